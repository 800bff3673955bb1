//! What stages read of the KV cache, by the positions of a step's rows: of one formula on every device.

/// What one stage reads: keys that rows see, or compressed rows, of so many bytes each.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KvRead {
    /// Of a key or compressed row, over all heads.
    pub bytes: u64,
    /// Tokens of a compressed row; 0 where keys are read.
    ratio: u32,
    /// Keys that a row sees, its own included; `u32::MAX`: all.
    window: u32,
    /// Neighbouring rows of a sequence that read keys once for all.
    together: u32,
    /// Compressed rows are read where more than so many are visible,
    above: u32,
    /// and so many at most.
    most: u32,
    unused: u32,
}
const _: () = assert!(size_of::<KvRead>() == 32);

impl KvRead {
    /// Keys of `bytes`, of which a row sees the last `window`, and up to `together` neighbours read each once.
    pub fn keys(bytes: usize, window: Option<u32>, together: usize) -> KvRead {
        let window = window.unwrap_or(u32::MAX);
        KvRead { bytes: bytes as u64, window, together: together as u32, ..KvRead::default() }
    }

    /// Rows of `bytes` that stand for `ratio` tokens each: nothing where no more than `above` are visible, otherwise `most` of
    /// them at most.
    pub fn rows(bytes: usize, ratio: usize, above: usize, most: usize) -> KvRead {
        let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        KvRead { bytes: bytes as u64, ratio: word(ratio), above: word(above), most: word(most), ..KvRead::default() }
    }

    /// The same but for the size of what is read.
    pub fn alike(&self, other: &KvRead) -> bool {
        KvRead { bytes: 0, ..*self } == KvRead { bytes: 0, ..*other }
    }

    /// Bytes that are read for a live row at `pos`, of whose sequence `back` rows stand right before it and `ahead` behind it:
    /// `read_of` of step.cuh.
    pub fn of(&self, pos: u32, back: u32, ahead: u32) -> u64 {
        let visible = u64::from(pos) + 1;
        let n = if self.ratio > 0 {
            let rows = visible / u64::from(self.ratio);
            if rows > u64::from(self.above) { rows.min(u64::from(self.most)) } else { 0 }
        } else if back.is_multiple_of(self.together) {
            visible.min(u64::from(self.window)) + u64::from(ahead.min(self.together - 1))
        } else {
            // With a row before it.
            0
        };
        n * self.bytes
    }
}

/// The most kinds of reads that a step's stages have.
const MOST: usize = 8;

/// What the stages of a step read.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KvReads {
    n: u32,
    unused: u32,
    reads: [KvRead; MOST],
}
const _: () = assert!(size_of::<KvReads>() == 264);

impl KvReads {
    /// One stage more.
    pub fn add(&mut self, read: KvRead) {
        let n = self.n as usize;
        match self.reads[..n].iter_mut().find(|same| same.alike(&read)) {
            Some(same) => same.bytes += read.bytes,
            None => {
                assert!(n < MOST, "a model reads its cache in {MOST} ways at most");
                self.reads[n] = read;
                self.n += 1;
            }
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }
}

#[cfg(test)]
mod tests {
    use super::{KvRead, KvReads};

    #[test]
    fn keys_are_read_once_by_neighbours_and_rows_by_each() {
        // 20 rows from position 100 on, in groups of eight.
        let of = |read: KvRead| (0..20).map(|i| read.of(100 + i, i, 19 - i)).sum::<u64>();
        assert_eq!(of(KvRead::keys(10, None, 8)), 10 * (108 + 116 + 120));
        assert_eq!(of(KvRead::keys(10, Some(16), 8)), 10 * (23 + 23 + 19));
        assert_eq!(of(KvRead::keys(10, Some(16), 1)), 10 * 20 * 16);
        let rows: u64 = (101..=120).map(|visible| visible / 4).sum();
        assert_eq!(of(KvRead::rows(10, 4, 0, usize::MAX)), 10 * rows);
        assert_eq!(
            of(KvRead::rows(10, 4, 0, 26)),
            10 * (101..=120).map(|visible: u64| (visible / 4).min(26)).sum::<u64>()
        );
        // Only where there is a choice.
        assert_eq!(of(KvRead::rows(10, 4, 27, usize::MAX)), 10 * (112..=120).map(|visible| visible / 4).sum::<u64>());
        assert_eq!(KvRead::keys(10, Some(16), 1).of(3, 0, 0), 40);
    }

    #[test]
    fn reads_of_one_kind_are_one() {
        let mut reads = KvReads::default();
        assert!(reads.is_empty());
        for read in [KvRead::keys(3, None, 8), KvRead::keys(3, Some(4), 8), KvRead::keys(4, None, 8)] {
            reads.add(read);
        }
        assert_eq!((reads.n, reads.reads[0].bytes, reads.reads[1].bytes), (2, 7, 3));
    }
}
