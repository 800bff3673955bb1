//! The engine over a real model on the CPU device: a request's tokens depend on the request alone.

use std::path::Path;
use std::sync::mpsc::channel;

use arc_device::cpu::Cpu;
use arc_device::ops::sample::SamplerConfig;
use arc_device::step::Limits;
use arc_engine::engine::{self, EngineConfig, EngineHandle, SampleOn, Shutdown, Switches};
use arc_engine::load::{LoadError, ModelFile};
use arc_engine::model::{Model, ModelConfig};
use arc_engine::request::{Event, FinishReason, Request};
use arc_engine::runner::Runner;
use arc_engine::scheduler::buckets::Buckets;

const LIMITS: Limits = Limits { slots: 8, rows: 64, heads: 64, context: 128, blocks: 32, ring: 16 };

fn spawn(model: &str, config: EngineConfig, limits: Limits) -> EngineHandle {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny").join(model).join("model.gguf");
    let file = ModelFile::open(&path).expect("the fixture opens");
    let model_config = ModelConfig::read(&file).expect("the fixture has a configuration");
    let vocab = model_config.shape().vocab as u32;
    let make = move || {
        let mut dev = Cpu::new(2, limits);
        let model = Model::load(&mut dev, &file, &model_config, &limits)?;
        Ok::<_, LoadError>(Runner::new(dev, model))
    };
    engine::spawn(config, limits, vocab, make).expect("the model loads")
}

/// Prompts and parameters that differ in everything.
fn requests(vocab: u32) -> Vec<Request> {
    (0..8_u32)
        .map(|i| {
            let prompt = (0..5 + 9 * i).map(|t| (t * t * 7 + t * 13 + i * 101) % vocab).collect();
            let sampling = SamplerConfig {
                temperature: if i % 3 == 0 { 0.0 } else { 1.0 },
                top_k: if i % 2 == 0 { 0 } else { 20 },
                top_p: if i % 4 == 1 { 0.9 } else { 1.0 },
                presence: if i == 2 { 0.5 } else { 0.0 },
                repetition: if i == 5 { 1.2 } else { 1.0 },
                seed: u64::from(i) + 7,
                ..SamplerConfig::default()
            };
            let prompt_logprobs = (i == 4).then_some(2);
            let logprobs = (i % 2 == 0).then_some(3);
            Request { max_tokens: Some(16 + i), prompt_logprobs, logprobs, ..Request::new(prompt, sampling) }
        })
        .collect()
}

/// Every event of every request, the end aside: tokens, scores and alternatives must be equal to the bit.
type Outputs = Vec<Vec<Event>>;

fn ask(engine: &EngineHandle, together: bool) -> Outputs {
    let mut receivers = Vec::new();
    for request in requests(engine.limits().vocab) {
        let (sink, events) = channel();
        engine.submit(request, Box::new(sink)).expect("a place in the queue");
        receivers.push(if together { Err(events) } else { Ok(events.iter().collect::<Vec<Event>>()) });
    }
    let outputs = receivers.into_iter().map(|r| r.unwrap_or_else(|events| events.iter().collect()));
    outputs
        .map(|mut events| {
            let Some(Event::Finished(finished)) = events.pop() else { panic!("no end in {events:?}") };
            assert_eq!(finished.reason, FinishReason::Length, "{finished:?}");
            merge_scores(events)
        })
        .collect()
}

/// Scores come in as many events as chunks.
fn merge_scores(events: Vec<Event>) -> Vec<Event> {
    let mut scores = Vec::new();
    let mut rest = Vec::new();
    for event in events {
        match event {
            Event::Prompt(batch) => scores.extend(batch),
            other => rest.push(other),
        }
    }
    rest.insert(0, Event::Prompt(scores));
    rest
}

