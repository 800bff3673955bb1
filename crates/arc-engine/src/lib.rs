//! Arc's engine: tokens in, tokens out. No text, no HTTP, no JSON bodies, no CUDA types.
#![forbid(unsafe_code)]

pub mod blocks;
pub mod burst;
pub mod drafter;
pub mod engine;
pub mod grammar;
pub mod load;
pub mod logits;
pub mod model;
pub mod request;
pub mod runner;
pub mod sampler;
pub mod scheduler;
pub mod sequence;
pub mod stats;
