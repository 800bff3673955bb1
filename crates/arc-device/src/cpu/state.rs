//! Slots, row table and ring of the CPU device.

use std::time::Instant;

use super::Wanted;
use crate::count::kv::KvRead;
use crate::error::{DeviceError, Result};
use crate::ops::kv::GROUP_ROWS;
use crate::ops::sample::dry::DryTable;
use crate::ops::sample::seen::SeenTokens;
use crate::ops::sample::{DryInputs, RowInputs, Sampled, SamplerParams, Scratch, logprobs_row, sample_row};
use crate::step::{
    BLOCK_TOKENS, Forced, Landed, Limits, MAX_DRAFTS, Part, Row, SlotInit, StepClocks, StepDelta, StepKey,
    TOKEN_OF_SLOT, landed_flags, row_flags, slot_flags,
};

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

/// What DRY reads.
struct Dry {
    table: DryTable,
    /// Prompt and output, then the slot's drafts.
    history: Vec<u32>,
    /// Entries that are no drafts.
    emitted: usize,
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
    dry: Option<Dry>,
    /// Tokens that may be emitted next, `n_drafts` of them.
    drafts: [u32; MAX_DRAFTS],
    n_drafts: usize,
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
    /// What each row drew, where that counts; made by `sample`.
    drawn: Vec<Option<u32>>,
    /// The draft rows as `infos` and `heads` of a table of their own, and the row of the step that each continues.
    draft_infos: Vec<RowInfo>,
    draft_heads: Vec<u32>,
    draft_from: Vec<u32>,
    /// Whether stages run over the draft rows.
    drafting: bool,
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
            drawn: Vec::with_capacity(limits.rows),
            draft_infos: Vec::with_capacity(limits.heads),
            draft_heads: Vec::with_capacity(limits.heads),
            draft_from: Vec::with_capacity(limits.heads),
            drafting: false,
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
        let rows =
            limits.rows * (size_of::<Row>() + size_of::<RowInfo>() + size_of::<RowGroup>() + size_of::<Option<u32>>());
        let drafts = limits.heads * (size_of::<RowInfo>() + 8);
        let writers = limits.blocks * size_of::<(u64, u16)>();
        (landed + rows + drafts + writers + limits.slots * size_of::<Slot>()) as u64
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
            self.now.kv_bytes = 0;
        }
        self.part = key.part;
        self.begun += 1;
        self.infos.clear();
        self.groups.clear();
        self.heads.clear();
        self.drawn.clear();
        self.drawn.resize(self.rows.len(), None);
        self.drafting = false;
        for r in 0..self.rows.len() {
            let row = self.rows[r];
            let mut info = resolve(&mut self.slots, &row, self.vocab, self.limits.context);
            if info.live && !self.claim(&info) {
                // A draft may be left out. If it is the sequence that goes wrong here, its own row will find out.
                if row.flags & row_flags::VERIFY == 0 {
                    self.slots[info.slot].fault = landed_flags::OUT_OF_RANGE;
                }
                info = RowInfo { slot: info.slot, ..RowInfo::default() };
            }
            if let Some(before) = self.infos.last().filter(|before| info.follows(before)) {
                info.back = before.back + 1;
            }
            if row.flags & row_flags::HEADS != 0 {
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

    /// The rows that stages run over: those of the step, or draft rows.
    pub fn infos(&self) -> &[RowInfo] {
        if self.drafting { &self.draft_infos } else { &self.infos }
    }

    /// The token after a live row: what it drew, the next row's, or what the table says follows; of a draft row, its last
    /// draft. `None` where that is no token.
    pub fn next_token(&self, r: usize) -> Option<u32> {
        let info = self.infos()[r];
        let token = if self.drafting {
            info.token
        } else if let Some(token) = self.drawn[r] {
            token
        } else if info.ahead > 0 {
            self.infos[r + 1].token
        } else {
            self.rows[r].target
        };
        (info.live && (token as usize) < self.vocab).then_some(token)
    }

    pub fn groups(&self) -> &[RowGroup] {
        &self.groups
    }

    /// Row index of each head row.
    pub fn heads(&self) -> &[u32] {
        if self.drafting { &self.draft_heads } else { &self.heads }
    }

    /// The drafts that a slot has.
    pub fn drafts(&self, slot: u16) -> &[u32] {
        let slot = &self.slots[usize::from(slot)];
        &slot.drafts[..slot.n_drafts]
    }

    /// Of each draft row, the row of the step that it continues.
    pub fn draft_from(&self) -> &[u32] {
        &self.draft_from
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

    /// Counts what a stage over the first `rows` rows reads of the KV cache.
    pub fn count_read(&mut self, read: KvRead, rows: usize) {
        let live = self.infos()[..rows].iter().filter(|info| info.live);
        self.now.kv_bytes += live.map(|info| read.of(info.pos, info.back, info.ahead)).sum::<u64>();
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
        self.settle();
    }

    /// Emits the draws that count.
    fn settle(&mut self) {
        let entry = (self.step + 1) as usize % self.ring.len();
        let mut h = 0;
        while h < self.heads.len() {
            let r = self.heads[h] as usize;
            let row = self.rows[r];
            let follows = |&(&other, at): &(&u32, usize)| {
                let verify = self.rows[other as usize];
                other as usize == at && verify.slot == row.slot && verify.flags & row_flags::VERIFY != 0
            };
            let verify = self.heads[h + 1..].iter().zip(r + 1..).take_while(follows).count();
            if row.flags & row_flags::SAMPLE != 0 {
                let landed = &mut self.ring[entry][h..=h + verify];
                self.slots[usize::from(row.slot)].settle(landed, &mut self.drawn[r..=r + verify]);
            }
            h += 1 + verify;
        }
    }

    /// Makes the draft rows the table, padded to `rows`.
    pub fn begin_drafts(&mut self, rows: usize) {
        self.draft_infos.clear();
        self.draft_heads.clear();
        self.draft_from.clear();
        for (r, row) in self.rows.iter().enumerate().filter(|(_, row)| row.flags & row_flags::PROPOSE != 0) {
            let counted = self.drawn[r..]
                .iter()
                .zip(&self.rows[r..])
                .take_while(|(drawn, other)| drawn.is_some() && other.slot == row.slot);
            let last = r + counted.count().saturating_sub(1);
            let info = self.infos[last];
            let live = self.drawn[r].is_some() && self.slots[info.slot].active;
            self.draft_heads.push(self.draft_infos.len() as u32);
            self.draft_infos.push(RowInfo { live, slot: info.slot, pos: info.pos, ..RowInfo::default() });
            self.draft_from.push(last as u32);
        }
        assert!(self.draft_infos.len() <= rows, "{} draft rows, the key has {rows}", self.draft_infos.len());
        self.draft_infos.resize(rows, RowInfo::default());
        self.drafting = true;
    }

    /// Draws a draft for every draft row. `logits`: `[draft rows, vocab]`.
    pub fn sample_drafts(&mut self, team: &mut super::Team, logits: &[f32]) {
        let n = self.draft_heads.len();
        let tasks = self.samplers.len().min(n);
        let samplers = super::buf::Shared::new(&mut self.samplers);
        let drawn = super::buf::Shared::new(&mut self.draft_infos);
        let (slots, vocab) = (&self.slots, self.vocab);
        team.run(tasks, &|task, _| {
            // SAFETY: task `task` has this scratch and the draft rows congruent to it for itself.
            let scratch = unsafe { &mut samplers.slice_mut(task, 1)[0] };
            for i in (task..n).step_by(tasks) {
                // SAFETY: as above.
                let info = unsafe { &mut drawn.slice_mut(i, 1)[0] };
                let slot = &slots[info.slot];
                let logits = &logits[i * vocab..(i + 1) * vocab];
                let token = (info.live && slot.takes_draft()).then(|| slot.draw(logits, slot.n_drafts, None, scratch));
                match token.map(|sampled| sampled.token) {
                    Some(Ok(token)) => info.token = token,
                    _ => info.live = false,
                }
            }
        });
        for info in self.draft_infos.iter_mut().filter(|info| info.live) {
            self.slots[info.slot].push_draft(info.token);
            info.pos += 1;
            info.live = (info.pos as usize) < self.limits.context;
        }
    }

    /// Asks for drafts from outside.
    pub fn propose(&mut self, drafts: usize, next: &mut dyn FnMut(Wanted<'_>) -> Option<u32>) {
        for row in self.rows.iter().filter(|row| row.flags & row_flags::PROPOSE != 0) {
            let slot = &mut self.slots[usize::from(row.slot)];
            while slot.active && slot.n_drafts < drafts && slot.takes_draft() {
                let drafts = &slot.drafts[..slot.n_drafts];
                let wanted = Wanted { slot: row.slot, generation: slot.generation, n_out: slot.n_out, drafts };
                let Some(token) = next(wanted) else { break };
                slot.push_draft(token);
            }
        }
    }

    /// Moves positions past the step's rows, decides what ended, and publishes the step.
    pub fn commit(&mut self) {
        let entry = (self.step + 1) as usize % self.ring.len();
        for ((row, info), drawn) in self.rows.iter().zip(&self.infos).zip(&self.drawn) {
            if info.live && (row.flags & row_flags::DRAWS == 0 || drawn.is_some()) {
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
    let verifies = row.flags & row_flags::VERIFY != 0;
    let token = match row.token {
        _ if verifies => match slot.draft(row.offset) {
            Some(draft) => draft,
            None => return inert,
        },
        TOKEN_OF_SLOT => slot.token,
        token => token,
    };
    let held = slot.blocks.len() * BLOCK_TOKENS;
    if token as usize >= vocab || pos as usize >= context.min(held) {
        if !verifies {
            slot.fault = landed_flags::OUT_OF_RANGE;
        }
        return inert;
    }
    RowInfo { live: true, slot: index, pos, token, ..RowInfo::default() }
}

/// A head row's entry, before `emit` decides whether it ended.
fn land(slot: &Slot, row: &Row, info: RowInfo, logits: &[f32], scratch: &mut Scratch) -> Landed {
    let mut landed = Landed { slot: u32::from(row.slot), generation: slot.generation, ..Landed::default() };
    if row.flags & row_flags::VERIFY != 0 {
        landed.flags = landed_flags::VERIFIED;
    }
    if slot.fault != 0 && slot.active {
        landed.flags |= slot.fault;
        return landed;
    }
    if !info.live {
        landed.flags |= landed_flags::INERT;
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
    if row.flags & row_flags::DRAWS != 0 {
        let drafts = if row.flags & row_flags::VERIFY != 0 { row.offset as usize } else { 0 };
        draw(slot, drafts, logits, scratch, &mut landed);
    }
    landed
}

/// Draws as if the slot's first `drafts` drafts had been emitted.
fn draw(slot: &Slot, drafts: usize, logits: &[f32], scratch: &mut Scratch, landed: &mut Landed) {
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
    let sampled = slot.draw(logits, drafts, slot.logprobs, scratch);
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
        let dry = init.sampling.dry.as_ref().and_then(DryTable::new).map(|table| {
            let mut history = Vec::with_capacity(context);
            history.extend_from_slice(&init.penalty_prompt);
            Dry { table, emitted: history.len(), history }
        });
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
            dry,
            logprobs: init.logprobs,
            prompt_top: init.prompt_top,
            ..Slot::default()
        };
    }

    /// Draft `j`, counted from 1, where the slot has one and may emit a token after it.
    fn draft(&self, j: u32) -> Option<u32> {
        let within = j >= 1 && j as usize <= self.n_drafts && self.n_out.saturating_add(j) < self.max_out;
        within.then(|| self.drafts[j as usize - 1])
    }

    /// Whether another draft could be of use.
    fn takes_draft(&self) -> bool {
        self.n_drafts < MAX_DRAFTS && self.n_out + (self.n_drafts as u32) < self.max_out
    }

    fn push_draft(&mut self, token: u32) {
        self.drafts[self.n_drafts] = token;
        self.n_drafts += 1;
        if let Some(dry) = &mut self.dry {
            dry.history.push(token);
        }
    }

    /// Draws as if the first `drafts` drafts had been emitted.
    fn draw(&self, logits: &[f32], drafts: usize, logprobs: Option<u32>, scratch: &mut Scratch) -> Sampled {
        let history = |dry: &'_ Dry| dry.emitted + drafts;
        let inputs = RowInputs {
            bias: &self.bias,
            grammar: self.mask.as_deref(),
            stop_ids: &self.stop_ids,
            seen: self.seen.as_ref().map_or(&[], SeenTokens::tokens),
            drafts: &self.drafts[..drafts],
            dry: self.dry.as_ref().map(|dry| DryInputs { table: &dry.table, history: &dry.history[..history(dry)] }),
            logprobs,
        };
        let params = self.params.as_ref().expect("an active slot was admitted with parameters");
        sample_row(logits, params, &inputs, self.n_out + drafts as u32, scratch)
    }

    /// Emits the draws that count: the first row's and, while they equal the drafts, those of the rows that verify.
    /// `landed` and `drawn` are of these rows; the tokens join the first entry, with what ended the sequence.
    fn settle(&mut self, landed: &mut [Landed], drawn: &mut [Option<u32>]) {
        self.mask = None;
        self.forced = None;
        let (first, verify) = landed.split_first_mut().expect("a row that draws");
        let mut draw = *first;
        first.n_tokens = 0;
        for (j, drawn) in drawn.iter_mut().enumerate() {
            first.flags |= draw.flags & landed_flags::FAULT;
            if first.flags & landed_flags::FAULT != 0 {
                self.active = false;
                break;
            }
            if draw.n_tokens == 0 {
                break;
            }
            let token = draw.tokens[0];
            (first.n_tokens, first.tokens[j]) = (j as u32 + 1, token);
            *drawn = Some(token);
            first.flags |= self.emit(token);
            if !self.active || self.drafts[..self.n_drafts].get(j) != Some(&token) {
                break;
            }
            let Some(next) = verify.get(j) else { break };
            draw = *next;
        }
        self.n_drafts = 0;
        for landed in verify {
            landed.n_tokens = 0;
            landed.flags &= landed_flags::VERIFIED | landed_flags::INERT;
        }
    }

    /// Takes a token into the sequence, and says whether that ends it.
    fn emit(&mut self, token: u32) -> u32 {
        self.token = token;
        self.n_out += 1;
        if let Some(seen) = &mut self.seen {
            seen.push(token);
        }
        if let Some(dry) = &mut self.dry {
            dry.history.truncate(dry.emitted);
            dry.history.push(token);
            dry.emitted += 1;
        }
        let done = if !self.ignore_stop && self.stop_ids.contains(&token) {
            landed_flags::DONE_STOP
        } else if self.n_out >= self.max_out {
            landed_flags::DONE_LENGTH
        } else {
            0
        };
        self.active = done == 0;
        done
    }
}

#[cfg(test)]
mod tests;
