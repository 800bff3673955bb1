//! The CPU device: a thread team, SIMD kernels, and the same slots and ring that a GPU would have.
//!
//! A step runs inside [`Steps::step`] on the calling thread and its team, so it has landed when the
//! call returns. Nothing is recorded: every stage is dispatched again, which costs a microsecond.

pub(crate) mod buf;
mod stages;
mod stages_v4;
mod state;
pub(crate) mod team;

use crate::count::Counters;
use crate::error::{DeviceError, Fault, Result};
use crate::ops::matmul::MatrixSource;
use crate::ops::matmul::cpu::Activations;
use crate::ops::matmul::pack::PackedMatrix;
use crate::ops::sample::{Declined, SamplerConfig};
use crate::step::{Landed, Limits, Part, StepClocks, StepDelta, StepKey};
use crate::{Alloc, Buffers, Element, Landing, MemoryClass, MemoryTable, ModelShape, Readback, Steps, StreamState};
use buf::Aligned;
pub use buf::free_bytes as available_bytes;
use state::State;
use team::Team;

/// The CPU as a device.
pub struct Cpu {
    team: Team,
    limits: Limits,
    state: State,
    acts: Activations,
    /// Widest matrix so far; `acts` is sized for it before the first step.
    max_cols: usize,
    /// A product that is normed before it joins the residual, `[rows, cols]`.
    product: Aligned<f32>,
    /// Partial attention of the rows whose splits run in parallel.
    partials: Aligned<f32>,
    counters: Counters,
    memory: MemoryTable,
}

/// A slot that wants a draft.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// The slot.
    pub slot: u16,
    /// Its sequence's generation.
    pub generation: u32,
    /// Tokens that the sequence has emitted.
    pub n_out: u32,
    /// Drafts that the slot has already.
    pub drafts: &'a [u32],
}

impl Cpu {
    /// A device of `threads` threads in all, with state for `limits`.
    pub fn new(threads: usize, limits: Limits) -> Cpu {
        let mut cpu = Cpu {
            team: Team::new(threads),
            limits,
            state: State::new(&limits),
            acts: Activations::new(0, 0).expect("no rows take no memory"),
            max_cols: 0,
            product: Aligned::zeroed(0),
            partials: Aligned::zeroed(stages::PARTIALS),
            counters: Counters::default(),
            memory: MemoryTable::default(),
        };
        cpu.counters.allocs += 1;
        cpu
    }

    /// Threads that work on a step.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// The limits that the device was made for.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Everything allocated so far.
    pub fn memory(&self) -> &MemoryTable {
        &self.memory
    }

    /// Gives drafts from outside to the slots that want some, up to `drafts` each, between `sample` and `commit`: as long
    /// as `next` has one. For scripts; a model's own drafter never leaves the device.
    pub fn propose(&mut self, drafts: usize, next: &mut dyn FnMut(Wanted<'_>) -> Option<u32>) {
        self.state.propose(drafts, next);
    }

    /// The drafts that a slot has: for comparisons.
    pub fn drafts(&self, slot: u16) -> &[u32] {
        self.state.drafts(slot)
    }

    /// What the device itself takes beside the buffers that a model allocates, for matrices of up to `max_cols` columns:
    /// known before anything is loaded.
    pub fn own_memory(limits: &Limits, shape: &ModelShape, max_cols: usize, threads: usize) -> MemoryTable {
        let mut table = MemoryTable::default();
        let rows = limits.rows.max(limits.heads);
        let product = if shape.post_norms { rows * shape.hidden } else { 0 };
        table.add("slots and ring", MemoryClass::State, State::bytes(limits));
        table.add("attention partials", MemoryClass::Workspace, 4 * stages::PARTIALS as u64);
        let acts = Activations::bytes(rows, max_cols.max(shape.gathered)) + 4 * product;
        table.add("activations", MemoryClass::Workspace, acts as u64);
        table.add("logits for the host", MemoryClass::Workspace, 4 * (limits.heads * shape.vocab) as u64);
        table.add("samplers", MemoryClass::Workspace, state::sampler_bytes(limits, shape.vocab, threads));
        table
    }

    fn note(&mut self, name: &str, class: MemoryClass, bytes: u64) {
        self.counters.allocs += 1;
        self.memory.add(name, class, bytes);
    }
}

fn no_room(name: &str, bytes: u64) -> DeviceError {
    DeviceError::OutOfMemory { name: name.to_owned(), bytes, free: buf::free_bytes().unwrap_or(0) }
}

/// A weight with these values.
fn copied<T: Element>(cpu: &mut Cpu, name: &str, values: &[T]) -> Result<Aligned<T>> {
    let bytes = size_of_val(values) as u64;
    let mut buf = Aligned::try_zeroed(values.len()).ok_or_else(|| no_room(name, bytes))?;
    buf.copy_from_slice(values);
    cpu.note(name, MemoryClass::Weights, bytes);
    Ok(buf)
}

impl Buffers for Cpu {
    type Buf<T: Element> = Aligned<T>;
    type Matrix = PackedMatrix;
}

impl Alloc for Cpu {
    fn alloc<T: Element>(&mut self, name: &'static str, class: MemoryClass, len: usize) -> Result<Aligned<T>> {
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        let buf = Aligned::try_zeroed(len).ok_or_else(|| no_room(name, bytes))?;
        self.note(name, class, bytes);
        Ok(buf)
    }

