// What DeepSeek-V4 stores of a row: the CUDA twin of quant.rs, format/fp8.rs and format/fp4.rs. Exact.
//
// A warp holds a row: lane l has x[j] = value l + 32 j.
#pragma once

#include <cstdint>

#include "math.cuh"

namespace arc {

// The scale byte of a block that holds a NaN or an infinity.
constexpr uint32_t kPoison = 255;
// Values of an index row, and its bytes.
constexpr uint32_t kIndexDim = 128, kIndexRowBytes = 68;

// How rows are kept; ops/latent.rs says what they mean.
enum RowFormat : uint32_t { kRowF32 = 0, kRowRoundedFp8 = 1, kRowFp8 = 2, kRowRoundedFp4 = 3, kRowFp4 = 4 };

// `bits >> shift` rounded to nearest, ties to even.
__device__ __forceinline__ uint32_t round_shift(uint32_t bits, uint32_t shift) {
    return (bits + ((1u << (shift - 1)) - 1) + (bits >> shift & 1)) >> shift;
}

// f32 to E4M3 by the processor's own conversion: the CPU's code for every f32 (conformance case quant/e4m3).
__device__ __forceinline__ uint32_t e4m3(float x) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return pair & 0xff;
}

__device__ __forceinline__ float e4m3_to_f32(uint32_t code) {
    const uint32_t magnitude = code & 0x7f, sign = (code & 0x80) << 24;
    const float value = __fmul_rn(__uint_as_float(magnitude << 20), __uint_as_float((120u + 127) << 23));
    return magnitude == 0x7f ? ARC_NAN : __uint_as_float(__float_as_uint(value) | sign);
}

// f32 to E2M1, in the low four bits.
__device__ __forceinline__ uint32_t e2m1(float x) {
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffff;
    uint32_t code;
    if (magnitude < 127u << 23) {
        code = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 4194304.0f)) & 7;
    } else {
        code = min(round_shift(magnitude - (126u << 23), 22), 7u);
    }
    return magnitude > 0x7f800000 ? 7 : (bits >> 28 & 8) | code;
}

__device__ __forceinline__ float e2m1_to_f32(uint32_t code) {
    const float value = __fmul_rn(__uint_as_float((code & 7) << 22), __uint_as_float((126u + 127) << 23));
    return __uint_as_float(__float_as_uint(value) | (code & 8) << 28);
}

__device__ __forceinline__ float e8m0_to_f32(uint32_t byte) {
    return byte == 0 ? __uint_as_float(0x00400000) : byte == 255 ? ARC_NAN : __uint_as_float(byte << 23);
}

__device__ __forceinline__ uint32_t bf16_bits(float x) {
    const uint32_t bits = __float_as_uint(x);
    return (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : round_shift(bits, 16) & 0xffff;
}

__device__ __forceinline__ float bf16_to_f32(uint32_t bits) { return __uint_as_float(bits << 16); }

// The scale of a block whose largest magnitude has the bits `amax`.
__device__ __forceinline__ uint32_t scale_byte(uint32_t amax, float floor, float reciprocal) {
    if (amax >= 0x7f800000) return kPoison;
    const uint32_t bits = __float_as_uint(__fmul_rn(fmaxf(__uint_as_float(amax), floor), reciprocal));
    return (bits >> 23) + ((bits & 0x7fffff) != 0);
}

__device__ __forceinline__ uint32_t fp8_scale(uint32_t amax) { return scale_byte(amax, 1e-4f, 1.0f / 448.0f); }
__device__ __forceinline__ uint32_t fp4_scale(uint32_t amax) {
    return scale_byte(amax, __uint_as_float(0x01c00000), 1.0f / 6.0f);
}

// 1 / scale, exact; any number for a poisoned block.
__device__ __forceinline__ float inverse_scale(uint32_t scale) {
    return scale == kPoison ? 0.0f : __uint_as_float((254 - scale) << 23);
}

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffff; }

