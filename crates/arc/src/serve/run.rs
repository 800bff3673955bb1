//! A job while it runs: events from the engine in, pieces of answers out.

use std::{sync::Arc, time::Duration};

use arc_engine::{
    engine::RequestId,
    request::{Event, EventSink, FinishReason, TokenEvent},
};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::Instant,
};

use super::{App, ending::Stage, error::ApiError, job::Job};
use crate::answer::{Answer, Piece};

/// What happens to one choice.
#[derive(Debug)]
pub enum Update {
    /// The prompt's scores: token 1, 2, ...
    Prompt(Vec<TokenEvent>),
    /// More of the answer.
    Piece(Piece),
    /// Its end: the finish reason as the API spells it.
    End(&'static str),
}

/// Tokens that a job took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompts, each counted once.
    pub prompt: u64,
    /// Of them those that did not run, as far as their sequences have begun.
    pub cached: u64,
    /// Of the answers.
    pub output: u64,
}

/// A running job. Dropping it cancels what still runs, so a client that goes away costs at most the steps in flight.
pub struct Run {
    app: Arc<App>,
    events: UnboundedReceiver<(usize, Event)>,
    choices: Vec<Running>,
    usage: Usage,
    /// Choices of each prompt.
    per_prompt: usize,
    deadline: Instant,
    /// See [`Job::described_by`].
    described_by: &'static str,
    /// Updates of one event that did not fit in one return value.
    next: Vec<(usize, Update)>,
}

struct Running {
    id: RequestId,
    answer: Answer,
    /// The engine has said its last word, or nobody wants to hear it.
    done: bool,
}

/// Where the engine puts events. Unbounded, since the engine thread must not wait; a request's own limits bound it.
struct Sink {
    choice: usize,
    events: UnboundedSender<(usize, Event)>,
}

impl EventSink for Sink {
    fn send(&mut self, event: Event) -> bool {
        self.events.send((self.choice, event)).is_ok()
    }
}

impl Run {
    /// Submits every choice of the job, whose request `began` then. Errors: the first refusal; what was submitted before it is cancelled.
    pub fn start(app: &Arc<App>, job: &mut Job, began: Instant) -> Result<Run, ApiError> {
        let (sender, events) = unbounded_channel();
        let timeout = Duration::from_secs(app.http.request_timeout_s.into());
        let per_prompt = (job.choices.len() / job.n_prompts).max(1);
        let mut run = Run {
            per_prompt,
            app: app.clone(),
            events,
            choices: Vec::with_capacity(job.choices.len()),
            usage: Usage::default(),
            deadline: began + timeout,
            described_by: job.described_by,
            next: Vec::new(),
        };
        for (choice, c) in job.choices.iter_mut().enumerate() {
            let answer = Answer::new(app.text.tokenizer().clone(), &job.stops, job.stop_ids.clone());
            let request =
                std::mem::replace(&mut c.request, arc_engine::request::Request::new(Vec::new(), Default::default()));
            if choice % per_prompt == 0 {
                run.usage.prompt += request.prompt.len() as u64;
            }
            let id = app.backend.submit(request, Box::new(Sink { choice, events: sender.clone() }))?;
            run.choices.push(Running { id, answer, done: false });
        }
        Ok(run)
    }

    /// The next thing that happens; `None` once every choice has ended. Errors end the job: a sequence failed, it took
    /// too long, or the server ends.
    pub async fn next(&mut self) -> Result<Option<(usize, Update)>, ApiError> {
        loop {
            if let Some(update) = self.next.pop() {
                return Ok(Some(update));
            }
            if self.choices.iter().all(|c| c.done) {
                return Ok(None);
            }
            let event = tokio::time::timeout_at(self.deadline, self.events.recv());
            let Ok(event) = self.app.ending.before(Stage::Over, event).await? else {
                return Err(ApiError::timed_out(self.app.http.request_timeout_s));
            };
            let Some((choice, event)) = event else {
                return Err(ApiError::unavailable(
                    self.app.backend.fault().unwrap_or_else(|| "the engine has ended".to_owned()),
                ));
            };
            if !self.choices[choice].done {
                self.take(choice, event)?;
            }
        }
    }

    /// Tokens so far.
    pub fn usage(&self) -> Usage {
        Usage { output: self.choices.iter().map(|c| u64::from(c.answer.n_tokens())).sum(), ..self.usage }
    }

    fn take(&mut self, choice: usize, event: Event) -> Result<(), ApiError> {
        let running = &mut self.choices[choice];
        match event {
            // A prompt counts once, as its first choice finds it.
            Event::Cached(n) if choice.is_multiple_of(self.per_prompt) => self.usage.cached += u64::from(n),
            Event::Cached(_) => {}
            Event::Prompt(scores) => self.next.push((choice, Update::Prompt(scores))),
            Event::Token(token) => {
                let piece = running.answer.push(token);
                if piece.stopped {
                    running.done = true;
                    self.app.backend.end(running.id, FinishReason::Stop);
                    self.next.push((choice, Update::End("stop")));
                }
                if !piece.text.is_empty() || !piece.tokens.is_empty() {
                    self.next.push((choice, Update::Piece(piece)));
                }
            }
            Event::Finished(finished) => {
                running.done = true;
                let reason = match finished.reason {
                    FinishReason::Stop => "stop",
                    FinishReason::Length => "length",
                    FinishReason::Cancelled => {
                        return Err(ApiError::unavailable("the request was cancelled by the server"));
                    }
                    FinishReason::Error => {
                        return Err(ApiError::failed(
                            finished.error.unwrap_or_else(|| "the sequence failed".to_owned()),
                        ));
                    }
                    // The client's schema is at fault, not the server.
                    FinishReason::Grammar => {
                        let why = finished.error.unwrap_or_else(|| "it leads to nothing".to_owned());
                        return Err(ApiError::field(self.described_by, format!("{}: {why}", self.described_by)));
                    }
                };
                let piece = running.answer.finish();
                let reason = if piece.stopped { "stop" } else { reason };
                // Last in, first out.
                self.next.push((choice, Update::End(reason)));
                if !piece.text.is_empty() || !piece.tokens.is_empty() {
                    self.next.push((choice, Update::Piece(piece)));
                }
            }
        }
        Ok(())
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        for running in self.choices.iter().filter(|c| !c.done) {
            self.app.backend.end(running.id, FinishReason::Cancelled);
        }
    }
}
