//! Model files: GGUF and safetensors, mapped, checked against their length before any use, and seen as one table of
//! tensors.

mod error;
pub mod gguf;
#[doc(hidden)]
pub mod testing;
mod weights;

pub use error::{HeaderError, LoadError};
pub use weights::{MAX_NAME, MAX_TENSORS, Shape, Tensor, TensorRef, WeightFile, Weights};
