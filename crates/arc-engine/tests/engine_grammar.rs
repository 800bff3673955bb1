//! Grammars: masks come from worker threads between the two parts of a step.

mod support;

use std::time::Duration;

use arc_engine::engine::{EngineConfig, Health};
use arc_engine::request::{FinishReason, Request};
use support::{Answer, Classes, HOST_SEED, Rig, Script, expected, expected_masked, limits, request};

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (seed * 17 + i * 5) % 96).collect()
}

fn with(grammar: Classes, prompt: &[u32], max_tokens: u32) -> Request {
    Request { grammar: Some(Box::new(grammar)), ..request(prompt, max_tokens) }
}

fn slow() -> Script {
    Script { step_time: Some(Duration::from_millis(2)), ..Script::default() }
}

fn rig(script: Script) -> Rig {
    Rig::new(EngineConfig { mask_timeout_ms: 500, ..EngineConfig::default() }, limits(), script)
}

#[test]
fn masked_rows_follow_their_grammar_and_others_do_not_notice() {
    for script in [Script::default(), slow()] {
        let in_steps_ahead = script.step_time.is_some();
        let rig = rig(script);
        let answers: Vec<(u32, Answer)> = (0..8)
            .map(|i| {
                let p = prompt(i, 5 + i);
                let mut r = if i % 2 == 0 { with(Classes::default(), &p, 20) } else { request(&p, 30) };
                r.sampling.seed = if i % 4 < 2 { HOST_SEED } else { 1 };
                (i, rig.start(r))
            })
            .collect();
        for (i, answer) in answers {
            let p = prompt(i, 5 + i);
            let want = if i % 2 == 0 { expected_masked(&p, 20, Classes::allows) } else { expected(&p, 30) };
            assert_eq!(answer.wait().ids(), want, "request {i}");
        }
        let log = rig.log.lock().expect("the log is whole");
        assert_eq!(log.masks, 2 * 20, "masks of device rows are staged, one a token");
        assert_eq!(log.forced, 2 * 20 + 2 * 30);
        assert_eq!(log.overlapped > 0, in_steps_ahead, "the forward part does not wait for the token");
        assert!(rig.engine.stats().mask_wait_us > 0.0);
    }
}

#[test]
fn a_stop_id_ends_a_grammar_too() {
    let rig = rig(slow());
    let p = prompt(3, 9);
    let all = expected_masked(&p, 20, Classes::allows);
    let mut r = with(Classes::default(), &p, 20);
    r.stop_ids = vec![all[7]];
    let end = all.iter().position(|&id| id == all[7]).expect("it is there");
    assert_eq!(rig.ask(r).ids(), all[..=end]);
}

#[test]
fn a_grammar_that_fails_ends_its_own_row_with_its_reason() {
    use FinishReason::{Error, Grammar};
    let cases = [
        (Classes { dead_end_after: Some(4), ..Classes::default() }, 4, Grammar, "grammar: dead end"),
        (
            Classes { empty_after: Some(3), ..Classes::default() },
            3,
            Error,
            "every token is masked: nothing can be drawn",
        ),
        (Classes { panic_after: Some(5), ..Classes::default() }, 5, Grammar, "grammar: the matcher panicked"),
        (
            Classes { takes: Duration::from_millis(900), ..Classes::default() },
            0,
            Error,
            "grammar: no mask within 500 ms",
        ),
    ];
    for script in [Script::default(), slow()] {
        for (grammar, n, reason, message) in cases.clone() {
            let rig = rig(script.clone());
            let neighbours: Vec<Answer> =
                vec![rig.start(request(&prompt(1, 6), 60)), rig.start(with(Classes::default(), &prompt(2, 6), 60))];
            let out = rig.ask(with(grammar, &prompt(5, 8), 20));
            assert_eq!(out.finished.reason, reason);
            assert_eq!(out.finished.error.as_deref(), Some(message));
            assert_eq!(out.ids(), expected_masked(&prompt(5, 8), n, Classes::allows));
            let ids: Vec<_> = neighbours.into_iter().map(|a| a.wait().ids()).collect();
            let want = [expected(&prompt(1, 6), 60), expected_masked(&prompt(2, 6), 60, Classes::allows)];
            assert_eq!(ids, want);
            assert_eq!(rig.engine.health(), Health::Ready);
            assert_eq!(rig.engine.stats().row_faults, 1);
        }
    }
}

#[test]
fn a_mask_that_comes_after_its_request_was_cancelled_goes_nowhere() {
    let rig = Rig::new(EngineConfig::default(), arc_device::step::Limits { slots: 1, ..limits() }, slow());
    let slow = Classes { takes: Duration::from_millis(30), ..Classes::default() };
    let cancelled = rig.start(with(slow, &prompt(1, 5), 50));
    std::thread::sleep(Duration::from_millis(10));
    rig.engine.cancel(cancelled.id);
    let next = rig.start(with(Classes::default(), &prompt(2, 5), 20));
    assert_eq!(cancelled.wait().finished.reason, FinishReason::Cancelled);
    assert_eq!(next.wait().ids(), expected_masked(&prompt(2, 5), 20, Classes::allows));
}
