//! Routed experts: who computes what, and their gated unit. Exact.
//!
//! ```text
//! expert(x; a) = down (a * silu(min(gate x, limit)) * clamp(up x, -limit, limit))
//! out          = sum over the row's experts, ascending, of expert_e(x; weight_e)  +  shared(x; 1)
//! ```
//!
//! The gate is clamped from above only. The product is `(silu(g) * u) * a`, each operation rounded; the weight goes in
//! before `down`, so that it is part of what a quantised `down` rounds. The sum starts at 0 and takes the shared expert
//! last. A NaN passes every clamp. Source: DeepSeek-V4's published model code (`Expert`, `MoE`).
//!
//! A step's *assignments* are its (row, expert) pairs. They are handed on sorted by expert, then by row, so that an
//! expert's rows stand together and every row meets its experts in ascending order.

use crate::math::silu;
use crate::simd::multiversion;

multiversion! {
    /// `gate[i] = silu(min(gate[i], limit)) * clamp(up[i], -limit, limit)`.
    pub(crate) fn clamped_silu(gate: &mut [f32], up: &[f32], limit: f32) {
        for (gate, &up) in gate.iter_mut().zip(up) {
            let g = if *gate > limit { limit } else { *gate };
            let u = if up > limit { limit } else { up };
            let u = if u < -limit { -limit } else { u };
            *gate = silu(g) * u;
        }
    }
}

/// Sorts a step's assignments: `order[i]` is the `i`-th of them, as `row * chosen + place`, and those of expert `e` are
/// `bounds[e] .. bounds[e + 1]`. `ids`: `[rows, chosen]`; rows that are not `live` are assigned to nobody. `bounds`:
/// `[experts + 1]`.
pub(crate) fn assign(order: &mut [u32], bounds: &mut [u32], ids: &[u32], chosen: usize, live: impl Fn(usize) -> bool) {
    bounds.fill(0);
    let counted = |i: &usize| live(i / chosen);
    for i in (0..ids.len()).filter(counted) {
        bounds[ids[i] as usize + 1] += 1;
    }
    for e in 1..bounds.len() {
        bounds[e] += bounds[e - 1];
    }
    // `bounds[e]` serves as the cursor of expert `e`; afterwards it has moved to where `e + 1` begins.
    for i in (0..ids.len()).filter(counted) {
        let cursor = &mut bounds[ids[i] as usize];
        order[*cursor as usize] = i as u32;
        *cursor += 1;
    }
    let last = bounds.len() - 1;
    bounds.copy_within(0..last, 1);
    bounds[0] = 0;
}

pub(crate) mod cuda;
#[cfg(test)]
mod tests;
