//! DeepSeek-V4: hyper-connections around latent attention and routed experts.
//!
//! ```text
//! X[k] = embed(token)                        for the four streams k
//! for each layer:
//!     h = norm(mix of X)                     hc_site
//!     q, row, pooled values and gates        attn_in, attn_q_kv
//!     compressed rows to read                index_select, in sparse layers with more than they read
//!     o = attention(q, window + compressed)  attn_latent
//!     y = W_b group-wise W_a unrotated o     attn_out_a, attn_out_b
//!     X = post y + comb X; h = norm(mix)     hc_site
//!     experts, shared gated unit             ffn_in
//!     y = sum of the experts                 experts_up, experts_down
//! z = mix of X                               hc_head
//! logits = W_head norm(z)                    head
//! ```
//!
//! Layer kinds: the window alone; *sparse*, which also reads rows that pool four tokens and an indexer chooses; *heavy*,
//! which also reads every row that pools 128. Source: DeepSeek-V4's published model code.

mod config;
mod draft;
mod load;
mod report;
mod weights;

use arc_device::error::Result;
use arc_device::ops::latent::RowFormat;
use arc_device::ops_v4::{
    ExpertWeights, ExpertWork, HcHead, HcSite, Incoming, LatentLayer, LatentState, LatentWeights, LatentWork, OpsV4,
    Streams,
};
use arc_device::step::{CtxClass, Limits, Part, StepKey};
use arc_device::{Buffers, Norm, Readback};

use draft::Draft;

pub use config::{LayerKind, NAME, Numerics, V4Config, Yarn, rope_row};
pub use report::{ClassRow, Report, SequenceState};

/// One layer's weights.
struct Layer<D: Buffers> {
    kind: LayerKind,
    attn_site: HcSite<D>,
    attn_norm: D::Buf<f32>,
    attention: LatentWeights<D>,
    ffn_site: HcSite<D>,
    ffn_norm: D::Buf<f32>,
    experts: ExpertWeights<D>,
}

/// Scratch of a step, reused by every layer.
pub struct Workspace<D: Buffers> {
    /// The embedding at first, then every block's output; `[rows, hidden]`.
    pub y: D::Buf<f32>,
    /// Every block's input, and the merged streams at the end; `[rows, hidden]`.
    pub h: D::Buf<f32>,
    /// The residual streams.
    pub streams: Streams<D>,
    /// Of the last attention block.
    pub attention: LatentWork<D>,
    /// Of the last block of experts.
    pub experts: ExpertWork<D>,
    /// `[heads, vocab]`.
    pub logits: D::Buf<f32>,
}

/// Where a forward pass stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// After the attention of this layer: `y` is its output, `streams` are those before it.
    Attention(usize),
    /// After the experts of this layer: likewise.
    Experts(usize),
    /// After the streams were merged into `h`.
    Merged,
}

/// Looks at the workspace in the middle of a forward pass: for tests, and to find where two devices part.
pub type Tap<'a, D> = &'a mut dyn FnMut(&mut D, Point, &Workspace<D>) -> Result<()>;

/// A DeepSeek-V4 model on a device.
pub struct DeepseekV4<D: Buffers> {
    config: V4Config,
    /// `[vocab, hidden]`.
    embed: D::Matrix,
    layers: Vec<Layer<D>>,
    hc_head: HcHead<D>,
    norm: D::Buf<f32>,
    /// `[vocab, hidden]`.
    head: D::Matrix,
    /// Of windowed layers, then of compressed ones.
    rope: [D::Buf<f32>; 2],
    /// By layer.
    state: Vec<LatentState<D>>,
    /// Where the configuration asks for it.
    draft: Option<Draft<D>>,
    ws: Workspace<D>,
}

impl<D: Readback> DeepseekV4<D> {
    /// Random rows in place of what sequences would have left: for measurements of some that nobody ran.
    pub fn fill_rows(&mut self, dev: &mut D, limits: &Limits) -> Result<()> {
        for (i, (state, &kind)) in self.state.iter_mut().zip(&self.config.layers).enumerate() {
            let layer: LatentLayer<'_, D> = latent_layer(&self.config, &self.rope, kind);
            let (att, seed) = (layer.attention, i as u64);
            dev.write(&mut state.window, &layer.row_format.random_rows(att.dim, limits.slots * att.ring(), seed))?;
            let rows = layer.rows.zip(state.rows.as_mut()).map(|(shape, pool)| (shape, pool, layer.row_format));
            let keys = layer.index.zip(state.keys.as_mut());
            let keys = keys.map(|((_, shape), pool)| (shape, pool, layer.key_format));
            for (shape, pool, format) in rows.into_iter().chain(keys) {
                let n = limits.blocks * shape.rows_per_block();
                dev.write(&mut pool.rows, &format.random_rows(shape.dim, n, seed))?;
                let ring = RowFormat::F32.random_rows(1, shape.ring_elements(limits.slots), seed);
                let ring = ring.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x));
                dev.write(&mut pool.ring, &ring.collect::<Vec<_>>())?;
            }
        }
        Ok(())
    }
}

impl<D: OpsV4> DeepseekV4<D> {
    /// One step over the device's row table, up to its draws.
    pub fn draw(&mut self, dev: &mut D, key: StepKey) -> Result<()> {
        self.draw_tapped(dev, key, &mut |_, _, _| Ok(()))
    }

