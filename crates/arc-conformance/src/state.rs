//! Slots, row tables and the ring: what is told of a step that computes nothing.

use arc_device::cuda::Cuda;
use arc_device::error::Result as DeviceResult;
use arc_device::ops::sample::SamplerConfig;
use arc_device::step::{BLOCK_TOKENS, CtxClass, Landed, Part, Row, SlotInit, StepDelta, StepKey, row_flags};
use arc_device::{Alloc, Buffers, Landing, MemoryClass, Ops, Readback, Steps};

use crate::compare::equal;
use crate::inputs::Rng;
use crate::suite::{Pair, Suite, Verdict, limits, shape};

/// Row tables, good and bad, and what lands of them.
pub fn cases(suite: &mut Suite) {
    for seed in 0..8 {
        suite.case(&format!("state/tables/{seed}"), |suite| tables(suite, seed, false, |_| {}));
        suite.case(&format!("state/one row/{seed}"), |suite| tables(suite, seed, true, |_| {}));
    }
    suite.mutant("state/one row/a token past the vocabulary", |suite| tables(suite, 0, true, |row| row.token = 100));
    suite.case("state/buffers taken and given back are counted", |suite| {
        let mut gpu = suite.gpu(limits(1, 64)).map_err(|error| error.to_string())?;
        let before = gpu.counters();
        let buf = gpu.alloc::<f32>("test", MemoryClass::Workspace, 100).map_err(|error| error.to_string())?;
        let taken = gpu.counters() - before;
        drop(buf);
        let given = gpu.counters() - before;
        equal(&[1, 0, 1, 1], &[taken.allocs, taken.frees, given.allocs, given.frees])
    });
    suite.case("state/a step runs twice", |suite| twice(suite, |_| Ok(())));
    suite.mutant("state/a step runs twice/eagerly from other logits", |suite| {
        twice(suite, |Twice { dev, logits, .. }| dev.write(logits, &[100.0]))
    });
    suite.mutant("state/a step runs twice/eagerly writes more", |suite| {
        twice(suite, |Twice { dev, kept, .. }| dev.write(kept, &[1.0]))
    });
    suite.measure("state/empty_step", |suite| {
        let mut pair = suite.pair(limits(256, 4096));
        pair.finish(&shape(1000, 64));
        let mut text = Vec::new();
        for rows in [1, 8, 64, 256] {
            pair.gpu.stage(&StepDelta { rows: Some(vec![padding(); rows]), ..StepDelta::default() }).expect("staged");
            let key = StepKey::new(rows as u32, 256, CtxClass::Short, Part::Forward);
            let us = pair.gpu.bench(key, 50, &mut |dev| dev.commit(rows, rows)).expect("it runs");
            text.push(format!("commit of {rows}: {us:.2} us"));
        }
        Ok(text.join(", "))
    });
}

fn padding() -> Row {
    Row { flags: row_flags::PADDING, ..Row::default() }
}

fn admit(slot: usize, blocks: Vec<u32>, pos: u32) -> SlotInit {
    SlotInit {
        slot: slot as u16,
        generation: 7 + slot as u32,
        max_out: 5,
        flags: 0,
        stop_ids: vec![3],
        sampling: SamplerConfig::default(),
        blocks,
        penalty_prompt: Vec::new(),
        pos,
        logprobs: None,
        prompt_top: 0,
    }
}

/// What an eager step may do beside what was recorded.
struct Twice<'a> {
    dev: &'a mut Cuda,
    logits: &'a mut <Cuda as Buffers>::Buf<f32>,
    kept: &'a mut <Cuda as Buffers>::Buf<f32>,
}

