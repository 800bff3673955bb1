//! What a choice has said, as the chat API writes it.

use serde_json::{Map, Value, json};

use crate::text::deepseek_v4::AnswerEvent;

/// What was said since it was last taken.
#[derive(Debug, Default)]
pub(super) struct Said {
    pub(super) content: String,
    reasoning: String,
    calls: Vec<CallPart>,
    /// Calls that have begun, and that have ended as they should.
    n_begun: usize,
    n_complete: usize,
}

/// More of a call.
#[derive(Debug)]
struct CallPart {
    index: usize,
    /// Where it begins here.
    name: Option<String>,
    arguments: String,
}

impl Said {
    pub(super) fn add(&mut self, event: AnswerEvent) {
        match event {
            AnswerEvent::Reasoning(text) => self.reasoning.push_str(&text),
            AnswerEvent::Content(text) => self.content.push_str(&text),
            AnswerEvent::ToolCallStart { index, name } => {
                self.n_begun += 1;
                self.calls.push(CallPart { index, name: Some(name), arguments: String::new() });
            }
            AnswerEvent::ToolCallArguments { index, delta } => match self.calls.last_mut() {
                Some(call) if call.index == index => call.arguments.push_str(&delta),
                _ => self.calls.push(CallPart { index, name: None, arguments: delta }),
            },
            AnswerEvent::ToolCallEnd { complete, .. } => self.n_complete += usize::from(complete),
        }
    }

    /// Whether there are calls, and all of them can be acted on.
    pub(super) fn is_calling(&self) -> bool {
        self.n_begun > 0 && self.n_begun == self.n_complete
    }

    pub(super) fn is_empty(&self) -> bool {
        self.content.is_empty() && self.reasoning.is_empty() && self.calls.is_empty()
    }

    /// What is new; the counts stay.
    pub(super) fn take(&mut self) -> Said {
        let (n_begun, n_complete) = (self.n_begun, self.n_complete);
        std::mem::replace(self, Said { n_begun, n_complete, ..Said::default() })
    }

    /// The message of a whole answer. `id` is the answer's, `choice` the place of this choice in it.
    pub(super) fn message(&self, id: &str, choice: usize) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content, "refusal": null});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = json!(self.reasoning);
        }
        if !self.calls.is_empty() {
            if self.content.is_empty() {
                message["content"] = Value::Null;
            }
            message["tool_calls"] = self.calls.iter().map(|call| call.body(id, choice, false)).collect();
        }
        message
    }

    /// The delta of a chunk.
    pub(super) fn delta(&self, id: &str, choice: usize) -> Value {
        let mut delta = Map::new();
        if !self.reasoning.is_empty() {
            delta.insert("reasoning_content".to_owned(), json!(self.reasoning));
        }
        if !self.content.is_empty() {
            delta.insert("content".to_owned(), json!(self.content));
        }
        if !self.calls.is_empty() {
            let calls = self.calls.iter().map(|call| call.body(id, choice, true)).collect();
            delta.insert("tool_calls".to_owned(), calls);
        }
        delta.into()
    }
}

impl CallPart {
    fn body(&self, id: &str, choice: usize, chunk: bool) -> Value {
        let mut body = Map::new();
        if chunk {
            body.insert("index".to_owned(), json!(self.index));
        }
        let mut function = Map::new();
        if let Some(name) = &self.name {
            let of_answer = id.rsplit('-').next().unwrap_or(id);
            body.insert("id".to_owned(), json!(format!("call_{of_answer}_{choice}_{}", self.index)));
            body.insert("type".to_owned(), json!("function"));
            function.insert("name".to_owned(), json!(name));
        }
        function.insert("arguments".to_owned(), json!(self.arguments));
        body.insert("function".to_owned(), function.into());
        body.into()
    }
}
