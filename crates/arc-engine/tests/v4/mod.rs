//! The tiny DeepSeek-V4 fixture: opening it in both storage forms, running rows, and comparing.
#![allow(dead_code, reason = "each test binary uses a part")]

pub mod plain;

use std::path::{Path, PathBuf};

use arc_device::cpu::Cpu;
use arc_device::ops::sample::SamplerConfig;
use arc_device::step::{BLOCK_TOKENS, CtxClass, Limits, Part, Row, SlotInit, StepDelta, StepKey, row_flags};
use arc_device::{DeviceLoop, Landing, Ops, Readback, Steps};
use arc_engine::load::ModelFile;
use arc_engine::load::synthetic::V4Sizes;
use arc_engine::model::deepseek_v4::{DeepseekV4, Numerics, V4Config};
use arc_engine::model::{Model, ModelConfig};
use arc_engine::runner::Runner;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};

pub const CONTEXT: usize = 512;
pub const SLOTS: usize = 4;
pub const VOCAB: usize = 384;

pub fn limits() -> Limits {
    Limits { slots: SLOTS, rows: 320, heads: 320, context: CONTEXT, blocks: SLOTS * CONTEXT / BLOCK_TOKENS, ring: 4 }
}

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/deepseek-v4-tiny").join(name)
}

/// The sizes of the fixture.
pub fn fixture_sizes() -> V4Sizes {
    V4Sizes { hidden: 128, expert_dim: 128, ..V4Sizes::tiny() }
}

/// Tensors of a golden file.
pub struct Golden(Vec<u8>);

impl Golden {
    pub fn open(name: &str) -> Golden {
        Golden(std::fs::read(fixture(name)).expect("the fixture is committed"))
    }

    fn data(&self, name: &str, dtype: Dtype) -> Vec<u8> {
        let tensors = SafeTensors::deserialize(&self.0).expect("the fixture is whole");
        let tensor = tensors.tensor(name).expect(name);
        assert_eq!(tensor.dtype(), dtype, "{name}");
        tensor.data().to_vec()
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.data(name, Dtype::F32).as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
    }

    pub fn halves(&self, name: &str) -> Vec<f32> {
        let half = |word: &[u8; 2]| arc_device::format::half::f16_to_f32(u16::from_le_bytes(*word));
        self.data(name, Dtype::F16).as_chunks::<2>().0.iter().map(half).collect()
    }

    pub fn ids(&self, name: &str) -> Vec<u32> {
        self.data(name, Dtype::I32).as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }
}

/// The folder as released: FP4 experts, FP8 dense.
pub fn native() -> PathBuf {
    fixture("native")
}

/// Name, type, shape and bytes.
pub type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

/// The same weights as BF16, written beside the test's binaries.
pub fn bf16() -> PathBuf {
    folder("bf16", &dequantised())
}

/// A folder of the fixture's configuration and these tensors, the draft block's aside.
pub fn folder(name: &str, tensors: &Tensors) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("v4-tiny-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let views = tensors
        .iter()
        .filter(|(name, ..)| !name.starts_with("mtp."))
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).expect("whole")));
    std::fs::write(folder.join("model.safetensors"), serialize(views, None).expect("serialises")).expect("written");
    std::fs::copy(native().join("config.json"), folder.join("config.json")).expect("copied");
    folder
}

/// The fixture's tensors with FP8 and FP4 as BF16: values by the definitions of the formats.
pub fn dequantised() -> Tensors {
    let bytes = std::fs::read(native().join("model.safetensors")).expect("the fixture is committed");
    let tensors = SafeTensors::deserialize(&bytes).expect("the fixture is whole");
    let mut out = Tensors::new();
    for (name, tensor) in tensors.tensors() {
        let mut shape = tensor.shape().to_vec();
        let scale = |r: usize, c: usize, across: usize| {
            let scale = tensors.tensor(&name.replace(".weight", ".scale")).expect("a scale");
            let byte = scale.data()[r * scale.shape()[1] + c / across];
            2f64.powi(i32::from(byte) - 127)
        };
        let value: Box<dyn Fn(usize, usize) -> f64> = match tensor.dtype() {
            Dtype::F8_E8M0 => continue,
            Dtype::F8_E4M3 => {
                let (data, cols) = (tensor.data(), shape[1]);
                Box::new(move |r, c| {
                    let code = data[r * cols + c];
                    let (e, m) = (i32::from(code >> 3 & 15), f64::from(code & 7));
                    let value = if e == 0 { m * 2f64.powi(-9) } else { (8.0 + m) * 2f64.powi(e - 10) };
                    if code & 128 == 0 { value } else { -value }
                })
            }
            Dtype::I8 => {
                shape[1] *= 2;
                let (data, cols) = (tensor.data(), shape[1]);
                Box::new(move |r, c| {
                    let code = data[(r * cols + c) / 2] >> (4 * (c % 2)) & 15;
                    let value = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
                    if code & 8 == 0 { value } else { -value }
                })
            }
            other => {
                out.push((name, other, shape, tensor.data().to_vec()));
                continue;
            }
        };
        let fp8 = tensor.dtype() == Dtype::F8_E4M3;
        let mut data = Vec::with_capacity(2 * shape[0] * shape[1]);
        for r in 0..shape[0] {
            for c in 0..shape[1] {
                let scale = if fp8 { scale(r / 128, c, 128) } else { scale(r, c, 32) };
                let bits = ((value(r, c) * scale) as f32).to_bits();
                assert_eq!(bits & 0xffff, 0, "{name} is exact in BF16");
                data.extend(((bits >> 16) as u16).to_le_bytes());
            }
        }
        out.push((name, Dtype::BF16, shape, data));
    }
    out
}

