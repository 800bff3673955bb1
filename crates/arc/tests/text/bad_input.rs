//! Tokenizers that lie are refused in a sentence; texts that are hostile cost little.

use std::time::{Duration, Instant};

use arc::text::{Special, Tokenizer, TokenizerSpec};

use crate::golden::{GEMMA3, SMOLLM2, from_gguf, from_json};

fn spec() -> TokenizerSpec<'static> {
    TokenizerSpec {
        model: "gpt2".into(),
        pre: "llama-bpe".into(),
        tokens: ["a", "b", "ab", "<s>"].map(Into::into).to_vec(),
        token_types: Some(vec![1, 1, 1, 3]),
        merges: Some(vec!["a b".into()]),
        ..Default::default()
    }
}

#[test]
fn every_lie_is_named() {
    assert_eq!(Tokenizer::from_spec(spec()).expect("sound").encode("ab<s>ba", Special::Parse), [2, 3, 1, 0]);
    type Change = fn(&mut TokenizerSpec<'static>);
    let cases: [(&str, Change); 25] = [
        ("unknown tokenizer model `bert`; known: gpt2, llama", |s| s.model = "bert".into()),
        ("unknown tokenizer model ``", |s| s.model = String::new()),
        ("unknown pre-tokenizer `qwen3`; known: smollm, llama-bpe, qwen2, joyai-llm", |s| s.pre = "qwen3".into()),
        ("unknown pre-tokenizer ``", |s| s.pre = String::new()),
        ("a vocabulary of 0 tokens", |s| (s.tokens, s.token_types) = (vec![], None)),
        ("a vocabulary of 5000000 tokens", |s| (s.tokens, s.token_types) = (vec!["".into(); 5_000_000], None)),
        ("`token_type` has 3 entries for 4 tokens", |s| s.token_types = Some(vec![1; 3])),
        ("`scores` has 5 entries for 4 tokens", |s| s.scores = Some(vec![0.0; 5])),
        ("token 1 has unknown type 7", |s| s.token_types = Some(vec![1, 7, 1, 1])),
        ("token 1 has unknown type -1", |s| s.token_types = Some(vec![1, -1, 1, 1])),
        ("needs `merges`", |s| s.merges = None),
        ("needs `scores`", |s| (s.model, s.unk) = ("llama".into(), Some(0))),
        ("score of token 2 is not a number", |s| {
            (s.model, s.unk, s.scores) = ("llama".into(), Some(0), Some(vec![0.0, f32::INFINITY, f32::NAN, -1.0]));
        }),
        ("neither all 256 byte tokens nor an unknown token", |s| {
            (s.model, s.scores) = ("llama".into(), Some(vec![0.0; 4]))
        }),
        ("byte token 0 is spelt \"a\" instead of <0xHH>", |s| s.token_types = Some(vec![6, 1, 1, 1])),
        ("merge 1 (\"b a\") names a text that is not in the vocabulary", |s| {
            s.merges = Some(vec!["a b".into(), "b a".into()])
        }),
        ("merge 0 (\"a c\") names a text that is not in the vocabulary", |s| s.merges = Some(vec!["a c".into()])),
        ("merge 0 (\"ab\") is not two texts with a space between", |s| s.merges = Some(vec!["ab".into()])),
        ("merge 0 (\"a \") has an empty side", |s| s.merges = Some(vec!["a ".into()])),
        ("bos token id 4 is outside the vocabulary of 4 tokens", |s| s.bos = Some(4)),
        ("eos token id 4294967295 is outside", |s| s.eos = Some(u32::MAX)),
        ("eot token id 99 is outside", |s| s.eot = Some(99)),
        ("unknown token id 99 is outside", |s| s.unk = Some(99)),
        ("control and added tokens have more than 524288 bytes", |s| {
            (s.tokens, s.token_types) = (vec!["x".repeat(200).into(); 3_000], Some(vec![4; 3_000]));
        }),
        ("added token 3 has 300 bytes; 1 to 256 are supported", |s| s.tokens[3] = "x".repeat(300).into()),
    ];
    for (expected, change) in cases {
        let mut spec = spec();
        change(&mut spec);
        let start = Instant::now();
        let error = Tokenizer::from_spec(spec).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error:?} should contain {expected:?}");
        assert!(start.elapsed() < Duration::from_secs(1), "{expected}");
    }
}

