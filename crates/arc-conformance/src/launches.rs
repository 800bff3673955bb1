//! Which kernels a step of DeepSeek-V4-Flash's widths is made of: that one has given way to another which does the same does not
//! show in what they leave.

use std::path::Path;

use arc_device::Steps;
use arc_device::step::{BLOCK_TOKENS, CtxClass, Limits, Part, StepKey};
use arc_engine::load::{LoadError, ModelFile};
use arc_engine::model::deepseek_v4::Numerics;
use arc_engine::model::{Model, ModelConfig};

use crate::suite::{Suite, Verdict};

/// A layer of each kind, and the draft block.
const SLICE: &str = "synthetic:deepseek-v4-slice";

/// A step, and what is to be said of its kernels.
#[derive(Clone)]
struct Step {
    /// Positions that there is room for.
    room: usize,
    ctx: CtxClass,
    rows: u32,
    drafts: u32,
    /// Kernels that it has, and such that it does not have; `*`: any that begin so.
    has: Vec<&'static str>,
    lacks: Vec<&'static str>,
}

/// One row shares all launches: products, a choice, experts.
const ONE: [&str; 8] = [
    "arc_matmul_follow_normed",
    "latent_rows",
    "arc_matmul_follow",
    "arc_hc_site_sent",
    "arc_matmul_experts_row",
    "arc_hc_head_cluster",
    "sample_rows",
    "step_commit",
];
const NOT_ONE: [&str; 8] = [
    "arc_matmul_prepare",
    "arc_matmul_experts_up_*",
    "arc_router_*",
    "arc_moe_*",
    "arc_hc_settle",
    "index_score",
    "index_pick",
    "latent_merge",
];
/// Experts of a few rows, and of many, at once.
const FEW: [&str; 7] = [
    "arc_hc_site_cluster",
    "arc_router_few_4",
    "arc_matmul_experts_up_iq2_xxs",
    "arc_matmul_experts_down_q2_k",
    "latent_rows",
    "latent_attend_512",
    "arc_matmul_gemv_q8_0_*",
];
const MANY: [&str; 10] = [
    "arc_hc_site_rows",
    "arc_hc_head_mix",
    "arc_hc_head_rows",
    "arc_router_scores_*",
    "arc_router_choose",
    "arc_moe_assign",
    "arc_matmul_grouped_iq2_xxs_*",
    "arc_matmul_grouped_q2_k_*",
    "arc_matmul_mma_q8_0_*",
    "latent_attend_512",
];
const SCORED: [&str; 2] = ["index_score", "index_pick"];
const DRAFTED: [&str; 4] = ["step_settle", "step_draft_rows", "step_draft_gather", "step_push_drafts"];

const LONG: usize = 131_072;

