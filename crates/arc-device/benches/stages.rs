//! The CPU device's matmul stage by format and row count: weights per second, which times a format's bits a weight is
//! its bandwidth, and times two is its arithmetic.
//!
//! `cargo bench -p arc-device --bench stages`; `ARC_BENCH_THREADS` sets the team (default: one thread).

use arc_device::cpu::Cpu;
use arc_device::format::Format;
use arc_device::ops::matmul::{Bytes, MatrixSource};
use arc_device::step::{Limits, Row, StepDelta};
use arc_device::{Alloc, Landing, MemoryClass, ModelShape, Norm, Ops};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Larger than the last-level cache of a core's share in every format.
const OUT: usize = 16384;
const COLS: usize = 2048;

fn stages(criterion: &mut Criterion) {
    let threads = std::env::var("ARC_BENCH_THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let mut group = criterion.benchmark_group(format!("norm_matmul, {threads} threads"));
    for format in [Format::Q4_1, Format::Q8_0, Format::Q4K, Format::Q6K, Format::F16] {
        let bytes = vec![0x11; OUT * format.row_bytes(COLS).expect("whole blocks")];
        for rows in [1, 16, 256] {
            let limits = Limits { slots: 1, rows, heads: 1, context: 32, blocks: 1, ring: 2 };
            let mut dev = Cpu::new(threads, limits);
            let source = MatrixSource { format, rows: OUT, cols: COLS, bytes: Bytes::Stored(&bytes) };
            let w = dev.matrix("w", &[source]).expect("loads");
            let norm = dev.vector("norm", &vec![1.0; COLS]).expect("loads");
            let mut x = dev.alloc::<f32>("x", MemoryClass::Workspace, rows * COLS).expect("allocates");
            let mut out = dev.alloc::<f32>("out", MemoryClass::Workspace, rows * OUT).expect("allocates");
            x.iter_mut().enumerate().for_each(|(i, x)| *x = (i * 37 % 101) as f32 - 50.0);
            dev.finish(&ModelShape { vocab: 1, hidden: COLS, post_norms: false, gathered: 0 }).expect("finishes");
            dev.stage(&StepDelta { rows: Some(vec![Row::default(); rows]), ..StepDelta::default() }).expect("stages");
            group.throughput(Throughput::Elements((OUT * COLS * rows) as u64));
            group.bench_function(BenchmarkId::new(format.name(), format!("{rows} rows")), |bencher| {
                bencher.iter(|| {
                    let norm = Norm { weight: &norm, eps: 1e-5 };
                    dev.norm_matmul(&mut out, &x, norm, &w, None, rows).expect("runs");
                });
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(1));
    targets = stages
}
criterion_main!(benches);
