//! Two products of one row in one launch, the second of what the first makes: the Rust side of follow.cu.
//!
//! The first is held back when its stage comes, and the second takes it along. Whatever else is launched goes behind the
//! first.

use super::Workspace;
use super::matrix::CudaMatrix;
use super::plan::{Cut, MAX_SHARED, Prepare, Product};
use crate::Norm;
use crate::cuda::{Arg, Cuda, CudaBuf, Grid, Kernel, kernel};
use crate::error::Result;
use crate::format::Format;
use crate::ops::latent::ROPE_DIM;
use crate::ops::latent::cuda::Mutant;
use crate::ops::quant::INDEX_DIM;

/// Threads of a block: warps that multiply, and one that brings tiles.
const THREADS: u32 = 32 * 9;
/// Tiles that a block has room for.
const PLACES: u32 = 22;
/// Bytes in front of the inputs: barriers and tiles.
const INPUTS_AT: u32 = 512 + PLACES * 8704;
/// Columns behind a norm.
const NORMED: usize = 1024;
/// Rows of a group.
const GROUP: usize = 8;
/// Groups of a head of an index query.
const HEAD_GROUPS: u32 = (INDEX_DIM / GROUP) as u32;
/// Blocks of a launch without a norm, at most.
const MOST_BLOCKS: u32 = 160;
/// Groups whose outputs are sent as one block of int8.
const UNIT: u32 = 4;
/// A block that begins late has fewer tiles than the others, by this part of a block's share: of 0, 16 and 28 tiles of 62 on an
/// H200, 16 were the best.
const LATE_FEWER: u32 = 4;
/// Groups of a block, at most: of the first product, and of the second.
const MOST_FIRST: u32 = 32;
const MOST_SECOND: u32 = 64;
/// Outputs of products in front of a norm and behind it that the exchange has room for; the former: the kernel's `kSentFirst`.
const FIRST_PAIRS: usize = 8192;
const SECOND_PAIRS: usize = 1 << 16;
/// Where the exchange has what launches with a norm share, and its bytes: numbers and pairs. In front of it is the number of
/// launches without.
const NORMED_AT: u64 = 16;
const NORMED_BYTES: u64 = 16 + 8 * (FIRST_PAIRS + SECOND_PAIRS) as u64;
/// Outputs that the exchange has room for where a site takes them as they are sent, and where these are: the number of the launch
/// that sends them stands behind that of launches without a norm.
const SITE_PAIRS: usize = 4096;
const SITE_AT: u64 = NORMED_AT + NORMED_BYTES;
const NUMBER_AT: u64 = 4;
/// Where blocks of launches without a norm send what is their own.
const SENT_AT: u64 = SITE_AT + 8 * SITE_PAIRS as u64;
/// What a block leaves of a multiprocessor's shared memory to the small blocks of the kernels after it.
const LEFT: u32 = 3200;
const LEFT_TO_CHOICE: u32 = 19 << 10;

/// The query of an indexer, which stands behind the same norm as the second product.
#[derive(Clone, Copy)]
pub(crate) struct Query<'a> {
    /// Its weights, whole heads of [`INDEX_DIM`].
    pub w: &'a CudaMatrix,
    /// Address of `[heads, INDEX_DIM]` f32: what storing leaves of it.
    pub out: u64,
    /// Address where the heads are sent, as they are stored.
    pub packed: u64,
    /// Address of the angles of positions.
    pub rope: u64,
    /// Where the weights of its heads are sent, the last outputs of the matrix beside the first, for a kernel that begins
    /// with this one and takes heads as they are sent; and the address of the number before that of the choice.
    pub weights: Option<(u64, u64)>,
}

/// A product that was asked for and is not launched yet.
#[derive(Clone)]
pub(crate) struct Held {
    pub(super) kernel: Kernel,
    pub(super) grid: Grid,
    pub(super) product: Product,
    /// The product that shares its launch, and how many blocks come before those of that one.
    pub(super) beside: Option<(Product, u32)>,
}

/// What a launch with a norm sends to the next kernels: outputs, each a pair of a value and the number of the launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Due {
    /// Blocks that read the number, and arrive then.
    pub blocks: u32,
    /// Address of the number of the launch before, arrivals, departures, and this launch's for the attention.
    pub counts: u64,
    /// Address of the outputs of the first matrix, and behind them of the one beside it.
    pub first: u64,
    /// Address of the outputs of the second product.
    pub second: u64,
}

