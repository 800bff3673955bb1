//! How many drafts a sequence verifies: as many as pay, by what steps were measured to cost and how many of its drafts
//! were right. The number decides how fast tokens come, never which.

use arc_device::step::MAX_DRAFTS;

use crate::scheduler::cost::CostModel;

/// Who says how many drafts are verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Speculate {
    /// None are made.
    Off,
    /// As many as pay, sequence by sequence.
    #[default]
    Auto,
    /// So many, 1 to [`MAX_DRAFTS`], whether they pay or not.
    Fixed(u32),
}

/// Steps after which a sequence is looked at again.
const DECIDE_EVERY: u32 = 8;
/// Weight of the newest draft in the share of right ones.
const NEWEST: f64 = 1.0 / 16.0;
/// Weight of the newest step in the mean time after the logits.
const NEWEST_TAIL: f64 = 0.25;
/// Another number of drafts must promise so many times the tokens, or everything stays as it is.
const MARGIN: f64 = 1.05;
/// Plain steps before drafts are tried again, and the most of them: each try that does not pay doubles them.
const REST: u32 = 32;
const REST_MAX: u32 = 1024;
/// What is assumed of drafts before any was verified.
const UNSEEN_ACCEPTANCE: f64 = 0.7;
/// Drafts to begin with.
const FIRST_DRAFTS: u32 = 2;

/// What steps cost, drafting apart from the rest.
#[derive(Debug, Clone, Default)]
pub struct StepCosts {
    /// Up to the logits, by rows.
    forward: CostModel,
    /// From the logits on, by drafts made.
    tail_us: [Option<f64>; MAX_DRAFTS + 1],
}

impl StepCosts {
    /// Takes in a measured step: its rows and the drafts that it made for a slot, the time up to its logits, and the rest.
    pub fn observe(&mut self, rows: u32, drafts: u32, fwd_us: f64, tail_us: f64) {
        self.forward.observe(rows, fwd_us);
        if tail_us.is_finite() && tail_us >= 0.0 {
            let mean = &mut self.tail_us[drafts as usize];
            *mean = Some(mean.map_or(tail_us, |mean| mean + (tail_us - mean) * NEWEST_TAIL));
        }
    }

    /// What a step is expected to take; 0 before anything was measured.
    fn us(&self, rows: u32, drafts: u32) -> f64 {
        self.forward.predict_us(rows) + self.tail_us(drafts)
    }

    /// Of a number of drafts that was not measured: in proportion to the nearest that was.
    fn tail_us(&self, drafts: u32) -> f64 {
        let plain = self.tail_us[0].unwrap_or(0.0);
        let known = (1..).zip(&self.tail_us[1..]).filter_map(|(n, us)| Some((n, (*us)?)));
        match known.min_by_key(|&(n, _): &(u32, f64)| n.abs_diff(drafts)) {
            Some((n, us)) if drafts > 0 => plain + (us - plain).max(0.0) * f64::from(drafts) / f64::from(n),
            _ => plain,
        }
    }
}

/// What else a step holds, beside the sequence that is decided about.
#[derive(Debug, Clone, Copy, Default)]
pub struct Others {
    /// Rows.
    pub rows: u32,
    /// Tokens that are expected of them.
    pub tokens: f64,
    /// The most drafts made for one of them.
    pub drafts: u32,
}

/// How many drafts one sequence verifies.
#[derive(Debug, Clone)]
pub struct Pace {
    drafts: u32,
    /// Whether it is decided here.
    auto: bool,
    max: u32,
    /// Share of drafts that were right, of those whose predecessors were.
    acceptance: f64,
    /// Since the last decision.
    steps: u32,
    rest: u32,
}

impl Pace {
    /// Of a sequence that has drawn nothing yet. `max`: what the device can draft.
    pub fn new(speculate: Speculate, max: u32) -> Pace {
        let max = max.min(MAX_DRAFTS as u32);
        let drafts = match speculate {
            Speculate::Off => 0,
            Speculate::Auto => FIRST_DRAFTS.min(max),
            Speculate::Fixed(n) => n.min(max),
        };
        let auto = speculate == Speculate::Auto && max > 0;
        Pace { drafts, auto, max, acceptance: UNSEEN_ACCEPTANCE, steps: 0, rest: REST }
    }

    /// Drafts to make and to verify.
    pub fn drafts(&self) -> u32 {
        self.drafts
    }

    /// Tokens that a step is expected to bring.
    pub fn tokens(&self) -> f64 {
        self.tokens_with(self.drafts)
    }

    fn tokens_with(&self, drafts: u32) -> f64 {
        (0..=drafts as i32).map(|j| self.acceptance.powi(j)).sum()
    }

