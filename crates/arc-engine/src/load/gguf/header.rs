//! The checked header of a GGUF file.

use std::fmt::Display;
use std::path::Path;

use arc_device::format::Format;

use super::{Metadata, ValueType};
use crate::load::error::HeaderError;
use crate::load::weights::{MAX_NAME, MAX_TENSORS, Shape, Tensor, check_table, first_bytes};

/// Everything before the tensor data fits in this many bytes. Real headers have up to 20 MB, nearly all of it
/// vocabulary; a larger one would make a hostile file expensive to refuse.
pub const MAX_HEADER: usize = 40 << 20;
/// The most metadata entries.
pub const MAX_METADATA: u64 = 1 << 16;

/// GGUF tensor types that exist but that Arc does not compute with: code, name, values and bytes of a block.
///
/// Their sizes are checked like all others, so that a file that has one which the model does not need still loads.
const OTHER_TYPES: [(u32, &str, u64, u64); 19] = [
    (9, "q8_1", 32, 40),
    (15, "q8_k", 256, 292),
    (17, "iq2_xs", 256, 74),
    (18, "iq3_xxs", 256, 98),
    (19, "iq1_s", 256, 50),
    (20, "iq4_nl", 32, 18),
    (21, "iq3_s", 256, 110),
    (22, "iq2_s", 256, 82),
    (23, "iq4_xs", 256, 136),
    (24, "i8", 1, 1),
    (25, "i16", 1, 2),
    (26, "i32", 1, 4),
    (27, "i64", 1, 8),
    (28, "f64", 1, 8),
    (29, "iq1_m", 256, 56),
    (34, "tq1_0", 256, 54),
    (35, "tq2_0", 256, 66),
    (40, "nvfp4", 64, 36),
    (41, "q1_0", 128, 18),
];

/// A metadata entry: where its key and value lie. Offsets fit, since a header has at most [`MAX_HEADER`] bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    key_at: u32,
    key_len: u32,
    /// The value; for an array, the elements.
    value_at: u32,
    value_len: u32,
    pub(super) value_type: ValueType,
    /// Of an array: type and number of its elements.
    pub(super) element: Option<(ValueType, u32)>,
}

impl Entry {
    pub(super) fn key<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        &bytes[self.key_at as usize..][..self.key_len as usize]
    }

    pub(super) fn value<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        &bytes[self.value_at as usize..][..self.value_len as usize]
    }
}

/// A GGUF header in which every length, offset and name has been checked.
#[derive(Debug)]
pub struct GgufHeader {
    /// Version of the file format.
    pub version: u32,
    /// Where the tensor data begins.
    pub data_start: usize,
    /// Sorted by key; no key twice.
    entries: Vec<Entry>,
    /// Sorted by name; no name twice, no byte in two.
    tensors: Vec<Tensor>,
}

impl GgufHeader {
    /// Reads and checks the header at the start of `bytes`.
    ///
    /// `file_len` is the length of the whole file, of which `bytes` may be a beginning that holds the header. Takes
    /// time and memory proportional to the header, which is at most [`MAX_HEADER`] bytes.
    pub fn parse(bytes: &[u8], file_len: u64) -> Result<Self, HeaderError> {
        let mut reader = Reader { bytes: &bytes[..bytes.len().min(MAX_HEADER)], at: 0, cut: bytes.len() > MAX_HEADER };
        let magic = reader.take(4, &"the header")?;
        if magic != b"GGUF" {
            return Err(HeaderError::Magic { found: first_bytes(bytes) });
        }
        let version = reader.u32(&"the version")?;
        match version {
            2 | 3 => {}
            _ if version != 0 && version & 0xffff == 0 => return Err(HeaderError::BigEndian),
            _ => return Err(HeaderError::Version { found: version }),
        }
        let n_tensors = reader.count(&"the number of tensors", MAX_TENSORS)?;
        let n_entries = reader.count(&"the number of metadata entries", MAX_METADATA)?;
        let entries = reader.entries(n_entries)?;
        let alignment = alignment(&entries, bytes)?;
        let mut tensors = reader.tensors(n_tensors)?;
        let data_start = reader.at.next_multiple_of(alignment);
        for (tensor, offset) in &mut tensors {
            place(tensor, *offset, data_start, alignment, file_len)?;
        }
        let mut tensors = tensors.into_iter().map(|(tensor, _)| tensor).collect::<Vec<_>>();
        check_table(&mut tensors)?;
        Ok(Self { version, data_start, entries, tensors })
    }

    /// The tensors, by name.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The metadata. `bytes`: the same that were parsed; `path` goes into messages.
    pub fn metadata<'a>(&'a self, bytes: &'a [u8], path: &'a Path) -> Metadata<'a> {
        Metadata { entries: &self.entries, bytes, path }
    }

    pub(super) fn take_tensors(&mut self) -> Vec<Tensor> {
        std::mem::take(&mut self.tensors)
    }
}

