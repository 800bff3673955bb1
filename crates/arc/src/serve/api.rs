//! Request bodies, as the API writes them.
//!
//! The types are our own: an unknown field is refused with the nearest known one, at every depth, where the ready-made
//! types of the field drop it silently. Fields that the API has and this server has not are listed too, so that asking for
//! them is refused by name; asking for nothing (null, an empty list) is not.

use std::{collections::BTreeMap, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, MapAccess, Visitor, value::MapAccessDeserializer},
};
use serde_json::{Value, value::RawValue};

use super::error::ApiError;
use crate::{
    config::suggestion,
    text::deepseek_v4::{Function, ToolCall},
};

/// The fields that both kinds of request have, handed to another macro with whatever it is called with.
macro_rules! with_shared_fields {
    ($callback:ident! $args:tt) => {
        $callback! {
            {
                /// Name of the model; absent: the one that is served.
                model: String,
                /// Choices for each prompt.
                n: u32,
                /// Most output tokens; 0 scores the prompt.
                max_tokens: u32,
                /// 0 is greedy.
                temperature: f32,
                /// Nucleus.
                top_p: f32,
                /// Keep the k most likely; -1 and 0: absent.
                top_k: i64,
                /// Keep what is at least this likely, relative to the most likely.
                min_p: f32,
                /// Penalty on tokens that the output holds.
                presence_penalty: f32,
                /// Penalty on tokens for each time that the output holds them.
                frequency_penalty: f32,
                /// Penalty on tokens of prompt and output, as a factor.
                repetition_penalty: f32,
                /// No end before so many tokens.
                min_tokens: u32,
                /// DRY: strength; 0 is absent.
                dry_multiplier: f32,
                /// DRY: growth for each repeated token.
                dry_base: f32,
                /// DRY: repetitions shorter than this are free.
                dry_allowed_length: u32,
                /// DRY: tokens looked back at; -1: all.
                dry_penalty_last_n: i64,
                /// DRY: texts whose tokens no repetition reaches across.
                dry_sequence_breakers: Vec<String>,
                /// Token id to bias.
                logit_bias: BTreeMap<String, f32>,
                /// Key of the generator; absent: one from the operating system, which the answer names.
                seed: i64,
                /// A string or a list of strings that end the answer.
                stop: Value,
                /// Token ids that end the answer, beside the model's own.
                stop_token_ids: Vec<u32>,
                /// Go on past the model's own end.
                ignore_eos: bool,
                /// Send the answer as it comes.
                stream: bool,
                /// How.
                stream_options: Object<StreamOptions>,
                /// Kept nowhere.
                user: String,
                /// Kept nowhere.
                metadata: BTreeMap<String, String>,
                /// Only `false`.
                store: bool,
                /// Any; there is one tier.
                service_tier: String,
            }
            $args
        }
    };
}

