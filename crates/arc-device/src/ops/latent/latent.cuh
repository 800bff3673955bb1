// Latent attention: rows and queries of a step, as a warp holds them. The CUDA twin of latent.rs.
#pragma once

#include <cstdint>

#include "math.cuh"
#include "ops/compress/compress.cuh"
#include "ops/quant/quant.cuh"
#include "step.cuh"

namespace arc {

// Values at the end of a row that rotate, in adjacent pairs.
constexpr uint32_t kRopeDim = 64;
// The longest row, and the values of it that a lane holds: value l + 32 j in x[j].
constexpr uint32_t kMaxLatent = 512, kLaneValues = kMaxLatent / 32;

// Everything of a layer's attention that kernels look at; `LatentArgs` of latent/cuda.rs.
struct LatentArgs {
    float* q;            // [rows, heads, dim]
    float* kv;           // [rows, dim]
    float* index_q;      // [rows, index_heads, index_dim]
    const float* low;    // [rows, q_rank + dim]
    const float* pool;   // [rows, pool_dim]
    uint8_t* window;     // [slots, ring, row_bytes]
    const float* rope;   // [context, kRopeDim]
    const float* kv_norm;
    const float* sinks;  // [heads]
    const uint32_t* picks;  // [rows, top]
    float* out;          // [rows, heads, dim]
    float* turned;       // [rows, heads, dim]: the same with the rotation undone, for the first output projection; or null
    int8_t* codes;       // that projection's inputs as int8, scales and sums (quantise.cuh); or null
    float* code_scales;
    uint32_t* code_sums;
    float* parts;        // [rows, heads, most_splits, dim + 2]
    PoolArgs rows, keys;
    uint32_t heads, dim, q_rank, ring;
    uint32_t window_len, index_heads, index_dim, pool_dim;
    uint32_t row_format, key_format, row_bytes, top;  // top: 0 where every visible row is read
    uint32_t n_rows, most_splits, mutant;
    float eps, scale;
    uint32_t apart;  // whether blocks leave their splits in `parts` for latent_merge
    // `low` and `pool` of one row, and `q`, as the product before sends them, each value with the number of the launch; 0 where
    // they are there when latent_rows starts, and when what is before the attention has ended.
    uint64_t sent, sent_q;
    // The number of the launch before, arrivals and departures, and for the attention the number of this one; and how many
    // arrivals there will be.
    uint32_t* counts;
    // Of one row: where latent_rows leaves all that the attention may read as it reads it, BF16 in rows of `tile_row` numbers: the
    // recent rows, the compressed ones, and then rows of zeros to the end of a split, at least one; or null.
    uint16_t* tiles;
    // Where blocks of latent_rows arrive when what they leave is there, for a kernel that begins with it; or null.
    uint32_t* left;
    // Where the attention takes from the tiles what is chosen beside the product (choose.cu): the number of the choice, and 16
    // bytes behind it which keys of every block are chosen, a bit each, and whether a score was NaN; or 0.
    uint64_t chosen;
    // Where `codes` with their scales are sent as they are made, each block of 32 with the number that queries were sent with; or 0.
    uint64_t sent_codes;
    uint32_t due;

    __device__ uint32_t first_visible(uint32_t pos) const { return pos + 1 > window_len ? pos + 1 - window_len : 0; }
    __device__ uint8_t* in_window(uint32_t slot, uint32_t p) const {
        return window + ((size_t)slot * ring + p % ring) * row_bytes;
    }
    // Numbers from one row of a tile to the next, in shared memory too: eight rows at the same place meet no bank twice.
    __device__ uint32_t tile_row() const { return dim + 8; }
    // Compressed rows that are visible, and whether the attention reads a choice of them.
    __device__ uint32_t visible(uint32_t pos) const { return rows.ratio == 0 ? 0 : rows.visible(pos); }
    __device__ bool chooses(uint32_t pos) const { return top != 0 && visible(pos) > top; }
    // Whether rows of a run this long may enter the ring before the step's attention has read it.
    __device__ bool short_run(const RowInfo& info) const { return info.back + info.ahead + 1 <= ring - window_len + 1; }
};
static_assert(sizeof(LatentArgs) == 376);

// Rows that there is room for in tiles: TILE_ROWS of latent/cuda.rs. Keys of a block of index_choose.
constexpr uint32_t kTileRows = 8448, kChooserKeys = 32;

// Rows of a split of the attention, which sums their values together.
constexpr uint32_t kSplitRows = 80;

__device__ __forceinline__ uint32_t bf16_product(uint32_t x, uint32_t y) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}

// Four E4M3 codes times the power of two of a scale byte, as BF16, exact. A code moved to where BF16 has exponent and
// mantissa is a number 2^120 too small, subnormals included.
__device__ __forceinline__ uint2 decode_four(uint32_t codes, uint32_t factor) {
    auto place = [](uint32_t x) { return (x >> 4 & 0x07f007f0u) | (x & 0x80008000u); };
    return make_uint2(bf16_product(place(__byte_perm(codes, 0, 0x1404)), factor),
                      bf16_product(place(__byte_perm(codes, 0, 0x3424)), factor));
}

// 2^120 times the scale as a pair of BF16, NaN for a poisoned block; `rest` is what the number cannot hold, or 1.
__device__ __forceinline__ uint32_t decode_factor(uint32_t scale, uint32_t& rest) {
    const uint32_t exponent = scale + 120, first = min(exponent, 254u);
    rest = (127 + exponent - first) << 7;
    rest |= rest << 16;
    return scale == kPoison ? 0x7fc07fc0u : first << 7 | first << 23;
}

