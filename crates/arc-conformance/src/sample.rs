//! Sampling: every token and logprob of the GPU against the CPU's, over random parameters and logits made to tell
//! mistakes apart.

use arc_device::cuda::Cuda;
use arc_device::math::exp;
use arc_device::ops::hc::{HcConfig, STREAMS};
use arc_device::ops::sample::{DryConfig, SamplerConfig};
use arc_device::ops_v4::{OpsV4, Streams};
use arc_device::rng::draw_word;
use arc_device::step::{
    BLOCK_TOKENS, CtxClass, Forced, Landed, Part, Row, SlotInit, StepDelta, StepKey, TOKEN_OF_SLOT, landed_flags,
    row_flags,
};
use arc_device::{Alloc, Buffers, Landing, MemoryClass, Ops, Readback, Steps, StreamState};

use crate::inputs::Rng;
use crate::suite::{Pair, Suite, Verdict, decode_row, limits, shape};

/// Vocabularies, rows of a step, and steps; what each case draws from follows from its seed.
const SIZES: [(usize, usize, usize); 15] = [
    (1, 8, 3),
    (2, 32, 6),
    (5, 64, 6),
    (31, 64, 8),
    (127, 64, 6),
    (1_000, 64, 6),
    (2_049, 64, 5),
    (5_000, 48, 5),
    (16_385, 24, 3),
    (20_001, 24, 3),
    (32_000, 24, 4),
    (49_152, 24, 3),
    (129_280, 24, 3),
    (151_936, 4, 2),
    (262_144, 12, 2),
];

/// Tokens, logprobs and faults of random requests; mutants; time by class of request.
pub fn cases(suite: &mut Suite) {
    for (vocab, rows, steps) in SIZES {
        suite.case(&format!("sample/random/{vocab}"), |suite| random(suite, vocab, rows, steps, 0));
        // Few rows have a layout of their own.
        suite.case(&format!("sample/few/{vocab}"), |suite| random(suite, vocab, rows.min(3), steps, 0));
        if vocab > 2_048 {
            let list = Cuda::SAMPLE_MISTAKES.len() as u32;
            suite.case(&format!("sample/no_list/{vocab}"), |suite| random(suite, vocab, rows, steps, list));
        }
    }
    suite.case("sample/two_parts", two_parts);
    suite.case("sample/drafts", drafts);
    for (mistake, edge) in [(2, fused_penalty as fn() -> Edge), (3, top_p_border), (6, draw_border)] {
        let name = Cuda::SAMPLE_MISTAKES[mistake - 1];
        suite.case(&format!("sample/edge/{name}"), |suite| at_edge(suite, &edge(), 0));
        suite.mutant(&format!("sample/{name}"), |suite| at_edge(suite, &edge(), mistake as u32));
    }
    for mistake in [1, 4, 5] {
        suite.mutant(&format!("sample/{}", Cuda::SAMPLE_MISTAKES[mistake - 1]), |suite| {
            random(suite, 1_000, 64, 12, mistake as u32)
        });
    }
    for vocab in [49_152, 129_280, 262_144] {
        suite.measure(&format!("sample/{vocab}"), |suite| times(suite, vocab));
    }
}

impl Rng {
    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn token(&mut self, vocab: usize) -> u32 {
        // Few distinct ids, so that they repeat.
        let spread = self.of(&[2, 5, vocab]).min(vocab);
        self.below(spread) as u32
    }
}

/// A row of logits: ties, signed zeros, denormals, one that dwarfs all others, runs of `-inf`, now and then NaN.
fn logits(rng: &mut Rng, vocab: usize, out: &mut Vec<f32>) {
    let start = out.len();
    let scale = rng.of(&[0.01, 0.5, 1.0, 3.0, 10.0, 1000.0]);
    let level = rng.of(&[0.0, -0.0, 1.0, -7.25, 30.0, 1e-41]);
    let zeros = [0.0, -0.0, 1e-45, -1e-45, 3e-40, -3e-40];
    let kind = rng.below(10);
    out.extend((0..vocab).map(|i| match kind {
        0 | 1 => rng.normal() * scale + level,
        2 => level,
        3 => rng.below(4) as f32 * 0.5 + level,
        4 => rng.of(&zeros[..2]),
        5 => rng.of(&zeros),
        6 => level - i as f32 * scale * 1e-3,
        7 => rng.normal() * 1e37,
        _ => rng.normal() * 2.0,
    }));
    let row = &mut out[start..];
    if kind == 8 {
        let at = rng.below(vocab);
        row[at] = rng.of(&[20.0, 90.0, 1e30]);
    }
    if rng.one_in(4) {
        let (from, len) = (rng.below(vocab), rng.below(vocab) + 1);
        row.iter_mut().skip(from).take(len).for_each(|x| *x = f32::NEG_INFINITY);
    }
    if rng.one_in(50) {
        let at = rng.below(vocab);
        row[at] = rng.of(&[f32::NAN, -f32::NAN, f32::INFINITY]);
    }
}

