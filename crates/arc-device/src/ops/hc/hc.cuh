// Hyper-connections: the arithmetic of hc.rs, line for line.
#pragma once

#include "../../sum.cuh"

namespace arc::hc {

constexpr int kStreams = 4;
constexpr int kMixes = 24;
constexpr int kComb = 8;

// What a site does with the streams first.
enum Incoming : unsigned { kEmbedding = 0, kOutput = 1, kNothing = 2 };

// What a stream becomes of: `post` of it, and `comb` to it.
struct StreamMixing {
    float post;
    float comb[4];
};

// Four values as the second cache has them, asked for here.
__device__ __forceinline__ float4 load_far(const float4* at) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(at));
    return v;
}

// `post` and `comb` of a token: what expand() reads.
struct Mixing {
    float post[4];
    float comb[16];

    __device__ __forceinline__ StreamMixing of(int k) const {
        auto pick = [k](const float* v) { return k < 2 ? (k == 0 ? v[0] : v[1]) : (k == 2 ? v[2] : v[3]); };
        return StreamMixing{pick(post), {pick(comb), pick(comb + 4), pick(comb + 8), pick(comb + 12)}};
    }

    // `row`: [kMixes], on a 16-byte border. FAR: as the second cache has it.
    template <bool FAR = false>
    __device__ __forceinline__ void load(const float* row) {
        const auto at = [row](int i) {
            const float4* from = reinterpret_cast<const float4*>(row) + i;
            return FAR ? load_far(from) : *from;
        };
        const float4 p = at(1);
        post[0] = p.x, post[1] = p.y, post[2] = p.z, post[3] = p.w;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 c = at(2 + j);
            comb[4 * j] = c.x, comb[4 * j + 1] = c.y, comb[4 * j + 2] = c.z, comb[4 * j + 3] = c.w;
        }
    }
};

// X'[k] of one column.
__device__ __forceinline__ float expand(const StreamMixing& m, float y, float x0, float x1, float x2, float x3) {
    float s = __fadd_rn(__fmul_rn(m.comb[0], x0), __fmul_rn(m.comb[1], x1));
    s = __fadd_rn(s, __fmul_rn(m.comb[2], x2));
    s = __fadd_rn(s, __fmul_rn(m.comb[3], x3));
    return __fadd_rn(__fmul_rn(m.post, y), s);
}

// X'[k] of four columns.
__device__ __forceinline__ float4 expand4(const float4 (&x)[kStreams], const StreamMixing& m, float4 y) {
    return make_float4(expand(m, y.x, x[0].x, x[1].x, x[2].x, x[3].x), expand(m, y.y, x[0].y, x[1].y, x[2].y, x[3].y),
                       expand(m, y.z, x[0].z, x[1].z, x[2].z, x[3].z), expand(m, y.w, x[0].w, x[1].w, x[2].w, x[3].w));
}

// The streams of four columns after a block: x becomes X'.
__device__ __forceinline__ void expand4(float4 (&x)[kStreams], const Mixing& m, float4 y) {
    float4 to[kStreams];
#pragma unroll
    for (int k = 0; k < kStreams; ++k) to[k] = expand4(x, m.of(k), y);
#pragma unroll
    for (int k = 0; k < kStreams; ++k) x[k] = to[k];
}

__device__ __forceinline__ float collapse(const float (&pre)[kStreams], float x0, float x1, float x2, float x3) {
    float s = __fadd_rn(__fmul_rn(pre[0], x0), __fmul_rn(pre[1], x1));
    s = __fadd_rn(s, __fmul_rn(pre[2], x2));
    return __fadd_rn(s, __fmul_rn(pre[3], x3));
}

__device__ __forceinline__ float4 collapse4(const float (&pre)[kStreams], const float4 (&x)[kStreams]) {
    return make_float4(collapse(pre, x[0].x, x[1].x, x[2].x, x[3].x), collapse(pre, x[0].y, x[1].y, x[2].y, x[3].y),
                       collapse(pre, x[0].z, x[1].z, x[2].z, x[3].z), collapse(pre, x[0].w, x[1].w, x[2].w, x[3].w));
}

