//! A request body turned into what the engine runs: one sequence for each prompt and choice.

use arc_device::ops::sample::{DryConfig, SamplerConfig};
use arc_engine::request::Request;
use serde::Deserialize;
use serde_json::{Map, Value, value::RawValue};

use super::{
    App,
    api::{
        self, ChatRequest, CompletionRequest, Message, Object, Prompt, ResponseFormat, Shared, StreamOptions,
        says_nothing,
    },
    error::ApiError,
};
use crate::{
    answer::fresh_seed,
    model_text::{ChatMessage, Conversation, PromptError, Role},
    structured::{Grammar, Grammars, SchemaError},
    text::{
        Special, StopMatcher,
        deepseek_v4::{AnswerFormat, Arguments, Calls, EncodeError, Tool},
    },
};

/// Which API the answer is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

/// Everything that is known before the first token.
#[derive(Debug)]
pub struct Job {
    /// Which API.
    pub kind: Kind,
    /// One sequence each, in the order of their index.
    pub choices: Vec<Choice>,
    /// Prompts; choice `i` belongs to prompt `i / (choices / n_prompts)`.
    pub n_prompts: usize,
    /// Strings that end an answer.
    pub stops: Vec<String>,
    /// Ids whose text is not part of an answer; empty where they do not end it.
    pub stop_ids: Vec<u32>,
    /// Key of the generator, chosen or asked for.
    pub seed: u64,
    /// Send the answer as it comes.
    pub stream: bool,
    /// How.
    pub stream_options: StreamOptions,
    /// Report logprobs.
    pub logprobs: bool,
    /// How to tell reasoning and calls from content; none: all is content.
    pub answer: Option<AnswerFormat>,
    /// The field that its grammar is of, if it has one.
    pub described_by: &'static str,
}

/// One sequence of a job.
#[derive(Debug)]
pub struct Choice {
    /// What the engine gets.
    pub request: Request,
    /// The prompt as the answer's beginning, where it was asked for.
    pub echo: Option<String>,
}

