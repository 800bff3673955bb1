//! Token ids equal those of the reference tokenizers, in both readings of control tokens.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use arc::text::{Control, Detokenizer, Special, Tokenizer, TokenizerSpec};
use arc_engine::load::gguf::GgufFile;
use serde_json::Value;

pub fn golden_json(name: &str) -> Value {
    let path = format!("{}/tests/golden/text/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&fs::read_to_string(path).expect("committed goldens")).expect("JSON")
}

/// A file among the test models. Fails with the way to get it when it is absent.
pub fn model_path(name: &str) -> PathBuf {
    let folder = std::env::var_os("ARC_TEST_MODELS").map(PathBuf::from);
    let folder = folder.or_else(|| Some(std::env::home_dir()?.join(".cache/arc/models"))).expect("a home folder");
    let path = folder.join(name);
    let fetch =
        "set ARC_TEST_MODELS to the folder of test models; tests/reference/fetch_tokenizers.sh fetches tokenizers";
    assert!(path.exists(), "{} is missing: {fetch}", path.display());
    path
}

/// The tokenizer from `tokenizer.json` in the folder `name` of the test models.
pub fn from_json(name: &str) -> Tokenizer {
    let read = |file: &str| fs::read_to_string(model_path(&format!("{name}/{file}"))).expect("readable");
    let (tokenizer, config) = (read("tokenizer.json"), read("tokenizer_config.json"));
    let spec = TokenizerSpec::from_json(&tokenizer, Some(&config)).expect("a known tokenizer.json");
    Tokenizer::from_spec(spec).expect("a sound tokenizer.json")
}

/// The tokenizer of a GGUF file among the test models, with a change.
fn from_gguf_with(file: &str, change: impl FnOnce(&mut TokenizerSpec)) -> Tokenizer {
    let file = GgufFile::open(&model_path(file)).expect("a sound GGUF file");
    let mut spec = TokenizerSpec::from_gguf(file.metadata()).expect("a tokenizer in it");
    change(&mut spec);
    Tokenizer::from_spec(spec).expect("a sound tokenizer")
}

/// The tokenizer of a GGUF file among the test models.
pub fn from_gguf(file: &str) -> Tokenizer {
    from_gguf_with(file, |_| {})
}

pub const SMOLLM2: &str = "smollm2-135m-instruct-q4_1.gguf";
pub const GEMMA3: &str = "gemma-3-270m-q4_k_m.gguf";

/// As `random_texts` of tests/reference/text_corpus.py.
pub fn random_texts(palette: &[String], count: usize, seed: u64) -> Vec<String> {
    let mut state = seed;
    let mut below = move |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % n as u64) as usize
    };
    (0..count).map(|_| (0..1 + below(40)).map(|_| &*palette[below(palette.len())]).collect()).collect()
}

/// As `code_point_texts` of tests/reference/text_corpus.py.
fn code_point_texts(ranges: &[(u32, u32)]) -> Vec<String> {
    let mut texts: Vec<(u32, String)> = Vec::new();
    for c in ranges.iter().flat_map(|&(first, last)| first..=last) {
        let text = char::from_u32(c).map(|c| format!("a{c}b {c}{c} .{c}1{c}\n")).expect("assigned");
        match texts.last_mut() {
            Some((block, all)) if *block == c >> 8 => all.push_str(&text),
            _ => texts.push((c >> 8, text)),
        }
    }
    texts.into_iter().map(|(_, text)| text).collect()
}

fn fnv(texts: impl Iterator<Item = Vec<u32>>) -> String {
    let mut value = 0xCBF2_9CE4_8422_2325u64;
    for id in texts.flat_map(|ids| ids.into_iter().chain([u32::MAX])) {
        for byte in id.to_le_bytes() {
            value = (value ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3);
        }
    }
    format!("{value:016x}")
}

pub struct Corpus {
    pub lines: Vec<String>,
    pub random: Vec<String>,
    points: Vec<String>,
}

pub fn corpus() -> Corpus {
    let json = golden_json("corpus");
    let strings = |key: &str| serde_json::from_value::<Vec<String>>(json[key].clone()).expect("strings");
    let assigned: Vec<(u32, u32)> = serde_json::from_value(json["assigned"].clone()).expect("ranges");
    Corpus {
        lines: strings("lines"),
        random: random_texts(&strings("palette"), 2000, 1),
        points: code_point_texts(&assigned),
    }
}

