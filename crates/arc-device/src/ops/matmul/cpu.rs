//! Matmul on the CPU: quantised activations, and the walk over tiles.

use std::ops::Range;

use super::SLICE;
use super::kernel::{Quantised, Shape, dot_slice};
use super::pack::{PackedMatrix, Part, SLICE_BLOCKS, Slice, TILE, unpack_floats, unpack_slice};
use crate::cpu::buf::{Aligned, Shared};
use crate::cpu::team::Team;
use crate::format::Coding;
use crate::simd::{Isa, multiversion, with_isa};

/// Activation rows that meet an unpacked slice before the next one is unpacked: their int8 values stay in L1.
const ROW_BLOCK: usize = 64;

/// The inputs of a matmul stage, ready for every format: scratch of the device, sized at load.
pub(crate) struct Activations {
    q: Aligned<i8>,
    d: Aligned<f32>,
    sums: Aligned<i32>,
    /// `[rows, cols]`, for float formats and as the place where a norm leaves its result.
    pub floats: Aligned<f32>,
}

impl Activations {
    /// Scratch for up to `max_rows` rows of up to `max_cols` values; `None` where there is no memory for it.
    pub fn new(max_rows: usize, max_cols: usize) -> Option<Activations> {
        // Rounded up, so that the blocks of a row are whole.
        let cols = max_cols.next_multiple_of(32);
        Some(Activations {
            q: Aligned::try_zeroed(max_rows * cols)?,
            d: Aligned::try_zeroed(max_rows * cols / 32)?,
            sums: Aligned::try_zeroed(max_rows * cols / 16)?,
            floats: Aligned::try_zeroed(max_rows * cols)?,
        })
    }

    /// Bytes of such scratch.
    pub fn bytes(max_rows: usize, max_cols: usize) -> usize {
        let cols = max_cols.next_multiple_of(32);
        max_rows * (5 * cols + cols / 8 + cols / 4)
    }

    /// Fills rows `0..rows` of `w.cols` values for the formats that `w` has: `prepare(r, out)` writes row `r` as f32.
    pub fn fill(
        &mut self,
        team: &mut Team,
        w: &PackedMatrix,
        rows: usize,
        prepare: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        self.fill_rows(team, w.cols, w.reads_quantised(), rows, prepare);
    }

    /// As [`Self::fill`] for any number of rows of `cols` values that fit; int8 values where `quantise`.
    pub fn fill_rows(
        &mut self,
        team: &mut Team,
        cols: usize,
        quantise: bool,
        rows: usize,
        prepare: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        assert!(rows * cols <= self.floats.len(), "{rows} rows of {cols}");
        let (floats, q, d, sums) = (self.floats.shared(), self.q.shared(), self.d.shared(), self.sums.shared());
        team.run(rows, &|r, _| {
            // SAFETY: a row is written by one task, in each of the four buffers.
            unsafe {
                let floats = floats.slice_mut(r * cols, cols);
                prepare(r, floats);
                if quantise {
                    let blocks = cols / 32;
                    let q = q.slice_mut(r * cols, cols);
                    quantise_row(
                        floats,
                        q,
                        d.slice_mut(r * blocks, blocks),
                        sums.slice_mut(2 * r * blocks, 2 * blocks),
                    );
                }
            }
        });
    }

    fn quantised(&self, cols: usize) -> Quantised<'_> {
        Quantised { q: &self.q, d: &self.d, sums: &self.sums, cols }
    }
}

