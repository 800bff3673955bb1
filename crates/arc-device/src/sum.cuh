// Sums in the order of math::sum by warps that read 16 bytes a lane, several sums at a time. The bits are those of
// sum_chunk_warp in math.cuh: only who holds which element differs.
//
// Lane l holds elements 128 j + 4 l + e of a chunk, j in 0..8, e in 0..4. The halvings by 512, 256 and 128 are over j and
// stay in registers; those by 64 to 4 are over lanes; those by 2 and 1 are over e. While values are exchanged for the
// halvings by 64 and 32 a lane keeps half of its e, so that bits 4 and 3 of the lane become e: 8 shuffles a sum.
#pragma once

#include "math.cuh"

namespace arc {

constexpr unsigned kFullWarp = 0xffffffffu;
// 16-byte reads of a lane that cover one chunk.
constexpr int kChunkReads = kSumChunk / 128;

__device__ __forceinline__ float4 mul4(float4 a, float4 b) {
    return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}
__device__ __forceinline__ float4 add4(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// A weight, loaded where it stands: not moved behind a wait that follows.
__device__ __forceinline__ float4 load_early(const float4* at) {
    float4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(at));
    return v;
}

__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Products of one chunk folded to 128 elements, four a lane: value(j) are elements 128 j + 4 l + (0, 1, 2, 3).
template <typename Value>
__device__ __forceinline__ float4 fold_chunk4(Value value) {
    const float4 a = add4(add4(value(0), value(4)), add4(value(2), value(6)));
    const float4 b = add4(add4(value(1), value(5)), add4(value(3), value(7)));
    return add4(a, b);
}

// The last seven halvings of N chunks; every lane gets every sum.
template <int N>
__device__ __forceinline__ void sum_lanes4(const float4 (&v)[N], float (&out)[N]) {
    const bool high = threadIdx.x & 16, odd = threadIdx.x & 8;
    float2 pair[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float sx = high ? v[n].x : v[n].z, sy = high ? v[n].y : v[n].w;
        const float kx = high ? v[n].z : v[n].x, ky = high ? v[n].w : v[n].y;
        pair[n].x = __fadd_rn(kx, __shfl_xor_sync(kFullWarp, sx, 16));
        pair[n].y = __fadd_rn(ky, __shfl_xor_sync(kFullWarp, sy, 16));
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float sent = odd ? pair[n].x : pair[n].y, kept = odd ? pair[n].y : pair[n].x;
        out[n] = __fadd_rn(kept, __shfl_xor_sync(kFullWarp, sent, 8));
    }
    // By 16, 8 and 4; then e: bit 1 is in lane bit 4, bit 0 in lane bit 3.
#pragma unroll
    for (int step = 0; step < 5; ++step) {
        constexpr int kMask[5] = {4, 2, 1, 16, 8};
#pragma unroll
        for (int n = 0; n < N; ++n) out[n] = __fadd_rn(out[n], __shfl_xor_sync(kFullWarp, out[n], kMask[step]));
    }
}

// One chunk that lies in memory, whole and on a 16-byte border; every lane gets its sum of squares.
__device__ __forceinline__ float sum_sq_chunk4(const float* chunk) {
    const float4* at = reinterpret_cast<const float4*>(chunk) + (threadIdx.x & 31);
    const float4 v[1] = {fold_chunk4([&](int j) {
        const float4 x = at[32 * j];
        return mul4(x, x);
    })};
    float out[1];
    sum_lanes4(v, out);
    return out[0];
}

}  // namespace arc
