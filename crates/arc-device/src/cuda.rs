//! The CUDA device: one stream, recorded steps, tokens through a ring in host memory.
//!
//! All memory is taken at load. A step is a chain of kernels on one stream: `step_begin` resolves the row table, the
//! model's stages follow, `step_commit` publishes. With `capture` on, the chain of a [`StepKey`] is recorded once into a
//! graph and replayed with one call. Everything that differs between two steps of one key lies in device memory
//! ([`StepView`]), so a replayed step computes what the eager one does.
//!
//! [`Cuda::launch`] is the only place that launches. Every kernel may start while the one before it still runs, and
//! waits for it in `pdl_wait` (pdl.cuh). What some take earlier has the number of its launch beside it (`send_pair`), or is
//! of kernels that have ended for certain (latent.cu, "What runs ahead").

mod driver;
pub mod images;
mod stages;
mod stages_v4;
mod state;
mod trace;
mod twice;
mod upload;

use std::collections::HashMap;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::Arc;
use std::thread::ThreadId;

use crate::count::Counters;
use crate::count::kv::{KvRead, KvReads};
use crate::error::{DeviceError, Fault, Result};
use crate::ops::matmul::MatrixSource;
use crate::ops::matmul::cuda::CudaMatrix;
use crate::ops::sample::{Declined, SamplerConfig};
use crate::step::{CtxClass, Landed, Limits, Part, StepClocks, StepDelta, StepKey};
use crate::{Alloc, Buffers, Element, Landing, MemoryClass, MemoryTable, ModelShape, Readback, Steps, StreamState};
pub(crate) use driver::Grid;
use driver::{Driver, Graph};
pub(crate) use images::Kernel;
use state::{Blob, State};
pub(crate) use state::{MAX_BIAS, StepView};

/// The kernel of this name. Does not compile where no image has it.
macro_rules! kernel {
    ($name:literal) => {
        const { $crate::cuda::images::find($name) }
    };
}
pub(crate) use kernel;

/// One argument of a kernel: a value of at most eight bytes, or the address of a struct.
#[derive(Clone, Copy)]
pub(crate) enum Arg<'a> {
    /// A number, in its low bytes.
    Word(u64),
    /// A struct that is passed by value.
    Struct(*const c_void, PhantomData<&'a ()>),
}

macro_rules! args_from {
    ($($t:ty: $value:ident => $word:expr),*) => { $(
        impl From<$t> for Arg<'_> {
            fn from($value: $t) -> Self {
                Arg::Word($word)
            }
        }
    )* };
}
args_from!(u64: x => x, u32: x => u64::from(x), i32: x => u64::from(x as u32), f32: x => u64::from(x.to_bits()));

impl<'a> Arg<'a> {
    /// A `#[repr(C)]` struct, passed by value.
    pub(crate) fn of<T: Copy>(value: &'a T) -> Self {
        Arg::Struct(std::ptr::from_ref(value).cast(), PhantomData)
    }
}

impl<'a> From<&'a StepView> for Arg<'a> {
    fn from(view: &'a StepView) -> Self {
        Arg::of(view)
    }
}

/// Arguments of a kernel in its order: `u64` addresses, `u32`, `i32`, `f32`, `&StepView`, or [`Arg::of`] a struct.
macro_rules! args {
    ($($value:expr),* $(,)?) => { &[$($crate::cuda::Arg::from($value)),*] };
}
pub(crate) use args;

/// Most arguments of a kernel.
const MAX_ARGS: usize = 48;

/// A vector in device memory.
pub struct CudaBuf<T: Element> {
    at: u64,
    len: usize,
    /// Keeps the context alive for `drop`.
    driver: Arc<Driver>,
    _element: PhantomData<T>,
}

impl<T: Element> CudaBuf<T> {
    /// Device address; aligned to 256 bytes.
    pub(crate) fn ptr(&self) -> u64 {
        self.at
    }

    /// Elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl<T: Element> std::fmt::Debug for CudaBuf<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda [{}; {}] at {:#x}", T::DTYPE, self.len, self.at)
    }
}

impl<T: Element> Drop for CudaBuf<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `Cuda::take`, freed once; the driver keeps its context. The call waits for what is in flight.
        unsafe { self.driver.free(self.at) };
    }
}

