//! Products on the GPU.
//!
//! [`Cuda::prepare`] makes inputs of rows of f32 (norm, rounding, int8), [`Cuda::product`] reads them. Inputs stay until
//! the next `prepare`, so several products can read the same. [`Cuda::product_of`] is both, and one launch for few rows,
//! whose inputs the kernel before may have left already ([`Workspace::leave`]).
//! What happens to an output on its way to memory is [`Then`].

mod experts;
mod experts_row;
mod follow;
mod inputs;
mod layers;
mod matrix;
mod plan;

use crate::cuda::{Arg, Cuda, CudaBuf, Grid, Kernel, args, kernel};
use crate::error::{DeviceError, Result};
use crate::format::{Coding, Format};
use crate::ops::glu::Activation;
use crate::{MemoryClass, ModelShape, Norm};
pub(crate) use experts::Units;
pub(crate) use experts_row::{AllExperts, HeldUnits};
pub(crate) use follow::{Due, Held, Query, Sent};
pub(crate) use inputs::{Codes, Reads, Source, makes_inputs};
use inputs::{Given, InputBuffers, Ready};
pub use matrix::CudaMatrix;
use matrix::Part;
use plan::{Block, Embed, MAX_SEGS, Prepare, Product};

/// Kernels over few rows, by format in the order of the enum and by rows (1, 2, 4, 8).
#[rustfmt::skip]
const GEMV: [[Kernel; 4]; 16] = [
    [kernel!("arc_matmul_gemv_f32_1"), kernel!("arc_matmul_gemv_f32_2"), kernel!("arc_matmul_gemv_f32_4"), kernel!("arc_matmul_gemv_f32_8")],
    [kernel!("arc_matmul_gemv_f16_1"), kernel!("arc_matmul_gemv_f16_2"), kernel!("arc_matmul_gemv_f16_4"), kernel!("arc_matmul_gemv_f16_8")],
    [kernel!("arc_matmul_gemv_bf16_1"), kernel!("arc_matmul_gemv_bf16_2"), kernel!("arc_matmul_gemv_bf16_4"), kernel!("arc_matmul_gemv_bf16_8")],
    [kernel!("arc_matmul_gemv_q8_0_1"), kernel!("arc_matmul_gemv_q8_0_2"), kernel!("arc_matmul_gemv_q8_0_4"), kernel!("arc_matmul_gemv_q8_0_8")],
    [kernel!("arc_matmul_gemv_q4_0_1"), kernel!("arc_matmul_gemv_q4_0_2"), kernel!("arc_matmul_gemv_q4_0_4"), kernel!("arc_matmul_gemv_q4_0_8")],
    [kernel!("arc_matmul_gemv_q4_1_1"), kernel!("arc_matmul_gemv_q4_1_2"), kernel!("arc_matmul_gemv_q4_1_4"), kernel!("arc_matmul_gemv_q4_1_8")],
    [kernel!("arc_matmul_gemv_q5_0_1"), kernel!("arc_matmul_gemv_q5_0_2"), kernel!("arc_matmul_gemv_q5_0_4"), kernel!("arc_matmul_gemv_q5_0_8")],
    [kernel!("arc_matmul_gemv_q5_1_1"), kernel!("arc_matmul_gemv_q5_1_2"), kernel!("arc_matmul_gemv_q5_1_4"), kernel!("arc_matmul_gemv_q5_1_8")],
    [kernel!("arc_matmul_gemv_q2_k_1"), kernel!("arc_matmul_gemv_q2_k_2"), kernel!("arc_matmul_gemv_q2_k_4"), kernel!("arc_matmul_gemv_q2_k_8")],
    [kernel!("arc_matmul_gemv_q3_k_1"), kernel!("arc_matmul_gemv_q3_k_2"), kernel!("arc_matmul_gemv_q3_k_4"), kernel!("arc_matmul_gemv_q3_k_8")],
    [kernel!("arc_matmul_gemv_q4_k_1"), kernel!("arc_matmul_gemv_q4_k_2"), kernel!("arc_matmul_gemv_q4_k_4"), kernel!("arc_matmul_gemv_q4_k_8")],
    [kernel!("arc_matmul_gemv_q5_k_1"), kernel!("arc_matmul_gemv_q5_k_2"), kernel!("arc_matmul_gemv_q5_k_4"), kernel!("arc_matmul_gemv_q5_k_8")],
    [kernel!("arc_matmul_gemv_q6_k_1"), kernel!("arc_matmul_gemv_q6_k_2"), kernel!("arc_matmul_gemv_q6_k_4"), kernel!("arc_matmul_gemv_q6_k_8")],
    [kernel!("arc_matmul_gemv_iq2_xxs_1"), kernel!("arc_matmul_gemv_iq2_xxs_2"), kernel!("arc_matmul_gemv_iq2_xxs_4"), kernel!("arc_matmul_gemv_iq2_xxs_8")],
    [kernel!("arc_matmul_gemv_mxfp4_1"), kernel!("arc_matmul_gemv_mxfp4_2"), kernel!("arc_matmul_gemv_mxfp4_4"), kernel!("arc_matmul_gemv_mxfp4_8")],
    [kernel!("arc_matmul_gemv_fp8_1"), kernel!("arc_matmul_gemv_fp8_2"), kernel!("arc_matmul_gemv_fp8_4"), kernel!("arc_matmul_gemv_fp8_8")],
];