/// Reads and checks a chat request.
pub fn chat(app: &App, body: &[u8]) -> Result<Job, ApiError> {
    let mut request: ChatRequest = api::parse(body)?;
    let mut shared = request.shared();
    for (param, value) in [
        ("functions", &request.functions),
        ("function_call", &request.function_call),
        ("audio", &request.audio),
        ("prediction", &request.prediction),
        ("verbosity", &request.verbosity),
        ("web_search_options", &request.web_search_options),
    ] {
        if !says_nothing(value) {
            return Err(ApiError::unsupported(param));
        }
    }
    let takes_tools = app.text.takes_tools();
    let mut tools = request.tools.unwrap_or_default();
    for (param, asked) in [("tools", !tools.is_empty()), ("reasoning_effort", request.reasoning_effort.is_some())] {
        if asked && !takes_tools {
            return Err(ApiError::unsupported(param));
        }
    }
    let choice = tool_choice(request.tool_choice)?;
    if choice == ToolChoice::None {
        tools.clear();
    }
    let parallel = request.parallel_tool_calls.unwrap_or(true);
    let form = Form::new(&choice, &tools, parallel, request.response_format)?;
    if request.modalities.as_ref().is_some_and(|m| m.iter().any(|m| m != "text")) {
        return Err(ApiError::unsupported("modalities"));
    }
    for (param, asked) in
        [("ignore_eos", shared.ignore_eos == Some(true)), ("min_tokens", shared.min_tokens.is_some_and(|n| n > 0))]
    {
        if let (Some(form), true) = (&form, asked) {
            let message = format!("what {} describes ends where it ends: leave {param} out", form.asked_by());
            return Err(ApiError::field(param, message));
        }
    }
    match (shared.max_tokens, request.max_completion_tokens) {
        (Some(a), Some(b)) if a != b => {
            let message =
                format!("max_completion_tokens is {b}, but max_tokens, its older name, is {a}; send one of them");
            return Err(ApiError::field("max_completion_tokens", message));
        }
        (a, b) => shared.max_tokens = b.or(a),
    }
    let logprobs = match (request.logprobs.unwrap_or(false), request.top_logprobs) {
        (true, Some(n)) if n > 20 => {
            return Err(ApiError::field("top_logprobs", format!("top_logprobs is {n}, must be from 0 to 20")));
        }
        (true, n) => Some(n.unwrap_or(0)),
        (false, None | Some(0)) => None,
        (false, Some(_)) => return Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs to be true")),
    };
    let messages = request.messages.ok_or_else(|| ApiError::field("messages", "messages is missing"))?;
    if messages.is_empty() {
        return Err(ApiError::field("messages", "messages is empty; send at least one"));
    }
    let messages = messages
        .into_iter()
        .enumerate()
        .map(|(i, Object(m))| chat_message(i, m, takes_tools))
        .collect::<Result<Vec<_>, _>>()?;
    if tools.is_empty() && choice == ToolChoice::Auto && !parallel && messages.iter().any(|m| !m.tool_calls.is_empty())
    {
        let message = "a conversation with calls may have more of them, and which is not known: send tools, or leave \
                       parallel_tool_calls out";
        return Err(ApiError::field("parallel_tool_calls", message));
    }
    let common = Common::new(app, shared, logprobs)?;
    let conversation = Conversation {
        messages: &messages,
        tools: &tools,
        effort: request.reasoning_effort.as_deref(),
        schema: form.as_ref().and_then(Form::told),
        variables: request.chat_template_kwargs.as_ref(),
    };
    let prompt = app.text.encode_conversation(&conversation).map_err(|e| match &e {
        PromptError::Option { name, .. } => ApiError::field(name.clone(), e.to_string()),
        PromptError::Encode(EncodeError::Tool { index }) => ApiError::field(format!("tools[{index}]"), e.to_string()),
        _ => ApiError::field("messages", e.to_string()),
    })?;
    // Who wants no calls gets text, also where there were some before.
    let answer = prompt.answer.map(|a| AnswerFormat { tools: a.tools && choice != ToolChoice::None, ..a });
    let mut job = common.job(app, Kind::Chat, vec![(prompt.ids, None)], None)?;
    if let Some(form) = form {
        let param = form.param();
        job.described_by = param;
        let grammar = form.grammar(app.text.grammars(), app.backend.limits().vocab).map_err(|error| match error {
            SchemaError::Failed(_) => ApiError::failed(error.to_string()),
            SchemaError::Busy => ApiError::overloaded(1),
            _ => ApiError::field(param, format!("{param}: {error}")),
        })?;
        for choice in &mut job.choices {
            choice.request.grammar = Some(grammar.mask(answer.and_then(|answer| answer.behind(app.text.tokenizer()))));
        }
    }
    Ok(Job { answer, ..job })
}

/// What an answer follows, where it is more than what the model likes.
pub(super) enum Form {
    /// JSON of any object.
    Object,
    /// JSON of a schema.
    Json(Box<RawValue>),
    /// Calls, or text with calls.
    Calls(Calls),
}

impl Form {
    /// As a request has it; `None` is text. `parallel`: there may be several calls.
    pub(super) fn new(
        choice: &ToolChoice,
        tools: &[Box<RawValue>],
        parallel: bool,
        format: Option<Object<ResponseFormat>>,
    ) -> Result<Option<Form>, ApiError> {
        let calls = calls(choice, tools, parallel)?;
        match format.map(|Object(format)| schema(format)).transpose()?.flatten() {
            Some(_) if !tools.is_empty() => {
                let message = "an answer is JSON of response_format or may call tools: leave one of them out";
                Err(ApiError::field("response_format", message))
            }
            Some(form) => Ok(Some(form)),
            None => Ok(calls.map(Form::Calls)),
        }
    }

