//! Rope, append and attention on the CPU.
//!
//! # The order of attention
//!
//! For one row and head, keys are taken in tiles of [`BLOCK_TOKENS`] positions counted from position 0, tiles without a
//! visible key being skipped, and tiles in splits of [`SPLIT_TILES`]:
//!
//! ```text
//! s[t]  = (sum over d, ascending, fma: q[d] * k[d][t]) * scale            -inf where t is not visible
//! m'    = max(m, s);  p[t] = exp(s[t] - m');  c = exp(m - m')
//! l     = l * c + (p[0..16] + p[16..32], halved on)
//! o[d]  = o[d] * c, then fma over visible t ascending: p[t] * v[t][d]
//! ```
//!
//! A split starts from m = -inf, l = 0, o = 0. Splits are merged in ascending order by the same rule, and the result is
//! `o / l`. Nothing depends on the other rows, on the chunk cut or on who computes a split, so a row's bits are its own.

use std::ops::Range;

use crate::cpu::buf::Shared;
use crate::format::half::{f16_to_f32, f32_to_f16};
use crate::math::exp;
use crate::ops::kv::{AttentionConfig, MAX_GROUP, MAX_HEAD_DIM, Rope, RopeStyle};
use crate::simd::{Isa, multiversion, prefetch_lines, with_isa};
use crate::step::BLOCK_TOKENS;

/// Tiles of one split.
pub(crate) const SPLIT_TILES: usize = 8;
/// Queries (rows times heads) that share a tile while it is in L1; those of one row always do.
const MAX_QUERIES: usize = MAX_GROUP;
/// Queries whose dot products are computed together.
const QUERY_BLOCK: usize = 4;

multiversion! {
    /// Rotates one head in place. `x`: `[head_dim]`; `table`: `[rope.dim / 2, 2]` cosine and sine of the position.
    ///
    /// `(a, b) -> (a cos - b sin, b cos + a sin)`, each product rounded.
    pub(crate) fn rotate(x: &mut [f32], table: &[f32], rope: Rope) {
        let half = rope.dim / 2;
        let table = &table[..2 * half];
        match rope.style {
            RopeStyle::Halves => {
                let (a, rest) = x.split_at_mut(half);
                for ((a, b), cs) in a.iter_mut().zip(&mut rest[..half]).zip(table.chunks_exact(2)) {
                    (*a, *b) = (*a * cs[0] - *b * cs[1], *b * cs[0] + *a * cs[1]);
                }
            }
            RopeStyle::Adjacent => {
                for (pair, cs) in x[..rope.dim].chunks_exact_mut(2).zip(table.chunks_exact(2)) {
                    let (a, b) = (pair[0], pair[1]);
                    pair[0] = a * cs[0] - b * cs[1];
                    pair[1] = b * cs[0] + a * cs[1];
                }
            }
        }
    }
}

/// Writes one key head and one value head at a position: `key`, `value`: `[head_dim]`.
///
/// # Safety
/// Nobody else reads or writes this head at this position.
pub(crate) unsafe fn append(
    k: Shared<'_, u16>,
    v: Shared<'_, u16>,
    cfg: &AttentionConfig,
    place: Place,
    key: &[f32],
    value: &[f32],
) {
    let head = place.head(cfg);
    for (d, key) in key.iter().enumerate() {
        // SAFETY: one element of this head and position.
        unsafe { k.slice_mut(head + d * BLOCK_TOKENS + place.in_block, 1)[0] = f32_to_f16(*key) };
    }
    // SAFETY: the value row of this head and position.
    let row = unsafe { v.slice_mut(head + place.in_block * cfg.head_dim, cfg.head_dim) };
    row.iter_mut().zip(value).for_each(|(row, value)| *row = f32_to_f16(*value));
}

/// Where a position of a head lies in a layer's pool.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub block: usize,
    pub in_block: usize,
    pub kv_head: usize,
}

