// Elementary functions in one fixed operation order: the CUDA twin of math.rs, line for line, bit for bit.
//
// Compile without fast-math, with -fmad=false and -ftz=false: the intrinsics below never contract, but denormals must
// survive. Every NaN result is ARC_NAN. Sources and error bounds are in math.rs.
#pragma once

namespace arc {

#define ARC_NAN __int_as_float(0x7fc00000)
#define ARC_INF __int_as_float(0x7f800000)

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2Hi = 0.693359375f;
constexpr float kLn2Lo = -2.1219444e-4f;

// 2^s for -126 <= s <= 127.
__device__ __forceinline__ float pow2(int s) { return __int_as_float((int)((unsigned)(s + 127) << 23)); }

// e^(c - n ln 2) where the difference is at most about ln(2)/2.
__device__ __forceinline__ float exp_reduced(float c, float n) {
    float r = __fmaf_rn(n, -kLn2Hi, c);
    r = __fmaf_rn(n, -kLn2Lo, r);
    float q = __int_as_float(0x3ab511a9);
    q = __fmaf_rn(q, r, __int_as_float(0x3c091d36));
    q = __fmaf_rn(q, r, __int_as_float(0x3d2aac7a));
    q = __fmaf_rn(q, r, __int_as_float(0x3e2aaa48));
    q = __fmaf_rn(q, r, __int_as_float(0x3efffffe));
    return __fadd_rn(1.0f, __fmaf_rn(__fmul_rn(r, r), q, r));
}

// e^x over the whole range.
__device__ __forceinline__ float exp(float x) {
    float c = x > 89.0f ? 89.0f : x;
    c = c < -104.0f ? -104.0f : c;
    const float t = __fmaf_rn(c, kLog2E, kRound);
    const float n = __fsub_rn(t, kRound);
    const float p = exp_reduced(c, n);
    const int i = (int)(__float_as_uint(t) - __float_as_uint(kRound));
    const int half = i >> 1;
    const float e = __fmul_rn(__fmul_rn(p, pow2(half)), pow2(i - half));
    return x != x ? ARC_NAN : e;
}

// exp for -87 <= x <= 0, the same bits; below it stays at exp(-87). No NaN.
__device__ __forceinline__ float exp_of_nonpositive(float x) {
    const float c = x < -87.0f ? -87.0f : x;
    const float t = __fmaf_rn(c, kLog2E, kRound);
    const float p = exp_reduced(c, __fsub_rn(t, kRound));
    return __fmul_rn(p, __uint_as_float((__float_as_uint(t) << 23) + 0x3f800000u));
}

// Natural logarithm.
__device__ __forceinline__ float ln(float x) {
    const bool tiny = x < 1.17549435e-38f;
    const float scaled = tiny ? __fmul_rn(x, 8388608.0f) : x;
    const int bits = __float_as_int(scaled);
    const int k = (int)((unsigned)bits - 0x3f3504f3u) >> 23;
    const float f = __fsub_rn(__uint_as_float((unsigned)bits - ((unsigned)k << 23)), 1.0f);
    const float e = __fsub_rn(__int2float_rn(k), tiny ? 23.0f : 0.0f);
    float p = __uint_as_float(0xbd9c5a2au);
    p = __fmaf_rn(p, f, __uint_as_float(0x3e02b7ccu));
    p = __fmaf_rn(p, f, __uint_as_float(0xbe06c767u));
    p = __fmaf_rn(p, f, __uint_as_float(0x3e116c09u));
    p = __fmaf_rn(p, f, __uint_as_float(0xbe2a3893u));
    p = __fmaf_rn(p, f, __uint_as_float(0x3e4cd00au));
    p = __fmaf_rn(p, f, __uint_as_float(0xbe800115u));
    p = __fmaf_rn(p, f, __uint_as_float(0x3eaaaaaau));
    const float z = __fmul_rn(f, f);
    float y = __fmul_rn(__fmul_rn(f, z), p);
    y = __fmaf_rn(e, kLn2Lo, y);
    y = __fmaf_rn(z, -0.5f, y);
    float r = __fmaf_rn(e, kLn2Hi, __fadd_rn(f, y));
    r = x == ARC_INF ? x : r;
    r = x > 0.0f ? r : ARC_NAN;
    return x == 0.0f ? -ARC_INF : r;
}

// ln(1 + u) for u >= 0.
__device__ __forceinline__ float ln_1p(float u) {
    const float w = __fadd_rn(1.0f, u);
    float r = __fadd_rn(ln(w), __fdiv_rn(__fsub_rn(u, __fsub_rn(w, 1.0f)), w));
    r = u == ARC_INF ? u : r;
    r = w == 1.0f ? u : r;
    return r != r ? ARC_NAN : r;
}

// ln(1 + e^x).
__device__ __forceinline__ float softplus(float x) {
    const float r = __fadd_rn(x > 0.0f ? x : 0.0f, ln_1p(exp(-fabsf(x))));
    return x != x ? ARC_NAN : r;
}

// 1 / (1 + e^-x).
__device__ __forceinline__ float sigmoid(float x) {
    const float z = exp(-fabsf(x));
    const float top = x < 0.0f ? z : 1.0f;
    const float r = __fdiv_rn(top, __fadd_rn(1.0f, z));
    return x != x ? ARC_NAN : r;
}

// x * sigmoid(x).
__device__ __forceinline__ float silu(float x) {
    const float r = __fmul_rn(x, sigmoid(x));
    return r != r ? ARC_NAN : r;
}

// The tanh form of GELU, as x * sigmoid(2u).
__device__ __forceinline__ float gelu_tanh(float x) {
    const float cube = __fmul_rn(__fmul_rn(0.044715f, x), x);
    const float u = __fmul_rn(__fmaf_rn(x, cube, x), 1.595769f);
    const float r = __fmul_rn(x, sigmoid(u));
    return r != r ? ARC_NAN : r;
}

// Hyperbolic tangent.
__device__ __forceinline__ float tanh(float x) {
    const float a = fabsf(x);
    const float z = __fmul_rn(x, x);
    float p = __uint_as_float(0xbbbaf0e6u);
    p = __fmaf_rn(p, z, __uint_as_float(0x3ca9134eu));
    p = __fmaf_rn(p, z, __uint_as_float(0xbd5c1e2du));
    p = __fmaf_rn(p, z, __uint_as_float(0x3e088393u));
    p = __fmaf_rn(p, z, __uint_as_float(0xbeaaaa99u));
    const float near = __fmaf_rn(a, __fmul_rn(z, p), a);
    const float far = __fsub_rn(1.0f, __fdiv_rn(2.0f, __fadd_rn(exp(__fadd_rn(a, a)), 1.0f)));
    const float r = copysignf(a < 0.625f ? near : far, x);
    return x != x ? ARC_NAN : r;
}

// 1 / sqrt(x), both operations IEEE-rounded.
__device__ __forceinline__ float rsqrt(float x) {
    const float r = __fdiv_rn(1.0f, __fsqrt_rn(x));
    return r != r ? ARC_NAN : r;
}

// Length of one chunk of a sum.
constexpr int kSumChunk = 1024;

// v[j] takes v[j + HALF], then v[j + HALF / 2], ... then v[j + 1]. A template, since a loop over halves is not unrolled
// for every architecture, and v then leaves the registers.
template <int HALF>
__device__ __forceinline__ void fold(float* v) {
#pragma unroll
    for (int j = 0; j < HALF; ++j) v[j] = __fadd_rn(v[j], v[j + HALF]);
    if constexpr (HALF > 1) fold<HALF / 2>(v);
}

// The sum of one chunk by one warp, in the order of math.rs; every lane gets it. Lane l passes v[j] = element
// l + 32 j of the chunk, missing elements being +0.0. The halvings by 512 to 32 stay in registers, those by 16 to 1 are
// shuffles: both partners of a pair compute the same sum, because addition commutes.
__device__ __forceinline__ float sum_chunk_warp(float (&v)[kSumChunk / 32]) {
    fold<kSumChunk / 64>(v);
    float s = v[0];
#pragma unroll
    for (int half = 16; half > 0; half >>= 1) s = __fadd_rn(s, __shfl_xor_sync(0xffffffffu, s, half));
    return s;
}

// The sum of n values by one warp: chunks in ascending order, added to +0.0. value(i) is called for 0 <= i < n.
template <typename Value>
__device__ __forceinline__ float sum_warp(int n, Value value) {
    const int lane = threadIdx.x & 31;
    float total = 0.0f;
    for (int start = 0; start < n; start += kSumChunk) {
        float v[kSumChunk / 32];
#pragma unroll
        for (int j = 0; j < kSumChunk / 32; ++j) {
            const int i = start + lane + 32 * j;
            v[j] = i < n ? value(i) : 0.0f;
        }
        total = __fadd_rn(total, sum_chunk_warp(v));
    }
    return total;
}

}  // namespace arc
