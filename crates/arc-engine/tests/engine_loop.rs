//! The engine over a scripted device: what a request gets, and what happens when things go wrong.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use arc_device::error::{DeviceError, Fault};
use arc_device::step::{Limits, Part};
use arc_engine::engine::{EngineConfig, EngineFault, EngineHandle, Health, SampleOn, Shutdown, SubmitError, Switches};
use arc_engine::request::{Event, EventSink, FinishReason, Request, RequestError};
use arc_engine::scheduler::buckets::Buckets;
use support::{Answer, Fickle, HOST_SEED, POISON, Rig, Script, VOCAB, expected, expected_score, limits, request};

fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (seed * 31 + i * 7) % (VOCAB - 1)).collect()
}

/// A device on which steps take a while and land later.
fn slow() -> Script {
    Script { step_time: Some(Duration::from_millis(1)), ..Script::default() }
}

#[test]
fn a_request_gets_the_tokens_of_its_prompt() {
    let rig = Rig::plain();
    for len in [1, 2, 31, 32, 33, 64, 65, 150] {
        let p = prompt(len as u32, len);
        let out = rig.ask(request(&p, 20));
        assert_eq!(out.ids(), expected(&p, 20), "prompt of {len}");
        assert_eq!(out.finished.reason, FinishReason::Length);
        assert_eq!(out.finished.prompt_tokens as usize, len);
    }
    let stats = rig.engine.stats();
    assert_eq!((stats.finished.length, stats.output_tokens, stats.kv_blocks_used), (8, 160, 0));
    assert_eq!(rig.engine.health(), Health::Ready);
}

#[test]
fn a_stop_id_ends_a_sequence_at_any_place_and_nothing_leaks_into_the_next() {
    for script in [Script::default(), slow()] {
        let in_steps_ahead = script.step_time.is_some();
        let rig = Rig::new(EngineConfig::default(), limits(), script);
        let mut cases = Vec::new();
        for at in 0..24 {
            for ignore_stop in [false, true] {
                let p = prompt(at, 1 + at as usize);
                let all = expected(&p, 24);
                let mut r = request(&p, 24);
                r.stop_ids = vec![all[at as usize]];
                r.ignore_stop = ignore_stop;
                let end = all.iter().position(|&id| id == all[at as usize]).expect("it is there");
                let (want, reason) = match ignore_stop {
                    true => (all, FinishReason::Length),
                    false if end == 23 => (all, FinishReason::Stop),
                    false => (all[..=end].to_vec(), FinishReason::Stop),
                };
                // All at once: 48 sequences through 8 slots, so that each slot is used again and again.
                cases.push((rig.start(r), want, reason));
            }
        }
        for (answer, want, reason) in cases {
            let out = answer.wait();
            assert_eq!(out.ids(), want);
            assert_eq!(out.finished.reason, reason);
        }
        let log = rig.log.lock().expect("the log is whole");
        let inert: u32 = log.steps.iter().map(|s| s.inert_rows).sum();
        assert_eq!(inert > 0, in_steps_ahead, "rows past an end ran, if steps run ahead: {inert}");
        assert_eq!(rig.engine.stats().dropped_tokens, 0, "inert rows land no tokens");
        assert_eq!(rig.engine.stats().kv_blocks_used, 0);
    }
}

#[test]
fn steps_run_ahead_by_a_burst_and_an_arrival_waits_for_no_more() {
    let mut seen = Vec::new();
    for (device_loop, most) in [(true, 8), (false, 1)] {
        let switches = Switches { device_loop, ..Switches::default() };
        let rig = Rig::new(EngineConfig { switches, ..EngineConfig::default() }, limits(), slow());
        let first = rig.start(request(&prompt(1, 10), 200));
        std::thread::sleep(Duration::from_millis(15));
        let second = rig.ask(request(&prompt(2, 20), 4));
        let first = first.wait();
        assert_eq!(rig.log.lock().expect("the log is whole").in_flight_max, most);
        let stats = rig.engine.stats();
        assert!(stats.arrival_steps_max <= most && stats.arrival_steps_max > 0, "{}", stats.arrival_steps_max);
        seen.push((first.ids(), second.ids()));
    }
    assert_eq!(seen[0], seen[1], "the switch changes no token");
    assert_eq!(seen[0].0, expected(&prompt(1, 10), 200));
}

