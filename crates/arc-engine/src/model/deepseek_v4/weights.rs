//! DeepSeek-V4's weights under their released names, in any of the released storage forms.
//!
//! | stored as | beside it | becomes |
//! |---|---|---|
//! | BF16, F16, F32 | | itself |
//! | F8_E4M3 `[out, in]` | `.scale` F8_E8M0, one for 128 x 128 | FP8 |
//! | I8 `[out, in / 2]`: two FP4 (E2M1) codes a byte, the even column low | `.scale` F8_E8M0, one for 32 of a row | MXFP4, or BF16 |
//!
//! GGUF files have names of their own ([`GgufNames`]), experts merged into one tensor, and integer-coded formats. Of a model
//! without a file, rows are made when they are asked for; a device on paper is given blanks instead.
//!
//! FP8 and MXFP4 keep every bit ([`repack`]). Products with integer-coded weights read int8 inputs, so that f32 inputs
//! need their values as floats: F32, or for MXFP4 BF16, which is exact, since a code has two significant bits, BF16 has
//! eight, and a scale is a power of two. A product beyond BF16's range, and a NaN anywhere, is refused by name.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

use arc_device::Alloc;
use arc_device::format::half::{bf16_to_f32, f32_to_bf16};
use arc_device::format::{Coding, Format, repack};
use arc_device::ops::matmul::MatrixSource;

use crate::load::synthetic::Synthetic;
use crate::load::synthetic::table::{Class, GgufNames, TensorSpec};
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

/// Where the tensors are.
#[derive(Clone, Copy)]
enum Tensors<'a> {
    Stored(&'a Weights),
    Made(&'a Synthetic),
}

/// Reads tensors of one model by their released names.
pub struct Reader<'a> {
    path: &'a Path,
    tensors: Tensors<'a>,
    /// Where the file has others.
    gguf: Option<GgufNames>,
    /// Routed experts, which a GGUF file merges into one tensor.
    experts: usize,
    keep_codes: bool,
    /// Zeros in place of bytes that nobody looks at, as many as any source of this model has. Never touched, so that
    /// they take no memory.
    blank: Option<Vec<u8>>,
}

impl<'a> Reader<'a> {
    /// Of this model; integer-coded weights stay so where `keep_codes`, and become floats otherwise. `reads`: whether the
    /// device looks at values ([`Alloc::READS_VALUES`]).
    pub fn new(file: &'a ModelFile, experts: usize, keep_codes: bool, reads: bool) -> Self {
        let gguf = matches!(file, ModelFile::Gguf(_)).then(GgufNames::default);
        let (tensors, blank) = match file {
            ModelFile::Gguf(file) => (Tensors::Stored(file.weights()), None),
            ModelFile::Safetensors(file) => (Tensors::Stored(file.weights()), None),
            ModelFile::Synthetic(model) => {
                let most = || model.tensors().iter().map(|tensor| largest_source(model, tensor)).max().unwrap_or(0);
                (Tensors::Made(model), (!reads).then(|| vec![0; most()]))
            }
        };
        Reader { path: file.path(), tensors, gguf, experts, keep_codes, blank }
    }

    /// The file's name for a tensor, and the place of an expert's share in it.
    fn name(&self, released: &str) -> (String, Option<usize>) {
        let found = self.gguf.as_ref().and_then(|names| names.of(released));
        found.unwrap_or_else(|| (released.to_owned(), None))
    }

    fn path(&self) -> &Path {
        self.path
    }

    fn missing(&self, name: &str) -> LoadError {
        LoadError::MissingTensor { path: self.path().to_owned(), name: name.to_owned() }
    }

