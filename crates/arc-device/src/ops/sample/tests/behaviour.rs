//! What a caller may count on, beside equal tokens: distribution, faults, logprobs, cost, and what "absent" means.

use super::*;
use crate::math;

fn plain(logits: Vec<f32>) -> (Case, Scratch) {
    let scratch = Scratch::new(logits.len(), 100);
    (Case::of(logits, SamplerConfig::default()), scratch)
}

fn some_logits(vocab: usize, seed: u32) -> Vec<f32> {
    let mut random = Gen::new(seed);
    (0..vocab).map(|_| random.normal() * 2.0).collect()
}

/// Pearson's statistic of 200,000 draws against probabilities computed in f64.
fn chi_square(case: &mut Case, p: &[f64]) -> f64 {
    let n = 200_000;
    let mut scratch = Scratch::new(case.logits.len(), 0);
    let mut counts = vec![0.0; p.len()];
    for draw_index in 0..n {
        case.draw_index = draw_index;
        counts[case.sample(&mut scratch).token.expect("finite logits") as usize] += 1.0;
    }
    let total: f64 = p.iter().sum();
    counts.iter().zip(p).map(|(count, p)| (count - p / total * f64::from(n)).powi(2) / (p / total * f64::from(n))).sum()
}

#[test]
fn draws_follow_the_distribution() {
    // 40 tokens: 39 degrees of freedom, whose statistic passes 92 once in 300,000 fair trials.
    let limit = 92.0;
    let mut random = Gen::new(11);
    let logits: Vec<f32> = (0..40).map(|_| random.normal()).collect();
    for temperature in [0.7, 1.0, 2.0] {
        let p: Vec<f64> = logits.iter().map(|&x| (f64::from(x) / f64::from(temperature)).exp()).collect();
        let config = SamplerConfig { temperature, seed: 99, ..SamplerConfig::default() };
        let mut case = Case::of(logits.clone(), config);
        let statistic = chi_square(&mut case, &p);
        assert!(statistic < limit, "temperature {temperature}: {statistic}");

        // The test can fail: another temperature's probabilities do not fit.
        let wrong: Vec<f64> = logits.iter().map(|&x| (f64::from(x) / f64::from(temperature) * 1.05).exp()).collect();
        assert!(chi_square(&mut case, &wrong) > limit);
    }
}

#[test]
fn seeds_choices_and_positions_give_different_tokens() {
    let (mut case, mut scratch) = plain(some_logits(1000, 3));
    let mut tokens_over = |change: &dyn Fn(&mut Case, u32)| {
        let mut tokens: Vec<u32> = (0..64)
            .map(|i| {
                change(&mut case, i);
                case.sample(&mut scratch).token.expect("finite logits")
            })
            .collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens.len()
    };
    assert!(tokens_over(&|case, i| case.config.seed = u64::from(i)) > 10);
    assert!(tokens_over(&|case, i| case.config.choice = i) > 10);
    assert!(tokens_over(&|case, i| case.draw_index = i) > 10);
    assert_eq!(tokens_over(&|case, _| (case.config.choice, case.draw_index) = (0, 0)), 1);
}

#[test]
fn top_k_1_is_greedy() {
    for seed in 0..50 {
        let mut random = Gen::new(seed);
        let (mut case, mut scratch) = plain(random.logits(300));
        case.config.temperature = 0.0;
        let greedy = case.sample(&mut scratch).token;
        case.config = SamplerConfig { temperature: 1.3, top_k: 1, ..SamplerConfig::default() };
        assert_eq!(case.sample(&mut scratch).token, greedy, "seed {seed}");
    }
}

