//! The gate and the experts of one row in one launch: the Rust side of experts_row.cu.
//!
//! Gate and gated units are held back when their stages come, and the sum takes them along. Whatever else is launched goes
//! behind them.

use super::experts::Experts;
use super::follow::Held;
use super::matrix::CudaMatrix;
use super::plan::{Cut, MAX_SHARED, Places, Shape, tile_bytes};
use super::{Assigned, Source};
use crate::cuda::{Arg, Cuda, Grid, Kernel, kernel};
use crate::error::Result;
use crate::format::Format;
use crate::math::SUM_CHUNK;
use crate::ops::matmul::SLICE;
use crate::ops::quant::Inputs;
use crate::ops::router::cuda::{Gate, ONE_EXPERTS, ONE_WARPS, choose_few};

/// Threads of a block: warps that multiply, and behind them those that bring chunks, send units and take them.
const THREADS: u32 = 32 * 20;
/// Blocks that have halves of the same units.
const CLUSTER: u32 = 2;
/// Bytes of what a block knows of the row, and shares of the gate.
const KNOWN: u32 = 1792;
/// Bytes of chunks on their way at a time: what memory needs to be busy, for all else waits behind them.
const WINDOW: u32 = 52 << 10;
/// Outputs of a unit, and rows of a group.
const UNIT: u32 = 32;
const GROUP: u32 = 8;
/// Groups of the shared expert's first matrix that a block takes: half a unit.
const SHARED_GROUPS: u32 = 2;
const UNIT_GROUPS: u32 = UNIT / GROUP;
/// Blocks in front of the others, where there are multiprocessors to spare: each makes so many halves of units of the shared
/// expert, in the place of the last blocks. These start late, since the kernel before leaves them no room.
const MOST_HELPERS: u32 = 4;
const HELPS: u32 = 4;
/// Groups of a chosen expert's second matrix that come together.
const DOWN_GROUPS: u32 = 2;
const MOST_CHOSEN: u32 = 16;
/// Chunks of the shared expert's first matrix, at most.
const MOST_SHARED: u32 = 16;
const DOWN_CHUNKS: u32 = UNIT_GROUPS / DOWN_GROUPS;
const MOST_CHUNKS: usize =
    (MOST_SHARED + UNIT_GROUPS * MOST_CHOSEN / 2 + UNIT_GROUPS + DOWN_CHUNKS * MOST_CHOSEN) as usize;

/// The matrices of a layer's experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AllExperts<'a> {
    pub up: &'a CudaMatrix,
    pub down: &'a CudaMatrix,
    pub shared_up: &'a CudaMatrix,
    pub shared_down: &'a CudaMatrix,
}

/// `Chunk` of experts_row.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Chunk {
    at: u32,
    freed: u16,
    landed: u16,
}

/// `ExpertsRow` of experts_row.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertsRow {
    up: Cut,
    down: Cut,
    base: u64,
    part_bytes: u64,
    up_at: u64,
    shared: u64,
    shared_up_at: u64,
    down_base: u64,
    down_bytes: u64,
    shared_down: u64,
    infos: u64,
    q: u64,
    d: u64,
    mid: u64,
    shared_units: u64,
    out: u64,
    counts: u64,
    sent: u64,
    site: u64,
    chosen: u32,
    units: u32,
    shared_tiles: u32,
    helpers: u32,
    each: u32,
    limit: f32,
    known_at: u32,
    table_at: u32,
    q_at: u32,
    d_at: u32,
    units_at: u32,
    partials_at: u32,
    products_at: u32,
    sums_at: u32,
    ring_at: u32,
    chunks: [[Chunk; MOST_CHUNKS]; 3],
}
const _: () = assert!(size_of::<ExpertsRow>() == 224 + 24 * MOST_CHUNKS);

/// The gate and gated units of one row's experts that were asked for and are not launched yet.
#[derive(Clone)]
pub(crate) struct HeldUnits {
    pub(super) gate: Gate,
    /// How they are launched without the sum: those of the shared expert, and those of the chosen ones.
    pub(super) shared: Option<Held>,
    pub(super) kernel: Kernel,
    pub(super) grid: Grid,
    pub(super) experts: Experts,
    /// And with it.
    pub(super) row: (ExpertsRow, Shape),
}

/// How a block goes about it.
struct Plan {
    row: [u32; 5],
    /// Of shared memory, as the kernel has them.
    places: [u32; 9],
    /// Of most blocks, of those that have a helper, and of helpers.
    chunks: [Vec<Chunk>; 3],
    shape: Shape,
}

/// Clusters of blocks.
fn grid(shape: Shape) -> Grid {
    Grid::new(shape.blocks, shape.threads).shared(shape.shared).cluster(CLUSTER)
}

