//! DeepSeek-V4 of random weights, without a file: every kind of layer in the 2-bit recipe, from one name.

mod v4;

use std::path::Path;

use arc_engine::model::deepseek_v4::Numerics;
use v4::{Rig, VOCAB, best, same_bits};

const TINY: &str = "synthetic:deepseek-v4-tiny";

fn rig(name: &str, numerics: Numerics, threads: usize) -> Rig {
    Rig::load(Path::new(name), numerics, threads)
}

/// Tokens of no meaning.
fn ids(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 7919 + i * i * 31 + 5) % VOCAB as u32).collect()
}

/// Prefill and decode: whatever the threads and the chunks, and in a second load, the same bits; finite; and of another
/// seed others.
#[test]
fn tiny_runs_and_everything_that_may_not_matter_does_not() {
    let ids = ids(150);
    let mut compared = 0;
    for numerics in [Numerics::Serving, Numerics::Reference] {
        let mut first = rig(TINY, numerics, 2);
        let want = first.prompt(0, &ids, ids.len());
        assert!(want.iter().all(|logit| logit.is_finite()));
        for (threads, chunks) in [(1, &[16, 150][..]), (3, &[1, 7, 128, 150])] {
            let mut again = rig(TINY, numerics, threads);
            for &chunk in chunks {
                let got = again.prompt(0, &ids, chunk);
                compared += same_bits(&got, &want, &format!("{numerics:?}, chunks of {chunk} on {threads} threads"));
            }
        }
        let greedy = first.greedy(1, &ids[..40], 12);
        assert_eq!(greedy, rig(TINY, numerics, 1).greedy(0, &ids[..40], 12));
        assert_eq!(greedy[0] as usize, best(&want[39 * VOCAB..40 * VOCAB]));
        let spread = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
        let spread = spread(&want[want.len() - VOCAB..]).sqrt();
        assert!((0.5..20.0).contains(&spread), "logits have a spread of {spread}");
        let other = rig("synthetic:deepseek-v4-tiny,seed=1", numerics, 2).prompt(0, &ids, ids.len());
        assert!(other.iter().zip(&want).filter(|(a, b)| a.to_bits() != b.to_bits()).count() > other.len() / 2);
    }
    assert_eq!(compared, 2 * 6 * 150 * VOCAB);
}