fn request(rng: &mut Rng, vocab: usize) -> SamplerConfig {
    let mut c = SamplerConfig {
        temperature: rng.of(&[0.0, 1e-3, 0.3, 0.7, 1.0, 1.0, 1.5, 8.0, 100.0, 1e-14, 1e-40, 1e20]),
        seed: rng.next(),
        choice: rng.below(3) as u32,
        ..SamplerConfig::default()
    };
    if rng.one_in(2) {
        let some = rng.below(vocab) as u32 + 1;
        c.top_k = rng.of(&[1, 2, 7, 40, 40, some, some, vocab as u32, vocab as u32 + 1]);
    }
    if rng.one_in(2) {
        c.top_p = rng.of(&[0.0, 1e-6, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.999, 0.999_999_9]);
    }
    if rng.one_in(2) {
        c.min_p = rng.of(&[1e-9, 0.01, 0.05, 0.25, 0.5, 1.0]);
    }
    if rng.one_in(3) {
        c.presence = rng.of(&[0.3, -0.5, 2.0]);
        c.frequency = rng.of(&[0.1, 0.3, 0.7, -0.2]);
    }
    if rng.one_in(3) {
        c.repetition = rng.of(&[1.1, 1.3, 0.8]);
    }
    if rng.one_in(4) {
        let n = rng.of(&[5, 5, 1024]).min(vocab);
        let step = vocab / n;
        c.bias = (0..n).map(|i| ((i * step) as u32, rng.normal() * 5.0)).collect();
        if rng.one_in(10) {
            c.bias.pop();
            c.bias.push((vocab as u32, 1.0));
        }
        if rng.one_in(20) {
            c.bias[0].1 = f32::INFINITY;
        }
    }
    if rng.one_in(4) {
        c.min_tokens = 4;
    }
    if rng.one_in(8) {
        // Present in the request, absent in effect.
        c.dry = Some(DryConfig { multiplier: 0.0, base: 2.0, allowed_length: 2, window: 9, breakers: Vec::new() });
    }
    c
}

fn admission(rng: &mut Rng, slot: usize, vocab: usize, generation: u32) -> SlotInit {
    let sampling = request(rng, vocab);
    let n_prompt = rng.below(40);
    SlotInit {
        slot: slot as u16,
        generation,
        max_out: rng.of(&[1, 3, 50]),
        flags: 0,
        stop_ids: (0..rng.below(4)).map(|_| rng.token(vocab)).collect(),
        sampling,
        blocks: (0..2).map(|b| (slot * 2 + b) as u32).collect(),
        penalty_prompt: (0..n_prompt).map(|_| rng.token(vocab)).collect(),
        pos: 0,
        logprobs: rng.one_in(4).then(|| rng.below(21) as u32),
        prompt_top: rng.below(21) as u32,
    }
}

/// Both devices, and their logits.
struct Both {
    pair: Pair,
    cpu_logits: <arc_device::cpu::Cpu as arc_device::Buffers>::Buf<f32>,
    gpu_logits: <Cuda as arc_device::Buffers>::Buf<f32>,
}

impl Both {
    fn new(suite: &Suite, vocab: usize, rows: usize) -> Both {
        let mut pair = suite.pair(limits(rows, 2 * BLOCK_TOKENS));
        pair.finish(&shape(vocab, 64));
        let cpu_logits = pair.cpu.alloc("logits", MemoryClass::Workspace, rows * vocab).expect("there is room");
        let gpu_logits = pair.gpu.alloc("logits", MemoryClass::Workspace, rows * vocab).expect("there is room");
        Both { pair, cpu_logits, gpu_logits }
    }

    fn write(&mut self, values: &[f32]) {
        self.pair.cpu.write(&mut self.cpu_logits, values).expect("it fits");
        self.pair.gpu.write(&mut self.gpu_logits, values).expect("it fits");
    }

