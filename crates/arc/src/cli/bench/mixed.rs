//! A prompt that arrives while others decode: what they feel of it, and how long it waits.

use std::{sync::mpsc, time::Instant};

use anyhow::{Result, bail, ensure};
use arc_engine::{engine::EngineHandle, request::FinishReason};
use serde_json::{Value, json};

use super::{Args, Series, Stopwatch, prompt, request};

/// Tokens of every stream before the prompt arrives.
const SETTLED: usize = 16;

/// What the arrivals of a run were like.
#[derive(Default)]
pub struct Mixed {
    /// From a token of a stream to its next, before the prompt arrived.
    quiet_ms: Vec<f64>,
    /// The same while it entered.
    entering_ms: Vec<f64>,
    /// From the arrival to its first token.
    ttft_ms: Vec<f64>,
    /// Steps that landed after the arrival before one that held rows of it.
    waited_steps: Vec<f64>,
}

impl Mixed {
    /// `--batch` streams decode `--tg` tokens; a prompt of `--pp` tokens arrives.
    pub fn arrival(&mut self, engine: &EngineHandle, args: &Args, vocab: u32, rep: u32) -> Result<()> {
        let (sender, events) = mpsc::channel();
        let submit = |seq: u32, n_prompt: u32, n: u32| {
            let sink = Stopwatch { seq: seq as usize, events: sender.clone() };
            engine.submit(request(args, prompt(n_prompt, vocab, rep, seq), n), Box::new(sink))
        };
        (0..args.batch).try_for_each(|seq| submit(seq, 1, args.tg).map(drop))?;
        let streams = args.batch as usize;
        let mut tokens = vec![Vec::new(); streams + 1];
        let mut running = streams;
        let mut arrived = None;
        while running > 0 {
            let (seq, at, reason, error) = events.recv()?;
            match reason {
                None => tokens[seq].push(at),
                Some(FinishReason::Length) => running -= 1,
                Some(_) => bail!("{}", error.unwrap_or_else(|| "a sequence ended early".to_owned())),
            }
            if arrived.is_none() && tokens[..streams].iter().all(|tokens| tokens.len() >= SETTLED) {
                let landed = engine.last_steps(1).last().map_or(0, |record| record.step);
                arrived = Some((Instant::now(), landed));
                submit(args.batch, args.pp, 1)?;
                running += 1;
            }
        }
        let entered = tokens.pop().and_then(|newcomer| newcomer.first().copied());
        let (Some((arrived, landed)), Some(entered)) = (arrived, entered) else {
            bail!("the streams ended before a prompt arrived: give them more tokens with --tg");
        };
        let decoded = tokens.iter().all(|tokens| tokens.last().is_some_and(|&last| last > entered));
        ensure!(decoded, "the streams ended before the prompt had entered: give them more tokens with --tg");
        let ms = |from: Instant, to: Instant| (to - from).as_secs_f64() * 1e3;
        self.ttft_ms.push(ms(arrived, entered));
        for pair in tokens.iter().flat_map(|tokens| tokens.windows(2)) {
            // The gap that the arrival falls into belongs to what ran before.
            if pair[1] <= arrived {
                self.quiet_ms.push(ms(pair[0], pair[1]));
            } else if arrived < pair[0] && pair[0] < entered {
                self.entering_ms.push(ms(pair[0], pair[1]));
            }
        }
        let steps = engine.steps_after(landed);
        let waited = steps.iter().position(|record| record.seqs > args.batch);
        self.waited_steps.extend(waited.map(|steps| steps as f64));
        Ok(())
    }

    pub fn json(&self, args: &Args) -> Value {
        let gaps = |ms: &[f64]| json!({"p50": quantile(ms, 0.5), "p99": quantile(ms, 0.99), "n": ms.len()});
        json!({
            "streams": args.batch,
            "prompt": args.pp,
            "quiet_ms": gaps(&self.quiet_ms),
            "entering_ms": gaps(&self.entering_ms),
            "ttft_ms": Series(self.ttft_ms.clone()).json(),
            "waited_steps": Series(self.waited_steps.clone()).json(),
        })
    }

    pub fn text(&self, args: &Args) -> String {
        let gaps = |ms: &[f64]| format!("{:.2} ms, {:.2} at the 99th of 100", quantile(ms, 0.5), quantile(ms, 0.99));
        let waited = Series(self.waited_steps.clone());
        format!(
            "{} streams, from token to token: {}; while {} tokens enter: {}\nfirst token after {:.1} ms; {} steps ran \
             between arrival and the first with rows of it, at most {}",
            args.batch,
            gaps(&self.quiet_ms),
            args.pp,
            gaps(&self.entering_ms),
            Series(self.ttft_ms.clone()).median(),
            waited.median(),
            waited.ends().1,
        )
    }
}

/// The value that a share of `values` does not exceed; 0 of none.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(at.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!([0.5, 0.99, 1.0].map(|share| quantile(&values, share)), [100.0, 198.0, 200.0]);
        assert_eq!((quantile(&[7.0], 0.5), quantile(&[], 0.99)), (7.0, 0.0));
    }
}