/// Cuts a row of `chosen` experts into blocks. `None` where the kernel cannot, or a block does not have the room.
fn plan(up: &Cut, down: &Cut, chosen: u32, multiprocessors: u32) -> Option<Plan> {
    let (hidden, ffn) = (up.cols, down.cols);
    // Every block has as many units as the next, and a half of one of the shared expert's, or a helper has it.
    let (blocks, outs, each) = (2 * ffn / UNIT, hidden / UNIT, chosen / 2);
    let whole = [up, down].iter().all(|cut| cut.log_c == 2 && cut.group_rows() as u32 == GROUP);
    let shared_out = chosen.is_multiple_of(2) && (1..=MOST_CHOSEN).contains(&chosen);
    if !whole || !shared_out || blocks > multiprocessors || outs != blocks {
        return None;
    }
    let (tiles, down_tiles) = (up.tiles() as u32, down.tiles() as u32);
    let shared_tiles = shared_tiles(up);
    if 2 * SHARED_GROUPS * tiles / shared_tiles > MOST_SHARED {
        return None;
    }
    let helpers = ((multiprocessors - blocks) / 2 * 2).min(MOST_HELPERS);
    let sizes = sizes(up, down, chosen);

    let mut places = Places::behind(2 * (MOST_CHUNKS as u32 + 1 + MOST_CHOSEN / 2) + 2 + HELPS);
    let mut place = |bytes| places.take(bytes);
    let known_at = place(KNOWN);
    let table_at = place(32 << 10);
    let (q_at, d_at) = (place(up.slices * 272), place(up.slices * 32));
    let units_at = place((chosen + 1) * down.slices * (272 + 64));
    let partials_at = place(128 * 2 * (SHARED_GROUPS + UNIT_GROUPS * each).max(HELPS * SHARED_GROUPS) * tiles);
    let products_at = place(128 * (chosen + 1) * UNIT_GROUPS * down_tiles);
    let sums_at = place(4 * UNIT * (chosen + 1));
    let ring_at = places.rest();
    let all = sizes.iter().map(|sizes| sizes.iter().sum()).max().unwrap_or(0);
    let ring = MAX_SHARED.checked_sub(ring_at)?.min(all);
    let [most, last, helper] = sizes.map(|sizes| chunks(&sizes, ring));
    let chunks = [most?, last?, helper?];
    Some(Plan {
        row: [chosen, ffn / UNIT, shared_tiles, helpers, each],
        places: [known_at, table_at, q_at, d_at, units_at, partials_at, products_at, sums_at, ring_at],
        chunks,
        shape: Shape { blocks: helpers + blocks, threads: THREADS, shared: ring_at + ring },
    })
}

/// Tiles of a chunk of the shared expert's first matrix.
fn shared_tiles(up: &Cut) -> u32 {
    if up.tiles().is_multiple_of(2) { 2 } else { 1 }
}

/// Bytes of chunks, in order: of a block that makes a half of a unit of the shared expert, of one that makes none, of a helper.
fn sizes(up: &Cut, down: &Cut, chosen: u32) -> [Vec<u32>; 3] {
    let (tiles, down_tiles, shared_tiles) = (up.tiles() as u32, down.tiles() as u32, shared_tiles(up));
    let bytes = |format| tile_bytes(format, SLICE) as u32;
    let of = |n: u32, size| std::iter::repeat_n(size, n as usize);
    let shared =
        |halves| of(halves * 2 * SHARED_GROUPS * tiles / shared_tiles, shared_tiles * bytes(Format::Q8_0)).collect();
    let down = |experts| of(DOWN_CHUNKS * experts, DOWN_GROUPS * down_tiles * bytes(Format::Q2K));
    let chosen = || {
        of(UNIT_GROUPS * chosen / 2, 2 * tiles * bytes(Format::Iq2Xxs))
            .chain(down(2))
            .chain(of(UNIT_GROUPS, down_tiles * bytes(Format::Q8_0)))
            .chain(down(chosen - 2))
    };
    let most: Vec<u32> = shared(1);
    [most.into_iter().chain(chosen()).collect(), chosen().collect(), shared(HELPS)]
}

/// Gives chunks of these sizes their places in a ring. `None` where one does not fit.
fn chunks(sizes: &[u32], ring: u32) -> Option<Vec<Chunk>> {
    let (mut next, mut spans) = (0, Vec::new());
    let mut chunks: Vec<Chunk> = Vec::with_capacity(sizes.len());
    for (c, &size) in sizes.iter().enumerate() {
        if size > ring {
            return None;
        }
        if next + size > ring {
            next = 0;
        }
        let (start, end) = (next, next + size);
        let freed = spans.iter().rposition(|&(s, e)| s < end && start < e).map_or(0, |last| last + 1);
        // As many in front of it as may be on their way with it.
        let together = sizes[..c].iter().rev().scan(size, |sum, &size| {
            *sum += size;
            Some(*sum)
        });
        let landed = c - together.take_while(|&sum| sum <= WINDOW).count();
        let before = chunks.last().copied().unwrap_or_default();
        let (freed, landed) = (before.freed.max(freed as u16), before.landed.max(landed as u16));
        chunks.push(Chunk { at: start, freed, landed });
        spans.push((start, end));
        next = end;
    }
    Some(chunks)
}

