//! Conversations to prompts.

use std::{collections::HashMap, ops::Range};

use super::{
    json::{self, Member},
    message::{Effort, Function, Message, Options, Profile, Role, Task, Thinking},
    words::{
        ASSISTANT, BOS, CLOSE_CALLS, CLOSE_INVOKE, CLOSE_PARAMETER, EFFORT_ABSOLUTE, EFFORT_BEYOND, END_THINK, EOS,
        IS_JSON, IS_STRING, LATEST_REMINDER, OPEN_CALLS_WITH_GAP, OPEN_INVOKE, OPEN_PARAMETER, RESPONSE_FORMAT, THINK,
        TOOLS_AFTER, TOOLS_BEFORE, USER,
    },
};
use crate::text::tokenizer::Tokenizer;

/// Why a conversation has no prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A tool definition has no `function`, or is nested more deeply than any model reads.
    #[error("tool {index} is not an object with a `function` of moderate depth")]
    Tool {
        /// Its place in the list.
        index: usize,
    },
    /// The response schema is nested too deeply.
    #[error("the response format is nested too deeply")]
    ResponseFormat,
}

/// A prompt, in which it is known what the format wrote and what came from elsewhere.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    text: String,
    /// Byte ranges that hold no control tokens, whatever they spell.
    guarded: Vec<Range<usize>>,
}

impl Prompt {
    /// Its text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Its tokens. Only what the format itself wrote becomes control tokens: where a message, a tool or a call spells
    /// one, it stays text, which the release's program does not see to.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        tokenizer.encode_guarded(&self.text, &self.guarded)
    }

    fn own(&mut self, text: &str) {
        self.text.push_str(text);
    }

    fn foreign(&mut self, text: &str) {
        let start = self.text.len();
        self.text.push_str(text);
        if !text.is_empty() {
            self.guarded.push(start..self.text.len());
        }
    }
}

/// A turn: results of calls and what a user says next share one.
struct Turn<'a> {
    role: Role,
    /// The message; none in a user's turn.
    message: Option<&'a Message>,
    /// What a user's turn consists of.
    parts: Vec<Part<'a>>,
    task: Option<Task>,
}

enum Part<'a> {
    Text(&'a str),
    Result { id: &'a str, content: &'a str },
}

impl Turn<'_> {
    fn is_users(&self) -> bool {
        matches!(self.role, Role::User | Role::Developer)
    }
}

/// The prompt that continues `context` with `messages` up to where the assistant speaks; the context itself, which an
/// earlier prompt has written, is only looked at.
///
/// # Errors
/// [`EncodeError`], for tools and schemas that cannot be written.
pub fn render(messages: &[Message], context: &[Message], options: &Options) -> Result<Prompt, EncodeError> {
    let mut turns = merge(context);
    let n_context = turns.len();
    turns.extend(merge(messages));
    sort_results(&mut turns);
    let has_tools = context.iter().chain(messages).any(|message| !message.tools.is_empty());
    let drops = options.drop_thinking && !has_tools;
    let mut skip = n_context;
    if drops && options.thinking == Thinking::On {
        skip = kept(&turns[..n_context]).iter().filter(|keep| **keep).count();
        let mut keep = kept(&turns).into_iter();
        turns.retain(|_| keep.next().expect("one for each"));
    }

    let mut prompt = Prompt::default();
    if options.add_bos && context.is_empty() {
        prompt.own(BOS);
    }
    let writer = Writer { last_user: last_user(&turns), turns: &turns, drops, options };
    for at in skip..turns.len() {
        writer.turn(at, &mut prompt)?;
    }
    Ok(prompt)
}

/// Puts results of calls into users' turns.
fn merge(messages: &[Message]) -> Vec<Turn<'_>> {
    let mut turns: Vec<Turn<'_>> = Vec::new();
    for message in messages {
        let part = match message.role {
            Role::Tool => Part::Result { id: &message.tool_call_id, content: &message.content },
            Role::User => Part::Text(&message.content),
            role => {
                turns.push(Turn { role, message: Some(message), parts: Vec::new(), task: message.task });
                continue;
            }
        };
        let is_result = message.role == Role::Tool;
        match turns.last_mut() {
            // A task ends a turn, but results still go into it.
            Some(turn) if turn.role == Role::User && (is_result || turn.task.is_none()) => turn.parts.push(part),
            _ => {
                let task = if is_result { None } else { message.task };
                turns.push(Turn { role: Role::User, message: None, parts: vec![part], task });
            }
        }
    }
    turns
}

