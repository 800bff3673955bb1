//! Host-cost probe of the sampler: one row of 129,280 logits on one CPU core. It says nothing about a GPU.
//!
//! `cargo bench -p arc-device --bench sample`. Bars: defaults at most 120 us, `top_k = 32` at most 200 us.

use std::hint::black_box;

use arc_device::ops::sample::dry::DryTable;
use arc_device::ops::sample::seen::SeenTokens;
use arc_device::ops::sample::{DryConfig, DryInputs, RowInputs, SamplerConfig, SamplerParams, Scratch};
use arc_device::ops::sample::{logprobs_row, sample_row};
use arc_device::rng::philox4x32;
use criterion::{Criterion, criterion_group, criterion_main};

const VOCAB: usize = 129_280;

/// About normal, with the given deviation; and `peaks` tokens that stand out, as they do where a model has an opinion.
fn logits(deviation: f32, peaks: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..VOCAB as u32)
        .map(|i| {
            let words = philox4x32([i, 0, 0, 0], [1, 2]);
            let sum: f32 = words.iter().map(|&w| w as f32 / 4_294_967_296.0).sum();
            (sum - 2.0) * 1.732 * deviation
        })
        .collect();
    for i in 0..peaks {
        x[(i * 7919 + 13) % VOCAB] = 18.0 - 0.4 * i as f32;
    }
    x
}

fn rows(c: &mut Criterion) {
    let opinionated = logits(2.0, 40);
    let flat = logits(1.0, 0);
    let base = SamplerConfig { seed: 7, ..SamplerConfig::default() };
    let with = |change: &dyn Fn(&mut SamplerConfig)| {
        let mut config = base.clone();
        change(&mut config);
        SamplerParams::new(&config)
    };
    let mut scratch = Scratch::new(VOCAB, 4096);
    let mut group = c.benchmark_group("sample: host-cost probe, one row of 129280 on one core");
    let mut bench = |name: &str, logits: &[f32], params: SamplerParams, row: RowInputs<'_>| {
        let mut draw_index = 0;
        group.bench_function(name, |b| {
            b.iter(|| {
                draw_index += 1;
                sample_row(black_box(logits), &params, &row, draw_index, &mut scratch)
            })
        });
    };

    let none = RowInputs::default();
    bench("greedy", &opinionated, with(&|c| c.temperature = 0.0), none);
    bench("defaults (temperature 1)", &opinionated, with(&|_| ()), none);
    bench("temperature 0.7", &opinionated, with(&|c| c.temperature = 0.7), none);
    bench("top_k 32", &opinionated, with(&|c| c.top_k = 32), none);
    bench("top_k 32, flat", &flat, with(&|c| c.top_k = 32), none);
    bench("top_p 0.95", &opinionated, with(&|c| c.top_p = 0.95), none);
    bench("top_p 0.95, flat", &flat, with(&|c| c.top_p = 0.95), none);
    bench("min_p 0.05", &opinionated, with(&|c| c.min_p = 0.05), none);
    bench("min_p 0.05, flat", &flat, with(&|c| c.min_p = 0.05), none);
    bench("logprobs 5", &opinionated, with(&|_| ()), RowInputs { logprobs: Some(5), ..none });

    let prompt: Vec<u32> = (0..2000).map(|i| i * i % 4999).collect();
    let seen = SeenTokens::new(VOCAB, &prompt, 4096);
    let config = DryConfig { multiplier: 0.8, base: 1.75, allowed_length: 2, window: 4096, breakers: vec![13] };
    let table = DryTable::new(&config).expect("it is present");
    let mask = vec![0x7fff_ffffu32; VOCAB.div_ceil(32)];
    let everything = with(&|c| {
        (c.temperature, c.top_k, c.top_p, c.min_p) = (0.7, 40, 0.95, 0.05);
        (c.presence, c.frequency, c.repetition) = (0.1, 0.1, 1.1);
    });
    let all = RowInputs {
        bias: &[(5, 1.0), (77, -1.0)],
        grammar: Some(&mask),
        seen: seen.tokens(),
        dry: Some(DryInputs { table: &table, history: &prompt }),
        logprobs: Some(5),
        ..none
    };
    bench("everything", &opinionated, everything, all);
    group.bench_function("logprobs_row, top 5", |b| {
        b.iter(|| logprobs_row(black_box(&opinionated), 5, 5, &mut scratch))
    });
    group.finish();
}

criterion_group!(benches, rows);
criterion_main!(benches);