    /// One step, or a part of one, on both; what landed, where it has.
    fn step(&mut self, part: Part, rows: usize, heads: usize, mistake: u32) -> Result<Vec<(Landed, Landed)>, String> {
        let key = StepKey::new(rows as u32, heads as u32, CtxClass::Short, part);
        let Both { pair: Pair { cpu, gpu }, cpu_logits, gpu_logits } = self;
        let text = |error: arc_device::error::DeviceError| error.to_string();
        let step = cpu
            .step(key, &mut |dev| {
                if part == Part::Forward {
                    return Ok(());
                }
                dev.sample(cpu_logits, heads)?;
                dev.commit(rows, heads)
            })
            .map_err(text)?;
        gpu.step(key, &mut |dev| {
            if part == Part::Forward {
                return Ok(());
            }
            match mistake {
                0 => dev.sample(gpu_logits, heads)?,
                _ => dev.sample_with(gpu_logits, heads, mistake)?,
            }
            dev.commit(rows, heads)
        })
        .map_err(text)?;
        if part == Part::Forward {
            return Ok(Vec::new());
        }
        while Landing::head(gpu) < step {
            if gpu.poll().map_err(text)? == StreamState::Idle && Landing::head(gpu) < step {
                return Err(format!("the stream is idle and step {step} has not landed"));
            }
        }
        let landed = (0..heads).map(|h| (cpu.landed(step, h), gpu.landed(step, h))).collect();
        cpu.read_to(step);
        gpu.read_to(step);
        Ok(landed)
    }
}

/// Whether two entries say the same; what is not valid is not looked at.
fn same(want: &Landed, got: &Landed) -> bool {
    let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    let n = want.n_top as usize;
    let head = |l: &Landed| (l.slot, l.generation, l.flags, l.n_tokens, l.n_top, bits(l.logprob));
    let tops = |l: &Landed| l.top_logprobs[..n].iter().map(|&x| bits(x)).collect::<Vec<_>>();
    head(want) == head(got)
        && want.tokens[..want.n_tokens as usize] == got.tokens[..want.n_tokens as usize]
        && want.top_ids[..n] == got.top_ids[..n]
        && tops(want) == tops(got)
}

/// Steps of slots that draw, score, end and start anew.
fn random(suite: &Suite, vocab: usize, rows: usize, steps: usize, mistake: u32) -> Verdict {
    let mut both = Both::new(suite, vocab, rows);
    let (mut compared, mut drawn, mut faults) = (0, 0, 0);
    let mut ended = vec![true; rows];
    for step in 0..steps {
        let mut rng = Rng((vocab * 1_000 + step) as u64);
        let mut delta = StepDelta::default();
        for (slot, ended) in ended.iter_mut().enumerate() {
            // An ended slot stays so for a step now and then: its row is inert.
            if *ended && (step == 0 || !rng.one_in(3)) {
                delta.admit.push(admission(&mut rng, slot, vocab, (step * rows + slot) as u32));
                *ended = false;
            }
            if !*ended && rng.one_in(5) {
                let dense = rng.one_in(2);
                let mut word = || {
                    let (a, b) = (rng.next(), rng.next());
                    (if dense { a | b } else { a & b & (a >> 32) }) as u32
                };
                delta.masks.push((slot as u16, (0..vocab.div_ceil(32)).map(|_| word()).collect()));
            }
            if !*ended && rng.one_in(12) {
                let fault = rng.of(&[0, 0, landed_flags::NOTHING_TO_SAMPLE]);
                delta.forced.push(Forced { slot: slot as u16, token: rng.below(vocab) as u32, fault });
            }
        }
        let mut table = Vec::new();
        for slot in 0..rows {
            let mut row = decode_row(slot, if vocab > 1 { 1 } else { 0 });
            if rng.one_in(6) {
                row.flags = rng.of(&[row_flags::SCORE, row_flags::SCORE | row_flags::SAMPLE]);
                row.target = if rng.one_in(10) { vocab as u32 } else { rng.below(vocab) as u32 };
            }
            if rng.one_in(20) {
                row.flags |= row_flags::PADDING;
            }
            table.push(row);
        }
        delta.rows = Some(table);
        both.pair.stage(&delta);
        let mut values = Vec::with_capacity(rows * vocab);
        (0..rows).for_each(|_| logits(&mut rng, vocab, &mut values));
        both.write(&values);
        for (h, (want, got)) in both.step(Part::Whole, rows, rows, mistake)?.iter().enumerate() {
            if !same(want, got) {
                return Err(format!("step {step}, row {h}: {want:?} wanted, {got:?}"));
            }
            compared += 1;
            drawn += want.n_tokens as usize;
            faults += usize::from(want.flags & landed_flags::FAULT != 0);
            let inert = want.flags & landed_flags::INERT != 0;
            ended[h] = want.flags & landed_flags::DONE != 0 || (ended[h] && inert);
        }
    }
    if drawn * 3 < compared && vocab > 5 {
        return Err(format!("only {drawn} of {compared} rows drew a token"));
    }
    Ok(format!("{compared} rows, {drawn} tokens, {faults} faults"))
}

