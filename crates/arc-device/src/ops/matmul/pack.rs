//! Weights as the CPU device keeps them: tiles of 16 rows, so that a SIMD lane is an output row.
//!
//! A part's rows are cut into tiles of [`TILE`] rows (the last one padded with zero rows), a tile into units of one
//! block length. A unit holds the same bits as the source blocks of its 16 rows, arranged by *plane*: first the scales,
//! then, for every 32 values, the code planes. In a plane, code number `c = 64 g + 4 row + i` belongs to value
//! `k = 4 g + i` of `row`: four consecutive values of one row are one 32-bit lane.
//!
//! ```text
//! bytes    512 B   code c in byte c
//! nibbles  256 B   code c in the low bits of byte c, or for c >= 256 in the high bits of byte c - 256
//! crumbs   128 B   code c in bits 2 (c / 128) of byte c % 128
//! bits      64 B   code c in bit c / 64 of byte c % 64
//! ```
//!
//! [`unpack_slice`] turns up to 256 columns of a tile into what the kernels read. IQ2_XXS, whose codes are indices into
//! a table, keeps its rows as they are.

use super::{MatrixSource, SLICE};
use crate::cpu::buf::Aligned;
use crate::cpu::team::Team;
use crate::format::fp8::e4m3_to_f32;
use crate::format::half::{bf16_to_f32, e8m0_half_to_f32, e8m0_to_f32, f16_to_f32};
use crate::format::{Coding, Format, Scales};
use crate::simd::{Isa, prefetch_lines};

/// Output rows of a tile.
pub(crate) const TILE: usize = 16;
/// Blocks of 32 values in a slice.
pub(crate) const SLICE_BLOCKS: usize = SLICE / 32;

/// A matrix: parts stacked along the output rows.
#[derive(Debug)]
pub struct PackedMatrix {
    pub(crate) parts: Vec<Part>,
    /// Output rows of all parts.
    pub(crate) rows: usize,
    /// Input columns.
    pub(crate) cols: usize,
}

/// Rows of one format.
#[derive(Debug)]
pub(crate) struct Part {
    pub format: Format,
    /// First output row in the matrix.
    pub first_row: usize,
    pub rows: usize,
    tile_bytes: usize,
    data: Aligned<u8>,
}

impl PackedMatrix {
    /// Packs checked sources, tiles in parallel; `None` where there is no memory for them.
    pub fn pack(team: &mut Team, sources: &[MatrixSource<'_>]) -> Option<PackedMatrix> {
        let cols = sources.first().map_or(0, |source| source.cols);
        let mut first_row = 0;
        let parts = sources
            .iter()
            .map(|source| {
                let part = Part::pack(team, source, first_row);
                first_row += source.rows;
                part
            })
            .collect::<Option<_>>()?;
        Some(PackedMatrix { parts, rows: first_row, cols })
    }

    /// Bytes of the packed weights.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.data.len()).sum()
    }

    /// Whether some part reads int8 activations.
    pub fn reads_quantised(&self) -> bool {
        self.parts.iter().any(|part| part.format.coding() != Coding::Float)
    }

    /// Whether every part is FP8.
    pub fn is_fp8(&self) -> bool {
        self.parts.iter().all(|part| part.format == Format::Fp8)
    }
}

impl Part {
    fn pack(team: &mut Team, source: &MatrixSource<'_>, first_row: usize) -> Option<Part> {
        let bytes = source.stored();
        let row_bytes = bytes.len() / source.rows.max(1);
        let tile_bytes = TILE * row_bytes;
        let n_tiles = source.rows.div_ceil(TILE);
        let mut data = Aligned::try_streamed(n_tiles * tile_bytes)?;
        let dst = data.shared();
        team.run(n_tiles, &|t, _| {
            let first = t * TILE;
            let n = TILE.min(source.rows - first);
            // SAFETY: tiles are disjoint, and each is packed by one task.
            let tile = unsafe { dst.slice_mut(t * tile_bytes, tile_bytes) };
            let rows = &bytes[first * row_bytes..(first + n) * row_bytes];
            pack_tile(source.format, rows, row_bytes, tile);
        });
        Some(Part { format: source.format, first_row, rows: source.rows, tile_bytes, data })
    }

    pub fn n_tiles(&self) -> usize {
        self.rows.div_ceil(TILE)
    }

