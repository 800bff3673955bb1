//! Verifying rows against speculation written plainly, and both against plain decoding.

use super::super::State;
use crate::cpu::Wanted;
use crate::cpu::team::Team;
use crate::ops::sample::dry::DryTable;
use crate::ops::sample::seen::SeenTokens;
use crate::ops::sample::{DryConfig, DryInputs, RowInputs, SamplerConfig, SamplerParams, Scratch, sample_row};
use crate::rng::philox4x32;
use crate::step::{
    CtxClass, Limits, MAX_DRAFTS, Part, Row, SlotInit, StepDelta, StepKey, TOKEN_OF_SLOT, landed_flags, row_flags,
};

const VOCAB: usize = 24;
const LIMITS: Limits = Limits { slots: 3, rows: 32, heads: 16, context: 64, blocks: 6, ring: 2 };

/// Tokens of each step of a sequence.
type Steps = Vec<Vec<u32>>;

/// A stream of choices.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(n)) as u32
    }
}

/// Logits that follow from all tokens so far, close enough together for every processor to matter.
fn model(tokens: &[u32]) -> Vec<f32> {
    let hash = tokens.iter().fold([tokens.len() as u32, 9], |h, &t| {
        let words = philox4x32([h[0], h[1], t, 1], [5, 7]);
        [words[0], words[1]]
    });
    (0..VOCAB as u32).map(|id| philox4x32([hash[0], hash[1], id, 2], [5, 7])[0] as f32 / 2e9).collect()
}

/// One sequence, and what is asked of it.
#[derive(Debug, Clone)]
struct Case {
    prompt: Vec<u32>,
    config: SamplerConfig,
    max_out: u32,
    stop_ids: Vec<u32>,
    ignore_stop: bool,
    /// Rows that verify.
    k: usize,
    /// Of ten drafts, so many are right.
    right: u32,
    /// Most drafts that are made.
    drafts: usize,
}

impl Case {
    fn new(r: &mut Random) -> Case {
        let flip = |r: &mut Random, value: f32| if r.below(2) == 0 { value } else { 0.0 };
        let dry = DryConfig { multiplier: 2.0, base: 1.5, allowed_length: 1, window: u32::MAX, breakers: vec![1] };
        let config = SamplerConfig {
            temperature: flip(r, 1.0),
            top_k: r.below(2) * 6,
            presence: flip(r, 0.7),
            frequency: flip(r, 0.6),
            repetition: 1.0 + flip(r, 0.4),
            min_tokens: r.below(6),
            dry: (r.below(3) == 0).then_some(dry),
            seed: u64::from(r.below(1000)),
            ..SamplerConfig::default()
        };
        Case {
            prompt: (0..1 + r.below(8)).map(|_| r.below(VOCAB as u32)).collect(),
            config,
            max_out: 6 + r.below(30),
            stop_ids: (0..r.below(3)).map(|_| r.below(VOCAB as u32)).collect(),
            ignore_stop: r.below(3) == 0,
            k: 1 + r.below(MAX_DRAFTS as u32) as usize,
            right: [0, 3, 8, 10][r.below(4) as usize],
            drafts: 1 + r.below(MAX_DRAFTS as u32) as usize,
        }
    }
}

/// Speculation that is wrong in one thing.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mutant {
    /// Every row draws with the word of the first.
    DrawWord,
    /// Penalties do not see the drafts before a row.
    CountsWithoutDrafts,
    /// The draw after the first that differs is emitted too.
    OneTooMany,
    /// Where a draw differs, the draft is emitted.
    DraftInstead,
    /// Drafts that were not accepted stay counted.
    CountsNotTakenBack,
    /// A stop id among accepted tokens does not end the run.
    PastStop,
    /// Nor does the length.
    PastLength,
}

const MUTANTS: [Mutant; 7] = [
    Mutant::DrawWord,
    Mutant::CountsWithoutDrafts,
    Mutant::OneTooMany,
    Mutant::DraftInstead,
    Mutant::CountsNotTakenBack,
    Mutant::PastStop,
    Mutant::PastLength,
];

