//! Plans as plain data: what a step holds, row by row.

use super::*;

fn limits() -> Limits {
    Limits { slots: 4, rows: 32, heads: 6, context: 4096, blocks: 200, ring: 16 }
}

fn scheduler(limits: Limits, buckets: Buckets) -> Scheduler {
    speculating(limits, buckets, Speculate::Off)
}

fn speculating(limits: Limits, buckets: Buckets, speculate: Speculate) -> Scheduler {
    Scheduler::new(config(limits, buckets, speculate))
}

fn config(limits: Limits, buckets: Buckets, speculate: Speculate) -> SchedulerConfig {
    let prefixes = Prefixes::Off;
    SchedulerConfig { limits, buckets, burst: 8, mixed_step_us: 2_050.0, speculate, max_drafts: 4, prefixes }
}

fn want(len: u32, max_out: u32) -> Want {
    Want { prompt: (100..100 + len).collect(), max_out, score: false, two_part: false, speculates: true, depth: 0 }
}

/// `(slot, offset, token, flags)` of each row.
fn table(plan: &StepPlan) -> Vec<(u16, u32, u32, u16)> {
    plan.rows.iter().map(|r| (r.slot, r.offset, r.token, r.flags)).collect()
}

const DRAW: u16 = row_flags::HEAD | row_flags::SAMPLE;
const SCORE: u16 = row_flags::HEAD | row_flags::SCORE;

#[test]
fn a_prompt_runs_in_chunks_and_its_last_row_draws() {
    let mut s = scheduler(Limits { rows: 4, ..limits() }, Buckets::Exact);
    let mut plan = StepPlan::default();
    s.admit(want(6, 3)).expect("room");
    let key = s.plan(&mut plan).expect("a chunk");
    assert_eq!(table(&plan), [(0, 0, 100, 0), (0, 1, 101, 0), (0, 2, 102, 0), (0, 3, 103, 0)]);
    assert_eq!((key.rows, key.heads, key.part), (4, 0, Part::Whole));
    let key = s.plan(&mut plan).expect("the rest");
    assert_eq!(table(&plan), [(0, 0, 104, 0), (0, 1, 105, DRAW)]);
    assert_eq!((key.rows, key.heads, plan.context, plan.prompt_rows), (2, 1, 6, 2));
    for context in [7, 8] {
        s.plan(&mut plan).expect("a decode row");
        assert_eq!(table(&plan), [(0, 0, TOKEN_OF_SLOT, DRAW)]);
        assert_eq!((plan.context, plan.prompt_rows), (context, 0));
    }
    assert_eq!(s.plan(&mut plan), None, "three draws are enqueued: its length is reached");
    assert_eq!(s.n_running(), 1, "and it runs until its end has landed");
    s.end(0);
    assert_eq!((s.n_running(), s.blocks().free()), (0, 200));
}

/// Runs a prompt of `tokens` to its end, and keeps `tokens` of it.
fn kept(s: &mut Scheduler, tokens: &[u32]) -> Place {
    let want = Want { prompt: tokens.into(), ..want(1, 100) };
    let place = s.admit(want).expect("room");
    s.keep(place.slot, tokens.to_vec());
    place
}

