//! The stages of DeepSeek-V4 on the CPU: each composes the families' functions over the team.

use super::Cpu;
use super::buf::{Aligned, Shared};
use super::stages::product;
use super::state::{RowInfo, State};
use super::team::Team;
use crate::Norm;
use crate::error::Result;
use crate::ops::compress::{Compressor, pool};
use crate::ops::hc::{HcConfig, MIXES, STREAMS, collapse, expand, mixes, split, split_head};
use crate::ops::index::{Best, FAULT, MAX_INDEX_DIM, score};
use crate::ops::latent::{MAX_DIM, ROPE_DIM, RowFormat, TASK_HEADS, attend, inverse_rope, rope};
use crate::ops::matmul::cpu::{decode_row, matmul, matmul_pairs, part_pair_tile, part_tile, store};
use crate::ops::matmul::pack::PackedMatrix;
use crate::ops::moe::{assign, clamped_silu};
use crate::ops::norm::{rms_norm, rms_norm_in_place, rms_scale};
use crate::ops::quant::{FP8_INPUT_BLOCK, Inputs, fp8_round_trip, int8_round_trip};
use crate::ops::router::{Choice, MAX_EXPERTS, choose, scores};
use crate::ops_v4::{
    CompressorWeights, DraftWeights, ExpertConfig, ExpertWeights, ExpertWork, HcHead, HcSite, Incoming, LatentLayer,
    LatentState, LatentWeights, LatentWork, OpsV4, PoolState, RouterWeights, Streams,
};

impl Cpu {
    /// `out[r] = w * prepare(r)`, rows of `out` as wide as `w` has outputs.
    fn project(
        &mut self,
        out: &mut Aligned<f32>,
        w: &PackedMatrix,
        rows: usize,
        prepare: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        self.count_matmul(w);
        self.acts.fill(&mut self.team, w, rows, prepare);
        product(&mut self.team, &self.acts, w, out.shared(), rows, |_, out, value| *out = value);
    }
}

/// Rounds a matrix's input. Integer-coded weights are left to their own rounding.
fn round(inputs: Inputs, w: &PackedMatrix, row: &mut [f32]) {
    match inputs {
        Inputs::F32 => {}
        Inputs::Fp8 => fp8_round_trip(row, FP8_INPUT_BLOCK),
        Inputs::Int8 if w.is_fp8() => int8_round_trip(row),
        Inputs::Int8 => {}
    }
}

/// A row's part of a buffer of `dim` values a row.
fn row_of(buf: &[f32], r: usize, dim: usize) -> &[f32] {
    &buf[r * dim..(r + 1) * dim]
}

/// Cosines and sines of a position.
fn angles(table: &[f32], pos: usize) -> &[f32] {
    row_of(table, pos, ROPE_DIM)
}

/// What a compressor reads and writes in a step.
struct Compress<'a> {
    shape: Compressor,
    weights: &'a CompressorWeights<Cpu>,
    format: RowFormat,
    rope_table: &'a [f32],
    eps: f32,
    /// Values a row of the workspace, and where this compressor's begin.
    stride: usize,
    at: usize,
}

