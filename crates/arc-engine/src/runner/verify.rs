//! A recorded step against the same step run eagerly, bit for bit: what lands, the logits of its heads, and the logits of
//! a row that comes after it and reads what it wrote.

use arc_device::error::{DeviceError, Fault, Result};
use arc_device::ops::sample::SamplerConfig;
use arc_device::step::{
    BLOCK_TOKENS, CtxClass, Limits, Part, Row, SlotInit, StepDelta, StepKey, TOKEN_OF_SLOT, row_flags,
};
use arc_device::{DeviceLoop, Landing, Steps, StreamState};

use super::Runner;

/// Steps of a key, one after the other: the second verifies what the first drafted.
const STEPS: usize = 2;
/// Rows of logits that are looked at.
const LOGITS: u32 = 8;

/// What a step left, printed: NaN equals NaN, and other numbers are equal where their bits are.
type Left = Vec<String>;

impl<D: Steps> Runner<D> {
    /// Runs the step of every key eagerly and replayed, from the same state and over rows that are made up. After
    /// warm-up, before a sequence is admitted. `limits`: the device's; `vocab`: the model's. Errors: the first key with two
    /// results.
    pub fn verify_replay(&mut self, keys: &[StepKey], limits: &Limits, vocab: u32) -> Result<()> {
        for &key in keys {
            let made_up = MadeUp::new(key, limits, vocab);
            let replayed = self.run(key, &made_up, true)?;
            let eager = self.run(key, &made_up, false)?;
            if let Some((eager, replayed)) = eager.iter().zip(&replayed).find(|(eager, replayed)| eager != replayed) {
                return Err(DeviceError::Replay {
                    key: key.to_string(),
                    eager: eager.clone(),
                    replayed: replayed.clone(),
                });
            }
        }
        let release = (0..limits.slots as u16).collect();
        self.stage(&StepDelta { release, ..StepDelta::default() })
    }

    fn run(&mut self, key: StepKey, made_up: &MadeUp, replay: bool) -> Result<Left> {
        let mut left = Left::new();
        for step in 0..STEPS {
            let admit = if step == 0 { made_up.admit.clone() } else { Vec::new() };
            let rows = Some(made_up.rows.clone());
            self.stage(&StepDelta { admit, rows, ..StepDelta::default() })?;
            if key.part != Part::Whole {
                self.part(StepKey { part: Part::Forward, ..key }.drafting(0, 0), replay && key.part == Part::Forward)?;
                self.logits(made_up.heads.min(LOGITS), &mut left)?;
            }
            if key.part != Part::Forward {
                self.part(key, replay)?;
            } else {
                self.part(StepKey { part: Part::Sample, ..key }, false)?;
            }
            left.extend((0..made_up.heads as usize).map(|h| self.landed(self.head(), h).told()));
        }
        // Reads what the steps wrote.
        let probe = Row { flags: row_flags::HEAD, token: 1, ..Row::default() };
        self.stage(&StepDelta { rows: Some(vec![probe]), ..StepDelta::default() })?;
        let key = |part| StepKey::new(1, 1, key.ctx, part);
        self.part(key(Part::Forward), false)?;
        self.logits(1, &mut left)?;
        self.part(key(Part::Sample), false)?;
        Ok(left)
    }

    /// Runs a part of a step to its end.
    fn part(&mut self, key: StepKey, replay: bool) -> Result<()> {
        let before = self.dev.set_replay(replay);
        let step = self.enqueue(key);
        self.dev.set_replay(before);
        let step = step?;
        while key.part != Part::Forward && self.head() < step {
            if self.poll()? == StreamState::Idle && self.head() < step {
                return Err(DeviceError::Fault(Fault::LostStep { enqueued: step, landed: self.head() }));
            }
        }
        self.read_to(self.head());
        Ok(())
    }

    /// Notes the logits of the first `n` head rows.
    fn logits(&mut self, n: u32, left: &mut Left) -> Result<()> {
        self.fetch_rows(&(0..n).collect::<Vec<_>>())?;
        while (0..n as usize).any(|h| self.fetched(h).is_none()) && self.poll()? != StreamState::Idle {}
        for h in 0..n as usize {
            let row = self.fetched(h).expect("an idle stream has copied them");
            // A sum that no two rows share by chance stands for a row of a hundred thousand.
            let hash = row.iter().fold(0u64, |hash, x| (hash ^ u64::from(x.to_bits())).wrapping_mul(0x100_0000_01b3));
            left.push(format!("logits {hash:016x}, from {:?}", &row[..row.len().min(4)]));
        }
        Ok(())
    }
}

/// Sequences and rows that fill a step of a key.
struct MadeUp {
    admit: Vec<SlotInit>,
    rows: Vec<Row>,
    heads: u32,
}