/// Kernels of two products over few rows, of Q8_0 and of F16, by rows.
const GEMV_TWO: [Kernel; 4] = [
    kernel!("arc_matmul_gemv_q8_0_and_f16_1"),
    kernel!("arc_matmul_gemv_q8_0_and_f16_2"),
    kernel!("arc_matmul_gemv_q8_0_and_f16_4"),
    kernel!("arc_matmul_gemv_q8_0_and_f16_8"),
];
/// Most threads of their blocks.
const TWO_THREADS: u32 = 384;

/// Kernels over many rows of integer-coded weights, by format.
#[rustfmt::skip]
const MMA: [Option<Many>; 16] = [
    None,
    None,
    None,
    Some(Many { warps: 4, block: kernel!("arc_matmul_mma_q8_0_32"), large: Some([kernel!("arc_matmul_mma_q8_0_64"), kernel!("arc_matmul_mma_q8_0_64_alone")]), split: [kernel!("arc_matmul_mma_q8_0_split_16"), kernel!("arc_matmul_mma_q8_0_split_32")] }),
    Some(Many { warps: 4, block: kernel!("arc_matmul_mma_q4_0_32"), large: Some([kernel!("arc_matmul_mma_q4_0_64"), kernel!("arc_matmul_mma_q4_0_64_alone")]), split: [kernel!("arc_matmul_mma_q4_0_split_16"), kernel!("arc_matmul_mma_q4_0_split_32")] }),
    Some(Many { warps: 4, block: kernel!("arc_matmul_mma_q4_1_32"), large: None, split: [kernel!("arc_matmul_mma_q4_1_split_16"), kernel!("arc_matmul_mma_q4_1_split_32")] }),
    Some(Many { warps: 4, block: kernel!("arc_matmul_mma_q5_0_32"), large: Some([kernel!("arc_matmul_mma_q5_0_64"), kernel!("arc_matmul_mma_q5_0_64_alone")]), split: [kernel!("arc_matmul_mma_q5_0_split_16"), kernel!("arc_matmul_mma_q5_0_split_32")] }),
    Some(Many { warps: 4, block: kernel!("arc_matmul_mma_q5_1_32"), large: None, split: [kernel!("arc_matmul_mma_q5_1_split_16"), kernel!("arc_matmul_mma_q5_1_split_32")] }),
    Some(Many { warps: 4, block: kernel!("arc_matmul_mma_q2_k_32"), large: None, split: [kernel!("arc_matmul_mma_q2_k_split_16"), kernel!("arc_matmul_mma_q2_k_split_32")] }),
    Some(Many { warps: 4, block: kernel!("arc_matmul_mma_q3_k_32"), large: None, split: [kernel!("arc_matmul_mma_q3_k_split_16"), kernel!("arc_matmul_mma_q3_k_split_32")] }),
    Some(Many { warps: 4, block: kernel!("arc_matmul_mma_q4_k_32"), large: None, split: [kernel!("arc_matmul_mma_q4_k_split_16"), kernel!("arc_matmul_mma_q4_k_split_32")] }),
    Some(Many { warps: 4, block: kernel!("arc_matmul_mma_q5_k_32"), large: None, split: [kernel!("arc_matmul_mma_q5_k_split_16"), kernel!("arc_matmul_mma_q5_k_split_32")] }),
    Some(Many { warps: 4, block: kernel!("arc_matmul_mma_q6_k_32"), large: None, split: [kernel!("arc_matmul_mma_q6_k_split_16"), kernel!("arc_matmul_mma_q6_k_split_32")] }),
    Some(Many { warps: 8, block: kernel!("arc_matmul_mma_iq2_xxs_32"), large: None, split: [kernel!("arc_matmul_mma_iq2_xxs_split_16"), kernel!("arc_matmul_mma_iq2_xxs_split_32")] }),
    Some(Many { warps: 4, block: kernel!("arc_matmul_mma_mxfp4_32"), large: None, split: [kernel!("arc_matmul_mma_mxfp4_split_16"), kernel!("arc_matmul_mma_mxfp4_split_32")] }),
    None,
];
/// Kernels of experts as grouped.cuh has them, of a gate and its up or of one matrix: up to 16 rows of an expert at a time, or 32.
#[rustfmt::skip]
const GROUPED: [(Format, bool, [Kernel; 2]); 2] = [
    (Format::Iq2Xxs, true, [kernel!("arc_matmul_grouped_iq2_xxs_16"), kernel!("arc_matmul_grouped_iq2_xxs_32")]),
    (Format::Q2K, false, [kernel!("arc_matmul_grouped_q2_k_16"), kernel!("arc_matmul_grouped_q2_k_32")]),
];
/// Rows of an expert up to which 16 are taken at a time. Of 48, 32 are better.
const GROUPED_FEW: usize = 12;
/// Kernels of one format, as mma.cuh has them.
#[derive(Debug, Clone, Copy)]
struct Many {
    /// Warps along the outputs of a block, 32 each.
    warps: usize,
    /// Blocks of 32 rows.
    block: Kernel,
    /// Blocks of 64 rows, where decoding weighs little: two a processor, and where they are so few that each has its own.
    large: Option<[Kernel; 2]>,
    /// Blocks of 32 outputs and 16 or 32 rows, whose warps share the slices.
    split: [Kernel; 2],
}

