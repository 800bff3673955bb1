//! Kernel families. A file is a family's contract; the folder beside it holds its implementations and tests.

pub mod compress;
pub mod glu;
pub mod hc;
pub mod index;
pub mod kv;
pub mod latent;
pub mod matmul;
pub mod moe;
pub mod norm;
pub mod quant;
pub mod router;
pub mod sample;
pub mod synthetic;
