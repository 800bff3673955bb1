//! GGUF files: one file, or several that are parts of one model.
//!
//! ```text
//! "GGUF", version u32, n_tensors u64, n_kv u64
//! n_kv      key string, value type u32, value
//! n_tensors name string, n_dims u32, dims u64 each (innermost first), type u32, offset u64
//! padding to general.alignment (32 if absent), then the tensor data, to which the offsets are relative
//! string    length u64, UTF-8 bytes        array    element type u32, length u64, elements
//! ```
//!
//! [`GgufHeader::parse`] checks all of that against the file's length before anything is used, copies no value, and
//! keeps offsets: [`Metadata`] reads values where they lie.
//!
//! Source: the GGUF specification, versions 2 and 3 (little-endian).

mod header;
mod metadata;
mod split;

use std::path::Path;

use super::error::LoadError;
use super::weights::Weights;

pub use header::{GgufHeader, MAX_HEADER, MAX_METADATA};
pub use metadata::{Array, Metadata, Optional, StrArray, Value};

/// Types of metadata values, in the order of their codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 16 bits.
    U16,
    /// Signed, 16 bits.
    I16,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 32 bits.
    I32,
    /// IEEE binary32.
    F32,
    /// One byte, 0 or 1.
    Bool,
    /// UTF-8 with its length.
    Str,
    /// Values of one other type.
    Array,
    /// Unsigned, 64 bits.
    U64,
    /// Signed, 64 bits.
    I64,
    /// IEEE binary64.
    F64,
}

impl ValueType {
    const BY_CODE: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Str,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn from_code(code: u32) -> Option<Self> {
        Self::BY_CODE.get(usize::try_from(code).ok()?).copied()
    }

    /// The type's code in a file.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// Lower-case name, as in `u32`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::Str => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }

    /// Bytes of a value; `None` for strings and arrays, whose length the file says.
    const fn size(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Str | Self::Array => None,
        }
    }
}

/// An opened GGUF model.
#[derive(Debug)]
pub struct GgufFile {
    /// Header of the first part, which has the metadata. Its tensors have moved to `weights`.
    header: GgufHeader,
    weights: Weights,
}

impl GgufFile {
    /// Opens a model and checks its header; of a split model, any part leads to all of them.
    ///
    /// Reads the header only. Errors: every [`LoadError`] about a file, its header or its parts.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let (header, parts) = split::open_all(path)?;
        Ok(Self { header, weights: Weights::new(parts)? })
    }

    /// The metadata; of a split model, that of its first part.
    pub fn metadata(&self) -> Metadata<'_> {
        self.header.metadata(self.weights.map(0).bytes(), self.weights.path())
    }

    /// The tensors.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }
}
