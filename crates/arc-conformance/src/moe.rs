//! Routed experts: scores and choice, assignments, gated units and their sum.

use arc_device::cpu::Cpu;
use arc_device::error::Result as DeviceResult;
use arc_device::format::Format;
use arc_device::math::silu;
use arc_device::ops::hc::{HcConfig, MIXES, STREAMS};
use arc_device::ops::matmul::{Bytes, MatrixSource};
use arc_device::ops::quant::Inputs;
use arc_device::ops::router::RouterConfig;
use arc_device::ops::sample::SamplerConfig;
use arc_device::ops::synthetic::SyntheticRows;
use arc_device::ops_v4::{ExpertConfig, ExpertWeights, ExpertWork, HcSite, Incoming, OpsV4, RouterWeights, Streams};
use arc_device::step::{Row, SlotInit, StepDelta, row_flags};
use arc_device::{Alloc, Element, Landing, MemoryClass, ModelShape, Norm, Readback, Steps};

use crate::compare::{all, equal, equal_or_nan, launches};
use crate::inputs::Rng;
use crate::suite::{Suite, Verdict, limits, stage_key};

pub(crate) const VOCAB: usize = 64;
/// The expert that a crowded case's table always has first.
const CROWDED: usize = 5;

/// Which scores meet.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scores {
    /// As in a network.
    Usual,
    /// Logits on both sides of 88.7, beyond which an exponential is infinite.
    Wide,
    /// A few values, each shared by many experts, also where the choice ends: `tie`.
    Ties,
    /// A NaN in the first row, an infinity in the last.
    Faulty,
}

#[derive(Clone)]
struct Case {
    cfg: ExpertConfig,
    rows: usize,
    hashed: bool,
    /// A table's first choice is always the same expert.
    crowded: bool,
    scores: Scores,
    /// Of routed gate and up, routed down, and both of the shared expert.
    formats: [Format; 3],
    /// Whether rows are nobody's, between two sites.
    padding: bool,
    /// Whether the gate chooses again behind the units, between two sites.
    twice: bool,
}

impl Case {
    fn new(hidden: usize, ffn: usize, experts: usize, chosen: usize, rows: usize) -> Case {
        let router = RouterConfig { experts, chosen, scale: 1.5 };
        Case {
            cfg: ExpertConfig { router, hidden, ffn, limit: 10.0, inputs: Inputs::Int8 },
            rows,
            hashed: false,
            crowded: false,
            scores: Scores::Usual,
            formats: [Format::Iq2Xxs, Format::Q2K, Format::Q8_0],
            padding: false,
            twice: false,
        }
    }

    fn name(&self) -> String {
        let Case { cfg, rows, hashed, crowded, scores, formats: [up, down, shared], .. } = self;
        let kind = if *crowded { "crowded" } else { ["learned", "hashed"][usize::from(*hashed)] };
        format!(
            "{}x{}/{} of {} {kind}/{rows} rows/{scores:?}/{} {} {}/{:?}/limit {}",
            cfg.hidden,
            cfg.ffn,
            cfg.router.chosen,
            cfg.router.experts,
            up.name(),
            down.name(),
            shared.name(),
            cfg.inputs,
            cfg.limit,
        )
    }

    fn h(&self) -> Vec<f32> {
        let (rows, hidden) = (self.rows, self.cfg.hidden);
        let mut rng = Rng(rows as u64 * 1009 + hidden as u64);
        let mut h = rng.values(rows * hidden, if self.scores == Scores::Wide { 40.0 } else { 1.0 });
        if self.scores == Scores::Faulty {
            h[hidden / 3] = f32::NAN;
            h[(rows - 1) * hidden] = f32::INFINITY;
        }
        h
    }

    fn gate(&self) -> Vec<f32> {
        let (experts, hidden) = (self.cfg.router.experts, self.cfg.hidden);
        let mut rng = Rng(77);
        let mut gate = rng.values(experts * hidden, 1.0 / (hidden as f32).sqrt());
        if self.scores == Scores::Ties {
            // Equal logits, to the bit.
            for e in 0..experts {
                let from = tie(e).0;
                gate.copy_within(from * hidden..(from + 1) * hidden, e * hidden);
            }
        }
        gate
    }

    fn bias(&self) -> Vec<f32> {
        let mut rng = Rng(5);
        let ties = self.scores == Scores::Ties;
        (0..self.cfg.router.experts).map(|e| if ties { tie(e).1 } else { 0.2 * rng.unit() }).collect()
    }

    /// Distinct and repeated experts.
    fn table(&self) -> Vec<u32> {
        let (experts, chosen) = (self.cfg.router.experts, self.cfg.router.chosen);
        let mut rng = Rng(9);
        let mut any = |i: usize| rng.below(if i.is_multiple_of(4) { 2 } else { experts }) as u32;
        (0..VOCAB * chosen).map(|i| if self.crowded && i % chosen == 0 { CROWDED as u32 } else { any(i) }).collect()
    }
}

