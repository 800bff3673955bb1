//! Loading: weights by their released names, state and workspace by the limits.

use arc_device::ops::hc::{MIXES, STREAMS};
use arc_device::ops_v4::{
    CompressorWeights, DraftWeights, ExpertWeights, ExpertWork, HcHead, HcSite, IndexWeights, LatentState,
    LatentWeights, LatentWork, OpsV4, PoolState, PoolWeights, RouterWeights, Streams,
};
use arc_device::step::Limits;
use arc_device::{Alloc, MemoryClass};

use arc_device::ops::compress::Compressor;
use arc_device::ops::latent::RowFormat;

use super::config::{LayerKind, Numerics, V4Config};
use super::draft::Draft;
use super::weights::Reader;
use super::{DeepseekV4, Layer, Workspace, latent_layer};
use crate::load::{LoadError, ModelFile};

type Result<T> = std::result::Result<T, LoadError>;

impl<D: OpsV4 + Alloc> DeepseekV4<D> {
    /// Loads a checked configuration's weights, every tensor's shape being compared with it first, and allocates state
    /// and workspace. Errors name the tensor.
    pub fn load(dev: &mut D, file: &ModelFile, config: &V4Config, limits: &Limits) -> Result<Self> {
        config.check_numerics(file.path())?;
        let keep_codes = config.numerics() == Numerics::Serving;
        let (layers, experts) = (config.layers.len(), config.experts.router.experts);
        let read = Reader::new(file, layers, experts, keep_codes, D::READS_VALUES);
        let loader = Loader { read, c: config };
        let (c, hidden) = (config, config.hc.dim);
        loader.check_kinds()?;
        let embed = loader.matrix(dev, "embed", c.vocab, hidden)?;
        let layer = |(i, &kind)| loader.layer(dev, &format!("layers.{i}."), kind, i < c.hashed_layers);
        let layers = c.layers.iter().enumerate().map(layer).collect::<Result<Vec<_>>>()?;
        let hc_head = loader.hc_head(dev, "")?;
        let norm = loader.norm(dev, "norm", hidden)?;
        let head = loader.matrix(dev, "head", c.vocab, hidden)?;
        let rope = [
            dev.vector("rope", &c.rope_table(false, limits.context))?,
            dev.vector("rope", &c.rope_table(true, limits.context))?,
        ];
        let state = c.layers.iter().map(|&kind| state(dev, c, kind, limits)).collect::<Result<Vec<_>>>()?;
        let draft = c.draft.then(|| loader.draft(dev, limits)).transpose()?;
        let ws = workspace(dev, c, &rope, limits)?;
        Ok(DeepseekV4 { config: c.clone(), embed, layers, hc_head, norm, head, rope, state, draft, ws })
    }
}

impl V4Config {
    /// Whether the file has a draft block of the kind that can be loaded: there are others.
    pub fn has_draft_block(&self, file: &ModelFile) -> bool {
        let read = Reader::new(file, self.layers.len(), self.experts.router.experts, true, false);
        ["enorm", "hnorm"].iter().all(|name| read.has(&format!("mtp.0.{name}.weight")))
    }
}

struct Loader<'a> {
    read: Reader<'a>,
    c: &'a V4Config,
}

