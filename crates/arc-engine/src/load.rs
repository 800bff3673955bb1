//! Model files: GGUF and safetensors, mapped, checked against their length before any use, and seen as one table of
//! tensors.
//!
//! ```text
//! ModelFile::open(path)         decides by content
//!   gguf::GgufFile              metadata() and weights()
//!   safetensors::SafetensorsFile  folder() and weights()
//!     Weights                   tensor(name) -> TensorRef, bytes(&TensorRef), release(&TensorRef)
//!
//!   synthetic::Synthetic        random weights from a seed, without a file
//! ```
//!
//! Opening reads headers only, in time and memory proportional to them, and never panics whatever a file contains: a
//! file that lies is refused with a [`LoadError`], one sentence that says where.

mod contents;
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

pub use contents::Entry;
pub use error::{HeaderError, LoadError};
pub use weights::{MAX_NAME, MAX_TENSORS, Shape, Tensor, TensorRef, WeightFile, Weights};

use gguf::GgufFile;
use safetensors::SafetensorsFile;
use synthetic::Synthetic;

/// A model in one of the kinds of files that Arc reads, or one that needs none.
#[derive(Debug)]
pub enum ModelFile {
    /// A GGUF file or a set of its parts: metadata, tokenizer and tensors.
    Gguf(GgufFile),
    /// Safetensors: tensors only; the configuration and the tokenizer lie beside them.
    Safetensors(SafetensorsFile),
    /// Random weights from a seed: no file at all.
    Synthetic(Box<Synthetic>),
}

impl ModelFile {
    /// Opens a GGUF file, a safetensors file, an index of shards, or a folder with safetensors; of a name that begins
    /// with [`synthetic::PREFIX`], the model of random weights.
    ///
    /// The first bytes decide, and only where they are of neither kind, the name does. Errors: every [`LoadError`] of
    /// the kinds, and `UnknownKind`.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        if let Some(name) = path.to_str().filter(|name| Synthetic::is_name(name)) {
            return Ok(Self::Synthetic(Box::new(Synthetic::open(name)?)));
        }
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

    /// The tensors of files; `None` where there is no file.
    pub fn weights(&self) -> Option<&Weights> {
        match self {
            Self::Gguf(file) => Some(file.weights()),
            Self::Safetensors(file) => Some(file.weights()),
            Self::Synthetic(_) => None,
        }
    }

    /// The first file, or the name of a model without one: what messages begin with.
    pub fn path(&self) -> &Path {
        match self {
            Self::Gguf(file) => file.weights().path(),
            Self::Safetensors(file) => file.weights().path(),
            Self::Synthetic(model) => Path::new(&model.name),
        }
    }
}

/// Opens a part of a model. Errors: the system's, and that it is no regular file.
pub fn open_regular(path: &Path) -> std::io::Result<File> {
    // Asked before opening: to open a pipe that nobody writes to waits for ever.
    if !std::fs::metadata(path)?.is_file() {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file"));
    }
    File::open(path)
}

/// Up to nine bytes from the start of a regular file.
fn first_bytes(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut start = Vec::new();
    open_regular(path)?.take(9).read_to_end(&mut start)?;
    Ok(start)
}
