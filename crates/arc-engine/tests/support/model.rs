//! A "model" whose logits follow from all tokens that it was fed.

/// Tokens of the vocabulary.
pub const VOCAB: u32 = 97;
/// A prompt token after which the logits are not finite.
pub const POISON: u32 = 96;

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What a model has seen.
pub fn hash(tokens: impl Iterator<Item = u32>) -> u64 {
    tokens.fold(0x9e37_79b9, |h, t| mix(h ^ u64::from(t).wrapping_add(0x1234_5678_9abc)))
}

/// A logit that a float holds exactly.
fn logit(seen: u64, id: u32) -> f32 {
    (mix(seen ^ (u64::from(id) << 32)) >> 44) as f32
}

/// `[vocab]`; not finite where `u64::MAX` was seen. `POISON` is masked.
pub fn logits(seen: u64) -> Vec<f32> {
    let of = |id| if id == POISON { f32::NEG_INFINITY } else { logit(seen, id) };
    (0..VOCAB).map(|id| if seen == u64::MAX { f32::NAN } else { of(id) }).collect()
}

/// Stands in for a logprob: any function will do that both sides know.
pub fn logprob(seen: u64, id: u32) -> f32 {
    -logit(seen, id) / 65536.0
}

/// The largest logit among the allowed, the lowest id among equals. `POISON` is never drawn.
pub fn best(seen: u64, allowed: impl Fn(u32) -> bool) -> Option<u32> {
    (0..VOCAB - 1).filter(|&id| allowed(id)).max_by(|&a, &b| logit(seen, a).total_cmp(&logit(seen, b)).then(b.cmp(&a)))
}

/// What the fake emits after a prompt: its `n` first tokens.
pub fn expected(prompt: &[u32], n: usize) -> Vec<u32> {
    expected_masked(prompt, n, |_, _| true)
}

/// The same with a mask that may look at the output so far.
pub fn expected_masked(prompt: &[u32], n: usize, allowed: impl Fn(&[u32], u32) -> bool) -> Vec<u32> {
    let mut all = prompt.to_vec();
    for _ in 0..n {
        let seen = hash(all.iter().copied());
        let token = best(seen, |id| allowed(&all[prompt.len()..], id)).expect("something is allowed");
        all.push(token);
    }
    all.split_off(prompt.len())
}

/// The score of prompt token `idx` (from 1).
pub fn expected_score(prompt: &[u32], idx: usize) -> f32 {
    logprob(hash(prompt[..idx].iter().copied()), prompt[idx])
}
