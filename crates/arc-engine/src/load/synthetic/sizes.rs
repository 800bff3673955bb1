//! What shapes a DeepSeek-V4.

/// Sizes and constants of a DeepSeek-V4. Source: the released `config.json` files.
#[derive(Clone, Debug, PartialEq)]
pub struct V4Sizes {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of a residual stream.
    pub hidden: usize,
    /// Query heads; there is one key-value head.
    pub n_heads: usize,
    /// Values of a head, the rotary ones included.
    pub head_dim: usize,
    /// Rotary values of a head: its last ones.
    pub rope_dim: usize,
    /// Width between the two query projections.
    pub q_rank: usize,
    /// Groups of heads in the output projection.
    pub o_groups: usize,
    /// Width of a group between the two output projections.
    pub o_rank: usize,
    /// Raw rows that a query sees, its own included.
    pub window: usize,
    /// By layer, then by MTP block: tokens that a compressed row stands for; 0 without compression.
    pub ratios: Vec<usize>,
    /// Blocks behind the trunk, each with an entry in `ratios`.
    pub n_mtp: usize,
    /// Heads of the indexer.
    pub index_heads: usize,
    /// Values of an index head.
    pub index_dim: usize,
    /// Compressed rows that the indexer picks.
    pub index_top: usize,
    /// Routed experts.
    pub n_experts: usize,
    /// Routed experts that a token goes to.
    pub experts_per_token: usize,
    /// Width of an expert, routed or shared.
    pub expert_dim: usize,
    /// Layers, from the first, that look their experts up by token.
    pub n_hash_layers: usize,
    /// Multiplies the routing weights.
    pub routed_scale: f32,
    /// Bound of gate and up projections.
    pub swiglu_limit: f32,
    /// Residual streams.
    pub streams: usize,
    /// Tokens that the model was made for.
    pub context: usize,
}

/// The kind of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct V4Layer {
    /// Tokens that a compressed row stands for: 0 (window only), 4 (with indexer) or 128.
    pub ratio: usize,
    /// Whether experts are looked up by token.
    pub hash: bool,
}

impl V4Sizes {
    /// DeepSeek-V4-Flash.
    pub fn flash() -> Self {
        let mut ratios = vec![0, 0];
        ratios.extend([4, 128].repeat(20));
        ratios.extend([4, 0]);
        Self {
            vocab: 129_280,
            hidden: 4096,
            n_heads: 64,
            head_dim: 512,
            rope_dim: 64,
            q_rank: 1024,
            o_groups: 8,
            o_rank: 1024,
            window: 128,
            ratios,
            n_mtp: 1,
            index_heads: 64,
            index_dim: 128,
            index_top: 512,
            n_experts: 256,
            experts_per_token: 6,
            expert_dim: 2048,
            n_hash_layers: 3,
            routed_scale: 1.5,
            swiglu_limit: 10.0,
            streams: 4,
            context: 1 << 20,
        }
    }

    /// DeepSeek-V4-Pro.
    pub fn pro() -> Self {
        let mut ratios = vec![128, 128];
        ratios.extend([4, 128].repeat(29));
        ratios.extend([4, 0]);
        Self {
            hidden: 7168,
            n_heads: 128,
            q_rank: 1536,
            o_groups: 16,
            ratios,
            index_top: 1024,
            n_experts: 384,
            expert_dim: 3072,
            routed_scale: 2.5,
            ..Self::flash()
        }
    }

    /// One layer of each kind at Flash's widths, and the MTP block: window and hash; CSA and hash; CSA; HCA.
    pub fn slice() -> Self {
        Self { ratios: vec![0, 4, 4, 128, 0], n_hash_layers: 2, ..Self::flash() }
    }

    /// Every kind of layer, as small as the formats allow: rows of Q2_K and IQ2_XXS are multiples of 256.
    pub fn tiny() -> Self {
        Self {
            vocab: 384,
            hidden: 256,
            n_heads: 4,
            head_dim: 128,
            q_rank: 128,
            o_groups: 2,
            o_rank: 64,
            window: 16,
            ratios: vec![0, 4, 128, 4, 0],
            index_heads: 8,
            index_top: 8,
            n_experts: 6,
            experts_per_token: 4,
            expert_dim: 256,
            n_hash_layers: 2,
            swiglu_limit: 2.0,
            ..Self::flash()
        }
    }

    /// Layers of the trunk.
    pub fn n_layers(&self) -> usize {
        self.ratios.len() - self.n_mtp
    }

    /// Kind of a layer; those from [`Self::n_layers`] on are MTP blocks.
    pub fn layer(&self, layer: usize) -> V4Layer {
        V4Layer { ratio: self.ratios[layer], hash: layer < self.n_hash_layers.min(self.n_layers()) }
    }
}
