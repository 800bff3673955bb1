//! DeepSeek-V4 as slowly and plainly as it can be said: float64, one token at a time, with the compressors' shifting buffers
//! and lists that grow. Written from the model's description, sharing nothing with the engine but rope frequencies, whose
//! rounding is tested on its own.

use std::collections::HashMap;

use arc_device::format::half::bf16_to_f32;
use safetensors::tensor::Dtype;

use super::{Tensors, VOCAB};

const D: usize = 128;
const HEADS: usize = 4;
const DIM: usize = 128;
const ROPE: usize = 64;
const WINDOW: usize = 16;
const GROUPS: usize = 2;
const GROUP_OUT: usize = 64;
const INDEX_HEADS: usize = 8;
const EXPERTS: usize = 6;
const CHOSEN: usize = 4;
const RATIOS: [usize; 4] = [0, 4, 128, 4];
const EPS: f64 = 1e-6;

type Row = Vec<f64>;

/// One compressor's buffers, shifted as windows end, and its finished rows.
#[derive(Default)]
struct Pool {
    before: Vec<(Row, Row)>,
    now: Vec<(Row, Row)>,
    rows: Vec<Row>,
}

#[derive(Default)]
struct Layer {
    window: Vec<Row>,
    rows: Pool,
    keys: Pool,
}

pub struct Plain {
    weights: HashMap<String, Row>,
    /// Of windowed layers, then of compressed ones.
    frequencies: [Vec<f32>; 2],
    index_top: usize,
    layers: Vec<Layer>,
    pos: usize,
}

fn rms(x: &[f64], weight: Option<&[f64]>) -> Row {
    let factor = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + EPS).sqrt();
    x.iter().enumerate().map(|(i, x)| x * factor * weight.map_or(1.0, |weight| weight[i])).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn matvec(w: &[f64], x: &[f64]) -> Row {
    w.chunks_exact(x.len()).map(|row| dot(row, x)).collect()
}

/// Ids of the largest values, of equal ones the lower.
fn top(values: &[f64], n: usize) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..values.len()).collect();
    ids.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    ids.truncate(n);
    ids.sort_unstable();
    ids
}

impl Plain {
    pub fn new(tensors: &Tensors, frequencies: [Vec<f32>; 2], index_top: usize) -> Plain {
        let value = |dtype: Dtype, data: &[u8]| -> Row {
            match dtype {
                Dtype::BF16 => {
                    let bf16 = |b: &[u8; 2]| f64::from(bf16_to_f32(u16::from_le_bytes(*b)));
                    data.as_chunks::<2>().0.iter().map(bf16).collect()
                }
                Dtype::F32 => data.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
                _ => data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
            }
        };
        let weights = tensors.iter().map(|(name, dtype, _, data)| (name.clone(), value(*dtype, data))).collect();
        let layers = RATIOS.iter().map(|_| Layer::default()).collect();
        Plain { weights, frequencies, index_top, layers, pos: 0 }
    }

    fn w(&self, name: &str) -> &[f64] {
        self.weights.get(name).unwrap_or_else(|| panic!("no {name}"))
    }

    fn linear(&self, name: &str, x: &[f64]) -> Row {
        matvec(self.w(&format!("{name}.weight")), x)
    }

    fn rope(&self, x: &mut [f64], pos: usize, compressed: bool, sign: f64) {
        let start = x.len() - ROPE;
        for (pair, f) in x[start..].chunks_exact_mut(2).zip(&self.frequencies[usize::from(compressed)]) {
            let (sin, cos) = f64::from(pos as f32 * f).sin_cos();
            (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin * sign, pair[0] * sin * sign + pair[1] * cos);
        }
    }

    /// Logits after one more token.
    pub fn step(&mut self, token: u32) -> Vec<f32> {
        let token = token as usize;
        let embedding = self.w("embed.weight")[token * D..(token + 1) * D].to_vec();
        let mut x: Row = (0..4).flat_map(|_| embedding.clone()).collect();
        for layer in 0..RATIOS.len() {
            let at = format!("layers.{layer}.");
            let (y, mixing) = self.site(&x, &format!("{at}hc_attn"));
            let h = rms(&y, Some(self.w(&format!("{at}attn_norm.weight"))));
            let y = self.attention(layer, &h);
            x = expand(&x, &y, &mixing);
            let (y, mixing) = self.site(&x, &format!("{at}hc_ffn"));
            let h = rms(&y, Some(self.w(&format!("{at}ffn_norm.weight"))));
            let y = self.experts(&format!("{at}ffn"), &h, token);
            x = expand(&x, &y, &mixing);
        }
        self.pos += 1;
        let m = rms(&x, None);
        let mix = matvec(self.w("hc_head_fn"), &m);
        let (base, scale) = (self.w("hc_head_base"), self.w("hc_head_scale")[0]);
        let pre: Row = (0..4).map(|k| sigmoid(mix[k] * scale + base[k]) + EPS).collect();
        let z: Row = (0..D).map(|i| (0..4).map(|k| pre[k] * x[k * D + i]).sum()).collect();
        let logits = self.linear("head", &rms(&z, Some(self.w("norm.weight"))));
        assert_eq!(logits.len(), VOCAB);
        logits.into_iter().map(|x| x as f32).collect()
    }

