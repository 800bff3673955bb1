//! The model stages on the CPU: each composes the families' functions over the team.

use super::Cpu;
use super::buf::{Aligned, Shared};
use super::team::{Scratch, Team};
use crate::error::Result;
use crate::math::tanh;
use crate::ops::glu::Activation;
use crate::ops::kv::cpu::{Group, Place, append, attend, attend_split, merge, partial_len, rotate};
use crate::ops::kv::{AttentionConfig, MAX_GROUP, MAX_HEAD_DIM};
use crate::ops::matmul::cpu::{Activations, decode_row, matmul, matmul_pairs, store};
use crate::ops::matmul::pack::PackedMatrix;
use crate::ops::norm::{rms_norm, rms_norm_in_place};
use crate::step::BLOCK_TOKENS;
use crate::{KvLayer, Norm, Ops, QkvConfig};

/// f32 values for partial attention: rows that would need more compute their splits one after the other.
pub(super) const PARTIALS: usize = 1 << 18;

impl Cpu {
    pub(super) fn count_matmul(&mut self, w: &PackedMatrix) {
        self.counters.launches += 1;
        self.counters.weight_bytes += w.bytes() as u64;
    }
}

/// The inputs of a product: the norms of the rows of `x` that `row_of` names.
fn fill_normed(
    team: &mut Team,
    acts: &mut Activations,
    w: &PackedMatrix,
    x: &[f32],
    norm: Norm<'_, Cpu>,
    rows: usize,
    row_of: &(dyn Fn(usize) -> usize + Sync),
) {
    let cols = w.cols;
    acts.fill(team, w, rows, &|r, row| {
        let r = row_of(r);
        rms_norm(row, &x[r * cols..(r + 1) * cols], norm.weight, norm.eps);
    });
}

/// `put(n, out[r, n], product)` for every output of every row: `out` is `[rows, w.rows]`. Generic, so that `put` is inlined.
pub(super) fn product(
    team: &mut Team,
    acts: &Activations,
    w: &PackedMatrix,
    out: Shared<'_, f32>,
    rows: usize,
    put: impl Fn(usize, &mut f32, f32) + Sync,
) {
    matmul(team, w, acts, rows, &|first, lanes, row, block| {
        // SAFETY: a tile's columns are written by the task that has the tile.
        unsafe { store(out, w.rows, first, lanes, row, block, |lane, out, value| put(first + lane, out, value)) };
    });
}

impl Ops for Cpu {
    fn embed(&mut self, out: &mut Aligned<f32>, table: &PackedMatrix, scale: f32, rows: usize) -> Result<()> {
        self.counters.launches += 1;
        self.counters.weight_bytes += (rows * table.bytes() / table.rows.max(1)) as u64;
        let dim = table.cols;
        let (infos, out) = (self.state.infos(), out.shared());
        self.team.run(rows, &|r, _| {
            // SAFETY: a row is written by one task.
            let out = unsafe { out.slice_mut(r * dim, dim) };
            if !infos[r].live {
                return out.fill(0.0);
            }
            decode_row(table, infos[r].token as usize, out);
            if scale != 1.0 {
                out.iter_mut().for_each(|x| *x *= scale);
            }
        });
        Ok(())
    }

    fn norm_matmul(
        &mut self,
        out: &mut Aligned<f32>,
        x: &Aligned<f32>,
        norm: Norm<'_, Self>,
        w: &PackedMatrix,
        bias: Option<&Aligned<f32>>,
        rows: usize,
    ) -> Result<()> {
        self.count_matmul(w);
        fill_normed(&mut self.team, &mut self.acts, w, x, norm, rows, &|r| r);
        product(&mut self.team, &self.acts, w, out.shared(), rows, |n, out, value| {
            *out = bias.map_or(value, |bias| value + bias[n]);
        });
        Ok(())
    }

