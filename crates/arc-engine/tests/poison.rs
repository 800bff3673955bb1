//! A token whose embedding is not a number: the sequence that meets it ends with an error, and nobody else notices.

mod common;
mod cpu;

use std::path::{Path, PathBuf};

use arc_device::ops::sample::SamplerConfig;
use arc_device::step::Limits;
use arc_engine::engine::{EngineConfig, SampleOn, Switches};
use arc_engine::load::ModelFile;
use arc_engine::request::{FinishReason, Request};
use common::Folder;
use cpu::{Output, Rig};

/// A filler token of the tiny vocabulary, made NaN.
const POISON: u32 = 290;
/// The request that meets it, among seven.
const VICTIM: u32 = 3;

/// How the token comes in.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// In the middle of the prompt.
    Prompt,
    /// In a prompt that is scored.
    Scored,
    /// As the first token that is drawn.
    Drawn,
}

/// A copy of `model` in which one row of the tensor `embed` is NaN. The model has a head of its own: where head and
/// embedding are one matrix, the token's logit would be NaN in every row.
fn poisoned(folder: &Folder, model: &Path, embed: &str, nan: u16) -> PathBuf {
    let file = ModelFile::open(model).expect("the fixture opens");
    let mut bytes = std::fs::read(file.weights().expect("a file").path()).expect("the fixture can be read");
    let tensor = file.weights().expect("a file").tensor(embed).expect("it is there");
    let start = file.weights().expect("a file").find(embed).expect("it is there").range.start;
    assert_eq!(tensor.n_bytes(), tensor.rows() * tensor.cols() * 2, "two bytes a value");
    let row = start + POISON as usize * tensor.cols() * 2;
    bytes[row..row + 2 * tensor.cols()].as_chunks_mut().0.iter_mut().for_each(|value| *value = nan.to_le_bytes());
    let name = file.weights().expect("a file").path().file_name().expect("a file").to_str().expect("ASCII");
    folder.write(name, bytes)
}

/// Seven requests; with `way`, one of them meets the token.
fn requests(way: Option<Way>) -> impl Iterator<Item = Request> {
    (0..7).map(move |i| {
        let way = way.filter(|_| i == VICTIM);
        let mut prompt: Vec<u32> = (0..12 + 9 * i).map(|t| (t * t * 5 + t * 3 + i * 41) % 250).collect();
        if matches!(way, Some(Way::Prompt | Way::Scored)) {
            prompt[20] = POISON;
        }
        let sampling = SamplerConfig {
            temperature: if i.is_multiple_of(2) { 0.0 } else { 1.0 },
            seed: u64::from(i),
            // Nobody draws the token by chance.
            bias: vec![(POISON, if way == Some(Way::Drawn) { 100.0 } else { -100.0 })],
            ..SamplerConfig::default()
        };
        let prompt_logprobs = (i == 5 || way == Some(Way::Scored)).then_some(20);
        Request { max_tokens: Some(24), logprobs: Some(20), prompt_logprobs, ..Request::new(prompt, sampling) }
    })
}

fn check(path: &Path, config: EngineConfig) {
    // The next round's sequences get the slots and, there being hardly more, the blocks of those before.
    let limits = Limits { blocks: 24, ..cpu::limits(7, 96, 64) };
    let rig = Rig::with(path, 2, limits, config);
    let clean = || rig.ask(requests(None)).into_iter().map(|o| o.complete().bits()).collect::<Vec<_>>();
    let want = clean();
    let mut faults = 0;
    for way in [Way::Prompt, Way::Scored, Way::Drawn, Way::Prompt] {
        let outputs = rig.ask(requests(Some(way)));
        for (i, output) in outputs.iter().enumerate() {
            let Output { tokens, finished, .. } = output;
            if i != VICTIM as usize {
                assert_eq!(finished.reason, FinishReason::Length, "{way:?}, request {i}: {finished:?}");
                assert_eq!(output.bits(), want[i], "{way:?}, request {i}");
                continue;
            }
            assert_eq!(finished.reason, FinishReason::Error, "{way:?}: {finished:?}");
            let error = finished.error.as_deref().expect("an error says why");
            assert!(error.contains("not finite"), "{way:?}: {error}");
            let drawn: &[u32] = if way == Way::Drawn { &[POISON] } else { &[] };
            assert_eq!(tokens.iter().map(|token| token.id).collect::<Vec<_>>(), drawn, "{way:?}");
            faults += 1;
        }
        assert_eq!(clean(), want, "after {way:?}");
    }
    let stats = rig.engine.stats();
    assert_eq!((stats.row_faults, stats.kv_blocks_used), (faults, 0));
    assert_eq!(faults, 4);
}

#[test]
fn a_poisoned_row_of_integer_formats_ends_alone() {
    let folder = Folder::new("poison-gguf");
    let path = poisoned(&folder, &cpu::tiny("llama-untied"), "token_embd.weight", 0x7e00);
    check(&path, EngineConfig::default());
    let host = Switches { sample_on: SampleOn::Host, ..Switches::default() };
    check(&path, EngineConfig { switches: host, ..EngineConfig::default() });
}

#[test]
fn a_poisoned_row_of_float_formats_ends_alone() {
    let folder = Folder::new("poison-safetensors");
    let source = cpu::tiny("llama-untied");
    let source = source.parent().expect("a folder");
    let config = std::fs::read(source.join("config.json")).expect("the fixture can be read");
    folder.write("config.json", config);
    poisoned(&folder, source, "model.embed_tokens.weight", 0x7fc0);
    check(folder.path(), EngineConfig::default());
}
