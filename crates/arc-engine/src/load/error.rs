//! Why a model file was refused.

use std::path::PathBuf;

/// What one header says that cannot be true. The file's path is added by [`LoadError::Header`].
///
/// Offsets are bytes from the start of the file. Names come from the file and are printed escaped.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum HeaderError {
    /// The file does not begin with the four bytes of its kind.
    #[error("not a GGUF file: it begins with \"{found}\" instead of \"GGUF\"")]
    Magic {
        /// The first bytes, escaped.
        found: String,
    },
    /// A GGUF file written for big-endian machines.
    #[error("a big-endian GGUF file: convert it to little-endian first")]
    BigEndian,
    /// A GGUF version that is not read.
    #[error("GGUF version {found} is not supported: versions 2 and 3 are; convert the model again")]
    Version {
        /// The version in the file.
        found: u32,
    },
    /// Something longer than what is left of the file.
    #[error(
        "{what} at byte {offset} needs {wanted} bytes, but {left} are left: the file is truncated or damaged, fetch it again"
    )]
    Truncated {
        /// What was being read.
        what: String,
        /// Where it starts.
        offset: u64,
        /// Bytes it needs at least.
        wanted: u64,
        /// Bytes there are.
        left: u64,
    },
    /// A count or a length above the limit for it.
    #[error("{what}: {found} is above the limit of {limit}")]
    TooLarge {
        /// What was counted.
        what: String,
        /// The number in the file.
        found: u64,
        /// The largest number accepted.
        limit: u64,
    },
    /// A metadata value type that GGUF does not have.
    #[error("metadata {key:?} at byte {offset} has the unknown value type {code}")]
    ValueType {
        /// Metadata key.
        key: String,
        /// Where the type is.
        offset: u64,
        /// The type in the file.
        code: u32,
    },
    /// An array whose elements are arrays.
    #[error("metadata {key:?} is an array of arrays, which is not supported")]
    NestedArray {
        /// Metadata key.
        key: String,
    },
    /// A boolean that is neither 0 nor 1.
    #[error("metadata {key:?} has the boolean {found} at byte {offset}, neither 0 nor 1")]
    Bool {
        /// Metadata key.
        key: String,
        /// Where the boolean is.
        offset: u64,
        /// The byte in the file.
        found: u8,
    },
    /// A string that is not UTF-8.
    #[error("{what} at byte {offset} is not valid UTF-8")]
    Utf8 {
        /// Which string.
        what: String,
        /// Where it starts.
        offset: u64,
    },
    /// A key or a tensor name without characters.
    #[error("{what} at byte {offset} is empty")]
    EmptyName {
        /// Which name.
        what: String,
        /// Where it is.
        offset: u64,
    },
    /// Two metadata entries of one key.
    #[error("metadata {key:?} appears twice")]
    DuplicateKey {
        /// Metadata key.
        key: String,
    },
    /// Two tensors of one name.
    #[error("tensor {name:?} appears twice")]
    DuplicateTensor {
        /// Tensor name.
        name: String,
    },
    /// `general.alignment` is no usable alignment.
    #[error("general.alignment is {found}: a power of two from 8 to 65536 is needed")]
    Alignment {
        /// The value in the file, or its type.
        found: String,
    },
    /// A tensor without dimensions or with too many.
    #[error("tensor {name:?} has {found} dimensions: 1 to {limit} are supported")]
    DimCount {
        /// Tensor name.
        name: String,
        /// Dimensions in the file.
        found: u64,
        /// The most that are supported.
        limit: u64,
    },
    /// A dimension of 0.
    #[error("tensor {name:?} has a dimension of 0 in its shape {shape:?}")]
    ZeroDim {
        /// Tensor name.
        name: String,
        /// Shape in the file's order.
        shape: Vec<u64>,
    },
    /// Dimensions whose product is beyond 64 bits.
    #[error("tensor {name:?} is impossibly large: shape {shape:?}")]
    ShapeOverflow {
        /// Tensor name.
        name: String,
        /// Shape in the file's order.
        shape: Vec<u64>,
    },
    /// A tensor type that the file format does not have.
    #[error("tensor {name:?} has the unknown type {found}")]
    TensorType {
        /// Tensor name.
        name: String,
        /// Type in the file.
        found: String,
    },
    /// A row that is no whole number of blocks.
    #[error("tensor {name:?} has rows of {row_len} values, no whole number of {type_name} blocks of {block_len}")]
    RowLength {
        /// Tensor name.
        name: String,
        /// Values in a row.
        row_len: u64,
        /// Name of the tensor's type.
        type_name: &'static str,
        /// Values in a block.
        block_len: u64,
    },
    /// A tensor that starts off the file's alignment.
    #[error("tensor {name:?} starts at byte {offset} of the tensor data, no multiple of the alignment {alignment}")]
    Misaligned {
        /// Tensor name.
        name: String,
        /// Offset in the tensor data.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor that reaches past the end of the file.
    #[error(
        "tensor {name:?} ends at byte {end}, but the file ends at {file_len}: it is truncated or damaged, fetch it again"
    )]
    PastEnd {
        /// Tensor name.
        name: String,
        /// Where the tensor would end; `u64::MAX` where that is beyond 64 bits.
        end: u64,
        /// Bytes of the file.
        file_len: u64,
    },
    /// Two tensors that share bytes.
    #[error("tensors {first:?} and {second:?} overlap at byte {offset}")]
    Overlap {
        /// The tensor that starts first.
        first: String,
        /// The tensor that starts inside it.
        second: String,
        /// Where the second one starts.
        offset: u64,
    },
    /// A safetensors header that is no JSON object of tensor entries.
    #[error("the safetensors header cannot be read: {problem}")]
    Json {
        /// What the JSON reader said.
        problem: String,
    },
    /// A safetensors entry whose length is not what type and shape need.
    #[error(
        "tensor {name:?} of type {type_name} and shape {shape:?} needs {expected} bytes, but its offsets span {found}"
    )]
    ByteCount {
        /// Tensor name.
        name: String,
        /// Name of the tensor's type.
        type_name: &'static str,
        /// Shape, outermost first.
        shape: Vec<u64>,
        /// Bytes that type and shape need.
        expected: u64,
        /// Bytes between the offsets, 0 where they are reversed.
        found: u64,
    },
    /// Bytes of a safetensors file that belong to no tensor.
    #[error("bytes {start}..{end} belong to no tensor: the file is damaged or not written to its end")]
    Hole {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
}

