//! Gated linear units: `act(gate) * up`. Exact.

/// The gate's activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)` (Llama, Qwen). Source: Elfwing et al. 2017.
    Silu,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))` (Gemma). Source: Hendrycks & Gimpel 2016.
    GeluTanh,
}
