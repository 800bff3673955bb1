//! Speculation changes how many tokens a step lands, and nothing else.
//!
//! Requests run alone without drafts. Then they run with 1 to 4 drafts a step, of which a script makes none, half or all
//! right, alone and among strangers; and with DeepSeek-V4's own draft block. Their tokens must be the same.

mod cpu;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use arc_device::cpu::Cpu;
use arc_device::error::Result;
use arc_device::ops::sample::{DryConfig, SamplerConfig};
use arc_device::step::{Limits, StepDelta, StepKey};
use arc_engine::drafter::Drafter;
use arc_engine::engine::{EngineConfig, SampleOn, Shutdown, Speculate, Switches};
use arc_engine::grammar::{MaskError, TokenMask};
use arc_engine::model::deepseek_v4::Numerics;
use arc_engine::model::{Model, ModelConfig};
use arc_engine::request::{Event, EventSink, FinishReason, Request};
use arc_engine::runner::Runner;
use arc_engine::stats::EngineStats;
use cpu::{Answer, Rig, limits, tiny};

/// Tokens that the subjects generate.
const N_NEW: u32 = 44;
/// Longest of all sequences here.
const CONTEXT: usize = 256;

/// What each request is to say, by its seed.
type Known = Arc<Mutex<HashMap<u64, Vec<u32>>>>;

/// Drafts by a script: `right` of a hundred are the tokens that will come.
struct Script {
    known: Known,
    right: u32,
    /// Seeds of the slots' requests.
    owners: HashMap<u16, u64>,
    numbers: Numbers,
}

impl Script {
    fn new(known: Known, right: u32) -> Script {
        Script { known, right, owners: HashMap::new(), numbers: Numbers(u64::from(right)) }
    }
}

impl Drafter<Cpu> for Script {
    fn draft(&mut self, _model: &mut Model<Cpu>, dev: &mut Cpu, key: StepKey) -> Result<()> {
        let known = self.known.lock().expect("no test panics with it");
        dev.propose(key.drafts as usize, &mut |wanted| {
            let coming = known.get(&self.owners[&wanted.slot])?;
            let right = *coming.get(wanted.n_out as usize + wanted.drafts.len())?;
            Some(if self.numbers.below(100) < self.right { right } else { (right + 1) % 300 })
        });
        Ok(())
    }

    fn staged(&mut self, delta: &StepDelta) {
        self.owners.extend(delta.admit.iter().map(|init| (init.slot, init.sampling.seed)));
    }
}

struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(n)) as u32
    }

    fn prompt(&mut self, len: u32) -> Vec<u32> {
        (0..len).map(|_| self.below(300)).collect()
    }
}

/// Who drafts.
#[derive(Clone)]
enum By {
    Script(Known, u32),
    OwnBlock,
}

/// A model and its arithmetic.
#[derive(Clone)]
struct Subject {
    path: PathBuf,
    numerics: Option<Numerics>,
}

impl Subject {
    fn dense(name: &str) -> Subject {
        Subject { path: tiny(name), numerics: None }
    }

    fn v4(numerics: Numerics) -> Subject {
        let fixture = "../../tests/fixtures/deepseek-v4-tiny/native";
        Subject { path: Path::new(env!("CARGO_MANIFEST_DIR")).join(fixture), numerics: Some(numerics) }
    }

    fn rig(&self, speculate: Speculate, by: By, limits: Limits, config: EngineConfig) -> Rig {
        let own = matches!(by, By::OwnBlock);
        let change = |model: &mut ModelConfig, file: &_| {
            if let (ModelConfig::DeepseekV4(v4), Some(numerics)) = (&mut *model, self.numerics) {
                v4.set_numerics(numerics);
            }
            assert!(!own || model.load_draft_block(file), "the model has a draft block");
        };
        let config = EngineConfig { speculate, ..config };
        Rig::over(&self.path, 2, limits, config, change, move |dev, model| match by {
            By::OwnBlock => Runner::new(dev, model),
            By::Script(known, right) => Runner::with_drafter(dev, model, Box::new(Script::new(known, right))),
        })
    }

    fn plain(&self) -> Rig {
        self.rig(Speculate::Off, By::Script(Known::default(), 0), limits(12, CONTEXT, 256), EngineConfig::default())
    }
}

