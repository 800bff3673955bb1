// Rope, the paged KV cache and attention over it: the device functions. The order of every sum is that of cpu.rs, so
// both stages give the CPU's bits.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>

#include "copies.cuh"
#include "math.cuh"
#include "step.cuh"

namespace arc {

// Tiles of a split, and keys of it. A tile of keys is a block of the cache.
constexpr uint32_t kSplitTiles = 8;
constexpr uint32_t kSplitKeys = kBlockTokens * kSplitTiles;
// Values of the widest head.
constexpr uint32_t kMaxHeadDim = 256;
// Fault word: a row has more splits than the step was launched for.
constexpr uint32_t kFaultContextClass = 0x6b760001;

// f32 to f16 as format/half.rs rounds: a NaN keeps its sign and upper payload and becomes quiet.
__device__ __forceinline__ uint16_t f16_bits(float x) {
    const uint32_t bits = __float_as_uint(x);
    const uint16_t nan = (bits >> 16 & 0x8000) | 0x7e00 | (bits >> 13 & 0x3ff);
    return (bits & 0x7fffffff) > 0x7f800000 ? nan : __half_as_ushort(__float2half_rn(x));
}

// The sum of the squares of up to 256 values by one warp, in the order of math.rs; every lane gets it. Lane l passes
// v[j] = value l + 32 j, missing ones being +0.0. The halvings by 512 and 256 add +0.0 to squares, which changes none.
__device__ __forceinline__ float sum_sq_head(const float (&v)[kMaxHeadDim / 32]) {
    float sq[kMaxHeadDim / 32];
#pragma unroll
    for (int j = 0; j < kMaxHeadDim / 32; ++j) sq[j] = __fmul_rn(v[j], v[j]);
    fold<kMaxHeadDim / 64>(sq);
    float s = sq[0];
#pragma unroll
    for (int half = 16; half > 0; half >>= 1) s = __fadd_rn(s, __shfl_xor_sync(0xffffffffu, s, half));
    return __fadd_rn(0.0f, s);
}

// One pair turned by its angle, every product rounded.
__device__ __forceinline__ void turn(float& a, float& b, float cos, float sin) {
    const float x = a, y = b;
    a = __fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin));
    b = __fadd_rn(__fmul_rn(y, cos), __fmul_rn(x, sin));
}

// The larger of two; a NaN is never lost.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// What a layer's attention fixes.
struct AttentionShape {
    uint32_t n_heads, n_kv_heads, head_dim;
    float scale;
    // Visible keys, the row's own included; 0: all.
    uint32_t window;

    __device__ uint32_t group() const { return n_heads / n_kv_heads; }
    __device__ uint32_t qkv_dim() const { return (n_heads + 2 * n_kv_heads) * head_dim; }
    __device__ uint32_t first_visible(uint32_t pos) const {
        return window == 0 || pos + 1 <= window ? 0 : pos + 1 - window;
    }
    // First element of a head's tile in the pool.
    __device__ size_t tile(uint32_t block, uint32_t kv_head) const {
        return ((size_t)block * n_kv_heads + kv_head) * head_dim * kBlockTokens;
    }
};

// A running softmax of one query takes a later part in: what its own sums and the part's are to be multiplied by.
__device__ __forceinline__ void join(float& m, float part_m, float& keep, float& add) {
    const float top = max_or_nan(m, part_m);
    keep = exp(__fsub_rn(m, top));
    add = exp(__fsub_rn(part_m, top));
    m = top;
}

__device__ __forceinline__ float joined(float own, float keep, float part, float add) {
    return __fadd_rn(__fmul_rn(own, keep), __fmul_rn(part, add));
}

}  // namespace arc