    /// The field that describes it.
    fn param(&self) -> &'static str {
        if matches!(self, Form::Calls(_)) { "tools" } else { "response_format" }
    }

    /// The field for which there is a form.
    fn asked_by(&self) -> &'static str {
        match self {
            Form::Object | Form::Json(_) => "response_format",
            Form::Calls(calls) if calls.has_to => "tool_choice",
            Form::Calls(calls) if calls.several => "strict",
            Form::Calls(_) => "parallel_tool_calls",
        }
    }

    /// As the model is told of it, where its format has words for that.
    fn told(&self) -> Option<&RawValue> {
        if let Form::Json(schema) = self { Some(schema) } else { None }
    }

    /// `vocab`: logits of the model.
    pub(super) fn grammar(&self, grammars: &Grammars, vocab: u32) -> Result<Grammar, SchemaError> {
        match self {
            Form::Object => grammars.json(r#"{"type": "object"}"#, vocab),
            Form::Json(schema) => grammars.json(schema.get(), vocab),
            Form::Calls(calls) => grammars.calls(calls, vocab),
        }
    }
}

/// Which tools the model calls.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ToolChoice {
    None,
    Auto,
    Required,
    /// Once.
    One(String),
}

pub(super) fn tool_choice(choice: Option<Value>) -> Result<ToolChoice, ApiError> {
    if says_nothing(&choice) {
        return Ok(ToolChoice::Auto);
    }
    let choice = choice.unwrap_or_default();
    match (choice.as_str(), choice["type"].as_str(), choice["function"]["name"].as_str()) {
        (Some("none"), ..) => Ok(ToolChoice::None),
        (Some("auto"), ..) => Ok(ToolChoice::Auto),
        (Some("required"), ..) => Ok(ToolChoice::Required),
        (None, Some("function"), Some(name)) => Ok(ToolChoice::One(name.to_owned())),
        _ => {
            let message = "tool_choice must be \"none\", \"auto\", \"required\" or \
                           {\"type\": \"function\", \"function\": {\"name\": ...}}";
            Err(ApiError::field("tool_choice", message))
        }
    }
}

/// What calls an answer has, where that is more than what the model likes. `parallel`: it may have several.
fn calls(choice: &ToolChoice, tools: &[Box<RawValue>], parallel: bool) -> Result<Option<Calls>, ApiError> {
    #[derive(Deserialize)]
    struct Offered<'a> {
        #[serde(borrow)]
        function: Function<'a>,
    }
    #[derive(Deserialize)]
    struct Function<'a> {
        name: String,
        #[serde(borrow)]
        parameters: Option<&'a RawValue>,
        strict: Option<bool>,
    }
    let has_to = match choice {
        ToolChoice::None => return Ok(None),
        ToolChoice::Auto => false,
        ToolChoice::Required | ToolChoice::One(_) => true,
    };
    let mut calls = Calls { tools: Vec::new(), has_to, several: parallel && !matches!(choice, ToolChoice::One(_)) };
    for (i, tool) in tools.iter().enumerate() {
        let wrong = |e: serde_json::Error| ApiError::field(format!("tools[{i}]"), format!("tools[{i}]: {e}"));
        let Offered { function } = serde_json::from_str(tool.get()).map_err(wrong)?;
        let arguments = match (function.strict, has_to) {
            (Some(true), _) => Arguments::Strict,
            (_, true) => Arguments::Typed,
            (_, false) => Arguments::Any,
        };
        let parameters: Option<Map<String, Value>> = match function.parameters {
            Some(schema) if arguments != Arguments::Any => serde_json::from_str(schema.get()).map_err(wrong)?,
            _ => None,
        };
        calls.tools.push(Tool { name: function.name, parameters: parameters.unwrap_or_default(), arguments });
    }
    if let ToolChoice::One(name) = choice {
        calls.tools.retain(|tool| tool.name == *name);
    }
    let strict = calls.tools.iter().any(|tool| tool.arguments == Arguments::Strict);
    match (calls.tools.is_empty(), choice) {
        (true, ToolChoice::One(name)) => {
            let name: String = name.chars().take(50).collect();
            Err(ApiError::field("tool_choice", format!("tool_choice names {name:?}, which is not among tools")))
        }
        (true, ToolChoice::Required) => {
            Err(ApiError::field("tool_choice", "tool_choice is \"required\", but there are no tools"))
        }
        (false, _) if has_to || strict || !parallel => Ok(Some(calls)),
        _ => Ok(None),
    }
}