/// What the last launch sends to a site right behind it, which does not wait for its end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    /// Address of the outputs as others find them.
    pub out: u64,
    /// Address of pairs of an output and the number of the launch.
    pub pairs: u64,
    /// Address of that number.
    pub number: u64,
}

/// `Run` of follow.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    base: u64,
    out: u64,
    groups: u32,
    tiles: u32,
    each: u32,
    others: u32,
}
const _: () = assert!(size_of::<Run>() == 32);

/// `Follow` of follow.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Follow {
    first: [Run; 2],
    index: Run,
    second: Run,
    q: u64,
    d: u64,
    floats: u64,
    norm: u64,
    counts: u64,
    sent: u64,
    infos: u64,
    rope: u64,
    heads: u64,
    weights: u64,
    number: u64,
    site: u64,
    taken: u64,
    taken_number: u64,
    eps: f32,
    split: u32,
    row_groups: u32,
    cols: u32,
    first_at: u32,
    index_at: u32,
    second_at: u32,
    angles_at: u32,
}
const _: () = assert!(size_of::<Follow>() == 272);

/// `Shares` of follow.cu: where the groups of every block begin in either product, and where they end.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Shares {
    starts: [[u16; MOST_BLOCKS as usize + 1]; 2],
}
const _: () = assert!(size_of::<Shares>() == 644);

impl Shares {
    /// Of so many blocks the last `late` ones begin when the kernel before leaves their multiprocessors, while the others have their
    /// rings full by then. All wait for what late ones make of the first product, so these have a unit of it; and they have fewer
    /// tiles in all, so that they end with the others.
    fn new(first: &Run, second: &Run, blocks: u32, late: u32) -> Shares {
        let (units, early) = (first.groups / UNIT - late, blocks - late);
        let (unit_tiles, tiles) = (UNIT * first.tiles, first.groups * first.tiles + second.groups * second.tiles);
        let fewer = tiles / blocks / LATE_FEWER;
        let mine = (tiles + late * fewer) * early / blocks;
        let mut starts = [[0; MOST_BLOCKS as usize + 1]; 2];
        let mut then = 0;
        for block in 0..=blocks {
            let unit = if block <= early { units * block / early } else { units + block - early };
            then = if block <= early {
                let due = (mine * block / early).saturating_sub(unit * unit_tiles);
                ((due + second.tiles / 2) / second.tiles).clamp(then, second.groups)
            } else {
                // The rest, in equal shares of the blocks that are left.
                then + (second.groups - then).div_ceil(blocks - block + 1)
            };
            starts[0][block as usize] = (UNIT * unit) as u16;
            starts[1][block as usize] = then as u16;
        }
        Shares { starts }
    }

    /// Groups that a block has of a product, at most.
    fn most(&self, product: usize, blocks: u32) -> u32 {
        let starts = &self.starts[product][..=blocks as usize];
        starts.windows(2).map(|pair| u32::from(pair[1] - pair[0])).max().unwrap_or(0)
    }
}

/// A matrix whose groups stand one behind the other, all of one format, and so do its outputs.
fn run(w: &CudaMatrix, format: Format) -> Option<Run> {
    let (mut at, mut groups) = (w.parts.first()?.at, 0);
    let base = at;
    for part in &w.parts {
        if part.format != format || part.at != at || part.rows % GROUP != 0 {
            return None;
        }
        let n = w.cut.groups(part.rows);
        at += (n * w.cut.group_bytes(format)) as u64;
        groups += n as u32;
    }
    let whole = w.cut.log_c == 2 && w.cut.group_rows() == GROUP;
    whole.then(|| Run { base, groups, tiles: w.cut.tiles() as u32, ..Run::default() })
}

/// Bytes of the inputs of rows of so many columns: int8 with scales, or f32.
fn code_bytes(cut: &Cut) -> u32 {
    cut.slices * (272 + 32)
}