pub fn load(folder: &Path, numerics: Numerics, threads: usize) -> (Cpu, Model<Cpu>) {
    load_with(folder, threads, &|config| config.set_numerics(numerics))
}

/// A model whose configuration was changed first.
pub fn load_with(folder: &Path, threads: usize, change: &dyn Fn(&mut V4Config)) -> (Cpu, Model<Cpu>) {
    load_within(folder, threads, limits(), change)
}

/// Within other limits than most tests need.
pub fn load_within(folder: &Path, threads: usize, limits: Limits, change: &dyn Fn(&mut V4Config)) -> (Cpu, Model<Cpu>) {
    let file = ModelFile::open(folder).expect("the fixture opens");
    let mut config = ModelConfig::read(&file).expect("the fixture has a configuration");
    let ModelConfig::DeepseekV4(v4) = &mut config else { panic!("the fixture is a DeepSeek-V4") };
    change(v4);
    let mut dev = Cpu::new(threads, limits);
    let model = Model::load(&mut dev, &file, &config, &limits).expect("the fixture loads");
    (dev, model)
}

/// A loaded model.
pub struct Rig {
    pub runner: Runner<Cpu>,
    /// Of the steps to come.
    pub ctx: CtxClass,
}

impl Rig {
    pub fn load(folder: &Path, numerics: Numerics, threads: usize) -> Rig {
        let (dev, model) = load(folder, numerics, threads);
        Rig::new(dev, model)
    }

    pub fn new(dev: Cpu, model: Model<Cpu>) -> Rig {
        Rig { runner: Runner::new(dev, model), ctx: CtxClass::Short }
    }

    /// Runs rows of one step and returns the logits of its head rows.
    pub fn step(&mut self, admit: Vec<SlotInit>, rows: Vec<Row>) -> Vec<f32> {
        let n = rows.len() as u32;
        let head = row_flags::HEAD | row_flags::SAMPLE;
        let heads = rows.iter().filter(|row| row.flags & head != 0).count() as u32;
        let ctx = self.ctx;
        let key = |part| StepKey::new(n, heads, ctx, part);
        self.runner.stage(&StepDelta { admit, rows: Some(rows), ..StepDelta::default() }).expect("staged");
        self.runner.enqueue(key(Part::Forward)).expect("forward");
        let all: Vec<u32> = (0..heads).collect();
        self.runner.fetch_rows(&all).expect("fetched");
        let logits = all.iter().flat_map(|&h| self.runner.fetched(h as usize).expect("fetched").to_vec()).collect();
        let step = self.runner.enqueue(key(Part::Sample)).expect("sampled");
        self.runner.read_to(step);
        logits
    }

    /// Logits of every token of a prompt in a slot of its own, in chunks.
    pub fn prompt(&mut self, slot: u16, tokens: &[u32], chunk: usize) -> Vec<f32> {
        let mut logits = Vec::new();
        for (i, tokens) in tokens.chunks(chunk).enumerate() {
            let admits = if i == 0 { vec![admit(slot, 0)] } else { Vec::new() };
            logits.extend(self.step(admits, rows(slot, tokens)));
        }
        logits
    }

    /// Greedy continuation, one decode row a step.
    pub fn greedy(&mut self, slot: u16, prompt: &[u32], n: usize) -> Vec<u32> {
        let mut logits = self.prompt(slot, prompt, prompt.len());
        let mut out = Vec::new();
        while out.len() < n {
            let token = best(&logits[logits.len() - VOCAB..]) as u32;
            out.push(token);
            logits = self.step(Vec::new(), rows(slot, &[token]));
        }
        out
    }
}