/// Steps of one row and of more, in contexts of every class.
pub fn cases(suite: &mut Suite) {
    let step = |room, ctx, rows, has: &[&[&'static str]], lacks: &[&[&'static str]]| Step {
        room,
        ctx,
        rows,
        drafts: 0,
        has: has.concat(),
        lacks: lacks.concat(),
    };
    use CtxClass::{Long, Medium, Short};
    let chosen: &[&str] = &["arc_matmul_follow_indexed"];
    let (few, many): (&[&str], &[&str]) = (&["index_choose", "latent_attend_tiles"], &["index_choose_many"]);
    let (by_512, long): (&[&str], &[&str]) = (&["latent_attend_512"], &["latent_attend_long"]);
    let one = [
        step(LONG, Short, 1, &[&ONE, &["latent_attend_tiles"]], &[&NOT_ONE, &["index_*"], chosen, by_512, long]),
        step(8192, Medium, 1, &[&ONE, chosen, few], &[&NOT_ONE, many, by_512, long]),
        step(LONG, Medium, 1, &[&ONE, chosen, many, by_512], &[&NOT_ONE, &["index_choose"], long]),
        step(LONG, Long, 1, &[&ONE, chosen, many, by_512, long], &[&NOT_ONE, &["index_choose"]]),
    ];
    suite.case("launches/one row", |suite| check(suite, &one));
    let few = [2, 4, 8].map(|rows| {
        step(LONG, Medium, rows, &[&FEW, &SCORED], &[&["index_choose*", "arc_moe_assign", "arc_matmul_mma_*"]])
    });
    suite.case("launches/few rows", |suite| check(suite, &few));
    let mix = |n: usize| ["arc_hc_site_mix_1", "arc_hc_site_mix_2", "arc_hc_site_mix_4", "arc_hc_site_mix_8"][n];
    let mut many = [(9, 0), (64, 1), (128, 2), (512, 3), (2048, 3)].map(|(rows, n)| {
        step(LONG, Medium, rows, &[&MANY, &SCORED, &[mix(n)]], &[&["index_choose*", "arc_matmul_gemv_*"]])
    });
    many[1..].iter_mut().for_each(|step| step.has.push("latent_rings"));
    suite.case("launches/many rows", |suite| check(suite, &many));
    let drafts = [1, 4].map(|rows| Step { drafts: 3, ..step(LONG, Medium, rows, &[&ONE, &DRAFTED], &[]) });
    suite.case("launches/drafts", |suite| check(suite, &drafts));
    for (what, has, lacks) in
        [("misses one", "latent_attend_512", "-"), ("has another", "latent_rows", "latent_attend_*")]
    {
        let wrong = step(LONG, Short, 1, &[&[has]], &[&[lacks]]);
        suite.mutant(&format!("launches/one row {what}"), |suite| check(suite, std::slice::from_ref(&wrong)));
    }
}

/// Records the steps, which runs none.
fn check(suite: &Suite, steps: &[Step]) -> Verdict {
    let mut said = Vec::new();
    for room in [8192, LONG] {
        let steps: Vec<&Step> = steps.iter().filter(|step| step.room == room).collect();
        if steps.is_empty() {
            continue;
        }
        let launched = record(suite, room, &steps).map_err(|error| error.to_string())?;
        for (step, launched) in steps.into_iter().zip(launched) {
            let Step { ctx, rows, drafts, .. } = step;
            let has = |name: &&&'static str| launched.iter().any(|kernel| matches(name, kernel));
            let missing: Vec<_> = step.has.iter().filter(|name| !has(name)).collect();
            let wrong: Vec<_> = step.lacks.iter().filter(has).collect();
            if !missing.is_empty() || !wrong.is_empty() {
                return Err(format!("{rows} rows, {drafts} drafts, {ctx:?} of {room}: not {missing:?}, but {wrong:?}"));
            }
            said.push(format!("{rows} rows, {ctx:?}: {} launches", launched.len()));
        }
    }
    Ok(said.join("; "))
}

fn matches(name: &str, kernel: &str) -> bool {
    name.strip_suffix('*').map_or(kernel == name, |begin| kernel.starts_with(begin))
}

/// What each of the steps launches, with room for so many positions.
fn record(suite: &Suite, room: usize, steps: &[&Step]) -> Result<Vec<Vec<&'static str>>, LoadError> {
    let most = steps.iter().map(|step| step.rows as usize).max().unwrap_or(1);
    let limits =
        Limits { slots: 16, rows: most.max(16), heads: 64, context: room, blocks: room / BLOCK_TOKENS, ring: 4 };
    let file = ModelFile::open(Path::new(SLICE))?;
    let mut config = ModelConfig::read(&file)?;
    if let ModelConfig::DeepseekV4(v4) = &mut config {
        v4.set_numerics(Numerics::Serving);
    }
    config.load_draft_block(&file);
    let mut dev = suite.gpu(limits)?;
    let mut model = Model::load(&mut dev, &file, &config, &limits)?;
    let mut launched = Vec::new();
    for step in steps {
        let key = StepKey::new(step.rows, step.rows.min(64), step.ctx, Part::Whole);
        let key = if step.drafts > 0 { key.drafting(step.drafts, 1) } else { key };
        dev.record(key, &mut |dev| model.step(dev, key))?;
        launched.push(dev.launched().collect());
    }
    Ok(launched)
}