impl Cuda {
    /// The launch of one row's experts, of inputs that are there. `None` where it cannot be.
    pub(super) fn experts_row(
        &mut self,
        w: &AllExperts<'_>,
        from: Source,
        to: &Assigned,
    ) -> Result<Option<(ExpertsRow, Shape)>> {
        let (hidden, ffn) = (w.up.cols, w.down.cols);
        let alike = |w: &CudaMatrix, format, parts: usize, rows, cols| {
            let each = |part: &super::Part| part.format == format && part.rows == rows;
            w.cols == cols && w.parts.len() == parts && w.parts.iter().all(each)
        };
        let fits = to.rows == 1
            && alike(w.up, Format::Iq2Xxs, 2 * to.experts, ffn, hidden)
            && alike(w.down, Format::Q2K, to.experts, hidden, ffn)
            && alike(w.shared_up, Format::Q8_0, 2, ffn, hidden)
            && alike(w.shared_down, Format::Q8_0, 1, hidden, ffn);
        let there = |w: &CudaMatrix| self.matmul.ready(&from.for_matrix(w), to.rows);
        let (Some(which), true) = (there(w.up).filter(|_| fits), there(w.shared_up) == there(w.up)) else {
            return Ok(None);
        };
        let Some(plan) = plan(&w.up.cut, &w.down.cut, to.chosen as u32, self.multiprocessors()) else {
            return Ok(None);
        };
        // Blocks wait for one another.
        let clusters = self.resident_clusters(kernel!("arc_matmul_experts_row"), grid(plan.shape))?;
        if CLUSTER * clusters < plan.shape.blocks {
            return Ok(None);
        }
        // Every block has units, and some have scores: a warp a chunk of an expert's row.
        let chunks = hidden / SUM_CHUNK;
        let divides = hidden.is_multiple_of(SUM_CHUNK) && ONE_WARPS.is_multiple_of(chunks);
        let scored = to.experts * chunks <= 2 * ffn / UNIT as usize * ONE_WARPS;
        if !divides || !scored || to.experts > ONE_EXPERTS {
            return Ok(None);
        }
        let codes = self.matmul.codes(which);
        let pieces = (to.chosen + 1) * ffn / UNIT as usize;
        let Some([counts, sent]) = self.matmul.exchange_units(pieces) else { return Ok(None) };
        let gates = |w: &CudaMatrix| (w.parts[0].at, w.parts[1].at - w.parts[0].at);
        let ((base, up_at), (shared, shared_up_at)) = (gates(w.up), gates(w.shared_up));
        let [chosen, units, shared_tiles, helpers, each] = plan.row;
        let [known_at, table_at, q_at, d_at, units_at, partials_at, products_at, sums_at, ring_at] = plan.places;
        let mut row = ExpertsRow {
            up: w.up.cut,
            down: w.down.cut,
            base,
            part_bytes: w.up.stride(2)?,
            up_at,
            shared,
            shared_up_at,
            down_base: w.down.parts[0].at,
            down_bytes: w.down.stride(1)?,
            shared_down: w.shared_down.parts[0].at,
            infos: self.view().infos(),
            q: codes.q,
            d: codes.d,
            mid: 0,
            shared_units: 0,
            out: 0,
            counts,
            sent,
            site: 0,
            chosen,
            units,
            shared_tiles,
            helpers,
            each,
            limit: 0.0,
            known_at,
            table_at,
            q_at,
            d_at,
            units_at,
            partials_at,
            products_at,
            sums_at,
            ring_at,
            chunks: [[Chunk::default(); MOST_CHUNKS]; 3],
        };
        for (to, chunks) in row.chunks.iter_mut().zip(&plan.chunks) {
            to[..chunks.len()].copy_from_slice(chunks);
        }
        Ok(Some((row, plan.shape)))
    }

    /// Whether one launch takes the experts of a row from its inputs to their sum: [`experts_up`](Self::experts_up) then
    /// chooses, and makes the shared expert's units too.
    pub(crate) fn takes_all(&mut self, w: &AllExperts<'_>, from: Source, to: &Assigned) -> Result<bool> {
        Ok(self.experts_row(w, from, to)?.is_some())
    }

