use super::cpu::{Group, Place, Work, append, attend, attend_split, merge, partial_len, rotate};
use super::{AttentionConfig, Rope, RopeStyle};
use crate::cpu::buf::Aligned;
use crate::format::half::f16_to_f32;
use crate::simd::{Isa, force_isa};
use crate::step::BLOCK_TOKENS;

fn noise(i: usize) -> f32 {
    let x = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((x >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 4.0
}

struct Case {
    cfg: AttentionConfig,
    k: Aligned<u16>,
    v: Aligned<u16>,
    blocks: Vec<u32>,
    qkv: Vec<f32>,
    rows: usize,
}

/// A cache of `context` positions in scattered blocks, and queries for its last `rows` positions.
fn case(heads: (usize, usize), head_dim: usize, window: Option<u32>, context: usize, rows: usize) -> Case {
    let (n_heads, n_kv_heads) = heads;
    let cfg = AttentionConfig { n_heads, n_kv_heads, head_dim, scale: 0.125, window };
    let n_blocks = context.div_ceil(BLOCK_TOKENS);
    let blocks: Vec<u32> = (0..n_blocks as u32).map(|i| (i * 7 + 3) % (n_blocks as u32 * 8) / 8 * 8 + i % 8).collect();
    let pool = 1 + *blocks.iter().max().expect("a block") as usize;
    let mut k = Aligned::zeroed(cfg.kv_elements(pool));
    let mut v = Aligned::zeroed(cfg.kv_elements(pool));
    // Whatever a former owner left must not be seen.
    k.fill(0x7e00);
    v.fill(0x7e00);
    for pos in 0..n_blocks * BLOCK_TOKENS {
        for kv_head in 0..n_kv_heads {
            let at = |what: usize, d: usize| noise(((what * 4096 + pos) * 8 + kv_head) * 256 + d);
            let key: Vec<f32> = (0..head_dim).map(|d| at(0, d)).collect();
            let value: Vec<f32> = (0..head_dim).map(|d| at(1, d)).collect();
            if pos < context {
                let place = Place { block: blocks[pos / BLOCK_TOKENS] as usize, in_block: pos % BLOCK_TOKENS, kv_head };
                // SAFETY: single-threaded.
                unsafe { append(k.shared(), v.shared(), &cfg, place, &key, &value) };
            }
        }
    }
    let qkv = (0..rows * cfg.qkv_dim()).map(|i| noise(i + 900_000)).collect();
    Case { cfg, k, v, blocks, qkv, rows }
}

impl Case {
    fn group(&self, kv_head: usize, pos: usize, rows: usize) -> Group<'_> {
        Group { cfg: &self.cfg, k: &self.k, v: &self.v, blocks: &self.blocks, kv_head, pos: pos as u32, rows }
    }

    /// Attention of all rows, `per_group` at a time.
    fn run(&self, context: usize, per_group: usize) -> Vec<f32> {
        let (heads, head_dim) = (self.cfg.n_heads / self.cfg.n_kv_heads, self.cfg.head_dim);
        let dim = self.cfg.n_heads * head_dim;
        let mut out = vec![f32::NAN; self.rows * dim];
        let mut work = Work::default();
        for first in (0..self.rows).step_by(per_group) {
            let rows = per_group.min(self.rows - first);
            for kv_head in 0..self.cfg.n_kv_heads {
                let group = self.group(kv_head, context - self.rows + first, rows);
                attend(&mut work, group, &self.qkv[first * self.cfg.qkv_dim()..], &mut |r, h, values| {
                    let at = (first + r) * dim + (kv_head * heads + h) * head_dim;
                    out[at..at + head_dim].copy_from_slice(values);
                });
            }
        }
        out
    }

    fn by_f64(&self, context: usize) -> Vec<f64> {
        let (heads, head_dim) = (self.cfg.n_heads / self.cfg.n_kv_heads, self.cfg.head_dim);
        let element = |pool: &[u16], pos: usize, kv_head: usize, d: usize, transposed: bool| {
            let block = self.blocks[pos / BLOCK_TOKENS] as usize;
            let head = (block * self.cfg.n_kv_heads + kv_head) * head_dim * BLOCK_TOKENS;
            let t = pos % BLOCK_TOKENS;
            f64::from(f16_to_f32(pool[head + if transposed { d * BLOCK_TOKENS + t } else { t * head_dim + d }]))
        };
        let mut out = Vec::new();
        for r in 0..self.rows {
            let pos = context - self.rows + r;
            let from = self.cfg.window.map_or(0, |window| (pos + 1).saturating_sub(window as usize));
            for h in 0..self.cfg.n_heads {
                let q = &self.qkv[r * self.cfg.qkv_dim() + h * head_dim..][..head_dim];
                let scores: Vec<f64> = (from..=pos)
                    .map(|t| {
                        let dot = |d: usize| f64::from(q[d]) * element(&self.k, t, h / heads, d, true);
                        (0..head_dim).map(dot).sum::<f64>() * f64::from(self.cfg.scale)
                    })
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let sum: f64 = weights.iter().sum();
                out.extend((0..head_dim).map(|d| {
                    let term = |(t, w): (usize, &f64)| w * element(&self.v, t, h / heads, d, false);
                    (from..=pos).zip(&weights).map(term).sum::<f64>() / sum
                }));
            }
        }
        out
    }
}

#[test]
fn attention_agrees_with_f64_and_ignores_grouping_and_instruction_set() {
    let cases = [
        ((3, 1), 64, None, 1, 1),
        ((9, 3), 64, None, 77, 5),
        ((4, 1), 256, Some(40), 130, 20),
        ((4, 4), 48, None, 700, 3),
        ((8, 2), 128, Some(512), 640, 9),
        ((64, 1), 32, None, 40, 4),
    ];
    let mut worst = 0.0f64;
    for (heads, head_dim, window, context, rows) in cases {
        let case = case(heads, head_dim, window, context, rows);
        let want = case.by_f64(context);
        let mut bits: Option<Vec<u32>> = None;
        for &isa in Isa::available() {
            let _forced = force_isa(isa);
            for per_group in [1, 3, 8] {
                let got = case.run(context, per_group);
                for (got, want) in got.iter().zip(&want) {
                    worst = worst.max((f64::from(*got) - want).abs());
                }
                let got: Vec<u32> = got.iter().map(|v| v.to_bits()).collect();
                assert_eq!(*bits.get_or_insert(got.clone()), got, "{heads:?} {head_dim} {isa:?} {per_group}");
            }
        }
        // Scores reach 40, where an f32 is 4e-6 apart; a weight is off by as much, and values are up to 2.
        assert!(worst < 4e-5, "{heads:?} {head_dim}: {worst:e}");
    }
}

#[test]
fn splits_merged_in_order_are_the_whole() {
    let (context, heads) = (1500, 3);
    let case = case((9, 3), 64, None, context, 1);
    let whole = case.run(context, 1);
    let len = partial_len(64);
    for kv_head in 0..3 {
        let group = case.group(kv_head, context - 1, 1);
        let (begin, end) = group.splits();
        assert_eq!((begin, end), (0, 6));
        let mut partials = vec![f32::NAN; (end - begin) * heads * len];
        // In any order of computing.
        for split in (begin..end).rev() {
            let at = (split - begin) * heads * len;
            attend_split(&mut Work::default(), group, split, &case.qkv, &mut partials[at..at + heads * len]);
        }
        for h in 0..heads {
            let mut out = vec![0.0; 64];
            merge(&partials[h * len..], heads * len, end - begin, &mut out);
            assert_eq!(out, whole[(kv_head * heads + h) * 64..][..64]);
            // Merging in another order is another result somewhere: the order is part of the contract.
            if h == 0 && kv_head == 0 {
                let mut turned: Vec<f32> = partials.chunks(heads * len).rev().flatten().copied().collect();
                turned.truncate(partials.len());
                let mut other = vec![0.0; 64];
                merge(&turned, heads * len, end - begin, &mut other);
                assert!(other != out, "the reversed merge was not told apart");
            }
        }
    }
}

#[test]
fn rope_turns_pairs_by_their_angles() {
    let dim = 8;
    let angles: Vec<f32> = (0..dim / 2).map(|i| 0.3 + i as f32).collect();
    let table: Vec<f32> = angles.iter().flat_map(|a| [a.cos(), a.sin()]).collect();
    for (style, pair) in [(RopeStyle::Halves, 4), (RopeStyle::Adjacent, 1)] {
        let mut x: Vec<f32> = (0..10).map(|i| i as f32 - 3.5).collect();
        let before = x.clone();
        rotate(&mut x, &table, Rope { dim, style });
        for (i, angle) in angles.iter().enumerate() {
            let (a, b) = if pair == 1 { (2 * i, 2 * i + 1) } else { (i, i + 4) };
            let want =
                (before[a] * angle.cos() - before[b] * angle.sin(), before[b] * angle.cos() + before[a] * angle.sin());
            assert_eq!((x[a], x[b]), want, "{style:?} pair {i}");
        }
        assert_eq!(x[8..], before[8..], "values past rope.dim stay");
    }
}
