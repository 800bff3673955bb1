//! Sampling on the GPU.

use super::SamplerConfig;

/// Whether the device draws rows with these parameters itself.
pub(crate) fn can_finish(sampling: &SamplerConfig) -> bool {
    sampling.dry.is_none() && sampling.bias.len() <= crate::cuda::MAX_BIAS
}
