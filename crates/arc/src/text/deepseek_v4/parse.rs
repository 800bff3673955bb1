//! Answers as they come: one state machine for reasoning, content and tool calls.
//!
//! Every character is looked at once, or a bounded number of times where it stands in a tag that turns out to be none,
//! so an answer costs time in proportion to its length however it is cut; [`AnswerParser::bytes_read`] counts. The events
//! add up to the same answer for every cut.
//!
//! A call begins once a block's tag and the head of a call have come; until then all of it may still be text. What does
//! not follow the format after that ends the call as incomplete and is content, as is everything behind a block. Only
//! white space between tags, and a tag that the end of the answer cuts off inside a block, leave no trace.

use std::{borrow::Cow, mem};

use serde::de::IgnoredAny;

use super::{
    answer::{AnswerEvent, ParsedAnswer, push_text},
    json::push_string,
    message::Thinking,
    words::{
        CLOSE_CALLS, CLOSE_INVOKE, CLOSE_PARAMETER, END_THINK, EOS, IS_JSON, IS_STRING, OPEN_CALLS,
        OPEN_CALLS_WITH_GAP, OPEN_INVOKE, OPEN_PARAMETER,
    },
};
use crate::text::{Tokenizer, python::push_json_char};

/// Longest name of a tool or parameter with what stands behind it, in bytes. What is longer is text.
pub(super) const MAX_NAME: usize = 512;

/// What to expect of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerFormat {
    /// Whether it begins with reasoning, since the prompt ended in [`super::THINK`].
    pub thinking: Thinking,
    /// Whether it may hold calls. If not, their tags are content.
    pub tools: bool,
}

impl AnswerFormat {
    /// The token behind which its content begins, where reasoning is before it.
    pub fn behind(&self, tokenizer: &Tokenizer) -> Option<u32> {
        if self.thinking == Thinking::On { tokenizer.id_of(super::END_THINK) } else { None }
    }
}

/// Turns the text of an answer into events, piece by piece.
#[derive(Debug, Clone)]
pub struct AnswerParser {
    tools: bool,
    state: State,
    /// Text that is not yet known to be one thing or another: the beginning of a tag, with the white space before it.
    held: String,
    /// Bytes of [`Self::held`] in front of the tag that may be coming.
    tag_at: usize,
    /// How much of [`EOS`] the text ends in; it is dropped at the very end, and text elsewhere.
    eos_len: usize,
    n_calls: usize,
    /// The call has a parameter already.
    has_parameter: bool,
    /// A value that is JSON, or claims to be.
    json: String,
    bytes_read: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Reasoning,
    Content,
    /// Behind the tag of a block, of which nothing is certain; `held` begins with the tag, `opener` bytes long.
    Opened {
        opener: usize,
    },
    /// Between calls.
    Block,
    /// Between parameters.
    Invoke,
    TextValue,
    JsonValue,
}

/// What became of one more character.
enum Tag {
    /// The tag can still become one.
    Open,
    /// It can not.
    None,
    /// It is the head of a call or parameter of this name. `is_json` is of parameters.
    Head { name: String, is_json: bool },
    /// It ends the call or block.
    Close,
}

impl AnswerParser {
    /// A parser at the beginning of an answer.
    pub fn new(format: AnswerFormat) -> AnswerParser {
        AnswerParser {
            tools: format.tools,
            state: if format.thinking == Thinking::On { State::Reasoning } else { State::Content },
            held: String::new(),
            tag_at: 0,
            eos_len: 0,
            n_calls: 0,
            has_parameter: false,
            json: String::new(),
            bytes_read: 0,
        }
    }

    /// Bytes that were looked at so far, once for each look: a bounded multiple of the text's length.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// A whole answer at once.
    pub fn parse(format: AnswerFormat, text: &str) -> ParsedAnswer {
        let (mut parser, mut events) = (AnswerParser::new(format), Vec::new());
        parser.push(text, &mut events);
        parser.finish(&mut events);
        let mut answer = ParsedAnswer::default();
        events.into_iter().for_each(|event| answer.add(event));
        answer
    }

    /// Takes more text; what has become certain is appended to `out`.
    pub fn push(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        // EOS begins with `<`, which it holds nowhere else: where it fails, nothing of what was held can begin it anew.
        let mut from = 0;
        let mut at = 0;
        while at < text.len() {
            if self.eos_len == 0 {
                let next = text[at..].find('<');
                self.read(next.map_or(text.len() - at, |next| next + 1));
                let Some(next) = next else { break };
                self.run(&text[from..at + next], out);
                (from, at, self.eos_len) = (at + next + 1, at + next + 1, 1);
                continue;
            }
            let c = text[at..].chars().next().expect("not at the end");
            self.read(c.len_utf8());
            if EOS[self.eos_len..].starts_with(c) {
                self.eos_len += c.len_utf8();
                at += c.len_utf8();
                from = at;
            } else {
                let held = mem::take(&mut self.eos_len);
                self.run(&EOS[..held], out);
            }
        }
        self.run(&text[from..], out);
    }

