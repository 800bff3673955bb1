//! The scripted device.
//!
//! It checks what a device takes for granted: that positions follow each other, that no block belongs to two sequences,
//! that no step is larger than the limits. A violation panics, and a panic is the engine's fault.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arc_device::count::{Counters, heap};
use arc_device::error::{DeviceError, Fault, Result};
use arc_device::ops::sample::{Declined, SamplerConfig};
use arc_device::step::{
    BLOCK_TOKENS, Forced, Landed, Limits, Part, Row, SlotInit, StepClocks, StepDelta, StepKey, TOKEN_OF_SLOT,
    landed_flags, row_flags, slot_flags,
};
use arc_device::{DeviceLoop, Landing, StreamState};

use super::HOST_SEED;
use super::model::{POISON, VOCAB, best, hash, logits, logprob};

/// What goes wrong, and how fast the rest goes.
#[derive(Debug, Clone, Default)]
pub struct Script {
    /// `None`: a step runs where it is enqueued. Otherwise it lands this much after the one before.
    pub step_time: Option<Duration>,
    /// This step runs and never lands, and the stream goes idle.
    pub lost: Option<u64>,
    /// From this step on nothing lands, and the stream stays busy.
    pub stuck: Option<u64>,
    /// From this step on, steps land in the moment in which the stream is asked.
    pub lands_when_asked: Option<u64>,
    /// This step takes this much longer.
    pub late: Option<(u64, Duration)>,
    /// The fault word that this step leaves.
    pub fault_word: Option<(u64, u32)>,
    /// The stream reports an error once this step was enqueued.
    pub stream_error: Option<u64>,
    /// Enqueuing this step panics.
    pub panic: Option<u64>,
    /// Enqueuing this step waits until it is let through.
    pub hold: Option<(u64, Arc<AtomicBool>)>,
    /// The device drafts, and of a hundred drafts so many are right.
    pub drafts: Option<u32>,
    /// A slot's sequence may go on from any earlier position.
    pub rewinds: bool,
    /// Rows name their slot's former generation: what a device must never do.
    pub wrong_generation: bool,
}

/// What the fake was asked to do.
#[derive(Debug, Default)]
pub struct Log {
    pub steps: Vec<StepLog>,
    /// `steps` must not grow past its capacity.
    pub fixed: bool,
    pub admitted: Vec<SlotInit>,
    pub released: Vec<u16>,
    pub stages: usize,
    pub in_flight_max: u64,
    /// Steps whose forward part was enqueued while the step before was still in flight.
    pub overlapped: u64,
    pub fetches: Vec<usize>,
    pub forced: usize,
    pub masks: usize,
}

#[derive(Debug, Clone, Copy)]
pub struct StepLog {
    pub key: StepKey,
    pub decode_rows: u32,
    pub prompt_rows: u32,
    pub inert_rows: u32,
    pub verify_rows: u32,
    /// Allocations of the engine thread up to this step.
    pub heap_allocs: u64,
}

#[derive(Debug, Clone)]
struct Slot {
    live: bool,
    generation: u32,
    pos: u32,
    last: u32,
    out: u32,
    max_out: u32,
    flags: u32,
    stop_ids: Vec<u32>,
    blocks: Vec<u32>,
    logprobs: Option<u32>,
    prompt_top: u32,
    mask: Vec<u32>,
    masked: bool,
    forced: Option<Forced>,
    drafts: Vec<u32>,
}

#[derive(Debug, Default, Clone)]
struct Entry {
    landed: Vec<Landed>,
    clocks: StepClocks,
}

/// The scripted device.
pub struct Fake {
    limits: Limits,
    script: Script,
    log: Arc<Mutex<Log>>,
    slots: Vec<Slot>,
    /// The token fed at each position of each block.
    kv: Vec<u32>,
    rows: Vec<Row>,
    ring: Vec<Entry>,
    enqueued: u64,
    /// The last step enqueued when the stream was asked.
    asked: u64,
    read: u64,
    forward: Option<(u64, StepKey)>,
    /// Hash of what each head row had seen, from the forward part to the sampling part.
    seen: Vec<u64>,
    /// Whether each row moves its sequence on.
    counts: Vec<bool>,
    n_drafts: u64,
    fetched: Vec<Vec<f32>>,
    land_at: VecDeque<(u64, Instant)>,
    last_land: Instant,
    clock_ns: u64,
    counters: Counters,
    fault: Option<Fault>,
}