impl Place {
    /// First element of the head's tile.
    fn head(self, cfg: &AttentionConfig) -> usize {
        (self.block * cfg.n_kv_heads + self.kv_head) * cfg.head_dim * BLOCK_TOKENS
    }
}

/// One key head's share of attention for neighbouring rows of one sequence.
#[derive(Clone, Copy)]
pub(crate) struct Group<'a> {
    pub cfg: &'a AttentionConfig,
    pub k: &'a [u16],
    pub v: &'a [u16],
    /// The sequence's blocks.
    pub blocks: &'a [u32],
    pub kv_head: usize,
    /// Position of the first row; the others follow.
    pub pos: u32,
    pub rows: usize,
}

impl Group<'_> {
    fn heads(&self) -> usize {
        self.cfg.n_heads / self.cfg.n_kv_heads
    }

    /// Splits with a key that some row sees: first and past the last.
    pub fn splits(&self) -> (usize, usize) {
        let keys = BLOCK_TOKENS * SPLIT_TILES;
        let last = self.pos as usize + self.rows - 1;
        (self.cfg.first_visible(self.pos) as usize / keys, last / keys + 1)
    }
}

/// Running softmax of one query: maximum, sum, and `head_dim` weighted values.
struct Running {
    m: [f32; MAX_QUERIES],
    l: [f32; MAX_QUERIES],
    o: [[f32; MAX_HEAD_DIM]; MAX_QUERIES],
}

impl Default for Running {
    fn default() -> Running {
        Running { m: [0.0; MAX_QUERIES], l: [0.0; MAX_QUERIES], o: [[0.0; MAX_HEAD_DIM]; MAX_QUERIES] }
    }
}

impl Running {
    fn clear(&mut self, queries: usize, head_dim: usize) {
        self.m[..queries].fill(f32::NEG_INFINITY);
        self.l[..queries].fill(0.0);
        self.o[..queries].iter_mut().for_each(|o| o[..head_dim].fill(0.0));
    }
}

/// What a member of the team keeps for attention.
pub(crate) struct Work {
    part: Running,
    total: Running,
    /// One tile of keys, `[head_dim, BLOCK_TOKENS]`.
    keys: [[f32; BLOCK_TOKENS]; MAX_HEAD_DIM],
    /// One tile of values, `[BLOCK_TOKENS, head_dim]`.
    values: [f32; BLOCK_TOKENS * MAX_HEAD_DIM],
}

impl Default for Work {
    fn default() -> Work {
        Work {
            part: Running::default(),
            total: Running::default(),
            keys: [[0.0; BLOCK_TOKENS]; MAX_HEAD_DIM],
            values: [0.0; BLOCK_TOKENS * MAX_HEAD_DIM],
        }
    }
}

/// Values that one stored partial takes.
pub(crate) const fn partial_len(head_dim: usize) -> usize {
    head_dim + 2
}

with_isa! {
    /// Whole attention of a group. `qkv`: the group's first row on; `out` likewise, `[rows, n_heads * head_dim]`.
    pub(crate) fn attend(
        work: &mut Work,
        group: Group<'_>,
        qkv: &[f32],
        out: &mut dyn FnMut(usize, usize, &[f32]),
    ) => attend_body
}

with_isa! {
    /// One split of a group with a single row, to be merged later. `partials`: per head `m, l, o`.
    pub(crate) fn attend_split(
        work: &mut Work,
        group: Group<'_>,
        split: usize,
        qkv: &[f32],
        partials: &mut [f32],
    ) => attend_split_body
}

with_isa! {
    /// Merges the partials of one head, `[splits, partial_len]` with `stride` values between splits.
    pub(crate) fn merge(partials: &[f32], stride: usize, splits: usize, out: &mut [f32]) => merge_body
}

