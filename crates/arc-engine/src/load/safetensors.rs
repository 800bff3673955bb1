//! Safetensors files: one, or several shards beside a `model.safetensors.index.json`.
//!
//! ```text
//! header length u64, header (a JSON object, padded with spaces), tensor data
//! {"__metadata__": {..}, NAME: {"dtype": "BF16", "shape": [out, in], "data_offsets": [begin, end]}, ..}
//! ```
//!
//! Offsets are relative to the tensor data, which the tensors must cover from the first byte to the last, without
//! overlap. They need no alignment: bytes are never cast.
//!
//! Source: the safetensors format description. Stricter than it in two ways: a name that appears twice is refused
//! (readers disagree about which one counts), and so is a dimension of 0.

pub(super) mod json;
mod shards;

use std::path::{Path, PathBuf};

use arc_device::format::Format;
use arc_device::map::Mapped;

use super::error::{HeaderError, LoadError};
use super::weights::{Shape, Tensor, Weights, check_table};

/// The longest header, in bytes. A tensor takes about a hundred; a larger one would make a hostile file expensive to
/// refuse.
pub const MAX_HEADER: usize = 16 << 20;
/// The longest index of a sharded model, in bytes.
pub const MAX_INDEX: usize = 20 << 20;

/// Name in a file, our name, bits of a value, and the weight format where there is one.
const TYPES: [(&str, &str, u64, Option<Format>); 22] = [
    ("F32", "f32", 32, Some(Format::F32)),
    ("F16", "f16", 16, Some(Format::F16)),
    ("BF16", "bf16", 16, Some(Format::Bf16)),
    ("F64", "f64", 64, None),
    ("I64", "i64", 64, None),
    ("U64", "u64", 64, None),
    ("I32", "i32", 32, None),
    ("U32", "u32", 32, None),
    ("I16", "i16", 16, None),
    ("U16", "u16", 16, None),
    ("I8", "i8", 8, None),
    ("U8", "u8", 8, None),
    ("BOOL", "bool", 8, None),
    ("C64", "c64", 64, None),
    ("F8_E4M3", "f8_e4m3", 8, None),
    ("F8_E4M3FNUZ", "f8_e4m3fnuz", 8, None),
    ("F8_E5M2", "f8_e5m2", 8, None),
    ("F8_E5M2FNUZ", "f8_e5m2fnuz", 8, None),
    ("F8_E8M0", "f8_e8m0", 8, None),
    ("F6_E2M3", "f6_e2m3", 6, None),
    ("F6_E3M2", "f6_e3m2", 6, None),
    ("F4", "f4", 4, None),
];

/// A safetensors header in which every name, size and offset has been checked.
#[derive(Debug)]
pub struct SafetensorsHeader {
    /// Where the tensor data begins.
    pub data_start: usize,
    /// Sorted by name; no name twice, no byte in two, no byte in none.
    tensors: Vec<Tensor>,
}

impl SafetensorsHeader {
    /// Reads and checks the header at the start of `bytes`.
    ///
    /// `file_len` is the length of the whole file, of which `bytes` may be a beginning that holds the header. Takes
    /// time and memory proportional to the header, which is at most [`MAX_HEADER`] bytes.
    pub fn parse(bytes: &[u8], file_len: u64) -> Result<Self, HeaderError> {
        let truncated = |what: &str, offset: u64, wanted: u64, left: u64| HeaderError::Truncated {
            what: what.to_owned(),
            offset,
            wanted,
            left,
        };
        let Some((len, rest)) = bytes.split_first_chunk() else {
            return Err(truncated("the length of the header", 0, 8, bytes.len() as u64));
        };
        let len = u64::from_le_bytes(*len);
        if len > MAX_HEADER as u64 {
            let what = "bytes of the header".to_owned();
            return Err(HeaderError::TooLarge { what, found: len, limit: MAX_HEADER as u64 });
        }
        let header = rest.get(..len as usize).ok_or_else(|| truncated("the header", 8, len, rest.len() as u64))?;
        if header.first() != Some(&b'{') {
            return Err(HeaderError::Json { problem: "it does not begin with {".to_owned() });
        }
        // The JSON reader would not look into strings that it passes over.
        let text =
            str::from_utf8(header).map_err(|_| HeaderError::Utf8 { what: "the header".to_owned(), offset: 8 })?;
        let data_start = 8 + header.len();
        let mut tensors = json::entries(text)?
            .into_iter()
            .map(|(name, entry)| tensor(name, entry, data_start, file_len))
            .collect::<Result<Vec<_>, _>>()?;
        check_table(&mut tensors)?;
        check_cover(&tensors, data_start as u64, file_len)?;
        Ok(Self { data_start, tensors })
    }

