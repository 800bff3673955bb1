//! The tensors of a DeepSeek-V4: one table, read as a GGUF file in the 2-bit recipe and as a released checkpoint.
//!
//! Recipe: routed gate and up IQ2_XXS, routed down Q2_K; Q8_0 for attention, shared expert and head; F16 for embedding,
//! compressors, indexer, router and hyper-connection matrices; F32 for norms, sinks, biases and the other vectors.
//! Released: FP8 squares and FP4 groups with their scales as tensors of their own, BF16 and F32 for the rest.

use std::collections::BTreeMap;

use arc_device::format::Format;

use super::{V4Layer, V4Sizes};
use crate::load::Shape;

/// What a tensor is for, in a table of memory and traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Projections of queries, keys and outputs.
    Attention,
    /// Routed experts.
    Routed,
    /// The shared expert.
    Shared,
    /// The output head.
    Head,
    /// Compressors of attention rows.
    Compressor,
    /// Indexer with its compressor.
    Indexer,
    /// Hyper-connections.
    Hyper,
    /// Scores and biases of experts, and the table of those that are looked up.
    Router,
    /// Embedding of tokens.
    Embedding,
    /// Norms and sinks.
    Norm,
    /// What joins the MTP block to the trunk.
    Mtp,
}

impl Class {
    /// Name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention projections",
            Self::Routed => "routed experts",
            Self::Shared => "shared expert",
            Self::Head => "output head",
            Self::Compressor => "compressors",
            Self::Indexer => "indexer",
            Self::Hyper => "hyper-connections",
            Self::Router => "router",
            Self::Embedding => "embedding",
            Self::Norm => "norms, sinks",
            Self::Mtp => "mtp projections",
        }
    }
}

/// How a released checkpoint stores a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// E4M3 `[out, in]` with E8M0 `[ceil(out / 128), ceil(in / 128)]`.
    Fp8,
    /// E2M1 pairs `[out, in / 2]` with E8M0 `[out, in / 32]`.
    Fp4,
    /// BF16.
    Bf16,
    /// F32.
    F32,
    /// 64-bit integers.
    I64,
}

/// How the values of a synthetic tensor spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Draw {
    /// Real numbers.
    Values {
        /// Their mean; 0 for matrices.
        mean: f32,
        /// Their standard deviation.
        std: f32,
    },
    /// In each row distinct integers below this number.
    Picks(usize),
}

/// How much of a tensor one token reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// All of it.
    Whole,
    /// The experts that it goes to.
    Picked,
    /// One row.
    Row,
}

/// A tensor of the 2-bit recipe.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Name in GGUF.
    pub name: String,
    /// Outermost first; of routed experts `[experts, out, in]`.
    pub shape: Shape,
    /// How it is stored; `None` for 32-bit integers.
    pub format: Option<Format>,
    /// What it is for.
    pub class: Class,
    /// Whether it belongs to an MTP block.
    pub mtp: bool,
    /// How much of it a token reads.
    pub reads: Reads,
    /// Its values.
    pub draw: Draw,
}

impl TensorSpec {
    /// Values in a row: the innermost dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows: the product of all dimensions but the innermost.
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        let bytes = self.format.map_or(Some(4 * self.cols()), |format| format.row_bytes(self.cols()));
        bytes.expect("the sizes of a synthetic model are whole blocks")
    }

    /// Bytes of all rows.
    pub fn n_bytes(&self) -> usize {
        self.rows() * self.row_bytes()
    }

    /// Values.
    pub fn n_values(&self) -> u64 {
        self.shape.iter().map(|&dim| dim as u64).product()
    }

    /// Bytes that one token reads of it.
    pub fn read_bytes(&self, sizes: &V4Sizes) -> u64 {
        match self.reads {
            Reads::Whole => self.n_bytes() as u64,
            Reads::Picked => (self.n_bytes() / sizes.n_experts * sizes.experts_per_token) as u64,
            Reads::Row => self.row_bytes() as u64,
        }
    }
}

/// A tensor of a released checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct ReleasedSpec {
    /// Name, without `.weight` and `.scale` where it has both.
    pub name: String,
    /// `[out, in]` in values, or the shape of a vector.
    pub shape: Vec<usize>,
    /// How it is stored: with [`Stored::Fp8`] and [`Stored::Fp4`] two tensors, else one of this name.
    pub stored: Stored,
}

