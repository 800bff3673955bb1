//! Gated linear units: `act(gate) * up`. Exact.

use crate::math::{gelu_tanh, silu};
use crate::simd::multiversion;

/// The gate's activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)` (Llama, Qwen). Source: Elfwing et al. 2017.
    Silu,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))` (Gemma). Source: Hendrycks & Gimpel 2016.
    GeluTanh,
}

impl Activation {
    /// `gate[i] = act(gate[i]) * up[i]`, the activation rounded before the product.
    pub(crate) fn apply(self, gate: &mut [f32], up: &[f32]) {
        match self {
            Activation::Silu => silu_mul(gate, up),
            Activation::GeluTanh => gelu_mul(gate, up),
        }
    }
}

multiversion! {
    fn silu_mul(gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = silu(*gate) * up;
        }
    }

    fn gelu_mul(gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = gelu_tanh(*gate) * up;
        }
    }
}