    /// The tensors, by name.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
}

/// Checks one entry against itself and the end of the file.
fn tensor(name: Box<str>, entry: json::Entry, data_start: usize, file_len: u64) -> Result<Tensor, HeaderError> {
    if name.is_empty() {
        return Err(HeaderError::EmptyName { what: "a tensor name".to_owned(), offset: 8 });
    }
    let Some(&(_, type_name, bits, format)) = TYPES.iter().find(|known| known.0 == &*entry.dtype.0) else {
        return Err(HeaderError::TensorType { name: name.into(), found: format!("{:?}", entry.dtype.0) });
    };
    let (dims, shape) = (&entry.shape, entry.shape.to_vec());
    if dims.contains(&0) {
        return Err(HeaderError::ZeroDim { name: name.into(), shape });
    }
    let n_bits = dims.iter().try_fold(bits, |product, &dim| product.checked_mul(dim));
    let sizes = dims.iter().map(|&dim| usize::try_from(dim).ok()).collect::<Option<Vec<_>>>();
    let (Some(n_bits), Some(sizes)) = (n_bits, sizes) else {
        return Err(HeaderError::ShapeOverflow { name: name.into(), shape });
    };
    let [begin, end] = entry.data_offsets;
    let (expected, found) = (n_bits.div_ceil(8), end.saturating_sub(begin));
    if n_bits % 8 != 0 || expected != found {
        return Err(HeaderError::ByteCount { name: name.into(), type_name, shape, expected, found });
    }
    // Not empty and not reversed, since a tensor has at least one byte.
    let end = end.saturating_add(data_start as u64);
    let range = match usize::try_from(end) {
        Ok(end) if end as u64 <= file_len => begin as usize + data_start..end,
        _ => return Err(HeaderError::PastEnd { name: name.into(), end, file_len }),
    };
    let shape = Shape::new(&sizes).expect("the reader of entries refuses more dimensions");
    Ok(Tensor { name, type_name, format, shape, file_idx: 0, range })
}

/// Tensors that do not overlap must leave no byte of the data out.
fn check_cover(tensors: &[Tensor], data_start: u64, file_len: u64) -> Result<(), HeaderError> {
    let covered = tensors.iter().map(|tensor| tensor.range.len() as u64).sum::<u64>();
    if covered == file_len.saturating_sub(data_start) {
        return Ok(());
    }
    let mut ranges =
        tensors.iter().map(|tensor| (tensor.range.start as u64, tensor.range.end as u64)).collect::<Vec<_>>();
    ranges.push((file_len, file_len));
    ranges.sort_unstable();
    let mut at = data_start;
    for (start, end) in ranges {
        if start > at {
            return Err(HeaderError::Hole { start: at, end: start });
        }
        at = end;
    }
    unreachable!("tensors that leave no hole cover everything");
}

/// An opened safetensors model.
#[derive(Debug)]
pub struct SafetensorsFile {
    folder: PathBuf,
    weights: Weights,
}

impl SafetensorsFile {
    /// Opens a file, an index of shards (`*.index.json`), or a folder that has `model.safetensors.index.json` or
    /// `model.safetensors`, and checks every header.
    ///
    /// Reads headers only. Errors: every [`LoadError`] about a file, its header, its index or its shards.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let file = if path.is_dir() { model_in(path)? } else { path.to_owned() };
        let folder = file.parent().unwrap_or(Path::new("")).to_owned();
        let weights = if file.extension().is_some_and(|extension| extension == "json") {
            shards::open_all(&file)?
        } else {
            let (map, header) = open_one(&file, |source| LoadError::Open { path: file.clone(), source })?;
            Weights::new(vec![(file, map, header.tensors)])?
        };
        Ok(Self { folder, weights })
    }

    /// The folder that the files lie in, where `config.json` and the tokenizer are found.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The tensors.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }
}

/// The file of a folder that leads to its model.
fn model_in(folder: &Path) -> Result<PathBuf, LoadError> {
    ["model.safetensors.index.json", "model.safetensors"]
        .map(|name| folder.join(name))
        .into_iter()
        .find(|path| path.exists())
        .ok_or_else(|| LoadError::EmptyFolder { path: folder.to_owned() })
}

/// Maps one file and checks its header; `cannot_open` makes the error of a file that is not there.
fn open_one(
    path: &Path,
    cannot_open: impl FnOnce(std::io::Error) -> LoadError,
) -> Result<(Mapped, SafetensorsHeader), LoadError> {
    let map = Mapped::open(path).map_err(cannot_open)?;
    let header = SafetensorsHeader::parse(map.bytes(), map.bytes().len() as u64)
        .map_err(|problem| LoadError::Header { path: path.to_owned(), problem })?;
    Ok((map, header))
}
