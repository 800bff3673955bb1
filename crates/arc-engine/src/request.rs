//! What a client asks and what it gets back. A request is checked once, here.

use arc_device::ops::sample::{DryConfig, SamplerConfig};
use arc_device::step::{MAX_STOP_IDS, MAX_TOP_LOGPROBS};

use crate::grammar::TokenMask;

/// A request as its caller states it, in tokens.
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
    /// Says before every draw which tokens may come next.
    pub grammar: Option<Box<dyn TokenMask>>,
    /// Prompt tokens that count as run although they are not: what they would have left is whatever memory holds. For
    /// measurements far into a context.
    pub depth: u32,
}

impl Request {
    /// A request with nothing asked for beside tokens.
    pub fn new(prompt: Vec<u32>, sampling: SamplerConfig) -> Self {
        Request {
            prompt,
            max_tokens: None,
            sampling,
            stop_ids: Vec::new(),
            ignore_stop: false,
            logprobs: None,
            prompt_logprobs: None,
            grammar: None,
            depth: 0,
        }
    }
}

impl std::fmt::Debug for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request")
            .field("prompt_tokens", &self.prompt.len())
            .field("max_tokens", &self.max_tokens)
            .field("sampling", &self.sampling)
            .field("stop_ids", &self.stop_ids)
            .field("ignore_stop", &self.ignore_stop)
            .field("logprobs", &self.logprobs)
            .field("prompt_logprobs", &self.prompt_logprobs)
            .field("grammar", &self.grammar.is_some())
            .finish()
    }
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

impl RequestLimits {
    /// What `max_tokens` comes to behind a prompt of so many tokens. Both the context and the KV pool bound prompt and output
    /// together. Errors: they do not fit either, not even with one token where none is named.
    pub fn output_len(&self, prompt_tokens: usize, max_tokens: Option<u32>) -> Result<u32, RequestError> {
        // A prompt longer than u32 is longer than every context; saturating keeps the arithmetic of the message true enough.
        let prompt = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
        let room = self.context.min(self.kv_tokens);
        let least = max_tokens.unwrap_or(1);
        let total = u64::from(prompt) + u64::from(least);
        if total > u64::from(self.context) {
            return Err(RequestError::ContextExceeded { prompt, max_tokens: least, context: self.context });
        }
        if total > u64::from(self.kv_tokens) {
            return Err(RequestError::KvExceeded { prompt, max_tokens: least, kv_tokens: self.kv_tokens });
        }
        Ok(max_tokens.unwrap_or_else(|| (room - prompt).min(self.default_max_tokens.max(1))))
    }
}

/// A request that passed every check. The only way to the engine.
#[derive(Debug)]
pub struct ValidRequest {
    request: Request,
    max_out: u32,
    limits: RequestLimits,
}

impl ValidRequest {
    /// Checks a request and settles its output length. Errors: the first field that is wrong.
    pub fn new(request: Request, limits: &RequestLimits) -> Result<Self, RequestError> {
        if request.prompt.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        ids_in_vocab("prompt", request.prompt.iter().copied(), limits)?;
        at_most("stop_ids", request.stop_ids.len(), MAX_STOP_IDS)?;
        ids_in_vocab("stop_ids", request.stop_ids.iter().copied(), limits)?;
        for (field, asked) in [("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)] {
            let n = asked.unwrap_or(0);
            in_range(field, n, n as usize <= MAX_TOP_LOGPROBS, "from 0 to 20")?;
        }
        let max_out = limits.output_len(request.prompt.len(), request.max_tokens)?;
        check_sampling(&request.sampling, max_out, limits)?;
        let scored = request.prompt_logprobs.is_some();
        let deep = request.depth == 0 || (request.depth as usize) < request.prompt.len() && !scored;
        in_range("depth", request.depth, deep, "less than the prompt's tokens, and 0 where those are scored")?;
        Ok(ValidRequest { request, max_out, limits: *limits })
    }

    /// The request as it was stated.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Tokens it may emit; 0 where it only scores its prompt.
    pub fn max_out(&self) -> u32 {
        self.max_out
    }

    /// Positions that it takes in the KV pool.
    pub fn total_tokens(&self) -> u32 {
        self.request.prompt.len() as u32 + self.max_out
    }

    /// What it was checked against.
    pub fn limits(&self) -> &RequestLimits {
        &self.limits
    }

    /// The request, to be taken apart.
    pub(crate) fn into_request(self) -> Request {
        self.request
    }
}

/// Every sampler parameter, one line each, by the name that clients know it by. `contains` is false for NaN, so a range
/// refuses it and the infinities.
fn check_sampling(s: &SamplerConfig, max_out: u32, limits: &RequestLimits) -> Result<(), RequestError> {
    let penalty = -2.0..=2.0;
    in_range("temperature", s.temperature, (0.0..=100.0).contains(&s.temperature), "a number from 0 to 100")?;
    in_range("top_p", s.top_p, s.top_p > 0.0 && s.top_p <= 1.0, "a number above 0 and at most 1")?;
    in_range("min_p", s.min_p, (0.0..=1.0).contains(&s.min_p), "a number from 0 to 1")?;
    in_range("presence_penalty", s.presence, penalty.contains(&s.presence), "a number from -2 to 2")?;
    in_range("frequency_penalty", s.frequency, penalty.contains(&s.frequency), "a number from -2 to 2")?;
    // Logits are divided by it, and have to stay finite.
    let repetition = (0.01..=10.0).contains(&s.repetition);
    in_range("repetition_penalty", s.repetition, repetition, "a number from 0.01 to 10")?;
    in_range("min_tokens", s.min_tokens, s.min_tokens <= max_out, "at most max_tokens")?;
    check_bias(&s.bias, limits)?;
    s.dry.as_ref().map_or(Ok(()), |dry| check_dry(dry, limits))
}

fn check_bias(bias: &[(u32, f32)], limits: &RequestLimits) -> Result<(), RequestError> {
    ids_in_vocab("logit_bias", bias.iter().map(|&(id, _)| id), limits)?;
    for &(_, value) in bias {
        in_range("logit_bias", value, (-100.0..=100.0).contains(&value), "a number from -100 to 100")?;
    }
    let mut ids: Vec<u32> = bias.iter().map(|&(id, _)| id).collect();
    ids.sort_unstable();
    match ids.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => in_range("logit_bias", format_args!("given twice for token {}", pair[0]), false, "given once"),
        None => Ok(()),
    }
}