/// Of scores that meet: the expert whose row of the gate expert `e` has, and what is added to its score. A few are ahead of
/// all others, and behind them are more than can be chosen, all alike.
fn tie(e: usize) -> (usize, f32) {
    match e {
        _ if e % 64 == 31 => (e, 20.0),
        _ if e.is_multiple_of(3) => (0, 10.0),
        _ if e.is_multiple_of(5) => (1, 0.0),
        _ => (e, 0.0),
    }
}

/// What the stages leave.
#[derive(Clone, Default)]
struct Left {
    ids: Vec<u32>,
    weights: Vec<f32>,
    order: Vec<u32>,
    bounds: Vec<u32>,
    shared: Vec<f32>,
    mid: Vec<f32>,
    out: Vec<f32>,
}

pub(crate) fn matrix<D: Alloc>(
    dev: &mut D,
    format: Format,
    parts: usize,
    rows: usize,
    cols: usize,
) -> DeviceResult<D::Matrix> {
    let std = 1.5 / (cols as f32).sqrt();
    let made = SyntheticRows { seed: 11, tensor: (rows * cols) as u64, first_row: 0, mean: 0.0, std };
    let stored: Vec<Vec<u8>> = match SyntheticRows::has(format) {
        true => Vec::new(),
        false => (0..parts).map(|part| random_rows(format, rows * cols, part as u64)).collect(),
    };
    let sources: Vec<MatrixSource<'_>> = (0..parts)
        .map(|part| {
            let bytes = match stored.get(part) {
                Some(bytes) => Bytes::Stored(bytes),
                None => Bytes::Synthetic(made.skip(part * rows)),
            };
            MatrixSource { format, rows, cols, bytes }
        })
        .collect();
    dev.matrix("experts", &sources)
}

/// Random codes with scales near 2^-5.
fn random_rows(format: Format, values: usize, seed: u64) -> Vec<u8> {
    let mut bytes = Rng(seed + 1).bytes(values / format.block_len() * format.block_bytes());
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        match format {
            Format::Mxfp4 => block[0] = 120 + block[0] % 4,
            Format::Fp8 => {
                block[0] = 118 + block[0] % 4;
                // No NaN codes.
                block[1..].iter_mut().for_each(|code| *code &= if *code & 0x7f == 0x7f { 0xf7 } else { 0xff });
            }
            // Of either sign, from 2^-7.
            Format::Bf16 => block[1] = block[1] & 0x80 | 0x3c,
            _ => panic!("no random rows in {}", format.name()),
        }
    }
    bytes
}

fn read<D: Readback, T: Element>(dev: &mut D, buf: &D::Buf<T>, len: usize) -> DeviceResult<Vec<T>> {
    let mut out = vec![T::default(); len];
    dev.read(buf, &mut out)?;
    Ok(out)
}

/// Rows of slots of their own, or so many a slot that there are 256 at most; of every fifth they are padding.
pub(crate) fn table(rows: usize) -> StepDelta {
    let mut delta = StepDelta::default();
    let padding = Row { flags: row_flags::PADDING, ..Row::default() };
    let (mut table, each) = (Vec::new(), rows.div_ceil(256));
    for r in 0..rows {
        let (slot, offset) = (r / each, (r % each) as u32);
        if slot % 5 == 3 || slot >= 250 {
            table.push(padding);
            continue;
        }
        table.push(Row { slot: slot as u16, flags: 0, offset, token: (r * 13 % VOCAB) as u32, target: 0 });
        if offset > 0 {
            continue;
        }
        delta.admit.push(SlotInit {
            slot: slot as u16,
            generation: 1,
            max_out: 5,
            flags: 0,
            stop_ids: Vec::new(),
            sampling: SamplerConfig::default(),
            blocks: vec![slot as u32],
            penalty_prompt: Vec::new(),
            pos: 0,
            logprobs: None,
            prompt_top: 0,
        });
    }
    delta.rows = Some(table);
    delta
}

/// Buffers and weights of a case on one device.
struct Bench<D: Alloc> {
    weights: ExpertWeights<D>,
    work: ExpertWork<D>,
    h: D::Buf<f32>,
    out: D::Buf<f32>,
}

