//! Routed experts over few rows: the Rust side of `experts.cuh`.

use super::plan::{Cut, MAX_SHARED, Shape, tile_bytes};
use crate::format::Format;
use crate::ops::matmul::SLICE;

/// Warps of a block: fewer where the tiles of more have no room.
const WARPS: [u32; 2] = [16, 8];
/// Outputs of a unit.
const UNIT: u32 = 32;
/// Shared memory of a block of gated units, unless it needs more: half of what there is, so that such a block and its
/// weights can be there while the kernel before it runs. Measured.
const UP_SHARED: u32 = 113 << 10;
/// Tiles of a step whose partial sums a block keeps.
const STEP_TILES: u32 = 96;

/// `Experts` of experts.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Experts {
    pub cut: Cut,
    pub outputs: u32,
    pub base: u64,
    pub part_bytes: u64,
    pub up_at: u64,
    pub shared: u64,
    pub order: u64,
    pub bounds: u64,
    pub ids: u64,
    pub weights: u64,
    pub infos: u64,
    pub q: u64,
    pub d: u64,
    pub sums: u64,
    pub x: u64,
    pub mid: u64,
    pub mid_q: u64,
    pub mid_d: u64,
    pub mid_sums: u64,
    pub mid_floats: u64,
    pub out: u64,
    pub rows: u32,
    pub chosen: u32,
    pub experts: u32,
    pub limit: f32,
    pub unit_groups: u32,
    pub each: u32,
    pub at_once: u32,
    pub most_staged: u32,
    pub stages: u32,
    pub stage_bytes: u32,
    pub shared_each: u32,
    pub table_at: u32,
    pub q_at: u32,
    pub d_at: u32,
    pub sums_at: u32,
    pub sums_of_at: u32,
    pub partials_at: u32,
    pub shared_ring_at: u32,
    pub ring_at: u32,
    pub pad: u32,
}
const _: () = assert!(size_of::<Experts>() == 248);

impl Experts {
    /// Whether units are whole, as the kernels take for granted.
    pub fn fits(cut: &Cut, outputs: usize) -> bool {
        (cut.cols as usize).is_multiple_of(SLICE) && outputs.is_multiple_of(UNIT as usize)
    }

    /// Cuts gated units into blocks. `None` where a block does not have the room.
    pub fn cut_up(&mut self, format: Format, multiprocessors: u32) -> Option<Shape> {
        let (tiles, wide) = (self.cut.tiles() as u32, self.cut.group_rows() as u32);
        self.unit_groups = UNIT / wide;
        let (per_unit, units_of) = (self.unit_groups * tiles, self.outputs / UNIT);
        let units = self.rows * self.chosen * units_of;
        self.each = units.div_ceil(multiprocessors);
        self.at_once = (STEP_TILES / 2 / per_unit).clamp(1, self.each);
        self.most_staged = if self.rows == 1 { 1 } else { (self.each + units_of - 2) / units_of + 1 };
        let halves = if self.each > self.at_once { 2 } else { 1 };
        let room = Room {
            tile: 2 * tile_bytes(format, SLICE) as u32,
            shared_tiles: 0,
            tiles: self.each * per_unit,
            table: if format == Format::Iq2Xxs { 1 << 10 } else { 0 },
            partials: halves * self.at_once * 2 * per_unit,
            sums: 0,
            most: UP_SHARED,
        };
        self.place(units.div_ceil(self.each), &room)
    }

    /// Cuts sums of experts into blocks. `None` where a block does not have the room.
    pub fn cut_down(&mut self, format: Format, multiprocessors: u32) -> Option<Shape> {
        let (tiles, wide) = (self.cut.tiles() as u32, self.cut.group_rows() as u32);
        self.unit_groups = UNIT / wide;
        let of_expert = self.unit_groups * tiles;
        let units = self.rows * (self.outputs / UNIT);
        self.each = units.div_ceil(multiprocessors);
        let blocks = units.div_ceil(self.each);
        self.at_once = 1;
        let shared = u32::from(self.shared != 0);
        self.most_staged = self.chosen + shared;
        let halves = if self.each > 1 { 2 } else { 1 };
        let room = Room {
            tile: tile_bytes(format, SLICE) as u32,
            shared_tiles: shared * of_expert,
            tiles: self.each * self.chosen * of_expert,
            table: if format == Format::Iq2Xxs { 1 << 10 } else { 0 },
            partials: halves * self.most_staged * of_expert,
            sums: 4 * UNIT * self.most_staged,
            most: MAX_SHARED,
        };
        self.place(blocks, &room)
    }