    /// First output of a tile, counted in the part, and how many it has.
    pub fn tile_columns(&self, t: usize) -> (usize, usize) {
        (t * TILE, TILE.min(self.rows - t * TILE))
    }

    pub fn tile(&self, t: usize) -> &[u8] {
        &self.data[t * self.tile_bytes..(t + 1) * self.tile_bytes]
    }
}

/// Bytes of the scales in front of a unit's code planes.
const fn header_bytes(format: Format) -> usize {
    TILE * match format {
        Format::Q8_0 | Format::Q4_0 | Format::Q5_0 => 2,
        Format::Q4_1 | Format::Q5_1 => 4,
        Format::Mxfp4 => 1,
        Format::Q4K | Format::Q5K => 4 + 12,
        Format::Q2K => 4 + 16,
        Format::Q3K => 2 + 12,
        Format::Q6K => 2 + 16,
        Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8 | Format::Iq2Xxs => 0,
    }
}

/// The source bytes, as ranges of a block, that stand in the header, in order; each byte of a range is a plane of 16.
/// The ranges of f16 scales come first.
const fn header_ranges(format: Format) -> &'static [(usize, usize)] {
    match format {
        Format::Q8_0 | Format::Q4_0 | Format::Q5_0 => &[(0, 2)],
        Format::Q4_1 | Format::Q5_1 => &[(0, 2), (2, 4)],
        Format::Mxfp4 => &[(0, 1)],
        Format::Q4K | Format::Q5K => &[(0, 2), (2, 4), (4, 16)],
        Format::Q2K => &[(80, 82), (82, 84), (0, 16)],
        Format::Q3K => &[(108, 110), (96, 108)],
        Format::Q6K => &[(208, 210), (192, 208)],
        Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8 | Format::Iq2Xxs => &[],
    }
}

/// Bytes of the code planes of 32 values.
const fn plane_bytes(format: Format) -> usize {
    match format {
        Format::Q8_0 => 512,
        Format::Q4_0 | Format::Q4_1 | Format::Q4K | Format::Mxfp4 => 256,
        Format::Q5_0 | Format::Q5_1 | Format::Q5K => 256 + 64,
        Format::Q6K => 256 + 128,
        Format::Q2K => 128,
        Format::Q3K => 128 + 64,
        Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8 | Format::Iq2Xxs => 0,
    }
}

/// Packs up to 16 source rows into a zeroed tile.
fn pack_tile(format: Format, rows: &[u8], row_bytes: usize, tile: &mut [u8]) {
    if format == Format::Iq2Xxs {
        tile[..rows.len()].copy_from_slice(rows);
        return;
    }
    let block_bytes = format.block_bytes();
    let unit_bytes = TILE * block_bytes;
    for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
        for (block, unit) in bytes.chunks_exact(block_bytes).zip(tile.chunks_exact_mut(unit_bytes)) {
            if format == Format::Fp8 {
                // Every byte is a plane of 16: the scales, then the codes of one value of each row.
                for (i, byte) in block.iter().enumerate() {
                    unit[TILE * i + row] = *byte;
                }
                continue;
            }
            if format.coding() == Coding::Float {
                // One value of each row, side by side.
                unit[row * block_bytes..(row + 1) * block_bytes].copy_from_slice(block);
                continue;
            }
            let (header, planes) = unit.split_at_mut(header_bytes(format));
            pack_header(format, row, block, header);
            match format {
                // The source's own nibble order is the plane's: four bytes move at once.
                Format::Q4_0 => pack_words(row, &block[2..], planes, 0),
                Format::Q4_1 => pack_words(row, &block[4..], planes, 0),
                Format::Q8_0 => pack_words(row, &block[2..], planes, 0x8080_8080),
                Format::Mxfp4 => pack_words(row, &block[1..], planes, 0),
                _ => pack_planes(format, row, block, planes),
            }
        }
    }
}

fn pack_header(format: Format, row: usize, block: &[u8], header: &mut [u8]) {
    let mut at = 0;
    for &(start, end) in header_ranges(format) {
        let range = &block[start..end];
        if range.len() == 2 {
            header[at + 2 * row..at + 2 * row + 2].copy_from_slice(range);
        } else {
            for (i, &byte) in range.iter().enumerate() {
                header[at + TILE * i + row] = byte;
            }
        }
        at += TILE * range.len();
    }
}