#[test]
fn faults_are_the_rows_own() {
    let fault = |change: &dyn Fn(&mut Case)| {
        let (mut case, mut scratch) = plain(some_logits(100, 1));
        change(&mut case);
        let faulted = case.sample_with(Some(3), &mut scratch);
        assert_eq!(scratch.top().len(), if faulted.token.is_ok() { 3 } else { 0 });
        // The scratch is as good as new for the next row.
        let (good, mut fresh) = plain(some_logits(100, 2));
        assert_eq!(good.sample(&mut scratch).token, good.sample(&mut fresh).token);
        faulted.token.err()
    };
    assert_eq!(fault(&|_| {}), None);
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
        for at in [0, 63, 64, 99] {
            assert_eq!(fault(&|case| case.logits[at] = bad), Some(RowFault::NonFiniteLogits));
        }
        // Masked or not: a model that makes NaN is broken.
        let masked = |case: &mut Case| (case.logits[0], case.grammar) = (bad, Some(vec![0xffff_fffe; 4]));
        assert_eq!(fault(&masked), Some(RowFault::NonFiniteLogits));
    }
    assert_eq!(fault(&|case| case.logits[5] = f32::NEG_INFINITY), None);
    assert_eq!(fault(&|case| case.logits.fill(f32::NEG_INFINITY)), Some(RowFault::NothingToSample));
    assert_eq!(fault(&|case| case.grammar = Some(vec![0; 4])), Some(RowFault::NothingToSample));
    let overflow = |case: &mut Case| (case.logits[0], case.config.bias) = (3e38, vec![(0, 3e38)]);
    assert_eq!(fault(&overflow), Some(RowFault::NonFiniteLogits));
    assert_eq!(fault(&|case| case.config.bias = vec![(100, 1.0)]), Some(RowFault::TokenOutOfRange));
    let stop = |case: &mut Case| (case.stop_ids, case.config.min_tokens) = (vec![u32::MAX], 5);
    assert_eq!(fault(&stop), Some(RowFault::TokenOutOfRange));
}

#[test]
fn a_row_does_no_work_that_nothing_reads() {
    let (mut case, mut scratch) = plain(some_logits(5_000, 5));
    let mut work = |config: SamplerConfig| {
        case.config = config;
        case.sample(&mut scratch).work
    };
    let defaults = SamplerConfig::default();
    let two_passes = Work { passes: 2, ..Work::default() };
    assert_eq!(work(defaults.clone()), two_passes);
    assert_eq!(work(SamplerConfig { temperature: 0.0, ..defaults.clone() }), Work { passes: 1, ..Work::default() });
    // Absent by value, whether or not the request carried the field.
    let no_op = DryConfig { multiplier: 0.0, base: 1.75, allowed_length: 2, window: u32::MAX, breakers: vec![1] };
    let absent = [
        SamplerConfig { top_p: 1.0, min_p: 0.0, top_k: 0, ..defaults.clone() },
        SamplerConfig { top_k: 5_000, ..defaults.clone() },
        SamplerConfig { dry: Some(no_op), ..defaults.clone() },
        SamplerConfig { repetition: 1.3, presence: 0.5, frequency: 0.5, min_tokens: 9, ..defaults.clone() },
    ];
    for config in absent {
        assert_eq!(work(config.clone()), two_passes, "{config:?}");
    }
    // One selection for each filter that is present; greedy needs none of them.
    let filters = [
        (SamplerConfig { top_k: 32, ..defaults.clone() }, 1),
        (SamplerConfig { top_p: 0.9, ..defaults.clone() }, 1),
        (SamplerConfig { min_p: 0.05, ..defaults.clone() }, 1),
        (SamplerConfig { top_k: 32, top_p: 0.9, min_p: 0.05, ..defaults.clone() }, 3),
        (SamplerConfig { top_k: 32, top_p: 0.9, min_p: 0.05, temperature: 0.0, ..defaults.clone() }, 0),
    ];
    for (config, selects) in filters {
        let work = work(config.clone());
        assert_eq!((work.selects, work.sorts, work.copies), (selects, 0, 0), "{config:?}");
        assert!(work.passes <= 3, "{config:?}: {work:?}");
    }
    assert_eq!(work(SamplerConfig { bias: vec![(1, 1.0)], ..defaults }).copies, 1);
}

