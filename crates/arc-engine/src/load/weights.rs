//! The tensors of a model, whatever files they lie in.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use arc_device::format::Format;
use arc_device::map::Mapped;

use super::error::{HeaderError, LoadError};

/// The most tensors that one file may have.
pub const MAX_TENSORS: u64 = 1 << 16;
/// The longest tensor name, in bytes.
pub const MAX_NAME: u64 = 255;

/// A shape of up to six dimensions, outermost first: a matrix is `[out, in]`, and a row is contiguous.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    len: u8,
    dims: [usize; Shape::MAX_DIMS],
}

impl Shape {
    /// The most dimensions that a shape has.
    pub const MAX_DIMS: usize = 6;

    /// `None` for more than [`Self::MAX_DIMS`] dimensions.
    pub fn new(dims: &[usize]) -> Option<Self> {
        let mut shape = Self { len: dims.len().try_into().ok()?, dims: [1; Self::MAX_DIMS] };
        shape.dims.get_mut(..dims.len())?.copy_from_slice(dims);
        Some(shape)
    }
}

impl std::ops::Deref for Shape {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.dims[..usize::from(self.len)]
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}

/// What a file says about one tensor. Its bytes are known to lie inside the file and to be as many as type and shape
/// need.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Name in the file.
    pub name: Box<str>,
    /// Name of the stored type, lower-case.
    pub type_name: &'static str,
    /// The weight format; `None` for types that Arc does not compute with, such as integers.
    pub format: Option<Format>,
    /// Outermost first.
    pub shape: Shape,
    /// Which of the model's files holds it: an index into [`Weights::files`].
    pub file_idx: u32,
    /// Where its bytes lie in that file.
    pub range: Range<usize>,
}

/// A tensor that Arc can compute with.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRef {
    /// Name in the file.
    pub name: Box<str>,
    /// How it is stored.
    pub format: Format,
    /// Outermost first.
    pub shape: Shape,
    file_idx: u32,
    range: Range<usize>,
}

impl TensorRef {
    /// Values in a row: the innermost dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows: the product of all dimensions but the innermost.
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Bytes in the file.
    pub fn n_bytes(&self) -> usize {
        self.range.len()
    }
}

/// One file of a model.
#[derive(Debug)]
pub struct WeightFile {
    /// Where it was opened.
    pub path: PathBuf,
    map: Mapped,
}

/// The tensors of a model and the mapped files that hold them.
#[derive(Debug)]
pub struct Weights {
    files: Vec<WeightFile>,
    /// Sorted by name; no name twice.
    tensors: Vec<Tensor>,
    /// Bytes of tensors that were handed out.
    bytes_read: AtomicU64,
}

impl Weights {
    /// Joins the files of a model. `tensors` of each file have passed [`check_table`].
    pub(super) fn new(parts: Vec<(PathBuf, Mapped, Vec<Tensor>)>) -> Result<Self, LoadError> {
        let mut files = Vec::with_capacity(parts.len());
        let mut all = Vec::with_capacity(parts.iter().map(|(_, _, tensors)| tensors.len()).sum());
        for (file_idx, (path, map, tensors)) in parts.into_iter().enumerate() {
            let file_idx = u32::try_from(file_idx).expect("fewer files than tensors");
            files.push(WeightFile { path, map });
            all.extend(tensors.into_iter().map(|tensor| Tensor { file_idx, ..tensor }));
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some([a, b]) = all.array_windows().find(|[a, b]| a.name == b.name) {
            return Err(LoadError::TensorTwice {
                path: files[b.file_idx as usize].path.clone(),
                name: b.name.to_string(),
                other: files[a.file_idx as usize].path.clone(),
            });
        }
        Ok(Self { files, tensors: all, bytes_read: AtomicU64::new(0) })
    }

    /// The model's files; the first one is the one that names the model in messages.
    pub fn files(&self) -> &[WeightFile] {
        &self.files
    }

    /// The first file.
    pub fn path(&self) -> &Path {
        &self.files[0].path
    }

    /// Bytes of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.map.bytes().len() as u64).sum()
    }