/// Kernels over many rows of float weights, in the order of [`MMA`]'s gaps: in blocks of 32 outputs and 16 or 32 rows, and of 64
/// and 32.
#[rustfmt::skip]
const FMA: [(Format, [Kernel; 3]); 4] = [
    (Format::F32, [kernel!("arc_matmul_fma_f32_16"), kernel!("arc_matmul_fma_f32_32x32"), kernel!("arc_matmul_fma_f32_32")]),
    (Format::F16, [kernel!("arc_matmul_fma_f16_16"), kernel!("arc_matmul_fma_f16_32x32"), kernel!("arc_matmul_fma_f16_32")]),
    (Format::Bf16, [kernel!("arc_matmul_fma_bf16_16"), kernel!("arc_matmul_fma_bf16_32x32"), kernel!("arc_matmul_fma_bf16_32")]),
    (Format::Fp8, [kernel!("arc_matmul_fma_fp8_16"), kernel!("arc_matmul_fma_fp8_32x32"), kernel!("arc_matmul_fma_fp8_32")]),
];
/// Rows up to which weights meet whole rows; of more, a block takes weights and rows a slice at a time.
pub(crate) const FEW_ROWS: usize = 8;

/// The kernel that takes experts' rows as they are, where it can: gates and their ups that become clamped units, or one matrix
/// whose outputs are stored; whole sixteens of outputs, four slices a tile, and room for the rows. `each`: rows of an expert.
fn grouped(format: Format, each: usize, product: &Product) -> Option<(Kernel, Block)> {
    let pair = product.pair != 0;
    let (_, _, kernels) = GROUPED.iter().find(|(of, pairs, _)| (*of, *pairs) == (format, pair))?;
    let more = usize::from(each > GROUPED_FEW);
    let block = Block::of_grouped(format, 16 << more, product.cut.cols as usize, product.experts as usize);
    let outputs = product.segs[0].rows as usize * if pair { 2 } else { 1 };
    let fits = product.cut.log_c == 2
        && outputs.is_multiple_of(block.outputs)
        && product.epilogue == if pair { 6 } else { 0 }
        && product.n_segs == 1 + product.pair
        && block.shared <= plan::MAX_SHARED;
    fits.then_some((kernels[more], block))
}

fn unsupported(what: String) -> DeviceError {
    DeviceError::Unsupported { device: "cuda", what }
}

