//! The stages of DeepSeek-V4 on the GPU.

use super::{Cuda, Grid, args, kernel};
use crate::Norm;
use crate::error::Result;
use crate::ops::hc::{self, HcConfig, STREAMS};
use crate::ops::moe;
use crate::ops::quant::Inputs;
use crate::ops_v4::{
    DraftWeights, ExpertConfig, ExpertWeights, ExpertWork, HcHead, HcSite, Incoming, LatentLayer, LatentState,
    LatentWeights, LatentWork, OpsV4, Streams,
};

/// Where a row info has the token after the row: `RowInfo::next` of step.cuh.
const NEXT_AT: u64 = 28;

impl OpsV4 for Cuda {
    fn hc_site(
        &mut self,
        h: &mut Self::Buf<f32>,
        streams: &mut Streams<Self>,
        incoming: Incoming<'_, Self>,
        site: &HcSite<Self>,
        cfg: &HcConfig,
        norm: Norm<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        hc::cuda::site(self, h, streams, incoming, site, cfg, norm, rows)
    }

    fn attn_in(
        &mut self,
        ws: &mut LatentWork<Self>,
        h: &Self::Buf<f32>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        self.latent_in(ws, h, w, layer, rows)
    }

    fn attn_q_kv(
        &mut self,
        ws: &mut LatentWork<Self>,
        state: &mut LatentState<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        select: bool,
        rows: usize,
    ) -> Result<()> {
        self.latent_q_kv(ws, state, w, layer, select, rows)
    }

    fn index_select(
        &mut self,
        ws: &mut LatentWork<Self>,
        state: &LatentState<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        self.index_choose(ws, state, layer, rows)
    }

    fn attn_latent(
        &mut self,
        ws: &mut LatentWork<Self>,
        state: &mut LatentState<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        select: bool,
        rows: usize,
    ) -> Result<()> {
        self.latent_attend(ws, state, w, layer, select, rows)
    }

    fn attn_out_a(
        &mut self,
        ws: &mut LatentWork<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        self.latent_out_a(ws, w, layer, rows)
    }

    fn attn_out_b(
        &mut self,
        out: &mut Self::Buf<f32>,
        ws: &LatentWork<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        self.latent_out_b(out, ws, w, layer, rows)
    }

    fn ffn_in(
        &mut self,
        ws: &mut ExpertWork<Self>,
        h: &Self::Buf<f32>,
        w: &ExpertWeights<Self>,
        cfg: &ExpertConfig,
        rows: usize,
    ) -> Result<()> {
        moe::cuda::ffn_in(self, ws, h, w, cfg, rows)
    }

    fn experts_up(
        &mut self,
        ws: &mut ExpertWork<Self>,
        h: &Self::Buf<f32>,
        w: &ExpertWeights<Self>,
        cfg: &ExpertConfig,
        rows: usize,
    ) -> Result<()> {
        moe::cuda::up(self, ws, h, w, cfg, rows)
    }

    fn experts_down(
        &mut self,
        out: &mut Self::Buf<f32>,
        ws: &ExpertWork<Self>,
        w: &ExpertWeights<Self>,
        cfg: &ExpertConfig,
        rows: usize,
    ) -> Result<()> {
        moe::cuda::down(self, out, ws, w, cfg, rows)
    }

    fn hc_head(
        &mut self,
        out: &mut Self::Buf<f32>,
        streams: &mut Streams<Self>,
        y: &Self::Buf<f32>,
        head: &HcHead<Self>,
        cfg: &HcConfig,
        rows: usize,
    ) -> Result<()> {
        hc::cuda::head(self, out, streams, y, head, cfg, rows)
    }

    fn embed_next(&mut self, out: &mut Self::Buf<f32>, table: &Self::Matrix, rows: usize) -> Result<()> {
        let next = self.view().infos() + NEXT_AT;
        self.decode_rows(out, table, next, 1.0, rows)
    }

    fn draft_in(
        &mut self,
        streams: &mut Streams<Self>,
        e: &Self::Buf<f32>,
        w: &DraftWeights<Self>,
        cfg: &HcConfig,
        inputs: Inputs,
        rows: usize,
    ) -> Result<()> {
        hc::cuda::draft(self, streams, e, w, cfg, inputs, rows)
    }

    fn draft_rows(
        &mut self,
        out: &mut Streams<Self>,
        h: &mut Self::Buf<f32>,
        streams: &Streams<Self>,
        merged: &Self::Buf<f32>,
        cfg: &HcConfig,
        rows: usize,
    ) -> Result<()> {
        let table = self.table_rows();
        self.begin_drafts(table, rows)?;
        let (draft, wide, narrow) = (self.view(), (STREAMS * cfg.dim) as u32, cfg.dim as u32);
        let grid = Grid::xy(wide.div_ceil(1024), rows as u32, 256);
        let args = args![&draft, out.x.ptr(), streams.x.ptr(), wide, h.ptr(), merged.ptr(), narrow];
        self.launch(kernel!("step_draft_gather"), grid, args)
    }

    fn sample_drafts(&mut self, logits: &mut Self::Buf<f32>, rows: usize) -> Result<()> {
        self.sample_with(logits, rows, 0)?;
        self.push_drafts(rows)
    }
}