fn fails_with(script: Script, config: EngineConfig) -> EngineFault {
    let through = Arc::new(AtomicBool::new(false));
    let rig = Rig::new(config, limits(), Script { hold: Some((5, through.clone())), ..script });
    // Some run, some of them have no slot, and some come too late to be looked at.
    let mut answers: Vec<Answer> = (0..10).map(|i| rig.start(request(&prompt(i, 20), 40))).collect();
    while rig.log.lock().expect("the log is whole").steps.len() < 4 {
        std::thread::yield_now();
    }
    answers.extend((10..12).map(|i| rig.start(request(&prompt(i, 20), 40))));
    through.store(true, Ordering::Release);
    for answer in answers {
        let finished = answer.wait().finished;
        assert_eq!(finished.reason, FinishReason::Error);
        assert!(finished.error.is_some());
        // Whoever hears of it can already see it.
        assert!(rig.engine.fault().is_some());
    }
    let fault = rig.engine.fault().expect("the engine failed");
    assert_eq!(rig.engine.health(), Health::Failed(fault.clone()));
    let (sink, _events) = channel();
    assert_eq!(rig.engine.submit(request(&[1], 1), Box::new(sink)), Err(SubmitError::Failed(fault.clone())));
    let stats = rig.engine.stats();
    assert_eq!((stats.finished.error, stats.running, stats.queued, stats.kv_blocks_used), (12, 0, 0, 0));
    assert_eq!(rig.engine.wait(), Some(fault.clone()));
    rig.engine.shutdown(Shutdown::Stop);
    assert_eq!(rig.engine.fault(), Some(fault.clone()), "a fault is never forgotten");
    fault
}

#[test]
fn each_device_fault_is_told_apart_and_latched() {
    let device = |fault| EngineFault::Device(DeviceError::Fault(fault));
    let config = EngineConfig { poll_limit: 20, ..EngineConfig::default() };
    for base in [Script::default(), slow()] {
        let lost = Script { lost: Some(5), ..base.clone() };
        let EngineFault::Device(DeviceError::Fault(Fault::LostStep { enqueued, landed })) =
            fails_with(lost, config.clone())
        else {
            panic!("not a lost step")
        };
        assert_eq!(landed, 4);
        assert!(enqueued >= 5);
        let stuck = Script { stuck: Some(5), ..base.clone() };
        assert_eq!(fails_with(stuck, config.clone()), device(Fault::Stuck { step: 5 }));
        let word = Script { fault_word: Some((5, 0xbad)), ..base.clone() };
        assert_eq!(fails_with(word, config.clone()), device(Fault::Word(0xbad)));
        let panic = Script { panic: Some(5), ..base.clone() };
        assert_eq!(fails_with(panic, config.clone()), EngineFault::Panic("the script says so".into()));
        // Rows that name a former sequence belong to nobody: no token goes to the wrong one, and nobody waits for ever.
        let wrong = Script { wrong_generation: true, ..base };
        assert!(matches!(fails_with(wrong, config.clone()), EngineFault::Panic(_)));
    }
    // Only a device that runs behind has a stream to ask.
    let stream = Script { stream_error: Some(5), stuck: Some(5), ..slow() };
    assert_eq!(fails_with(stream, config), device(Fault::Stream(-7)));
}

#[test]
fn a_late_step_is_waited_for() {
    let script = Script { late: Some((6, Duration::from_millis(60))), ..slow() };
    let rig = Rig::new(EngineConfig { poll_limit: 2000, ..EngineConfig::default() }, limits(), script);
    let p = prompt(3, 10);
    assert_eq!(rig.ask(request(&p, 30)).ids(), expected(&p, 30));
    assert_eq!(rig.engine.health(), Health::Ready);
}

#[test]
fn a_step_that_lands_while_the_stream_is_asked_is_not_lost() {
    // Reading the head before the state would see it missing and the stream idle.
    let rig = Rig::new(EngineConfig::default(), limits(), Script { lands_when_asked: Some(3), ..Script::default() });
    let p = prompt(3, 10);
    assert_eq!(rig.ask(request(&p, 30)).ids(), expected(&p, 30));
    assert_eq!(rig.engine.health(), Health::Ready);
}

