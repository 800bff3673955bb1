//! Layers of a dense decoder over a few rows in one launch: the Rust side of layers.cu.

use super::Workspace;
use super::matrix::CudaMatrix;
use super::plan::{Cut, MAX_SHARED, Places};
use crate::cuda::{Arg, Cuda, CudaBuf, Grid, Kernel, kernel};
use crate::error::Result;
use crate::format::Format;
use crate::ops::glu::Activation;
use crate::ops::kv::RopeStyle;
use crate::ops::matmul::SLICE;
use crate::step::{BLOCK_TOKENS, CtxClass};
use crate::{DenseLayer, Norm};

/// Blocks of the cluster.
const BLOCKS: usize = 16;
/// Threads of a block.
const THREADS: u32 = 512;
/// Values of a head.
const HEAD_DIM: usize = 64;
/// Layers of a launch.
const MOST_LAYERS: usize = 32;
/// Keys of a split, and splits of a row.
const SPLIT_KEYS: usize = 256;
const MOST_SPLITS: usize = 8;
/// Bytes in front of everything: barriers, what a block and its warps have of products, tables of a softmax.
const HEAD_BYTES: u32 = 800;
/// Values that a part of 32 values of a head takes.
const PART: usize = 36;
/// Launches in which rows go faster than by their stages, and rows of all of them.
const MOST_LAUNCHES: usize = 5;
const MOST_ROWS: usize = 8 * MOST_LAUNCHES;

/// `Layer` of layers.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Layer {
    qkv: u64,
    out: u64,
    gate: u64,
    up: u64,
    down: u64,
    attn_norm: u64,
    ffn_norm: u64,
    k: u64,
    v: u64,
}
const _: () = assert!(size_of::<Layer>() == 72);

/// `Layers` of layers.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Layers {
    layers: [Layer; MOST_LAYERS],
    x: u64,
    rope: u64,
    appended: u64,
    eps: f32,
    scale: f32,
    n_layers: u32,
    adjacent: u32,
    first_row: u32,
    first_layer: u32,
    x_at: u32,
    middle_at: u32,
    codes_at: u32,
    heads_at: u32,
    units_at: u32,
    qkv_at: u32,
    angles_at: u32,
    sums_at: u32,
    rows_at: u32,
    parts_at: u32,
    weights_at: u32,
    kv_at: u32,
}
const _: () = assert!(size_of::<Layers>() == 2400);

/// A shape that there is a kernel for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    hidden: usize,
    n_heads: usize,
    n_kv_heads: usize,
    ffn: usize,
}

/// Shapes and their kernels: of one row, of several.
const SHAPES: [(Shape, [Kernel; 2]); 1] = [(
    Shape { hidden: 576, n_heads: 9, n_kv_heads: 3, ffn: 1536 },
    [kernel!("arc_matmul_layers_576_one"), kernel!("arc_matmul_layers_576")],
)];

/// What all layers of a launch have in common.
#[derive(Clone, Copy, PartialEq)]
struct Common {
    shape: Shape,
    eps: f32,
    scale: f32,
    style: RopeStyle,
    rope: u64,
}

/// Whether parts are of the kernel's format, and stand one behind the other.
fn fits(w: &CudaMatrix) -> bool {
    let mut at = w.parts.first().map_or(0, |part| part.at);
    w.parts.iter().all(|part| {
        let here = part.at == at;
        at += (w.cut.groups(part.rows) * w.cut.group_bytes(Format::Q4_1)) as u64;
        here && part.format == Format::Q4_1
    })
}

/// Where the share of block `rank` begins, the first blocks having one item more or the last: `share` of layers.cu.
fn share(n: usize, rank: usize, last: bool) -> usize {
    let (each, more) = (n / BLOCKS, n % BLOCKS);
    rank * each + if last { rank.saturating_sub(BLOCKS - more) } else { rank.min(more) }
}

