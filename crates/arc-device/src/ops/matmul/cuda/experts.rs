//! Routed experts over few rows: the Rust side of `experts.cuh`.

use super::experts_row::{AllExperts, HeldUnits};
use super::inputs::Source;
use super::matrix::CudaMatrix;
use super::plan::{Cut, MAX_SHARED, Places, Shape, tile_bytes};
use super::{Assigned, FEW_ROWS, Out, Then};
use crate::cuda::{Arg, Cuda, Grid, Kernel, kernel};
use crate::error::Result;
use crate::format::Format;
use crate::ops::matmul::SLICE;
use crate::ops::quant::Inputs;
use crate::ops::router::cuda::Gate;

/// Kernels of routed experts over few rows, by format: gated units, and sums.
#[rustfmt::skip]
const EXPERTS: [Option<[Kernel; 2]>; 16] = [
    None,
    None,
    None,
    Some([kernel!("arc_matmul_experts_up_q8_0"), kernel!("arc_matmul_experts_down_q8_0")]),
    Some([kernel!("arc_matmul_experts_up_q4_0"), kernel!("arc_matmul_experts_down_q4_0")]),
    Some([kernel!("arc_matmul_experts_up_q4_1"), kernel!("arc_matmul_experts_down_q4_1")]),
    Some([kernel!("arc_matmul_experts_up_q5_0"), kernel!("arc_matmul_experts_down_q5_0")]),
    Some([kernel!("arc_matmul_experts_up_q5_1"), kernel!("arc_matmul_experts_down_q5_1")]),
    Some([kernel!("arc_matmul_experts_up_q2_k"), kernel!("arc_matmul_experts_down_q2_k")]),
    Some([kernel!("arc_matmul_experts_up_q3_k"), kernel!("arc_matmul_experts_down_q3_k")]),
    Some([kernel!("arc_matmul_experts_up_q4_k"), kernel!("arc_matmul_experts_down_q4_k")]),
    Some([kernel!("arc_matmul_experts_up_q5_k"), kernel!("arc_matmul_experts_down_q5_k")]),
    Some([kernel!("arc_matmul_experts_up_q6_k"), kernel!("arc_matmul_experts_down_q6_k")]),
    Some([kernel!("arc_matmul_experts_up_iq2_xxs"), kernel!("arc_matmul_experts_down_iq2_xxs")]),
    Some([kernel!("arc_matmul_experts_up_mxfp4"), kernel!("arc_matmul_experts_down_mxfp4")]),
    None,
];