#[test]
fn one_poisoned_row_among_255_good_ones_ends_alone() {
    let limits = Limits { slots: 256, rows: 512, heads: 256, context: 64, blocks: 512, ring: 16 };
    for script in [Script::default(), slow()] {
        let config = EngineConfig { queue: 256, ..EngineConfig::default() };
        let rig = Rig::new(config, limits, script);
        let answers: Vec<(bool, Vec<u32>, Answer)> = (0..256)
            .map(|i| {
                let mut p = prompt(i, 5);
                p[2] = if i == 100 { POISON } else { p[2] };
                (i == 100, p.clone(), rig.start(request(&p, 12)))
            })
            .collect();
        for (poisoned, p, answer) in answers {
            let out = answer.wait();
            if poisoned {
                assert_eq!(out.finished.reason, FinishReason::Error);
                assert_eq!(out.finished.error.as_deref(), Some("the logits are not finite (NaN or infinity)"));
                assert!(out.tokens.is_empty());
            } else {
                assert_eq!(out.ids(), expected(&p, 12));
            }
        }
        assert_eq!(rig.engine.health(), Health::Ready);
        let stats = rig.engine.stats();
        assert_eq!((stats.row_faults, stats.finished.length, stats.finished.error), (1, 255, 1));
    }
}

#[test]
fn prompt_tokens_are_scored_in_order_within_the_head_limit() {
    let rig = Rig::plain();
    for (len, max_tokens) in [(1, 0), (1, 3), (2, 0), (40, 5), (150, 0), (150, 7)] {
        let p = prompt(len as u32, len);
        let mut r = request(&p, max_tokens);
        r.prompt_logprobs = Some(2);
        r.logprobs = Some(1);
        let out = rig.ask(r);
        let scores: Vec<(u32, Option<f32>)> = out.scores.iter().map(|s| (s.id, s.logprob)).collect();
        let want: Vec<_> = (1..len).map(|idx| (p[idx], Some(expected_score(&p, idx)))).collect();
        assert_eq!(scores, want, "prompt of {len}");
        assert!(out.scores.iter().all(|s| s.top.len() == 2) && out.tokens.iter().all(|t| t.top.len() == 1));
        assert_eq!(out.ids(), expected(&p, max_tokens as usize));
        assert!(out.tokens.iter().all(|t| t.logprob.is_some()));
        assert_eq!(out.finished.reason, FinishReason::Length);
    }
    let log = rig.log.lock().expect("the log is whole");
    let heads_max = log.steps.iter().map(|s| s.key.heads).max();
    assert_eq!(heads_max, Some(16), "the limit was reached, and kept");
    assert_eq!(rig.engine.stats().kv_blocks_used, 0);
}

#[test]
fn a_poisoned_score_ends_its_request() {
    let rig = Rig::plain();
    let mut p = prompt(1, 10);
    p[4] = POISON;
    let mut r = request(&p, 5);
    r.prompt_logprobs = Some(0);
    assert_eq!(rig.ask(r).finished.reason, FinishReason::Error);
    assert_eq!(rig.engine.health(), Health::Ready);
}

#[test]
fn a_request_can_be_cancelled_wherever_it_is() {
    let rig = Rig::new(EngineConfig::default(), Limits { slots: 2, ..limits() }, slow());
    let mut running: Vec<Answer> = (0..2).map(|i| rig.start(request(&prompt(i, 5), 240))).collect();
    let queued = rig.start(request(&prompt(9, 5), 5));
    let after = rig.start(request(&prompt(8, 6), 5));
    rig.engine.cancel(queued.id);
    assert_eq!(queued.wait().finished.reason, FinishReason::Cancelled);
    let first = running.remove(0);
    let mut n = 0;
    while n < 3 {
        n += usize::from(matches!(first.events.recv().expect("tokens flow"), Event::Token(_)));
    }
    rig.engine.cancel(first.id);
    let rest: Vec<Event> = first.events.iter().collect();
    let Some(Event::Finished(finished)) = rest.last() else { panic!("no end in {rest:?}") };
    assert_eq!(finished.reason, FinishReason::Cancelled);
    assert_eq!(finished.output_tokens as usize, n + rest.len() - 1);
    assert_eq!(after.wait().ids(), expected(&prompt(8, 6), 5), "the next in the slot starts clean");
    assert_eq!(running.remove(0).wait().ids(), expected(&prompt(1, 5), 240), "the neighbour goes on");
    rig.engine.cancel(first.id);
    assert_eq!(rig.engine.stats().finished.cancelled, 2);
    assert!(!rig.log.lock().expect("the log is whole").released.is_empty());
}

