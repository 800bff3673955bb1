//! [`Tokenizer`]: a checked and indexed vocabulary that encodes text.

use std::borrow::Cow;
use std::ops::Range;
use std::slice;

use hashbrown::HashMap;
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::bpe::{Merge, Merger, NO_ID, Symbol};
use super::spec::{TokenizerError, TokenizerSpec, token_type};
use super::special::{AddedTokens, MAX_ADDED_BYTES, Part};
use super::split::Splitter;
use super::vocab::{ByteChars, Kind, MAX_BYTES, MAX_TOKENS, Vocab};

/// SentencePiece's spelling of a space, U+2581.
const SPACE_MARK: &str = "▁";

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

/// Whether a text that spells a control token is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// It is: for text that the application wrote, such as a template's own.
    Parse,
    /// It is not: for a user's text. Added tokens that are ordinary text (white-space runs, HTML tags) still match.
    Text,
}

/// A model's vocabulary, ready to encode and to look up token bytes. Immutable; share it in an `Arc`.
pub struct Tokenizer {
    vocab: Vocab,
    added: AddedTokens,
    algorithm: Algorithm,
    /// Token of each single byte, or [`NO_ID`].
    byte_ids: [u32; 256],
    bos: Option<u32>,
    eos: Option<u32>,
    unk: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    add_space_prefix: bool,
    stop_ids: Vec<u32>,
    chat_template: Option<String>,
}

enum Algorithm {
    /// Merges over bytes, within words.
    Bytes { splitter: Splitter, merges: MergeTable, whole_words: bool, nfc: bool },
    /// Merges over the characters of the whole text; uncovered characters become byte tokens first.
    Characters { merges: MergeTable },
    /// SentencePiece: the pair that spells the token with the best score; what is left uncovered becomes byte tokens.
    Scores { ranks: Vec<u32> },
}

type MergeTable = HashMap<(u32, u32), Merge>;