fn pack_words(row: usize, codes: &[u8], planes: &mut [u8], flip: u32) {
    for (word, line) in codes.chunks_exact(4).zip(planes.chunks_exact_mut(64)) {
        let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]) ^ flip;
        line[4 * row..4 * row + 4].copy_from_slice(&word.to_le_bytes());
    }
}

fn pack_planes(format: Format, row: usize, block: &[u8], planes: &mut [u8]) {
    for (s, planes) in planes.chunks_exact_mut(plane_bytes(format)).enumerate() {
        let codes = format.unpack32(block, s).codes;
        for (k, code) in codes.into_iter().enumerate() {
            let c = 64 * (k / 4) + 4 * row + k % 4;
            let nibble = |planes: &mut [u8]| planes[c % 256] |= (code & 15) << (4 * (c / 256));
            let crumb = |planes: &mut [u8], bits: u8| planes[c % 128] |= (bits & 3) << (2 * (c / 128));
            let bit = |planes: &mut [u8], bit: u8| planes[c % 64] |= (bit & 1) << (c / 64);
            match format {
                Format::Q4K => nibble(planes),
                Format::Q5_0 | Format::Q5_1 | Format::Q5K => {
                    nibble(planes);
                    bit(&mut planes[256..], code >> 4);
                }
                Format::Q6K => {
                    nibble(planes);
                    crumb(&mut planes[256..], code >> 4);
                }
                Format::Q2K => crumb(planes, code),
                Format::Q3K => {
                    crumb(planes, code);
                    bit(&mut planes[128..], code >> 2);
                }
                _ => unreachable!("{} is packed elsewhere", format.name()),
            }
        }
    }
}

/// Up to 256 columns of an integer-coded tile, as the kernels read them.
#[repr(C, align(64))]
pub(crate) struct Slice {
    /// By block: the codes in plane order.
    pub codes: [[u8; 512]; SLICE_BLOCKS],
    /// By block and row: scale.
    pub d: [[f32; TILE]; SLICE_BLOCKS],
    /// By block and row: scale of the minimum.
    pub m: [[f32; TILE]; SLICE_BLOCKS],
    /// By block, half and row: integer scale; `PerHalf` formats only.
    pub sc: [[[i32; TILE]; 2]; SLICE_BLOCKS],
    /// By block, half and row: integer minimum; `PerHalf` formats only.
    pub min: [[[i32; TILE]; 2]; SLICE_BLOCKS],
}

impl Slice {
    pub const fn zeroed() -> Slice {
        Slice {
            codes: [[0; 512]; SLICE_BLOCKS],
            d: [[0.0; TILE]; SLICE_BLOCKS],
            m: [[0.0; TILE]; SLICE_BLOCKS],
            sc: [[[0; TILE]; 2]; SLICE_BLOCKS],
            min: [[[0; TILE]; 2]; SLICE_BLOCKS],
        }
    }
}

/// Unpacks blocks `first .. first + n` (of 32 columns) of an integer-coded tile; `first` is a slice border.
///
/// Inlined into a caller compiled for `isa`, where its byte loops become vector code.
#[inline(always)]
pub(crate) fn unpack_slice(isa: Isa, format: Format, tile: &[u8], first: usize, n: usize, slice: &mut Slice) {
    let unit_bytes = TILE * format.block_bytes();
    match format {
        Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8 => unreachable!("float tiles are not sliced"),
        Format::Iq2Xxs => unpack_rows(format, tile, first, n, slice),
        Format::Q2K | Format::Q3K | Format::Q4K | Format::Q5K | Format::Q6K => {
            let unit = &tile[first / 8 * unit_bytes..][..unit_bytes];
            prefetch(isa, unit);
            unpack_super(isa, format, unit, slice);
        }
        Format::Q8_0 | Format::Q4_0 | Format::Q4_1 | Format::Q5_0 | Format::Q5_1 | Format::Mxfp4 => {
            let units = tile[first * unit_bytes..][..n * unit_bytes].chunks_exact(unit_bytes);
            for (b, unit) in units.enumerate() {
                prefetch(isa, unit);
                let (header, planes) = unit.split_at(header_bytes(format));
                match format {
                    Format::Mxfp4 => slice.d[b] = std::array::from_fn(|row| e8m0_half_to_f32(header[row])),
                    _ => slice.d[b] = f16_lanes(isa, header),
                }
                if matches!(format, Format::Q4_1 | Format::Q5_1) {
                    slice.m[b] = f16_lanes(isa, &header[32..]);
                }
                unpack_codes(format, planes, &mut slice.codes[b]);
            }
        }
    }
}

