//! A persistent team of threads that works through numbered tasks together.
//!
//! The caller is a member: it publishes a job, takes tasks from a shared counter like everybody else, and returns when
//! all are done. It waits only for members that took part, never for one that has yet to wake up, so a descheduled
//! thread costs its own task at most. Results do not depend on who ran what: a task writes only its own outputs.

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long an idle member spins before it parks. A decode step's next stage comes within a few microseconds.
const SPIN: Duration = Duration::from_micros(20);

/// What a member keeps between tasks, so that none has to clear or allocate it: contents are whatever was left there.
#[derive(Default)]
pub struct Scratch {
    pub(crate) matmul: Box<crate::ops::matmul::cpu::Work>,
    pub(crate) attention: Box<crate::ops::kv::cpu::Work>,
    pub(crate) latent: Box<crate::ops::latent::Work>,
}

type Task<'a> = dyn Fn(usize, &mut Scratch) + Sync + 'a;

/// Threads that outlive the jobs they do.
pub struct Team {
    shared: Arc<Shared>,
    scratch: Scratch,
    members: Vec<(Thread, Option<JoinHandle<()>>)>,
}

#[derive(Default)]
struct Shared {
    /// `epoch << 16 | open << 15 | members inside`. A member enters by compare-and-swap while the job is open, so
    /// after the caller closed it nobody can enter, and `job` is dead once the count is back at zero.
    gate: AtomicU64,
    /// The next task to take.
    next: AtomicUsize,
    n_tasks: AtomicUsize,
    /// A `&Task` of the caller's stack while the gate is open or members are inside.
    job: AtomicPtr<&'static Task<'static>>,
    /// Members parked, or about to.
    sleepers: AtomicUsize,
    /// A task panicked; the caller panics in turn.
    panicked: AtomicUsize,
}

const OPEN: u64 = 1 << 15;
const COUNT: u64 = OPEN - 1;
const EPOCH: u64 = 1 << 16;
/// Epoch value that tells members to leave for good.
const QUIT: u64 = u64::MAX - COUNT - OPEN;

impl Team {
    /// A team of `threads` in all, the caller included; at least 1.
    pub fn new(threads: usize) -> Team {
        let shared = Arc::new(Shared::default());
        let members = (1..threads.max(1))
            .map(|i| {
                let shared = Arc::clone(&shared);
                let handle = std::thread::Builder::new()
                    .name(format!("arc-cpu-{i}"))
                    .spawn(move || member(&shared))
                    .expect("the system can start a thread");
                (handle.thread().clone(), Some(handle))
            })
            .collect();
        Team { shared, scratch: Scratch::default(), members }
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.members.len() + 1
    }