/// How blocks share the groups of two matrices, the second beside the first, and those of a third behind both: so that
/// the block with the most bytes has few. Blocks that have the first have heads of an index query too. Returns how many these
/// are. `bytes`: of groups of the three and of the query.
fn share(first: &mut [Run; 2], query: &mut Run, second: &mut Run, bytes: [usize; 4], blocks: u32) -> Option<u32> {
    let mut best: Option<(usize, [u32; 6])> = None;
    for split in 1..=blocks {
        let others = blocks - split;
        if (others == 0) != (first[1].groups == 0) {
            continue;
        }
        let each = [first[0].groups.div_ceil(split), if others == 0 { 0 } else { first[1].groups.div_ceil(others) }];
        // What the second waits for is in the ring when the first's inputs come.
        if each[0] * first[0].tiles > PLACES {
            continue;
        }
        let heads = (query.groups / HEAD_GROUPS).div_ceil(split) * HEAD_GROUPS;
        let mine = each[0] as usize * bytes[0] + heads as usize * bytes[3];
        let theirs = each[1] as usize * bytes[1];
        for more in 0..=MOST_SECOND {
            let load = mine + more as usize * bytes[2];
            let Some(room) = load.checked_sub(theirs) else { continue };
            let rest = ((room / bytes[2]) as u32).min(MOST_SECOND);
            if split * more + others * rest >= second.groups {
                let fits = each[0].max(each[1]) <= MOST_FIRST && heads <= MOST_SECOND;
                if fits && best.is_none_or(|(least, _)| load < least) {
                    best = Some((load, [split, each[0], each[1], heads, more, rest]));
                }
                break;
            }
        }
    }
    let (_, [split, one, two, heads, more, rest]) = best?;
    (first[0].each, first[1].each, second.each, second.others) = (one, two, more, rest);
    query.each = heads;
    Some(split)
}

impl Cuda {
    /// Runs `launch`, whose product over one row may share its launch with the next.
    pub(crate) fn hold(&mut self, launch: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.matmul.hold = true;
        let done = launch(self);
        self.matmul.hold = false;
        done
    }

    /// Launches a product over one row, or holds it back.
    pub(super) fn launch_or_hold(&mut self, held: Held) -> Result<()> {
        self.launch_held()?;
        self.matmul.held = Some(held);
        if self.matmul.hold { Ok(()) } else { self.launch_held() }
    }

    /// Launches what was held back.
    pub(crate) fn launch_held(&mut self) -> Result<()> {
        if let Some(held) = self.matmul.held_units.take() {
            return self.launch_units(held);
        }
        self.matmul.held.take().map_or(Ok(()), |held| self.launch_product_of(held))
    }

    pub(super) fn launch_product_of(&mut self, held: Held) -> Result<()> {
        let Held { kernel, grid, product, beside } = held;
        match &beside {
            Some((other, split)) => self.launch(kernel, grid, &[Arg::of(&product), Arg::of(other), Arg::from(*split)]),
            None => self.launch(kernel, grid, &[Arg::of(&product), Arg::of(&Prepare::default())]),
        }
    }

    /// Drops what was held back by a step that failed, and what it would have sent.
    pub(crate) fn forget_held(&mut self) {
        (self.matmul.held, self.matmul.held_units, self.matmul.due, self.matmul.sent) = (None, None, None, None);
    }