impl Fake {
    pub fn new(limits: Limits, script: Script, log: Arc<Mutex<Log>>) -> Self {
        let slot = Slot {
            live: false,
            generation: 0,
            pos: 0,
            last: 0,
            out: 0,
            max_out: 0,
            flags: 0,
            stop_ids: Vec::new(),
            blocks: Vec::new(),
            logprobs: None,
            prompt_top: 0,
            mask: Vec::new(),
            masked: false,
            forced: None,
            drafts: Vec::new(),
        };
        let entry = Entry { landed: Vec::with_capacity(limits.heads), clocks: StepClocks::default() };
        Fake {
            slots: vec![slot; limits.slots],
            kv: vec![u32::MAX; limits.blocks * BLOCK_TOKENS],
            rows: Vec::with_capacity(limits.rows),
            ring: (0..limits.ring)
                .map(|_| Entry { landed: Vec::with_capacity(limits.heads), ..entry.clone() })
                .collect(),
            enqueued: 0,
            asked: 0,
            read: 0,
            forward: None,
            seen: Vec::with_capacity(limits.heads),
            counts: Vec::with_capacity(limits.rows),
            n_drafts: 0,
            fetched: Vec::new(),
            land_at: VecDeque::with_capacity(limits.ring + 1),
            last_land: Instant::now(),
            clock_ns: 0,
            counters: Counters::default(),
            fault: None,
            limits,
            script,
            log,
        }
    }

    fn hash(&self, slot: &Slot, len: u32) -> (u64, bool) {
        let block_tokens = |&block: &u32| &self.kv[block as usize * BLOCK_TOKENS..][..BLOCK_TOKENS];
        let mut poisoned = false;
        let fed = slot.blocks.iter().flat_map(block_tokens).take(len as usize).copied();
        let hash = hash(fed.inspect(|&token| poisoned |= token == POISON));
        (hash, poisoned)
    }

    /// Feeds the rows, and notes what each head row has seen.
    fn run_forward(&mut self, key: StepKey) {
        assert_eq!(self.rows.len(), key.rows as usize, "the key's rows are the table's");
        assert!(self.rows.len() <= self.limits.rows, "{} rows", self.rows.len());
        self.seen.clear();
        let mut offsets: [u32; 512] = [0; 512];
        for idx in 0..self.rows.len() {
            let row = self.rows[idx];
            if row.flags & row_flags::PADDING != 0 {
                assert!(self.rows[idx..].iter().all(|r| r.flags == row_flags::PADDING), "padding comes last");
                break;
            }
            let slot = self.slots[usize::from(row.slot)].clone_for_read();
            assert_eq!(row.offset, offsets[usize::from(row.slot)], "rows of a slot follow each other");
            offsets[usize::from(row.slot)] += 1;
            let mut seen = 0;
            let draft = self.slots[usize::from(row.slot)].draft(&row);
            if slot.live && (row.flags & row_flags::VERIFY == 0 || draft.is_some()) {
                let pos = slot.pos + row.offset;
                let token = if row.token == TOKEN_OF_SLOT { draft.unwrap_or(slot.last) } else { row.token };
                let block = self.slots[usize::from(row.slot)].blocks[pos as usize / BLOCK_TOKENS];
                self.kv[block as usize * BLOCK_TOKENS + pos as usize % BLOCK_TOKENS] = token;
                let (hash, poisoned) = self.hash(&self.slots[usize::from(row.slot)], pos + 1);
                seen = if poisoned { u64::MAX } else { hash };
            }
            if row.flags & row_flags::HEAD != 0 {
                self.seen.push(seen);
            }
        }
        assert!(self.seen.len() <= self.limits.heads, "{} heads", self.seen.len());
        assert!(self.seen.len() <= key.heads as usize, "{} heads in {key}", self.seen.len());
    }