    fn qkv_rope_append(
        &mut self,
        qkv: &mut Aligned<f32>,
        kv: &mut KvLayer<Self>,
        cfg: &QkvConfig<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        self.counters.launches += 1;
        let att = &cfg.attention;
        let (dim, head_dim) = (att.qkv_dim(), att.head_dim);
        let (qkv, k, v) = (qkv.shared(), kv.k.shared(), kv.v.shared());
        let state = &self.state;
        self.team.run(rows, &|r, _| {
            let info = state.infos()[r];
            if !info.live {
                return;
            }
            // SAFETY: a row is changed by one task.
            let row = unsafe { qkv.slice_mut(r * dim, dim) };
            let (qk, values) = row.split_at_mut((att.n_heads + att.n_kv_heads) * head_dim);
            let table = &cfg.rope_table[info.pos as usize * cfg.rope.dim..][..cfg.rope.dim];
            for (h, head) in qk.chunks_exact_mut(head_dim).enumerate() {
                let norm = if h < att.n_heads { cfg.q_norm } else { cfg.k_norm };
                if let Some(norm) = norm {
                    rms_norm_in_place(head, norm.weight, norm.eps);
                }
                rotate(head, table, cfg.rope);
            }
            let keys = &qk[att.n_heads * head_dim..];
            let pos = info.pos as usize;
            let block = state.blocks(info.slot)[pos / BLOCK_TOKENS] as usize;
            for (kv_head, (key, value)) in keys.chunks_exact(head_dim).zip(values.chunks_exact(head_dim)).enumerate() {
                let place = Place { block, in_block: pos % BLOCK_TOKENS, kv_head };
                // SAFETY: `State::claim` gave this block to one sequence and this position to one of its rows.
                unsafe { append(k, v, att, place, key, value) };
            }
        });
        Ok(())
    }

    fn attention(
        &mut self,
        out: &mut Aligned<f32>,
        qkv: &Aligned<f32>,
        kv: &KvLayer<Self>,
        cfg: &AttentionConfig,
        rows: usize,
    ) -> Result<()> {
        let heads = cfg.n_heads / cfg.n_kv_heads;
        assert!(cfg.head_dim <= MAX_HEAD_DIM && heads <= MAX_GROUP, "{cfg:?} was not checked at load");
        self.counters.launches += 1;
        self.state.count_read(cfg.read(), rows);
        let state = &self.state;
        let out_dim = cfg.n_heads * cfg.head_dim;
        for (r, info) in state.infos()[..rows].iter().enumerate() {
            if !info.live {
                out[r * out_dim..(r + 1) * out_dim].fill(0.0);
            }
        }
        let group = |i: usize, kv_head: usize| {
            let rows = state.groups()[i];
            let info = state.infos()[rows.first];
            Group { cfg, k: &kv.k, v: &kv.v, blocks: state.blocks(info.slot), kv_head, pos: info.pos, rows: rows.rows }
        };
        let n_groups = state.groups().len();
        let (qkv_dim, kv_heads) = (cfg.qkv_dim(), cfg.n_kv_heads);
        let row_of = |i: usize| state.groups()[i].first;
        let view = out.shared();
        let whole = |i: usize, kv_head: usize, scratch: &mut Scratch| {
            let first = row_of(i);
            attend(&mut scratch.attention, group(i, kv_head), &qkv[first * qkv_dim..], &mut |r, h, values| {
                let at = (first + r) * out_dim + (kv_head * heads + h) * cfg.head_dim;
                // SAFETY: a row's head is written by the one task that has its key head.
                unsafe { view.slice_mut(at, cfg.head_dim) }.copy_from_slice(values);
            });
        };
        // With few rows, long contexts are cut at their fixed splits, so that every thread has work.
        let most_splits = (0..n_groups).map(|i| group(i, 0).splits()).map(|(a, b)| b - a).max().unwrap_or(0);
        let stride = heads * partial_len(cfg.head_dim);
        let fits = n_groups * kv_heads * most_splits * stride <= PARTIALS;
        let single = state.groups().iter().all(|group| group.rows == 1);
        if most_splits < 2 || !single || !fits {
            self.team.run(n_groups * kv_heads, &|task, scratch| whole(task / kv_heads, task % kv_heads, scratch));
            return Ok(());
        }
        let partials = Shared::new(&mut self.partials);
        let at = |task: usize| task * most_splits * stride;
        self.team.run(n_groups * kv_heads * most_splits, &|task, scratch| {
            let (task, nth) = (task / most_splits, task % most_splits);
            let group = group(task / kv_heads, task % kv_heads);
            let (begin, end) = group.splits();
            if begin + nth >= end {
                return;
            }
            // SAFETY: a split's partials are written by one task.
            let partials = unsafe { partials.slice_mut(at(task) + nth * stride, stride) };
            let qkv = &qkv[row_of(task / kv_heads) * qkv_dim..];
            attend_split(&mut scratch.attention, group, begin + nth, qkv, partials);
        });
        self.team.run(n_groups * kv_heads, &|task, _| {
            let (begin, end) = group(task / kv_heads, task % kv_heads).splits();
            for h in 0..heads {
                // SAFETY: the splits are complete; this task alone reads them, and alone writes this key head's part.
                unsafe {
                    let parts = partials.slice_mut(at(task), most_splits * stride);
                    let row = row_of(task / kv_heads) * out_dim + (task % kv_heads * heads + h) * cfg.head_dim;
                    let out = view.slice_mut(row, cfg.head_dim);
                    merge(&parts[h * partial_len(cfg.head_dim)..], stride, end - begin, out);
                }
            }
        });
        Ok(())
    }

