//! Model files: GGUF and safetensors, mapped, checked against their length before any use, and seen as one table of
//! tensors.
//!
//! ```text
//! ModelFile::open(path)         decides by content
//!   gguf::GgufFile              metadata() and weights()
//!   safetensors::SafetensorsFile  folder() and weights()
//!     Weights                   tensor(name) -> TensorRef, bytes(&TensorRef), release(&TensorRef)
//!
//! synthetic::Synthetic          random weights from a seed, without a file
//! ```
//!
//! Opening reads headers only, in time and memory proportional to them, and never panics whatever a file contains: a
//! file that lies is refused with a [`LoadError`], one sentence that says where.

mod error;
pub mod gguf;
pub mod safetensors;
pub mod synthetic;
#[doc(hidden)]
pub mod testing;
mod weights;

use std::fs::File;
use std::io::Read;
use std::path::Path;

pub use error::{HeaderError, LoadError};
pub use weights::{MAX_NAME, MAX_TENSORS, Shape, Tensor, TensorRef, WeightFile, Weights};

use gguf::GgufFile;
use safetensors::SafetensorsFile;

/// A model in one of the kinds of files that Arc reads.
#[derive(Debug)]
pub enum ModelFile {
    /// A GGUF file or a set of its parts: metadata, tokenizer and tensors.
    Gguf(GgufFile),
    /// Safetensors: tensors only; the configuration and the tokenizer lie beside them.
    Safetensors(SafetensorsFile),
}

impl ModelFile {
    /// Opens a GGUF file, a safetensors file, an index of shards, or a folder with safetensors.
    ///
    /// The first bytes decide, and only where they are of neither kind, the name does. Errors: every [`LoadError`] of
    /// the two kinds, and `UnknownKind`.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let named = |extension: &str| path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension));
        if path.is_dir() || named("json") {
            return Ok(Self::Safetensors(SafetensorsFile::open(path)?));
        }
        let start = first_bytes(path).map_err(|source| LoadError::Open { path: path.to_owned(), source })?;
        if start.starts_with(b"GGUF") || named("gguf") {
            Ok(Self::Gguf(GgufFile::open(path)?))
        } else if start.get(8) == Some(&b'{') || named("safetensors") {
            Ok(Self::Safetensors(SafetensorsFile::open(path)?))
        } else {
            Err(LoadError::UnknownKind { path: path.to_owned(), found: weights::first_bytes(&start) })
        }
    }

    /// The tensors.
    pub fn weights(&self) -> &Weights {
        match self {
            Self::Gguf(file) => file.weights(),
            Self::Safetensors(file) => file.weights(),
        }
    }
}

/// Up to nine bytes from the start of a regular file.
fn first_bytes(path: &Path) -> std::io::Result<Vec<u8>> {
    // Asked before opening: to open a pipe that nobody writes to waits for ever.
    if !std::fs::metadata(path)?.is_file() {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut start = Vec::new();
    File::open(path)?.take(9).read_to_end(&mut start)?;
    Ok(start)
}
