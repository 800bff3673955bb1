//! The stages of DeepSeek-V4: hyper-connections around latent attention and routed experts.
//!
//! A layer is eleven stages, in the order of the trait's methods; `hc_site` stands before either block:
//!
//! ```text
//! hc_site  attn_in  attn_q_kv  [index_select]  attn_latent  attn_out_a  attn_out_b
//! hc_site  ffn_in   experts_up  experts_down
//! ```
//!
//! after the last layer come `hc_head` and the output head of [`Ops`]. What a stage computes is the contract of its
//! families: [`hc`](crate::ops::hc), [`latent`](crate::ops::latent), [`compress`](crate::ops::compress),
//! [`index`](crate::ops::index), [`router`](crate::ops::router), [`moe`](crate::ops::moe),
//! [`norm`](crate::ops::norm) and [`matmul`](crate::ops::matmul). Weights, state and workspace of a block are structs
//! here, with the shape beside every buffer, so that a stage names what it reads and writes.
//!
//! **Rows of one sequence stand together in the row table, in ascending position**: a query finds those before it there.
//!
//! **State is addressed by absolute position.** Nothing is shifted, accumulated or reset, and what a row sees follows
//! from its position alone: to run a position again gives the same state, to take positions back moves a cursor, and a
//! slot or a block may hold whatever its former owner left.

use crate::count::kv::KvRead;
use crate::error::Result;
use crate::ops::compress::Compressor;
use crate::ops::hc::HcConfig;
use crate::ops::index::IndexConfig;
use crate::ops::latent::{LatentConfig, RowFormat};
use crate::ops::quant::Inputs;
use crate::ops::router::RouterConfig;
use crate::{Buffers, Norm, Ops};

