//! The fast sampler against the contract written plainly, on inputs made to tell mistakes apart.

mod behaviour;
mod reference;

use reference::{MUTANTS, Mutant, reference};

use super::dry::DryTable;
use super::seen::SeenTokens;
use super::*;
use crate::rng::philox4x32;
use crate::simd::{Isa, force_isa};

/// One row and everything that its token depends on.
#[derive(Debug, Clone, Default)]
pub(super) struct Case {
    logits: Vec<f32>,
    config: SamplerConfig,
    prompt: Vec<u32>,
    output: Vec<u32>,
    grammar: Option<Vec<u32>>,
    stop_ids: Vec<u32>,
    draw_index: u32,
}

impl Case {
    fn of(logits: Vec<f32>, config: SamplerConfig) -> Self {
        Case { logits, config, ..Case::default() }
    }

    fn sample(&self, scratch: &mut Scratch) -> Sampled {
        self.sample_with(None, scratch)
    }

    fn sample_with(&self, logprobs: Option<u32>, scratch: &mut Scratch) -> Sampled {
        let params = SamplerParams::new(&self.config);
        let history: Vec<u32> = self.prompt.iter().chain(&self.output).copied().collect();
        let mut seen = SeenTokens::new(self.logits.len(), &self.prompt, history.len());
        // The output's end as drafts: to the sampler they are as good as emitted.
        let n_drafts = self.output.len().min(self.draw_index as usize % 5);
        let (output, drafts) = self.output.split_at(self.output.len() - n_drafts);
        output.iter().for_each(|&id| seen.push(id));
        let table = self.config.dry.as_ref().and_then(DryTable::new);
        let row = RowInputs {
            bias: &self.config.bias,
            grammar: self.grammar.as_deref(),
            stop_ids: &self.stop_ids,
            seen: seen.tokens(),
            drafts,
            dry: table.as_ref().map(|table| DryInputs { table, history: &history }),
            logprobs,
        };
        sample_row(&self.logits, &params, &row, self.draw_index, scratch)
    }
}

/// A reproducible stream of random choices.
struct Gen {
    seed: u32,
    n: u32,
}

impl Gen {
    fn new(seed: u32) -> Self {
        Gen { seed, n: 0 }
    }

    fn word(&mut self) -> u32 {
        self.n += 1;
        philox4x32([self.n, 0, 0, 0], [self.seed, 77])[0]
    }

    fn below(&mut self, n: usize) -> usize {
        ((u64::from(self.word()) * n as u64) >> 32) as usize
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }

    /// Roughly normal, mean 0, deviation 1.
    fn normal(&mut self) -> f32 {
        let sum: f32 = (0..6).map(|_| self.word() as f32 / 4_294_967_296.0).sum();
        (sum - 3.0) * std::f32::consts::SQRT_2
    }

    fn ids(&mut self, vocab: usize, n_max: usize) -> Vec<u32> {
        let n = self.below(n_max + 1);
        // Few distinct ids, so that they repeat.
        let spread = self.of(&[2, 5, vocab]).min(vocab);
        (0..n).map(|_| self.below(spread) as u32).collect()
    }

    fn logits(&mut self, vocab: usize) -> Vec<f32> {
        let kind = self.below(9);
        let scale = self.of(&[0.01, 0.5, 1.0, 3.0, 10.0, 1000.0]);
        let level = self.of(&[0.0, -0.0, 1.0, -7.25, 30.0, 1e-41]);
        let mut x: Vec<f32> = match kind {
            0 | 1 => (0..vocab).map(|_| self.normal() * scale + level).collect(),
            2 => vec![level; vocab],
            3 => (0..vocab).map(|_| self.below(4) as f32 * 0.5 + level).collect(),
            4 => (0..vocab).map(|_| self.of(&[0.0, -0.0])).collect(),
            5 => (0..vocab).map(|_| self.of(&[0.0, -0.0, 1e-45, -1e-45, 3e-40, -3e-40])).collect(),
            6 => (0..vocab).map(|i| level - i as f32 * scale * 1e-3).collect(),
            7 => (0..vocab).map(|_| self.normal() * 1e38).collect(),
            _ => (0..vocab).map(|_| self.normal()).collect(),
        };
        if kind == 8 {
            let at = self.below(vocab);
            x[at] = self.of(&[20.0, 90.0, 1e30]);
        }
        if self.chance(4) {
            let from = self.below(vocab);
            let len = self.below(vocab) + 1;
            x.iter_mut().skip(from).take(len).for_each(|x| *x = f32::NEG_INFINITY);
        }
        if self.chance(50) {
            let at = self.below(vocab);
            x[at] = self.of(&[f32::NAN, -f32::NAN, f32::INFINITY]);
        }
        x
    }

