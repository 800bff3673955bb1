//! The draft block (multi-token prediction): from the trunk's streams at a position and the token after it, logits of the
//! token after that.
//!
//! ```text
//! X[k] = W_e norm(embed(next token)) + W_h norm(X[k] of the trunk)      embed_next, draft_in
//! one layer: window attention at the same positions, learned router     as in the trunk
//! logits = W_head norm(mix of X)                                        hc_head, head; norm and mix its own
//! ```
//!
//! It follows every row of a step, so that its window knows each token with the trunk's streams: what was taken back is
//! written anew by the step that runs these positions again. Then each slot that wants drafts goes on in a row of its own:
//! its first draft comes from the last row that counts, the next from the block's own streams in place of the trunk's, one
//! position further on, and so forth.
//!
//! It has a window of rows of its own, addressed by position like every state. Embedding and head are the trunk's.
//! Source: DeepSeek-V4's published model code (`MTPBlock`); the chain: vLLM and ds4.

use arc_device::error::Result;
use arc_device::ops_v4::{DraftWeights, HcHead, LatentState, OpsV4, Streams};
use arc_device::step::{CtxClass, StepKey};
use arc_device::{Buffers, Norm};

use super::{DeepseekV4, Layer, Start, V4Config, Workspace};

/// Weights, state and workspace of the draft block.
pub(super) struct Draft<D: Buffers> {
    pub input: DraftWeights<D>,
    pub layer: Layer<D>,
    pub hc_head: HcHead<D>,
    pub norm: D::Buf<f32>,
    pub state: LatentState<D>,
    /// Of the draft rows.
    pub streams: Streams<D>,
    /// `[draft rows, hidden]`.
    pub merged: D::Buf<f32>,
    /// `[draft rows, vocab]`.
    pub logits: D::Buf<f32>,
}

/// Weights that the block shares with the trunk.
struct Shared<'a, D: Buffers> {
    config: &'a V4Config,
    embed: &'a D::Matrix,
    rope: &'a [D::Buf<f32>; 2],
}

impl<D: OpsV4> Draft<D> {
    /// Input and layer over the rows of the device's table; the output is left in `ws.y`.
    fn forward(
        &mut self,
        dev: &mut D,
        with: &Shared<'_, D>,
        ws: &mut Workspace<D>,
        rows: usize,
        ctx: CtxClass,
    ) -> Result<()> {
        let c = with.config;
        dev.embed_next(&mut ws.y, with.embed, rows)?;
        dev.draft_in(&mut ws.streams, &ws.y, &self.input, &c.hc, c.experts.inputs, rows)?;
        let (start, step) = (Start::Streams, (rows, ctx));
        self.layer.forward(dev, c, ws, &mut self.state, with.rope, start, step, &mut |_, _, _| Ok(()))
    }
}

impl<D: OpsV4> DeepseekV4<D> {
    /// Whether it was loaded with its draft block.
    pub fn can_draft(&self) -> bool {
        self.draft.is_some()
    }

    /// Drafts for the step whose draws were just made, as the key asks; does nothing without a draft block.
    ///
    /// The trunk's logits must have been used: where a step runs in parts, the device keeps the last head's for the host.
    pub fn draft(&mut self, dev: &mut D, key: StepKey) -> Result<()> {
        let Some(draft) = &mut self.draft else { return Ok(()) };
        let (c, ws) = (&self.config, &mut self.ws);
        let with = Shared { config: c, embed: &self.embed, rope: &self.rope };
        let (rows, n) = (key.rows as usize, key.draft_rows as usize);
        draft.forward(dev, &with, ws, rows, key.ctx)?;
        if n == 0 {
            return Ok(());
        }
        dev.hc_head(&mut ws.h, &mut ws.streams, &ws.y, &draft.hc_head, &c.hc, rows)?;
        dev.draft_rows(&mut draft.streams, &mut draft.merged, &ws.streams, &ws.h, &c.hc, n)?;
        std::mem::swap(&mut ws.streams, &mut draft.streams);
        let drafted = (0..key.drafts).try_for_each(|i| {
            if i > 0 {
                draft.forward(dev, &with, ws, n, key.ctx)?;
                dev.hc_head(&mut draft.merged, &mut ws.streams, &ws.y, &draft.hc_head, &c.hc, n)?;
            }
            let norm = Norm { weight: &draft.norm, eps: c.attention.eps };
            dev.head(&mut draft.logits, &draft.merged, norm, &self.head, None, n)?;
            dev.sample_drafts(&mut draft.logits, n)
        });
        std::mem::swap(&mut ws.streams, &mut draft.streams);
        drafted
    }

    /// What the draft block says of every head row of the step that just ran, `[heads, vocab]`, in place of the trunk's
    /// logits: for comparisons. `None` without a draft block.
    pub fn draft_logits(&mut self, dev: &mut D, key: StepKey) -> Result<Option<&D::Buf<f32>>> {
        let Some(draft) = &mut self.draft else { return Ok(None) };
        let (c, ws, rows) = (&self.config, &mut self.ws, key.rows as usize);
        let with = Shared { config: c, embed: &self.embed, rope: &self.rope };
        draft.forward(dev, &with, ws, rows, key.ctx)?;
        dev.hc_head(&mut ws.h, &mut ws.streams, &ws.y, &draft.hc_head, &c.hc, rows)?;
        let norm = Norm { weight: &draft.norm, eps: c.attention.eps };
        dev.head(&mut ws.logits, &ws.h, norm, &self.head, None, key.heads as usize)?;
        Ok(Some(&ws.logits))
    }
}