impl ReleasedSpec {
    /// Tensors that it is in the file.
    pub fn n_tensors(&self) -> usize {
        if matches!(self.stored, Stored::Fp8 | Stored::Fp4) { 2 } else { 1 }
    }
}

/// One entry: `{e}` in the released name stands for an expert.
struct Entry {
    released: &'static str,
    gguf: &'static str,
    shape: Vec<usize>,
    stored: Stored,
    format: Option<Format>,
    class: Class,
    reads: Reads,
    draw: Draw,
}

fn entry(
    (released, gguf): (&'static str, &'static str),
    shape: &[usize],
    (stored, format): (Stored, Format),
    class: Class,
    draw: Draw,
) -> Entry {
    let reads = if class == Class::Routed { Reads::Picked } else { Reads::Whole };
    Entry { released, gguf, shape: shape.to_vec(), stored, format: Some(format), class, reads, draw }
}

const DENSE: (Stored, Format) = (Stored::Fp8, Format::Q8_0);
const HALF: (Stored, Format) = (Stored::Bf16, Format::F16);
const VECTOR: (Stored, Format) = (Stored::F32, Format::F32);
const NORM: (Stored, Format) = (Stored::Bf16, Format::F32);

/// Keeps the size of what it multiplies, `gain` times.
fn matrix(gain: f32, cols: usize) -> Draw {
    // A square root is correctly rounded everywhere; a power is not.
    Draw::Values { mean: 0.0, std: gain / (cols as f32).sqrt() }
}

fn around(mean: f32, std: f32) -> Draw {
    Draw::Values { mean, std }
}

fn norm(names: (&'static str, &'static str), len: usize) -> Entry {
    entry(names, &[len], NORM, Class::Norm, around(1.0, 0.2))
}

fn top(s: &V4Sizes) -> Vec<Entry> {
    let wide = s.streams * s.hidden;
    vec![
        Entry {
            reads: Reads::Row,
            ..entry(
                ("embed.weight", "token_embd.weight"),
                &[s.vocab, s.hidden],
                HALF,
                Class::Embedding,
                around(0.0, 1.0),
            )
        },
        Entry {
            stored: Stored::Bf16,
            ..entry(("head.weight", "output.weight"), &[s.vocab, s.hidden], DENSE, Class::Head, matrix(2.5, s.hidden))
        },
        norm(("norm.weight", "output_norm.weight"), s.hidden),
        entry(
            ("hc_head_fn", "output_hc_fn.weight"),
            &[s.streams, wide],
            (Stored::F32, Format::F16),
            Class::Hyper,
            matrix(1.0, wide),
        ),
        entry(("hc_head_base", "output_hc_base.weight"), &[s.streams], VECTOR, Class::Hyper, around(0.0, 0.5)),
        entry(("hc_head_scale", "output_hc_scale.weight"), &[1], VECTOR, Class::Hyper, around(1.0, 0.3)),
    ]
}

/// What an MTP block has beside the tensors of a layer. The names are the same in both, `.weight` aside.
fn mtp(s: &V4Sizes) -> Vec<Entry> {
    let (d, wide) = (s.hidden, s.streams * s.hidden);
    vec![
        entry(("e_proj", "e_proj.weight"), &[d, d], DENSE, Class::Mtp, matrix(1.0, d)),
        entry(("h_proj", "h_proj.weight"), &[d, d], DENSE, Class::Mtp, matrix(1.0, d)),
        norm(("enorm.weight", "enorm.weight"), d),
        norm(("hnorm.weight", "hnorm.weight"), d),
        norm(("norm.weight", "norm.weight"), d),
        entry(
            ("hc_head_fn", "hc_head_fn.weight"),
            &[s.streams, wide],
            (Stored::F32, Format::F16),
            Class::Hyper,
            matrix(1.0, wide),
        ),
        entry(("hc_head_base", "hc_head_base.weight"), &[s.streams], VECTOR, Class::Hyper, around(0.0, 0.5)),
        entry(("hc_head_scale", "hc_head_scale.weight"), &[1], VECTOR, Class::Hyper, around(1.0, 0.3)),
    ]
}

