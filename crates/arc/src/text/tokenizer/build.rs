//! From a specification to a tokenizer: everything that a file can get wrong is found here.

use std::borrow::Cow;

use hashbrown::HashSet;

use super::{Algorithm, MergeTable, SPACE_MARK, Tokenizer};
use crate::text::bpe::{Merge, NO_ID};
use crate::text::spec::{TokenizerError, TokenizerSpec, token_type};
use crate::text::special::{AddedTokens, MAX_ADDED_BYTES, MAX_ADDED_TOTAL};
use crate::text::split::Splitter;
use crate::text::vocab::{ByteChars, Kind, MAX_BYTES, MAX_TOKENS, Vocab};

/// Control tokens that end a turn or a text in some model family, whatever the file declares.
const STOP_NAMES: [&str; 14] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|EOT|>",
    "<EOT>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
    "<|end_of_turn|>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
];

impl Tokenizer {
    /// Checks a specification and builds the tokenizer. About one hash lookup per token and three per merge.
    ///
    /// # Errors
    /// [`TokenizerError`], for anything in `spec` that could not work; nothing in it can panic later.
    pub fn from_spec(spec: TokenizerSpec<'_>) -> Result<Self, TokenizerError> {
        let byte_level = match spec.model.as_str() {
            "gpt2" => Some(Splitter::from_name(&spec.pre).ok_or(TokenizerError::UnknownPre { pre: spec.pre.clone() })?),
            "llama" | "bpe-byte-fallback" => None,
            _ => return Err(TokenizerError::UnknownModel { model: spec.model }),
        };

        let kinds = kinds(&spec)?;
        let Indexed { vocab, added, mut byte_ids } = index(&spec, &kinds)?;
        let algorithm = if let Some(splitter) = byte_level {
            for (byte, id) in byte_ids.iter_mut().enumerate() {
                *id = vocab.find(&[byte as u8]).unwrap_or(NO_ID);
            }
            let byte_chars = ByteChars::new();
            let decode = |text: &str, out: &mut Vec<u8>| byte_chars.decode(text, out);
            Algorithm::Bytes {
                splitter,
                merges: merge_table(&spec, &vocab, decode)?,
                whole_words: splitter == Splitter::LlamaBpe,
                nfc: splitter == Splitter::Qwen2,
            }
        } else {
            if byte_ids.contains(&NO_ID) && spec.unk.is_none() {
                return Err(TokenizerError::NoFallback);
            }
            match spec.model.as_str() {
                "llama" => Algorithm::Scores { ranks: score_ranks(&spec)? },
                _ => Algorithm::Characters { merges: merge_table(&spec, &vocab, spell_spaces)? },
            }
        };

        let mut stop_ids: Vec<u32> = [spec.eos, spec.eot].into_iter().flatten().collect();
        // An added token that is ordinary text is not meant: in Gemma `</s>` ends struck-out HTML.
        let stops = |(token, kind): (&str, Kind)| {
            STOP_NAMES.contains(&token) && (kind == Kind::Control || kind == Kind::Added && token.starts_with("<|"))
        };
        let tokens = spec.tokens.iter().map(|token| &**token).zip(kinds.iter().copied());
        stop_ids.extend((0..).zip(tokens).filter(|(_, token)| stops(*token)).map(|(id, _)| id));
        stop_ids.sort_unstable();
        stop_ids.dedup();
        Ok(Self {
            vocab,
            added,
            algorithm,
            byte_ids,
            bos: spec.bos,
            eos: spec.eos,
            unk: spec.unk,
            add_bos: spec.add_bos && spec.bos.is_some(),
            add_eos: spec.add_eos && spec.eos.is_some(),
            add_space_prefix: spec.add_space_prefix && byte_level.is_none(),
            stop_ids,
            chat_template: spec.chat_template,
        })
    }
}