/// What becomes of the value `v` of output `n`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Then {
    /// `out = v`.
    Store,
    /// `out = v + bias[n]`; an address of `[outputs]` f32.
    Bias(u64),
    /// `out = out + v`.
    Add,
    /// `out = cap * tanh(v / cap)`.
    Softcap(f32),
    /// `out = act(gate) * up`: the matrix is two parts.
    Glu(Activation),
    /// The gated unit of experts, clamped: two parts, or two an expert. Over assignments, times the routing weight.
    ClampedSilu {
        /// The clamp.
        limit: f32,
    },
    /// `out = sum over the row's assignments, ascending, of products[row * chosen + place, n], + v`. Rows that are not
    /// live have no assignments.
    Routed {
        /// Address of `[rows * chosen, outputs]` f32: what `product_experts` left with `by_place`.
        products: u64,
        /// Experts a row.
        chosen: usize,
    },
}

/// Where outputs go: `[rows, stride]` f32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Out {
    /// Address.
    pub at: u64,
    /// Values from one row to the next.
    pub stride: usize,
    /// What happens on the way.
    pub then: Then,
}

/// A step's assignments of rows to experts, as [`moe`](crate::ops::moe) sorts them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Assigned {
    /// Address of `[rows * chosen]` u32.
    pub order: u64,
    /// Address of `[experts + 1]` u32.
    pub bounds: u64,
    /// Address of `[rows, chosen]` u32.
    pub ids: u64,
    /// Address of `[rows, chosen]` f32.
    pub weights: u64,
    /// Experts in all.
    pub experts: usize,
    /// Experts a row.
    pub chosen: usize,
    /// Rows of the step: there are at most `rows * chosen` assignments.
    pub rows: usize,
    /// Input `i` of the product is that of the row of assignment `i`; otherwise inputs stand in the order of assignments.
    pub by_row: bool,
    /// Output row `row * chosen + place`; otherwise outputs stand in the order of assignments.
    pub by_place: bool,
}

/// Memory that products need beside their operands.
#[derive(Default)]
pub(crate) struct Workspace {
    /// Where the step's output head leaves its logits, `[heads, vocab]`.
    pub logits: Option<u64>,
    /// Rows of logits on their way to the host, `[heads, vocab]`.
    pub gathered: Option<CudaBuf<f32>>,
    /// Widest matrix so far.
    max_cols: usize,
    inputs: Option<[InputBuffers; 2]>,
    /// Inputs that the kernel which left the rows has made of them too.
    ready: Option<Ready>,
    /// The address of the last gated units of few rows' experts, where they are as int8, by row and place, and the address of the
    /// shared expert's if these are there too, behind them.
    units: Option<(u64, Codes, Option<u64>)>,
    /// Multiprocessors that the kernel before the next product has to its end.
    taken: u32,
    /// Whether products over few rows let their successor start only after their own wait.
    late: bool,
    /// Whether the next product over one row is held back until it is known what follows.
    hold: bool,
    /// A product that the next one may share a launch with.
    held: Option<Held>,
    /// Gated units that their sum may share a launch with.
    held_units: Option<HeldUnits>,
    /// What blocks of one launch tell one another.
    exchange: Option<CudaBuf<u32>>,
    /// What rows of one launch tell one another of their keys and values.
    appended: Option<CudaBuf<u32>>,
    /// What the last launch sends to the next kernel.
    pub due: Option<Due>,
    /// What it sends to a site right behind it.
    pub sent: Option<Sent>,
    /// Blocks of the last two products behind an attention that begin late.
    pub late_blocks: u32,
    /// A product that is normed before it joins the residual, `[rows, hidden]`.
    product: Option<CudaBuf<f32>>,
}