#[test]
fn a_request_that_its_caller_ends_counts_as_what_the_caller_says() {
    let rig = Rig::new(EngineConfig::default(), Limits { slots: 1, ..limits() }, slow());
    let running = rig.start(request(&prompt(1, 5), 240));
    assert!(matches!(running.events.recv().expect("tokens flow"), Event::Token(_)));
    let queued = rig.start(request(&prompt(2, 5), 5));
    for ended in [queued, running] {
        rig.engine.end(ended.id, FinishReason::Stop);
        let last = ended.events.iter().last();
        assert!(matches!(&last, Some(Event::Finished(f)) if f.reason == FinishReason::Stop), "{last:?}");
    }
    assert_eq!(
        rig.ask(request(&prompt(3, 6), 5)).ids(),
        expected(&prompt(3, 6), 5),
        "the next in the slot starts clean"
    );
    let finished = rig.engine.stats().finished;
    assert_eq!((finished.stop, finished.length, finished.cancelled), (2, 1, 0));
    assert_eq!(rig.log.lock().expect("the log is whole").released, [0], "the device hears of it");
}

#[test]
fn a_sink_that_stops_listening_or_panics_cancels_its_own_request() {
    let rig = Rig::new(EngineConfig::default(), limits(), slow());
    let neighbour = rig.start(request(&prompt(1, 5), 100));
    let (to, events) = channel();
    rig.engine.submit(request(&prompt(2, 5), 200), Box::new(Fickle { n: 3, to })).expect("a place");
    let events: Vec<Event> = events.iter().collect();
    assert_eq!(events.len(), 4, "three tokens and the end: {events:?}");
    struct Broken;
    impl arc_engine::request::EventSink for Broken {
        fn send(&mut self, _: Event) -> bool {
            panic!("a caller's mistake")
        }
    }
    rig.engine.submit(request(&prompt(3, 5), 200), Box::new(Broken)).expect("a place");
    assert_eq!(neighbour.wait().ids(), expected(&prompt(1, 5), 100));
    assert_eq!(rig.engine.health(), Health::Ready);
    rig.engine.shutdown(Shutdown::Drain);
    assert_eq!(rig.engine.stats().finished.cancelled, 2);
    assert_eq!(rig.engine.stats().kv_blocks_used, 0);
}

#[test]
fn a_full_queue_refuses_and_says_when_to_come_back() {
    let rig = Rig::new(EngineConfig { queue: 3, ..EngineConfig::default() }, Limits { slots: 1, ..limits() }, slow());
    let running = rig.start(request(&prompt(0, 5), 200));
    while rig.engine.stats().running == 0 {
        std::thread::yield_now();
    }
    let waiting: Vec<Answer> = (1..4).map(|i| rig.start(request(&prompt(i, 5), 2))).collect();
    let (sink, _events) = channel();
    match rig.engine.submit(request(&[1], 1), Box::new(sink)) {
        Err(SubmitError::Full { queued: 3, retry_after_ms: 1000.. }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(rig.engine.stats().refused_full, 1);
    running.wait();
    for (i, answer) in (1..4).zip(waiting) {
        assert_eq!(answer.wait().ids(), expected(&prompt(i, 5), 2));
    }
    assert_eq!(rig.engine.stats().queued, 0);
}

#[test]
fn a_drain_finishes_what_was_taken_and_a_stop_cancels_it() {
    for (how, reason) in [(Shutdown::Drain, FinishReason::Length), (Shutdown::Stop, FinishReason::Cancelled)] {
        let rig = Rig::new(EngineConfig::default(), Limits { slots: 2, ..limits() }, slow());
        let answers: Vec<Answer> = (0..6).map(|i| rig.start(request(&prompt(i, 5), 100))).collect();
        rig.engine.shutdown(how);
        assert_eq!(rig.engine.health(), Health::Stopped);
        for answer in answers {
            assert_eq!(answer.wait().finished.reason, reason);
        }
        let (sink, _events) = channel();
        assert_eq!(rig.engine.submit(request(&[1], 1), Box::new(sink)), Err(SubmitError::Stopped));
        rig.engine.shutdown(how);
    }
}

#[test]
fn everybody_who_shuts_down_waits_for_the_end() {
    let rig = Rig::new(EngineConfig::default(), limits(), slow());
    let answer = rig.start(request(&prompt(1, 5), 100));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                rig.engine.shutdown(Shutdown::Drain);
                assert_eq!(rig.engine.health(), Health::Stopped);
            });
        }
    });
    assert_eq!(answer.wait().finished.reason, FinishReason::Length);
}

