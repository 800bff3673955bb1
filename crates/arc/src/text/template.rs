//! Chat templates: a conversation to the text, and the token ids, that a model was trained to continue.
//!
//! Templates are Jinja programs that come with model files, so they run as strangers: `minijinja` with fuel, a size
//! limit, and a thread whose stack is deep enough for any expression of that size, which is left behind when its time is
//! up: in `minijinja` 3.1 comparing values that hold themselves many times over, or adding lists to themselves, costs no
//! fuel. They see what Hugging Face's
//! `apply_chat_template` would show them; the difference is in [`ChatTemplate::encode`], where a control token that a
//! user merely typed stays text.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value};

use super::deep_stack::{DeepStackError, DeepStacks};
use super::marks::{Marker, unmark};
use super::python;
use super::tokenizer::Tokenizer;

/// Largest template source. Expressions can nest about once per four bytes, which bounds the stack they need.
pub const MAX_TEMPLATE_BYTES: usize = 64 << 10;

/// Threads that may still be at work past their time before a template is given up. A template that nests values on purpose
/// needs their deep stacks: [`fuel`] allows about 60,000 levels, which take about 1 kB each to print, compare or drop.
const MAX_STUCK: usize = 2;

/// Name under which the mark is in the context, which no template can spell.
pub(super) const MARK_KEY: &str = "the mark";

/// A conversation, as the client of the API gave it.
#[derive(Debug, Clone, Copy)]
pub struct ChatInput<'a> {
    /// Objects with a `role` and a `content` (a string, null, or a list of text parts) and whatever else the template
    /// reads: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`.
    pub messages: &'a [Value],
    /// Tool definitions, passed through.
    pub tools: Option<&'a Value>,
    /// Whether the text ends with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// More variables for the template, such as `enable_thinking`.
    pub variables: Option<&'a Map<String, Value>>,
}