/// A request whose token turns on one unit or one rounding, which random ones do not meet: the logits of its steps.
struct Edge {
    sampling: SamplerConfig,
    steps: Vec<Vec<f32>>,
}

/// Logits of tokens that nobody takes.
const FAR: f32 = -1e4;

/// The weight that a draw gives a logit below the largest by `-x`: math of sampling.md.
fn mass(x: f32) -> u64 {
    ((1u64 << 40) as f64 * f64::from(exp(x))) as u64
}

/// After three times the same token, penalised in two roundings it equals another, and the lower id wins; in one rounding it
/// is less.
fn fused_penalty() -> Edge {
    // Three times as much is rounded down.
    let frequency = 0.7_f32;
    let apart = |x: &f32| (-frequency).mul_add(3.0, *x) < x - frequency * 3.0;
    let x = (0..1024).map(|i| 2.5 + i as f32 / 1024.0).find(apart).expect("one of them is rounded differently");
    let sampling = SamplerConfig { temperature: 0.0, frequency, ..SamplerConfig::default() };
    let sure = vec![FAR, 100.0, FAR, FAR];
    Edge { sampling, steps: vec![sure.clone(), sure.clone(), sure, vec![FAR, x, x - frequency * 3.0, FAR]] }
}

/// The first token has less than `top_p` of the mass, by less than one unit; the draw takes the second.
fn top_p_border() -> Edge {
    const ONE: u128 = 1 << 40;
    for bits in 0x3f00_0000_u32..0x3f80_0000 {
        let x = -f32::from_bits(bits);
        let whole = ONE + u128::from(mass(x));
        // A share that is an f32: 24 bits.
        let share = (ONE << 32).div_ceil(whole).next_multiple_of(256);
        if !(1..1 << 32).contains(&(share * whole - (ONE << 32))) {
            continue;
        }
        let second = |seed: &u64| (u128::from(draw_word(*seed, 0, 0)) * whole) >> 64 >= ONE;
        let top_p = (share as f64 / 4_294_967_296.0) as f32;
        let seed = (1..1000).find(second).expect("a third of all draws");
        let sampling = SamplerConfig { temperature: 1.0, seed, top_p, ..SamplerConfig::default() };
        return Edge { sampling, steps: vec![vec![0.0, x, FAR, FAR]] };
    }
    unreachable!("one in 2^16 logits has such a share")
}

/// The draw falls on the end of the second token's mass, which is the beginning of the third's.
fn draw_border() -> Edge {
    const ONE: u64 = 1 << 40;
    let beyond = |word: u64, before: u64| ((u128::from(word) * u128::from(before + ONE)) >> 64) as i64 - before as i64;
    for seed in 1..1_000_000 {
        let word = draw_word(seed, 0, 0);
        let u = word as f64 / 2f64.powi(64);
        if !(0.1..0.4).contains(&u) {
            continue;
        }
        // The first token's mass is a little short, and the second's is what is missing.
        let x = ((u / (1.0 - u)).ln() as f32).next_down();
        let first = mass(x);
        let about = beyond(word, first).max(0) as f64 / (1.0 - u);
        let fits = |t: &u64| beyond(word, first + t) == 0;
        let Some(second) = (about as u64..about as u64 + 3).find(fits) else { continue };
        let ln = (second as f64 / ONE as f64).ln() as f32;
        let near = (-8..8).map(|i| f32::from_bits(ln.to_bits().wrapping_add_signed(i)));
        let Some(y) = near.into_iter().find(|&y| mass(y) == second) else { continue };
        let sampling = SamplerConfig { temperature: 1.0, seed, ..SamplerConfig::default() };
        return Edge { sampling, steps: vec![vec![x, y, 0.0, FAR]] };
    }
    unreachable!("one in a few seeds has such logits")
}

