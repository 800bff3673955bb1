//! Inputs of products: rows of f32 as they are, or behind a norm and a rounding, or as int8; and who made them already.

use super::matrix::CudaMatrix;
use super::plan::{MAKES_CHUNKS, MAKES_ROWS, Prepare};
use super::{FEW_ROWS, Workspace};
use crate::Norm;
use crate::cuda::{Arg, Cuda, CudaBuf, Grid, kernel};
use crate::error::Result;
use crate::math::SUM_CHUNK;
use crate::ops::quant::Inputs;

/// Widest row that a product's kernel norms by itself: it stands in shared memory.
const MAKES_COLS: usize = 16_384;

/// Whether a product over so few rows makes its inputs by itself ([`Cuda::product_of`]).
pub(crate) fn makes_inputs(rows: usize) -> bool {
    rows <= MAKES_ROWS
}

/// What a product reads of its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reads {
    /// int8 with scales and sums.
    pub codes: bool,
    /// f32.
    pub floats: bool,
}

/// Rows of f32 from which inputs are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    /// Address of the first row.
    pub x: u64,
    /// Values from one row to the next.
    pub stride: usize,
    /// Values of a row.
    pub cols: usize,
    /// Address of the norm's weights, and what is added to the mean square.
    pub norm: Option<(u64, f32)>,
    /// How values are rounded, behind the norm.
    pub inputs: Inputs,
    /// Address of a table of u32: input `r` is made of row `map[r]`.
    pub map: Option<u64>,
    /// Address of a u32: inputs from there on are not made.
    pub count: Option<u64>,
}

impl Source {
    /// Rows side by side.
    pub fn of(x: &CudaBuf<f32>, cols: usize) -> Source {
        Source { x: x.ptr(), stride: cols, cols, norm: None, inputs: Inputs::F32, map: None, count: None }
    }

    /// Behind a norm.
    pub fn normed(self, norm: Norm<'_, Cuda>) -> Source {
        Source { norm: Some((norm.weight.ptr(), norm.eps)), ..self }
    }

    /// Rounded.
    pub fn rounded(self, inputs: Inputs) -> Source {
        Source { inputs, ..self }
    }

    /// As the CPU rounds for this matrix: int8 is for FP8 weights, integer-coded ones round by themselves.
    pub(super) fn for_matrix(self, w: &CudaMatrix) -> Source {
        assert_eq!(self.cols, w.cols, "values of a row and columns of its matrix");
        match self.inputs {
            Inputs::Int8 if !w.is_fp8() => self.rounded(Inputs::F32),
            _ => self,
        }
    }

    /// Whether inputs are the rows themselves.
    pub(super) fn as_it_is(&self) -> bool {
        self.norm.is_none() && self.map.is_none() && self.inputs == Inputs::F32 && self.stride == self.cols
    }

    pub(super) fn prepare(&self) -> Prepare {
        let (weight, eps) = self.norm.unwrap_or((0, 0.0));
        Prepare {
            x: self.x,
            weight,
            map: self.map.unwrap_or(0),
            count: self.count.unwrap_or(0),
            stride: self.stride as u32,
            cols: self.cols as u32,
            eps,
            rounding: match self.inputs {
                Inputs::F32 => 0,
                Inputs::Fp8 => 1,
                Inputs::Int8 => 2,
            },
            ..Prepare::default()
        }
    }
}

/// Rows of f32 that are there as int8 too, in one of the two [`InputBuffers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ready {
    pub(super) x: u64,
    pub(super) cols: usize,
    pub(super) rows: usize,
    pub(super) which: usize,
}

/// Where int8 inputs stand: values, scales, sums of the halves of blocks. Null where nobody wants them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Codes {
    pub q: u64,
    pub d: u64,
    pub sums: u64,
}

/// Inputs of products: of the largest step and the widest row, and of few rows, so that a kernel can make the inputs of
/// the next product while it reads its own.
pub(super) struct InputBuffers {
    /// `[rows, cols]`.
    pub(super) q: CudaBuf<i8>,
    /// `[rows, cols / 32]`.
    pub(super) d: CudaBuf<f32>,
    /// `[rows, cols / 32]`: sums of the halves of a block, two i16.
    pub(super) sums: CudaBuf<u32>,
    /// `[rows, cols]`.
    pub(super) floats: CudaBuf<f32>,
}

/// Where a product finds its inputs.
#[derive(Clone, Copy)]
pub(super) struct Given {
    pub(super) codes: Codes,
    /// Address of `[rows, cols]` f32.
    pub(super) floats: u64,
    /// What the kernel makes them of by itself.
    pub(super) making: Option<Source>,
}

impl Workspace {
    pub(super) fn inputs(&self, which: usize) -> &InputBuffers {
        &self.inputs.as_ref().expect("`finish` made it")[which]
    }

    /// Where inputs stand as f32, for a kernel that leaves so many there: products read them as they are, and what rounds them
    /// takes each before it writes to its place.
    pub(crate) fn floats(&self, values: usize) -> u64 {
        let floats = &self.inputs(0).floats;
        assert!(values <= floats.len(), "{values} inputs, room for {}", floats.len());
        floats.ptr()
    }

