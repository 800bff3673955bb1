//! Grammars as the engine sees them: a mask of the tokens that may come next. Matchers run on worker threads, never on
//! the engine thread, while the device computes the logits that the mask will be applied to.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A grammar over tokens. Implemented above the engine, which knows no text.
pub trait TokenMask: Send {
    /// Advances past a token that was emitted.
    fn accept(&mut self, token: u32) -> Result<(), MaskError>;

    /// Writes which tokens may come next: one bit a token, lowest bit first, `[ceil(vocab / 32)]`.
    fn mask(&mut self, out: &mut [u32]) -> Result<(), MaskError>;
}

/// A grammar that cannot go on. Ends its own row with `error` and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("grammar: {0}")]
pub struct MaskError(pub String);

/// A matcher with the mask that it wrote last.
pub(crate) struct Matcher {
    pub mask: Box<dyn TokenMask>,
    pub bits: Vec<u32>,
}

/// Where the matcher of a sequence is.
pub(crate) enum MatcherState {
    /// The sequence has no grammar.
    Absent,
    /// With a worker.
    Working,
    /// Its mask is written.
    Ready(Matcher),
}

/// Work for a matcher: pass a token, if there is one, and write the next mask.
pub(crate) struct MaskJob {
    pub slot: u16,
    pub generation: u32,
    pub accept: Option<u32>,
    pub matcher: Matcher,
}

/// A finished job.
pub(crate) struct MaskDone {
    pub slot: u16,
    pub generation: u32,
    pub result: Result<Matcher, MaskError>,
}

/// The worker threads. They start with the first grammar, so that an engine without grammars has none.
pub(crate) struct MaskPool {
    workers: usize,
    running: Option<Running>,
}

struct Running {
    jobs: Sender<MaskJob>,
    done: Receiver<MaskDone>,
}

impl MaskPool {
    pub fn new(workers: usize) -> Self {
        MaskPool { workers: workers.max(1), running: None }
    }

    /// Hands a job to the next free worker.
    pub fn submit(&mut self, job: MaskJob) {
        let workers = self.workers;
        let running = self.running.get_or_insert_with(|| start(workers));
        running.jobs.send(job).expect("workers live as long as this sender");
    }

    /// The next finished job; `None` after `wait`.
    pub fn next(&self, wait: Duration) -> Option<MaskDone> {
        self.running.as_ref()?.done.recv_timeout(wait).ok()
    }
}

fn start(workers: usize) -> Running {
    let (jobs, queue) = mpsc::channel::<MaskJob>();
    let (finished, done) = mpsc::channel();
    let queue = Arc::new(Mutex::new(queue));
    for idx in 0..workers {
        let (queue, finished) = (queue.clone(), finished.clone());
        std::thread::Builder::new()
            .name(format!("arc-mask-{idx}"))
            .spawn(move || work(&queue, &finished))
            .expect("the system refused a thread for grammar masks");
    }
    Running { jobs, done }
}

fn work(queue: &Mutex<Receiver<MaskJob>>, finished: &Sender<MaskDone>) {
    loop {
        // The lock is held while waiting: the others wait for the lock instead, and none holds it while it works.
        let job = queue.lock().expect("no worker panics with the lock held").recv();
        let Ok(MaskJob { slot, generation, accept, mut matcher }) = job else { return };
        let result = catch_unwind(AssertUnwindSafe(|| {
            if let Some(token) = accept {
                matcher.mask.accept(token)?;
            }
            matcher.mask.mask(&mut matcher.bits)?;
            Ok(matcher)
        }))
        .unwrap_or_else(|_| Err(MaskError("the matcher panicked".into())));
        if finished.send(MaskDone { slot, generation, result }).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Step(u32);

    impl TokenMask for Step {
        fn accept(&mut self, token: u32) -> Result<(), MaskError> {
            assert_ne!(token, 666, "a matcher may be wrong");
            if token == 13 {
                return Err(MaskError("dead end".into()));
            }
            self.0 += token;
            Ok(())
        }

        fn mask(&mut self, out: &mut [u32]) -> Result<(), MaskError> {
            out.fill(self.0);
            Ok(())
        }
    }

    fn run(pool: &mut MaskPool, accept: Option<u32>) -> Result<Vec<u32>, MaskError> {
        let matcher = Matcher { mask: Box::new(Step(1)), bits: vec![0; 2] };
        pool.submit(MaskJob { slot: 3, generation: 7, accept, matcher });
        let done = pool.next(Duration::from_secs(10)).expect("the job ends");
        assert_eq!((done.slot, done.generation), (3, 7));
        done.result.map(|matcher| matcher.bits)
    }

    #[test]
    fn a_matcher_that_fails_or_panics_fails_alone() {
        let mut pool = MaskPool::new(1);
        assert!(pool.next(Duration::ZERO).is_none());
        assert_eq!(run(&mut pool, None), Ok(vec![1, 1]));
        assert_eq!(run(&mut pool, Some(666)), Err(MaskError("the matcher panicked".into())));
        assert_eq!(run(&mut pool, Some(13)), Err(MaskError("dead end".into())));
        assert_eq!(run(&mut pool, Some(4)), Ok(vec![5, 5]), "the worker goes on");
    }
}