multiversion! {
    /// Quantises a row to int8 per 32 values, as [`super`] states. `x`, `q`: `cols`; `d`: `cols / 32`; `sums`:
    /// `cols / 16` sums of q.
    pub(crate) fn quantise_row(x: &[f32], q: &mut [i8], d: &mut [f32], sums: &mut [i32]) {
        for (((x, q), d), sums) in
            x.chunks_exact(32).zip(q.chunks_exact_mut(32)).zip(d).zip(sums.chunks_exact_mut(2))
        {
            // The bits of |x| order like the numbers, infinity and NaN last.
            let mut top = 0u32;
            for x in x {
                top = top.max(x.to_bits() & 0x7fff_ffff);
            }
            let amax = f32::from_bits(top);
            *d = amax / 127.0;
            if top == 0 || top >= 0x7f80_0000 {
                q.fill(0);
                sums.fill(0);
                continue;
            }
            for (q, x) in q.iter_mut().zip(x) {
                let scaled = ((x / amax) * 127.0).round_ties_even();
                // SAFETY: |x| <= amax, so the quotient is at most 1 and the product at most 127.
                *q = unsafe { scaled.to_int_unchecked::<i32>() } as i8;
            }
            for (sum, q) in sums.iter_mut().zip(q.chunks_exact(16)) {
                *sum = q.iter().map(|&q| i32::from(q)).sum();
            }
        }
    }
}

/// Products of one tile with a block of rows: `[row][lane]`.
pub(crate) type Block = [[f32; TILE]];

/// Runs `w` over activation rows `0..rows` and hands every finished block to `sink(first_out, n_out, first_row, block)`.
pub(crate) fn matmul(
    team: &mut Team,
    w: &PackedMatrix,
    x: &Activations,
    rows: usize,
    sink: &(dyn Fn(usize, usize, usize, &Block) + Sync),
) {
    let tiles: usize = w.parts.iter().map(Part::n_tiles).sum();
    for_tile_runs(team, tiles, &|first, last, work| {
        for_row_blocks(rows, |row, n| {
            for t in first..last {
                let (part, t) = locate(&w.parts, t);
                let acc = &mut work.acc[0][..n];
                tile_product(part, t, w.cols, x, row, acc, &mut work.scratch);
                let lanes = TILE.min(part.rows - t * TILE);
                sink(part.first_row + t * TILE, lanes, row, acc);
            }
        });
    });
}

/// As [`matmul`] for a matrix of two equal parts, tile `t` of both at once: `sink(first_out, n_out, row, first, second)`,
/// where `first` may be overwritten.
pub(crate) fn matmul_pairs(
    team: &mut Team,
    w: &PackedMatrix,
    x: &Activations,
    rows: usize,
    sink: &(dyn Fn(usize, usize, usize, &mut Block, &Block) + Sync),
) {
    let [a, b] = &w.parts[..] else { panic!("a gated matrix has two parts, this one {}", w.parts.len()) };
    assert_eq!(a.rows, b.rows, "the parts of a gated matrix have equal rows");
    for_tile_runs(team, a.n_tiles(), &|first, last, work| {
        for_row_blocks(rows, |row, n| {
            for t in first..last {
                let [first, second] = &mut work.acc;
                tile_product(a, t, w.cols, x, row, &mut first[..n], &mut work.scratch);
                tile_product(b, t, w.cols, x, row, &mut second[..n], &mut work.scratch);
                sink(t * TILE, TILE.min(a.rows - t * TILE), row, &mut first[..n], &second[..n]);
            }
        });
    });
}

/// Tile `t` of one part of `w` over some activation rows: `sink(first_out, n_out, row, block)`, outputs counted in the
/// part. For parts that meet rows of their own.
pub(crate) fn part_tile(
    work: &mut Work,
    w: &PackedMatrix,
    part: usize,
    t: usize,
    x: &Activations,
    rows: Range<usize>,
    sink: &mut dyn FnMut(usize, usize, usize, &Block),
) {
    let part = &w.parts[part];
    for_row_blocks(rows.len(), |row, n| {
        let acc = &mut work.acc[0][..n];
        tile_product(part, t, w.cols, x, rows.start + row, acc, &mut work.scratch);
        sink(t * TILE, TILE.min(part.rows - t * TILE), rows.start + row, acc);
    });
}