    /// Bytes of tensors that were handed out since the files were opened: what no plan does.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Every tensor, by name.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// What the file says about a tensor, of whatever type; `None` where there is no such tensor.
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        let idx = self.tensors.binary_search_by(|tensor| (*tensor.name).cmp(name)).ok()?;
        Some(&self.tensors[idx])
    }

    /// A tensor to compute with. Errors: `MissingTensor`, `UnsupportedType`.
    pub fn tensor(&self, name: &str) -> Result<TensorRef, LoadError> {
        let tensor = self
            .find(name)
            .ok_or_else(|| LoadError::MissingTensor { path: self.path().to_owned(), name: name.to_owned() })?;
        let format = tensor.format.ok_or_else(|| LoadError::UnsupportedType {
            path: self.files[tensor.file_idx as usize].path.clone(),
            name: name.to_owned(),
            type_name: tensor.type_name,
        })?;
        Ok(TensorRef {
            name: tensor.name.clone(),
            format,
            shape: tensor.shape,
            file_idx: tensor.file_idx,
            range: tensor.range.clone(),
        })
    }

    /// A tensor of one shape, outermost first. Errors: those of [`Self::tensor`], and `WrongShape`.
    pub fn tensor_of_shape(&self, name: &str, shape: &[usize]) -> Result<TensorRef, LoadError> {
        let tensor = self.tensor(name)?;
        if *tensor.shape != *shape {
            return Err(LoadError::WrongShape {
                path: self.files[tensor.file_idx as usize].path.clone(),
                name: name.to_owned(),
                expected: shape.to_vec(),
                found: tensor.shape.to_vec(),
            });
        }
        Ok(tensor)
    }

    /// The tensor's bytes, row after row: `rows() * format.row_bytes(cols())`, at any alignment.
    pub fn bytes(&self, tensor: &TensorRef) -> &[u8] {
        self.counted(tensor.file_idx, tensor.range.clone())
    }

    /// The bytes of a tensor of any type.
    pub fn raw_bytes(&self, tensor: &Tensor) -> &[u8] {
        self.counted(tensor.file_idx, tensor.range.clone())
    }

    /// Some of the bytes of a tensor, counted from its first.
    pub fn part_bytes(&self, tensor: &Tensor, part: Range<usize>) -> &[u8] {
        let start = tensor.range.start;
        assert!(part.end <= tensor.range.len(), "{part:?} of {} in {:?}", tensor.name, tensor.range);
        self.counted(tensor.file_idx, start + part.start..start + part.end)
    }

    fn counted(&self, file_idx: u32, range: Range<usize>) -> &[u8] {
        self.bytes_read.fetch_add(range.len() as u64, Ordering::Relaxed);
        &self.map(file_idx).bytes()[range]
    }

    /// Asks the system to read the tensor ahead.
    pub fn prefetch(&self, tensor: &TensorRef) {
        self.map(tensor.file_idx).prefetch(tensor.range.clone());
    }

    /// Takes the tensor's pages out of this process's memory, once its values have been copied elsewhere.
    pub fn release(&self, tensor: &TensorRef) {
        self.map(tensor.file_idx).release(tensor.range.clone());
    }

    pub(super) fn map(&self, file_idx: u32) -> &Mapped {
        &self.files[file_idx as usize].map
    }
}

/// Sorts the tensors of one file by name and refuses two of one name and two that share bytes.
pub(super) fn check_table(tensors: &mut [Tensor]) -> Result<(), HeaderError> {
    tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    if let Some([a, _]) = tensors.array_windows().find(|[a, b]| a.name == b.name) {
        return Err(HeaderError::DuplicateTensor { name: a.name.to_string() });
    }
    let mut by_start = tensors.iter().collect::<Vec<_>>();
    by_start.sort_by_key(|tensor| tensor.range.start);
    match by_start.array_windows().find(|[a, b]| b.range.start < a.range.end) {
        Some([first, second]) => Err(HeaderError::Overlap {
            first: first.name.to_string(),
            second: second.name.to_string(),
            offset: second.range.start as u64,
        }),
        None => Ok(()),
    }
}

/// The first bytes of a file, printable, for a message.
pub(super) fn first_bytes(bytes: &[u8]) -> String {
    bytes[..bytes.len().min(8)].escape_ascii().to_string()
}