/// Why a model cannot be loaded. Each message is one sentence that names the file.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file is absent or cannot be read.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A header that cannot be true; nothing of the model was read.
    #[error("{}: {problem}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: HeaderError,
    },
    /// Neither a GGUF nor a safetensors file.
    #[error("{}: neither a GGUF nor a safetensors file: it begins with \"{found}\"", path.display())]
    UnknownKind {
        /// The file.
        path: PathBuf,
        /// The first bytes, escaped.
        found: String,
    },
    /// A folder without a model.
    #[error("{}: no model in this folder: it has neither model.safetensors nor model.safetensors.index.json", path.display())]
    EmptyFolder {
        /// The folder.
        path: PathBuf,
    },
    /// An architecture that Arc does not run.
    #[error("{}: the architecture {found:?} is not supported; supported are {known}", path.display())]
    UnknownArchitecture {
        /// The file.
        path: PathBuf,
        /// The architecture in the file.
        found: String,
        /// The supported ones.
        known: String,
    },
    /// A configuration that cannot be true, or that asks for something that Arc does not do.
    #[error("{}: {what} {problem}", path.display())]
    BadConfig {
        /// The file.
        path: PathBuf,
        /// Which value.
        what: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The device refused a weight or had no room.
    #[error(transparent)]
    Device(#[from] arc_device::error::DeviceError),
    /// A metadata entry that the model needs is absent.
    #[error("{}: the metadata {key:?} is missing", path.display())]
    MissingMetadata {
        /// The file.
        path: PathBuf,
        /// Metadata key.
        key: String,
    },
    /// A metadata entry of another type than is needed.
    #[error("{}: the metadata {key:?} should be {wanted}, but is {found}", path.display())]
    WrongType {
        /// The file.
        path: PathBuf,
        /// Metadata key.
        key: String,
        /// What is needed.
        wanted: &'static str,
        /// What the file has: its type, and the value where that is the reason.
        found: String,
    },
    /// A tensor that the model needs is absent.
    #[error("{}: there is no tensor {name:?}: the file is incomplete or holds another kind of model", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// Tensor name.
        name: String,
    },
    /// A tensor of a type that exists but that Arc does not compute with.
    #[error("{}: tensor {name:?} is stored as {type_name}, which is not supported; use one of {}", path.display(), formats())]
    UnsupportedType {
        /// The file.
        path: PathBuf,
        /// Tensor name.
        name: String,
        /// Name of the type.
        type_name: &'static str,
    },
    /// A tensor of another shape than the metadata asks for.
    #[error("{}: tensor {name:?} has shape {found:?}, but the metadata asks for {expected:?}", path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// Tensor name.
        name: String,
        /// Shape that is needed, outermost first.
        expected: Vec<usize>,
        /// Shape in the file, outermost first.
        found: Vec<usize>,
    },
    /// A tensor that lies in two parts of a model.
    #[error("{}: tensor {name:?} is also in {}", path.display(), other.display())]
    TensorTwice {
        /// The part that was read later.
        path: PathBuf,
        /// Tensor name.
        name: String,
        /// The part that was read first.
        other: PathBuf,
    },
    /// A part of a split model cannot be opened.
    #[error("{} is missing or unreadable ({source}): {n_parts} files make up this model, put them in one folder", path.display())]
    PartMissing {
        /// The absent part.
        path: PathBuf,
        /// Parts of the model.
        n_parts: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// A part of a split model that belongs elsewhere, by its own account.
    #[error("{}: {problem}", path.display())]
    WrongPart {
        /// The part.
        path: PathBuf,
        /// What does not fit.
        problem: String,
    },
    /// A `model.safetensors.index.json` that cannot be used.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong, with the name of the shard or the tensor.
        problem: String,
    },
}

impl LoadError {
    /// Whether the error is the absence of a metadata entry, and nothing else.
    pub const fn is_missing_metadata(&self) -> bool {
        matches!(self, Self::MissingMetadata { .. })
    }
}

fn formats() -> String {
    arc_device::format::Format::ALL.map(|format| format.name()).join(", ")
}