/// Checks the arrays and ids of `spec` against each other and says what each token is for.
fn kinds(spec: &TokenizerSpec<'_>) -> Result<Vec<Kind>, TokenizerError> {
    let n_tokens = spec.tokens.len();
    for (array, len) in
        [("scores", spec.scores.as_ref().map(Vec::len)), ("token_type", spec.token_types.as_ref().map(Vec::len))]
    {
        if let Some(len) = len.filter(|&len| len != n_tokens) {
            return Err(TokenizerError::ArrayLength { array, len, n_tokens });
        }
    }
    let mut kinds = match &spec.token_types {
        None => vec![Kind::Piece; n_tokens],
        Some(types) => types
            .iter()
            .enumerate()
            .map(|(id, &value)| match value {
                token_type::NORMAL => Ok(Kind::Piece),
                token_type::UNKNOWN | token_type::CONTROL => Ok(Kind::Control),
                token_type::USER_DEFINED => Ok(Kind::Added),
                token_type::UNUSED if spec.model == "llama" => Ok(Kind::Unused),
                token_type::UNUSED => Ok(Kind::Piece),
                token_type::BYTE => Ok(Kind::Byte),
                _ => Err(TokenizerError::TokenType { id, value }),
            })
            .collect::<Result<_, _>>()?,
    };
    let ids = [("bos", spec.bos), ("eos", spec.eos), ("eot", spec.eot), ("unknown", spec.unk), ("padding", spec.pad)];
    for (name, id) in ids {
        let Some(id) = id else { continue };
        let kind = kinds.get_mut(id as usize).ok_or(TokenizerError::SpecialId { name, id, n_tokens })?;
        // Files without types still mean these three; unknown and padding ids are often some ordinary token.
        if matches!(name, "bos" | "eos" | "eot") {
            *kind = Kind::Control;
        }
    }
    Ok(kinds)
}

/// Tokens by id, by text and by byte.
struct Indexed {
    vocab: Vocab,
    added: AddedTokens,
    byte_ids: [u32; 256],
}

/// Indexes the tokens of `spec`, which are for what `kinds` says.
fn index(spec: &TokenizerSpec<'_>, kinds: &[Kind]) -> Result<Indexed, TokenizerError> {
    let byte_level = spec.model == "gpt2";
    let n_tokens = spec.tokens.len();
    let n_bytes = spec.tokens.iter().map(|token| token.len()).sum();
    if n_tokens == 0 || n_tokens > MAX_TOKENS || n_bytes > MAX_BYTES {
        let (max_tokens, max_bytes) = (MAX_TOKENS, MAX_BYTES);
        return Err(TokenizerError::VocabSize { n_tokens, bytes: n_bytes, max_tokens, max_bytes });
    }
    let byte_chars = ByteChars::new();
    let mut vocab = Vocab::with_capacity(n_tokens, n_bytes);
    let mut byte_ids = [NO_ID; 256];
    let (mut added, mut added_bytes) = (Vec::new(), 0);
    let written = bracketed(spec.chat_template.as_deref().unwrap_or_default());
    let mut text = Vec::new();
    for (id, (token, &kind)) in spec.tokens.iter().zip(kinds).enumerate() {
        text.clear();
        match kind {
            Kind::Byte => {
                let byte =
                    parse_byte_token(token).ok_or_else(|| TokenizerError::ByteToken { id, text: shorten(token) })?;
                byte_ids[usize::from(byte)] = id as u32;
                text.push(byte);
            }
            _ if !byte_level => spell_spaces(token, &mut text),
            Kind::Piece => byte_chars.decode(token, &mut text),
            _ => text.extend_from_slice(token.as_bytes()),
        }
        if matches!(kind, Kind::Added | Kind::Control) {
            if !(1..=MAX_ADDED_BYTES).contains(&token.len()) {
                return Err(TokenizerError::AddedLength { id, len: token.len(), max: MAX_ADDED_BYTES });
            }
            added_bytes += token.len();
            if added_bytes > MAX_ADDED_TOTAL {
                return Err(TokenizerError::AddedTotal { max: MAX_ADDED_TOTAL });
            }
            let structural = kind == Kind::Control || is_structural(token, &written);
            // SentencePiece replaces spaces before it looks for added tokens, `tokenizer.json` after.
            let spelling =
                if spec.model == "llama" { token.replace(SPACE_MARK, " ").into() } else { Cow::from(&**token) };
            added.push((id as u32, spelling, structural));
        }
        vocab.push(&text, kind);
    }
    let added: Vec<_> = added.iter().map(|(id, text, structural)| (*id, &**text, *structural)).collect();
    let added = AddedTokens::new(&added)?;
    Ok(Indexed { vocab, added, byte_ids })
}

