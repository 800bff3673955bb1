//! `arc eval`: how well a model predicts a text, and what exactly it computes.

mod logits;

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    sync::mpsc::{self, Receiver},
};

use anyhow::{Context, Result, anyhow, bail};
use arc::{
    config::Config,
    open::{self, Sizes},
    text::Special,
};
use arc_device::ops::sample::SamplerConfig;
use arc_engine::{
    engine::EngineHandle,
    request::{Event, FinishReason, Request},
};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::{
    EngineFlags, open_model,
    run::{read_bounded, without_last_newline},
};

/// Windows that are scored side by side, and rows that are scored in one step: every row of a window goes through the head.
const SIZES: Sizes = Sizes { slots: 4, heads: Some(128), random_rows: false };

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Perplexity of a text
    Ppl(PplArgs),
    /// Logits of every token of a prompt, to compare with another implementation
    Logits(logits::Args),
}

#[derive(Debug, clap::Args)]
struct PplArgs {
    /// Name or path of the model
    model: String,
    /// The text, UTF-8
    file: PathBuf,
    /// Tokens of a window; the first half of each is context, the second is scored
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..))]
    window: u32,
    /// Score only the first N windows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    windows: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: EngineFlags,
}

impl Args {
    /// Settings that were given as flags.
    pub fn given(&self) -> Vec<(String, String)> {
        match &self.what {
            What::Ppl(args) => args.flags.given(),
            What::Logits(args) => args.flags.given(),
        }
    }
}

pub fn run(args: &Args, config: &Config) -> Result<ExitCode> {
    match &args.what {
        What::Ppl(args) => perplexity(args, config),
        What::Logits(args) => logits::run(args, config),
    }
}