/// The requests under test: greedy, drawn with filters, drawn with every processor. Their prompts end before a border of
/// all windows, which their outputs cross.
fn subjects() -> Vec<Request> {
    let dry = DryConfig { multiplier: 0.8, base: 1.75, allowed_length: 1, window: u32::MAX, breakers: vec![5] };
    let greedy = SamplerConfig { temperature: 0.0, seed: 1, ..SamplerConfig::default() };
    let filters = SamplerConfig { top_k: 40, top_p: 0.95, min_p: 0.01, seed: 2, ..SamplerConfig::default() };
    let processors = SamplerConfig {
        presence: 0.4,
        frequency: 0.3,
        repetition: 1.1,
        min_tokens: 10,
        bias: vec![(7, 2.0), (9, -3.0)],
        dry: Some(dry),
        seed: 3,
        ..SamplerConfig::default()
    };
    let request = |sampling, len: u32| Request {
        max_tokens: Some(N_NEW),
        stop_ids: vec![3],
        ignore_stop: true,
        ..Request::new(Numbers(u64::from(len)).prompt(len), sampling)
    };
    // Few tokens, all about as likely.
    let favoured = (0..4).map(|i| (40 + 50 * i, 60.0)).collect();
    let favours = SamplerConfig { temperature: 8.0, bias: favoured, seed: 5, ..SamplerConfig::default() };
    vec![
        request(greedy.clone(), 111),
        request(filters, 1),
        request(processors, 118),
        request(SamplerConfig { repetition: 1.3, seed: 4, ..greedy }, 30),
        request(favours, 100),
    ]
}

/// A request that has nothing to do with the subjects.
fn stranger(numbers: &mut Numbers) -> Request {
    let sampling = SamplerConfig {
        temperature: [0.0, 0.7, 1.0][numbers.below(3) as usize],
        presence: [0.0, 0.6][numbers.below(2) as usize],
        seed: 1000 + u64::from(numbers.below(1000)),
        ..SamplerConfig::default()
    };
    let len = 1 + numbers.below(40);
    Request {
        max_tokens: Some(10 + numbers.below(25)),
        logprobs: (numbers.below(3) == 0).then_some(5),
        prompt_logprobs: (numbers.below(4) == 0).then_some(1),
        ..Request::new(numbers.prompt(len), sampling)
    }
}

/// What the subjects say without drafts, one after the other.
fn plain(subject: &Subject) -> (Vec<Vec<u32>>, Known) {
    let rig = subject.plain();
    let want: Vec<Vec<u32>> =
        subjects().into_iter().map(|request| rig.ask([request]).remove(0).complete().ids()).collect();
    assert_eq!(rig.engine.stats().drafted, 0);
    let known = Known::default();
    known.lock().expect("nobody else has it").extend((1..).zip(want.clone()));
    (want, known)
}

/// The subjects' tokens alone, one after the other, and then among strangers.
fn both_ways(rig: &Rig, want: &[Vec<u32>], what: &str) -> EngineStats {
    for (request, want) in subjects().into_iter().zip(want) {
        let got = rig.ask([request]).remove(0).complete();
        assert_eq!(&got.ids(), want, "{what}, alone");
    }
    let alone = rig.engine.stats();
    let mut numbers = Numbers(5);
    let mut strangers: Vec<Answer> = (0..4).map(|_| rig.start(stranger(&mut numbers))).collect();
    let answers: Vec<Answer> = subjects()
        .into_iter()
        .map(|request| {
            strangers.push(rig.start(stranger(&mut numbers)));
            rig.start(request)
        })
        .collect();
    for (answer, want) in answers.into_iter().zip(want) {
        assert_eq!(&answer.wait().complete().ids(), want, "{what}, among strangers");
    }
    strangers.into_iter().for_each(|answer| drop(answer.wait().complete()));
    rig.engine.shutdown(Shutdown::Drain);
    let stats = rig.engine.stats();
    assert_eq!((stats.kv_blocks_used, stats.row_faults), (0, 0), "{what}");
    let steps = rig.engine.last_steps(usize::MAX);
    let sum = |of: fn(&arc_engine::stats::StepRecord) -> u32| steps.iter().map(|s| u64::from(of(s))).sum::<u64>();
    assert_eq!((sum(|s| s.drafted), sum(|s| s.accepted)), (stats.drafted, stats.accepted), "{what}");
    alone
}

/// Every number of drafts, and none, half or all of them right.
fn scripted(subject: &Subject, name: &str) {
    let (want, known) = plain(subject);
    for k in 1..=4 {
        for (right, rows) in [(0, 256), (50, 24), (100, 256), (100, 17)] {
            let limits = Limits { heads: rows.min(80), ..limits(12, CONTEXT, rows) };
            let by = By::Script(known.clone(), right);
            let rig = subject.rig(Speculate::Fixed(k), by, limits, EngineConfig::default());
            let what = format!("{name}, {k} drafts, {right} % right, {rows} rows");
            let stats = both_ways(&rig, &want, &what);
            let (drafted, accepted) = (stats.drafted, stats.accepted);
            println!("{what}: {accepted} of {drafted} accepted, {} steps", stats.steps);
            assert!(drafted > 80, "{what}: {drafted} drafts");
            match right {
                0 => assert_eq!(accepted, 0, "{what}"),
                100 => {
                    assert_eq!(accepted, drafted, "{what}");
                    // One token of the prompt, and then as many as there may be.
                    let steps = want.len() as u64 * u64::from((N_NEW - 1).div_ceil(k + 1));
                    assert!(stats.steps >= steps && stats.steps < steps + 40, "{what}: {} steps", stats.steps);
                }
                _ => assert!(accepted > 20 && accepted < drafted, "{what}: {accepted} of {drafted}"),
            }
        }
    }
}