/// The value of `general.alignment`, 32 where it is absent.
fn alignment(entries: &[Entry], bytes: &[u8]) -> Result<usize, HeaderError> {
    let Some(entry) = entries.iter().find(|entry| entry.key(bytes) == b"general.alignment") else {
        return Ok(32);
    };
    if entry.value_type != ValueType::U32 {
        return Err(HeaderError::Alignment { found: format!("of type {}", entry.value_type.name()) });
    }
    let value = u32::from_le_bytes(entry.value(bytes).try_into().expect("a u32 has 4 bytes"));
    if !value.is_power_of_two() || !(8..=65_536).contains(&value) {
        return Err(HeaderError::Alignment { found: value.to_string() });
    }
    Ok(value as usize)
}

/// Turns a tensor's offset in the tensor data and its length, which is in `range.end`, into its place in the file.
fn place(
    tensor: &mut Tensor,
    offset: u64,
    data_start: usize,
    alignment: usize,
    file_len: u64,
) -> Result<(), HeaderError> {
    let alignment = alignment as u64;
    if !offset.is_multiple_of(alignment) {
        return Err(HeaderError::Misaligned { name: tensor.name.to_string(), offset, alignment });
    }
    let start = offset.checked_add(data_start as u64);
    let end = start.and_then(|start| start.checked_add(tensor.range.end as u64));
    match (start, end) {
        (Some(start), Some(end)) if end <= file_len && usize::try_from(end).is_ok() => {
            tensor.range = start as usize..end as usize;
            Ok(())
        }
        _ => Err(HeaderError::PastEnd { name: tensor.name.to_string(), end: end.unwrap_or(u64::MAX), file_len }),
    }
}

/// Reads forward through a header. Every read says what it is for, which becomes part of the message when it fails.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Whether the file goes on where `bytes` end.
    cut: bool,
}

impl<'a> Reader<'a> {
    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn take(&mut self, n: u64, what: &dyn Display) -> Result<&'a [u8], HeaderError> {
        if n > self.left() {
            return Err(self.too_short(n, what));
        }
        let start = self.at;
        self.at += n as usize;
        Ok(&self.bytes[start..self.at])
    }

    #[cold]
    fn too_short(&self, wanted: u64, what: &dyn Display) -> HeaderError {
        let (what, offset) = (what.to_string(), self.at as u64);
        match self.cut {
            true => HeaderError::TooLarge {
                what: format!("bytes of the header, with {what}"),
                found: offset.saturating_add(wanted),
                limit: MAX_HEADER as u64,
            },
            false => HeaderError::Truncated { what, offset, wanted, left: self.left() },
        }
    }

    fn u32(&mut self, what: &dyn Display) -> Result<u32, HeaderError> {
        Ok(u32::from_le_bytes(self.take(4, what)?.try_into().expect("4 bytes were taken")))
    }

    fn u64(&mut self, what: &dyn Display) -> Result<u64, HeaderError> {
        Ok(u64::from_le_bytes(self.take(8, what)?.try_into().expect("8 bytes were taken")))
    }

    fn count(&mut self, what: &dyn Display, limit: u64) -> Result<u64, HeaderError> {
        let found = self.u64(what)?;
        if found > limit {
            return Err(HeaderError::TooLarge { what: what.to_string(), found, limit });
        }
        Ok(found)
    }

    fn string(&mut self, what: &dyn Display) -> Result<&'a str, HeaderError> {
        let len = self.u64(what)?;
        let offset = self.at as u64;
        str::from_utf8(self.take(len, what)?).map_err(|_| HeaderError::Utf8 { what: what.to_string(), offset })
    }

    fn name(&mut self, what: &dyn Display) -> Result<&'a str, HeaderError> {
        let offset = self.at as u64;
        let name = self.string(what)?;
        if name.is_empty() {
            return Err(HeaderError::EmptyName { what: what.to_string(), offset });
        }
        if name.len() as u64 > MAX_NAME {
            let what = format!("bytes of {what}");
            return Err(HeaderError::TooLarge { what, found: name.len() as u64, limit: MAX_NAME });
        }
        Ok(name)
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, HeaderError> {
        let offset = self.at as u64;
        let code = self.u32(&Of("the type of metadata", key))?;
        ValueType::from_code(code).ok_or_else(|| HeaderError::ValueType { key: key.to_owned(), offset, code })
    }

    fn entries(&mut self, n: u64) -> Result<Vec<Entry>, HeaderError> {
        let mut entries = Vec::new();
        for i in 0..n {
            let key = self.name(&Nth("the key of metadata entry", i, n))?;
            let key_at = self.at - key.len();
            let value_type = self.value_type(key)?;
            let (value_at, element) = match value_type {
                ValueType::Array => self.array(key)?,
                ValueType::Str => {
                    let value = self.string(&Of("the string in metadata", key))?;
                    (self.at - value.len(), None)
                }
                _ => (self.values(key, value_type, 1)?, None),
            };
            entries.push(Entry {
                key_at: key_at as u32,
                key_len: key.len() as u32,
                value_at: value_at as u32,
                value_len: (self.at - value_at) as u32,
                value_type,
                element,
            });
        }
        let bytes = self.bytes;
        entries.sort_unstable_by_key(|entry| entry.key(bytes));
        match entries.array_windows().find(|[a, b]| a.key(bytes) == b.key(bytes)) {
            Some([a, _]) => {
                let key = String::from_utf8_lossy(a.key(bytes)).into_owned();
                Err(HeaderError::DuplicateKey { key })
            }
            None => Ok(entries),
        }
    }

    /// Passes over the elements of an array; returns where they begin.
    fn array(&mut self, key: &str) -> Result<(usize, Option<(ValueType, u32)>), HeaderError> {
        let element = self.value_type(key)?;
        let len = self.u64(&Of("the length of metadata", key))?;
        let start = match element {
            ValueType::Array => return Err(HeaderError::NestedArray { key: key.to_owned() }),
            ValueType::Str => {
                // Each string has at least the eight bytes of its length.
                let what = Of("the array of strings in metadata", key);
                if len > self.left() / 8 {
                    return Err(self.too_short(len.saturating_mul(8), &what));
                }
                let start = self.at;
                for _ in 0..len {
                    self.string(&what)?;
                }
                start
            }
            _ => self.values(key, element, len)?,
        };
        Ok((start, Some((element, len as u32))))
    }

    /// Passes over `n` values of a type of fixed size; returns where they begin.
    fn values(&mut self, key: &str, value_type: ValueType, n: u64) -> Result<usize, HeaderError> {
        let size = value_type.size().expect("strings and arrays are read elsewhere") as u64;
        let start = self.at;
        let values = self.take(n.saturating_mul(size), &Of("the value of metadata", key))?;
        if value_type == ValueType::Bool
            && let Some(i) = values.iter().position(|&byte| byte > 1)
        {
            let offset = (start + i) as u64;
            return Err(HeaderError::Bool { key: key.to_owned(), offset, found: values[i] });
        }
        Ok(start)
    }

    /// The tensor table: tensors with their length in `range.end`, and their offsets in the tensor data.
    fn tensors(&mut self, n: u64) -> Result<Vec<(Tensor, u64)>, HeaderError> {
        let mut tensors = Vec::new();
        for i in 0..n {
            let name = self.name(&Nth("the name of tensor", i, n))?;
            let what = Of("the entry of tensor", name);
            let n_dims = self.u32(&what)?;
            if !(1..=4).contains(&n_dims) {
                return Err(HeaderError::DimCount { name: name.to_owned(), found: n_dims.into(), limit: 4 });
            }
            let mut dims = [1; 4];
            for dim in &mut dims[..n_dims as usize] {
                *dim = self.u64(&what)?;
            }
            let code = self.u32(&what)?;
            let offset = self.u64(&what)?;
            tensors.push((tensor(name, &dims[..n_dims as usize], code)?, offset));
        }
        Ok(tensors)
    }
}

