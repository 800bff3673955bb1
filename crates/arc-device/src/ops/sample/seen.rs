//! Which tokens a sequence holds, kept up to date as it grows.

use super::SeenToken;

/// Distinct tokens of one sequence's prompt and output, for the penalties.
///
/// Takes 4 bytes for each id of the vocabulary: make one only where
/// [`SamplerParams::reads_seen`](super::SamplerParams::reads_seen). Never allocates after it is made.
#[derive(Debug, Clone)]
pub struct SeenTokens {
    /// By id: index in `tokens` plus one, or 0.
    index: Vec<u32>,
    tokens: Vec<SeenToken>,
}

impl SeenTokens {
    /// A sequence's prompt, before any output. `len_max` is the most tokens that prompt and output will hold.
    /// Panics where a prompt token is outside the vocabulary.
    pub fn new(vocab: usize, prompt: &[u32], len_max: usize) -> Self {
        let mut seen = SeenTokens { index: vec![0; vocab], tokens: Vec::with_capacity(len_max.min(vocab)) };
        seen.restart(prompt);
        seen
    }

    /// Forgets the sequence and starts another in the same memory: same vocabulary, same most tokens. Panics where a
    /// prompt token is outside the vocabulary.
    pub fn restart(&mut self, prompt: &[u32]) {
        for token in self.tokens.drain(..) {
            self.index[token.id as usize] = 0;
        }
        for &id in prompt {
            self.entry(id).in_prompt = true;
        }
    }

    /// The output grew by a token. Panics where it is outside the vocabulary.
    pub fn push(&mut self, id: u32) {
        self.entry(id).in_output += 1;
    }

    /// Every token seen.
    pub fn tokens(&self) -> &[SeenToken] {
        &self.tokens
    }

    fn entry(&mut self, id: u32) -> &mut SeenToken {
        let index = &mut self.index[id as usize];
        if *index == 0 {
            self.tokens.push(SeenToken { id, in_output: 0, in_prompt: false });
            *index = self.tokens.len() as u32;
        }
        &mut self.tokens[*index as usize - 1]
    }
}