    /// A tensor by the file's name for it.
    fn find(&self, weights: &'a Weights, name: &str) -> Result<&'a Tensor, LoadError> {
        weights.find(name).ok_or_else(|| self.missing(name))
    }

    /// The rows of a model without a file that a released tensor is.
    fn made(
        &self,
        model: &'a Synthetic,
        name: &str,
        shape: &[usize],
    ) -> Result<(&'a TensorSpec, Range<usize>), LoadError> {
        let (tensor, rows) = model.released(name).ok_or_else(|| self.missing(name))?;
        let found = if rows.len() == tensor.rows() { tensor.shape.to_vec() } else { vec![rows.len(), tensor.cols()] };
        if found == shape {
            return Ok((tensor, rows));
        }
        let (path, name) = (self.path().to_owned(), name.to_owned());
        Err(LoadError::WrongShape { path, name, expected: shape.to_vec(), found })
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
        let there = match self.tensors {
            Tensors::Stored(weights) => weights.find(&name).is_some(),
            Tensors::Made(model) => model.released(&name).is_some(),
        };
        match there {
            false => Ok(()),
            true => Err(bad(self.path(), &format!("tensor {name:?}"), format!("is there, but {why}"))),
        }
    }

    /// The matrix `{name}.weight` `[rows, cols]` in whatever form it is stored.
    pub fn source(&self, name: &str, rows: usize, cols: usize) -> Result<Source<'_>, LoadError> {
        let source = match (self.tensors, &self.gguf) {
            (Tensors::Made(model), _) => self.made_source(model, name, rows, cols)?,
            (Tensors::Stored(weights), Some(_)) => self.gguf_source(weights, name, rows, cols)?,
            (Tensors::Stored(weights), None) => self.released_source(weights, name, rows, cols)?,
        };
        if self.keep_codes || source.format.coding() == Coding::Float {
            return Ok(source);
        }
        let to = if source.format == Format::Mxfp4 { Format::Bf16 } else { Format::F32 };
        if let Some(blank) = &self.blank {
            return Ok(Source { format: to, bytes: blank_of(blank, to, rows, cols), ..source });
        }
        let bytes = to_floats(source.format, &source.bytes, rows * cols, to).ok_or_else(|| {
            let problem = "has values beyond BF16: its scales are too large".to_owned();
            bad(self.path(), &format!("matrix {name:?}"), problem)
        })?;
        Ok(Source { format: to, bytes: Cow::Owned(bytes), ..source })
    }

