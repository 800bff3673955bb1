//! Answers as the API writes them, whole or in chunks.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use arc_engine::request::TokenEvent;
use axum::{
    Json,
    response::{
        IntoResponse, Response,
        sse::{Event as SseEvent, KeepAlive, Sse},
    },
};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    App,
    error::ApiError,
    job::{Job, Kind},
    run::{Run, Update, Usage},
};
use crate::{
    answer::Scored,
    text::{
        Control, Detokenizer, Tokenizer,
        deepseek_v4::{AnswerEvent, AnswerParser},
    },
};

mod said;

use said::Said;

/// What every body of one answer says.
struct Head {
    app: Arc<App>,
    kind: Kind,
    id: String,
    created: u64,
    seed: u64,
    logprobs: bool,
    include_usage: bool,
}

impl Head {
    fn new(app: &Arc<App>, job: &Job) -> Head {
        let prefix = if job.kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        Head {
            app: app.clone(),
            kind: job.kind,
            id: format!("{prefix}-{:016x}", getrandom::u64().unwrap_or(job.seed)),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            seed: job.seed,
            logprobs: job.logprobs,
            include_usage: job.stream_options.include_usage == Some(true),
        }
    }

    fn body(&self, chunk: bool, choices: Vec<Value>) -> Value {
        let object = match (self.kind, chunk) {
            (Kind::Chat, false) => "chat.completion",
            (Kind::Chat, true) => "chat.completion.chunk",
            (Kind::Completion, _) => "text_completion",
        };
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.app.model.name,
            "system_fingerprint": concat!("arc-", env!("CARGO_PKG_VERSION")),
            "seed": self.seed,
            "choices": choices,
        })
    }

    /// Logprobs of some tokens in the shape of this API; null where nobody asked.
    fn logprobs(&self, tokens: &[Scored]) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        let tokenizer = self.app.text.tokenizer();
        match self.kind {
            Kind::Chat => {
                let entry = |id: u32, logprob: f32| json!({"token": shown(tokenizer, id), "logprob": finite(logprob), "bytes": tokenizer.token_bytes(id)});
                let token = |t: &Scored| {
                    let mut value = entry(t.id, t.logprob.unwrap_or(f32::MIN));
                    value["top_logprobs"] = t.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
                    value
                };
                json!({"content": tokens.iter().map(token).collect::<Vec<_>>(), "refusal": null})
            }
            Kind::Completion => {
                let top = |t: &Scored| match t.logprob {
                    None => Value::Null,
                    Some(_) => t
                        .top
                        .iter()
                        .map(|&(id, logprob)| (shown(tokenizer, id), json!(finite(logprob))))
                        .collect::<serde_json::Map<_, _>>()
                        .into(),
                };
                json!({
                    "tokens": tokens.iter().map(|t| shown(tokenizer, t.id)).collect::<Vec<_>>(),
                    "token_logprobs": tokens.iter().map(|t| t.logprob.map(finite)).collect::<Vec<_>>(),
                    "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
                    "text_offset": tokens.iter().map(|t| t.offset).collect::<Vec<_>>(),
                })
            }
        }
    }
}

/// The text of one token, alone; bytes that are no text are replaced.
fn shown(tokenizer: &Tokenizer, id: u32) -> String {
    String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned()
}

/// JSON has no infinity; a token of no probability gets the lowest number.
fn finite(logprob: f32) -> f32 {
    logprob.max(f32::MIN)
}

fn usage_body(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    })
}

/// An answer's beginning where the prompt is repeated: its text, its characters, and its tokens once they are scored.
struct Echo {
    text: String,
    prompt: Vec<u32>,
}

impl Echo {
    /// Prompt tokens with their places in the text. The first has no score, since nothing stands before it.
    fn tokens(&self, tokenizer: &Arc<Tokenizer>, scores: Vec<TokenEvent>) -> Vec<Scored> {
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), Control::Skip);
        let mut text = String::new();
        let mut scores = scores.into_iter();
        let mut offset = 0;
        let mut tokens = Vec::with_capacity(self.prompt.len());
        for (i, &id) in self.prompt.iter().enumerate() {
            let score = if i == 0 { None } else { scores.next() };
            let (logprob, top) = score.map_or((None, Vec::new()), |s| (s.logprob, s.top));
            tokens.push(Scored { id, logprob, top, offset });
            text.clear();
            detokenizer.push(id, &mut text);
            offset += text.chars().count();
        }
        tokens
    }
}