    pub(super) fn codes(&self, which: usize) -> Codes {
        let InputBuffers { q, d, sums, .. } = self.inputs(which);
        Codes { q: q.ptr(), d: d.ptr(), sums: sums.ptr() }
    }

    /// Where a kernel that writes rows of f32 at `x` leaves them as int8 too, for products that follow. `wanted`: whether
    /// it does; every kernel that writes rows which products read unrounded has to say so, since what is known of `x`
    /// would be of the rows before.
    /// `read`: the buffers that it reads itself.
    pub(crate) fn leave(&mut self, x: u64, cols: usize, rows: usize, wanted: bool, read: Option<usize>) -> Codes {
        let which = read.map_or(0, |read| 1 - read);
        let wanted = wanted && rows <= FEW_ROWS && cols.is_multiple_of(32);
        self.ready = wanted.then_some(Ready { x, cols, rows, which });
        if wanted { self.codes(which) } else { Codes::default() }
    }

    /// As [`leave`](Self::leave), of rows that products read in `parts` pieces of `cols` values, by a kernel that reads no
    /// inputs: of any number of rows.
    pub(crate) fn leave_parts(&mut self, x: u64, cols: usize, rows: usize, parts: usize, wanted: bool) -> Codes {
        let wanted = wanted && cols.is_multiple_of(32);
        assert!(!wanted || rows * parts * cols <= self.inputs(0).q.len(), "{rows} inputs of {parts} x {cols} values");
        self.ready = wanted.then_some(Ready { x, cols, rows: rows * parts, which: 0 });
        if wanted { self.codes(0) } else { Codes::default() }
    }

    /// Which buffers have the int8 inputs that `from` says.
    pub(super) fn ready(&self, from: &Source, rows: usize) -> Option<usize> {
        let ready = self.ready.filter(|ready| from.as_it_is() && ready.x == from.x && ready.cols == from.cols)?;
        (rows <= ready.rows).then_some(ready.which)
    }
}

impl Cuda {
    /// Makes inputs `0 .. rows` of `from`, of the kinds that `reads` names.
    pub(crate) fn prepare(&mut self, reads: Reads, from: Source, rows: usize) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        self.matmul.ready = None;
        let inputs = self.matmul.inputs(0);
        assert!(rows * from.cols <= inputs.floats.len(), "{rows} inputs of {} values", from.cols);
        let wanted = |want: bool, at: u64| if want { at } else { 0 };
        let args = Prepare {
            q: wanted(reads.codes, inputs.q.ptr()),
            d: inputs.d.ptr(),
            sums: inputs.sums.ptr(),
            floats: wanted(reads.floats, inputs.floats.ptr()),
            ..from.prepare()
        };
        let threads = if from.cols >= 2048 { 512 } else { 256 };
        self.launch(kernel!("arc_matmul_prepare"), Grid::new(rows as u32, threads), &[Arg::of(&args)])
    }

    /// Makes inputs for one matrix, rounded as the CPU rounds them: integer-coded weights are left to their own rounding
    /// where `inputs` is int8.
    pub(crate) fn prepare_for(&mut self, w: &CudaMatrix, from: Source, rows: usize) -> Result<()> {
        self.prepare(w.reads(), from.for_matrix(w), rows)
    }

    /// What the last [`prepare`](Self::prepare) left.
    pub(super) fn prepared(&self) -> Given {
        Given { codes: self.matmul.codes(0), floats: self.matmul.inputs(0).floats.ptr(), making: None }
    }

    /// Inputs of a product with `w` that are there already.
    pub(super) fn there(&self, w: &CudaMatrix, from: Source, rows: usize) -> Option<Given> {
        let (from, reads) = (from.for_matrix(w), w.reads());
        let ready = self.matmul.ready(&from, rows);
        if reads.codes && ready.is_none() || reads.floats && !from.as_it_is() {
            return None;
        }
        let codes = ready.map_or(Codes::default(), |which| self.matmul.codes(which));
        Some(Given { codes, floats: from.x, making: None })
    }

    /// Inputs of a product with `w`: those that are there, or that its own kernel makes of few rows, or that a kernel of
    /// their own makes.
    pub(super) fn given(&mut self, w: &CudaMatrix, from: Source, rows: usize) -> Result<Given> {
        if let Some(given) = self.there(w, from, rows) {
            return Ok(given);
        }
        let from = from.for_matrix(w);
        let chunks = from.norm.is_some() && w.cols == SUM_CHUNK && from.stride.is_multiple_of(4);
        let makes = makes_inputs(rows) || rows <= MAKES_CHUNKS && chunks;
        if makes && (from.norm.is_none() || w.cols <= MAKES_COLS) {
            return Ok(Given { making: Some(from), ..self.prepared() });
        }
        self.prepare(w.reads(), from, rows)?;
        Ok(self.prepared())
    }
}