impl Compress<'_> {
    /// Finishes the rows that the step's tokens complete, then takes the tokens into the rings.
    fn run(&self, team: &mut Team, device: &State, rows: usize, work: &mut [f32], state: &mut PoolState<Cpu>) {
        let (c, width, infos) = (self.shape, self.shape.width(), &device.infos()[..rows]);
        let shared = Shared::new(work);
        team.run(rows, &|r, _| {
            let info = infos[r];
            if info.live {
                let gates = self.stride * r + self.at + width;
                // SAFETY: a row's gates are changed by one task.
                let gates = unsafe { shared.slice_mut(gates, width) };
                let bias = row_of(&self.weights.bias, info.pos as usize % c.ratio, width);
                gates.iter_mut().zip(bias).for_each(|(gate, bias)| *gate += bias);
            }
        });
        let work = &*work;
        let row_bytes = self.format.row_bytes(c.dim);
        let (ring, pooled) = (&state.ring, state.rows.shared());
        let ring_at = |slot: usize, p: usize| (slot * c.ring() + p % c.ring()) * 2 * width;
        team.run(rows, &|r, _| {
            let info = infos[r];
            let (pos, back) = (info.pos as usize, info.back as usize);
            if !info.live || !(pos + 1).is_multiple_of(c.ratio) {
                return;
            }
            let w = pos / c.ratio;
            let tokens = c.tokens(w);
            let mut buf = [0.0; MAX_DIM];
            let row = &mut buf[..c.dim];
            pool(row, tokens.len(), |i| {
                let p = tokens.start + i;
                let (from, at) = match pos - p {
                    before if before <= back => (work, (r - before) * self.stride + self.at),
                    _ => (&ring[..], ring_at(info.slot, p)),
                };
                let at = at + c.channel(w, p);
                (&from[at..at + c.dim], &from[at + width..at + width + c.dim])
            });
            rms_norm_in_place(row, &self.weights.norm, self.eps);
            rope(row, angles(self.rope_table, w * c.ratio));
            let place = c.place(device.blocks(info.slot), w);
            // SAFETY: `State::claim` gave the block of this token to its sequence, and the token completes one row.
            self.format.write(unsafe { pooled.slice_mut(place * row_bytes, row_bytes) }, row);
        });
        let ring = state.ring.shared();
        team.run(rows, &|r, _| {
            let info = infos[r];
            // A later row of the step would take the same place.
            if info.live && (info.ahead as usize) < c.ring() {
                // SAFETY: places differ by slot or, within a ring's length of tokens, by token.
                let out = unsafe { ring.slice_mut(ring_at(info.slot, info.pos as usize), 2 * width) };
                out.copy_from_slice(&work[r * self.stride + self.at..][..2 * width]);
            }
        });
    }
}

impl OpsV4 for Cpu {
    fn hc_site(
        &mut self,
        h: &mut Aligned<f32>,
        streams: &mut Streams<Self>,
        incoming: Incoming<'_, Self>,
        site: &HcSite<Self>,
        cfg: &HcConfig,
        norm: Norm<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        self.counters.launches += 1;
        self.counters.weight_bytes += 4 * site.mix.len() as u64;
        let dim = cfg.dim;
        let (h, x, mixing) = (h.shared(), streams.x.shared(), streams.mixing.shared());
        self.team.run(rows, &|r, _| {
            // SAFETY: a row of each is written by one task.
            let (h, x, mixing) = unsafe {
                (
                    h.slice_mut(r * dim, dim),
                    x.slice_mut(r * STREAMS * dim, STREAMS * dim),
                    mixing.slice_mut(r * MIXES, MIXES),
                )
            };
            match incoming {
                Incoming::Embedding(e) => x.chunks_exact_mut(dim).for_each(|x| x.copy_from_slice(row_of(e, r, dim))),
                Incoming::Output(y) => expand(x, row_of(y, r, dim), mixing),
                Incoming::Nothing => {}
            }
            let m: &mut [f32; MIXES] = mixing.try_into().expect("a row of MIXES values");
            mixes(m, x, &site.mix, cfg.norm_eps);
            split(m, &site.base, &site.scale, cfg);
            collapse(h, x, &m[..STREAMS]);
            rms_norm_in_place(h, norm.weight, norm.eps);
        });
        Ok(())
    }

