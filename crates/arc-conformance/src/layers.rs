//! Layers of a dense decoder over a few rows, in one launch: what their stages leave on the CPU.

use arc_device::error::Fault;
use arc_device::format::Format;
use arc_device::ops::glu::Activation;
use arc_device::ops::kv::{AttentionConfig, Rope, RopeStyle};
use arc_device::ops::matmul::{Bytes, MatrixSource};
use arc_device::step::{BLOCK_TOKENS, CtxClass, Limits, Part, StepKey};
use arc_device::{Alloc, Buffers, DenseLayer, DenseRows, KvLayer, Landing, Norm, Ops, QkvConfig, Readback, Steps};

use crate::compare::{all, equal, equal_bits, launches};
use crate::inputs::Rng;
use crate::matmul::{buf, rows_of};
use crate::rows::{Run, context, delta};
use crate::suite::{Suite, Verdict, shape};

const EPS: f32 = 1e-5;
/// What takes all layers of a launch of several rows, and of one.
const KERNEL: &str = "arc_matmul_layers_576";
const KERNEL_OF_ONE: &str = "arc_matmul_layers_576_one";

/// What the launch does not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beyond {
    Bias,
    QNorm,
    KNorm,
    AttentionPostNorm,
    FfnPostNorm,
    Gelu,
    Eps,
    Window,
    Rope,
    /// The last layer's scale is another.
    Scale,
    Context,
}

/// What a case fixes.
#[derive(Clone)]
struct Case {
    hidden: usize,
    n_heads: usize,
    n_kv_heads: usize,
    ffn: usize,
    layers: usize,
    style: RopeStyle,
    /// Of the third layer's last matrix; the others are of Q4_1.
    format: Format,
    /// The step's rows, by sequence.
    runs: Vec<Run>,
    scale: f32,
    /// Layers change places.
    swapped: bool,
    beyond: Option<Beyond>,
}

impl Case {
    /// SmolLM2-135M's, one row.
    fn smollm2(pos: usize, layers: usize, style: RopeStyle) -> Case {
        Case {
            hidden: 576,
            n_heads: 9,
            n_kv_heads: 3,
            ffn: 1536,
            layers,
            style,
            format: Format::Q4_1,
            runs: vec![Run { pos, rows: 1, live: true }],
            scale: 0.125,
            swapped: false,
            beyond: None,
        }
    }

    fn is(&self, beyond: Beyond) -> bool {
        self.beyond == Some(beyond)
    }

    /// Of layer `i`.
    fn attention(&self, i: usize) -> AttentionConfig {
        let Case { n_heads, n_kv_heads, .. } = *self;
        let scale = self.scale * if self.is(Beyond::Scale) && i + 1 == self.layers { 0.5 } else { 1.0 };
        AttentionConfig { n_heads, n_kv_heads, head_dim: 64, scale, window: self.is(Beyond::Window).then_some(17) }
    }

    /// The same over these rows: position and rows of a sequence, padding where it has none.
    fn rows(self, runs: &[(usize, usize)]) -> Case {
        let run = |&(pos, rows): &(usize, usize)| Run { pos, rows: rows.max(1), live: rows > 0 };
        Case { runs: runs.iter().map(run).collect(), ..self }
    }

    fn n_rows(&self) -> usize {
        self.runs.iter().map(|run| run.rows).sum()
    }

    fn key(&self) -> StepKey {
        let ctx = if self.is(Beyond::Context) { CtxClass::Medium } else { CtxClass::Short };
        StepKey::new(self.n_rows() as u32, 256, ctx, Part::Forward)
    }

    /// Of a sequence.
    fn context(&self) -> usize {
        context(&self.runs)
    }

    fn limits(&self) -> Limits {
        let (context, slots, rows) = (self.context(), self.runs.len(), self.n_rows());
        Limits { slots, rows, heads: rows, context, blocks: slots * context / BLOCK_TOKENS, ring: 4 }
    }
}

