//! `arc-conformance`: every family's and stage's cases on the CPU and on a GPU, compared.
//!
//! ```text
//! arc-conformance [--require-gpu] [--perf] [--list] [--repeat N] [--device N] [--model PATH]... [--skip TEXT]... [FILTER...]
//! ```
//!
//! Cases run whose names contain a FILTER, if there is one, and no TEXT; each N times.
//!
//! Exact families compare bits, bounded ones report the largest error and where it is. `--model` adds
//! whole models: greedy texts, invariance, what a decode step costs. `--perf` measures instead, `--list` names cases. Without
//! a GPU the program says what it skipped and exits 0; with `--require-gpu` it exits 2. A failed case: exit 1. No case of that name:
//! exit 2.

#![forbid(unsafe_code)]

mod chain;
mod compare;
mod draft;
mod faults;
mod golden;
mod hc;
mod inputs;
mod kv;
mod latent;
mod launches;
mod layers;
mod matmul;
mod models;
mod moe;
mod quant;
mod row_faults;
mod rows;
mod sample;
mod state;
mod suite;
mod synthetic;

use std::path::PathBuf;
use std::process::ExitCode;

use suite::Suite;

const USAGE: &str = "usage: arc-conformance [--require-gpu] [--perf] [--list] [--repeat N] [--device N] [--model PATH]... [--skip TEXT]... [FILTER...]";

fn main() -> ExitCode {
    let (mut require, mut perf, mut list, mut ordinal, mut repeat) = (false, false, false, 0, 1);
    let (mut filters, mut skips, mut models) = (Vec::new(), Vec::new(), Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match &*arg {
            "--require-gpu" => require = true,
            "--perf" => perf = true,
            "--list" => list = true,
            "--device" => match args.next().and_then(|n| n.parse().ok()) {
                Some(n) => ordinal = n,
                None => return usage("--device takes a number"),
            },
            "--repeat" => match args.next().and_then(|n| n.parse().ok()) {
                Some(n) => repeat = n,
                None => return usage("--repeat takes a number"),
            },
            "--help" => {
                println!("{USAGE}");
                return ExitCode::SUCCESS;
            }
            "--child" => return faults::child(&args.collect::<Vec<_>>()),
            "--model" => match args.next() {
                Some(path) => models.push(PathBuf::from(path)),
                None => return usage("--model takes a file or folder"),
            },
            "--skip" => match args.next() {
                Some(text) => skips.push(text),
                None => return usage("--skip takes a part of a name"),
            },
            flag if flag.starts_with('-') => return usage(&format!("unknown option {flag}")),
            _ => filters.push(arg),
        }
    }
    let mut suite = Suite::new(ordinal, perf, filters, skips).repeat(repeat);
    if list {
        suite = suite.list();
    } else if let Err(why) = suite.look() {
        eprintln!("skipped: every case, since {why}");
        return ExitCode::from(if require { 2 } else { 0 });
    }
    matmul::cases(&mut suite);
    kv::cases(&mut suite);
    layers::cases(&mut suite);
    sample::cases(&mut suite);
    quant::cases(&mut suite);
    latent::cases(&mut suite);
    state::cases(&mut suite);
    faults::cases(&mut suite);
    models::cases(&mut suite, &models);
    hc::cases(&mut suite);
    draft::cases(&mut suite);
    moe::cases(&mut suite);
    chain::cases(&mut suite);
    launches::cases(&mut suite);
    synthetic::cases(&mut suite);
    suite.finish()
}

fn usage(what: &str) -> ExitCode {
    eprintln!("{what}\n{USAGE}");
    ExitCode::from(2)
}
