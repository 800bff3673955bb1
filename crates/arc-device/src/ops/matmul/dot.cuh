// One lane's slice of weights by a few rows of activations: the inner loop of products with few rows. Exact: operations
// and their order are those of matmul.rs.
#pragma once

#include "decode.cuh"

namespace arc {

// A lane's slice of the activations of some rows, in shared memory: pointers of row 0, and elements between rows.
struct Inputs {
    const int8_t* q;
    const float* d;
    const uint32_t* sums;  // of values 0..16 and 16..32 of a block, as two int16
    const float* f;
    uint32_t q_row, d_row, f_row;
    const uint32_t* patterns;  // of IQ2_XXS: a nibble a value, the index of its magnitude
};

// acc[r] takes the block of 32 values whose codes are given as words. PerBlock formats.
template <int NR, uint32_t F>
__device__ __forceinline__ void add_block(const uint32_t (&code)[8], float d, float m, int b, const Inputs& x,
                                          float (&acc)[NR]) {
#pragma unroll
    for (int r = 0; r < NR; ++r) {
        const uint4* q = reinterpret_cast<const uint4*>(x.q + r * x.q_row + 32 * b);
        const uint4 q0 = q[0], q1 = q[1];
        int dot = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            dot = __dp4a((int)code[i], (int)word(q0, i), dot);
            dot = __dp4a((int)code[4 + i], (int)word(q1, i), dot);
        }
        const float dx = x.d[r * x.d_row + b];
        uint32_t sums = 0;
        if constexpr (reads_sums(F)) sums = x.sums[r * x.d_row + b];
        if constexpr (code_offset(F) != 0) dot = dp2a(sums, (uint32_t)(256 - code_offset(F)) * 0x0101u, dot);
        acc[r] = __fmaf_rn(__fmul_rn(d, dx), (float)dot, acc[r]);
        if constexpr (has_min(F)) acc[r] = __fmaf_rn(__fmul_rn(m, dx), (float)dp2a(sums, 0x0101u, 0), acc[r]);
    }
}

// The same for PerHalf formats. `mins`: the two integer minimums, a byte each.
template <int NR, uint32_t F>
__device__ __forceinline__ void add_halves(const uint32_t (&code)[8], float d, int sc0, int sc1, float m, uint32_t mins,
                                           int b, const Inputs& x, float (&acc)[NR]) {
#pragma unroll
    for (int r = 0; r < NR; ++r) {
        const uint4* q = reinterpret_cast<const uint4*>(x.q + r * x.q_row + 32 * b);
        const uint4 q0 = q[0], q1 = q[1];
        uint32_t sums = 0;
        if constexpr (reads_sums(F)) sums = x.sums[r * x.d_row + b];
        int low = 0, high = 0;
        if constexpr (code_offset(F) != 0) {
            low = dp2a(sums, (uint32_t)(256 - code_offset(F)), 0);
            high = dp2a(sums, (uint32_t)(256 - code_offset(F)) << 8, 0);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            low = __dp4a((int)code[i], (int)word(q0, i), low);
            high = __dp4a((int)code[4 + i], (int)word(q1, i), high);
        }
        const float dx = x.d[r * x.d_row + b];
        acc[r] = __fmaf_rn(__fmul_rn(d, dx), (float)(sc0 * low + sc1 * high), acc[r]);
        if constexpr (has_min(F)) acc[r] = __fmaf_rn(__fmul_rn(m, dx), (float)dp2a(sums, mins, 0), acc[r]);
    }
}

// Adds blocks to the sums of NR rows.
template <int NR, uint32_t F>
struct Add {
    const Inputs& x;
    float (&acc)[NR];
    __device__ __forceinline__ void block(int b, const uint32_t (&code)[8], float d, float m) {
        add_block<NR, F>(code, d, m, b, x, acc);
    }
    __device__ __forceinline__ void halves(int b, const uint32_t (&code)[8], float d, int sc0, int sc1, float m,
                                           uint32_t mins) {
        add_halves<NR, F>(code, d, sc0, sc1, m, mins, b, x, acc);
    }
};

