//! Kernel families. A file is a family's contract; the folder beside it holds its implementations and tests.

pub mod glu;
pub mod kv;
pub mod matmul;
pub mod norm;
pub mod quant;
pub mod sample;