#[test]
fn the_engine_stops_with_its_last_handle() {
    let rig = Rig::plain();
    let (_, other) = (rig.engine.clone(), rig.engine.clone());
    let answer = rig.start(request(&prompt(0, 5), 5));
    drop(rig);
    answer.wait();
    let (sink, events) = channel();
    other.submit(request(&prompt(0, 5), 5), Box::new(sink)).expect("one handle is left");
    drop(other);
    assert!(matches!(events.try_iter().last(), Some(Event::Finished(_))), "and nobody is left waiting");
}

#[test]
fn a_sink_may_hold_the_last_handle() {
    struct Holds {
        events: Sender<Event>,
        _engine: EngineHandle,
    }
    impl EventSink for Holds {
        fn send(&mut self, event: Event) -> bool {
            self.events.send(event).is_ok()
        }
    }
    let rig = Rig::plain();
    let (sender, events) = channel();
    let sink = Holds { events: sender, _engine: rig.engine.clone() };
    rig.engine.submit(request(&prompt(0, 5), 5), Box::new(sink)).expect("a valid request");
    drop(rig);
    // The sink goes with the request, on the engine's own thread, and its end with it.
    assert!(matches!(events.iter().last(), Some(Event::Finished(_))));
}

#[test]
fn an_invalid_request_is_refused_before_it_is_queued() {
    let rig = Rig::plain();
    let (sink, _events) = channel();
    let refused = rig.engine.submit(request(&[], 1), Box::new(sink));
    assert_eq!(refused, Err(SubmitError::Invalid(RequestError::EmptyPrompt)));
    assert_eq!(rig.engine.stats().submitted, 0);
    let limits = rig.engine.limits();
    assert_eq!((limits.vocab, limits.context, limits.kv_tokens), (VOCAB, 256, 48 * 32));
}

#[test]
fn host_rows_draw_the_tokens_that_the_device_would() {
    let ask = |sample_on, script: Script| {
        let switches = Switches { sample_on, ..Switches::default() };
        let rig = Rig::new(EngineConfig { switches, ..EngineConfig::default() }, limits(), script);
        let answers: Vec<Answer> = (0..6).map(|i| rig.start(request(&prompt(i, 10 + i as usize), 15))).collect();
        let ids: Vec<_> = answers.into_iter().map(|a| a.wait().ids()).collect();
        (ids, rig)
    };
    let (device, rig) = ask(SampleOn::Device, slow());
    assert_eq!(rig.engine.stats().counters.d2h_copies, 0);
    assert_eq!(rig.engine.stats().two_part_steps, 0);
    for script in [Script::default(), slow()] {
        let (host, rig) = ask(SampleOn::Host, script);
        assert_eq!(host, device);
        let stats = rig.engine.stats();
        let log = rig.log.lock().expect("the log is whole");
        assert_eq!(stats.host_rows, 6 * 15);
        assert_eq!(log.fetches.iter().sum::<usize>(), 6 * 15, "exactly the rows that draw cross");
        assert_eq!(stats.counters.d2h_copies, log.fetches.len() as u64, "one copy a step");
        assert_eq!(stats.two_part_steps, log.fetches.len() as u64);
        assert!(log.in_flight_max <= 2, "the host sees each token before the next draw");
        // The fake's clock: 1.1 ms to the logits of a row and half of one to the commit. The host's draw is between them, and is drawing.
        for s in rig.engine.last_steps(usize::MAX) {
            assert!(s.host_us > 0.0 && s.sample_us == 500.0 + s.host_us, "{s:?}");
            assert_eq!(s.fwd_us, (1000.0 + 100.0 * f64::from(s.rows) - s.host_us).max(0.0), "{s:?}");
        }
    }
    assert!(rig.engine.last_steps(usize::MAX).iter().all(|s| s.host_us == 0.0 && s.sample_us == 500.0));
}