/// Why a conversation has no text.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The model file has no template.
    #[error("this model has no chat template, so it only continues text: arc run --raw, or /v1/completions")]
    Missing,
    /// The source is larger than [`MAX_TEMPLATE_BYTES`].
    #[error("the chat template has {bytes} bytes, at most {max} are supported")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The source is not a template.
    #[error("the chat template does not compile: line {line}: {problem}")]
    Syntax {
        /// Line of the template.
        line: usize,
        /// What the engine said.
        problem: String,
    },
    /// A statement failed.
    #[error("the chat template fails at line {line}: {problem}")]
    Render {
        /// Line of the template.
        line: usize,
        /// What the engine said.
        problem: String,
    },
    /// The template works too long or makes too much text for the conversation given.
    #[error("the chat template does too much work at line {line}")]
    OutOfFuel {
        /// Line of the template.
        line: usize,
    },
    /// The template did not end in time. Its thread cannot be stopped: a program that can should end.
    #[error("the chat template does not end; this model's template is not safe to use")]
    Stuck,
    /// The template engine failed by a defect of its own.
    #[error("the chat template makes the template engine fail; this model's template is not safe to use")]
    Panicked,
    /// The template refuses the conversation, in its own words.
    #[error("the chat template refuses this conversation: {0}")]
    Refused(String),
    /// A message has not the form that [`ChatInput::messages`] describes.
    #[error("message {index} {problem}")]
    Message {
        /// Its place in the list.
        index: usize,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The text uses every private character, so none is left to mark control token look-alikes with.
    #[error("the conversation uses every private-use character of Unicode")]
    NoMark,
    /// The rendering thread did not start.
    #[error("no thread to render the chat template on: {0}")]
    Thread(#[from] io::Error),
}

impl From<DeepStackError> for TemplateError {
    fn from(error: DeepStackError) -> TemplateError {
        match error {
            DeepStackError::Late | DeepStackError::Full => TemplateError::Stuck,
            DeepStackError::Panicked => TemplateError::Panicked,
            DeepStackError::Thread(error) => TemplateError::Thread(error),
        }
    }
}

/// What `raise_exception` was called with.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// A compiled chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    source: Arc<str>,
    threads: DeepStacks,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// Compiles `source`. `bos` and `eos` are the texts of `bos_token` and `eos_token` in the template.
    ///
    /// # Errors
    /// [`TemplateError::TooLarge`], [`TemplateError::Syntax`], [`TemplateError::Thread`].
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self, TemplateError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(TemplateError::TooLarge { bytes: source.len(), max: MAX_TEMPLATE_BYTES });
        }
        let (owned, threads) = (source.to_owned(), DeepStacks::new("chat-template", MAX_STUCK));
        let environment = threads.run(deadline(source.len() as u64), move || {
            let mut environment = Environment::new();
            let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
            environment.set_syntax(syntax.expect("the default delimiters"));
            environment.set_undefined_behavior(UndefinedBehavior::Lenient);
            python::install(&mut environment);
            match environment.add_template_owned("chat", owned) {
                Ok(()) => Ok(environment),
                Err(error) => {
                    let (line, problem) = line_and_problem(&error);
                    Err(TemplateError::Syntax { line, problem })
                }
            }
        })??;
        Ok(Self {
            environment: Arc::new(environment),
            source: source.into(),
            threads,
            bos: bos.map(str::to_owned),
            eos: eos.map(str::to_owned),
        })
    }

    /// The template that came with a model's tokenizer.
    ///
    /// # Errors
    /// [`TemplateError::Missing`] and those of [`Self::new`].
    pub fn of(tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let text = |id: Option<u32>| id.map(|id| String::from_utf8_lossy(tokenizer.token_bytes(id)));
        let source = tokenizer.chat_template().ok_or(TemplateError::Missing)?;
        Self::new(source, text(tokenizer.bos()).as_deref(), text(tokenizer.eos()).as_deref())
    }

    /// The text of a conversation, for people to read; [`Self::encode`] is for models.
    ///
    /// # Errors
    /// [`TemplateError`]; all of them are the client's or the template's fault.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TemplateError> {
        self.run(context(input)?, None)
    }

    /// Token ids of a conversation: as if [`Self::render`] were encoded with its control tokens, except that what comes
    /// from `input` cannot become one.
    ///
    /// Where a message spells a control token, a private character is put inside it before rendering and taken out
    /// afterwards; no control token may span its place. Everything else, merges across borders of messages included,
    /// is as without. What an assistant said may hold tokens that structure its answer (`<think>`), but no control
    /// tokens proper. Adds no bos or eos: templates write their own.
    ///
    /// # Errors
    /// [`TemplateError`]; all of them are the client's or the template's fault.
    pub fn encode(&self, tokenizer: &Tokenizer, input: &ChatInput<'_>) -> Result<Vec<u32>, TemplateError> {
        let mut context = context(input)?;
        let mut marker = Marker::new(tokenizer, &context, &self.source).ok_or(TemplateError::NoMark)?;
        for (name, value) in &mut context {
            *value = match value {
                Value::Array(messages) if name == "messages" => {
                    messages.iter().map(|message| marker.mark(message, message["role"] != "assistant")).collect()
                }
                _ => marker.mark(value, true),
            };
        }
        let mark = marker.used();
        let text = self.run(context, mark)?;
        let Some(mark) = mark else { return Ok(tokenizer.encode_guarded(&text, &[])) };
        let (text, guarded) = unmark(&text, mark);
        Ok(tokenizer.encode_guarded(&text, &guarded))
    }

    fn run(&self, mut context: Map<String, Value>, mark: Option<char>) -> Result<String, TemplateError> {
        for (name, text) in [("bos_token", &self.bos), ("eos_token", &self.eos)] {
            if let Some(text) = text {
                context.insert(name.into(), text.as_str().into());
            }
        }
        if let Some(mark) = mark {
            context.insert(MARK_KEY.into(), mark.to_string().into());
        }
        let n_messages = context["messages"].as_array().map_or(0, Vec::len) as u64;
        let (bytes, mut environment) = (size_of(&context), (*self.environment).clone());
        environment.set_fuel(Some(fuel(n_messages, bytes)));
        self.threads.run(deadline(bytes), move || {
            // Values that a template builds are dropped here too, where the stack is deep enough for them.
            let template = environment.get_template("chat").expect("added by `new`");
            template.render(minijinja::value::Serde(&context)).map_err(|error| {
                let raised = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<Raised>());
                let (line, problem) = line_and_problem(&error);
                match (raised, error.kind()) {
                    (Some(Raised(words)), _) => TemplateError::Refused(words.replace(|c| Some(c) == mark, "")),
                    (None, ErrorKind::OutOfFuel) => TemplateError::OutOfFuel { line },
                    _ => TemplateError::Render { line, problem },
                }
            })
        })?
    }
}

