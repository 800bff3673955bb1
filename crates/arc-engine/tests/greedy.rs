//! Greedy text of the real models against three references: transformers in f32, the same with int8 activation rows,
//! and llama.cpp (`tests/reference/greedy.py`).
//!
//! A continuation equals a reference's, or parts from it at a near-tie: a step at which the two candidates lie close
//! together in Arc's logits and in the reference's. After that step the two are different texts. So the f32 texts are
//! also fed to Arc, and the gap between the first two candidates is compared at every step of them, which says how much
//! noise Arc's logits carry beside what int8 activations cost anybody.

mod common;
mod cpu;

use std::sync::{Mutex, PoisonError};

use cpu::{Output, Rig};
use serde::Deserialize;

/// Two candidates that lie this close, in logits, are a near-tie. int8 activations alone move the gap of two candidates
/// by more than this in one step of a hundred (`shift_p99` in the goldens: 0.50 for SmolLM2, 0.42 for Gemma).
const NEAR_TIE: f32 = 0.5;
/// By how much the 20 first logprobs of a prompt's last position may differ from f32's. int8 rows move them by 0.33.
const LOGPROB_TOLERANCE: f32 = 0.4;

#[derive(Deserialize)]
struct Golden {
    n_new: usize,
    forced: Forced,
    cases: Vec<Case>,
}

/// What the f32 texts, fed to another engine, say of its noise.
#[derive(Deserialize)]
struct Forced {
    int8_rows: Noise,
    llama_cpp: Noise,
}

#[derive(Deserialize, Debug)]
struct Noise {
    /// Steps at which its first choice is the f32 token, `of` so many.
    argmax_equal: usize,
    of: usize,
    /// The widest f32 gap at which it is not.
    largest_gap_lost: f32,
    /// By how much the gap of f32's first two choices differs from f32's: root mean square, 99th percentile, largest.
    shift_rms: f32,
    shift_p99: f32,
    shift_max: f32,
}

#[derive(Deserialize)]
struct Case {
    label: String,
    prompt: Vec<u32>,
    llama_cpp: Text,
    f32: Text,
    int8_rows: Text,
    logits: Option<Logits>,
}

#[derive(Deserialize)]
struct Text {
    tokens: Vec<u32>,
    runner_up: Vec<u32>,
    gap: Vec<f32>,
}

/// The largest logits of the last prompt position.
#[derive(Deserialize)]
struct Logits {
    ids: Vec<u32>,
    f32: Vec<f32>,
    f32_lse: f32,
    int8_rows: Vec<f32>,
    int8_rows_lse: f32,
}

/// Where Arc's text parts from a reference's.
#[derive(Debug)]
struct Parting {
    step: usize,
    /// How far Arc's own choice lies above the reference's, in Arc's logits.
    ours: f32,
    /// How far the reference's choice lies above Arc's in the reference's logits; at least this far where Arc's is not
    /// its second.
    theirs: f32,
    is_second: bool,
}

impl Parting {
    fn find(output: &Output, text: &Text) -> Option<Parting> {
        let step = output.tokens.iter().zip(&text.tokens).position(|(token, want)| token.id != *want)?;
        let token = &output.tokens[step];
        let is_second = token.id == text.runner_up[step];
        let ours = logprob(&token.top, token.id) - logprob(&token.top, text.tokens[step]);
        Some(Parting { step, ours, theirs: text.gap[step], is_second })
    }

    fn is_near_tie(&self) -> bool {
        self.is_second && self.ours <= NEAR_TIE && self.theirs <= NEAR_TIE
    }
}

impl std::fmt::Display for Parting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let least = if self.is_second { ' ' } else { '>' };
        write!(f, "{:>2} {:.3} /{least}{:.3}", self.step, self.ours, self.theirs)
    }
}

fn logprob(top: &[(u32, f32)], wanted: u32) -> f32 {
    top.iter().find(|(id, _)| *id == wanted).map_or(f32::NEG_INFINITY, |(_, logprob)| *logprob)
}

/// Partings from f32, int8 rows and llama.cpp; prints the row of the table.
fn partings(case: &Case, output: &Output) -> [Option<Parting>; 3] {
    let partings = [&case.f32, &case.int8_rows, &case.llama_cpp].map(|text| Parting::find(output, text));
    let cells = partings.each_ref().map(|p| p.as_ref().map_or_else(|| "equal".into(), Parting::to_string));
    println!("{:<12} {:<20} {:<20} {:<20}", case.label, cells[0], cells[1], cells[2]);
    partings
}

/// Arc's noise by the scores of the f32 texts, which end the prompts that were scored.
fn noise<'a>(scored: impl Iterator<Item = (&'a Case, Output)>) -> Noise {
    let (mut equal, mut lost, mut shifts) = (0, 0.0f32, Vec::new());
    for (case, output) in scored {
        let text = &case.f32;
        let steps = &output.scores[output.scores.len() - text.tokens.len()..];
        for (i, step) in steps.iter().enumerate() {
            assert_eq!(step.id, text.tokens[i]);
            if step.top[0].0 == step.id {
                equal += 1;
            } else {
                lost = lost.max(text.gap[i]);
            }
            // Where the second of f32 is not among Arc's 20 first, it lies no higher than the last of them.
            let second = logprob(&step.top, text.runner_up[i]).max(step.top[19].1);
            let gap = step.logprob.expect("it was asked for") - second;
            shifts.push((gap - text.gap[i]).abs());
        }
    }
    shifts.sort_by(f32::total_cmp);
    let of = shifts.len();
    Noise {
        argmax_equal: equal,
        of,
        largest_gap_lost: lost,
        shift_rms: (shifts.iter().map(|s| s * s).sum::<f32>() / of as f32).sqrt(),
        shift_p99: shifts[of * 99 / 100],
        shift_max: shifts[of - 1],
    }
}