/// A sequence as the reference sees it.
struct Reference<'a> {
    case: &'a Case,
    out: Vec<u32>,
    /// What a wrong one counts beside prompt and output.
    ghosts: Vec<u32>,
    done: bool,
    scratch: Scratch,
    mutant: Option<Mutant>,
}

impl<'a> Reference<'a> {
    fn new(case: &'a Case, mutant: Option<Mutant>) -> Self {
        let scratch = Scratch::new(VOCAB, LIMITS.context + MAX_DRAFTS);
        Reference { case, out: Vec::new(), ghosts: Vec::new(), done: false, scratch, mutant }
    }

    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// The token after prompt, output and drafts, everything made anew.
    fn draw(&mut self, drafts: &[u32]) -> u32 {
        let config = &self.case.config;
        let text: Vec<u32> = self.case.prompt.iter().chain(&self.out).chain(drafts).copied().collect();
        let counted = if self.is(Mutant::CountsWithoutDrafts) { text.len() - drafts.len() } else { text.len() };
        let mut seen = SeenTokens::new(VOCAB, &self.case.prompt, 200);
        text[self.case.prompt.len()..counted].iter().chain(&self.ghosts).for_each(|&id| seen.push(id));
        let table = config.dry.as_ref().and_then(DryTable::new);
        let inputs = RowInputs {
            stop_ids: &self.case.stop_ids,
            seen: seen.tokens(),
            dry: table.as_ref().map(|table| DryInputs { table, history: &text[..counted] }),
            ..RowInputs::default()
        };
        let index = self.out.len() + if self.is(Mutant::DrawWord) { 0 } else { drafts.len() };
        let params = SamplerParams::new(config);
        sample_row(&model(&text), &params, &inputs, index as u32, &mut self.scratch).token.expect("finite logits")
    }

    /// What a step with these drafts lands.
    fn step(&mut self, drafts: &[u32]) -> Vec<u32> {
        let room = self.case.max_out as usize - self.out.len();
        let within = if self.is(Mutant::PastLength) { usize::MAX } else { room - 1 };
        let drafts = &drafts[..drafts.len().min(self.case.k).min(within)];
        let draws: Vec<u32> = (0..=drafts.len()).map(|j| self.draw(&drafts[..j])).collect();
        let mut n = draws.iter().zip(drafts).take_while(|(draw, draft)| draw == draft).count() + 1;
        let mut tokens = draws;
        if self.is(Mutant::DraftInstead) && n <= drafts.len() {
            tokens[n - 1] = drafts[n - 1];
        }
        if self.is(Mutant::OneTooMany) && n < tokens.len() {
            n += 1;
        }
        if self.is(Mutant::CountsNotTakenBack) {
            self.ghosts.extend(&drafts[n.min(drafts.len())..]);
        }
        tokens.truncate(n);
        let stop = |id: &u32| !self.case.ignore_stop && self.case.stop_ids.contains(id);
        if let Some(at) = tokens.iter().position(stop) {
            self.done = true;
            if !self.is(Mutant::PastStop) {
                tokens.truncate(at + 1);
            }
        }
        self.out.extend(&tokens);
        self.done |= self.out.len() >= self.case.max_out as usize;
        tokens
    }
}

/// The tokens of plain decoding.
fn plain(case: &Case) -> Vec<u32> {
    let mut reference = Reference::new(case, None);
    while !reference.done {
        reference.step(&[]);
    }
    reference.out
}

/// Sequences on the device, with their caches.
struct Rig {
    state: State,
    team: Team,
    /// The token fed at each position, by slot.
    fed: Vec<Vec<u32>>,
}

impl Rig {
    fn new(cases: &[Case]) -> Rig {
        let mut state = State::new(&LIMITS);
        state.set_vocab(VOCAB, 1);
        let admit = cases.iter().zip(0..).map(|(case, slot)| SlotInit {
            slot,
            generation: 1,
            max_out: case.max_out,
            flags: u32::from(case.ignore_stop),
            stop_ids: case.stop_ids.clone(),
            sampling: case.config.clone(),
            blocks: vec![2 * u32::from(slot), 2 * u32::from(slot) + 1],
            penalty_prompt: case.prompt.clone(),
            pos: 0,
            logprobs: None,
            prompt_top: 0,
        });
        state.stage(&StepDelta { admit: admit.collect(), ..StepDelta::default() });
        Rig { state, team: Team::new(1), fed: vec![vec![u32::MAX; LIMITS.context]; cases.len()] }
    }

