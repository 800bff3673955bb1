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

// Four values of each of eight lanes that share a block, N blocks side by side.
//
// x / amax is IEEE division, by the reciprocal that a block's values share: with the rounded one, a step of correction gives
// the rounded quotient (Markstein 1990) as long as nothing over- or underflows. So blocks far from 1 are brought nearer by a
// power of two, which no quotient notices; values that vanish by it count for 0 all the same.
template <int N>
__device__ __forceinline__ void quantise(const float (&v)[N][4], Quantised (&out)[N]) {
    uint32_t top[N];
#pragma unroll
    for (int n = 0; n < N; ++n) top[n] = amax_bits<8>(v[n]);
    int sum[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const bool sound = top[n] != 0 && top[n] < 0x7f800000u;
        const float amax = __uint_as_float(top[n]);
        const float scale = !sound ? 0.0f : amax < 0x1p-60f ? 0x1p64f : amax > 0x1p60f ? 0x1p-64f : 1.0f;
        const float of = sound ? __fmul_rn(amax, scale) : 1.0f, reciprocal = __frcp_rn(of);
        out[n].q = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Of an unsound block every code is 0, whatever its values are.
            const float x = sound ? __fmul_rn(v[n][i], scale) : 0.0f, q = __fmul_rn(x, reciprocal);
            const float quotient = __fmaf_rn(__fmaf_rn(-q, of, x), reciprocal, q);
            out[n].q |= ((uint32_t)__float2int_rn(__fmul_rn(quotient, 127.0f)) & 255u) << (8 * i);
        }
        out[n].d = __fdiv_rn(amax, 127.0f);
        sum[n] = __dp4a((int)out[n].q, 0x01010101, 0);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        sum[n] += __shfl_xor_sync(~0u, sum[n], 1);
        sum[n] += __shfl_xor_sync(~0u, sum[n], 2);
        const int other = __shfl_xor_sync(~0u, sum[n], 4);
        out[n].sums = threadIdx.x & 4 ? ((uint32_t)other & 0xffffu) | (uint32_t)sum[n] << 16
                                      : ((uint32_t)sum[n] & 0xffffu) | (uint32_t)other << 16;
    }
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

constexpr uint32_t kMaxCols = 64 * kSumChunk;

// The sum of squares of each chunk of 1,024 of n values, by the block: `sums[c]`. value(i) is called for 0 <= i < n.
template <typename Value>
__device__ __forceinline__ void chunk_squares(uint32_t n, float* sums, Value value) {
    const uint32_t lane = threadIdx.x & 31;
    for (uint32_t c = threadIdx.x >> 5; c * kSumChunk < n; c += blockDim.x >> 5) {
        float v[kSumChunk / 32];
#pragma unroll
        for (int j = 0; j < kSumChunk / 32; ++j) {
            const uint32_t i = c * kSumChunk + lane + 32 * j;
            const float x = i < n ? value(i) : 0.0f;
            v[j] = __fmul_rn(x, x);
        }
        const float sum = sum_chunk_warp(v);
        if (lane == 0) sums[c] = sum;
    }
}

// 1 / root mean square of n values, from the squares of their chunks.
__device__ __forceinline__ float norm_factor(uint32_t n, float eps, const float* sums) {
    float sum = 0.0f;
    for (uint32_t c = 0; c * kSumChunk < n; ++c) sum = __fadd_rn(sum, sums[c]);
    return rsqrt(__fadd_rn(__fdiv_rn(sum, (float)n), eps));
}

// The sum of squares of a chunk of 1,024 values by a warp, in the order of `sum_sq`: v[s][i] is value 128 s + 4 lane + i.
__device__ __forceinline__ float chunk_square(const float (&v)[8][4]) {
    float t[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float u[8];
#pragma unroll
        for (int s = 0; s < 8; ++s) u[s] = __fmul_rn(v[s][i], v[s][i]);
        fold<4>(u);
        t[i] = u[0];
    }
#pragma unroll
    for (int half = 16; half > 0; half >>= 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) t[i] = __fadd_rn(t[i], __shfl_xor_sync(~0u, t[i], half));
    }
    return __fadd_rn(__fadd_rn(t[0], t[2]), __fadd_rn(t[1], t[3]));
}

// Norm and rounding of values k .. k + 4 of a row, 0 beyond its end. `weight`: of the norm, or null.
__device__ __forceinline__ void norm_and_round(const Prepare& p, const float* weight, uint32_t k, float factor, float (&v)[4]) {
    if (weight != nullptr) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (k + i < p.cols) v[i] = __fmul_rn(__fmul_rn(v[i], factor), weight[k + i]);
        }
    }
    if (p.rounding == kRoundFp8) fp8_blocks(v);
    if (p.rounding == kRoundInt8) int8_blocks(v);
}

// Where row `row` of the inputs comes from.
__device__ __forceinline__ const float* source_row(const Prepare& p, uint32_t row) {
    const uint32_t from = p.map != 0 ? reinterpret_cast<const uint32_t*>(p.map)[row] : row;
    return reinterpret_cast<const float*>(p.x) + (size_t)from * p.stride;
}

__device__ __forceinline__ void load_four(const float* x, uint32_t k, uint32_t cols, bool vectors, float (&v)[4]) {
    v[0] = v[1] = v[2] = v[3] = 0.0f;
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
}

// Blocks of 128 values of a row that a warp takes together.
constexpr int kTogether = 2;

// One row of inputs, by the block: `sink.take(k, step, cols, v)` takes values k + step n .. k + step n + 4 as v[n], what is
// below `cols`. `squares`: a float a chunk of 1,024. Loads run ahead of what is done with them. `weight`: of the norm; it
// may be in shared memory, written before the row's barrier.
template <typename Sink>
__device__ __forceinline__ void prepare_row(const Prepare& p, const float* x, const float* weight, float* squares, Sink sink) {
    const uint32_t cols = p.cols, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const bool vectors = cols % 4 == 0 && p.stride % 4 == 0, normed = weight != nullptr;
    float factor = 1.0f;
    if (normed) {
        for (uint32_t begin = 1024 * warp; begin < cols; begin += 1024 * warps) {
            float v[8][4];
#pragma unroll
            for (int s = 0; s < 8; ++s) load_four(x, begin + s * 128 + 4 * lane, cols, vectors, v[s]);
            const float sum = chunk_square(v);
            if (lane == 0) squares[begin / 1024] = sum;
        }
        __syncthreads();
        factor = norm_factor(cols, p.eps, squares);
    }
    // The next values are on their way while these are looked at. Rolled: this is code that runs once a kernel.
    const uint32_t step = 128 * warps;
    float v[kTogether][4], next[kTogether][4];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) load_four(x, 128 * warp + 4 * lane + n * step, cols, vectors, v[n]);
#pragma unroll 1
    for (uint32_t k = 128 * warp + 4 * lane; k - 4 * lane < cols; k += kTogether * step) {
#pragma unroll
        for (int n = 0; n < kTogether; ++n) load_four(x, k + (kTogether + n) * step, cols, vectors, next[n]);
#pragma unroll
        for (int n = 0; n < kTogether; ++n) norm_and_round(p, weight, k + n * step, factor, v[n]);
        sink.take(k, step, cols, v);
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) v[n][i] = next[n][i];
        }
    }
}

}  // namespace arc