    /// Ends the answer; the parser is spent.
    pub fn finish(&mut self, out: &mut Vec<AnswerEvent>) {
        let eos = mem::take(&mut self.eos_len);
        if eos < EOS.len() {
            self.run(&EOS[..eos], out);
        }
        let held = mem::take(&mut self.held);
        match self.state {
            State::Reasoning | State::Content | State::Opened { .. } => self.text(&held, out),
            State::Block => {}
            State::Invoke => self.end_call(false, out),
            State::TextValue => {
                self.text(&held, out);
                self.end_call(false, out);
            }
            State::JsonValue => {
                self.json.push_str(&held);
                let json = mem::take(&mut self.json);
                self.argument(&json, out);
                self.end_call(false, out);
            }
        }
    }

    fn read(&mut self, bytes: usize) {
        self.bytes_read += bytes as u64;
    }

    /// Takes text in which EOS is nothing special.
    fn run(&mut self, text: &str, out: &mut Vec<AnswerEvent>) {
        // What a tag that was none leaves to be looked at again comes before the rest of the text.
        let mut work = vec![(Cow::Borrowed(text), 0)];
        while let Some((text, mut at)) = work.pop() {
            while at < text.len() {
                at += self.plain(&text[at..], out);
                let Some(c) = text[at..].chars().next() else { break };
                at += c.len_utf8();
                if let Some(again) = self.step(c, out) {
                    work.push((text, at));
                    work.push((Cow::Owned(again), 0));
                    break;
                }
            }
        }
    }

    /// Passes on text that begins no tag, all at once; returns its length.
    fn plain(&mut self, text: &str, out: &mut Vec<AnswerEvent>) -> usize {
        if !self.held.is_empty() {
            return 0;
        }
        let len = match self.state {
            State::Reasoning | State::TextValue => text.find('<'),
            State::Content if !self.tools => None,
            State::Content => text.find(['<', '\n']),
            State::JsonValue => {
                let len = text.find('<').unwrap_or(text.len());
                self.read(len);
                self.json.push_str(&text[..len]);
                return len;
            }
            State::Opened { .. } | State::Block | State::Invoke => return 0,
        };
        let len = len.unwrap_or(text.len());
        self.read(len);
        self.text(&text[..len], out);
        len
    }

    /// Takes a character; returns text that must be looked at again.
    fn step(&mut self, c: char, out: &mut Vec<AnswerEvent>) -> Option<String> {
        self.held.push(c);
        self.read(c.len_utf8());
        match self.state {
            State::Reasoning => {
                if self.ends_in(&[END_THINK], out) {
                    self.held.clear();
                    self.state = State::Content;
                }
            }
            State::Content => {
                if self.ends_in(&[OPEN_CALLS_WITH_GAP, OPEN_CALLS], out) {
                    (self.state, self.tag_at) = (State::Opened { opener: self.held.len() }, self.held.len());
                }
            }
            State::TextValue => {
                if self.ends_in(&[CLOSE_PARAMETER], out) {
                    self.held.clear();
                    self.end_value("\"", out);
                }
            }
            State::JsonValue => {
                // Nothing is passed on: whether it is JSON is known at its end.
                let mut none = Vec::new();
                if self.ends_in(&[CLOSE_PARAMETER], &mut none) {
                    self.held.clear();
                    let mut json = mem::take(&mut self.json);
                    self.read(json.len());
                    if serde_json::from_str::<IgnoredAny>(&json).is_err() {
                        let text = mem::take(&mut json);
                        push_string(&text, &mut json);
                    }
                    self.end_value(&json, out);
                }
            }
            State::Opened { .. } | State::Block | State::Invoke => return self.tag(c, out),
        }
        None
    }

    /// Whether `held` is one of `tags`; passes on what can not be the beginning of one.
    fn ends_in(&mut self, tags: &[&str], out: &mut Vec<AnswerEvent>) -> bool {
        let mut from = 0;
        loop {
            self.read(tags.iter().map(|tag| tag.len().min(self.held.len() - from)).sum());
            if tags.iter().any(|tag| tag.starts_with(&self.held[from..])) {
                break;
            }
            from += self.held[from..].chars().next().map_or(0, char::len_utf8);
        }
        let rest = self.held.split_off(from);
        let passed = mem::replace(&mut self.held, rest);
        match self.state {
            State::JsonValue => self.json.push_str(&passed),
            _ => self.text(&passed, out),
        }
        tags.contains(&self.held.as_str())
    }