    fn run_sample(&mut self, step: u64, key: StepKey) {
        let at = (step % self.limits.ring as u64) as usize;
        let mut entry = std::mem::take(&mut self.ring[at]);
        entry.landed.clear();
        let mut head_idx = 0;
        let mut log = StepLog {
            key: self.forward.expect("a forward part came first").1,
            decode_rows: 0,
            prompt_rows: 0,
            inert_rows: 0,
            verify_rows: 0,
            heap_allocs: heap::allocs_on_this_thread(),
        };
        self.counts.clear();
        // The entry that gathers what a slot's rows draw, and whether all draws so far were as drafted.
        let (mut lead, mut as_drafted) = (0, false);
        for idx in 0..self.rows.len() {
            let row = self.rows[idx];
            if row.flags & row_flags::PADDING != 0 {
                break;
            }
            let seen = if row.flags & row_flags::HEAD != 0 { self.seen[head_idx] } else { 0 };
            let slot = &mut self.slots[usize::from(row.slot)];
            self.counts.push(slot.live && row.flags & row_flags::VERIFY == 0);
            let prompt_row = row.token != TOKEN_OF_SLOT;
            let verifies = row.flags & row_flags::VERIFY != 0;
            log.prompt_rows += u32::from(prompt_row);
            log.decode_rows += u32::from(!prompt_row && !verifies);
            log.verify_rows += u32::from(verifies);
            log.inert_rows += u32::from(!slot.live);
            if row.flags & row_flags::HEAD == 0 {
                continue;
            }
            head_idx += 1;
            let generation = slot.generation - u32::from(self.script.wrong_generation);
            let mut landed = Landed { slot: row.slot.into(), generation, ..Landed::default() };
            if verifies {
                landed.flags = landed_flags::VERIFIED;
                // A sequence that ends among its own rows leaves the rest without a word.
                let draft = slot.draft_of_step(&row).filter(|_| seen != 0);
                match draft {
                    None => landed.flags |= landed_flags::INERT,
                    Some(draft) => {
                        as_drafted &= slot.live && slot.last == draft;
                        if as_drafted {
                            let mut drawn = Landed::default();
                            slot.draw(seen, &mut drawn);
                            let lead: &mut Landed = &mut entry.landed[lead];
                            lead.flags |= drawn.flags;
                            lead.tokens[lead.n_tokens as usize] = drawn.tokens[0];
                            lead.n_tokens += drawn.n_tokens;
                            self.counts[idx] = true;
                        }
                    }
                }
                entry.landed.push(landed);
                continue;
            }
            (lead, as_drafted) = (entry.landed.len(), true);
            if !slot.live {
                landed.flags = landed_flags::INERT;
            } else if row.flags & row_flags::SCORE != 0 {
                landed.flags = landed_flags::SCORED;
                landed.logprob = logprob(seen, row.target);
                top(&mut landed, seen, slot.prompt_top);
            } else {
                slot.draw(seen, &mut landed);
            }
            entry.landed.push(landed);
        }
        for idx in 0..self.rows.len() {
            let row = self.rows[idx];
            if row.flags & row_flags::PADDING == 0 {
                let slot = &mut self.slots[usize::from(row.slot)];
                slot.pos += u32::from(self.counts[idx]);
                slot.masked = false;
                slot.forced = None;
                if row.flags & row_flags::SAMPLE != 0 {
                    slot.drafts.clear();
                }
            }
        }
        self.propose(key);
        // A made-up clock: a millisecond a step, a tenth of one a row, and half a millisecond to sample.
        let start_ns = self.clock_ns + 10_000;
        let sample_ns = start_ns + 1_000_000 + 100_000 * u64::from(log.decode_rows + log.prompt_rows);
        self.clock_ns = sample_ns + 500_000;
        entry.clocks = StepClocks { start_ns, sample_ns, commit_ns: self.clock_ns, kv_bytes: 0 };
        self.ring[at] = entry;
        let in_flight = self.enqueued + 1 - self.read;
        let mut shared = self.log.lock().expect("no test panics with the log");
        if !shared.fixed || shared.steps.len() < shared.steps.capacity() {
            shared.steps.push(log);
        }
        shared.in_flight_max = shared.in_flight_max.max(in_flight);
    }

    /// Drafts the tokens that will come, or others.
    fn propose(&mut self, key: StepKey) {
        let Some(right) = self.script.drafts else {
            assert_eq!((key.drafts, key.draft_rows), (0, 0), "drafts of a device that makes none");
            return;
        };
        let asks = |row: &&Row| row.flags & row_flags::PROPOSE != 0;
        assert!(self.rows.iter().filter(asks).count() <= key.draft_rows as usize, "{key}");
        for idx in 0..self.rows.len() {
            let row = self.rows[idx];
            let slot = &self.slots[usize::from(row.slot)];
            if !asks(&&row) || !slot.live {
                continue;
            }
            let block_tokens = |&block: &u32| &self.kv[block as usize * BLOCK_TOKENS..][..BLOCK_TOKENS];
            let fed: Vec<u32> = slot.blocks.iter().flat_map(block_tokens).take(slot.pos as usize).copied().collect();
            let mut drafts = Vec::new();
            for _ in 0..key.drafts {
                let text = fed.iter().chain([&slot.last]).chain(&drafts).copied();
                let coming = best(hash(text), |_| true).expect("something is allowed");
                self.n_drafts += 1;
                let is_right = self.n_drafts * 7919 % 100 < u64::from(right);
                drafts.push(if is_right { coming } else { (coming + 1) % VOCAB });
            }
            self.slots[usize::from(row.slot)].drafts = drafts;
        }
    }

