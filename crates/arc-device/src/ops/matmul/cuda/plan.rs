//! How a matrix lies in device memory, and how a product over few rows is cut into blocks: the Rust side of `layout.cuh`.

use crate::format::{Coding, Format};
use crate::ops::matmul::SLICE;

/// Lanes of a warp.
const LANES: usize = 32;
/// Segments that one launch takes.
pub(crate) const MAX_SEGS: usize = 8;
/// Shared memory that a block can have.
pub(crate) const MAX_SHARED: u32 = 232_448;

/// Columns cut into slices, and slices into tiles. `Cut` of layout.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cut {
    pub cols: u32,
    pub slices: u32,
    pub log_c: u32,
}

/// Values and bytes of a unit of a lane.
fn unit(format: Format) -> (usize, usize) {
    match format {
        Format::F32 => (4, 16),
        Format::F16 | Format::Bf16 => (8, 16),
        _ => (format.block_len(), format.block_bytes()),
    }
}

/// Bytes of `n` columns of a tile.
pub(super) fn tile_bytes(format: Format, n: usize) -> usize {
    let (len, bytes) = unit(format);
    LANES * (n / len * bytes + n % len * format.block_bytes())
}

impl Cut {
    /// Of rows of `cols` values.
    pub fn of(cols: usize) -> Cut {
        let slices = cols.div_ceil(SLICE);
        let log_c = match slices {
            _ if !cols.is_multiple_of(SLICE) => 0,
            n if n.is_multiple_of(4) => 2,
            n if n.is_multiple_of(2) => 1,
            _ => 0,
        };
        Cut { cols: cols as u32, slices: slices as u32, log_c }
    }

    /// Rows of a group.
    pub fn group_rows(&self) -> usize {
        LANES >> self.log_c
    }

    /// Tiles of a group.
    pub fn tiles(&self) -> usize {
        (self.slices >> self.log_c) as usize
    }

    /// Groups of that many rows.
    pub fn groups(&self, rows: usize) -> usize {
        rows.div_ceil(self.group_rows())
    }

    /// Bytes of a group.
    pub fn group_bytes(&self, format: Format) -> usize {
        match self.cols as usize % SLICE {
            0 => self.tiles() * tile_bytes(format, SLICE),
            tail => (self.tiles() - 1) * tile_bytes(format, SLICE) + tile_bytes(format, tail),
        }
    }

    /// Bytes of the longest tile.
    fn longest_tile(&self, format: Format) -> usize {
        tile_bytes(format, SLICE.min(self.cols as usize))
    }
}

/// Rows of one format. `Seg` of layout.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Seg {
    pub base: u64,
    pub groups_end: u32,
    pub rows: u32,
    pub first_row: u32,
    pub format: u32,
}

/// `Product` of layout.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    pub segs: [Seg; MAX_SEGS],
    pub n_segs: u32,
    pub cut: Cut,
    pub pair: u32,
    pub groups: u32,
    pub per_block: u32,
    pub stages: u32,
    pub stage_bytes: u32,
    pub rows: u32,
    pub q: u64,
    pub d: u64,
    pub sums: u64,
    pub floats: u64,
    pub out: u64,
    pub out_stride: u32,
    pub epilogue: u32,
    pub aux: u64,
    pub scalar: f32,
    pub parts: u32,
    pub part_bytes: u64,
    pub x_row: u32,
    pub x_part: u32,
    pub order: u64,
    pub bounds: u64,
    pub chosen: u32,
    pub gather: u32,
    pub scatter: u32,
    pub experts: u32,
    pub infos: u64,
    pub out_q: u64,
    pub out_d: u64,
    pub out_sums: u64,
    pub table_at: u32,
    pub q_at: u32,
    pub d_at: u32,
    pub sums_at: u32,
    pub floats_at: u32,
    pub squares_at: u32,
    pub norm_at: u32,
    pub partials_at: u32,
    pub ring_at: u32,
    pub warps: u32,
    pub late: u32,
}
const _: () = assert!(size_of::<Product>() == 424);

/// `Prepare` of quantise.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Prepare {
    pub x: u64,
    pub weight: u64,
    pub map: u64,
    pub count: u64,
    pub q: u64,
    pub d: u64,
    pub sums: u64,
    pub floats: u64,
    pub stride: u32,
    pub cols: u32,
    pub eps: f32,
    pub rounding: u32,
}
const _: () = assert!(size_of::<Prepare>() == 80);

/// `Embed` of inputs.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Embed {
    pub segs: [Seg; MAX_SEGS],
    pub n_segs: u32,
    pub cut: Cut,
    pub ids: u64,
    pub live: u64,
    pub out: u64,
    pub id_stride: u32,
    pub table_rows: u32,
    pub scale: f32,
    pub unused: u32,
}
const _: () = assert!(size_of::<Embed>() == 248);

/// Gives the parts of a block's shared memory their places, one behind the other.
pub(super) struct Places {
    at: u32,
}

