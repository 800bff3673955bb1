//! Weight formats: how a row of weights lies in memory and which numbers it stands for.
//!
//! A row is a whole number of blocks of [`Format::block_len`] values and [`Format::block_bytes`] bytes. Everything is
//! little-endian. Each format has one definition here, [`Format::unpack32`] for the integer-coded ones and
//! [`Format::decode_row`] on top of it; kernels on any device are tested against these.
//!
//! # The integer view
//!
//! Every integer-coded format is seen as blocks of 32 values, whatever its own block length: unsigned `codes`, one
//! constant `offset` for the format, and scales of one of two kinds ([`Scales`]):
//!
//! ```text
//! PerBlock   w[i] = d * (code[i] - offset) + m
//! PerHalf    w[i] = d * sc[i / 16] * (code[i] - offset) + m * min[i / 16]
//! ```
//!
//! For finite scales every product above is exact in f32 (an f16 scale has 11 significant bits, sub-scales at most 7,
//! codes at most 8), so a value is rounded once, by the addition, and not at all in formats without a minimum.
//!
//! Source of the layouts: the GGUF specification and the `gguf` Python package, against which the decoder is tested.

pub mod fp4;
pub mod fp8;
pub mod half;
mod iq2;
pub mod repack;
mod unpack;

pub(crate) use unpack::FP4_DOUBLED;

#[cfg(test)]
mod sweep;
#[cfg(test)]
mod tests;

/// A weight format that Arc reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
    /// 8-bit codes, one f16 scale per 32 values.
    Q8_0,
    /// 4-bit codes, one f16 scale per 32 values.
    Q4_0,
    /// 4-bit codes, f16 scale and minimum per 32 values.
    Q4_1,
    /// 5-bit codes, one f16 scale per 32 values.
    Q5_0,
    /// 5-bit codes, f16 scale and minimum per 32 values.
    Q5_1,
    /// 2-bit codes, 4-bit scale and minimum per 16 values, two f16 per 256.
    Q2K,
    /// 3-bit codes, 6-bit scale per 16 values, one f16 per 256.
    Q3K,
    /// 4-bit codes, 6-bit scale and minimum per 32 values, two f16 per 256.
    Q4K,
    /// 5-bit codes, 6-bit scale and minimum per 32 values, two f16 per 256.
    Q5K,
    /// 6-bit codes, 8-bit scale per 16 values, one f16 per 256.
    Q6K,
    /// Eight values at a time from a table of 256 patterns, with signs; 4-bit scale per 32 values, one f16 per 256.
    Iq2Xxs,
    /// FP4 (E2M1) codes, one power-of-two scale (E8M0) per 32 values.
    Mxfp4,
    /// FP8 (E4M3) codes, one power-of-two scale (E8M0) per 128 values. A block is the scale, then the codes. Ours: what
    /// [`repack::fp8_rows`] makes of codes whose scales stand for squares of 128 x 128.
    Fp8,
}

/// What the codes of an integer-coded format look like: constants of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Codes {
    /// The code of the value 0: subtract it before multiplying by a scale.
    pub offset: u8,
    /// The largest code that [`Format::unpack32`] returns.
    pub max: u8,
    /// Whether the format adds a minimum; without one, `m` and `min` are zero and nothing is added.
    pub has_min: bool,
}

/// How a format stores numbers: as floats, or as integer codes with one of the two kinds of [`Scales`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// F32, F16, BF16, FP8: there is no integer view.
    Float,
    /// One f32 scale per 32 values ([`Scales::PerBlock`]).
    PerBlock(Codes),
    /// Integer sub-scales per 16 values below a shared f32 ([`Scales::PerHalf`]).
    PerHalf(Codes),
}

/// Scales of 32 consecutive values; the formulas are at the head of this module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scales {
    /// One scale and one minimum for all 32 values.
    PerBlock {
        /// Scale.
        d: f32,
        /// Added minimum; zero in formats without one.
        m: f32,
    },
    /// Integer scales and minimums for the values 0..16 and 16..32.
    PerHalf {
        /// Scale of the super-block of 256 values.
        d: f32,
        /// Integer scale of each half, -128..=127.
        sc: [i32; 2],
        /// Scale of the minimums, its sign included: minimums are added. Zero in formats without one.
        m: f32,
        /// Integer minimum of each half, 0..=15.
        min: [i32; 2],
    },
}

/// The integer view of 32 consecutive values of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block32 {
    /// Unsigned codes, `0..=Codes::max`; a code minus `Codes::offset` is the signed integer that is scaled.
    pub codes: [u8; 32],
    /// Scales of these 32 values.
    pub scales: Scales,
}

