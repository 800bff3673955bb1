//! DeepSeek-V4's weights under their released names, in any of the released storage forms.
//!
//! | stored as | beside it | becomes |
//! |---|---|---|
//! | BF16, F16, F32 | | itself |
//! | F8_E4M3 `[out, in]` | `.scale` F8_E8M0, one for 128 x 128 | FP8 |
//! | I8 `[out, in / 2]`: two FP4 (E2M1) codes a byte, the even column low | `.scale` F8_E8M0, one for 32 of a row | MXFP4, or BF16 |
//!
//! GGUF files have names of their own ([`GgufNames`]), experts merged into one tensor, and integer-coded formats.
//!
//! FP8 and MXFP4 keep every bit ([`repack`]). Products with integer-coded weights read int8 inputs, so that f32 inputs
//! need their values as floats: F32, or for MXFP4 BF16, which is exact, since a code has two significant bits, BF16 has
//! eight, and a scale is a power of two. A product beyond BF16's range, and a NaN anywhere, is refused by name.

use std::borrow::Cow;
use std::path::Path;

use arc_device::Alloc;
use arc_device::format::half::{bf16_to_f32, f32_to_bf16};
use arc_device::format::{Coding, Format, repack};
use arc_device::ops::matmul::MatrixSource;

use crate::load::synthetic::table::GgufNames;
use crate::load::{LoadError, ModelFile, Tensor, TensorRef, Weights};
use crate::model::config::bad;

/// A matrix ready for the device.
pub struct Source<'a> {
    format: Format,
    rows: usize,
    cols: usize,
    bytes: Cow<'a, [u8]>,
    /// The file's tensor, where the bytes are its own.
    tensor: Option<TensorRef>,
}

/// Reads tensors of one model by their released names.
pub struct Reader<'a> {
    weights: &'a Weights,
    /// Where the file has others.
    gguf: Option<GgufNames>,
    /// Routed experts, which a GGUF file merges into one tensor.
    experts: usize,
    keep_codes: bool,
}

impl<'a> Reader<'a> {
    /// Of this model; integer-coded weights stay so where `keep_codes`, and become floats otherwise.
    pub fn new(file: &'a ModelFile, experts: usize, keep_codes: bool) -> Self {
        let gguf = matches!(file, ModelFile::Gguf(_)).then(GgufNames::default);
        Reader { weights: file.weights(), gguf, experts, keep_codes }
    }

    /// The file's name for a tensor, and the place of an expert's share in it.
    fn name(&self, released: &str) -> (String, Option<usize>) {
        let found = self.gguf.as_ref().and_then(|names| names.of(released));
        found.unwrap_or_else(|| (released.to_owned(), None))
    }

    fn path(&self) -> &Path {
        self.weights.path()
    }