    /// Runs `task(0)`, ..., `task(n_tasks - 1)`, each once, in any order and on any member.
    ///
    /// Panics if a task panicked, after all members have left the job.
    pub fn run(&mut self, n_tasks: usize, task: &Task<'_>) {
        if n_tasks <= 1 || self.members.is_empty() {
            (0..n_tasks).for_each(|i| task(i, &mut self.scratch));
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. Members use the reference between entering and leaving the gate; this
        // function closes the gate and sees the count at zero before it returns or unwinds, so `task` outlives them.
        let task: &'static Task<'static> = unsafe { std::mem::transmute::<&Task<'_>, &'static Task<'static>>(task) };
        let mut slot = task;
        shared.job.store(&raw mut slot, Ordering::Relaxed);
        shared.n_tasks.store(n_tasks, Ordering::Relaxed);
        shared.next.store(0, Ordering::Relaxed);
        // SeqCst pairs with the member's store to `sleepers` and load of `gate`: one of the two sees the other.
        let opened = ((shared.gate.load(Ordering::Relaxed) & !(OPEN | COUNT)) + EPOCH) | OPEN;
        shared.gate.store(opened, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            self.members.iter().for_each(|(thread, _)| thread.unpark());
        }
        work(shared, task, &mut self.scratch);
        shared.gate.fetch_and(!OPEN, Ordering::Relaxed);
        let mut spins = 0u32;
        while shared.gate.load(Ordering::Acquire) & COUNT != 0 {
            spins += 1;
            // A member inside may have been descheduled on a busy machine: give it the core now and then.
            if spins.is_multiple_of(4096) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        if shared.panicked.swap(0, Ordering::Relaxed) > 0 {
            panic!("a task of the CPU team panicked");
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.gate.store(QUIT, Ordering::SeqCst);
        for (thread, handle) in &mut self.members {
            thread.unpark();
            if let Some(handle) = handle.take() {
                // A member's panic was already passed on by `run`.
                let _ = handle.join();
            }
        }
    }
}

/// Takes tasks until none is left. A panic is noted, and ends the job for everybody.
fn work(shared: &Shared, task: &Task<'_>, scratch: &mut Scratch) {
    let n_tasks = shared.n_tasks.load(Ordering::Relaxed);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        loop {
            let i = shared.next.fetch_add(1, Ordering::Relaxed);
            if i >= n_tasks {
                break;
            }
            task(i, scratch);
        }
    }));
    if outcome.is_err() {
        shared.panicked.fetch_add(1, Ordering::Relaxed);
        shared.next.store(n_tasks, Ordering::Relaxed);
    }
}

fn member(shared: &Shared) {
    let mut scratch = Scratch::default();
    let mut seen = 0;
    loop {
        let gate = wait(shared, seen);
        if gate == QUIT {
            return;
        }
        seen = gate & !(OPEN | COUNT);
        if gate & OPEN == 0 || !enter(shared, gate) {
            continue;
        }
        // SAFETY: we are inside the gate, so the caller's slot and task are alive until we leave; the entering
        // compare-and-swap acquired the caller's stores.
        let task = unsafe { *shared.job.load(Ordering::Relaxed) };
        work(shared, task, &mut scratch);
        shared.gate.fetch_sub(1, Ordering::Release);
    }
}

/// Enters the job of `gate`'s epoch if it is still open.
fn enter(shared: &Shared, mut gate: u64) -> bool {
    let epoch = gate & !(OPEN | COUNT);
    loop {
        if gate & !(OPEN | COUNT) != epoch || gate & OPEN == 0 {
            return false;
        }
        match shared.gate.compare_exchange_weak(gate, gate + 1, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => gate = now,
        }
    }
}

/// Returns the gate once its epoch differs from `seen`.
fn wait(shared: &Shared, seen: u64) -> u64 {
    let news = |gate: u64| gate == QUIT || gate & !(OPEN | COUNT) != seen;
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            let gate = shared.gate.load(Ordering::Acquire);
            if news(gate) {
                return gate;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() < SPIN {
            continue;
        }
        shared.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut gate = shared.gate.load(Ordering::SeqCst);
        while !news(gate) {
            std::thread::park();
            gate = shared.gate.load(Ordering::SeqCst);
        }
        shared.sleepers.fetch_sub(1, Ordering::SeqCst);
        return gate;
    }
}

#[cfg(test)]
mod tests {
    use super::Team;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_task_runs_once_in_every_job() {
        for threads in [1, 2, 3, 8] {
            let mut team = Team::new(threads);
            for job in 0..2000 {
                let n_tasks = job % 17;
                let runs: Vec<AtomicUsize> = (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
                team.run(n_tasks, &|i, _| {
                    runs[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1), "threads {threads} job {job}");
            }
        }
    }

    #[test]
    fn members_wake_after_parking() {
        let mut team = Team::new(3);
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(2));
            let n = AtomicUsize::new(0);
            team.run(64, &|_, _| {
                n.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(n.into_inner(), 64);
        }
    }

    #[test]
    fn a_panicking_task_reaches_the_caller_and_the_team_goes_on() {
        let mut team = Team::new(2);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            team.run(8, &|i, _| assert!(i != 3, "task 3 fails on purpose"));
        }));
        assert!(outcome.is_err());
        let n = AtomicUsize::new(0);
        team.run(8, &|_, _| {
            n.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(n.into_inner(), 8);
    }
}
