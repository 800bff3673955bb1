//! Logits processors: step 1 of a row. Each operation rounds; none is fused.

use super::dry;
use super::passes::mask_out;
use super::{RowFault, RowInputs, SamplerParams, SeenToken};

/// Whether any processor is present, so that the row must be copied before it is changed.
pub(super) fn any(params: &SamplerParams, row: &RowInputs<'_>, draw_index: u32) -> bool {
    !row.bias.is_empty()
        || row.grammar.is_some()
        || masks_stop_ids(params, row, draw_index)
        || (params.reads_seen() && !(row.seen.is_empty() && row.drafts.is_empty()))
        || row.dry.is_some()
}

fn masks_stop_ids(params: &SamplerParams, row: &RowInputs<'_>, draw_index: u32) -> bool {
    draw_index < params.min_tokens && !row.stop_ids.is_empty()
}

/// Applies every processor that is present to `x`, `[vocab]`. `matches` and `longest` are [`dry::apply`]'s scratch.
pub(super) fn apply(
    x: &mut [f32],
    params: &SamplerParams,
    row: &RowInputs<'_>,
    draw_index: u32,
    matches: &mut [u32],
    longest: &mut [u32],
) -> Result<(), RowFault> {
    let at = |id: u32, len: usize| if (id as usize) < len { Ok(id as usize) } else { Err(RowFault::TokenOutOfRange) };
    let vocab = x.len();
    for &(id, bias) in row.bias {
        x[at(id, vocab)?] += bias;
    }
    if let Some(mask) = row.grammar {
        mask_out(x, mask);
    }
    if masks_stop_ids(params, row, draw_index) {
        for &id in row.stop_ids {
            x[at(id, vocab)?] = f32::NEG_INFINITY;
        }
    }
    if params.reads_seen() {
        let drafted = |id: u32| row.drafts.iter().filter(|&&draft| draft == id).count() as u32;
        for token in row.seen {
            let in_output = token.in_output + drafted(token.id);
            penalise(&mut x[at(token.id, vocab)?], params, SeenToken { in_output, ..*token });
        }
        for (i, &id) in row.drafts.iter().enumerate() {
            // Each id once.
            if !row.drafts[..i].contains(&id) && !row.seen.iter().any(|token| token.id == id) {
                let token = SeenToken { id, in_output: drafted(id), in_prompt: false };
                penalise(&mut x[at(id, vocab)?], params, token);
            }
        }
    }
    match &row.dry {
        Some(inputs) => dry::apply(x, inputs, matches, longest),
        None => Ok(()),
    }
}

fn penalise(x: &mut f32, params: &SamplerParams, token: SeenToken) {
    if params.repetition != 1.0 && (token.in_prompt || token.in_output > 0) {
        *x = if *x > 0.0 { *x / params.repetition } else { *x * params.repetition };
    }
    if token.in_output > 0 {
        if params.presence != 0.0 {
            *x -= params.presence;
        }
        if params.frequency != 0.0 {
            *x -= params.frequency * token.in_output as f32;
        }
    }
}
