//! DeepSeek-V4's weights under their released names, in any of the released storage forms.
//!
//! | stored as | beside it | becomes |
//! |---|---|---|
//! | BF16, F16, F32 | | itself |
//! | F8_E4M3 `[out, in]` | `.scale` F8_E8M0, one for 128 x 128 | FP8 |
//! | I8 `[out, in / 2]`: two FP4 (E2M1) codes a byte, the even column low | `.scale` F8_E8M0, one for 32 of a row | MXFP4, or BF16 |
//!
//! GGUF files have names of their own ([`GgufNames`]), experts merged into one tensor, and integer-coded formats. The rows
//! of a model without a file are made by the device that keeps them ([`Bytes::Synthetic`]). For a device on paper nothing is
//! read or made: names, types and shapes are checked.
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
use arc_device::ops::matmul::{Bytes, MatrixSource};
use arc_device::ops::synthetic::SyntheticRows;

use crate::load::synthetic::Synthetic;
use crate::load::synthetic::table::{GgufNames, TensorSpec};
use crate::load::{LoadError, ModelFile, Tensor, TensorRef, Weights};
use crate::model::config::bad;

/// A matrix ready for the device.
pub struct Source<'a> {
    format: Format,
    rows: usize,
    cols: usize,
    bytes: SourceBytes<'a>,
    /// The file's tensor, where the bytes are its own.
    tensor: Option<TensorRef>,
}

/// What [`Bytes`] a source becomes.
enum SourceBytes<'a> {
    Host(Cow<'a, [u8]>),
    Synthetic(SyntheticRows),
    Absent,
}

impl<'a> From<Option<Cow<'a, [u8]>>> for SourceBytes<'a> {
    /// `None` for a device that looks at none.
    fn from(bytes: Option<Cow<'a, [u8]>>) -> Self {
        bytes.map_or(SourceBytes::Absent, SourceBytes::Host)
    }
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
    /// Whether anybody looks at values.
    reads: bool,
}

impl<'a> Reader<'a> {
    /// Of this model with its layers and routed experts; integer-coded weights stay so where `keep_codes`, and become floats otherwise. `reads`: whether the
    /// device looks at values ([`Alloc::READS_VALUES`]).
    pub fn new(file: &'a ModelFile, layers: usize, experts: usize, keep_codes: bool, reads: bool) -> Self {
        let gguf = match file {
            ModelFile::Gguf(file) => {
                let names = GgufNames::default();
                let counted = file.weights().find(&format!("blk.{layers}.nextn.enorm.weight")).is_some();
                Some(if counted { names.counting_mtp_blocks(layers) } else { names })
            }
            ModelFile::Safetensors(_) | ModelFile::Synthetic(_) => None,
        };
        let tensors = match file {
            ModelFile::Gguf(file) => Tensors::Stored(file.weights()),
            ModelFile::Safetensors(file) => Tensors::Stored(file.weights()),
            ModelFile::Synthetic(model) => Tensors::Made(model),
        };
        Reader { path: file.path(), tensors, gguf, experts, keep_codes, reads }
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

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        let (name, _) = self.name(name);
        match self.tensors {
            Tensors::Stored(weights) => weights.find(&name).is_some(),
            Tensors::Made(model) => model.released(&name).is_some(),
        }
    }

    /// Refuses a tensor that the configuration leaves no place for.
    pub fn absent(&self, name: &str, why: &str) -> Result<(), LoadError> {
        let there = self.has(name);
        let (name, _) = self.name(name);
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
        let floats = |bytes: &[u8]| {
            to_floats(source.format, bytes, rows * cols, to).map(Cow::Owned).ok_or_else(|| {
                let problem = "has values beyond BF16: its scales are too large".to_owned();
                bad(self.path(), &format!("matrix {name:?}"), problem)
            })
        };
        let bytes = if self.reads { Some(floats(&source.whole().stored())?) } else { None };
        Ok(Source { format: to, bytes: bytes.into(), ..source })
    }

