//! The draft block (multi-token prediction): from the trunk's streams at a position and the token after it, logits of the
//! token after that.
//!
//! ```text
//! X[k] = W_e norm(embed(next token)) + W_h norm(X[k] of the trunk)      embed_next, draft_in
//! one layer: window attention at the same positions, learned router     as in the trunk
//! logits = W_head norm(mix of X)                                        hc_head, head; norm and mix its own
//! ```
//!
//! It has a window of rows of its own, addressed by position like every state. Embedding and head are the trunk's.
//! Source: DeepSeek-V4's published model code (`MTPBlock`).

use arc_device::error::Result;
use arc_device::ops_v4::{DraftWeights, HcHead, LatentState, OpsV4};
use arc_device::step::StepKey;
use arc_device::{Buffers, Norm};

use super::{DeepseekV4, Layer, Start};

/// Weights and state of the draft block.
pub(super) struct Draft<D: Buffers> {
    pub input: DraftWeights<D>,
    pub layer: Layer<D>,
    pub hc_head: HcHead<D>,
    pub norm: D::Buf<f32>,
    pub state: LatentState<D>,
    /// `[heads, vocab]`.
    pub logits: D::Buf<f32>,
}

impl<D: OpsV4> DeepseekV4<D> {
    /// Runs the draft block over the rows of the step whose trunk just ran; does nothing without a draft block. Its rows
    /// join its window; logits of head rows are in [`Self::draft_logits`].
    ///
    /// The trunk's logits must have been used: where a step runs in parts, the device keeps the last head's for the host.
    pub fn draft(&mut self, dev: &mut D, key: StepKey) -> Result<()> {
        let Some(draft) = &mut self.draft else { return Ok(()) };
        let (c, ws, rows) = (&self.config, &mut self.ws, key.rows as usize);
        dev.embed_next(&mut ws.y, &self.embed, rows)?;
        dev.draft_in(&mut ws.streams, &ws.y, &draft.input, &c.hc, c.experts.inputs, rows)?;
        let step = (rows, key.ctx);
        draft.layer.forward(dev, c, ws, &mut draft.state, &self.rope, Start::Streams, step, &mut |_, _, _| Ok(()))?;
        dev.hc_head(&mut ws.h, &mut ws.streams, &ws.y, &draft.hc_head, &c.hc, rows)?;
        let norm = Norm { weight: &draft.norm, eps: c.attention.eps };
        dev.head(&mut draft.logits, &ws.h, norm, &self.head, None, key.heads as usize)
    }

    /// `[heads, vocab]`: what the draft block said last; `None` without one.
    pub fn draft_logits(&self) -> Option<&D::Buf<f32>> {
        self.draft.as_ref().map(|draft| &draft.logits)
    }
}
