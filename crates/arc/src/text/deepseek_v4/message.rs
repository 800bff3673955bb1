//! What a conversation consists of.

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Instructions, at the beginning.
    System,
    /// Instructions in a user's place. In thinking without tools, those before the last turn are left out.
    Developer,
    /// The person.
    User,
    /// What is true now, such as today's date.
    LatestReminder,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
}

/// A quick task, which a token of its own asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Whether to search.
    Action,
    /// What to search for.
    Query,
    /// Which authority of source is needed.
    Authority,
    /// Which domain it belongs to.
    Domain,
    /// Whether to read an address.
    ReadUrl,
    /// The title of the conversation.
    Title,
}

impl Task {
    /// All of them.
    pub const ALL: [Task; 6] = [Task::Action, Task::Query, Task::Authority, Task::Domain, Task::ReadUrl, Task::Title];

    /// Its token.
    pub fn word(self) -> &'static str {
        match self {
            Task::Action => "<｜action｜>",
            Task::Query => "<｜query｜>",
            Task::Authority => "<｜authority｜>",
            Task::Domain => "<｜domain｜>",
            Task::ReadUrl => "<｜read_url｜>",
            Task::Title => "<｜title｜>",
        }
    }
}

/// A message. JSON fields as in the release's tests; fields that it does not have are ignored.
#[derive(Debug, Clone, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; null is empty.
    #[serde(default, deserialize_with = "or_empty")]
    pub content: String,
    /// Assistant: what was thought before.
    #[serde(default, deserialize_with = "or_empty")]
    pub reasoning_content: String,
    /// System and developer: tool definitions, objects with a `function`.
    #[serde(default)]
    pub tools: Vec<Box<RawValue>>,
    /// System and developer: the JSON schema that the answer must have.
    #[serde(default)]
    pub response_format: Option<Box<RawValue>>,
    /// Assistant: what was called.
    #[serde(default)]
    pub tool_calls: Vec<ToolCall>,
    /// Tool: the id of the call that this is the result of.
    #[serde(default)]
    pub tool_call_id: String,
    /// A quick task that follows this message.
    #[serde(default)]
    pub task: Option<Task>,
    /// Assistant: the answer goes on, so that no end is written.
    #[serde(default)]
    pub wo_eos: bool,
}

impl Message {
    /// A message that says `content` and nothing else.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message {
            role,
            content: content.into(),
            reasoning_content: String::new(),
            tools: Vec::new(),
            response_format: None,
            tool_calls: Vec::new(),
            tool_call_id: String::new(),
            task: None,
            wo_eos: false,
        }
    }
}

/// A call that the assistant made.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ToolCall {
    /// By which its result names it.
    #[serde(default)]
    pub id: String,
    /// What was called.
    pub function: Function,
}

/// Name and arguments of a call.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Function {
    /// Name of the tool.
    pub name: String,
    /// Text of a JSON object; any other text becomes one parameter named `arguments`.
    pub arguments: String,
}

/// Whether the model reasons first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Thinking {
    /// It answers at once; the release calls it `chat`.
    #[default]
    #[serde(rename = "chat")]
    Off,
    /// It reasons, then answers; `thinking`.
    #[serde(rename = "thinking")]
    On,
}

/// How long to reason, where it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effort {
    /// Nothing is asked for.
    #[default]
    Low,
    /// Nothing is asked for in [`Profile::Preview`], much in [`Profile::July`].
    High,
    /// As much as there is.
    Max,
}

/// Which release's words ask for [`Effort`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Profile {
    /// V4-Flash and V4-Pro of April 2026.
    #[default]
    Preview,
    /// V4-Flash-0731 and later.
    July,
}

/// How to write a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Whether the answer begins with reasoning.
    pub thinking: Thinking,
    /// Whether reasoning before the last user's turn is left out. With tools it never is.
    pub drop_thinking: bool,
    /// How much reasoning to ask for.
    pub effort: Effort,
    /// In which words.
    pub profile: Profile,
    /// Whether a prompt without context begins with [`super::BOS`].
    pub add_bos: bool,
}

impl Default for Options {
    /// No thinking, old reasoning dropped, the preview's words, BOS.
    fn default() -> Options {
        Options {
            thinking: Thinking::Off,
            drop_thinking: true,
            effort: Effort::Low,
            profile: Profile::Preview,
            add_bos: true,
        }
    }
}

fn or_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
