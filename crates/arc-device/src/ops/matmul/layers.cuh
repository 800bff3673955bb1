// What a layer in one launch (layers.cu) does between a wait and a send, in few instructions: sends to other blocks of the cluster,
// products of Q4_1 with int8, sums and maxima of a warp, quotients by constants, int8 of a block of 32 values, exponentials. Exact: all
// of it has the bits of sum.cuh, quantise.cuh and math.cuh.
#pragma once

#include "../../sum.cuh"
#include "tiles.cuh"

namespace arc {

// Two or four values to another block of the cluster, whose barrier `bar` counts their bytes; both are addresses of `in_block`.
__device__ __forceinline__ void send(uint32_t to, uint32_t bar, float a, float b) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void send(uint32_t to, uint32_t bar, const uint4& v) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void send(uint32_t to, uint32_t bar, float a, float b, float c, float d) {
    send(to, bar, make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)));
}

// acc + the bytes of `codes` without a sign times those of `x` with one.
__device__ __forceinline__ int dot_unsigned(uint32_t codes, uint32_t x, int acc) {
    int out;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(codes), "r"(x), "r"(acc));
    return out;
}

// An integer n of up to 22 bits as a float: kRound + n has it in its low bits.
__device__ __forceinline__ float small_float(int beside_round) { return __fsub_rn(__int_as_float(beside_round), kRound); }

// A lane's weights of a block of 32 values, ready to be multiplied.
struct Weights {
    static constexpr uint32_t kBlockBytes = kLanes * unit_bytes(Q4_1);
    uint32_t low[4], high[4];
    float d, m;
    __device__ __forceinline__ void load(const uint8_t* tile, uint32_t b, uint32_t lane) {
        const uint4 codes = load16(tile + b * kBlockBytes + 16 * lane);
        const uint32_t dm = load4(tile + b * kBlockBytes + 512 + 4 * lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] = word(codes, i), high[i] = word(codes, i) >> 4;
        d = low_half(dm), m = high_half(dm);
    }
    // Nibbles apart.
    __device__ __forceinline__ void part() {
#pragma unroll
        for (int i = 0; i < 4; ++i) low[i] &= 0x0f0f0f0fu, high[i] &= 0x0f0f0f0fu;
    }
    // `codes`: of this block; `scale` has the scale of the int8 and their sum.
    __device__ __forceinline__ void add(const uint8_t* codes, float2 scale, float& acc) const {
        const uint4 x0 = load16(codes), x1 = load16(codes + 16);
        int dot = __float_as_int(kRound);
        dot = dot_unsigned(low[0], x0.x, dot), dot = dot_unsigned(high[0], x0.y, dot);
        dot = dot_unsigned(low[1], x0.z, dot), dot = dot_unsigned(high[1], x0.w, dot);
        dot = dot_unsigned(low[2], x1.x, dot), dot = dot_unsigned(high[2], x1.y, dot);
        dot = dot_unsigned(low[3], x1.z, dot), dot = dot_unsigned(high[3], x1.w, dot);
        acc = __fmaf_rn(__fmul_rn(d, scale.x), small_float(dot), acc);
        acc = __fmaf_rn(__fmul_rn(m, scale.x), scale.y, acc);
    }
};

// v[j] takes v[j + HALF] of N values, as `fold` of more that are +0: those change no square.
template <int HALF, int N>
__device__ __forceinline__ void fold_first(float* v) {
#pragma unroll
    for (int j = 0; j < HALF; ++j) {
        if (j + HALF < N) v[j] = __fadd_rn(v[j], v[j + HALF]);
    }
    if constexpr (HALF > 1) fold_first<HALF / 2, (N < HALF ? N : HALF)>(v);
}

// The sum over a warp, by halvings of 16 to 1 lanes. Two of them at a time: what a partner would have added is asked for beside it.
__device__ __forceinline__ float sum_lanes(float v) {
    auto two = [&](int half) {
        const float a = __shfl_xor_sync(~0u, v, half), b = __shfl_xor_sync(~0u, v, half / 2);
        const float c = __shfl_xor_sync(~0u, v, half + half / 2);
        v = __fadd_rn(__fadd_rn(v, a), __fadd_rn(b, c));
    };
    two(16), two(4);
    return __fadd_rn(v, __shfl_xor_sync(~0u, v, 1));
}

// Whether a / D is what `over` makes of it: nothing on the way over- or underflows.
__device__ __forceinline__ bool tame(float a) { return a >= 0x1p-60f && a <= 0x1p60f; }
// a / D, rounded, of a tame `a`: with the rounded reciprocal one step of correction is enough (quantise.cuh). layers.rs has a test
// of all mantissas.
template <int D>
__device__ __forceinline__ float over(float a) {
    constexpr float reciprocal = 1.0f / D;
    const float q = __fmul_rn(a, reciprocal);
    return __fmaf_rn(__fmaf_rn(-q, (float)D, a), reciprocal, q);
}

// How the values of a block become int8, as `quantise` has it.
struct Scale {
    float of, reciprocal, d;
    // `amax`: of the block, a NaN before all. Values far from 1 are brought nearer; those of an unsound block are left as 0.
    template <int N>
    __device__ __forceinline__ Scale(float amax, float (&v)[N]) : of(amax), d(over<127>(amax)) {
        if (!tame(amax)) {
            const bool sound = amax > 0.0f && amax < ARC_INF;
            const float factor = amax < 1.0f ? 0x1p64f : 0x1p-64f;
            of = sound ? __fmul_rn(amax, factor) : 1.0f, d = __fdiv_rn(amax, 127.0f);
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = sound ? __fmul_rn(v[i], factor) : 0.0f;
        }
        reciprocal = __frcp_rn(of);
    }
    // kRound + the code of a value, as bits.
    __device__ __forceinline__ int code(float v) const {
        const float q = __fmul_rn(v, reciprocal), quotient = __fmaf_rn(__fmaf_rn(-q, of, v), reciprocal, q);
        return __float_as_int(__fadd_rn(__fmul_rn(quotient, 127.0f), kRound));
    }
};

__device__ __forceinline__ uint32_t low_bytes(int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// e^x of an x that is not above 0, or NaN: the bits of `exp`.
__device__ __forceinline__ float exp_down(float x) {
    const float c = x < -104.0f ? -104.0f : x;
    const float t = __fmaf_rn(c, kLog2E, kRound);
    const float p = exp_reduced(c, __fsub_rn(t, kRound));
    const int i = (int)(__float_as_uint(t) - __float_as_uint(kRound)), half = i >> 1;
    const float e = __fmul_rn(__fmul_rn(p, pow2(half)), pow2(i - half));
    return x != x ? ARC_NAN : e;
}

// A float as an integer of the same order, which it is made of again. A NaN that arithmetic left is above all.
__device__ __forceinline__ int ordered(int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
__device__ __forceinline__ float max_of_lanes(float v) {
    return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(v)))));
}

}  // namespace arc
