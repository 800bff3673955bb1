//! The stages of DeepSeek-V4 on the GPU.

use super::stages::todo;
use super::{Cuda, Grid, args, kernel};
use crate::error::Result;
use crate::ops::hc::{HcConfig, STREAMS};
use crate::ops::hc::{self, HcConfig};
use crate::ops::quant::Inputs;
use crate::ops_v4::{
    DraftWeights, ExpertConfig, ExpertWeights, ExpertWork, HcHead, HcSite, Incoming, LatentLayer, LatentState,
    LatentWeights, LatentWork, OpsV4, Streams,
};
use crate::Norm;

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
        _ws: &mut LatentWork<Self>,
        _h: &Self::Buf<f32>,
        _w: &LatentWeights<Self>,
        _layer: &LatentLayer<'_, Self>,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("attn_in"))
    }

    fn attn_q_kv(
        &mut self,
        _ws: &mut LatentWork<Self>,
        _state: &mut LatentState<Self>,
        _w: &LatentWeights<Self>,
        _layer: &LatentLayer<'_, Self>,
        _select: bool,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("attn_q_kv"))
    }

    fn index_select(
        &mut self,
        _ws: &mut LatentWork<Self>,
        _state: &LatentState<Self>,
        _layer: &LatentLayer<'_, Self>,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("index_select"))
    }

    fn attn_latent(
        &mut self,
        _ws: &mut LatentWork<Self>,
        _state: &mut LatentState<Self>,
        _w: &LatentWeights<Self>,
        _layer: &LatentLayer<'_, Self>,
        _select: bool,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("attn_latent"))
    }

    fn attn_out_a(
        &mut self,
        _ws: &mut LatentWork<Self>,
        _w: &LatentWeights<Self>,
        _layer: &LatentLayer<'_, Self>,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("attn_out_a"))
    }

    fn attn_out_b(
        &mut self,
        _out: &mut Self::Buf<f32>,
        _ws: &LatentWork<Self>,
        _w: &LatentWeights<Self>,
        _layer: &LatentLayer<'_, Self>,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("attn_out_b"))
    }

    fn ffn_in(
        &mut self,
        _ws: &mut ExpertWork<Self>,
        _h: &Self::Buf<f32>,
        _w: &ExpertWeights<Self>,
        _cfg: &ExpertConfig,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("ffn_in"))
    }

    fn experts_up(
        &mut self,
        _ws: &mut ExpertWork<Self>,
        _h: &Self::Buf<f32>,
        _w: &ExpertWeights<Self>,
        _cfg: &ExpertConfig,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("experts_up"))
    }

    fn experts_down(
        &mut self,
        _out: &mut Self::Buf<f32>,
        _ws: &ExpertWork<Self>,
        _w: &ExpertWeights<Self>,
        _cfg: &ExpertConfig,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("experts_down"))
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

    fn embed_next(&mut self, _out: &mut Self::Buf<f32>, _table: &Self::Matrix, _rows: usize) -> Result<()> {
        Err(todo("embed_next"))
    }

    fn draft_in(
        &mut self,
        _streams: &mut Streams<Self>,
        _e: &Self::Buf<f32>,
        _w: &DraftWeights<Self>,
        _cfg: &HcConfig,
        _inputs: Inputs,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("draft_in"))
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