#[inline(always)]
unsafe fn attend_body(
    isa: Isa,
    work: &mut Work,
    group: Group<'_>,
    qkv: &[f32],
    out: &mut dyn FnMut(usize, usize, &[f32]),
) {
    let heads = group.heads();
    let head_dim = group.cfg.head_dim;
    let per_pass = (MAX_QUERIES / heads).max(1);
    for first in (0..group.rows).step_by(per_pass) {
        let rows = per_pass.min(group.rows - first);
        let group = Group { pos: group.pos + first as u32, rows, ..group };
        let qkv = &qkv[first * group.cfg.qkv_dim()..];
        work.total.clear(rows * heads, head_dim);
        let (begin, end) = group.splits();
        for split in begin..end {
            work.part.clear(rows * heads, head_dim);
            // SAFETY: as this function's own promise.
            unsafe { split_body(isa, work, group, split, qkv) };
            for q in 0..rows * heads {
                let (total, part) = (&mut work.total, &work.part);
                let (m, l, o) = (&mut total.m[q], &mut total.l[q], &mut total.o[q][..head_dim]);
                merge_into(m, l, o, part.m[q], part.l[q], &part.o[q][..head_dim]);
            }
        }
        for q in 0..rows * heads {
            let l = work.total.l[q];
            work.total.o[q][..head_dim].iter_mut().for_each(|o| *o /= l);
            out(first + q / heads, q % heads, &work.total.o[q][..head_dim]);
        }
    }
}

#[inline(always)]
unsafe fn attend_split_body(
    isa: Isa,
    work: &mut Work,
    group: Group<'_>,
    split: usize,
    qkv: &[f32],
    partials: &mut [f32],
) {
    let head_dim = group.cfg.head_dim;
    work.part.clear(group.heads(), head_dim);
    // SAFETY: as this function's own promise.
    unsafe { split_body(isa, work, group, split, qkv) };
    for (q, partial) in partials.chunks_exact_mut(partial_len(head_dim)).enumerate() {
        partial[0] = work.part.m[q];
        partial[1] = work.part.l[q];
        partial[2..].copy_from_slice(&work.part.o[q][..head_dim]);
    }
}

#[inline(always)]
unsafe fn merge_body(_isa: Isa, partials: &[f32], stride: usize, splits: usize, out: &mut [f32]) {
    let (mut m, mut l) = (f32::NEG_INFINITY, 0.0);
    out.fill(0.0);
    for split in 0..splits {
        let partial = &partials[split * stride..][..out.len() + 2];
        merge_into(&mut m, &mut l, out, partial[0], partial[1], &partial[2..]);
    }
    out.iter_mut().for_each(|o| *o /= l);
}

/// Adds a later part to a running softmax.
#[inline(always)]
fn merge_into(m: &mut f32, l: &mut f32, o: &mut [f32], part_m: f32, part_l: f32, part_o: &[f32]) {
    if part_m == f32::NEG_INFINITY {
        return;
    }
    let top = if part_m > *m || part_m.is_nan() { part_m } else { *m };
    let (keep, add) = (exp(*m - top), exp(part_m - top));
    *m = top;
    *l = *l * keep + part_l * add;
    for (o, part) in o.iter_mut().zip(part_o) {
        *o = *o * keep + part * add;
    }
}

