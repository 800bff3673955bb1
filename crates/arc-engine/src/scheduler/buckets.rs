//! How many rows a step may have: any number, or one of those that were recorded.

/// The row counts that a device runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Buckets {
    /// Any number: the device runs what it is given.
    Exact,
    /// Ascending row counts; a step is filled up to the next with padding rows.
    List(Vec<u32>),
}

/// Row counts that are recorded: dense where decoding lives, then doubling for chunks.
const RECORDED: [u32; 19] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048];

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
    }
}
