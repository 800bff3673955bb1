//! Rope, append and attention of the dense decoder: the CPU's bits.

use arc_device::ops::kv::{AttentionConfig, Rope, RopeStyle};
use arc_device::step::{BLOCK_TOKENS, CtxClass, Limits, Part, StepKey};
use arc_device::{Alloc, KvLayer, Landing, MemoryClass, Norm, Ops, QkvConfig, Readback, Steps};

use crate::compare::{all, equal, equal_bits};
use crate::inputs::Rng;
use crate::rows::{Run, context, delta};
use crate::suite::{Suite, Verdict, shape};

/// What a case fixes.
#[derive(Clone)]
struct Case {
    att: AttentionConfig,
    rope: Rope,
    norms: bool,
    runs: Vec<Run>,
    ctx: CtxClass,
}

impl Case {
    /// Positions that every sequence has room for.
    fn context(&self) -> usize {
        context(&self.runs)
    }
}

/// What a device left.
struct Left {
    qkv: Vec<f32>,
    out: Vec<f32>,
    k: Vec<u16>,
    v: Vec<u16>,
    /// Bytes that were read of it.
    kv_bytes: u64,
}

/// Shapes, windows, and row tables of every kind.
pub fn cases(suite: &mut Suite) {
    let shapes = [
        (9, 3, 64, None),
        (32, 8, 128, None),
        (14, 2, 64, Some(300)),
        (8, 4, 256, Some(40)),
        (4, 4, 48, None),
        (64, 1, 32, None),
        (7, 1, 80, Some(1)),
        (2, 1, 2, None),
        (6, 2, 192, Some(512)),
    ];
    for (n_heads, n_kv_heads, head_dim, window) in shapes {
        let att = AttentionConfig { n_heads, n_kv_heads, head_dim, scale: (head_dim as f32).powf(-0.5), window };
        let name = format!("kv/{n_heads}x{n_kv_heads}x{head_dim}");
        for (i, style) in [RopeStyle::Halves, RopeStyle::Adjacent].into_iter().enumerate() {
            let dim = if i == 0 { head_dim } else { (head_dim / 4 * 2).max(2) };
            for (table, runs) in tables().into_iter().enumerate() {
                let ctx = CtxClass::of(runs.iter().map(|run| run.pos + run.rows).max().unwrap_or(0) as u32);
                let case = Case { att, rope: Rope { dim, style }, norms: i == 0, runs, ctx };
                suite.case(&format!("{name}/{style:?}/{table}"), |suite| same(suite, &case, |_| {}));
            }
        }
    }
    let att = AttentionConfig { n_heads: 9, n_kv_heads: 3, head_dim: 64, scale: 0.125, window: Some(300) };
    let rope = Rope { dim: 64, style: RopeStyle::Halves };
    for runs in [tables().swap_remove(1), tables().swap_remove(3)] {
        let case = Case { att, rope, norms: true, ctx: CtxClass::Medium, runs };
        let rows = case.runs.iter().map(|run| run.rows).sum::<usize>();
        suite.mutant(&format!("kv/window/{rows}"), |suite| same(suite, &case, |case| case.att.window = Some(301)));
        suite.mutant(&format!("kv/scale/{rows}"), |suite| {
            same(suite, &case, |case| case.att.scale = f32::from_bits(case.att.scale.to_bits() + 1))
        });
        suite.mutant(&format!("kv/rope/{rows}"), |suite| {
            same(suite, &case, |case| case.rope.style = RopeStyle::Adjacent)
        });
        suite.case(&format!("kv/alone/{rows}"), |suite| alone(suite, &case));
    }
    for (name, n_heads, n_kv_heads, head_dim) in [("smollm2-135m", 9, 3, 64), ("llama-8b", 32, 8, 128)] {
        let att = AttentionConfig { n_heads, n_kv_heads, head_dim, scale: 0.125, window: None };
        suite.measure(&format!("kv/{name}"), |suite| measure(suite, att));
    }
}

/// Decoding rows, chunks, both, with inert rows between; short and long contexts.
fn tables() -> Vec<Vec<Run>> {
    let decode = |pos: usize| Run { pos, rows: 1, live: true };
    let chunk = |pos: usize, rows: usize| Run { pos, rows, live: true };
    let inert = Run { pos: 0, rows: 1, live: false };
    vec![
        vec![decode(0)],
        vec![decode(700)],
        vec![decode(5000)],
        vec![chunk(3, 5), inert, decode(31), decode(255), decode(256), inert, decode(2047)],
        vec![chunk(0, 70), inert, decode(1000), chunk(611, 3), chunk(2000, 45)],
        (0..20).map(|i| decode(i * 97 % 700)).collect(),
        vec![chunk(300, 21), decode(6100), inert, inert, chunk(7000, 64)],
    ]
}

