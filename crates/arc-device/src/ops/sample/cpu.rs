//! One row on one core: the sampler as the CPU runs it, and the replica of the GPU's.

use super::compact::{SLACK, collect, keep_from, keep_where};
use super::passes::{LANES, TILE, first_at, mass_sums, masses, scan};
use super::process;
use super::select::{Count, Cut, SelectScratch, find_cut, order_key};
use super::{GREEDY, MASS_ONE, RowFault, RowInputs, Sampled, SamplerParams, TOP_P_ABSENT};
use super::{TokenLogprob, VOCAB_MAX, Work};
use crate::math;
use crate::rng::draw_word;
use crate::step::MAX_TOP_LOGPROBS;

/// Everything that rows need beside their inputs, made once for a thread; no row allocates.
#[derive(Debug)]
pub struct Scratch {
    /// `[vocab]`: a row's logits after processors, where it has any.
    processed: Vec<f32>,
    dry_matches: Vec<u32>,
    passes: PassScratch,
    top: [TokenLogprob; MAX_TOP_LOGPROBS],
    n_top: usize,
}

#[derive(Debug)]
struct PassScratch {
    /// `[tiles, LANES]`, of the row last scanned.
    group_max: Vec<f32>,
    /// `[tiles]`.
    tile_mass: Vec<u64>,
    /// Candidates in id order, each `[vocab + SLACK]`: what the filters have kept so far.
    ids: Vec<u32>,
    xs: Vec<f32>,
    mass: Vec<u64>,
    select: SelectScratch,
}

impl Scratch {
    /// Scratch for rows of `vocab` logits, and for DRY over at most `dry_window` tokens (0: no DRY).
    /// About `24 * vocab + 4 * dry_window` bytes. Panics unless 1 <= `vocab` <= [`VOCAB_MAX`].
    pub fn new(vocab: usize, dry_window: usize) -> Self {
        assert!((1..=VOCAB_MAX).contains(&vocab), "a vocabulary of {vocab} tokens cannot be sampled");
        let tiles = vocab.div_ceil(TILE);
        Scratch {
            processed: vec![0.0; vocab],
            dry_matches: vec![0; dry_window],
            passes: PassScratch {
                group_max: vec![0.0; tiles * LANES],
                tile_mass: vec![0; tiles],
                ids: vec![0; vocab + SLACK],
                xs: vec![0.0; vocab + SLACK],
                mass: vec![0; vocab + SLACK],
                select: SelectScratch::new(vocab.max(tiles * LANES)),
            },
            top: [TokenLogprob { id: 0, logprob: 0.0 }; MAX_TOP_LOGPROBS],
            n_top: 0,
        }
    }

    /// The alternatives of the last row, where it asked for logprobs and did not fault: larger logit first, then lower id.
    pub fn top(&self) -> &[TokenLogprob] {
        &self.top[..self.n_top]
    }
}

/// Draws one token. See the [module](super) for what is computed, in which order.
///
/// `logits`: `[vocab]` f32, as long as `scratch` was made for. `draw_index`: the token's position in the output, from 0.
pub fn sample_row(
    logits: &[f32],
    params: &SamplerParams,
    row: &RowInputs<'_>,
    draw_index: u32,
    scratch: &mut Scratch,
) -> Sampled {
    let mut work = Work::default();
    scratch.n_top = 0;
    match try_sample(logits, params, row, draw_index, scratch, &mut work) {
        Ok((token, logprob)) => Sampled { token: Ok(token as u32), logprob, work },
        Err(fault) => {
            scratch.n_top = 0;
            Sampled { token: Err(fault), logprob: f32::NAN, work }
        }
    }
}

/// Scores a token that is already known: the natural log of the model's probability of `target`, and in
/// [`Scratch::top`] the `n_top` (at most [`MAX_TOP_LOGPROBS`]) most likely tokens. Bits as [`sample_row`] would report.
///
/// `logits`: `[vocab]` f32. Errors: non-finite logits, all masked, `target` outside the vocabulary.
pub fn logprobs_row(logits: &[f32], target: u32, n_top: u32, scratch: &mut Scratch) -> Result<f32, RowFault> {
    scratch.n_top = 0;
    if target as usize >= logits.len() {
        return Err(RowFault::TokenOutOfRange);
    }
    let mut work = Work::default();
    let max = check(logits, &mut scratch.passes, &mut work)?;
    let own = OwnDistribution::of(logits, max, n_top, scratch, &mut work);
    Ok(own.logprob(logits[target as usize]))
}

