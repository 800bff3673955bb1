//! From the tokens of a sequence to the text of an answer.
//!
//! Text is passed on as soon as no stop string can begin in it; each token is passed on with the first byte of its text.
//! So when a stop string appears, the tokens behind it are in nobody's hands yet and can be dropped.

use std::{collections::VecDeque, sync::Arc};

use arc_engine::request::TokenEvent;

use crate::text::{Control, Detokenizer, StopMatcher, Tokenizer};

/// A token of the answer with what the model thought of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// Token id.
    pub id: u32,
    /// Natural log of its probability, where asked for.
    pub logprob: Option<f32>,
    /// Alternatives, larger first.
    pub top: Vec<(u32, f32)>,
    /// Characters of the text before it.
    pub offset: usize,
}

/// What one more token brought.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Piece {
    /// Text that is certain to belong to the answer.
    pub text: String,
    /// Tokens whose text begins in what was passed on.
    pub tokens: Vec<Scored>,
    /// A stop string has appeared: the answer is complete, and whatever else arrives is not part of it.
    pub stopped: bool,
}

/// The text of one sequence, as far as it has come.
#[derive(Debug)]
pub struct Answer {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Ids that end the sequence; their own text is not part of the answer.
    stop_ids: Vec<u32>,
    /// Bytes and characters that the detokenizer gave.
    raw: Length,
    /// Bytes that passed the matcher.
    passed: usize,
    /// Tokens that were not passed on, each with the byte where its text begins.
    held: VecDeque<(usize, Scored)>,
    n_tokens: u32,
    stopped: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Length {
    bytes: usize,
    chars: usize,
}

impl Length {
    fn add(&mut self, text: &str) {
        self.bytes += text.len();
        self.chars += text.chars().count();
    }
}

impl Answer {
    /// An answer that continues a prompt. `stops` have passed [`StopMatcher::check`]; `stop_ids` is empty where the
    /// sequence goes on past them.
    pub fn new(tokenizer: Arc<Tokenizer>, stops: &[String], stop_ids: Vec<u32>) -> Answer {
        Answer {
            detokenizer: Detokenizer::continuing(tokenizer, Control::Skip),
            stops: StopMatcher::new(stops),
            stop_ids,
            raw: Length::default(),
            passed: 0,
            held: VecDeque::new(),
            n_tokens: 0,
            stopped: false,
        }
    }

    /// Takes the next token. After a stop string nothing more comes out.
    pub fn push(&mut self, event: TokenEvent) -> Piece {
        if self.stopped {
            return Piece { stopped: true, ..Piece::default() };
        }
        self.n_tokens += 1;
        if self.stop_ids.contains(&event.id) {
            return Piece::default();
        }
        let begins = self.raw;
        let mut raw = String::new();
        self.detokenizer.push(event.id, &mut raw);
        let TokenEvent { id, logprob, top } = event;
        self.held.push_back((begins.bytes, Scored { id, logprob, top, offset: begins.chars }));
        self.pass(&raw)
    }

    /// The rest, once the sequence has ended.
    pub fn finish(&mut self) -> Piece {
        if self.stopped {
            return Piece { stopped: true, ..Piece::default() };
        }
        let mut raw = String::new();
        self.detokenizer.finish(&mut raw);
        let mut piece = self.pass(&raw);
        if !piece.stopped {
            self.stops.finish(&mut piece.text);
            piece.tokens.extend(self.held.drain(..).map(|(_, token)| token));
        }
        piece
    }

    /// Tokens taken, up to the one that completed a stop string.
    pub fn n_tokens(&self) -> u32 {
        self.n_tokens
    }

    /// Whether a stop string has ended it.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    fn pass(&mut self, raw: &str) -> Piece {
        self.raw.add(raw);
        let mut piece = Piece::default();
        self.stopped = self.stops.push(raw, &mut piece.text);
        piece.stopped = self.stopped;
        self.passed += piece.text.len();
        // A token without text of its own (half a character, a control token) goes with the text that follows it.
        while self.held.front().is_some_and(|(begins, _)| *begins < self.passed) {
            piece.tokens.extend(self.held.pop_front().map(|(_, token)| token));
        }
        if self.stopped {
            self.held.clear();
        }
        piece
    }
}

/// A seed from the operating system; below 2^53, so that every JSON reader keeps it.
pub fn fresh_seed() -> u64 {
    getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id())) >> 11
}
