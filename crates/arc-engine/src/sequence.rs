//! A request while it is in the engine: what it has emitted, and where its events go.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use arc_device::ops::sample::SamplerParams;
use arc_device::step::{Landed, SlotInit, landed_flags, slot_flags};

use crate::engine::RequestId;
use crate::grammar::{MaskJob, Matcher, MatcherState};
use crate::request::{Event, EventSink, FinishReason, Finished, Request, TokenEvent, ValidRequest};
use crate::sampler::HostDraw;
use crate::scheduler::{Place, Want};
use crate::stats::RequestTimes;

/// Scores are sent in batches of this size, and at the end of a step.
const SCORE_BATCH: usize = 64;

/// A request on its way to a slot.
pub(crate) struct Submission {
    pub id: RequestId,
    pub request: ValidRequest,
    pub sink: Box<dyn EventSink>,
    pub submitted: Instant,
}

impl Submission {
    /// Ends a request that never ran.
    pub fn finish(mut self, reason: FinishReason, error: Option<String>) {
        let finished = Finished {
            reason,
            error,
            prompt_tokens: self.request.request().prompt.len() as u32,
            cached_tokens: 0,
            output_tokens: 0,
            queue_us: micros(self.submitted, Instant::now()),
            prefill_us: 0,
            decode_us: 0,
        };
        send(&mut self.sink, Event::Finished(finished));
    }
}

/// A request in a slot.
pub(crate) struct Sequence {
    pub id: RequestId,
    pub place: Place,
    pub prompt: Arc<[u32]>,
    /// Prompt and what was drawn, where its rows may be kept.
    tokens: Option<Vec<u32>>,
    /// Where the host draws.
    pub host: Option<HostDraw>,
    pub matcher: MatcherState,
    pub request: Request,
    pub submitted: Instant,
    pub admitted: Instant,
    pub first_token: Option<Instant>,
    pub last_token: Option<Instant>,
    pub n_out: u32,
    max_out: u32,
    scores_left: u32,
    scores: Vec<TokenEvent>,
    sink: Box<dyn EventSink>,
}

/// What a landed row did to its sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It goes on.
    GoesOn,
    /// It is over on the device too.
    Over(FinishReason, Option<&'static str>),
    /// It has all that it asked for, but its slot does not know.
    Complete,
    /// Nobody listens.
    Gone,
}

impl Sequence {
    /// A request that was given a place, and what its slot starts with.
    /// `keeps`: its rows may be of use after its end.
    pub fn admit(
        submission: Submission,
        place: Place,
        want: &Want,
        host: Option<HostDraw>,
        keeps: bool,
    ) -> (Self, SlotInit) {
        let Submission { id, request, sink, submitted } = submission;
        let max_out = request.max_out();
        let mut request = request.into_request();
        request.prompt = Vec::new();
        let sampling = &request.sampling;
        let reads_prompt = SamplerParams::new(sampling).reads_seen() || sampling.dry.is_some();
        let init = SlotInit {
            slot: place.slot,
            generation: place.generation,
            // A slot that only scores never counts; 1 keeps its entry valid.
            max_out: max_out.max(1),
            flags: if request.ignore_stop { slot_flags::IGNORE_STOP } else { 0 },
            stop_ids: request.stop_ids.clone(),
            sampling: request.sampling.clone(),
            blocks: place.blocks.clone(),
            penalty_prompt: if reads_prompt { want.prompt.to_vec() } else { Vec::new() },
            pos: place.depth,
            logprobs: request.logprobs,
            prompt_top: request.prompt_logprobs.unwrap_or(0),
        };
        let cached = place.cached;
        let mut sequence = Sequence {
            id,
            place,
            prompt: want.prompt.clone(),
            // Rows that count as run may hold anything.
            tokens: (keeps && max_out > 0 && want.depth == 0).then(|| {
                let mut tokens = Vec::with_capacity(want.prompt.len() + max_out as usize);
                tokens.extend_from_slice(&want.prompt);
                tokens
            }),
            host,
            matcher: MatcherState::Absent,
            request,
            submitted,
            admitted: Instant::now(),
            first_token: None,
            last_token: None,
            n_out: 0,
            max_out,
            scores_left: want.scored_rows(),
            scores: Vec::new(),
            sink,
        };
        if cached > 0 {
            // Whoever does not listen is seen at the first token.
            send(&mut sequence.sink, Event::Cached(cached));
        }
        (sequence, init)
    }