fn check_dry(dry: &DryConfig, limits: &RequestLimits) -> Result<(), RequestError> {
    in_range("dry_multiplier", dry.multiplier, (0.0..=100.0).contains(&dry.multiplier), "a number from 0 to 100")?;
    in_range("dry_base", dry.base, (1.0..=100.0).contains(&dry.base), "a number from 1 to 100")?;
    in_range("dry_allowed_length", dry.allowed_length, dry.allowed_length >= 1, "at least 1")?;
    ids_in_vocab("dry_sequence_breakers", dry.breakers.iter().copied(), limits)
}

fn ids_in_vocab(
    field: &'static str,
    mut ids: impl Iterator<Item = u32>,
    limits: &RequestLimits,
) -> Result<(), RequestError> {
    match ids.find(|&id| id >= limits.vocab) {
        Some(id) => Err(RequestError::TokenOutOfRange { field, id, vocab: limits.vocab }),
        None => Ok(()),
    }
}

fn at_most(field: &'static str, n: usize, max: usize) -> Result<(), RequestError> {
    if n > max { Err(RequestError::TooMany { field, n, max }) } else { Ok(()) }
}

fn in_range(
    field: &'static str,
    value: impl std::fmt::Display,
    ok: bool,
    want: &'static str,
) -> Result<(), RequestError> {
    if ok { Ok(()) } else { Err(RequestError::OutOfRange { field, value: value.to_string(), want }) }
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
    #[error(
        "prompt has {prompt} tokens and max_tokens is {max_tokens}: {} together, but the context is {context}; \
         shorten the prompt or lower max_tokens",
        u64::from(*prompt) + u64::from(*max_tokens)
    )]
    ContextExceeded {
        /// Prompt tokens.
        prompt: u32,
        /// Requested or least output.
        max_tokens: u32,
        /// The limit.
        context: u32,
    },
    /// Prompt and output do not fit the whole KV pool, so the request could never start.
    #[error(
        "prompt has {prompt} tokens and max_tokens is {max_tokens}: {} together, but the KV cache holds {kv_tokens}; \
         shorten the prompt or lower max_tokens",
        u64::from(*prompt) + u64::from(*max_tokens)
    )]
    KvExceeded {
        /// Prompt tokens.
        prompt: u32,
        /// Requested or least output.
        max_tokens: u32,
        /// Tokens of the pool.
        kv_tokens: u32,
    },
    /// A list longer than its limit.
    #[error("{field} has {n} entries; at most {max} are allowed")]
    TooMany {
        /// The field.
        field: &'static str,
        /// Entries sent.
        n: usize,
        /// The limit.
        max: usize,
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
    /// Its grammar cannot go on, which is its caller's affair; see [`Finished::error`].
    Grammar,
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
    /// Those of them that did not run, since a sequence before had left them.
    pub cached_tokens: u32,
    /// Tokens emitted, the stop id included.
    pub output_tokens: u32,
    /// From submission to admission.
    pub queue_us: u64,
    /// From admission to the first token.
    pub prefill_us: u64,
    /// From the first token to the last.
    pub decode_us: u64,
}

/// What a request's sink receives, in order: what was known of the prompt, its scores, tokens, one `Finished`.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// So many tokens of the prompt do not run, since a sequence before left them; where there are some.
    Cached(u32),
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

#[cfg(test)]
mod tests;