    /// The weighted sum, and post and comb.
    fn site(&self, x: &[f64], at: &str) -> (Row, Row) {
        let raw = matvec(self.w(&format!("{at}_fn")), &rms(x, None));
        let (base, scale) = (self.w(&format!("{at}_base")), self.w(&format!("{at}_scale")));
        let m: Row = (0..24).map(|i| raw[i] * scale[(i / 4).min(2)] + base[i]).collect();
        let mut c: Vec<Row> = (0..4).map(|j| m[8 + 4 * j..12 + 4 * j].iter().map(|x| x.exp()).collect()).collect();
        for row in &mut c {
            let total: f64 = row.iter().sum();
            row.iter_mut().for_each(|x| *x = *x / total + EPS);
        }
        let columns = |c: &mut Vec<Row>| {
            for k in 0..4 {
                let total = c.iter().map(|row| row[k]).sum::<f64>() + EPS;
                c.iter_mut().for_each(|row| row[k] /= total);
            }
        };
        columns(&mut c);
        for _ in 0..19 {
            for row in &mut c {
                let total = row.iter().sum::<f64>() + EPS;
                row.iter_mut().for_each(|x| *x /= total);
            }
            columns(&mut c);
        }
        let y = (0..D).map(|i| (0..4).map(|k| (sigmoid(m[k]) + EPS) * x[k * D + i]).sum()).collect();
        let post = m[4..8].iter().map(|x| 2.0 * sigmoid(*x));
        (y, post.chain(c.into_iter().flatten()).collect())
    }

    /// Takes a token into a compressor; every `ratio`-th finishes a row.
    fn compress(&mut self, layer: usize, h: &[f64], at: &str, index: bool) {
        let (ratio, pos) = (RATIOS[layer], self.pos);
        let a = self.linear(&format!("{at}.wkv"), h);
        let mut g = self.linear(&format!("{at}.wgate"), h);
        let width = g.len();
        let bias = &self.w(&format!("{at}.ape"))[pos % ratio * width..][..width];
        g.iter_mut().zip(bias).for_each(|(g, bias)| *g += bias);
        let norm = self.w(&format!("{at}.norm.weight")).to_vec();
        let state = &mut self.layers[layer];
        let pool = if index { &mut state.keys } else { &mut state.rows };
        pool.now.push((a, g));
        if !(pos + 1).is_multiple_of(ratio) {
            return;
        }
        let (now, dim) = (std::mem::take(&mut pool.now), norm.len());
        let own = width - dim;
        let channel = |c: usize| -> f64 {
            let mut slots: Vec<(f64, f64)> = Vec::new();
            if own > 0 {
                slots.extend(pool.before.iter().map(|(a, g)| (a[c], g[c])));
            }
            slots.extend(now.iter().map(|(a, g)| (a[own + c], g[own + c])));
            let most = slots.iter().map(|slot| slot.1).fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = slots.iter().map(|slot| (slot.1 - most).exp()).sum();
            slots.iter().map(|slot| slot.0 * (slot.1 - most).exp()).sum::<f64>() / total
        };
        let mut row = rms(&(0..dim).map(channel).collect::<Row>(), Some(&norm));
        pool.before = now;
        self.rope(&mut row, pos + 1 - ratio, true, 1.0);
        let state = &mut self.layers[layer];
        if index { &mut state.keys } else { &mut state.rows }.rows.push(row);
    }