    /// A tensor by the file's name for it.
    fn find(&self, name: &str) -> Result<&'a Tensor, LoadError> {
        let missing = || LoadError::MissingTensor { path: self.path().to_owned(), name: name.to_owned() };
        self.weights.find(name).ok_or_else(missing)
    }

    fn shaped(&self, tensor: &Tensor, shape: &[usize]) -> Result<(), LoadError> {
        if *tensor.shape == *shape {
            return Ok(());
        }
        Err(LoadError::WrongShape {
            path: self.path().to_owned(),
            name: tensor.name.to_string(),
            expected: shape.to_vec(),
            found: tensor.shape.to_vec(),
        })
    }

    /// Refuses a tensor that the configuration leaves no place for.
    pub fn absent(&self, name: &str, why: &str) -> Result<(), LoadError> {
        let (name, _) = self.name(name);
        match self.weights.find(&name) {
            None => Ok(()),
            Some(_) => Err(bad(self.path(), &format!("tensor {name:?}"), format!("is there, but {why}"))),
        }
    }

    /// The matrix `{name}.weight` `[rows, cols]` in whatever form it is stored.
    pub fn source(&self, name: &str, rows: usize, cols: usize) -> Result<Source<'a>, LoadError> {
        let source = match &self.gguf {
            Some(_) => self.gguf_source(name, rows, cols)?,
            None => self.released_source(name, rows, cols)?,
        };
        if self.keep_codes || source.format.coding() == Coding::Float {
            return Ok(source);
        }
        let to = if source.format == Format::Mxfp4 { Format::Bf16 } else { Format::F32 };
        let bytes = to_floats(source.format, &source.bytes, rows * cols, to).ok_or_else(|| {
            let problem = "has values beyond BF16: its scales are too large".to_owned();
            bad(self.path(), &format!("matrix {name:?}"), problem)
        })?;
        Ok(Source { format: to, bytes: Cow::Owned(bytes), ..source })
    }

    fn gguf_source(&self, name: &str, rows: usize, cols: usize) -> Result<Source<'a>, LoadError> {
        let (name, expert) = self.name(&format!("{name}.weight"));
        let shape: &[usize] = if expert.is_some() { &[self.experts, rows, cols] } else { &[rows, cols] };
        let tensor = self.weights.tensor_of_shape(&name, shape)?;
        let (format, all) = (tensor.format, self.weights.raw_bytes(self.find(&name)?));
        let Some(expert) = expert else {
            return Ok(Source { format, rows, cols, bytes: Cow::Borrowed(all), tensor: Some(tensor) });
        };
        let each = all.len() / self.experts;
        let bytes = Cow::Borrowed(&all[expert * each..(expert + 1) * each]);
        // The pages of all experts go with the last one.
        let tensor = (expert + 1 == self.experts).then_some(tensor);
        Ok(Source { format, rows, cols, bytes, tensor })
    }

    fn released_source(&self, name: &str, rows: usize, cols: usize) -> Result<Source<'a>, LoadError> {
        let weight = format!("{name}.weight");
        let tensor = self.find(&weight)?;
        let per_code = match tensor.type_name {
            "f8_e4m3" => 1,
            "i8" => 2,
            _ => {
                let tensor = self.weights.tensor_of_shape(&weight, &[rows, cols])?;
                let bytes = Cow::Borrowed(self.weights.raw_bytes(self.find(&weight)?));
                return Ok(Source { format: tensor.format, rows, cols, bytes, tensor: Some(tensor) });
            }
        };
        self.shaped(tensor, &[rows, cols / per_code])?;
        let scale = self.find(&format!("{name}.scale"))?;
        if scale.type_name != "f8_e8m0" {
            let problem = format!("is stored as {}, must be f8_e8m0", scale.type_name);
            return Err(bad(self.path(), &format!("tensor {:?}", scale.name), problem));
        }
        let (codes, scales) = (self.weights.raw_bytes(tensor), self.weights.raw_bytes(scale));
        let (format, bytes) = if per_code == 1 {
            (Format::Fp8, repack::fp8_rows(codes, rows, cols, scales, &scale.shape))
        } else {
            (Format::Mxfp4, repack::fp4_rows(codes, rows, cols, scales, &scale.shape))
        };
        let bytes = bytes.map_err(|problem| {
            bad(self.path(), &format!("tensor {weight:?}"), format!("does not fit {:?}: {problem}", scale.name))
        })?;
        Ok(Source { format, rows, cols, bytes: Cow::Owned(bytes), tensor: None })
    }

    /// Loads sources, stacked along the outputs, as one matrix.
    pub fn matrix<D: Alloc>(&self, dev: &mut D, name: &str, sources: &[Source<'a>]) -> Result<D::Matrix, LoadError> {
        let parts: Vec<MatrixSource<'_>> = sources.iter().map(Source::part).collect();
        let matrix = dev.matrix(name, &parts)?;
        sources.iter().filter_map(|source| source.tensor.as_ref()).for_each(|tensor| self.weights.release(tensor));
        Ok(matrix)
    }

    /// Loads one source as a matrix of `parts` equal parts.
    pub fn split_matrix<D: Alloc>(
        &self,
        dev: &mut D,
        name: &str,
        source: &Source<'a>,
        parts: usize,
    ) -> Result<D::Matrix, LoadError> {
        let whole = source.part();
        let each = whole.bytes.len() / parts;
        let parts: Vec<MatrixSource<'_>> = (0..parts)
            .map(|i| MatrixSource { rows: whole.rows / parts, bytes: &whole.bytes[i * each..(i + 1) * each], ..whole })
            .collect();
        let matrix = dev.matrix(name, &parts)?;
        source.tensor.iter().for_each(|tensor| self.weights.release(tensor));
        Ok(matrix)
    }

    /// A tensor's values in f32, whatever float format it has.
    pub fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let tensor = self.weights.tensor_of_shape(&self.name(name).0, shape)?;
        let mut values = vec![0.0; shape.iter().product()];
        tensor.format.decode_row(self.weights.bytes(&tensor), &mut values);
        self.weights.release(&tensor);
        Ok(values)
    }

    /// A vector weight, `[shape]` flattened.
    pub fn vector<D: Alloc>(
        &self,
        dev: &mut D,
        kind: &str,
        name: &str,
        shape: &[usize],
    ) -> Result<D::Buf<f32>, LoadError> {
        Ok(dev.vector(kind, &self.values(name, shape)?)?)
    }

    /// A table of ids below `end`, stored as I64 or I32.
    pub fn ids(&self, name: &str, shape: &[usize], end: usize) -> Result<Vec<u32>, LoadError> {
        let (name, _) = self.name(name);
        let tensor = self.find(&name)?;
        self.shaped(tensor, shape)?;
        let bytes = self.weights.raw_bytes(tensor);
        let ids: Vec<i64> = match tensor.type_name {
            "i64" => bytes.as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id)).collect(),
            "i32" => bytes.as_chunks::<4>().0.iter().map(|id| i64::from(i32::from_le_bytes(*id))).collect(),
            other => {
                let problem = format!("is stored as {other}, must be i64 or i32");
                return Err(bad(self.path(), &format!("tensor {name:?}"), problem));
            }
        };
        let id = |id: i64| u32::try_from(id).ok().filter(|&id| (id as usize) < end);
        let checked = |&found: &i64| {
            let problem = || format!("names expert {found}, there are {end}");
            id(found).ok_or_else(|| bad(self.path(), &format!("tensor {name:?}"), problem()))
        };
        ids.iter().map(checked).collect()
    }
}

impl Source<'_> {
    fn part(&self) -> MatrixSource<'_> {
        MatrixSource { format: self.format, rows: self.rows, cols: self.cols, bytes: &self.bytes }
    }
}

/// Values as BF16 or F32; `None` where one is not exactly that.
fn to_floats(format: Format, bytes: &[u8], n: usize, to: Format) -> Option<Vec<u8>> {
    let mut values = vec![0.0; n];
    format.decode_row(bytes, &mut values);
    if to == Format::F32 {
        return Some(values.iter().flat_map(|value| value.to_le_bytes()).collect());
    }
    let mut out = Vec::with_capacity(2 * n);
    for value in values {
        let bits = f32_to_bf16(value);
        if !value.is_finite() || bf16_to_f32(bits) != value {
            return None;
        }
        out.extend(bits.to_le_bytes());
    }
    Some(out)
}