impl Loader<'_> {
    /// Refuses tensors that `compress_ratios` and `num_hash_layers` leave no place for; what they ask for and is absent
    /// is found when it is read.
    fn check_kinds(&self) -> Result<()> {
        for (i, kind) in self.c.layers.iter().enumerate() {
            let attn = format!("layers.{i}.attn");
            if *kind == LayerKind::Window {
                self.read.absent(&format!("{attn}.compressor.ape"), "compress_ratios has 0 for its layer")?;
            }
            if *kind != LayerKind::Sparse {
                self.read.absent(&format!("{attn}.indexer.wq_b.weight"), "compress_ratios has no 4 for its layer")?;
            }
            if i >= self.c.hashed_layers {
                let why = "num_hash_layers ends before its layer";
                self.read.absent(&format!("layers.{i}.ffn.gate.tid2eid"), why)?;
            }
        }
        Ok(())
    }

    fn matrix<D: Alloc>(&self, dev: &mut D, name: &str, rows: usize, cols: usize) -> Result<D::Matrix> {
        self.read.matrix(dev, name, &[self.read.source(name, rows, cols)?])
    }

    fn norm<D: Alloc>(&self, dev: &mut D, name: &str, len: usize) -> Result<D::Buf<f32>> {
        self.read.vector(dev, "norm", &format!("{name}.weight"), &[len])
    }

    fn draft<D: Alloc>(&self, dev: &mut D, limits: &Limits) -> Result<Draft<D>> {
        // A slot is drafted for in one row at most.
        let (at, dim, rows) = ("mtp.0.", self.c.hc.dim, limits.slots.min(limits.rows));
        self.read.absent(&format!("{at}attn.compressor.ape"), "draft blocks read their window only")?;
        Ok(Draft {
            input: DraftWeights {
                embed_norm: self.norm(dev, &format!("{at}enorm"), dim)?,
                stream_norm: self.norm(dev, &format!("{at}hnorm"), dim)?,
                embed: self.matrix(dev, &format!("{at}e_proj"), dim, dim)?,
                stream: self.matrix(dev, &format!("{at}h_proj"), dim, dim)?,
            },
            layer: self.layer(dev, at, LayerKind::Window, false)?,
            hc_head: self.hc_head(dev, at)?,
            norm: self.norm(dev, &format!("{at}norm"), dim)?,
            state: state(dev, self.c, LayerKind::Window, limits)?,
            streams: Streams {
                x: dev.alloc("draft streams", MemoryClass::Workspace, rows * STREAMS * dim)?,
                mixing: dev.alloc("draft streams", MemoryClass::Workspace, rows * MIXES)?,
            },
            merged: dev.alloc("draft streams", MemoryClass::Workspace, rows * dim)?,
            logits: dev.alloc("draft logits", MemoryClass::Workspace, rows * self.c.vocab)?,
        })
    }

    fn layer<D: Alloc>(&self, dev: &mut D, at: &str, kind: LayerKind, hashed: bool) -> Result<Layer<D>> {
        Ok(Layer {
            kind,
            attn_site: self.site(dev, &format!("{at}hc_attn"))?,
            attn_norm: self.norm(dev, &format!("{at}attn_norm"), self.c.hc.dim)?,
            attention: self.attention(dev, &format!("{at}attn"), kind)?,
            ffn_site: self.site(dev, &format!("{at}hc_ffn"))?,
            ffn_norm: self.norm(dev, &format!("{at}ffn_norm"), self.c.hc.dim)?,
            experts: self.experts(dev, &format!("{at}ffn"), hashed)?,
        })
    }

    fn site<D: Alloc>(&self, dev: &mut D, at: &str) -> Result<HcSite<D>> {
        let kind = "hyper-connections";
        Ok(HcSite {
            mix: self.read.vector(dev, kind, &format!("{at}_fn"), &[MIXES, STREAMS * self.c.hc.dim])?,
            base: self.read.vector(dev, kind, &format!("{at}_base"), &[MIXES])?,
            scale: self.read.vector(dev, kind, &format!("{at}_scale"), &[3])?,
        })
    }

    fn hc_head<D: Alloc>(&self, dev: &mut D, at: &str) -> Result<HcHead<D>> {
        let kind = "hyper-connections";
        Ok(HcHead {
            mix: self.read.vector(dev, kind, &format!("{at}hc_head_fn"), &[STREAMS, STREAMS * self.c.hc.dim])?,
            base: self.read.vector(dev, kind, &format!("{at}hc_head_base"), &[STREAMS])?,
            scale: self.read.vector(dev, kind, &format!("{at}hc_head_scale"), &[1])?,
        })
    }

    fn attention<D: Alloc>(&self, dev: &mut D, at: &str, kind: LayerKind) -> Result<LatentWeights<D>> {
        let (att, rank, hidden) = (&self.c.attention, self.c.q_rank, self.c.hc.dim);
        let source = |name: &str, rows, cols| self.read.source(&format!("{at}.{name}"), rows, cols);
        let low = [source("wq_a", rank, hidden)?, source("wkv", att.dim, hidden)?];
        let groups = att.groups;
        let out_a = source("wo_a", groups * att.group_out, att.q_dim() / groups)?;
        Ok(LatentWeights {
            low: self.read.matrix(dev, at, &low)?,
            q_norm: self.norm(dev, &format!("{at}.q_norm"), rank)?,
            q_b: self.matrix(dev, &format!("{at}.wq_b"), att.q_dim(), rank)?,
            kv_norm: self.norm(dev, &format!("{at}.kv_norm"), att.dim)?,
            sinks: self.read.vector(dev, "sinks", &format!("{at}.attn_sink"), &[att.heads])?,
            pool: self.c.rows(kind).map(|rows| self.pool(dev, at, rows, self.c.keys(kind))).transpose()?,
            out_a: self.read.split_matrix(dev, at, &out_a, groups)?,
            out_b: self.matrix(dev, &format!("{at}.wo_b"), hidden, groups * att.group_out)?,
        })
    }

    fn pool<D: Alloc>(
        &self,
        dev: &mut D,
        at: &str,
        rows: Compressor,
        keys: Option<Compressor>,
    ) -> Result<PoolWeights<D>> {
        let (index, hidden) = (&self.c.index, self.c.hc.dim);
        let source = |name: &str, rows| self.read.source(&format!("{at}.{name}"), rows, hidden);
        let mut parts = vec![source("compressor.wkv", rows.width())?, source("compressor.wgate", rows.width())?];
        if let Some(keys) = keys {
            parts.push(source("indexer.compressor.wkv", keys.width())?);
            parts.push(source("indexer.compressor.wgate", keys.width())?);
            parts.push(source("indexer.weights_proj", index.heads)?);
        }
        let index = |keys| {
            Ok::<_, LoadError>(IndexWeights {
                q_b: self.matrix(dev, &format!("{at}.indexer.wq_b"), index.heads * index.dim, self.c.q_rank)?,
                keys: self.compressor(dev, &format!("{at}.indexer.compressor"), keys)?,
            })
        };
        let index = keys.map(index).transpose()?;
        Ok(PoolWeights {
            matrix: self.read.matrix(dev, at, &parts)?,
            rows: self.compressor(dev, &format!("{at}.compressor"), rows)?,
            index,
        })
    }

    fn compressor<D: Alloc>(&self, dev: &mut D, at: &str, shape: Compressor) -> Result<CompressorWeights<D>> {
        Ok(CompressorWeights {
            bias: self.read.vector(dev, "gate biases", &format!("{at}.ape"), &[shape.ratio, shape.width()])?,
            norm: self.norm(dev, &format!("{at}.norm"), shape.dim)?,
        })
    }

    fn experts<D: Alloc>(&self, dev: &mut D, at: &str, hashed: bool) -> Result<ExpertWeights<D>> {
        let experts = &self.c.experts;
        let (n, hidden, ffn) = (experts.router.experts, experts.hidden, experts.ffn);
        let router = if hashed {
            let ids = self.read.ids(&format!("{at}.gate.tid2eid"), &[self.c.vocab, experts.router.chosen], n)?;
            RouterWeights::Hashed(dev.ids("hash tables", &ids)?)
        } else {
            RouterWeights::Learned(self.read.vector(dev, "router biases", &format!("{at}.gate.bias"), &[n])?)
        };
        let up = |name: &str| {
            Ok::<_, LoadError>([
                self.read.source(&format!("{at}.{name}.w1"), ffn, hidden)?,
                self.read.source(&format!("{at}.{name}.w3"), ffn, hidden)?,
            ])
        };
        let each = (0..n).map(|e| format!("experts.{e}"));
        let ups = each.clone().map(|name| up(&name)).collect::<Result<Vec<_>>>()?;
        let ups: Vec<_> = ups.into_iter().flatten().collect();
        let down = |name: &str| self.read.source(&format!("{at}.{name}.w2"), hidden, ffn);
        let downs = each.map(|name| down(&name)).collect::<Result<Vec<_>>>()?;
        Ok(ExpertWeights {
            gate: self.read.vector(dev, "routers", &format!("{at}.gate.weight"), &[n, hidden])?,
            router,
            up: self.read.matrix(dev, at, &ups)?,
            down: self.read.matrix(dev, at, &downs)?,
            shared_up: self.read.matrix(dev, at, &up("shared_experts")?)?,
            shared_down: self.read.matrix(dev, at, &[down("shared_experts")?])?,
        })
    }
}