/// What the streams take in when a site begins.
pub enum Incoming<'a, D: Buffers> {
    /// The first site: every stream starts as the embedding `[rows, dim]`.
    Embedding(&'a D::Buf<f32>),
    /// The output `[rows, dim]` of the block before, with the mixing values that its site left.
    Output(&'a D::Buf<f32>),
    /// Nothing: the streams are already those of the site.
    Nothing,
}

/// Weights of one hyper-connection site.
pub struct HcSite<D: Buffers> {
    /// `[MIXES, STREAMS * dim]` f32.
    pub mix: D::Buf<f32>,
    /// `[MIXES]` f32.
    pub base: D::Buf<f32>,
    /// `[3]` f32, for `pre`, `post` and `comb`.
    pub scale: D::Buf<f32>,
}

/// Weights that merge the streams after the last layer.
pub struct HcHead<D: Buffers> {
    /// `[STREAMS, STREAMS * dim]` f32.
    pub mix: D::Buf<f32>,
    /// `[STREAMS]` f32.
    pub base: D::Buf<f32>,
    /// `[1]` f32.
    pub scale: D::Buf<f32>,
}

/// Weights that turn the trunk's streams into those of a draft block.
pub struct DraftWeights<D: Buffers> {
    /// Norm of the next token's embedding, `[dim]` f32.
    pub embed_norm: D::Buf<f32>,
    /// Norm of each stream, `[dim]` f32.
    pub stream_norm: D::Buf<f32>,
    /// `[dim, dim]`, of the embedding.
    pub embed: D::Matrix,
    /// `[dim, dim]`, of each stream.
    pub stream: D::Matrix,
}

/// The streams and what the last site said of them.
pub struct Streams<D: Buffers> {
    /// `[rows, STREAMS, dim]`.
    pub x: D::Buf<f32>,
    /// `[rows, MIXES]`: `pre`, `post`, `comb` of the last site. Between two sites a device may keep them in a form of its
    /// own.
    pub mixing: D::Buf<f32>,
}

/// Weights that finish the rows of one compressor; its projections are parts of [`PoolWeights::matrix`].
pub struct CompressorWeights<D: Buffers> {
    /// Added to the gates: `[ratio, width]` f32.
    pub bias: D::Buf<f32>,
    /// `[dim]` f32.
    pub norm: D::Buf<f32>,
}

/// What a compressed layer has beside a windowed one.
pub struct PoolWeights<D: Buffers> {
    /// Five parts, or two without indexer, each `[.., hidden]`: values and gates of the attention's compressor
    /// (`width` each), values and gates of the indexer's, weights of the index heads.
    pub matrix: D::Matrix,
    /// The attention's compressor.
    pub rows: CompressorWeights<D>,
    /// The indexer.
    pub index: Option<IndexWeights<D>>,
}

/// Weights of an indexer.
pub struct IndexWeights<D: Buffers> {
    /// `[heads * dim, q_rank]`.
    pub q_b: D::Matrix,
    /// Its compressor.
    pub keys: CompressorWeights<D>,
}

/// Weights of one attention block.
pub struct LatentWeights<D: Buffers> {
    /// `[q_rank + dim, hidden]`: queries' first projection, then the row's.
    pub low: D::Matrix,
    /// `[q_rank]` f32.
    pub q_norm: D::Buf<f32>,
    /// `[heads * dim, q_rank]`.
    pub q_b: D::Matrix,
    /// `[dim]` f32.
    pub kv_norm: D::Buf<f32>,
    /// `[heads]` f32.
    pub sinks: D::Buf<f32>,
    /// Compressors, in a compressed layer.
    pub pool: Option<PoolWeights<D>>,
    /// One part a group, each `[group_out, heads * dim / groups]`.
    pub out_a: D::Matrix,
    /// `[hidden, groups * group_out]`.
    pub out_b: D::Matrix,
}

/// State of one compressor.
pub struct PoolState<D: Buffers> {
    /// `[slots, ring, 2, width]` f32: values and gates of recent tokens.
    pub ring: D::Buf<f32>,
    /// `[blocks, rows_per_block, row_bytes]`.
    pub rows: D::Buf<u8>,
}

/// State of one attention block.
pub struct LatentState<D: Buffers> {
    /// `[slots, ring, row_bytes]`: rows of recent tokens.
    pub window: D::Buf<u8>,
    /// Of the attention's compressor.
    pub rows: Option<PoolState<D>>,
    /// Of the indexer's compressor.
    pub keys: Option<PoolState<D>>,
}

/// Workspace of an attention block, for the widest layer and the largest step.
pub struct LatentWork<D: Buffers> {
    /// `[rows, q_rank + dim]`.
    pub low: D::Buf<f32>,
    /// `[rows, parts of PoolWeights::matrix]`.
    pub pool: D::Buf<f32>,
    /// `[rows, heads * dim]`: queries.
    pub q: D::Buf<f32>,
    /// `[rows, dim]`: the step's own rows, as storing would leave them.
    pub kv: D::Buf<f32>,
    /// `[rows, index heads * index dim]`: index queries.
    pub index_q: D::Buf<f32>,
    /// `[rows, top]`: chosen rows, ascending; written where more than `top` are visible.
    pub picks: D::Buf<u32>,
    /// `[rows, heads * dim]`: what the heads read, still rotated.
    pub out: D::Buf<f32>,
    /// `[rows, groups * group_out]`.
    pub grouped: D::Buf<f32>,
}

/// What one attention block fixes.
pub struct LatentLayer<'a, D: Buffers> {
    /// Heads, window, groups.
    pub attention: LatentConfig,
    /// Width of the query projection between its two matrices.
    pub q_rank: usize,
    /// The attention's compressor.
    pub rows: Option<Compressor>,
    /// The indexer and its compressor.
    pub index: Option<(IndexConfig, Compressor)>,
    /// How rows are kept.
    pub row_format: RowFormat,
    /// How index rows are kept.
    pub key_format: RowFormat,
    /// How the inputs of `low`, `q_b`, the indexer's `q_b`, `out_a` and `out_b` are rounded; compressors and index weights
    /// read f32.
    pub inputs: Inputs,
    /// `[context, ROPE_DIM / 2, 2]` f32: cosine and sine by position.
    pub rope_table: &'a D::Buf<f32>,
}

impl<D: Buffers> LatentLayer<'_, D> {
    /// Values of a row of [`LatentWork::pool`].
    pub fn pool_dim(&self) -> usize {
        let keys = self.index.map_or(0, |(index, keys)| 2 * keys.width() + index.heads);
        self.rows.map_or(0, |rows| 2 * rows.width()) + keys
    }

    /// Where the indexer's values begin in a row of [`LatentWork::pool`].
    pub fn keys_at(&self) -> usize {
        self.rows.map_or(0, |rows| 2 * rows.width())
    }

    /// What scores of keys read.
    pub(crate) fn scored(&self, index: IndexConfig, keys: Compressor) -> KvRead {
        KvRead::rows(self.key_format.row_bytes(index.dim), keys.ratio, index.top, usize::MAX)
    }

    /// What the attention reads: recent rows, and compressed ones. `select`: whether they are chosen.
    pub(crate) fn attended(&self, select: bool) -> impl Iterator<Item = KvRead> {
        let (att, row_bytes) = (self.attention, self.row_format.row_bytes(self.attention.dim));
        let top = self.index.filter(|_| select).map_or(usize::MAX, |(index, _)| index.top);
        let recent = KvRead::keys(row_bytes, Some(att.window as u32), 1);
        let compressed = self.rows.map(|rows| KvRead::rows(row_bytes, rows.ratio, 0, top));
        std::iter::once(recent).chain(compressed)
    }
}