// acc[r] takes N values at column k, one after the other.
template <int NR, int N>
__device__ __forceinline__ void add_floats(const float (&w)[N], int k, const Inputs& x, float (&acc)[NR]) {
#pragma unroll
    for (int r = 0; r < NR; ++r) {
        const float* f = x.f + r * x.f_row + k;
        if constexpr (N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const float4 v = *reinterpret_cast<const float4*>(f + i);
                acc[r] = __fmaf_rn(w[i], v.x, acc[r]);
                acc[r] = __fmaf_rn(w[i + 1], v.y, acc[r]);
                acc[r] = __fmaf_rn(w[i + 2], v.z, acc[r]);
                acc[r] = __fmaf_rn(w[i + 3], v.w, acc[r]);
            }
        } else {
            acc[r] = __fmaf_rn(w[0], f[0], acc[r]);
        }
    }
}

template <int NR, uint32_t F>
__device__ __forceinline__ void dot_floats(const uint8_t* tile, int lane, int cols, const Inputs& x, float (&acc)[NR]) {
    const uint8_t* wide = tile + 16 * lane;
    if constexpr (F == FP8) {
        for (int u = 0; u < cols / 128; ++u) {
            const uint8_t* unit = wide + u * (kLanes * 129);
            const float scale = e8m0(tile[u * (kLanes * 129) + 8 * 512 + lane]);
#pragma unroll 2
            for (int i = 0; i < 8; ++i) {
                const uint4 v = load16(unit + i * 512);
                float w[16];
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float2 two = e4m3x2(word(v, j / 2) >> (16 * (j % 2)));
                    w[2 * j] = __fmul_rn(two.x, scale), w[2 * j + 1] = __fmul_rn(two.y, scale);
                }
                add_floats<NR, 16>(w, 128 * u + 16 * i, x, acc);
            }
        }
    } else {
        constexpr int kLen = unit_len(F);
        const int units = cols / kLen;
#pragma unroll 4
        for (int u = 0; u < units; ++u) {
            const uint4 v = load16(wide + u * 512);
            float w[kLen];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if constexpr (F == F32) {
                    w[j] = __uint_as_float(word(v, j));
                } else {
                    const float2 two = halves(F, word(v, j));
                    w[2 * j] = two.x, w[2 * j + 1] = two.y;
                }
            }
            add_floats<NR, kLen>(w, u * kLen, x, acc);
        }
        constexpr int kBytes = F == F32 ? 4 : 2;
        for (int i = 0; i < cols % kLen; ++i) {
            const uint8_t* at = tile + units * 512 + (i * kLanes + lane) * kBytes;
            float w[1];
            if constexpr (F == F32) {
                w[0] = __uint_as_float(load4(at));
            } else {
                w[0] = halves(F, *reinterpret_cast<const unsigned short*>(at)).x;
            }
            add_floats<NR, 1>(w, units * kLen + i, x, acc);
        }
    }
}

// acc[r] = this lane's slice of `cols` weights by row r.
template <int NR, uint32_t F>
__device__ __forceinline__ void dot_slice(const uint8_t* tile, int lane, int cols, const Inputs& x, float (&acc)[NR]) {
#pragma unroll
    for (int r = 0; r < NR; ++r) acc[r] = 0.0f;
    if constexpr (is_float(F)) {
        dot_floats<NR, F>(tile, lane, cols, x, acc);
    } else {
        // q8_0 has the most to load.
        constexpr int kUnroll = F == Q8_0 ? 4 : 8;
        Add<NR, F> add{x, acc};
        if (unit_len(F) == 32 && cols != kSlice) {
            each_block<F, false, 1>(tile, lane, cols / 32, x.patterns, add);
        } else {
            each_block<F, true, kUnroll>(tile, lane, 8, x.patterns, add);
        }
    }
}

}  // namespace arc