    fn schedule(&mut self, step: u64) {
        let now = Instant::now();
        let mut time = self.script.step_time.unwrap_or_default();
        if let Some((late, by)) = self.script.late
            && late == step
        {
            time += by;
        }
        self.last_land = self.last_land.max(now) + time;
        self.land_at.push_back((step, self.last_land));
    }
}

struct SlotView {
    live: bool,
    pos: u32,
    last: u32,
}

impl Slot {
    fn clone_for_read(&self) -> SlotView {
        SlotView { live: self.live, pos: self.pos, last: self.last }
    }

    /// The draft that a row verifies, as its step begins.
    fn draft(&self, row: &Row) -> Option<u32> {
        let within = row.flags & row_flags::VERIFY != 0 && self.out + row.offset < self.max_out;
        within.then(|| self.drafts.get(row.offset as usize - 1).copied()).flatten()
    }

    /// The same while its step emits.
    fn draft_of_step(&self, row: &Row) -> Option<u32> {
        self.drafts.get(row.offset as usize - 1).copied()
    }

    fn draw(&mut self, seen: u64, landed: &mut Landed) {
        let forced_fault = self.forced.map_or(0, |f| f.fault);
        if seen == u64::MAX || forced_fault != 0 {
            landed.flags = if forced_fault != 0 { forced_fault } else { landed_flags::NON_FINITE };
            self.live = false;
            return;
        }
        let allowed = |id: u32| !self.masked || self.mask[id as usize / 32] >> (id % 32) & 1 != 0;
        let token = match self.forced {
            Some(forced) => forced.token,
            None => match best(seen, allowed) {
                Some(token) => token,
                None => {
                    landed.flags = landed_flags::NOTHING_TO_SAMPLE;
                    self.live = false;
                    return;
                }
            },
        };
        landed.n_tokens = 1;
        landed.tokens[0] = token;
        if let Some(n) = self.logprobs {
            landed.logprob = logprob(seen, token);
            top(landed, seen, n);
        }
        self.last = token;
        self.out += 1;
        if self.flags & slot_flags::IGNORE_STOP == 0 && self.stop_ids.contains(&token) {
            landed.flags |= landed_flags::DONE_STOP;
        } else if self.out == self.max_out {
            landed.flags |= landed_flags::DONE_LENGTH;
        }
        self.live = landed.flags & landed_flags::DONE == 0;
    }
}

impl Landing for Fake {
    fn stage(&mut self, delta: &StepDelta) -> Result<()> {
        let mut log = self.log.lock().expect("no test panics with the log");
        log.stages += 1;
        for &slot in &delta.release {
            self.slots[usize::from(slot)].live = false;
            log.released.push(slot);
        }
        for init in &delta.admit {
            let others = self.slots.iter().enumerate().filter(|(idx, s)| s.live && *idx != usize::from(init.slot));
            for (idx, other) in others {
                let shared = other.blocks.iter().find(|b| init.blocks.contains(b));
                assert_eq!(shared, None, "slot {} was given a block of slot {idx}", init.slot);
            }
            let slot = &mut self.slots[usize::from(init.slot)];
            assert!(init.generation > slot.generation, "generations only grow");
            assert!(init.max_out > 0);
            let goes_on = self.script.rewinds || init.pos == 0 || init.pos == slot.pos;
            assert!(goes_on, "slot {} goes on at {}, and has run up to {}", init.slot, init.pos, slot.pos);
            *slot = Slot {
                live: true,
                generation: init.generation,
                pos: init.pos,
                last: u32::MAX,
                out: 0,
                max_out: init.max_out,
                flags: init.flags,
                stop_ids: init.stop_ids.clone(),
                blocks: init.blocks.clone(),
                logprobs: init.logprobs,
                prompt_top: init.prompt_top,
                mask: vec![0; VOCAB.div_ceil(32) as usize],
                masked: false,
                forced: None,
                drafts: Vec::new(),
            };
            log.admitted.push(init.clone());
        }
        if let Some(rows) = &delta.rows {
            assert!(self.forward.is_none(), "the row table changed between the parts of a step");
            self.rows.clone_from(rows);
        }
        for (slot, bits) in &delta.masks {
            let slot = &mut self.slots[usize::from(*slot)];
            slot.mask.copy_from_slice(bits);
            slot.masked = true;
            log.masks += 1;
        }
        for forced in &delta.forced {
            self.slots[usize::from(forced.slot)].forced = Some(*forced);
            log.forced += 1;
        }
        self.counters.h2d_copies += 1;
        Ok(())
    }