    /// Starts the sequence's grammar, if it has one: its first mask is written while the prompt runs.
    pub fn start_matcher(&mut self, mask_words: usize) -> Option<MaskJob> {
        let mask = self.request.grammar.take()?;
        self.matcher = MatcherState::Working;
        let matcher = Matcher { mask, bits: vec![0; mask_words] };
        Some(MaskJob { slot: self.place.slot, generation: self.place.generation, accept: None, matcher })
    }

    /// Lets the grammar take the token that was just emitted.
    pub fn advance_matcher(&mut self, token: u32) -> Option<MaskJob> {
        match std::mem::replace(&mut self.matcher, MatcherState::Working) {
            MatcherState::Absent => {
                self.matcher = MatcherState::Absent;
                None
            }
            MatcherState::Working => panic!("slot {} drew a token before its mask was written", self.place.slot),
            MatcherState::Ready(matcher) => {
                Some(MaskJob { slot: self.place.slot, generation: self.place.generation, accept: Some(token), matcher })
            }
        }
    }

    /// The mask of the next draw.
    pub fn mask_bits(&self) -> Option<&[u32]> {
        match &self.matcher {
            MatcherState::Ready(matcher) => Some(&matcher.bits),
            MatcherState::Absent | MatcherState::Working => None,
        }
    }

    /// Lends the mask out to be staged.
    pub fn lend_bits(&mut self) -> Option<Vec<u32>> {
        match &mut self.matcher {
            MatcherState::Ready(matcher) => Some(std::mem::take(&mut matcher.bits)),
            MatcherState::Absent | MatcherState::Working => None,
        }
    }

    /// Takes back what [`Sequence::lend_bits`] lent.
    pub fn give_back_bits(&mut self, bits: Vec<u32>) {
        if let MatcherState::Ready(matcher) = &mut self.matcher {
            matcher.bits = bits;
        }
    }

    /// The tokens whose rows are there, all but the last that was drawn; `None` where none was, or they are not kept.
    pub fn kept(&mut self) -> Option<Vec<u32>> {
        let mut tokens = self.tokens.take().filter(|_| self.n_out > 0)?;
        tokens.pop();
        Some(tokens)
    }

    /// Whether it draws nothing.
    pub fn only_scores(&self) -> bool {
        self.max_out == 0
    }

    /// How long its parts took so far.
    pub fn times(&self) -> RequestTimes {
        let first = |t: Instant| micros(self.submitted, t) as f64;
        let decode = self.first_token.zip(self.last_token).filter(|_| self.n_out > 1);
        RequestTimes {
            first_token_us: self.first_token.map(first),
            token_us: decode.map(|(first, last)| micros(first, last) as f64 / f64::from(self.n_out - 1)),
            request_us: micros(self.submitted, Instant::now()) as f64,
        }
    }