/// Zeroed device memory that the caller gives back with [`Driver::free`].
fn alloc_zeroed(driver: &Driver, name: &str, bytes: usize) -> Result<u64> {
    let Some(at) = driver.alloc(bytes)? else {
        return Err(DeviceError::OutOfMemory { name: name.to_owned(), bytes: bytes as u64, free: driver.memory().0 });
    };
    driver.zero(at, bytes)?;
    Ok(at)
}

/// How a [`Cuda`] runs.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// Which of the machine's devices.
    pub ordinal: usize,
    /// Record steps and replay them.
    pub capture: bool,
    /// Record a step that warm-up missed when it comes, which is told, instead of refusing it.
    pub late: bool,
    /// Wait behind every launch, so that a fault names its kernel.
    pub blame: bool,
    /// Run every step that is replayed eagerly first, and compare what the two leave. Takes all that steps write once more.
    pub verify: bool,
    /// For tests of faults: a sequence of this seed makes a kernel trap when it is admitted.
    pub trap_seed: Option<u64>,
}

impl Default for CudaOptions {
    fn default() -> Self {
        CudaOptions { ordinal: 0, capture: true, late: true, blame: false, verify: false, trap_seed: None }
    }
}

/// A recorded step.
struct Recorded {
    graph: Graph,
    /// What its stages counted: a replay reads as much.
    weight_bytes: u64,
}

/// A GPU as a device.
pub struct Cuda {
    driver: Arc<Driver>,
    pub(crate) limits: Limits,
    /// Made by `finish`, when the vocabulary is known.
    state: Option<State>,
    /// Part of the step that is being enqueued.
    part: Part,
    /// Rows of its table.
    rows: usize,
    /// Whether it makes drafts, which have to know what was drawn before the commit.
    settles: bool,
    /// Whether stages run over the draft rows.
    pub(crate) drafting: bool,
    /// What stages over the step's rows read of the KV cache, and since the last drafts those over the draft rows.
    reads: [KvReads; 2],
    /// Longest context of the step that is being enqueued.
    pub(crate) ctx: CtxClass,
    graphs: HashMap<StepKey, Recorded>,
    /// Kernels that the last step enqueued.
    launched: Vec<Kernel>,
    /// Clusters that there is room for at once, of launches that depend on it.
    resident: HashMap<(Kernel, Grid), u32>,
    /// Whether a sequence was ever admitted: warm-up is over.
    serving: bool,
    options: CudaOptions,
    pub(crate) counters: Counters,
    memory: MemoryTable,
    /// What steps write, but for the state. Buffers of steps live as long as the device.
    regions: Vec<twice::Region>,
    saved: Option<twice::Saved>,
    current: Option<ThreadId>,
    trace: Option<trace::Trace>,
    /// Pinned memory of uploads, until `finish`.
    chute: Option<upload::Chute>,
    pub(crate) matmul: crate::ops::matmul::cuda::Workspace,
    pub(crate) kv: crate::ops::kv::cuda::Workspace,
    pub(crate) hc: crate::ops::hc::cuda::Workspace,
    pub(crate) router: crate::ops::router::cuda::Workspace,
    pub(crate) moe: crate::ops::moe::cuda::Workspace,
    pub(crate) latent: crate::ops::latent::cuda::Workspace,
}

impl Cuda {
    /// Opens a device, with state for `limits`. Errors: `Unavailable`, `Cuda`.
    pub fn new(options: CudaOptions, limits: Limits) -> Result<Cuda> {
        Ok(Cuda::on(Arc::new(Driver::open(options.ordinal)?), options, limits))
    }

    /// Another device on the same card, with state and memory of its own, behind what this one has enqueued: nothing is opened
    /// or loaded, which takes a fifth of a second. For many of them one after the other.
    pub fn beside(&self, limits: Limits) -> Cuda {
        Cuda::on(self.driver.clone(), self.options, limits)
    }

