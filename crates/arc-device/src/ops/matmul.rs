//! Products of activations with stored weights.
//!
//! `out[r, n] = sum over k of x[r, k] * w[n, k]`, `w` `[out, in]` in any [`Format`].
//!
//! # Integer-coded formats: exact
//!
//! Activations are quantised to int8 per 32 values of a row:
//!
//! ```text
//! amax = max |x|          d_x = amax / 127          q = round((x / amax) * 127), ties to even
//! ```
//!
//! both divisions and the product being IEEE f32 operations in this order; `amax = 0` gives `q = 0`. Where a block holds
//! a NaN or an infinity, `q = 0` and `d_x` is not finite, so that every product with it is NaN and the row is refused by
//! the sampler instead of going on with plausible numbers.
//!
//! A weight block of 32 values is integer codes with scales ([`format`](crate::format)). Its contribution is
//!
//! ```text
//! PerBlock   dot = sum (code - offset) * q                      min = sum q
//! PerHalf    dot = sum over halves h of sc[h] * sum (code - offset) * q
//!            min = sum over halves h of min[h] * sum q
//! acc = fma(d_w * d_x, f32(dot), acc)
//! acc = fma(m_w * d_x, f32(min), acc)                           in formats with a minimum
//! ```
//!
//! with `dot` and `min` int32 and their conversion rounded to nearest. Blocks are added in ascending order inside
//! slices of [`SLICE`] values, each slice starting from +0; slices are added in ascending order, from +0. Nothing here
//! depends on an instruction set, on the number of rows or on threads, so every device gives the same bits.
//!
//! # Float formats: invariant, bounded
//!
//! F32, F16, BF16 and FP8 weights, decoded to f32, meet f32 activations: `acc = fma(w, x, acc)`, `k` ascending inside a
//! slice, slices as above. The CPU device gives the same bits on every instruction set; other devices may order a slice
//! differently.

#[cfg(test)]
mod tests;

pub(crate) mod cpu;
pub mod cuda;
pub(crate) mod kernel;
pub(crate) mod pack;

use std::borrow::Cow;

use crate::format::Format;
use crate::ops::synthetic::SyntheticRows;

/// Values of `in` that are summed on their own before they join the total.
pub const SLICE: usize = 256;

/// The bytes of a part of a matrix.
#[derive(Debug, Clone, Copy)]
pub enum Bytes<'a> {
    /// As they lie in the file: `rows * format.row_bytes(cols)` bytes, row after row.
    Stored(&'a [u8]),
    /// As [`SyntheticRows`] says: a device may make them where it keeps them.
    Synthetic(SyntheticRows),
    /// Nothing: for a device that does not look at values ([`Alloc::READS_VALUES`](crate::Alloc::READS_VALUES)).
    Absent,
}

/// Where a part of a matrix comes from: rows in a stored format.
#[derive(Debug, Clone, Copy)]
pub struct MatrixSource<'a> {
    /// How the rows are stored.
    pub format: Format,
    /// Output rows.
    pub rows: usize,
    /// Input columns.
    pub cols: usize,
    /// The rows.
    pub bytes: Bytes<'a>,
}

impl<'a> MatrixSource<'a> {
    /// Bytes that the rows take; `None` where the columns are no whole number of blocks.
    pub fn n_bytes(&self) -> Option<usize> {
        self.format.row_bytes(self.cols).and_then(|row| row.checked_mul(self.rows))
    }

    /// The bytes on the host, made now where they are not stored. Of a checked source; panics where there are none.
    pub fn stored(&self) -> Cow<'a, [u8]> {
        match self.bytes {
            Bytes::Stored(bytes) => Cow::Borrowed(bytes),
            Bytes::Synthetic(rows) => {
                let mut bytes = vec![0; self.n_bytes().expect("the source was checked")];
                rows.fill(self.format, self.cols, &mut bytes);
                Cow::Owned(bytes)
            }
            Bytes::Absent => panic!("a device that looks at values was given none"),
        }
    }

    /// Rows `first .. first + rows` of a checked source.
    pub fn rows(&self, first: usize, rows: usize) -> Self {
        assert!(first + rows <= self.rows, "{first} + {rows} rows of {}", self.rows);
        let bytes = match self.bytes {
            Bytes::Stored(bytes) => {
                let row = bytes.len() / self.rows.max(1);
                Bytes::Stored(&bytes[first * row..(first + rows) * row])
            }
            Bytes::Synthetic(all) => Bytes::Synthetic(all.skip(first)),
            Bytes::Absent => Bytes::Absent,
        };
        Self { rows, bytes, ..*self }
    }

    /// Refuses a source whose bytes are not its shape's.
    pub(crate) fn check(&self, name: &str) -> crate::error::Result<()> {
        let want = self.n_bytes();
        let have = match self.bytes {
            Bytes::Stored(bytes) => bytes.len(),
            Bytes::Synthetic(_) | Bytes::Absent => want.unwrap_or(0),
        };
        if want == Some(have) {
            return Ok(());
        }
        Err(crate::error::DeviceError::MatrixSize {
            name: name.to_owned(),
            rows: self.rows,
            cols: self.cols,
            format: self.format.name(),
            want: want.unwrap_or(0) as u64,
            have: have as u64,
        })
    }
}
