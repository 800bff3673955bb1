//! Arc's engine: tokens in, tokens out. No text, no HTTP, no JSON, no CUDA types.
#![forbid(unsafe_code)]
