// The indexer: scores as ordered integers. The CUDA twin of index.rs.
#pragma once

#include <cstdint>

#include "math.cuh"

namespace arc {

// Stands first in a row's choice when a score was NaN.
constexpr uint32_t kIndexFault = 0xffffffffu;

// A score as an integer of the same order; -0 and +0 are equal scores.
__device__ __forceinline__ uint32_t ordinal(float score) {
    const uint32_t bits = __float_as_uint(__fadd_rn(score, 0.0f));
    return bits >> 31 == 0 ? bits | 1u << 31 : ~bits;
}

// Whether an ordinal is that of a NaN: beyond those of the infinities.
__device__ __forceinline__ bool is_nan_ordinal(uint32_t x) { return x > 0xff800000u || x < 0x007fffffu; }

// Sum of `n` values, a power of two, by a warp that passes value l + 32 j as v[j]; the order of math.rs.
template <uint32_t J>
__device__ __forceinline__ float fold_power(float (&v)[J], uint32_t n) {
    const uint32_t lane = threadIdx.x & 31;
#pragma unroll
    for (uint32_t j = 0; j < J; ++j) v[j] = lane + 32 * j < n ? __fadd_rn(v[j], 0.0f) : 0.0f;
    if constexpr (J > 1) fold<J / 2>(v);
    float s = v[0];
#pragma unroll
    for (int half = 16; half > 0; half >>= 1) s = __fadd_rn(s, __shfl_xor_sync(0xffffffffu, s, half));
    return s;
}

}  // namespace arc
