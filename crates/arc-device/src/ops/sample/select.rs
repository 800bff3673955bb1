//! Selection without a sort: where, in the order "larger logit, then lower id", a running weight reaches a target.

use super::compact::indices_of;
use super::passes::{bins_below, finite_min};
use crate::math;

/// Bins of the first level, equal in width.
const BINS: usize = 2048;
/// Bits of a key that each later level tells apart.
const LEVEL_BITS: u32 = 8;

/// Scratch of [`find_cut`].
#[derive(Debug)]
pub(super) struct SelectScratch {
    bins: Box<[u64; BINS]>,
    /// `[vocab]`: bins of candidates, then indices of those in the cut bin.
    list: Vec<u32>,
}

impl SelectScratch {
    pub(super) fn new(n_max: usize) -> Self {
        SelectScratch { bins: Box::new([0; BINS]), list: vec![0; n_max] }
    }
}

/// The entry at which the running weight reaches the target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cut {
    /// Its logit, up to the sign of zero.
    pub x: f32,
    /// Its index: entries with this logit are kept up to here.
    pub last: usize,
    /// Whether there are entries with this logit after it.
    pub splits_ties: bool,
}

/// The weights of a list's entries: the same for equal logits.
pub(super) trait Weights {
    /// All weights, in order of index; may go on past the list's end.
    fn each(&self) -> impl Iterator<Item = u64>;
    /// The weight of entry i.
    fn at(&self, i: usize) -> u64;
}

/// Every entry weighs 1.
pub(super) struct Count;

impl Weights for Count {
    #[inline(always)]
    fn each(&self) -> impl Iterator<Item = u64> {
        std::iter::repeat(1)
    }
    #[inline(always)]
    fn at(&self, _: usize) -> u64 {
        1
    }
}

/// Entries weigh their masses.
impl Weights for &[u64] {
    #[inline(always)]
    fn each(&self) -> impl Iterator<Item = u64> {
        self.iter().copied()
    }
    #[inline(always)]
    fn at(&self, i: usize) -> u64 {
        self[i]
    }
}

/// A `u32` that compares as the logits do, -0.0 and +0.0 being equal.
#[inline(always)]
pub(super) fn order_key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    bits ^ if bits >> 31 == 1 { u32::MAX } else { 1 << 31 }
}

/// Finds the first entry of the order "larger logit, then lower index" at which the running weight is at least `target`.
///
/// `x`: `[n]`, no NaN. The weights sum to at least `target`, and `target` is at least 1. Linear in n whatever the values: bins of equal width first, then 8 bits of [`order_key`] at a time within the
/// bin of the cut.
pub(super) fn find_cut(x: &[f32], weights: impl Weights, target: u64, scratch: &mut SelectScratch) -> Cut {
    let SelectScratch { bins, list } = scratch;
    let list = &mut list[..x.len()];
    let max = math::max(x);
    // Any scale is correct; this one spreads the finite logits over all bins.
    let scale = (BINS - 1) as f32 / (max - finite_min(x));
    bins_below(x, max, if scale > 0.0 { scale } else { 0.0 }, BINS as u32 - 1, list);

    bins.fill(0);
    for (&bin, weight) in list.iter().zip(weights.each()) {
        bins[bin as usize % BINS] += weight;
    }
    let (cut_bin, mut above) = walk(&bins[..], 0, target);
    let n = indices_of(list, cut_bin as u32);
    let list = &mut list[..n];

    // The bin holds a run of the order; walk it by distance from the largest key, most significant bits first.
    let keys = || list.iter().map(|&i| order_key(x[i as usize]));
    let top = keys().max().expect("the cut bin has weight");
    let mut width = u32::BITS - (top - keys().min().expect("as above")).leading_zeros();
    let mut prefix = 0;
    let mut n = list.len();
    while width > 0 {
        let bits = width.min(LEVEL_BITS);
        width -= bits;
        let bins = &mut bins[..1 << bits];
        bins.fill(0);
        let place = |i: u32| (top - order_key(x[i as usize])) >> width;
        for &i in &list[..n] {
            bins[(place(i) & ((1 << bits) - 1)) as usize] += weights.at(i as usize);
        }
        let (cut_bin, weight_above) = walk(bins, above, target);
        above = weight_above;
        prefix = prefix << bits | cut_bin as u32;
        let mut kept = 0;
        for at in 0..n {
            let i = list[at];
            list[kept] = i;
            kept += usize::from(place(i) == prefix);
        }
        n = kept;
    }
    // What is left are all entries with the logit of the cut, in order of index.
    let ties = (target - above).div_ceil(weights.at(list[0] as usize)) as usize;
    let last = list[ties - 1] as usize;
    Cut { x: x[last], last, splits_ties: ties < n }
}

/// The first bin at which the running weight, from `above`, reaches the target, and the weight before that bin.
fn walk(bins: &[u64], mut above: u64, target: u64) -> (usize, u64) {
    for (bin, &weight) in bins.iter().enumerate() {
        if above + weight >= target {
            return (bin, above);
        }
        above += weight;
    }
    unreachable!("the weights sum to {above}, below the target {target}")
}