fn layer(s: &V4Sizes, kind: V4Layer) -> Vec<Entry> {
    let (d, q, heads) = (s.hidden, s.q_rank, s.n_heads * s.head_dim);
    let mut all = hyper(s);
    all.extend([
        norm(("attn_norm.weight", "attn_norm.weight"), d),
        norm(("ffn_norm.weight", "ffn_norm.weight"), d),
        entry(("attn.wq_a", "attn_q_a.weight"), &[q, d], DENSE, Class::Attention, matrix(1.0, d)),
        norm(("attn.q_norm.weight", "attn_q_a_norm.weight"), q),
        entry(("attn.wq_b", "attn_q_b.weight"), &[heads, q], DENSE, Class::Attention, matrix(1.0, q)),
        entry(("attn.wkv", "attn_kv.weight"), &[s.head_dim, d], DENSE, Class::Attention, matrix(1.0, d)),
        norm(("attn.kv_norm.weight", "attn_kv_a_norm.weight"), s.head_dim),
        entry(("attn.attn_sink", "attn_sinks.weight"), &[s.n_heads], VECTOR, Class::Norm, around(0.0, 1.0)),
        entry(
            ("attn.wo_a", "attn_output_a.weight"),
            &[s.o_groups * s.o_rank, heads / s.o_groups],
            DENSE,
            Class::Attention,
            matrix(1.0, heads / s.o_groups),
        ),
        entry(
            ("attn.wo_b", "attn_output_b.weight"),
            &[d, s.o_groups * s.o_rank],
            DENSE,
            Class::Attention,
            matrix(1.0, s.o_groups * s.o_rank),
        ),
    ]);
    if kind.ratio > 0 {
        const ROWS: [(&str, &str); 4] = [
            ("attn.compressor.wkv.weight", "attn_compressor_kv.weight"),
            ("attn.compressor.wgate.weight", "attn_compressor_gate.weight"),
            ("attn.compressor.ape", "attn_compressor_ape.weight"),
            ("attn.compressor.norm.weight", "attn_compressor_norm.weight"),
        ];
        all.extend(compressor(s, kind.ratio, s.head_dim, Class::Compressor, ROWS));
    }
    if kind.ratio == 4 {
        const KEYS: [(&str, &str); 4] = [
            ("attn.indexer.compressor.wkv.weight", "indexer_compressor_kv.weight"),
            ("attn.indexer.compressor.wgate.weight", "indexer_compressor_gate.weight"),
            ("attn.indexer.compressor.ape", "indexer_compressor_ape.weight"),
            ("attn.indexer.compressor.norm.weight", "indexer_compressor_norm.weight"),
        ];
        let width = s.index_heads * s.index_dim;
        let weights = ("attn.indexer.weights_proj.weight", "indexer.proj.weight");
        let queries = ("attn.indexer.wq_b", "indexer.attn_q_b.weight");
        all.push(entry(queries, &[width, q], (Stored::Fp8, Format::F16), Class::Indexer, matrix(1.0, q)));
        all.push(entry(weights, &[s.index_heads, d], HALF, Class::Indexer, matrix(1.0, d)));
        all.extend(compressor(s, kind.ratio, s.index_dim, Class::Indexer, KEYS));
    }
    all.extend(experts(s, kind.hash));
    all
}

fn hyper(s: &V4Sizes) -> Vec<Entry> {
    let (wide, mixes) = (s.streams * s.hidden, (2 + s.streams) * s.streams);
    let site = |[matrix_names, base, scale]: [(&'static str, &'static str); 3]| {
        [
            entry(matrix_names, &[mixes, wide], (Stored::F32, Format::F16), Class::Hyper, matrix(1.0, wide)),
            entry(base, &[mixes], VECTOR, Class::Hyper, around(0.0, 0.5)),
            entry(scale, &[3], VECTOR, Class::Hyper, around(1.0, 0.3)),
        ]
    };
    let attention = site([
        ("hc_attn_fn", "hc_attn_fn.weight"),
        ("hc_attn_base", "hc_attn_base.weight"),
        ("hc_attn_scale", "hc_attn_scale.weight"),
    ]);
    let experts = site([
        ("hc_ffn_fn", "hc_ffn_fn.weight"),
        ("hc_ffn_base", "hc_ffn_base.weight"),
        ("hc_ffn_scale", "hc_ffn_scale.weight"),
    ]);
    attention.into_iter().chain(experts).collect()
}