macro_rules! shared_struct {
    ({ $($(#[doc = $doc:literal])+ $field:ident: $type:ty,)+ } {}) => {
        /// What both kinds of request can say.
        #[derive(Debug, Clone, Default)]
        pub struct Shared { $($(#[doc = $doc])+ pub $field: Option<$type>,)+ }
    };
}

macro_rules! request_struct {
    ({ $($(#[doc = $sdoc:literal])+ $shared:ident: $stype:ty,)+ }
     { $(#[doc = $doc:literal])+ $name:ident { $($(#[doc = $fdoc:literal])+ $field:ident: $type:ty,)+ } }) => {
        $(#[doc = $doc])+
        #[derive(Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[doc = $fdoc])+ pub $field: Option<$type>,)+
            $($(#[doc = $sdoc])+ pub $shared: Option<$stype>,)+
        }

        impl $name {
            /// Takes out what both kinds share.
            pub fn shared(&mut self) -> Shared {
                Shared { $($shared: self.$shared.take(),)+ }
            }
        }
    };
}

with_shared_fields!(shared_struct! {});

with_shared_fields!(request_struct! {
    /// Body of `/v1/chat/completions`.
    ChatRequest {
        /// The conversation.
        messages: Vec<Object<Message>>,
        /// Most output tokens; the same as `max_tokens`.
        max_completion_tokens: u32,
        /// Report logprobs.
        logprobs: bool,
        /// With so many alternatives.
        top_logprobs: u32,
        /// What the answer is: text, or JSON of a schema.
        response_format: Object<ResponseFormat>,
        /// What the model may call, where its chat format is known.
        tools: Vec<Box<RawValue>>,
        /// Whether the model calls tools: `"none"`, `"auto"`, `"required"`, or the one that it calls.
        tool_choice: Value,
        /// Whether there may be several calls in an answer.
        parallel_tool_calls: bool,
        /// Not supported.
        functions: Value,
        /// Not supported.
        function_call: Value,
        /// Only `["text"]`.
        modalities: Vec<String>,
        /// Not supported.
        audio: Value,
        /// Not supported.
        prediction: Value,
        /// How much to reason, where the model's chat format is known.
        reasoning_effort: String,
        /// Not supported.
        verbosity: Value,
        /// Not supported.
        web_search_options: Value,
        /// More variables for the model's chat template.
        chat_template_kwargs: serde_json::Map<String, Value>,
    }
});

with_shared_fields!(request_struct! {
    /// Body of `/v1/completions`.
    CompletionRequest {
        /// Text, a list of texts, token ids, or a list of lists of token ids.
        prompt: Value,
        /// Begin the answer with the prompt.
        echo: bool,
        /// Report logprobs with so many alternatives.
        logprobs: u32,
        /// As many as `n` at most, which makes it `n`.
        best_of: u32,
        /// Not supported.
        suffix: Value,
    }
});

/// What only an object gives: serde takes a list for a struct too, field by field in the order of its declaration.
#[derive(Debug, Clone, Copy)]
pub struct Object<T>(
    /// What the object says.
    pub T,
);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Object<T>, D::Error> {
        struct Fields<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields)).map(Object)
            }
        }
        deserializer.deserialize_map(Fields(PhantomData))
    }
}

/// `response_format`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResponseFormat {
    /// `text`, `json_object` or `json_schema`.
    pub r#type: String,
    /// Of the last of these.
    pub json_schema: Option<Object<JsonSchema>>,
}

/// `response_format.json_schema`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JsonSchema {
    /// Says nothing to this server.
    pub name: Option<String>,
    /// Says nothing to this server.
    pub description: Option<String>,
    /// Every answer follows its schema, strict or not.
    pub strict: Option<bool>,
    /// The schema.
    pub schema: Option<Box<RawValue>>,
}

/// `stream_options`.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    /// Send a last chunk with the usage.
    pub include_usage: Option<bool>,
    /// Accepted; no padding is sent.
    pub include_obfuscation: Option<bool>,
}

/// A message of a conversation.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Who speaks.
    pub role: String,
    /// Text, or a list of text parts.
    pub content: Option<Value>,
    /// Kept nowhere.
    pub name: Option<String>,
    /// What a client echoes from an answer, where the model's chat format is known.
    pub reasoning_content: Option<String>,
    /// What a client echoes from an answer, where the model's chat format is known.
    pub tool_calls: Option<Value>,
    /// Of a tool's result: the id of the call.
    pub tool_call_id: Option<String>,
    /// Not supported.
    pub function_call: Option<Value>,
    /// Not supported.
    pub audio: Option<Value>,
    /// What a client echoes from an answer; not supported where it says something.
    pub refusal: Option<Value>,
    /// What a client echoes from an answer; not supported where it says something.
    pub annotations: Option<Value>,
}

/// A call in a message. Streams have its index; in a list its place counts.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolCallParam {
    id: Option<String>,
    r#type: Option<String>,
    #[serde(rename = "index")]
    _index: Option<u32>,
    function: Object<FunctionParam>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FunctionParam {
    name: String,
    arguments: String,
}

/// A part of a message's content.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ContentPart {
    #[serde(rename = "type")]
    _type: String,
    text: Option<String>,
}

/// Reads a body. Errors: 400, naming the field where there is one and the nearest known one where it is unknown.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let Object(value) = serde_path_to_error::deserialize(&mut json).map_err(|e| {
        let path = e.path().to_string();
        describe(&path, e.inner())
    })?;
    json.end().map_err(|e| ApiError::bad(format!("the body is not one JSON value: {e}")))?;
    Ok(value)
}

