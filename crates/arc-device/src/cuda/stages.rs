//! The stages of the dense decoder on the GPU: each is a few launches of its families' kernels.

use super::Cuda;
use crate::error::Result;
use crate::ops::glu::Activation;
use crate::ops::kv::AttentionConfig;
use crate::ops::matmul::cuda::{Out, Source, Then};
use crate::{DenseLayer, DenseRows, KvLayer, Norm, Ops, QkvConfig};

/// Where a row info has its token.
const TOKEN_AT: u64 = 12;

impl Ops for Cuda {
    fn embed(&mut self, out: &mut Self::Buf<f32>, table: &Self::Matrix, scale: f32, rows: usize) -> Result<()> {
        let tokens = self.view().infos() + TOKEN_AT;
        self.decode_rows(out, table, tokens, scale, rows)
    }

    fn norm_matmul(
        &mut self,
        out: &mut Self::Buf<f32>,
        x: &Self::Buf<f32>,
        norm: Norm<'_, Self>,
        w: &Self::Matrix,
        bias: Option<&Self::Buf<f32>>,
        rows: usize,
    ) -> Result<()> {
        let then = bias.map_or(Then::Store, |bias| Then::Bias(bias.ptr()));
        let out = Out { at: out.ptr(), stride: w.rows, then };
        self.product_of(w, Source::of(x, w.cols).normed(norm), out, rows)
    }

    fn qkv_rope_append(
        &mut self,
        qkv: &mut Self::Buf<f32>,
        kv: &mut KvLayer<Self>,
        cfg: &QkvConfig<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        self.kv_append(qkv, kv, cfg, rows)
    }

    fn attention(
        &mut self,
        out: &mut Self::Buf<f32>,
        qkv: &Self::Buf<f32>,
        kv: &KvLayer<Self>,
        cfg: &AttentionConfig,
        rows: usize,
    ) -> Result<()> {
        self.kv_attend(out, qkv, kv, cfg, rows)
    }

    fn matmul_residual(
        &mut self,
        residual: &mut Self::Buf<f32>,
        x: &Self::Buf<f32>,
        w: &Self::Matrix,
        post_norm: Option<Norm<'_, Self>>,
        rows: usize,
    ) -> Result<()> {
        let from = Source::of(x, w.cols);
        match post_norm {
            None => self.product_of(w, from, Out { at: residual.ptr(), stride: w.rows, then: Then::Add }, rows),
            Some(norm) => self.product_normed(residual, w, from, norm, rows),
        }
    }

    fn norm_gate_up_glu(
        &mut self,
        out: &mut Self::Buf<f32>,
        x: &Self::Buf<f32>,
        norm: Norm<'_, Self>,
        w: &Self::Matrix,
        act: Activation,
        rows: usize,
    ) -> Result<()> {
        let out = Out { at: out.ptr(), stride: w.rows / 2, then: Then::Glu(act) };
        self.product_of(w, Source::of(x, w.cols).normed(norm), out, rows)
    }

    fn layers<'a>(
        &mut self,
        on: &mut DenseRows<'_, Self>,
        layers: &mut dyn Iterator<Item = DenseLayer<'a, Self>>,
        rows: usize,
    ) -> Result<()>
    where
        Self: 'a,
    {
        let layers: Vec<DenseLayer<'a, Self>> = layers.collect();
        if self.layers_of_rows(on.x, &layers, rows)? {
            return Ok(());
        }
        layers.into_iter().try_for_each(|layer| layer.run(self, on, rows))
    }

    fn head(
        &mut self,
        logits: &mut Self::Buf<f32>,
        x: &Self::Buf<f32>,
        norm: Norm<'_, Self>,
        w: &Self::Matrix,
        softcap: Option<f32>,
        heads: usize,
    ) -> Result<()> {
        // The host fetches the trunk's.
        if !self.drafting {
            self.matmul.logits = Some(logits.ptr());
        }
        let view = self.view();
        let source = Source::of(x, w.cols).normed(norm);
        let gathered = Source { map: Some(view.heads()), count: Some(view.n_heads()), ..source };
        let then = softcap.map_or(Then::Store, Then::Softcap);
        self.product_of(w, gathered, Out { at: logits.ptr(), stride: w.rows, then }, heads)
    }

    fn sample(&mut self, logits: &mut Self::Buf<f32>, heads: usize) -> Result<()> {
        self.sample_with(logits, heads, 0)?;
        self.settle()
    }

    fn commit(&mut self, rows: usize, _heads: usize) -> Result<()> {
        self.publish(rows)
    }
}