/// Warps of a block: fewer where the tiles of more have no room.
const WARPS: [u32; 2] = [16, 8];
/// Lanes of a warp: copies of the patterns of IQ2_XXS where gated units are made, and the most assignments of a block there.
const LANES: u32 = 32;
/// Outputs of a unit.
const UNIT: u32 = 32;
/// Shared memory of a block of one row's gated units, unless it needs more: half of what there is, so that such a block and its
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
    pub shared_tiles: u32,
    pub table_at: u32,
    pub q_at: u32,
    pub d_at: u32,
    pub sums_at: u32,
    pub partials_at: u32,
    pub shared_partials_at: u32,
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
        // A lane knows each of them.
        if self.most_staged > LANES {
            return None;
        }
        let halves = if self.each > self.at_once { 2 } else { 1 };
        let room = Room {
            tile: 2 * tile_bytes(format, SLICE) as u32,
            tiles: self.each * per_unit,
            table: if format == Format::Iq2Xxs { LANES << 10 } else { 0 },
            partials: halves * self.at_once * 2 * per_unit,
            shared_partials: 0,
            most: if self.rows == 1 { UP_SHARED } else { MAX_SHARED },
        };
        self.place(units.div_ceil(self.each), &room)
    }

    /// Cuts sums of experts into blocks, which have all rows of their outputs where the shared expert's come along. `None` where a
    /// block does not have the room.
    pub fn cut_down(&mut self, format: Format, multiprocessors: u32) -> Option<Shape> {
        let (tiles, wide) = (self.cut.tiles() as u32, self.cut.group_rows() as u32);
        self.unit_groups = UNIT / wide;
        let (of_expert, units_of) = (self.unit_groups * tiles, self.outputs / UNIT);
        let (units, shared) = (self.rows * units_of, u32::from(self.shared != 0));
        self.each = match shared {
            0 => units.div_ceil(multiprocessors),
            _ => self.rows * units_of.div_ceil(multiprocessors),
        };
        self.at_once = 1;
        self.shared_tiles = shared * of_expert;
        // The next row's come while one is multiplied.
        self.most_staged = self.chosen * self.rows.min(2) + shared * self.rows;
        let halves = if self.each > 1 { 2 } else { 1 };
        let shared_halves = if self.each > self.rows { 2 } else { 1 };
        let room = Room {
            tile: tile_bytes(format, SLICE) as u32,
            tiles: self.each * self.chosen * of_expert,
            table: if format == Format::Iq2Xxs { 1 << 10 } else { 0 },
            partials: halves * self.chosen * of_expert,
            shared_partials: shared_halves * shared * of_expert * self.rows,
            most: MAX_SHARED,
        };
        self.place(units.div_ceil(self.each), &room)
    }

    /// Gives the parts of shared memory their places, and tiles in flight what is left.
    fn place(&mut self, blocks: u32, room: &Room) -> Option<Shape> {
        WARPS.into_iter().find_map(|warps| self.place_for(warps, blocks, room))
    }

    fn place_for(&mut self, warps: u32, blocks: u32, room: &Room) -> Option<Shape> {
        self.stage_bytes = room.tile.next_multiple_of(128);
        let codes = self.most_staged * self.cut.slices;
        let shared_ring = self.shared_tiles * tile_bytes(Format::Q8_0, SLICE) as u32;
        let mut sized = |stages: u32| {
            let mut places = Places::behind(self.shared_tiles + warps * stages);
            let mut place = |bytes| places.take(bytes);
            self.table_at = place(room.table);
            self.q_at = place(codes * 272);
            self.d_at = place(codes * 32);
            self.sums_at = place(codes * 32);
            self.partials_at = place(room.partials * 128);
            self.shared_partials_at = place(room.shared_partials * 128);
            self.shared_ring_at = places.rest();
            self.ring_at = self.shared_ring_at + shared_ring.next_multiple_of(128);
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
    /// Times that something comes.
    tiles: u32,
    /// Bytes of the table of magnitudes.
    table: u32,
    /// Tiles whose partial sums are kept.
    partials: u32,
    /// The same of the shared expert's.
    shared_partials: u32,
    /// Bytes that are not exceeded without need: other kernels have weights on their way meanwhile.
    most: u32,
}

/// Gated units of experts, and who reads them.
pub(crate) struct Units<'a> {
    /// The clamp.
    pub limit: f32,
    /// Address of `[assignments, units]` f32, in the order of assignments.
    pub mid: u64,
    /// Address of room for `[rows * chosen, units]` f32, by row and place.
    pub by_assignment: u64,
    /// The matrix that reads them, and how they are rounded for it.
    pub down: &'a CudaMatrix,
    pub next: Source,
    /// The shared expert's second matrix and its units, which are there: its sums may come along.
    pub shared: (&'a CudaMatrix, Source),
    /// The gate, all matrices and where the shared expert's units go, where choice, all units and their sum are to be one launch.
    pub all: Option<(Gate, AllExperts<'a>, u64)>,
}

impl Cuda {
    /// Routed experts over few rows. `None` where their kernels cannot: float weights, or units that are not whole.
    fn experts(&self, w: &CudaMatrix, to: &Assigned, per: usize) -> Result<Option<Experts>> {
        let part = w.parts[0];
        if to.rows > FEW_ROWS || EXPERTS[part.format as usize].is_none() || !Experts::fits(&w.cut, part.rows) {
            return Ok(None);
        }
        Ok(Some(Experts {
            cut: w.cut,
            outputs: part.rows as u32,
            base: part.at,
            part_bytes: w.stride(per)?,
            up_at: w.parts.get(1).map_or(0, |up| up.at - part.at),
            order: to.order,
            bounds: to.bounds,
            ids: to.ids,
            weights: to.weights,
            infos: self.view().infos(),
            rows: to.rows as u32,
            chosen: to.chosen as u32,
            experts: to.experts as u32,
            ..Experts::default()
        }))
    }

    /// Gated units of few rows' experts, times their routing weights: at `mid`, in the order of assignments, and where
    /// [`experts_down`](Self::experts_down) finds them. `false` where it cannot, with nothing done.
    pub(crate) fn experts_up(
        &mut self,
        w: &CudaMatrix,
        from: Source,
        units: &Units<'_>,
        to: &Assigned,
    ) -> Result<bool> {
        // Units of former rows are nobody's.
        self.matmul.units = None;
        let Some(mut experts) = self.experts(w, to, 2)? else { return Ok(false) };
        let format = w.parts[0].format;
        // One block more makes the inputs of the shared expert's sums.
        let processors = self.multiprocessors() - 1;
        let Some(shape) = experts.cut_up(format, processors) else { return Ok(false) };
        let which = match self.matmul.ready(&from.for_matrix(w), to.rows) {
            Some(which) => which,
            None => {
                self.prepare(w.reads(), from.for_matrix(w), to.rows)?;
                0
            }
        };
        let codes = self.matmul.codes(which);
        (experts.q, experts.d, experts.sums) = (codes.q, codes.d, codes.sums);
        self.counters.weight_bytes += self.touched(w, to);
        (experts.limit, experts.mid) = (units.limit, units.mid);
        // The second product's inputs, by assignment.
        let (rows, cols) = (to.rows * to.chosen, w.parts[0].rows);
        let next = Source { x: units.by_assignment, ..units.next }.for_matrix(units.down);
        let as_it_is = next.inputs == Inputs::F32 && !units.down.reads().floats;
        let left = self.matmul.codes(if as_it_is { 1 - which } else { 0 });
        if as_it_is {
            let room = self.matmul.inputs(1 - which).q.len();
            assert!(rows * cols <= room, "{rows} units of {cols} values");
            (experts.mid_q, experts.mid_d, experts.mid_sums) = (left.q, left.d, left.sums);
            let (matrix, shared) = units.shared;
            let alike = matrix.parts.len() == 1
                && matrix.parts[0].format == Format::Q8_0
                && (matrix.rows, matrix.cols) == (units.down.parts[0].rows, units.down.cols);
            if alike && shared.for_matrix(matrix).as_it_is() && (rows + to.rows) * cols <= room {
                experts.x = shared.x;
            }
        } else {
            experts.mid_floats = units.by_assignment;
        }
        let [kernel, _] = EXPERTS[format as usize].expect("`experts` looked");
        let grid = Grid::new(shape.blocks + u32::from(experts.x != 0), shape.threads).shared(shape.shared);
        let along = (experts.x != 0).then_some(experts.x);
        match units.all {
            Some((gate, all, at)) => {
                let mut row = self.experts_row(&all, from, to)?.expect("`takes_all` looked");
                row.0.leave(units.mid, at, units.limit);
                let out = Out { at, stride: cols, then: Then::ClampedSilu { limit: units.limit } };
                self.hold(|dev| dev.product_of(all.shared_up, from, out, to.rows))?;
                let shared = self.matmul.held.take();
                self.matmul.held_units = Some(HeldUnits { gate, shared, kernel, grid, experts, row });
            }
            None => self.launch(kernel, grid, &[Arg::of(&experts)])?,
        }
        if !as_it_is {
            self.prepare(units.down.reads(), next, rows)?;
        }
        self.matmul.units = Some((units.mid, left, along));
        Ok(true)
    }

    /// The shared expert's units at `at` are made anew: what the last [`experts_up`](Self::experts_up) left of them as int8 is of
    /// former ones.
    pub(crate) fn forget_shared_units(&mut self, at: u64) {
        if let Some((.., along)) = &mut self.matmul.units {
            along.take_if(|along| *along == at);
        }
    }

    /// Sums of few rows' experts, of the units that the last [`experts_up`](Self::experts_up) left for `mid`. `shared`: what it was
    /// told of the shared expert, whose sums may come along. Whether they did; `None` where nothing is done,
    /// since it cannot.
    pub(crate) fn experts_down(
        &mut self,
        w: &CudaMatrix,
        shared: (&CudaMatrix, Source),
        out: u64,
        mid: u64,
        to: &Assigned,
    ) -> Result<Option<bool>> {
        let Some((_, codes, left)) = self.matmul.units.filter(|(of, ..)| *of == mid) else { return Ok(None) };
        if self.sum_held(w, shared, mid, out, to)? {
            return Ok(Some(true));
        }
        let Some(mut experts) = self.experts(w, to, 1)? else { return Ok(None) };
        let (format, processors) = (w.parts[0].format, self.multiprocessors());
        (experts.q, experts.d, experts.sums, experts.out) = (codes.q, codes.d, codes.sums, out);
        let (matrix, units) = shared;
        let along = left.filter(|left| *left == units.x).and_then(|_| {
            let mut both = Experts { shared: matrix.parts[0].at, ..experts };
            both.cut_down(format, processors).map(|shape| (both, shape))
        });
        let comes = along.is_some();
        let alone = || experts.cut_down(format, processors).map(|shape| (experts, shape));
        let Some((experts, shape)) = along.or_else(alone) else { return Ok(None) };
        self.counters.weight_bytes += self.touched(w, to) + if comes { matrix.bytes() as u64 } else { 0 };
        let [_, kernel] = EXPERTS[format as usize].expect("`experts` looked");
        self.launch(kernel, Grid::new(shape.blocks, shape.threads).shared(shape.shared), &[Arg::of(&experts)])?;
        Ok(Some(comes))
    }
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
