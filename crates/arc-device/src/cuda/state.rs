//! Slots, row table, ring and staging of the CUDA device: the Rust side of `step.cuh`.

use std::collections::VecDeque;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::driver::{self, Driver};
use super::twice::Region;
use crate::MemoryClass;
use crate::error::Result;
use crate::ops::sample::SamplerParams;
use crate::step::{
    BLOCK_TOKENS, Landed, Limits, MAX_DRAFTS, MAX_STOP_IDS, Part, Row, SlotInit, StepClocks, StepDelta, row_flags,
    slot_flags,
};

/// `Slot` of step.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Slot {
    active: u32,
    generation: u32,
    pos: u32,
    token: u32,
    n_out: u32,
    max_out: u32,
    flags: u32,
    n_stop: u32,
    fault: u32,
    n_blocks: u32,
    logprobs: u32,
    prompt_top: u32,
    n_bias: u32,
    reads_seen: u32,
    has_mask: u32,
    forced: u32,
    forced_token: u32,
    forced_fault: u32,
    stop_ids: [u32; MAX_STOP_IDS],
    drafts: [u32; MAX_DRAFTS],
    n_drafts: u32,
    pad: u32,
    params: SamplerParams,
}
const _: () = assert!(size_of::<Slot>() == 216);
const SLOT_WORDS: usize = size_of::<Slot>() / 4;
/// Rows of a step: a claim to a block of the KV cache has a row in 16 bits, beside the step.
const MOST_ROWS: usize = 1 << 16;

/// `Progress` of step.cuh.
#[repr(C)]
struct Progress {
    step: u64,
    begun: u64,
    now: StepClocks,
}

/// `StepView` of step.cuh: where everything is, passed by value to kernels that look at rows and slots.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StepView {
    rows: u64,
    infos: u64,
    heads: u64,
    counts: u64,
    slots: u64,
    blocks: u64,
    writers: u64,
    landed: u64,
    drawn: u64,
    from: u64,
    bias_ids: u64,
    bias: u64,
    masks: u64,
    seen: u64,
    progress: u64,
    ring: u64,
    ring_clocks: u64,
    head: u64,
    fault_word: u64,
    n_slots: u32,
    max_blocks: u32,
    n_blocks: u32,
    vocab: u32,
    context: u32,
    heads_max: u32,
    ring_steps: u32,
    pub(super) part: u32,
}
const _: () = assert!(size_of::<StepView>() == 184);

/// Entries of a slot's bias list; a row with more is drawn by the host. `kMaxBias` of step.cuh.
pub const MAX_BIAS: usize = 1024;

/// Kinds of staged records, as in step.cu.
#[derive(Clone, Copy)]
enum Record {
    Release = 0,
    Admit = 1,
    Rows = 2,
    Mask = 3,
    Forced = 4,
}

/// Host memory that kernels read and write.
pub struct Pinned {
    host: *mut u8,
    /// The same memory as the device sees it.
    pub device: u64,
    bytes: usize,
}

impl Pinned {
    fn new(driver: &Driver, bytes: usize) -> Result<Pinned> {
        let (host, device) = driver.alloc_pinned(bytes)?;
        Ok(Pinned { host, device, bytes })
    }

    /// A word that kernels store.
    fn word(&self) -> &AtomicU64 {
        assert!(self.bytes >= 8);
        // SAFETY: aligned to a page, at least eight bytes, alive as long as self; kernels store whole words.
        unsafe { AtomicU64::from_ptr(self.host.cast()) }
    }

    /// The `i`-th value. What a kernel may be writing is not asked for: the head tells what has landed.
    fn get<T: Copy>(&self, i: usize) -> T {
        assert!((i + 1) * size_of::<T>() <= self.bytes, "value {i} of {} bytes", self.bytes);
        // SAFETY: in bounds as just asserted, and plain numbers.
        unsafe { ptr::read_volatile(self.host.cast::<T>().add(i)) }
    }