/// Reads `response_format`; `None` is text.
fn schema(format: ResponseFormat) -> Result<Option<Form>, ApiError> {
    let described = format.json_schema.is_some();
    let schema = format.json_schema.and_then(|Object(described)| described.schema);
    match (format.r#type.as_str(), schema) {
        ("text", None) if !described => Ok(None),
        ("json_object", None) if !described => Ok(Some(Form::Object)),
        ("json_schema", Some(schema)) => Ok(Some(Form::Json(schema))),
        ("json_schema", None) => {
            let message = "response_format of type json_schema needs json_schema.schema";
            Err(ApiError::field("response_format.json_schema.schema", message))
        }
        ("text" | "json_object", _) => {
            let message = "response_format has a json_schema, so its type must be json_schema";
            Err(ApiError::field("response_format.type", message))
        }
        (other, _) => {
            let other: String = other.chars().take(50).collect();
            let message = format!("response_format.type is {other:?}, must be text, json_object or json_schema");
            Err(ApiError::field("response_format.type", message))
        }
    }
}

fn chat_message(i: usize, m: Message, takes_tools: bool) -> Result<ChatMessage, ApiError> {
    let at = |field: &str| format!("messages[{i}].{field}");
    for (field, asked) in [
        ("tool_calls", !says_nothing(&m.tool_calls)),
        ("tool_call_id", m.tool_call_id.is_some()),
        ("reasoning_content", m.reasoning_content.as_ref().is_some_and(|text| !text.is_empty())),
    ] {
        if asked && !takes_tools {
            return Err(ApiError::unsupported(&at(field)));
        }
    }
    for (field, value) in [
        ("function_call", &m.function_call),
        ("audio", &m.audio),
        ("refusal", &m.refusal),
        ("annotations", &m.annotations),
    ] {
        if !says_nothing(value) {
            return Err(ApiError::unsupported(&at(field)));
        }
    }
    let role = match m.role.as_str() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" if takes_tools => Role::Tool,
        other => {
            let hint = crate::config::suggestion(other, ["system", "developer", "user", "assistant"]);
            let other: String = other.chars().take(50).collect();
            return Err(ApiError::field(at("role"), format!("role {other:?} is not supported{hint}")));
        }
    };
    let content = match m.content {
        Some(content) if !content.is_null() => api::content_text(content, &at("content"))?,
        _ if role == Role::Assistant => String::new(),
        _ => return Err(ApiError::field(at("content"), format!("messages[{i}].content is missing"))),
    };
    let misplaced = |field: &str, role: &str| {
        let message = format!("messages[{i}].{field} belongs to a message of role {role}");
        Err(ApiError::field(at(field), message))
    };
    if role != Role::Assistant && !says_nothing(&m.tool_calls) {
        return misplaced("tool_calls", "assistant");
    }
    if role != Role::Assistant && m.reasoning_content.is_some() {
        return misplaced("reasoning_content", "assistant");
    }
    if role != Role::Tool && m.tool_call_id.is_some() {
        return misplaced("tool_call_id", "tool");
    }
    let tool_calls = match m.tool_calls.filter(|calls| !calls.is_null()) {
        Some(calls) => api::tool_calls(calls, &at("tool_calls"))?,
        None => Vec::new(),
    };
    Ok(ChatMessage {
        reasoning: m.reasoning_content.unwrap_or_default(),
        tool_calls,
        tool_call_id: m.tool_call_id.unwrap_or_default(),
        ..ChatMessage::new(role, content)
    })
}

