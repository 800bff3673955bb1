//! For tests: writers of small model files, whole ones and ones that lie, and readers that use all they are given.

use std::path::Path;

use arc_device::format::Format;

use super::error::HeaderError;
use super::gguf::{GgufHeader, Value, ValueType};
use super::safetensors::{SafetensorsHeader, json};
use super::weights::Tensor;

/// Builds a GGUF file in memory. Every field can be set to something that is not true.
#[derive(Clone, Debug)]
pub struct GgufWriter {
    /// The first four bytes.
    pub magic: [u8; 4],
    /// Version of the file format.
    pub version: u32,
    /// Number of tensors, if not the true one.
    pub n_tensors: Option<u64>,
    /// Number of metadata entries, if not the true one.
    pub n_metadata: Option<u64>,
    /// Alignment that is used; `general.alignment` is written by the caller.
    pub alignment: usize,
    /// Metadata entries: key, type and value in bytes.
    pub metadata: Vec<(Vec<u8>, Vec<u8>)>,
    /// Tensors, laid out in this order.
    pub tensors: Vec<TensorSpec>,
}

/// One tensor of a [`GgufWriter`].
#[derive(Clone, Debug)]
pub struct TensorSpec {
    /// Name.
    pub name: Vec<u8>,
    /// Dimensions, innermost first.
    pub dims: Vec<u64>,
    /// Number of dimensions, if not the true one.
    pub n_dims: Option<u32>,
    /// GGUF type code.
    pub code: u32,
    /// Offset in the tensor data, if not the true one.
    pub offset: Option<u64>,
    /// Content.
    pub data: Vec<u8>,
}

/// The bytes of a GGUF string.
pub fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

/// The bytes of a GGUF array value: element type, length, elements.
pub fn array(element: ValueType, len: u64, elements: &[u8]) -> Vec<u8> {
    [&element.code().to_le_bytes()[..], &len.to_le_bytes(), elements].concat()
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            n_tensors: None,
            n_metadata: None,
            alignment: 32,
            metadata: Vec::new(),
            tensors: Vec::new(),
        }
    }
}

impl GgufWriter {
    /// Adds a metadata entry of a type, with the bytes of its value.
    pub fn value(mut self, key: &str, value_type: ValueType, value: impl AsRef<[u8]>) -> Self {
        let typed = [&value_type.code().to_le_bytes(), value.as_ref()].concat();
        self.metadata.push((key.into(), typed));
        self
    }

    /// Adds an unsigned integer.
    pub fn u32(self, key: &str, value: u32) -> Self {
        self.value(key, ValueType::U32, value.to_le_bytes())
    }

    /// Adds a float.
    pub fn f32(self, key: &str, value: f32) -> Self {
        self.value(key, ValueType::F32, value.to_le_bytes())
    }

    /// Adds a string.
    pub fn str(self, key: &str, value: &str) -> Self {
        self.value(key, ValueType::Str, string(value))
    }

    /// Adds an array of strings.
    pub fn strs(self, key: &str, values: &[&str]) -> Self {
        let elements = values.iter().flat_map(string).collect::<Vec<_>>();
        self.value(key, ValueType::Array, array(ValueType::Str, values.len() as u64, &elements))
    }

