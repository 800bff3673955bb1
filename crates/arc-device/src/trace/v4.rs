//! The stages of DeepSeek-V4 on paper.

use super::{Trace, TraceBuf, TraceMatrix, shape};
use crate::Norm;
use crate::error::Result;
use crate::ops::hc::{HcConfig, MIXES, STREAMS};
use crate::ops::latent::ROPE_DIM;
use crate::ops::quant::Inputs;
use crate::ops_v4::{
    DraftWeights, ExpertConfig, ExpertWeights, ExpertWork, HcHead, HcSite, Incoming, LatentLayer, LatentState,
    LatentWeights, LatentWork, OpsV4, RouterWeights, Streams,
};

/// Bytes of a vector weight.
fn bytes(buf: &TraceBuf) -> u64 {
    4 * buf.len as u64
}

/// What one of `experts` equal shares of a matrix takes, times those that a step of `rows` rows can choose.
fn share(w: &TraceMatrix, cfg: &ExpertConfig, rows: usize) -> u64 {
    let experts = cfg.router.experts;
    w.bytes / experts as u64 * experts.min(rows * cfg.router.chosen) as u64
}

impl OpsV4 for Trace {
    fn hc_site(
        &mut self,
        h: &mut TraceBuf,
        streams: &mut Streams<Self>,
        incoming: Incoming<'_, Self>,
        site: &HcSite<Self>,
        cfg: &HcConfig,
        norm: Norm<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        if let Incoming::Embedding(y) | Incoming::Output(y) = incoming {
            self.needs("hc_site", y, rows * cfg.dim)?;
        }
        for (buf, len) in [
            (&*h, rows * cfg.dim),
            (&streams.x, rows * STREAMS * cfg.dim),
            (&streams.mixing, rows * MIXES),
            (&site.mix, MIXES * STREAMS * cfg.dim),
            (norm.weight, cfg.dim),
        ] {
            self.needs("hc_site", buf, len)?;
        }
        let first = if matches!(incoming, Incoming::Output(_)) { "" } else { ", first" };
        self.stage("hc_site", format!("{STREAMS}x{} f32{first}", cfg.dim), bytes(&site.mix), 0)
    }

    fn attn_in(
        &mut self,
        ws: &mut LatentWork<Self>,
        h: &TraceBuf,
        w: &LatentWeights<Self>,
        _layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        self.needs("attn_in", h, rows * w.low.cols)?;
        self.needs("attn_in", &ws.low, rows * w.low.rows)?;
        let (mut what, mut read) = (shape(&w.low), w.low.bytes);
        if let Some(pool) = &w.pool {
            self.needs("attn_in", &ws.pool, rows * pool.matrix.rows)?;
            what += &format!(", {}", shape(&pool.matrix));
            read += pool.matrix.bytes;
        }
        self.stage("attn_in", what, read, 0)
    }

    fn attn_q_kv(
        &mut self,
        ws: &mut LatentWork<Self>,
        _state: &mut LatentState<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        select: bool,
        rows: usize,
    ) -> Result<()> {
        self.needs("attn_q_kv", &ws.q, rows * layer.attention.q_dim())?;
        self.needs("attn_q_kv", &ws.kv, rows * layer.attention.dim)?;
        self.needs("attn_q_kv", layer.rope_table, self.limits.context * ROPE_DIM)?;
        let (mut what, mut read) = (shape(&w.q_b), w.q_b.bytes);
        if let Some(index) = w.pool.as_ref().and_then(|pool| pool.index.as_ref()).filter(|_| select) {
            self.needs("attn_q_kv", &ws.index_q, rows * index.q_b.rows)?;
            what += &format!(", index {}", shape(&index.q_b));
            read += index.q_b.bytes;
        }
        for compressor in layer.rows.iter().chain(layer.index.iter().map(|(_, keys)| keys)) {
            what += &format!(", {} by {}", compressor.dim, compressor.ratio);
        }
        self.stage("attn_q_kv", what, read, 0)
    }

    fn index_select(
        &mut self,
        ws: &mut LatentWork<Self>,
        _state: &LatentState<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        let Some((cfg, keys)) = layer.index else { return Ok(()) };
        self.needs("index_select", &ws.picks, rows * cfg.top)?;
        let visible = keys.visible(self.context as u32 - 1);
        let scored = if visible > cfg.top { visible } else { 0 };
        let read = (rows * scored * layer.key_format.row_bytes(cfg.dim)) as u64;
        self.stage("index_select", format!("{} of {visible}, {} heads of {}", cfg.top, cfg.heads, cfg.dim), 0, read)
    }

    fn attn_latent(
        &mut self,
        ws: &mut LatentWork<Self>,
        _state: &mut LatentState<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        select: bool,
        rows: usize,
    ) -> Result<()> {
        let att = layer.attention;
        self.needs("attn_latent", &ws.out, rows * att.q_dim())?;
        self.needs("attn_latent", &w.sinks, att.heads)?;
        let recent = self.context.min(att.window);
        let visible = layer.rows.map_or(0, |rows| rows.visible(self.context as u32 - 1));
        let chosen = layer.index.filter(|_| select).map_or(visible, |(index, _)| visible.min(index.top));
        let what = format!("{} heads of {}, {recent} + {chosen} rows", att.heads, att.dim);
        let read = rows * (recent + chosen) * layer.row_format.row_bytes(att.dim);
        self.stage("attn_latent", what, 0, read as u64)
    }

