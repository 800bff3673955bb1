//! DeepSeek-V4 as slowly and plainly as it can be said: float64, a whole prompt layer after layer, with the compressors'
//! shifting buffers. Written from the model's description, sharing nothing with the engine but the decoding of weights and
//! the rope frequencies, whose rounding is tested on its own.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use arc_device::format::half::bf16_to_f32;
use arc_engine::load::synthetic::{Synthetic, V4Sizes};
use safetensors::tensor::Dtype;

use super::Tensors;

const EPS: f64 = 1e-6;
/// Rows of a matrix that are decoded at once, so that those of a large one are never all there.
const BLOCK: usize = 16;

pub type Row = Vec<f64>;

/// Where values come from, by their released names.
pub enum Weights<'a> {
    /// A folder's tensors, all of them.
    Held(HashMap<String, Row>),
    /// A model without a file, whose rows are made when they are read.
    Made(&'a Synthetic),
}

impl Weights<'_> {
    /// Of dequantised tensors.
    pub fn held(tensors: &Tensors) -> Weights<'static> {
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
        Weights::Held(tensors.iter().map(|(name, dtype, _, data)| (name.clone(), value(*dtype, data))).collect())
    }

    fn has(&self, name: &str) -> bool {
        match self {
            Weights::Held(all) => all.contains_key(name),
            Weights::Made(model) => model.released(name).is_some(),
        }
    }

    /// Values of a tensor in rows of `cols`.
    fn len(&self, name: &str, cols: usize) -> usize {
        match self {
            Weights::Held(all) => all.get(name).unwrap_or_else(|| panic!("no {name}")).len() / cols,
            Weights::Made(model) => {
                let (tensor, rows) = model.released(name).unwrap_or_else(|| panic!("no {name}"));
                rows.len() * tensor.cols() / cols
            }
        }
    }

    fn rows(&self, name: &str, rows: Range<usize>, cols: usize) -> Cow<'_, [f64]> {
        match self {
            Weights::Held(all) => Cow::Borrowed(&all[name][rows.start * cols..rows.end * cols]),
            Weights::Made(model) => {
                let (tensor, all) = model.released(name).unwrap_or_else(|| panic!("no {name}"));
                assert_eq!(tensor.cols(), cols, "{name}");
                assert!(all.start + rows.end <= all.end, "{name}");
                let bytes = model.rows(tensor, all.start + rows.start..all.start + rows.end);
                let Some(format) = tensor.format else {
                    return bytes.as_chunks::<4>().0.iter().map(|id| f64::from(i32::from_le_bytes(*id))).collect();
                };
                let mut values = vec![0.0; rows.len() * cols];
                format.decode_row(&bytes, &mut values);
                values.into_iter().map(f64::from).collect()
            }
        }
    }

    /// A vector, or a small matrix.
    fn whole(&self, name: &str) -> Row {
        match self {
            Weights::Held(all) => all.get(name).unwrap_or_else(|| panic!("no {name}")).clone(),
            Weights::Made(model) => {
                let (tensor, rows) = model.released(name).unwrap_or_else(|| panic!("no {name}"));
                self.rows(name, 0..rows.len(), tensor.cols()).into_owned()
            }
        }
    }
}

pub struct Plain<'a> {
    pub weights: Weights<'a>,
    pub sizes: V4Sizes,
    /// Of windowed layers, then of compressed ones.
    pub frequencies: [Vec<f32>; 2],
}

fn rms(x: &[f64], weight: Option<&[f64]>) -> Row {
    let factor = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + EPS).sqrt();
    x.iter().enumerate().map(|(i, x)| x * factor * weight.map_or(1.0, |weight| weight[i])).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        (0..8).for_each(|i| sums[i] += a[i] * b[i]);
    }
    sums.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f64>()
}

/// `f` of every index, half of them on another thread.
fn each<T: Send>(n: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let run = |part: Range<usize>| part.map(&f).collect::<Vec<T>>();
    let mut first = Vec::new();
    let second = std::thread::scope(|scope| {
        let second = scope.spawn(|| run(n / 2..n));
        first = run(0..n / 2);
        second.join().expect("it does not panic where the first half does not")
    });
    first.extend(second);
    first
}