    fn attention(&mut self, layer: usize, h: &[f64]) -> Row {
        let (at, pos, compressed) = (format!("layers.{layer}.attn"), self.pos, RATIOS[layer] > 0);
        let qr = rms(&self.linear(&format!("{at}.wq_a"), h), Some(self.w(&format!("{at}.q_norm.weight"))));
        let q = self.linear(&format!("{at}.wq_b"), &qr);
        let mut kv = rms(&self.linear(&format!("{at}.wkv"), h), Some(self.w(&format!("{at}.kv_norm.weight"))));
        self.rope(&mut kv, pos, compressed, 1.0);
        let window = &mut self.layers[layer].window;
        window.push(kv);
        if window.len() > WINDOW {
            window.remove(0);
        }
        if compressed {
            self.compress(layer, h, &format!("{at}.compressor"), false);
        }
        if RATIOS[layer] == 4 {
            self.compress(layer, h, &format!("{at}.indexer.compressor"), true);
        }
        let state = &self.layers[layer];
        let mut keys: Vec<&Row> = state.window.iter().collect();
        if RATIOS[layer] == 4 {
            let index_q = self.linear(&format!("{at}.indexer.wq_b"), &qr);
            let weights = self.linear(&format!("{at}.indexer.weights_proj"), h);
            let queries: Vec<Row> = index_q
                .chunks_exact(128)
                .map(|q| {
                    let mut q = q.to_vec();
                    self.rope(&mut q, pos, true, 1.0);
                    q
                })
                .collect();
            let factor = 1.0 / (128.0 * INDEX_HEADS as f64).sqrt();
            let score = |key: &Row| -> f64 {
                (0..INDEX_HEADS).map(|i| weights[i] * factor * dot(&queries[i], key).max(0.0)).sum()
            };
            let scores: Row = state.keys.rows.iter().map(score).collect();
            keys.extend(top(&scores, self.index_top).into_iter().map(|w| &state.rows.rows[w]));
        } else {
            keys.extend(&state.rows.rows);
        }
        let mut out = Row::new();
        for (head, q) in q.chunks_exact(DIM).enumerate() {
            let mut q = rms(q, None);
            self.rope(&mut q, pos, compressed, 1.0);
            let s: Row = keys.iter().map(|key| dot(&q, key) / (DIM as f64).sqrt()).collect();
            let sink = self.w(&format!("{at}.attn_sink"))[head];
            let most = s.iter().copied().fold(sink, f64::max);
            let total = s.iter().map(|s| (s - most).exp()).sum::<f64>() + (sink - most).exp();
            let mut o = vec![0.0; DIM];
            for (s, key) in s.iter().zip(&keys) {
                o.iter_mut().zip(key.iter()).for_each(|(o, key)| *o += (s - most).exp() / total * key);
            }
            self.rope(&mut o, pos, compressed, -1.0);
            out.extend(o);
        }
        let cols = HEADS * DIM / GROUPS;
        let w = self.w(&format!("{at}.wo_a.weight"));
        let group =
            |g: usize| matvec(&w[g * GROUP_OUT * cols..(g + 1) * GROUP_OUT * cols], &out[g * cols..(g + 1) * cols]);
        let grouped: Row = (0..GROUPS).flat_map(group).collect();
        self.linear(&format!("{at}.wo_b"), &grouped)
    }

    fn expert(&self, at: &str, h: &[f64], weight: f64) -> Row {
        let (gate, up) = (self.linear(&format!("{at}.w1"), h), self.linear(&format!("{at}.w3"), h));
        let unit = |(g, u): (&f64, &f64)| {
            let g = g.min(2.0);
            g * sigmoid(g) * u.clamp(-2.0, 2.0) * weight
        };
        self.linear(&format!("{at}.w2"), &gate.iter().zip(&up).map(unit).collect::<Row>())
    }

    fn experts(&self, at: &str, h: &[f64], token: usize) -> Row {
        let score: Row = self.linear(&format!("{at}.gate"), h).iter().map(|x| x.exp().ln_1p().sqrt()).collect();
        let chosen: Vec<usize> = match self.weights.get(&format!("{at}.gate.tid2eid")) {
            Some(table) => table[token * CHOSEN..(token + 1) * CHOSEN].iter().map(|&e| e as usize).collect(),
            None => {
                let bias = self.w(&format!("{at}.gate.bias"));
                top(&(0..EXPERTS).map(|e| score[e] + bias[e]).collect::<Row>(), CHOSEN)
            }
        };
        let total: f64 = chosen.iter().map(|&e| score[e]).sum();
        let mut out = self.expert(&format!("{at}.shared_experts"), h, 1.0);
        for e in chosen {
            let y = self.expert(&format!("{at}.experts.{e}"), h, score[e] / total * 1.5);
            out.iter_mut().zip(y).for_each(|(out, y)| *out += y);
        }
        out
    }
}

fn expand(x: &[f64], y: &[f64], mixing: &[f64]) -> Row {
    let stream =
        |k: usize, i: usize| mixing[k] * y[i] + (0..4).map(|j| mixing[4 + 4 * j + k] * x[j * D + i]).sum::<f64>();
    (0..4).flat_map(|k| (0..D).map(move |i| stream(k, i))).collect()
}