impl Places {
    /// Behind so many barriers.
    pub fn behind(barriers: u32) -> Places {
        Places { at: (8 * barriers).next_multiple_of(128) }
    }

    /// The place of so many bytes, on a border of 16.
    pub fn take(&mut self, bytes: u32) -> u32 {
        let here = self.at;
        self.at += bytes.next_multiple_of(16);
        here
    }

    /// What is left begins here, on a border of 128.
    pub fn rest(&self) -> u32 {
        self.at.next_multiple_of(128)
    }
}

/// Blocks, threads and shared memory of a launch over few rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub blocks: u32,
    pub threads: u32,
    pub shared: u32,
}

/// A block over many rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub outputs: usize,
    pub rows: usize,
    pub threads: u32,
    pub shared: u32,
}

impl Block {
    /// `Fma` of fma.cuh.
    pub fn of_floats(outputs: usize, rows: usize) -> Block {
        let shared = Block::tables(outputs, rows) + 8 * 4 * 32 * (outputs + rows);
        Block { outputs, rows, threads: 256, shared: shared as u32 }
    }

    /// `warps` along the outputs and along the rows, of which each has `rows`, `stages` of slices: `Mma` of mma.cuh.
    pub fn of_slices(format: Format, [warps, along]: [usize; 2], rows: usize, stages: usize) -> Block {
        let (outputs, rows) = (32 * warps, rows * along);
        let stages = stages * (warps * tile_bytes(format, SLICE) + Block::inputs(format, rows));
        let shared = Block::head(format, outputs, rows) + stages.max(4 * rows * (outputs + 4));
        Block { outputs, rows, threads: (32 * warps * along) as u32, shared: shared as u32 }
    }

    /// Four warps that share the slices, `size` 1 or 2: `Split` of mma.cuh.
    pub fn of_split(format: Format, size: usize) -> Block {
        let (outputs, rows) = (32, 16 * size);
        let stage = tile_bytes(format, SLICE) + Block::inputs(format, rows);
        let shared = Block::head(format, outputs, rows) + 4 * (4 * rows * (outputs + 4) + stage);
        Block { outputs, rows, threads: 128, shared: shared as u32 }
    }

    /// `Tables` of many.cuh.
    fn tables(outputs: usize, rows: usize) -> usize {
        (outputs / 8 * 20 + rows * 4).next_multiple_of(8)
    }

    /// A multiprocessor's share of experts' products, up to 16 or 32 rows at a time: `Grouped` of grouped.cuh.
    pub fn of_grouped(format: Format, rows: usize, cols: usize, experts: usize) -> Block {
        let iq2 = format == Format::Iq2Xxs;
        let (warps, stages) = if rows == 16 { (20, 4) } else { (16, if iq2 { 2 } else { 4 }) };
        let plan = (4 * (experts + 1)).next_multiple_of(16) + 68;
        let head = plan.next_multiple_of(128) + 128 + if iq2 { 32_768 + 512 * warps } else { 0 };
        let row = cols + 64 + cols / 8 * if iq2 { 1 } else { 2 };
        // A slice of sixteen outputs, of tiles that have four slices of eight.
        let stage = 2 * tile_bytes(format, SLICE) / 4;
        let shared = head + rows * row + warps * stages * stage;
        Block { outputs: 16, rows, threads: 32 * warps as u32, shared: shared as u32 }
    }

    /// Tables, and copies of the patterns of IQ2_XXS.
    fn head(format: Format, outputs: usize, rows: usize) -> usize {
        Block::tables(outputs, rows).next_multiple_of(128) + if format == Format::Iq2Xxs { 32_768 } else { 0 }
    }

    /// A slice of rows: `Rows` of mma.cuh.
    fn inputs(format: Format, rows: usize) -> usize {
        let natural = format == Format::Q8_0 || matches!(format.coding(), Coding::PerHalf(_));
        let sums = !matches!(format, Format::Q8_0 | Format::Iq2Xxs | Format::Mxfp4);
        rows * (if natural { 272 } else { 288 } + 32 + if sums { 32 } else { 0 })
    }
}

/// Rows that a kernel over few rows takes: the smallest kernel that has room for `rows`.
pub(crate) fn rows_taken(rows: usize) -> usize {
    match rows {
        0..=1 => 1,
        2 => 2,
        3..=4 => 4,
        _ => 8,
    }
}

/// Rows that a kernel may make the inputs of by itself.
pub(crate) const MAKES_ROWS: usize = 2;
/// The same where they stand behind a norm and are one chunk of a sum each.
pub(crate) const MAKES_CHUNKS: usize = 4;
/// Warps of a block, by kernel: as its launch bounds say.
const WARPS: [u32; 4] = [16, 16, 12, 12];
/// Warps of a block of one row, should its tiles want fewer: so many that the row comes in quickly.
const LEAST_WARPS: u32 = 8;
/// Of large tiles, fewer warps that have two in flight are better than more that have one.
const LARGE_TILE: u32 = 8192;
const WARPS_OF_LARGE: u32 = 11;
/// Tiles of a step, at one row: what their partial sums take is bounded.
const STEP_TILES: u32 = 64;