fn perplexity(args: &PplArgs, config: &Config) -> Result<ExitCode> {
    let name = args.file.display().to_string();
    let file = File::open(&args.file).with_context(|| format!("cannot open {name}"))?;
    let text = String::from_utf8(read_bounded(file, &name)?).map_err(|e| {
        anyhow!("{name} is not valid UTF-8: byte {} is the first wrong one", e.utf8_error().valid_up_to())
    })?;
    let model = open_model(&args.model, config)?;
    let context = model.limits(config, SIZES)?.context;
    if args.window as usize > context {
        let choice = if context < model.config.context() { "set --context or lower" } else { "lower" };
        bail!("a window has {} tokens, but the context is {context}: {choice} --window", args.window);
    }
    let running = open::start(&model, config, SIZES)?;
    let tokenizer = running.text.tokenizer();
    let mut tokens = tokenizer.encode(without_last_newline(&text), Special::Text);
    let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
    if let Some(bos) = bos {
        tokens.insert(0, bos);
    }
    let window = args.window as usize;
    let n_windows = (tokens.len() / window).min(args.windows.map_or(usize::MAX, |n| n as usize));
    if n_windows == 0 {
        bail!("{name} has {} tokens, fewer than one window of {window}", tokens.len());
    }
    // Each window begins as a text does.
    let windows = tokens.chunks_exact(window).take(n_windows).map(|w| {
        let mut w = w.to_vec();
        if let Some(bos) = bos {
            w[0] = bos;
        }
        w
    });
    let slots = config.slots.value().unwrap_or(SIZES.slots) as usize;
    let score = score(&running.engine, windows, n_windows, slots, config.progress.is_on())?;
    let mut out = io::stdout().lock();
    if args.json {
        let body = json!({
            "model": args.model,
            "file": name,
            "window": window,
            "windows": n_windows,
            "tokens_scored": score.n,
            "nll": score.mean(),
            "perplexity": score.perplexity(),
            "perplexity_error": score.perplexity() * score.mean_error(),
        });
        writeln!(out, "{body}")?;
    } else {
        let (ppl, error) = (score.perplexity(), score.perplexity() * score.mean_error());
        writeln!(out, "perplexity {ppl:.4} +/- {error:.4} over {} tokens in {n_windows} windows of {window}", score.n)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Sums over scored tokens, in f64.
#[derive(Debug, Default, Clone, Copy)]
struct Score {
    n: u64,
    nll: f64,
    nll_squared: f64,
}

impl Score {
    fn add(&mut self, logprob: f32) {
        let nll = -f64::from(logprob);
        self.n += 1;
        self.nll += nll;
        self.nll_squared += nll * nll;
    }

    fn mean(&self) -> f64 {
        self.nll / self.n as f64
    }

    /// Standard error of the mean.
    fn mean_error(&self) -> f64 {
        let n = self.n as f64;
        let variance = (self.nll_squared / n - self.mean() * self.mean()).max(0.0);
        if self.n > 1 { (variance / (n - 1.0)).sqrt() } else { 0.0 }
    }

    fn perplexity(&self) -> f64 {
        self.mean().exp()
    }
}

/// Scores windows, `slots` at a time. In a window of N tokens, those after position N / 2 are scored: the usual
/// measure, in which every scored token has at least half a window of context.
fn score(
    engine: &EngineHandle,
    windows: impl Iterator<Item = Vec<u32>>,
    n_windows: usize,
    slots: usize,
    progress: bool,
) -> Result<Score> {
    let bar = if progress { ProgressBar::new(n_windows as u64) } else { ProgressBar::hidden() };
    bar.set_style(
        ProgressStyle::with_template("{msg} [{bar:32}] {pos}/{len} windows {eta}")
            .expect("the template is constant and well formed")
            .progress_chars("=> "),
    );
    let mut score = Score::default();
    let mut running: VecDeque<(usize, Receiver<Event>)> = VecDeque::new();
    let mut finish = |running: &mut VecDeque<(usize, Receiver<Event>)>| -> Result<()> {
        let Some((len, events)) = running.pop_front() else { return Ok(()) };
        collect(&events, len, &mut score)?;
        bar.set_message(format!("perplexity {:.4}", score.perplexity()));
        bar.inc(1);
        Ok(())
    };
    for window in windows {
        if running.len() >= slots.max(1) {
            finish(&mut running)?;
        }
        let (sender, events) = mpsc::channel();
        let len = window.len();
        let sampling = SamplerConfig { temperature: 0.0, ..SamplerConfig::default() };
        let request = Request { max_tokens: Some(0), prompt_logprobs: Some(0), ..Request::new(window, sampling) };
        engine.submit(request, Box::new(sender))?;
        running.push_back((len, events));
    }
    while !running.is_empty() {
        finish(&mut running)?;
    }
    bar.finish_and_clear();
    Ok(score)
}

fn collect(events: &Receiver<Event>, len: usize, score: &mut Score) -> Result<()> {
    // Scores come for positions 1, 2, ...
    let mut position = 1;
    for event in events {
        match event {
            Event::Prompt(scores) => {
                for token in scores {
                    let logprob = token.logprob.context("a scored token came without its score")?;
                    if position > len / 2 {
                        score.add(logprob);
                    }
                    position += 1;
                }
            }
            Event::Token(_) | Event::Cached(_) => {}
            Event::Finished(finished) if finished.reason == FinishReason::Error => {
                bail!("{}", finished.error.unwrap_or_else(|| "the sequence failed".to_owned()));
            }
            Event::Finished(_) => {
                if position != len {
                    bail!("{} of {} tokens were scored", position - 1, len - 1);
                }
                return Ok(());
            }
        }
    }
    bail!("the engine ended before the text did")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perplexity_of_a_uniform_guess_is_the_number_of_choices() {
        let mut score = Score::default();
        for _ in 0..10 {
            score.add(-(50.0_f32.ln()));
        }
        assert!((score.perplexity() - 50.0).abs() < 1e-4);
        assert!(score.mean_error() < 1e-6);
    }
}