/// Ids of the largest values, of equal ones the lower.
fn top(values: &[f64], n: usize) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..values.len()).collect();
    ids.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    ids.truncate(n);
    ids.sort_unstable();
    ids
}

impl Plain<'_> {
    /// `W x` of every token.
    fn linear(&self, name: &str, x: &[Row]) -> Vec<Row> {
        let rows = x.first().map_or(0, |x| self.weights.len(name, x.len()));
        self.part(name, 0..rows, x)
    }

    /// Likewise of some rows of `W`.
    fn part(&self, name: &str, rows: Range<usize>, x: &[Row]) -> Vec<Row> {
        let Some(cols) = x.first().map(Vec::len) else { return Vec::new() };
        let blocks = each(rows.len().div_ceil(BLOCK), |block| {
            let start = rows.start + block * BLOCK;
            let w = self.weights.rows(name, start..(start + BLOCK).min(rows.end), cols);
            x.iter().map(|x| w.chunks_exact(cols).map(|w| dot(w, x)).collect()).collect::<Vec<Row>>()
        });
        (0..x.len()).map(|t| blocks.iter().flat_map(|block| block[t].iter().copied()).collect()).collect()
    }

    fn norm(&self, name: &str, x: &[Row]) -> Vec<Row> {
        let weight = self.weights.whole(&format!("{name}.weight"));
        x.iter().map(|x| rms(x, Some(&weight))).collect()
    }

    fn rope(&self, x: &mut [f64], pos: usize, compressed: bool, sign: f64) {
        let start = x.len() - self.sizes.rope_dim;
        for (pair, f) in x[start..].chunks_exact_mut(2).zip(&self.frequencies[usize::from(compressed)]) {
            let (sin, cos) = f64::from(pos as f32 * f).sin_cos();
            (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin * sign, pair[0] * sin * sign + pair[1] * cos);
        }
    }

    /// Logits after every token of a prompt, one row after the other.
    pub fn logits(&self, ids: &[u32]) -> Vec<f32> {
        self.head(&self.streams(ids), "").concat()
    }

    /// The trunk's streams after every token.
    pub fn streams(&self, ids: &[u32]) -> Vec<Row> {
        let embed = |&id: &u32| self.embedding(id).repeat(4);
        let mut x: Vec<Row> = ids.iter().map(embed).collect();
        for layer in 0..self.sizes.n_layers() {
            self.layer(&format!("layers.{layer}."), self.sizes.ratios[layer], &mut x, ids);
        }
        x
    }

    /// What the draft block says when `next` follow, one each, the positions of these streams; then, on its own streams,
    /// when `chain` follow those one by one. Logits of the last position and of those of the chain.
    pub fn drafts(&self, streams: &[Row], next: &[u32], chain: &[u32]) -> Vec<Vec<f32>> {
        assert_eq!(streams.len(), next.len());
        let mut input = self.draft_input(streams, next);
        let mut ids = next.to_vec();
        let mut logits = Vec::new();
        for i in 0..=chain.len() {
            let mut x = input.clone();
            self.layer("mtp.0.", 0, &mut x, &ids);
            let last = x.split_off(x.len() - 1);
            logits.extend(self.head(&last, "mtp.0."));
            if let Some(&token) = chain.get(i) {
                input.extend(self.draft_input(&last, &[token]));
                ids.push(token);
            }
        }
        logits
    }

    fn draft_input(&self, streams: &[Row], next: &[u32]) -> Vec<Row> {
        let hidden = self.sizes.hidden;
        let e: Vec<Row> = next.iter().map(|&id| self.embedding(id)).collect();
        let e = self.linear("mtp.0.e_proj.weight", &self.norm("mtp.0.enorm", &e));
        let each: Vec<Row> = streams.iter().flat_map(|x| x.chunks_exact(hidden).map(<[f64]>::to_vec)).collect();
        let each = self.linear("mtp.0.h_proj.weight", &self.norm("mtp.0.hnorm", &each));
        let add = |(i, h): (usize, &Row)| -> Row { h.iter().zip(&e[i / 4]).map(|(h, e)| h + e).collect() };
        let each: Vec<Row> = each.iter().enumerate().map(add).collect();
        each.chunks_exact(4).map(<[Row]>::concat).collect()
    }

    fn embedding(&self, id: u32) -> Row {
        self.weights.rows("embed.weight", id as usize..id as usize + 1, self.sizes.hidden).into_owned()
    }

    /// Both blocks of a layer, or of the draft block.
    fn layer(&self, at: &str, ratio: usize, x: &mut [Row], ids: &[u32]) {
        let (y, mixing) = self.site(x, &format!("{at}hc_attn"));
        let y = self.attention(&format!("{at}attn"), ratio, &self.norm(&format!("{at}attn_norm"), &y));
        expand(x, &y, &mixing);
        let (y, mixing) = self.site(x, &format!("{at}hc_ffn"));
        let y = self.experts(&format!("{at}ffn"), &self.norm(&format!("{at}ffn_norm"), &y), ids);
        expand(x, &y, &mixing);
    }

    fn head(&self, x: &[Row], at: &str) -> Vec<Vec<f32>> {
        let hidden = self.sizes.hidden;
        let mix = self.linear(&format!("{at}hc_head_fn"), &x.iter().map(|x| rms(x, None)).collect::<Vec<_>>());
        let base = self.weights.whole(&format!("{at}hc_head_base"));
        let scale = self.weights.whole(&format!("{at}hc_head_scale"))[0];
        let merged = |(x, mix): (&Row, &Row)| -> Row {
            let pre: Row = (0..4).map(|k| sigmoid(mix[k] * scale + base[k]) + EPS).collect();
            (0..hidden).map(|i| (0..4).map(|k| pre[k] * x[k * hidden + i]).sum()).collect()
        };
        let z: Vec<Row> = x.iter().zip(&mix).map(merged).collect();
        let logits = self.linear("head.weight", &self.norm(&format!("{at}norm"), &z));
        logits.into_iter().map(|row| row.into_iter().map(|x| x as f32).collect()).collect()
    }

    /// The weighted sums, and post and comb.
    fn site(&self, x: &[Row], at: &str) -> (Vec<Row>, Vec<Row>) {
        let raw = self.linear(&format!("{at}_fn"), &x.iter().map(|x| rms(x, None)).collect::<Vec<_>>());
        let (base, scale) = (self.weights.whole(&format!("{at}_base")), self.weights.whole(&format!("{at}_scale")));
        let hidden = self.sizes.hidden;
        let one = |(x, raw): (&Row, &Row)| {
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
            let y = (0..hidden).map(|i| (0..4).map(|k| (sigmoid(m[k]) + EPS) * x[k * hidden + i]).sum()).collect();
            let post = m[4..8].iter().map(|x| 2.0 * sigmoid(*x));
            (y, post.chain(c.into_iter().flatten()).collect())
        };
        x.iter().zip(&raw).map(one).unzip()
    }

    /// The rows of a compressor: every `ratio`-th token finishes one.
    fn compress(&self, ratio: usize, h: &[Row], at: &str) -> Vec<Row> {
        let a = self.linear(&format!("{at}.wkv.weight"), h);
        let mut g = self.linear(&format!("{at}.wgate.weight"), h);
        let (bias, norm) = (self.weights.whole(&format!("{at}.ape")), self.weights.whole(&format!("{at}.norm.weight")));
        let (width, dim) = (bias.len() / ratio, norm.len());
        for (pos, g) in g.iter_mut().enumerate() {
            g.iter_mut().zip(&bias[pos % ratio * width..][..width]).for_each(|(g, bias)| *g += bias);
        }
        let (mut rows, own) = (Vec::new(), width - dim);
        let (mut before, mut now) = (Vec::<(Row, Row)>::new(), Vec::<(Row, Row)>::new());
        for (pos, token) in a.into_iter().zip(g).enumerate() {
            now.push(token);
            if now.len() < ratio {
                continue;
            }
            let channel = |c: usize| -> f64 {
                let mut slots: Vec<(f64, f64)> = Vec::new();
                if own > 0 {
                    slots.extend(before.iter().map(|(a, g)| (a[c], g[c])));
                }
                slots.extend(now.iter().map(|(a, g)| (a[own + c], g[own + c])));
                let most = slots.iter().map(|slot| slot.1).fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = slots.iter().map(|slot| (slot.1 - most).exp()).sum();
                slots.iter().map(|slot| slot.0 * (slot.1 - most).exp()).sum::<f64>() / total
            };
            let mut row = rms(&(0..dim).map(channel).collect::<Row>(), Some(&norm));
            self.rope(&mut row, pos + 1 - ratio, true, 1.0);
            rows.push(row);
            before = std::mem::take(&mut now);
        }
        rows
    }

    fn attention(&self, at: &str, ratio: usize, h: &[Row]) -> Vec<Row> {
        let (s, dim) = (&self.sizes, self.sizes.head_dim);
        let compressed = ratio > 0;
        let qr = self.norm(&format!("{at}.q_norm"), &self.linear(&format!("{at}.wq_a.weight"), h));
        let q = self.linear(&format!("{at}.wq_b.weight"), &qr);
        let mut kv = self.norm(&format!("{at}.kv_norm"), &self.linear(&format!("{at}.wkv.weight"), h));
        kv.iter_mut().enumerate().for_each(|(pos, kv)| self.rope(kv, pos, compressed, 1.0));
        let rows = if compressed { self.compress(ratio, h, &format!("{at}.compressor")) } else { Vec::new() };
        let picked: Vec<Vec<usize>> = match ratio {
            4 => self.picked(at, h, &qr),
            0 => vec![Vec::new(); h.len()],
            // A row counts as soon as its last token is there.
            _ => (0..h.len()).map(|pos| (0..(pos + 1) / ratio).collect()).collect(),
        };
        let sinks = self.weights.whole(&format!("{at}.attn_sink"));
        let out = each(h.len(), |pos| {
            let window = &kv[(pos + 1).saturating_sub(s.window)..=pos];
            let keys: Vec<&Row> = window.iter().chain(picked[pos].iter().map(|&w| &rows[w])).collect();
            let mut out = Row::with_capacity(s.n_heads * dim);
            for (q, &sink) in q[pos].chunks_exact(dim).zip(&sinks) {
                let mut q = rms(q, None);
                self.rope(&mut q, pos, compressed, 1.0);
                let scores: Row = keys.iter().map(|key| dot(&q, key) / (dim as f64).sqrt()).collect();
                let most = scores.iter().copied().fold(sink, f64::max);
                let total = scores.iter().map(|s| (s - most).exp()).sum::<f64>() + (sink - most).exp();
                let mut o = vec![0.0; dim];
                for (score, key) in scores.iter().zip(&keys) {
                    let weight = (score - most).exp() / total;
                    o.iter_mut().zip(key.iter()).for_each(|(o, key)| *o += weight * key);
                }
                self.rope(&mut o, pos, compressed, -1.0);
                out.extend(o);
            }
            out
        });
        let cols = s.n_heads * dim / s.o_groups;
        let mut grouped = vec![Row::new(); h.len()];
        for g in 0..s.o_groups {
            let x: Vec<Row> = out.iter().map(|o| o[g * cols..(g + 1) * cols].to_vec()).collect();
            let group = self.part(&format!("{at}.wo_a.weight"), g * s.o_rank..(g + 1) * s.o_rank, &x);
            grouped.iter_mut().zip(group).for_each(|(all, group)| all.extend(group));
        }
        self.linear(&format!("{at}.wo_b.weight"), &grouped)
    }

    /// Which compressed rows the indexer of a sparse layer picks for every token.
    fn picked(&self, at: &str, h: &[Row], qr: &[Row]) -> Vec<Vec<usize>> {
        let s = &self.sizes;
        let keys = self.compress(4, h, &format!("{at}.indexer.compressor"));
        let q = self.linear(&format!("{at}.indexer.wq_b.weight"), qr);
        let weights = self.linear(&format!("{at}.indexer.weights_proj.weight"), h);
        let factor = 1.0 / ((s.index_dim * s.index_heads) as f64).sqrt();
        each(h.len(), |pos| {
            let mut q = q[pos].clone();
            q.chunks_exact_mut(s.index_dim).for_each(|q| self.rope(q, pos, true, 1.0));
            let score = |key: &Row| -> f64 {
                let heads = q.chunks_exact(s.index_dim).zip(&weights[pos]);
                heads.map(|(q, weight)| weight * factor * dot(q, key).max(0.0)).sum()
            };
            top(&keys[..(pos + 1) / 4].iter().map(score).collect::<Row>(), s.index_top)
        })
    }

    /// Of tokens with the weights of their routing.
    fn expert(&self, at: &str, h: &[Row], weights: &[f64]) -> Vec<Row> {
        let (gate, up) = (self.linear(&format!("{at}.w1.weight"), h), self.linear(&format!("{at}.w3.weight"), h));
        let limit = f64::from(self.sizes.swiglu_limit);
        let unit = |((gate, up), weight): ((&Row, &Row), &f64)| -> Row {
            let one = |(g, u): (&f64, &f64)| {
                let g = g.min(limit);
                g * sigmoid(g) * u.clamp(-limit, limit) * weight
            };
            gate.iter().zip(up).map(one).collect()
        };
        let mid: Vec<Row> = gate.iter().zip(&up).zip(weights).map(unit).collect();
        self.linear(&format!("{at}.w2.weight"), &mid)
    }

    fn experts(&self, at: &str, h: &[Row], ids: &[u32]) -> Vec<Row> {
        let (s, table) = (&self.sizes, format!("{at}.gate.tid2eid"));
        let scores = self.linear(&format!("{at}.gate.weight"), h);
        let hashed = self.weights.has(&table);
        let bias = if hashed { Row::new() } else { self.weights.whole(&format!("{at}.gate.bias")) };
        // By expert: tokens and weights.
        let mut assigned: Vec<Vec<(usize, f64)>> = vec![Vec::new(); s.n_experts];
        for (t, (score, &id)) in scores.iter().zip(ids).enumerate() {
            let score: Row = score.iter().map(|x| x.exp().ln_1p().sqrt()).collect();
            let chosen: Vec<usize> = if hashed {
                let row = self.weights.rows(&table, id as usize..id as usize + 1, s.experts_per_token);
                row.iter().map(|&e| e as usize).collect()
            } else {
                top(&score.iter().zip(&bias).map(|(score, bias)| score + bias).collect::<Row>(), s.experts_per_token)
            };
            let total: f64 = chosen.iter().map(|&e| score[e]).sum();
            chosen.iter().for_each(|&e| assigned[e].push((t, score[e] / total * f64::from(s.routed_scale))));
        }
        let mut out = self.expert(&format!("{at}.shared_experts"), h, &vec![1.0; h.len()]);
        for (e, tokens) in assigned.iter().enumerate() {
            let (x, weights): (Vec<Row>, Row) = tokens.iter().map(|&(t, weight)| (h[t].clone(), weight)).unzip();
            let y = self.expert(&format!("{at}.experts.{e}"), &x, &weights);
            for (y, &(t, _)) in y.iter().zip(tokens) {
                out[t].iter_mut().zip(y).for_each(|(out, y)| *out += y);
            }
        }
        out
    }
}

/// Spreads a block's output over the streams.
fn expand(x: &mut [Row], y: &[Row], mixing: &[Row]) {
    for ((x, y), mixing) in x.iter_mut().zip(y).zip(mixing) {
        let hidden = y.len();
        let stream = |k: usize, i: usize| {
            mixing[k] * y[i] + (0..4).map(|j| mixing[4 + 4 * j + k] * x[j * hidden + i]).sum::<f64>()
        };
        *x = (0..4).flat_map(|k| (0..hidden).map(move |i| (k, i))).map(|(k, i)| stream(k, i)).collect();
    }
}