    fn attn_out_a(
        &mut self,
        ws: &mut LatentWork<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        let att = layer.attention;
        self.needs("attn_out_a", &ws.grouped, rows * att.groups * att.group_out)?;
        self.stage("attn_out_a", format!("{} groups of {}", att.groups, shape(&w.out_a)), w.out_a.bytes, 0)
    }

    fn attn_out_b(
        &mut self,
        out: &mut TraceBuf,
        ws: &LatentWork<Self>,
        w: &LatentWeights<Self>,
        _layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        self.needs("attn_out_b", out, rows * w.out_b.rows)?;
        self.needs("attn_out_b", &ws.grouped, rows * w.out_b.cols)?;
        self.stage("attn_out_b", shape(&w.out_b), w.out_b.bytes, 0)
    }

    fn ffn_in(
        &mut self,
        ws: &mut ExpertWork<Self>,
        h: &TraceBuf,
        w: &ExpertWeights<Self>,
        cfg: &ExpertConfig,
        rows: usize,
    ) -> Result<()> {
        self.needs("ffn_in", h, rows * cfg.hidden)?;
        self.needs("ffn_in", &ws.ids, rows * cfg.router.chosen)?;
        self.needs("ffn_in", &ws.bounds, cfg.router.experts + 1)?;
        self.needs("ffn_in", &ws.shared, rows * cfg.ffn)?;
        let kind = match w.router {
            RouterWeights::Hashed(_) => "hashed",
            RouterWeights::Learned(_) => "learned",
        };
        let router = cfg.router;
        let what = format!("{} of {} {kind}, shared {}", router.chosen, router.experts, shape(&w.shared_up));
        self.stage("ffn_in", what, bytes(&w.gate) + w.shared_up.bytes, 0)
    }

    fn experts_up(
        &mut self,
        ws: &mut ExpertWork<Self>,
        _h: &TraceBuf,
        w: &ExpertWeights<Self>,
        cfg: &ExpertConfig,
        rows: usize,
    ) -> Result<()> {
        self.needs("experts_up", &ws.mid, rows * cfg.router.chosen * cfg.ffn)?;
        self.stage("experts_up", shape(&w.up), share(&w.up, cfg, rows), 0)
    }

    fn experts_down(
        &mut self,
        out: &mut TraceBuf,
        _ws: &ExpertWork<Self>,
        w: &ExpertWeights<Self>,
        cfg: &ExpertConfig,
        rows: usize,
    ) -> Result<()> {
        self.needs("experts_down", out, rows * cfg.hidden)?;
        let what = format!("{}, shared {}", shape(&w.down), shape(&w.shared_down));
        self.stage("experts_down", what, share(&w.down, cfg, rows) + w.shared_down.bytes, 0)
    }

    fn hc_head(
        &mut self,
        out: &mut TraceBuf,
        streams: &mut Streams<Self>,
        y: &TraceBuf,
        head: &HcHead<Self>,
        cfg: &HcConfig,
        rows: usize,
    ) -> Result<()> {
        self.needs("hc_head", out, rows * cfg.dim)?;
        self.needs("hc_head", y, rows * cfg.dim)?;
        self.needs("hc_head", &streams.x, rows * STREAMS * cfg.dim)?;
        self.stage("hc_head", format!("{STREAMS}x{} f32", cfg.dim), bytes(&head.mix), 0)
    }

    fn embed_next(&mut self, out: &mut TraceBuf, table: &TraceMatrix, rows: usize) -> Result<()> {
        self.needs("embed_next", out, rows * table.cols)?;
        self.stage("embed_next", shape(table), table.bytes / table.rows.max(1) as u64 * rows as u64, 0)
    }

    fn draft_in(
        &mut self,
        streams: &mut Streams<Self>,
        e: &TraceBuf,
        w: &DraftWeights<Self>,
        cfg: &HcConfig,
        _inputs: Inputs,
        rows: usize,
    ) -> Result<()> {
        self.needs("draft_in", &streams.x, rows * STREAMS * cfg.dim)?;
        self.needs("draft_in", e, rows * cfg.dim)?;
        let what = format!("{}, {STREAMS} of {}", shape(&w.embed), shape(&w.stream));
        self.stage("draft_in", what, w.embed.bytes + w.stream.bytes, 0)
    }

    fn draft_rows(
        &mut self,
        out: &mut Streams<Self>,
        h: &mut TraceBuf,
        streams: &Streams<Self>,
        merged: &TraceBuf,
        cfg: &HcConfig,
        rows: usize,
    ) -> Result<()> {
        for (buf, len) in
            [(&out.x, STREAMS * cfg.dim), (&streams.x, STREAMS * cfg.dim), (h, cfg.dim), (merged, cfg.dim)]
        {
            self.needs("draft_rows", buf, rows * len)?;
        }
        self.stage("draft_rows", format!("{rows} rows, {STREAMS}x{} f32", cfg.dim), 0, 0)
    }

    fn sample_drafts(&mut self, _logits: &mut TraceBuf, rows: usize) -> Result<()> {
        self.stage("sample_drafts", format!("{rows} rows"), 0, 0)
    }
}