/// As [`part_tile`] for two parts of equal rows at once: `sink(first_out, n_out, row, first, second)`, where `first` may be
/// overwritten.
pub(crate) fn part_pair_tile(
    work: &mut Work,
    w: &PackedMatrix,
    parts: [usize; 2],
    t: usize,
    x: &Activations,
    rows: Range<usize>,
    sink: &mut dyn FnMut(usize, usize, usize, &mut Block, &Block),
) {
    let [a, b] = parts.map(|part| &w.parts[part]);
    assert_eq!(a.rows, b.rows, "the parts of a gated unit have equal rows");
    for_row_blocks(rows.len(), |row, n| {
        let [first, second] = &mut work.acc;
        tile_product(a, t, w.cols, x, rows.start + row, &mut first[..n], &mut work.scratch);
        tile_product(b, t, w.cols, x, rows.start + row, &mut second[..n], &mut work.scratch);
        sink(t * TILE, TILE.min(a.rows - t * TILE), rows.start + row, &mut first[..n], &second[..n]);
    });
}

/// Splits `tiles` into runs and gives them to the team: enough of them to even out, few enough to stay cheap.
fn for_tile_runs(team: &mut Team, tiles: usize, run: &(dyn Fn(usize, usize, &mut Work) + Sync)) {
    let wanted = if team.threads() == 1 { 1 } else { team.threads() * 6 };
    let len = tiles.div_ceil(wanted).max(1);
    team.run(tiles.div_ceil(len), &|i, scratch| run(i * len, (i * len + len).min(tiles), &mut scratch.matmul));
}

fn for_row_blocks(rows: usize, mut block: impl FnMut(usize, usize)) {
    for row in (0..rows).step_by(ROW_BLOCK) {
        block(row, ROW_BLOCK.min(rows - row));
    }
}

/// The part that the `t`-th tile of a matrix lies in, and its number there.
fn locate(parts: &[Part], mut t: usize) -> (&Part, usize) {
    for part in parts {
        if t < part.n_tiles() {
            return (part, t);
        }
        t -= part.n_tiles();
    }
    unreachable!("tile past the end of a matrix");
}

const _: () = assert!(size_of::<Slice>() <= size_of::<[[f32; TILE]; SLICE]>());

/// What a member of the team keeps for a tile.
pub(crate) struct Work {
    acc: [[[f32; TILE]; ROW_BLOCK]; 2],
    scratch: Scratch,
}

/// Room for one slice of a tile, in either view. `repr(C)`: both begin at its start, so that zeros written through the
/// larger, `floats`, are zeros of the other.
#[repr(C)]
union Scratch {
    codes: std::mem::ManuallyDrop<Slice>,
    floats: [[f32; TILE]; SLICE],
}

impl Default for Work {
    fn default() -> Work {
        Work { acc: [[[0.0; TILE]; ROW_BLOCK]; 2], scratch: Scratch { floats: [[0.0; TILE]; SLICE] } }
    }
}

with_isa! {
    /// `acc[r] = tile t of part * x[row + r]`.
    fn tile_product(
        part: &Part,
        t: usize,
        cols: usize,
        x: &Activations,
        row: usize,
        acc: &mut Block,
        scratch: &mut Scratch,
    ) => tile_body
}

/// # Safety
/// The machine has `isa`, and the caller is compiled for it.
#[inline(always)]
unsafe fn tile_body(
    isa: Isa,
    part: &Part,
    t: usize,
    cols: usize,
    x: &Activations,
    row: usize,
    acc: &mut Block,
    scratch: &mut Scratch,
) {
    acc.fill([0.0; TILE]);
    let tile = part.tile(t);
    if part.format.coding() == Coding::Float {
        // SAFETY: both views are plain numbers, zeroed at first, so either may be read after the other was written.
        let weights = unsafe { &mut scratch.floats };
        for first in (0..cols).step_by(SLICE) {
            let n = SLICE.min(cols - first);
            unpack_floats(isa, part.format, tile, first, &mut weights[..n]);
            float_slice(&weights[..n], &x.floats, cols, row, first, acc);
        }
        return;
    }
    let shape = Shape::of(part.format);
    let x = x.quantised(cols);
    // SAFETY: both views are plain numbers, zeroed at first, so either may be read after the other was written.
    let slice = unsafe { &mut *scratch.codes };
    let blocks = cols / 32;
    for first in (0..blocks).step_by(SLICE_BLOCKS) {
        let n = SLICE_BLOCKS.min(blocks - first);
        unpack_slice(isa, part.format, tile, first, n, slice);
        // SAFETY: as this function's own promise.
        unsafe { dot_slice(isa, shape, slice, x, row, first, n, acc) };
    }
}

