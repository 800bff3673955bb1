//! Token bytes in one arena, found by id and by text.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

/// Most tokens a vocabulary may have; the largest in use have about 262,000.
pub(super) const MAX_TOKENS: usize = 1 << 22;
/// Most bytes of token text; offsets are `u32`.
pub(super) const MAX_BYTES: usize = 1 << 30;

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Found by merging.
    Piece,
    /// Matched as a whole, in any text.
    Added,
    /// Matched as a whole, and only in text that the application wrote.
    Control,
    /// One raw byte.
    Byte,
    /// Never produced by encoding.
    Unused,
}

/// The bytes each token stands for. Hashing is seeded at random, so no file can choose its collisions.
pub(super) struct Vocab {
    bytes: Vec<u8>,
    /// Token `id` is `bytes[ends[id - 1]..ends[id]]`.
    ends: Vec<u32>,
    kinds: Vec<Kind>,
    by_text: HashTable<u32>,
    hasher: DefaultHashBuilder,
    longest: usize,
}

impl Vocab {
    pub(super) fn with_capacity(n_tokens: usize, n_bytes: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(n_bytes),
            ends: Vec::with_capacity(n_tokens),
            kinds: Vec::with_capacity(n_tokens),
            by_text: HashTable::with_capacity(n_tokens),
            hasher: DefaultHashBuilder::default(),
            longest: 0,
        }
    }

    /// Appends the next token. Pieces and added tokens can be found by [`Self::find`]; of equal texts the first is.
    pub(super) fn push(&mut self, text: &[u8], kind: Kind) {
        let id = self.ends.len() as u32;
        self.bytes.extend_from_slice(text);
        self.ends.push(self.bytes.len() as u32);
        self.kinds.push(kind);
        if matches!(kind, Kind::Piece | Kind::Added) && self.find(text).is_none() {
            self.longest = self.longest.max(text.len());
            let Self { bytes, ends, by_text, hasher, .. } = self;
            let hash = hasher.hash_one(text);
            by_text.insert_unique(hash, id, |&other| hasher.hash_one(slice(bytes, ends, other)));
        }
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of token `id`, or nothing for an id outside the vocabulary.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        if (id as usize) < self.ends.len() { slice(&self.bytes, &self.ends, id) } else { &[] }
    }

    pub(super) fn kind(&self, id: u32) -> Option<Kind> {
        self.kinds.get(id as usize).copied()
    }

    /// The piece or added token with these bytes.
    pub(super) fn find(&self, text: &[u8]) -> Option<u32> {
        let hash = self.hasher.hash_one(text);
        self.by_text.find(hash, |&id| slice(&self.bytes, &self.ends, id) == text).copied()
    }

    /// Bytes of the longest text that [`Self::find`] can find.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }
}

fn slice<'a>(bytes: &'a [u8], ends: &[u32], id: u32) -> &'a [u8] {
    let start = if id == 0 { 0 } else { ends[id as usize - 1] as usize };
    &bytes[start..ends[id as usize] as usize]
}

/// GPT-2's spelling of bytes as printable characters. Source: `bytes_to_unicode` of the GPT-2 release: printable
/// Latin-1 stands for itself, the other 68 bytes are U+0100 and up in order.
pub(super) struct ByteChars {
    byte_of: [Option<u8>; 0x144],
}

impl ByteChars {
    pub(super) fn new() -> Self {
        let mut byte_of = [None; 0x144];
        let mut next = 0x100;
        for byte in 0..=255u8 {
            let printable = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
            let code = if printable { byte as usize } else { next };
            next += usize::from(!printable);
            byte_of[code] = Some(byte);
        }
        Self { byte_of }
    }

    /// Appends the bytes that `text` spells. A text with any other character stands for itself, as added tokens do.
    pub(super) fn decode(&self, text: &str, out: &mut Vec<u8>) {
        let start = out.len();
        for c in text.chars() {
            match self.byte_of.get(c as usize).copied().flatten() {
                Some(byte) => out.push(byte),
                None => {
                    out.truncate(start);
                    out.extend_from_slice(text.as_bytes());
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_spelling_covers_every_byte_once() {
        let table = ByteChars::new();
        let mut seen: Vec<u8> = table.byte_of.iter().flatten().copied().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
        let mut out = Vec::new();
        table.decode("ĠtheĊ", &mut out);
        assert_eq!(out, b" the\n");
        out.clear();
        table.decode("<｜Ġ｜>", &mut out);
        assert_eq!(out, "<｜Ġ｜>".as_bytes(), "a text outside the spelling is literal as a whole");
    }

    #[test]
    fn first_of_equal_texts_is_found() {
        let mut vocab = Vocab::with_capacity(3, 8);
        vocab.push(b"a", Kind::Control);
        vocab.push(b"a", Kind::Piece);
        vocab.push(b"a", Kind::Piece);
        assert_eq!(vocab.find(b"a"), Some(1));
        assert_eq!((vocab.bytes(0), vocab.bytes(2), vocab.bytes(3)), (&b"a"[..], &b"a"[..], &b""[..]));
    }
}