#[test]
fn a_prompt_goes_on_where_a_kept_sequence_ends() {
    for (prefixes, of_40, of_10) in [(Prefixes::Off, 0, 0), (Prefixes::Whole, 40, 0), (Prefixes::Any, 40, 30)] {
        let mut s = Scheduler::new(SchedulerConfig { prefixes, ..config(limits(), Buckets::Exact, Speculate::Off) });
        let first: Vec<u32> = (0..40).collect();
        let place = kept(&mut s, &first);
        assert_eq!((s.n_running(), s.kept_blocks(), s.blocks().free()), (0, 2, 198), "two hold 40 tokens");
        let longer: Vec<u32> = (0..50).collect();
        let again = s.admit(Want { prompt: longer.into(), ..want(1, 20) }).expect("room");
        assert_eq!((again.depth, again.cached), (of_40, of_40), "{prefixes:?}");
        if of_40 > 0 {
            assert_eq!((again.slot, &again.blocks[..2]), (place.slot, &place.blocks[..2]), "where it was");
            let mut plan = StepPlan::default();
            s.plan(&mut plan).expect("what is new");
            assert_eq!((plan.n_rows, plan.rows[0].token, plan.rows[0].offset, plan.context), (10, 40, 0, 50));
            assert_eq!(s.kept_blocks(), 0);
        }
        s.end(again.slot);
        // A part of it: the rest of the blocks is free at once.
        kept(&mut s, &first);
        let other: Vec<u32> = (0..30).chain(1000..1003).collect();
        let place = s.admit(Want { prompt: other.into(), ..want(1, 5) }).expect("room");
        assert_eq!(place.cached, of_10, "{prefixes:?}");
        s.end(place.slot);
        // The last token of a prompt runs in any case.
        kept(&mut s, &first);
        let same = s.admit(Want { prompt: first.as_slice().into(), ..want(1, 5) }).expect("room");
        assert_eq!(same.cached, if prefixes == Prefixes::Any { 39 } else { 0 });
        s.end(same.slot);
        while let Some(left) = s.kept.pop() {
            s.blocks.release(left.blocks);
        }
        assert_eq!(s.blocks().free(), 200, "all come back");
    }
}

#[test]
fn what_is_kept_gives_way() {
    let limits = Limits { slots: 3, blocks: 10, ..limits() };
    let mut s =
        Scheduler::new(SchedulerConfig { prefixes: Prefixes::Any, ..config(limits, Buckets::Exact, Speculate::Off) });
    let tokens = |of: u32| -> Vec<u32> { (0..64).map(|i| 1000 * of + i).collect() };
    let places = [1, 2, 3].map(|of| kept(&mut s, &tokens(of)));
    assert_eq!((s.admissible_blocks(), s.blocks().free(), s.kept_blocks()), (Some(10), 4, 6));
    assert_eq!(s.admit(want(32 * 11, 1)), None, "more than there is");
    assert_eq!(s.kept_blocks(), 6, "and nothing is given up for it");
    // A stranger takes the place of the oldest, and as many others' as it needs blocks.
    let stranger = s.admit(Want { prompt: (9000..9064).collect(), ..want(1, 1) }).expect("room");
    assert_eq!((stranger.slot, stranger.cached, s.kept_blocks()), (places[0].slot, 0, 4));
    s.end(stranger.slot);
    let stranger = s.admit(Want { prompt: (9000..9256).collect(), ..want(1, 32) }).expect("room");
    assert_eq!((stranger.blocks.len(), s.kept_blocks()), (9, 0));
    s.end(stranger.slot);
    // Of a long one with little in common nothing is taken, unless there is no other place.
    kept(&mut s, &tokens(1));
    let little = || Want { prompt: tokens(1)[..20].iter().copied().chain([7, 8]).collect(), ..want(1, 1) };
    let other = s.admit(little()).expect("room");
    assert_eq!((other.cached, s.kept_blocks()), (0, 2));
    let another = s.admit(little()).expect("room");
    let last = s.admit(little()).expect("the slot of what is kept");
    assert_eq!((another.cached, last.cached, s.kept_blocks()), (0, 20, 0));
    // Rows that no drafter saw are of no use to who has drafts made, and scores are of all rows.
    for place in [other, another, last] {
        s.end(place.slot);
    }
    let place = s.admit(Want { prompt: tokens(4).into(), speculates: false, ..want(1, 1) }).expect("room");
    s.keep(place.slot, tokens(4));
    for want in [want(1, 1), Want { score: true, speculates: false, ..want(1, 1) }] {
        let place = s.admit(Want { prompt: tokens(4).into(), ..want }).expect("room");
        assert_eq!(place.cached, 0);
        s.end(place.slot);
    }
    let place = s.admit(Want { prompt: tokens(4).into(), speculates: false, ..want(1, 1) }).expect("room");
    assert_eq!(place.cached, 63);
}