    fn write(&mut self, at: usize, words: &[u32]) {
        let bytes = size_of_val(words);
        assert!(at <= self.bytes && bytes <= self.bytes - at, "{bytes} bytes at {at} of {}", self.bytes);
        // SAFETY: in bounds as just asserted; nothing in flight reads there, by `Staging::reserve`.
        unsafe { ptr::copy_nonoverlapping(words.as_ptr().cast(), self.host.add(at), bytes) };
    }
}

/// Bytes on their way to the device: a ring in pinned memory and its twin on the device. A part is used again once the
/// kernel that read it has begun.
struct Staging {
    pinned: Pinned,
    twin: u64,
    at: usize,
    /// What was sent, from 1.
    number: u64,
    in_flight: VecDeque<(u64, usize, usize)>,
    /// The newest number whose bytes have left the host.
    applied: Pinned,
}

impl Staging {
    /// Room for `bytes`, and the times that it had to be waited for.
    fn reserve(&mut self, bytes: usize) -> (usize, u64) {
        assert!(bytes <= self.pinned.bytes, "{bytes} bytes staged at once, {} are there", self.pinned.bytes);
        let start = if self.at + bytes > self.pinned.bytes { 0 } else { self.at };
        let mut waits = 0;
        while let Some(&(number, from, to)) = self.in_flight.front() {
            if self.applied.word().load(Ordering::Acquire) >= number {
                self.in_flight.pop_front();
            } else if self.in_flight.iter().all(|&(_, from, to)| to <= start || from >= start + bytes) {
                break;
            } else {
                let _ = (from, to);
                waits += 1;
                std::thread::yield_now();
            }
        }
        self.number += 1;
        self.in_flight.push_back((self.number, start, start + bytes));
        self.at = (start + bytes).next_multiple_of(16);
        (start, waits.min(1))
    }
}

/// One piece of a staged change, ready to be sent.
pub struct Blob {
    /// Records, which is blocks of the kernel that applies them.
    pub records: u32,
    /// Where it was put in the device's memory.
    pub device: u64,
    /// Its number.
    pub number: u64,
    /// Where it lies on the host.
    pub host: *const u8,
    /// Its length.
    pub bytes: usize,
    /// Waits for room.
    pub waits: u64,
}

/// Everything of a step that is not arithmetic.
pub struct State {
    driver: Arc<Driver>,
    view: StepView,
    /// The same over the draft rows.
    draft_view: StepView,
    limits: Limits,
    /// Device memory that this owns.
    owned: Vec<Region>,
    /// Bytes of it.
    pub bytes: u64,
    staging: Staging,
    ring: Pinned,
    ring_clocks: Pinned,
    head: Pinned,
    fault_word: Pinned,
    kept: Pinned,
    /// Rows fetched last, and the number that says that they arrived.
    fetched: (usize, u64),
    /// Rows and head rows of the staged table.
    pub table: (usize, usize),
    /// Steps enqueued, and read from the ring.
    pub enqueued: u64,
    pub read: u64,
    words: Vec<u32>,
    starts: Vec<usize>,
}

/// Bytes of host memory for changes in flight, at least.
const STAGING: usize = 16 << 20;