/// The steps of one request, on both devices.
fn at_edge(suite: &Suite, edge: &Edge, mistake: u32) -> Verdict {
    let vocab = edge.steps[0].len();
    let mut both = Both::new(suite, vocab, 1);
    let init = SlotInit {
        slot: 0,
        generation: 1,
        max_out: 50,
        flags: 0,
        stop_ids: Vec::new(),
        sampling: edge.sampling.clone(),
        blocks: vec![0, 1],
        penalty_prompt: Vec::new(),
        pos: 0,
        logprobs: None,
        prompt_top: 0,
    };
    let table = vec![decode_row(0, TOKEN_OF_SLOT)];
    both.pair.stage(&StepDelta { admit: vec![init], rows: Some(table), ..StepDelta::default() });
    let mut tokens = Vec::new();
    for (step, logits) in edge.steps.iter().enumerate() {
        both.write(logits);
        for (want, got) in both.step(Part::Whole, 1, 1, mistake)? {
            if !same(&want, &got) {
                return Err(format!("step {step}: {want:?} wanted, {got:?}"));
            }
            tokens.push(want.tokens[0]);
        }
    }
    Ok(format!("tokens {tokens:?}"))
}

/// A step in two parts, whose tokens the host draws of some rows, or masks.
fn two_parts(suite: &Suite) -> Verdict {
    let (vocab, rows) = (1_000, 32);
    let mut both = Both::new(suite, vocab, rows);
    let mut rng = Rng(7);
    let mut admit: Vec<SlotInit> = (0..rows).map(|slot| admission(&mut rng, slot, vocab, 1)).collect();
    admit.iter_mut().for_each(|init| init.max_out = 50);
    let table: Vec<Row> = (0..rows).map(|slot| decode_row(slot, TOKEN_OF_SLOT)).collect();
    both.pair.stage(&StepDelta { admit, rows: Some(table), ..StepDelta::default() });
    let mut tokens = 0;
    for _ in 0..6 {
        let mut values = Vec::new();
        (0..rows).for_each(|_| logits(&mut rng, vocab, &mut values));
        both.write(&values);
        both.step(Part::Forward, rows, rows, 0)?;
        let mut delta = StepDelta::default();
        for slot in 0..rows {
            match rng.below(3) {
                0 => delta.forced.push(Forced { slot: slot as u16, token: rng.below(vocab) as u32, fault: 0 }),
                1 => delta.masks.push((slot as u16, (0..vocab.div_ceil(32)).map(|_| rng.next() as u32).collect())),
                _ => {}
            }
        }
        both.pair.stage(&delta);
        for (h, (want, got)) in both.step(Part::Sample, rows, rows, 0)?.iter().enumerate() {
            if !same(want, got) {
                return Err(format!("row {h}: {want:?} wanted, {got:?}"));
            }
            tokens += want.n_tokens;
        }
    }
    Ok(format!("{tokens} tokens"))
}

