//! DeepSeek-V4 across every border of its windows, against a slow, plain model in float64.

mod v4;

use std::collections::HashSet;

use arc_device::ops::sample::SamplerConfig;
use arc_device::step::{
    BLOCK_TOKENS, CtxClass, Limits, Part, Row, SlotInit, StepDelta, StepKey, TOKEN_OF_SLOT, row_flags,
};
use arc_device::{Landing, Steps};
use arc_engine::load::synthetic::V4Sizes;
use arc_engine::model::ModelConfig;
use arc_engine::model::deepseek_v4::{Numerics, V4Config, rope_row};
use safetensors::SafeTensors;
use v4::plain::{Plain, Weights};
use v4::{
    Golden, Rig, VOCAB, admit, admit_within, best, dequantised, divergence, fixture_sizes, load_with, load_within,
    native, rows, worst,
};

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

/// Whether a token has the largest of these logits, or so nearly that float32 may say so.
fn is_best(token: u32, logits: &[f32], bias: &[(u32, f32)]) -> bool {
    let mut logits = logits.to_vec();
    bias.iter().for_each(|&(id, bias)| logits[id as usize] += bias);
    logits[token as usize] > logits[best(&logits)] - 1e-3
}

/// The draft block's drafts, one by one: the first of the trunk's streams, the others chained, while drafts of every step
/// are verified and most are taken back. Four tokens are favoured, so that some are right. 150 tokens: past a compressed row
/// of 128, and nine windows.
#[test]
fn drafts_are_those_of_the_plain_model() {
    const DRAFTS: usize = 4;
    let plain = plain(8);
    let golden = Golden::open("golden.safetensors").ids("long.input_ids");
    let (mut dev, mut model) = load_with(&native(), 2, &|config| {
        config.set_numerics(Numerics::Reference);
        config.draft = true;
    });
    let bias = vec![(17, 40.0), (101, 40.0), (230, 40.0), (311, 40.0)];
    let sampling = SamplerConfig { temperature: 0.0, bias: bias.clone(), ..SamplerConfig::default() };
    let prompt = &golden[..60];
    let (ask, verify) = (row_flags::SAMPLE | row_flags::PROPOSE, row_flags::VERIFY);
    let mut out: Vec<u32> = Vec::new();
    let (mut accepted, mut chunks) = (0, prompt.chunks(23).enumerate().peekable());
    // After so many tokens, these drafts.
    let mut drafted: Vec<(usize, Vec<u32>)> = Vec::new();
    while out.len() < 90 {
        let (mut rows, mut admits) = (Vec::new(), Vec::new());
        if let Some((i, chunk)) = chunks.next() {
            rows = v4::rows(0, chunk);
            let last = rows.len() - 1;
            rows[last].flags = if chunks.peek().is_none() { ask } else { 0 };
            rows[last].target = prompt.get(i * 23 + chunk.len()).copied().unwrap_or(0);
            if i == 0 {
                admits.push(SlotInit { sampling: sampling.clone(), ..admit(0, 0) });
            }
        } else {
            let flags = |j| if j == 0 { ask } else { verify };
            let row = |j| Row { slot: 0, flags: flags(j), offset: j, token: TOKEN_OF_SLOT, target: 0 };
            rows.extend((0..=DRAFTS as u32).map(row));
        }
        let draft_rows = u32::from(chunks.peek().is_none());
        let n = rows.len() as u32;
        let key = StepKey::new(n, n, CtxClass::Short, Part::Whole).drafting(DRAFTS as u32, draft_rows);
        let heads = rows.iter().filter(|row| row.flags != 0).count();
        dev.stage(&StepDelta { admit: admits, rows: Some(rows), ..StepDelta::default() }).expect("staged");
        let step = dev.step(key, &mut |dev| model.step(dev, key)).expect("a step");
        dev.read_to(step);
        if draft_rows == 0 {
            continue;
        }
        let landed = dev.landed(step, if out.is_empty() { heads - 1 } else { 0 });
        accepted += landed.n_tokens as usize - 1;
        out.extend(&landed.tokens[..landed.n_tokens as usize]);
        drafted.push((out.len(), dev.drafts(0).to_vec()));
    }
    let text = [prompt, &out].concat();
    let streams = plain.streams(&text);
    let logits = plain.logits(&text);
    for (i, &token) in out.iter().enumerate() {
        let at = prompt.len() - 1 + i;
        assert!(is_best(token, &logits[at * VOCAB..(at + 1) * VOCAB], &bias), "token {i}");
    }
    let mut compared = 0;
    for (n, drafts) in drafted {
        assert_eq!(drafts.len(), DRAFTS);
        let known = prompt.len() + n;
        let logits = plain.drafts(&streams[..known - 1], &text[1..known], &drafts[..DRAFTS - 1]);
        for (j, (draft, logits)) in drafts.iter().zip(&logits).enumerate() {
            assert!(is_best(*draft, logits, &bias), "draft {j} after {n} tokens");
            compared += 1;
        }
    }
    println!("{compared} drafts, {accepted} accepted");
    let distinct: HashSet<u32> = out.iter().copied().collect();
    assert!(compared > 100 && accepted > 5 && distinct.len() > 1, "{compared} {accepted} {distinct:?}");
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
