//! Where the time of a step goes, as one line for every 25 steps.

use crate::stats::StepRecord;

/// Steps that are not counted: caches are cold and pages are touched for the first time.
const SKIPPED: u32 = 4;
/// Steps of a mean.
const MEAN_OF: u32 = 25;

/// Mean times of a step, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepSplit {
    /// Commit to commit.
    pub total_us: f64,
    /// Start to logits.
    pub fwd_us: f64,
    /// Logits to commit: drawing, and drafting.
    pub sample_us: f64,
    /// The rest: the last commit to this start.
    pub other_us: f64,
    /// Rows.
    pub rows: f64,
}

impl std::fmt::Display for StepSplit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let StepSplit { total_us, fwd_us, sample_us, other_us, rows } = self;
        write!(
            f,
            "STEP_us TOTAL={total_us:.1} fwd={fwd_us:.1} sample={sample_us:.1} other={other_us:.1} rows={rows:.1}"
        )
    }
}

/// Skips the first 4 steps, then gives the mean of every 25.
#[derive(Debug, Default)]
pub struct SplitMean {
    skipped: u32,
    n: u32,
    sum: StepSplit,
}

impl SplitMean {
    /// Takes in a step; gives the mean with every 25th.
    pub fn add(&mut self, r: &StepRecord) -> Option<StepSplit> {
        if self.skipped < SKIPPED {
            self.skipped += 1;
            return None;
        }
        self.n += 1;
        self.sum.total_us += r.gap_us + r.fwd_us + r.sample_us;
        self.sum.fwd_us += r.fwd_us;
        self.sum.sample_us += r.sample_us;
        self.sum.other_us += r.gap_us;
        self.sum.rows += f64::from(r.rows);
        if self.n < MEAN_OF {
            return None;
        }
        let StepSplit { total_us, fwd_us, sample_us, other_us, rows } = std::mem::take(&mut self.sum);
        let n = f64::from(std::mem::take(&mut self.n));
        Some(StepSplit {
            total_us: total_us / n,
            fwd_us: fwd_us / n,
            sample_us: sample_us / n,
            other_us: other_us / n,
            rows: rows / n,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_are_skipped_and_twenty_five_make_a_line() {
        let mut mean = SplitMean::default();
        let step = |us: f64| StepRecord { fwd_us: us, sample_us: 2.0, gap_us: 1.0, rows: 3, ..StepRecord::default() };
        for _ in 0..4 {
            assert_eq!(mean.add(&step(1e9)), None);
        }
        for round in 0..2 {
            for idx in 0..24 {
                assert_eq!(mean.add(&step(f64::from(idx))), None, "round {round}");
            }
            let split = mean.add(&step(24.0)).expect("the 25th");
            assert_eq!(split.to_string(), "STEP_us TOTAL=15.0 fwd=12.0 sample=2.0 other=1.0 rows=3.0");
        }
    }
}
