//! Random arrivals, lengths, stops, cancels, grammars and device speeds, from printed seeds. Whatever happens, a request
//! gets exactly the tokens that its prompt leads to, one end, and gives everything back.

mod support;

use std::sync::mpsc::channel;
use std::time::Duration;

use arc_device::step::Limits;
use arc_engine::engine::{EngineConfig, Health, SampleOn, Shutdown, Speculate, SubmitError, Switches};
use arc_engine::request::{FinishReason, Request};
use arc_engine::scheduler::buckets::Buckets;
use support::{Answer, Classes, Fickle, HOST_SEED, Rig, Script, expected_masked, expected_score, request};

struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(n)) as u32
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == 0
    }
}

struct Case {
    answer: Answer,
    prompt: Vec<u32>,
    want: Vec<u32>,
    reason: FinishReason,
    scored: bool,
    /// It may also have ended early, at its caller's wish.
    cancelled: bool,
}

/// What a seed saw, so that a lucky draw cannot leave the interesting cases out.
#[derive(Default)]
struct Seen {
    stopped: u64,
    cancelled: u64,
    passes: u32,
    inert: u32,
    two_part: u64,
    padding: u64,
    full: u64,
    dropped: u64,
    drafted: u64,
    accepted: u64,
    /// Steps that verified drafts while others were in flight.
    ahead: u64,
    /// Tokens that an earlier sequence had left, on devices that rewind and that do not.
    cached: [u64; 2],
}

/// `before`: cases that it may go on from.
fn random_request(r: &mut Random, before: &[Case]) -> (Request, Vec<u32>, FinishReason, bool) {
    let len = if r.one_in(4) { 1 + r.below(120) } else { 1 + r.below(20) };
    let mut prompt: Vec<u32> = (0..len).map(|_| r.below(96)).collect();
    if !before.is_empty() && r.one_in(2) {
        let recent = before.len() - 1 - r.below(before.len().min(6) as u32) as usize;
        let mut longer = [before[recent].prompt.as_slice(), &before[recent].want].concat();
        if r.one_in(4) {
            longer.truncate(1 + r.below(longer.len() as u32) as usize);
        }
        longer.extend((0..r.below(8)).map(|_| r.below(96)));
        if longer.len() <= 120 {
            prompt = longer;
        }
    }
    let max_tokens = if r.one_in(12) { 0 } else { 1 + r.below(60) };
    let mut ask = request(&prompt, max_tokens);
    let masked = r.one_in(8);
    let allowed = |out: &[u32], id: u32| !masked || Classes::allows(out, id);
    let mut want = expected_masked(&prompt, max_tokens as usize, allowed);
    let mut reason = FinishReason::Length;
    if masked {
        ask.grammar = Some(Box::new(Classes::default()));
    }
    if r.one_in(2) {
        ask.stop_ids = (0..1 + r.below(3)).map(|_| r.below(96)).collect();
        ask.ignore_stop = r.one_in(4);
        let stop = want.iter().position(|id| ask.stop_ids.contains(id));
        if let Some(stop) = stop.filter(|_| !ask.ignore_stop) {
            want.truncate(stop + 1);
            reason = FinishReason::Stop;
        }
    }
    ask.prompt_logprobs = r.one_in(5).then_some(1);
    ask.logprobs = r.one_in(5).then_some(2);
    ask.sampling.seed = if r.one_in(10) { HOST_SEED } else { 1 };
    let scored = ask.prompt_logprobs.is_some();
    (ask, want, reason, scored)
}

