//! Logits of DeepSeek-V4 on the GPU: against goldens that other implementations made (the tiny fixture, whose README says
//! what lies in its files and how close an engine comes), and against the CPU.

use std::path::{Path, PathBuf};

use arc_device::cpu::Cpu;
use arc_device::cuda::Cuda;
use arc_device::format::half::f16_to_f32;
use arc_device::step::{BLOCK_TOKENS, Limits};
use arc_engine::load::{LoadError, ModelFile};
use arc_engine::logits::prompt_logits;
use arc_engine::model::deepseek_v4::{Numerics, V4Config};
use arc_engine::model::{Model, ModelConfig};
use arc_engine::runner::Runner;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

use crate::compare::equal_bits;
use crate::inputs::Rng;
use crate::models::{On, prompt, vocab};
use crate::suite::{Suite, Verdict};

/// Of logits in float32, by the fixture's README.
const TOLERANCE: f32 = 1e-4;

/// Cases of a model that has goldens beside its folder; none of others.
pub fn cases(suite: &mut Suite, name: &str, path: &Path) {
    let Some(files) = Files::beside(path) else { return };
    let name = format!("model/{name}/golden");
    suite.case(&format!("{name}/reference"), |suite| files.reference(suite));
    suite.case(&format!("{name}/simulated"), |suite| files.simulated(suite));
    suite.case(&format!("{name}/serving"), |suite| files.serving(suite));
    type Mistake = (&'static str, fn(&mut V4Config));
    let mistakes: [Mistake; 8] = [
        ("window one short", |config| config.attention.window -= 1),
        ("window one long", |config| config.attention.window += 1),
        ("one index row fewer", |config| config.index.top -= 1),
        ("no clamp", |config| config.experts.limit = f32::INFINITY),
        ("routing weights not scaled", |config| config.experts.router.scale = 1.0),
        ("one rope for all layers", |config| config.compress_rope_base = config.rope_base),
        ("one normalisation", |config| config.hc.iterations = 1),
        ("scores not scaled", |config| config.attention.scale = 1.0),
    ];
    for (what, mistake) in mistakes {
        suite.mutant(&format!("{name}/{what}"), |suite| {
            let ids = files.golden.ids("long.input_ids");
            let got = files.logits(suite, Numerics::Reference, mistake, &ids, ids.len()).expect("it runs all the same");
            close(&got, &files.golden.floats("long.logits"), ids.len(), 10.0 * TOLERANCE)
        });
    }
}

/// What a server computes, of 1,200 tokens on both devices: on the GPU, the same bits in chunks and token by token; on the
/// CPU, distributions as close as codes allow that round the other way now and then.
pub fn devices(suite: &Suite, path: &Path) -> Verdict {
    let serving = |config: &mut V4Config| config.set_numerics(Numerics::Serving);
    let gpu = On::Gpu { ordinal: suite.ordinal(), capture: false };
    let ids = prompt(&mut Rng(18), 1200, vocab(path)?);
    let chunks = logits(gpu, path, serving, &ids, 250)?;
    equal_bits(&chunks, &logits(gpu, path, serving, &ids, 1)?).map_err(|why| format!("token by token: {why}"))?;
    alike("CPU", &chunks, &logits(On::Cpu, path, serving, &ids, 250)?, ids.len(), 0.05, 0.8)
}

/// Logits of all tokens, `[ids, vocab]`, in steps of at most `chunk` rows.
fn logits(on: On, path: &Path, change: impl Fn(&mut V4Config), ids: &[u32], chunk: usize) -> Result<Vec<f32>, String> {
    let (context, chunk) = (ids.len().next_multiple_of(BLOCK_TOKENS), chunk.min(256));
    let blocks = Limits::blocks_for(context);
    let limits = Limits { slots: 1, rows: chunk, heads: chunk, context, blocks, ring: 16 };
    let run = || -> Result<Vec<f32>, LoadError> {
        let file = ModelFile::open(path)?;
        let mut config = ModelConfig::read(&file)?;
        let ModelConfig::DeepseekV4(v4) = &mut config else { panic!("a DeepSeek-V4") };
        change(v4);
        let mut logits = Vec::new();
        let mut each = |row: &[f32]| logits.extend_from_slice(row);
        match on.options() {
            None => {
                let mut dev = Cpu::new(On::threads(), limits);
                let model = Model::load(&mut dev, &file, &config, &limits)?;
                prompt_logits(&mut Runner::new(dev, model), &limits, ids, chunk, &mut each)?;
            }
            Some(options) => {
                let mut dev = Cuda::new(options, limits)?;
                let model = Model::load(&mut dev, &file, &config, &limits)?;
                prompt_logits(&mut Runner::new(dev, model), &limits, ids, chunk, &mut each)?;
            }
        }
        Ok(logits)
    };
    run().map_err(|error| error.to_string())
}

/// A file of tensors.
struct Golden(Vec<u8>);

impl Golden {
    fn data(&self, name: &str) -> (Dtype, Vec<u8>) {
        let tensors = SafeTensors::deserialize(&self.0).expect("the fixture is whole");
        let tensor = tensors.tensor(name).expect(name);
        (tensor.dtype(), tensor.data().to_vec())
    }

    /// Of F32 or F16.
    fn floats(&self, name: &str) -> Vec<f32> {
        let (dtype, data) = self.data(name);
        match dtype {
            Dtype::F32 => data.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
            Dtype::F16 => data.as_chunks::<2>().0.iter().map(|half| f16_to_f32(u16::from_le_bytes(*half))).collect(),
            other => panic!("{name} is {other:?}"),
        }
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        let (dtype, data) = self.data(name);
        assert_eq!(dtype, Dtype::I32, "{name}");
        data.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }
}

/// A model and the goldens beside it.
struct Files {
    model: PathBuf,
    golden: Golden,
    serving: Golden,
}

impl Files {
    fn beside(model: &Path) -> Option<Files> {
        let read = |name: &str| std::fs::read(model.parent()?.join(name)).ok().map(Golden);
        Some(Files {
            golden: read("golden.safetensors")?,
            serving: read("serving.safetensors")?,
            model: model.to_owned(),
        })
    }

    fn logits(
        &self,
        suite: &Suite,
        numerics: Numerics,
        change: fn(&mut V4Config),
        ids: &[u32],
        chunk: usize,
    ) -> Result<Vec<f32>, String> {
        let change = |config: &mut V4Config| {
            config.set_numerics(numerics);
            change(config);
        };
        logits(On::Gpu { ordinal: suite.ordinal(), capture: false }, &self.model, change, ids, chunk)
    }

    /// Float32 everywhere: the logits of transformers, of whole prompts and of one token after another, and its greedy
    /// tokens, each of which is the largest logit after those before it.
    fn reference(&self, suite: &Suite) -> Verdict {
        let mut text = String::new();
        for name in ["short", "mid", "long"] {
            let ids = self.golden.ids(&format!("{name}.input_ids"));
            let want = self.golden.floats(&format!("{name}.logits"));
            let vocab = want.len() / ids.len();
            let got = self.logits(suite, Numerics::Reference, |_| {}, &ids, ids.len())?;
            text += &format!(
                "{name}: {}; ",
                close(&got, &want, ids.len(), TOLERANCE).map_err(|why| format!("{name}: {why}"))?
            );
            let greedy = self.golden.ids(&format!("{name}.greedy_ids"));
            let all = [&ids[..], &greedy[..]].concat();
            let got = self.logits(suite, Numerics::Reference, |_| {}, &all, 1)?;
            for (i, &token) in greedy.iter().enumerate() {
                let at = ids.len() - 1 + i;
                let best = best(&got[at * vocab..][..vocab]);
                if best as u32 != token {
                    return Err(format!("{name}: greedy token {i}: {token} wanted, {best}"));
                }
            }
            if name == "long" {
                let rows = self.golden.ids("long.decode_rows");
                let decoded: Vec<f32> =
                    rows.iter().flat_map(|&row| got[row as usize * vocab..][..vocab].to_vec()).collect();
                let verdict = close(&decoded, &self.golden.floats("long.decode_logits"), rows.len(), TOLERANCE);
                text += &format!("token by token: {}", verdict.map_err(|why| format!("token by token: {why}"))?);
            }
        }
        Ok(text)
    }

    /// The round trips that the model was trained with, and the released kernels' FP8 inputs.
    fn simulated(&self, suite: &Suite) -> Verdict {
        let mut text = String::new();
        for (fp8_inputs, kind, name, exact) in [
            (false, "kvix", "short", true),
            (false, "kvix", "mid", true),
            (false, "kvix", "long", false),
            (true, "full", "short", true),
            (true, "full", "mid", false),
        ] {
            let (ids, key) = (self.golden.ids(&format!("{name}.input_ids")), format!("{name}.{kind}.logits"));
            let want = self.golden.floats(&key);
            let got = self.logits(suite, Numerics::Simulated { fp8_inputs }, |_| {}, &ids, ids.len())?;
            if exact {
                close(&got, &want, ids.len(), 1e-3).map_err(|why| format!("{key}: {why}"))?;
            }
            text += &alike(&key, &got, &want, ids.len(), 0.01, 0.0)?;
        }
        Ok(text)
    }

    /// What a server computes on. No value of `steady` is near a rounding border: it finds a wrong rule; of the others, one
    /// code that rounds the other way changes what follows, so only distributions stay close.
    fn serving(&self, suite: &Suite) -> Verdict {
        let (ids, want) = (self.serving.ids("steady.input_ids"), self.serving.floats("steady.serving.logits"));
        let mut text = String::new();
        for chunk in [ids.len(), 1, 5] {
            let got = self.logits(suite, Numerics::Serving, |_| {}, &ids, chunk)?;
            let verdict = close(&got, &want, ids.len(), TOLERANCE);
            text += &format!("steady by {chunk}: {}; ", verdict.map_err(|why| format!("steady by {chunk}: {why}"))?);
        }
        for (name, most_kl, least_same) in [("short", 2e-3, 1.0), ("mid", 0.02, 0.85), ("long", 0.02, 0.85)] {
            let ids = self.golden.ids(&format!("{name}.input_ids"));
            let got = self.logits(suite, Numerics::Serving, |_| {}, &ids, ids.len())?;
            let want = self.serving.floats(&format!("{name}.serving.logits"));
            text += &alike(name, &got, &want, ids.len(), most_kl, least_same)?;
        }
        Ok(text)
    }
}

/// No logit of `rows` rows differs by more than `most`.
fn close(got: &[f32], want: &[f32], rows: usize, most: f32) -> Verdict {
    assert_eq!(got.len(), want.len());
    let vocab = want.len() / rows;
    let error = |(got, want): (&[f32], &[f32])| got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let errors: Vec<f32> = got.chunks_exact(vocab).zip(want.chunks_exact(vocab)).map(error).collect();
    let largest = errors.iter().fold(0.0, |a: f32, b| a.max(*b));
    match errors.iter().position(|error| error.is_nan() || *error > most) {
        None => Ok(format!("{largest:.1e}")),
        Some(row) => Err(format!("{:.1e} in row {row} of {rows}, at most {largest:.1e}", errors[row])),
    }
}

/// Mean KL(want || got) over `rows` rows below `most_kl`, the largest logit the same in a share of at least `least_same`.
fn alike(what: &str, got: &[f32], want: &[f32], rows: usize, most_kl: f64, least_same: f64) -> Verdict {
    assert_eq!(got.len(), want.len());
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let top = row.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        let total = row.iter().map(|x| f64::from(x - top).exp()).sum::<f64>().ln();
        row.iter().map(|x| f64::from(x - top) - total).collect()
    };
    let vocab = want.len() / rows;
    let (mut kl, mut same) = (0.0, 0);
    for (got, want) in got.chunks_exact(vocab).zip(want.chunks_exact(vocab)) {
        let (p, q) = (log_softmax(want), log_softmax(got));
        kl += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>() / rows as f64;
        same += usize::from(best(got) == best(want));
    }
    let same = same as f64 / rows as f64;
    let text = format!("{what}: mean KL {kl:.1e}, same first {same:.3}; ");
    if kl < most_kl && same >= least_same { Ok(text) } else { Err(text) }
}

/// The largest logit's token; of equal ones the lowest.
fn best(row: &[f32]) -> usize {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a))).expect("a token")
}
