//! How a matrix lies in device memory, and how a product over few rows is cut into blocks: the Rust side of `layout.cuh`.

use crate::format::Format;
use crate::ops::matmul::SLICE;

/// Lanes of a warp.
const LANES: usize = 32;
/// Segments that one launch takes.
pub(crate) const MAX_SEGS: usize = 8;
/// Shared memory that a block can have.
pub(crate) const MAX_SHARED: u32 = 232_448;
/// Of a multiprocessor, what a block takes for itself.
const SHARED_OF_BLOCK: u32 = 1024;

/// Columns cut into slices, and slices into tiles. `Cut` of layout.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
fn tile_bytes(format: Format, n: usize) -> usize {
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
    pub table_at: u32,
    pub q_at: u32,
    pub d_at: u32,
    pub sums_at: u32,
    pub floats_at: u32,
    pub partials_at: u32,
    pub ring_at: u32,
    pub unused: u32,
}
const _: () = assert!(size_of::<Product>() == 384);

/// `Prepare` of quantise.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
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

/// Blocks, threads and shared memory of a launch over few rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub blocks: u32,
    pub threads: u32,
    pub shared: u32,
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

impl Product {
    /// Cuts the product into blocks for `multiprocessors`, each row kernel taking `taken` rows: fills the fields that say
    /// so. `table`: the kernel keeps the patterns of IQ2_XXS. `parts`: parts or experts with rows, 1 otherwise. `None`
    /// where the rows do not fit in shared memory.
    pub fn cut_blocks(
        &mut self,
        taken: usize,
        table: bool,
        format: Format,
        parts: usize,
        multiprocessors: u32,
    ) -> Option<Shape> {
        let tiles = self.cut.tiles() as u32;
        let per_group = if self.pair != 0 { 2 * tiles } else { tiles };
        self.stage_bytes = self.cut.longest_tile(format).next_multiple_of(128) as u32;
        let (taken, slices) = (taken as u32, self.cut.slices);
        let (codes, floats) = (u32::from(self.q != 0) * taken * slices, u32::from(self.floats != 0) * taken * slices);
        // Large inputs want fewer and larger blocks, since each keeps a copy of them; large tiles, smaller ones.
        let inputs = codes * 336 + floats * 1040;
        let mut most = match inputs {
            28_673.. if taken == 8 => 12,
            28_673.. if taken == 4 => 16,
            _ => 8,
        };
        if self.stage_bytes > 12_000 {
            most = 4;
        }
        let (groups_at_once, mut warps) = if per_group >= most {
            (1, per_group.div_ceil(per_group.div_ceil(most)))
        } else {
            (most / per_group, most / per_group * per_group)
        };
        self.per_block = groups_at_once.min(self.groups);
        warps = warps.min(self.per_block * per_group);
        let items = self.per_block * per_group;
        let steps = parts as u32 * self.groups.div_ceil(self.per_block);
        let mut shared = |warps: u32, stages: u32| {
            let mut at = (8 * warps * stages).next_multiple_of(128);
            let mut place = |bytes: u32| {
                let here = at;
                at += bytes.next_multiple_of(16);
                here
            };
            self.table_at = place(if table { 1024 } else { 0 });
            self.q_at = place(codes * 272);
            self.d_at = place(codes * 32);
            self.sums_at = place(codes * 32);
            self.floats_at = place(floats * 1040);
            self.partials_at = place(2 * items * taken * 128);
            self.ring_at = at.next_multiple_of(128);
            self.ring_at + warps * stages * self.stage_bytes
        };
        while shared(warps, 1) > MAX_SHARED {
            warps -= 1;
            if warps == 0 {
                return None;
            }
        }
        let each = items.div_ceil(warps);
        // Registers, by kernel: about these many warps fit.
        let resident = [32, 24, 16, 12][taken.ilog2() as usize];
        let fitting = |shared: u32, warps: u32| (MAX_SHARED / (shared + SHARED_OF_BLOCK)).min(resident / warps).max(1);
        let at_once = fitting(shared(warps, 1), warps);
        let rounds = steps.div_ceil(multiprocessors * at_once);
        // As many tiles in flight as there is room for, and no more than a warp ever takes.
        let mut stages = 1;
        while stages < 8 && stages < rounds * each {
            let more = shared(warps, stages + 1);
            if more > MAX_SHARED || fitting(more, warps) < at_once {
                break;
            }
            stages += 1;
        }
        self.stages = stages;
        let shared = shared(warps, stages);
        Some(Shape { blocks: steps.div_ceil(rounds), threads: 32 * warps, shared })
    }
}

#[cfg(test)]
mod tests {
    use super::Cut;
    use crate::format::Format;

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
