//! The sampler as its contract reads: sort everything, sum in 128 bits, look at one id at a time. And the ways to get
//! it wrong.

use super::Case;
use crate::math;
use crate::ops::sample::{DryConfig, RowFault};
use crate::rng::draw_word;

/// A deliberate mistake.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mutant {
    /// None: the contract.
    Right,
    /// Equal logits in the order in which a partition may leave them: here, higher ids first.
    TiesByPlace,
    /// The order of raw bits, in which -0.0 is less than +0.0.
    SignedZero,
    /// The share of `top_p` as a product of f32.
    TopPAsF32,
    /// Running sums of f32.
    FloatSums,
    /// Frequency penalty in one rounding.
    FusedPenalty,
    /// The draw sees what the masks forbid; a forbidden token gives way to the next allowed one.
    DrawBeforeMask,
    /// `top_p` of the whole mass, not of what `top_k` left.
    TopPOfAll,
    /// Repetitions reach across DRY's breakers.
    DryIgnoresBreakers,
    /// DRY counts an earlier passage one token short.
    DryShort,
}

pub const MUTANTS: [Mutant; 9] = [
    Mutant::TiesByPlace,
    Mutant::SignedZero,
    Mutant::TopPAsF32,
    Mutant::FloatSums,
    Mutant::FusedPenalty,
    Mutant::DrawBeforeMask,
    Mutant::TopPOfAll,
    Mutant::DryIgnoresBreakers,
    Mutant::DryShort,
];

const ONE: f64 = (1u64 << 40) as f64;

/// The token of a case.
pub fn reference(case: &Case, mutant: Mutant) -> Result<u32, RowFault> {
    let c = &case.config;
    let non_finite = |x: &[f32]| x.iter().any(|x| x.is_nan() || *x == f32::INFINITY);
    if non_finite(&case.logits) {
        return Err(RowFault::NonFiniteLogits);
    }
    let (mut x, unmasked) = processed(case, mutant);
    if non_finite(&x) {
        return Err(RowFault::NonFiniteLogits);
    }
    let allowed: Vec<bool> = x.iter().map(|&x| x > f32::NEG_INFINITY).collect();
    if !allowed.contains(&true) {
        return Err(RowFault::NothingToSample);
    }
    if mutant == Mutant::DrawBeforeMask {
        x = unmasked;
    }

    let key = |i: usize| {
        let bits = if mutant == Mutant::SignedZero { x[i].to_bits() } else { (x[i] + 0.0).to_bits() } as i32;
        if bits < 0 { i64::from(i32::MIN) - i64::from(bits) - 1 } else { i64::from(bits) }
    };
    let mut order: Vec<usize> = (0..x.len()).collect();
    let place = |i: usize| if mutant == Mutant::TiesByPlace { x.len() - i } else { i };
    order.sort_by_key(|&i| (std::cmp::Reverse(key(i)), place(i)));
    if c.temperature == 0.0 {
        return Ok(order[0] as u32);
    }

    let max = x[order[0]];
    let mass = |i: usize| (ONE * f64::from(math::exp((x[i] - max) / c.temperature))) as u64;
    let sum = |ids: &[usize]| ids.iter().map(|&i| u128::from(mass(i))).sum::<u128>();
    let all = sum(&order);
    if c.top_k > 0 {
        order.truncate(c.top_k as usize);
    }
    if c.top_p < 1.0 {
        let left = if mutant == Mutant::TopPOfAll { all } else { sum(&order) };
        let target = if mutant == Mutant::TopPAsF32 {
            (c.top_p * left as f32) as u128
        } else {
            let p = (f64::from(c.top_p) * 4_294_967_296.0).round() as u128;
            (p * left).div_ceil(1 << 32)
        };
        let mut running = 0;
        let mut n = 0;
        while n < order.len() && (n == 0 || running < target) {
            running += u128::from(mass(order[n]));
            n += 1;
        }
        order.truncate(n);
    }
    if c.min_p > 0.0 {
        let least = (f64::from(c.min_p) * ONE).ceil() as u64;
        order.retain(|&i| mass(i) >= least);
    }

    order.sort_unstable();
    let word = draw_word(c.seed, case.draw_index, c.choice);
    let drawn = if mutant == Mutant::FloatSums {
        let total = order.iter().fold(0.0, |s, &i| s + mass(i) as f32);
        let at = (word as f64 / 2f64.powi(64)) as f32 * total;
        let mut running = 0.0;
        let past = |&&i: &&usize| {
            running += mass(i) as f32;
            running > at
        };
        order.iter().find(past).or(order.last())
    } else {
        let at = (u128::from(word) * sum(&order)) >> 64;
        let mut running = 0;
        let past = |&&i: &&usize| {
            running += u128::from(mass(i));
            running > at
        };
        order.iter().find(past)
    };
    let drawn = *drawn.expect("the total is above the draw");
    // Only a mutant can have drawn what is forbidden.
    let given = (drawn..x.len()).chain(0..drawn).find(|&i| allowed[i]);
    Ok(given.expect("something is allowed") as u32)
}