/// How far ahead of the reader a tile is asked for: past what the out-of-order window reaches, well inside L1.
const AHEAD: usize = 4096;

/// Asks for the lines that lie [`AHEAD`] of a unit. Tiles follow each other in memory, and so do a task's units.
#[inline(always)]
fn prefetch(isa: Isa, unit: &[u8]) {
    prefetch_lines(isa, unit.as_ptr().wrapping_add(AHEAD), unit.len());
}

#[inline(always)]
fn unpack_super(isa: Isa, format: Format, unit: &[u8], slice: &mut Slice) {
    let (header, planes) = unit.split_at(header_bytes(format));
    for (s, planes) in planes.chunks_exact(plane_bytes(format)).enumerate() {
        unpack_codes(format, planes, &mut slice.codes[s]);
    }
    let d = f16_lanes(isa, header);
    // One byte of each row, side by side: an array, so that loops over rows have no bounds to check.
    let bytes = |base: usize, i: usize| -> &[u8; TILE] {
        header[base + TILE * i..][..TILE].try_into().expect("a line of sixteen")
    };
    match format {
        Format::Q4K | Format::Q5K => {
            let dmin = f16_lanes(isa, &header[32..]);
            for s in 0..SLICE_BLOCKS {
                let (sc, min): ([u8; TILE], [u8; TILE]) = if s < 4 {
                    (bytes(64, s).map(|sc| sc & 63), bytes(64, s + 4).map(|min| min & 63))
                } else {
                    let (low, sc_high, min_high) = (bytes(64, s + 4), bytes(64, s - 4), bytes(64, s));
                    let sc = std::array::from_fn(|row| low[row] & 15 | sc_high[row] >> 6 << 4);
                    (sc, std::array::from_fn(|row| low[row] >> 4 | min_high[row] >> 6 << 4))
                };
                for row in 0..TILE {
                    slice.d[s][row] = d[row] * f32::from(sc[row]);
                    slice.m[s][row] = -(dmin[row] * f32::from(min[row]));
                }
            }
        }
        Format::Q2K => {
            let dmin = f16_lanes(isa, &header[32..]);
            for s in 0..SLICE_BLOCKS {
                slice.d[s] = d;
                slice.m[s] = dmin.map(|dmin| -dmin);
                for h in 0..2 {
                    let both = bytes(64, 2 * s + h);
                    slice.sc[s][h] = both.map(|both| i32::from(both & 15));
                    slice.min[s][h] = both.map(|both| i32::from(both >> 4));
                }
            }
        }
        Format::Q3K => {
            for s in 0..SLICE_BLOCKS {
                slice.d[s] = d;
                for h in 0..2 {
                    let i = 2 * s + h;
                    let (low, high) = (bytes(32, i % 8), bytes(32, 8 + i % 4));
                    slice.sc[s][h] = std::array::from_fn(|row| {
                        let (low, high) = (low[row] >> (i / 8 * 4) & 15, high[row] >> (i / 4 * 2) & 3);
                        i32::from(low | high << 4) - 32
                    });
                }
            }
        }
        _ => {
            for s in 0..SLICE_BLOCKS {
                slice.d[s] = d;
                for h in 0..2 {
                    slice.sc[s][h] = bytes(32, 2 * s + h).map(|sc| i32::from(sc as i8));
                }
            }
        }
    }
}

/// Codes of 32 values of 16 rows, from their planes.
#[inline(always)]
fn unpack_codes(format: Format, planes: &[u8], codes: &mut [u8; 512]) {
    match format {
        Format::Q8_0 => codes.copy_from_slice(&planes[..512]),
        Format::Q4_0 | Format::Q4_1 | Format::Q4K => nibbles(planes, codes),
        Format::Mxfp4 => {
            nibbles(planes, codes);
            for code in codes.iter_mut() {
                *code = crate::format::FP4_DOUBLED[usize::from(*code & 15)];
            }
        }
        Format::Q5_0 | Format::Q5_1 | Format::Q5K => {
            nibbles(planes, codes);
            bits(&planes[256..], codes, 4);
        }
        Format::Q6K => {
            nibbles(planes, codes);
            crumbs(&planes[256..], |q, crumb| codes[q] |= crumb << 4);
        }
        Format::Q2K | Format::Q3K => {
            crumbs(planes, |q, crumb| codes[q] = crumb);
            if format == Format::Q3K {
                bits(&planes[128..], codes, 2);
            }
        }
        Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8 | Format::Iq2Xxs => unreachable!("no planes"),
    }
}

