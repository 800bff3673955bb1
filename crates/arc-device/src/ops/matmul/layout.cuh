// How the CUDA device keeps a matrix, and the arguments of its products. Mirrors: cuda/plan.rs (sizes asserted there).
//
// A part's rows are cut into groups of R = 32 / C rows and their columns into slices of 256, C of which stand side by
// side in a tile: lane l of a warp owns slice l / R of row l % R. C is the largest of 4, 2 and 1 that divides the number
// of slices, or 1 where the last slice is short. A group is its tiles one after the other; rows past the part's last are
// zeros. Tiles hold the bits of the source blocks and nothing else.
//
// A tile is units of 32 lanes, each of one block of the format (floats: of 16 bytes): planes of 16, 4, 2 or 1 bytes a
// lane, the widest first, so that every access of a warp is whole lines.
//
//   q8_0      2 x 16 codes, 2 scale
//   q4_0      16 nibbles, 2 scale                      q4_1      16 nibbles, 4 scale and minimum
//   q5_0      16 nibbles, 4 bits, 2 scale              q5_1      16 nibbles, 4 bits, 4 scale and minimum
//   mxfp4     16 codes, 1 scale
//   q2_k      16 scales and minimums, 4 x 16 crumbs, 4 scale and minimum
//   q3_k      4 x 16 crumbs, 2 x 16 bits, 3 x 4 scales, 2 scale
//   q4_k      16 head, 8 x 16 nibbles                  q5_k      16 head, 8 x 16 nibbles, 2 x 16 bits
//   q6_k      8 x 16 nibbles, 4 x 16 crumbs, 16 scales, 2 scale
//   iq2_xxs   4 x 16 patterns and signs, 2 scale
//   fp8       8 x 16 codes, 1 scale
//   floats    16; values left over at the end of a row one by one
//
// Inside 32 values, `word j` is values 4j .. 4j + 3, one a byte, as the activations have them:
//   nibbles   byte b of word i: value 8i + b low, value 8i + 4 + b high; q6_k: value 4i + b low, value 16 + 4i + b high
//   crumbs    bits 2t of byte b of word a: value 4 (4a + t) + b
//   bits      bit j of byte b: value 4j + b
//   mxfp4     nibble n of word i: value 8i + n
//   signs     bit g of nibble i: whether an odd number of the values 8g .. 8g + i is negative, of all eight an even one is;
//             nibble 7 is the scale of the 32 values
//   head      scale and minimum (f16), low nibbles of the 8 scales, of the 8 minimums, upper two bits of both
#pragma once

#include <cstdint>