impl State {
    /// State for `limits` over a vocabulary. Errors: `OutOfMemory`, `Cuda`.
    pub fn new(driver: &Arc<Driver>, limits: &Limits, vocab: usize) -> Result<State> {
        assert!(limits.rows <= MOST_ROWS, "{} rows of a step, at most {MOST_ROWS}", limits.rows);
        let max_blocks = Limits::blocks_for(limits.context);
        let mut owned = Vec::new();
        let mut total = 0;
        let mut device = |name: &str, bytes: usize| -> Result<u64> {
            let at = super::alloc_zeroed(driver, "slots and ring", bytes)?;
            owned.push(Region { name: name.to_owned(), class: MemoryClass::State, at, bytes, timeless: bytes });
            total += bytes as u64;
            Ok(at)
        };
        let largest = 4 * (limits.context + max_blocks + 2 * MAX_BIAS + SLOT_WORDS + 64);
        let staging = STAGING.max(2 * largest).max(4 * (limits.rows * size_of::<Row>() + vocab / 8));
        let twin = device("staged changes", staging)?;
        let ring = Pinned::new(driver, limits.ring * limits.heads * size_of::<Landed>())?;
        let ring_clocks = Pinned::new(driver, limits.ring * size_of::<StepClocks>())?;
        let (head, fault_word) = (Pinned::new(driver, 64)?, Pinned::new(driver, 64)?);
        let kept = Pinned::new(driver, 4 * limits.heads * vocab)?;
        let view = StepView {
            rows: device("row table", limits.rows * size_of::<Row>())?,
            infos: device("rows resolved", limits.rows * 32)?,
            heads: device("head rows", limits.heads * 4)?,
            counts: device("number of head rows", 8)?,
            slots: device("slots", limits.slots * size_of::<Slot>())?,
            blocks: device("block tables", limits.slots * max_blocks * 4)?,
            writers: device("writers of blocks", limits.blocks * 8)?,
            landed: device("what lands", limits.heads * size_of::<Landed>())?,
            drawn: device("drawn tokens", limits.rows * 4)?,
            from: device("rows drawn after", limits.rows * 4)?,
            bias_ids: device("bias lists", limits.slots * MAX_BIAS * 4)?,
            bias: device("bias", limits.slots * MAX_BIAS * 4)?,
            masks: device("masks", limits.slots * vocab.div_ceil(32) * 4)?,
            seen: device("tokens seen", limits.slots * vocab * 4)?,
            progress: device("steps done", size_of::<Progress>())?,
            ring: ring.device,
            ring_clocks: ring_clocks.device,
            head: head.device,
            fault_word: fault_word.device,
            n_slots: limits.slots as u32,
            max_blocks: max_blocks as u32,
            n_blocks: limits.blocks as u32,
            vocab: vocab as u32,
            context: limits.context as u32,
            heads_max: limits.heads as u32,
            ring_steps: limits.ring as u32,
            part: 0,
        };
        let draft_view = StepView {
            rows: device("drafts' row table", limits.rows * size_of::<Row>())?,
            infos: device("drafts' rows resolved", limits.rows * 32)?,
            heads: device("drafts' head rows", limits.rows * 4)?,
            counts: device("number of drafts' head rows", 8)?,
            landed: device("what lands of drafts", limits.rows * size_of::<Landed>())?,
            ..view
        };
        let progress = owned.iter_mut().find(|region| region.at == view.progress).expect("just taken");
        progress.timeless = std::mem::offset_of!(Progress, now);
        let staging = Staging {
            pinned: Pinned::new(driver, staging)?,
            twin,
            at: 0,
            number: 0,
            in_flight: VecDeque::new(),
            applied: Pinned::new(driver, 64)?,
        };
        Ok(State {
            driver: driver.clone(),
            view,
            draft_view,
            limits: *limits,
            owned,
            bytes: total,
            staging,
            ring,
            ring_clocks,
            head,
            fault_word,
            kept,
            fetched: (0, 0),
            table: (0, 0),
            enqueued: 0,
            read: 0,
            words: Vec::new(),
            starts: Vec::new(),
        })
    }

    pub fn view(&self, part: Part) -> StepView {
        StepView { part: part as u32, ..self.view }
    }

    /// What stages see while they run over the draft rows.
    pub fn draft_view(&self, part: Part) -> StepView {
        StepView { part: part as u32, ..self.draft_view }
    }