// Eight codes of a block of this scale.
__device__ __forceinline__ uint4 decode_eight(uint2 codes, uint32_t scale) {
    uint32_t rest;
    const uint32_t factor = decode_factor(scale, rest);
    uint2 low = decode_four(codes.x, factor), high = decode_four(codes.y, factor);
    if (rest != 0x3f803f80u) {
        low = make_uint2(bf16_product(low.x, rest), bf16_product(low.y, rest));
        high = make_uint2(bf16_product(high.x, rest), bf16_product(high.y, rest));
    }
    return make_uint4(low.x, low.y, high.x, high.y);
}

// What is known of a row, past the first cache.
__device__ __forceinline__ RowInfo info_early(const StepView& view, uint32_t r) {
    const uint4* at = reinterpret_cast<const uint4*>(view.infos + r);
    const uint4 x = __ldcg(at), y = __ldcg(at + 1);
    return RowInfo{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
}

// The sum of the squares of up to 512 values by one warp, in the order of math.rs.
template <uint32_t J>
__device__ __forceinline__ float sum_sq_row(const float (&x)[J]) {
    float sq[J];
#pragma unroll
    for (uint32_t j = 0; j < J; ++j) sq[j] = __fmul_rn(x[j], x[j]);
    fold<J / 2>(sq);
    float s = sq[0];
#pragma unroll
    for (int half = 16; half > 0; half >>= 1) s = __fadd_rn(s, __shfl_xor_sync(0xffffffffu, s, half));
    return __fadd_rn(0.0f, s);
}

template <uint32_t J>
__device__ __forceinline__ float rms_factor(const float (&x)[J], uint32_t dim, float eps) {
    return rsqrt(__fadd_rn(__fdiv_rn(sum_sq_row(x), (float)dim), eps));
}

// Cosines and sines of the lane's values at the end of a row, loaded ahead of their use.
struct Angles {
    float2 cs[3];

    // `table`: those of the position.
    __device__ __forceinline__ void load(const float* table, uint32_t dim) {
        const uint32_t start = dim - kRopeDim, first = start / 32;
#pragma unroll
        for (uint32_t k = 0; k < 3; ++k) {
            const uint32_t e = (threadIdx.x & 31) + 32 * (first + k);
            cs[k] = e >= start && e < dim ? *reinterpret_cast<const float2*>(table + ((e - start) & ~1u)) : make_float2(1.0f, 0.0f);
        }
    }
};

// Rotates the end of a row.
template <uint32_t J>
__device__ __forceinline__ void rope_row(float (&x)[J], uint32_t dim, const Angles& angles) {
    const uint32_t lane = threadIdx.x & 31, start = dim - kRopeDim, first = start / 32;
#pragma unroll
    for (uint32_t j = 0; j < J; ++j) {
        if (32 * j + 31 >= start && 32 * j < dim) {
            const float other = __shfl_xor_sync(0xffffffffu, x[j], 1);
            const float2 cs = j == first ? angles.cs[0] : j == first + 1 ? angles.cs[1] : angles.cs[2];
            const uint32_t e = lane + 32 * j;
            if (e >= start && e < dim) {
                const float turned = __fmul_rn(other, cs.y), kept = __fmul_rn(x[j], cs.x);
                x[j] = lane & 1 ? __fadd_rn(kept, turned) : __fsub_rn(kept, turned);
            }
        }
    }
}

template <uint32_t J>
__device__ __forceinline__ void load_row(float (&x)[J], const float* from, uint32_t dim) {
    const uint32_t lane = threadIdx.x & 31;
#pragma unroll
    for (uint32_t j = 0; j < J; ++j) x[j] = lane + 32 * j < dim ? from[lane + 32 * j] : 0.0f;
}

// The same past the first cache: of what may be read before the kernel that wrote it is waited for.
template <uint32_t J>
__device__ __forceinline__ void load_row_early(float (&x)[J], const float* from, uint32_t dim) {
    const uint32_t lane = threadIdx.x & 31;
#pragma unroll
    for (uint32_t j = 0; j < J; ++j) x[j] = lane + 32 * j < dim ? __ldcg(from + lane + 32 * j) : 0.0f;
}

template <uint32_t J>
__device__ __forceinline__ void store_row(float* to, const float (&x)[J], uint32_t dim) {
    const uint32_t lane = threadIdx.x & 31;
#pragma unroll
    for (uint32_t j = 0; j < J; ++j) {
        if (lane + 32 * j < dim) to[lane + 32 * j] = x[j];
    }
}

// What storing leaves of a row; where `out` is not null it is stored too. Rows of the FP4 formats have 128 values.
template <uint32_t J>
__device__ __forceinline__ void keep_row(float (&x)[J], uint32_t dim, uint32_t format, uint8_t* out) {
    if (format == kRowRoundedFp8 || format == kRowFp8) {
        fp8_row(x, dim - kRopeDim, format == kRowFp8, out);
    } else if (format == kRowRoundedFp4 || format == kRowFp4) {
        float y[4] = {x[0], x[1], x[2], x[3]};
        index_row(y, format == kRowFp4, out);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = y[j];
    }
    if (out != nullptr && format != kRowFp8 && format != kRowFp4) store_row(reinterpret_cast<float*>(out), x, dim);
}

}  // namespace arc
