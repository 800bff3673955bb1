//! Text in, token ids out, and back: the only part of Arc that knows characters.
//!
//! * [`TokenizerSpec`] is what a model file, GGUF or `tokenizer.json`, says about its tokenizer; [`Tokenizer`] is that,
//!   checked and indexed.
//! * [`Detokenizer`] turns a stream of ids into text that is always valid UTF-8 and never held back longer than needed.
//! * [`StopMatcher`] ends that text at the first stop string, wherever token borders fall.
//! * [`ChatTemplate`] turns a conversation into ids, keeping apart what a user typed and what the template wrote.
//!
//! # Why the merge loop is our own
//!
//! The `tokenizers` crate (0.23) is the reference of the tests, not a dependency: it takes 110 ms of CPU to build
//! SmolLM2's 49,152 tokens and 150 to 700 ms for the vocabularies of DeepSeek-V4 and Gemma 3, where a first token is
//! due 300 ms after process start; it encodes 0.3 to 1.9 MB/s; it panics on a merge that names a token outside the
//! vocabulary; and it has no way to say that one part of a text may hold control tokens and another may not. What we
//! own instead is small: one merge loop ([`bpe`]), four splitters ([`split`]) and a table of token bytes ([`vocab`]).

mod bpe;
mod deep_stack;
pub mod deepseek_v4;
mod detokenize;
mod gguf;
mod json;
mod marks;
mod python;
mod spec;
mod special;
mod split;
mod stop;
mod template;
#[doc(hidden)]
pub mod testing;
mod tokenizer;
mod vocab;

pub use deep_stack::{DeepStackError, DeepStacks};
pub use detokenize::{Control, Detokenizer};
pub use spec::{TokenizerError, TokenizerSpec, token_type};
pub use stop::StopMatcher;
pub use template::{ChatInput, ChatTemplate, MAX_TEMPLATE_BYTES, TemplateError};
pub use tokenizer::{Special, Tokenizer};