/// Adds one split's tiles to `work.part`.
#[inline(always)]
unsafe fn split_body(isa: Isa, work: &mut Work, group: Group<'_>, split: usize, qkv: &[f32]) {
    let cfg = group.cfg;
    let (heads, head_dim) = (group.heads(), cfg.head_dim);
    let last = group.pos as usize + group.rows - 1;
    let first_tile = (cfg.first_visible(group.pos) as usize / BLOCK_TOKENS).max(split * SPLIT_TILES);
    let end_tile = (last / BLOCK_TOKENS + 1).min((split + 1) * SPLIT_TILES);
    let Work { part: run, keys, values, .. } = work;
    for tile in first_tile..end_tile {
        let head =
            |tile: usize| Place { block: group.blocks[tile] as usize, in_block: 0, kv_head: group.kv_head }.head(cfg);
        let len = head_dim * BLOCK_TOKENS;
        if tile + 1 < end_tile {
            // The next tile lies in a block of its own, where no hardware looks ahead.
            let next = head(tile + 1);
            prefetch_lines(isa, group.k[next..].as_ptr().cast(), 2 * len);
            prefetch_lines(isa, group.v[next..].as_ptr().cast(), 2 * len);
        }
        let head = head(tile);
        widen(isa, &group.k[head..head + len], keys.as_flattened_mut());
        widen(isa, &group.v[head..head + len], values);
        let start = tile * BLOCK_TOKENS;
        let queries = group.rows * heads;
        let row_head = |q: usize| (q / heads, group.kv_head * heads + q % heads);
        for block in (0..queries).step_by(QUERY_BLOCK) {
            // Queries past the last repeat it, so that one loop serves every number of them.
            let query = |i: usize| {
                let (r, h) = row_head((block + i).min(queries - 1));
                &qkv[r * cfg.qkv_dim() + h * head_dim..][..head_dim]
            };
            let mut p = dot_tile(std::array::from_fn(query), keys);
            let mut keep = [1.0; QUERY_BLOCK];
            let mut seen = [0..0, 0..0, 0..0, 0..0];
            for i in 0..QUERY_BLOCK.min(queries - block) {
                let pos = group.pos as usize + row_head(block + i).0;
                let from = cfg.first_visible(pos as u32) as usize;
                if start > pos || start + BLOCK_TOKENS <= from {
                    continue;
                }
                seen[i] = from.saturating_sub(start)..(pos + 1 - start).min(BLOCK_TOKENS);
                let (m, l) = (&mut run.m[block + i], &mut run.l[block + i]);
                keep[i] = soften(&mut p[i], cfg.scale, seen[i].clone(), m, l);
            }
            if seen.iter().all(|seen| *seen == (0..BLOCK_TOKENS)) {
                weigh_block(&mut run.o[block..block + QUERY_BLOCK], keep, &p, values, head_dim);
                continue;
            }
            for i in (0..QUERY_BLOCK).filter(|&i| !seen[i].is_empty()) {
                let (p, values) = (&p[i][seen[i].clone()], &values[seen[i].start * head_dim..]);
                weigh(&mut run.o[block + i][..head_dim], keep[i], p, values);
            }
        }
    }
}

/// Dot products `s` to weights `p` of the running softmax `m`, `l`; returns what its values are to be multiplied by.
#[inline(always)]
fn soften(s: &mut [f32; BLOCK_TOKENS], scale: f32, seen: Range<usize>, m: &mut f32, l: &mut f32) -> f32 {
    for (t, s) in s.iter_mut().enumerate() {
        *s = if t >= seen.start && t < seen.end { *s * scale } else { f32::NEG_INFINITY };
    }
    // A NaN score must not be lost: it poisons the row, which the sampler then refuses.
    let larger = |a: f32, b: f32| if b > a || b.is_nan() { b } else { a };
    let top = larger(*m, halved(*s, larger));
    let keep = exp(*m - top);
    *m = top;
    for s in s.iter_mut() {
        *s = exp(*s - top);
    }
    *l = *l * keep + halved(*s, |a, b| a + b);
    keep
}

/// Element i takes i + 16, then i + 8, ... then i + 1.
#[inline(always)]
fn halved(mut x: [f32; BLOCK_TOKENS], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = BLOCK_TOKENS / 2;
    while half > 0 {
        for t in 0..half {
            x[t] = f(x[t], x[t + half]);
        }
        half /= 2;
    }
    x[0]
}

/// Dot products of a few queries with a tile of keys: independent chains, so that they hide each other's latency.
#[inline(always)]
fn dot_tile(queries: [&[f32]; QUERY_BLOCK], keys: &[[f32; BLOCK_TOKENS]]) -> [[f32; BLOCK_TOKENS]; QUERY_BLOCK] {
    let mut s = [[0.0f32; BLOCK_TOKENS]; QUERY_BLOCK];
    let len = queries[0].len();
    // One length for all, so that the loop has no bounds to check.
    let (queries, keys) = (queries.map(|query| &query[..len]), &keys[..len]);
    for d in 0..len {
        for i in 0..QUERY_BLOCK {
            for t in 0..BLOCK_TOKENS {
                s[i][t] = queries[i][d].mul_add(keys[d][t], s[i][t]);
            }
        }
    }
    s
}