    fn attn_in(
        &mut self,
        ws: &mut LatentWork<Self>,
        h: &Aligned<f32>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        let dim = w.low.cols;
        self.project(&mut ws.low, &w.low, rows, &|r, row| {
            row.copy_from_slice(row_of(h, r, dim));
            round(layer.inputs, &w.low, row);
        });
        if let Some(pool) = &w.pool {
            self.project(&mut ws.pool, &pool.matrix, rows, &|r, row| row.copy_from_slice(row_of(h, r, dim)));
        }
        Ok(())
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
        let (att, rank) = (layer.attention, layer.q_rank);
        let (dim, low_dim) = (att.dim, rank + att.dim);
        let low = &ws.low;
        let query = |w_b: &PackedMatrix, r: usize, row: &mut [f32]| {
            rms_norm(row, &low[r * low_dim..r * low_dim + rank], &w.q_norm, att.eps);
            round(layer.inputs, w_b, row);
        };
        self.project(&mut ws.q, &w.q_b, rows, &|r, row| query(&w.q_b, r, row));
        let index = layer.index.zip(w.pool.as_ref().and_then(|pool| pool.index.as_ref())).filter(|_| select);
        if let Some((_, index)) = index {
            self.project(&mut ws.index_q, &index.q_b, rows, &|r, row| query(&index.q_b, r, row));
        }
        let index_dims = index.map_or((0, 1), |((index, _), _)| (index.heads * index.dim, index.dim));
        let infos = &self.state.infos()[..rows];
        let (kv, index_q, table) = (ws.kv.shared(), ws.index_q.shared(), &layer.rope_table[..]);
        self.team.run(rows, &|r, _| {
            // SAFETY: a row of either is changed by one task.
            let (kv, index_q) =
                unsafe { (kv.slice_mut(r * dim, dim), index_q.slice_mut(r * index_dims.0, index_dims.0)) };
            if !infos[r].live {
                return kv.fill(0.0);
            }
            let angles = angles(table, infos[r].pos as usize);
            rms_norm(kv, &low[r * low_dim + rank..(r + 1) * low_dim], &w.kv_norm, att.eps);
            rope(kv, angles);
            layer.row_format.round(kv);
            for head in index_q.chunks_exact_mut(index_dims.1) {
                rope(head, angles);
                layer.key_format.round(head);
            }
        });
        let Some(weights) = &w.pool else { return Ok(()) };
        let (eps, stride) = (att.eps, layer.pool_dim());
        if let Some((shape, state)) = layer.rows.zip(state.rows.as_mut()) {
            let (weights, format) = (&weights.rows, layer.row_format);
            let compress = Compress { shape, weights, format, rope_table: table, eps, stride, at: 0 };
            compress.run(&mut self.team, &self.state, rows, &mut ws.pool, state);
        }
        if let Some(((_, shape), (weights, state))) = layer.index.zip(weights.index.as_ref().zip(state.keys.as_mut())) {
            let (weights, format, at) = (&weights.keys, layer.key_format, layer.keys_at());
            let compress = Compress { shape, weights, format, rope_table: table, eps, stride, at };
            compress.run(&mut self.team, &self.state, rows, &mut ws.pool, state);
        }
        Ok(())
    }