fn try_sample(
    logits: &[f32],
    params: &SamplerParams,
    row: &RowInputs<'_>,
    draw_index: u32,
    scratch: &mut Scratch,
    work: &mut Work,
) -> Result<(usize, f32), RowFault> {
    assert_eq!(logits.len(), scratch.processed.len(), "logits of a row, and the vocabulary of the scratch");
    let raw_max = check(logits, &mut scratch.passes, work)?;
    let own = row.logprobs.map(|n_top| OwnDistribution::of(logits, raw_max, n_top, scratch, work));

    let Scratch { processed, dry_matches, passes, .. } = scratch;
    let t = params.temperature;
    let row = if process::any(params, row, draw_index) {
        processed.copy_from_slice(logits);
        work.copies += 1;
        process::apply(processed, params, row, draw_index, dry_matches, &mut passes.ids)?;
        let max = check(processed, passes, work)?;
        Weighed { x: processed, max, t, total: None }
    } else {
        let total = own.as_ref().filter(|_| t == 1.0).map(|own| own.total);
        Weighed { x: logits, max: raw_max, t, total }
    };

    let token = if params.flags & GREEDY != 0 {
        first_at(row.x, &passes.group_max, row.max)
    } else {
        draw(&row, params, draw_word(params.seed, draw_index, params.choice), passes, work)
    };
    Ok((token, own.map_or(f32::NAN, |own| own.logprob(logits[token]))))
}

/// The first pass: the maximum, or why nothing can be drawn.
fn check(x: &[f32], s: &mut PassScratch, work: &mut Work) -> Result<f32, RowFault> {
    work.passes += 1;
    let found = scan(x, &mut s.group_max);
    match (found.non_finite, found.max == f32::NEG_INFINITY) {
        (true, _) => Err(RowFault::NonFiniteLogits),
        (false, true) => Err(RowFault::NothingToSample),
        (false, false) => Ok(found.max),
    }
}

/// The model's own distribution: no processors, temperature 1.
struct OwnDistribution {
    max: f32,
    /// Mass of all tokens; its sums by tile stay in the scratch.
    total: u64,
    ln_total: f32,
}

impl OwnDistribution {
    /// `logits` must be the row last scanned. Leaves the `n_top` most likely tokens in the scratch.
    fn of(logits: &[f32], max: f32, n_top: u32, scratch: &mut Scratch, work: &mut Work) -> Self {
        let s = &mut scratch.passes;
        work.passes += 1;
        let total = mass_sums(logits, max, 1.0, &mut s.tile_mass);
        let own = OwnDistribution { max, total, ln_total: math::ln(total as f32 * (1.0 / MASS_ONE as f32)) };
        if n_top > 0 {
            let k = (n_top as usize).min(MAX_TOP_LOGPROBS);
            let n = first_k(logits, k, f32::NEG_INFINITY, s, work);
            for (top, (&id, &x)) in scratch.top.iter_mut().zip(s.ids[..n].iter().zip(&s.xs)) {
                *top = TokenLogprob { id, logprob: own.logprob(x) };
            }
            // Logprobs may round to equal where logits differ, so the logits decide.
            let by_order = |t: &TokenLogprob| (std::cmp::Reverse(order_key(logits[t.id as usize])), t.id);
            scratch.top[..n].sort_unstable_by_key(by_order);
            work.sorts += 1;
            scratch.n_top = n;
        }
        own
    }

    fn logprob(&self, x: f32) -> f32 {
        (x - self.max) - self.ln_total
    }
}

/// A row as the draw sees it: logits after processors, last scanned, with what turns them into mass.
struct Weighed<'a> {
    x: &'a [f32],
    max: f32,
    t: f32,
    /// Mass of all tokens, where the sums by tile are in the scratch already.
    total: Option<u64>,
}

impl Weighed<'_> {
    /// Mass of all tokens; leaves its sums by tile in the scratch.
    fn total(&self, s: &mut PassScratch, work: &mut Work) -> u64 {
        self.total.unwrap_or_else(|| {
            work.passes += 1;
            mass_sums(self.x, self.max, self.t, &mut s.tile_mass)
        })
    }

    /// Lists every id that can have at least this mass (and maybe some with a little less), with masses, in id order.
    fn list(&self, least: u64, s: &mut PassScratch, work: &mut Work) -> usize {
        work.passes += 1;
        let floor = lowest_with_mass(self.max, self.t, least);
        let n = collect(self.x, &s.group_max, floor, &mut s.ids, &mut s.xs);
        masses(&s.xs[..n], self.max, self.t, &mut s.mass[..n]);
        n
    }
}