/// Whether an added token structures a conversation, so that a user's text must not produce it. `written`: the
/// [`bracketed`] texts of the chat template.
fn is_structural(token: &str, written: &HashSet<&str>) -> bool {
    token.contains('｜')
        || token.starts_with("<|") && token.ends_with("|>")
        // DeepSeek-V4 has no template that would write them.
        || matches!(token, "<think>" | "</think>")
        || written.contains(token)
}

/// Every `<...>` and `[...]` in `template`, up to the first closing bracket.
fn bracketed(template: &str) -> HashSet<&str> {
    let mut found = HashSet::new();
    for (open, close) in [('<', '>'), ('[', ']')] {
        for (start, _) in template.match_indices(open) {
            let near = &template[start..template.floor_char_boundary(start + MAX_ADDED_BYTES)];
            found.extend(near.find(close).map(|end| &near[..=end]));
        }
    }
    found
}

fn merge_table(
    spec: &TokenizerSpec<'_>,
    vocab: &Vocab,
    decode: impl Fn(&str, &mut Vec<u8>),
) -> Result<MergeTable, TokenizerError> {
    let Some(merges) = &spec.merges else {
        return Err(TokenizerError::MissingArray { model: spec.model.clone(), array: "merges" });
    };
    let mut table = MergeTable::with_capacity(merges.len().min(MAX_TOKENS));
    let mut joined = Vec::new();
    for (rank, merge) in merges.iter().enumerate() {
        let bad = |problem| TokenizerError::Merge { rank, merge: shorten(merge), problem };
        if rank >= MAX_TOKENS {
            return Err(bad("is one too many"));
        }
        let (left, right) = merge.split_once(' ').ok_or_else(|| bad("is not two texts with a space between"))?;
        joined.clear();
        decode(left, &mut joined);
        let border = joined.len();
        decode(right, &mut joined);
        if left.is_empty() || right.is_empty() {
            return Err(bad("has an empty side"));
        }
        let token = |text| vocab.find(text).ok_or_else(|| bad("names a text that is not in the vocabulary"));
        let pair = (token(&joined[..border])?, token(&joined[border..])?);
        table.insert(pair, Merge { rank: rank as u32, id: token(&joined)? });
    }
    Ok(table)
}

/// A rank per token that is lower where its score is higher, equal where equal.
fn score_ranks(spec: &TokenizerSpec<'_>) -> Result<Vec<u32>, TokenizerError> {
    let Some(scores) = &spec.scores else {
        return Err(TokenizerError::MissingArray { model: spec.model.clone(), array: "scores" });
    };
    let rank = |(id, &score): (usize, &f32)| {
        if score.is_nan() {
            return Err(TokenizerError::Score { id });
        }
        // IEEE bits in the order of their values, descending; the sum makes -0.0 and 0.0 one.
        let bits = (score + 0.0).to_bits();
        Ok(if bits >> 31 == 1 { bits } else { !bits & 0x7FFF_FFFF })
    };
    scores.iter().enumerate().map(rank).collect()
}

/// `<0xHH>`
fn parse_byte_token(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// Appends `text` with spaces for U+2581.
fn spell_spaces(text: &str, out: &mut Vec<u8>) {
    for (at, part) in text.split(SPACE_MARK).enumerate() {
        if at > 0 {
            out.push(b' ');
        }
        out.extend_from_slice(part.as_bytes());
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(40).collect()
}