    fn on(driver: Arc<Driver>, options: CudaOptions, limits: Limits) -> Cuda {
        Cuda {
            driver,
            limits,
            state: None,
            part: Part::Whole,
            rows: 0,
            settles: false,
            drafting: false,
            reads: [KvReads::default(); 2],
            ctx: CtxClass::Long,
            graphs: HashMap::new(),
            launched: Vec::new(),
            resident: HashMap::new(),
            serving: false,
            options,
            counters: Counters::default(),
            memory: MemoryTable::default(),
            regions: Vec::new(),
            saved: None,
            current: None,
            trace: None,
            chute: None,
            matmul: crate::ops::matmul::cuda::Workspace::default(),
            kv: crate::ops::kv::cuda::Workspace::default(),
            hc: crate::ops::hc::cuda::Workspace::default(),
            router: crate::ops::router::cuda::Workspace::default(),
            moe: crate::ops::moe::cuda::Workspace::default(),
            latent: crate::ops::latent::cuda::Workspace::default(),
        }
    }

    /// Name of the card, as the driver tells it.
    pub fn name(&self) -> &str {
        &self.driver.name
    }

    /// Driver version: 1000 * major + 10 * minor.
    pub fn driver_version(&self) -> i32 {
        self.driver.version
    }

    /// Multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.driver.multiprocessors
    }

    /// How many clusters of a launch the device can have at once. The driver is asked once.
    pub(crate) fn resident_clusters(&mut self, kernel: Kernel, grid: Grid) -> Result<u32> {
        if let Some(clusters) = self.resident.get(&(kernel, grid)) {
            return Ok(*clusters);
        }
        let clusters = self.driver.resident_clusters(kernel, grid)?;
        self.resident.insert((kernel, grid), clusters);
        Ok(clusters)
    }

    /// Free and total bytes of the device.
    pub fn device_memory(&self) -> (u64, u64) {
        self.driver.memory()
    }

    /// The limits that the device was made for.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Everything allocated so far.
    pub fn memory(&self) -> &MemoryTable {
        &self.memory
    }

    /// Recorded steps, and the kernels of each.
    pub fn recorded(&self) -> impl Iterator<Item = (StepKey, usize)> + '_ {
        self.graphs.iter().map(|(key, recorded)| (*key, recorded.graph.nodes))
    }

    /// Kernels of the step that was enqueued or recorded last, in their order: that one launch did what several would do as well
    /// does not show in what it left.
    pub fn launched(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.launched.iter().map(|kernel| kernel.name())
    }

    /// Blocks that begin late of the last two products that shared a launch behind an attention: they have less to do, which does
    /// not show in what the launch left.
    pub fn late_blocks(&self) -> u32 {
        self.matmul.late_blocks
    }

    /// Slots, rows and ring, for kernels that look at them. Panics before `finish`.
    pub(crate) fn view(&self) -> StepView {
        let state = self.state.as_ref().expect("`finish` made the state");
        if self.drafting { state.draft_view(self.part) } else { state.view(self.part) }
    }

    /// Launches a kernel: the only place that does. It may start while the kernel before it runs.
    pub(crate) fn launch(&mut self, kernel: Kernel, grid: Grid, args: &[Arg<'_>]) -> Result<()> {
        self.launch_held()?;
        self.matmul.sent = None;
        self.launched.push(kernel);
        self.launch_with(kernel, grid, args, true)
    }

    fn launch_with(&mut self, kernel: Kernel, grid: Grid, args: &[Arg<'_>], overlap: bool) -> Result<()> {
        assert!(args.len() <= MAX_ARGS, "{} takes {} arguments", kernel.name(), args.len());
        let mut pointers = [std::ptr::null_mut(); MAX_ARGS];
        for (pointer, arg) in pointers.iter_mut().zip(args) {
            *pointer = match arg {
                Arg::Word(word) => std::ptr::from_ref(word).cast_mut().cast(),
                Arg::Struct(at, _) => at.cast_mut(),
            };
        }
        self.counters.launches += 1;
        if let Some(trace) = &mut self.trace {
            trace.launch(kernel, grid, self.counters.weight_bytes);
        }
        self.driver.launch(kernel, grid, &mut pointers[..args.len()], overlap)?;
        if self.options.blame {
            self.counters.syncs += 1;
            self.driver.synchronize(kernel.name())?;
        }
        Ok(())
    }

    /// Makes the context current where a thread calls for the first time.
    fn enter(&mut self) -> Result<()> {
        let thread = std::thread::current().id();
        if self.current != Some(thread) {
            self.driver.make_current()?;
            self.current = Some(thread);
        }
        Ok(())
    }

    /// Zeroed device memory of a stage's own. Load time only.
    pub(crate) fn take<T: Element>(&mut self, name: &str, class: MemoryClass, len: usize) -> Result<CudaBuf<T>> {
        self.enter()?;
        let bytes = len.saturating_mul(size_of::<T>());
        let at = alloc_zeroed(&self.driver, name, bytes)?;
        self.memory.add(name, class, bytes as u64);
        if class != MemoryClass::Weights {
            self.regions.push(twice::Region { name: name.to_owned(), class, at, bytes, timeless: bytes });
        }
        Ok(CudaBuf { at, len, driver: self.driver.clone(), _element: PhantomData })
    }

    /// Copies `values` to the front of a buffer and waits until they are there. Load time only.
    pub(crate) fn upload<T: Element>(&mut self, to: u64, values: &[T]) -> Result<()> {
        self.enter()?;
        let bytes = size_of_val(values);
        self.counters.h2d_copies += 1;
        self.counters.h2d_bytes += bytes as u64;
        self.counters.syncs += 1;
        self.driver.copy_in(to, values.as_ptr().cast(), bytes, "upload")?;
        self.driver.synchronize("upload")
    }

    fn state(&mut self) -> &mut State {
        self.state.as_mut().expect("`finish` made the state")
    }

    /// Sends one piece of staged bytes.
    fn send(&mut self, blob: &Blob) -> Result<()> {
        self.counters.h2d_copies += 1;
        self.counters.h2d_bytes += blob.bytes as u64;
        self.counters.syncs += blob.waits;
        self.driver.copy_in(blob.device, blob.host, blob.bytes, "stage")
    }

    /// The step's kernels, eagerly or into a recording.
    fn enqueue(&mut self, key: StepKey, body: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<()> {
        (self.part, self.ctx) = (key.part, key.ctx);
        (self.rows, self.settles, self.drafting) = (key.rows as usize, key.drafts > 0, false);
        self.forget_held();
        self.launched.clear();
        self.reads = Default::default();
        let view = self.view();
        let threads = key.rows.next_multiple_of(32).clamp(32, 1024);
        let grid = Grid::new(1, threads).shared(12 * self.limits.slots as u32);
        let stamp = u32::from(key.part != Part::Sample);
        self.launch(kernel!("step_begin"), grid, args![&view, key.rows, stamp])?;
        body(self)?;
        self.launch_held()?;
        // Nobody behind the step takes what its last site put off.
        crate::ops::hc::cuda::settle(self)?;
        if key.part == Part::Forward && !self.reads[0].is_empty() {
            let reads = self.reads[0];
            self.launch(kernel!("step_count"), Grid::new(1, 32), args![&view, Arg::of(&reads), key.rows])?;
        }
        Ok(())
    }

    /// A stage reads this of the KV cache; what it comes to by the rows' positions, the step's last kernel finds.
    pub(crate) fn count_read(&mut self, read: KvRead) {
        self.reads[usize::from(self.drafting)].add(read);
    }

    /// Rows of the step that is being enqueued.
    pub(crate) fn table_rows(&self) -> usize {
        self.rows
    }

    /// Lets a drafter know what was drawn.
    pub(crate) fn settle(&mut self) -> Result<()> {
        if !self.settles {
            return Ok(());
        }
        let view = self.view();
        self.launch(kernel!("step_settle"), Grid::new(1, 256), args![&view])
    }

    /// Publishes the step.
    pub(crate) fn publish(&mut self, rows: usize) -> Result<()> {
        self.drafting = false;
        let (view, reads) = (self.view(), self.reads[0]);
        let args = args![&view, Arg::of(&reads), rows as u32, u32::from(self.settles)];
        self.launch(kernel!("step_commit"), Grid::new(1, 256), args)
    }

    /// Makes the table of `n` draft rows of a step of `rows` rows, and goes over to it.
    pub(crate) fn begin_drafts(&mut self, rows: usize, n: usize) -> Result<()> {
        let view = self.view();
        self.drafting = true;
        let draft = self.view();
        let threads = rows.next_multiple_of(32).clamp(32, 1024) as u32;
        self.launch(kernel!("step_draft_rows"), Grid::new(1, threads), args![&view, &draft, rows as u32, n as u32])
    }

    /// Takes drawn drafts into their slots.
    pub(crate) fn push_drafts(&mut self, n: usize) -> Result<()> {
        let (draft, reads) = (self.view(), std::mem::take(&mut self.reads[1]));
        self.launch(kernel!("step_push_drafts"), Grid::new(1, 256), args![&draft, Arg::of(&reads), n as u32])
    }

    /// Gives drafts from a script to the slots that want some, up to `drafts` each, between `sample` and `commit`:
    /// `script[s * len + i]` is what a sequence of seed `s` may emit as its `i`-th token, from 0; `u32::MAX` is no draft.
    /// For tests; a model's own drafter is stages.
    pub fn propose(&mut self, script: &CudaBuf<u32>, len: usize, drafts: u32) -> Result<()> {
        let (view, rows, n) = (self.view(), self.table_rows() as u32, (script.len / len) as u32);
        self.launch(kernel!("step_script"), Grid::new(1, 256), args![&view, script.at, n, len as u32, rows, drafts])
    }

    /// Microseconds that one `body` takes inside a graph of `repeats` of them, over the staged row table: the least of
    /// five replays, after one to warm up. For benchmarks; waits.
    pub fn bench(
        &mut self,
        key: StepKey,
        repeats: usize,
        body: &mut dyn FnMut(&mut Self) -> Result<()>,
    ) -> Result<f64> {
        self.enter()?;
        (self.part, self.ctx) = (key.part, key.ctx);
        self.enqueue(key, &mut |_| Ok(()))?;
        self.driver.begin_capture()?;
        let done = (0..repeats).try_for_each(|_| body(self)).and_then(|()| self.launch_held());
        let graph = self.driver.end_capture();
        done?;
        let graph = graph?;
        let mut least = f32::INFINITY;
        for replay in 0..6 {
            let ms = self.driver.timed(|| self.driver.replay(&graph))?;
            if replay > 0 {
                least = least.min(ms);
            }
        }
        self.counters.syncs += 6;
        self.driver.destroy(graph);
        Ok(f64::from(least) * 1e3 / repeats as f64)
    }

    /// Launches a kernel that traps, which no context survives. For tests of what happens then.
    pub fn inject_trap(&mut self) -> Result<()> {
        self.enter()?;
        self.launch(kernel!("step_trap"), Grid::new(1, 1), &[])
    }

    /// Replays a recorded step.
    fn replay(&mut self, key: StepKey) -> Result<()> {
        let recorded = &self.graphs[&key];
        self.counters.graph_launches += 1;
        self.counters.graph_kernels += recorded.graph.nodes as u64;
        self.counters.weight_bytes += recorded.weight_bytes;
        if let Some(trace) = &mut self.trace {
            trace.replay(key, self.counters.weight_bytes);
        }
        self.driver.replay(&recorded.graph)
    }

    fn check_key(&mut self, key: StepKey) -> Result<()> {
        let most = self.limits.heads;
        let state = self.state();
        let (rows, heads) = state.table;
        if rows != key.rows as usize {
            return Err(DeviceError::UnknownStep { key: format!("{key} over a table of {rows} rows") });
        }
        if heads > most.min(key.heads as usize) {
            return Err(DeviceError::UnknownStep { key: format!("{key} over {heads} head rows") });
        }
        if state.enqueued + 1 - state.read > state.view(Part::Whole).ring_steps() {
            return Err(DeviceError::RingFull { step: state.enqueued + 1, oldest: state.read + 1 });
        }
        Ok(())
    }
}

impl Buffers for Cuda {
    type Buf<T: Element> = CudaBuf<T>;
    type Matrix = CudaMatrix;
}

impl Alloc for Cuda {
    fn alloc<T: Element>(&mut self, name: &'static str, class: MemoryClass, len: usize) -> Result<CudaBuf<T>> {
        self.take(name, class, len)
    }

    fn vector(&mut self, name: &str, values: &[f32]) -> Result<CudaBuf<f32>> {
        let buf = self.take(name, MemoryClass::Weights, values.len())?;
        self.upload(buf.at, values)?;
        Ok(buf)
    }

    fn ids(&mut self, name: &str, values: &[u32]) -> Result<CudaBuf<u32>> {
        let buf = self.take(name, MemoryClass::Weights, values.len())?;
        self.upload(buf.at, values)?;
        Ok(buf)
    }

    fn matrix(&mut self, name: &str, parts: &[MatrixSource<'_>]) -> Result<CudaMatrix> {
        for part in parts {
            part.check(name)?;
            assert_eq!(part.cols, parts[0].cols, "parts of {name} have equal columns");
        }
        CudaMatrix::load(self, name, parts)
    }

    fn finish(&mut self, shape: &ModelShape) -> Result<()> {
        self.enter()?;
        let state = State::new(&self.driver, &self.limits, shape.vocab)?;
        self.memory.add("slots and ring", MemoryClass::State, state.bytes);
        self.state = Some(state);
        self.chute = None;
        self.matmul = crate::ops::matmul::cuda::Workspace::new(self, shape)?;
        self.kv = crate::ops::kv::cuda::Workspace::new(self)?;
        self.hc = crate::ops::hc::cuda::Workspace::new(self, shape)?;
        self.router = crate::ops::router::cuda::Workspace::new(self, shape)?;
        self.moe = crate::ops::moe::cuda::Workspace::new(self, shape)?;
        let mutant = self.latent.mutant;
        self.latent = crate::ops::latent::cuda::Workspace::new(self, shape)?;
        self.latent.mutant = mutant;
        self.driver.synchronize("load")?;
        if let Some(to) = std::env::var_os("ARC_CUDA_TRACE") {
            let at = self.take::<u8>("times of kernels", MemoryClass::Workspace, trace::Trace::BYTES)?;
            let marks = self.take::<u8>("times of blocks", MemoryClass::Workspace, trace::Trace::MARK_BYTES)?;
            self.trace = Some(trace::Trace::new(to.into(), &self.driver, at, marks)?);
        }
        Ok(())
    }
}

impl Steps for Cuda {
    fn step(&mut self, key: StepKey, body: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<u64> {
        self.enter()?;
        self.check_key(key)?;
        if self.options.capture {
            if !self.graphs.contains_key(&key) {
                if self.serving && !self.options.late {
                    return Err(DeviceError::UnknownStep { key: key.to_string() });
                }
                if self.serving {
                    tracing::warn!(%key, "a step that warm-up missed is recorded now");
                }
                self.record(key, body)?;
            }
            if self.options.verify {
                self.step_twice(key, body)?;
            } else {
                self.replay(key)?;
            }
        } else {
            self.enqueue(key, body)?;
        }
        let state = self.state();
        let step = state.enqueued + 1;
        if key.part != Part::Forward {
            state.enqueued = step;
        }
        Ok(step)
    }

    fn record(&mut self, key: StepKey, body: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<()> {
        self.enter()?;
        let before = self.counters;
        self.driver.begin_capture()?;
        if let Some(trace) = &mut self.trace {
            trace.begin_record();
        }
        let done = self.enqueue(key, body);
        if let Some(trace) = &mut self.trace {
            trace.end_record(key);
        }
        let graph = self.driver.end_capture();
        // What was recorded was not launched.
        let weight_bytes = (self.counters - before).weight_bytes;
        self.counters = before;
        self.counters.graphs += 1;
        done?;
        self.graphs.insert(key, Recorded { graph: graph?, weight_bytes });
        Ok(())
    }

    fn set_replay(&mut self, on: bool) -> bool {
        std::mem::replace(&mut self.options.capture, on)
    }
}

impl Landing for Cuda {
    fn stage(&mut self, delta: &StepDelta) -> Result<()> {
        self.enter()?;
        self.serving |= !delta.admit.is_empty();
        let mut state = self.state.take().expect("`finish` made the state");
        let (view, applied) = (state.view(Part::Whole), state.applied());
        let done = state.stage(delta, |_, blob| {
            self.send(&blob)?;
            let args = args![&view, blob.device, applied, blob.number];
            // It reads what a copy brought: not before the copy, so no overlap.
            self.launch_with(kernel!("step_apply"), Grid::new(blob.records, 256), args, false)
        });
        self.state = Some(state);
        done?;
        if self.options.trap_seed.is_some_and(|seed| delta.admit.iter().any(|init| init.sampling.seed == seed)) {
            self.inject_trap()?;
        }
        Ok(())
    }

    fn declines(&self, sampling: &SamplerConfig) -> Option<Declined> {
        crate::ops::sample::cuda::declines(sampling, self.view().vocab())
    }

    fn fetch_rows(&mut self, heads: &[u32]) -> Result<()> {
        self.enter()?;
        if heads.is_empty() {
            return Ok(());
        }
        let (vocab, n) = (self.view().vocab() as usize, heads.len());
        let blob = self.state().put(heads, 0);
        self.send(&blob)?;
        let logits = self.matmul.logits.ok_or_else(|| DeviceError::Unsupported {
            device: "cuda",
            what: "fetching rows before an output head ran".to_owned(),
        })?;
        let gathered = self.matmul.gathered.as_ref().expect("made with the head").ptr();
        let grid = Grid::xy(32, n as u32, 256);
        self.launch_with(kernel!("step_gather"), grid, args![gathered, logits, blob.device, vocab as u32], false)?;
        let bytes = 4 * n * vocab;
        let to = self.state().fetch(n, blob.number);
        self.counters.d2h_copies += 1;
        self.counters.d2h_bytes += bytes as u64;
        self.driver.copy_out(to, gathered, bytes, "fetch_rows")?;
        let applied = self.state().applied();
        self.launch_with(kernel!("step_signal"), Grid::new(1, 1), args![applied, blob.number], false)
    }

    fn fetched(&self, idx: usize) -> Option<&[f32]> {
        self.state.as_ref()?.fetched(idx)
    }

    fn poll(&mut self) -> Result<StreamState> {
        self.enter()?;
        // Stream state before head: the other order reports a false short count.
        let idle = self.driver.idle()?;
        if let Some(fault) = self.fault() {
            return Err(DeviceError::Fault(fault));
        }
        Ok(if idle { StreamState::Idle } else { StreamState::Busy })
    }

    fn head(&self) -> u64 {
        self.state.as_ref().map_or(0, State::landed_steps)
    }

    fn landed(&self, step: u64, head_idx: usize) -> Landed {
        self.state.as_ref().expect("`finish` made the state").landed(step, head_idx)
    }

    fn read_to(&mut self, step: u64) {
        let state = self.state();
        state.read = state.read.max(step.min(state.enqueued));
    }

    fn clocks(&self, step: u64) -> StepClocks {
        self.state.as_ref().map_or(StepClocks::default(), |state| state.clocks(step))
    }

    fn fault(&self) -> Option<Fault> {
        let word = self.state.as_ref().map_or(0, State::fault_word);
        (word != 0).then_some(Fault::Word(word))
    }

    fn counters(&self) -> Counters {
        let (allocs, frees) = self.driver.allocations();
        Counters { allocs, frees, ..self.counters }
    }
}

impl Readback for Cuda {
    fn read<T: Element>(&mut self, buf: &CudaBuf<T>, out: &mut [T]) -> Result<()> {
        assert!(out.len() <= buf.len, "{} of {} elements", out.len(), buf.len);
        self.enter()?;
        self.counters.d2h_copies += 1;
        self.counters.d2h_bytes += size_of_val(out) as u64;
        self.counters.syncs += 1;
        self.driver.copy_out(out.as_mut_ptr().cast(), buf.at, size_of_val(out), "read")?;
        self.driver.synchronize("read")
    }

    fn write<T: Element>(&mut self, buf: &mut CudaBuf<T>, values: &[T]) -> Result<()> {
        assert!(values.len() <= buf.len, "{} of {} elements", values.len(), buf.len);
        self.upload(buf.at, values)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let _ = self.driver.make_current();
        if let Some(trace) = self.trace.take() {
            let _ = trace.write(&self.driver);
        }
        for (_, recorded) in self.graphs.drain() {
            self.driver.destroy(recorded.graph);
        }
    }
}

#[cfg(test)]
mod tests;