/// Steps 3 to 5: mass, filters, draw.
fn draw(row: &Weighed<'_>, params: &SamplerParams, word: u64, s: &mut PassScratch, work: &mut Work) -> usize {
    let &Weighed { x, max, t, .. } = row;
    // How many candidates there are in `ids` and `mass` once a filter has listed them, and their mass.
    let mut kept: Option<(usize, u64)> = None;

    if params.top_k > 0 && (params.top_k as usize) < x.len() {
        // Below this logit mass is 0: such tokens cannot be drawn, and none of them comes before one that can.
        let n = first_k(x, params.top_k as usize, lowest_with_mass(max, t, 1), s, work);
        kept = Some((n, masses(&s.xs[..n], max, t, &mut s.mass[..n])));
    }
    if params.top_p < TOP_P_ABSENT {
        kept = Some(shortest_prefix(row, params.top_p, kept, s, work));
    }
    if params.min_p > 0 {
        work.selects += 1;
        let n = kept.map_or_else(|| row.list(params.min_p, s, work), |(n, _)| n);
        kept = Some(retain(&mut s.ids[..n], &mut s.mass[..n], params.min_p));
    }

    match kept {
        Some((n, total)) => {
            let i = first_past(&s.mass[..n], mul_high(word, total)).0;
            s.ids[i] as usize
        }
        None => {
            let total = row.total(s, work);
            let (tile, rest) = first_past(&s.tile_mass, mul_high(word, total));
            let start = tile * TILE;
            let tile = &x[start..x.len().min(start + TILE)];
            let mass = &mut s.mass[..tile.len()];
            masses(tile, max, t, mass);
            start + first_past(mass, rest).0
        }
    }
}

/// `top_p`: leaves the shortest prefix of the order that has the wanted share of mass, in id order.
fn shortest_prefix(
    row: &Weighed<'_>,
    top_p: u64,
    kept: Option<(usize, u64)>,
    s: &mut PassScratch,
    work: &mut Work,
) -> (usize, u64) {
    work.selects += 1;
    let share = |left: u64| {
        let product = u128::from(top_p) * u128::from(left);
        (product.div_ceil(u128::from(TOP_P_ABSENT)) as u64).max(1)
    };
    let (n, target) = match kept {
        Some((n, left)) => (n, share(left)),
        None => {
            let left = row.total(s, work);
            let target = share(left);
            // All tokens with less mass than this have at most `left - target` together: the prefix ends before them.
            let least = ((left - target) / row.x.len() as u64).max(1);
            (row.list(least, s, work), target)
        }
    };
    let cut = find_cut(&s.xs[..n], &s.mass[..n], target, &mut s.select);
    let n = keep_to(cut, &mut s.ids[..n], &mut s.xs[..n]);
    (n, masses(&s.xs[..n], row.max, row.t, &mut s.mass[..n]))
}

/// Lists the first k ids of the order, in id order, but none below `floor`; returns how many.
fn first_k(x: &[f32], k: usize, floor: f32, s: &mut PassScratch, work: &mut Work) -> usize {
    work.selects += 1;
    work.passes += 1;
    let PassScratch { group_max, ids, xs, select, .. } = s;
    // The k-th largest maximum of groups is a lower bound of the k-th largest logit.
    let bound = if k <= group_max.len() { find_cut(group_max, Count, k as u64, select).x } else { floor };
    let n = collect(x, group_max, if bound > floor { bound } else { floor }, ids, xs);
    if n <= k {
        return n;
    }
    let cut = find_cut(&xs[..n], Count, k as u64, select);
    keep_to(cut, &mut ids[..n], &mut xs[..n])
}

/// Keeps the candidates that come no later in the order than the cut; returns how many.
fn keep_to(cut: Cut, ids: &mut [u32], xs: &mut [f32]) -> usize {
    if cut.splits_ties {
        keep_where(ids, xs, |i, x| x > cut.x || (x == cut.x && i <= cut.last))
    } else {
        keep_from(ids, xs, cut.x)
    }
}

/// A logit below which mass is certainly less than `mass` (1 to 2^40).
///
/// A bound, not a definition: nothing depends on how close it is. The margins, 1e-5 absolute and relative, cover the
/// rounding of the difference, of the quotient and of `exp` (together under 1e-6) many times.
fn lowest_with_mass(max: f32, t: f32, mass: u64) -> f32 {
    let y = (mass as f64 / MASS_ONE as f64).ln();
    let x = f64::from(max) + f64::from(t) * (y * (1.0 + 1e-5) - 1e-5);
    (x as f32).next_down()
}

/// Keeps the candidates with at least this mass, in order; returns how many, and their mass.
fn retain(ids: &mut [u32], mass: &mut [u64], least: u64) -> (usize, u64) {
    let (mut n, mut total) = (0, 0);
    for i in 0..ids.len() {
        let (id, m) = (ids[i], mass[i]);
        (ids[n], mass[n]) = (id, m);
        n += usize::from(m >= least);
        total += if m >= least { m } else { 0 };
    }
    (n, total)
}

/// The first index at which the running sum exceeds `at`, and what of `at` is left before it.
fn first_past(mass: &[u64], mut at: u64) -> (usize, u64) {
    for (i, &m) in mass.iter().enumerate() {
        if at < m {
            return (i, at);
        }
        at -= m;
    }
    unreachable!("the draw lies {at} past the total mass")
}

/// The high half of the product: a number below `total` where `word` is uniform.
fn mul_high(word: u64, total: u64) -> u64 {
    ((u128::from(word) * u128::from(total)) >> 64) as u64
}