#[test]
fn dense_models_say_what_they_say_without_drafts() {
    for name in ["llama", "qwen2", "gemma3"] {
        scripted(&Subject::dense(name), name);
    }
}

#[test]
fn deepseek_v4_says_what_it_says_without_drafts() {
    scripted(&Subject::v4(Numerics::Serving), "serving");
}

/// With its own block, which sees prompts in chunks, and alone and in company.
#[test]
fn deepseek_v4_drafts_for_itself() {
    for (numerics, name) in [(Numerics::Reference, "reference"), (Numerics::Serving, "serving")] {
        let subject = Subject::v4(numerics);
        let (want, _) = plain(&subject);
        let mut accepted = 0;
        for k in 1..=4 {
            let mut counts = Vec::new();
            for rows in [256, 19] {
                let limits = Limits { heads: rows.min(80), ..limits(12, CONTEXT, rows) };
                let rig = subject.rig(Speculate::Fixed(k), By::OwnBlock, limits, EngineConfig::default());
                let what = format!("{name}, {k} drafts of its own, {rows} rows");
                let stats = both_ways(&rig, &want, &what);
                println!("{what}: {} of {} accepted, {} steps", stats.accepted, stats.drafted, stats.steps);
                assert!(stats.drafted > 80, "{what}");
                accepted += stats.accepted;
                counts.push((stats.drafted, stats.accepted));
            }
            assert_eq!(counts[0], counts[1], "drafts do not depend on how a prompt was cut");
        }
        assert!(accepted > 0, "{name}: an own draft is right now and then");
        let rig = subject.rig(Speculate::Auto, By::OwnBlock, limits(12, CONTEXT, 256), EngineConfig::default());
        both_ways(&rig, &want, &format!("{name}, auto"));
        let off = subject.rig(Speculate::Off, By::OwnBlock, limits(12, CONTEXT, 256), EngineConfig::default());
        assert_eq!(both_ways(&off, &want, "off").drafted, 0);
    }
}

/// Stop ids and lengths that fall into a run of accepted drafts end the sequence where plain decoding does.
#[test]
fn a_run_ends_where_its_sequence_does() {
    let subject = Subject::dense("llama");
    let (want, known) = plain(&subject);
    let by = By::Script(known, 100);
    let rig = subject.rig(Speculate::Fixed(4), by, limits(12, CONTEXT, 256), EngineConfig::default());
    let ends = |change: &dyn Fn(&mut Request)| {
        let mut requests = subjects();
        requests.iter_mut().for_each(change);
        rig.ask(requests)
    };
    for n in 1..14 {
        let outputs = ends(&|request| {
            request.max_tokens = Some(n);
            request.sampling.min_tokens = request.sampling.min_tokens.min(n);
        });
        for (out, want) in outputs.into_iter().zip(&want) {
            assert_eq!((out.finished.reason, out.finished.output_tokens), (FinishReason::Length, n));
            assert_eq!(out.ids(), want[..n as usize]);
        }
    }
    let mut inside = 0;
    for at in 0..20 {
        let mut requests = subjects();
        for (request, want) in requests.iter_mut().zip(&want) {
            (request.stop_ids, request.ignore_stop) = (vec![want[at]], false);
        }
        // Stop ids are masked below it.
        requests[2].sampling.min_tokens = 0;
        for (idx, (out, want)) in rig.ask(requests).into_iter().zip(&want).enumerate().filter(|(idx, _)| *idx != 2) {
            let end = want.iter().position(|id| *id == want[at]).expect("it is there");
            assert_eq!(out.ids(), want[..=end], "request {idx}");
            assert_eq!(out.finished.reason, FinishReason::Stop, "request {idx}");
            // The first token comes of the prompt, then five a step.
            inside += usize::from(!end.is_multiple_of(5));
        }
    }
    assert!(inside > 20, "{inside} stops inside a run");
}

/// Stops listening after `n` tokens.
struct Fickle {
    n: usize,
    to: Sender<u32>,
}

impl EventSink for Fickle {
    fn send(&mut self, event: Event) -> bool {
        if let Event::Token(token) = event {
            self.n -= 1;
            self.to.send(token.id).expect("the test listens");
        }
        self.n > 0
    }
}

