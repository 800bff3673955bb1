//! `tokenizer.json` and `tokenizer_config.json`, as published beside safetensors files, to a [`TokenizerSpec`].
//!
//! A `tokenizer.json` is a small program; we know the programs of the models we run and refuse any other by name, since
//! one that is merely similar would give other ids.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::spec::{TokenizerError, TokenizerSpec, token_type};
use super::vocab::MAX_TOKENS;

/// Pre-tokenizers by what they are made of (see [`steps`]), with the name that GGUF has for each, and whether the text
/// is put into Unicode normalisation form C first.
const PRE_TOKENIZERS: [(&str, bool, &[&str]); 4] = [
    ("smollm", false, &["digits", "bytes of words"]),
    (
        "llama-bpe",
        false,
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            "bytes",
        ],
    ),
    (
        "qwen2",
        true,
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            "bytes",
        ],
    ),
    (
        "joyai-llm",
        false,
        &[
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            concat!(
                r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"##,
                "\r\n",
                r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[",
                "\r\n",
                r"]*|\s*[",
                "\r\n",
                r"]+|\s+(?!\S)|\s+"
            ),
            "bytes",
        ],
    ),
];

#[derive(Deserialize)]
struct File<'a> {
    #[serde(borrow, default)]
    added_tokens: Vec<AddedToken<'a>>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    model: Model<'a>,
}

#[derive(Deserialize)]
struct AddedToken<'a> {
    id: u32,
    #[serde(borrow)]
    content: Cow<'a, str>,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

#[derive(Deserialize)]
struct Model<'a> {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(borrow)]
    vocab: Entries<'a>,
    #[serde(default)]
    merges: Vec<MergeText<'a>>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
}

#[derive(Deserialize, Default)]
struct Config {
    #[serde(default)]
    bos_token: Value,
    #[serde(default)]
    eos_token: Value,
    #[serde(default)]
    pad_token: Value,
    #[serde(default)]
    add_bos_token: Option<bool>,
    #[serde(default)]
    add_eos_token: Option<bool>,
    #[serde(default)]
    chat_template: Value,
}

impl<'a> TokenizerSpec<'a> {
    /// Reads the text of a `tokenizer.json`, and of the `tokenizer_config.json` beside it for the special tokens and
    /// the chat template.
    ///
    /// # Errors
    /// [`TokenizerError::Json`] and [`TokenizerError::Unsupported`].
    pub fn from_json(tokenizer: &'a str, config: Option<&str>) -> Result<Self, TokenizerError> {
        let file: File<'a> = serde_json::from_str(tokenizer)?;
        let config: Config = config.map(serde_json::from_str).transpose()?.unwrap_or_default();
        let (model, pre) = algorithm(&file)?;

        // A few ids may be missing; a file of two tokens must not make a vocabulary of millions.
        let n_entries = file.model.vocab.0.len() + file.added_tokens.len();
        let end = MAX_TOKENS.min(2 * n_entries + 1024);
        let (mut tokens, mut types) = (Vec::new(), Vec::new());
        let mut place = |id: u32, text: Cow<'a, str>, kind: i32| {
            let at = id as usize;
            if at >= end {
                return Err(unsupported("token id", id));
            }
            if at >= tokens.len() {
                tokens.resize(at + 1, Cow::Borrowed(""));
                types.resize(at + 1, token_type::UNUSED);
            }
            // An added token may repeat one of the vocabulary; nothing else may share an id.
            if types[at] != token_type::UNUSED && tokens[at] != text {
                return Err(unsupported("two tokens with id", id));
            }
            (tokens[at], types[at]) = (text, kind);
            Ok(())
        };
        let byte_level = model == "gpt2";
        for (text, id) in file.model.vocab.0 {
            let is_byte = !byte_level && text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
            place(id, text, if is_byte { token_type::BYTE } else { token_type::NORMAL })?;
        }
        for token in file.added_tokens {
            if token.single_word || token.lstrip || token.rstrip {
                return Err(unsupported("added token with single_word, lstrip or rstrip", token.content));
            }
            let kind = if token.special { token_type::CONTROL } else { token_type::USER_DEFINED };
            place(token.id, token.content, kind)?;
        }

        let find = |text: &str| tokens.iter().position(|token| token == text).map(|id| id as u32);
        let named = |value: &Value| {
            let text = value.as_str().or_else(|| value.get("content")?.as_str());
            text.and_then(find)
        };
        let bos = named(&config.bos_token);
        let framed = |last| frame(&file.post_processor, last);
        Ok(Self {
            bos,
            eos: named(&config.eos_token),
            eot: None,
            unk: file.model.unk_token.as_deref().and_then(find),
            pad: named(&config.pad_token),
            add_bos: config.add_bos_token.unwrap_or_else(|| framed(false)),
            add_eos: config.add_eos_token.unwrap_or_else(|| framed(true)),
            add_space_prefix: false,
            chat_template: template(&config.chat_template),
            model: model.to_owned(),
            pre: pre.to_owned(),
            tokens,
            scores: None,
            token_types: Some(types),
            merges: Some(file.model.merges.into_iter().map(|merge| merge.0).collect()),
        })
    }
}

