//! Drawing on the host: for rows that the device does not finish, and for all rows where `sample_on` is `host`. The same
//! sampler as the CPU device's, so the same token.

use std::sync::Arc;

use arc_device::ops::sample::dry::DryTable;
use arc_device::ops::sample::seen::SeenTokens;
use arc_device::ops::sample::{DryInputs, RowFault, RowInputs, SamplerConfig, SamplerParams, Scratch, sample_row};

/// What drawing one sequence's tokens on the host takes: its parameters, and the tokens that they read.
#[derive(Debug)]
pub struct HostDraw {
    params: SamplerParams,
    bias: Vec<(u32, f32)>,
    stop_ids: Vec<u32>,
    seen: Option<SeenTokens>,
    dry: Option<DryTable>,
    /// Prompt and output, where DRY reads them.
    history: Vec<u32>,
    n_out: u32,
}

impl HostDraw {
    /// A sequence that has emitted nothing yet. Allocates all that it will ever need.
    pub fn new(sampling: &SamplerConfig, stop_ids: &[u32], prompt: &Arc<[u32]>, max_out: u32, vocab: u32) -> Self {
        let params = SamplerParams::new(sampling);
        let len_max = prompt.len() + max_out as usize;
        let dry = sampling.dry.as_ref().and_then(DryTable::new);
        let mut history = Vec::new();
        if dry.is_some() {
            history.reserve_exact(len_max);
            history.extend_from_slice(prompt);
        }
        HostDraw {
            seen: params.reads_seen().then(|| SeenTokens::new(vocab as usize, prompt, len_max)),
            bias: sampling.bias.clone(),
            stop_ids: stop_ids.to_vec(),
            n_out: 0,
            params,
            dry,
            history,
        }
    }

    /// The sequence emitted a token.
    pub fn push(&mut self, token: u32) {
        self.n_out += 1;
        if let Some(seen) = &mut self.seen {
            seen.push(token);
        }
        if self.dry.is_some() {
            self.history.push(token);
        }
    }

    /// Draws the next token. `logits`: `[vocab]`; `mask`: one bit a token, 1 where allowed.
    pub fn draw(&self, logits: &[f32], mask: Option<&[u32]>, scratch: &mut Scratch) -> Result<u32, RowFault> {
        let row = RowInputs {
            bias: &self.bias,
            grammar: mask,
            stop_ids: &self.stop_ids,
            seen: self.seen.as_ref().map_or(&[], SeenTokens::tokens),
            drafts: &[],
            dry: self.dry.as_ref().map(|table| DryInputs { table, history: &self.history }),
            logprobs: None,
        };
        sample_row(logits, &self.params, &row, self.n_out, scratch).token
    }
}

#[cfg(test)]
mod tests {
    use arc_device::ops::sample::DryConfig;

    use super::*;

    const VOCAB: usize = 40;

    /// Close logits, so that every processor and every draw word matters.
    fn logits(step: usize) -> Vec<f32> {
        (0..VOCAB).map(|id| ((id * 37 + step * 11) % 19) as f32 * 0.1).collect()
    }

    /// Draws 60 tokens; `told` says which of them the host state hears of.
    fn draw(sampling: &SamplerConfig, told: impl Fn(usize) -> bool) -> Vec<u32> {
        let prompt: Arc<[u32]> = [3, 9, 3, 9, 4].into();
        let mut scratch = Scratch::new(VOCAB, 128);
        let mut host = HostDraw::new(sampling, &[7], &prompt, 60, VOCAB as u32);
        (0..60)
            .map(|step| {
                let token = host.draw(&logits(step), None, &mut scratch).expect("finite");
                if told(step) {
                    host.push(token);
                }
                token
            })
            .collect()
    }

    /// The same from scratch at every step.
    fn oracle(sampling: &SamplerConfig) -> Vec<u32> {
        let mut all = vec![3, 9, 3, 9, 4];
        let mut scratch = Scratch::new(VOCAB, 128);
        for step in 0..60 {
            let mut seen = SeenTokens::new(VOCAB, &all[..5], 100);
            all[5..].iter().for_each(|&id| seen.push(id));
            let table = sampling.dry.as_ref().and_then(DryTable::new);
            let row = RowInputs {
                bias: &sampling.bias,
                stop_ids: &[7],
                seen: seen.tokens(),
                dry: table.as_ref().map(|table| DryInputs { table, history: &all }),
                ..RowInputs::default()
            };
            let params = SamplerParams::new(sampling);
            let drawn = sample_row(&logits(step), &params, &row, step as u32, &mut scratch);
            all.push(drawn.token.expect("finite"));
        }
        all.split_off(5)
    }

    #[test]
    fn a_sequence_is_drawn_with_its_own_history_and_draw_words() {
        let plain = SamplerConfig { seed: 5, ..SamplerConfig::default() };
        let dry = DryConfig { multiplier: 0.8, base: 1.75, allowed_length: 1, window: u32::MAX, breakers: vec![4] };
        let cases = [
            plain.clone(),
            SamplerConfig { min_tokens: 30, bias: vec![(7, 3.0)], ..plain.clone() },
            SamplerConfig { temperature: 0.0, repetition: 1.3, ..plain.clone() },
            SamplerConfig { presence: 0.5, frequency: 0.4, ..plain.clone() },
            SamplerConfig { temperature: 0.0, dry: Some(dry), ..plain },
        ];
        for sampling in cases {
            let want = oracle(&sampling);
            assert_eq!(draw(&sampling, |_| true), want);
            assert_ne!(draw(&sampling, |step| step != 10), want, "a token that was not heard of shows: {sampling:?}");
        }
    }

    #[test]
    fn a_mask_leaves_what_it_allows_and_faults_are_told() {
        let prompt: Arc<[u32]> = [1].into();
        let host = HostDraw::new(&SamplerConfig::default(), &[], &prompt, 5, VOCAB as u32);
        let mut scratch = Scratch::new(VOCAB, 1);
        assert_eq!(host.draw(&logits(0), Some(&[0, 1 << 3]), &mut scratch), Ok(35));
        assert_eq!(host.draw(&logits(0), Some(&[0, 0]), &mut scratch), Err(RowFault::NothingToSample));
        assert_eq!(host.draw(&[f32::NAN; VOCAB], None, &mut scratch), Err(RowFault::NonFiniteLogits));
    }
}
