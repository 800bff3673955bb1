//! Just enough of a GGUF reader to get at the tokenizer's arrays, apart from the product's own so that the text tests
//! stand alone. Trusts the file.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use arc::text::TokenizerSpec;

/// A file or folder among the test models. Fails with the way to get it when it is absent.
pub fn model_path(name: &str) -> PathBuf {
    let folder = std::env::var_os("ARC_TEST_MODELS").map(PathBuf::from);
    let folder = folder.or_else(|| Some(std::env::home_dir()?.join(".cache/arc/models"))).expect("a home folder");
    let path = folder.join(name);
    assert!(
        path.exists(),
        "{} is missing: set ARC_TEST_MODELS to the folder of test models (tests/reference/fetch_tokenizers.sh fetches the tokenizers)",
        path.display()
    );
    path
}

enum Value {
    Number(u64),
    Float(f32),
    Text(String),
    List(Vec<Value>),
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let (head, tail) = self.0.split_first_chunk().expect("a whole file");
        self.0 = tail;
        *head
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    fn text(&mut self) -> String {
        let len = self.u64() as usize;
        let (head, tail) = self.0.split_at(len);
        self.0 = tail;
        String::from_utf8(head.to_vec()).expect("UTF-8")
    }

    fn value(&mut self, kind: u32) -> Value {
        match kind {
            0 | 1 | 7 => Value::Number(u64::from(self.bytes::<1>()[0])),
            2 | 3 => Value::Number(u64::from(u16::from_le_bytes(self.bytes()))),
            4 | 5 => Value::Number(u64::from(u32::from_le_bytes(self.bytes()))),
            6 => Value::Float(f32::from_le_bytes(self.bytes())),
            8 => Value::Text(self.text()),
            9 => {
                let kind = u32::from_le_bytes(self.bytes());
                let len = self.u64();
                Value::List((0..len).map(|_| self.value(kind)).collect())
            }
            10..=12 => Value::Number(self.u64()),
            _ => panic!("type {kind}"),
        }
    }
}

/// The tokenizer of a GGUF file.
pub fn spec(path: &Path) -> TokenizerSpec<'static> {
    let file = fs::read(path).expect("a readable model");
    let mut reader = Reader(&file);
    assert_eq!(&reader.bytes::<4>(), b"GGUF");
    let _version: [u8; 4] = reader.bytes();
    let (_tensors, n_keys) = (reader.u64(), reader.u64());
    let mut keys = HashMap::new();
    for _ in 0..n_keys {
        let key = reader.text();
        let kind = u32::from_le_bytes(reader.bytes());
        let value = reader.value(kind);
        keys.insert(key, value);
    }
    let mut text = |key: &str| match keys.remove(key) {
        Some(Value::Text(text)) => Some(text),
        _ => None,
    };
    let model = text("tokenizer.ggml.model").expect("a tokenizer model");
    let pre = text("tokenizer.ggml.pre").unwrap_or_default();
    let chat_template = text("tokenizer.chat_template");
    let number = |key: &str| match keys.get(key) {
        Some(Value::Number(n)) => Some(*n as u32),
        _ => None,
    };
    let flag = |key: &str, default| number(key).map_or(default, |n| n != 0);
    let list = |key: &str| match keys.get(key) {
        Some(Value::List(list)) => Some(list),
        _ => None,
    };
    let texts = |key: &str| {
        let text = |v: &Value| if let Value::Text(text) = v { Cow::from(text.clone()) } else { panic!("{key}") };
        list(key).map(|list| list.iter().map(text).collect())
    };
    let is_llama = model == "llama";
    TokenizerSpec {
        tokens: texts("tokenizer.ggml.tokens").expect("tokens"),
        merges: texts("tokenizer.ggml.merges"),
        scores: list("tokenizer.ggml.scores")
            .map(|list| list.iter().map(|v| if let Value::Float(f) = v { *f } else { panic!("score") }).collect()),
        token_types: list("tokenizer.ggml.token_type").map(|list| {
            list.iter().map(|v| if let Value::Number(n) = v { *n as i32 } else { panic!("type") }).collect()
        }),
        bos: number("tokenizer.ggml.bos_token_id"),
        eos: number("tokenizer.ggml.eos_token_id"),
        eot: number("tokenizer.ggml.eot_token_id"),
        unk: number("tokenizer.ggml.unknown_token_id"),
        pad: number("tokenizer.ggml.padding_token_id"),
        add_bos: flag("tokenizer.ggml.add_bos_token", is_llama),
        add_eos: flag("tokenizer.ggml.add_eos_token", false),
        add_space_prefix: flag("tokenizer.ggml.add_space_prefix", is_llama),
        model,
        pre,
        chat_template,
    }
}