/// Microseconds by class of request, 1 row and 256, inside a graph.
fn times(suite: &Suite, vocab: usize) -> Verdict {
    let base = SamplerConfig::default;
    let all = SamplerConfig {
        temperature: 0.7,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.05,
        presence: 0.1,
        frequency: 0.1,
        repetition: 1.1,
        bias: (0..1024).map(|i| (i * 3, 0.1)).collect(),
        ..base()
    };
    let classes = [
        ("greedy", SamplerConfig { temperature: 0.0, ..base() }, 3.0),
        ("temperature", SamplerConfig { temperature: 0.7, ..base() }, 3.0),
        ("min_p", SamplerConfig { temperature: 0.7, min_p: 0.05, ..base() }, 3.0),
        ("top_k 40", SamplerConfig { temperature: 0.7, top_k: 40, ..base() }, 3.0),
        ("top_p", SamplerConfig { temperature: 0.7, top_p: 0.95, ..base() }, 3.0),
        (
            "top_k 40, top_p, min_p",
            SamplerConfig { temperature: 0.7, top_k: 40, top_p: 0.95, min_p: 0.05, ..base() },
            3.0,
        ),
        ("everything", all.clone(), 3.0),
        ("everything, 20 logprobs", all, 3.0),
        ("top_k 1000, top_p, flat", SamplerConfig { temperature: 0.7, top_k: 1000, top_p: 0.95, ..base() }, 0.5),
        ("top_p, flat", SamplerConfig { temperature: 0.7, top_p: 0.95, ..base() }, 0.5),
        ("top_k 1000, top_p, all equal", SamplerConfig { temperature: 0.7, top_k: 1000, top_p: 0.95, ..base() }, 0.0),
    ];
    let mut text = String::new();
    for rows in [1, 256] {
        let mut gpu = suite.gpu(limits(rows, 2 * BLOCK_TOKENS)).map_err(|error| error.to_string())?;
        gpu.finish(&shape(vocab, 64)).map_err(|error| error.to_string())?;
        let mut logits =
            gpu.alloc("logits", MemoryClass::Workspace, rows * vocab).map_err(|error| error.to_string())?;
        for (name, sampling, scale) in &classes {
            let mut rng = Rng(vocab as u64);
            let one: Vec<f32> = (0..vocab * rows.min(4)).map(|_| rng.normal() * scale).collect();
            let values: Vec<f32> = one.iter().copied().cycle().take(rows * vocab).collect();
            gpu.write(&mut logits, &values).map_err(|error| error.to_string())?;
            let admit = (0..rows).map(|slot| SlotInit {
                slot: slot as u16,
                generation: 1,
                max_out: 50,
                flags: 0,
                stop_ids: vec![3],
                sampling: SamplerConfig { seed: slot as u64, ..sampling.clone() },
                blocks: vec![slot as u32 * 2],
                penalty_prompt: (0..200).map(|_| rng.below(vocab) as u32).collect(),
                pos: 0,
                logprobs: name.contains("logprobs").then_some(20),
                prompt_top: 0,
            });
            let table = (0..rows).map(|slot| decode_row(slot, 1)).collect();
            let masks = (0..rows).filter(|_| name.contains("everything"));
            let masks = masks.map(|slot| (slot as u16, vec![0xffff_fff7; vocab.div_ceil(32)])).collect();
            let delta = StepDelta { admit: admit.collect(), rows: Some(table), masks, ..StepDelta::default() };
            gpu.stage(&delta).map_err(|error| error.to_string())?;
            let key = StepKey::new(rows as u32, rows as u32, CtxClass::Short, Part::Whole);
            let us = gpu.bench(key, 20, &mut |dev| dev.sample(&mut logits, rows)).map_err(|error| error.to_string())?;
            text += &format!("\n      {rows:3} rows, {name}: {us:.1} us");
        }
    }
    Ok(text)
}

/// Steps that draw drafts, and verify them in the next: of most slots the drafter sees what the model will, so that its
/// drafts are accepted.
fn drafts(suite: &Suite) -> Verdict {
    const DRAFTS: usize = 3;
    let (vocab, slots, dim) = (1_000, 16, 8);
    let rows = slots * (1 + DRAFTS);
    let mut both = Both::new(suite, vocab, rows);
    let mut rng = Rng(11);
    let mut admit: Vec<SlotInit> = (0..slots).map(|slot| admission(&mut rng, slot, vocab, 1)).collect();
    for init in &mut admit {
        init.max_out = 40;
        init.logprobs = None;
    }
    let mut table = Vec::new();
    for slot in 0..slots {
        let mut first = decode_row(slot, TOKEN_OF_SLOT);
        first.flags |= row_flags::PROPOSE;
        table.push(first);
        table.extend((1..=DRAFTS).map(|j| Row { flags: row_flags::VERIFY, offset: j as u32, ..first }));
    }
    both.pair.stage(&StepDelta { admit, rows: Some(table), ..StepDelta::default() });
    let mut of_slots = Vec::new();
    (0..slots).for_each(|_| logits(&mut rng, vocab, &mut of_slots));
    of_slots.iter_mut().filter(|x| x.is_nan() || **x == f32::INFINITY).for_each(|x| *x = 0.0);
    let of_slot = |slot: usize| &of_slots[slot * vocab..(slot + 1) * vocab];
    let values: Vec<f32> = (0..rows).flat_map(|r| of_slot(r / (1 + DRAFTS)).iter().copied()).collect();
    both.write(&values);
    let mut draft_values = Vec::new();
    for slot in 0..slots {
        if slot % 4 == 3 {
            draft_values.extend((0..vocab).map(|_| rng.normal() * 3.0));
        } else {
            draft_values.extend_from_slice(of_slot(slot));
        }
    }
    let key =
        StepKey::new(rows as u32, rows as u32, CtxClass::Short, Part::Whole).drafting(DRAFTS as u32, slots as u32);
    let Both { pair: Pair { cpu, gpu }, cpu_logits, gpu_logits } = &mut both;
    let mut cpu_side = Drafter::new(cpu, rows, vocab, dim, &draft_values);
    let mut gpu_side = Drafter::new(gpu, rows, vocab, dim, &draft_values);
    let text = |error: arc_device::error::DeviceError| error.to_string();
    let (mut tokens, mut longest) = (0, 0);
    for _ in 0..6 {
        let step = cpu.step(key, &mut |dev| cpu_side.body(dev, cpu_logits, rows, slots, DRAFTS)).map_err(text)?;
        gpu.step(key, &mut |dev| gpu_side.body(dev, gpu_logits, rows, slots, DRAFTS)).map_err(text)?;
        while Landing::head(gpu) < step {
            if gpu.poll().map_err(text)? == StreamState::Idle && Landing::head(gpu) < step {
                return Err(format!("the stream is idle and step {step} has not landed"));
            }
        }
        for h in 0..rows {
            let (want, got) = (cpu.landed(step, h), gpu.landed(step, h));
            if !same(&want, &got) {
                return Err(format!("step {step}, row {h}: {want:?} wanted, {got:?}"));
            }
            tokens += want.n_tokens;
            longest = longest.max(want.n_tokens);
        }
        cpu.read_to(step);
        gpu.read_to(step);
    }
    if longest as usize <= DRAFTS {
        return Err(format!("no step landed more than {longest} tokens of a slot"));
    }
    Ok(format!("{tokens} tokens, up to {longest} a step"))
}

