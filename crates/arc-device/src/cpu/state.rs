//! Slots, row table and ring of the CPU device.

use std::time::Instant;

use crate::error::{DeviceError, Result};
use crate::ops::sample::dry::DryTable;
use crate::ops::sample::seen::SeenTokens;
use crate::ops::sample::{DryInputs, RowInputs, SamplerParams, Scratch, logprobs_row, sample_row};
use crate::step::{
    BLOCK_TOKENS, Forced, Landed, Limits, Part, Row, SlotInit, StepClocks, StepDelta, StepKey, TOKEN_OF_SLOT,
    landed_flags, row_flags, slot_flags,
};

/// Rows of one sequence that share a tile of keys.
const GROUP_ROWS: usize = 8;

/// A row of the current step, resolved against its slot.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RowInfo {
    /// Reads and writes state; otherwise its activations are zero.
    pub live: bool,
    pub slot: usize,
    pub pos: u32,
    pub token: u32,
    /// Rows right before this one that hold the positions before it, of the same sequence.
    pub back: u32,
    /// Rows right after this one that hold the positions after it.
    pub ahead: u32,
}

impl RowInfo {
    /// Whether this row holds the position after that of `before`, of the same sequence.
    fn follows(&self, before: &RowInfo) -> bool {
        self.live && before.live && before.slot == self.slot && before.pos + 1 == self.pos
    }
}

/// Neighbouring live rows of one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowGroup {
    pub first: usize,
    pub rows: usize,
}

#[derive(Default)]
struct Slot {
    active: bool,
    generation: u32,
    pos: u32,
    token: u32,
    n_out: u32,
    max_out: u32,
    ignore_stop: bool,
    stop_ids: Vec<u32>,
    blocks: Vec<u32>,
    params: Option<SamplerParams>,
    bias: Vec<(u32, f32)>,
    seen: Option<SeenTokens>,
    /// The table of a former sequence, for the next one that wants one: a table has a word for every id, and to get and
    /// return it with each sequence would scatter the heap.
    spare_seen: Option<SeenTokens>,
    dry: Option<(DryTable, Vec<u32>)>,
    logprobs: Option<u32>,
    prompt_top: u32,
    mask: Option<Vec<u32>>,
    forced: Option<Forced>,
    /// A row of this sequence was out of range; told by its next head row.
    fault: u32,
    /// The last step that had a row of this sequence; see [`State::claim`].
    claimed: u64,
}

/// Everything of a step that is not arithmetic.
pub(super) struct State {
    limits: Limits,
    vocab: usize,
    slots: Vec<Slot>,
    /// Which slot writes to a block, with the step in which it does; see [`State::claim`].
    writers: Vec<(u64, u16)>,
    /// Times that a row table was resolved.
    begun: u64,
    rows: Vec<Row>,
    infos: Vec<RowInfo>,
    groups: Vec<RowGroup>,
    /// Row index of each head row.
    heads: Vec<u32>,
    part: Part,
    /// Steps committed.
    step: u64,
    /// Steps that the ring's reader is done with.
    read: u64,
    ring: Vec<Vec<Landed>>,
    ring_clocks: Vec<StepClocks>,
    now: StepClocks,
    started: Instant,
    samplers: Vec<Scratch>,
    /// Logits kept for the host after a `Forward` part, and which of them were fetched.
    kept: Vec<f32>,
    fetched: Vec<u32>,
}

impl State {
    pub fn new(limits: &Limits) -> State {
        State {
            limits: *limits,
            vocab: 0,
            slots: (0..limits.slots).map(|_| Slot::default()).collect(),
            writers: vec![(0, 0); limits.blocks],
            begun: 0,
            rows: Vec::with_capacity(limits.rows),
            infos: Vec::with_capacity(limits.rows),
            groups: Vec::with_capacity(limits.rows),
            heads: Vec::with_capacity(limits.heads),
            part: Part::Whole,
            step: 0,
            read: 0,
            ring: (0..limits.ring).map(|_| vec![Landed::default(); limits.heads]).collect(),
            ring_clocks: vec![StepClocks::default(); limits.ring],
            now: StepClocks::default(),
            started: Instant::now(),
            samplers: Vec::new(),
            kept: Vec::new(),
            fetched: Vec::new(),
        }
    }

    /// Bytes of the fixed parts.
    pub fn bytes(limits: &Limits) -> u64 {
        let landed = limits.ring * limits.heads * size_of::<Landed>();
        let rows = limits.rows * (size_of::<Row>() + size_of::<RowInfo>() + size_of::<RowGroup>());
        let writers = limits.blocks * size_of::<(u64, u16)>();
        (landed + rows + writers + limits.slots * size_of::<Slot>()) as u64
    }