impl Product {
    /// Cuts the product into blocks for `multiprocessors`, each row kernel taking `taken` rows: fills the fields that say
    /// so. `parts`: 1 where there are none. `normed`: the kernel makes its inputs, behind a norm. `None`
    /// where the rows do not fit in shared memory.
    pub fn cut_blocks(
        &mut self,
        taken: usize,
        format: Format,
        parts: usize,
        normed: bool,
        multiprocessors: u32,
    ) -> Option<Shape> {
        let tiles = self.cut.tiles() as u32;
        let per_group = if self.pair != 0 { 2 * tiles } else { tiles };
        self.stage_bytes = self.cut.longest_tile(format).next_multiple_of(128) as u32;
        let (taken, slices, parts) = (taken as u32, self.cut.slices, parts as u32);
        // Groups of a step: every multiprocessor gets about the same number of groups in the end.
        let most_groups = (STEP_TILES / taken / per_group).clamp(1, self.groups);
        // Outputs that are left as int8 are so in blocks of 32.
        let whole = if self.out_q != 0 { 32 / self.cut.group_rows() as u32 } else { 1 };
        let load = |at_once: u32| (parts * self.groups.div_ceil(at_once)).div_ceil(multiprocessors) * at_once;
        let sizes = (1..=most_groups.max(whole)).rev().filter(|at_once| at_once % whole == 0);
        self.per_block = sizes.min_by_key(|at_once| load(*at_once)).unwrap_or(whole);
        let items = self.per_block * per_group;
        let steps = parts * self.groups.div_ceil(self.per_block);
        let most = match WARPS[taken.ilog2() as usize] {
            most if self.stage_bytes > LARGE_TILE => most.min(WARPS_OF_LARGE),
            most => most,
        };
        let mut warps = items.div_ceil(items.div_ceil(most));
        let floats = format.coding() == Coding::Float;
        let (codes, floats) = (u32::from(!floats) * taken * slices, u32::from(floats) * taken * slices);
        let mut shared = |warps: u32, stages: u32| {
            let mut places = Places::behind(warps * stages);
            let mut place = |bytes| places.take(bytes);
            self.table_at = place(if format == Format::Iq2Xxs { 1024 } else { 0 });
            self.q_at = place(codes * 272);
            self.d_at = place(codes * 32);
            self.sums_at = place(codes * 32);
            self.floats_at = place(floats * 1040);
            self.squares_at = place(if normed { taken * 256 } else { 0 });
            self.norm_at = place(if normed { 4 * self.cut.cols } else { 0 });
            self.partials_at = place(2 * items * taken * 128);
            self.ring_at = places.rest();
            self.ring_at + warps * stages * self.stage_bytes
        };
        while shared(warps, 1) > MAX_SHARED {
            warps -= 1;
            if warps == 0 {
                return None;
            }
        }
        // As many tiles in flight as there is room for, and no more than a warp ever takes.
        let rounds = steps.div_ceil(multiprocessors);
        let each = rounds * items.div_ceil(warps);
        let stages = (1..=each.min(8)).rev().find(|stages| shared(warps, *stages) <= MAX_SHARED).unwrap_or(1);
        (self.stages, self.warps) = (stages, warps);
        let shared = shared(warps, stages);
        let threads = 32 * warps.max(if taken == 1 { LEAST_WARPS } else { 1 });
        Some(Shape { blocks: steps.div_ceil(rounds), threads, shared })
    }
}

#[cfg(test)]
mod tests {
    use super::{Block, Cut, MAX_SHARED};
    use crate::format::Format;

    /// DeepSeek-V4-Flash's experts, of which a tile's rows stand in shared memory as a whole.
    #[test]
    fn tiles_of_experts_rows_fit() {
        for rows in [16, 32] {
            for (format, cols) in [(Format::Iq2Xxs, 4096), (Format::Q2K, 2048)] {
                let block = Block::of_grouped(format, rows, cols, 256);
                assert!(block.shared <= MAX_SHARED, "{rows} rows of {}: {}", format.name(), block.shared);
            }
        }
    }

    #[test]
    fn a_group_has_the_bytes_of_its_rows() {
        for format in Format::ALL {
            for cols in [32, 64, 256, 301, 512, 576, 640, 768, 896, 1024, 1536, 4096, 5120, 14336] {
                let Some(row_bytes) = format.row_bytes(cols) else { continue };
                let cut = Cut::of(cols);
                assert_eq!(cut.group_bytes(format), cut.group_rows() * row_bytes, "{} {cols}", format.name());
                assert_eq!(cut.tiles() << cut.log_c, cut.slices as usize);
            }
        }
    }
}
