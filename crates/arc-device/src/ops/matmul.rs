//! Products of activations with stored weights.

/// Where a part of a matrix comes from: rows in a stored format, as they lie in the file.
#[derive(Debug, Clone, Copy)]
pub struct MatrixSource<'a> {
    /// Output rows.
    pub rows: usize,
    /// Input columns.
    pub cols: usize,
    /// `rows * row_bytes(cols)` bytes, row after row.
    pub bytes: &'a [u8],
}