/// Which of our algorithms and pre-tokenizers the file describes.
fn algorithm(file: &File<'_>) -> Result<(&'static str, &'static str), TokenizerError> {
    let model = &file.model;
    if model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
        return Err(unsupported("model type", model.kind.as_deref().unwrap_or_default()));
    }
    let affix = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    if model.dropout.is_some_and(|p| p > 0.0)
        || affix(&model.continuing_subword_prefix)
        || affix(&model.end_of_word_suffix)
    {
        return Err(unsupported("model with", "dropout, subword prefix or word suffix"));
    }
    let normalizers = flatten(&file.normalizer, "normalizers");
    if model.byte_fallback {
        let replaces = |n: &&Value| n["type"] == "Replace" && n["pattern"]["String"] == " " && n["content"] == "▁";
        // The split is made after the replacement and so finds no space to split at.
        let no_split = |p: &&Value| p["type"] == "Split" && p["pattern"]["String"] == " ";
        let pre = flatten(&file.pre_tokenizer, "pretokenizers");
        if normalizers.len() != 1 || !normalizers.iter().all(replaces) || !pre.iter().all(no_split) {
            return Err(unsupported("normalizer", &file.normalizer));
        }
        return Ok(("bpe-byte-fallback", ""));
    }
    let steps = steps(&file.pre_tokenizer)?;
    let Some((pre, nfc, _)) = PRE_TOKENIZERS.iter().find(|known| known.2 == steps) else {
        return Err(unsupported("pre-tokenizer", &file.pre_tokenizer));
    };
    let is_nfc = match normalizers[..] {
        [] => false,
        [one] if one["type"] == "NFC" => true,
        _ => return Err(unsupported("normalizer", &file.normalizer)),
    };
    if is_nfc != *nfc {
        return Err(unsupported("normalizer with this pre-tokenizer:", &file.normalizer));
    }
    if model.ignore_merges != (*pre == "llama-bpe") {
        return Err(unsupported("ignore_merges with this pre-tokenizer:", model.ignore_merges));
    }
    Ok(("gpt2", pre))
}

/// The members of a `Sequence`, or the value itself, or nothing for null.
fn flatten<'v>(value: &'v Value, members: &str) -> Vec<&'v Value> {
    match value {
        Value::Null => Vec::new(),
        _ if value["type"] == "Sequence" => value[members].as_array().into_iter().flatten().collect(),
        _ => vec![value],
    }
}

/// A pre-tokenizer as the texts of [`PRE_TOKENIZERS`].
fn steps(pre_tokenizer: &Value) -> Result<Vec<&str>, TokenizerError> {
    flatten(pre_tokenizer, "pretokenizers")
        .into_iter()
        .map(|step| match step["type"].as_str() {
            Some("Digits") if step["individual_digits"] == true => Ok("digits"),
            Some("ByteLevel") if step["add_prefix_space"] == false => {
                Ok(if step["use_regex"] == false { "bytes" } else { "bytes of words" })
            }
            Some("Split") if step["behavior"] == "Isolated" && step["invert"] == false => {
                step["pattern"]["Regex"].as_str().ok_or_else(|| unsupported("split pattern", &step["pattern"]))
            }
            _ => Err(unsupported("pre-tokenizer", step)),
        })
        .collect()
}

/// Whether the post-processor puts a special token in front of a text, or at its end.
fn frame(post_processor: &Value, last: bool) -> bool {
    flatten(post_processor, "processors").iter().any(|step| {
        let single = step["single"].as_array();
        let at_border = single.and_then(|s| if last { s.last() } else { s.first() });
        at_border.is_some_and(|token| token.get("SpecialToken").is_some())
    })
}

/// The chat template, or the one named `default` of several.
fn template(value: &Value) -> Option<String> {
    let of_list = || value.as_array()?.iter().find(|t| t["name"] == "default")?["template"].as_str();
    value.as_str().or_else(of_list).map(str::to_owned)
}

fn unsupported(part: &'static str, found: impl fmt::Display) -> TokenizerError {
    TokenizerError::Unsupported { part, found: found.to_string().chars().take(120).collect() }
}

/// Vocabulary entries in file order; a map would cost a hash per token that nobody looks up.
struct Entries<'a>(Vec<(Cow<'a, str>, u32)>);

impl<'de: 'a, 'a> Deserialize<'de> for Entries<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Map;
        impl<'de> Visitor<'de> for Map {
            type Value = Entries<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from token to id")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some((Text(text), id)) = map.next_entry()? {
                    entries.push((text, id));
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Map)
    }
}

/// A string, borrowed where it holds no escapes.
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(MergeVisitor).map(|merge| Text(merge.0))
    }
}

/// `"left right"`, or the newer `["left", "right"]` brought to the same form.
struct MergeText<'a>(Cow<'a, str>);

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = MergeText<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a pair of strings")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(MergeText(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(MergeText(Cow::Owned(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut next = || seq.next_element::<Text<'de>>();
        let (Some(Text(left)), Some(Text(right)), None) = (next()?, next()?, next()?) else {
            return Err(A::Error::custom("a merge is not a pair"));
        };
        if left.contains(' ') || right.contains(' ') {
            return Err(A::Error::custom("a merge holds a space"));
        }
        Ok(MergeText(Cow::Owned(format!("{left} {right}"))))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for MergeText<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}