/// The variables of a template, but for those that come from the tokenizer.
fn context(input: &ChatInput<'_>) -> Result<Map<String, Value>, TemplateError> {
    let mut context = input.variables.cloned().unwrap_or_default();
    context.entry("documents").or_insert(Value::Null);
    context.insert("messages".into(), messages(input)?.into());
    context.insert("tools".into(), input.tools.cloned().unwrap_or(Value::Null));
    context.insert("add_generation_prompt".into(), input.add_generation_prompt.into());
    Ok(context)
}

/// Work and memory a template may use: one unit is an instruction or 64 bytes. Grows with the conversation, so that a
/// long one never fails for its length: 64 passes over its bytes and 1,000 instructions a message.
fn fuel(n_messages: u64, bytes: u64) -> u64 {
    250_000 + 1_000 * n_messages + bytes
}

/// Time for `bytes` of input: far more than the fuel lasts for, on a machine that is busy with other things.
fn deadline(bytes: u64) -> Duration {
    Duration::from_secs(2) + Duration::from_micros(4 * bytes)
}

/// Bytes of text in a context, and one for each value.
fn size_of(context: &Map<String, Value>) -> u64 {
    fn size(value: &Value) -> u64 {
        match value {
            Value::String(text) => text.len() as u64,
            Value::Array(items) => items.iter().map(size).sum::<u64>() + 1,
            Value::Object(entries) => size_of(entries) + 1,
            _ => 1,
        }
    }
    context.iter().map(|(name, value)| name.len() as u64 + size(value) + 1).sum()
}

fn line_and_problem(error: &minijinja::Error) -> (usize, String) {
    let problem = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    (error.line().unwrap_or(0), problem)
}

/// The messages in the form that templates read: `content` a string, tool-call arguments objects.
fn messages(input: &ChatInput<'_>) -> Result<Vec<Value>, TemplateError> {
    let message = |(index, message): (usize, &Value)| {
        let bad = |problem| TemplateError::Message { index, problem };
        let mut message = message.clone();
        let fields = message.as_object_mut().ok_or_else(|| bad("is not an object"))?;
        if !fields.get("role").is_some_and(Value::is_string) {
            return Err(bad("has no role"));
        }
        let content = match fields.get("content") {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => {
                let text = |part: &Value| match part {
                    Value::String(text) => Some(text.clone()),
                    _ if part["type"] == "text" => part["text"].as_str().map(str::to_owned),
                    _ => None,
                };
                let texts: Option<Vec<String>> = parts.iter().map(text).collect();
                texts.ok_or_else(|| bad("has a part that is not text, which is all this model reads"))?.join("\n")
            }
            Some(_) => return Err(bad("has a content that is neither a string nor a list of parts")),
        };
        fields.insert("content".into(), content.into());
        for call in fields.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments")) else {
                continue;
            };
            if let Some(object @ Value::Object(_)) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok())
            {
                *arguments = object;
            }
        }
        Ok(message)
    };
    input.messages.iter().enumerate().map(message).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_value_has_its_time() {
        let Value::Object(context) = json!({"a": [{}, {}, [], 1, "xy"]}) else { unreachable!() };
        assert_eq!(size_of(&context), 1 + 1 + 1 + 4 + 2);
    }
}