/// Positions where tiles and splits begin and end, several layers, and what the launch does not take.
pub fn cases(suite: &mut Suite) {
    use RopeStyle::{Adjacent, Halves};
    for pos in [0, 1, 31, 32, 200, 255, 256, 511, 700, 1279, 1280, 1800, 2047] {
        for style in [Adjacent, Halves] {
            let case = Case::smollm2(pos, 3, style);
            suite.case(&format!("layers/smollm2/{style:?}/{pos}"), |suite| one(suite, &case, &case));
        }
    }
    // Two splits of keys, in a launch that compute-sanitizer ends.
    let case = Case::smollm2(300, 1, Adjacent);
    suite.case("layers/smollm2/one layer", |suite| one(suite, &case, &case));
    let case = Case::smollm2(300, 34, Adjacent);
    suite.case("layers/smollm2/more than a launch has", |suite| {
        same(suite, &case, &case, |launched| {
            launches("", &["step_begin", KERNEL_OF_ONE, KERNEL_OF_ONE, "step_count"], launched)
        })
    });
    let case = Case::smollm2(0, 2, Adjacent).rows(&[(0, 0)]);
    suite.case("layers/inert", |suite| one(suite, &case, &case));
    // Sequences side by side, rows of one sequence, both; more rows than there are clusters. How many launches: as the device has.
    for (name, runs) in [
        ("two", &[(40, 1), (300, 1)][..]),
        ("three, one inert", &[(255, 1), (0, 0), (31, 1)]),
        ("a sequence's", &[(30, 4)]),
        ("a sequence's over two splits", &[(254, 6)]),
        ("of several", &[(0, 2), (700, 1), (1279, 3)]),
        ("many", &[(5, 1), (100, 1), (0, 9), (400, 1), (600, 1), (1, 1), (800, 3)]),
    ] {
        let case = Case::smollm2(0, 3, Adjacent).rows(runs);
        suite.case(&format!("layers/smollm2/rows/{name}"), |suite| {
            same(suite, &case, &case, |launched| {
                let n = launched.iter().filter(|&&kernel| kernel == KERNEL).count().clamp(1, case.n_rows());
                launches("", &[&["step_begin"][..], &vec![KERNEL; n], &["step_count"]].concat(), launched)
            })
        });
    }
    let case = Case::smollm2(2048, 2, Adjacent);
    suite.case("layers/position 2,048 of a short key", |suite| past_the_key(suite, &case));
    beyond(suite);
    let case = Case { format: Format::Q8_0, ..Case::smollm2(40, 3, Adjacent) };
    suite.case("layers/by stages/of two formats", |suite| by_stages(suite, &case, &case));
    let case = Case { n_heads: 8, n_kv_heads: 4, ..Case::smollm2(40, 1, Adjacent) };
    suite.case("layers/by stages/of another shape", |suite| by_stages(suite, &case, &case));

    let case = Case::smollm2(300, 2, Adjacent);
    let other = Case { style: Halves, ..case.clone() };
    suite.mutant("layers/rope", |suite| one(suite, &case, &other));
    let other = Case { scale: 0.126, ..case.clone() };
    suite.mutant("layers/scale", |suite| one(suite, &case, &other));
    let other = Case { swapped: true, ..case.clone() };
    suite.mutant("layers/order", |suite| one(suite, &case, &other));
}

/// What the launch does not take has the same bits by its stages, and matters.
fn beyond(suite: &mut Suite) {
    use Beyond::*;
    // Scores are small, so that a row reads of all keys.
    let plain = Case { scale: 1e-3, ..Case::smollm2(40, 2, RopeStyle::Adjacent) };
    for what in [Bias, QNorm, KNorm, AttentionPostNorm, FfnPostNorm, Gelu, Eps, Window, Rope, Scale, Context] {
        let case = Case { beyond: Some(what), ..plain.clone() };
        suite.case(&format!("layers/by stages/{what:?}"), |suite| by_stages(suite, &case, &case));
        if what != Context {
            suite.mutant(&format!("layers/by stages/{what:?}"), |suite| by_stages(suite, &plain, &case));
        }
    }
    suite.mutant("layers/by stages", |suite| by_stages(suite, &plain, &plain));
}

/// One launch.
fn one(suite: &Suite, case: &Case, changed: &Case) -> Verdict {
    same(suite, case, changed, |launched| launches("", &["step_begin", KERNEL_OF_ONE, "step_count"], launched))
}