    fn matmul_residual(
        &mut self,
        residual: &mut Aligned<f32>,
        x: &Aligned<f32>,
        w: &PackedMatrix,
        post_norm: Option<Norm<'_, Self>>,
        rows: usize,
    ) -> Result<()> {
        self.count_matmul(w);
        let cols = w.cols;
        self.acts.fill(&mut self.team, w, rows, &|r, row| row.copy_from_slice(&x[r * cols..(r + 1) * cols]));
        let Some(norm) = post_norm else {
            product(&mut self.team, &self.acts, w, residual.shared(), rows, |_, out, value| *out += value);
            return Ok(());
        };
        let dim = w.rows;
        product(&mut self.team, &self.acts, w, self.product.shared(), rows, |_, out, value| *out = value);
        let product = self.product.shared();
        let out = residual.shared();
        self.team.run(rows, &|r, _| {
            // SAFETY: a row is read and written by one task.
            let (product, out) = unsafe { (product.slice_mut(r * dim, dim), out.slice_mut(r * dim, dim)) };
            rms_norm_in_place(product, norm.weight, norm.eps);
            out.iter_mut().zip(product).for_each(|(out, value)| *out += *value);
        });
        Ok(())
    }

    fn norm_gate_up_glu(
        &mut self,
        out: &mut Aligned<f32>,
        x: &Aligned<f32>,
        norm: Norm<'_, Self>,
        w: &PackedMatrix,
        act: Activation,
        rows: usize,
    ) -> Result<()> {
        self.count_matmul(w);
        fill_normed(&mut self.team, &mut self.acts, w, x, norm, rows, &|r| r);
        let (out, stride) = (out.shared(), w.rows / 2);
        matmul_pairs(&mut self.team, w, &self.acts, rows, &|first, lanes, row, gate, up| {
            act.apply(gate.as_flattened_mut(), up.as_flattened());
            // SAFETY: a tile's columns are written by the task that has the tile.
            unsafe { store(out, stride, first, lanes, row, gate, |_, out, value| *out = value) };
        });
        Ok(())
    }

    fn head(
        &mut self,
        logits: &mut Aligned<f32>,
        x: &Aligned<f32>,
        norm: Norm<'_, Self>,
        w: &PackedMatrix,
        softcap: Option<f32>,
        _heads: usize,
    ) -> Result<()> {
        let heads = self.state.heads().len();
        if heads == 0 {
            return Ok(());
        }
        self.count_matmul(w);
        let rows_of_heads = self.state.heads();
        fill_normed(&mut self.team, &mut self.acts, w, x, norm, heads, &|h| rows_of_heads[h] as usize);
        product(&mut self.team, &self.acts, w, logits.shared(), heads, |_, out, value| {
            *out = softcap.map_or(value, |cap| cap * tanh(value / cap));
        });
        self.state.keep(logits);
        Ok(())
    }

    fn sample(&mut self, logits: &mut Aligned<f32>, _heads: usize) -> Result<()> {
        self.counters.launches += 1;
        self.state.sample(&mut self.team, logits);
        Ok(())
    }

    fn commit(&mut self, _rows: usize, _heads: usize) -> Result<()> {
        self.counters.launches += 1;
        self.state.commit();
        Ok(())
    }
}