#[test]
fn sound_oddities_are_accepted() {
    let with = |change: fn(&mut TokenizerSpec<'static>)| {
        let mut spec = spec();
        change(&mut spec);
        Tokenizer::from_spec(spec).expect("sound")
    };
    let untyped = with(|s| (s.token_types, s.eos) = (None, Some(3)));
    assert_eq!(untyped.encode("<s>a<s>", Special::Text), [0], "eos is a control token without types too");
    assert_eq!(untyped.encode("<s>a<s>", Special::Parse), [3, 0, 3]);
    assert_eq!(untyped.stop_ids(), [3]);
    let doubled = with(|s| (s.tokens[2], s.merges) = ("a".into(), Some(vec![])));
    assert_eq!(doubled.encode("a", Special::Text), [0], "of equal texts the first is meant");
}

#[test]
fn json_that_is_not_ours_is_refused() {
    let read = |json: &str| TokenizerSpec::from_json(json, None).map(|_| ()).expect_err("refused").to_string();
    let bpe = |rest: &str| format!("{{\"model\":{{\"type\":\"BPE\",\"vocab\":{{\"a\":0}},\"merges\":[]}}{rest}}}");
    assert!(read("").contains("not a usable tokenizer.json"));
    assert!(read("{}").contains("model"));
    assert!(read("[[[[").contains("not a usable"));
    assert!(read("{\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}").contains("unsupported model type WordPiece"));
    assert!(read("{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}").contains("a map from token to id"));
    assert!(read(&bpe("")).contains("unsupported pre-tokenizer null"));
    assert!(read(&bpe(",\"pre_tokenizer\":{\"type\":\"Whitespace\"}")).contains("Whitespace"));
    let bytes = ",\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\",\"individual_digits\":true},{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}]}";
    assert!(TokenizerSpec::from_json(&bpe(bytes), None).is_ok_and(|spec| spec.pre == "smollm"));
    assert!(read(&bpe(&format!("{bytes},\"normalizer\":{{\"type\":\"NFKC\"}}"))).contains("unsupported normalizer"));
    assert!(
        read(&bpe(&format!("{bytes},\"normalizer\":{{\"type\":\"NFC\"}}")))
            .contains("normalizer with this pre-tokenizer")
    );
    let added = |fields: &str| bpe(&format!("{bytes},\"added_tokens\":[{{\"id\":{fields}}}]"));
    assert!(read(&added("0,\"content\":\"b\"")).contains("two tokens with id 0"));
    assert!(read(&added("4000000,\"content\":\"b\"")).contains("token id 4000000"));
    assert!(read(&added("4000000000,\"content\":\"b\"")).contains("token id 4000000000"));
    assert!(read(&added("1,\"content\":\"b\",\"lstrip\":true")).contains("lstrip"));
    let merges = |merges: &str| format!("{{\"model\":{{\"vocab\":{{}},\"merges\":[{merges}]}}}}");
    assert!(read(&merges("[\"a\"]")).contains("not a pair"));
    assert!(read(&merges("[\"a\",\"b\",\"c\"]")).contains("not a pair"));
    assert!(read(&merges("[\"a \",\"b\"]")).contains("holds a space"));
    assert!(read(&merges("3")).contains("a string or a pair"));
}

#[test]
fn hostile_texts_cost_little() {
    let texts = [
        "a".repeat(200_000),
        "abcdefghijklmnopqrstuvwxyz".repeat(8_000),
        " ".repeat(200_000),
        " \n".repeat(100_000),
        "\u{1}".repeat(200_000),
        "<|im_start|>".repeat(17_000),
        "<|".repeat(100_000),
        "<bos".repeat(50_000),
        "\u{301}".repeat(100_000),
        "e\u{301}".repeat(66_000),
        "1".repeat(200_000),
        "▁".repeat(66_000),
        "\u{0}".repeat(200_000),
        "字".repeat(66_000),
        "'".repeat(200_000),
    ];
    for tokenizer in
        [from_gguf(SMOLLM2), from_gguf(GEMMA3), from_json("llama3"), from_json("qwen3"), from_json("deepseek-v4")]
    {
        for text in &texts {
            for special in [Special::Text, Special::Parse] {
                let start = Instant::now();
                let ids = tokenizer.encode(text, special);
                assert!(ids.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
                assert!(start.elapsed() < Duration::from_secs(4), "{:?}: {:?}", &text[..8], start.elapsed());
            }
        }
    }
}