impl Tokenizer {
    /// Checks a specification and builds the tokenizer. About one hash lookup per token and three per merge.
    ///
    /// # Errors
    /// [`TokenizerError`], for anything in `spec` that could not work; nothing in it can panic later.
    pub fn from_spec(spec: TokenizerSpec<'_>) -> Result<Self, TokenizerError> {
        let n_tokens = spec.tokens.len();
        let kinds = kinds(&spec)?;
        let n_bytes = spec.tokens.iter().map(|t| t.len()).sum();
        if n_tokens == 0 || n_tokens > MAX_TOKENS || n_bytes > MAX_BYTES {
            return Err(TokenizerError::VocabSize {
                n_tokens,
                bytes: n_bytes,
                max_tokens: MAX_TOKENS,
                max_bytes: MAX_BYTES,
            });
        }
        let byte_level = match spec.model.as_str() {
            "gpt2" => Some(Splitter::from_name(&spec.pre).ok_or(TokenizerError::UnknownPre { pre: spec.pre.clone() })?),
            "llama" | "bpe-byte-fallback" => None,
            _ => return Err(TokenizerError::UnknownModel { model: spec.model }),
        };

        let byte_chars = ByteChars::new();
        let mut vocab = Vocab::with_capacity(n_tokens, n_bytes);
        let mut byte_ids = [NO_ID; 256];
        let mut added = Vec::new();
        let mut text = Vec::new();
        for (id, (token, &kind)) in spec.tokens.iter().zip(&kinds).enumerate() {
            text.clear();
            match kind {
                Kind::Byte => {
                    let byte = parse_byte_token(token)
                        .ok_or_else(|| TokenizerError::ByteToken { id, text: shorten(token) })?;
                    byte_ids[usize::from(byte)] = id as u32;
                    text.push(byte);
                }
                _ if byte_level.is_none() => spell_spaces(token, &mut text),
                Kind::Piece => byte_chars.decode(token, &mut text),
                _ => text.extend_from_slice(token.as_bytes()),
            }
            if matches!(kind, Kind::Added | Kind::Control) {
                if !(1..=MAX_ADDED_BYTES).contains(&token.len()) {
                    return Err(TokenizerError::AddedLength { id, len: token.len(), max: MAX_ADDED_BYTES });
                }
                let structural = kind == Kind::Control || is_structural(token, spec.chat_template.as_deref());
                // SentencePiece replaces spaces before it looks for added tokens, `tokenizer.json` after.
                let spelling =
                    if spec.model == "llama" { token.replace(SPACE_MARK, " ").into() } else { Cow::from(&**token) };
                added.push((id as u32, spelling, structural));
            }
            vocab.push(&text, kind);
        }
        let added: Vec<_> = added.iter().map(|(id, text, structural)| (*id, &**text, *structural)).collect();
        let added = AddedTokens::new(&added)?;

        let algorithm = if let Some(splitter) = byte_level {
            for (byte, id) in byte_ids.iter_mut().enumerate() {
                *id = vocab.find(&[byte as u8]).unwrap_or(NO_ID);
            }
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
        let named = spec.tokens.iter().enumerate().filter(|(_, token)| STOP_NAMES.contains(&&***token));
        stop_ids.extend(named.map(|(id, _)| id as u32).filter(|&id| kinds[id as usize] != Kind::Piece));
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

    /// Ids of `text`, without bos or eos. Never fails: a byte-level vocabulary that lacks a byte leaves it out, as its
    /// reference does; others use byte tokens or the unknown token.
    pub fn encode(&self, text: &str, special: Special) -> Vec<u32> {
        match special {
            Special::Parse => self.encode_guarded(text, &[]),
            Special::Text => self.encode_guarded(text, slice::from_ref(&(0..text.len()))),
        }
    }

    /// Ids of a raw prompt: bos and eos as the model wants them, no control tokens in the text.
    pub fn encode_prompt(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        ids.extend(self.bos.filter(|_| self.add_bos));
        ids.extend(self.encode(text, Special::Text));
        ids.extend(self.eos.filter(|_| self.add_eos));
        ids
    }

    /// Ids of `text`, of which some parts are not to be read as control tokens.
    ///
    /// `guarded`: sorted, disjoint byte ranges. A control token that overlaps one, or has an empty one strictly inside,
    /// is encoded as ordinary text. All else is as if the whole were the application's: merges run across the borders.
    pub fn encode_guarded(&self, text: &str, guarded: &[Range<usize>]) -> Vec<u32> {
        let (text, guarded) = self.normalize(text, guarded);
        let mut ids = Vec::with_capacity(text.len() / 3 + 1);
        let mut merger = Merger::default();
        self.added.split(&text, &guarded, |part| match part {
            Part::Token(id) => ids.push(id),
            Part::Text(range) => self.encode_segment(&text[range], &mut merger, &mut ids),
        });
        ids
    }

    /// What SentencePiece does to a text before anything else: a dummy space in front, U+2581 for spaces.
    fn normalize<'a>(&self, text: &'a str, guarded: &'a [Range<usize>]) -> (Cow<'a, str>, Cow<'a, [Range<usize>]>) {
        let prefix = self.add_space_prefix && !text.is_empty() && !self.added.begins(text, guarded);
        let marks = matches!(self.algorithm, Algorithm::Scores { .. }) && text.contains(SPACE_MARK);
        if !prefix && !marks {
            return (Cow::from(text), Cow::from(guarded));
        }
        let mut out = String::from(if prefix { " " } else { "" });
        let mut moved = guarded.to_vec();
        let mut bounds: Vec<&mut usize> =
            moved.iter_mut().flat_map(|range| [&mut range.start, &mut range.end]).collect();
        bounds.reverse();
        for (at, c) in text.char_indices() {
            while let Some(bound) = bounds.pop_if(|bound| **bound <= at) {
                *bound = out.len();
            }
            out.push(if marks && c == '▁' { ' ' } else { c });
        }
        for bound in bounds {
            *bound = out.len();
        }
        (Cow::from(out), Cow::from(moved))
    }

    fn encode_segment(&self, text: &str, merger: &mut Merger, ids: &mut Vec<u32>) {
        match &self.algorithm {
            Algorithm::Bytes { splitter, merges, whole_words, nfc } => {
                let text = if *nfc { to_nfc(text) } else { Cow::from(text) };
                splitter.split(&text, |word| {
                    if *whole_words
                        && word.len() <= self.vocab.longest()
                        && let Some(id) = self.vocab.find(word.as_bytes())
                    {
                        return ids.push(id);
                    }
                    merger.clear();
                    for (at, &byte) in word.as_bytes().iter().enumerate() {
                        let id = self.byte_ids[usize::from(byte)];
                        if id != NO_ID {
                            merger.push(at, at + 1, id);
                        }
                    }
                    merger.run(|l, r| merges.get(&(l.id, r.id)).copied(), |symbol| ids.push(symbol.id));
                });
            }
            Algorithm::Characters { merges } => {
                let text = spaces(text);
                merger.clear();
                let mut after_unknown = false;
                for (at, c) in text.char_indices() {
                    let end = at + c.len_utf8();
                    let known = self.vocab.find(&text.as_bytes()[at..end]);
                    match known {
                        Some(id) => merger.push(at, end, id),
                        None => self.fallback(&text.as_bytes()[at..end], after_unknown, |at_byte, id| {
                            merger.push(at + at_byte, at + at_byte + 1, id);
                        }),
                    }
                    after_unknown = known.is_none();
                }
                merger.run(|l, r| merges.get(&(l.id, r.id)).copied(), |symbol| ids.push(symbol.id));
            }
            Algorithm::Scores { ranks } => {
                merger.clear();
                for (at, c) in text.char_indices() {
                    let end = at + c.len_utf8();
                    merger.push(at, end, self.vocab.find(&text.as_bytes()[at..end]).unwrap_or(NO_ID));
                }
                let pair = |l: &Symbol, r: &Symbol| {
                    let bytes = &text.as_bytes()[l.start..r.end];
                    let id = if bytes.len() <= self.vocab.longest() { self.vocab.find(bytes)? } else { return None };
                    Some(Merge { rank: ranks[id as usize], id })
                };
                let mut after_unknown = false;
                merger.run(pair, |symbol| {
                    if symbol.id == NO_ID {
                        let bytes = &text.as_bytes()[symbol.start..symbol.end];
                        self.fallback(bytes, after_unknown, |_, id| ids.push(id));
                    } else {
                        ids.push(symbol.id);
                    }
                    after_unknown = symbol.id == NO_ID;
                });
            }
        }
    }

    /// Byte tokens for `bytes`, or one unknown token for a run of such.
    fn fallback(&self, bytes: &[u8], after_unknown: bool, mut emit: impl FnMut(usize, u32)) {
        let ids = bytes.iter().map(|&byte| self.byte_ids[usize::from(byte)]);
        if ids.clone().all(|id| id != NO_ID) {
            ids.enumerate().for_each(|(at, id)| emit(at, id));
        } else if let (Some(unk), false) = (self.unk, after_unknown) {
            emit(0, unk);
        }
    }

    /// Bytes that token `id` stands for; empty for an id outside the vocabulary. Not always UTF-8: see
    /// [`super::Detokenizer`]. Control tokens have the bytes of their names.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.vocab.bytes(id)
    }