/// What a drafter has beside a model: streams that nobody reads here, and logits.
struct Drafter<D: Buffers> {
    streams: [Streams<D>; 2],
    merged: [D::Buf<f32>; 2],
    logits: D::Buf<f32>,
    cfg: HcConfig,
}

impl<D: OpsV4 + Alloc + Readback> Drafter<D> {
    fn new(dev: &mut D, rows: usize, vocab: usize, dim: usize, logits: &[f32]) -> Self {
        let mut take = |len| dev.alloc("drafter", MemoryClass::Workspace, len).expect("there is room");
        let mut streams = || Streams { x: take(rows * STREAMS * dim), mixing: take(rows * 32) };
        let streams = [streams(), streams()];
        let merged = [take(rows * dim), take(rows * dim)];
        let mut buf = take(rows * vocab);
        dev.write(&mut buf, logits).expect("it fits");
        Drafter { streams, merged, logits: buf, cfg: HcConfig { dim, iterations: 1, eps: 1e-6, norm_eps: 1e-6 } }
    }

    fn body(
        &mut self,
        dev: &mut D,
        logits: &mut D::Buf<f32>,
        rows: usize,
        draft_rows: usize,
        drafts: usize,
    ) -> arc_device::error::Result<()> {
        dev.sample(logits, rows)?;
        let ([from, to], [merged, h]) = (&mut self.streams, &mut self.merged);
        dev.draft_rows(to, h, from, merged, &self.cfg, draft_rows)?;
        for _ in 0..drafts {
            dev.sample_drafts(&mut self.logits, draft_rows)?;
        }
        dev.commit(rows, rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each edge is one: on the CPU, a unit or a rounding less gives another token.
    #[test]
    fn edges_are_found() {
        let fused = fused_penalty();
        let [_, x, y, _] = fused.steps[3][..] else { panic!("four logits") };
        assert!(x - fused.sampling.frequency * 3.0 == y && (-fused.sampling.frequency).mul_add(3.0, x) < y);

        let share = top_p_border();
        let whole = (1u128 << 40) + u128::from(mass(share.steps[0][1]));
        let p = (f64::from(share.sampling.top_p) * 4_294_967_296.0).round() as u128;
        assert_eq!(((p * whole) >> 32, (p * whole).div_ceil(1 << 32)), (1 << 40, (1 << 40) + 1));

        let drawn = draw_border();
        let masses: Vec<u64> = drawn.steps[0].iter().map(|&x| mass(x)).collect();
        let at = (u128::from(draw_word(drawn.sampling.seed, 0, 0)) * u128::from(masses.iter().sum::<u64>())) >> 64;
        assert_eq!(at, u128::from(masses[0] + masses[1]));
    }
}