#[test]
fn logprobs_are_the_models_own() {
    for (seed, vocab) in [(1, 1), (2, 7), (3, 1_000), (4, 1_025), (5, 32_000)] {
        let logits = some_logits(vocab, seed);
        let (mut case, mut scratch) = plain(logits.clone());
        // Processors, temperature and filters change the draw and not what is reported.
        case.config = SamplerConfig { temperature: 3.0, top_k: 50, bias: vec![(0, 2.0)], ..SamplerConfig::default() };
        let got = case.sample_with(Some(5), &mut scratch);
        let top = scratch.top().to_vec();
        let token = got.token.expect("finite logits");

        let largest = logits.iter().fold(f64::NEG_INFINITY, |a, &x| a.max(f64::from(x)));
        let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
        let oracle = |id: u32| f64::from(logits[id as usize]) - largest - sum.ln();
        assert!((f64::from(got.logprob) - oracle(token)).abs() < 2e-6 * oracle(token).abs().max(1.0));
        let mut order: Vec<u32> = (0..vocab as u32).collect();
        order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        assert_eq!(top.iter().map(|t| t.id).collect::<Vec<_>>(), order[..vocab.min(5)]);
        for t in &top {
            assert!((f64::from(t.logprob) - oracle(t.id)).abs() < 2e-6 * oracle(t.id).abs().max(1.0));
        }

        // Scoring a known token gives the same bits.
        assert_eq!(logprobs_row(&logits, token, 5, &mut scratch).map(f32::to_bits), Ok(got.logprob.to_bits()));
        assert_eq!(scratch.top(), top);
        case.config = SamplerConfig::default();
        let plain = case.sample_with(Some(0), &mut scratch);
        let scored = logprobs_row(&logits, plain.token.expect("finite logits"), 0, &mut scratch);
        assert_eq!(scored.map(f32::to_bits), Ok(plain.logprob.to_bits()));
        assert!(scratch.top().is_empty());
        assert!(case.sample(&mut scratch).logprob.is_nan());
        assert_eq!(logprobs_row(&logits, vocab as u32, 0, &mut scratch), Err(RowFault::TokenOutOfRange));
    }
}

#[test]
fn alternatives_are_ordered_by_logit_then_id() {
    // Far below the maximum, neighbouring logits have equal logprobs.
    let mut logits = vec![-30.0; 100];
    logits[90] = 1e6;
    logits[7] = (-30.0f32).next_up();
    let mut scratch = Scratch::new(100, 0);
    logprobs_row(&logits, 0, 20, &mut scratch).expect("finite logits");
    let ids: Vec<u32> = scratch.top().iter().map(|t| t.id).collect();
    assert_eq!(ids, [90, 7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]);
    logits[3] = f32::NAN;
    assert_eq!(logprobs_row(&logits, 0, 2, &mut scratch), Err(RowFault::NonFiniteLogits));
}

#[test]
fn values_become_fixed_point_once() {
    let params = |top_p, min_p| SamplerParams::new(&SamplerConfig { top_p, min_p, ..SamplerConfig::default() });
    assert_eq!(params(1.0, 0.0).top_p, TOP_P_ABSENT);
    assert_eq!(params(0.5, 1.0).top_p, 1 << 31);
    assert_eq!(params(0.0, 1.0).min_p, MASS_ONE);
    assert_eq!(params(2.0, -1.0), params(1.0, 0.0));
    assert_eq!(params(1.0, 1e-20).min_p, 1);
}

#[test]
fn the_dry_table_is_bounded_and_absent_at_multiplier_0() {
    let config = DryConfig { multiplier: 0.8, base: 1.75, allowed_length: 2, window: 100, breakers: vec![40] };
    let table = DryTable::new(&config).expect("it is present");
    assert_eq!(table.penalty(2), 0.8);
    assert_eq!(table.penalty(4), (f64::from(0.8f32) * 1.75 * 1.75) as f32);
    assert_eq!(table.penalty(100_000), f32::MAX);
    assert_eq!(DryTable::new(&DryConfig { multiplier: 0.0, ..config.clone() }), None);
    assert_eq!(DryTable::new(&DryConfig { window: 0, ..config }), None);
}

#[test]
fn a_restarted_table_holds_nothing_of_the_former_sequence() {
    let mut seen = SeenTokens::new(50, &[3, 3, 4], 10);
    [3, 7, 9, 7].iter().for_each(|&id| seen.push(id));
    seen.restart(&[7, 1]);
    let mut new = SeenTokens::new(50, &[7, 1], 10);
    assert_eq!(seen.tokens(), new.tokens());
    [9, 3, 7].iter().for_each(|&id| (seen.push(id), new.push(id)).1);
    assert_eq!(seen.tokens(), new.tokens());
}

#[test]
fn the_first_of_equal_maxima_wins_whatever_the_sign_of_zero() {
    let mut logits = vec![-1.0; 3000];
    logits[1500] = 0.0;
    logits[1200] = -0.0;
    logits[2000] = 0.0;
    let (mut case, mut scratch) = plain(logits);
    case.config.temperature = 0.0;
    assert_eq!(case.sample(&mut scratch).token, Ok(1200));
    assert_eq!(math::exp(0.0), 1.0);
}