/// One choice while it is put together.
#[derive(Default)]
struct Draft {
    echo: Option<Echo>,
    /// Characters of the echoed prompt, by which the answer's own offsets are moved.
    echo_chars: usize,
    scores: Vec<TokenEvent>,
    /// Tells reasoning and calls from content, where the model has them.
    parser: Option<AnswerParser>,
    events: Vec<AnswerEvent>,
    said: Said,
    tokens: Vec<Scored>,
    reason: &'static str,
}

impl Draft {
    /// Puts the prompt in front, at the first sign of the answer: by then all its scores are there.
    fn begin(&mut self, head: &Head) {
        if let Some(echo) = self.echo.take() {
            self.echo_chars = echo.text.chars().count();
            if head.logprobs {
                self.tokens = echo.tokens(head.app.text.tokenizer(), std::mem::take(&mut self.scores));
            }
            self.said.content = echo.text;
        }
    }

    fn add(&mut self, head: &Head, update: Update) {
        match update {
            Update::Prompt(scores) => self.scores.extend(scores),
            Update::Piece(piece) => {
                self.begin(head);
                match &mut self.parser {
                    Some(parser) => parser.push(&piece.text, &mut self.events),
                    None => self.said.content.push_str(&piece.text),
                }
                let moved = piece.tokens.into_iter().map(|t| Scored { offset: t.offset + self.echo_chars, ..t });
                self.tokens.extend(moved);
            }
            Update::End(reason) => {
                self.begin(head);
                if let Some(parser) = &mut self.parser {
                    parser.finish(&mut self.events);
                }
                self.reason = reason;
            }
        }
        self.events.drain(..).for_each(|event| self.said.add(event));
        // A call that can be acted on was meant; one that was cut off was not.
        if self.reason == "stop" && self.said.is_calling() {
            self.reason = "tool_calls";
        }
    }
}

fn drafts(job: &Job) -> Vec<Draft> {
    let echo = |c: &super::job::Choice| c.echo.clone().map(|text| Echo { text, prompt: c.request.prompt.clone() });
    let parser = || job.answer.map(AnswerParser::new);
    job.choices.iter().map(|c| Draft { echo: echo(c), parser: parser(), ..Draft::default() }).collect()
}

/// Runs a job of a request that `began` then and answers, in one body or in a stream. Errors: refused, or failed before a stream
/// began.
pub async fn reply(app: Arc<App>, mut job: Job, began: Instant) -> Result<Response, ApiError> {
    let head = Head::new(&app, &job);
    let drafts = drafts(&job);
    let run = Run::start(&app, &mut job, began)?;
    let prompt_tokens = run.usage().prompt;
    tracing::info!(
        id = head.id,
        prompt_tokens,
        choices = drafts.len(),
        seed = head.seed,
        stream = job.stream,
        "accepted"
    );
    if job.stream { Ok(stream_reply(head, drafts, run)) } else { whole_reply(head, drafts, run).await }
}

async fn whole_reply(head: Head, mut drafts: Vec<Draft>, mut run: Run) -> Result<Response, ApiError> {
    while let Some((choice, update)) = run.next().await? {
        drafts[choice].add(&head, update);
    }
    let choice = |(index, draft): (usize, &Draft)| {
        let logprobs = head.logprobs(&draft.tokens);
        match head.kind {
            Kind::Chat => json!({
                "index": index,
                "message": draft.said.message(&head.id, index),
                "logprobs": logprobs,
                "finish_reason": draft.reason,
            }),
            Kind::Completion => {
                json!({"index": index, "text": draft.said.content, "logprobs": logprobs, "finish_reason": draft.reason})
            }
        }
    };
    tracing::info!(id = head.id, output_tokens = run.usage().output, "answered");
    let mut body = head.body(false, drafts.iter().enumerate().map(choice).collect());
    body["usage"] = usage_body(run.usage());
    Ok(Json(body).into_response())
}

