//! Sampling on the GPU.

use super::dry::DryTable;
use super::{Declined, SamplerConfig};
use crate::cuda::{Cuda, CudaBuf, Grid, MAX_BIAS, args, kernel};
use crate::error::{DeviceError, Result};

/// Threads of a block; `kThreads` of run.cuh.
const THREADS: u32 = 384;
/// Ids of a warp's tile; `kTile`.
const TILE: u32 = 128;
/// Shared memory of a block before its ids, `kRunAt`, and the least for those, 4 * `kRunMin`.
const SHARED_BEFORE: u32 = 1536 + 2 * 2048 * 4 + 2048 * 8;
const SHARED_RUN_MIN: u32 = 2 * 2048 * 4;
/// Blocks of a cluster that every Hopper places; `kMaxCluster`.
const MAX_CLUSTER: u32 = 8;
/// Ids of a block with which two blocks share a multiprocessor.
const RUN_GOOD: u32 = 16_384;
/// Shared memory that a block can have, bytes.
const SHARED_MAX: u32 = 227 << 10;
/// Rows up to which latency counts more than throughput.
const FEW_ROWS: usize = 8;

/// The largest vocabulary that a cluster holds.
pub(crate) const VOCAB_MAX: u32 = (SHARED_MAX - SHARED_BEFORE) / 4 / TILE * TILE * MAX_CLUSTER;

/// Why the device does not draw rows with these parameters itself. The kernel knows no DRY, a slot holds [`MAX_BIAS`] bias
/// entries, and a cluster [`VOCAB_MAX`] logits; there is nothing else that it declines.
pub(crate) fn declines(sampling: &SamplerConfig, vocab: u32) -> Option<Declined> {
    if sampling.dry.as_ref().is_some_and(|dry| DryTable::new(dry).is_some()) {
        Some(Declined::Dry)
    } else if sampling.bias.len() > MAX_BIAS {
        Some(Declined::Bias)
    } else {
        (vocab > VOCAB_MAX).then_some(Declined::Vocab)
    }
}

/// Blocks of a row's cluster, and ids of each.
fn layout(vocab: u32, heads: usize) -> (u32, u32) {
    let run = |cluster: u32| vocab.div_ceil(cluster).next_multiple_of(TILE);
    let few = heads <= FEW_ROWS && vocab > RUN_GOOD / 4;
    let mut cluster = if few { MAX_CLUSTER } else { 1 };
    while cluster < MAX_CLUSTER && run(cluster) > RUN_GOOD {
        cluster *= 2;
    }
    (cluster, run(cluster))
}

impl Cuda {
    /// Deliberate mistakes that the sampler's kernel can make, by number from 1; `Mutant` of run.cuh. The last is none:
    /// it takes the way of long lists always, and must not be noticed.
    pub const SAMPLE_MISTAKES: [&str; 7] = [
        "signed zero",
        "fused penalty",
        "top_p rounds down",
        "ties from the end",
        "top_p of all",
        "draw past equal",
        "no list",
    ];

    /// [`Ops::sample`](crate::Ops::sample); with a `mistake`, for the test that must catch it: its number in
    /// [`Cuda::SAMPLE_MISTAKES`].
    pub fn sample_with(&mut self, logits: &CudaBuf<f32>, heads: usize, mistake: u32) -> Result<()> {
        let view = self.view();
        let vocab = view.vocab();
        assert!(heads * vocab as usize <= logits.len(), "{heads} rows of {vocab} logits in {}", logits.len());
        if vocab > VOCAB_MAX {
            return Err(DeviceError::Unsupported { device: "cuda", what: format!("a vocabulary of {vocab} tokens") });
        }
        if heads == 0 {
            return Ok(());
        }
        let (cluster, run) = layout(vocab, heads);
        let shared = SHARED_BEFORE + (4 * run).max(SHARED_RUN_MIN);
        let grid = Grid::new(heads as u32 * cluster, THREADS).shared(shared).cluster(cluster);
        if mistake == 0 {
            let stamp = u32::from(!self.drafting);
            return self.launch(kernel!("sample_rows"), grid, args![&view, logits.ptr(), run, stamp]);
        }
        self.launch(kernel!("sample_rows_wrong"), grid, args![&view, logits.ptr(), run, mistake])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::sample::DryConfig;

    /// Over the grid of everything that a request can ask for, what the predicate says against what the kernel reads.
    #[test]
    fn the_device_declines_what_its_kernel_does_not_know_and_nothing_else() {
        let dry = |multiplier: f32, window| DryConfig {
            multiplier,
            base: 1.75,
            allowed_length: 2,
            window,
            breakers: Vec::new(),
        };
        let dries = [None, Some(dry(0.8, 100)), Some(dry(0.0, 100)), Some(dry(0.8, 0)), Some(dry(-1.0, u32::MAX))];
        let (mut yes, mut no) = (0, 0);
        for (d, dry) in dries.iter().enumerate() {
            for bias in [0, 1, MAX_BIAS, MAX_BIAS + 1] {
                for vocab in [1, 129_280, VOCAB_MAX, VOCAB_MAX + 1] {
                    for bits in 0..128u32 {
                        let on = |bit: u32| bits >> bit & 1 == 1;
                        let sampling = SamplerConfig {
                            temperature: if on(0) { 0.0 } else { 0.7 },
                            top_k: if on(1) { 50_000 } else { 0 },
                            top_p: if on(2) { 0.9 } else { 1.0 },
                            min_p: if on(3) { 0.05 } else { 0.0 },
                            presence: if on(4) { 0.5 } else { 0.0 },
                            repetition: if on(5) { 1.1 } else { 1.0 },
                            min_tokens: if on(6) { 5 } else { 0 },
                            bias: (0..bias as u32).map(|id| (id, 1.0)).collect(),
                            dry: dry.clone(),
                            ..SamplerConfig::default()
                        };
                        let why = match (d, bias, vocab) {
                            (1 | 4, ..) => Some(Declined::Dry),
                            (_, 1025.., _) => Some(Declined::Bias),
                            (.., vocab) if vocab > VOCAB_MAX => Some(Declined::Vocab),
                            _ => None,
                        };
                        assert_eq!(declines(&sampling, vocab), why, "{sampling:?} of {vocab}");
                        *if why.is_none() { &mut yes } else { &mut no } += 1;
                    }
                }
            }
        }
        assert!(yes > 1000 && no > 1000);
    }

    #[test]
    fn every_vocabulary_has_a_layout_that_fits() {
        for vocab in (1..5000).chain([32_000, 49_152, 129_280, 151_936, 262_144, VOCAB_MAX]) {
            for heads in [1, 8, 9, 256] {
                let (cluster, run) = layout(vocab, heads);
                assert!(cluster.is_power_of_two() && cluster <= MAX_CLUSTER && run.is_multiple_of(TILE));
                assert!(cluster * run >= vocab && SHARED_BEFORE + 4 * run <= SHARED_MAX, "{vocab}: {cluster} x {run}");
            }
        }
    }
}
