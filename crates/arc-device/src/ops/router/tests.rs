use super::{Choice, RouterConfig, choose, scores};

fn config(experts: usize, chosen: usize) -> RouterConfig {
    RouterConfig { experts, chosen, scale: 1.5 }
}

fn learned(score: &[f32], bias: &[f32], chosen: usize) -> (Vec<u32>, Vec<f32>) {
    let (mut ids, mut weights) = (vec![u32::MAX; chosen], vec![0.0; chosen]);
    choose(&mut ids, &mut weights, score, &Choice::Learned(bias), &config(score.len(), chosen));
    (ids, weights)
}

#[test]
fn scores_are_roots_of_softplus() {
    let gate = [1.0, 0.0, -3.0, 0.5, 30.0, 2.0];
    let mut score = [0.0; 3];
    scores(&mut score, &[1.0, 2.0], &gate);
    for (score, x) in score.iter().zip([1.0, -2.0, 34.0f64]) {
        let want = x.exp().ln_1p().sqrt();
        assert!((f64::from(*score) - want).abs() < 1e-6 * want, "{score} {want}");
    }
}

#[test]
fn the_largest_win_and_of_equal_ones_the_lower_id() {
    assert_eq!(learned(&[1.0, 3.0, 2.0, 3.0, 3.0], &[0.0; 5], 2).0, [1, 3]);
    assert_eq!(learned(&[1.0; 8], &[0.0; 8], 3).0, [0, 1, 2]);
    let (ids, weights) = learned(&[1.0, 2.0, 4.0, 3.0], &[9.0, 0.0, 0.0, 0.0], 2);
    assert_eq!(ids, [0, 2], "bias chooses");
    assert_eq!(weights, [1.0 / 5.0 * 1.5, 4.0 / 5.0 * 1.5], "bias does not weigh");
}

/// Against a sort, over many random rows with ties.
#[test]
fn the_choice_is_that_of_a_sort() {
    let mut state = 1u32;
    for round in 0..2000 {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24 & 15) as f32 / 4.0
        };
        let (experts, chosen) = (16 + round % 50, 1 + round % 8);
        let score: Vec<f32> = (0..experts).map(|_| next()).collect();
        let bias: Vec<f32> = (0..experts).map(|_| next()).collect();
        let mut want: Vec<u32> = (0..experts as u32).collect();
        let value = |e: &u32| score[*e as usize] + bias[*e as usize];
        want.sort_by(|a, b| value(b).total_cmp(&value(a)).then(a.cmp(b)));
        want.truncate(chosen);
        want.sort_unstable();
        assert_eq!(learned(&score, &bias, chosen).0, want);
    }
}

#[test]
fn an_expert_named_twice_counts_twice() {
    let (mut ids, mut weights) = ([0; 3], [0.0; 3]);
    choose(&mut ids, &mut weights, &[1.0, 2.0, 3.0], &Choice::Hashed(&[2, 0, 2]), &config(3, 3));
    assert_eq!(ids, [0, 2, 2]);
    assert_eq!(weights, [1.0 / 7.0 * 1.5, 3.0 / 7.0 * 1.5, 3.0 / 7.0 * 1.5]);
}

#[test]
fn a_nan_score_leaves_ids_in_range_and_no_weight() {
    for at in 0..4 {
        let mut score = [1.0, 2.0, 3.0, 4.0];
        score[at] = f32::NAN;
        let (ids, weights) = learned(&score, &[0.0; 4], 2);
        assert!(ids.iter().all(|&id| id < 4) && weights.iter().all(|weight| weight.is_nan()));
    }
}