/// How a layer chooses its experts.
pub enum RouterWeights<D: Buffers> {
    /// `[vocab, chosen]`: by token.
    Hashed(D::Buf<u32>),
    /// `[experts]` f32: by score, with this bias.
    Learned(D::Buf<f32>),
}

/// Weights of one block of experts.
pub struct ExpertWeights<D: Buffers> {
    /// `[experts, hidden]` f32.
    pub gate: D::Buf<f32>,
    /// How experts are chosen.
    pub router: RouterWeights<D>,
    /// Two parts an expert, gate then up, each `[ffn, hidden]`.
    pub up: D::Matrix,
    /// One part an expert, each `[hidden, ffn]`.
    pub down: D::Matrix,
    /// The shared expert's gate and up, as two parts.
    pub shared_up: D::Matrix,
    /// `[hidden, ffn]`.
    pub shared_down: D::Matrix,
}

/// What one block of experts fixes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertConfig {
    /// The gate.
    pub router: RouterConfig,
    /// Width of the residual streams.
    pub hidden: usize,
    /// Width of an expert, routed or shared.
    pub ffn: usize,
    /// Clamp of the gated unit.
    pub limit: f32,
    /// How the inputs of every expert's matrices are rounded; the gate reads f32.
    pub inputs: Inputs,
}

/// Workspace of a block of experts.
pub struct ExpertWork<D: Buffers> {
    /// `[rows, chosen]`, ascending in a row.
    pub ids: D::Buf<u32>,
    /// `[rows, chosen]`.
    pub weights: D::Buf<f32>,
    /// `[rows * chosen]`: assignments by expert, then row.
    pub order: D::Buf<u32>,
    /// `[experts + 1]`: where each expert's assignments begin.
    pub bounds: D::Buf<u32>,
    /// `[rows * chosen, ffn]`, in the order of `order`.
    pub mid: D::Buf<f32>,
    /// `[rows, ffn]`: of the shared expert.
    pub shared: D::Buf<f32>,
}

/// Model stages of DeepSeek-V4. As in [`Ops`], none allocates, reads back, or waits.
pub trait OpsV4: Ops {
    /// Takes the last block's output into the streams, and gives the next block its input. Exact.
    ///
    /// `streams.x` becomes X' of the site before (or the embedding, four times), `streams.mixing` the values of this
    /// site, `h[r] = norm(sum over k of pre[k] X'[k])`. `h`: `[rows, dim]`.
    fn hc_site(
        &mut self,
        h: &mut Self::Buf<f32>,
        streams: &mut Streams<Self>,
        incoming: Incoming<'_, Self>,
        site: &HcSite<Self>,
        cfg: &HcConfig,
        norm: Norm<'_, Self>,
        rows: usize,
    ) -> Result<()>;

