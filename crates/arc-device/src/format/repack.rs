//! From the layouts of released DeepSeek-V4 files to rows of [`Format`] blocks. Lossless: bits move, none changes.
//!
//! | file | | here |
//! |---|---|---|
//! | E4M3 `[out, in]`, E8M0 `[ceil(out / 128), ceil(in / 128)]` | one scale per square | [`Format::Fp8`]: the square's scale in each of its rows |
//! | E2M1 pairs `[out, in / 2]`, E8M0 `[out, in / 32]` | value 2j low, 2j + 1 high in byte j | [`Format::Mxfp4`]: value j low, j + 16 high in byte j of a block |
//!
//! A scale that is NaN (255) is refused, and so are codes that are NaN: no sound file has them.

use super::Format;
use super::fp8::E4M3_NAN;

/// Rows and columns of a square of FP8 values that share a scale.
pub const FP8_SQUARE: usize = 128;
/// Values of a row of FP4 values that share a scale.
pub const FP4_GROUP: usize = 32;

/// Why codes and scales cannot be put together. Indices count from 0, in the layout of the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RepackError {
    /// The row length is not a whole number of blocks.
    #[error("rows of {cols} values are no whole number of blocks of {block}")]
    Columns {
        /// Values in a row.
        cols: usize,
        /// Values that share a scale.
        block: usize,
    },
    /// Too few or too many bytes of codes for the shape.
    #[error("codes take {have} bytes, but the shape needs {want}")]
    Codes {
        /// Bytes that the shape needs.
        want: usize,
        /// Bytes that are there.
        have: usize,
    },
    /// Scales of another shape than the codes need.
    #[error("scales have the shape {have:?}, but the codes need {want:?}")]
    Scales {
        /// Rows and columns of scales that are needed.
        want: [usize; 2],
        /// Shape of the scales.
        have: Vec<usize>,
    },
    /// A scale that is NaN.
    #[error("the scale at row {row}, column {col} is NaN")]
    NanScale {
        /// Row of the scales.
        row: usize,
        /// Column of the scales.
        col: usize,
    },
    /// A code that is NaN.
    #[error("the value at row {row}, column {col} is NaN")]
    NanCode {
        /// Row of the values.
        row: usize,
        /// Column of the values.
        col: usize,
    },
}

/// Rows of [`Format::Fp8`] from E4M3 codes and the scales of their squares of 128 x 128.
///
/// `codes`: `[rows, cols]`; `scales`, of the shape `scale_shape`: `[ceil(rows / 128), cols / 128]`. Returns
/// `rows * Format::Fp8.row_bytes(cols)` bytes. Errors: all of [`RepackError`].
pub fn fp8_rows(
    codes: &[u8],
    rows: usize,
    cols: usize,
    scales: &[u8],
    scale_shape: &[usize],
) -> Result<Vec<u8>, RepackError> {
    let across = check_fp8(codes.len(), rows, cols, scales.len(), scale_shape)?;
    refuse_nan(scales, across)?;
    if let Some(at) = codes.iter().position(|code| code & 0x7f == E4M3_NAN) {
        return Err(RepackError::NanCode { row: at / cols, col: at % cols });
    }
    let mut out = Vec::with_capacity(rows * across * Format::Fp8.block_bytes());
    for (row, codes) in codes.chunks_exact(cols.max(1)).enumerate() {
        let scales = &scales[row / FP8_SQUARE * across..][..across];
        for (codes, scale) in codes.chunks_exact(FP8_SQUARE).zip(scales) {
            out.push(*scale);
            out.extend_from_slice(codes);
        }
    }
    Ok(out)
}