    /// Adds a tensor. `shape`: outermost first; `data`: the bytes that shape and format need.
    pub fn tensor(mut self, name: &str, format: Format, shape: &[usize], data: Vec<u8>) -> Self {
        self.tensors.push(TensorSpec {
            name: name.into(),
            dims: shape.iter().rev().map(|&dim| dim as u64).collect(),
            n_dims: None,
            code: format.ggml_type().expect("GGUF has the format"),
            offset: None,
            data,
        });
        self
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.n_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.n_metadata.unwrap_or(self.metadata.len() as u64).to_le_bytes());
        for (key, typed) in &self.metadata {
            out.extend(string(key));
            out.extend(typed);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            out.extend(string(&tensor.name));
            out.extend(tensor.n_dims.unwrap_or(tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(tensor.code.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }
}

/// A safetensors file of a header, true or not, and data.
pub fn safetensors_bytes(header: impl AsRef<[u8]>, data: &[u8]) -> Vec<u8> {
    let header = header.as_ref();
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// Parses bytes as a GGUF file and, if they are accepted, uses everything that was accepted.
///
/// Panics where a promise of the parser is broken. For tests that feed it hostile bytes.
pub fn exercise_gguf(bytes: &[u8]) -> Result<(), HeaderError> {
    let header = GgufHeader::parse(bytes, bytes.len() as u64)?;
    assert_table(header.tensors(), header.data_start, bytes.len());
    let metadata = header.metadata(bytes, Path::new("hostile.gguf"));
    let mut previous = None;
    for (key, value) in metadata.iter() {
        assert!(previous < Some(key), "keys are sorted and each is there once");
        previous = Some(key);
        assert_eq!(metadata.get(key).map(|found| found.to_string()), Some(value.to_string()));
        // Each getter gives a value or an error that says what was wanted; which one is the file's business.
        let results = [
            metadata.get_u32(key).map(drop),
            metadata.get_u64(key).map(drop),
            metadata.get_f32(key).map(drop),
            metadata.get_bool(key).map(drop),
            metadata.get_str(key).map(drop),
            metadata.get_i32_array(key).map(drop),
            metadata.get_f32_array(key).map(drop),
            metadata.get_bool_array(key).map(drop),
            metadata.get_str_array(key).map(|strings| assert_eq!(strings.iter().count(), strings.len())),
        ];
        let messages = results.iter().filter_map(|result| Some(result.as_ref().err()?.to_string()));
        assert!(messages.into_iter().all(|message| message.len() < 2_000), "messages stay short");
        if let Value::Array(array) = value {
            assert_eq!(array.iter().count(), array.len());
        }
    }
    Ok(())
}

/// As [`exercise_gguf`], for a safetensors file.
pub fn exercise_safetensors(bytes: &[u8]) -> Result<SafetensorsHeader, HeaderError> {
    let header = SafetensorsHeader::parse(bytes, bytes.len() as u64)?;
    assert_table(header.tensors(), header.data_start, bytes.len());
    let covered = header.tensors().iter().map(|tensor| tensor.range.len()).sum::<usize>();
    assert_eq!(covered, bytes.len() - header.data_start, "every byte of the data is in a tensor");
    Ok(header)
}

/// As [`exercise_gguf`], for an index of shards; gives the number of tensors that it lists.
pub fn exercise_index(bytes: &[u8]) -> Result<usize, String> {
    let index = json::index(bytes)?;
    assert!(index.tensors.is_sorted_by(|a, b| a.0 < b.0), "names are sorted and each is there once");
    assert!(index.files.is_sorted_by(|a, b| a < b), "files are sorted and each is there once");
    assert!(index.tensors.iter().all(|(_, file_idx)| (*file_idx as usize) < index.files.len()));
    Ok(index.tensors.len())
}

/// Tensors are sorted by name, lie in the tensor data, do not overlap and are as long as format and shape need.
fn assert_table(tensors: &[Tensor], data_start: usize, file_len: usize) {
    assert!(tensors.is_sorted_by(|a, b| a.name < b.name), "names are sorted and each is there once");
    let mut ranges = tensors.iter().map(|tensor| (tensor.range.start, tensor.range.end)).collect::<Vec<_>>();
    ranges.sort_unstable();
    let mut at = data_start;
    for (start, end) in ranges {
        assert!(at <= start && start < end && end <= file_len, "{at} <= {start} < {end} <= {file_len}");
        at = end;
    }
    for tensor in tensors {
        let Some(format) = tensor.format else { continue };
        let (cols, rows) = match &*tensor.shape {
            [] => (1, 1),
            [rows @ .., cols] => (*cols, rows.iter().product()),
        };
        assert_eq!(format.row_bytes(cols).map(|row| row * rows), Some(tensor.range.len()), "{}", tensor.name);
    }
}