impl<D: Alloc + Readback> Bench<D> {
    fn new(dev: &mut D, case: &Case) -> DeviceResult<Bench<D>> {
        let ExpertConfig { router: RouterConfig { experts, chosen, .. }, hidden, ffn, .. } = case.cfg;
        let (rows, class) = (case.rows, MemoryClass::Workspace);
        let [up, down, shared] = case.formats;
        let router = match case.hashed {
            true => RouterWeights::Hashed(dev.ids("table", &case.table())?),
            false => RouterWeights::Learned(dev.vector("bias", &case.bias())?),
        };
        let weights = ExpertWeights {
            gate: dev.vector("gate", &case.gate())?,
            router,
            up: matrix(dev, up, 2 * experts, ffn, hidden)?,
            down: matrix(dev, down, experts, hidden, ffn)?,
            shared_up: matrix(dev, shared, 2, ffn, hidden)?,
            shared_down: matrix(dev, shared, 1, hidden, ffn)?,
        };
        let work = ExpertWork {
            ids: dev.alloc("ids", class, rows * chosen)?,
            weights: dev.alloc("weights", class, rows * chosen)?,
            order: dev.alloc("order", class, rows * chosen)?,
            bounds: dev.alloc("bounds", class, experts + 1)?,
            mid: dev.alloc("mid", class, rows * chosen * ffn)?,
            shared: dev.alloc("shared", class, rows * ffn)?,
        };
        let (mut h, out) = (dev.alloc("h", class, rows * hidden)?, dev.alloc("out", class, rows * hidden)?);
        dev.write(&mut h, &case.h())?;
        dev.finish(&shape(case))?;
        Ok(Bench { weights, work, h, out })
    }
}

fn shape(case: &Case) -> ModelShape {
    let ExpertConfig { router, hidden, ffn, .. } = case.cfg;
    ModelShape { vocab: VOCAB, hidden, post_norms: false, gathered: (router.chosen + 1) * hidden.max(ffn) }
}

fn run<D: Steps + Alloc + Readback + Landing>(dev: &mut D, case: &Case) -> DeviceResult<Left> {
    run_with(dev, case, &case.h())
}

/// Of other inputs than the case's.
fn run_with<D: Steps + Alloc + Readback + Landing>(dev: &mut D, case: &Case, h: &[f32]) -> DeviceResult<Left> {
    let mut bench = Bench::new(dev, case)?;
    dev.write(&mut bench.h, h)?;
    dev.stage(&table(case.rows))?;
    let (rows, cfg) = (case.rows, &case.cfg);
    let (chosen, n) = (cfg.router.chosen, rows * cfg.router.chosen);
    dev.step(stage_key(rows), &mut |dev| {
        let Bench { weights, work, h, out } = &mut bench;
        dev.ffn_in(work, h, weights, cfg, rows)?;
        dev.experts_up(work, h, weights, cfg, rows)?;
        dev.experts_down(out, work, weights, cfg, rows)
    })?;
    let bounds = read(dev, &bench.work.bounds, cfg.router.experts + 1)?;
    let assigned = bounds.last().map_or(0, |&n| n as usize).min(rows * chosen);
    Ok(Left {
        ids: read(dev, &bench.work.ids, n)?,
        weights: read(dev, &bench.work.weights, n)?,
        order: read(dev, &bench.work.order, assigned)?,
        bounds,
        shared: read(dev, &bench.work.shared, rows * cfg.ffn)?,
        mid: read(dev, &bench.work.mid, assigned * cfg.ffn)?,
        out: read(dev, &bench.out, rows * cfg.hidden)?,
    })
}

fn compare(want: &Left, got: &Left) -> Verdict {
    let named = |name: &str, verdict: Verdict| verdict.map_err(|why| format!("{name}: {why}"));
    all([
        named("ids", equal(&want.ids, &got.ids)),
        named("weights", equal_or_nan(&want.weights, &got.weights)),
        named("bounds", equal(&want.bounds, &got.bounds)),
        named("order", equal(&want.order, &got.order)),
        named("shared", equal_or_nan(&want.shared, &got.shared)),
        named("mid", equal_or_nan(&want.mid, &got.mid)),
        named("out", equal_or_nan(&want.out, &got.out)),
    ])
}

fn both(suite: &Suite, case: &Case) -> Result<[Left; 2], String> {
    let mut pair = suite.pair(limits(case.rows, 32));
    let want = run(&mut pair.cpu, case).map_err(|error| error.to_string())?;
    let got = run(&mut pair.gpu, case).map_err(|error| error.to_string())?;
    Ok([want, got])
}

/// Of float weights the products are only bounded; scores, choice and assignments are exact all the same.
fn exact(case: &Case) -> bool {
    case.formats.iter().all(|&format| format != Format::Fp8 && format != Format::F16)
}

fn check(suite: &Suite, case: &Case) -> Verdict {
    let [want, mut got] = both(suite, case)?;
    if !exact(case) {
        let near = |want: &[f32], got: &[f32]| crate::compare::within(want, got, 1e-4, 1e-4);
        all([near(&want.shared, &got.shared), near(&want.mid, &got.mid), near(&want.out, &got.out)])?;
        (got.shared, got.mid, got.out) = (want.shared.clone(), want.mid.clone(), want.out.clone());
    }
    compare(&want, &got)
}