    fn index_select(
        &mut self,
        ws: &mut LatentWork<Self>,
        state: &LatentState<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        let Some(((cfg, keys), state)) = layer.index.zip(state.keys.as_ref()) else { return Ok(()) };
        self.counters.launches += 1;
        let row_bytes = layer.key_format.row_bytes(cfg.dim);
        self.state.count_read(layer.scored(cfg, keys), rows);
        let infos = &self.state.infos()[..rows];
        let scored = |info: &RowInfo| if info.live { keys.visible(info.pos) } else { 0 };
        let factor = (cfg.dim as f32).sqrt().recip() * (cfg.heads as f32).sqrt().recip();
        let (stride, weights_at) = (layer.pool_dim(), layer.pool_dim() - cfg.heads);
        let (picks, index_q, pool) = (ws.picks.shared(), &ws.index_q, &ws.pool);
        let device = &self.state;
        self.team.run(rows, &|r, _| {
            let visible = scored(&infos[r]);
            if visible <= cfg.top {
                return;
            }
            let blocks = device.blocks(infos[r].slot);
            let q = row_of(index_q, r, cfg.heads * cfg.dim);
            let (mut weights, mut key) = ([0.0; MAX_INDEX_DIM], [0.0; MAX_INDEX_DIM]);
            let (weights, key) = (&mut weights[..cfg.heads], &mut key[..cfg.dim]);
            weights.copy_from_slice(&pool[r * stride + weights_at..][..cfg.heads]);
            weights.iter_mut().for_each(|weight| *weight *= factor);
            let mut best = Best::new(cfg.top);
            for w in 0..visible {
                layer.key_format.read(&state.rows[keys.place(blocks, w) * row_bytes..][..row_bytes], key);
                best.offer(w as u32, score(q, weights, key));
            }
            // SAFETY: a row's choice is written by one task.
            best.write(unsafe { picks.slice_mut(r * cfg.top, cfg.top) });
        });
        Ok(())
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
        self.counters.launches += 1;
        let att = layer.attention;
        let (dim, q_dim, ring, format) = (att.dim, att.q_dim(), att.ring(), layer.row_format);
        let row_bytes = format.row_bytes(dim);
        let top = layer.index.filter(|_| select).map_or(usize::MAX, |(index, _)| index.top);
        layer.attended(select).for_each(|read| self.state.count_read(read, rows));
        let infos = &self.state.infos()[..rows];
        let window_rows = |info: &RowInfo| info.pos as usize + 1 - att.first_visible(info.pos);
        let pooled_rows = |info: &RowInfo| layer.rows.map_or(0, |rows| rows.visible(info.pos));
        let device = &self.state;
        let (out, kv, picks, q) = (ws.out.shared(), &ws.kv, &ws.picks, ws.q.shared());
        let (window, pooled) = (&state.window, state.rows.as_ref());
        let place = |slot: usize, p: usize| (slot * ring + p % ring) * row_bytes;
        let tasks = att.heads.div_ceil(TASK_HEADS);
        self.team.run(rows * tasks, &|task, scratch| {
            let (r, first) = (task / tasks, task % tasks * TASK_HEADS);
            let (info, heads) = (infos[r], first..att.heads.min(first + TASK_HEADS));
            let at = r * q_dim + first * dim;
            // SAFETY: a row's heads are written by the task that has them.
            let (out, q) = unsafe { (out.slice_mut(at, heads.len() * dim), q.slice_mut(at, heads.len() * dim)) };
            if !info.live {
                return out.fill(0.0);
            }
            let (pos, back, first) = (info.pos as usize, info.back as usize, att.first_visible(info.pos));
            let (recent, visible) = (window_rows(&info), pooled_rows(&info));
            let chosen = (visible > top).then(|| &picks[r * top..][..top]);
            if chosen.is_some_and(|chosen| chosen[0] == FAULT) {
                return out.fill(crate::math::NAN);
            }
            let blocks = device.blocks(info.slot);
            for head in q.chunks_exact_mut(dim) {
                rms_scale(head, att.eps);
                rope(head, angles(layer.rope_table, pos));
            }
            let sinks = &w.sinks[heads];
            attend(&mut scratch.latent, out, q, sinks, att.scale, recent + visible.min(top), |i, row| {
                let Some(i) = i.checked_sub(recent) else {
                    let p = first + i;
                    if pos - p <= back {
                        return row.copy_from_slice(row_of(kv, r - (pos - p), dim));
                    }
                    return format.read(&window[place(info.slot, p)..][..row_bytes], row);
                };
                let (Some(shape), Some(pooled)) = (layer.rows, pooled) else {
                    unreachable!("a layer without compressor sees no compressed rows");
                };
                let row_idx = shape.place(blocks, chosen.map_or(i, |chosen| chosen[i] as usize));
                format.read(&pooled.rows[row_idx * row_bytes..][..row_bytes], row);
            });
        });
        let window = state.window.shared();
        self.team.run(rows, &|r, _| {
            let info = infos[r];
            // A later row of the step would take the same place.
            if info.live && (info.ahead as usize) < ring {
                // SAFETY: places differ by slot or, within a ring's length of tokens, by token.
                let out = unsafe { window.slice_mut(place(info.slot, info.pos as usize), row_bytes) };
                format.write(out, row_of(kv, r, dim));
            }
        });
        Ok(())
    }

    fn attn_out_a(
        &mut self,
        ws: &mut LatentWork<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        self.count_matmul(&w.out_a);
        let att = layer.attention;
        let (cols, width) = (w.out_a.cols, att.groups * att.group_out);
        let infos = &self.state.infos()[..rows];
        let (out, table, quantise) = (&ws.out, &layer.rope_table[..], w.out_a.reads_quantised());
        self.acts.fill_rows(&mut self.team, cols, quantise, att.groups * rows, &|i, row| {
            let (group, r) = (i / rows, i % rows);
            row.copy_from_slice(&out[r * att.q_dim() + group * cols..][..cols]);
            if infos[r].live {
                let angles = angles(table, infos[r].pos as usize);
                row.chunks_exact_mut(att.dim).for_each(|head| inverse_rope(head, angles));
            }
            // The released kernels do not round what this one reads.
            if layer.inputs != Inputs::Fp8 {
                round(layer.inputs, &w.out_a, row);
            }
        });
        let (grouped, acts) = (ws.grouped.shared(), &self.acts);
        let tiles = w.out_a.parts[0].n_tiles();
        self.team.run(att.groups * tiles, &|task, scratch| {
            let (group, t) = (task / tiles, task % tiles);
            let (first_row, range) = (group * rows, group * rows..(group + 1) * rows);
            part_tile(&mut scratch.matmul, &w.out_a, group, t, acts, range, &mut |first, lanes, row, block| {
                let first = group * att.group_out + first;
                // SAFETY: a tile's columns are written by the task that has the tile.
                unsafe { store(grouped, width, first, lanes, row - first_row, block, |_, out, value| *out = value) };
            });
        });
        Ok(())
    }

