//! Logits of every token of a prompt, for comparing with other implementations: the steps that a server runs, with a head
//! on every row.

use arc_device::error::Result;
use arc_device::ops::sample::SamplerConfig;
use arc_device::step::{CtxClass, Limits, Part, Row, SlotInit, StepDelta, StepKey, row_flags};
use arc_device::{DeviceLoop, StreamState};

/// Runs `tokens` in steps of at most `chunk` rows and gives each row's logits, `[vocab]`, in order.
///
/// `chunk`: at least 1, at most `limits.rows` and `limits.heads`; the tokens fit into the context and into the blocks.
/// Panics otherwise. Errors: the device's.
pub fn prompt_logits<L: DeviceLoop + ?Sized>(
    dev: &mut L,
    limits: &Limits,
    tokens: &[u32],
    chunk: usize,
    each: &mut dyn FnMut(&[f32]),
) -> Result<()> {
    assert!((1..=limits.rows.min(limits.heads)).contains(&chunk), "rows of a step");
    let blocks = Limits::blocks_for(tokens.len());
    assert!(tokens.len() <= limits.context && blocks <= limits.blocks, "tokens of a sequence");
    for (i, part) in tokens.chunks(chunk).enumerate() {
        let row = |(offset, &token): (usize, &u32)| Row {
            slot: 0,
            flags: row_flags::HEAD,
            offset: offset as u32,
            token,
            target: 0,
        };
        let delta = StepDelta {
            admit: if i == 0 { vec![whole_prompt(blocks)] } else { Vec::new() },
            rows: Some(part.iter().enumerate().map(row).collect()),
            ..StepDelta::default()
        };
        let (rows, ctx) = (part.len() as u32, CtxClass::of((i * chunk + part.len()) as u32));
        let key = |part| StepKey::new(rows, rows, ctx, part);
        dev.stage(&delta)?;
        dev.enqueue(key(Part::Forward))?;
        dev.fetch_rows(&(0..rows).collect::<Vec<_>>())?;
        while (0..part.len()).any(|idx| dev.fetched(idx).is_none()) && dev.poll()? != StreamState::Idle {
            std::thread::yield_now();
        }
        (0..part.len()).filter_map(|idx| dev.fetched(idx)).for_each(&mut *each);
        let step = dev.enqueue(key(Part::Sample))?;
        while dev.head() < step && dev.poll()? != StreamState::Idle {
            std::thread::yield_now();
        }
        dev.read_to(step);
    }
    Ok(())
}

fn whole_prompt(blocks: usize) -> SlotInit {
    SlotInit {
        slot: 0,
        generation: 1,
        max_out: 1,
        flags: 0,
        stop_ids: Vec::new(),
        sampling: SamplerConfig { temperature: 0.0, ..SamplerConfig::default() },
        blocks: (0..blocks as u32).collect(),
        penalty_prompt: Vec::new(),
        pos: 0,
        logprobs: None,
        prompt_top: 0,
    }
}