    /// Every matrix that reads the block's input: `ws.low` and, in a compressed layer, `ws.pool`. `h`: `[rows, hidden]`.
    /// Exact for integer-coded formats, otherwise invariant.
    fn attn_in(
        &mut self,
        ws: &mut LatentWork<Self>,
        h: &Self::Buf<f32>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()>;

    /// Queries, the step's rows, and what the compressors finish.
    ///
    /// `ws.q`: norm, second projection. `ws.kv`: norm, rope, as stored. Rows that a compressor completes go to the
    /// sequence's blocks; then its rings take the step's tokens. With `select`, `ws.index_q`: second projection, rope, as
    /// index rows are stored.
    fn attn_q_kv(
        &mut self,
        ws: &mut LatentWork<Self>,
        state: &mut LatentState<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        select: bool,
        rows: usize,
    ) -> Result<()>;

    /// Chooses compressed rows into `ws.picks`, for rows that see more than `top`. Exact. Not called where no row can.
    fn index_select(
        &mut self,
        ws: &mut LatentWork<Self>,
        state: &LatentState<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()>;

    /// Norm and rope of every query head, maybe in place; its attention into `ws.out`; then the window's ring takes the
    /// step's rows. Invariant, bounded.
    /// `select`: whether `index_select` ran; otherwise every visible compressed row is read.
    fn attn_latent(
        &mut self,
        ws: &mut LatentWork<Self>,
        state: &mut LatentState<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        select: bool,
        rows: usize,
    ) -> Result<()>;

    /// Undoes the rotation of every head and projects each group of heads: `ws.grouped`. `ws.out` is left as it was.
    fn attn_out_a(
        &mut self,
        ws: &mut LatentWork<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()>;

    /// `out[r] = out_b * ws.grouped[r]`. `out`: `[rows, hidden]`.
    fn attn_out_b(
        &mut self,
        out: &mut Self::Buf<f32>,
        ws: &LatentWork<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()>;

    /// Scores and choice of experts, the step's assignments, and the shared expert's gated unit; all of it may be left to the
    /// next two stages. Scores and choice are exact. `h`: `[rows, hidden]`.
    fn ffn_in(
        &mut self,
        ws: &mut ExpertWork<Self>,
        h: &Self::Buf<f32>,
        w: &ExpertWeights<Self>,
        cfg: &ExpertConfig,
        rows: usize,
    ) -> Result<()>;

    /// Gated unit of every assignment, its routing weight included: `ws.mid`.
    fn experts_up(
        &mut self,
        ws: &mut ExpertWork<Self>,
        h: &Self::Buf<f32>,
        w: &ExpertWeights<Self>,
        cfg: &ExpertConfig,
        rows: usize,
    ) -> Result<()>;

    /// Sum of the experts of every row, ascending, and of the shared one last. `out`: `[rows, hidden]`.
    fn experts_down(
        &mut self,
        out: &mut Self::Buf<f32>,
        ws: &ExpertWork<Self>,
        w: &ExpertWeights<Self>,
        cfg: &ExpertConfig,
        rows: usize,
    ) -> Result<()>;

    /// Takes the last block's output into the streams, and merges the streams of head rows: `out[r]`, `[rows, dim]`.
    /// Exact. Other rows of `out` may be left as they were.
    fn hc_head(
        &mut self,
        out: &mut Self::Buf<f32>,
        streams: &mut Streams<Self>,
        y: &Self::Buf<f32>,
        head: &HcHead<Self>,
        cfg: &HcConfig,
        rows: usize,
    ) -> Result<()>;

    /// Embeds the token that follows each row of its sequence: what the row drew, if that counts; otherwise the next row's
    /// token, and for the last one its [`target`](crate::step::Row::target). In draft rows, the slot's last draft. Exact.
    /// `out`: `[rows, dim]`; `table`: `[vocab, dim]`.
    fn embed_next(&mut self, out: &mut Self::Buf<f32>, table: &Self::Matrix, rows: usize) -> Result<()>;

    /// A draft block's streams: `X[k] = embed * norm(e) + stream * norm(X[k])`. `e`: `[rows, dim]`. Exact for
    /// integer-coded formats, otherwise invariant.
    fn draft_in(
        &mut self,
        streams: &mut Streams<Self>,
        e: &Self::Buf<f32>,
        w: &DraftWeights<Self>,
        cfg: &HcConfig,
        inputs: Inputs,
        rows: usize,
    ) -> Result<()>;

    /// Leaves the step's table for the *draft rows*: one for each row with [`PROPOSE`](crate::step::row_flags::PROPOSE), in
    /// table order, at the position of the last row of its slot whose draw counts; inert where there is none or the
    /// sequence has ended. `out` and `h` take that row's streams and merged streams, `[rows, STREAMS, dim]` and
    /// `[rows, dim]`. Until `commit`, stages run over the draft rows, all of them head rows. Exact.
    fn draft_rows(
        &mut self,
        out: &mut Streams<Self>,
        h: &mut Self::Buf<f32>,
        streams: &Streams<Self>,
        merged: &Self::Buf<f32>,
        cfg: &HcConfig,
        rows: usize,
    ) -> Result<()>;

    /// Draws a draft for every draft row, as its slot will draw that token, behind the drafts it has; then the row stands
    /// one position further on. A row that can draw nothing becomes inert. Exact. `logits`: `[rows, vocab]`, may be
    /// overwritten.
    fn sample_drafts(&mut self, logits: &mut Self::Buf<f32>, rows: usize) -> Result<()>;
}
