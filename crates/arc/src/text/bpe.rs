//! The merge loop: repeatedly join the neighbouring pair with the best rank, leftmost first among equals.
//!
//! Byte-level BPE and SentencePiece differ only in what a pair's rank is, so that is an argument. Symbols form a linked
//! list over the text and candidate pairs wait in a heap: `n log n` for a word of `n` bytes, however hostile.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Id of a symbol that no token spells yet.
pub(super) const NO_ID: u32 = u32::MAX;
/// Most bytes of a text that is merged as a whole: positions are `u32`, which halves the memory of a long word.
pub(super) const MAX_SEGMENT: usize = 1 << 30;
/// No neighbour.
const NONE: u32 = u32::MAX;

/// A piece of the text under construction.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    /// First byte in the text.
    pub start: u32,
    /// End (exclusive) in the text.
    pub end: u32,
    /// Token, or [`NO_ID`].
    pub id: u32,
    prev: u32,
    next: u32,
}

/// A possible merge: lower ranks go first; `id` is the token that results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Merge {
    /// Lower goes first.
    pub rank: u32,
    /// Token that results.
    pub id: u32,
}

/// Buffers of the merge loop, kept between words.
#[derive(Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<(u32, u32, u32)>>,
}

impl Merger {
    pub(super) fn clear(&mut self) {
        self.symbols.clear();
    }

    /// Appends a symbol that covers `start..end` of the text, which is shorter than [`MAX_SEGMENT`].
    pub(super) fn push(&mut self, start: usize, end: usize, id: u32) {
        let at = self.symbols.len() as u32;
        if let Some(last) = self.symbols.last_mut() {
            last.next = at;
        }
        self.symbols.push(Symbol { start: start as u32, end: end as u32, id, prev: at.wrapping_sub(1), next: NONE });
    }

    /// Merges until `pair` offers nothing more, then hands the remaining symbols to `emit` from left to right.
    pub(super) fn run(&mut self, pair: impl Fn(&Symbol, &Symbol) -> Option<Merge>, mut emit: impl FnMut(&Symbol)) {
        let Self { symbols, heap } = self;
        heap.clear();
        for (at, two) in symbols.windows(2).enumerate() {
            if let Some(merge) = pair(&two[0], &two[1]) {
                heap.push(Reverse((merge.rank, at as u32, merge.id)));
            }
        }
        while let Some(Reverse((_, at, id))) = heap.pop() {
            // A symbol that was merged away has no end; one that has changed offers another token.
            let left = symbols[at as usize];
            let right_at = left.next;
            if left.end == 0 || right_at == NONE {
                continue;
            }
            let right = symbols[right_at as usize];
            if pair(&left, &right).is_none_or(|now| now.id != id) {
                continue;
            }
            symbols[at as usize] = Symbol { end: right.end, id, next: right.next, ..left };
            symbols[right_at as usize].end = 0;
            if right.next != NONE {
                symbols[right.next as usize].prev = at;
            }
            for (l, r) in [(left.prev, at), (at, right.next)] {
                if l != NONE
                    && r != NONE
                    && let Some(merge) = pair(&symbols[l as usize], &symbols[r as usize])
                {
                    heap.push(Reverse((merge.rank, l, merge.id)));
                }
            }
        }
        let mut at = 0;
        while let Some(symbol) = symbols.get(at as usize) {
            emit(symbol);
            at = symbol.next;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// The definition, read literally: find the best pair of all, join it, begin again.
    fn naive(ids: &[u32], merges: &HashMap<(u32, u32), Merge>) -> Vec<u32> {
        let mut ids = ids.to_vec();
        loop {
            let best = ids
                .windows(2)
                .enumerate()
                .filter_map(|(at, two)| merges.get(&(two[0], two[1])).map(|m| (m.rank, at, m.id)))
                .min();
            let Some((_, at, id)) = best else { return ids };
            ids.splice(at..at + 2, [id]);
        }
    }

    #[test]
    fn heap_equals_the_definition() {
        let mut state = 7u64;
        let mut next = move |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        let mut merged = 0;
        for case in 0..400 {
            // Every merge makes a new token, as in a trained vocabulary.
            let mut merges = HashMap::new();
            for rank in 0..40u32 {
                let n = u64::from(4 + rank);
                let pair = (next(n) as u32, next(n) as u32);
                merges.entry(pair).or_insert(Merge { rank, id: 4 + rank });
            }
            let ids: Vec<u32> = (0..next(60)).map(|_| next(4) as u32).collect();
            let mut merger = Merger::default();
            for (at, &id) in ids.iter().enumerate() {
                merger.push(at, at + 1, id);
            }
            let mut got = Vec::new();
            merger.run(|l, r| merges.get(&(l.id, r.id)).copied(), |s| got.push(s.id));
            assert_eq!(got, naive(&ids, &merges), "case {case}: {ids:?}");
            merged += usize::from(got.len() < ids.len());
        }
        assert!(merged > 200, "only {merged} cases merged anything");
    }
}
