//! DeepSeek-V4's chat format: prompts to the exact strings of the release.
//!
//! Cases: `tests/fixtures/deepseek-v4-chat`. The tokenizer is found as in `tests/text.rs`.
#![forbid(unsafe_code)]

mod common;

#[path = "v4_chat/encode.rs"]
mod encode;

use std::{fs, sync::Arc};

use arc::text::{Tokenizer, TokenizerSpec};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

/// The committed cases, with numbers and spacing as they are in the file.
#[derive(Deserialize)]
struct Cases {
    encode: Vec<EncodeCase>,
    protocol_strings: Value,
}

#[derive(Deserialize)]
struct EncodeCase {
    name: String,
    options: Value,
    messages: Box<RawValue>,
    prompt: String,
    ids: Vec<u32>,
}

fn cases() -> Cases {
    let path = format!("{}/../../tests/fixtures/deepseek-v4-chat/cases.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&fs::read_to_string(path).expect("a committed fixture")).expect("JSON of this form")
}

fn tokenizer() -> Arc<Tokenizer> {
    let read = |file: &str| fs::read_to_string(common::model(&format!("deepseek-v4/{file}"))).expect("readable");
    let (tokenizer, config) = (read("tokenizer.json"), read("tokenizer_config.json"));
    let spec = TokenizerSpec::from_json(&tokenizer, Some(&config)).expect("a known tokenizer.json");
    Arc::new(Tokenizer::from_spec(spec).expect("a sound tokenizer.json"))
}