    /// Fixes the vocabulary, and makes the samplers' scratch, one a thread, and room for the logits that the host reads.
    pub fn set_vocab(&mut self, vocab: usize, threads: usize) {
        self.vocab = vocab;
        self.kept = Vec::with_capacity(self.limits.heads * vocab);
        self.samplers = (0..threads).map(|_| Scratch::new(vocab, self.limits.context)).collect();
    }

    pub fn stage(&mut self, delta: &StepDelta) {
        for &slot in &delta.release {
            self.slots[usize::from(slot)].active = false;
        }
        for init in &delta.admit {
            self.slots[usize::from(init.slot)].admit(init, self.vocab, self.limits.context);
        }
        if let Some(rows) = &delta.rows {
            assert!(rows.len() <= self.limits.rows, "{} rows staged, the limit is {}", rows.len(), self.limits.rows);
            self.rows.clear();
            self.rows.extend_from_slice(rows);
        }
        for (slot, mask) in &delta.masks {
            self.slots[usize::from(*slot)].mask = Some(mask.clone());
        }
        for forced in &delta.forced {
            self.slots[usize::from(forced.slot)].forced = Some(*forced);
        }
    }

    /// Resolves the row table for the step that starts now.
    pub fn begin(&mut self, key: StepKey) -> Result<()> {
        if key.rows as usize != self.rows.len() {
            return Err(DeviceError::UnknownStep { key: format!("{key} over a table of {} rows", self.rows.len()) });
        }
        if self.step + 1 - self.read > self.ring.len() as u64 {
            return Err(DeviceError::RingFull { step: self.step + 1, oldest: self.read + 1 });
        }
        if key.part != Part::Sample {
            self.now.start_ns = self.elapsed_ns();
        }
        self.part = key.part;
        self.begun += 1;
        self.infos.clear();
        self.groups.clear();
        self.heads.clear();
        for r in 0..self.rows.len() {
            let row = self.rows[r];
            let mut info = resolve(&mut self.slots, &row, self.vocab, self.limits.context);
            if info.live && !self.claim(&info) {
                self.slots[info.slot].fault = landed_flags::OUT_OF_RANGE;
                info = RowInfo { slot: info.slot, ..RowInfo::default() };
            }
            if let Some(before) = self.infos.last().filter(|before| info.follows(before)) {
                info.back = before.back + 1;
            }
            if row.flags & (row_flags::HEAD | row_flags::SAMPLE | row_flags::SCORE) != 0 {
                self.heads.push(r as u32);
            }
            match self.groups.last_mut() {
                Some(group)
                    if info.live && info.back > 0 && group.first + group.rows == r && group.rows < GROUP_ROWS =>
                {
                    group.rows += 1;
                }
                _ if info.live => self.groups.push(RowGroup { first: r, rows: 1 }),
                _ => {}
            }
            self.infos.push(info);
        }
        for r in (1..self.infos.len()).rev() {
            if self.infos[r].back > 0 {
                self.infos[r - 1].ahead = self.infos[r].ahead + 1;
            }
        }
        if self.heads.len() > self.limits.heads.min(key.heads as usize) {
            return Err(DeviceError::UnknownStep { key: format!("{key} over {} head rows", self.heads.len()) });
        }
        Ok(())
    }

    /// Takes the row's place in the KV pool for this step. Rows run in parallel, and what is written there must be one
    /// row's: `false` where the pool has no such block, where another sequence writes to it, or where the rows of the
    /// sequence do not stand together in order of position, so that two of them might be the same.
    fn claim(&mut self, info: &RowInfo) -> bool {
        let slot = &mut self.slots[info.slot];
        let first = std::mem::replace(&mut slot.claimed, self.begun) != self.begun;
        if !first && !self.infos.last().is_some_and(|before| info.follows(before)) {
            return false;
        }
        let writer = (self.begun, info.slot as u16);
        let Some(last) = self.writers.get_mut(slot.blocks[info.pos as usize / BLOCK_TOKENS] as usize) else {
            return false;
        };
        let free = last.0 != self.begun || *last == writer;
        *last = writer;
        free
    }

    pub fn infos(&self) -> &[RowInfo] {
        &self.infos
    }

    /// The token after a live row: the next row's, or what the table says follows; `None` where that is no token.
    pub fn next_token(&self, r: usize) -> Option<u32> {
        let token = if self.infos[r].ahead > 0 { self.infos[r + 1].token } else { self.rows[r].target };
        (self.infos[r].live && (token as usize) < self.vocab).then_some(token)
    }

    pub fn groups(&self) -> &[RowGroup] {
        &self.groups
    }

    /// Row index of each head row.
    pub fn heads(&self) -> &[u32] {
        &self.heads
    }

    pub fn blocks(&self, slot: usize) -> &[u32] {
        &self.slots[slot].blocks
    }

