//! Nothing in the process allocates while the CPU device decodes: engine, stages, sampler and thread team together.

use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};

use arc_device::count::heap::{CountingAlloc, allocs_of_all_threads};
use arc_device::cpu::Cpu;
use arc_device::ops::sample::SamplerConfig;
use arc_device::step::Limits;
use arc_engine::engine::{self, EngineConfig, Shutdown, Speculate};
use arc_engine::load::{LoadError, ModelFile};
use arc_engine::model::{Model, ModelConfig};
use arc_engine::request::{Event, EventSink, Request};
use arc_engine::runner::Runner;

#[global_allocator]
static HEAP: CountingAlloc = CountingAlloc;

/// Notes the count at every token, in memory that it had from the start.
struct Counts {
    counts: Arc<Mutex<Vec<u64>>>,
    /// Met at the first token, by the engine thread.
    all_submitted: Option<Arc<Barrier>>,
}

impl EventSink for Counts {
    fn send(&mut self, event: Event) -> bool {
        if matches!(event, Event::Token(_)) {
            if let Some(all) = self.all_submitted.take() {
                all.wait();
            }
            let mut counts = self.counts.lock().expect("nobody panics with the counts");
            assert!(counts.len() < counts.capacity());
            counts.push(allocs_of_all_threads());
        }
        true
    }
}

/// Allocations from one token of the first request to its next, while four sequences decode. A model with a draft block
/// makes three drafts a step.
fn from_token_to_token(model: &str, logprobs: Option<u32>) -> Vec<u64> {
    let limits = Limits { slots: 4, rows: 64, heads: 16, context: 256, blocks: 32, ring: 16 };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(model);
    let file = ModelFile::open(&path).expect("the fixture opens");
    let mut config = ModelConfig::read(&file).expect("the fixture has a configuration");
    let drafts = config.load_draft_block(&file);
    let vocab = config.shape().vocab as u32;
    let make = move || {
        let mut dev = Cpu::new(2, limits);
        let model = Model::load(&mut dev, &file, &config, &limits)?;
        Ok::<_, LoadError>(Runner::new(dev, model))
    };
    let set_up = EngineConfig { speculate: Speculate::Fixed(3), ..EngineConfig::default() };
    let engine = engine::spawn(set_up, limits, vocab, make).expect("the model loads");
    let counts = Arc::new(Mutex::new(Vec::with_capacity(200)));
    let all_submitted = Arc::new(Barrier::new(2));
    for i in 0..4 {
        let sampling = SamplerConfig { top_k: 20, top_p: 0.9, presence: 0.3, seed: i, ..SamplerConfig::default() };
        let prompt = (0..10).map(|t| t * 3 + i as u32).collect();
        let request = Request { max_tokens: Some(160), logprobs, ..Request::new(prompt, sampling) };
        // The first goes on when all are there, however late this thread is.
        let sink = match i {
            0 => Counts { counts: counts.clone(), all_submitted: Some(all_submitted.clone()) },
            _ => Counts { counts: Arc::new(Mutex::new(Vec::with_capacity(200))), all_submitted: None },
        };
        engine.submit(request, Box::new(sink)).expect("a place in the queue");
    }
    all_submitted.wait();
    engine.shutdown(Shutdown::Drain);
    assert_eq!(engine.stats().drafted > 300, drafts, "{} drafts", engine.stats().drafted);
    let counts = counts.lock().expect("nobody panics with the counts");
    assert_eq!(counts.len(), 160);
    // All four are admitted within the first steps, and end within the last.
    counts[40..150].windows(2).map(|w| w[1] - w[0]).collect()
}

#[test]
fn a_decode_step_on_the_cpu_allocates_nothing() {
    for model in ["tiny/llama/model.gguf", "deepseek-v4-tiny/native"] {
        let plain = from_token_to_token(model, None);
        assert_eq!(plain.iter().sum::<u64>(), 0, "{model}: {plain:?}");
    }
    // The count can fail: alternatives are lists, one of each of the four sequences a step, though now and then fewer lie between two
    // tokens of the first.
    let lists = from_token_to_token("tiny/llama/model.gguf", Some(2));
    assert!(lists.iter().sum::<u64>() >= 4 * (lists.len() as u64 - 8), "{lists:?}");
}