    fn attn_out_b(
        &mut self,
        out: &mut Aligned<f32>,
        ws: &LatentWork<Self>,
        w: &LatentWeights<Self>,
        layer: &LatentLayer<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        let cols = w.out_b.cols;
        self.project(out, &w.out_b, rows, &|r, row| {
            row.copy_from_slice(row_of(&ws.grouped, r, cols));
            round(layer.inputs, &w.out_b, row);
        });
        Ok(())
    }

    fn ffn_in(
        &mut self,
        ws: &mut ExpertWork<Self>,
        h: &Aligned<f32>,
        w: &ExpertWeights<Self>,
        cfg: &ExpertConfig,
        rows: usize,
    ) -> Result<()> {
        self.count_matmul(&w.shared_up);
        self.counters.weight_bytes += 4 * w.gate.len() as u64;
        let (hidden, chosen, experts) = (cfg.hidden, cfg.router.chosen, cfg.router.experts);
        let infos = &self.state.infos()[..rows];
        let (ids, weights) = (ws.ids.shared(), ws.weights.shared());
        self.team.run(rows, &|r, _| {
            // SAFETY: a row of both is written by one task.
            let (ids, weights) = unsafe { (ids.slice_mut(r * chosen, chosen), weights.slice_mut(r * chosen, chosen)) };
            let mut score = [0.0; MAX_EXPERTS];
            let score = &mut score[..experts];
            scores(score, row_of(h, r, hidden), &w.gate);
            let choice = match &w.router {
                RouterWeights::Hashed(table) => Choice::Hashed(&table[infos[r].token as usize * chosen..][..chosen]),
                RouterWeights::Learned(bias) => Choice::Learned(bias),
            };
            choose(ids, weights, score, &choice, &cfg.router);
        });
        assign(&mut ws.order, &mut ws.bounds[..=experts], &ws.ids[..rows * chosen], chosen, |r| infos[r].live);
        self.acts.fill(&mut self.team, &w.shared_up, rows, &|r, row| {
            row.copy_from_slice(row_of(h, r, hidden));
            round(cfg.inputs, &w.shared_up, row);
        });
        let out = ws.shared.shared();
        matmul_pairs(&mut self.team, &w.shared_up, &self.acts, rows, &|first, lanes, row, gate, up| {
            clamped_silu(gate.as_flattened_mut(), up.as_flattened(), cfg.limit);
            // SAFETY: a tile's columns are written by the task that has the tile.
            unsafe { store(out, cfg.ffn, first, lanes, row, gate, |_, out, value| *out = value) };
        });
        Ok(())
    }

    fn experts_up(
        &mut self,
        ws: &mut ExpertWork<Self>,
        h: &Aligned<f32>,
        w: &ExpertWeights<Self>,
        cfg: &ExpertConfig,
        _rows: usize,
    ) -> Result<()> {
        let (hidden, chosen, ffn) = (cfg.hidden, cfg.router.chosen, cfg.ffn);
        let active = Active::of(&ws.bounds[..=cfg.router.experts]);
        self.count_experts(&w.up, &active, cfg);
        let (order, bounds, weights) = (&ws.order, &ws.bounds, &ws.weights);
        let n = bounds[cfg.router.experts] as usize;
        self.acts.fill_rows(&mut self.team, hidden, w.up.reads_quantised(), n, &|i, row| {
            row.copy_from_slice(row_of(h, order[i] as usize / chosen, hidden));
            round(cfg.inputs, &w.up, row);
        });
        let (mid, acts) = (ws.mid.shared(), &self.acts);
        let tiles = w.up.parts[0].n_tiles();
        self.team.run(active.ids().len() * tiles, &|task, scratch| {
            let (e, t) = (usize::from(active.ids()[task / tiles]), task % tiles);
            let (rows, parts) = (bounds[e] as usize..bounds[e + 1] as usize, [2 * e, 2 * e + 1]);
            part_pair_tile(&mut scratch.matmul, &w.up, parts, t, acts, rows, &mut |first, lanes, row, gate, up| {
                clamped_silu(gate.as_flattened_mut(), up.as_flattened(), cfg.limit);
                for (i, values) in gate.iter_mut().enumerate() {
                    let weight = weights[order[row + i] as usize];
                    values.iter_mut().for_each(|value| *value *= weight);
                }
                // SAFETY: an assignment's columns are written by the task that has expert and tile.
                unsafe { store(mid, ffn, first, lanes, row, gate, |_, out, value| *out = value) };
            });
        });
        Ok(())
    }