/// Six launches a layer, or more.
fn by_stages(suite: &Suite, case: &Case, changed: &Case) -> Verdict {
    same(suite, case, changed, |launched| launches(KERNEL, &[], launched))
}

/// One layer's weights.
struct Layer<D: Buffers> {
    norms: [D::Buf<f32>; 2],
    matrices: [D::Matrix; 4],
    /// What some cases have beside.
    bias: D::Buf<f32>,
    head_norms: [D::Buf<f32>; 2],
    post_norms: [D::Buf<f32>; 2],
}

/// What a device left.
struct Left {
    start: Vec<f32>,
    x: Vec<f32>,
    pools: Vec<Vec<u16>>,
}

/// A device's layers.
fn run<D: Ops + Alloc + Landing + Readback + Steps>(dev: &mut D, case: &Case) -> Result<Left, String> {
    let text = |error: arc_device::error::DeviceError| error.to_string();
    let (att, context, rows) = (case.attention(0), case.context(), case.n_rows());
    let mut rng = Rng(11);
    let (heads, hidden, ffn) = (case.n_heads * 64, case.hidden, case.ffn);
    let matrix = |dev: &mut D, rng: &mut Rng, format: Format, parts: &[usize], cols: usize| {
        let bytes: Vec<Vec<u8>> = parts.iter().map(|&rows| rows_of(format, rows, cols, rng)).collect();
        let sources: Vec<MatrixSource<'_>> = parts
            .iter()
            .zip(&bytes)
            .map(|(&rows, bytes)| MatrixSource { format, rows, cols, bytes: Bytes::Stored(bytes) })
            .collect();
        dev.matrix("case", &sources).map_err(text)
    };
    let mut layers = Vec::new();
    for i in 0..case.layers {
        let norms = [buf(dev, &rng.values(hidden, 1.0)), buf(dev, &rng.values(hidden, 1.0))];
        let down = if i == 2 { case.format } else { Format::Q4_1 };
        let kv = case.n_kv_heads * 64;
        let matrices = [
            matrix(dev, &mut rng, Format::Q4_1, &[heads, kv, kv], hidden)?,
            matrix(dev, &mut rng, Format::Q4_1, &[hidden], heads)?,
            matrix(dev, &mut rng, Format::Q4_1, &[ffn, ffn], hidden)?,
            matrix(dev, &mut rng, down, &[hidden], ffn)?,
        ];
        let mut near_one = |n| buf(dev, &rng.values(n, 0.2).iter().map(|x| 1.0 + x).collect::<Vec<_>>());
        let (head_norms, post_norms) = ([near_one(64), near_one(64)], [near_one(hidden), near_one(hidden)]);
        let bias = buf(dev, &rng.values(att.qkv_dim(), 1.0));
        layers.push(Layer::<D> { norms, matrices, bias, head_norms, post_norms });
    }
    if case.swapped {
        layers.swap(0, 1);
    }
    let rope_table = buf(dev, &rng.values(context * 64, 1.0));
    let start = case.runs.iter().flat_map(|run| {
        let n = run.rows * hidden;
        if run.live { rng.values(n, 1.0) } else { vec![0.0; n] }
    });
    let start: Vec<f32> = start.collect();
    let mut x = buf(dev, &start);
    let mut scratch = [att.qkv_dim(), heads, ffn].map(|n| buf(dev, &vec![f32::NAN; rows * n]));
    let len = att.kv_elements(case.limits().blocks);
    let staged = delta(&case.runs, context);
    let mut pools = Vec::new();
    for _ in 0..case.layers {
        // What no sequence has written yet must not be seen.
        let (mut k, mut v) = (vec![0x7e00u16; len], vec![0x7e00u16; len]);
        for init in &staged.admit {
            for p in 0..init.pos as usize {
                let tile = init.blocks[p / BLOCK_TOKENS] as usize * att.n_kv_heads;
                for head in 0..att.n_kv_heads {
                    let at = (tile + head) * 64 * BLOCK_TOKENS;
                    for d in 0..64 {
                        let bits = rng.next();
                        let half = |bits: u64| (bits as u16 & 0x83ff) | (0x3000 + (bits as u16 >> 12 & 3) * 0x400);
                        k[at + d * BLOCK_TOKENS + p % BLOCK_TOKENS] = half(bits);
                        v[at + p % BLOCK_TOKENS * 64 + d] = half(bits >> 16);
                    }
                }
            }
        }
        pools.push(KvLayer::<D> { k: buf(dev, &k), v: buf(dev, &v) });
    }
    dev.finish(&shape(100, hidden)).map_err(text)?;
    dev.stage(&staged).map_err(text)?;
    dev.step(case.key(), &mut |dev| {
        let [qkv, attention, ffn] = &mut scratch;
        let mut on = DenseRows { x: &mut x, qkv, attention, ffn };
        let rope_dim = if case.is(Beyond::Rope) { 32 } else { 64 };
        let act = if case.is(Beyond::Gelu) { Activation::GeluTanh } else { Activation::Silu };
        let ffn_eps = if case.is(Beyond::Eps) { 0.1 } else { EPS };
        let mut layers = layers.iter().zip(&mut pools).enumerate().map(|(i, (layer, kv))| {
            let norm = |weight, what| case.is(what).then_some(Norm { weight, eps: EPS });
            DenseLayer {
                attn_norm: Norm { weight: &layer.norms[0], eps: EPS },
                qkv: &layer.matrices[0],
                qkv_bias: case.is(Beyond::Bias).then_some(&layer.bias),
                heads: QkvConfig {
                    attention: case.attention(i),
                    rope: Rope { dim: rope_dim, style: case.style },
                    rope_table: &rope_table,
                    q_norm: norm(&layer.head_norms[0], Beyond::QNorm),
                    k_norm: norm(&layer.head_norms[1], Beyond::KNorm),
                },
                kv,
                attn_out: &layer.matrices[1],
                attn_post_norm: norm(&layer.post_norms[0], Beyond::AttentionPostNorm),
                ffn_norm: Norm { weight: &layer.norms[1], eps: ffn_eps },
                gate_up: &layer.matrices[2],
                act,
                down: &layer.matrices[3],
                ffn_post_norm: norm(&layer.post_norms[1], Beyond::FfnPostNorm),
            }
        });
        dev.layers(&mut on, &mut layers, rows)
    })
    .map_err(text)?;
    let mut left = Left { start, x: vec![0.0; rows * hidden], pools: Vec::new() };
    dev.read(&x, &mut left.x).map_err(text)?;
    for kv in &pools {
        for pool in [&kv.k, &kv.v] {
            let mut read = vec![0u16; len];
            dev.read(pool, &mut read).map_err(text)?;
            left.pools.push(read);
        }
    }
    Ok(left)
}