#[test]
fn only_the_rows_that_need_the_host_cross_to_it() {
    for mix in 1..63_u32 {
        let rig = Rig::plain();
        let answers: Vec<_> = (0..6)
            .map(|i| {
                let p = prompt(i, 8);
                let mut r = request(&p, 6);
                r.sampling.seed = if mix >> i & 1 == 1 { HOST_SEED } else { 1 };
                (p, rig.start(r))
            })
            .collect();
        for (p, answer) in answers {
            assert_eq!(answer.wait().ids(), expected(&p, 6));
        }
        assert_eq!(rig.engine.stats().host_rows, 6 * u64::from(mix.count_ones()), "mix {mix:b}");
        assert_eq!(rig.engine.stats().declined, [mix.count_ones().into(), 0, 0], "mix {mix:b}");
    }
}

#[test]
fn a_host_fault_ends_its_row() {
    let switches = Switches { sample_on: SampleOn::Host, ..Switches::default() };
    let rig = Rig::new(EngineConfig { switches, ..EngineConfig::default() }, limits(), Script::default());
    let good = rig.start(request(&prompt(1, 5), 10));
    let mut p = prompt(2, 5);
    p[0] = POISON;
    assert_eq!(rig.ask(request(&p, 10)).finished.reason, FinishReason::Error);
    assert_eq!(good.wait().ids(), expected(&prompt(1, 5), 10));
}

#[test]
fn chunks_share_steps_with_decoding_rows_within_the_time_limit() {
    // The fake's clock: 1.5 ms a step and 0.1 ms a row, so 6 ms hold 45 rows; alone, a chunk has all 64.
    let config = EngineConfig { mixed_step_ms: 6.0, ..EngineConfig::default() };
    let rig = Rig::new(config, limits(), slow());
    let decoding = rig.start(request(&prompt(1, 40), 200));
    assert!(matches!(decoding.events.recv(), Ok(Event::Token(_))));
    for i in 2..6 {
        let p = prompt(i, 200);
        assert_eq!(rig.ask(request(&p, 3)).ids(), expected(&p, 3));
    }
    rig.engine.cancel(decoding.id);
    drop(decoding);
    let alone = prompt(7, 200);
    assert_eq!(rig.ask(request(&alone, 3)).ids(), expected(&alone, 3));
    let log = rig.log.lock().expect("the log is whole");
    let mixed: Vec<u32> =
        log.steps.iter().filter(|s| s.decode_rows > 0 && s.prompt_rows > 0).map(|s| s.key.rows).collect();
    assert!(mixed.len() >= 8, "{mixed:?}");
    assert!(mixed.iter().skip(4).all(|&rows| rows <= 46), "{mixed:?}");
    assert!(mixed.iter().any(|&rows| rows >= 44), "{mixed:?}");
    let alone: Vec<u32> = log.steps.iter().filter(|s| s.decode_rows == 0).map(|s| s.prompt_rows).collect();
    assert!(alone.ends_with(&[64, 64, 64, 8]), "{alone:?}");
}

