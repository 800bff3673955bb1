mod speculation;

use super::State;
use crate::ops::sample::SamplerConfig;
use crate::step::{BLOCK_TOKENS, CtxClass, Limits, Part, Row, SlotInit, StepDelta, StepKey, landed_flags, row_flags};

const LIMITS: Limits = Limits { slots: 4, rows: 8, heads: 8, context: 64, blocks: 6, ring: 2 };

fn admit(slot: u16, pos: u32, blocks: &[u32]) -> SlotInit {
    SlotInit {
        slot,
        generation: 1,
        max_out: 8,
        flags: 0,
        stop_ids: Vec::new(),
        sampling: SamplerConfig::default(),
        blocks: blocks.to_vec(),
        penalty_prompt: Vec::new(),
        pos,
        logprobs: None,
        prompt_top: 0,
    }
}

fn row(slot: u16, offset: u32) -> Row {
    Row { slot, flags: row_flags::HEAD, offset, token: 1, target: 0 }
}

/// Which rows run, and which slots are at fault, when these rows are a step of sequences with these blocks.
fn resolve(admit: Vec<SlotInit>, rows: Vec<Row>) -> (Vec<bool>, Vec<usize>) {
    let mut state = State::new(&LIMITS);
    state.vocab = 8;
    let key = StepKey::new(rows.len() as u32, 8, CtxClass::Short, Part::Whole);
    state.stage(&StepDelta { admit, rows: Some(rows), ..StepDelta::default() });
    state.begin(key).expect("a table of its length");
    let once = state.infos().iter().map(|info| info.live).collect::<Vec<_>>();
    // A step in two parts resolves its table twice.
    state.begin(key).expect("a table of its length");
    let faults = (0..LIMITS.slots).filter(|&slot| state.slots[slot].fault == landed_flags::OUT_OF_RANGE).collect();
    if state.slots.iter().all(|slot| slot.fault == 0) {
        assert!(once.iter().eq(state.infos().iter().map(|info| &info.live)));
    }
    (once, faults)
}

/// Rows run in parallel, so no two may write to one place: whoever fills in the table, this is where it is seen to.
#[test]
fn no_two_rows_of_a_step_write_to_one_place() {
    let two = || vec![admit(0, 0, &[0, 1]), admit(1, 0, &[2, 3])];
    let chunk = vec![row(0, 0), row(0, 1), row(1, 0), row(1, 1)];
    assert_eq!(resolve(two(), chunk), (vec![true; 4], vec![]), "two chunks");
    let twice = vec![row(0, 0), row(0, 0), row(1, 0)];
    assert_eq!(resolve(two(), twice), (vec![true, false, true], vec![0]), "a position twice");
    let apart = vec![row(0, 0), row(1, 0), row(0, 1)];
    assert_eq!(resolve(two(), apart), (vec![true, true, false], vec![0]), "rows of a sequence that stand apart");
    let shared = vec![admit(0, 0, &[0, 1]), admit(1, 0, &[0, 3])];
    let rows = vec![row(0, 0), row(1, 0)];
    assert_eq!(resolve(shared, rows.clone()), (vec![true, false], vec![1]), "a block of two sequences");
    let tokens = BLOCK_TOKENS as u32;
    let prefix = vec![admit(0, tokens, &[0, 1]), admit(1, tokens, &[0, 3])];
    assert_eq!(resolve(prefix, rows), (vec![true; 2], vec![]), "a block that both only read");
    let past = vec![admit(0, 0, &[6]), admit(1, 0, &[u32::MAX]), admit(2, 0, &[5])];
    let rows = vec![row(0, 0), row(1, 0), row(2, 0)];
    assert_eq!(resolve(past, rows), (vec![false, false, true], vec![0, 1]), "blocks that the pool has not");
}

#[test]
fn the_last_position_of_the_context_runs_and_the_next_is_at_fault() {
    let full = || vec![admit(0, 63, &[0, 1])];
    assert_eq!(resolve(full(), vec![row(0, 0)]), (vec![true], vec![]));
    assert_eq!(resolve(full(), vec![row(0, 0), row(0, 1)]), (vec![true, false], vec![0]));
    assert_eq!(resolve(full(), vec![row(0, u32::MAX)]), (vec![false], vec![0]));
    let short = vec![admit(0, 31, &[0])];
    assert_eq!(resolve(short, vec![row(0, 0), row(0, 1)]), (vec![true, false], vec![0]), "past its own blocks");
    let strange = vec![row(9, 0), Row { flags: row_flags::PADDING, ..row(0, 0) }];
    assert_eq!(resolve(full(), strange), (vec![false; 2], vec![]), "no slot, and padding");
}

#[test]
fn a_step_in_two_parts_keeps_its_logits_without_allocating() {
    let mut state = State::new(&LIMITS);
    state.set_vocab(8, 1);
    let room = state.kept.capacity();
    let rows = (0..LIMITS.heads as u32).map(|offset| row(0, offset)).collect();
    state.stage(&StepDelta { admit: vec![admit(0, 0, &[0, 1])], rows: Some(rows), ..StepDelta::default() });
    let key = StepKey::new(8, 8, CtxClass::Short, Part::Forward);
    state.begin(key).expect("a table of its length");
    let logits: Vec<f32> = (0..64).map(|i| i as f32).collect();
    state.keep(&logits);
    state.fetch(&[7, 0, 8]);
    assert_eq!(state.fetched(0), Some(&logits[56..]));
    assert_eq!(state.fetched(1), Some(&logits[..8]));
    assert_eq!((state.fetched(2), state.fetched(3)), (None, None), "a head that the step has not, and no row");
    assert_eq!(state.kept.capacity(), room);
}