/// Where a stream stands.
enum Phase {
    /// Chat: the role of each choice is still to be said; the number is the next choice.
    Roles(usize),
    Running,
    Done,
    Closed,
}

struct Streaming {
    head: Head,
    drafts: Vec<Draft>,
    run: Run,
    phase: Phase,
}

fn stream_reply(head: Head, drafts: Vec<Draft>, run: Run) -> Response {
    let phase = if head.kind == Kind::Chat { Phase::Roles(0) } else { Phase::Running };
    let state = Streaming { head, drafts, run, phase };
    let events = stream::unfold(state, |mut state| async move {
        let payload = state.next().await?;
        Some((Ok::<_, Infallible>(SseEvent::default().data(payload)), state))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

impl Streaming {
    /// The next payload; `None` ends the stream.
    async fn next(&mut self) -> Option<String> {
        match self.phase {
            Phase::Roles(choice) => {
                self.phase = if choice + 1 < self.drafts.len() { Phase::Roles(choice + 1) } else { Phase::Running };
                let delta = json!({"role": "assistant", "content": ""});
                Some(self.chunk(json!({"index": choice, "delta": delta, "logprobs": null, "finish_reason": null})))
            }
            Phase::Running => loop {
                match self.run.next().await {
                    Ok(Some((choice, update))) => {
                        if let Some(payload) = self.update(choice, update) {
                            return Some(payload);
                        }
                    }
                    Ok(None) => {
                        self.phase = Phase::Done;
                        tracing::info!(id = self.head.id, output_tokens = self.run.usage().output, "answered");
                        if !self.head.include_usage {
                            return self.done();
                        }
                        let mut body = self.head.body(true, Vec::new());
                        body["usage"] = usage_body(self.run.usage());
                        return Some(body.to_string());
                    }
                    Err(e) => {
                        tracing::warn!(id = self.head.id, error = e.message, "a stream ended with an error");
                        self.phase = Phase::Closed;
                        return Some(self.failed(&e));
                    }
                }
            },
            Phase::Done => self.done(),
            Phase::Closed => None,
        }
    }

    fn done(&mut self) -> Option<String> {
        self.phase = Phase::Closed;
        Some("[DONE]".to_owned())
    }

    fn chunk(&self, choice: Value) -> String {
        let mut body = self.head.body(true, vec![choice]);
        if self.head.include_usage {
            body["usage"] = Value::Null;
        }
        body.to_string()
    }

    fn update(&mut self, choice: usize, update: Update) -> Option<String> {
        let ended = matches!(update, Update::End(_));
        let draft = &mut self.drafts[choice];
        draft.add(&self.head, update);
        let said = draft.said.take();
        let tokens = std::mem::take(&mut draft.tokens);
        let reason = if ended { json!(draft.reason) } else { Value::Null };
        // Where a parser holds text back, tokens alone say something only with their logprobs.
        let says_tokens = !tokens.is_empty() && (self.head.logprobs || draft.parser.is_none());
        if said.is_empty() && !says_tokens && !ended {
            return None;
        }
        let logprobs = if tokens.is_empty() { Value::Null } else { self.head.logprobs(&tokens) };
        Some(self.chunk(match self.head.kind {
            Kind::Chat => {
                let delta = said.delta(&self.head.id, choice);
                json!({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason})
            }
            Kind::Completion => {
                json!({"index": choice, "text": said.content, "logprobs": logprobs, "finish_reason": reason})
            }
        }))
    }

    /// An error in the middle of a stream: the usual error body, with a choice that says so to readers of chunks.
    fn failed(&self, e: &ApiError) -> String {
        let choice = match self.head.kind {
            Kind::Chat => json!({"index": 0, "delta": {"content": ""}, "finish_reason": "error"}),
            Kind::Completion => json!({"index": 0, "text": "", "finish_reason": "error"}),
        };
        let mut body = self.head.body(true, vec![choice]);
        let mut error = e.body()["error"].take();
        if error["code"].is_null() {
            error["code"] = json!(e.status.as_u16());
        }
        body["error"] = error;
        body.to_string()
    }
}
