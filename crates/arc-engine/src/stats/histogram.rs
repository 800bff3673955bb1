//! Times in fixed buckets, as metrics want them.

/// Upper bounds of the buckets in microseconds; one more bucket has no bound.
pub const BOUNDS_US: [u64; 20] = [
    100,
    200,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    35_000,
    50_000,
    75_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    30_000_000,
    100_000_000,
];

/// How many times fell into each bucket.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Histogram {
    /// Entries at or below each bound and above the one before; the last has no bound.
    pub counts: [u64; BOUNDS_US.len() + 1],
    /// Sum of all entries in microseconds.
    pub sum_us: f64,
}

impl Histogram {
    /// Adds one time.
    pub fn add(&mut self, us: f64) {
        let bucket = BOUNDS_US.partition_point(|&bound| (bound as f64) < us);
        self.counts[bucket] += 1;
        self.sum_us += us;
    }

    /// Entries in all.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let mut h = Histogram::default();
        for us in [0.0, 100.0, 100.5, 1e9] {
            h.add(us);
        }
        assert_eq!((h.counts[0], h.counts[1], h.counts[BOUNDS_US.len()]), (2, 1, 1));
        assert_eq!(h.count(), 4);
        assert_eq!(h.sum_us, 1e9 + 200.5);
    }
}
