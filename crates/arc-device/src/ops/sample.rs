//! The sampler's parameters.

/// Sampler parameters as a request states them.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerConfig {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0: absent.
    pub top_k: u32,
    /// 1.0: absent.
    pub top_p: f32,
    /// 0.0: absent.
    pub min_p: f32,
    /// Key of the generator.
    pub seed: u64,
}