fn run(seed: u64, seen: &mut Seen) {
    let mut r = Random(seed);
    let slots = 1 + r.below(8) as usize;
    let limits = Limits {
        slots,
        rows: slots + r.below(60) as usize,
        heads: slots + r.below(10) as usize,
        context: 192,
        blocks: 6 + r.below(30) as usize,
        ring: 1 + r.below(16) as usize,
    };
    let switches = Switches {
        device_loop: !r.one_in(4),
        sample_on: if r.one_in(8) { SampleOn::Host } else { SampleOn::Device },
        prefix_cache: !r.one_in(4),
    };
    let rewinds = r.one_in(2);
    let config = EngineConfig {
        queue: 40,
        burst: 1 + r.below(8) as usize,
        mixed_step_ms: 2.0 + f64::from(r.below(5)),
        buckets: if r.one_in(2) { Buckets::Exact } else { Buckets::recorded(limits.rows as u32) },
        switches,
        ..EngineConfig::default()
    };
    let drafts = (!r.one_in(3)).then(|| [0, 40, 90, 100][r.below(4) as usize]);
    let speculate = if r.one_in(3) { Speculate::Auto } else { Speculate::Fixed(1 + r.below(4)) };
    let config = EngineConfig { speculate, ..config };
    let step_time = (!r.one_in(3)).then(|| Duration::from_micros(u64::from(r.below(80))));
    let rig = Rig::new(config, limits, Script { step_time, drafts, rewinds, ..Script::default() });
    let mut cases: Vec<Case> = Vec::new();
    while cases.len() < 60 {
        let (ask, want, reason, scored) = random_request(&mut r, &cases);
        let prompt = ask.prompt.clone();
        let (to, events) = channel();
        let fickle = r.one_in(12);
        let n = if fickle { 1 + r.below(10) as usize } else { usize::MAX };
        match rig.engine.submit(ask, Box::new(Fickle { n, to })) {
            Ok(id) => {
                let answer = Answer { id, events };
                cases.push(Case { answer, prompt, want, reason, scored, cancelled: fickle });
            }
            Err(SubmitError::Full { .. }) => {
                seen.full += 1;
                std::thread::sleep(Duration::from_micros(300));
            }
            Err(error) => panic!("seed {seed}: {error}"),
        }
        if r.one_in(6) {
            let idx = r.below(cases.len() as u32) as usize;
            cases[idx].cancelled = true;
            rig.engine.cancel(cases[idx].answer.id);
        }
        if r.one_in(3) {
            std::thread::sleep(Duration::from_micros(u64::from(r.below(400))));
        }
    }
    for (idx, case) in cases.into_iter().enumerate() {
        let Case { answer, prompt, want, reason, scored, cancelled } = case;
        let out = answer.wait();
        let at = format!("seed {seed}, request {idx}");
        if cancelled && out.finished.reason == FinishReason::Cancelled {
            assert!(want.starts_with(&out.ids()), "{at}: {:?} of {want:?}", out.ids());
            seen.cancelled += 1;
        } else {
            assert_eq!(out.ids(), want, "{at}");
            assert_eq!(out.finished.reason, reason, "{at}: {:?}", out.finished.error);
            assert!(!scored || out.scores.len() == prompt.len() - 1, "{at}: {} scores", out.scores.len());
            seen.stopped += u64::from(reason == FinishReason::Stop);
        }
        for (idx, score) in (1..).zip(&out.scores) {
            assert_eq!(score.logprob, Some(expected_score(&prompt, idx)), "{at}, score {idx}");
        }
    }
    assert_eq!(rig.engine.health(), Health::Ready, "seed {seed}");
    rig.engine.shutdown(Shutdown::Drain);
    let stats = rig.engine.stats();
    assert_eq!(stats.finished.total(), 60, "seed {seed}");
    assert_eq!((stats.kv_blocks_used, stats.running, stats.queued), (0, 0, 0), "seed {seed}");
    assert!(stats.passes_max <= 16, "seed {seed}");
    let log = rig.log.lock().expect("the log is whole");
    assert!(log.in_flight_max <= limits.ring as u64, "seed {seed}");
    assert!(stats.arrival_steps_max <= 8, "seed {seed}");
    assert!(switches.prefix_cache || (stats.cached_tokens, stats.kv_blocks_kept) == (0, 0), "seed {seed}");
    seen.cached[usize::from(rewinds)] += stats.cached_tokens;
    seen.passes = seen.passes.max(stats.passes_max);
    seen.inert += log.steps.iter().map(|s| s.inert_rows).sum::<u32>();
    seen.two_part += stats.two_part_steps;
    seen.padding += stats.padding_rows;
    seen.dropped += stats.dropped_tokens;
    assert!(drafts.is_some() || stats.drafted == 0, "seed {seed}");
    seen.drafted += stats.drafted;
    seen.accepted += stats.accepted;
    seen.ahead += if log.in_flight_max > 1 { stats.accepted } else { 0 };
}

#[test]
fn whatever_happens_a_request_gets_its_tokens_and_one_end() {
    let mut seen = Seen::default();
    for seed in 1..=40 {
        run(seed, &mut seen);
    }
    let Seen { stopped, cancelled, passes, inert, two_part, padding, full, dropped, drafted, accepted, ahead, cached } =
        seen;
    assert!(stopped > 50 && cancelled > 50 && two_part > 100 && padding > 100, "the seeds must reach these");
    assert!(passes > 0 && inert > 0 && full > 0 && dropped > 0, "{passes} {inert} {full} {dropped}");
    assert!(cached.iter().all(|&n| n > 500), "{cached:?}");
    assert!(accepted > 1000 && drafted > 2 * accepted && ahead > 500, "{drafted} {accepted} {ahead}");
}
