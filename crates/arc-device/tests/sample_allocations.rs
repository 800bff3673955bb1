//! A row is drawn without touching the heap, whatever its parameters.

use arc_device::count::heap::{CountingAlloc, allocs_on_this_thread};
use arc_device::ops::sample::dry::DryTable;
use arc_device::ops::sample::seen::SeenTokens;
use arc_device::ops::sample::{DryConfig, DryInputs, RowInputs, SamplerConfig, SamplerParams, Scratch};
use arc_device::ops::sample::{logprobs_row, sample_row};

#[global_allocator]
static COUNTING: CountingAlloc = CountingAlloc;

#[test]
fn rows_do_not_allocate() {
    let vocab = 5_000;
    let logits: Vec<f32> = (0..vocab).map(|i| (i * 7919 % 1000) as f32 * 0.01).collect();
    let history: Vec<u32> = (0..300).map(|i| i % 7).collect();
    let mut seen = SeenTokens::new(vocab, &history, 600);
    let dry = DryConfig { multiplier: 0.8, base: 1.75, allowed_length: 2, window: 200, breakers: vec![9] };
    let table = DryTable::new(&dry).expect("it is present");
    let mask = vec![0xffff_fff0u32; vocab.div_ceil(32)];
    let mut scratch = Scratch::new(vocab, 200);
    let config = SamplerConfig {
        temperature: 0.8,
        top_k: 100,
        top_p: 0.9,
        min_p: 0.01,
        presence: 0.1,
        frequency: 0.1,
        repetition: 1.1,
        min_tokens: 1_000,
        ..SamplerConfig::default()
    };
    let everything = SamplerParams::new(&config);
    let greedy = SamplerParams::new(&SamplerConfig { temperature: 0.0, ..SamplerConfig::default() });

    let before = allocs_on_this_thread();
    assert!(before > 0, "nothing is counted");
    for draw_index in 0..100 {
        let row = RowInputs {
            bias: &[(3, 1.5)],
            grammar: Some(&mask),
            stop_ids: &[5],
            seen: seen.tokens(),
            drafts: &[7, 7, 9],
            dry: Some(DryInputs { table: &table, history: &history }),
            logprobs: Some(20),
        };
        let token = sample_row(&logits, &everything, &row, draw_index, &mut scratch).token.expect("finite logits");
        seen.push(token);
        sample_row(&logits, &greedy, &RowInputs::default(), draw_index, &mut scratch).token.expect("finite logits");
        logprobs_row(&logits, token, 20, &mut scratch).expect("finite logits");
    }
    assert_eq!(allocs_on_this_thread() - before, 0);
}
