use super::{Best, FAULT, score};
use crate::math::{dot, sum};
use crate::simd::{Isa, force_isa};

fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0).collect()
}

/// The halvings of a power of two are the bits of `math::sum`.
#[test]
fn scores_have_the_bits_of_math() {
    let mut compared = 0;
    for (heads, dim) in [(64, 128), (8, 128), (1, 64), (128, 64), (16, 32)] {
        for seed in 0..40 {
            let (q, key, weights) = (values(heads * dim, seed), values(dim, seed + 50), values(heads, seed + 99));
            let relu = |x: f32| if x < 0.0 { 0.0 } else { x };
            let terms: Vec<f32> =
                (0..heads).map(|i| weights[i] * relu(dot(&q[i * dim..(i + 1) * dim], &key))).collect();
            for &isa in Isa::available() {
                let _forced = force_isa(isa);
                assert_eq!(score(&q, &weights, &key).to_bits(), sum(&terms).to_bits());
                compared += 1;
            }
        }
    }
    assert!(compared >= 200);
}

fn best(scores: &[f32], top: usize) -> Vec<u32> {
    let mut best = Best::new(top);
    scores.iter().zip(0..).for_each(|(&score, w)| best.offer(w, score));
    let mut out = vec![u32::MAX - 1; top];
    best.write(&mut out);
    out.truncate(top.min(scores.len()));
    out
}

#[test]
fn the_choice_is_that_of_a_sort() {
    let mut state = 7u32;
    let mut tied = 0;
    for round in 0..400usize {
        let (n, top) = (1 + round * 7 % 900, [1, 8, 64, 512][round % 4]);
        let scores: Vec<f32> = (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Many zeros of both signs, as relu leaves them, and few distinct values.
                let value = (state >> 26) as f32 - 40.0;
                if value < 0.0 { if state & 1 == 0 { 0.0 } else { -0.0 } } else { value - 5.0 }
            })
            .collect();
        let mut want: Vec<u32> = (0..n as u32).collect();
        let value = |w: &u32| scores[*w as usize] + 0.0;
        want.sort_by(|a, b| value(b).total_cmp(&value(a)).then(a.cmp(b)));
        tied += usize::from(n > top && value(&want[top - 1]) == value(&want[top]));
        want.truncate(top);
        want.sort_unstable();
        assert_eq!(best(&scores, top), want, "{n} {top}");
    }
    assert!(tied > 50, "{tied} choices fell among equal scores");
}

#[test]
fn a_nan_marks_the_row() {
    let mut scores = vec![1.0; 40];
    assert_ne!(best(&scores, 8)[0], FAULT);
    for at in [0, 20, 39] {
        scores[at] = f32::NAN;
        assert_eq!(best(&scores, 8)[0], FAULT);
        scores[at] = 1.0;
    }
}