/// Every plan of the GPU, every kind of gate, and the formats that experts come in.
pub fn cases(suite: &mut Suite) {
    let mut cases = Vec::new();
    for rows in [1, 2, 3, 8, 9, 64, 256] {
        cases.push(Case::new(1024, 256, 32, 6, rows));
    }
    for rows in [1, 8, 40] {
        cases.push(Case { hashed: true, ..Case::new(1024, 256, 32, 6, rows) });
        for scores in [Scores::Wide, Scores::Ties, Scores::Faulty] {
            cases.push(Case { scores, ..Case::new(1024, 256, 64, 6, rows) });
        }
    }
    // Experts whose slices stand four a tile: the way through all of them, and tiles of 8 to 32 rows.
    for (hidden, ffn, experts, chosen, rows) in [
        (1024, 1024, 32, 6, 9),
        (1024, 1024, 32, 6, 64),
        (1024, 2048, 300, 16, 20),
        (2048, 1024, 64, 6, 150),
        (4096, 2048, 16, 2, 80),
        (4096, 2048, 8, 2, 90),
        (1024, 1024, 32, 6, 256),
        (1024, 1024, 32, 6, 600),
        (1024, 256, 32, 6, 600),
        (1024, 1024, 256, 6, 2048),
    ] {
        cases.push(Case::new(hidden, ffn, experts, chosen, rows));
    }
    // One expert has all rows, and nobody else any, or others some.
    for (ffn, chosen, rows) in [(1024, 1, 40), (1024, 1, 300), (1024, 6, 300), (256, 6, 300), (256, 6, 8)] {
        let case = Case { hashed: true, crowded: true, ..Case::new(1024, ffn, 32, chosen, rows) };
        suite.mutant(&format!("moe/another last row/{}", case.name()), |suite| last_row(suite, &case));
        cases.push(case);
    }
    cases.push(Case { hashed: true, ..Case::new(1024, 1024, 32, 6, 40) });
    cases.push(Case { scores: Scores::Faulty, ..Case::new(1024, 1024, 64, 6, 40) });
    // The production widths, and the tiny model's.
    cases.push(Case::new(4096, 512, 16, 6, 1));
    cases.push(Case::new(4096, 512, 16, 6, 5));
    cases.push(Case::new(2048, 256, 32, 6, 3));
    // Blocks with the sums of more outputs than 32, of all rows.
    cases.push(Case::new(5120, 512, 16, 6, 1));
    cases.push(Case::new(5120, 512, 16, 6, 3));
    // One row among 256 experts has a kernel of its own.
    for (hidden, scores, chosen) in
        [(2048, Scores::Ties, 6), (4096, Scores::Wide, 6), (1024, Scores::Faulty, 6), (1024, Scores::Usual, 16)]
    {
        cases.push(Case { scores, ..Case::new(hidden, 256, 256, chosen, 1) });
    }
    cases.push(Case { hashed: true, ..Case::new(4096, 256, 256, 6, 1) });
    cases.push(Case::new(256, 256, 8, 2, 3));
    cases.push(Case::new(512, 256, 300, 16, 20));
    for formats in [
        [Format::Q8_0; 3],
        [Format::Mxfp4, Format::Mxfp4, Format::Fp8],
        [Format::Q2K, Format::Q8_0, Format::F16],
        [Format::F16, Format::Fp8, Format::Q8_0],
    ] {
        for rows in [1, 7, 70] {
            cases.push(Case { formats, ..Case::new(1024, 256, 16, 4, rows) });
        }
    }
    for inputs in [Inputs::F32, Inputs::Fp8] {
        let mut case = Case { formats: [Format::Q8_0; 3], ..Case::new(1024, 256, 16, 4, 4) };
        case.cfg.inputs = inputs;
        cases.push(case);
    }
    // A clamp that bites.
    let mut clamped = Case::new(1024, 256, 16, 4, 6);
    clamped.cfg.limit = 0.5;
    cases.push(clamped.clone());
    for case in cases {
        suite.case(&format!("moe/{}", case.name()), |suite| check(suite, &case));
    }
    suite.case("moe/a row alone and among others", invariant);
    for (rows, ffn) in [(1, 256), (1, 2048), (3, 256), (9, 256)] {
        let case = Case::new(4096, ffn, 16, 6, rows);
        suite.case(&format!("moe/between two sites/{rows} rows of {ffn} units"), |suite| {
            between_sites(suite, &case, &case, |_| Ok(String::new()))
        });
        let mut other = case.clone();
        other.cfg.router.scale = 2.5;
        suite.mutant(&format!("moe/another scale between two sites/{rows} rows of {ffn} units"), |suite| {
            between_sites(suite, &other, &case, |_| Ok(String::new()))
        });
    }
    one_launch(suite);
    suite.case("moe/clamps", |suite| clamps(suite, |gate, limit| gate.min(limit)));
    suite.mutant("moe/gate clamped on both sides", |suite| clamps(suite, |gate, limit| gate.clamp(-limit, limit)));
    for (experts, rows, ffn) in [(64, 4, 256), (256, 1, 256), (64, 40, 1024)] {
        let case = Case { scores: Scores::Ties, ..Case::new(1024, ffn, experts, 6, rows) };
        suite.mutant(&format!("moe/of equal scores the higher id/{experts} experts, {rows} rows"), |suite| {
            higher_id(suite, &case)
        });
        let mut other = case.clone();
        other.cfg.router.scale = 2.5;
        suite.mutant(&format!("moe/another scale of the weights/{experts} experts, {rows} rows"), |suite| {
            let mut pair = suite.pair(limits(case.rows, 32));
            let want = run(&mut pair.cpu, &other).map_err(|error| error.to_string())?;
            let got = run(&mut pair.gpu, &case).map_err(|error| error.to_string())?;
            equal_or_nan(&want.mid, &got.mid)
        });
    }
    suite.measure("moe", perf);
}

