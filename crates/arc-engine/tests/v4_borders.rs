//! DeepSeek-V4 across every border of its windows, against a slow, plain model in float64.

mod v4;

use arc_device::step::{BLOCK_TOKENS, CtxClass, Limits};
use arc_engine::load::synthetic::V4Sizes;
use arc_engine::model::ModelConfig;
use arc_engine::model::deepseek_v4::{Numerics, V4Config, rope_row};
use safetensors::SafeTensors;
use v4::plain::{Plain, Weights};
use v4::{Golden, Rig, VOCAB, admit_within, dequantised, divergence, fixture_sizes, load_within, native, rows, worst};

/// Past 513 compressed rows.
const TOKENS: usize = 2060;

fn config() -> V4Config {
    let file = arc_engine::load::ModelFile::open(&native()).expect("the fixture opens");
    match ModelConfig::read(&file) {
        Ok(ModelConfig::DeepseekV4(config)) => config,
        other => panic!("{other:?}"),
    }
}

/// The plain model of the fixture's weights.
fn plain(top: usize) -> Plain<'static> {
    let frequencies = [false, true].map(|compressed| config().frequencies(compressed));
    let sizes = V4Sizes { index_top: top, ..fixture_sizes() };
    Plain { weights: Weights::held(&dequantised()), sizes, frequencies }
}

/// Which token stands at a position: no period that a window could share.
fn token(i: usize) -> u32 {
    ((i * i * 31 + i * 97 + i / 7) % VOCAB) as u32
}

fn run(top: usize, chunk: usize, ids: &[u32]) -> Vec<f32> {
    let context = 2112;
    let limits = Limits { slots: 1, rows: 320, heads: 320, context, blocks: context / BLOCK_TOKENS, ring: 4 };
    let (dev, model) = load_within(&native(), 2, limits, &|config| {
        config.set_numerics(Numerics::Reference);
        config.index.top = top;
    });
    let mut rig = Rig::new(dev, model);
    let mut logits = Vec::new();
    let (short, medium) = ids.split_at(ids.len().min(2048));
    for (ctx, ids) in [(CtxClass::Short, short), (CtxClass::Medium, medium)] {
        rig.ctx = ctx;
        for tokens in ids.chunks(chunk) {
            let admits = if logits.is_empty() { vec![admit_within(0, 0, context)] } else { Vec::new() };
            logits.extend(rig.step(admits, rows(0, tokens)));
        }
    }
    logits
}

/// 2,060 tokens with an indexer of 512 rows, as in production: nothing is scored up to 2,048 tokens, everything is read up
/// to 512 rows, and then 512 of 513 and more are. And with one of 8.
#[test]
fn every_border_is_as_in_the_plain_model() {
    let ids: Vec<u32> = (0..TOKENS).map(token).collect();
    for (top, tokens) in [(512, TOKENS), (8, 600)] {
        let want = plain(top).logits(&ids[..tokens]);
        for chunk in [1, 300] {
            let got = run(top, chunk, &ids[..tokens]);
            let (error, at) = worst(&got, &want);
            let (kl, same) = divergence(&got, &want);
            eprintln!("top {top}, chunks of {chunk}: {error:.2e} at row {}, mean KL {kl:.1e}", at / VOCAB);
            assert!(error < 1e-4, "top {top}, chunks of {chunk}: {error} at row {}, mean KL {kl}, {same}", at / VOCAB);
        }
    }
}

/// The plain model itself, against transformers.
#[test]
fn the_plain_model_gives_the_golden() {
    let golden = Golden::open("golden.safetensors");
    let (error, at) = worst(&plain(8).logits(&golden.ids("long.input_ids")), &golden.floats("long.logits"));
    assert!(error < 1e-4, "{error} at row {}", at / VOCAB);
}

/// Frequencies and angles at production constants, which the fixture shares, up to a million.
#[test]
fn rope_is_that_of_the_release() {
    let path = v4::fixture("../deepseek-v4/unit_vectors.safetensors");
    let bytes = std::fs::read(path).expect("the vectors are committed");
    let tensors = SafeTensors::deserialize(&bytes).expect("whole");
    let floats = |name: &str| -> Vec<f32> {
        let data = tensors.tensor(name).expect(name).data().to_vec();
        data.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
    };
    let positions = tensors.tensor("rope.pos").expect("positions").data().to_vec();
    let positions: Vec<usize> =
        positions.as_chunks::<8>().0.iter().map(|pos| i64::from_le_bytes(*pos) as usize).collect();
    let (x, config) = (floats("rope.in"), config());
    assert!(positions.iter().any(|&pos| pos > 900_000));
    for (compressed, kind) in [(false, "main"), (true, "compress")] {
        let frequencies = config.frequencies(compressed);
        for (ours, theirs) in frequencies.iter().zip(floats(&format!("rope.{kind}.inv_freq"))) {
            assert!((ours - theirs).abs() <= theirs * 1.2e-7, "{kind}: {ours} {theirs}");
        }
        let (out, exact) = (floats(&format!("rope.{kind}.out")), floats(&format!("rope.{kind}.out_f64angle")));
        let mut apart = 0.0f32;
        for (i, &pos) in positions.iter().enumerate() {
            let row: Vec<f32> = rope_row(&floats(&format!("rope.{kind}.inv_freq")), pos).collect();
            for j in 0..32 {
                let (a, b) = (x[i * 64 + 2 * j], x[i * 64 + 2 * j + 1]);
                let (cos, sin) = (row[2 * j], row[2 * j + 1]);
                for (got, at) in [(a * cos - b * sin, 2 * j), (a * sin + b * cos, 2 * j + 1)] {
                    assert!((got - out[i * 64 + at]).abs() < 2e-6, "{kind} at {pos}: {got} {}", out[i * 64 + at]);
                    apart = apart.max((got - exact[i * 64 + at]).abs());
                }
            }
        }
        assert!(apart > 1e-3, "{kind}: angles that were not rounded would not differ");
    }
}