/// [`weigh`] for queries that all see the whole tile: their chains hide each other's latency, and a value is loaded once.
#[inline(always)]
fn weigh_block(
    o: &mut [[f32; MAX_HEAD_DIM]],
    keep: [f32; QUERY_BLOCK],
    p: &[[f32; BLOCK_TOKENS]; QUERY_BLOCK],
    values: &[f32],
    head_dim: usize,
) {
    const LANES: usize = 32;
    let whole = head_dim / LANES * LANES;
    for first in (0..whole).step_by(LANES) {
        let mut acc = [[0.0f32; LANES]; QUERY_BLOCK];
        for i in 0..QUERY_BLOCK {
            for d in 0..LANES {
                acc[i][d] = o[i][first + d] * keep[i];
            }
        }
        for t in 0..BLOCK_TOKENS {
            let v = &values[t * head_dim + first..][..LANES];
            for i in 0..QUERY_BLOCK {
                for d in 0..LANES {
                    acc[i][d] = p[i][t].mul_add(v[d], acc[i][d]);
                }
            }
        }
        for i in 0..QUERY_BLOCK {
            o[i][first..first + LANES].copy_from_slice(&acc[i]);
        }
    }
    for i in 0..QUERY_BLOCK {
        for d in whole..head_dim {
            weigh_lanes::<1>(&mut o[i][d..], keep[i], &p[i], &values[d..], head_dim);
        }
    }
}

/// `o = o * keep`, then `o[d] = fma(p[t], v[t][d], o[d])`, t ascending; up to 64 values at a time stay in registers.
///
/// Only visible positions: the others may hold what a former owner of the block left, and 0 times its NaN is NaN.
#[inline(always)]
fn weigh(o: &mut [f32], keep: f32, p: &[f32], values: &[f32]) {
    let head_dim = o.len();
    let mut first = 0;
    while head_dim - first >= 64 {
        weigh_lanes::<64>(&mut o[first..], keep, p, &values[first..], head_dim);
        first += 64;
    }
    while head_dim - first >= 16 {
        weigh_lanes::<16>(&mut o[first..], keep, p, &values[first..], head_dim);
        first += 16;
    }
    while first < head_dim {
        weigh_lanes::<1>(&mut o[first..], keep, p, &values[first..], head_dim);
        first += 1;
    }
}

#[inline(always)]
fn weigh_lanes<const N: usize>(o: &mut [f32], keep: f32, p: &[f32], values: &[f32], head_dim: usize) {
    let mut acc: [f32; N] = std::array::from_fn(|d| o[d] * keep);
    for (t, p) in p.iter().enumerate() {
        let v = &values[t * head_dim..][..N];
        for d in 0..N {
            acc[d] = p.mul_add(v[d], acc[d]);
        }
    }
    o[..N].copy_from_slice(&acc);
}

/// f16 bits to f32.
#[inline(always)]
fn widen(isa: Isa, half: &[u16], out: &mut [f32]) {
    let (blocks, rest) = half.as_chunks::<16>();
    for (block, out) in blocks.iter().zip(out.chunks_exact_mut(16)) {
        #[cfg(target_arch = "x86_64")]
        if isa != Isa::Scalar {
            // SAFETY: both vector sets include F16C; sixteen u16 are 32 bytes.
            out.copy_from_slice(&unsafe { crate::ops::matmul::kernel::f16x16(&*block.as_ptr().cast::<[u8; 32]>()) });
            continue;
        }
        let _ = isa;
        out.iter_mut().zip(block).for_each(|(out, &half)| *out = f16_to_f32(half));
    }
    let done = blocks.len() * 16;
    rest.iter().zip(&mut out[done..]).for_each(|(&half, out)| *out = f16_to_f32(half));
}