    /// Runs a step, and lets `propose` say what may follow. The tokens of each head row.
    fn step(&mut self, rows: Vec<Row>, propose: &mut dyn FnMut(Wanted<'_>) -> Option<u32>) -> Vec<Vec<u32>> {
        let key = StepKey::new(rows.len() as u32, LIMITS.heads as u32, CtxClass::Short, Part::Whole);
        self.state.stage(&StepDelta { rows: Some(rows), ..StepDelta::default() });
        self.state.begin(key).expect("a step");
        for info in self.state.infos().iter().filter(|info| info.live) {
            self.fed[info.slot][info.pos as usize] = info.token;
        }
        let heads = self.state.heads().len();
        let logits = |&r: &u32| {
            let info = self.state.infos()[r as usize];
            if info.live { model(&self.fed[info.slot][..=info.pos as usize]) } else { vec![f32::NAN; VOCAB] }
        };
        let logits: Vec<f32> = self.state.heads().iter().flat_map(logits).collect();
        self.state.sample(&mut self.team, &logits);
        self.state.propose(MAX_DRAFTS, propose);
        self.state.commit();
        let step = self.state.landed_steps();
        let landed = (0..heads).map(|h| {
            let landed = self.state.landed(step, h);
            assert!(landed.flags & landed_flags::FAULT == 0, "{landed:?}");
            assert!(landed.n_tokens == 0 || landed.flags & landed_flags::VERIFIED == 0, "{landed:?}");
            landed.tokens[..landed.n_tokens as usize].to_vec()
        });
        let landed = landed.collect();
        self.state.read_to(step);
        landed
    }
}

/// Runs sequences together. What each step landed for each, until all have ended.
fn run(cases: &[Case], wants: &[Vec<u32>], r: &mut Random) -> (Vec<Steps>, Vec<Steps>) {
    let mut rig = Rig::new(cases);
    let mut landed = vec![Vec::new(); cases.len()];
    // The drafts that each step verifies.
    let mut drafted = vec![vec![Vec::new()]; cases.len()];
    for step in 0.. {
        let mut rows = Vec::new();
        let mut heads = Vec::new();
        for (slot, case) in (0u16..).zip(cases) {
            let out: usize = landed[usize::from(slot)].iter().map(Vec::len).sum();
            if out == wants[usize::from(slot)].len() {
                continue;
            }
            let draws = row_flags::HEAD | row_flags::SAMPLE | row_flags::PROPOSE;
            heads.push(slot);
            if step == 0 {
                let last = case.prompt.len() - 1;
                let flags = |i: usize| if i == last { draws } else { 0 };
                let row =
                    |(i, &token): (usize, &u32)| Row { slot, flags: flags(i), offset: i as u32, token, target: 0 };
                rows.extend(case.prompt.iter().enumerate().map(row));
                continue;
            }
            rows.push(Row { slot, flags: draws, offset: 0, token: TOKEN_OF_SLOT, target: 0 });
            let verify = |j| Row { slot, flags: row_flags::VERIFY, offset: j, token: TOKEN_OF_SLOT, target: 0 };
            rows.extend((1..=case.k as u32).map(verify));
            heads.extend(std::iter::repeat_n(slot, case.k));
        }
        if rows.is_empty() {
            return (landed, drafted);
        }
        let mut made = vec![Vec::new(); cases.len()];
        let mut propose = |wanted: Wanted<'_>| {
            let (slot, n_out, drafts) = (usize::from(wanted.slot), wanted.n_out, wanted.drafts);
            let case = &cases[slot];
            if drafts.len() == case.drafts {
                return None;
            }
            let right = *wants[slot].get(n_out as usize + drafts.len()).unwrap_or(&0);
            let token = if r.below(10) < case.right { right } else { (right + 1 + r.below(5)) % VOCAB as u32 };
            made[slot].push(token);
            Some(token)
        };
        let tokens = rig.step(rows, &mut propose);
        assert_eq!(tokens.len(), heads.len());
        let mut before = None;
        for (&slot, tokens) in heads.iter().zip(tokens) {
            if before.replace(slot) != Some(slot) {
                landed[usize::from(slot)].push(tokens);
            } else {
                assert!(tokens.is_empty());
            }
        }
        for (drafted, made) in drafted.iter_mut().zip(made) {
            drafted.push(made);
        }
    }
    unreachable!()
}