    /// Takes in what one of its rows left, and sends it on.
    pub fn take(&mut self, landed: &Landed) -> Taken {
        if landed.flags & landed_flags::SCORED != 0 {
            return self.take_score(landed);
        }
        if !self.flush_scores() {
            return Taken::Gone;
        }
        let tokens = &landed.tokens[..landed.n_tokens as usize];
        let one_by_one = self.request.logprobs.is_some() || !matches!(self.matcher, MatcherState::Absent);
        assert!(tokens.len() <= 1 || !one_by_one, "slot {} landed drafts that it cannot have", self.place.slot);
        for &id in tokens {
            let now = Instant::now();
            self.first_token.get_or_insert(now);
            self.last_token = Some(now);
            self.n_out += 1;
            if let Some(tokens) = &mut self.tokens {
                tokens.push(id);
            }
            if let Some(host) = &mut self.host {
                host.push(id);
            }
            let event = match self.request.logprobs {
                Some(_) => scored(id, landed),
                None => TokenEvent { id, logprob: None, top: Vec::new() },
            };
            if !send(&mut self.sink, Event::Token(event)) {
                return Taken::Gone;
            }
        }
        match landed.flags {
            f if f & landed_flags::NON_FINITE != 0 => error("the logits are not finite (NaN or infinity)"),
            f if f & landed_flags::NOTHING_TO_SAMPLE != 0 => error("every token is masked: nothing can be drawn"),
            f if f & landed_flags::OUT_OF_RANGE != 0 => error("a token or position is out of range"),
            f if f & landed_flags::DONE_STOP != 0 => Taken::Over(FinishReason::Stop, None),
            f if f & landed_flags::DONE_LENGTH != 0 => Taken::Over(FinishReason::Length, None),
            f if f & landed_flags::INERT != 0 => error("the device ended the sequence before its time"),
            _ if self.n_out >= self.max_out => error("the device went on past the sequence's length"),
            _ => Taken::GoesOn,
        }
    }

    fn take_score(&mut self, landed: &Landed) -> Taken {
        assert!(self.scores_left > 0, "slot {} landed more scores than it has rows", self.place.slot);
        let at = self.prompt.len() - self.scores_left as usize;
        self.scores_left -= 1;
        self.scores.push(scored(self.prompt[at], landed));
        if landed.flags & landed_flags::FAULT != 0 {
            return error("the logits of a prompt token are not finite (NaN or infinity)");
        }
        if self.scores.len() == SCORE_BATCH && !self.flush_scores() {
            return Taken::Gone;
        }
        if self.scores_left == 0 && self.max_out == 0 { Taken::Complete } else { Taken::GoesOn }
    }

    /// Sends the scores that have landed. `false`: nobody listens.
    pub fn flush_scores(&mut self) -> bool {
        self.scores.is_empty() || send(&mut self.sink, Event::Prompt(std::mem::take(&mut self.scores)))
    }

    /// Sends the last event.
    pub fn finish(&mut self, reason: FinishReason, error: Option<String>) {
        self.flush_scores();
        let now = Instant::now();
        let first = self.first_token.unwrap_or(now);
        let finished = Finished {
            reason,
            error,
            prompt_tokens: self.prompt.len() as u32,
            cached_tokens: self.place.cached,
            output_tokens: self.n_out,
            queue_us: micros(self.submitted, self.admitted),
            prefill_us: micros(self.admitted, first),
            decode_us: micros(first, self.last_token.unwrap_or(first)),
        };
        send(&mut self.sink, Event::Finished(finished));
    }
}

fn error(what: &'static str) -> Taken {
    Taken::Over(FinishReason::Error, Some(what))
}

fn scored(id: u32, landed: &Landed) -> TokenEvent {
    let n = landed.n_top as usize;
    let top = landed.top_ids[..n].iter().copied().zip(landed.top_logprobs[..n].iter().copied()).collect();
    TokenEvent { id, logprob: Some(landed.logprob), top }
}

/// A sink is its caller's code: if it panics, its own request is cancelled, and nobody else's.
fn send(sink: &mut Box<dyn EventSink>, event: Event) -> bool {
    catch_unwind(AssertUnwindSafe(|| sink.send(event))).unwrap_or(false)
}

/// Microseconds between two times; 0 where they are in the other order.
pub(crate) fn micros(from: Instant, to: Instant) -> u64 {
    u64::try_from(to.saturating_duration_since(from).as_micros()).unwrap_or(u64::MAX)
}