/// Rows of [`Format::Mxfp4`] from packed E2M1 pairs and the scales of their groups of 32.
///
/// `pairs`: `[rows, cols / 2]`; `scales`, of the shape `scale_shape`: `[rows, cols / 32]`. Returns
/// `rows * Format::Mxfp4.row_bytes(cols)` bytes. Errors: all of [`RepackError`] but `NanCode`, as no E2M1 code is NaN.
pub fn fp4_rows(
    pairs: &[u8],
    rows: usize,
    cols: usize,
    scales: &[u8],
    scale_shape: &[usize],
) -> Result<Vec<u8>, RepackError> {
    let across = check_fp4(pairs.len(), rows, cols, scales.len(), scale_shape)?;
    refuse_nan(scales, across)?;
    let mut out = Vec::with_capacity(rows * across * Format::Mxfp4.block_bytes());
    for (pairs, scale) in pairs.chunks_exact(FP4_GROUP / 2).zip(scales) {
        out.push(*scale);
        let code = |i: usize| pairs[i / 2] >> (i % 2 * 4) & 15;
        out.extend((0..16).map(|j| code(j) | code(j + 16) << 4));
    }
    Ok(out)
}

fn blocks(cols: usize, block: usize) -> Result<usize, RepackError> {
    if cols.is_multiple_of(block) { Ok(cols / block) } else { Err(RepackError::Columns { cols, block }) }
}

/// What [`fp8_rows`] asks of sizes, without a look at the bytes: `codes` and `scales` are how many there are. Returns the
/// scales of a row. Errors: `Columns`, `Codes`, `Scales`.
pub fn check_fp8(
    codes: usize,
    rows: usize,
    cols: usize,
    scales: usize,
    scale_shape: &[usize],
) -> Result<usize, RepackError> {
    let across = blocks(cols, FP8_SQUARE)?;
    check(codes, rows.saturating_mul(cols), scales, [rows.div_ceil(FP8_SQUARE), across], scale_shape)
}

/// What [`fp4_rows`] asks of sizes, likewise.
pub fn check_fp4(
    pairs: usize,
    rows: usize,
    cols: usize,
    scales: usize,
    scale_shape: &[usize],
) -> Result<usize, RepackError> {
    let across = blocks(cols, FP4_GROUP)?;
    check(pairs, rows.saturating_mul(cols / 2), scales, [rows, across], scale_shape)
}

fn check(codes: usize, want: usize, scales: usize, wanted: [usize; 2], shape: &[usize]) -> Result<usize, RepackError> {
    if codes != want {
        return Err(RepackError::Codes { want, have: codes });
    }
    if *shape != wanted || scales != wanted[0] * wanted[1] {
        return Err(RepackError::Scales { want: wanted, have: shape.to_vec() });
    }
    Ok(wanted[1])
}

