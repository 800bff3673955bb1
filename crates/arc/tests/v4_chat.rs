//! DeepSeek-V4's chat format: prompts and answers to the exact strings of the release, in every split.
//!
//! Cases: `tests/fixtures/deepseek-v4-chat`. The tokenizer is found as in `tests/text.rs`.
#![forbid(unsafe_code)]

mod common;

#[path = "v4_chat/calls.rs"]
mod calls;
#[path = "v4_chat/encode.rs"]
mod encode;
#[path = "v4_chat/parse.rs"]
mod parse;
#[path = "v4_chat/server.rs"]
mod server;
#[path = "v4_chat/splits.rs"]
mod splits;

use std::{fs, sync::Arc};

use arc::text::{Tokenizer, TokenizerSpec};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

/// The committed cases, with numbers and spacing as they are in the file.
#[derive(Deserialize)]
struct Cases {
    encode: Vec<EncodeCase>,
    parse: Vec<ParseCase>,
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

#[derive(Deserialize)]
struct ParseCase {
    name: String,
    thinking_mode: String,
    completion: String,
    parsed: Value,
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

/// A 64-bit linear congruential generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % n as u64) as usize
    }

    fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }
}