/// Both stages on one device.
fn run<D: Ops + Alloc + Landing + Readback + Steps>(dev: &mut D, case: &Case) -> Result<Left, String> {
    let text = |error: arc_device::error::DeviceError| error.to_string();
    let (att, context, rows) = (&case.att, case.context(), case.runs.iter().map(|run| run.rows).sum::<usize>());
    let mut rng = Rng(7);
    let blocks = case.runs.len() * context / BLOCK_TOKENS;
    let q_norm = dev.vector("q_norm", &rng.values(att.head_dim, 1.0)).map_err(text)?;
    let k_norm = dev.vector("k_norm", &rng.values(att.head_dim, 1.0)).map_err(text)?;
    let angles = rng.values(context * case.rope.dim, 1.0);
    let rope_table = dev.vector("rope", &angles).map_err(text)?;
    let alloc = |dev: &mut D, len| dev.alloc::<f32>("test", MemoryClass::Workspace, len).map_err(text);
    let mut qkv = alloc(dev, rows * att.qkv_dim())?;
    let mut out = alloc(dev, rows * att.n_heads * att.head_dim)?;
    let len = att.kv_elements(blocks);
    let mut kv = KvLayer {
        k: dev.alloc("k", MemoryClass::State, len).map_err(text)?,
        v: dev.alloc("v", MemoryClass::State, len).map_err(text)?,
    };
    dev.finish(&shape(100, 64)).map_err(text)?;
    let staged = delta(&case.runs, case.context());
    // What no sequence has written yet must not be seen.
    let (mut k, mut v) = (vec![0x7e00u16; len], vec![0x7e00u16; len]);
    for init in &staged.admit {
        // A sequence has the same rows whoever else is there.
        let mut rng = Rng(100 + u64::from(init.slot));
        for p in 0..init.pos as usize {
            let tile = init.blocks[p / BLOCK_TOKENS] as usize * att.n_kv_heads;
            for head in 0..att.n_kv_heads {
                let at = (tile + head) * att.head_dim * BLOCK_TOKENS;
                for d in 0..att.head_dim {
                    // f16 between -2 and 2.
                    let bits = rng.next();
                    let half = |bits: u64| (bits as u16 & 0x83ff) | (0x3000 + (bits as u16 >> 12 & 3) * 0x400);
                    k[at + d * BLOCK_TOKENS + p % BLOCK_TOKENS] = half(bits);
                    v[at + p % BLOCK_TOKENS * att.head_dim + d] = half(bits >> 16);
                }
            }
        }
    }
    dev.write(&mut kv.k, &k).map_err(text)?;
    dev.write(&mut kv.v, &v).map_err(text)?;
    dev.write(&mut qkv, &rng.values(rows * att.qkv_dim(), 1.0)).map_err(text)?;
    dev.write(&mut out, &vec![f32::NAN; rows * att.n_heads * att.head_dim]).map_err(text)?;
    dev.stage(&staged).map_err(text)?;
    let norm = |weight| case.norms.then_some(Norm { weight, eps: 1e-6 });
    let cfg = QkvConfig {
        attention: *att,
        rope: case.rope,
        rope_table: &rope_table,
        q_norm: norm(&q_norm),
        k_norm: norm(&k_norm),
    };
    let key = StepKey::new(rows as u32, 256, case.ctx, Part::Whole);
    let stages = &mut |dev: &mut D| {
        dev.qkv_rope_append(&mut qkv, &mut kv, &cfg, rows)?;
        dev.attention(&mut out, &qkv, &kv, att, rows)?;
        dev.commit(rows, 0)
    };
    let step = dev.step(key, stages).map_err(text)?;
    let (qkv_len, out_len) = (rows * att.qkv_dim(), rows * att.n_heads * att.head_dim);
    let mut left = Left { qkv: vec![0.0; qkv_len], out: vec![0.0; out_len], k, v, kv_bytes: 0 };
    dev.read(&qkv, &mut left.qkv).map_err(text)?;
    dev.read(&out, &mut left.out).map_err(text)?;
    dev.read(&kv.k, &mut left.k).map_err(text)?;
    dev.read(&kv.v, &mut left.v).map_err(text)?;
    left.kv_bytes = dev.clocks(step).kv_bytes;
    Ok(left)
}

