//! The stages of the dense decoder on the GPU: each is a few launches of its families' kernels.

use super::{Cuda, Grid, args, kernel};
use crate::error::{DeviceError, Result};
use crate::ops::glu::Activation;
use crate::ops::kv::AttentionConfig;
use crate::{KvLayer, Norm, Ops, QkvConfig};

pub(super) fn todo(stage: &str) -> DeviceError {
    DeviceError::Unsupported { device: "cuda", what: format!("stage {stage}") }
}

impl Ops for Cuda {
    fn embed(&mut self, _out: &mut Self::Buf<f32>, _table: &Self::Matrix, _scale: f32, _rows: usize) -> Result<()> {
        Err(todo("embed"))
    }

    fn norm_matmul(
        &mut self,
        _out: &mut Self::Buf<f32>,
        _x: &Self::Buf<f32>,
        _norm: Norm<'_, Self>,
        _w: &Self::Matrix,
        _bias: Option<&Self::Buf<f32>>,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("norm_matmul"))
    }

    fn qkv_rope_append(
        &mut self,
        _qkv: &mut Self::Buf<f32>,
        _kv: &mut KvLayer<Self>,
        _cfg: &QkvConfig<'_, Self>,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("qkv_rope_append"))
    }

    fn attention(
        &mut self,
        _out: &mut Self::Buf<f32>,
        _qkv: &Self::Buf<f32>,
        _kv: &KvLayer<Self>,
        _cfg: &AttentionConfig,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("attention"))
    }

    fn matmul_residual(
        &mut self,
        _residual: &mut Self::Buf<f32>,
        _x: &Self::Buf<f32>,
        _w: &Self::Matrix,
        _post_norm: Option<Norm<'_, Self>>,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("matmul_residual"))
    }

    fn norm_gate_up_glu(
        &mut self,
        _out: &mut Self::Buf<f32>,
        _x: &Self::Buf<f32>,
        _norm: Norm<'_, Self>,
        _w: &Self::Matrix,
        _act: Activation,
        _rows: usize,
    ) -> Result<()> {
        Err(todo("norm_gate_up_glu"))
    }

    fn head(
        &mut self,
        _logits: &mut Self::Buf<f32>,
        _x: &Self::Buf<f32>,
        _norm: Norm<'_, Self>,
        _w: &Self::Matrix,
        _softcap: Option<f32>,
        _heads: usize,
    ) -> Result<()> {
        Err(todo("head"))
    }

    fn sample(&mut self, _logits: &mut Self::Buf<f32>, _heads: usize) -> Result<()> {
        Err(todo("sample"))
    }

    fn commit(&mut self, rows: usize, _heads: usize) -> Result<()> {
        let view = self.view();
        self.launch(kernel!("step_commit"), Grid::new(1, 256), args![&view, rows as u32])
    }
}