/// Reads and checks a completion request.
pub fn completion(app: &App, body: &[u8]) -> Result<Job, ApiError> {
    let mut request: CompletionRequest = api::parse(body)?;
    let shared = request.shared();
    if !says_nothing(&request.suffix) {
        return Err(ApiError::unsupported("suffix"));
    }
    if request.best_of.is_some_and(|best_of| best_of != shared.n.unwrap_or(1)) {
        return Err(ApiError::field("best_of", "best_of is supported only where it equals n"));
    }
    let prompts = api::prompts(request.prompt.ok_or_else(|| ApiError::field("prompt", "prompt is missing"))?)?;
    if prompts.len() > app.http.max_choices {
        let message = format!("prompt has {} entries; at most {} are allowed", prompts.len(), app.http.max_choices);
        return Err(ApiError::field("prompt", message));
    }
    let echo = request.echo.unwrap_or(false);
    let common = Common::new(app, shared, request.logprobs)?;
    let prompts = prompts
        .into_iter()
        .map(|prompt| {
            let (ids, text) = match prompt {
                Prompt::Text(text) => {
                    (app.text.encode_prompt(&text).map_err(|e| ApiError::field("prompt", e.to_string()))?, text)
                }
                Prompt::Tokens(ids) => {
                    // Before it is turned to text.
                    app.backend.limits().output_len(ids.len(), common.shared.max_tokens)?;
                    let text = if echo { app.text.decode(&ids) } else { String::new() };
                    (ids, text)
                }
            };
            Ok((ids, echo.then_some(text)))
        })
        .collect::<Result<Vec<_>, ApiError>>()?;
    common.job(app, Kind::Completion, prompts, request.logprobs.filter(|_| echo))
}

/// What both kinds say, checked as far as the engine does not check it.
struct Common {
    sampling: SamplerConfig,
    stops: Vec<String>,
    stop_ids: Vec<u32>,
    shared: Shared,
    logprobs: Option<u32>,
    n: u32,
}

impl Common {
    fn new(app: &App, mut shared: Shared, logprobs: Option<u32>) -> Result<Common, ApiError> {
        if let Some(model) = shared.model.as_ref().filter(|m| **m != app.model.name) {
            let model: String = model.chars().take(100).collect();
            return Err(ApiError::no_such_model(&model, &app.model.name));
        }
        if shared.store == Some(true) {
            return Err(ApiError::unsupported("store"));
        }
        if shared.stream_options.is_some() && shared.stream != Some(true) {
            return Err(ApiError::field("stream_options", "stream_options needs stream to be true"));
        }
        let n = shared.n.unwrap_or(1);
        if n == 0 || n as usize > app.http.max_choices {
            return Err(ApiError::field("n", format!("n is {n}, must be from 1 to {}", app.http.max_choices)));
        }
        let stops = api::stop_strings(shared.stop.take())?;
        StopMatcher::check(&stops).map_err(|e| ApiError::field("stop", e))?;
        let mut stop_ids = app.text.tokenizer().stop_ids().to_vec();
        let own = shared.stop_token_ids.take().unwrap_or_default();
        if shared.ignore_eos == Some(true) {
            stop_ids.clear();
        }
        stop_ids.extend(own.into_iter().filter(|id| !app.text.tokenizer().stop_ids().contains(id)));
        stop_ids.dedup();
        let sampling = sampling(app, &mut shared)?;
        Ok(Common { sampling, stops, stop_ids, shared, logprobs, n })
    }

    fn job(
        self,
        app: &App,
        kind: Kind,
        prompts: Vec<(Vec<u32>, Option<String>)>,
        prompt_logprobs: Option<u32>,
    ) -> Result<Job, ApiError> {
        let n_prompts = prompts.len();
        let most = app.http.max_choices;
        if n_prompts * self.n as usize > most {
            let message = format!("{n_prompts} prompts with n = {} are more than {most} choices", self.n);
            return Err(ApiError::field("n", message));
        }
        // Before they are copied for every choice.
        for (ids, _) in &prompts {
            app.backend.limits().output_len(ids.len(), self.shared.max_tokens)?;
        }
        let choice = |(ids, echo): &(Vec<u32>, Option<String>), choice: u32| Choice {
            request: Request {
                max_tokens: self.shared.max_tokens,
                stop_ids: self.stop_ids.clone(),
                logprobs: self.logprobs,
                prompt_logprobs,
                ..Request::new(ids.clone(), SamplerConfig { choice, ..self.sampling.clone() })
            },
            echo: echo.clone(),
        };
        let choices =
            prompts.iter().flat_map(|p| (0..self.n).map(move |c| (p, c))).map(|(p, c)| choice(p, c)).collect();
        Ok(Job {
            kind,
            choices,
            n_prompts,
            stops: self.stops,
            stop_ids: self.stop_ids,
            seed: self.sampling.seed,
            stream: self.shared.stream.unwrap_or(false),
            stream_options: self.shared.stream_options.map_or_else(StreamOptions::default, |Object(options)| options),
            logprobs: self.logprobs.is_some(),
            answer: None,
            described_by: "response_format",
        })
    }
}