    fn declines(&self, sampling: &SamplerConfig) -> Option<Declined> {
        (sampling.seed == HOST_SEED).then_some(Declined::Dry)
    }

    fn fetch_rows(&mut self, heads: &[u32]) -> Result<()> {
        assert!(self.forward.is_some(), "rows are fetched between the parts of a step");
        self.fetched = heads.iter().map(|&head| logits(self.seen[head as usize])).collect();
        self.counters.d2h_copies += 1;
        self.log.lock().expect("no test panics with the log").fetches.push(heads.len());
        Ok(())
    }

    fn fetched(&self, idx: usize) -> Option<&[f32]> {
        self.fetched.get(idx).map(Vec::as_slice)
    }

    fn poll(&mut self) -> Result<StreamState> {
        if self.script.stream_error.is_some_and(|step| self.enqueued >= step) {
            return Err(DeviceError::Fault(Fault::Stream(-7)));
        }
        if self.script.stuck.is_some_and(|step| self.enqueued >= step) {
            return Ok(StreamState::Busy);
        }
        self.asked = self.enqueued;
        let busy = self.land_at.iter().any(|&(_, at)| at > Instant::now());
        Ok(if busy { StreamState::Busy } else { StreamState::Idle })
    }

    fn head(&self) -> u64 {
        let now = Instant::now();
        let landed = self.land_at.iter().take_while(|&&(_, at)| at <= now).map(|&(step, _)| step).last();
        let head = landed.unwrap_or_else(|| self.land_at.front().map_or(self.enqueued, |&(step, _)| step - 1));
        let limit = [self.script.lost, self.script.stuck].into_iter().flatten().min().map_or(u64::MAX, |step| step - 1);
        let asked = self.script.lands_when_asked.map_or(u64::MAX, |step| self.asked.max(step - 1));
        head.min(limit).min(asked)
    }

    fn landed(&self, step: u64, head_idx: usize) -> Landed {
        assert!(step > self.read && step <= self.head(), "step {step} is not to be read");
        self.ring[(step % self.limits.ring as u64) as usize].landed[head_idx]
    }

    fn clocks(&self, step: u64) -> StepClocks {
        self.ring[(step % self.limits.ring as u64) as usize].clocks
    }

    fn read_to(&mut self, step: u64) {
        assert_eq!(step, self.read + 1, "steps are read in order");
        self.read = step;
        while self.land_at.front().is_some_and(|&(landed, _)| landed <= step) {
            self.land_at.pop_front();
        }
    }

    fn fault(&self) -> Option<Fault> {
        let (step, word) = self.script.fault_word?;
        (self.head() >= step).then_some(Fault::Word(word))
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl DeviceLoop for Fake {
    fn rewinds(&self) -> bool {
        self.script.rewinds
    }

    fn max_drafts(&self) -> u32 {
        if self.script.drafts.is_some() { 4 } else { 0 }
    }

    fn enqueue(&mut self, key: StepKey) -> Result<u64> {
        let step = self.enqueued + 1;
        if let Some((held, through)) = &self.script.hold
            && *held == step
        {
            while !through.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        }
        assert!(self.script.panic != Some(step), "the script says so");
        if step - self.read > self.limits.ring as u64 {
            return Err(DeviceError::RingFull { step, oldest: self.read + 1 });
        }
        self.counters.launches += 1;
        if key.part == Part::Forward && self.head() < self.enqueued {
            self.log.lock().expect("no test panics with the log").overlapped += 1;
        }
        if key.part != Part::Sample {
            assert!(self.forward.is_none());
            self.run_forward(key);
            self.forward = Some((step, key));
        }
        if key.part != Part::Forward {
            self.run_sample(step, key);
            self.forward = None;
            self.enqueued = step;
            self.schedule(step);
        }
        Ok(step)
    }
}

fn top(landed: &mut Landed, seen: u64, n: u32) {
    landed.n_top = n;
    for idx in 0..n {
        landed.top_ids[idx as usize] = idx;
        landed.top_logprobs[idx as usize] = logprob(seen, idx);
    }
}
