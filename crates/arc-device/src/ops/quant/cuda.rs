//! Conversions on the GPU by themselves, for conformance: stages compose them.

use crate::Buffers;
use crate::cuda::{Cuda, Grid, args, kernel};
use crate::error::Result;

impl Cuda {
    /// `out[i]` = E4M3 of the f32 whose bits are `first + i`, for all of `out`; `visited[0]` grows by the number of them.
    /// `mutant`: ties go away from zero.
    pub fn encode_e4m3_range(
        &mut self,
        out: &mut <Cuda as Buffers>::Buf<u8>,
        visited: &mut <Cuda as Buffers>::Buf<u32>,
        first: u32,
        mutant: bool,
    ) -> Result<()> {
        let n = out.len() as u32;
        let args = args![out.ptr(), visited.ptr(), first, n, u32::from(mutant)];
        self.launch(kernel!("quant_e4m3_sweep"), Grid::new(1056, 256), args)
    }
}