fn describe(path: &str, error: &serde_json::Error) -> ApiError {
    let text = error.to_string();
    if !error.is_data() {
        return ApiError::bad(format!("the body is not valid JSON: {text}"));
    }
    // serde says: unknown field `x`, expected one of `a`, `b` at line 1 column 2
    if let Some(rest) = text.strip_prefix("unknown field `") {
        let (name, rest) = rest.split_once("`, expected").unwrap_or((rest, ""));
        let known: Vec<&str> = rest.split('`').skip(1).step_by(2).collect();
        let name: String = name.chars().take(100).collect();
        let hint = suggestion(&name, known.iter().copied());
        return ApiError::field(at(path), format!("unknown field {name:?}{hint}"));
    }
    let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
    let what: String = what.chars().take(300).collect();
    if path == "." { ApiError::bad(what) } else { ApiError::field(at(path), format!("{path}: {what}")) }
}

/// `messages[0].role`, without serde's mark for a place that it could not name.
fn at(path: &str) -> String {
    path.chars().take(200).collect()
}

/// Whether a field asks for nothing: absent, null, or an empty list, object or string.
pub fn says_nothing(value: &Option<Value>) -> bool {
    match value {
        None | Some(Value::Null) => true,
        Some(Value::Array(list)) => list.is_empty(),
        Some(Value::Object(map)) => map.is_empty(),
        Some(Value::String(text)) => text.is_empty(),
        Some(_) => false,
    }
}

/// Text of a message's content: a string, or the texts of its parts joined. `param` is its path.
pub fn content_text(content: Value, param: &str) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text),
        Value::Array(parts) => {
            let mut joined = String::new();
            for (i, part) in parts.into_iter().enumerate() {
                let at = format!("{param}[{i}]");
                // What else another kind has is not known here.
                if let Some(other) = part.get("type").and_then(Value::as_str).filter(|&kind| kind != "text") {
                    let other: String = other.chars().take(50).collect();
                    let message = format!("content of type {other:?} is not supported; text is");
                    return Err(ApiError::field(at, message));
                }
                let Object(part): Object<ContentPart> =
                    serde_path_to_error::deserialize(part).map_err(|e| describe(&at, e.inner()))?;
                let text = part.text.ok_or_else(|| ApiError::field(at, "a text part needs a text"))?;
                joined.push_str(&text);
            }
            Ok(joined)
        }
        _ => Err(ApiError::field(param, format!("{param} must be a string or a list of text parts"))),
    }
}

/// The calls of a message. `param` is their path.
pub fn tool_calls(calls: Value, param: &str) -> Result<Vec<ToolCall>, ApiError> {
    let Value::Array(calls) = calls else {
        return Err(ApiError::field(param, format!("{param} must be a list")));
    };
    let call = |(i, call): (usize, Value)| {
        let at = format!("{param}[{i}]");
        let Object(call): Object<ToolCallParam> =
            serde_path_to_error::deserialize(call).map_err(|e| describe(&at, e.inner()))?;
        if call.r#type.is_some_and(|kind| kind != "function") {
            return Err(ApiError::field(&at, format!("the type of {at} must be \"function\"")));
        }
        let Object(function) = call.function;
        let function = Function { name: function.name, arguments: function.arguments };
        Ok(ToolCall { id: call.id.unwrap_or_default(), function })
    };
    calls.into_iter().enumerate().map(call).collect()
}

/// `stop`: null, a string, or a list of strings.
pub fn stop_strings(stop: Option<Value>) -> Result<Vec<String>, ApiError> {
    match stop {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(one)) => Ok(vec![one]),
        Some(Value::Array(list)) => list
            .into_iter()
            .map(|s| match s {
                Value::String(s) => Ok(s),
                _ => Err(ApiError::field("stop", "stop must be a string or a list of strings")),
            })
            .collect(),
        Some(_) => Err(ApiError::field("stop", "stop must be a string or a list of strings")),
    }
}

/// A prompt of `/v1/completions`.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// Text, still to be encoded.
    Text(String),
    /// Token ids, taken as they are.
    Tokens(Vec<u32>),
}

