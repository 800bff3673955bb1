//! Layers of a dense decoder over one row, in one launch: what their stages leave on the CPU.

use arc_device::cuda::Cuda;
use arc_device::format::Format;
use arc_device::ops::glu::Activation;
use arc_device::ops::kv::{AttentionConfig, Rope, RopeStyle};
use arc_device::ops::matmul::{Bytes, MatrixSource};
use arc_device::step::{BLOCK_TOKENS, CtxClass, Limits, Part, StepKey};
use arc_device::{Alloc, Buffers, DenseLayer, DenseRows, KvLayer, Landing, Norm, Ops, QkvConfig, Readback, Steps};

use crate::compare::{all, equal, equal_bits};
use crate::inputs::Rng;
use crate::matmul::{buf, rows_of};
use crate::rows::{Run, delta};
use crate::suite::{Suite, Verdict, shape};

const EPS: f32 = 1e-5;

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
    pos: usize,
    live: bool,
    scale: f32,
    /// Layers change places.
    swapped: bool,
}

impl Case {
    /// SmolLM2-135M's.
    fn smollm2(pos: usize, layers: usize, style: RopeStyle) -> Case {
        Case {
            hidden: 576,
            n_heads: 9,
            n_kv_heads: 3,
            ffn: 1536,
            layers,
            style,
            format: Format::Q4_1,
            pos,
            live: true,
            scale: 0.125,
            swapped: false,
        }
    }

    fn attention(&self) -> AttentionConfig {
        let Case { n_heads, n_kv_heads, scale, .. } = *self;
        AttentionConfig { n_heads, n_kv_heads, head_dim: 64, scale, window: None }
    }

    fn run(&self) -> Run {
        Run { pos: self.pos, rows: 1, live: self.live }
    }

    fn context(&self) -> usize {
        (self.pos + 1).next_power_of_two().max(128)
    }

    fn limits(&self) -> Limits {
        let context = self.context();
        Limits { slots: 1, rows: 1, heads: 1, context, blocks: context / BLOCK_TOKENS, ring: 4 }
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
    let case = Case::smollm2(300, 34, Adjacent);
    suite.case("layers/smollm2/more than a launch has", |suite| same(suite, &case, &case, 2));
    let case = Case { live: false, ..Case::smollm2(0, 2, Adjacent) };
    suite.case("layers/inert", |suite| one(suite, &case, &case));
    // By their stages.
    let case = Case { format: Format::Q8_0, ..Case::smollm2(40, 3, Adjacent) };
    suite.case("layers/of two formats", |suite| same(suite, &case, &case, 18));
    let case = Case { n_heads: 8, n_kv_heads: 4, ..Case::smollm2(40, 1, Adjacent) };
    suite.case("layers/of another shape", |suite| same(suite, &case, &case, 6));

    let case = Case::smollm2(300, 2, Adjacent);
    let other = Case { style: Halves, ..case.clone() };
    suite.mutant("layers/rope", |suite| one(suite, &case, &other));
    let other = Case { scale: 0.126, ..case.clone() };
    suite.mutant("layers/scale", |suite| one(suite, &case, &other));
    let other = Case { swapped: true, ..case.clone() };
    suite.mutant("layers/order", |suite| one(suite, &case, &other));
}

/// One launch.
fn one(suite: &Suite, case: &Case, changed: &Case) -> Verdict {
    same(suite, case, changed, 1)
}

/// One layer's weights.
struct Layer<D: Buffers> {
    norms: [D::Buf<f32>; 2],
    matrices: [D::Matrix; 4],
}

/// What a device left.
struct Left {
    x: Vec<f32>,
    pools: Vec<Vec<u16>>,
}

/// A device's layers; `launches` counts.
fn run<D: Ops + Alloc + Landing + Readback + Steps>(
    dev: &mut D,
    case: &Case,
    launches: impl Fn(&D) -> u64,
) -> Result<(Left, u64), String> {
    let text = |error: arc_device::error::DeviceError| error.to_string();
    let (att, context) = (case.attention(), case.context());
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
        layers.push(Layer::<D> { norms, matrices });
    }
    if case.swapped {
        layers.swap(0, 1);
    }
    let rope_table = buf(dev, &rng.values(context * 64, 1.0));
    let start = if case.live { rng.values(hidden, 1.0) } else { vec![0.0; hidden] };
    let mut x = buf(dev, &start);
    let mut scratch = [att.qkv_dim(), heads, ffn].map(|n| buf(dev, &vec![f32::NAN; n]));
    let len = att.kv_elements(context / BLOCK_TOKENS);
    let staged = delta(&[case.run()], context);
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
    let before = std::cell::Cell::new(0);
    let key = StepKey::new(1, 256, CtxClass::Short, Part::Forward);
    dev.step(key, &mut |dev| {
        before.set(launches(dev));
        let [qkv, attention, ffn] = &mut scratch;
        let mut on = DenseRows { x: &mut x, qkv, attention, ffn };
        let mut layers = layers.iter().zip(&mut pools).map(|(layer, kv)| DenseLayer {
            attn_norm: Norm { weight: &layer.norms[0], eps: EPS },
            qkv: &layer.matrices[0],
            qkv_bias: None,
            heads: QkvConfig {
                attention: att,
                rope: Rope { dim: 64, style: case.style },
                rope_table: &rope_table,
                q_norm: None,
                k_norm: None,
            },
            kv,
            attn_out: &layer.matrices[1],
            attn_post_norm: None,
            ffn_norm: Norm { weight: &layer.norms[1], eps: EPS },
            gate_up: &layer.matrices[2],
            act: Activation::Silu,
            down: &layer.matrices[3],
            ffn_post_norm: None,
        });
        dev.layers(&mut on, &mut layers, 1)
    })
    .map_err(text)?;
    let launched = launches(dev) - before.get();
    let mut left = Left { x: vec![0.0; hidden], pools: Vec::new() };
    dev.read(&x, &mut left.x).map_err(text)?;
    for kv in &pools {
        for pool in [&kv.k, &kv.v] {
            let mut read = vec![0u16; len];
            dev.read(pool, &mut read).map_err(text)?;
            left.pools.push(read);
        }
    }
    Ok((left, launched))
}

fn same(suite: &Suite, case: &Case, changed: &Case, launches: u64) -> Verdict {
    let mut pair = suite.pair(case.limits());
    let (want, _) = run(&mut pair.cpu, case, |_| 0)?;
    let (got, launched) = run(&mut pair.gpu, changed, |dev: &Cuda| dev.counters().launches)?;
    if launched != launches {
        return Err(format!("{launched} launches"));
    }
    if want.x.iter().any(|x| !x.is_finite()) {
        return Err("the case has no finite result".to_owned());
    }
    let pools = want.pools.iter().zip(&got.pools).map(|(want, got)| equal(want, got));
    all(pools.chain([equal_bits(&want.x, &got.x)]).collect::<Vec<_>>())
}
