//! DeepSeek-V4's chat format: conversations to prompts, and answers to reasoning, text and tool calls.
//!
//! The release has no Jinja template; a Python program defines the format, and the models were trained on its exact
//! bytes. [`render`] writes the same prompt. [`AnswerParser`] reads answers as they come: where that program gives up, it
//! goes on, and no text is lost.
//!
//! ```text
//! <BOS>{effort}{system}{tools}<User>{user}<Assistant><think>{reasoning}</think>{content}{calls}<EOS><User>...
//! ```
//!
//! Source: `encoding/encoding_dsv4.py` of the DeepSeek-V4 release.

mod answer;
mod calls;
mod encode;
mod json;
mod message;
mod parse;
mod words;

pub use answer::{AnswerEvent, Call, ParsedAnswer};
pub use calls::{Arguments, Calls, CallsError, Tool, calls_grammar};
pub use encode::{EncodeError, Prompt, render};
pub use message::{Effort, Function, Message, Options, Profile, Role, Task, Thinking, ToolCall};
pub use parse::{AnswerFormat, AnswerParser};
pub use words::{ASSISTANT, BOS, DSML, END_THINK, EOS, LATEST_REMINDER, THINK, USER};

use super::tokenizer::Tokenizer;

/// Whether the model of `tokenizer` speaks this format: all words of the format are tokens, those that came with V4
/// among them.
pub fn speaks(tokenizer: &Tokenizer) -> bool {
    let words = [BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML, LATEST_REMINDER];
    words.iter().copied().chain(Task::ALL.map(Task::word)).all(|word| tokenizer.id_of(word).is_some())
}