#[test]
fn tokens_and_logprobs_are_the_same_alone_together_in_any_chunks_and_with_every_switch() {
    for model in ["llama", "gemma3"] {
        let alone = ask(&spawn(model, EngineConfig::default(), LIMITS), false);
        assert_eq!(alone.len(), 8);
        assert!(alone.iter().zip(16..).all(|(events, n)| events.len() == n + 1), "one event a token, and the scores");
        let host = Switches { sample_on: SampleOn::Host, ..Switches::default() };
        let no_loop = Switches { device_loop: false, ..Switches::default() };
        let cases = [
            ("together", EngineConfig::default(), LIMITS),
            ("drawn on the host", EngineConfig { switches: host, ..EngineConfig::default() }, LIMITS),
            ("no device loop", EngineConfig { switches: no_loop, ..EngineConfig::default() }, LIMITS),
            ("in small chunks", EngineConfig::default(), Limits { rows: 9, heads: 8, ..LIMITS }),
            ("small mixed steps", EngineConfig { mixed_step_ms: 0.01, ..EngineConfig::default() }, LIMITS),
            ("two at a time", EngineConfig::default(), Limits { slots: 2, ..LIMITS }),
            ("few blocks", EngineConfig::default(), Limits { blocks: 9, ..LIMITS }),
            ("padded", EngineConfig { buckets: Buckets::List(vec![5, 16, 64]), ..EngineConfig::default() }, LIMITS),
        ];
        for (name, config, limits) in cases {
            let engine = spawn(model, config, limits);
            let together = ask(&engine, true);
            for (idx, (got, want)) in together.iter().zip(&alone).enumerate() {
                assert_eq!(got, want, "{model}, {name}, request {idx}");
            }
            engine.shutdown(Shutdown::Drain);
            let stats = engine.stats();
            assert_eq!((stats.kv_blocks_used, stats.counters.syncs), (0, 0));
            assert_eq!(stats.host_rows > 0, name == "drawn on the host");
            assert_eq!(stats.padding_rows > 0, name == "padded");
        }
    }
}

#[test]
fn a_decode_step_allocates_copies_and_waits_for_nothing() {
    let engine = spawn("llama", EngineConfig::default(), LIMITS);
    ask(&engine, true);
    engine.shutdown(Shutdown::Drain);
    let steps = engine.last_steps(usize::MAX);
    // Steps whose table is that of the step before.
    let steady: Vec<_> = steps.windows(2).filter(|w| w[0].rows == w[1].rows && w[1].tokens == w[1].rows).collect();
    assert!(steady.len() > 8, "{} steady steps", steady.len());
    for w in steady.iter().skip(1) {
        let s = &w[1];
        assert_eq!((s.counted.allocs, s.counted.d2h_copies, s.counted.d2h_bytes), (0, 0, 0), "{s:?}");
        assert_eq!(s.counted.launches, w[0].counted.launches, "as many launches as the step before");
        assert!(s.counted.weight_bytes > 0 && s.kv_bytes > 0 && s.fwd_us > 0.0 && s.sample_us > 0.0, "{s:?}");
    }
}

#[test]
fn a_stop_id_ends_a_real_sequence_where_it_first_falls() {
    let engine = spawn("llama", EngineConfig::default(), LIMITS);
    let run = |stop_ids: Vec<u32>| {
        let sampling = SamplerConfig { temperature: 1.0, seed: 3, ..SamplerConfig::default() };
        let request = Request { max_tokens: Some(40), stop_ids, ..Request::new(vec![5, 9, 2], sampling) };
        let (sink, events) = channel();
        engine.submit(request, Box::new(sink)).expect("a place in the queue");
        let tokens = events.iter().filter_map(|e| match e {
            Event::Token(token) => Some(token.id),
            _ => None,
        });
        tokens.collect::<Vec<u32>>()
    };
    let all = run(Vec::new());
    assert_eq!(all.len(), 40);
    for at in (0..40).step_by(7) {
        let end = all.iter().position(|&id| id == all[at]).expect("it is there");
        assert_eq!(run(vec![all[at]]), all[..=end]);
    }
}