    /// Number of tokens; ids are below it.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }

    /// Token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether a raw prompt begins with [`Self::bos`].
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether a text begins as if a space stood before it, so that a first space of decoded text is not its own.
    pub fn add_space_prefix(&self) -> bool {
        self.add_space_prefix
    }

    /// Tokens at which generation ends: eos, eot and the control tokens known to end a turn. Sorted.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Whether `id` is a control token: never shown, never read from a user's text.
    pub fn is_special(&self, id: u32) -> bool {
        self.vocab.kind(id) == Some(Kind::Control)
    }

    /// The token whose text is exactly `text`: a control or added token if there is one, else a piece.
    pub fn id_of(&self, text: &str) -> Option<u32> {
        self.added.id_of(text).or_else(|| self.vocab.find(text.as_bytes()))
    }

    /// Jinja source of the model's chat template.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Byte offsets in `text` where a mark breaks everything that could be read as a control token, also together with
    /// text appended later. `visible` includes the added tokens that count as control tokens only in a user's text.
    pub(super) fn look_alikes(&self, text: &str, visible: bool) -> Vec<usize> {
        self.added.look_alikes(text, |id| visible || self.is_special(id))
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("n_vocab", &self.n_vocab()).field("stop_ids", &self.stop_ids).finish()
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

/// Whether an added token structures a conversation, so that a user's text must not produce it.
fn is_structural(token: &str, chat_template: Option<&str>) -> bool {
    let bracketed = token.len() > 2
        && (token.starts_with('<') && token.ends_with('>') || token.starts_with('[') && token.ends_with(']'));
    token.contains('｜')
        || token.starts_with("<|") && token.ends_with("|>")
        || bracketed && chat_template.is_some_and(|template| template.contains(token))
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

fn spaces(text: &str) -> Cow<'_, str> {
    if text.contains(SPACE_MARK) { text.replace(SPACE_MARK, " ").into() } else { text.into() }
}

fn to_nfc(text: &str) -> Cow<'_, str> {
    if text.is_ascii() || is_nfc_quick(text.chars()) == IsNormalized::Yes {
        text.into()
    } else {
        text.nfc().collect::<String>().into()
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(40).collect()
}