    /// `out = w * norm(x)` of one row, where `x` is the first outputs of the product held back, which was with `low` and,
    /// beside it, with `pool`: in one launch with it, and with `query` where there is one. It sends all outputs to its
    /// successors ([`Due`]), which begin after everything before it. `false`: nothing was done.
    pub(crate) fn follow_normed(
        &mut self,
        (low, pool): (&CudaMatrix, Option<&CudaMatrix>),
        x: &CudaBuf<f32>,
        norm: Norm<'_, Cuda>,
        w: &CudaMatrix,
        out: &CudaBuf<f32>,
        query: Option<Query<'_>>,
    ) -> Result<bool> {
        let Some(held) = self.matmul.held.clone() else { return Ok(false) };
        let due_rows = low.parts.first().map_or(0, |part| part.rows);
        let here = held.product.out == x.ptr() && held.product.segs[0].base == low.parts[0].at;
        let runs = run(low, Format::Q8_0).zip(run(w, Format::Q8_0));
        let room = low.rows + pool.map_or(0, |pool| pool.rows) <= FIRST_PAIRS && w.rows <= SECOND_PAIRS;
        let Some((mut first, mut second)) = runs.filter(|_| here && w.cols == NORMED && due_rows == NORMED && room)
        else {
            return Ok(false);
        };
        let beside = match (pool, &held.beside) {
            (None, None) => Run::default(),
            (Some(pool), Some((product, _))) => match run(pool, Format::F16) {
                Some(run) => Run { out: product.out, ..run },
                None => return Ok(false),
            },
            _ => return Ok(false),
        };
        let mut index = match &query {
            None => Run::default(),
            Some(query) => match run(query.w, Format::F16) {
                Some(run) if query.w.cols == NORMED && query.w.rows % INDEX_DIM == 0 => Run { out: query.out, ..run },
                _ => return Ok(false),
            },
        };
        (first.out, second.out) = (held.product.out, out.ptr());
        let mut first = [first, beside];
        let bytes = [
            low.cut.group_bytes(Format::Q8_0),
            pool.map_or(0, |pool| pool.cut.group_bytes(Format::F16)),
            w.cut.group_bytes(Format::Q8_0),
            w.cut.group_bytes(Format::F16),
        ];
        let blocks = self.multiprocessors();
        let Some(split) = share(&mut first, &mut index, &mut second, bytes, blocks) else { return Ok(false) };
        // The second's inputs may come while sums of the first are taken: int8, f32 as they were sent, and for a query f32
        // behind the norm.
        let inputs_end = code_bytes(&w.cut) + 4 * NORMED as u32 + if query.is_some() { w.cut.slices * 1040 } else { 0 };
        let first_at = code_bytes(&low.cut).max(pool.map_or(0, |pool| pool.cut.slices * 1040)).max(inputs_end);
        let partials = |run: &Run, n: u32| 128 * run.tiles * n;
        let first_end = first_at + first.iter().map(|run| partials(run, run.each)).max().unwrap_or(0);
        // Some sum up the query's while others are at the second's.
        let second_at = inputs_end + partials(&index, index.each);
        let second_end = second_at + partials(&second, second.each.max(second.others));
        let angles_at = first_end.max(second_end);
        let args = Follow {
            q: held.product.q,
            d: held.product.d,
            floats: held.beside.as_ref().map_or(0, |(product, _)| product.floats),
            norm: norm.weight.ptr(),
            counts: self.matmul.exchange(NORMED_AT),
            sent: self.matmul.exchange(NORMED_AT) + 16,
            infos: self.view().infos(),
            rope: query.map_or(0, |query| query.rope),
            heads: query.map_or(0, |query| query.packed),
            weights: query.and_then(|query| query.weights).map_or(0, |(weights, _)| weights),
            number: query.and_then(|query| query.weights).map_or(0, |(_, number)| number),
            site: 0,
            taken: 0,
            taken_number: 0,
            eps: norm.eps,
            split,
            row_groups: first[0].groups,
            cols: low.cols as u32,
            first_at,
            index_at: inputs_end,
            second_at,
            angles_at,
            first,
            index,
            second,
        };
        let shared = INPUTS_AT + angles_at + 4 * ROPE_DIM as u32;
        if shared > MAX_SHARED - if query.is_some() { LEFT_TO_CHOICE } else { LEFT } {
            return Ok(false);
        }
        self.matmul.due =
            Some(Due { blocks, counts: args.counts, first: args.sent, second: args.sent + 8 * FIRST_PAIRS as u64 });
        self.matmul.held = None;
        self.counters.weight_bytes += (w.bytes() + query.map_or(0, |query| query.w.bytes())) as u64;
        let kernel = match query {
            None => kernel!("arc_matmul_follow_normed"),
            Some(_) => kernel!("arc_matmul_follow_indexed"),
        };
        self.launch(kernel, Grid::new(blocks, THREADS).shared(shared), &[Arg::of(&args)])?;
        Ok(true)
    }