    fn elapsed_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// After a `Forward` part: keeps the logits for the host.
    pub fn keep(&mut self, logits: &[f32]) {
        if self.part == Part::Forward {
            self.kept.clear();
            self.kept.extend_from_slice(&logits[..self.heads.len() * self.vocab]);
            self.fetched.clear();
        }
    }

    pub fn stamp_forward(&mut self) {
        self.now.sample_ns = self.elapsed_ns();
    }

    pub fn fetch(&mut self, heads: &[u32]) {
        self.fetched.clear();
        self.fetched.extend_from_slice(heads);
    }

    pub fn fetched(&self, idx: usize) -> Option<&[f32]> {
        let head = *self.fetched.get(idx)? as usize;
        self.kept.get(head * self.vocab..(head + 1) * self.vocab)
    }

    /// Draws or scores every head row into the ring entry of the step. `logits`: `[heads, vocab]`.
    pub fn sample(&mut self, team: &mut super::Team, logits: &[f32]) {
        self.stamp_forward();
        let entry = (self.step + 1) as usize % self.ring.len();
        let n = self.heads.len();
        let tasks = self.samplers.len().min(n);
        let landed = super::buf::Shared::new(&mut self.ring[entry]);
        let samplers = super::buf::Shared::new(&mut self.samplers);
        let (slots, heads, rows, infos, vocab) = (&self.slots, &self.heads, &self.rows, &self.infos, self.vocab);
        team.run(tasks, &|task, _| {
            // SAFETY: task `task` has this scratch and the head rows congruent to it for itself.
            let scratch = unsafe { &mut samplers.slice_mut(task, 1)[0] };
            for h in (task..n).step_by(tasks) {
                let r = heads[h] as usize;
                let logits = &logits[h * vocab..(h + 1) * vocab];
                // SAFETY: as above.
                let landed = unsafe { &mut landed.slice_mut(h, 1)[0] };
                *landed = land(&slots[infos[r].slot], &rows[r], infos[r], logits, scratch);
            }
        });
    }

    /// Moves positions past the step's rows, decides what ended, and publishes the step.
    pub fn commit(&mut self) {
        let entry = (self.step + 1) as usize % self.ring.len();
        for (h, &r) in self.heads.iter().enumerate() {
            let row = &self.rows[r as usize];
            if row.flags & row_flags::SAMPLE != 0 {
                self.slots[usize::from(row.slot)].emit(&mut self.ring[entry][h]);
            }
        }
        for (row, info) in self.rows.iter().zip(&self.infos) {
            if info.live {
                self.slots[usize::from(row.slot)].pos += 1;
            }
        }
        self.now.commit_ns = self.elapsed_ns();
        self.ring_clocks[entry] = self.now;
        self.step += 1;
    }

    pub fn read_to(&mut self, step: u64) {
        self.read = self.read.max(step.min(self.step));
    }

    pub fn landed_steps(&self) -> u64 {
        self.step
    }

    pub fn landed(&self, step: u64, head_idx: usize) -> Landed {
        self.ring[step as usize % self.ring.len()][head_idx]
    }

    pub fn clocks(&self, step: u64) -> StepClocks {
        self.ring_clocks[step as usize % self.ring.len()]
    }
}

/// Bytes of the samplers' scratch, one a thread: see [`Scratch::new`].
pub(super) fn sampler_bytes(limits: &Limits, vocab: usize, threads: usize) -> u64 {
    (threads * (28 * vocab + 4 * limits.context)) as u64
}

/// What a row stands for; a row out of range makes its slot fault and is not live.
fn resolve(slots: &mut [Slot], row: &Row, vocab: usize, context: usize) -> RowInfo {
    let index = usize::from(row.slot);
    let inert = RowInfo { slot: index.min(slots.len() - 1), ..RowInfo::default() };
    if row.flags & row_flags::PADDING != 0 || index >= slots.len() {
        return inert;
    }
    let slot = &mut slots[index];
    if !slot.active || slot.fault != 0 {
        return inert;
    }
    let pos = slot.pos.saturating_add(row.offset);
    let token = if row.token == TOKEN_OF_SLOT { slot.token } else { row.token };
    let held = slot.blocks.len() * BLOCK_TOKENS;
    if token as usize >= vocab || pos as usize >= context.min(held) {
        slot.fault = landed_flags::OUT_OF_RANGE;
        return inert;
    }
    RowInfo { live: true, slot: index, pos, token, ..RowInfo::default() }
}

