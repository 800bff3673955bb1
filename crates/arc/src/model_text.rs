//! The text side of a loaded model: prompts and conversations to tokens, tokens to text.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::text::{ChatInput, ChatTemplate, Control, Detokenizer, TemplateError, Tokenizer};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// As chat templates spell it.
    pub fn word(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: String,
}

impl ChatMessage {
    /// A message.
    pub fn new(role: Role, content: impl Into<String>) -> ChatMessage {
        ChatMessage { role, content: content.into() }
    }

    /// As templates and files have it.
    pub fn to_json(&self) -> Value {
        json!({"role": self.role.word(), "content": self.content})
    }
}

/// Why text could not become a prompt. The caller's text or the model's template is at fault, never the engine.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// More text than any prompt of this context can hold.
    #[error("the text has {bytes} bytes, more than a context of {context} tokens can hold; shorten it")]
    TooLong {
        /// Bytes of the text.
        bytes: usize,
        /// The context.
        context: u32,
    },
    /// The model has no template that works.
    #[error("{0}")]
    NoTemplate(String),
    /// The template did not take this conversation.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// Tokenizer and chat template of one model.
#[derive(Debug, Clone)]
pub struct ModelText {
    tokenizer: Arc<Tokenizer>,
    /// Or why there is none: a model can still continue raw text.
    template: Result<ChatTemplate, String>,
    context: u32,
    token_bytes_max: usize,
}

impl ModelText {
    /// `context` bounds what is worth encoding. A template that is absent or broken is an error only once it is needed.
    pub fn new(tokenizer: Tokenizer, context: u32) -> ModelText {
        let n_vocab = u32::try_from(tokenizer.n_vocab()).unwrap_or(u32::MAX);
        let token_bytes_max = (0..n_vocab).map(|id| tokenizer.token_bytes(id).len()).max().unwrap_or(1).max(1);
        let template = ChatTemplate::of(&tokenizer).map_err(|e| e.to_string());
        ModelText { tokenizer: Arc::new(tokenizer), template, context, token_bytes_max }
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Whether conversations can be encoded.
    pub fn has_template(&self) -> bool {
        self.template.is_ok()
    }

    /// Tokens of a raw prompt: what the model wants in front of it, then the text, in which no control token is read.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        self.check_len(text)?;
        Ok(self.tokenizer.encode_prompt(text))
    }

    /// Tokens of a conversation up to where the assistant speaks. `variables` are more names for the template.
    pub fn encode_chat(
        &self,
        messages: &[ChatMessage],
        variables: Option<&Map<String, Value>>,
    ) -> Result<Vec<u32>, PromptError> {
        let template = self.template.as_ref().map_err(|e| PromptError::NoTemplate(e.clone()))?;
        for m in messages {
            self.check_len(&m.content)?;
        }
        let messages: Vec<Value> = messages.iter().map(ChatMessage::to_json).collect();
        let input = ChatInput { messages: &messages, tools: None, add_generation_prompt: true, variables };
        Ok(template.encode(&self.tokenizer, &input)?)
    }

    /// Text of tokens; control tokens leave no trace.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut detokenizer = Detokenizer::new(self.tokenizer.clone(), Control::Skip);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push(id, &mut text);
        }
        detokenizer.finish(&mut text);
        text
    }

    /// Refuses, before any work, text that could not fit if every token were the longest of the vocabulary.
    fn check_len(&self, text: &str) -> Result<(), PromptError> {
        // Normalisation can shorten a text, three bytes to one at most.
        let most = self.token_bytes_max.saturating_mul(3).saturating_mul(self.context as usize);
        if text.len() > most { Err(PromptError::TooLong { bytes: text.len(), context: self.context }) } else { Ok(()) }
    }
}
