//! What a client asks and what it gets back. A request is checked once, here.

use arc_device::ops::sample::SamplerConfig;

/// A request as its caller states it, in tokens.
#[derive(Debug, Clone)]
pub struct Request {
    /// Prompt token ids; at least one.
    pub prompt: Vec<u32>,
    /// Tokens to generate; `None`: what fits, at most the engine's `default_max_tokens`. 0 scores the prompt only.
    pub max_tokens: Option<u32>,
    /// Sampler parameters.
    pub sampling: SamplerConfig,
    /// Ids that end the sequence, beside nothing else: the model's own end ids are the caller's to pass.
    pub stop_ids: Vec<u32>,
    /// Go on past stop ids, to `max_tokens`.
    pub ignore_stop: bool,
    /// Report the logprob of every token, with this many alternatives (0 to 20).
    pub logprobs: Option<u32>,
    /// Report the logprob of every prompt token but the first, with this many alternatives.
    pub prompt_logprobs: Option<u32>,
}

/// What the model and the limits allow; a request is checked against it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// Tokens of the longest sequence, prompt and output together.
    pub context: u32,
    /// Tokens that the KV pool holds.
    pub kv_tokens: u32,
    /// `max_tokens` where a request names none, if it fits.
    pub default_max_tokens: u32,
}

/// Why a request was refused. Each is a 4xx whose message names the field and what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// Nothing to continue.
    #[error("prompt is empty; send at least one token")]
    EmptyPrompt,
    /// A token id past the vocabulary.
    #[error("{field} names token {id}, but the vocabulary has {vocab} tokens")]
    TokenOutOfRange {
        /// The field.
        field: &'static str,
        /// The id.
        id: u32,
        /// Tokens of the vocabulary.
        vocab: u32,
    },
    /// Prompt and output do not fit the context.
    #[error("prompt has {prompt} tokens and max_tokens is {max_tokens}: {} together, but the context is {context}; shorten the prompt or lower max_tokens", u64::from(*prompt) + u64::from(*max_tokens))]
    ContextExceeded {
        /// Prompt tokens.
        prompt: u32,
        /// Requested or least output.
        max_tokens: u32,
        /// The limit.
        context: u32,
    },
    /// A parameter outside its range.
    #[error("{field} is {value}, must be {want}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// What was sent.
        value: String,
        /// The range, in words.
        want: &'static str,
    },
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// One of its stop ids.
    Stop,
    /// `max_tokens`.
    Length,
    /// The caller went away or asked.
    Cancelled,
    /// A row fault or a device fault; see [`Finished::error`].
    Error,
}

/// One token of the output, or one scored token of the prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenEvent {
    /// Token id.
    pub id: u32,
    /// Natural log of its probability under the model alone (temperature 1, no processors); when asked for.
    pub logprob: Option<f32>,
    /// Alternatives, larger first.
    pub top: Vec<(u32, f32)>,
}

/// The end of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// What went wrong, where `reason` is `Error`.
    pub error: Option<String>,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Tokens emitted, the stop id included.
    pub output_tokens: u32,
    /// From submission to admission.
    pub queue_us: u64,
    /// From admission to the first token.
    pub prefill_us: u64,
    /// From the first token to the last.
    pub decode_us: u64,
}

/// What a request's sink receives, in order: prompt scores, tokens, one `Finished`.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Scores of prompt tokens 1, 2, ... in order, possibly in several events.
    Prompt(Vec<TokenEvent>),
    /// One token.
    Token(TokenEvent),
    /// The last event.
    Finished(Finished),
}

/// Where a request's events go. Called on the engine thread: must not block.
pub trait EventSink: Send {
    /// Takes an event; `false` says that nobody listens any more, and the sequence is cancelled at the next step border.
    fn send(&mut self, event: Event) -> bool;
}

impl EventSink for std::sync::mpsc::Sender<Event> {
    fn send(&mut self, event: Event) -> bool {
        std::sync::mpsc::Sender::send(self, event).is_ok()
    }
}
