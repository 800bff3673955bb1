//! Rope, the paged KV cache, and attention over it.

use crate::count::kv::KvRead;

/// Values of the widest head: what every device has room for. A model beyond it is refused before it is loaded.
pub const MAX_HEAD_DIM: usize = 256;
/// Query heads that may share a key head; likewise.
pub const MAX_GROUP: usize = 64;

/// Neighbouring rows of a sequence that read their keys once for all, as is counted on every device.
pub(crate) const GROUP_ROWS: usize = 8;

/// How the values of a head pair up for rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Value `i` with value `i + dim / 2` (Qwen, Gemma; GPT-NeoX).
    Halves,
    /// Value `2 i` with value `2 i + 1` (Llama as stored in GGUF).
    Adjacent,
}

/// Rotary position embedding. Source: Su et al. 2021.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rope {
    /// Rotated values at the start of each head; even, at most `head_dim`.
    pub dim: usize,
    /// How they pair.
    pub style: RopeStyle,
}

/// What one layer's attention fixes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionConfig {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`, into groups of at most [`MAX_GROUP`].
    pub n_kv_heads: usize,
    /// Values a head; at most [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Multiplies every score.
    pub scale: f32,
    /// Keys visible to a row, its own included; `None`: all of them.
    pub window: Option<u32>,
}

impl AttentionConfig {
    /// Values of a row of `qkv`.
    pub fn qkv_dim(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Elements of one layer's keys (and of its values) in a pool of `blocks`.
    pub fn kv_elements(&self, blocks: usize) -> usize {
        blocks * crate::step::BLOCK_TOKENS * self.n_kv_heads * self.head_dim
    }

    /// What a stage reads of its keys and values.
    pub(crate) fn read(&self) -> KvRead {
        KvRead::keys(4 * self.n_kv_heads * self.head_dim, self.window, GROUP_ROWS)
    }

    /// The first position visible to the row at `pos`.
    pub fn first_visible(&self, pos: u32) -> u32 {
        self.window.map_or(0, |window| (pos + 1).saturating_sub(window))
    }
}

#[cfg(test)]
mod tests;

pub(crate) mod cpu;
pub(crate) mod cuda;