/// Sampler parameters. Ranges are the engine's to check, except where a number has no place in [`SamplerConfig`].
fn sampling(app: &App, shared: &mut Shared) -> Result<SamplerConfig, ApiError> {
    let absent = SamplerConfig::default();
    let top_k = shared.top_k.unwrap_or(0);
    let top_k = if top_k == -1 { Ok(0) } else { u32::try_from(top_k) };
    let top_k = top_k.map_err(|_| ApiError::field("top_k", "top_k must be -1, 0 or a count of tokens"))?;
    Ok(SamplerConfig {
        temperature: shared.temperature.unwrap_or(absent.temperature),
        top_k,
        top_p: shared.top_p.unwrap_or(absent.top_p),
        min_p: shared.min_p.unwrap_or(absent.min_p),
        presence: shared.presence_penalty.unwrap_or(absent.presence),
        frequency: shared.frequency_penalty.unwrap_or(absent.frequency),
        repetition: shared.repetition_penalty.unwrap_or(absent.repetition),
        min_tokens: shared.min_tokens.unwrap_or(absent.min_tokens),
        // A negative seed is one of the 2^64 keys too.
        seed: shared.seed.map_or_else(fresh_seed, |seed| seed as u64),
        choice: 0,
        bias: bias(shared)?,
        dry: dry(app, shared)?,
    })
}

fn bias(shared: &mut Shared) -> Result<Vec<(u32, f32)>, ApiError> {
    let mut bias = Vec::new();
    for (key, value) in shared.logit_bias.take().unwrap_or_default() {
        // Only the plain spelling: `01` and `+1` would name an id twice.
        let id = key.parse::<u32>().ok().filter(|id| id.to_string() == key);
        let key: String = key.chars().take(50).collect();
        let id =
            id.ok_or_else(|| ApiError::field("logit_bias", format!("logit_bias has key {key:?}; keys are token ids")))?;
        if !(-100.0..=100.0).contains(&value) {
            let message = format!("logit_bias of token {id} is {value}, must be a number from -100 to 100");
            return Err(ApiError::field(format!("logit_bias.{id}"), message));
        }
        bias.push((id, value));
    }
    Ok(bias)
}

fn dry(app: &App, shared: &mut Shared) -> Result<Option<DryConfig>, ApiError> {
    let multiplier = shared.dry_multiplier.unwrap_or(0.0);
    if multiplier == 0.0 {
        return Ok(None);
    }
    let window = match shared.dry_penalty_last_n.unwrap_or(-1) {
        -1 => u32::MAX,
        n => u32::try_from(n)
            .map_err(|_| ApiError::field("dry_penalty_last_n", "dry_penalty_last_n must be -1 or a count of tokens"))?,
    };
    let breakers = shared.dry_sequence_breakers.take();
    let breakers = breakers.unwrap_or_else(|| ["\n", ":", "\"", "*"].map(str::to_owned).to_vec());
    if breakers.len() > 64 {
        return Err(ApiError::field("dry_sequence_breakers", "dry_sequence_breakers has more than 64 entries"));
    }
    let mut ids: Vec<u32> = breakers.iter().flat_map(|text| app.text.tokenizer().encode(text, Special::Text)).collect();
    ids.sort_unstable();
    ids.dedup();
    Ok(Some(DryConfig {
        multiplier,
        base: shared.dry_base.unwrap_or(1.75),
        allowed_length: shared.dry_allowed_length.unwrap_or(2),
        window,
        breakers: ids,
    }))
}