/// Brings the results of every turn into the order of the calls before it.
fn sort_results(turns: &mut [Turn<'_>]) {
    let mut order: HashMap<&str, usize> = HashMap::new();
    for turn in turns {
        if let Some(message) = turn.message.filter(|m| m.role == Role::Assistant && !m.tool_calls.is_empty()) {
            let ids = message.tool_calls.iter().map(|call| call.id.as_str()).enumerate();
            order = ids.filter(|(_, id)| !id.is_empty()).map(|(at, id)| (id, at)).collect();
        }
        let mut results: Vec<(usize, (&str, &str))> = Vec::new();
        for part in &turn.parts {
            if let Part::Result { id, content } = part {
                results.push((order.get(id).copied().unwrap_or(0), (id, content)));
            }
        }
        results.sort_by_key(|(at, _)| *at);
        let mut results = results.into_iter();
        for part in &mut turn.parts {
            if let Part::Result { id, content } = part {
                (*id, *content) = results.next().expect("one for each").1;
            }
        }
    }
}

fn last_user(turns: &[Turn<'_>]) -> Option<usize> {
    turns.iter().rposition(Turn::is_users)
}

/// Which turns are written where old reasoning is dropped: a developer's only from the last user's turn on.
fn kept(turns: &[Turn<'_>]) -> Vec<bool> {
    let last = last_user(turns);
    turns.iter().enumerate().map(|(at, turn)| turn.role != Role::Developer || Some(at) >= last).collect()
}

struct Writer<'a> {
    turns: &'a [Turn<'a>],
    last_user: Option<usize>,
    drops: bool,
    options: &'a Options,
}

impl Writer<'_> {
    fn turn(&self, at: usize, out: &mut Prompt) -> Result<(), EncodeError> {
        let turn = &self.turns[at];
        let thinks = self.options.thinking == Thinking::On;
        if at == 0 && thinks {
            out.own(effort(self.options.profile, self.options.effort));
        }
        match (turn.role, turn.message) {
            (Role::System, Some(message)) => instructions(message, out)?,
            (Role::Developer, Some(message)) => {
                out.own(USER);
                instructions(message, out)?;
            }
            (Role::LatestReminder, Some(message)) => {
                out.own(LATEST_REMINDER);
                out.foreign(&message.content);
            }
            (Role::Assistant, Some(message)) => {
                // The result of a quick task has no reasoning.
                let is_task = at > 0 && self.turns[at - 1].task.is_some();
                if thinks && !is_task && (!self.drops || Some(at) > self.last_user) {
                    out.foreign(&message.reasoning_content);
                    out.own(END_THINK);
                }
                out.foreign(&message.content);
                calls(message, out);
                if !message.wo_eos {
                    out.own(EOS);
                }
            }
            _ => user(turn, out),
        }

        let answered = self.turns.get(at + 1).is_none_or(|t| matches!(t.role, Role::Assistant | Role::LatestReminder));
        if !answered {
            return Ok(());
        }
        match turn.task {
            Some(Task::Action) => {
                out.own(ASSISTANT);
                out.own(if thinks { THINK } else { END_THINK });
                out.own(Task::Action.word());
            }
            Some(task) => out.own(task.word()),
            None if turn.is_users() => {
                out.own(ASSISTANT);
                out.own(if thinks && (!self.drops || Some(at) >= self.last_user) { THINK } else { END_THINK });
            }
            None => {}
        }
        Ok(())
    }
}

fn effort(profile: Profile, effort: Effort) -> &'static str {
    match (profile, effort) {
        (_, Effort::Low) | (Profile::Preview, Effort::High) => "",
        (Profile::Preview, Effort::Max) | (Profile::July, Effort::High) => EFFORT_ABSOLUTE,
        (Profile::July, Effort::Max) => EFFORT_BEYOND,
    }
}

/// Content, tools and response format of a system's or developer's message.
fn instructions(message: &Message, out: &mut Prompt) -> Result<(), EncodeError> {
    out.foreign(&message.content);
    if !message.tools.is_empty() {
        out.own("\n\n");
        out.own(TOOLS_BEFORE);
        for (index, tool) in message.tools.iter().enumerate() {
            out.own(if index > 0 { "\n" } else { "" });
            let members = json::members(tool.get()).ok_or(EncodeError::Tool { index })?;
            match members.into_iter().find(|(name, _)| name == "function") {
                Some((_, Member::Json(function))) if function.starts_with('{') => out.foreign(&function),
                _ => return Err(EncodeError::Tool { index }),
            }
        }
        out.own(TOOLS_AFTER);
    }
    if let Some(schema) = &message.response_format {
        out.own("\n\n");
        out.own(RESPONSE_FORMAT);
        out.foreign(&json::rewrite(schema.get()).ok_or(EncodeError::ResponseFormat)?);
    }
    Ok(())
}

fn user(turn: &Turn<'_>, out: &mut Prompt) {
    out.own(USER);
    for (at, part) in turn.parts.iter().enumerate() {
        out.own(if at > 0 { "\n\n" } else { "" });
        match part {
            Part::Text(text) => out.foreign(text),
            Part::Result { content, .. } => {
                out.own("<tool_result>");
                out.foreign(content);
                out.own("</tool_result>");
            }
        }
    }
}

fn calls(message: &Message, out: &mut Prompt) {
    if message.tool_calls.is_empty() {
        return;
    }
    out.own(OPEN_CALLS_WITH_GAP);
    out.own("\n");
    for call in &message.tool_calls {
        invoke(&call.function, out);
        out.own("\n");
    }
    out.own(CLOSE_CALLS);
}

fn invoke(function: &Function, out: &mut Prompt) {
    out.own(OPEN_INVOKE);
    out.foreign(&function.name);
    out.own("\">\n");
    let members = json::members(&function.arguments)
        .unwrap_or_else(|| vec![("arguments".to_owned(), Member::Text(function.arguments.clone()))]);
    for (at, (name, value)) in members.iter().enumerate() {
        out.own(if at > 0 { "\n" } else { "" });
        out.own(OPEN_PARAMETER);
        out.foreign(name);
        let (kind, value) = match value {
            Member::Text(text) => (IS_STRING, text),
            Member::Json(json) => (IS_JSON, json),
        };
        out.own(kind);
        out.foreign(value);
        out.own(CLOSE_PARAMETER);
    }
    out.own("\n");
    out.own(CLOSE_INVOKE);
}
