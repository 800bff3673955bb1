//! Requests of the API in the words of DeepSeek-V4's chat format.

use serde_json::Value;

use super::{ChatMessage, ChatPrompt, Conversation, PromptError, Role};
use crate::text::{
    Tokenizer,
    deepseek_v4::{self, AnswerFormat, Effort, Message, Options, Profile, Thinking},
};

/// Tokens of a conversation, and how its answer is to be read.
pub(super) fn encode(
    tokenizer: &Tokenizer,
    profile: Profile,
    conversation: &Conversation<'_>,
) -> Result<ChatPrompt, PromptError> {
    let options = options(profile, conversation)?;
    let mut messages: Vec<Message> = conversation.messages.iter().map(message).collect();
    if !conversation.tools.is_empty() || conversation.schema.is_some() {
        if messages.first().is_none_or(|m| m.role != deepseek_v4::Role::System) {
            messages.insert(0, Message::new(deepseek_v4::Role::System, ""));
        }
        messages[0].tools = conversation.tools.to_vec();
        messages[0].response_format = conversation.schema.map(ToOwned::to_owned);
    }
    // Tools that were called are still known, even if the client no longer lists them.
    let tools = messages.iter().any(|m| !m.tools.is_empty() || !m.tool_calls.is_empty());
    let prompt = deepseek_v4::render(&messages, &[], &options)?;
    Ok(ChatPrompt { ids: prompt.encode(tokenizer), answer: Some(AnswerFormat { thinking: options.thinking, tools }) })
}

fn message(m: &ChatMessage) -> Message {
    let role = match m.role {
        Role::System => deepseek_v4::Role::System,
        Role::User => deepseek_v4::Role::User,
        Role::Assistant => deepseek_v4::Role::Assistant,
        Role::Tool => deepseek_v4::Role::Tool,
    };
    Message {
        reasoning_content: m.reasoning.clone(),
        tool_calls: m.tool_calls.clone(),
        tool_call_id: m.tool_call_id.clone(),
        ..Message::new(role, m.content.as_str())
    }
}

/// `reasoning_effort` and the template variables that servers of this model know: `thinking`, or `enable_thinking`, and
/// `drop_thinking`. The model reasons where one of them asks for it. The preview has two efforts, of which any but the
/// highest is the lower; later releases have three, of which `medium` is the lowest, their default.
fn options(profile: Profile, conversation: &Conversation<'_>) -> Result<Options, PromptError> {
    let wrong = |name: &str, problem| PromptError::Option { name: name.to_owned(), problem };
    let mut options = Options { profile, ..Options::default() };
    let mut thinks = None;
    let mut effort = conversation.effort;
    for (name, value) in conversation.variables.into_iter().flatten() {
        let at = format!("chat_template_kwargs.{name}");
        match (name.as_str(), value) {
            ("thinking" | "enable_thinking", Value::Bool(on)) => {
                if thinks.is_some_and(|other| other != *on) {
                    return Err(wrong(&at, "contradicts its other name"));
                }
                thinks = Some(*on);
            }
            ("drop_thinking", Value::Bool(on)) => options.drop_thinking = *on,
            ("reasoning_effort", Value::String(word)) => {
                if effort.is_some_and(|other| other != word) {
                    return Err(wrong(&at, "contradicts the reasoning_effort of the request"));
                }
                effort = Some(word);
            }
            ("thinking" | "enable_thinking" | "drop_thinking", _) => return Err(wrong(&at, "must be true or false")),
            ("reasoning_effort", _) => return Err(wrong(&at, "must be a string")),
            _ => {
                let problem =
                    "is not known to this model; thinking, enable_thinking, drop_thinking and reasoning_effort are";
                return Err(wrong(&at.chars().take(100).collect::<String>(), problem));
            }
        }
    }
    let asked = match effort {
        None => None,
        Some("none") => Some(false),
        Some("minimal" | "low" | "medium") => {
            options.effort = Effort::Low;
            Some(true)
        }
        Some("high") => {
            options.effort = Effort::High;
            Some(true)
        }
        Some("xhigh" | "max") => {
            options.effort = Effort::Max;
            Some(true)
        }
        Some(_) => {
            let problem = "must be none, minimal, low, medium, high, xhigh or max";
            return Err(wrong("reasoning_effort", problem));
        }
    };
    if let (Some(thinks), Some(asked)) = (thinks, asked)
        && thinks != asked
    {
        return Err(wrong("reasoning_effort", "contradicts chat_template_kwargs.thinking"));
    }
    if thinks.or(asked) == Some(true) {
        options.thinking = Thinking::On;
    }
    Ok(options)
}
