//! What a step costs by its rows: a line fitted to the steps that were measured.

/// Rows of a step with decoding rows in it before anything was measured.
const UNMEASURED_ROWS: u32 = 32;
/// Weight of the newest step in its bin's mean.
const NEWEST: f64 = 0.25;

/// `step_us = base + per_row * rows`, fitted over one mean a power of two of rows: however many decode steps follow,
/// they cannot wash out what a long chunk was seen to cost.
#[derive(Debug, Clone, Default)]
pub struct CostModel {
    bins: [Bin; 16],
    line: Line,
}

#[derive(Debug, Clone, Copy, Default)]
struct Bin {
    rows: f64,
    us: f64,
    seen: bool,
}

/// The fitted line.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Line {
    /// Microseconds of a step however few rows it has.
    pub base_us: f64,
    /// Microseconds that a row adds; 0 before anything was measured.
    pub per_row_us: f64,
}

impl CostModel {
    /// Takes in a measured step.
    pub fn observe(&mut self, rows: u32, us: f64) {
        if rows == 0 || !us.is_finite() || us <= 0.0 {
            return;
        }
        let bin = &mut self.bins[(rows.ilog2() as usize).min(15)];
        let weight = if bin.seen { NEWEST } else { 1.0 };
        bin.rows += (f64::from(rows) - bin.rows) * weight;
        bin.us += (us - bin.us) * weight;
        bin.seen = true;
        self.line = fit(self.bins.iter().filter(|b| b.seen));
    }

    /// The line as fitted so far.
    pub fn line(&self) -> Line {
        self.line
    }

    /// What a step of `rows` is expected to take; 0 before anything was measured.
    pub fn predict_us(&self, rows: u32) -> f64 {
        self.line.base_us + self.line.per_row_us * f64::from(rows)
    }

    /// The most rows whose step is expected to stay within `limit_us`.
    pub fn rows_within(&self, limit_us: f64) -> u32 {
        if self.line.per_row_us <= 0.0 {
            return UNMEASURED_ROWS;
        }
        ((limit_us - self.line.base_us) / self.line.per_row_us).clamp(0.0, f64::from(u32::MAX)) as u32
    }
}

/// Least squares of the relative error, so that a long chunk does not outvote the small steps. A single bin says
/// nothing about the base: everything is then taken to be by row, which errs on the side of small chunks.
fn fit<'a>(bins: impl Iterator<Item = &'a Bin>) -> Line {
    let [mut w, mut wr, mut wt, mut wrr, mut wrt] = [0.0; 5];
    for bin in bins {
        let weight = 1.0 / (bin.us * bin.us);
        w += weight;
        wr += weight * bin.rows;
        wt += weight * bin.us;
        wrr += weight * bin.rows * bin.rows;
        wrt += weight * bin.rows * bin.us;
    }
    let spread = w * wrr - wr * wr;
    let slope = (w * wrt - wr * wt) / spread;
    let base = (wt - slope * wr) / w;
    // One bin has no spread but for rounding; a base below zero means that the steps were measured with noise.
    if spread > 1e-9 * w * wrr && base >= 0.0 && slope > 0.0 {
        Line { base_us: base, per_row_us: slope }
    } else {
        Line { base_us: 0.0, per_row_us: wrt / wrr }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_and_kept_through_long_decoding() {
        let mut cost = CostModel::default();
        assert_eq!(cost.rows_within(50_000.0), UNMEASURED_ROWS);
        cost.observe(1, 12_000.0);
        assert_eq!(cost.rows_within(50_000.0), 4, "one point: by row");
        let truth = |rows: u32| 10_000.0 + 100.0 * f64::from(rows);
        for rows in [1, 512, 64, 4] {
            for _ in 0..30 {
                cost.observe(rows, truth(rows));
            }
        }
        for _ in 0..100_000 {
            cost.observe(1, truth(1));
        }
        let rows = cost.rows_within(50_000.0);
        assert!((398..=402).contains(&rows), "{rows}");
        assert!((cost.predict_us(200) - truth(200)).abs() < 50.0);
        assert_eq!(cost.rows_within(5_000.0), 0);
    }

    #[test]
    fn noise_never_gives_a_line_that_falls() {
        let mut cost = CostModel::default();
        cost.observe(1, 900.0);
        cost.observe(64, 300.0);
        assert!(cost.line().per_row_us > 0.0);
        cost.observe(0, 5.0);
        cost.observe(3, f64::NAN);
        assert!(cost.predict_us(64).is_finite());
    }
}