// The orthonormal Walsh-Hadamard transform of the warp's 128 values: inside blocks of 32, of which it has N, then across them.
template <int N>
__device__ __forceinline__ void hadamard_inside(float (&x)[N]) {
    const uint32_t lane = threadIdx.x & 31;
#pragma unroll
    for (uint32_t distance = 1; distance < 32; distance <<= 1) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float other = __shfl_xor_sync(0xffffffffu, x[j], distance);
            x[j] = lane & distance ? __fsub_rn(other, x[j]) : __fadd_rn(x[j], other);
        }
    }
}
__device__ __forceinline__ void hadamard(float (&x)[4]) {
    hadamard_inside(x);
#pragma unroll
    for (int step = 1; step < 4; step <<= 1) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if ((j & step) == 0) {
                const float a = x[j], b = x[j + step];
                x[j] = __fadd_rn(a, b), x[j + step] = __fsub_rn(a, b);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __fmul_rn(x[j], 0.088388346f);
}
// The lane's value of block j, of what blocks have behind their own steps.
__device__ __forceinline__ float hadamard_across(const float (&x)[4], uint32_t j) {
    const float a = j & 1 ? __fsub_rn(x[0], x[1]) : __fadd_rn(x[0], x[1]), b = j & 1 ? __fsub_rn(x[2], x[3]) : __fadd_rn(x[2], x[3]);
    return __fmul_rn(j & 2 ? __fsub_rn(a, b) : __fadd_rn(a, b), 0.088388346f);
}

// The code of a value of an index row, and the scale of its block.
struct IndexCode {
    uint32_t code, scale;
};

// What storing leaves of a value behind the transform, of a block that the warp has. `stores`: the format Fp4, rather than its
// simulation in f32.
__device__ __forceinline__ IndexCode index_code(float& x, bool stores) {
    if (stores) x = bf16_to_f32(bf16_bits(x));
    const uint32_t scale = fp4_scale(__reduce_max_sync(0xffffffffu, magnitude_bits(x)));
    const uint32_t code = e2m1(__fmul_rn(x, inverse_scale(scale)));
    x = __fmul_rn(e2m1_to_f32(code), e8m0_to_f32(scale));
    return {code, scale};
}

// What storing leaves of an index row; where `out` is not null it is stored too.
__device__ __forceinline__ void index_row(float (&x)[4], bool packed, uint8_t* out) {
    const uint32_t lane = threadIdx.x & 31;
    hadamard(x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const IndexCode of = index_code(x[j], packed);
        if (packed && out != nullptr) {
            // Byte i of a block holds value i in its low and value i + 16 in its high nibble.
            const uint32_t high = __shfl_down_sync(0xffffffffu, of.code, 16);
            if (lane < 16) out[16 * j + lane] = of.code | high << 4;
            if (lane == 0) out[kIndexDim / 2 + j] = of.scale;
        }
    }
}

// What storing leaves of a row of `nope` + 64 values, the first after the FP8 round trip; where `out` is not null the
// packed row is stored too. `packed`: the format Fp8, whose last values are rounded to BF16.
template <uint32_t J>
__device__ __forceinline__ void fp8_row(float (&x)[J], uint32_t nope, bool packed, uint8_t* out) {
    static_assert(J % 2 == 0);
    const uint32_t lane = threadIdx.x & 31;
    uint8_t* scales = out + nope + 128;
#pragma unroll
    for (uint32_t j = 0; j < J; j += 2) {
        if (32 * j < nope) {
            const uint32_t amax = max(magnitude_bits(x[j]), magnitude_bits(x[j + 1]));
            const uint32_t scale = fp8_scale(__reduce_max_sync(0xffffffffu, amax));
            const float factor = inverse_scale(scale), by = e8m0_to_f32(scale);
#pragma unroll
            for (uint32_t e = j; e < j + 2; ++e) {
                const uint32_t code = e4m3(__fmul_rn(x[e], factor));
                x[e] = __fmul_rn(e4m3_to_f32(code), by);
                if (packed && out != nullptr) out[lane + 32 * e] = code;
            }
            if (packed && out != nullptr && lane == 0) scales[j / 2] = scale;
        } else if (packed && 32 * j < nope + 64) {
#pragma unroll
            for (uint32_t e = j; e < j + 2; ++e) {
                const uint32_t half = bf16_bits(x[e]);
                x[e] = bf16_to_f32(half);
                if (out != nullptr) reinterpret_cast<uint16_t*>(out + nope)[lane + 32 * e - nope] = half;
            }
        }
    }
    if (packed && out != nullptr) {
        // Zeros up to a multiple of eight bytes.
        const uint32_t used = nope / 64;
        if (lane >= used && lane < ((used + 7) & ~7u)) scales[lane] = 0;
    }
}

}  // namespace arc
