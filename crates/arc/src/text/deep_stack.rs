//! Threads for a stranger's programs: deep enough for any nesting that their size allows, and left behind when their time is up.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Stack of such a thread. Mapped, not touched, unless something nests on purpose.
const STACK_BYTES: usize = 256 << 20;

/// Why work gave no result.
#[derive(Debug, thiserror::Error)]
pub enum DeepStackError {
    /// It did not end in time. A thread cannot be stopped.
    #[error("it does not end")]
    Late,
    /// It was not begun, since too many before it still run past their time.
    #[error("too much before it does not end")]
    Full,
    /// It panicked.
    #[error("it panicked")]
    Panicked,
    /// The thread did not start.
    #[error("no thread to run it on: {0}")]
    Thread(#[from] io::Error),
}

/// Where such work runs.
#[derive(Debug, Clone)]
pub struct DeepStacks {
    name: &'static str,
    max_late: usize,
    /// Threads that have not ended in time and still run.
    late: Arc<AtomicUsize>,
}

impl DeepStacks {
    /// Threads of that name, of which so many may be late before no more work is taken.
    pub fn new(name: &'static str, max_late: usize) -> DeepStacks {
        DeepStacks { name, max_late, late: Arc::default() }
    }

    /// Runs `work` on a thread of its own, and waits for as long as `deadline`.
    pub fn run<T: Send + 'static>(
        &self,
        deadline: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, DeepStackError> {
        if self.late.load(Ordering::Relaxed) >= self.max_late {
            return Err(DeepStackError::Full);
        }
        // Whoever comes second, the thread at its end or the caller who gave it up, sees that the other has been here.
        struct Ends {
            first: Arc<AtomicBool>,
            late: Arc<AtomicUsize>,
        }
        impl Drop for Ends {
            fn drop(&mut self) {
                if self.first.swap(true, Ordering::AcqRel) {
                    self.late.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let ended = Arc::new(AtomicBool::new(false));
        let ends = Ends { first: ended.clone(), late: self.late.clone() };
        let run = move || {
            let _ends = ends;
            // Nobody may wait any more.
            let _ = sender.send(work());
        };
        thread::Builder::new().name(self.name.into()).stack_size(STACK_BYTES).spawn(run)?;
        match receiver.recv_timeout(deadline) {
            Ok(result) => Ok(result),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                self.late.fetch_add(1, Ordering::Relaxed);
                if !ended.swap(true, Ordering::AcqRel) {
                    return Err(DeepStackError::Late);
                }
                // It has ended just now.
                self.late.fetch_sub(1, Ordering::Relaxed);
                receiver.recv().map_err(|_| DeepStackError::Panicked)
            }
            // The thread ended without a result.
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(DeepStackError::Panicked),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_thread_that_ends_as_it_is_given_up_is_not_late_for_good() {
        let threads = DeepStacks::new("test", 2);
        let (mut done, mut late) = (0, 0);
        for _ in 0..500 {
            match threads.run(Duration::from_micros(50), || 7) {
                Ok(result) => done += usize::from(result == 7),
                Err(DeepStackError::Late) => late += 1,
                Err(other) => panic!("{other}"),
            }
            // Threads that are late end soon.
            let began = Instant::now();
            while threads.late.load(Ordering::Relaxed) > 0 {
                assert!(began.elapsed() < Duration::from_secs(20), "one is late for good, behind {done} and {late}");
                thread::yield_now();
            }
        }
        assert_eq!(done + late, 500);
    }

    #[test]
    fn a_panic_is_an_error() {
        let threads = DeepStacks::new("test", 2);
        let panicked = threads.run(Duration::from_secs(20), || assert_eq!(1, 2, "a defect"));
        assert!(matches!(panicked, Err(DeepStackError::Panicked)) && threads.late.load(Ordering::Relaxed) == 0);
    }
}