impl Workspace {
    /// For the widest matrix loaded so far and the largest step.
    pub(crate) fn new(dev: &mut Cuda, shape: &ModelShape) -> Result<Workspace> {
        let class = MemoryClass::Workspace;
        let rows = dev.limits.rows.max(dev.limits.heads);
        let max_cols = dev.matmul.max_cols;
        // Experts' second matrices read the assignments' inputs and, apart from them, the shared expert's.
        let cols = max_cols.max(shape.gathered).next_multiple_of(32);
        let mut inputs = |rows: usize| -> Result<InputBuffers> {
            Ok(InputBuffers {
                q: dev.take("activations", class, rows * cols)?,
                d: dev.take("activations", class, rows * cols / 32)?,
                sums: dev.take("activations", class, rows * cols / 32)?,
                floats: dev.take("activations", class, rows * cols)?,
            })
        };
        let inputs = [inputs(rows)?, inputs(rows.min(FEW_ROWS))?];
        let product = if shape.post_norms { rows * shape.hidden } else { 0 };
        let exchange = dev.take("activations", class, Workspace::exchange_words(cols))?;
        Ok(Workspace {
            logits: None,
            gathered: Some(dev.take("logits for the host", class, dev.limits.heads * shape.vocab)?),
            max_cols,
            inputs: Some(inputs),
            ready: None,
            units: None,
            taken: 0,
            late: false,
            hold: false,
            held: None,
            held_units: None,
            exchange: Some(exchange),
            appended: Some(dev.take("activations", class, Workspace::appended_words())?),
            due: None,
            sent: None,
            late_blocks: 0,
            product: Some(dev.take("activations", class, product)?),
        })
    }
}

impl Cuda {
    /// Runs `launch`, whose last product, over few rows, lets its successor start after its own wait only: what begins then,
    /// begins after the end of everything before that product.
    pub(crate) fn late(&mut self, launch: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.matmul.late = true;
        let done = launch(self);
        self.matmul.late = false;
        done
    }

    /// `out[r] = then(w * from[r])`. What `from` names must not be what `out` names.
    pub(crate) fn product_of(&mut self, w: &CudaMatrix, from: Source, out: Out, rows: usize) -> Result<()> {
        let given = self.given(w, from, rows)?;
        self.product_given(w, given, out, rows)
    }

    /// `out[r] = then(w * input r)` for `rows` inputs of the last [`prepare`](Self::prepare).
    pub(crate) fn product(&mut self, w: &CudaMatrix, out: Out, rows: usize) -> Result<()> {
        self.product_given(w, self.prepared(), out, rows)
    }

    /// Two products of few rows, of Q8_0 and of F16 weights, in one launch where that can be: their inputs are there, and each
    /// matrix is one segment after the other of one format.
    pub(crate) fn product_both(
        &mut self,
        a: (&CudaMatrix, Source, Out),
        b: (&CudaMatrix, Source, Out),
        rows: usize,
    ) -> Result<()> {
        let all =
            |w: &CudaMatrix, format| w.parts.len() <= MAX_SEGS && w.parts.iter().all(|part| part.format == format);
        let fit = rows <= FEW_ROWS && all(a.0, Format::Q8_0) && all(b.0, Format::F16);
        let there = self.there(a.0, a.1, rows).zip(self.there(b.0, b.1, rows)).filter(|_| fit);
        let both = there.and_then(|(given_a, given_b)| {
            let one = self.product_args(a.0, &a.0.parts, given_a, a.2, rows);
            let two = self.product_args(b.0, &b.0.parts, given_b, b.2, rows);
            self.share_launch(one, two, rows)
        });
        let Some(held) = both else {
            self.product_of(a.0, a.1, a.2, rows)?;
            return self.product_of(b.0, b.1, b.2, rows);
        };
        self.counters.weight_bytes += (a.0.bytes() + b.0.bytes()) as u64;
        if rows == 1 { self.launch_or_hold(held) } else { self.launch_product_of(held) }
    }

    /// One launch of a product of Q8_0 and one of F16. `None` where the rows do not fit in shared memory, or tiles are so small that
    /// a block would have more warps than the kernel.
    fn share_launch(&self, mut one: Product, mut two: Product, rows: usize) -> Option<Held> {
        // So many blocks each that the one with the most bytes has as few as can be.
        let processors = self.multiprocessors();
        let load = |product: &Product, format, blocks: u32| {
            product.groups.div_ceil(blocks) as usize * product.cut.group_bytes(format)
        };
        let worst = |blocks: &u32| load(&one, Format::Q8_0, *blocks).max(load(&two, Format::F16, processors - blocks));
        let first = (1..processors).min_by_key(worst).expect("a device has several multiprocessors");
        let taken = plan::rows_taken(rows);
        let shape = one.cut_blocks(taken, Format::Q8_0, 1, false, first)?;
        let other = two.cut_blocks(taken, Format::F16, 1, false, processors - first)?;
        let threads = Some(shape.threads.max(other.threads)).filter(|threads| *threads <= TWO_THREADS)?;
        let grid = Grid::new(shape.blocks + other.blocks, threads).shared(shape.shared.max(other.shared));
        Some(Held { kernel: GEMV_TWO[taken.ilog2() as usize], grid, product: one, beside: Some((two, shape.blocks)) })
    }