/// One row's experts are one launch where every block has as many units as the next.
fn one_launch(suite: &mut Suite) {
    // The width of a site that leaves its outputs as int8, without which there is no such launch.
    let case = Case::new(4096, 2048, 32, 6, 1);
    let mut clamped = case.clone();
    clamped.cfg.limit = 0.5;
    let cases = [
        ("scores choose", case.clone()),
        ("equal scores", Case { scores: Scores::Ties, ..case.clone() }),
        ("a table's choice", Case { hashed: true, ..case.clone() }),
        ("a row that is nobody's", Case { padding: true, ..case.clone() }),
        ("a NaN", Case { scores: Scores::Faulty, ..case.clone() }),
        ("a clamp that bites", clamped),
        ("2 of 8 experts", Case::new(4096, 2048, 8, 2, 1)),
        ("16 of 40 experts", Case::new(4096, 2048, 40, 16, 1)),
    ];
    for (what, case) in cases {
        suite.case(&format!("moe/one launch/{what}"), |suite| between_sites(suite, &case, &case, together));
    }
    let narrow = Case::new(1024, 1024, 32, 6, 1);
    let cases = [
        ("something between units and sum", Case { twice: true, ..case.clone() }),
        ("5 experts", Case::new(4096, 2048, 32, 5, 1)),
        ("narrow inputs", narrow.clone()),
    ];
    for (what, case) in cases {
        suite.case(&format!("moe/more launches/{what}"), |suite| between_sites(suite, &case, &case, apart));
    }
    suite.mutant("moe/one launch/of narrow inputs", |suite| between_sites(suite, &narrow, &narrow, together));
    let ties = Case { scores: Scores::Ties, ..case.clone() };
    suite.mutant("moe/one launch/of equal scores the higher id", |suite| {
        let mut pair = suite.pair(limits(1, 32));
        let (cpu, gpu) = (&mut pair.cpu, &mut pair.gpu);
        let [.., want, _, _, _] = sites(cpu, &ties, &mut |_, _| Ok(())).map_err(|error| error.to_string())?;
        let [.., got, _, _, _] = sites(gpu, &ties, &mut |_, _| Ok(())).map_err(|error| error.to_string())?;
        let mut ids: Vec<u32> = want[..6].iter().map(|&id| id as u32).collect();
        higher(&mut ids, 32);
        equal(&ids, &got[..6].iter().map(|&id| id as u32).collect::<Vec<_>>())
    });
    let chosen = case.cfg.router.chosen;
    let ascending: Vec<usize> = (0..=chosen).collect();
    suite.case("moe/one launch/experts one by one", |suite| summed(suite, &case, &ascending));
    let mut descending = ascending.clone();
    descending[..chosen].reverse();
    suite.mutant("moe/one launch/experts descending", |suite| summed(suite, &case, &descending));
    let mut shared_first = ascending.clone();
    shared_first.rotate_right(1);
    suite.mutant("moe/one launch/the shared expert first", |suite| summed(suite, &case, &shared_first));
}

/// One row's experts are one launch, which sends the last site what it reads.
fn together(launched: &[&str]) -> Verdict {
    all([
        launches("arc_matmul_", &["arc_matmul_experts_row"], launched),
        launches("arc_router_", &[], launched),
        launches("arc_hc_site", &["arc_hc_site_cluster", "arc_hc_site_cluster", "arc_hc_site_sent"], launched),
    ])
}

/// Nothing of it.
fn apart(launched: &[&str]) -> Verdict {
    all(["arc_matmul_experts_row", "arc_hc_site_sent"].map(|name| launches(name, &[], launched)))
}