    fn made_source(&self, model: &'a Synthetic, name: &str, rows: usize, cols: usize) -> Result<Source<'_>, LoadError> {
        let (tensor, range) = self.made(model, &format!("{name}.weight"), &[rows, cols])?;
        let integers = || bad(self.path(), &format!("tensor {:?}", tensor.name), "holds integers".to_owned());
        let format = tensor.format.ok_or_else(integers)?;
        let made = model.rows_of(tensor, range.start).ok_or_else(integers)?;
        Ok(Source { format, rows, cols, bytes: SourceBytes::Synthetic(made), tensor: None })
    }

    fn gguf_source(&self, weights: &'a Weights, name: &str, rows: usize, cols: usize) -> Result<Source<'a>, LoadError> {
        let joined = self.gguf.as_ref().and_then(|names| names.joined(name));
        if let Some((joined, place)) = joined.filter(|(joined, _)| weights.find(joined).is_some()) {
            return self.half_of_columns(weights, &joined, place, rows, cols);
        }
        let (name, expert) = self.name(&format!("{name}.weight"));
        let shape: &[usize] = if expert.is_some() { &[self.experts, rows, cols] } else { &[rows, cols] };
        let tensor = weights.tensor_of_shape(&name, shape)?;
        let (format, found) = (tensor.format, self.find(weights, &name)?);
        let Some(expert) = expert else {
            let bytes = self.reads.then(|| Cow::Borrowed(weights.raw_bytes(found)));
            return Ok(Source { format, rows, cols, bytes: bytes.into(), tensor: Some(tensor) });
        };
        let each = tensor.n_bytes() / self.experts;
        let bytes = self.reads.then(|| Cow::Borrowed(weights.part_bytes(found, expert * each..(expert + 1) * each)));
        // The pages of all experts go with the last one.
        let tensor = (expert + 1 == self.experts).then_some(tensor);
        Ok(Source { format, rows, cols, bytes: bytes.into(), tensor })
    }

    /// Every row's first or second half.
    fn half_of_columns(
        &self,
        weights: &'a Weights,
        name: &str,
        place: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Source<'a>, LoadError> {
        let tensor = weights.tensor_of_shape(name, &[rows, 2 * cols])?;
        let format = tensor.format;
        let half = format.row_bytes(cols).ok_or_else(|| {
            let problem = format!("has a block of {} across its halves of {cols} columns", format.name());
            bad(self.path(), &format!("tensor {name:?}"), problem)
        })?;
        let cut = |all: &[u8]| -> Vec<u8> {
            all.chunks_exact(2 * half).flat_map(|row| &row[place * half..(place + 1) * half]).copied().collect()
        };
        let bytes = self.reads.then(|| Cow::Owned(cut(weights.bytes(&tensor))));
        Ok(Source { format, rows, cols, bytes: bytes.into(), tensor: (place == 1).then_some(tensor) })
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
                let found = self.find(weights, &weight)?;
                let bytes = self.reads.then(|| Cow::Borrowed(weights.raw_bytes(found)));
                return Ok(Source { format: tensor.format, rows, cols, bytes: bytes.into(), tensor: Some(tensor) });
            }
        };
        self.shaped(tensor, &[rows, cols / per_code])?;
        let scale = self.find(weights, &format!("{name}.scale"))?;
        if scale.type_name != "f8_e8m0" {
            let problem = format!("is stored as {}, must be f8_e8m0", scale.type_name);
            return Err(bad(self.path(), &format!("tensor {:?}", scale.name), problem));
        }
        let format = if per_code == 1 { Format::Fp8 } else { Format::Mxfp4 };
        let bytes = if self.reads {
            let repack = if per_code == 1 { repack::fp8_rows } else { repack::fp4_rows };
            let (codes, scales) = (weights.raw_bytes(tensor), weights.raw_bytes(scale));
            repack(codes, rows, cols, scales, &scale.shape).map(Some)
        } else {
            let check = if per_code == 1 { repack::check_fp8 } else { repack::check_fp4 };
            check(tensor.range.len(), rows, cols, scale.range.len(), &scale.shape).map(|_| None)
        };
        let bytes = bytes.map_err(|problem| {
            bad(self.path(), &format!("tensor {weight:?}"), format!("does not fit {:?}: {problem}", scale.name))
        })?;
        Ok(Source { format, rows, cols, bytes: bytes.map(Cow::Owned).into(), tensor: None })
    }

    /// Loads sources, stacked along the outputs, as one matrix.
    pub fn matrix<D: Alloc>(&self, dev: &mut D, name: &str, sources: &[Source<'_>]) -> Result<D::Matrix, LoadError> {
        let parts: Vec<MatrixSource<'_>> = sources.iter().map(Source::whole).collect();
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
        let (whole, each) = (source.whole(), source.rows / parts);
        let parts: Vec<MatrixSource<'_>> = (0..parts).map(|i| whole.rows(i * each, each)).collect();
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
                if self.reads {
                    tensor.format.decode_row(weights.bytes(&tensor), &mut values);
                    weights.release(&tensor);
                }
            }
            Tensors::Made(model) => {
                let (tensor, rows) = self.made(model, name, shape)?;
                if let (Some(format), true) = (tensor.format, self.reads) {
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
                (tensor.type_name, self.reads.then(|| Cow::Borrowed(weights.raw_bytes(tensor))))
            }
            Tensors::Made(model) => {
                let (tensor, rows) = self.made(model, &name, shape)?;
                ("i32", self.reads.then(|| Cow::Owned(model.rows(tensor, rows))))
            }
        };
        if !matches!(type_name, "i64" | "i32") {
            let problem = format!("is stored as {type_name}, must be i64 or i32");
            return Err(bad(self.path(), &format!("tensor {name:?}"), problem));
        }
        let Some(bytes) = bytes else { return Ok(vec![0; shape.iter().product()]) };
        let ids: Vec<i64> = match type_name {
            "i64" => bytes.as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id)).collect(),
            _ => bytes.as_chunks::<4>().0.iter().map(|id| i64::from(i32::from_le_bytes(*id))).collect(),
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
    fn whole(&self) -> MatrixSource<'_> {
        let bytes = match &self.bytes {
            SourceBytes::Host(bytes) => Bytes::Stored(bytes),
            SourceBytes::Synthetic(rows) => Bytes::Synthetic(*rows),
            SourceBytes::Absent => Bytes::Absent,
        };
        MatrixSource { format: self.format, rows: self.rows, cols: self.cols, bytes }
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
