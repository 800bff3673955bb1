// From tiles (layout.cuh) to codes and scales: format/unpack.rs for one lane's slice.
#pragma once

#include <cuda_fp16.h>

#include "layout.cuh"

namespace arc {

// The code of zero that is left to subtract; other formats come as signed bytes.
__device__ constexpr int code_offset(uint32_t f) { return f == Q4_0 ? 8 : f == Q5_0 ? 16 : f == Q3_K ? 4 : f == Q6_K ? 32 : 0; }
__device__ constexpr bool has_min(uint32_t f) { return f == Q4_1 || f == Q5_1 || f == Q2_K || f == Q4_K || f == Q5_K; }
__device__ constexpr bool per_half(uint32_t f) { return f == Q2_K || f == Q3_K || f == Q6_K; }

// acc + the two int16 of `sums` times the two lowest bytes.
__device__ __forceinline__ int dp2a(uint32_t sums, uint32_t bytes, int acc) {
    int out;
    asm("dp2a.lo.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(sums), "r"(bytes), "r"(acc));
    return out;
}

__device__ __forceinline__ uint4 load16(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }
__device__ __forceinline__ uint32_t load4(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }
__device__ __forceinline__ float load_half(const uint8_t* p) { return __half2float(*reinterpret_cast<const __half*>(p)); }
__device__ __forceinline__ float low_half(uint32_t w) { return __half2float(__ushort_as_half((unsigned short)w)); }
__device__ __forceinline__ float high_half(uint32_t w) { return __half2float(__ushort_as_half((unsigned short)(w >> 16))); }
__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Half of an E8M0 scale, as format/half.rs.
__device__ __forceinline__ float e8m0_half(uint32_t byte) {
    return __uint_as_float(byte < 2 ? 0x00200000u << byte : (byte - 1) << 23);
}
__device__ __forceinline__ float e8m0(uint32_t byte) {
    return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23);
}
// Two E4M3 codes. Exact.
__device__ __forceinline__ float2 e4m3x2(uint32_t codes) {
    uint32_t h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((unsigned short)codes));
    return __half22float2(*reinterpret_cast<__half2*>(&h));
}

__device__ __forceinline__ float2 halves(uint32_t f, uint32_t w) {
    if (f == F16) return __half22float2(*reinterpret_cast<__half2*>(&w));
    return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
}

// HALVES: the order of q6_k.
template <bool HALVES>
__device__ __forceinline__ void nibbles(const uint4& v, uint32_t (&code)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        code[HALVES ? i : 2 * i] = word(v, i) & 0x0f0f0f0fu;
        code[HALVES ? 4 + i : 2 * i + 1] = (word(v, i) >> 4) & 0x0f0f0f0fu;
    }
}

// code[j] |= bit j of every byte of `bits`, moved to bit AT.
template <int AT>
__device__ __forceinline__ void add_bits(uint32_t bits, uint32_t (&code)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const uint32_t moved = j <= AT ? bits << (AT - j) : bits >> (j - AT);
        code[j] |= moved & (0x01010101u << AT);
    }
}

// Eight FP4 codes, doubled: two words of signed bytes.
__device__ __forceinline__ uint2 fp4(uint32_t v) {
    const uint32_t at = v & 0x77777777u;
    const uint32_t sign = 0x32103210u | ((v & 0x88888888u) >> 1);
    const uint32_t p0 = __byte_perm(0x03020100u, 0x0c080604u, at), n0 = __byte_perm(0xfdfeff00u, 0xf4f8fafcu, at);
    const uint32_t p1 = __byte_perm(0x03020100u, 0x0c080604u, at >> 16);
    const uint32_t n1 = __byte_perm(0xfdfeff00u, 0xf4f8fafcu, at >> 16);
    return make_uint2(__byte_perm(p0, n0, sign), __byte_perm(p1, n1, sign >> 16));
}

// Bytes that the nibbles of a selector name, of eight; their top bits are known to be 0, which __byte_perm sees to.
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
    return r;
}

// The signs of a block of IQ2_XXS: bit g of nibble i is that of value 8g + i.
__device__ __forceinline__ uint32_t iq2_signs(uint32_t changes) { return (changes & 0x0fffffffu) ^ (changes << 4); }