/// The units of the expert that has all rows, of which the last one has other inputs on the CPU.
fn last_row(suite: &Suite, case: &Case) -> Verdict {
    let (hidden, ffn, mut h) = (case.cfg.hidden, case.cfg.ffn, case.h());
    let rows = table(case.rows).rows.unwrap_or_default();
    let live = |row: &Row| row.flags & row_flags::PADDING == 0;
    let last = rows.iter().rposition(live).expect("a row is live");
    h[last * hidden..(last + 1) * hidden].iter_mut().for_each(|x| *x = -*x);
    let mut pair = suite.pair(limits(case.rows, 32));
    let want = run_with(&mut pair.cpu, case, &h).map_err(|error| error.to_string())?;
    let got = run(&mut pair.gpu, case).map_err(|error| error.to_string())?;
    // Assignments of the expert are in the order of rows; a table may have it twice in a row.
    let [begin, end] = [CROWDED, CROWDED + 1].map(|expert| got.bounds[expert] as usize);
    let rows_of: Vec<usize> = got.order[begin..end].iter().map(|&i| i as usize / case.cfg.router.chosen).collect();
    if rows_of.len() < rows.iter().filter(|row| live(row)).count() {
        return Ok(format!("{} rows of the expert", rows_of.len()));
    }
    let others = begin + rows_of.iter().take_while(|&&row| row != last).count();
    // Not what the mutant is about.
    if let Err(why) = equal_or_nan(&want.mid[begin * ffn..others * ffn], &got.mid[begin * ffn..others * ffn]) {
        return Ok(format!("another row: {why}"));
    }
    equal_or_nan(&want.mid[others * ffn..end * ffn], &got.mid[others * ffn..end * ffn])
}

/// A choice that takes the higher of two ids where their scores are equal.
fn higher_id(suite: &Suite, case: &Case) -> Verdict {
    let [mut want, got] = both(suite, case)?;
    for ids in want.ids.chunks_exact_mut(case.cfg.router.chosen) {
        higher(ids, case.cfg.router.experts);
    }
    compare(&want, &got)
}

/// Takes the last of the experts that share a chosen one's score, as far as it is not chosen too.
fn higher(ids: &mut [u32], experts: usize) {
    for i in (0..ids.len()).rev() {
        let score = tie(ids[i] as usize).0;
        let same = |e: &usize| tie(*e).0 == score && !ids.contains(&(*e as u32));
        if let Some(e) = (ids[i] as usize..experts).rev().find(same) {
            ids[i] = e as u32;
        }
    }
    ids.sort_unstable();
}

fn invariant(suite: &Suite) -> Verdict {
    let one = Case::new(1024, 256, 32, 6, 1);
    let mut wanted: Option<Left> = None;
    for rows in [1, 2, 8, 9, 33, 200] {
        let case = Case { rows, ..one.clone() };
        let mut gpu = suite.gpu(limits(rows, 32)).map_err(|error| error.to_string())?;
        let first = first_row(&mut gpu, &case, &one.h()).map_err(|error| error.to_string())?;
        let want = wanted.get_or_insert(first.clone());
        compare(want, &first).map_err(|why| format!("{rows} rows: {why}"))?;
    }
    Ok("6 row counts".to_owned())
}

/// Row 0 of a step whose first row is `h`.
fn first_row<D: Steps + Alloc + Readback + Landing>(dev: &mut D, case: &Case, h: &[f32]) -> DeviceResult<Left> {
    let mut all = case.h();
    all[..h.len()].copy_from_slice(h);
    let of = |values: Vec<f32>, len: usize| values[..len].to_vec();
    let ExpertConfig { router, hidden, ffn, .. } = case.cfg;
    let Left { ids, weights, shared, out, .. } = run_with(dev, case, &all)?;
    Ok(Left {
        ids: ids[..router.chosen].to_vec(),
        weights: of(weights, router.chosen),
        shared: of(shared, ffn),
        out: of(out, hidden),
        ..Left::default()
    })
}

/// Three sites with experts between the last two: the gate may do what the site before has put off, products read what the
/// site left for them, and the last site reads their sum. `launched`: what is to be said of the GPU's kernels.
fn between_sites(suite: &Suite, cpu: &Case, gpu: &Case, launched: fn(&[&str]) -> Verdict) -> Verdict {
    let mut pair = suite.pair(limits(cpu.rows, 32));
    let want = sites(&mut pair.cpu, cpu, &mut |_, _| Ok(())).map_err(|error| error.to_string())?;
    let got = sites(&mut pair.gpu, gpu, &mut |_, _| Ok(())).map_err(|error| error.to_string())?;
    launched(&pair.gpu.launched().collect::<Vec<_>>())?;
    all(want.iter().zip(&got).map(|(want, got)| equal_or_nan(want, got)))
}