    /// `out = w * x` of one row, where `x` is the outputs of the product held back, which was by parts with `from`: in one
    /// launch with it. `heads`: where its inputs are sent, and the address of their number; `None`: they are there when everything
    /// before has ended. `attending`: multiprocessors that the kernel before has to its end. `false`: nothing was done.
    pub(crate) fn follow(
        &mut self,
        from: &CudaMatrix,
        x: &CudaBuf<f32>,
        w: &CudaMatrix,
        out: &CudaBuf<f32>,
        heads: Option<(u64, u64)>,
        attending: u32,
    ) -> Result<bool> {
        let Some(held) = self.matmul.held.clone() else { return Ok(false) };
        let product = &held.product;
        let here = product.out == x.ptr()
            && product.segs[0].base == from.parts[0].at
            && product.parts as usize == from.parts.len()
            && product.out_q != 0
            && from.rows == w.cols;
        let runs = run(from, Format::Q8_0).zip(run(w, Format::Q8_0)).filter(|_| here);
        let Some((mut first, mut second)) = runs else { return Ok(false) };
        let (processors, row_groups) = (self.multiprocessors(), product.groups);
        let blocks = processors.min(first.groups / UNIT).min(MOST_BLOCKS);
        if first.groups % UNIT != 0 || blocks == 0 || first.groups.max(second.groups) > u16::MAX.into() {
            return Ok(false);
        }
        // Blocks are placed in order: the last ones wait for multiprocessors.
        let late = blocks.saturating_sub(processors.saturating_sub(attending));
        let late = if late < blocks { late } else { 0 };
        let mut shares = Shares::new(&first, &second, blocks, late);
        if self.latent.mutant == Mutant::GroupLeft {
            shares.starts[1][blocks as usize] -= 1;
        }
        let most = [0, 1].map(|product| shares.most(product, blocks));
        (first.out, second.out) = (product.out, out.ptr());
        let second_at = code_bytes(&w.cut);
        // Two rows of inputs.
        let first_at = (2 * code_bytes(&from.cut)).max(second_at);
        let first_end = first_at + 128 * first.tiles * most[0];
        let second_end = second_at + 128 * second.tiles * most[1];
        let shared = INPUTS_AT + first_end.max(second_end);
        if shared > MAX_SHARED || most[0] > row_groups {
            return Ok(false);
        }
        let sent = self.matmul.sends(out.ptr(), w.rows);
        let args = Follow {
            first: [first, Run::default()],
            index: Run::default(),
            second,
            q: product.q,
            d: product.d,
            floats: 0,
            norm: 0,
            counts: self.matmul.exchange(0),
            sent: self.matmul.exchange(SENT_AT),
            infos: 0,
            rope: 0,
            heads: 0,
            weights: 0,
            number: 0,
            site: sent.map_or(0, |sent| sent.pairs),
            taken: heads.map_or(0, |(at, _)| at),
            taken_number: heads.map_or(0, |(_, number)| number),
            eps: 0.0,
            split: blocks,
            row_groups,
            cols: from.cols as u32,
            first_at,
            index_at: 0,
            second_at,
            angles_at: 0,
        };
        self.matmul.late_blocks = late;
        // Its int8 outputs go from block to block only.
        (self.matmul.held, self.matmul.ready) = (None, None);
        self.counters.weight_bytes += w.bytes() as u64;
        let grid = Grid::new(blocks, THREADS).shared(shared);
        self.launch(kernel!("arc_matmul_follow"), grid, &[Arg::of(&args), Arg::of(&shares)])?;
        self.matmul.sent = sent;
        Ok(true)
    }
}

impl Workspace {
    /// Where blocks meet.
    fn exchange(&self, at: u64) -> u64 {
        self.exchange.as_ref().expect("`finish` made it").ptr() + at
    }

    /// How one row of so many outputs is sent to a site. `None` where they are not as many as a cluster takes.
    pub(super) fn sends(&self, out: u64, outputs: usize) -> Option<Sent> {
        let sent = Sent { out, pairs: self.exchange(SITE_AT), number: self.exchange(NUMBER_AT) };
        (outputs == SITE_PAIRS).then_some(sent)
    }

    /// Words of the exchange, for products of so many columns as blocks of int8.
    pub(super) fn exchange_words(cols: usize) -> usize {
        SENT_AT as usize / 4 + cols.div_ceil(32) * 12
    }

    /// Where launches without a norm are counted, and so many blocks of int8 are sent. `None` where there is no room for them.
    /// Numbers stand at the same places whoever sends.
    pub(super) fn exchange_units(&self, blocks: usize) -> Option<[u64; 2]> {
        let sent = self.exchange(SENT_AT);
        let end = self.exchange(4 * self.exchange.as_ref()?.len() as u64);
        (sent + 48 * blocks as u64 <= end).then_some([self.exchange(0), sent])
    }
}

#[cfg(test)]
mod tests {
    use super::{HEAD_GROUPS, MOST_FIRST, MOST_SECOND, PLACES, Run, Shares, UNIT, share};