    /// `out`: the sum of the experts whose units were held back, which are to be at `mid` and, of the shared one, what
    /// `units` says. Whether these were it.
    pub(super) fn sum_held(
        &mut self,
        down: &CudaMatrix,
        (shared_down, units): (&CudaMatrix, Source),
        mid: u64,
        out: u64,
        to: &Assigned,
    ) -> Result<bool> {
        let Some(HeldUnits { gate, row: (row, shape), .. }) = self.matmul.held_units.as_ref() else { return Ok(false) };
        let held = (row.mid, row.shared_units, row.down_base, row.shared_down);
        let wanted = (mid, units.x, down.parts[0].at, shared_down.parts[0].at);
        if held != wanted || units.for_matrix(shared_down).inputs != Inputs::F32 {
            return Ok(false);
        }
        let sent = self.matmul.sends(out, down.parts[0].rows);
        let site = sent.map_or(0, |sent| sent.pairs);
        let (row, gate, grid) = (ExpertsRow { out, site, ..*row }, *gate, grid(*shape));
        // Units go from block to block only.
        (self.matmul.held_units, self.matmul.units) = (None, None);
        self.counters.weight_bytes += self.touched(down, to) + shared_down.bytes() as u64;
        self.launch(kernel!("arc_matmul_experts_row"), grid, &[Arg::of(&row), Arg::of(&gate)])?;
        self.matmul.sent = sent;
        Ok(true)
    }

    /// Launches units that were held back, without their sum.
    pub(super) fn launch_units(&mut self, held: HeldUnits) -> Result<()> {
        choose_few(self, &held.gate, 1)?;
        if let Some(shared) = held.shared {
            self.launch_product_of(shared)?;
        }
        self.launch(held.kernel, held.grid, &[Arg::of(&held.experts)])
    }
}

impl ExpertsRow {
    /// Where units go, and their clamp.
    pub(super) fn leave(&mut self, mid: u64, shared: u64, limit: f32) {
        (self.mid, self.shared_units, self.limit) = (mid, shared, limit);
    }
}

#[cfg(test)]
mod tests {
    use super::{Cut, HELPS, Plan, plan, sizes};

    /// Plans and bytes of chunks of DeepSeek-V4-Flash's experts, and of small ones.
    fn plans() -> Vec<(Plan, [Vec<u32>; 3])> {
        let of = |(hidden, ffn, chosen)| {
            let (up, down) = (Cut::of(hidden), Cut::of(ffn));
            (plan(&up, &down, chosen, 132).expect("they fit"), sizes(&up, &down, chosen))
        };
        [(4096, 2048, 6), (4096, 2048, 2), (2048, 1024, 16)].map(of).into()
    }

    #[test]
    fn every_unit_and_every_output_has_a_block() {
        for (Plan { row: [chosen, units, _, helpers, each], shape, .. }, _) in plans() {
            let blocks = shape.blocks - helpers;
            assert_eq!(blocks * each, chosen * units);
            assert_eq!(blocks, 2 * units);
            assert!(helpers % 2 == 0 && HELPS * helpers <= blocks && shape.blocks <= 132);
            assert!(shape.shared <= super::MAX_SHARED);
        }
        assert!(plan(&Cut::of(1024), &Cut::of(1024), 6, 132).is_none(), "blocks without outputs");
        assert!(plan(&Cut::of(7168), &Cut::of(3072), 6, 132).is_none(), "more blocks than multiprocessors");
        assert!(plan(&Cut::of(4096), &Cut::of(2048), 5, 132).is_none(), "units that cannot be shared evenly");
    }

    /// No chunk comes where another one stands that is not known to be empty, none waits for itself, and no more bytes are on
    /// their way than there may be.
    #[test]
    fn chunks_do_not_meet() {
        for (Plan { chunks, places, shape, .. }, sizes) in plans() {
            for (chunks, sizes) in chunks.iter().zip(&sizes) {
                assert_eq!(chunks.len(), sizes.len());
                for (c, chunk) in chunks.iter().enumerate() {
                    let (freed, landed, end) = (chunk.freed as usize, chunk.landed as usize, chunk.at + sizes[c]);
                    assert!(freed <= c && landed <= c && chunk.at % 128 == 0 && places[8] + end <= shape.shared);
                    for other in freed..c {
                        let apart = chunks[other].at + sizes[other] <= chunk.at || end <= chunks[other].at;
                        assert!(apart, "{c} at {} meets {other}", chunk.at);
                    }
                    let together: u32 = sizes[landed..=c].iter().sum();
                    assert!(together <= super::WINDOW.max(sizes[c]), "{together} bytes on their way with {c}");
                }
            }
            assert_eq!(places[8] % 128, 0);
        }
    }
}