/// The GPU's sum of one row's experts is what the CPU's experts one by one make in this order; the last is the shared one.
fn summed(suite: &Suite, case: &Case, order: &[usize]) -> Verdict {
    let ExpertConfig { router: RouterConfig { chosen, .. }, hidden, ffn, .. } = case.cfg;
    let mut pair = suite.pair(limits(1, 32));
    let mut parts: Vec<Vec<f32>> = Vec::new();
    // Units of the others are 0, and so is what they add.
    let mut alone = |dev: &mut Cpu, bench: &mut Bench<Cpu>| {
        let (mid, shared) = (read(dev, &bench.work.mid, chosen * ffn)?, read(dev, &bench.work.shared, ffn)?);
        for e in 0..=chosen {
            let (mut one, mut last) = (vec![0.0; chosen * ffn], vec![0.0; ffn]);
            match one.get_mut(e * ffn..(e + 1) * ffn) {
                Some(units) => units.copy_from_slice(&mid[e * ffn..(e + 1) * ffn]),
                None => last.copy_from_slice(&shared),
            }
            dev.write(&mut bench.work.mid, &one)?;
            dev.write(&mut bench.work.shared, &last)?;
            dev.experts_down(&mut bench.out, &bench.work, &bench.weights, &case.cfg, 1)?;
            parts.push(read(dev, &bench.out, hidden)?);
        }
        Ok(())
    };
    sites(&mut pair.cpu, case, &mut alone).map_err(|error| error.to_string())?;
    let [.., got, _] = sites(&mut pair.gpu, case, &mut |_, _| Ok(())).map_err(|error| error.to_string())?;
    let want: Vec<f32> = (0..hidden).map(|n| order.iter().fold(0.0, |sum, &e| sum + parts[e][n])).collect();
    equal(&want, &got)
}

/// The streams, their mixing values, units of the shared expert, the choice, other units, their sum, and what the last site
/// leaves. `then`: what happens behind the sum of the experts.
fn sites<D: Steps + Alloc + Readback + Landing>(
    dev: &mut D,
    case: &Case,
    then: &mut dyn FnMut(&mut D, &mut Bench<D>) -> DeviceResult<()>,
) -> DeviceResult<[Vec<f32>; 7]> {
    let (rows, dim, class) = (case.rows, case.cfg.hidden, MemoryClass::Workspace);
    let mut bench = Bench::new(dev, case)?;
    let mut rng = Rng(21);
    let site = HcSite {
        mix: dev.vector("mix", &rng.values(MIXES * STREAMS * dim, 0.02))?,
        base: dev.vector("base", &rng.values(MIXES, 1.0))?,
        scale: dev.vector("scale", &[1.0, 0.8, 1.5])?,
    };
    let weight = dev.vector("norm", &vec![1.0; dim])?;
    let x = dev.alloc("streams", class, rows * STREAMS * dim)?;
    let mut streams = Streams { x, mixing: dev.alloc("mixing", class, rows * MIXES)? };
    let mut sum = dev.alloc("sum", class, rows * dim)?;
    let mut values = rng.values(rows * STREAMS * dim, 1.0);
    if case.scores == Scores::Faulty {
        values[dim / 3] = f32::NAN;
    }
    dev.write(&mut streams.x, &values)?;
    dev.write(&mut streams.mixing, &rng.values(rows * MIXES, 0.5))?;
    let mut delta = table(rows);
    if case.padding {
        delta.rows = Some(vec![Row { flags: row_flags::PADDING, ..Row::default() }; rows]);
    }
    dev.stage(&delta)?;
    let cfg = HcConfig { dim, iterations: 20, eps: 1e-6, norm_eps: 1e-6 };
    dev.step(stage_key(rows), &mut |dev| {
        let (norm, Bench { weights, work, h, out }) = (Norm { weight: &weight, eps: 1e-6 }, &mut bench);
        dev.hc_site(out, &mut streams, Incoming::Output(h), &site, &cfg, norm, rows)?;
        dev.hc_site(h, &mut streams, Incoming::Output(out), &site, &cfg, norm, rows)?;
        dev.ffn_in(work, h, weights, &case.cfg, rows)?;
        dev.experts_up(work, h, weights, &case.cfg, rows)?;
        if case.twice {
            // Of inputs that nobody has left.
            let cfg = ExpertConfig { inputs: Inputs::Fp8, ..case.cfg };
            dev.ffn_in(work, h, weights, &cfg, rows)?;
        }
        dev.experts_down(&mut sum, work, weights, &case.cfg, rows)?;
        dev.hc_site(out, &mut streams, Incoming::Output(&sum), &site, &cfg, norm, rows)?;
        then(dev, &mut bench)
    })?;
    let (x, mixing, chosen) = (rows * STREAMS * dim, rows * MIXES, rows * case.cfg.router.chosen);
    let bounds = read(dev, &bench.work.bounds, case.cfg.router.experts + 1)?;
    let assigned = bounds[case.cfg.router.experts] as usize;
    let mut choice = read(dev, &bench.work.ids, chosen)?;
    choice.extend(read(dev, &bench.work.order, assigned.min(chosen))?);
    choice.extend(bounds);
    let mut choice: Vec<f32> = choice.into_iter().map(|word| word as f32).collect();
    choice.extend(read(dev, &bench.work.weights, chosen)?);
    Ok([
        read(dev, &streams.x, x)?,
        read(dev, &streams.mixing, mixing)?,
        read(dev, &bench.work.shared, rows * case.cfg.ffn)?,
        choice,
        read(dev, &bench.work.mid, assigned.min(rows * case.cfg.router.chosen) * case.cfg.ffn)?,
        read(dev, &sum, rows * dim)?,
        read(dev, &bench.out, rows * dim)?,
    ])
}

