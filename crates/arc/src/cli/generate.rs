//! What `run` and `chat` share: sampler flags, Ctrl-C, and one answer streamed to the terminal.

use std::{
    io,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    time::Duration,
};

use anyhow::{Context, Result, anyhow};
use arc::{answer::Answer, model_text::ModelText, text::StopMatcher};
use arc_device::ops::sample::SamplerConfig;
use arc_engine::{
    engine::EngineHandle,
    request::{Event, FinishReason, Finished, Request, RequestLimits, ValidRequest},
};

/// What narrows a draw. What is not said is as the command has it.
#[derive(Debug, Clone, clap::Args)]
pub struct DrawFlags {
    /// 0 always takes the most likely token [default: 0.7; for bench 0]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temp: Option<f32>,
    /// Keep the most likely tokens that together have this probability; 1: all [default: 0.95; for bench 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Keep the K most likely tokens; 0: all [default: 0]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<u32>,
    /// Keep tokens at least this likely, relative to the most likely; 0: all [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Penalty on tokens that prompt or answer hold, as a factor; 1: none [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
}

impl DrawFlags {
    /// What was said over what is usual.
    pub fn over(&self, usual: SamplerConfig) -> SamplerConfig {
        SamplerConfig {
            temperature: self.temp.unwrap_or(usual.temperature),
            top_p: self.top_p.unwrap_or(usual.top_p),
            top_k: self.top_k.unwrap_or(usual.top_k),
            min_p: self.min_p.unwrap_or(usual.min_p),
            repetition: self.repetition_penalty.unwrap_or(usual.repetition),
            ..usual
        }
    }
}

/// How tokens are drawn and where the answer ends.
#[derive(Debug, Clone, clap::Args)]
pub struct SamplingArgs {
    /// Most tokens of the answer
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true)]
    max_tokens: Option<u32>,
    #[command(flatten)]
    draws: DrawFlags,
    /// Penalty on tokens that the answer holds; 0: none
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Penalty on tokens for each time that the answer holds them; 0: none
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// The same seed gives the same answer; without it, one is drawn and shown
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<u64>,
    /// End the answer before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
}

impl SamplingArgs {
    /// Checks everything that can be checked before a model is there.
    pub fn check(&self) -> Result<()> {
        StopMatcher::check(&self.stop).map_err(|e| anyhow!("--stop: {e}"))?;
        let any = RequestLimits { vocab: u32::MAX, context: u32::MAX, kv_tokens: u32::MAX, default_max_tokens: 1 };
        ValidRequest::new(Request::new(vec![0], self.sampling()), &any)?;
        Ok(())
    }

    fn sampling(&self) -> SamplerConfig {
        SamplerConfig {
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
            seed: self.seed.unwrap_or_else(arc::answer::fresh_seed),
            ..self.draws.over(SamplerConfig { temperature: 0.7, top_p: 0.95, ..SamplerConfig::default() })
        }
    }

    /// A request for an answer to `prompt`.
    pub fn request(&self, text: &ModelText, prompt: Vec<u32>) -> Request {
        Request {
            max_tokens: self.max_tokens,
            stop_ids: text.tokenizer().stop_ids().to_vec(),
            ..Request::new(prompt, self.sampling())
        }
    }

    /// Stop strings.
    pub fn stops(&self) -> &[String] {
        &self.stop
    }
}

/// An answer, and what it took.
#[derive(Debug)]
pub struct Outcome {
    /// Its text.
    pub text: String,
    /// Why it ended: `stop`, `length`, `interrupted`.
    pub reason: &'static str,
    /// What the engine measured.
    pub finished: Finished,
    /// Tokens of the answer.
    pub n_tokens: u32,
}

impl Outcome {
    /// Prompt tokens that ran by the time from admission to the first token.
    pub fn prefill_rate(&self) -> f64 {
        rate(f64::from(self.finished.prompt_tokens - self.finished.cached_tokens), self.finished.prefill_us)
    }

