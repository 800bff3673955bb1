//! Conversations that grow, on the CPU: with what earlier turns left they have the tokens, and the bits of logprobs, that they have
//! without.

use std::path::Path;
use std::sync::mpsc::channel;

use arc_device::cpu::Cpu;
use arc_device::ops::sample::SamplerConfig;
use arc_device::step::Limits;
use arc_engine::engine::{self, EngineConfig, EngineHandle, Speculate, Switches};
use arc_engine::load::{LoadError, ModelFile};
use arc_engine::model::{Model, ModelConfig};
use arc_engine::request::{Event, Finished, Request, TokenEvent};
use arc_engine::runner::Runner;

const LIMITS: Limits = Limits { slots: 3, rows: 64, heads: 64, context: 512, blocks: 40, ring: 16 };

fn spawn(model: &str, prefix_cache: bool, speculate: Speculate) -> EngineHandle {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(model);
    let file = ModelFile::open(&path).expect("the fixture opens");
    let mut config = ModelConfig::read(&file).expect("the fixture has a configuration");
    assert_eq!(config.load_draft_block(&file), model.contains("deepseek"));
    let vocab = config.shape().vocab as u32;
    let make = move || {
        let mut dev = Cpu::new(2, LIMITS);
        let model = Model::load(&mut dev, &file, &config, &LIMITS)?;
        Ok::<_, LoadError>(Runner::new(dev, model))
    };
    let switches = Switches { prefix_cache, ..Switches::default() };
    engine::spawn(EngineConfig { switches, speculate, ..EngineConfig::default() }, LIMITS, vocab, make)
        .expect("it loads")
}

/// How turns are asked for.
#[derive(Clone, Copy, Default)]
struct How {
    logprobs: Option<u32>,
    /// The caller has enough after so many tokens.
    ends_after: Option<usize>,
}

fn ask(engine: &EngineHandle, prompt: &[u32], seed: u64, how: How) -> (Vec<TokenEvent>, Finished) {
    let sampling = SamplerConfig {
        temperature: [0.0, 0.9][seed as usize % 2],
        repetition: [1.0, 1.2][seed as usize / 2 % 2],
        seed,
        ..SamplerConfig::default()
    };
    let request = Request {
        max_tokens: Some(12 + seed as u32 % 9),
        logprobs: how.logprobs,
        ..Request::new(prompt.into(), sampling)
    };
    let (sink, events) = channel();
    let id = engine.submit(request, Box::new(sink)).expect("a place in the queue");
    let mut tokens = Vec::new();
    for event in events {
        match event {
            Event::Token(token) if how.ends_after.is_none_or(|n| tokens.len() < n) => {
                tokens.push(token);
                if how.ends_after == Some(tokens.len()) {
                    engine.cancel(id);
                }
            }
            Event::Finished(finished) => return (tokens, finished),
            _ => {}
        }
    }
    panic!("no end");
}

/// Two conversations in turns, and a stranger between: what they got, and how much of each prompt was known.
fn converse(engine: &EngineHandle, how: How) -> (Vec<Vec<TokenEvent>>, Vec<u32>) {
    let (mut got, mut cached) = (Vec::new(), Vec::new());
    let vocab = engine.limits().vocab;
    let mut talks: Vec<Vec<u32>> =
        (0..2_u32).map(|of| (0..37 + of).map(|i| (i * i * 7 + of * 31 + 3) % vocab).collect()).collect();
    for turn in 0..4 {
        for of in 0..2 {
            let (tokens, finished) = ask(engine, &talks[of], 10 * turn + of as u64, how);
            talks[of].extend(tokens.iter().map(|token| token.id));
            talks[of].extend((0..5 + 11 * turn as u32).map(|i| (i * 13 + 5) % vocab));
            got.push(tokens);
            cached.push(finished.cached_tokens);
        }
        let stranger: Vec<u32> = (0..20).map(|i| (i * 3 + turn as u32 + 50) % vocab).collect();
        got.push(ask(engine, &stranger, turn, How::default()).0);
    }
    (got, cached)
}

#[test]
fn a_conversation_that_goes_on_has_the_tokens_of_one_that_is_run_again() {
    let v4 = "deepseek-v4-tiny/native";
    let mut cases = vec![(v4, Speculate::Off, How::default()), (v4, Speculate::Fixed(3), How::default())];
    for model in ["tiny/llama/model.gguf", "tiny/gemma3/model.gguf", v4] {
        cases.push((model, Speculate::Off, How { logprobs: Some(3), ..How::default() }));
    }
    for (model, speculate, how) in cases {
        let (want, known) = converse(&spawn(model, false, speculate), how);
        assert!(known.iter().all(|&n| n == 0));
        let engine = spawn(model, true, speculate);
        let (got, known) = converse(&engine, how);
        assert_eq!(got, want, "{model}, {speculate:?}");
        // All but what was drawn last and what is new.
        let turns: Vec<u32> = known.chunks(2).map(|turn| turn[0].min(turn[1])).collect();
        assert!(
            turns[0] == 0 && turns[1] > 45 && turns[2] > turns[1] + 15 && turns[3] > turns[2] + 25,
            "{model}: {known:?}"
        );
        let stats = engine.stats();
        assert_eq!(stats.cached_tokens, known.iter().map(|&n| u64::from(n)).sum::<u64>());
        assert!(stats.kv_blocks_used == 0 && stats.kv_blocks_kept > 0, "{stats:?}");
    }
}

/// What a caller ended may still be under way: of use where positions behind are written again, and nowhere else.
#[test]
fn what_its_caller_ends_is_kept_where_it_can_rewind() {
    let how = How { ends_after: Some(6), ..How::default() };
    for (model, some) in [("tiny/llama/model.gguf", true), ("deepseek-v4-tiny/native", false)] {
        let (want, _) = converse(&spawn(model, false, Speculate::Off), how);
        let (got, known) = converse(&spawn(model, true, Speculate::Off), how);
        assert_eq!(got, want, "{model}");
        assert_eq!(known[2..].iter().any(|&n| n > 30), some, "{model}: {known:?}");
    }
}
