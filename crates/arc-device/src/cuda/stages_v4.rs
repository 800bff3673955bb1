//! The stages of DeepSeek-V4 on the GPU.

use super::Cuda;
use super::stages::todo;
use crate::Norm;
use crate::error::Result;
use crate::ops::hc::HcConfig;
use crate::ops::quant::Inputs;
use crate::ops_v4::{
    DraftWeights, ExpertConfig, ExpertWeights, ExpertWork, HcHead, HcSite, Incoming, LatentLayer, LatentState,
    LatentWeights, LatentWork, OpsV4, Streams,
};

impl OpsV4 for Cuda {
    fn hc_site(
        &mut self,
        _h: &mut Self::Buf<f32>,
        _streams: &mut Streams<Self>,
        _incoming: Incoming<'_, Self>,
        _site: &HcSite<Self>,
        _cfg: &HcConfig,
        _norm: Norm<'_, Self>,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("hc_site"))
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
        _out: &mut Self::Buf<f32>,
        _streams: &mut Streams<Self>,
        _y: &Self::Buf<f32>,
        _head: &HcHead<Self>,
        _cfg: &HcConfig,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("hc_head"))
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
        _out: &mut Streams<Self>,
        _h: &mut Self::Buf<f32>,
        _streams: &Streams<Self>,
        _merged: &Self::Buf<f32>,
        _cfg: &HcConfig,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("draft_rows"))
    }

    fn sample_drafts(&mut self, _logits: &mut Self::Buf<f32>, _rows: usize) -> Result<()> {
        Err(todo("sample_drafts"))
    }
}
