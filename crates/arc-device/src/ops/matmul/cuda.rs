//! Products on the GPU.

use crate::ModelShape;
use crate::cuda::{Cuda, CudaBuf};
use crate::error::{DeviceError, Result};
use crate::ops::matmul::MatrixSource;

/// A weight in device memory.
#[derive(Debug)]
pub struct CudaMatrix {}

impl CudaMatrix {
    /// Uploads and repacks the parts of a matrix.
    pub(crate) fn load(_dev: &mut Cuda, name: &str, _parts: &[MatrixSource<'_>]) -> Result<CudaMatrix> {
        Err(DeviceError::Unsupported { device: "cuda", what: format!("matrix {name}") })
    }
}

/// Memory that products need beside their operands.
#[derive(Default)]
pub(crate) struct Workspace {
    /// Where the last output head left its logits, `[heads, vocab]`.
    pub logits: Option<u64>,
    /// Rows of logits on their way to the host, `[heads, vocab]`.
    pub gathered: Option<CudaBuf<f32>>,
}

impl Workspace {
    /// For the widest matrix loaded so far and the largest step.
    pub(crate) fn new(_dev: &mut Cuda, _shape: &ModelShape) -> Result<Workspace> {
        Ok(Workspace::default())
    }
}