/// The draft block's logits over a prompt whose tokens are all known, in chunks. Nothing follows the last token: of it there
/// are none.
pub fn draft_logits(dev: &mut Cpu, model: &mut DeepseekV4<Cpu>, ids: &[u32], chunk: usize) -> Vec<f32> {
    let mut logits = Vec::new();
    for first in (0..ids.len()).step_by(chunk) {
        let tokens = &ids[first..ids.len().min(first + chunk)];
        let mut table = rows(0, tokens);
        let last = table.len() - 1;
        table[last].target = ids.get(first + tokens.len()).copied().unwrap_or(0);
        let admit = if first == 0 { vec![admit(0, 0)] } else { Vec::new() };
        dev.stage(&StepDelta { admit, rows: Some(table), ..StepDelta::default() }).expect("staged");
        let n = tokens.len() as u32;
        let key = StepKey::new(n, n, CtxClass::Short, Part::Whole);
        let mut out = vec![0.0; tokens.len() * VOCAB];
        let step = dev.step(key, &mut |dev| {
            model.draw(dev, key)?;
            let logits = model.draft_logits(dev, key)?.expect("it was asked for");
            dev.read(logits, &mut out)?;
            dev.commit(n as usize, n as usize)
        });
        dev.read_to(step.expect("a step"));
        logits.extend(out);
    }
    logits.truncate((ids.len() - 1) * VOCAB);
    logits
}

/// A sequence from `pos` on, its blocks deliberately not in order.
pub fn admit(slot: u16, pos: u32) -> SlotInit {
    let per_slot = (CONTEXT / BLOCK_TOKENS) as u32;
    let blocks = (0..per_slot).rev().map(|i| i * SLOTS as u32 + u32::from(slot)).collect();
    SlotInit { blocks, ..admit_within(slot, pos, 0) }
}

/// A sequence alone in a pool of blocks for `context` tokens, not in order.
pub fn admit_within(slot: u16, pos: u32, context: usize) -> SlotInit {
    SlotInit {
        slot,
        generation: 1,
        max_out: 10_000,
        flags: 0,
        stop_ids: Vec::new(),
        sampling: SamplerConfig { temperature: 0.0, ..SamplerConfig::default() },
        blocks: (0..(context / BLOCK_TOKENS) as u32).rev().collect(),
        penalty_prompt: Vec::new(),
        pos,
        logprobs: None,
        prompt_top: 0,
    }
}

/// Head rows that feed these tokens from the slot's position on.
pub fn rows(slot: u16, tokens: &[u32]) -> Vec<Row> {
    let row = |(i, &token): (usize, &u32)| Row { slot, flags: row_flags::HEAD, offset: i as u32, token, target: 0 };
    tokens.iter().enumerate().map(row).collect()
}

/// Largest difference, and where.
pub fn worst(got: &[f32], want: &[f32]) -> (f32, usize) {
    assert_eq!(got.len(), want.len());
    let errors = got.iter().zip(want).map(|(got, want)| (got - want).abs()).zip(0..);
    errors.max_by(|a, b| a.0.total_cmp(&b.0)).expect("something to compare")
}

/// Mean over rows of KL(want || got), and the share of rows with the same largest logit.
pub fn divergence(got: &[f32], want: &[f32]) -> (f64, f64) {
    assert_eq!(got.len(), want.len());
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let top = row.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        let total = row.iter().map(|x| f64::from(x - top).exp()).sum::<f64>().ln();
        row.iter().map(|x| f64::from(x - top) - total).collect()
    };
    let rows = got.len() / VOCAB;
    let (mut kl, mut same) = (0.0, 0);
    for (got, want) in got.chunks_exact(VOCAB).zip(want.chunks_exact(VOCAB)) {
        let (p, q) = (log_softmax(want), log_softmax(got));
        kl += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        same += usize::from(best(got) == best(want));
    }
    (kl / rows as f64, same as f64 / rows as f64)
}

/// The largest logit's token; of equal ones the lowest.
pub fn best(row: &[f32]) -> usize {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a))).expect("a token")
}

/// Counts equal bits and insists on all.
pub fn same_bits(got: &[f32], want: &[f32], what: &str) -> usize {
    assert_eq!(got.len(), want.len(), "{what}");
    if let Some(i) = got.iter().zip(want).position(|(a, b)| a.to_bits() != b.to_bits()) {
        panic!("{what}: row {} id {}: {} and {}", i / VOCAB, i % VOCAB, got[i], want[i]);
    }
    want.len()
}