    fn product_given(&mut self, w: &CudaMatrix, given: Given, out: Out, rows: usize) -> Result<()> {
        self.counters.weight_bytes += w.bytes() as u64;
        if matches!(out.then, Then::Glu(_) | Then::ClampedSilu { .. }) {
            assert_eq!(w.parts.len(), 2, "parts of a gated matrix");
            assert_eq!(w.parts[0].rows, w.parts[1].rows, "rows of the parts of a gated matrix");
            return self.launch_product(w, &w.parts, given, out, rows, |product| {
                product.pair = 1;
                product.groups = w.cut.groups(w.parts[0].rows) as u32;
                // Behind a shared expert come the others, which read what the gate chose before their own wait.
                product.late = u32::from(matches!(out.then, Then::ClampedSilu { .. }));
            });
        }
        // One launch takes parts of one format, and few of them.
        let mut parts = &w.parts[..];
        while let Some(first) = parts.first() {
            let n = parts.iter().take(MAX_SEGS).take_while(|part| part.format == first.format).count();
            self.launch_product(w, &parts[..n], given, out, rows, |_| {})?;
            parts = &parts[n..];
        }
        Ok(())
    }

    /// Part `p` meets inputs of its own: of row `r` that is input `r * parts + p` of `from`, and the outputs are
    /// `out[r][p * part rows ..]`. Parts are alike. `leave`: outputs are left as inputs of the next product too.
    pub(crate) fn product_parts(
        &mut self,
        w: &CudaMatrix,
        from: Source,
        out: Out,
        rows: usize,
        leave: bool,
    ) -> Result<()> {
        self.counters.weight_bytes += w.bytes() as u64;
        let (stride, parts) = (w.stride(1)?, w.parts.len());
        let which = self.matmul.ready(&from.for_matrix(w), rows * parts).unwrap_or(0);
        let given = match self.there(w, from, rows * parts) {
            Some(given) => given,
            None => {
                self.prepare_for(w, from, rows * parts)?;
                self.prepared()
            }
        };
        let part_rows = w.parts[0].rows;
        let leave = leave && part_rows.is_multiple_of(32) && out.stride == parts * part_rows;
        let left = self.matmul.leave(out.at, out.stride, rows, leave, Some(which));
        self.launch_product(w, &w.parts[..1], given, out, rows, |product| {
            product.parts = parts as u32;
            product.part_bytes = stride;
            (product.x_row, product.x_part) = (parts as u32, 1);
            (product.out_q, product.out_d, product.out_sums) = (left.q, left.d, left.sums);
        })
    }

    /// Every expert meets the rows that are assigned to it, of the last [`prepare`](Self::prepare). With
    /// [`Then::ClampedSilu`] an expert is two parts, gate and up.
    pub(crate) fn product_experts(&mut self, w: &CudaMatrix, out: Out, to: &Assigned) -> Result<()> {
        let per = if matches!(out.then, Then::ClampedSilu { .. }) { 2 } else { 1 };
        assert_eq!(w.parts.len(), per * to.experts, "parts of all experts");
        let stride = w.stride(per)?;
        let touched = to.experts.min(to.rows * to.chosen);
        self.counters.weight_bytes += self.touched(w, to);
        self.launch_product(w, &w.parts[..per], self.prepared(), out, to.rows, |product| {
            product.pair = u32::from(per == 2);
            product.groups = w.cut.groups(w.parts[0].rows) as u32;
            product.parts = touched as u32;
            product.part_bytes = stride;
            (product.order, product.bounds) = (to.order, to.bounds);
            (product.chosen, product.experts) = (to.chosen as u32, to.experts as u32);
            (product.gather, product.scatter) = (u32::from(to.by_row), u32::from(to.by_place));
            if per == 2 {
                product.aux = to.weights;
            }
        })
    }