impl MadeUp {
    /// Sequences that decode, ask for drafts and verify them; of slot 0, in a context of the key's class where there is
    /// room for one, the rows that are left: a chunk, where nothing is drafted.
    fn new(key: StepKey, limits: &Limits, vocab: u32) -> MadeUp {
        let (n, heads) = (key.rows as usize, key.heads as usize);
        let drafts = if key.draft_rows > 0 { key.drafts as usize } else { 0 };
        let mut made_up = MadeUp { admit: Vec::new(), rows: Vec::new(), heads: 0 };
        let others = limits.slots.min(limits.blocks).min(heads).saturating_sub(1);
        for slot in 1..=others {
            // Slot 0 has a row too.
            if made_up.rows.len() + 1 + drafts >= n || made_up.heads as usize + 1 + drafts >= heads {
                break;
            }
            let block = (limits.blocks - slot) as u32;
            made_up.admit.push(admission(slot, vec![block], 3 + slot as u32 % 5, drafts));
            made_up.decode(slot, drafts, slot < key.draft_rows as usize);
        }
        let rest = n - made_up.rows.len();
        let room = limits.context.min((limits.blocks - made_up.admit.len()) * BLOCK_TOKENS);
        let room = room.min(key.ctx.limit() as usize);
        let far = match key.ctx {
            CtxClass::Short => 0,
            CtxClass::Medium => CtxClass::Short.limit() as usize,
            CtxClass::Long => CtxClass::Medium.limit() as usize,
        };
        // Both steps and the row that reads.
        let pos = if far + STEPS * rest < room { far } else { 0 };
        let rest = rest.min((room - 1) / STEPS);
        let blocks = (0..Limits::blocks_for(pos + STEPS * rest + 1) as u32).collect();
        made_up.admit.push(admission(0, blocks, pos as u32, drafts));
        if drafts > 0 {
            let verify = drafts.min(rest - 1).min(heads - 1 - made_up.heads as usize);
            made_up.decode(0, verify, true);
        } else {
            let token = |i: usize| (i as u32).wrapping_mul(2_654_435_761) % vocab;
            let flags = |i| if i + 1 == rest && heads > 0 { SAMPLE } else { 0 };
            let row = |i| Row { slot: 0, flags: flags(i), offset: i as u32, token: token(i), target: token(i + 1) };
            made_up.rows.extend((0..rest).map(row));
            made_up.heads += u32::from(heads > 0);
        }
        made_up.rows.resize(n, Row { flags: row_flags::PADDING, ..Row::default() });
        made_up
    }

    /// A row that decodes, and those that verify behind it.
    fn decode(&mut self, slot: usize, verify: usize, asks: bool) {
        let asks = if asks { row_flags::PROPOSE } else { 0 };
        let row = Row { slot: slot as u16, flags: SAMPLE | asks, token: TOKEN_OF_SLOT, ..Row::default() };
        let flags = row_flags::HEAD | row_flags::VERIFY;
        self.rows.push(row);
        self.rows.extend((1..=verify).map(|j| Row { flags, offset: j as u32, ..row }));
        self.heads += 1 + verify as u32;
    }
}

const SAMPLE: u16 = row_flags::HEAD | row_flags::SAMPLE;

fn admission(slot: usize, blocks: Vec<u32>, pos: u32, drafts: usize) -> SlotInit {
    let temperature = if slot.is_multiple_of(2) { 0.0 } else { 1.0 };
    SlotInit {
        slot: slot as u16,
        generation: 1,
        max_out: u32::MAX,
        flags: 0,
        stop_ids: Vec::new(),
        sampling: SamplerConfig { temperature, seed: slot as u64, ..SamplerConfig::default() },
        blocks,
        penalty_prompt: Vec::new(),
        pos,
        // A sequence with logprobs is not drafted for.
        logprobs: (drafts == 0).then_some(4),
        prompt_top: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some kernels take no position beyond their key's class: neither both steps nor the row that reads may have one.
    #[test]
    fn positions_are_of_the_class() {
        let limits = Limits { slots: 16, rows: 2048, heads: 32, context: 200_000, blocks: 16 * 6250, ring: 32 };
        for ctx in [CtxClass::Short, CtxClass::Medium, CtxClass::Long] {
            for rows in [1, 16, 1023, 1024, 1536, 2048] {
                let made_up = MadeUp::new(StepKey::new(rows, rows.min(16), ctx, Part::Whole), &limits, 1000);
                let first = made_up.admit.last().expect("slot 0").pos;
                let own =
                    made_up.rows.iter().filter(|row| row.slot == 0 && row.flags & row_flags::PADDING == 0).count();
                let read = first as usize + STEPS * own;
                assert!(own > 0 && read < ctx.limit() as usize, "{rows} rows, {ctx:?}: {read}");
                let far = CtxClass::of(first + 1) == ctx;
                assert!(far || ctx != CtxClass::Long, "{rows} rows, {ctx:?}: begins at {first}");
            }
        }
    }
}