#[test]
fn rows_that_count_as_run_are_left_out() {
    let mut s = scheduler(limits(), Buckets::Exact);
    let mut plan = StepPlan::default();
    s.admit(Want { depth: 4, ..want(6, 3) }).expect("room");
    s.plan(&mut plan).expect("the rest of the prompt");
    assert_eq!((table(&plan), plan.context), (vec![(0, 0, 104, 0), (0, 1, 105, DRAW)], 6));
}

#[test]
fn scored_rows_go_through_the_head_and_limit_the_chunk() {
    let mut s = scheduler(limits(), Buckets::Exact);
    let mut plan = StepPlan::default();
    s.admit(Want { score: true, ..want(9, 1) }).expect("room");
    s.plan(&mut plan).expect("as many as there are heads");
    assert_eq!(plan.n_heads, 6);
    let targets: Vec<_> = plan.rows.iter().map(|r| (r.flags, r.token, r.target)).collect();
    assert_eq!(targets[0], (SCORE, 100, 101));
    assert_eq!(targets[5], (SCORE, 105, 106));
    s.plan(&mut plan).expect("the rest");
    assert_eq!(table(&plan), [(0, 0, 106, SCORE), (0, 1, 107, SCORE), (0, 2, 108, DRAW)]);

    // Scores alone need no row for the last token.
    s.admit(Want { score: true, ..want(3, 0) }).expect("room");
    s.plan(&mut plan).expect("two rows");
    assert_eq!(table(&plan), [(1, 0, 100, SCORE), (1, 1, 101, SCORE)]);
    assert_eq!(s.plan(&mut plan), None);
}

#[test]
fn the_oldest_prompt_gets_its_rows_first_and_the_next_gets_the_rest() {
    let mut s = scheduler(Limits { rows: 10, ..limits() }, Buckets::Exact);
    let mut plan = StepPlan::default();
    s.admit(want(7, 1)).expect("room");
    s.admit(want(7, 1)).expect("room");
    s.plan(&mut plan).expect("both");
    let rows = |slot| plan.rows.iter().filter(|r| r.slot == slot).count();
    assert_eq!((rows(0), rows(1), plan.seqs, plan.n_heads), (7, 3, 2, 1));
}

#[test]
fn a_chunk_beside_decoding_rows_is_cut_by_the_cost_line_in_whole_buckets() {
    for (buckets, first, measured) in [(Buckets::Exact, 32, 15), (Buckets::recorded(32), 32, 12)] {
        let mut s = scheduler(limits(), buckets);
        let mut plan = StepPlan::default();
        s.admit(want(1, 100)).expect("room");
        s.plan(&mut plan).expect("its prompt");
        s.admit(want(2000, 1)).expect("room");
        let key = s.plan(&mut plan).expect("mixed");
        assert_eq!(key.rows, first, "nothing was measured");
        // 500 us a step and 100 us a row: 2.05 ms hold 15 rows.
        for rows in [1, 8, 32] {
            s.observe(rows, Some(0), 500.0 + 100.0 * f64::from(rows), 0.0);
        }
        let key = s.plan(&mut plan).expect("mixed");
        assert_eq!((key.rows, plan.n_rows, plan.n_heads), (measured, measured, 1));
        // However slow a step is, a prompt moves.
        for _ in 0..100 {
            s.observe(1, Some(0), 1e6, 0.0);
            s.observe(32, Some(0), 1e6, 1.0);
        }
        s.plan(&mut plan).expect("mixed");
        assert!((MIN_CHUNK..=2 * MIN_CHUNK).contains(&plan.prompt_rows), "{}", plan.prompt_rows);
        // With nobody decoding, the largest chunk.
        s.end(0);
        assert_eq!(s.plan(&mut plan).expect("a chunk").rows, 32);
    }
}

