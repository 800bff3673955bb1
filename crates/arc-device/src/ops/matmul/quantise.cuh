// Inputs of products: norm, rounding, int8. Exact; operations and their order are those of norm.rs, quant.rs, matmul.rs.
//
// A warp takes 128 consecutive values of a row at a time, four a lane: a block of 32 is eight lanes, and one of the FP8
// round trip the whole warp.
#pragma once

#include "../../math.cuh"
#include "layout.cuh"

namespace arc {

// The largest of |v| over 8 or 32 lanes, as bits: infinity and NaN last.
template <int LANES>
__device__ __forceinline__ uint32_t amax_bits(const float (&v)[4]) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) top = max(top, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
    for (int half = LANES / 2; half > 0; half >>= 1) top = max(top, __shfl_xor_sync(~0u, top, half));
    return top;
}

// What storing as E4M3 with a scale per 128 values leaves of them (`fp8_round_trip`).
__device__ __forceinline__ void fp8_blocks(float (&v)[4]) {
    const uint32_t top = amax_bits<32>(v);
    uint32_t scale = 255;
    if (top < 0x7f800000u) {
        const uint32_t up = __float_as_uint(__fmul_rn(fmaxf(__uint_as_float(top), 1e-4f), 1.0f / 448.0f));
        scale = (up >> 23) + ((up & 0x7fffffu) != 0);
    }
    // 2^(127 - scale), and for a poisoned block anything: every code is multiplied by NaN.
    const float factor = scale == 255 ? 0.0f : __uint_as_float((254 - scale) << 23);
    const float back = scale == 255 ? ARC_NAN : scale == 0 ? __uint_as_float(0x00400000u) : __uint_as_float(scale << 23);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        unsigned short codes;
        uint32_t halves;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(__fmul_rn(v[i + 1], factor)), "f"(__fmul_rn(v[i], factor)));
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
        float low, high;
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(halves));
        v[i] = __fmul_rn(low, back), v[i + 1] = __fmul_rn(high, back);
    }
}

struct Quantised {
    uint32_t q;     // four int8
    float d;        // of the block of eight lanes
    uint32_t sums;  // of its halves, two int16
};

// Four values of each of eight lanes that share a block.
__device__ __forceinline__ Quantised quantise(const float (&v)[4]) {
    const uint32_t top = amax_bits<8>(v);
    const float amax = __uint_as_float(top);
    Quantised out{0, __fdiv_rn(amax, 127.0f), 0};
    if (top != 0 && top < 0x7f800000u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int q = __float2int_rn(__fmul_rn(__fdiv_rn(v[i], amax), 127.0f));
            out.q |= ((uint32_t)q & 255u) << (8 * i);
        }
    }
    int sum = __dp4a((int)out.q, 0x01010101, 0);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int other = __shfl_xor_sync(~0u, sum, 4);
    out.sums = threadIdx.x & 4 ? ((uint32_t)other & 0xffffu) | (uint32_t)sum << 16
                               : ((uint32_t)sum & 0xffffu) | (uint32_t)other << 16;
    return out;
}

// What int8 leaves of the values (`int8_round_trip`).
__device__ __forceinline__ void int8_blocks(float (&v)[4]) {
    const uint32_t top = amax_bits<8>(v);
    const float amax = __uint_as_float(top), d = __fdiv_rn(amax, 127.0f);
    if (top == 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float q = rintf(__fmul_rn(__fdiv_rn(v[i], amax), 127.0f));
        v[i] = top >= 0x7f800000u ? ARC_NAN : __fmul_rn(q, d);
    }
}

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

// 1 / root mean square of a row, by the block; `shared`: a float a chunk of 1,024.
__device__ __forceinline__ float norm_factor(const float* x, uint32_t cols, float eps, float* shared) {
    const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, chunks = (cols + kSumChunk - 1) / kSumChunk;
    for (uint32_t c = warp; c < chunks; c += blockDim.x >> 5) {
        float v[kSumChunk / 32];
#pragma unroll
        for (int j = 0; j < kSumChunk / 32; ++j) {
            const uint32_t i = c * kSumChunk + lane + 32 * j;
            const float value = i < cols ? x[i] : 0.0f;
            v[j] = __fmul_rn(value, value);
        }
        const float sum = sum_chunk_warp(v);
        if (lane == 0) shared[c] = sum;
    }
    __syncthreads();
    float sum = 0.0f;
    for (uint32_t c = 0; c < chunks; ++c) sum = __fadd_rn(sum, shared[c]);
    return rsqrt(__fadd_rn(__fdiv_rn(sum, (float)cols), eps));
}

constexpr uint32_t kMaxCols = 64 * kSumChunk;

// One row, by the block.
__device__ __forceinline__ void prepare_row(const Prepare& p, uint32_t row, float* shared) {
    const uint32_t cols = p.cols, lane = threadIdx.x & 31;
    const uint32_t from = p.map != 0 ? reinterpret_cast<const uint32_t*>(p.map)[row] : row;
    const float* x = reinterpret_cast<const float*>(p.x) + (size_t)from * p.stride;
    const float* weight = reinterpret_cast<const float*>(p.weight);
    const float factor = weight != nullptr ? norm_factor(x, cols, p.eps, shared) : 1.0f;
    const bool vectors = cols % 4 == 0 && p.stride % 4 == 0;
    for (uint32_t first = (threadIdx.x >> 5) * 128; first < cols; first += (blockDim.x >> 5) * 128) {
        const uint32_t k = first + 4 * lane;
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (vectors) {
            if (k < cols) {
                const float4 four = *reinterpret_cast<const float4*>(x + k);
                v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (k + i < cols) v[i] = x[k + i];
            }
        }
        if (weight != nullptr) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (k + i < cols) v[i] = __fmul_rn(__fmul_rn(v[i], factor), weight[k + i]);
            }
        }
        if (p.rounding == kRoundFp8) fp8_blocks(v);
        if (p.rounding == kRoundInt8) int8_blocks(v);
        if (p.floats != 0) {
            float* to = reinterpret_cast<float*>(p.floats) + (size_t)row * cols + k;
            if (vectors) {
                if (k < cols) *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (k + i < cols) to[i] = v[i];
                }
            }
        }
        if (p.q != 0) {
            const Quantised out = quantise(v);
            const size_t at = (size_t)row * cols + k;
            if (k < cols) {
                *reinterpret_cast<uint32_t*>(p.q + at) = out.q;
                if (lane % 8 == 0) {
                    reinterpret_cast<float*>(p.d)[at / 32] = out.d;
                    reinterpret_cast<uint32_t*>(p.sums)[at / 32] = out.sums;
                }
            }
        }
    }
}

}  // namespace arc