#[inline(always)]
fn nibbles(planes: &[u8], codes: &mut [u8; 512]) {
    let planes = &planes[..256];
    for c in 0..256 {
        codes[c] = planes[c] & 15;
        codes[256 + c] = planes[c] >> 4;
    }
}

/// Calls `put(code number, crumb)` for all 512.
#[inline(always)]
fn crumbs(plane: &[u8], mut put: impl FnMut(usize, u8)) {
    let plane = &plane[..128];
    for q in 0..4 {
        for c in 0..128 {
            put(128 * q + c, plane[c] >> (2 * q) & 3);
        }
    }
}

#[inline(always)]
fn bits(plane: &[u8], codes: &mut [u8; 512], shift: u32) {
    let plane = &plane[..64];
    for q in 0..8 {
        for c in 0..64 {
            codes[64 * q + c] |= (plane[c] >> q & 1) << shift;
        }
    }
}

/// The path of formats that keep their rows: through the definition of the format.
fn unpack_rows(format: Format, tile: &[u8], first: usize, n: usize, slice: &mut Slice) {
    let row_bytes = tile.len() / TILE;
    for (row, bytes) in tile.chunks_exact(row_bytes).enumerate() {
        for b in 0..n {
            let block = format.unpack32(bytes, first + b);
            for (k, code) in block.codes.into_iter().enumerate() {
                slice.codes[b][64 * (k / 4) + 4 * row + k % 4] = code;
            }
            let Scales::PerBlock { d, m } = block.scales else {
                unreachable!("only IQ2_XXS keeps its rows");
            };
            slice.d[b][row] = d;
            slice.m[b][row] = m;
        }
    }
}

/// Sixteen f16 side by side.
#[inline(always)]
fn f16_lanes(isa: Isa, bytes: &[u8]) -> [f32; TILE] {
    let bytes: &[u8; 32] = bytes[..32].try_into().expect("32 bytes");
    #[cfg(target_arch = "x86_64")]
    if isa != Isa::Scalar {
        // SAFETY: both vector instruction sets that `Isa` names include F16C.
        return unsafe { super::kernel::f16x16(bytes) };
    }
    let _ = isa;
    std::array::from_fn(|row| f16_to_f32(u16::from_le_bytes([bytes[2 * row], bytes[2 * row + 1]])))
}

/// Columns `first .. first + n` of a float tile as f32, `out[k][row]`; `first` is a slice border.
#[inline(always)]
pub(crate) fn unpack_floats(isa: Isa, format: Format, tile: &[u8], first: usize, out: &mut [[f32; TILE]]) {
    let unit_bytes = TILE * format.block_bytes();
    if format == Format::Fp8 {
        let units = tile[first / format.block_len() * unit_bytes..].chunks_exact(unit_bytes);
        for (unit, out) in units.zip(out.chunks_mut(format.block_len())) {
            let (scales, codes) = unit.split_at(TILE);
            let scales: [f32; TILE] = std::array::from_fn(|row| e8m0_to_f32(scales[row]));
            for (codes, out) in codes.chunks_exact(TILE).zip(out) {
                *out = std::array::from_fn(|row| e4m3_to_f32(codes[row]) * scales[row]);
            }
        }
        return;
    }
    let units = tile[first * unit_bytes..][..out.len() * unit_bytes].chunks_exact(unit_bytes);
    for (unit, out) in units.zip(out) {
        match format {
            Format::F16 => *out = f16_lanes(isa, unit),
            Format::Bf16 => {
                *out = std::array::from_fn(|row| bf16_to_f32(u16::from_le_bytes([unit[2 * row], unit[2 * row + 1]])));
            }
            _ => {
                *out = std::array::from_fn(|row| {
                    f32::from_le_bytes([unit[4 * row], unit[4 * row + 1], unit[4 * row + 2], unit[4 * row + 3]])
                });
            }
        }
    }
}
