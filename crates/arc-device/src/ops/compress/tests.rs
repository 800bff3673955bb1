use super::{Compressor, pool};
use crate::simd::{Isa, force_isa};
use crate::step::BLOCK_TOKENS;

const SPARSE: Compressor = Compressor { ratio: 4, overlap: 2, dim: 8 };
const HEAVY: Compressor = Compressor { ratio: 128, overlap: 1, dim: 8 };

#[test]
fn rows_read_their_window_and_the_one_before() {
    assert_eq!((SPARSE.ring(), HEAVY.ring()), (16, 144));
    assert_eq!((SPARSE.tokens(0), SPARSE.tokens(1), SPARSE.tokens(7)), (0..4, 0..8, 24..32));
    assert_eq!((HEAVY.tokens(0), HEAVY.tokens(1)), (0..128, 128..256));
    let channels: Vec<usize> = SPARSE.tokens(1).map(|p| SPARSE.channel(1, p)).collect();
    assert_eq!(channels, [0, 0, 0, 0, 8, 8, 8, 8]);
    assert_eq!(SPARSE.channel(0, 0), 8);
    assert_eq!(HEAVY.channel(3, 500), 0);
    for (pos, sparse, heavy) in [(2, 0, 0), (3, 1, 0), (126, 31, 0), (127, 32, 1), (128, 32, 1)] {
        assert_eq!((SPARSE.visible(pos), HEAVY.visible(pos)), (sparse, heavy), "{pos}");
    }
}

/// Tokens that may be computed and taken back do not reach what a later row of the sequence still reads.
#[test]
fn drafts_leave_what_is_read() {
    for (c, drafts) in [(SPARSE, 8), (HEAVY, 16)] {
        for pos in 0..1000 {
            // The next two rows to be completed at or after `pos` read these tokens before `pos`.
            let next = pos / c.ratio;
            for p in c.tokens(next).chain(c.tokens(next + 1)).filter(|&p| p < pos) {
                for draft in pos..pos + drafts {
                    assert_ne!(draft % c.ring(), p % c.ring(), "{c:?} at {pos}: {draft} takes the place of {p}");
                }
            }
        }
    }
}

/// Every row of a sequence has a place of its own, in the block of its last token.
#[test]
fn rows_lie_in_blocks_of_their_last_tokens() {
    let blocks: Vec<u32> = (0..64).map(|i| (i * 37 + 5) % 64).collect();
    for c in [SPARSE, HEAVY] {
        let mut taken = std::collections::HashSet::new();
        for w in 0..64 * BLOCK_TOKENS / c.ratio {
            let place = c.place(&blocks, w);
            assert!(taken.insert(place), "{c:?} row {w}");
            let block = (place / c.rows_per_block()) as u32;
            assert_eq!(block, blocks[(w * c.ratio + c.ratio - 1) / BLOCK_TOKENS], "{c:?} row {w}");
        }
    }
}

#[test]
fn pooling_agrees_with_f64() {
    let mut compared = 0;
    for (n, dim) in [(4, 8), (8, 64), (128, 100), (1, 130), (8, 512)] {
        let value = |i: usize, c: usize, seed: usize| ((i * 31 + c * 17 + seed * 101) % 97) as f32 / 12.0 - 4.0;
        let a: Vec<Vec<f32>> = (0..n).map(|i| (0..dim).map(|c| value(i, c, 1)).collect()).collect();
        let g: Vec<Vec<f32>> = (0..n).map(|i| (0..dim).map(|c| value(i, c, 2)).collect()).collect();
        let mut bits: Option<Vec<f32>> = None;
        for &isa in Isa::available() {
            let _forced = force_isa(isa);
            let mut row = vec![f32::NAN; dim];
            pool(&mut row, n, |i| (&a[i], &g[i]));
            for c in 0..dim {
                let weights: Vec<f64> = (0..n).map(|i| f64::from(g[i][c]).exp()).collect();
                let sum = (0..n).map(|i| weights[i] * f64::from(a[i][c])).sum::<f64>();
                let want = sum / weights.iter().sum::<f64>();
                assert!((f64::from(row[c]) - want).abs() < 1e-5, "{n} {dim} {c}: {} {want}", row[c]);
                compared += 1;
            }
            assert_eq!(*bits.get_or_insert(row.clone()), row, "{isa:?}");
        }
    }
    assert!(compared > 800);
}