    /// The device memory of all of it.
    pub fn regions(&self) -> impl Iterator<Item = Region> + '_ {
        self.owned.iter().cloned()
    }

    /// Device address of the word that [`Blob`] numbers are stored to.
    pub fn applied(&self) -> u64 {
        self.staging.applied.device
    }

    /// Steps landed.
    pub fn landed_steps(&self) -> u64 {
        self.head.word().load(Ordering::Acquire)
    }

    pub fn landed(&self, step: u64, head: usize) -> Landed {
        self.ring.get(step as usize % self.limits.ring * self.limits.heads + head)
    }

    pub fn clocks(&self, step: u64) -> StepClocks {
        self.ring_clocks.get(step as usize % self.limits.ring)
    }

    /// What a kernel found wrong; 0 for nothing.
    pub fn fault_word(&self) -> u32 {
        // SAFETY: as in `Pinned::word`.
        unsafe { AtomicU32::from_ptr(self.fault_word.host.cast()) }.load(Ordering::Acquire)
    }

    /// Puts words where a copy can take them: for [`Blob`]s and lists of rows.
    pub fn put(&mut self, words: &[u32], records: u32) -> Blob {
        let bytes = size_of_val(words);
        let (at, waits) = self.staging.reserve(bytes);
        self.staging.pinned.write(at, words);
        Blob {
            records,
            device: self.staging.twin + at as u64,
            number: self.staging.number,
            host: self.staging.pinned.host.wrapping_add(at),
            bytes,
            waits,
        }
    }

    /// Host memory for `rows` fetched rows of logits, which arrive with `number`.
    pub fn fetch(&mut self, rows: usize, number: u64) -> *mut u8 {
        self.fetched = (rows, number);
        self.kept.host
    }

    pub fn fetched(&self, idx: usize) -> Option<&[f32]> {
        let (rows, number) = self.fetched;
        let vocab = self.view.vocab as usize;
        if idx >= rows || self.staging.applied.word().load(Ordering::Acquire) < number {
            return None;
        }
        // SAFETY: in bounds, since `kept` has `limits.heads` rows and no more can be fetched; written by a copy that has
        // run, and not written again before the next `fetch`, which takes `&mut self`.
        Some(unsafe { std::slice::from_raw_parts(self.kept.host.cast::<f32>().add(idx * vocab), vocab) })
    }

    /// Writes a change down as records and calls `send` for each piece of it.
    pub fn stage(&mut self, delta: &StepDelta, mut send: impl FnMut(&mut State, Blob) -> Result<()>) -> Result<()> {
        for &slot in &delta.release {
            // A slot that is admitted in the same change is overwritten as a whole; records run side by side.
            if !delta.admit.iter().any(|init| init.slot == slot) {
                self.record(Record::Release, &[u32::from(slot)]);
            }
        }
        for init in &delta.admit {
            self.admit(init);
            if self.words.len() * 4 > self.staging.pinned.bytes / 4 {
                self.flush(&mut send)?;
            }
        }
        if let Some(rows) = &delta.rows {
            assert!(rows.len() <= self.limits.rows, "{} rows staged, the limit is {}", rows.len(), self.limits.rows);
            let is_head = |row: &&Row| row.flags & row_flags::HEADS != 0;
            self.table = (rows.len(), rows.iter().filter(is_head).count());
            self.record(Record::Rows, &[rows.len() as u32]);
            for row in rows {
                let first = u32::from(row.slot) | u32::from(row.flags) << 16;
                self.words.extend([first, row.offset, row.token, row.target]);
            }
        }
        if !delta.masks.is_empty() || !delta.forced.is_empty() {
            // They change slots that a record above may still be writing.
            self.flush(&mut send)?;
        }
        let mask_words = (self.view.vocab as usize).div_ceil(32);
        for (slot, mask) in &delta.masks {
            self.record(Record::Mask, &[u32::from(*slot)]);
            let start = self.words.len();
            self.words.extend(mask.iter().take(mask_words));
            self.words.resize(start + mask_words, 0);
            if self.words.len() * 4 > self.staging.pinned.bytes / 4 {
                self.flush(&mut send)?;
            }
        }
        for forced in &delta.forced {
            self.record(Record::Forced, &[u32::from(forced.slot), forced.token, forced.fault]);
        }
        self.flush(&mut send)
    }

    fn record(&mut self, kind: Record, words: &[u32]) {
        self.starts.push(self.words.len());
        self.words.push(kind as u32);
        self.words.extend_from_slice(words);
    }

    fn admit(&mut self, init: &SlotInit) {
        let params = SamplerParams::new(&init.sampling);
        let bias = &init.sampling.bias[..init.sampling.bias.len().min(MAX_BIAS)];
        let mut stop_ids = [0; MAX_STOP_IDS];
        stop_ids[..init.stop_ids.len()].copy_from_slice(&init.stop_ids);
        let reads_seen = params.reads_seen();
        let prompt: &[u32] = if reads_seen { &init.penalty_prompt } else { &[] };
        let held = init.blocks.len().min(self.view.max_blocks as usize);
        let slot = Slot {
            active: 1,
            generation: init.generation,
            pos: init.pos,
            token: 0,
            n_out: 0,
            max_out: init.max_out,
            flags: init.flags & slot_flags::IGNORE_STOP,
            n_stop: init.stop_ids.len() as u32,
            fault: 0,
            n_blocks: held as u32,
            logprobs: init.logprobs.unwrap_or(u32::MAX),
            prompt_top: init.prompt_top,
            n_bias: bias.len() as u32,
            reads_seen: u32::from(reads_seen),
            has_mask: 0,
            forced: 0,
            forced_token: 0,
            forced_fault: 0,
            stop_ids,
            drafts: [0; MAX_DRAFTS],
            n_drafts: 0,
            pad: 0,
            params,
        };
        let lens = [u32::from(init.slot), held as u32, bias.len() as u32, prompt.len() as u32];
        self.record(Record::Admit, &lens);
        // SAFETY: a repr(C) struct without padding is its words.
        let words: [u32; SLOT_WORDS] = unsafe { std::mem::transmute(slot) };
        self.words.extend(words);
        self.words.extend_from_slice(&init.blocks[..held]);
        self.words.extend(bias.iter().map(|&(id, _)| id));
        self.words.extend(bias.iter().map(|&(_, value)| value.to_bits()));
        self.words.extend_from_slice(prompt);
    }

    fn flush(&mut self, send: &mut impl FnMut(&mut State, Blob) -> Result<()>) -> Result<()> {
        if self.starts.is_empty() {
            return Ok(());
        }
        let records = self.starts.len();
        let mut blob: Vec<u32> = self.starts.iter().map(|start| (records + start) as u32).collect();
        blob.extend_from_slice(&self.words);
        self.words.clear();
        self.starts.clear();
        let blob = self.put(&blob, records as u32);
        send(self, blob)
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let _ = self.driver.synchronize("drop");
        for region in &self.owned {
            // SAFETY: allocated in `new`, freed once; `self.driver` keeps the context.
            unsafe { self.driver.free(region.at) };
        }
        let pinned = [&self.ring, &self.ring_clocks, &self.head, &self.fault_word, &self.kept];
        for pinned in pinned.into_iter().chain([&self.staging.pinned, &self.staging.applied]) {
            // SAFETY: allocated in `Pinned::new`, freed once, nothing in flight.
            unsafe { driver::free_pinned(pinned.host) };
        }
    }
}

// SAFETY: the pointers are to pinned memory that this owns; the driver's calls may come from any thread.
unsafe impl Send for State {}

/// `kBlockTokens` of step.cuh.
const _: () = assert!(BLOCK_TOKENS == 32);

impl StepView {
    /// Steps that the ring holds.
    pub fn ring_steps(&self) -> u64 {
        u64::from(self.ring_steps)
    }

    /// Address of the row infos, 32 bytes each: `RowInfo` of step.cuh.
    pub fn infos(&self) -> u64 {
        self.infos
    }

    /// Address of the row of each head row, u32.
    pub fn heads(&self) -> u64 {
        self.heads
    }

    /// Address of the number of head rows, u32.
    pub fn n_heads(&self) -> u64 {
        self.counts
    }

    /// Tokens of the vocabulary.
    pub fn vocab(&self) -> u32 {
        self.vocab
    }
}