/// `launched`: what is to be said of the GPU's kernels.
fn same(suite: &Suite, case: &Case, changed: &Case, launched: impl Fn(&[&str]) -> Verdict) -> Verdict {
    let mut pair = suite.pair(case.limits());
    let want = run(&mut pair.cpu, case)?;
    let got = run(&mut pair.gpu, changed)?;
    launched(&pair.gpu.launched().collect::<Vec<_>>())?;
    if want.x.iter().any(|x| !x.is_finite()) {
        return Err("the case has no finite result".to_owned());
    }
    let pools = want.pools.iter().zip(&got.pools).map(|(want, got)| equal(want, got));
    all(pools.chain([equal_bits(&want.x, &got.x)]).collect::<Vec<_>>())
}

/// A row that the launch has no room for: the device says so, and leaves the residual as it was.
fn past_the_key(suite: &Suite, case: &Case) -> Verdict {
    let mut gpu = suite.gpu(case.limits()).map_err(|error| error.to_string())?;
    let got = run(&mut gpu, case)?;
    launches("", &["step_begin", KERNEL_OF_ONE, "step_count"], &gpu.launched().collect::<Vec<_>>())?;
    let Some(Fault::Word(word)) = gpu.fault() else { return Err(format!("the fault is {:?}", gpu.fault())) };
    equal_bits(&got.start, &got.x)?;
    Ok(format!("fault word {word:#x}"))
}