/// A tensor with its length in bytes as `range.end`. `dims`: innermost first, as in the file.
fn tensor(name: &str, dims: &[u64], code: u32) -> Result<Tensor, HeaderError> {
    let format = Format::from_ggml_type(code);
    let (type_name, block_len, block_bytes) = match format {
        Some(format) => (format.name(), format.block_len() as u64, format.block_bytes() as u64),
        None => OTHER_TYPES
            .iter()
            .find(|other| other.0 == code)
            .map(|&(_, name, len, bytes)| (name, len, bytes))
            .ok_or_else(|| HeaderError::TensorType { name: name.to_owned(), found: code.to_string() })?,
    };
    if dims.contains(&0) {
        return Err(HeaderError::ZeroDim { name: name.to_owned(), shape: dims.to_vec() });
    }
    if !dims[0].is_multiple_of(block_len) {
        return Err(HeaderError::RowLength { name: name.to_owned(), row_len: dims[0], type_name, block_len });
    }
    let overflow = || HeaderError::ShapeOverflow { name: name.to_owned(), shape: dims.to_vec() };
    let n_blocks = dims[1..].iter().try_fold(dims[0] / block_len, |product, &dim| product.checked_mul(dim));
    let n_bytes = n_blocks.and_then(|n| n.checked_mul(block_bytes)).ok_or_else(overflow)?;
    // The product fits, so each factor does.
    let n_bytes = usize::try_from(n_bytes).map_err(|_| overflow())?;
    let mut shape = [0; 4];
    for (out, &dim) in shape.iter_mut().zip(dims.iter().rev()) {
        *out = usize::try_from(dim).map_err(|_| overflow())?;
    }
    let shape = Shape::new(&shape[..dims.len()]).expect("at most 4 dimensions");
    Ok(Tensor { name: name.into(), type_name, format, shape, file_idx: 0, range: 0..n_bytes })
}

/// `the key of metadata entry 3 of 20`, counted from 1.
struct Nth(&'static str, u64, u64);

impl Display for Nth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} of {}", self.0, self.1 + 1, self.2)
    }
}

/// `the value of metadata "key"`.
struct Of<'a>(&'static str, &'a str);

impl Display for Of<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}", self.0, self.1)
    }
}