/// Largest difference of logprobs of the last prompt position from f32's, over Arc's 20 first; and int8 rows' over the
/// same ids.
fn logit_errors(logits: &Logits, output: &Output) -> (f32, f32) {
    let mut errors = (0.0f32, 0.0f32);
    let mut compared = 0;
    for &(id, logprob) in &output.tokens[0].top {
        let Some(at) = logits.ids.iter().position(|&other| other == id) else { continue };
        let want = logits.f32[at] - logits.f32_lse;
        errors.0 = errors.0.max((logprob - want).abs());
        errors.1 = errors.1.max((logits.int8_rows[at] - logits.int8_rows_lse - want).abs());
        compared += 1;
    }
    assert!(compared >= 18, "{compared} of Arc's 20 first are among the 64 first of f32");
    errors
}

/// Held by the model that runs: two engines at once would only take each other's cores.
static TURN: Mutex<()> = Mutex::new(());

/// Runs all prompts and all f32 texts together.
///
/// `matched`: on how many prompts f32, int8 rows and llama.cpp are matched to the end, and on how many some of them is.
/// Arc's bits are the same on every machine, so these are what was counted once; fewer is a change to look into.
fn check(name: &str, model: &str, matched: [usize; 4]) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let golden: Golden = serde_json::from_str(&cpu::golden(name)).expect("the golden is what greedy.py writes");
    let (cases, n_new) = (&golden.cases, golden.n_new);
    assert!(cases.len() >= 20 && n_new == 64);
    let context = cases.iter().map(|case| case.prompt.len()).max().expect("cases") + n_new;
    let rig = Rig::new(&common::real_model(model), 2, cpu::limits(cases.len(), context, 256));
    let fed = |case: &Case, from: usize| cpu::score(&[&case.prompt[from..], &case.f32.tokens].concat(), 20);
    // A prompt that lost its first token, the longer ones' beginning being too far away to matter.
    let short: Vec<&Case> = cases.iter().filter(|case| (8..16).contains(&case.prompt.len())).collect();
    let requests = cases.iter().map(|case| cpu::greedy(&case.prompt, n_new as u32, 20));
    let requests = requests.chain(cases.iter().map(|case| fed(case, 0))).chain(short.iter().map(|case| fed(case, 1)));
    let mut outputs = rig.ask(requests).into_iter().map(Output::complete).collect::<Vec<_>>();
    let wrong = outputs.split_off(2 * cases.len());
    let scored = outputs.split_off(cases.len());

    println!("{model}: step of parting, gap in Arc / in the reference");
    println!("{:<12} {:<20} {:<20} {:<20}", "prompt", "f32", "int8 rows", "llama.cpp");
    let rows: Vec<_> = cases.iter().zip(&outputs).map(|(case, output)| partings(case, output)).collect();
    let equal = |which: usize| rows.iter().filter(|row| row[which].is_none()).count();
    let some = rows.iter().filter(|row| row.iter().any(Option::is_none)).count();
    let counted = [equal(0), equal(1), equal(2), some];
    println!("of {}, matched to the end: {counted:?}, the last being some reference", cases.len());
    let widest = 2.0 * golden.forced.int8_rows.shift_p99;
    for (case, row) in cases.iter().zip(&rows) {
        let explained = row.iter().any(|p| p.as_ref().is_none_or(Parting::is_near_tie));
        assert!(explained, "{}: no reference is matched, nor left at a near-tie: {row:?}", case.label);
        // To part, the logits of two engines must lie apart by both gaps together; both have their own noise.
        for p in row.iter().flatten() {
            assert!(p.ours + p.theirs <= widest, "{}: {p:?}, more than {widest}", case.label);
        }
    }
    assert!(counted.iter().zip(&matched).all(|(got, want)| got >= want), "{counted:?}, want {matched:?}");

    let ours = noise(cases.iter().zip(scored));
    let Forced { int8_rows, llama_cpp } = &golden.forced;
    println!("fed with the f32 texts\n  Arc       {ours:?}\n  int8 rows {int8_rows:?}\n  llama.cpp {llama_cpp:?}");
    // No noisier than the noisier of two engines that round activations as well.
    let no_worse = |of: fn(&Noise) -> f32| of(&ours) <= of(int8_rows).max(of(llama_cpp));
    assert_eq!(ours.of, int8_rows.of);
    assert!(ours.argmax_equal >= int8_rows.argmax_equal.min(llama_cpp.argmax_equal));
    assert!(no_worse(|n| n.shift_rms) && no_worse(|n| n.shift_p99) && no_worse(|n| n.shift_max));
    assert!(no_worse(|n| n.largest_gap_lost));
    let wrong = noise(short.iter().copied().zip(wrong));
    println!("  without the first token of {} short prompts {wrong:?}", short.len());
    assert!(wrong.shift_rms > 2.0 * int8_rows.shift_rms.max(llama_cpp.shift_rms), "the comparison can fail");

    let mut compared = 0;
    for (case, output) in cases.iter().zip(&outputs) {
        let Some(logits) = &case.logits else { continue };
        let (error, int8) = logit_errors(logits, output);
        println!("last prompt position of {}: logprobs off by {error:.3}, int8 rows by {int8:.3}", case.label);
        assert!(error <= LOGPROB_TOLERANCE, "{}: {error}", case.label);
        compared += 1;
    }
    assert_eq!(compared, 3);
}

#[test]
fn smollm2() {
    check("greedy_smollm2.json", cpu::SMOLLM2, [5, 5, 6, 8]);
}

#[test]
fn gemma3() {
    check("greedy_gemma3.json", cpu::GEMMA3, [8, 13, 6, 15]);
}