// Eight values of IQ2_XXS, group g of a block: two words of signed bytes. `patterns`: in shared memory, an entry every STRIDE
// bytes. `low`: kMagnitudes, for those who want it in a register.
constexpr uint32_t kMagnitudes = 0x002b1908u;
template <uint32_t STRIDE>
__device__ __forceinline__ uint2 iq2(uint32_t index, uint32_t signs, int g, uint32_t patterns, uint32_t low) {
    // The unit of dot products has nothing to do yet: it takes the index out of its word, and an entry's upper half.
    const uint32_t entry = __dp4a(index, STRIDE << (8 * g), patterns);
    // At bit 2 of its nibble a sign turns the selector to the negatives.
    const uint32_t sign = (g < 2 ? signs << (2 - g) : signs >> (g - 2)) & 0x44444444u;
    const uint32_t at = *reinterpret_cast<const uint32_t*>(__cvta_shared_to_generic(entry)) | sign;
    return make_uint2(permute(low, 0x00d5e7f8u, at), permute(low, 0x00d5e7f8u, __dp2a_lo(at, 0x0100u, 0u)));
}

// The scale of a block of IQ2_XXS, of d / 8 of the row and the block's signs: d8 (2 s + 1), s their top four bits. An eighth
// commutes with every rounding here.
__device__ __forceinline__ float iq2_scale(float d8, uint32_t signs) {
    // s is 2^23 less than a float; 2 s + 1 is exact.
    const float biased = __uint_as_float(__funnelshift_l(signs, 0x4b000000u >> 4, 4));
    return __fmul_rn(d8, __fmaf_rn(biased, 2.0f, -16777215.0f));
}

// Scale and minimum of block s from the head of Q4_K and Q5_K.
__device__ __forceinline__ void k_scale_min(const uint4& head, int s, float& d, float& m) {
    const uint32_t sc = ((head.y >> (4 * s)) & 15u) | (((head.w >> (2 * s)) & 3u) << 4);
    const uint32_t mn = ((head.z >> (4 * s)) & 15u) | (((head.w >> (16 + 2 * s)) & 3u) << 4);
    d = __fmul_rn(low_half(head.x), (float)sc);
    m = -__fmul_rn(high_half(head.x), (float)mn);
}

