//! The stages of a decode step against committed listings: a launch or a byte more is a diff to review.
//!
//! `ARC_UPDATE_GOLDEN=1` writes the listings anew.

mod common;

use std::path::{Path, PathBuf};

use arc_device::MemoryClass;
use arc_device::cpu::Cpu;
use arc_device::step::{BLOCK_TOKENS, Limits};
use arc_device::trace::{Stage, listing};
use arc_engine::load::ModelFile;
use arc_engine::model::{Model, ModelConfig, Plan};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn limits(context: usize) -> Limits {
    Limits { slots: 1, rows: 8, heads: 4, context, blocks: context / BLOCK_TOKENS, ring: 4 }
}

fn check(name: &str, path: &Path, context: usize) {
    let file = ModelFile::open(path).expect("opens");
    let mut config = ModelConfig::read(&file).expect("a configuration");
    let drafts = config.load_draft_block(&file);
    let plan = Plan::new(&file, &config, &limits(context), 2, context).expect("a plan");
    compare(&format!("decode_step_{name}"), &plan.decode_step);
    assert_eq!(!plan.speculating_step.is_empty(), drafts, "{name}");
    if drafts {
        compare(&format!("speculating_step_{name}"), &plan.speculating_step);
    }
}

fn compare(name: &str, stages: &[Stage]) {
    let text = listing(stages);
    let golden = root().join(format!("tests/golden/{name}.txt"));
    if std::env::var_os("ARC_UPDATE_GOLDEN").is_some() {
        std::fs::write(&golden, &text).expect("written");
    }
    let want = std::fs::read_to_string(&golden).expect("the golden is committed");
    assert_eq!(text, want, "{}", golden.display());
}

#[test]
fn steps_of_real_models_are_as_reviewed() {
    check("llama_smollm2", &common::real_model("smollm2-135m-instruct-q4_1.gguf"), 512);
    check("gemma3_270m", &common::real_model("gemma-3-270m-q4_k_m.gguf"), 1024);
}

#[test]
fn steps_of_tiny_models_are_as_reviewed() {
    check("qwen2_tiny", &root().join("tests/fixtures/tiny/qwen2/model.gguf"), 64);
    check("qwen3_tiny", &root().join("tests/fixtures/tiny/qwen3"), 64);
    check("deepseek_v4_tiny", &root().join("tests/fixtures/deepseek-v4-tiny/native"), 256);
}

/// The table that `arc inspect` prints is what loading allocates, but for rows that fill tiles of 16.
#[test]
fn the_plan_is_what_loading_takes() {
    let limits = limits(256);
    // Two matrices of the last one have eight rows of 128 BF16 that fill a tile.
    let fixture = |name: &str| root().join("tests/fixtures").join(name);
    for (path, draft, filling) in [
        (fixture("tiny/llama"), false, 0),
        (fixture("tiny/qwen2"), false, 0),
        (fixture("tiny/gemma3"), false, 0),
        (fixture("deepseek-v4-tiny/native"), false, 2 * 8 * 128 * 2),
        (fixture("deepseek-v4-tiny/native"), true, 2 * 8 * 128 * 2),
        // Likewise, of 256 F16.
        (PathBuf::from("synthetic:deepseek-v4-tiny"), false, 2 * 8 * 256 * 2),
        (PathBuf::from("synthetic:deepseek-v4-tiny"), true, 2 * 8 * 256 * 2),
    ] {
        let name = path.display();
        let file = ModelFile::open(&path).expect("opens");
        let mut config = ModelConfig::read(&file).expect("a configuration");
        assert!(!draft || config.load_draft_block(&file), "{name} has a draft block");
        let plan = Plan::new(&file, &config, &limits, 2, 64).expect("a plan");
        let mut dev = Cpu::new(2, limits);
        Model::load(&mut dev, &file, &config, &limits).expect("loads");
        for class in [MemoryClass::State, MemoryClass::Workspace, MemoryClass::Weights] {
            let filling = if class == MemoryClass::Weights { filling } else { 0 };
            let planned = plan.memory.class_bytes(class) + filling;
            assert_eq!(dev.memory().class_bytes(class), planned, "{name} {class:?}");
        }
        assert!(plan.memory.total_bytes() > 0);
    }
}
