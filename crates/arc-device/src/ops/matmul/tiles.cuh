// Tiles of weights on their way through shared memory: bulk copies that barriers count, one tile by one row, and sums of
// slices.
#pragma once

#include "../../barrier.cuh"
#include "../../copies.cuh"
#include "../../pdl.cuh"
#include "dot.cuh"
#include "iq2.cuh"
#include "product.cuh"
#include "quantise.cuh"

namespace arc {

// One thread: `bytes` from global to shared memory, both 16-byte aligned, counted by `bar`.
__device__ __forceinline__ void bulk_copy(void* to, const uint8_t* from, uint32_t bytes, uint64_t* bar) {
    asm volatile(
        "{\n"
        ".reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n"
        "}\n" ::"r"(shared_at(to)),
        "l"(from), "r"(bytes), "r"(shared_at(bar))
        : "memory");
}

// One tile; completes on `bar`.
__device__ __forceinline__ void bulk_load(void* to, const uint8_t* from, uint32_t bytes, uint64_t* bar) {
    expect(bar, bytes);
    bulk_copy(to, from, bytes, bar);
}

// Where rows of inputs stand in shared memory: int8 in slices of 272 bytes, eight scales and sums a slice; or f32 in slices
// of 260. Row after row.
struct Staged {
    const uint8_t *q, *d, *sums, *floats, *table;
};

// What a lane's slice of tile `t` makes of N rows: `to[r * 32]`.
template <int N, uint32_t F>
__device__ __forceinline__ void dot_tile(const Cut& cut, const uint8_t* tile, uint32_t t, const Staged& in, float* to) {
    const uint32_t lane = threadIdx.x & 31, slice = cut.slice_of(t, lane);
    const uint32_t cols = cut.tail() != 0 && slice + 1 == cut.slices ? cut.tail() : kSlice;
    Inputs x;
    x.q = reinterpret_cast<const int8_t*>(in.q) + slice * 272;
    x.d = reinterpret_cast<const float*>(in.d) + slice * 8;
    x.sums = reinterpret_cast<const uint32_t*>(in.sums) + slice * 8;
    x.f = reinterpret_cast<const float*>(in.floats) + slice * 260;
    x.q_row = cut.slices * 272;
    x.d_row = cut.slices * 8;
    x.f_row = cut.slices * 260;
    x.patterns = reinterpret_cast<const uint32_t*>(in.table);
    float acc[N];
    dot_slice<N, F>(tile, lane, cols, x, acc);
#pragma unroll
    for (int r = 0; r < N; ++r) to[r * kLanes] = acc[r];
}

// The sum of the slices of row n of a group: ascending, from +0. `at`: of its first tile, tiles `step` floats apart.
__device__ __forceinline__ float total(const Cut& cut, const float* at, uint32_t tiles, uint32_t step, uint32_t n) {
    float sum = 0.0f;
    at += n;
    if (cut.log_c == 2) {
#pragma unroll 2
        for (uint32_t t = 0; t < tiles; ++t, at += step) {
            const float a = at[0], b = at[8], c = at[16], d = at[24];
            sum = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(sum, a), b), c), d);
        }
    } else {
        for (uint32_t t = 0; t < tiles; ++t, at += step) {
            for (uint32_t c = 0; c < kLanes; c += cut.group_rows()) sum = __fadd_rn(sum, at[c]);
        }
    }
    return sum;
}

// The table that IQ2_XXS looks magnitudes up in.
template <uint32_t F>
__device__ __forceinline__ void make_table(uint8_t* to) {
    if constexpr (F == IQ2_XXS) {
        uint32_t* table = reinterpret_cast<uint32_t*>(to);
        for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) table[i] = spread_pattern(kPatterns[i]);
    }
}

// Sends for one row of int8 inputs: values, scales and sums of row `from` of `cols`, by threads `at`, `at + of` and so on.
__device__ __forceinline__ void stage_codes(uint64_t q, uint64_t d, uint64_t sums, size_t from, uint32_t cols, uint32_t at, uint32_t of,
                                            uint8_t* q_to, uint8_t* d_to, uint8_t* s_to) {
    const uint8_t* q_from = reinterpret_cast<const uint8_t*>(q) + from * cols;
    const uint8_t* d_from = reinterpret_cast<const uint8_t*>(d) + from * (cols / 8);
    const uint8_t* s_from = reinterpret_cast<const uint8_t*>(sums) + from * (cols / 8);
    const uint32_t wide = cols / 16;
    if (cols % 128 == 0) {
        const uint32_t narrow = cols / 128;
        for (uint32_t i = at; i < wide + 2 * narrow; i += of) {
            if (i < wide) {
                copy16(q_to + (i / 16) * 272 + (i % 16) * 16, q_from + 16 * i);
            } else if (i < wide + narrow) {
                copy16(d_to + 16 * (i - wide), d_from + 16 * (i - wide));
            } else {
                copy16(s_to + 16 * (i - wide - narrow), s_from + 16 * (i - wide - narrow));
            }
        }
    } else {
        for (uint32_t i = at; i < wide; i += of) copy16(q_to + (i / 16) * 272 + (i % 16) * 16, q_from + 16 * i);
        for (uint32_t i = at; i < cols / 32; i += of) {
            reinterpret_cast<uint32_t*>(d_to)[i] = reinterpret_cast<const uint32_t*>(d_from)[i];
            reinterpret_cast<uint32_t*>(s_to)[i] = reinterpret_cast<const uint32_t*>(s_from)[i];
        }
    }
}

// Leaves 32 values, one a lane, as int8: block `at` of a row of codes, scales and sums.
__device__ __forceinline__ void leave_codes(float v, uint64_t q, uint64_t d, uint64_t sums, size_t at) {
    const uint32_t lane = threadIdx.x & 31;
    float four[1][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[0][i] = __shfl_sync(~0u, v, 4 * (lane & 7) + i);
    Quantised made[1];
    quantise(four, made);
    if (lane < 8) reinterpret_cast<uint32_t*>(q)[8 * at + lane] = made[0].q;
    if (lane == 0) reinterpret_cast<float*>(d)[at] = made[0].d, reinterpret_cast<uint32_t*>(sums)[at] = made[0].sums;
}

}  // namespace arc