    /// What a kernel is told of a product over `parts`, whose first part's outputs begin at its own first row.
    fn product_args(&self, w: &CudaMatrix, parts: &[Part], given: Given, out: Out, rows: usize) -> Product {
        let (segs, groups) = w.segs(parts);
        let float = parts[0].format.coding() == Coding::Float;
        let (epilogue, aux, scalar) = match out.then {
            Then::Store => (0, 0, 0.0),
            Then::Bias(bias) => (1, bias, 0.0),
            Then::Add => (2, 0, 0.0),
            Then::Softcap(cap) => (3, 0, cap),
            Then::Glu(Activation::Silu) => (4, 0, 0.0),
            Then::Glu(Activation::GeluTanh) => (5, 0, 0.0),
            Then::ClampedSilu { limit } => (6, 0, limit),
            Then::Routed { products, .. } => (7, products, 0.0),
        };
        Product {
            segs,
            n_segs: parts.len() as u32,
            cut: w.cut,
            pair: 0,
            groups,
            per_block: 0,
            stages: 0,
            stage_bytes: 0,
            rows: rows as u32,
            q: if float { 0 } else { given.codes.q },
            d: given.codes.d,
            sums: given.codes.sums,
            floats: if float { given.floats } else { 0 },
            out: out.at,
            out_stride: out.stride as u32,
            epilogue,
            aux,
            scalar,
            parts: 0,
            part_bytes: 0,
            x_row: 1,
            x_part: 0,
            order: 0,
            bounds: 0,
            chosen: if let Then::Routed { chosen, .. } = out.then { chosen as u32 } else { 1 },
            gather: 0,
            scatter: 0,
            experts: 0,
            infos: if let Then::Routed { .. } = out.then { self.view().infos() } else { 0 },
            out_q: 0,
            out_d: 0,
            out_sums: 0,
            table_at: 0,
            q_at: 0,
            d_at: 0,
            sums_at: 0,
            floats_at: 0,
            squares_at: 0,
            norm_at: 0,
            partials_at: 0,
            ring_at: 0,
            warps: 0,
            late: u32::from(self.matmul.late),
        }
    }

    /// Launches a product over `parts`.
    fn launch_product(
        &mut self,
        w: &CudaMatrix,
        parts: &[Part],
        given: Given,
        out: Out,
        rows: usize,
        set: impl FnOnce(&mut Product),
    ) -> Result<()> {
        if rows == 0 || parts.iter().all(|part| part.rows == 0) {
            return Ok(());
        }
        let mut product = self.product_args(w, parts, given, out, rows);
        set(&mut product);
        let format = parts[0].format;
        if rows > FEW_ROWS || product.bounds != 0 {
            return self.launch_many(format, &product);
        }
        let source = given.making.map_or(Prepare::default(), |from| from.prepare());
        let normed = given.making.is_some_and(|from| from.norm.is_some());
        // A block for which there is room only later brings its weights when all others have theirs.
        let processors = self.multiprocessors();
        let free = processors - std::mem::take(&mut self.matmul.taken);
        let processors = if 4 * free >= 3 * processors { free } else { processors };
        let mut taken = plan::rows_taken(rows);
        let shape = loop {
            let parts = (product.parts as usize).max(1);
            if let Some(shape) = product.cut_blocks(taken, format, parts, normed, processors) {
                break shape;
            }
            assert!(taken > 1, "one row of {} values does not fit", w.cols);
            taken /= 2;
        };
        let kernel = GEMV[format as usize][taken.ilog2() as usize];
        let grid = Grid::xy(shape.blocks, rows.div_ceil(taken) as u32, shape.threads).shared(shape.shared);
        if source.x == 0 && rows == 1 {
            return self.launch_or_hold(Held { kernel, grid, product, beside: None });
        }
        self.launch(kernel, grid, &[Arg::of(&product), Arg::of(&source)])
    }

    /// Bytes of the experts that the rows of a step read, should no two share one.
    fn touched(&self, w: &CudaMatrix, to: &Assigned) -> u64 {
        (w.bytes() / to.experts * to.experts.min(to.rows * to.chosen)) as u64
    }