    /// Gives the parts of shared memory their places, and tiles in flight what is left.
    fn place(&mut self, blocks: u32, room: &Room) -> Option<Shape> {
        WARPS.into_iter().find_map(|warps| self.place_for(warps, blocks, room))
    }

    fn place_for(&mut self, warps: u32, blocks: u32, room: &Room) -> Option<Shape> {
        self.stage_bytes = room.tile.next_multiple_of(128);
        self.shared_each = room.shared_tiles.div_ceil(warps);
        let codes = self.most_staged * self.cut.slices;
        let shared_ring = warps * self.shared_each * tile_bytes(Format::Q8_0, SLICE) as u32;
        let mut sized = |stages: u32| {
            let mut at = (8 * warps * (stages + self.shared_each)).next_multiple_of(128);
            let mut place = |bytes: u32| {
                let here = at;
                at += bytes.next_multiple_of(16);
                here
            };
            self.table_at = place(room.table);
            self.q_at = place(codes * 272);
            self.d_at = place(codes * 32);
            self.sums_at = place(codes * 32);
            self.sums_of_at = place(room.sums);
            self.partials_at = place(room.partials * 128);
            self.shared_ring_at = at.next_multiple_of(128);
            self.ring_at = self.shared_ring_at + shared_ring;
            self.ring_at + warps * stages * self.stage_bytes
        };
        // Less than all that there is, unless nothing fits then.
        let most = if sized(1) <= room.most { room.most } else { MAX_SHARED };
        let stages = (1..=room.tiles.div_ceil(warps).clamp(1, 8)).rev().find(|&stages| sized(stages) <= most)?;
        let shared = sized(stages);
        self.stages = stages;
        Some(Shape { blocks, threads: 32 * warps, shared })
    }
}

/// What a block needs shared memory for.
struct Room {
    /// Bytes of what comes at once.
    tile: u32,
    /// Tiles of the shared expert's matrix.
    shared_tiles: u32,
    /// Times that something comes.
    tiles: u32,
    /// Bytes of the table of magnitudes.
    table: u32,
    /// Tiles whose partial sums are kept.
    partials: u32,
    /// Bytes of sums.
    sums: u32,
    /// Bytes that are not exceeded without need: other kernels have weights on their way meanwhile.
    most: u32,
}

#[cfg(test)]
mod tests {
    use super::Experts;
    use crate::format::Format;
    use crate::ops::matmul::cuda::plan::{Cut, MAX_SHARED};

    /// DeepSeek-V4-Flash's experts, and small ones.
    #[test]
    fn blocks_have_room_and_take_every_unit() {
        for (hidden, ffn) in [(4096, 2048), (1024, 256), (256, 256)] {
            for rows in 1..=8 {
                for format in [Format::Iq2Xxs, Format::Q2K, Format::Q4K, Format::Mxfp4, Format::Q8_0] {
                    let base = Experts { rows, chosen: 6, experts: 256, ..Experts::default() };
                    let mut up = Experts { cut: Cut::of(hidden), outputs: ffn as u32, ..base };
                    let shape = up.cut_up(format, 132).expect("gated units fit");
                    assert!(shape.shared <= MAX_SHARED && shape.blocks <= 132 && up.stages > 0);
                    assert!(shape.blocks * up.each >= rows * 6 * ffn as u32 / 32);
                    let mut down = Experts { cut: Cut::of(ffn), outputs: hidden as u32, ..base };
                    // With the largest tiles the shared expert's have no room beside them.
                    down.shared = u64::from(format != Format::Q8_0);
                    let shape = down.cut_down(format, 132).expect("sums fit");
                    assert!(shape.shared <= MAX_SHARED && shape.blocks <= 132 && down.stages > 0);
                    assert!(shape.blocks * down.each >= rows * hidden as u32 / 32);
                }
            }
        }
    }
}
