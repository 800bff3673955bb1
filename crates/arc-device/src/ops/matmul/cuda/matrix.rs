//! A weight in device memory.

use std::ops::Range;

use super::inputs::Reads;
use super::plan::{Cut, MAX_SEGS, Seg};
use super::unsupported;
use crate::MemoryClass;
use crate::cuda::{Cuda, CudaBuf, Grid, args, kernel};
use crate::error::Result;
use crate::format::{Coding, Format};
use crate::ops::matmul::{Bytes, MatrixSource};
use crate::ops::synthetic;

/// Bytes of a piece of a matrix on its way to the device.
const PIECE: usize = 32 << 20;
/// Parts begin at multiples of this.
const PART_ALIGN: usize = 256;
/// Widest row that can be normed: `kMaxCols` of quantise.cuh.
const MAX_COLS: usize = 65_536;

/// A weight in device memory, in tiles (`layout.cuh`).
#[derive(Debug)]
pub struct CudaMatrix {
    pub(super) data: CudaBuf<u8>,
    pub(super) parts: Vec<Part>,
    /// Output rows of all parts.
    pub(crate) rows: usize,
    /// Input columns.
    pub(crate) cols: usize,
    pub(super) cut: Cut,
}

/// Rows of one format.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) format: Format,
    pub(super) rows: usize,
    pub(super) first_row: usize,
    pub(super) at: u64,
}

impl CudaMatrix {
    /// Uploads and repacks checked parts.
    pub(crate) fn load(dev: &mut Cuda, name: &str, sources: &[MatrixSource<'_>]) -> Result<CudaMatrix> {
        let cols = sources.first().map_or(0, |source| source.cols);
        if cols == 0 || cols > MAX_COLS {
            return Err(unsupported(format!("matrix {name} of {cols} columns")));
        }
        let cut = Cut::of(cols);
        let bytes_of = |source: &MatrixSource<'_>| cut.groups(source.rows) * cut.group_bytes(source.format);
        let total = sources.iter().map(|source| bytes_of(source).next_multiple_of(PART_ALIGN)).sum();
        let data = dev.take::<u8>("matrices", MemoryClass::Weights, total)?;
        let (mut at, mut first_row, mut parts) = (data.ptr(), 0, Vec::with_capacity(sources.len()));
        for source in sources {
            parts.push(Part { format: source.format, rows: source.rows, first_row, at });
            pack(dev, source, &cut, at)?;
            first_row += source.rows;
            at += bytes_of(source).next_multiple_of(PART_ALIGN) as u64;
        }
        dev.matmul.max_cols = dev.matmul.max_cols.max(cols);
        Ok(CudaMatrix { data, parts, rows: first_row, cols, cut })
    }

    /// Bytes of the packed weights.
    pub(crate) fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Whether every part is FP8.
    pub(crate) fn is_fp8(&self) -> bool {
        self.parts.iter().all(|part| part.format == Format::Fp8)
    }

    /// What products with this matrix read.
    pub(crate) fn reads(&self) -> Reads {
        let float = |part: &Part| part.format.coding() == Coding::Float;
        Reads { codes: !self.parts.iter().all(float), floats: self.parts.iter().any(float) }
    }

    /// Segments of parts, counted from the first of them.
    pub(super) fn segs(&self, parts: &[Part]) -> ([Seg; MAX_SEGS], u32) {
        assert!(parts.len() <= MAX_SEGS, "{} parts in one launch", parts.len());
        let (mut segs, mut end) = ([Seg::default(); MAX_SEGS], 0);
        for (seg, part) in segs.iter_mut().zip(parts) {
            end += self.cut.groups(part.rows) as u32;
            *seg = Seg {
                base: part.at,
                groups_end: end,
                rows: part.rows as u32,
                first_row: part.first_row as u32,
                format: part.format as u32,
            };
        }
        (segs, end)
    }

    /// Bytes from one part, or pair of parts, to the next, all alike. Errors: `Unsupported` where they are not.
    pub(super) fn stride(&self, per: usize) -> Result<u64> {
        let alike = self.parts.chunks(per).all(|parts| {
            parts.len() == per && parts.iter().zip(&self.parts).all(|(a, b)| (a.format, a.rows) == (b.format, b.rows))
        });
        if !alike {
            return Err(unsupported("parts of different formats or rows, by part".to_owned()));
        }
        Ok(self.parts.get(per).map_or(0, |next| next.at - self.parts[0].at))
    }
}

/// Uploads the rows of one part in pieces and packs each into its groups.
fn pack(dev: &mut Cuda, source: &MatrixSource<'_>, cut: &Cut, at: u64) -> Result<()> {
    if source.rows == 0 {
        return Ok(());
    }
    let total = source.n_bytes().expect("the source was checked");
    let row_bytes = total / source.rows;
    let groups_at_once = (PIECE / (row_bytes * cut.group_rows())).max(1);
    let piece = groups_at_once * cut.group_rows() * row_bytes;
    let (format, group_rows, group_bytes) = (source.format, cut.group_rows(), cut.group_bytes(source.format));
    let cut = *cut;
    let mut repack = |dev: &mut Cuda, from: u64, Range { start, end }: Range<usize>| {
        let rows = (end - start) / row_bytes;
        let to = at + (start / row_bytes / group_rows * group_bytes) as u64;
        let tiles = cut.groups(rows) * cut.tiles();
        let grid = Grid::new(tiles.div_ceil(8) as u32, 256);
        let args = args![to, from, format as u32, rows as u32, cut.cols, cut.slices, cut.log_c];
        dev.launch(kernel!("arc_matmul_repack"), grid, args)
    };
    match source.bytes {
        Bytes::Stored(bytes) => dev.send_pieces(bytes, piece, &mut repack),
        Bytes::Synthetic(rows) => {
            let from = dev.piece_room(piece)?;
            (0..total).step_by(piece).try_for_each(|start| {
                let range = start..total.min(start + piece);
                let (first, n) = (start / row_bytes, range.len() / row_bytes);
                synthetic::cuda::fill(dev, from, rows.skip(first), format, source.cols, n)?;
                repack(dev, from, range)
            })
        }
        Bytes::Absent => panic!("a device that looks at values was given none"),
    }
}