namespace arc {

// The order of the enum in format.rs.
enum Format : uint32_t { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, MXFP4, FP8 };

constexpr int kSlice = 256;
constexpr int kLanes = 32;

// Values and bytes of a unit, a lane.
__host__ __device__ constexpr int unit_len(uint32_t f) {
    return f == F32 ? 4 : f == F16 || f == BF16 ? 8 : f == FP8 ? 128 : f >= Q2_K && f <= IQ2_XXS ? 256 : 32;
}
__host__ __device__ constexpr int unit_bytes(uint32_t f) {
    return f == Q8_0      ? 34
           : f == Q4_0    ? 18
           : f == Q4_1    ? 20
           : f == Q5_0    ? 22
           : f == Q5_1    ? 24
           : f == Q2_K    ? 84
           : f == Q3_K    ? 110
           : f == Q4_K    ? 144
           : f == Q5_K    ? 176
           : f == Q6_K    ? 210
           : f == IQ2_XXS ? 66
           : f == MXFP4   ? 17
           : f == FP8     ? 129
                          : 16;
}
__host__ __device__ constexpr bool is_float(uint32_t f) { return f <= BF16 || f == FP8; }
// Whether the contract needs sums of activations: a code of zero that is not 0, or a minimum.
__host__ __device__ constexpr bool reads_sums(uint32_t f) { return !is_float(f) && f != Q8_0 && f != IQ2_XXS && f != MXFP4; }

// Bytes of `n` columns of a tile (of all 32 lanes).
__host__ __device__ constexpr uint32_t tile_bytes(uint32_t f, uint32_t n) {
    return kLanes * (n / unit_len(f) * unit_bytes(f) + n % unit_len(f) * (f == F32 ? 4 : 2));
}

// Columns cut into slices and slices into tiles.
struct Cut {
    uint32_t cols, slices, log_c;
    __host__ __device__ uint32_t c() const { return 1u << log_c; }
    __host__ __device__ uint32_t group_rows() const { return kLanes >> log_c; }
    __host__ __device__ uint32_t slice_of(uint32_t t, uint32_t lane) const { return (t << log_c) + (lane >> (5 - log_c)); }
    __host__ __device__ uint32_t tiles() const { return slices >> log_c; }  // of a group
    __host__ __device__ uint32_t tail() const { return cols % kSlice; }
    __host__ __device__ uint32_t cols_of(uint32_t slice) const { return tail() != 0 && slice + 1 == slices ? tail() : kSlice; }
    __host__ __device__ uint32_t tile_at(uint32_t f, uint32_t t) const { return t * tile_bytes(f, kSlice); }
    __host__ __device__ uint32_t tile_len(uint32_t f, uint32_t t) const {
        return tail() != 0 && t + 1 == slices ? tile_bytes(f, tail()) : tile_bytes(f, kSlice);
    }
    __host__ __device__ uint32_t group_bytes(uint32_t f) const { return tile_at(f, tiles() - 1) + tile_len(f, tiles() - 1); }
};

// Rows of one format that stand together.
struct Seg {
    uint64_t base;
    uint32_t groups_end;  // groups of this segment and of those before it
    uint32_t rows;
    uint32_t first_row;  // in the output
    uint32_t format;
};
static_assert(sizeof(Seg) == 24);

enum Epilogue : uint32_t {
    kThenStore,         // out = v
    kThenBias,          // out = v + aux[n]
    kThenAdd,           // out = out + v
    kThenSoftcap,       // out = scalar * tanh(v / scalar)
    kThenSilu,          // out = silu(gate) * up
    kThenGelu,          // out = gelu_tanh(gate) * up
    kThenClampedSilu,   // as the experts: limit = scalar; times aux[order[i]] where the product is over assignments
    kThenRouted,        // out = sum over the row's assignments of aux[row * chosen + place, n], ascending, + v
};

constexpr int kMaxSegs = 8;

// A product of rows.
//
// Plain: every group of every segment meets rows 0 .. rows. Parts (`parts` > 0): one segment describes part 0, part p
// begins `p * part_bytes` later and meets rows of its own: row r of part p is input row `r * x_row + p * x_part`, and its
// outputs begin at column `p * seg.rows`. Experts (`bounds` not null): as parts, of those that have assignments; the
// rows of expert e are its assignments i, input row `gather ? order[i] / chosen : i`, output row `scatter ? order[i] : i`.
// With `pair`, groups of segments 0 and 1 are taken together (gate and up); a part is then both.
struct Product {
    Seg segs[kMaxSegs];
    uint32_t n_segs;
    Cut cut;
    uint32_t pair;
    uint32_t groups;     // of all segments, or of a part; of one segment of a pair
    uint32_t per_block;  // groups that a block takes at once
    uint32_t stages;     // tiles that a warp has in flight
    uint32_t stage_bytes;
    uint32_t rows;
    uint64_t q, d, sums, floats;  // [rows, cols] int8, [rows, cols / 32] f32, the same of int16 x 2, [rows, cols] f32
    uint64_t out;
    uint32_t out_stride;
    uint32_t epilogue;
    uint64_t aux;
    float scalar;
    uint32_t parts;
    uint64_t part_bytes;
    uint32_t x_row, x_part;
    uint64_t order, bounds;
    uint32_t chosen, gather, scatter, experts;
    uint64_t infos;  // RowInfo, for kThenRouted
    uint64_t out_q, out_d, out_sums;  // of few rows: outputs as int8 inputs of the next product, or null
    // Where the parts of a block's shared memory begin: table of patterns, activations (int8, scales, sums, floats),
    // squares of a norm and its weights, partial sums, tiles. Barriers stand at 0.
    uint32_t table_at, q_at, d_at, sums_at, floats_at, squares_at, norm_at, partials_at, ring_at;
    uint32_t warps;  // that take tiles
    uint32_t late;   // the next kernel may begin only when the one before this one has ended
};
static_assert(sizeof(Product) == 424);

// How inputs are made of rows of f32.
enum Rounding : uint32_t { kRoundNot, kRoundFp8, kRoundInt8 };

// Rows of f32 to inputs of a product.
struct Prepare {
    uint64_t x;           // [.., stride] f32
    uint64_t weight;      // of the norm, [cols] f32; null: no norm
    uint64_t map;         // row of x for each row, u32; null: the same
    uint64_t count;       // how many rows there are, u32; null: all
    uint64_t q, d, sums;  // null: not wanted
    uint64_t floats;      // null: not wanted
    uint32_t stride, cols;
    float eps;
    uint32_t rounding;
};
static_assert(sizeof(Prepare) == 80);

}  // namespace arc
