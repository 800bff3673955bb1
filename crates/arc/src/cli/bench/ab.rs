//! `arc bench --ab`: what a setting changes, in turns A B A B, against how much either side changes by itself.
//!
//! A machine drifts: clocks fall, neighbours come. A difference is one only where it is larger than what both sides showed
//! between their own turns.

use std::{
    fs,
    io::{self, Write},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, bail};
use arc::{
    config::{Config, Scope, setting},
    open::{Described, OpenError},
};
use serde_json::{Value, json};

use super::{Args, Figures, open_model, setting_of};

/// How long a turn waits for the memory that another process, or the turn before, still has.
const WAIT_FOR_ROOM: Duration = Duration::from_secs(60);

/// One side, and what its turns reached.
struct Side {
    name: String,
    model: Described,
    config: Config,
    /// Medians of the turns, tokens a second: prefill and decode.
    rates: [Vec<f64>; 2],
    /// The load of the machine when each turn began.
    loads: Vec<String>,
}

impl Side {
    fn new(name: String, args: &Args, config: &Config) -> Result<Side> {
        let model = open_model(&args.model, config)?;
        let config = args.sized(config, &model)?;
        Ok(Side { name, model, config, rates: Default::default(), loads: Vec::new() })
    }

    fn turn(&mut self, args: &Args) -> Result<()> {
        self.loads.push(load_average());
        let figures = measure(args, &self.model, &self.config)?;
        let decode = figures.decode();
        for (of, series) in [figures.prefill, decode].into_iter().enumerate() {
            if !series.0.is_empty() {
                self.rates[of].push(series.median());
            }
        }
        Ok(())
    }

    fn json(&self, args: &Args) -> Value {
        let [prefill, decode] = &self.rates;
        json!({
            "name": self.name,
            "environment": setting_of(args, &self.model, &self.config),
            "load_average": self.loads,
            "prefill_tokens_per_s": prefill,
            "decode_tokens_per_s": decode,
        })
    }
}

/// A turn, once there is room for it.
fn measure(args: &Args, model: &Described, config: &Config) -> Result<Figures> {
    let began = Instant::now();
    loop {
        match Figures::measure(args, model, config) {
            Err(error)
                if matches!(error.downcast_ref(), Some(OpenError::NoRoom(_))) && began.elapsed() < WAIT_FOR_ROOM =>
            {
                thread::sleep(Duration::from_secs(1));
            }
            figures => return figures,
        }
    }
}

/// The system's own three figures, or nothing where it has none.
fn load_average() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// What B is to A.
#[derive(Debug, PartialEq)]
struct Delta {
    /// B's mean by A's.
    ratio: f64,
    /// How far the turns of a side are apart, by its mean: of both sides together.
    drift: f64,
}

impl Delta {
    /// Of the rates of their turns; `None` where nothing was measured.
    fn of(a: &[f64], b: &[f64]) -> Option<Delta> {
        let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
        let apart = |x: &[f64]| {
            let (min, max) = x.iter().fold((f64::INFINITY, 0.0_f64), |(min, max), v| (v.min(min), v.max(max)));
            (max - min) / mean(x)
        };
        if a.is_empty() || b.is_empty() {
            return None;
        }
        Some(Delta { ratio: mean(b) / mean(a), drift: apart(a) + apart(b) })
    }

    /// Whether there is a difference.
    fn is_one(&self) -> bool {
        (self.ratio - 1.0).abs() > self.drift
    }

    fn json(&self) -> Value {
        json!({"ratio": self.ratio, "drift": self.drift, "is_a_difference": self.is_one()})
    }

    fn text(&self) -> String {
        let (ratio, drift) = (self.ratio, 100.0 * self.drift);
        if self.is_one() {
            format!(
                "B / A = {ratio:.4} ({:+.2} %), beyond the {drift:.2} % that A and B drift by themselves",
                100.0 * (ratio - 1.0)
            )
        } else {
            format!("no difference is seen: B / A = {ratio:.4}, and A and B drift {drift:.2} % by themselves")
        }
    }
}

pub fn run(args: &Args, config: &Config) -> Result<ExitCode> {
    let mut other = config.clone();
    for assignment in &args.ab {
        other = other.with(assignment).map_err(|why| anyhow!("--ab: {why}"))?;
        let name = assignment.split('=').next().unwrap_or_default().trim().replace('-', "_");
        if setting(&name).is_none_or(|s| s.scope != Scope::Engine) {
            bail!("--ab: `{name}` changes nothing of an engine");
        }
    }
    if other == *config {
        bail!("--ab {}: that is how it is already", args.ab.join(" --ab "));
    }
    let mut sides = [Side::new("as it is".to_owned(), args, config)?, Side::new(args.ab.join(", "), args, &other)?];
    for _ in 0..args.turns {
        for side in &mut sides {
            side.turn(args)?;
        }
    }
    let [a, b] = &sides;
    let deltas = [0, 1].map(|of| Delta::of(&a.rates[of], &b.rates[of]));
    let mut out = io::stdout().lock();
    if args.json {
        let [prefill, decode] = deltas.map(|delta| delta.map(|delta| delta.json()));
        let body = json!({"a": a.json(args), "b": b.json(args), "prefill": prefill, "decode": decode});
        writeln!(out, "{body:#}")?;
        return Ok(ExitCode::SUCCESS);
    }
    for (of, what) in ["prefill", "decode"].into_iter().enumerate() {
        let Some(delta) = &deltas[of] else { continue };
        for (letter, side) in ["A", "B"].into_iter().zip(&sides) {
            let turns = side.rates[of].iter().map(|rate| format!("{rate:9.2}")).collect::<String>();
            writeln!(out, "{what:7}  {letter} {turns} tok/s  {}", side.name)?;
        }
        writeln!(out, "{what:7}  {}", delta.text())?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_inside_the_drift_is_none() {
        let delta = Delta::of(&[100.0, 104.0], &[106.0, 109.0]).expect("both ran");
        assert!(!delta.is_one() && delta.text().starts_with("no difference"), "{delta:?}");
        let delta = Delta::of(&[100.0, 101.0], &[110.0, 110.5]).expect("both ran");
        assert!(delta.is_one() && delta.text().contains("+9.70 %"), "{}", delta.text());
        let slower = Delta::of(&[100.0, 101.0], &[90.0, 91.0]).expect("both ran");
        assert!(slower.is_one() && slower.ratio < 1.0);
        assert_eq!(Delta::of(&[], &[1.0]), None);
    }
}
