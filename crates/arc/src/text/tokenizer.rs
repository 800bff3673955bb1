//! [`Tokenizer`]: a checked and indexed vocabulary that encodes text.

mod build;

use std::borrow::Cow;
use std::ops::Range;
use std::slice;

use hashbrown::HashMap;
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::bpe::{MAX_SEGMENT, Merge, Merger, NO_ID, Symbol};
use super::special::{AddedTokens, Part};
use super::split::Splitter;
use super::vocab::{Kind, Vocab};

/// SentencePiece's spelling of a space, U+2581.
const SPACE_MARK: &str = "▁";

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
            Part::Text(range) => {
                let mut rest = &text[range];
                while !rest.is_empty() {
                    let (segment, tail) = rest.split_at(rest.floor_char_boundary(MAX_SEGMENT));
                    self.encode_segment(segment, &mut merger, &mut ids);
                    rest = tail;
                }
            }
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
                    let bytes = &text.as_bytes()[l.start as usize..r.end as usize];
                    let id = if bytes.len() <= self.vocab.longest() { self.vocab.find(bytes)? } else { return None };
                    Some(Merge { rank: ranks[id as usize], id })
                };
                let mut after_unknown = false;
                merger.run(pair, |symbol| {
                    if symbol.id == NO_ID {
                        let bytes = &text.as_bytes()[symbol.start as usize..symbol.end as usize];
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