#[test]
fn buckets_are_filled_with_padding_and_heads_are_rounded_up() {
    let mut s = scheduler(Limits { slots: 8, heads: 9, ..limits() }, Buckets::recorded(32));
    let mut plan = StepPlan::default();
    for _ in 0..5 {
        s.admit(want(1, 9)).expect("room");
    }
    let key = s.plan(&mut plan).expect("five rows");
    assert_eq!((key.rows, key.heads, plan.n_rows, plan.n_heads), (6, 6, 5, 5));
    assert_eq!(plan.rows[5], Row { flags: row_flags::PADDING, ..Row::default() });
    for _ in 0..3 {
        s.admit(want(1, 9)).expect("room");
    }
    s.plan(&mut plan).expect("eight rows");
    assert_eq!(s.admit(want(1, 1)), None, "no slot is left");
}

#[test]
fn a_context_class_follows_the_longest_row() {
    let mut s = scheduler(Limits { rows: 4096, ..limits() }, Buckets::Exact);
    let mut plan = StepPlan::default();
    s.admit(want(2047, 3)).expect("room");
    let classes: Vec<CtxClass> = (0..3).map(|_| s.plan(&mut plan).expect("a step").ctx).collect();
    assert_eq!(classes, [CtxClass::Short, CtxClass::Short, CtxClass::Medium], "contexts 2,047 to 2,049");
}

#[test]
fn the_window_is_short_where_the_host_must_keep_up() {
    let mut s = scheduler(limits(), Buckets::Exact);
    let mut plan = StepPlan::default();
    assert_eq!(s.window(), 8);
    s.admit(want(2, 9)).expect("room");
    assert_eq!(s.window(), 2, "a prompt is waiting");
    s.plan(&mut plan).expect("its prompt");
    assert_eq!(s.window(), 8);
    let host = s.admit(Want { two_part: true, ..want(1, 9) }).expect("room");
    assert_eq!(s.plan(&mut plan).expect("both").part, Part::Forward);
    assert_eq!(plan.two_part, [(1, host.slot)]);
    assert_eq!(s.window(), 2, "the host draws");
    s.end(host.slot);
    assert_eq!(s.window(), 8);
    let ring = scheduler(Limits { ring: 3, ..limits() }, Buckets::Exact);
    assert_eq!(ring.window(), 3, "the ring is never lapped");
}

#[test]
fn a_slot_never_has_the_same_generation_twice() {
    let mut s = scheduler(limits(), Buckets::Exact);
    let mut seen = std::collections::HashSet::new();
    for _ in 0..10 {
        let place = s.admit(want(30, 10)).expect("room");
        assert_eq!(place.blocks.len(), 2);
        assert!(seen.insert((place.slot, place.generation)));
        s.end(place.slot);
    }
    assert_eq!(s.admit(want(6400, 1)), None, "more blocks than the pool has");
    assert_eq!(s.blocks().free(), 200);
}

const ASKS: u16 = DRAW | row_flags::PROPOSE;
const VERIFY: u16 = row_flags::HEAD | row_flags::VERIFY;

#[test]
fn drafts_are_asked_for_from_the_prompt_on_and_verified_in_the_next_step() {
    let mut s = speculating(Limits { rows: 4, ..limits() }, Buckets::Exact, Speculate::Fixed(2));
    let mut plan = StepPlan::default();
    s.admit(want(6, 9)).expect("room");
    let key = s.plan(&mut plan).expect("a chunk");
    assert_eq!((key.drafts, key.draft_rows), (1, 0), "a drafter sees every row");
    assert_eq!(plan.rows.iter().map(|r| r.target).collect::<Vec<_>>(), [101, 102, 103, 104]);
    let key = s.plan(&mut plan).expect("the rest");
    assert_eq!(table(&plan), [(0, 0, 104, 0), (0, 1, 105, ASKS)]);
    assert_eq!((key.drafts, key.draft_rows, key.heads), (2, 1, 1));
    for context in [9, 12] {
        let key = s.plan(&mut plan).expect("a step");
        let verify = |offset| (0, offset, TOKEN_OF_SLOT, VERIFY);
        assert_eq!(table(&plan), [(0, 0, TOKEN_OF_SLOT, ASKS), verify(1), verify(2)]);
        assert_eq!((key.rows, key.heads, key.drafts, key.draft_rows), (3, 3, 2, 1));
        assert_eq!(plan.context, context, "as if every draft in flight were right");
    }
    // The prompt's draw, then two steps with drafts: three tokens and one.
    s.landed(0, 0, 0, 1);
    s.landed(0, 2, 2, 3);
    s.landed(0, 2, 2, 1);
    s.plan(&mut plan).expect("a step");
    assert_eq!(plan.context, 13, "six of the prompt, five that came, two drafts");
    s.landed(0, 2, 2, 2);
    s.plan(&mut plan).expect("a step");
    assert_eq!(table(&plan), [(0, 0, TOKEN_OF_SLOT, DRAW), (0, 1, TOKEN_OF_SLOT, VERIFY)], "two are left");
}