/// The shared expert's unit where its matrices pick single inputs, so that gate and up are known: values far beyond the
/// clamp on both sides, and a NaN.
fn clamps(suite: &Suite, clamp: fn(f32, f32) -> f32) -> Verdict {
    let case = Case { formats: [Format::Q8_0, Format::Q8_0, Format::F32], ..Case::new(1024, 256, 8, 2, 2) };
    let (rows, ExpertConfig { hidden, ffn, limit, .. }) = (case.rows, case.cfg);
    let mut gpu = suite.gpu(limits(rows, 32)).map_err(|error| error.to_string())?;
    let mut picks = vec![0.0f32; 2 * ffn * hidden];
    (0..2 * ffn).for_each(|n| picks[n * hidden + n] = 1.0);
    let picks: Vec<u8> = picks.iter().flat_map(|x| x.to_le_bytes()).collect();
    let h: Vec<f32> = Rng(3).values(rows * hidden, 12.0);
    let got = (|| {
        let parts = picks.chunks_exact(4 * ffn * hidden);
        let part = |bytes| MatrixSource { format: Format::F32, rows: ffn, cols: hidden, bytes: Bytes::Stored(bytes) };
        let shared_up = gpu.matrix("picks", &parts.map(part).collect::<Vec<_>>())?;
        let mut bench = Bench::new(&mut gpu, &case)?;
        bench.weights.shared_up = shared_up;
        gpu.write(&mut bench.h, &h)?;
        gpu.stage(&table(rows))?;
        gpu.step(stage_key(rows), &mut |dev| dev.ffn_in(&mut bench.work, &bench.h, &bench.weights, &case.cfg, rows))?;
        read(&mut gpu, &bench.work.shared, rows * ffn)
    })()
    .map_err(|error| error.to_string())?;
    let unit = |gate: f32, up: f32| silu(clamp(gate, limit)) * up.clamp(-limit, limit);
    let want = h.chunks_exact(hidden).flat_map(|h| (0..ffn).map(|n| unit(h[n], h[ffn + n])));
    equal_or_nan(&want.collect::<Vec<_>>(), &got)
}

/// The stages at the production sizes.
fn perf(suite: &Suite) -> Verdict {
    let mut text = Vec::new();
    for rows in [1, 2, 4, 8, 32, 64, 256, 512, 2048] {
        let case = Case::new(4096, 2048, 256, 6, rows);
        let mut gpu = suite.gpu(limits(rows, 32)).map_err(|error| error.to_string())?;
        text.push(figures(&mut gpu, &case).map_err(|error| error.to_string())?);
    }
    Ok(format!("us by rows: ffn_in, experts_up, experts_down: {}", text.join("; ")))
}

fn figures(gpu: &mut arc_device::cuda::Cuda, case: &Case) -> DeviceResult<String> {
    let mut bench = Bench::new(gpu, case)?;
    let (rows, cfg) = (case.rows, &case.cfg);
    let mut delta = table(rows);
    // Every row counts.
    if let Some(table) = &mut delta.rows {
        for r in 0..rows {
            if table[r].flags & row_flags::PADDING != 0 {
                table[r] = table[r - 1];
            }
        }
    }
    gpu.stage(&delta)?;
    let Bench { weights, work, h, out } = &mut bench;
    let ins = gpu.bench(stage_key(rows), 20, &mut |dev| dev.ffn_in(work, h, weights, cfg, rows))?;
    let up = gpu.bench(stage_key(rows), 20, &mut |dev| dev.experts_up(work, h, weights, cfg, rows))?;
    let down = gpu.bench(stage_key(rows), 20, &mut |dev| dev.experts_down(out, work, weights, cfg, rows))?;
    Ok(format!("{rows}: {ins:.2} {up:.2} {down:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The choice ends among equal scores, so that the mutant differs.
    #[test]
    fn ties_tell_the_lower_id_from_the_higher() {
        for experts in [32, 64, 256] {
            let case = Case { scores: Scores::Ties, ..Case::new(1024, 256, experts, 6, 1) };
            let left = run(&mut Cpu::new(2, limits(1, 32)), &case).expect("it runs");
            let mut ids = left.ids.clone();
            higher(&mut ids, experts);
            assert_ne!(ids, left.ids, "{experts} experts");
        }
    }
}