// rsqrt(total / n + eps).
__device__ __forceinline__ float norm_factor(float total, float n, float eps) {
    return rsqrt(__fadd_rn(__fdiv_rn(total, n), eps));
}

// The same where n is a power of two: the quotient is a product.
template <unsigned N>
__device__ __forceinline__ float norm_factor(float total, float eps) {
    static_assert((N & (N - 1)) == 0);
    return rsqrt(__fadd_rn(__fmul_rn(total, 1.0f / N), eps));
}

// Every element divided by the sum of its line plus eps; the line of lane l are the lanes first(l) + step i.
template <int STEP>
__device__ __forceinline__ float divide_line(float c, int first, float eps) {
    const float c0 = __shfl_sync(kFullWarp, c, first);
    const float c1 = __shfl_sync(kFullWarp, c, first + STEP);
    const float c2 = __shfl_sync(kFullWarp, c, first + 2 * STEP);
    const float c3 = __shfl_sync(kFullWarp, c, first + 3 * STEP);
    const float total = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(c0, c1), c2), c3), eps);
    return __fdiv_rn(c, total);
}

// `comb` from its scaled raw values, by one warp: lanes l and l + 16 hold element l of the row-major matrix. Registers
// and shuffles only. Passes that change no bit are the last ones, since those that follow would not either; this is
// looked for now and then, as looking takes a tenth of a pair of passes. NOTE: a quotient by Newton steps from 2 - total,
// with IEEE division where totals are far from 1, was slower: the test that chooses costs more than the division saves.
__device__ __forceinline__ float sinkhorn(float raw, unsigned iterations, float eps) {
    const int lane = threadIdx.x & 15, row = lane & 12, column = lane & 3;
    float top = fmaxf(raw, __shfl_xor_sync(kFullWarp, raw, 1));
    top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
    const float e = exp(__fsub_rn(raw, top));
    const float e0 = __shfl_sync(kFullWarp, e, row), e1 = __shfl_sync(kFullWarp, e, row + 1);
    const float e2 = __shfl_sync(kFullWarp, e, row + 2), e3 = __shfl_sync(kFullWarp, e, row + 3);
    const float total = __fadd_rn(__fadd_rn(__fadd_rn(e0, e1), e2), e3);
    float c = __fadd_rn(__fdiv_rn(e, total), eps);
    c = divide_line<4>(c, column, eps);
#pragma unroll 1
    for (unsigned i = 1; i < iterations; ++i) {
        const float before = c;
        c = divide_line<1>(c, row, eps);
        c = divide_line<4>(c, column, eps);
        if (i % 4 == 0 && __all_sync(kFullWarp, __float_as_uint(c) == __float_as_uint(before))) break;
    }
    return c;
}

// Writes a token's mixing values from the scaled ones that the lanes hold. One warp.
__device__ __forceinline__ void write_mixing(float* mixing, float value, unsigned iterations, float eps) {
    const int lane = threadIdx.x & 31;
    const float comb = sinkhorn(__shfl_sync(kFullWarp, value, kComb + (lane & 15)), iterations, eps);
    if (lane < 16) mixing[kComb + lane] = comb;
    const float s = sigmoid(value);
    if (lane < kStreams) mixing[lane] = __fadd_rn(s, eps);
    else if (lane < kComb) mixing[lane] = __fmul_rn(2.0f, s);
}

// The same where the site left scaled values in their place.
__device__ __forceinline__ void settle(float* mixing, unsigned iterations, float eps) {
    const int lane = threadIdx.x & 31;
    const float value = lane < kMixes ? __ldcg(mixing + lane) : 0.0f;
    write_mixing(mixing, value, iterations, eps);
}

// A raw mixing value, scaled: m * scale[min(i / 4, 2)] + base[i].
__device__ __forceinline__ float scaled(float m, int i, const float* base, const float* scale) {
    return __fadd_rn(__fmul_rn(m, scale[i / kStreams < 2 ? i / kStreams : 2]), base[i]);
}

}  // namespace arc::hc