#[test]
fn whatever_is_drafted_the_tokens_are_those_of_plain_decoding() {
    let mut r = Random(3);
    let (mut accepted, mut taken_back, mut steps) = (0, 0, 0);
    let mut caught = [0; MUTANTS.len()];
    for _ in 0..400 {
        let cases: Vec<Case> = (0..LIMITS.slots).map(|_| Case::new(&mut r)).collect();
        let wants: Vec<Vec<u32>> = cases.iter().map(plain).collect();
        let (landed, drafted) = run(&cases, &wants, &mut r);
        for (((case, want), landed), drafted) in cases.iter().zip(&wants).zip(&landed).zip(&drafted) {
            assert_eq!(&landed.concat(), want, "{case:?}");
            let agrees = |mutant| {
                let mut reference = Reference::new(case, mutant);
                let same =
                    |(tokens, drafts): (&Vec<u32>, &Vec<u32>)| !reference.done && reference.step(drafts) == *tokens;
                landed.iter().zip(drafted).all(same)
            };
            assert!(agrees(None), "{case:?}: {landed:?} of {drafted:?}");
            for (mutant, caught) in MUTANTS.into_iter().zip(&mut caught) {
                *caught += usize::from(!agrees(Some(mutant)));
            }
            steps += landed.len();
            for (tokens, drafts) in landed.iter().zip(drafted) {
                accepted += tokens.len() - 1;
                taken_back += drafts.len().min(case.k).saturating_sub(tokens.len() - 1);
            }
        }
    }
    println!("{steps} steps, {accepted} drafts accepted, {taken_back} taken back; mutants caught {caught:?}");
    assert!(accepted > 1000 && taken_back > 1000, "{accepted} {taken_back}");
    assert!(caught.iter().all(|&n| n > 10), "{MUTANTS:?} {caught:?}");
}

/// A draft that is no token, and drafts that nobody verifies, change nothing.
#[test]
fn a_draft_out_of_the_vocabulary_is_no_draft() {
    let mut r = Random(8);
    for _ in 0..20 {
        let mut case = Case::new(&mut r);
        (case.stop_ids, case.k) = (Vec::new(), 3);
        let want = plain(&case);
        let mut rig = Rig::new(std::slice::from_ref(&case));
        let mut out = Vec::new();
        let draws = row_flags::HEAD | row_flags::SAMPLE | row_flags::PROPOSE;
        let row = |(i, &token): (usize, &u32)| {
            let flags = if i + 1 == case.prompt.len() { draws } else { 0 };
            Row { slot: 0, flags, offset: i as u32, token, target: 0 }
        };
        let mut rows: Vec<Row> = case.prompt.iter().enumerate().map(row).collect();
        while out.len() < want.len() {
            let mut propose = |wanted: Wanted<'_>| match wanted.drafts.len() {
                0 => want.get(wanted.n_out as usize).copied(),
                1 => Some(VOCAB as u32),
                _ => Some(0),
            };
            let landed = rig.step(rows, &mut propose).concat();
            assert!(landed.len() <= 2, "one draft a step can be right");
            out.extend(landed);
            rows = (0..4)
                .map(|j| Row {
                    slot: 0,
                    flags: if j == 0 { draws } else { row_flags::VERIFY },
                    offset: j,
                    token: TOKEN_OF_SLOT,
                    target: 0,
                })
                .collect();
        }
        assert_eq!(out, want);
    }
}
