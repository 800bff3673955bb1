//! Token ids to text, one at a time.

use std::sync::Arc;

use super::tokenizer::Tokenizer;

/// What becomes of control tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// They leave no trace.
    Skip,
    /// Their names appear.
    Show,
}

/// Turns a stream of token ids into text.
///
/// Every character is passed on with the token that completes it, and every byte that cannot become part of one is
/// passed on at once as U+FFFD, so at most three bytes are held and nothing can stall the stream. All text together
/// equals [`String::from_utf8_lossy`] of all bytes together.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    control: Control,
    /// A beginning of a character.
    held: Vec<u8>,
    /// The next text may begin with the space that the tokenizer put in front of it.
    drop_space: bool,
}

impl Detokenizer {
    /// For a text of its own, decoded from its beginning: the space of [`Tokenizer::add_space_prefix`] is taken off.
    pub fn new(tokenizer: Arc<Tokenizer>, control: Control) -> Self {
        let drop_space = tokenizer.add_space_prefix();
        Self { tokenizer, control, held: Vec::with_capacity(4), drop_space }
    }

    /// For text that continues a prompt: a first space is its own.
    pub fn continuing(tokenizer: Arc<Tokenizer>, control: Control) -> Self {
        Self { drop_space: false, ..Self::new(tokenizer, control) }
    }

    /// Appends to `out` what token `id` completes. Ids outside the vocabulary have no text.
    pub fn push(&mut self, id: u32, out: &mut String) {
        if self.control == Control::Skip && self.tokenizer.is_special(id) {
            return;
        }
        let mut bytes = self.tokenizer.token_bytes(id);
        if std::mem::take(&mut self.drop_space) && !bytes.is_empty() {
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        if self.held.is_empty() {
            let used = emit(bytes, out);
            self.held.extend_from_slice(&bytes[used..]);
        } else {
            self.held.extend_from_slice(bytes);
            let used = emit(&self.held, out);
            self.held.drain(..used);
        }
    }

    /// Ends the text: appends U+FFFD for a character that was begun and never completed.
    pub fn finish(&mut self, out: &mut String) {
        if !self.held.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.held.clear();
        }
    }
}

/// Appends the text of `bytes` up to an incomplete character at the end; returns how many bytes that took.
fn emit(bytes: &[u8], out: &mut String) -> usize {
    let mut used = 0;
    loop {
        match std::str::from_utf8(&bytes[used..]) {
            Ok(text) => {
                out.push_str(text);
                return bytes.len();
            }
            Err(error) => {
                let valid = used + error.valid_up_to();
                out.push_str(std::str::from_utf8(&bytes[used..valid]).expect("valid up to here"));
                let Some(bad) = error.error_len() else { return valid };
                out.push(char::REPLACEMENT_CHARACTER);
                used = valid + bad;
            }
        }
    }
}