/// Logits after all processors, and after all but the masks.
fn processed(case: &Case, mutant: Mutant) -> (Vec<f32>, Vec<f32>) {
    let c = &case.config;
    let with_masks = |masks: bool| {
        let mut x = case.logits.clone();
        for &(id, bias) in &c.bias {
            x[id as usize] += bias;
        }
        if let Some(grammar) = &case.grammar
            && masks
        {
            for (i, x) in x.iter_mut().enumerate() {
                if grammar[i / 32] >> (i % 32) & 1 == 0 {
                    *x = f32::NEG_INFINITY;
                }
            }
        }
        if masks && case.draw_index < c.min_tokens {
            for &id in &case.stop_ids {
                x[id as usize] = f32::NEG_INFINITY;
            }
        }
        let mut in_output = vec![0u32; x.len()];
        let mut in_prompt = vec![false; x.len()];
        case.output.iter().for_each(|&id| in_output[id as usize] += 1);
        case.prompt.iter().for_each(|&id| in_prompt[id as usize] = true);
        for (i, x) in x.iter_mut().enumerate() {
            let count = in_output[i] as f32;
            if in_prompt[i] || in_output[i] > 0 {
                *x = if *x > 0.0 { *x / c.repetition } else { *x * c.repetition };
            }
            if in_output[i] > 0 {
                *x -= c.presence;
                *x = if mutant == Mutant::FusedPenalty {
                    (-c.frequency).mul_add(count, *x)
                } else {
                    let penalty = c.frequency * count;
                    *x - penalty
                };
            }
        }
        if let Some(dry) = &c.dry {
            let history: Vec<u32> = case.prompt.iter().chain(&case.output).copied().collect();
            apply_dry(&mut x, dry, &history, mutant);
        }
        x
    };
    (with_masks(true), with_masks(false))
}

/// DRY by its definition: for every earlier place, walk back while the tokens agree and none is a breaker.
fn apply_dry(x: &mut [f32], dry: &DryConfig, history: &[u32], mutant: Mutant) {
    let text = &history[history.len() - history.len().min(dry.window as usize)..];
    let mut longest = vec![0; x.len()];
    for end in 1..text.len() {
        let mut len = 0;
        while len < end && text[end - 1 - len] == text[text.len() - 1 - len] {
            if mutant != Mutant::DryIgnoresBreakers && dry.breakers.contains(&text[end - 1 - len]) {
                break;
            }
            len += 1;
        }
        len -= usize::from(mutant == Mutant::DryShort && len > 0);
        if !dry.breakers.contains(&text[end]) {
            longest[text[end] as usize] = longest[text[end] as usize].max(len);
        }
    }
    for (x, len) in x.iter_mut().zip(longest) {
        if dry.multiplier != 0.0 && len >= dry.allowed_length.max(1) as usize {
            let power = f64::from(dry.base).powi(((len - dry.allowed_length as usize) as i32).min(255));
            *x -= (f64::from(dry.multiplier) * power).min(f64::from(f32::MAX)) as f32;
        }
    }
}