/// `prompt`: a text, texts, token ids, or lists of token ids.
pub fn prompts(prompt: Value) -> Result<Vec<Prompt>, ApiError> {
    let wrong = || {
        ApiError::field(
            "prompt",
            "prompt must be a string, a list of strings, token ids, or a list of lists of token ids",
        )
    };
    let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or_else(wrong);
    match prompt {
        Value::String(text) => Ok(vec![Prompt::Text(text)]),
        Value::Array(list) => match list.first() {
            None => Err(ApiError::field("prompt", "prompt is an empty list; send at least one")),
            Some(Value::Number(_)) => Ok(vec![Prompt::Tokens(list.iter().map(id).collect::<Result<_, _>>()?)]),
            Some(_) => list
                .into_iter()
                .map(|p| match p {
                    Value::String(text) => Ok(Prompt::Text(text)),
                    Value::Array(ids) => Ok(Prompt::Tokens(ids.iter().map(id).collect::<Result<_, _>>()?)),
                    _ => Err(wrong()),
                })
                .collect(),
        },
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(body: &str) -> (Option<String>, String) {
        let e = parse::<ChatRequest>(body.as_bytes()).expect_err("must be refused");
        assert_eq!(e.status, 400);
        (e.param, e.message)
    }

    #[test]
    fn unknown_fields_are_named_at_every_depth() {
        let (param, message) = refused(r#"{"messages": [], "temprature": 1}"#);
        assert_eq!(param.as_deref(), Some("temprature"));
        assert!(message.contains("did you mean `temperature`?"), "{message}");
        let (param, message) = refused(r#"{"messages": [{"role": "user", "contnet": "x"}]}"#);
        assert_eq!(param.as_deref(), Some("messages[0].contnet"));
        assert!(message.contains("did you mean `content`?"), "{message}");
        let (param, message) = refused(r#"{"stream_options": {"usage": true}}"#);
        assert_eq!(param.as_deref(), Some("stream_options.usage"));
        assert!(message.contains("include_usage"), "{message}");
    }

    #[test]
    fn wrong_types_and_broken_json_say_where() {
        assert_eq!(refused(r#"{"temperature": "hot"}"#).0.as_deref(), Some("temperature"));
        assert_eq!(refused(r#"{"max_tokens": -1}"#).0.as_deref(), Some("max_tokens"));
        assert_eq!(refused(r#"{"max_tokens": 1.5}"#).0.as_deref(), Some("max_tokens"));
        assert_eq!(refused(r#"{"logit_bias": {"1": "x"}}"#).0.as_deref(), Some("logit_bias.1"));
        assert!(refused(r#"{"n": 1, "n": 2}"#).1.contains("duplicate field"));
        for (given, param, what) in [
            (r#"["m", [{"role": "user", "content": "x"}]]"#, None, "sequence"),
            ("\"x\"", None, "string"),
            (r#"{"messages": [["user", "x"]]}"#, Some("messages[0]"), "sequence"),
            (r#"{"stream_options": [true]}"#, Some("stream_options"), "sequence"),
        ] {
            let (at, message) = refused(given);
            assert_eq!(at.as_deref(), param, "{given}");
            assert!(message.contains(what) && message.ends_with("expected a JSON object"), "{message}");
        }
        let calls = |json: &str| tool_calls(serde_json::from_str(json).expect("the case is JSON"), "calls");
        assert!(calls(r#"[{"function": {"name": "f", "arguments": "{}"}}]"#).is_ok());
        for list in [r#"[["id", "function", 0, ["f", "{}"]]]"#, r#"[{"function": ["f", "{}"]}]"#] {
            assert!(calls(list).expect_err("a list").message.contains("a JSON object"), "{list}");
        }
        let parts = |json: &str| content_text(serde_json::from_str(json).expect("the case is JSON"), "content");
        assert_eq!(parts(r#"[{"type": "text", "text": "x"}]"#), Ok("x".to_owned()));
        assert!(parts(r#"[["text", "x"]]"#).expect_err("a list").message.contains("a JSON object"));
        for broken in ["", "{", "[]", "null", "{\"temperature\": NaN}", "{} {}", "\u{1}"] {
            let (_, message) = refused(broken);
            assert!(!message.is_empty(), "{broken}");
        }
        let deep = format!("{{\"prompt\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(parse::<CompletionRequest>(deep.as_bytes()).is_err());
    }

    #[test]
    fn prompts_come_in_four_shapes() {
        let parse = |text: &str| prompts(serde_json::from_str(text).expect("the case is JSON"));
        assert_eq!(parse(r#""a""#), Ok(vec![Prompt::Text("a".into())]));
        assert_eq!(parse(r#"["a", "b"]"#), Ok(vec![Prompt::Text("a".into()), Prompt::Text("b".into())]));
        assert_eq!(parse("[1, 2]"), Ok(vec![Prompt::Tokens(vec![1, 2])]));
        assert_eq!(parse("[[1], [2, 3]]"), Ok(vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]));
        for wrong in ["[]", "1", "null", "[1, \"a\"]", "[-1]", "[1.5]", "[4294967296]", "[[[1]]]", "[[\"a\"]]"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