fn compressor(
    s: &V4Sizes,
    ratio: usize,
    dim: usize,
    class: Class,
    [values, gates, bias, norm_names]: [(&'static str, &'static str); 4],
) -> [Entry; 4] {
    // Overlapping windows have channels of their own.
    let width = if ratio == 4 { 2 * dim } else { dim };
    [
        entry(values, &[width, s.hidden], HALF, class, matrix(1.0, s.hidden)),
        entry(gates, &[width, s.hidden], HALF, class, matrix(1.0, s.hidden)),
        Entry {
            reads: Reads::Row,
            ..entry(bias, &[ratio, width], (Stored::F32, Format::F16), class, around(0.0, 1.0))
        },
        norm(norm_names, dim),
    ]
}

fn experts(s: &V4Sizes, hash: bool) -> Vec<Entry> {
    let (d, i, e) = (s.hidden, s.expert_dim, s.n_experts);
    let narrow = (Stored::Fp4, Format::Iq2Xxs);
    let mut all = vec![
        entry(("ffn.gate.weight", "ffn_gate_inp.weight"), &[e, d], HALF, Class::Router, matrix(1.5, d)),
        entry(("ffn.experts.{e}.w1", "ffn_gate_exps.weight"), &[i, d], narrow, Class::Routed, matrix(2.0, d)),
        entry(("ffn.experts.{e}.w3", "ffn_up_exps.weight"), &[i, d], narrow, Class::Routed, matrix(2.0, d)),
        entry(
            ("ffn.experts.{e}.w2", "ffn_down_exps.weight"),
            &[d, i],
            (Stored::Fp4, Format::Q2K),
            Class::Routed,
            matrix(1.0, i),
        ),
        entry(("ffn.shared_experts.w1", "ffn_gate_shexp.weight"), &[i, d], DENSE, Class::Shared, matrix(2.0, d)),
        entry(("ffn.shared_experts.w3", "ffn_up_shexp.weight"), &[i, d], DENSE, Class::Shared, matrix(2.0, d)),
        entry(("ffn.shared_experts.w2", "ffn_down_shexp.weight"), &[d, i], DENSE, Class::Shared, matrix(1.0, i)),
    ];
    all.push(if hash {
        Entry {
            released: "ffn.gate.tid2eid",
            gguf: "ffn_gate_tid2eid.weight",
            shape: vec![s.vocab, s.experts_per_token],
            stored: Stored::I64,
            format: None,
            class: Class::Router,
            reads: Reads::Row,
            draw: Draw::Picks(e),
        }
    } else {
        entry(("ffn.gate.bias", "exp_probs_b.bias"), &[e], VECTOR, Class::Router, around(0.0, 0.3))
    });
    all
}

/// Every block of tensors with its prefixes (released, GGUF) and whether it is an MTP block.
fn blocks(s: &V4Sizes) -> Vec<(String, String, bool, Vec<Entry>)> {
    let mut all = vec![(String::new(), String::new(), false, top(s))];
    for idx in 0..s.ratios.len() {
        let entries = layer(s, s.layer(idx));
        match idx.checked_sub(s.n_layers()) {
            None => all.push((format!("layers.{idx}."), format!("blk.{idx}."), false, entries)),
            Some(idx) => {
                let prefix = format!("mtp.{idx}.");
                all.push((prefix.clone(), prefix, true, entries.into_iter().chain(mtp(s)).collect()));
            }
        }
    }
    all
}

/// The tensors of a GGUF file in the 2-bit recipe. An MTP block is named `mtp.N.`, with the suffixes of a layer.
pub fn gguf(sizes: &V4Sizes) -> Vec<TensorSpec> {
    let mut all = Vec::new();
    for (_, prefix, mtp, entries) in blocks(sizes) {
        all.extend(entries.into_iter().map(|entry| {
            let mut shape = entry.shape;
            if entry.class == Class::Routed {
                shape.insert(0, sizes.n_experts);
            }
            TensorSpec {
                name: format!("{prefix}{}", entry.gguf),
                shape: Shape::new(&shape).expect("at most three dimensions"),
                format: entry.format,
                class: entry.class,
                mtp,
                reads: entry.reads,
                draw: entry.draw,
            }
        }));
    }
    all
}