    /// A step of the sequence landed, in which `accepted` of the `verified` drafts were right.
    pub fn landed(&mut self, verified: u32, accepted: u32) {
        self.steps += 1;
        let accepted = accepted.min(verified);
        // What follows a wrong draft was not tested.
        for right in 0..(accepted + 1).min(verified) {
            let seen = if right < accepted { 1.0 } else { 0.0 };
            self.acceptance += (seen - self.acceptance) * NEWEST;
        }
    }

    /// Whether [`Pace::decide`] is due.
    pub fn is_due(&self) -> bool {
        self.auto && self.steps >= if self.drafts == 0 { self.rest } else { DECIDE_EVERY }
    }

    /// Decides anew, from what was measured.
    pub fn decide(&mut self, others: Others, costs: &StepCosts) {
        self.steps = 0;
        if self.drafts == 0 {
            self.drafts = 1;
            return;
        }
        let pace = |drafts: u32| {
            let us = costs.us(others.rows + 1 + drafts, drafts.max(others.drafts));
            (others.tokens + self.tokens_with(drafts)) / us.max(f64::MIN_POSITIVE)
        };
        let best = (0..=self.max).max_by(|&a, &b| pace(a).total_cmp(&pace(b))).expect("0 is one");
        if best != self.drafts && pace(best) > pace(self.drafts) * MARGIN {
            self.drafts = best;
        }
        self.rest = if self.drafts == 0 { (2 * self.rest).min(REST_MAX) } else { REST };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of `base_us` and a row more for every row, `draft_us` a draft; of a hundred drafts, `right` are right. Gives
    /// the drafts of each of 4,000 steps.
    fn run(base_us: f64, row_us: f64, draft_us: f64, right: u32) -> Vec<u32> {
        let mut costs = StepCosts::default();
        let mut pace = Pace::new(Speculate::Auto, 4);
        let mut draw = 1u32;
        let fwd_us = |rows: u32| base_us + row_us * f64::from(rows);
        costs.observe(64, pace.drafts(), fwd_us(64), 10.0 + draft_us * f64::from(pace.drafts()));
        let step = |_| {
            let drafts = pace.drafts();
            costs.observe(1 + drafts, drafts, fwd_us(1 + drafts), 10.0 + draft_us * f64::from(drafts));
            let mut is_right = |_: &u32| {
                draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (draw >> 16) % 100 < right
            };
            let accepted = (0..drafts).take_while(|j| is_right(j)).count() as u32;
            pace.landed(drafts, accepted);
            if pace.is_due() {
                pace.decide(Others::default(), &costs);
            }
            drafts
        };
        (0..4000).map(step).collect()
    }

    /// Steps of the last 3,000 with this many drafts.
    fn steps_with(drafts: &[u32], n: u32) -> usize {
        drafts[1000..].iter().filter(|&&d| d == n).count()
    }

    #[test]
    fn drafts_are_verified_as_far_as_they_pay() {
        // A row costs a twentieth of a step, and nine in ten are right.
        let cheap = run(2000.0, 100.0, 50.0, 90);
        assert!(steps_with(&cheap, 4) > 2700, "{}", steps_with(&cheap, 4));
        // Nothing is right.
        let wrong = run(2000.0, 100.0, 50.0, 0);
        assert!(steps_with(&wrong, 0) > 2900, "{}", steps_with(&wrong, 0));
        // Everything is right, but a row costs as much as a step.
        let dear = run(10.0, 2000.0, 500.0, 100);
        assert!(steps_with(&dear, 0) > 2900, "{}", steps_with(&dear, 0));
        // A row is free, and a draft costs three quarters of a step.
        let dear = run(2000.0, 1.0, 1500.0, 60);
        assert!(steps_with(&dear, 0) > 2700, "{}", steps_with(&dear, 0));
    }

    #[test]
    fn a_close_decision_is_kept() {
        for right in [40, 50, 60, 70] {
            let drafts = run(2000.0, 300.0, 150.0, right);
            let changes = drafts[1000..].array_windows().filter(|[a, b]| a != b).count();
            assert!(changes < 60, "{right} %: {changes} changes in 3,000 steps");
        }
    }

    #[test]
    fn what_is_told_is_done() {
        for (speculate, drafts) in [(Speculate::Off, 0), (Speculate::Fixed(3), 3), (Speculate::Fixed(9), 4)] {
            let mut pace = Pace::new(speculate, 4);
            (0..5000).for_each(|_| pace.landed(drafts, 0));
            assert!(!pace.is_due());
            assert_eq!(pace.drafts(), drafts);
        }
        assert_eq!(Pace::new(Speculate::Auto, 0).drafts(), 0);
        assert!(!Pace::new(Speculate::Auto, 0).is_due());
    }
}
