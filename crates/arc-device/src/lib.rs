//! Arc's device layer. The only crate where `unsafe` may appear.
