//! `arc-conformance`: every family's and stage's cases on the CPU and on a GPU, compared.
//!
//! ```text
//! arc-conformance [--require-gpu] [--perf] [--device N] [FILTER...]
//! ```
//!
//! Exact families compare bits, bounded ones report the largest error and where it is. `--perf` measures instead. Without
//! a GPU the program says what it skipped and exits 0; with `--require-gpu` it exits 2. A failed case: exit 1.

#![forbid(unsafe_code)]

mod compare;
mod inputs;
mod state;
mod suite;

use std::process::ExitCode;

use suite::Suite;

const USAGE: &str = "usage: arc-conformance [--require-gpu] [--perf] [--device N] [FILTER...]";

fn main() -> ExitCode {
    let (mut require, mut perf, mut ordinal, mut filters) = (false, false, 0, Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match &*arg {
            "--require-gpu" => require = true,
            "--perf" => perf = true,
            "--device" => match args.next().and_then(|n| n.parse().ok()) {
                Some(n) => ordinal = n,
                None => return usage("--device takes a number"),
            },
            flag if flag.starts_with('-') => return usage(&format!("unknown option {flag}")),
            _ => filters.push(arg),
        }
    }
    let mut suite = Suite::new(ordinal, perf, filters);
    if let Err(why) = suite.look() {
        eprintln!("skipped: every case, since {why}");
        return ExitCode::from(if require { 2 } else { 0 });
    }
    state::cases(&mut suite);
    suite.finish()
}

fn usage(what: &str) -> ExitCode {
    eprintln!("{what}\n{USAGE}");
    ExitCode::from(2)
}