#[test]
fn buckets_pad_the_table_and_change_no_token() {
    let config = EngineConfig { buckets: Buckets::recorded(64), ..EngineConfig::default() };
    let rig = Rig::new(config, limits(), Script::default());
    let answers: Vec<_> = (0..7).map(|i| (i, rig.start(request(&prompt(i, 20 + 9 * i as usize), 15)))).collect();
    for (i, answer) in answers {
        assert_eq!(answer.wait().ids(), expected(&prompt(i, 20 + 9 * i as usize), 15));
    }
    let log = rig.log.lock().expect("the log is whole");
    let buckets = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];
    assert!(log.steps.iter().all(|s| buckets.contains(&s.key.rows)));
    assert!(log.steps.iter().all(|s| s.key.part == Part::Whole && s.key.heads <= 16));
    assert!(rig.engine.stats().padding_rows > 0);
}

#[test]
fn records_add_up_to_the_totals() {
    let rig = Rig::plain();
    let answers: Vec<Answer> = (0..5).map(|i| rig.start(request(&prompt(i, 30), 40))).collect();
    let tokens: usize = answers.into_iter().map(|a| a.wait().tokens.len()).sum();
    rig.engine.shutdown(Shutdown::Drain);
    let stats = rig.engine.stats();
    let steps = rig.engine.last_steps(usize::MAX);
    assert_eq!(steps.len() as u64, stats.steps);
    assert!(steps.windows(2).all(|w| w[1].step == w[0].step + 1));
    assert_eq!(steps.iter().map(|s| s.tokens as usize).sum::<usize>(), tokens);
    assert_eq!(steps.iter().map(|s| s.counted.launches).sum::<u64>(), stats.counters.launches);
    assert_eq!(steps.iter().map(|s| s.counted.h2d_copies).sum::<u64>(), stats.counters.h2d_copies);
    assert_eq!(steps.iter().map(|s| u64::from(s.rows)).sum::<u64>(), stats.rows);
    let last = steps.last().expect("there were steps");
    assert_eq!((last.sample_us, last.gap_us), (500.0, 10.0));
    let quiet = steps.iter().filter(|s| s.counted.h2d_copies == 0).count();
    assert!(quiet >= 25, "a step like the one before uploads nothing: {quiet} of {}", steps.len());
    let split = stats.split.expect("more than 29 steps");
    assert_eq!((split.sample_us, split.other_us), (500.0, 10.0));
    assert_eq!(stats.first_token_time.count(), 5);
    assert_eq!(rig.engine.last_steps(3), steps[steps.len() - 3..]);
    assert_eq!(rig.engine.steps_after(last.step - 2), steps[steps.len() - 2..]);
    assert!(rig.engine.steps_after(last.step).is_empty());
}

#[test]
fn nothing_asked_for_is_nothing_run() {
    let rig = Rig::plain();
    let out = rig.ask(Request { max_tokens: Some(0), ..request(&[1, 2, 3], 0) });
    assert_eq!((out.finished.reason, out.tokens.len()), (FinishReason::Length, 0));
    assert_eq!(rig.engine.stats().steps, 0);
}

/// Behind a step of a second, requests come, are given places and are cancelled: the device never hears of them, and who is given
/// their blocks has them alone.
#[test]
fn who_leaves_before_its_step_was_never_there() {
    let switches = Switches { device_loop: false, ..Switches::default() };
    let script = Script { step_time: Some(Duration::from_secs(1)), ..Script::default() };
    let rig = Rig::new(EngineConfig { switches, ..EngineConfig::default() }, limits(), script);
    let pause = || std::thread::sleep(Duration::from_millis(60));
    let first = rig.start(request(&[1, 2, 3], 1));
    pause();
    let leave: Vec<_> = (0..3).map(|i| rig.start(request(&[4 + i; 40], 30))).collect();
    pause();
    for answer in &leave {
        rig.engine.cancel(answer.id);
    }
    let stays = rig.start(request(&[9; 120], 2));
    for answer in leave {
        let finished = answer.wait().finished;
        assert_eq!((finished.reason, finished.output_tokens), (FinishReason::Cancelled, 0));
    }
    assert_eq!(first.wait().finished.reason, FinishReason::Length);
    assert_eq!(stays.wait().ids(), expected(&[9; 120], 2));
    rig.engine.shutdown(Shutdown::Drain);
    assert_eq!(rig.engine.stats().queue_time.count(), 5, "all were given places");
    assert_eq!(rig.log.lock().expect("the log is whole").admitted.len(), 2);
}