fn limits(case: &Case) -> Limits {
    let rows = case.runs.iter().map(|run| run.rows).sum();
    let (slots, context) = (case.runs.len(), case.context());
    Limits { slots, rows, heads: rows, context, blocks: slots * context / BLOCK_TOKENS, ring: 4 }
}

fn same(suite: &Suite, case: &Case, change: impl Fn(&mut Case)) -> Verdict {
    let mut pair = suite.pair(limits(case));
    let mut changed = case.clone();
    change(&mut changed);
    let (want, got) = (run(&mut pair.cpu, case)?, run(&mut pair.gpu, &changed)?);
    all([
        equal_bits(&want.qkv, &got.qkv),
        equal(&want.k, &got.k),
        equal(&want.v, &got.v),
        equal_bits(&want.out, &got.out),
        equal(&[want.kv_bytes], &[got.kv_bytes]).map_err(|why| format!("bytes read: {why}")),
    ])
}

/// A row has the same bits alone as among the others.
fn alone(suite: &Suite, case: &Case) -> Verdict {
    let together = run(&mut suite.pair(limits(case)).gpu, case)?.out;
    let dim = case.att.n_heads * case.att.head_dim;
    // Inputs are drawn in the order of the table, so what is alone keeps the table and drops the other rows.
    let mut first = 0;
    let mut verdicts = Vec::new();
    for (i, kept) in case.runs.iter().enumerate() {
        let mut only = case.clone();
        only.runs.iter_mut().enumerate().filter(|(j, _)| *j != i).for_each(|(_, run)| run.live = false);
        let mut pair = suite.pair(limits(case));
        let out = run(&mut pair.gpu, &only)?.out;
        let range = first * dim..(first + kept.rows) * dim;
        verdicts.push(equal_bits(&together[range.clone()], &out[range]));
        first += kept.rows;
    }
    all(verdicts)
}

fn measure(suite: &Suite, att: AttentionConfig) -> Verdict {
    let mut text = Vec::new();
    for (pos, sequences, rows) in [
        (20, 1, 1),
        (200, 1, 1),
        (2000, 1, 1),
        (8000, 1, 1),
        (2000, 8, 1),
        (2000, 64, 1),
        (0, 1, 512),
        (0, 1, 2048),
        (6000, 1, 2048),
    ] {
        let runs = vec![Run { pos, rows, live: true }; sequences];
        let case = Case {
            att,
            rope: Rope { dim: att.head_dim, style: RopeStyle::Halves },
            norms: false,
            runs,
            ctx: CtxClass::of(pos as u32 + 48),
        };
        let text_of = |error: arc_device::error::DeviceError| error.to_string();
        let mut dev = suite.gpu(limits(&case)).map_err(text_of)?;
        let total = rows * sequences;
        let rope_table = dev.vector("rope", &vec![0.5; case.context() * att.head_dim]).map_err(text_of)?;
        let mut qkv = dev.alloc::<f32>("test", MemoryClass::Workspace, total * att.qkv_dim()).map_err(text_of)?;
        let mut out =
            dev.alloc::<f32>("test", MemoryClass::Workspace, total * att.n_heads * att.head_dim).map_err(text_of)?;
        let len = att.kv_elements(sequences * case.context() / BLOCK_TOKENS);
        let mut kv = KvLayer {
            k: dev.alloc("k", MemoryClass::State, len).map_err(text_of)?,
            v: dev.alloc("v", MemoryClass::State, len).map_err(text_of)?,
        };
        dev.finish(&shape(100, 64)).map_err(text_of)?;
        dev.stage(&delta(&case.runs, case.context())).map_err(text_of)?;
        let cfg = QkvConfig { attention: att, rope: case.rope, rope_table: &rope_table, q_norm: None, k_norm: None };
        let key = StepKey::new(total as u32, 256, case.ctx, Part::Forward);
        let repeats = if total > 100 { 5 } else { 100 };
        let append =
            dev.bench(key, repeats, &mut |dev| dev.qkv_rope_append(&mut qkv, &mut kv, &cfg, total)).map_err(text_of)?;
        let attend =
            dev.bench(key, repeats, &mut |dev| dev.attention(&mut out, &qkv, &kv, &att, total)).map_err(text_of)?;
        text.push(format!("{sequences} x {rows} at {pos}: {append:.2} + {attend:.2} us"));
    }
    Ok(text.join("; "))
}