/// Steps of one row, run twice; `more`: of the eager ones.
fn twice(suite: &Suite, more: impl Fn(Twice<'_>) -> DeviceResult<()>) -> Verdict {
    const STEPS: u64 = 3;
    let run = || -> DeviceResult<u64> {
        let mut gpu = suite.gpu(limits(4, 64))?;
        gpu.finish(&shape(100, 64))?;
        gpu.set_replay(true);
        gpu.set_verify(true);
        let mut logits = gpu.alloc::<f32>("logits", MemoryClass::Workspace, 100)?;
        let mut kept = gpu.alloc::<f32>("kept", MemoryClass::State, 1)?;
        let row = Row { flags: row_flags::HEAD | row_flags::SAMPLE, token: 1, ..Row::default() };
        let key = StepKey::new(1, 1, CtxClass::Short, Part::Whole);
        gpu.stage(&StepDelta { admit: vec![admit(0, vec![0], 0)], rows: Some(vec![row]), ..StepDelta::default() })?;
        let mut recorded = false;
        for step in 1..=STEPS {
            gpu.step(key, &mut |dev| {
                if std::mem::replace(&mut recorded, true) {
                    more(Twice { dev: &mut *dev, logits: &mut logits, kept: &mut kept })?;
                }
                dev.sample(&mut logits, 1)?;
                dev.commit(1, 1)
            })?;
            gpu.read_to(step);
        }
        Ok(gpu.counters().verified)
    };
    equal(&[STEPS], &[run().map_err(|error| error.to_string())?])
}

/// Steps of random tables on both devices: rows in and out of order, out of range, of ended slots, in others' blocks; or of one
/// such row `alone`, which the GPU resolves by itself. Only what `INERT` and `OUT_OF_RANGE` say is compared, since nothing is drawn.
/// `change`: of a row of the GPU's.
fn tables(suite: &Suite, seed: u64, alone: bool, change: impl Fn(&mut Row)) -> Verdict {
    let mut rng = Rng(seed);
    let mut pair = suite.pair(limits(64, 256));
    pair.finish(&shape(100, 64));
    let per = 256 / BLOCK_TOKENS;
    let slots = 12;
    let mut delta = StepDelta::default();
    for slot in 0..slots {
        let held = 1 + rng.below(per);
        let mut blocks: Vec<u32> = (0..held).map(|b| (slot * per + b) as u32).collect();
        if rng.below(6) == 0 {
            // A block that a neighbour has, or that is not there.
            blocks[0] = if rng.below(2) == 0 { ((slot + 1) % slots * per) as u32 } else { 1 << 20 };
        }
        delta.admit.push(admit(slot, blocks, rng.below(40) as u32));
    }
    pair.stage(&delta);
    let mut compared = 0;
    for step in 1..=if alone { 40 } else { 6 } {
        let mut rows = Vec::new();
        let some = if alone { vec![rng.below(slots)] } else { (0..slots).collect() };
        for slot in some {
            let n = if alone { 1 } else { rng.below(4) };
            for i in 0..n {
                // A row alone may be anywhere: past what its slot holds, too.
                let skew = if alone { rng.below(per) * BLOCK_TOKENS } else { usize::from(rng.below(24) == 0) };
                let flags = if i + 1 == n { row_flags::HEAD } else { 0 };
                let token = if rng.below(40) == 0 { 100 } else { rng.below(100) as u32 };
                rows.push(Row { slot: slot as u16, flags, offset: (i + skew) as u32, token, target: 0 });
            }
        }
        rows.resize(rows.len().max(1), padding());
        let n = rows.len();
        let release = if rng.below(3) == 0 { vec![rng.below(slots) as u16] } else { Vec::new() };
        let mut delta = StepDelta { rows: Some(rows.clone()), release, ..StepDelta::default() };
        pair.cpu.stage(&delta).expect("staged");
        delta.rows.iter_mut().flatten().for_each(&change);
        pair.gpu.stage(&delta).expect("staged");
        let key = StepKey::new(n as u32, 64, CtxClass::Short, Part::Whole);
        let heads = rows.iter().filter(|row| row.flags & row_flags::HEAD != 0).count();
        let (want, got) = (land(&mut pair, key, n, heads, step)?, land_gpu(&mut pair, key, n, heads, step)?);
        for (h, (want, got)) in want.iter().zip(&got).enumerate() {
            if (want.slot, want.generation, want.flags) != (got.slot, got.generation, got.flags) {
                return Err(format!("step {step}, head row {h}: {want:?} wanted, {got:?}; rows {rows:?}"));
            }
            compared += 1;
        }
    }
    Ok(format!("{compared} head rows"))
}

fn land(pair: &mut Pair, key: StepKey, rows: usize, heads: usize, step: u64) -> Result<Vec<Landed>, String> {
    let cpu = &mut pair.cpu;
    let mut logits = arc_device::Alloc::alloc(cpu, "logits", arc_device::MemoryClass::Workspace, 64 * 100)
        .map_err(|error| error.to_string())?;
    cpu.step(key, &mut |dev| {
        dev.sample(&mut logits, heads)?;
        dev.commit(rows, heads)
    })
    .map_err(|error| error.to_string())?;
    cpu.read_to(step);
    Ok((0..heads).map(|h| cpu.landed(step, h)).collect())
}

fn land_gpu(pair: &mut Pair, key: StepKey, rows: usize, heads: usize, step: u64) -> Result<Vec<Landed>, String> {
    let gpu = &mut pair.gpu;
    let mut logits = arc_device::Alloc::alloc(gpu, "logits", arc_device::MemoryClass::Workspace, 64 * 100)
        .map_err(|error| error.to_string())?;
    gpu.step(key, &mut |dev| {
        dev.sample(&mut logits, heads)?;
        dev.commit(rows, heads)
    })
    .map_err(|error| error.to_string())?;
    while Landing::head(gpu) < step {
        if gpu.poll().map_err(|error| error.to_string())? == arc_device::StreamState::Idle && Landing::head(gpu) < step
        {
            return Err(format!("the stream is idle and step {step} has not landed"));
        }
    }
    gpu.read_to(step);
    Ok((0..heads).map(|h| gpu.landed(step, h)).collect())
}
