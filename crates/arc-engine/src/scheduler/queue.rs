//! The waiting requests: first in, first out, but a request that does not fit yet may be passed by smaller ones.

use std::collections::VecDeque;

/// Times that a waiting request may be passed. After that, nothing behind it starts before it does.
pub const MAX_PASSES: u32 = 16;

/// Requests in order of arrival.
#[derive(Debug)]
pub struct Queue<T> {
    waiting: VecDeque<Waiting<T>>,
    passes_max: u32,
}

#[derive(Debug)]
struct Waiting<T> {
    item: T,
    blocks: usize,
    passed: u32,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Queue { waiting: VecDeque::new(), passes_max: 0 }
    }
}

impl<T> Queue<T> {
    /// Adds a request that needs `blocks`.
    pub fn push(&mut self, item: T, blocks: usize) {
        self.waiting.push_back(Waiting { item, blocks, passed: 0 });
    }

    /// The first request that `free_blocks` are enough for, unless it would pass one that was passed enough.
    pub fn pop_admissible(&mut self, free_blocks: usize) -> Option<T> {
        let fits = |w: &Waiting<T>| w.blocks <= free_blocks;
        let idx = self.waiting.iter().position(|w| fits(w) || w.passed == MAX_PASSES)?;
        if !fits(&self.waiting[idx]) {
            return None;
        }
        for passed in self.waiting.iter_mut().take(idx) {
            passed.passed += 1;
            self.passes_max = self.passes_max.max(passed.passed);
        }
        self.waiting.remove(idx).map(|w| w.item)
    }

    /// Takes out the first request that `is` describes.
    pub fn remove(&mut self, mut is: impl FnMut(&T) -> bool) -> Option<T> {
        let idx = self.waiting.iter().position(|w| is(&w.item))?;
        self.waiting.remove(idx).map(|w| w.item)
    }

    /// Takes out the first request, whatever it needs.
    pub fn pop(&mut self) -> Option<T> {
        self.waiting.pop_front().map(|w| w.item)
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The most times that any request was passed.
    pub fn passes_max(&self) -> u32 {
        self.passes_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_request_is_passed_sixteen_times_and_then_waited_for() {
        let mut queue = Queue::default();
        queue.push("large", 100);
        for _ in 0..20 {
            queue.push("small", 1);
        }
        let mut passed = 0;
        while let Some(item) = queue.pop_admissible(10) {
            assert_eq!(item, "small");
            passed += 1;
        }
        assert_eq!(passed, MAX_PASSES);
        assert_eq!(queue.len(), 5);
        assert_eq!(queue.pop_admissible(99), None, "four small ones fit, and wait all the same");
        assert_eq!(queue.pop_admissible(100), Some("large"));
        assert_eq!(queue.pop_admissible(1), Some("small"));
        assert_eq!(queue.passes_max(), MAX_PASSES);
    }

    #[test]
    fn order_of_arrival_decides_among_those_that_fit() {
        let mut queue = Queue::default();
        for (item, blocks) in [(0, 5), (1, 9), (2, 5), (3, 1)] {
            queue.push(item, blocks);
        }
        assert_eq!(queue.pop_admissible(5), Some(0));
        assert_eq!(queue.pop_admissible(5), Some(2));
        assert_eq!(queue.remove(|&item| item == 1), Some(1));
        assert_eq!(queue.pop_admissible(0), None);
        assert_eq!(queue.pop_admissible(5), Some(3));
        assert!(queue.is_empty());
    }
}