    /// Every group has a block, no block has more than the kernel's parts have room for, and nobody has much more than his
    /// share: DeepSeek-V4-Flash's layers without a compressor, with one, with an indexer beside, with its query, and small
    /// ones.
    #[test]
    fn blocks_take_every_group() {
        for (low, pool, heads, queries) in [
            (192, 0, 0, 4096),
            (192, 128, 0, 4096),
            (192, 328, 0, 4096),
            (192, 328, 64, 4096),
            (136, 2, 0, 256),
            (136, 18, 0, 256),
            (136, 18, 64, 256),
        ] {
            let tiles = |tiles, groups| Run { groups, tiles, ..Run::default() };
            let (mut first, mut second) = ([tiles(4, low), tiles(4, pool)], tiles(1, queries));
            let mut index = tiles(1, heads * HEAD_GROUPS);
            let bytes = [4 * 8704, 4 * 16384, 8704, 16384];
            let split = share(&mut first, &mut index, &mut second, bytes, 132).expect("they fit");
            let others = 132 - split;
            assert!(split * index.each >= index.groups && index.each % HEAD_GROUPS == 0, "{heads} heads");
            assert!(index.each <= MOST_SECOND);
            assert!(split * first[0].each >= low && others * first[1].each >= pool, "{low} {pool}");
            assert!(split * second.each + others * second.others >= queries, "{low} {pool} {queries}");
            assert!(first[0].each.max(first[1].each) <= MOST_FIRST && first[0].each * first[0].tiles <= PLACES);
            assert!(second.each.max(second.others) <= MOST_SECOND);
            let of =
                |groups: [u32; 4]| -> usize { groups.iter().zip(bytes).map(|(n, bytes)| *n as usize * bytes).sum() };
            let (all, load) = (of([low, pool, queries, index.groups]), of([first[0].each, 0, second.each, index.each]));
            let more = bytes[0] + bytes[1] + bytes[2] + index.each as usize * bytes[3];
            assert!(load <= all.div_ceil(132) + more, "{load} of {all}");
        }
    }

    /// Without a norm every group has a block and every block a unit of the first product; late ones have no more of it, and all
    /// others differ by little: DeepSeek-V4-Flash's output projections behind attentions of several sizes, and small ones.
    #[test]
    fn late_blocks_have_less() {
        let run = |groups, tiles| Run { groups, tiles, ..Run::default() };
        let v4 = [0, 4, 8, 16, 32, 131].map(|late| (run(1024, 4), run(512, 8), 132, late));
        let small = [(run(16, 1), run(32, 1), 4, 3), (run(4, 2), run(1, 1), 1, 0), (run(528, 1), run(3, 1), 132, 16)];
        for (first, second, blocks, late) in v4.into_iter().chain(small) {
            let shares = Shares::new(&first, &second, blocks, late);
            let name = format!("{} and {} groups, {late} of {blocks} late", first.groups, second.groups);
            let counts = [0, 1].map(|product| {
                let starts = &shares.starts[product][..=blocks as usize];
                assert!(starts.is_sorted() && starts[0] == 0, "{name}");
                assert_eq!(u32::from(starts[blocks as usize]), [first.groups, second.groups][product], "{name}");
                starts.windows(2).map(|pair| u32::from(pair[1] - pair[0])).collect::<Vec<_>>()
            });
            let early = (blocks - late) as usize;
            assert!(counts[0].iter().all(|&n| n != 0 && n % UNIT == 0), "{name}: {:?}", counts[0]);
            assert!(counts[0][early..].iter().all(|&n| n == UNIT), "{name}: {:?}", counts[0]);
            if first.groups != 1024 || late > 32 {
                continue;
            }
            let tiles: Vec<u32> =
                counts[0].iter().zip(&counts[1]).map(|(a, b)| a * first.tiles + b * second.tiles).collect();
            assert!(tiles[..early].iter().all(|n| (56..=72).contains(n)), "{name}: {tiles:?}");
            assert!(tiles[early..].iter().all(|n| (40..=56).contains(n)), "{name}: {tiles:?}");
        }
    }

    /// More of the first product than a ring has places is not worth one launch.
    #[test]
    fn what_does_not_fit_is_left_alone() {
        let run = |tiles, groups| Run { groups, tiles, ..Run::default() };
        let (mut first, mut second) = ([run(4, 1000), Run::default()], run(1, 4096));
        assert_eq!(share(&mut first, &mut Run::default(), &mut second, [4 * 8704, 0, 8704, 0], 132), None);
    }
}
