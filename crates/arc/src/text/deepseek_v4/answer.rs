//! What an answer consists of.

/// A part of an answer, as soon as it is certain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerEvent {
    /// More of the reasoning.
    Reasoning(String),
    /// More of what is said.
    Content(String),
    /// A call begins.
    ToolCallStart {
        /// Its place among the calls, from 0.
        index: usize,
        /// Name of the tool, as the model wrote it.
        name: String,
    },
    /// More of the JSON object of its arguments.
    ToolCallArguments {
        /// The call.
        index: usize,
        /// Text.
        delta: String,
    },
    /// A call ends.
    ToolCallEnd {
        /// The call.
        index: usize,
        /// Whether the model ended it: its arguments are then one JSON object. If not, they are the beginning of one,
        /// and nobody should act on them.
        complete: bool,
    },
}

/// A call of a whole answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Call {
    /// Name of the tool, as the model wrote it.
    pub name: String,
    /// JSON object, or the beginning of one.
    pub arguments: String,
    /// See [`AnswerEvent::ToolCallEnd`].
    pub complete: bool,
}

/// A whole answer: the sum of its events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParsedAnswer {
    /// What was thought.
    pub reasoning: String,
    /// What was said, before, between and after calls.
    pub content: String,
    /// What was called.
    pub calls: Vec<Call>,
}

impl ParsedAnswer {
    /// Adds what happened next.
    pub fn add(&mut self, event: AnswerEvent) {
        match event {
            AnswerEvent::Reasoning(text) => self.reasoning.push_str(&text),
            AnswerEvent::Content(text) => self.content.push_str(&text),
            AnswerEvent::ToolCallStart { name, .. } => self.calls.push(Call { name, ..Call::default() }),
            AnswerEvent::ToolCallArguments { index, delta } => self.calls[index].arguments.push_str(&delta),
            AnswerEvent::ToolCallEnd { index, complete } => self.calls[index].complete = complete,
        }
    }

    /// Whether there are calls, and all of them can be acted on.
    pub fn is_calling(&self) -> bool {
        !self.calls.is_empty() && self.calls.iter().all(|call| call.complete)
    }
}

/// Appends text to the last event where it goes on, else a new event; nothing for no text.
pub(super) fn push_text(out: &mut Vec<AnswerEvent>, event: AnswerEvent) {
    match (out.last_mut(), event) {
        (Some(AnswerEvent::Reasoning(so_far)), AnswerEvent::Reasoning(text))
        | (Some(AnswerEvent::Content(so_far)), AnswerEvent::Content(text)) => so_far.push_str(&text),
        (
            Some(AnswerEvent::ToolCallArguments { index: at, delta: so_far }),
            AnswerEvent::ToolCallArguments { index, delta },
        ) if *at == index => {
            so_far.push_str(&delta);
        }
        (_, event) => out.push(event),
    }
}
