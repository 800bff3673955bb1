//! DeepSeek-V4 at production widths: one layer of each kind in the 2-bit recipe, 16 experts, against the plain model in
//! float64. Takes 10 GB of memory, since integer-coded weights become F32 in `reference`.

mod v4;

use std::path::Path;

use arc_device::step::{BLOCK_TOKENS, Limits};
use arc_engine::load::ModelFile;
use arc_engine::model::ModelConfig;
use arc_engine::model::deepseek_v4::Numerics;
use v4::plain::{Plain, Weights};
use v4::{Rig, VOCAB, admit_within, divergence, load_within, rows, worst};

/// Few tokens in the vocabulary, which no layer's width depends on.
const SLICE: &str = "synthetic:deepseek-v4-slice,experts=16,vocab=384";
/// Past the window, a heavy layer's first row, and fifty of a sparse layer's.
const TOKENS: usize = 200;
/// The rest is decoded.
const PREFILL: usize = 184;
/// Rows that the indexer picks: so few that it has a choice from token 96 on.
const INDEX_TOP: usize = 24;

/// Which token stands at a position: no period that a window could share.
fn token(i: usize) -> u32 {
    ((i * i * 31 + i * 97 + i / 7) % VOCAB) as u32
}

/// Logits of all tokens: a prompt in one chunk, then one row a step.
fn run(numerics: Numerics, ids: &[u32]) -> Vec<f32> {
    let context = 256;
    let limits = Limits { slots: 1, rows: PREFILL, heads: PREFILL, context, blocks: context / BLOCK_TOKENS, ring: 4 };
    let (dev, model) = load_within(Path::new(SLICE), 2, limits, &|config| {
        config.set_numerics(numerics);
        config.index.top = INDEX_TOP;
    });
    let mut rig = Rig::new(dev, model);
    let mut logits = rig.step(vec![admit_within(0, 0, context)], rows(0, &ids[..PREFILL]));
    ids[PREFILL..].iter().for_each(|&id| logits.extend(rig.step(Vec::new(), rows(0, &[id]))));
    logits
}

/// 200 tokens, all compared. `serving` only has to stay close: its codes are chaotic, and the goldens of the fixture pin
/// them.
#[test]
fn production_widths_are_as_in_the_plain_model() {
    let ids: Vec<u32> = (0..TOKENS).map(token).collect();
    let file = ModelFile::open(Path::new(SLICE)).expect("a known name");
    let (ModelFile::Synthetic(model), Ok(ModelConfig::DeepseekV4(config))) = (&file, ModelConfig::read(&file)) else {
        panic!("a DeepSeek-V4 without a file")
    };
    let frequencies = [false, true].map(|compressed| config.frequencies(compressed));
    let mut sizes = model.sizes.clone();
    assert_eq!((sizes.hidden, sizes.n_heads, sizes.head_dim, sizes.expert_dim), (4096, 64, 512, 2048));
    sizes.index_top = INDEX_TOP;
    let want = Plain { weights: Weights::Made(model), sizes, frequencies }.logits(&ids);
    assert_eq!(want.len(), TOKENS * VOCAB);
    for (numerics, most_error, most_kl) in [(Numerics::Serving, f32::INFINITY, 0.05), (Numerics::Reference, 1e-4, 1e-9)]
    {
        let got = run(numerics, &ids);
        let ((error, at), (kl, same), name) = (worst(&got, &want), divergence(&got, &want), numerics.name());
        eprintln!("{name}: {error:.2e} at row {}, mean KL {kl:.1e}, same argmax {same:.3}", at / VOCAB);
        assert!(error <= most_error, "{name}: {error} at row {}", at / VOCAB);
        assert!(kl < most_kl && same > 0.8, "{name}: mean KL {kl}, same argmax {same}");
    }
}
