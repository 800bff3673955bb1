//! The text side of a loaded model: prompts and conversations to tokens, tokens to text.

use std::sync::Arc;

use serde_json::{Map, Value, json, value::RawValue};

use crate::structured::Grammars;
use crate::text::{
    ChatInput, ChatTemplate, Control, Detokenizer, TemplateError, Tokenizer,
    deepseek_v4::{self, AnswerFormat, EncodeError, Profile, ToolCall},
};

mod v4;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
}

impl Role {
    /// As chat templates spell it.
    pub fn word(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
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
    /// What the assistant thought before.
    pub reasoning: String,
    /// What the assistant called.
    pub tool_calls: Vec<ToolCall>,
    /// The id of the call that a tool's message is the result of.
    pub tool_call_id: String,
}

impl ChatMessage {
    /// A message.
    pub fn new(role: Role, content: impl Into<String>) -> ChatMessage {
        ChatMessage {
            role,
            content: content.into(),
            reasoning: String::new(),
            tool_calls: Vec::new(),
            tool_call_id: String::new(),
        }
    }

    /// As templates and files have it.
    pub fn to_json(&self) -> Value {
        json!({"role": self.role.word(), "content": self.content})
    }
}

/// A conversation with all that a client can say about its answer.
#[derive(Debug, Clone, Copy, Default)]
pub struct Conversation<'a> {
    /// What was said.
    pub messages: &'a [ChatMessage],
    /// Tools that the model may call: objects with a `function`. Empty unless [`ModelText::takes_tools`].
    pub tools: &'a [Box<RawValue>],
    /// The schema of the answer. A format that has no words for it says nothing of it.
    pub schema: Option<&'a RawValue>,
    /// How much to reason, in the API's words. Absent unless [`ModelText::takes_tools`].
    pub effort: Option<&'a str>,
    /// More names for the template.
    pub variables: Option<&'a Map<String, Value>>,
}

/// Tokens of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatPrompt {
    /// Up to where the assistant speaks.
    pub ids: Vec<u32>,
    /// How the answer is to be read; none: all of it is content.
    pub answer: Option<AnswerFormat>,
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
    /// More messages than any prompt of this context has tokens.
    #[error("{messages} messages are more than a context of {context} tokens can hold; leave some out")]
    TooMany {
        /// Messages of the conversation.
        messages: usize,
        /// The context.
        context: u32,
    },
    /// The model has no template that works.
    #[error("{0}")]
    NoTemplate(String),
    /// The template did not take this conversation.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The model's own format did not take it.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// Something that the client asks for is not known to the model's format.
    #[error("{name} {problem}")]
    Option {
        /// Field of the request, as a path.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// How conversations become prompts.
#[derive(Debug, Clone)]
enum Format {
    /// As the model's own template says.
    Template(ChatTemplate),
    /// As DeepSeek-V4 wants it, in the words of a release.
    DeepSeekV4(Profile),
}

/// Tokenizer and chat template of one model.
#[derive(Debug, Clone)]
pub struct ModelText {
    tokenizer: Arc<Tokenizer>,
    /// Or why there is none: a model can still continue raw text.
    format: Result<Format, String>,
    grammars: Grammars,
    context: u32,
    token_bytes_max: usize,
}

impl ModelText {
    /// `context` bounds what is worth encoding. A template that is absent or broken is an error only once it is needed.
    pub fn new(tokenizer: Tokenizer, context: u32) -> ModelText {
        let n_vocab = u32::try_from(tokenizer.n_vocab()).unwrap_or(u32::MAX);
        let token_bytes_max = (0..n_vocab).map(|id| tokenizer.token_bytes(id).len()).max().unwrap_or(1).max(1);
        // Files of V4 may come with somebody's template; the format itself is exact.
        let format = if deepseek_v4::speaks(&tokenizer) {
            Ok(Format::DeepSeekV4(Profile::Preview))
        } else {
            ChatTemplate::of(&tokenizer).map(Format::Template).map_err(|e| e.to_string())
        };
        let tokenizer = Arc::new(tokenizer);
        ModelText { grammars: Grammars::new(tokenizer.clone()), tokenizer, format, context, token_bytes_max }
    }

    /// Asks DeepSeek-V4 for reasoning in the words of another release than the preview; other formats are as they are.
    pub fn with_profile(mut self, profile: Profile) -> ModelText {
        if let Ok(Format::DeepSeekV4(own)) = &mut self.format {
            *own = profile;
        }
        self
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Grammars over its tokens.
    pub fn grammars(&self) -> &Grammars {
        &self.grammars
    }

    /// Whether conversations can be encoded.
    pub fn has_template(&self) -> bool {
        self.format.is_ok()
    }

    /// Whether it is known how this model is told of tools and reasoning, and how its answers tell them from text.
    pub fn takes_tools(&self) -> bool {
        matches!(self.format, Ok(Format::DeepSeekV4(_)))
    }

    /// Tokens of a raw prompt: what the model wants in front of it, then the text, in which no control token is read.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        self.check_len(text.len())?;
        Ok(self.tokenizer.encode_prompt(text))
    }

    /// Tokens of a conversation up to where the assistant speaks, to be answered with content alone. `variables` are more
    /// names for the template.
    pub fn encode_chat(
        &self,
        messages: &[ChatMessage],
        variables: Option<&Map<String, Value>>,
    ) -> Result<Vec<u32>, PromptError> {
        let prompt = self.encode_conversation(&Conversation { messages, variables, ..Conversation::default() })?;
        Ok(prompt.ids)
    }

    /// Tokens of a conversation up to where the assistant speaks, and how to read what it says.
    pub fn encode_conversation(&self, conversation: &Conversation<'_>) -> Result<ChatPrompt, PromptError> {
        let format = self.format.as_ref().map_err(|e| PromptError::NoTemplate(e.clone()))?;
        let messages = conversation.messages.len();
        if messages > self.context as usize {
            return Err(PromptError::TooMany { messages, context: self.context });
        }
        let bytes = |m: &ChatMessage| {
            m.content.len() + m.tool_calls.iter().map(|call| call.function.arguments.len()).sum::<usize>()
        };
        self.check_len(conversation.messages.iter().map(bytes).sum())?;
        // What was thought before may have no place in the prompt.
        conversation.messages.iter().try_for_each(|m| self.check_len(m.reasoning.len()))?;
        self.check_len(conversation.tools.iter().map(|tool| tool.get().len()).sum())?;
        self.check_len(conversation.schema.map_or(0, |schema| schema.get().len()))?;
        match format {
            Format::Template(template) => {
                let messages: Vec<Value> = conversation.messages.iter().map(ChatMessage::to_json).collect();
                let variables = conversation.variables;
                let input = ChatInput { messages: &messages, tools: None, add_generation_prompt: true, variables };
                Ok(ChatPrompt { ids: template.encode(&self.tokenizer, &input)?, answer: None })
            }
            Format::DeepSeekV4(profile) => v4::encode(&self.tokenizer, *profile, conversation),
        }
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
    fn check_len(&self, bytes: usize) -> Result<(), PromptError> {
        // Normalisation can shorten a text, three bytes to one at most.
        let most = self.token_bytes_max.saturating_mul(3).saturating_mul(self.context as usize);
        if bytes > most { Err(PromptError::TooLong { bytes, context: self.context }) } else { Ok(()) }
    }
}
