//! DRY, the penalty on continuing a repetition: its table, and the matching of a text's end with earlier passages.

use super::{DryConfig, DryInputs, RowFault};

/// Powers kept; longer matches count as the last one.
const POWERS: usize = 256;

/// DRY's parameters as a row reads them, made once for a request.
#[derive(Debug, Clone, PartialEq)]
pub struct DryTable {
    /// `multiplier * base^e`, computed in f64, rounded once, at most `f32::MAX`.
    powers: Vec<f32>,
    allowed_length: u32,
    window: usize,
    /// One bit a token; 1 for a breaker. May be shorter than the vocabulary.
    breakers: Vec<u32>,
}

impl DryTable {
    /// `None` where the configuration is absent in effect: multiplier exactly 0 or window 0.
    pub fn new(config: &DryConfig) -> Option<Self> {
        if config.multiplier == 0.0 || config.window == 0 {
            return None;
        }
        let mut power = f64::from(config.multiplier);
        let powers = (0..POWERS)
            .map(|_| {
                let this = power.min(f64::from(f32::MAX)) as f32;
                power *= f64::from(config.base);
                this
            })
            .collect();
        let words = config.breakers.iter().max().map_or(0, |&id| id as usize / 32 + 1);
        let mut breakers = vec![0; words];
        for &id in &config.breakers {
            breakers[id as usize / 32] |= 1 << (id % 32);
        }
        Some(DryTable { powers, allowed_length: config.allowed_length, window: config.window as usize, breakers })
    }

    /// What a token loses that would continue a match of `len` tokens; `len` is at least the allowed length.
    pub(super) fn penalty(&self, len: u32) -> f32 {
        self.powers[((len - self.allowed_length) as usize).min(POWERS - 1)]
    }

    fn is_breaker(&self, id: u32) -> bool {
        self.breakers.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }
}

/// Takes DRY's penalties from `x`. Linear in the window.
///
/// For each earlier place whose last L tokens equal the last L tokens of the history (no breaker among them), L maximal,
/// the token after that place is charged for L; a token with several such places, for the longest.
///
/// `x`: `[vocab]`. `matches`: scratch, at least the window long. `longest`: scratch, `[vocab]`; contents do not matter.
pub(super) fn apply(
    x: &mut [f32],
    dry: &DryInputs<'_>,
    matches: &mut [u32],
    longest: &mut [u32],
) -> Result<(), RowFault> {
    let table = dry.table;
    let n = dry.history.len().min(table.window);
    let text = &dry.history[dry.history.len() - n..];
    assert!(n <= matches.len(), "DRY looks back {n} tokens, the scratch was made for {}", matches.len());
    if text.iter().any(|&id| id as usize >= x.len()) {
        return Err(RowFault::TokenOutOfRange);
    }
    // No match reaches past the last breaker.
    let reach = text.iter().rev().position(|&id| table.is_breaker(id)).unwrap_or(n);
    if reach < table.allowed_length.max(1) as usize {
        return Ok(());
    }
    suffix_matches(text, &mut matches[..n]);

    // `end` is where an earlier passage stops; the token at `end` followed it.
    let charged = |end: usize| {
        let len = matches[end - 1].min(reach as u32);
        (len >= table.allowed_length.max(1) && !table.is_breaker(text[end])).then_some((text[end] as usize, len))
    };
    for (id, _) in (1..n).filter_map(charged) {
        longest[id] = 0;
    }
    for (id, len) in (1..n).filter_map(charged) {
        longest[id] = longest[id].max(len);
    }
    for (id, _) in (1..n).filter_map(charged) {
        let len = std::mem::take(&mut longest[id]);
        if len > 0 {
            x[id] -= table.penalty(len);
        }
    }
    Ok(())
}

/// `matches[i]` becomes the length of the longest common suffix of `text[..=i]` and `text`: the Z function of the
/// reversed text.
fn suffix_matches(text: &[u32], matches: &mut [u32]) {
    let n = text.len();
    // Positions from the end: r(0) is the last token.
    let r = |i: usize| text[n - 1 - i];
    matches[n - 1] = n as u32;
    // The match that reaches furthest: r[from..to] equals r[..to - from].
    let (mut from, mut to) = (0, 0);
    for i in 1..n {
        let known = if i < to { (matches[n - 1 - (i - from)] as usize).min(to - i) } else { 0 };
        let mut len = known;
        while i + len < n && r(len) == r(i + len) {
            len += 1;
        }
        matches[n - 1 - i] = len as u32;
        if i + len > to {
            (from, to) = (i, i + len);
        }
    }
}
