//! How many rows a step may have: any number, or one of those that were recorded.

use arc_device::step::{CtxClass, Limits, Part, StepKey};

/// The row counts that a device runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Buckets {
    /// Any number: the device runs what it is given.
    Exact,
    /// Ascending row counts; a step is filled up to the next with padding rows.
    List(Vec<u32>),
}

/// Row counts that are recorded: dense where decoding lives, then so that at most a third of a chunk is padding.
const RECORDED: [u32; 22] =
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048];
/// Up to so many rows, steps in which one sequence asks for drafts are recorded apart from those in which several do. More
/// kinds would be recorded for each number of drafts too, to save rows of one layer.
const ONE_DRAFTS: u32 = 8;

impl Buckets {
    /// The recorded row counts up to `max_rows`, which is always one of them.
    pub fn recorded(max_rows: u32) -> Self {
        Buckets::List(RECORDED.into_iter().filter(|&rows| rows < max_rows).chain([max_rows]).collect())
    }

    /// The smallest row count that holds `n`.
    pub fn pad(&self, n: u32) -> u32 {
        match self {
            Buckets::Exact => n,
            Buckets::List(list) => list.iter().copied().find(|&rows| rows >= n).unwrap_or(n),
        }
    }

    /// How many head rows a step of `rows` rows has room for, where `heads` of them go through the output head: no more
    /// kinds of steps are recorded than with and without heads.
    pub fn heads(&self, rows: u32, heads: u32, max_heads: u32) -> u32 {
        match self {
            _ if heads == 0 => 0,
            Buckets::Exact => heads,
            Buckets::List(_) => rows.min(max_heads),
        }
    }

    /// How many draft rows a step of `rows` rows has room for, where `n` are asked for and there are `slots` slots.
    pub fn draft_rows(&self, rows: u32, n: u32, slots: u32) -> u32 {
        match self {
            Buckets::List(_) if n > 1 || n == 1 && rows > ONE_DRAFTS => rows.min(slots),
            _ => n,
        }
    }

    /// The keys of every step that a device may be given: none where it runs what it is given. `drafts`: how many a step
    /// may make for a slot, beside none.
    pub fn keys(&self, limits: &Limits, drafts: &[u32]) -> Vec<StepKey> {
        let Buckets::List(list) = self else { return Vec::new() };
        let slots = limits.slots.min(limits.rows).min(limits.heads) as u32;
        let mut keys = Vec::new();
        for ctx in [CtxClass::Short, CtxClass::Medium, CtxClass::Long] {
            for &rows in list {
                let heads = self.heads(rows, 1, limits.heads as u32);
                let headless = StepKey::new(rows, 0, ctx, Part::Whole);
                let [whole, forward, sample] =
                    [Part::Whole, Part::Forward, Part::Sample].map(|part| StepKey::new(rows, heads, ctx, part));
                keys.extend([headless, whole, forward, sample]);
                if !drafts.is_empty() {
                    keys.extend([headless, whole, sample].map(|key| key.drafting(1, 0)));
                }
                let mut draft_rows = vec![self.draft_rows(rows, 1, slots), rows.min(slots)];
                draft_rows.dedup();
                for n in draft_rows {
                    keys.extend(drafts.iter().flat_map(|&drafts| [whole, sample].map(|key| key.drafting(drafts, n))));
                }
            }
            if limits.context as u64 <= u64::from(ctx.limit()) {
                break;
            }
        }
        keys
    }

    /// The largest row count within `n`; 0 where none is.
    pub fn floor(&self, n: u32) -> u32 {
        match self {
            Buckets::Exact => n,
            Buckets::List(list) => list.iter().copied().rev().find(|&rows| rows <= n).unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_rounded_within_the_list() {
        let list = Buckets::recorded(300);
        assert_eq!((list.pad(1), list.pad(5), list.pad(257), list.pad(300)), (1, 6, 300, 300));
        assert_eq!((list.floor(5), list.floor(299), list.floor(9999)), (4, 256, 300));
        assert_eq!((Buckets::Exact.pad(5), Buckets::Exact.floor(5)), (5, 5));
        assert_eq!((list.heads(96, 3, 64), list.heads(8, 3, 64), list.heads(8, 0, 64)), (64, 8, 0));
    }

    #[test]
    fn every_step_that_can_be_planned_has_a_key() {
        let list = Buckets::recorded(40);
        let limits = Limits { slots: 9, rows: 40, heads: 16, context: 4096, blocks: 1, ring: 1 };
        let (plain, all) = (list.keys(&limits, &[]), list.keys(&limits, &[1, 2, 3]));
        for n in 1..=40 {
            for heads in [0, 1, n] {
                let rows = list.pad(n);
                for ctx in [CtxClass::Short, CtxClass::Medium] {
                    let key = StepKey::new(rows, list.heads(rows, heads, 16), ctx, Part::Whole);
                    assert!(plain.contains(&key) && all.contains(&key), "{key}");
                    assert!(all.contains(&key.drafting(3, 0)), "{key}, every row seen by a drafter");
                    for (drafts, wanted) in [(1, 1), (3, 2), (2, 9)] {
                        let key = key.drafting(drafts, list.draft_rows(rows, wanted.min(n), 9));
                        assert!(heads == 0 || all.contains(&key), "{key}");
                    }
                }
            }
        }
        let mut keys = all.clone();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), all.len(), "each once");
        assert!(all.iter().all(|key| key.ctx != CtxClass::Long) && Buckets::Exact.keys(&limits, &[1, 2, 3]).is_empty());
        assert!(plain.iter().all(|key| key.drafts == 0));
    }
}