    /// Tokens after the first by their time.
    pub fn decode_rate(&self) -> f64 {
        rate(f64::from(self.finished.output_tokens.saturating_sub(1)), self.finished.decode_us)
    }

    /// One line for people.
    pub fn summary(&self, seed: u64) -> String {
        let f = &self.finished;
        let cached = if f.cached_tokens > 0 { format!(" ({} known)", f.cached_tokens) } else { String::new() };
        let rate = |r: f64| if r > 0.0 { format!("{r:.1} tok/s") } else { "-".to_owned() };
        format!(
            "prefill {} tokens{cached}, {} | decode {} tokens, {} | {} | seed {seed}",
            f.prompt_tokens,
            rate(self.prefill_rate()),
            self.n_tokens,
            rate(self.decode_rate()),
            self.reason,
        )
    }
}

/// Things a second; 0 where no time passed.
pub fn rate(things: f64, us: u64) -> f64 {
    if us == 0 { 0.0 } else { things * 1e6 / us as f64 }
}

/// Set by Ctrl-C, taken by whoever answers at the time.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C ends an answer; a second one, before anybody took notice of the first, ends the process.
pub fn catch_interrupts() -> Result<()> {
    ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::SeqCst) {
            std::process::exit(super::INTERRUPTED.into());
        }
    })
    .context("cannot catch Ctrl-C")
}

/// Runs one request and passes its text on as it comes. Ctrl-C ends it early, which is not an error.
///
/// Errors: refused, failed, or `on_text` failed (the request is then cancelled).
pub fn answer(
    engine: &EngineHandle,
    text: &ModelText,
    request: Request,
    stops: &[String],
    mut on_text: impl FnMut(&str) -> io::Result<()>,
) -> Result<Outcome> {
    INTERRUPTED.store(false, Ordering::SeqCst);
    let (sender, events) = mpsc::channel();
    let mut answer = Answer::new(text.tokenizer().clone(), stops, request.stop_ids.clone());
    let id = engine.submit(request, Box::new(sender))?;
    let mut whole = String::new();
    let mut interrupted = false;
    let mut pass = |piece: &str, whole: &mut String| -> io::Result<()> {
        whole.push_str(piece);
        if piece.is_empty() { Ok(()) } else { on_text(piece) }
    };
    loop {
        let event = match events.recv_timeout(Duration::from_millis(50)) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => {
                if INTERRUPTED.swap(false, Ordering::SeqCst) {
                    interrupted = true;
                    engine.cancel(id);
                }
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => {
                let fault = engine.fault().map_or_else(|| "the engine has ended".to_owned(), |f| f.to_string());
                return Err(anyhow!(fault));
            }
        };
        match event {
            Event::Prompt(_) | Event::Cached(_) => {}
            Event::Token(token) => {
                if INTERRUPTED.swap(false, Ordering::SeqCst) {
                    interrupted = true;
                    engine.cancel(id);
                }
                if interrupted {
                    continue;
                }
                let already = answer.stopped();
                let piece = answer.push(token);
                if piece.stopped && !already {
                    engine.end(id, FinishReason::Stop);
                }
                pass(&piece.text, &mut whole).inspect_err(|_| engine.cancel(id))?;
            }
            Event::Finished(finished) => {
                if matches!(finished.reason, FinishReason::Grammar | FinishReason::Error) {
                    return Err(anyhow!(finished.error.unwrap_or_else(|| "the sequence failed".to_owned())));
                }
                pass(&answer.finish().text, &mut whole)?;
                let reason = match finished.reason {
                    _ if interrupted => "interrupted",
                    _ if answer.stopped() => "stop",
                    FinishReason::Stop => "stop",
                    FinishReason::Length => "length",
                    FinishReason::Cancelled | FinishReason::Grammar | FinishReason::Error => "cancelled",
                };
                return Ok(Outcome { text: whole, reason, finished, n_tokens: answer.n_tokens() });
            }
        }
    }
}