/// Whoever leaves in the middle of a run gets nothing more, and whoever has the slot next nothing of it.
#[test]
fn a_sequence_that_is_cancelled_in_a_run_leaves_nothing_behind() {
    let subject = Subject::v4(Numerics::Serving);
    let (want, known) = plain(&subject);
    let by = By::Script(known, 100);
    let rig =
        subject.rig(Speculate::Fixed(4), by, Limits { slots: 2, ..limits(2, CONTEXT, 64) }, EngineConfig::default());
    let (mut heard, mut rest) = (Vec::new(), Vec::new());
    for n in 1..12 {
        for request in subjects() {
            let (to, tokens) = channel();
            rig.engine.submit(request, Box::new(Fickle { n, to })).expect("a place in the queue");
            heard.push((n, tokens));
        }
        let idx = n % want.len();
        rest.push((idx, rig.start(subjects().swap_remove(idx))));
    }
    for (idx, answer) in rest {
        assert_eq!(answer.wait().complete().ids(), want[idx], "request {idx}");
    }
    for (i, (n, tokens)) in heard.into_iter().enumerate() {
        assert_eq!(tokens.iter().collect::<Vec<u32>>(), want[i % want.len()][..n], "{n} tokens");
    }
}

/// Only even ids.
struct Even;

impl TokenMask for Even {
    fn accept(&mut self, token: u32) -> std::result::Result<(), MaskError> {
        if token.is_multiple_of(2) { Ok(()) } else { Err(MaskError(format!("{token} is odd"))) }
    }

    fn mask(&mut self, out: &mut [u32]) -> std::result::Result<(), MaskError> {
        out.fill(0x5555_5555);
        Ok(())
    }
}

/// Rows with a grammar, rows with logprobs and rows that the host draws have one token a step, also beside others.
#[test]
fn who_must_see_each_token_is_not_speculated_on() {
    let subject = Subject::v4(Numerics::Serving);
    let (want, known) = plain(&subject);
    let special = |idx: usize| {
        let mut request = subjects().swap_remove(idx);
        match idx {
            0 => request.grammar = Some(Box::new(Even)),
            _ => request.logprobs = Some(3),
        }
        request
    };
    let rig = subject.plain();
    let plainly: Vec<_> = (0..2).map(|idx| rig.ask([special(idx)]).remove(0).complete().bits()).collect();
    let by = || By::Script(known.clone(), 100);
    let rig = subject.rig(Speculate::Fixed(4), by(), limits(12, CONTEXT, 256), EngineConfig::default());
    for (idx, plainly) in plainly.iter().enumerate() {
        assert_eq!(&rig.ask([special(idx)]).remove(0).complete().bits(), plainly);
    }
    assert_eq!(rig.engine.stats().drafted, 0, "nothing to speculate on yet");
    let answers: Vec<Answer> =
        (0..4).map(|idx| rig.start(if idx < 2 { special(idx) } else { subjects().swap_remove(idx) })).collect();
    for (idx, answer) in answers.into_iter().enumerate() {
        let output = answer.wait().complete();
        match plainly.get(idx) {
            Some(plainly) => assert_eq!(&output.bits(), plainly),
            None => assert_eq!(output.ids(), want[idx]),
        }
    }
    assert!(rig.engine.stats().accepted > 20 && rig.engine.stats().two_part_steps > 0);
    let switches = Switches { sample_on: SampleOn::Host, ..Switches::default() };
    let config = EngineConfig { switches, ..EngineConfig::default() };
    let rig = subject.rig(Speculate::Fixed(4), by(), limits(12, CONTEXT, 256), config);
    assert_eq!(both_ways(&rig, &want, "drawn on the host").drafted, 0);
}

/// Neither verifying nor drafting allocates, copies or waits.
#[test]
fn a_speculating_step_allocates_copies_and_waits_for_nothing() {
    let subject = Subject::v4(Numerics::Serving);
    let rig = subject.rig(Speculate::Fixed(3), By::OwnBlock, limits(4, CONTEXT, 64), EngineConfig::default());
    rig.ask(subjects()).into_iter().for_each(|out| drop(out.complete()));
    let steps = rig.engine.last_steps(usize::MAX);
    let speculating: Vec<_> = steps.iter().filter(|s| s.drafted > 0).collect();
    assert!(speculating.len() > 20, "{} steps", speculating.len());
    for s in speculating {
        assert_eq!((s.counted.allocs, s.counted.d2h_copies, s.counted.d2h_bytes), (0, 0, 0), "{s:?}");
        assert!(s.fwd_us > 0.0 && s.sample_us > 0.0);
    }
}