/// The tensors of a released checkpoint.
pub fn released(sizes: &V4Sizes) -> Vec<ReleasedSpec> {
    let mut all = Vec::new();
    for (prefix, _, _, entries) in blocks(sizes) {
        for Entry { released, shape, stored, class, .. } in entries {
            let n = if class == Class::Routed { sizes.n_experts } else { 1 };
            all.extend((0..n).map(|expert| ReleasedSpec {
                name: format!("{prefix}{}", released.replace("{e}", &expert.to_string())),
                shape: shape.clone(),
                stored,
            }));
        }
    }
    all
}

/// From released names to GGUF's.
#[derive(Clone, Debug)]
pub struct GgufNames {
    /// Names inside a layer or an MTP block, and at the top.
    block: BTreeMap<&'static str, &'static str>,
    top: BTreeMap<&'static str, &'static str>,
    /// Layers of the trunk, in files that count MTP blocks as layers.
    trunk: Option<usize>,
}

impl Default for GgufNames {
    fn default() -> Self {
        // Names do not depend on sizes; the two kinds of layer together have all of them.
        let s = V4Sizes::tiny();
        let both = [V4Layer { ratio: 4, hash: false }, V4Layer { ratio: 4, hash: true }];
        let names = |entry: Entry| (entry.released, entry.gguf);
        Self {
            block: both.into_iter().flat_map(|kind| layer(&s, kind)).chain(mtp(&s)).map(names).collect(),
            top: top(&s).into_iter().map(names).collect(),
            trunk: None,
        }
    }
}

/// The name that an MTP block's tensor has where MTP blocks count as layers: `norm.weight` is `nextn.shared_head_norm.weight`.
/// `None` for what a layer has too.
fn nextn(released: &str) -> Option<String> {
    const OWN: [&str; 7] = ["e_proj", "h_proj", "enorm", "hnorm", "hc_head_fn", "hc_head_base", "hc_head_scale"];
    match bare(released) {
        "norm" => Some("nextn.shared_head_norm.weight".to_owned()),
        name => OWN.contains(&name).then(|| format!("nextn.{name}.weight")),
    }
}

impl GgufNames {
    /// For a file in which MTP block N is `blk.{layers + N}`, as llama.cpp writes it: what a layer has not stands under
    /// `nextn.`, and both projections may be one ([`Self::joined`]).
    pub fn counting_mtp_blocks(self, layers: usize) -> Self {
        Self { trunk: Some(layers), ..self }
    }

    /// The tensor that may hold this one beside another, along the inputs, and its place there: `mtp.0.e_proj` is the
    /// first half of `blk.43.nextn.eh_proj.weight`, `mtp.0.h_proj` the second.
    pub fn joined(&self, released: &str) -> Option<(String, usize)> {
        let (block, name) = released.strip_prefix("mtp.")?.split_once('.')?;
        let place = ["e_proj", "h_proj"].into_iter().position(|proj| bare(name) == proj)?;
        Some((format!("blk.{}.nextn.eh_proj.weight", self.trunk? + number(block)?), place))
    }

