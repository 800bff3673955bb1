//! The KV pool: which blocks are free. A sequence takes all of its blocks at admission and gives them back at its end,
//! so nothing is preempted and a block table never changes while a sequence runs.

/// The free list of the KV pool.
#[derive(Debug)]
pub struct BlockManager {
    /// Last in, first out: a block that was just used is the likeliest to be cached.
    free: Vec<u32>,
    total: usize,
}

impl BlockManager {
    /// A pool of blocks `0..total`, all free.
    pub fn new(total: usize) -> Self {
        BlockManager { free: (0..total as u32).rev().collect(), total }
    }

    /// Takes `n` blocks, or none at all.
    pub fn reserve(&mut self, n: usize) -> Option<Vec<u32>> {
        let left = self.free.len().checked_sub(n)?;
        Some(self.free.drain(left..).rev().collect())
    }

    /// Gives back what [`BlockManager::reserve`] gave.
    pub fn release(&mut self, blocks: Vec<u32>) {
        self.free.extend(blocks.into_iter().rev());
        assert!(self.free.len() <= self.total, "{} free blocks in a pool of {}", self.free.len(), self.total);
    }

    /// Blocks that nobody holds.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks of the pool.
    pub fn total(&self) -> usize {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_block_is_held_twice_and_all_come_back() {
        let mut pool = BlockManager::new(10);
        let a = pool.reserve(4).expect("10 are free");
        let b = pool.reserve(6).expect("6 are free");
        assert_eq!(pool.reserve(1), None);
        assert_eq!(pool.reserve(0), Some(vec![]));
        let mut all: Vec<u32> = a.iter().chain(&b).copied().collect();
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<_>>());
        pool.release(a);
        assert_eq!(pool.free(), 4);
        assert_eq!(pool.reserve(5), None, "a part of what was asked for is never taken");
        assert_eq!(pool.free(), 4);
        pool.release(b);
        assert_eq!(pool.free(), pool.total());
    }
}