    fn case(&mut self, vocab: usize) -> Case {
        let mut config = SamplerConfig {
            temperature: self.of(&[0.0, 1e-3, 0.3, 0.7, 1.0, 1.0, 1.5, 8.0, 100.0]),
            seed: u64::from(self.word()) << 32 | u64::from(self.word()),
            choice: self.below(3) as u32,
            ..SamplerConfig::default()
        };
        if self.chance(2) {
            let some = self.below(vocab) as u32 + 1;
            config.top_k = self.of(&[1, 2, 7, 40, some, some, vocab as u32, vocab as u32 + 1]);
        }
        if self.chance(2) {
            config.top_p = self.of(&[0.0, 1e-6, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.999, 0.999_999_9]);
        }
        if self.chance(2) {
            config.min_p = self.of(&[1e-9, 0.01, 0.05, 0.25, 0.5, 1.0]);
        }
        let mut case = Case { logits: self.logits(vocab), config, ..Case::default() };
        case.draw_index = self.below(1000) as u32;
        if self.chance(2) {
            self.add_processors(&mut case);
        }
        case
    }

    fn add_processors(&mut self, case: &mut Case) {
        let vocab = case.logits.len();
        let c = &mut case.config;
        case.prompt = self.ids(vocab, 40);
        case.output = self.ids(vocab, 40);
        if self.chance(2) {
            c.presence = self.of(&[0.3, -0.5, 2.0]);
            c.frequency = self.of(&[0.1, 0.3, 0.7, -0.2]);
        }
        if self.chance(2) {
            c.repetition = self.of(&[1.1, 1.3, 0.8]);
        }
        if self.chance(2) {
            c.bias = (0..vocab.min(5)).map(|i| ((i * 7 % vocab) as u32, self.normal() * 5.0)).collect();
            c.bias.sort_by_key(|b| b.0);
            c.bias.dedup_by_key(|b| b.0);
        }
        if self.chance(3) {
            c.dry = Some(DryConfig {
                multiplier: self.of(&[0.0, 0.8, 1.5]),
                base: self.of(&[1.0, 1.75, 2.0]),
                allowed_length: self.of(&[1, 2, 3]),
                window: self.of(&[0, 1, 10, u32::MAX]),
                breakers: if self.chance(2) { vec![0, 3] } else { Vec::new() },
            });
        }
        if self.chance(3) {
            let dense = self.chance(2);
            let mut word = || if dense { self.word() | self.word() } else { self.word() & self.word() & self.word() };
            case.grammar = Some((0..vocab.div_ceil(32)).map(|_| word()).collect());
        }
        if self.chance(3) {
            case.stop_ids = self.ids(vocab, 3);
            c.min_tokens = 500;
        }
        if c.frequency != 0.0 && self.chance(2) {
            // After the penalty, tokens of the output nearly tie with all others: a rounding decides.
            let level = self.of(&[0.5, 1.0, 3.0]);
            case.logits.fill(level);
            for &id in &case.output {
                let count = case.output.iter().filter(|&&o| o == id).count() as f32;
                case.logits[id as usize] = (level + c.frequency * count) + c.presence;
            }
        }
    }
}

/// Runs `n` cases and returns how many of them each mutant gets wrong.
fn compare(seed: u32, n: usize, vocabs: &[usize], mutants: &[Mutant]) -> Vec<usize> {
    let mut caught = vec![0; mutants.len()];
    let mut faults = 0;
    for round in 0..n {
        let mut gen_ = Gen::new(seed.wrapping_mul(1_000_003).wrapping_add(round as u32));
        let vocab = gen_.of(vocabs);
        let case = gen_.case(vocab);
        let mut scratch = Scratch::new(vocab, 100);
        let got = case.sample(&mut scratch);
        let want = reference(&case, Mutant::Right);
        let label = || format!("seed {seed} round {round} vocab {vocab} {:?}", case.config);
        assert_eq!(got.token, want, "{}", label());
        assert_eq!(case.sample(&mut scratch).token, want, "used scratch: {}", label());
        faults += usize::from(want.is_err());
        for (caught, &mutant) in caught.iter_mut().zip(mutants) {
            *caught += usize::from(reference(&case, mutant) != want);
        }
    }
    assert!(n < 50 || faults < n / 4, "{faults} of {n} cases test nothing but a fault");
    caught
}

/// Fewer rounds without optimisation.
fn rounds(n: usize) -> usize {
    if cfg!(debug_assertions) { n / 8 } else { n }
}

#[test]
fn every_token_is_the_contracts_and_every_mutant_is_caught() {
    let n = 8_000;
    let caught = compare(1, n, &[1, 2, 5, 10, 31, 64, 200, 1_000], &MUTANTS);
    // An f32 sum must be long before its rounding moves a token.
    let float_sums = compare(5, 200, &[20_000], &[Mutant::FloatSums])[0];
    for (mutant, caught) in MUTANTS.iter().zip(&caught) {
        let caught = caught + if *mutant == Mutant::FloatSums { float_sums } else { 0 };
        println!("{mutant:?}: {caught} of {n}");
        assert!(caught >= 3, "{mutant:?} was caught {caught} times in {n}");
    }
}

#[test]
fn large_vocabularies() {
    compare(2, rounds(160), &[1_023, 1_024, 1_025, 5_000, 32_000], &[]);
    compare(3, rounds(48), &[129_280, 262_144], &[]);
}

#[test]
fn every_isa_draws_the_same_tokens() {
    for &isa in Isa::available() {
        let _forced = force_isa(isa);
        compare(4, rounds(800), &[2, 31, 63, 64, 65, 1_000, 1_040, 3_000], &[]);
    }
}