fn state<D: Alloc>(dev: &mut D, c: &V4Config, kind: LayerKind, limits: &Limits) -> Result<LatentState<D>> {
    let window = limits.slots * c.attention.ring() * c.row_format().row_bytes(c.attention.dim);
    let pool = |dev: &mut D, name, shape: Compressor, format: RowFormat| {
        let rows = limits.blocks * shape.rows_per_block() * format.row_bytes(shape.dim);
        Ok::<_, LoadError>(PoolState {
            ring: dev.alloc("compressor rings", MemoryClass::State, shape.ring_elements(limits.slots))?,
            rows: dev.alloc(name, MemoryClass::State, rows)?,
        })
    };
    Ok(LatentState {
        window: dev.alloc("window rows", MemoryClass::State, window)?,
        rows: c.rows(kind).map(|rows| pool(dev, "compressed rows", rows, c.row_format())).transpose()?,
        keys: c.keys(kind).map(|keys| pool(dev, "index rows", keys, c.key_format())).transpose()?,
    })
}

fn workspace<D: Alloc>(dev: &mut D, c: &V4Config, rope: &[D::Buf<f32>; 2], limits: &Limits) -> Result<Workspace<D>> {
    let (att, index, experts) = (&c.attention, &c.index, &c.experts);
    let (rows, hidden, assigned) = (limits.rows, c.hc.dim, limits.rows * experts.router.chosen);
    let has = |kind| c.layers.contains(&kind);
    let kinds = [LayerKind::Window, LayerKind::Sparse, LayerKind::Heavy].into_iter().filter(|&kind| has(kind));
    let pool_dim = kinds.map(|kind| latent_layer::<D>(c, rope, kind).pool_dim()).max().unwrap_or(0);
    let sparse = usize::from(has(LayerKind::Sparse));
    let mut floats = |name, len| dev.alloc(name, MemoryClass::Workspace, len);
    let (y, h) = (floats("block outputs", rows * hidden)?, floats("block inputs", rows * hidden)?);
    let streams =
        Streams { x: floats("streams", rows * STREAMS * hidden)?, mixing: floats("stream mixing", rows * MIXES)? };
    let low = floats("projections", rows * (c.q_rank + att.dim))?;
    let pool = floats("compressor inputs", rows * pool_dim)?;
    let (q, out) = (floats("queries", rows * att.q_dim())?, floats("attention", rows * att.q_dim())?);
    let kv = floats("rows", rows * att.dim)?;
    let index_q = floats("index queries", sparse * rows * index.heads * index.dim)?;
    let grouped = floats("grouped outputs", rows * att.groups * att.group_out)?;
    let weights = floats("routing", assigned)?;
    let (mid, shared) = (floats("experts", assigned * experts.ffn)?, floats("shared expert", rows * experts.ffn)?);
    let logits = floats("logits", limits.heads * c.vocab)?;
    let mut ids = |name, len| dev.alloc(name, MemoryClass::Workspace, len);
    let picks = ids("chosen rows", sparse * rows * index.top)?;
    let (chosen, order) = (ids("routing", assigned)?, ids("routing", assigned)?);
    let bounds = ids("routing", experts.router.experts + 1)?;
    Ok(Workspace {
        y,
        h,
        streams,
        attention: LatentWork { low, pool, q, kv, index_q, picks, out, grouped },
        experts: ExpertWork { ids: chosen, weights, order, bounds, mid, shared },
        logits,
    })
}