fn refuse_nan(scales: &[u8], across: usize) -> Result<(), RepackError> {
    match scales.iter().position(|scale| *scale == 255) {
        Some(at) => Err(RepackError::NanScale { row: at / across, col: at % across }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;
    use crate::format::half::bf16_to_f32;

    const UNIT: &[u8] = include_bytes!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/deepseek-v4/unit_vectors.safetensors"
    ));

    fn bytes(name: &str) -> Vec<u8> {
        SafeTensors::deserialize(UNIT).expect("a safetensors file").tensor(name).expect(name).data().to_vec()
    }

    fn values(name: &str) -> Vec<u32> {
        let bytes = bytes(name);
        bytes.chunks_exact(2).map(|b| bf16_to_f32(u16::from_le_bytes([b[0], b[1]])).to_bits()).collect()
    }

    fn decoded(format: Format, row_bytes: &[u8], n: usize) -> Vec<u32> {
        let mut out = vec![0.0; n];
        format.decode_row(row_bytes, &mut out);
        out.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn fp8_squares_become_rows_of_the_same_values() {
        let (codes, scales) = (bytes("w_fp8.bytes"), bytes("w_fp8.scale_ue8m0"));
        let rows = fp8_rows(&codes, 128, 256, &scales, &[1, 2]).expect("sound");
        assert_eq!(decoded(Format::Fp8, &rows, 128 * 256), values("w_fp8.value"));
        // A last square that is cut short, and a scale for it that differs.
        let more: Vec<u8> = codes.iter().chain(&codes[..512]).copied().collect();
        let scales = [scales.as_slice(), &[3, 4]].concat();
        let rows = fp8_rows(&more, 130, 256, &scales, &[2, 2]).expect("sound");
        assert_eq!((rows[128 * 258], rows[128 * 258 + 129], rows[129 * 258]), (3, 4, 3));
        assert_eq!(rows.len(), 130 * 258);
    }

    #[test]
    fn fp4_pairs_become_mxfp4_blocks_of_the_same_values() {
        let (pairs, scales) = (bytes("w_fp4.bytes"), bytes("w_fp4.scale_ue8m0"));
        let rows = fp4_rows(&pairs, 32, 256, &scales, &[32, 8]).expect("sound");
        // The integer view has one zero, so -0 decodes as 0: as numbers they are equal.
        let number = |bits: &u32| f32::from_bits(*bits);
        let (ours, theirs) = (decoded(Format::Mxfp4, &rows, 32 * 256), values("w_fp4.value"));
        assert!(ours.iter().map(number).eq(theirs.iter().map(number)));
        // The other order of nibbles would not pass.
        let swapped: Vec<u8> = pairs.iter().map(|pair| pair.rotate_left(4)).collect();
        let rows = fp4_rows(&swapped, 32, 256, &scales, &[32, 8]).expect("sound");
        assert!(decoded(Format::Mxfp4, &rows, 32 * 256).iter().map(number).ne(theirs.iter().map(number)));
    }

    #[test]
    fn what_does_not_fit_together_is_named() {
        let (codes, scales) = (vec![0; 130 * 256], vec![127; 4]);
        assert!(fp8_rows(&codes, 130, 256, &scales, &[2, 2]).is_ok());
        assert_eq!(
            fp8_rows(&codes, 130, 256, &scales, &[4, 1]),
            Err(RepackError::Scales { want: [2, 2], have: vec![4, 1] })
        );
        assert_eq!(
            fp8_rows(&codes, 130, 256, &scales[..2], &[1, 2]),
            Err(RepackError::Scales { want: [2, 2], have: vec![1, 2] })
        );
        assert_eq!(fp8_rows(&codes, 129, 256, &scales, &[2, 2]), Err(RepackError::Codes { want: 33024, have: 33280 }));
        assert_eq!(fp8_rows(&codes, 260, 100, &scales, &[3, 1]), Err(RepackError::Columns { cols: 100, block: 128 }));
        let nan = |at: usize, value: u8, mut bytes: Vec<u8>| {
            bytes[at] = value;
            bytes
        };
        assert_eq!(
            fp8_rows(&codes, 130, 256, &nan(3, 255, scales.clone()), &[2, 2]),
            Err(RepackError::NanScale { row: 1, col: 1 })
        );
        assert_eq!(
            fp8_rows(&nan(258, 0xff, codes.clone()), 130, 256, &scales, &[2, 2]),
            Err(RepackError::NanCode { row: 1, col: 2 })
        );
        let (pairs, scales) = (vec![0xff; 2 * 32], vec![127; 4]);
        assert!(fp4_rows(&pairs, 2, 64, &scales, &[2, 2]).is_ok());
        assert_eq!(
            fp4_rows(&pairs, 2, 64, &nan(2, 255, scales.clone()), &[2, 2]),
            Err(RepackError::NanScale { row: 1, col: 0 })
        );
        assert_eq!(fp4_rows(&pairs, 2, 48, &scales, &[2, 2]), Err(RepackError::Columns { cols: 48, block: 32 }));
        assert_eq!(
            fp4_rows(&pairs, 2, 64, &scales, &[2, 2, 1]),
            Err(RepackError::Scales { want: [2, 2], have: vec![2, 2, 1] })
        );
    }
}