    fn experts_down(
        &mut self,
        out: &mut Aligned<f32>,
        ws: &ExpertWork<Self>,
        w: &ExpertWeights<Self>,
        cfg: &ExpertConfig,
        rows: usize,
    ) -> Result<()> {
        let (hidden, chosen, ffn) = (cfg.hidden, cfg.router.chosen, cfg.ffn);
        let active = Active::of(&ws.bounds[..=cfg.router.experts]);
        self.count_experts(&w.down, &active, cfg);
        self.counters.weight_bytes += w.shared_down.bytes() as u64;
        let (order, bounds) = (&ws.order, &ws.bounds);
        let n = bounds[cfg.router.experts] as usize;
        let quantise = w.down.reads_quantised() || w.shared_down.reads_quantised();
        self.acts.fill_rows(&mut self.team, ffn, quantise, n + rows, &|i, row| {
            let (from, i, w) = if i < n { (&ws.mid, i, &w.down) } else { (&ws.shared, i - n, &w.shared_down) };
            row.copy_from_slice(row_of(from, i, ffn));
            round(cfg.inputs, w, row);
        });
        let (out, acts) = (out.shared(), &self.acts);
        self.team.run(w.shared_down.parts[0].n_tiles(), &|t, scratch| {
            let columns = |row: usize, first: usize, lanes: usize| {
                // SAFETY: a tile's columns are written by the task that has the tile.
                unsafe { out.slice_mut(row * hidden + first, lanes) }
            };
            let (first, lanes) = w.shared_down.parts[0].tile_columns(t);
            (0..rows).for_each(|r| columns(r, first, lanes).fill(0.0));
            for &e in active.ids() {
                let e = usize::from(e);
                let range = bounds[e] as usize..bounds[e + 1] as usize;
                part_tile(&mut scratch.matmul, &w.down, e, t, acts, range, &mut |first, lanes, i, block| {
                    for (i, values) in (i..).zip(block) {
                        let out = columns(order[i] as usize / chosen, first, lanes);
                        out.iter_mut().zip(values).for_each(|(out, value)| *out += value);
                    }
                });
            }
            part_tile(&mut scratch.matmul, &w.shared_down, 0, t, acts, n..n + rows, &mut |first, lanes, i, block| {
                for (i, values) in (i..).zip(block) {
                    let out = columns(i - n, first, lanes);
                    out.iter_mut().zip(values).for_each(|(out, value)| *out += value);
                }
            });
        });
        Ok(())
    }

    fn hc_head(
        &mut self,
        out: &mut Aligned<f32>,
        streams: &mut Streams<Self>,
        y: &Aligned<f32>,
        head: &HcHead<Self>,
        cfg: &HcConfig,
        rows: usize,
    ) -> Result<()> {
        self.counters.launches += 1;
        self.counters.weight_bytes += 4 * head.mix.len() as u64;
        let (dim, heads) = (cfg.dim, self.state.heads());
        let (out, x, mixing) = (out.shared(), streams.x.shared(), &streams.mixing);
        self.team.run(rows, &|r, _| {
            // SAFETY: a row of both is written by one task.
            let (out, x) = unsafe { (out.slice_mut(r * dim, dim), x.slice_mut(r * STREAMS * dim, STREAMS * dim)) };
            expand(x, row_of(y, r, dim), row_of(mixing, r, MIXES));
            if heads.binary_search(&(r as u32)).is_ok() {
                let mut pre = [0.0; STREAMS];
                mixes(&mut pre, x, &head.mix, cfg.norm_eps);
                split_head(&mut pre, &head.base, head.scale[0], cfg.eps);
                collapse(out, x, &pre);
            }
        });
        Ok(())
    }