impl Format {
    /// Every format, in the order of the enum.
    pub const ALL: [Self; 16] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq2Xxs,
        Self::Mxfp4,
        Self::Fp8,
    ];

    /// Values in a block: 1, 32, 128 or 256.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Mxfp4 => 32,
            Self::Fp8 => 128,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq2Xxs => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Iq2Xxs => 66,
            Self::Mxfp4 => 17,
            Self::Fp8 => 129,
        }
    }

    /// Bytes of a row of `n` values; `None` when `n` is not a whole number of blocks or the product overflows.
    pub const fn row_bytes(self, n: usize) -> Option<usize> {
        if !n.is_multiple_of(self.block_len()) {
            return None;
        }
        (n / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Lower-case name, as in `q4_k`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q2K => "q2_k",
            Self::Q3K => "q3_k",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
            Self::Iq2Xxs => "iq2_xxs",
            Self::Mxfp4 => "mxfp4",
            Self::Fp8 => "fp8",
        }
    }

    /// The format of that [`name`](Self::name), in either case.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(name))
    }

    /// The format's GGUF tensor type code; `None` where GGUF has no such type.
    pub const fn ggml_type(self) -> Option<u32> {
        Some(match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q2K => 10,
            Self::Q3K => 11,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Iq2Xxs => 16,
            Self::Bf16 => 30,
            Self::Mxfp4 => 39,
            Self::Fp8 => return None,
        })
    }

    /// The format of a GGUF tensor type code; `None` for codes that Arc does not read.
    pub fn from_ggml_type(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.ggml_type() == Some(code))
    }

    /// How the format stores numbers, with the constants of its codes.
    pub const fn coding(self) -> Coding {
        const fn codes(offset: u8, max: u8, has_min: bool) -> Codes {
            Codes { offset, max, has_min }
        }
        match self {
            Self::F32 | Self::F16 | Self::Bf16 | Self::Fp8 => Coding::Float,
            Self::Q8_0 => Coding::PerBlock(codes(128, 255, false)),
            Self::Q4_0 => Coding::PerBlock(codes(8, 15, false)),
            Self::Q4_1 | Self::Q4K => Coding::PerBlock(codes(0, 15, true)),
            Self::Q5_0 => Coding::PerBlock(codes(16, 31, false)),
            Self::Q5_1 | Self::Q5K => Coding::PerBlock(codes(0, 31, true)),
            Self::Q2K => Coding::PerHalf(codes(0, 3, true)),
            Self::Q3K => Coding::PerHalf(codes(4, 7, false)),
            Self::Q6K => Coding::PerHalf(codes(32, 63, false)),
            Self::Iq2Xxs => Coding::PerBlock(codes(iq2::MAX, 2 * iq2::MAX, false)),
            Self::Mxfp4 => Coding::PerBlock(codes(12, 24, false)),
        }
    }

    /// The constants of the codes; `None` for float formats.
    pub const fn codes(self) -> Option<Codes> {
        match self.coding() {
            Coding::Float => None,
            Coding::PerBlock(codes) | Coding::PerHalf(codes) => Some(codes),
        }
    }

    /// The integer view of values `32 * block_idx .. 32 * block_idx + 32` of a row.
    ///
    /// `row`: the bytes of the row, or of any run of whole blocks. Panics for a float format and for an index past the
    /// end of the row.
    pub fn unpack32(self, row: &[u8], block_idx: usize) -> Block32 {
        assert!(self.coding() != Coding::Float, "{} has no integer view", self.name());
        let per_block = self.block_len() / 32;
        let start = block_idx / per_block * self.block_bytes();
        let block = &row[start..start + self.block_bytes()];
        unpack::unpack(self, block, block_idx % per_block)
    }

    /// Decodes a row to f32: the definition of the format.
    ///
    /// `src`: `row_bytes(out.len())` bytes, else it panics. The products are exact; a minimum is added with one
    /// rounding. Scales that are infinite or NaN follow IEEE arithmetic.
    pub fn decode_row(self, src: &[u8], out: &mut [f32]) {
        assert_eq!(Some(src.len()), self.row_bytes(out.len()), "bytes of {} {} values", out.len(), self.name());
        let Some(codes) = self.codes() else {
            return self.decode_floats(src, out);
        };
        for (block_idx, out) in out.chunks_exact_mut(32).enumerate() {
            let block = self.unpack32(src, block_idx);
            for (i, (out, code)) in out.iter_mut().zip(block.codes).enumerate() {
                let q = f32::from(i16::from(code) - i16::from(codes.offset));
                let (product, minimum) = match block.scales {
                    Scales::PerBlock { d, m } => (d * q, m),
                    Scales::PerHalf { d, sc, m, min } => (d * sc[i / 16] as f32 * q, m * min[i / 16] as f32),
                };
                // Adding +0 would turn -0 into +0, so formats without a minimum add nothing.
                *out = if codes.has_min { product + minimum } else { product };
            }
        }
    }

    /// Decodes one block: [`Self::block_bytes`] bytes to [`Self::block_len`] values; panics for other lengths.
    pub fn decode_block(self, src: &[u8], out: &mut [f32]) {
        assert_eq!(out.len(), self.block_len(), "values in a {} block", self.name());
        self.decode_row(src, out);
    }

    fn decode_floats(self, src: &[u8], out: &mut [f32]) {
        if self == Self::Fp8 {
            for (block, out) in src.chunks_exact(self.block_bytes()).zip(out.chunks_exact_mut(self.block_len())) {
                fp8::decode_e4m3(&block[1..], half::e8m0_to_f32(block[0]), out);
            }
            return;
        }
        let u16_at = |i: usize| u16::from_le_bytes([src[2 * i], src[2 * i + 1]]);
        for (i, out) in out.iter_mut().enumerate() {
            *out = match self {
                Self::F16 => half::f16_to_f32(u16_at(i)),
                Self::Bf16 => half::bf16_to_f32(u16_at(i)),
                _ => f32::from_le_bytes([src[4 * i], src[4 * i + 1], src[4 * i + 2], src[4 * i + 3]]),
            };
        }
    }
}