    /// A character between tags or inside one.
    fn tag(&mut self, c: char, out: &mut Vec<AnswerEvent>) -> Option<String> {
        let tag = &self.held[self.tag_at..];
        if tag.len() == c.len_utf8() && matches!(c, ' ' | '\t' | '\n' | '\r') {
            self.tag_at = self.held.len();
            return None;
        }
        let (found, looked) = self.look(tag);
        self.read(looked);
        match (found, self.state) {
            (Tag::Open, _) => return None,
            (Tag::Close, State::Invoke) => {
                self.end_call(true, out);
                self.state = State::Block;
            }
            (Tag::Close, State::Block) => self.state = State::Content,
            (Tag::Head { name, is_json }, State::Invoke) => self.begin_value(&name, is_json, out),
            (Tag::Head { name, .. }, _) => {
                push_text(out, AnswerEvent::ToolCallStart { index: self.n_calls, name });
                (self.state, self.has_parameter) = (State::Invoke, false);
            }
            // A block without calls is none.
            (Tag::Close | Tag::None, State::Opened { opener }) => {
                let again = self.held.split_off(opener);
                let opener = mem::take(&mut self.held);
                self.state = State::Content;
                self.text(&opener, out);
                return Some(again);
            }
            (_, state) => {
                if state == State::Invoke {
                    self.end_call(false, out);
                }
                self.state = State::Content;
                return Some(mem::take(&mut self.held));
            }
        }
        self.held.clear();
        self.tag_at = 0;
        None
    }

    /// What `tag` is in a state between tags, and how many bytes had to be looked at.
    fn look(&self, tag: &str) -> (Tag, usize) {
        let mut bytes = 0;
        (self.kind(tag, &mut bytes), bytes)
    }

    fn kind(&self, tag: &str, bytes: &mut usize) -> Tag {
        let (head, close) = match self.state {
            State::Invoke => (OPEN_PARAMETER, CLOSE_INVOKE),
            _ => (OPEN_INVOKE, CLOSE_CALLS),
        };
        *bytes += tag.len().min(close.len()) + tag.len().min(head.len());
        if close == tag {
            return Tag::Close;
        }
        if close.starts_with(tag) || head.starts_with(tag) {
            return Tag::Open;
        }
        let Some(name) = tag.strip_prefix(head) else { return Tag::None };
        if let Some(end) = name.strip_suffix("\">") {
            *bytes += name.len();
            let parameter = |end, is_json| Some(Tag::Head { name: name.strip_suffix(end)?.to_owned(), is_json });
            return match self.state {
                State::Invoke => parameter(IS_STRING, false)
                    .or_else(|| parameter(IS_JSON, true))
                    // What it does not say is what its value turns out to be.
                    .or_else(|| parameter("\">", true).filter(|_| !end.contains('"')))
                    .unwrap_or(Tag::None),
                _ => Tag::Head { name: end.to_owned(), is_json: false },
            };
        }
        if name.len() > MAX_NAME { Tag::None } else { Tag::Open }
    }

    fn begin_value(&mut self, name: &str, is_json: bool, out: &mut Vec<AnswerEvent>) {
        let mut text = String::from(if self.has_parameter { ", " } else { "{" });
        push_string(name, &mut text);
        text.push_str(if is_json { ": " } else { ": \"" });
        self.argument(&text, out);
        self.has_parameter = true;
        self.state = if is_json { State::JsonValue } else { State::TextValue };
    }

    fn end_value(&mut self, rest: &str, out: &mut Vec<AnswerEvent>) {
        self.argument(rest, out);
        self.state = State::Invoke;
    }

    fn end_call(&mut self, complete: bool, out: &mut Vec<AnswerEvent>) {
        if complete {
            self.argument(if self.has_parameter { "}" } else { "{}" }, out);
        }
        out.push(AnswerEvent::ToolCallEnd { index: self.n_calls, complete });
        self.n_calls += 1;
    }

    fn argument(&self, json: &str, out: &mut Vec<AnswerEvent>) {
        if !json.is_empty() {
            push_text(out, AnswerEvent::ToolCallArguments { index: self.n_calls, delta: json.to_owned() });
        }
    }

    /// Passes on text as what it is in this state.
    fn text(&self, text: &str, out: &mut Vec<AnswerEvent>) {
        if text.is_empty() {
            return;
        }
        match self.state {
            State::Reasoning => push_text(out, AnswerEvent::Reasoning(text.to_owned())),
            State::TextValue => {
                let mut json = String::with_capacity(text.len() + 8);
                text.chars().for_each(|c| push_json_char(c, &mut json));
                self.argument(&json, out);
            }
            _ => push_text(out, AnswerEvent::Content(text.to_owned())),
        }
    }
}