/// A head row's entry, before `emit` decides whether it ended.
fn land(slot: &Slot, row: &Row, info: RowInfo, logits: &[f32], scratch: &mut Scratch) -> Landed {
    let mut landed = Landed { slot: u32::from(row.slot), generation: slot.generation, ..Landed::default() };
    if slot.fault != 0 && slot.active {
        landed.flags = slot.fault;
        return landed;
    }
    if !info.live {
        landed.flags = landed_flags::INERT;
        return landed;
    }
    if row.flags & row_flags::SCORE != 0 {
        match logprobs_row(logits, row.target, slot.prompt_top, scratch) {
            Ok(logprob) => {
                landed.flags = landed_flags::SCORED;
                landed.logprob = logprob;
                put_top(&mut landed, scratch);
            }
            Err(fault) => landed.flags = fault.landed_flag() | landed_flags::SCORED,
        }
    }
    if row.flags & row_flags::SAMPLE != 0 {
        draw(slot, logits, scratch, &mut landed);
    }
    landed
}

fn draw(slot: &Slot, logits: &[f32], scratch: &mut Scratch, landed: &mut Landed) {
    if let Some(forced) = slot.forced {
        if forced.fault != 0 {
            landed.flags |= forced.fault;
            return;
        }
        (landed.n_tokens, landed.tokens[0]) = (1, forced.token);
        if let Some(top) = slot.logprobs {
            match logprobs_row(logits, forced.token, top, scratch) {
                Ok(logprob) => {
                    landed.logprob = logprob;
                    put_top(landed, scratch);
                }
                Err(fault) => landed.flags |= fault.landed_flag(),
            }
        }
        return;
    }
    let inputs = RowInputs {
        bias: &slot.bias,
        grammar: slot.mask.as_deref(),
        stop_ids: &slot.stop_ids,
        seen: slot.seen.as_ref().map_or(&[], SeenTokens::tokens),
        dry: slot.dry.as_ref().map(|(table, history)| DryInputs { table, history }),
        logprobs: slot.logprobs,
    };
    let params = slot.params.as_ref().expect("an active slot was admitted with parameters");
    let sampled = sample_row(logits, params, &inputs, slot.n_out, scratch);
    match sampled.token {
        Ok(token) => {
            (landed.n_tokens, landed.tokens[0]) = (1, token);
            if slot.logprobs.is_some() {
                landed.logprob = sampled.logprob;
                put_top(landed, scratch);
            }
        }
        Err(fault) => landed.flags |= fault.landed_flag(),
    }
}

fn put_top(landed: &mut Landed, scratch: &Scratch) {
    let top = scratch.top();
    landed.n_top = top.len() as u32;
    for (i, entry) in top.iter().enumerate() {
        landed.top_ids[i] = entry.id;
        landed.top_logprobs[i] = entry.logprob;
    }
}

impl Slot {
    fn admit(&mut self, init: &SlotInit, vocab: usize, context: usize) {
        let params = SamplerParams::new(&init.sampling);
        let dry = init.sampling.dry.as_ref().and_then(DryTable::new);
        let mut history = Vec::new();
        if dry.is_some() {
            history.reserve(context);
            history.extend_from_slice(&init.penalty_prompt);
        }
        let spare = self.seen.take().or_else(|| self.spare_seen.take());
        let (seen, spare_seen) = if params.reads_seen() {
            let mut seen = spare.unwrap_or_else(|| SeenTokens::new(vocab, &[], context));
            seen.restart(&init.penalty_prompt);
            (Some(seen), None)
        } else {
            (None, spare)
        };
        *self = Slot {
            active: true,
            generation: init.generation,
            pos: init.pos,
            max_out: init.max_out,
            ignore_stop: init.flags & slot_flags::IGNORE_STOP != 0,
            stop_ids: init.stop_ids.clone(),
            blocks: init.blocks.clone(),
            seen,
            spare_seen,
            params: Some(params),
            bias: init.sampling.bias.clone(),
            dry: dry.map(|table| (table, history)),
            logprobs: init.logprobs,
            prompt_top: init.prompt_top,
            ..Slot::default()
        };
    }

    /// Takes the row's token into the sequence and notes in `landed` whether that ends it.
    fn emit(&mut self, landed: &mut Landed) {
        self.mask = None;
        self.forced = None;
        if landed.flags & landed_flags::FAULT != 0 {
            self.active = false;
            return;
        }
        if landed.n_tokens == 0 {
            return;
        }
        let token = landed.tokens[0];
        self.token = token;
        self.n_out += 1;
        if let Some(seen) = &mut self.seen {
            seen.push(token);
        }
        if let Some((_, history)) = &mut self.dry {
            history.push(token);
        }
        if !self.ignore_stop && self.stop_ids.contains(&token) {
            landed.flags |= landed_flags::DONE_STOP;
        } else if self.n_out >= self.max_out {
            landed.flags |= landed_flags::DONE_LENGTH;
        }
        if landed.flags & landed_flags::DONE != 0 {
            self.active = false;
        }
    }
}

#[cfg(test)]
mod tests;