    fn made_source(&self, model: &'a Synthetic, name: &str, rows: usize, cols: usize) -> Result<Source<'_>, LoadError> {
        let (tensor, range) = self.made(model, &format!("{name}.weight"), &[rows, cols])?;
        let integers = || bad(self.path(), &format!("tensor {:?}", tensor.name), "holds integers".to_owned());
        let format = tensor.format.ok_or_else(integers)?;
        let bytes = match &self.blank {
            Some(blank) => blank_of(blank, format, rows, cols),
            None => Cow::Owned(model.rows(tensor, range)),
        };
        Ok(Source { format, rows, cols, bytes, tensor: None })
    }

    fn gguf_source(&self, weights: &'a Weights, name: &str, rows: usize, cols: usize) -> Result<Source<'a>, LoadError> {
        let (name, expert) = self.name(&format!("{name}.weight"));
        let shape: &[usize] = if expert.is_some() { &[self.experts, rows, cols] } else { &[rows, cols] };
        let tensor = weights.tensor_of_shape(&name, shape)?;
        let (format, all) = (tensor.format, weights.raw_bytes(self.find(weights, &name)?));
        let Some(expert) = expert else {
            return Ok(Source { format, rows, cols, bytes: Cow::Borrowed(all), tensor: Some(tensor) });
        };
        let each = all.len() / self.experts;
        let bytes = Cow::Borrowed(&all[expert * each..(expert + 1) * each]);
        // The pages of all experts go with the last one.
        let tensor = (expert + 1 == self.experts).then_some(tensor);
        Ok(Source { format, rows, cols, bytes, tensor })
    }

    fn released_source(
        &self,
        weights: &'a Weights,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Source<'a>, LoadError> {
        let weight = format!("{name}.weight");
        let tensor = self.find(weights, &weight)?;
        let per_code = match tensor.type_name {
            "f8_e4m3" => 1,
            "i8" => 2,
            _ => {
                let tensor = weights.tensor_of_shape(&weight, &[rows, cols])?;
                let bytes = Cow::Borrowed(weights.raw_bytes(self.find(weights, &weight)?));
                return Ok(Source { format: tensor.format, rows, cols, bytes, tensor: Some(tensor) });
            }
        };
        self.shaped(tensor, &[rows, cols / per_code])?;
        let scale = self.find(weights, &format!("{name}.scale"))?;
        if scale.type_name != "f8_e8m0" {
            let problem = format!("is stored as {}, must be f8_e8m0", scale.type_name);
            return Err(bad(self.path(), &format!("tensor {:?}", scale.name), problem));
        }
        let (codes, scales) = (weights.raw_bytes(tensor), weights.raw_bytes(scale));
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
    pub fn matrix<D: Alloc>(&self, dev: &mut D, name: &str, sources: &[Source<'_>]) -> Result<D::Matrix, LoadError> {
        let parts: Vec<MatrixSource<'_>> = sources.iter().map(Source::part).collect();
        let matrix = dev.matrix(name, &parts)?;
        sources.iter().for_each(|source| self.release(source));
        Ok(matrix)
    }

    fn release(&self, source: &Source<'_>) {
        if let (Tensors::Stored(weights), Some(tensor)) = (self.tensors, &source.tensor) {
            weights.release(tensor);
        }
    }

    /// Loads one source as a matrix of `parts` equal parts.
    pub fn split_matrix<D: Alloc>(
        &self,
        dev: &mut D,
        name: &str,
        source: &Source<'_>,
        parts: usize,
    ) -> Result<D::Matrix, LoadError> {
        let whole = source.part();
        let each = whole.bytes.len() / parts;
        let parts: Vec<MatrixSource<'_>> = (0..parts)
            .map(|i| MatrixSource { rows: whole.rows / parts, bytes: &whole.bytes[i * each..(i + 1) * each], ..whole })
            .collect();
        let matrix = dev.matrix(name, &parts)?;
        self.release(source);
        Ok(matrix)
    }

    /// A tensor's values in f32, whatever float format it has.
    pub fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let mut values = vec![0.0; shape.iter().product()];
        match self.tensors {
            Tensors::Stored(weights) => {
                let tensor = weights.tensor_of_shape(&self.name(name).0, shape)?;
                tensor.format.decode_row(weights.bytes(&tensor), &mut values);
                weights.release(&tensor);
            }
            Tensors::Made(model) => {
                let (tensor, rows) = self.made(model, name, shape)?;
                if let (Some(format), None) = (tensor.format, &self.blank) {
                    format.decode_row(&model.rows(tensor, rows), &mut values);
                }
            }
        }
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
        let (type_name, bytes) = match self.tensors {
            Tensors::Stored(weights) => {
                let tensor = self.find(weights, &name)?;
                self.shaped(tensor, shape)?;
                (tensor.type_name, Cow::Borrowed(weights.raw_bytes(tensor)))
            }
            Tensors::Made(model) => {
                let (tensor, rows) = self.made(model, &name, shape)?;
                let blank = || vec![0; tensor.n_bytes()];
                ("i32", Cow::Owned(if self.blank.is_some() { blank() } else { model.rows(tensor, rows) }))
            }
        };
        let ids: Vec<i64> = match type_name {
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

/// Bytes of a tensor as one source, in the widest form that it can take: routed experts are sources of their own.
fn largest_source(model: &Synthetic, tensor: &TensorSpec) -> usize {
    let bytes = match tensor.format {
        Some(format) if format.coding() != Coding::Float => 4 * tensor.n_values() as usize,
        _ => tensor.n_bytes(),
    };
    if tensor.class == Class::Routed { bytes / model.sizes.n_experts } else { bytes }
}

fn blank_of(blank: &[u8], format: Format, rows: usize, cols: usize) -> Cow<'_, [u8]> {
    Cow::Borrowed(&blank[..rows * format.row_bytes(cols).expect("synthetic models are whole blocks")])
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
        let mut out = vec![0; 4 * n];
        out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(out, value)| *out = value.to_le_bytes());
        return Some(out);
    }
    let mut out = vec![0; 2 * n];
    for (out, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
        let bits = f32_to_bf16(value);
        if !value.is_finite() || bf16_to_f32(bits) != value {
            return None;
        }
        *out = bits.to_le_bytes();
    }
    Some(out)
}