/// Compares every text of the corpus in every mode the golden has; returns how many ids were compared one by one.
fn check(name: &str, tokenizer: &Tokenizer) -> usize {
    let (corpus, golden) = (corpus(), golden_json(name));
    let mut compared = 0;
    let mut wrong = Vec::new();
    for (mode, special) in [("parse", Special::Parse), ("text", Special::Text)] {
        let Some(expected) = golden.get(mode) else { continue };
        let list = |key: &str| expected[key].as_array().expect("a list");
        assert_eq!(list("lines").len(), corpus.lines.len());
        for (at, (line, ids)) in corpus.lines.iter().zip(list("lines")).enumerate() {
            let ids = if ids.is_null() { &golden["parse"]["lines"][at] } else { ids };
            let ids: Vec<u32> = serde_json::from_value(ids.clone()).expect("ids");
            let got = tokenizer.encode(line, special);
            compared += ids.len();
            if got != ids {
                wrong.push(format!("{mode} {line:?}\n  got  {got:?}\n  want {ids:?}"));
            }
        }
        assert_eq!(list("random").len(), corpus.random.len().div_ceil(50));
        for (at, (texts, hash)) in corpus.random.chunks(50).zip(list("random")).enumerate() {
            if *hash != fnv(texts.iter().map(|text| tokenizer.encode(text, special))) {
                wrong.push(format!("{mode} random texts {} to {}", at * 50, at * 50 + 49));
            }
        }
        assert_eq!(list("points").len(), corpus.points.len());
        for (text, hash) in corpus.points.iter().zip(list("points")) {
            if *hash != fnv([tokenizer.encode(text, special)].into_iter()) {
                wrong.push(format!("{mode} code points from {:?}", text.chars().nth(1)));
            }
        }
    }
    assert!(wrong.is_empty(), "{name}: {} differences\n{}", wrong.len(), wrong[..wrong.len().min(12)].join("\n"));
    compared
}

#[test]
fn smollm2_from_gguf() {
    assert!(check("smollm2", &from_gguf(SMOLLM2)) > 7_000);
}

#[test]
fn llama3_from_json() {
    assert!(check("llama3", &from_json("llama3")) > 7_000);
}

#[test]
fn qwen3_from_json() {
    assert!(check("qwen3", &from_json("qwen3")) > 7_000);
}

#[test]
fn deepseek_v4_from_json() {
    assert!(check("deepseek-v4", &from_json("deepseek-v4")) > 7_000);
}

#[test]
fn gemma3_from_json() {
    assert!(check("gemma3", &from_json("gemma3")) > 7_000);
}

#[test]
fn gemma3_from_gguf() {
    assert!(check("gemma3-gguf", &from_gguf(GEMMA3)) > 3_500);
}

#[test]
fn sentencepiece_with_space_prefix() {
    let tokenizer = from_gguf_with(GEMMA3, |spec| spec.add_space_prefix = true);
    assert!(check("gemma3-prefix", &tokenizer) > 3_500);
}

/// Decoding gives back every text of the corpus but for what the tokenizer itself replaces.
#[test]
fn decoding_inverts_encoding() {
    let round_trip = |tokenizer: &Arc<Tokenizer>, text: &str, special| {
        let (mut decoder, mut out) = (Detokenizer::new(tokenizer.clone(), Control::Show), String::new());
        for id in tokenizer.encode(text, special) {
            decoder.push(id, &mut out);
        }
        decoder.finish(&mut out);
        out
    };
    let corpus = corpus();
    let texts: Vec<&String> = corpus.lines.iter().chain(&corpus.random).collect();
    for (tokenizer, spaces) in
        [(from_json("llama3"), false), (from_json("deepseek-v4"), false), (from_gguf(GEMMA3), true)]
    {
        let tokenizer = Arc::new(tokenizer);
        for text in &texts {
            // SentencePiece does not tell U+2581 from a space; control tokens keep their names.
            let want = if spaces { text.replace('▁', " ") } else { text.to_string() };
            for special in [Special::Parse, Special::Text] {
                assert_eq!(round_trip(&tokenizer, text, special), want, "{special:?} {text:?}");
            }
        }
    }
}