impl Shape {
    /// Places of the parts of a block's shared memory, and its bytes. `None` where there is no room.
    fn places(&self) -> Option<(Layers, u32)> {
        let Shape { hidden, n_heads, n_kv_heads, ffn } = *self;
        let group_heads = n_heads / n_kv_heads;
        let [wide, of_heads, of_ffn] = [hidden, n_heads * HEAD_DIM, ffn].map(Cut::of);
        let (heads, chunks) = (n_heads + 2 * n_kv_heads, (n_heads * HEAD_DIM / 32).div_ceil(BLOCKS));
        let span = |n: usize, rank: usize, last: bool| share(n, rank + 1, last) - share(n, rank, last);
        let heads_before = |rank: usize| (rank * heads.div_ceil(BLOCKS)).min(heads);
        // Groups of a block's share of the products.
        let parts = |rank: usize| {
            [
                (&wide, (heads_before(rank + 1) - heads_before(rank)) * HEAD_DIM / wide.group_rows()),
                (&of_heads, span(of_heads.groups(hidden), rank, false)),
                (&wide, (2 * span(ffn / 32, rank, false)) << wide.log_c),
                (&of_ffn, span(of_ffn.groups(hidden), rank, true)),
            ]
        };
        let bytes = |rank: usize| parts(rank).iter().map(|(cut, n)| n * cut.group_bytes(Format::Q4_1)).sum::<usize>();
        let weights = (0..BLOCKS).map(bytes).max()?;
        // Of products behind a norm, and of the others.
        let sums = |at: usize| {
            let of = |rank: usize| [at, at + 2].map(|i| parts(rank)[i]).map(|(cut, n)| 128 * n * cut.tiles());
            (0..BLOCKS).flat_map(of).max()
        };
        let (of_normed, of_rows) = (sums(0)?.max(4 * SPLIT_KEYS * group_heads), sums(1)?);
        // Scales and sums, whole slices on a border of their own, and the rest.
        let codes = |cols: usize| {
            let behind = cols / SLICE * (SLICE + 16) + cols % SLICE;
            (cols / 4).next_multiple_of(16) + behind
        };
        let mut places = Places::behind(HEAD_BYTES / 8);
        let mut take = |values: usize| places.take(4 * values as u32);
        let (x_at, middle_at) = (take(hidden), take(hidden));
        let [codes_at, heads_at, units_at] =
            [hidden, n_heads * HEAD_DIM, ffn].map(|cols| take(codes(cols).div_ceil(4)));
        let qkv_at = take((group_heads + 2) * HEAD_DIM);
        let angles_at = take(HEAD_DIM);
        let (sums_at, rows_at) = (take(of_normed / 4), take(of_rows / 4));
        let parts_at = take(chunks * MOST_SPLITS * PART);
        let weights_at = places.rest();
        let kv_at = (weights_at + weights as u32).next_multiple_of(128);
        let shared = kv_at + (4 * SPLIT_KEYS * HEAD_DIM) as u32;
        let args = Layers {
            layers: [Layer::default(); MOST_LAYERS],
            x: 0,
            rope: 0,
            appended: 0,
            eps: 0.0,
            scale: 0.0,
            n_layers: 0,
            adjacent: 0,
            first_row: 0,
            first_layer: 0,
            x_at,
            middle_at,
            codes_at,
            heads_at,
            units_at,
            qkv_at,
            angles_at,
            sums_at,
            rows_at,
            parts_at,
            weights_at,
            kv_at,
        };
        (shared <= MAX_SHARED).then_some((args, shared))
    }
}

impl Common {
    /// Of a layer that a kernel may take.
    fn of(layer: &DenseLayer<'_, Cuda>) -> Option<Common> {
        let (att, rope) = (&layer.heads.attention, layer.heads.rope);
        let plain = layer.qkv_bias.is_none()
            && layer.heads.q_norm.is_none()
            && layer.heads.k_norm.is_none()
            && layer.attn_post_norm.is_none()
            && layer.ffn_post_norm.is_none()
            && layer.act == Activation::Silu
            && layer.attn_norm.eps == layer.ffn_norm.eps
            && att.window.is_none()
            && (att.head_dim, rope.dim) == (HEAD_DIM, HEAD_DIM);
        let (qkv, out, up, down) = (layer.qkv, layer.attn_out, layer.gate_up, layer.down);
        let (hidden, heads, ffn) = (qkv.cols, att.n_heads * HEAD_DIM, down.cols);
        let shaped = qkv.rows == att.qkv_dim()
            && (out.cols, out.rows) == (heads, hidden)
            && (up.cols, up.rows, up.parts.len()) == (hidden, 2 * ffn, 2)
            && up.parts[0].rows == ffn
            && down.rows == hidden;
        let all = [qkv, out, up, down].into_iter().all(fits);
        (plain && shaped && all).then(|| Common {
            shape: Shape { hidden, n_heads: att.n_heads, n_kv_heads: att.n_kv_heads, ffn },
            eps: layer.attn_norm.eps,
            scale: att.scale,
            style: rope.style,
            rope: layer.heads.rope_table.ptr(),
        })
    }
}