/// `acc[r] += weights * x[row + r]` over columns `first ..`, each lane a chain of fused multiply-adds.
#[inline(always)]
fn float_slice(weights: &[[f32; TILE]], x: &[f32], cols: usize, row: usize, first: usize, acc: &mut Block) {
    let mut row = row;
    for group in acc.chunks_mut(4) {
        let mut sum = [[0.0f32; TILE]; 4];
        let at = |r: usize| &x[(row + r) * cols + first..][..weights.len()];
        // Rows past the group's end repeat its last one, so that one loop serves every size.
        let x: [&[f32]; 4] = std::array::from_fn(|r| at(r.min(group.len() - 1)));
        for (k, w) in weights.iter().enumerate() {
            for r in 0..4 {
                for lane in 0..TILE {
                    sum[r][lane] = w[lane].mul_add(x[r][k], sum[r][lane]);
                }
            }
        }
        for (total, sum) in group.iter_mut().zip(sum) {
            for lane in 0..TILE {
                total[lane] += sum[lane];
            }
        }
        row += group.len();
    }
}

/// Writes row `index` of a matrix as f32: the values that the format's definition gives.
pub(crate) fn decode_row(w: &PackedMatrix, index: usize, out: &mut [f32]) {
    let part = w.parts.iter().rev().find(|part| part.first_row <= index).expect("the first part starts at 0");
    let (t, lane) = ((index - part.first_row) / TILE, (index - part.first_row) % TILE);
    let tile = part.tile(t);
    let Some(codes) = part.format.codes() else {
        let mut floats = [[0.0; TILE]; SLICE];
        for (i, out) in out.chunks_mut(SLICE).enumerate() {
            unpack_floats(Isa::Scalar, part.format, tile, i * SLICE, &mut floats[..out.len()]);
            out.iter_mut().zip(&floats).for_each(|(out, row)| *out = row[lane]);
        }
        return;
    };
    let per_half = matches!(part.format.coding(), Coding::PerHalf(_));
    let mut slice = Slice::zeroed();
    for (i, out) in out.chunks_mut(SLICE).enumerate() {
        unpack_slice(Isa::Scalar, part.format, tile, i * SLICE_BLOCKS, out.len() / 32, &mut slice);
        for (k, out) in out.iter_mut().enumerate() {
            let (b, k) = (k / 32, k % 32);
            let code = slice.codes[b][64 * (k / 4) + 4 * lane + k % 4];
            let q = f32::from(i16::from(code) - i16::from(codes.offset));
            let (mut d, mut m) = (slice.d[b][lane], slice.m[b][lane]);
            if per_half {
                d *= slice.sc[b][k / 16][lane] as f32;
                m *= slice.min[b][k / 16][lane] as f32;
            }
            *out = if codes.has_min { d * q + m } else { d * q };
        }
    }
}

/// Scatters a block into row-major output: `out[row + r][first_out ..]`, `stride` values a row.
///
/// # Safety
/// No other task writes these columns of these rows.
pub(crate) unsafe fn store(
    out: Shared<'_, f32>,
    stride: usize,
    first_out: usize,
    lanes: usize,
    row: usize,
    block: &Block,
    mut put: impl FnMut(usize, &mut f32, f32),
) {
    for (r, values) in block.iter().enumerate() {
        // SAFETY: by the caller's promise.
        let out = unsafe { out.slice_mut((row + r) * stride + first_out, lanes) };
        for (lane, (out, value)) in out.iter_mut().zip(values).enumerate() {
            put(lane, out, *value);
        }
    }
}