    /// [`Self::draw`], with somebody looking on.
    pub fn draw_tapped(&mut self, dev: &mut D, key: StepKey, tap: Tap<'_, D>) -> Result<()> {
        let (rows, heads) = (key.rows as usize, key.heads as usize);
        if key.part != Part::Sample {
            self.forward(dev, rows, heads, key.ctx, tap)?;
        }
        if key.part != Part::Forward {
            dev.sample(&mut self.ws.logits, heads)?;
        }
        Ok(())
    }

    fn forward(&mut self, dev: &mut D, rows: usize, heads: usize, ctx: CtxClass, tap: Tap<'_, D>) -> Result<()> {
        let (c, ws) = (&self.config, &mut self.ws);
        dev.embed(&mut ws.y, &self.embed, 1.0, rows)?;
        for (i, (layer, state)) in self.layers.iter().zip(&mut self.state).enumerate() {
            let start = if i == 0 { Start::Embedding } else { Start::Output };
            layer.forward(dev, c, ws, state, &self.rope, start, (rows, ctx), &mut |dev, block, ws| {
                let point = match block {
                    Block::Attention => Point::Attention(i),
                    Block::Experts => Point::Experts(i),
                };
                tap(dev, point, ws)
            })?;
        }
        dev.hc_head(&mut ws.h, &mut ws.streams, &ws.y, &self.hc_head, &c.hc, rows)?;
        tap(dev, Point::Merged, ws)?;
        dev.head(&mut ws.logits, &ws.h, Norm { weight: &self.norm, eps: c.attention.eps }, &self.head, None, heads)
    }
}

/// What a layer's first site finds.
enum Start {
    /// The embedding, in `y`.
    Embedding,
    /// The output of the layer before, in `y`.
    Output,
    /// Streams that are ready.
    Streams,
}

/// The two blocks of a layer.
enum Block {
    Attention,
    Experts,
}

/// A [`Tap`] that does not know which layer it is in.
type BlockTap<'a, D> = &'a mut dyn FnMut(&mut D, Block, &Workspace<D>) -> Result<()>;

impl<D: OpsV4> Layer<D> {
    /// Both blocks; the output of the second is left in `ws.y`. `step`: rows, and the class of their longest context.
    fn forward(
        &self,
        dev: &mut D,
        c: &V4Config,
        ws: &mut Workspace<D>,
        state: &mut LatentState<D>,
        rope: &[D::Buf<f32>; 2],
        start: Start,
        (rows, ctx): (usize, CtxClass),
        tap: BlockTap<'_, D>,
    ) -> Result<()> {
        let (latent, w, eps) = (latent_layer(c, rope, self.kind), &self.attention, c.attention.eps);
        let select = latent.index.is_some_and(|(index, keys)| most_visible(keys.ratio, ctx) > index.top);
        let incoming = match start {
            Start::Embedding => Incoming::Embedding(&ws.y),
            Start::Output => Incoming::Output(&ws.y),
            Start::Streams => Incoming::Nothing,
        };
        let attn_norm = Norm { weight: &self.attn_norm, eps };
        dev.hc_site(&mut ws.h, &mut ws.streams, incoming, &self.attn_site, &c.hc, attn_norm, rows)?;
        dev.attn_in(&mut ws.attention, &ws.h, w, &latent, rows)?;
        dev.attn_q_kv(&mut ws.attention, state, w, &latent, select, rows)?;
        if select {
            dev.index_select(&mut ws.attention, state, &latent, rows)?;
        }
        dev.attn_latent(&mut ws.attention, state, w, &latent, select, rows)?;
        dev.attn_out_a(&mut ws.attention, w, &latent, rows)?;
        dev.attn_out_b(&mut ws.y, &ws.attention, w, &latent, rows)?;
        tap(dev, Block::Attention, ws)?;
        let (output, ffn_norm) = (Incoming::Output(&ws.y), Norm { weight: &self.ffn_norm, eps });
        dev.hc_site(&mut ws.h, &mut ws.streams, output, &self.ffn_site, &c.hc, ffn_norm, rows)?;
        dev.ffn_in(&mut ws.experts, &ws.h, &self.experts, &c.experts, rows)?;
        dev.experts_up(&mut ws.experts, &ws.h, &self.experts, &c.experts, rows)?;
        dev.experts_down(&mut ws.y, &ws.experts, &self.experts, &c.experts, rows)?;
        tap(dev, Block::Experts, ws)
    }
}

/// What the attention of a layer fixes.
fn latent_layer<'a, D: Buffers>(c: &V4Config, rope: &'a [D::Buf<f32>; 2], kind: LayerKind) -> LatentLayer<'a, D> {
    LatentLayer {
        attention: c.attention,
        q_rank: c.q_rank,
        rows: c.rows(kind),
        index: c.keys(kind).map(|keys| (c.index, keys)),
        row_format: c.row_format(),
        key_format: c.key_format(),
        inputs: c.experts.inputs,
        rope_table: &rope[usize::from(kind != LayerKind::Window)],
    }
}

/// Compressed rows that a row of a context class can see at most.
fn most_visible(ratio: usize, ctx: CtxClass) -> usize {
    ctx.limit() as usize / ratio
}
