//! The engine's side of a step allocates nothing.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_device::count::heap::CountingAlloc;
use arc_engine::engine::{EngineConfig, Shutdown};
use arc_engine::request::{Event, EventSink, Request};
use support::{Rig, Script, StepLog, limits, request};

#[global_allocator]
static HEAP: CountingAlloc = CountingAlloc;

/// Counts tokens, and allocates for none.
struct Counted(Arc<AtomicU64>);

impl EventSink for Counted {
    fn send(&mut self, event: Event) -> bool {
        self.0.fetch_add(u64::from(matches!(event, Event::Token(_))), Ordering::Relaxed);
        true
    }
}

/// Runs requests of one kind, and returns their steps.
fn steps(ask: impl Fn(u32) -> Request) -> Vec<StepLog> {
    let rig = Rig::new(EngineConfig::default(), limits(), Script::default());
    {
        let mut log = rig.log.lock().expect("the log is whole");
        log.steps.reserve(4096);
        log.fixed = true;
    }
    let tokens = Arc::new(AtomicU64::new(0));
    for i in 0..6 {
        rig.engine.submit(ask(i), Box::new(Counted(tokens.clone()))).expect("a place in the queue");
    }
    rig.engine.shutdown(Shutdown::Drain);
    assert_eq!(tokens.load(Ordering::Relaxed), 6 * 150);
    let log = rig.log.lock().expect("the log is whole");
    log.steps.clone()
}

/// Allocations from each step to the next, where both decode the same rows and nothing else.
fn in_steady_steps(steps: &[StepLog]) -> Vec<u64> {
    let steady = |w: &&[StepLog]| w.iter().all(|s| s.prompt_rows == 0 && s.decode_rows == w[0].decode_rows);
    // The first steps of all grow what is then reused.
    steps[8..].windows(2).filter(steady).map(|w| w[1].heap_allocs - w[0].heap_allocs).collect()
}

#[test]
fn a_steady_decode_step_allocates_nothing() {
    let prompt = |i: u32| (0..10 + i).collect::<Vec<u32>>();
    let plain = in_steady_steps(&steps(|i| request(&prompt(i), 150)));
    assert!(plain.len() > 100, "{} steady steps", plain.len());
    assert_eq!(plain.iter().sum::<u64>(), 0, "{plain:?}");

    // The count can fail: alternatives are lists, one a token.
    let listed = in_steady_steps(&steps(|i| Request { logprobs: Some(2), ..request(&prompt(i), 150) }));
    assert!(listed.len() > 100 && listed.iter().all(|&n| n > 0), "{listed:?}");
}

#[test]
fn the_chunks_of_a_prompt_allocate_nothing() {
    let prompts = |i: u32| (0..100).map(|t| (t + i) % 96).collect::<Vec<u32>>();
    let steps = steps(|i| request(&prompts(i), 150));
    let chunks = |w: &&[StepLog]| w.iter().all(|s| s.prompt_rows > 0);
    let grown: Vec<u64> = steps.windows(2).filter(chunks).map(|w| w[1].heap_allocs - w[0].heap_allocs).collect();
    // Admissions allocate, and the first chunks grow the tables; then there is nothing left to grow.
    assert!(grown.len() >= 5 && grown.contains(&0), "{grown:?}");
}