impl Cuda {
    /// Layers of a few rows in one launch, or a few. `false`: nothing was done.
    pub(crate) fn layers_of_rows(
        &mut self,
        x: &CudaBuf<f32>,
        layers: &[DenseLayer<'_, Cuda>],
        rows: usize,
    ) -> Result<bool> {
        // The kernel has room for the parts of a short context.
        const { assert!(MOST_SPLITS * SPLIT_KEYS == 2048 && SPLIT_KEYS == 8 * BLOCK_TOKENS) };
        if rows > MOST_ROWS || self.ctx != CtxClass::Short {
            return Ok(false);
        }
        let Some(common) = layers.first().and_then(Common::of) else { return Ok(false) };
        if layers.iter().any(|layer| Common::of(layer).as_ref() != Some(&common)) {
            return Ok(false);
        }
        let Some((_, kernels)) = SHAPES.iter().find(|(shape, _)| *shape == common.shape) else { return Ok(false) };
        let Some((places, shared)) = common.shape.places() else { return Ok(false) };
        let kernel = kernels[usize::from(rows > 1)];
        let grid = |rows: usize| Grid::new((rows * BLOCKS) as u32, THREADS).shared(shared).cluster(BLOCKS as u32);
        // Rows of a launch may wait for each other.
        let at_once = self.resident_clusters(kernel, grid(1))? as usize;
        if rows > MOST_LAUNCHES * at_once {
            return Ok(false);
        }
        // What is known of the rows is of before.
        self.matmul.leave(x.ptr(), common.shape.hidden, rows, false, None);
        let Common { eps, scale, rope, .. } = common;
        let adjacent = u32::from(common.style == RopeStyle::Adjacent);
        let appended = self.matmul.appended();
        let mut args = Layers { x: x.ptr(), rope, appended, eps, scale, adjacent, ..places };
        for some in layers.chunks(MOST_LAYERS) {
            for (to, layer) in args.layers.iter_mut().zip(some) {
                let norm = |norm: &Norm<'_, Cuda>| norm.weight.ptr();
                *to = Layer {
                    qkv: layer.qkv.parts[0].at,
                    out: layer.attn_out.parts[0].at,
                    gate: layer.gate_up.parts[0].at,
                    up: layer.gate_up.parts[1].at,
                    down: layer.down.parts[0].at,
                    attn_norm: norm(&layer.attn_norm),
                    ffn_norm: norm(&layer.ffn_norm),
                    k: layer.kv.k.ptr(),
                    v: layer.kv.v.ptr(),
                };
                let bytes = [layer.qkv, layer.attn_out, layer.gate_up, layer.down].map(CudaMatrix::bytes);
                self.counters.weight_bytes += bytes.iter().sum::<usize>() as u64;
                self.count_read(layer.heads.attention.read());
            }
            args.n_layers = some.len() as u32;
            for first in (0..rows).step_by(at_once) {
                args.first_row = first as u32;
                let view = self.view();
                self.launch(kernel, grid(at_once.min(rows - first)), &[Arg::of(&args), Arg::from(&view)])?;
            }
            args.first_layer += args.n_layers;
        }
        self.matmul.taken = (at_once.min(rows) * BLOCKS) as u32;
        Ok(true)
    }
}

impl Workspace {
    /// Where rows of a launch say what they have appended.
    fn appended(&self) -> u64 {
        self.appended.as_ref().expect("`finish` made it").ptr()
    }

    /// Words in which rows of a launch say what they have appended: of a row and key head two for keys and two for values.
    pub(super) fn appended_words() -> usize {
        let key_heads = SHAPES.iter().map(|(shape, _)| shape.n_kv_heads).max().unwrap_or(0);
        MOST_ROWS * key_heads * 4
    }
}

#[cfg(test)]
mod tests {
    use super::{BLOCKS, SHAPES, share};

    #[test]
    fn every_shape_fits_in_shared_memory() {
        assert!(SHAPES.iter().all(|(shape, _)| shape.places().is_some()));
    }

    /// `over` of layers.cu, for every mantissa: an exponent changes nothing as long as nothing over- or underflows.
    #[test]
    fn quotients_by_constants_are_rounded() {
        for divisor in [127.0f32, 576.0] {
            let reciprocal = 1.0 / divisor;
            let over = |a: f32| {
                let q = a * reciprocal;
                (-q).mul_add(divisor, a).mul_add(reciprocal, q)
            };
            let wrong = (0..1 << 23).map(|bits| f32::from_bits(127 << 23 | bits)).find(|&a| over(a) != a / divisor);
            assert_eq!(wrong, None, "over {divisor}");
        }
    }

    #[test]
    fn shares_are_all_items_and_differ_by_one() {
        for n in [16, 18, 36, 48, 61] {
            for last in [false, true] {
                let spans: Vec<usize> = (0..BLOCKS).map(|r| share(n, r + 1, last) - share(n, r, last)).collect();
                assert_eq!((share(n, 0, last), spans.iter().sum::<usize>()), (0, n));
                assert!(spans.iter().all(|span| span.abs_diff(n / BLOCKS) <= 1), "{spans:?}");
            }
        }
    }
}