// Calls `sink` with every block of 32 values of a lane's slice, ascending: `block(b, code, d, m)` or, in PerHalf formats,
// `halves(b, code, d, sc0, sc1, m, mins)` with the two integer minimums in a byte each. `code`: eight words, less
// `code_offset(F)` the integers that are scaled. FULL: the slice has eight blocks, else `blocks`.
// UNROLL: how many of them at once, in formats of blocks of 32, so that loads run ahead of the sums.
template <uint32_t F, bool FULL, int UNROLL, typename Sink>
__device__ __forceinline__ void each_block(const uint8_t* tile, int lane, int blocks, const uint32_t* patterns, Sink& sink) {
    const uint8_t* wide = tile + 16 * lane;
    uint32_t code[8];
    if constexpr (F == Q8_0 || F == Q4_0 || F == Q4_1 || F == Q5_0 || F == Q5_1 || F == MXFP4) {
        constexpr int kUnit = kLanes * unit_bytes(F);
#pragma unroll(FULL ? UNROLL : 1)
        for (int b = 0; b < (FULL ? 8 : blocks); ++b) {
            const uint8_t* unit = wide + b * kUnit;
            const uint8_t* rest = tile + b * kUnit + 512;
            if constexpr (F == Q8_0) {
                const uint4 c0 = load16(unit), c1 = load16(unit + 512);
#pragma unroll
                for (int i = 0; i < 4; ++i) code[i] = word(c0, i), code[4 + i] = word(c1, i);
                sink.block(b, code, load_half(rest + 512 + 2 * lane), 0.0f);
            } else if constexpr (F == MXFP4) {
                const uint4 v = load16(unit);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint2 two = fp4(word(v, i));
                    code[2 * i] = two.x, code[2 * i + 1] = two.y;
                }
                sink.block(b, code, e8m0_half(rest[lane]), 0.0f);
            } else {
                nibbles<false>(load16(unit), code);
                if constexpr (F == Q5_0 || F == Q5_1) {
                    add_bits<4>(load4(rest + 4 * lane), code);
                    rest += 128;
                }
                if constexpr (F == Q4_0 || F == Q5_0) {
                    sink.block(b, code, load_half(rest + 2 * lane), 0.0f);
                } else {
                    const uint32_t dm = load4(rest + 4 * lane);
                    sink.block(b, code, low_half(dm), high_half(dm));
                }
            }
        }
    } else if constexpr (F == Q4_K || F == Q5_K) {
        const uint4 head = load16(wide);
        uint4 high[2];
        if constexpr (F == Q5_K) high[0] = load16(wide + 9 * 512), high[1] = load16(wide + 10 * 512);
#pragma unroll
        for (int b = 0; b < 8; ++b) {
            nibbles<false>(load16(wide + (1 + b) * 512), code);
            if constexpr (F == Q5_K) add_bits<4>(word(high[b / 4], b % 4), code);
            float d, m;
            k_scale_min(head, b, d, m);
            sink.block(b, code, d, m);
        }
    } else if constexpr (F == Q2_K) {
        const uint4 scales = load16(wide);
        const uint32_t dm = load4(tile + 5 * 512 + 4 * lane);
        const float d = low_half(dm), m = -high_half(dm);
#pragma unroll
        for (int b = 0; b < 8; b += 2) {
            const uint4 v = load16(wide + (1 + b / 2) * 512);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const uint32_t both = word(scales, b / 2) >> (16 * e);
#pragma unroll
                for (int j = 0; j < 8; ++j) code[j] = (word(v, 2 * e + j / 4) >> (2 * (j % 4))) & 0x03030303u;
                sink.halves(b + e, code, d, (int)(both & 15u), (int)((both >> 8) & 15u), m, (both >> 4) & 0x0f0fu);
            }
        }
    } else if constexpr (F == Q3_K) {
        uint4 high[2] = {load16(wide + 4 * 512), load16(wide + 5 * 512)};
        const uint8_t* packed = tile + 6 * 512 + 4 * lane;
        const uint32_t low[2] = {load4(packed), load4(packed + 128)}, top = load4(packed + 256);
        const float d = load_half(tile + 6 * 512 + 384 + 2 * lane);
#pragma unroll
        for (int b = 0; b < 8; b += 2) {
            const uint4 v = load16(wide + (b / 2) * 512);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int s = b + e;
#pragma unroll
                for (int j = 0; j < 8; ++j) code[j] = (word(v, 2 * e + j / 4) >> (2 * (j % 4))) & 0x03030303u;
                add_bits<2>(word(high[s / 4], s % 4), code);
                int sc[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int i = 2 * s + h;
                    sc[h] = (int)(((low[i / 8] >> (4 * (i % 8))) & 15u) | (((top >> (2 * i)) & 3u) << 4)) - 32;
                }
                sink.halves(s, code, d, sc[0], sc[1], 0.0f, 0u);
            }
        }
    } else if constexpr (F == Q6_K) {
        const uint4 scales = load16(wide + 12 * 512);
        const float d = load_half(tile + 13 * 512 + 2 * lane);
#pragma unroll
        for (int b = 0; b < 8; b += 2) {
            const uint4 v = load16(wide + (8 + b / 2) * 512);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                nibbles<true>(load16(wide + (b + e) * 512), code);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const uint32_t w = word(v, 2 * e + j / 4);
                    const int t = 2 * (j % 4);
                    code[j] |= (t <= 4 ? w << (4 - t) : w >> (t - 4)) & 0x30303030u;
                }
                const uint32_t both = word(scales, b / 2) >> (16 * e);
                sink.halves(b + e, code, d, (int)(int8_t)both, (int)(int8_t)(both >> 8), 0.0f, 0u);
            }
        }
    } else if constexpr (F == IQ2_XXS) {
        const float d8 = __fmul_rn(load_half(tile + 4 * 512 + 2 * lane), 0.125f);
        const uint32_t table = (uint32_t)__cvta_generic_to_shared(patterns);
#pragma unroll
        for (int b = 0; b < 8; b += 2) {
            const uint4 v = load16(wide + (b / 2) * 512);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const uint32_t index = word(v, 2 * e), changes = word(v, 2 * e + 1), signs = iq2_signs(changes);
#pragma unroll
                for (int g = 0; g < 4; ++g) {
                    const uint2 two = iq2<4>(index, signs, g, table, kMagnitudes);
                    code[2 * g] = two.x, code[2 * g + 1] = two.y;
                }
                sink.block(b + e, code, iq2_scale(d8, changes), 0.0f);
            }
        }
    }
}

}  // namespace arc