    /// The tensor that holds a released one: its name, and of a routed expert's matrix the expert's number, its place
    /// in the outermost dimension. `released`: with or without `.weight` where the tensor has a scale beside it. `None`
    /// for a name that no DeepSeek-V4 has, scales included.
    ///
    /// `layers.3.ffn.experts.5.w1` gives `blk.3.ffn_gate_exps.weight` and 5; `mtp.0.attn.wkv` gives
    /// `mtp.0.attn_kv.weight`.
    pub fn of(&self, released: &str) -> Option<(String, Option<usize>)> {
        let mut parts = released.splitn(3, '.');
        let (prefix, name, names) = match (parts.next()?, parts.next(), parts.next()) {
            ("layers", Some(layer), Some(name)) => (format!("blk.{}.", number(layer)?), name, &self.block),
            ("mtp", Some(block), Some(name)) => match self.trunk {
                None => (format!("mtp.{}.", number(block)?), name, &self.block),
                Some(layers) => {
                    let prefix = format!("blk.{}.", layers + number(block)?);
                    if let Some(own) = nextn(name) {
                        return Some((format!("{prefix}{own}"), None));
                    }
                    (prefix, name, &self.block)
                }
            },
            _ => (String::new(), released, &self.top),
        };
        let (name, expert) = match name.strip_prefix("ffn.experts.") {
            None => (name.to_owned(), None),
            Some(rest) => {
                let (expert, rest) = rest.split_once('.')?;
                (format!("ffn.experts.{{e}}.{rest}"), Some(number(expert)?))
            }
        };
        let bare = name.strip_suffix(".weight").unwrap_or(&name);
        let found = names.get(name.as_str()).or_else(|| names.get(bare))?;
        Some((format!("{prefix}{found}"), expert))
    }
}

/// What a tensor of a DeepSeek-V4 is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Role {
    /// Its line in tables.
    pub class: Class,
    /// How much of it a token reads.
    pub reads: Reads,
    /// Whether it is of a block behind the trunk.
    pub draft: bool,
}

/// What tensors are for, by their released names or GGUF's.
#[derive(Clone, Debug)]
pub struct Roles {
    n_layers: usize,
    /// Names inside a layer or an MTP block, and at the top; of either kind, without `.weight` and `.scale`.
    block: BTreeMap<&'static str, (Class, Reads)>,
    top: BTreeMap<&'static str, (Class, Reads)>,
}

impl Roles {
    /// For a trunk of this many layers.
    pub fn new(n_layers: usize) -> Self {
        let s = V4Sizes::tiny();
        let both = [V4Layer { ratio: 4, hash: false }, V4Layer { ratio: 4, hash: true }];
        let names = |entry: Entry| [entry.released, entry.gguf].map(|name| (bare(name), (entry.class, entry.reads)));
        Self {
            n_layers,
            block: both.into_iter().flat_map(|kind| layer(&s, kind)).chain(mtp(&s)).flat_map(names).collect(),
            top: top(&s).into_iter().flat_map(names).collect(),
        }
    }

    /// The role of the tensor of that name; `None` for a name that no DeepSeek-V4 has.
    pub fn of(&self, name: &str) -> Option<Role> {
        let mut parts = bare(name).splitn(3, '.');
        let (block, idx, rest) = (parts.next()?, parts.next().and_then(number), parts.next());
        let (found, draft) = match (block, idx, rest) {
            ("layers" | "blk", Some(layer), Some(rest)) => {
                let rest = match rest.strip_prefix("nextn.") {
                    // Both projections in one.
                    Some("eh_proj") => "e_proj",
                    Some("shared_head_norm") => "norm",
                    Some(rest) => rest,
                    None => rest,
                };
                (self.in_block(rest), layer >= self.n_layers)
            }
            ("mtp", Some(_), Some(rest)) => (self.in_block(rest), true),
            _ => (self.top.get(bare(name)), false),
        };
        found.map(|&(class, reads)| Role { class, reads, draft })
    }

    fn in_block(&self, name: &str) -> Option<&(Class, Reads)> {
        let expert = name.strip_prefix("ffn.experts.").and_then(|rest| rest.split_once('.'));
        match expert {
            Some((_, matrix)) => self.block.get(format!("ffn.experts.{{e}}.{matrix}").as_str()),
            None => self.block.get(name),
        }
    }
}

fn bare(name: &str) -> &str {
    name.strip_suffix(".weight").or_else(|| name.strip_suffix(".scale")).unwrap_or(name)
}

/// A number as names have it: digits, no leading zero.
fn number(text: &str) -> Option<usize> {
    let number = text.parse::<usize>().ok()?;
    (number.to_string() == text).then_some(number)
}

/// Parameters of the trunk. Integers that are looked up are none.
pub fn parameters(sizes: &V4Sizes) -> u64 {
    let trunk = gguf(sizes).into_iter().filter(|tensor| !tensor.mtp && tensor.format.is_some());
    trunk.map(|tensor| tensor.n_values()).sum()
}