    fn embed_next(&mut self, out: &mut Aligned<f32>, table: &PackedMatrix, rows: usize) -> Result<()> {
        self.counters.launches += 1;
        self.counters.weight_bytes += (rows * table.bytes() / table.rows.max(1)) as u64;
        let (dim, out, device) = (table.cols, out.shared(), &self.state);
        self.team.run(rows, &|r, _| {
            // SAFETY: a row is written by one task.
            let out = unsafe { out.slice_mut(r * dim, dim) };
            match device.next_token(r) {
                Some(token) => decode_row(table, token as usize, out),
                None => out.fill(0.0),
            }
        });
        Ok(())
    }

    fn draft_in(
        &mut self,
        streams: &mut Streams<Self>,
        e: &Aligned<f32>,
        w: &DraftWeights<Self>,
        cfg: &HcConfig,
        inputs: Inputs,
        rows: usize,
    ) -> Result<()> {
        self.count_matmul(&w.stream);
        self.count_matmul(&w.embed);
        let dim = cfg.dim;
        let x = &streams.x;
        self.acts.fill(&mut self.team, &w.stream, STREAMS * rows, &|i, row| {
            rms_norm(row, row_of(x, i, dim), &w.stream_norm, cfg.norm_eps);
            round(inputs, &w.stream, row);
        });
        let x = streams.x.shared();
        matmul(&mut self.team, &w.stream, &self.acts, STREAMS * rows, &|first, lanes, row, block| {
            // SAFETY: a tile's columns are written by the task that has the tile.
            unsafe { store(x, dim, first, lanes, row, block, |_, out, value| *out = value) };
        });
        self.acts.fill(&mut self.team, &w.embed, rows, &|r, row| {
            rms_norm(row, row_of(e, r, dim), &w.embed_norm, cfg.norm_eps);
            round(inputs, &w.embed, row);
        });
        matmul(&mut self.team, &w.embed, &self.acts, rows, &|first, lanes, row, block| {
            for k in 0..STREAMS {
                // SAFETY: as above; stream `k` of row `row + r` begins at `(row + r) * STREAMS * dim + k * dim`.
                unsafe {
                    store(x, STREAMS * dim, k * dim + first, lanes, row, block, |_, out, value| *out += value);
                }
            }
        });
        Ok(())
    }

    fn draft_rows(
        &mut self,
        out: &mut Streams<Self>,
        h: &mut Aligned<f32>,
        streams: &Streams<Self>,
        merged: &Aligned<f32>,
        cfg: &HcConfig,
        rows: usize,
    ) -> Result<()> {
        self.counters.launches += 1;
        self.state.begin_drafts(rows);
        let (dim, from) = (cfg.dim, self.state.draft_from());
        let (x, h) = (out.x.shared(), h.shared());
        self.team.run(from.len(), &|i, _| {
            // SAFETY: a row of each is written by one task.
            let (x, h) = unsafe { (x.slice_mut(i * STREAMS * dim, STREAMS * dim), h.slice_mut(i * dim, dim)) };
            x.copy_from_slice(row_of(&streams.x, from[i] as usize, STREAMS * dim));
            h.copy_from_slice(row_of(merged, from[i] as usize, dim));
        });
        Ok(())
    }

    fn sample_drafts(&mut self, logits: &mut Aligned<f32>, _rows: usize) -> Result<()> {
        self.counters.launches += 1;
        self.state.sample_drafts(&mut self.team, logits);
        Ok(())
    }
}

impl Cpu {
    /// Counts what the chosen experts' share of a matrix of all of them takes to read.
    fn count_experts(&mut self, w: &PackedMatrix, active: &Active, cfg: &ExpertConfig) {
        self.counters.launches += 1;
        self.counters.weight_bytes += (w.bytes() / cfg.router.experts * active.ids().len()) as u64;
    }
}

/// Experts that have assignments, ascending.
struct Active {
    ids: [u16; MAX_EXPERTS],
    len: usize,
}

impl Active {
    fn of(bounds: &[u32]) -> Active {
        let mut active = Active { ids: [0; MAX_EXPERTS], len: 0 };
        for (e, pair) in bounds.array_windows().enumerate() {
            let [from, to]: &[u32; 2] = pair;
            if from < to {
                active.ids[active.len] = e as u16;
                active.len += 1;
            }
        }
        active
    }

    fn ids(&self) -> &[u16] {
        &self.ids[..self.len]
    }
}