    fn vector(&mut self, name: &str, values: &[f32]) -> Result<Aligned<f32>> {
        copied(self, name, values)
    }

    fn ids(&mut self, name: &str, values: &[u32]) -> Result<Aligned<u32>> {
        copied(self, name, values)
    }

    fn matrix(&mut self, name: &str, parts: &[MatrixSource<'_>]) -> Result<PackedMatrix> {
        for part in parts {
            part.check(name)?;
            assert_eq!(part.cols, parts[0].cols, "parts of {name} have equal columns");
        }
        let bytes = || parts.iter().filter_map(MatrixSource::n_bytes).sum::<usize>() as u64;
        let matrix = PackedMatrix::pack(&mut self.team, parts).ok_or_else(|| no_room(name, bytes()))?;
        self.max_cols = self.max_cols.max(matrix.cols);
        self.note("matrices", MemoryClass::Weights, matrix.bytes() as u64);
        Ok(matrix)
    }

    fn finish(&mut self, shape: &ModelShape) -> Result<()> {
        let rows = self.limits.rows.max(self.limits.heads);
        let (cols, product) =
            (self.max_cols.max(shape.gathered), if shape.post_norms { rows * shape.hidden } else { 0 });
        let (acts, buf) = (Activations::new(rows, cols), Aligned::try_zeroed(product));
        (self.acts, self.product) = acts
            .zip(buf)
            .ok_or_else(|| no_room("activations", (Activations::bytes(rows, cols) + 4 * product) as u64))?;
        self.state.set_vocab(shape.vocab, self.team.threads());
        for line in Cpu::own_memory(&self.limits, shape, self.max_cols, self.team.threads()).lines() {
            self.note(&line.name, line.class, line.bytes);
        }
        Ok(())
    }
}

impl Steps for Cpu {
    fn step(&mut self, key: StepKey, body: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<u64> {
        self.state.begin(key)?;
        body(self)?;
        if key.part == Part::Forward {
            self.state.stamp_forward();
            return Ok(self.state.landed_steps() + 1);
        }
        Ok(self.state.landed_steps())
    }
}

impl Landing for Cpu {
    fn stage(&mut self, delta: &StepDelta) -> Result<()> {
        self.state.stage(delta);
        Ok(())
    }

    fn declines(&self, _sampling: &SamplerConfig) -> Option<Declined> {
        // The CPU's sampler is the complete one.
        None
    }

    fn fetch_rows(&mut self, heads: &[u32]) -> Result<()> {
        self.state.fetch(heads);
        Ok(())
    }

    fn fetched(&self, idx: usize) -> Option<&[f32]> {
        self.state.fetched(idx)
    }

    fn poll(&mut self) -> Result<StreamState> {
        Ok(StreamState::Idle)
    }

    fn head(&self) -> u64 {
        self.state.landed_steps()
    }

    fn landed(&self, step: u64, head_idx: usize) -> Landed {
        self.state.landed(step, head_idx)
    }

    fn read_to(&mut self, step: u64) {
        self.state.read_to(step);
    }

    fn clocks(&self, step: u64) -> StepClocks {
        self.state.clocks(step)
    }

    fn fault(&self) -> Option<Fault> {
        None
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl Readback for Cpu {
    fn read<T: Element>(&mut self, buf: &Aligned<T>, out: &mut [T]) -> Result<()> {
        out.copy_from_slice(&buf[..out.len()]);
        Ok(())
    }

    fn write<T: Element>(&mut self, buf: &mut Aligned<T>, values: &[T]) -> Result<()> {
        buf[..values.len()].copy_from_slice(values);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Cpu;
    use crate::error::DeviceError;
    use crate::step::Limits;
    use crate::{Alloc, MemoryClass, ModelShape};

    #[test]
    fn memory_that_is_not_there_is_an_error_with_the_numbers() {
        let mut cpu = Cpu::new(1, Limits { slots: 1, rows: 1, heads: 1, context: 32, blocks: 1, ring: 2 });
        // Past what a process can address, past what a size can count, and past what can be multiplied.
        for len in [1 << 46, usize::MAX / 4, usize::MAX] {
            let error = cpu.alloc::<f32>("kv cache", MemoryClass::State, len).expect_err("nobody has this much");
            let DeviceError::OutOfMemory { name, bytes, .. } = error else { panic!("{error}") };
            assert_eq!((&*name, bytes), ("kv cache", (len as u64).saturating_mul(4)));
        }
        let shape = ModelShape { vocab: 8, hidden: 8, post_norms: true, gathered: 1 << 46 };
        assert!(matches!(cpu.finish(&shape), Err(DeviceError::OutOfMemory { .. })));
        assert!(cpu.memory().lines().is_empty(), "what was refused is not in the table");
        cpu.alloc::<f32>("kv cache", MemoryClass::State, 0).expect("nothing is always there");
        cpu.finish(&ModelShape { gathered: 8, ..shape }).expect("a little is there");
    }
}