#[test]
fn who_is_to_see_each_token_gets_one_a_step() {
    let mut s = speculating(limits(), Buckets::recorded(32), Speculate::Fixed(4));
    let mut plan = StepPlan::default();
    s.admit(Want { speculates: false, ..want(1, 9) }).expect("room");
    s.admit(want(1, 9)).expect("room");
    s.plan(&mut plan).expect("prompts");
    let key = s.plan(&mut plan).expect("a step");
    let rows = |slot| plan.rows[..plan.n_rows as usize].iter().filter(|r| r.slot == slot).count();
    assert_eq!((rows(0), rows(1)), (1, 5));
    assert_eq!((key.rows, key.heads, key.drafts, key.draft_rows), (6, 6, 4, 1));
    let mut s = speculating(limits(), Buckets::Exact, Speculate::Fixed(4));
    s.admit(Want { speculates: false, ..want(1, 9) }).expect("room");
    assert_eq!(s.plan(&mut plan).expect("a prompt").drafts, 0);
}

#[test]
fn drafts_take_what_rows_and_heads_are_to_spare() {
    // Six heads: two decode, one prefills.
    let mut s = speculating(limits(), Buckets::Exact, Speculate::Fixed(4));
    let mut plan = StepPlan::default();
    s.admit(want(1, 90)).expect("room");
    s.admit(want(1, 90)).expect("room");
    s.plan(&mut plan).expect("prompts");
    s.admit(want(40, 9)).expect("room");
    s.plan(&mut plan).expect("mixed");
    let rows = |plan: &StepPlan, slot| plan.rows.iter().filter(|r| r.slot == slot).count();
    assert_eq!((rows(&plan, 0), rows(&plan, 1), plan.n_heads), (4, 1, 5));
    assert!(rows(&plan, 2) >= MIN_CHUNK as usize, "{} rows", rows(&plan, 2));
    // A prompt moves however few rows there are.
    let mut s = speculating(Limits { rows: 10, ..limits() }, Buckets::Exact, Speculate::Fixed(4));
    s.admit(want(1, 90)).expect("room");
    s.plan(&mut plan).expect("a prompt");
    s.admit(want(40, 9)).expect("room");
    s.plan(&mut plan).expect("mixed");
    assert_eq!((rows(&plan, 0), rows(&plan, 1)), (2, 8));
}

#[test]
fn a_sequence_whose_drafts_are_wrong_stops_drafting() {
    let mut s = speculating(limits(), Buckets::Exact, Speculate::Auto);
    let mut plan = StepPlan::default();
    s.admit(want(1, 1000)).expect("room");
    let (mut verified, mut last) = (0, 0);
    for step in 0..500 {
        let key = s.plan(&mut plan).expect("a step");
        let verify = key.rows - 1;
        let tail_us = 50.0 + 100.0 * f64::from(key.drafts);
        s.observe(key.rows, Some(key.drafts), 1000.0 + 200.0 * f64::from(key.rows), tail_us);
        s.landed(0, verify, verify, 1);
        verified += verify;
        last = if verify > 0 { step } else { last };
    }
    assert!((8..120).contains(&verified), "{verified} drafts");
    assert!(last > 60, "drafts are tried again: {last}");
}