    /// Launches a product over many rows.
    fn launch_many(&mut self, format: Format, product: &Product) -> Result<()> {
        let (rows, parts) = (product.rows as usize, product.parts as usize);
        let of_all = (product.groups as usize * product.cut.group_rows()) << product.pair;
        let assigned = rows * product.chosen as usize;
        let across = |taken: usize| match (parts, product.bounds) {
            (0, _) => rows.div_ceil(taken),
            (_, 0) => parts * rows.div_ceil(taken),
            // Every expert with rows has a last block that is not full.
            _ => parts + assigned / taken,
        };
        let processors = self.multiprocessors() as usize;
        let blocks = |block: Block| across(block.rows) * of_all.div_ceil(block.outputs);
        let fills = |block: Block| 4 * blocks(block) >= 3 * processors;
        let each = if product.bounds != 0 { assigned / product.experts as usize } else { rows };
        if product.bounds != 0
            && let Some((kernel, block)) = grouped(format, each, product)
        {
            let grid = Grid::new(processors as u32, block.threads).shared(block.shared);
            return self.launch(kernel, grid, &[Arg::of(product)]);
        }
        let (kernel, block) = match MMA[format as usize] {
            Some(many) => {
                let [block, large, alone] = [(1, 32, 2), (2, 32, 2), (4, 16, 4)]
                    .map(|(along, each, stages)| Block::of_slices(format, [many.warps, along], each, stages));
                match many.large {
                    Some([_, kernel]) if each > block.rows && fills(large) && blocks(large) <= processors => {
                        (kernel, alone)
                    }
                    Some([kernel, _]) if each > block.rows && fills(large) => (kernel, large),
                    _ if product.bounds != 0 || fills(block) => (many.block, block),
                    _ => {
                        // Three of the smaller blocks or two of the larger, which take 1.6 times as long, fit a processor.
                        let [few, more] = [1, 2].map(|size| Block::of_split(format, size));
                        let turns = |block, at_once| blocks(block).div_ceil(at_once * processors);
                        if 8 * turns(more, 2) < 5 * turns(few, 3) {
                            (many.split[1], more)
                        } else {
                            (many.split[0], few)
                        }
                    }
                }
            }
            None => {
                let found = FMA.iter().find(|(of, _)| *of == format);
                let [few, more, many] = found.expect("every format is integer-coded or float").1;
                let [block, wide, large] = [(32, 16), (32, 32), (64, 32)].map(|(n, rows)| Block::of_floats(n, rows));
                // Three of the wide blocks or two of the large, which take 1.2 times as long as these, fit a processor.
                let turns = |block, at_once| blocks(block).div_ceil(at_once * processors);
                if each <= block.rows || !fills(large) {
                    (few, block)
                } else if 5 * turns(wide, 3) < 6 * turns(large, 2) {
                    (more, wide)
                } else {
                    (many, large)
                }
            }
        };
        let down = of_all.div_ceil(block.outputs);
        let grid = Grid::xy(across(block.rows) as u32, down as u32, block.threads).shared(block.shared);
        self.launch(kernel, grid, &[Arg::of(product)])
    }

    /// `out[r] = table[id(r)] * scale`, zeros where a row is not live or its id is past the table. `ids`: address of a u32
    /// every 32 bytes, as row infos have them.
    pub(crate) fn decode_rows(
        &mut self,
        out: &CudaBuf<f32>,
        table: &CudaMatrix,
        ids: u64,
        scale: f32,
        rows: usize,
    ) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        self.counters.weight_bytes += (rows * table.bytes() / table.rows.max(1)) as u64;
        let (segs, _) = table.segs(&table.parts);
        let args = Embed {
            segs,
            n_segs: table.parts.len() as u32,
            cut: table.cut,
            ids,
            live: self.view().infos(),
            out: out.ptr(),
            id_stride: 8,
            table_rows: table.rows as u32,
            scale,
            unused: 0,
        };
        let grid = Grid::xy(rows as u32, table.cut.slices, 256);
        self.launch(kernel!("arc_matmul_embed"), grid, &[Arg::of(&args)])
    }

    /// `residual[r] += norm(w * from[r])`.
    pub(crate) fn product_normed(
        &mut self,
        residual: &CudaBuf<f32>,
        w: &CudaMatrix,
        from: Source,
        norm: Norm<'_, Cuda>,
        rows: usize,
    ) -> Result<()> {
        let product = self.matmul.product.as_ref().expect("`finish` made it");
        assert!(rows * w.rows <= product.len(), "the model's shape says that products are normed");
        let at = product.ptr();
        self.product_of(w, from, Out { at, stride: w.rows, then: Then::Store }, rows)?;
        let args = args![residual.ptr(), at, norm.weight.ptr(), norm.eps, w.rows as u32];
        self.launch(kernel!("arc_matmul_norm_add"), Grid::new(rows as u32, 256), args)
    }
}
