// Scores of the indexer's keys: what its kernels share. In the format Fp4 with 64 heads of 128 values, a warp takes eight keys by
// int8 mma: codes are integers, a block of 32 has one power of two on either side, and where the powers of a row and a key span
// little, every partial sum of the CPU's order is a multiple of the smallest that 24 bits hold: all orders give the same bits.
// Other keys, and other formats, go through the CPU's order step by step.
#pragma once

#include "ops/index/index.cuh"
#include "ops/latent/latent.cuh"
#include "ops/matmul/exchange.cuh"
#include "pdl.cuh"

namespace arc::indexer {

constexpr uint32_t kFull = 0xffffffffu;
constexpr uint32_t kThreads = 256, kWarps = 8;
// Bins of a digit of a score, eleven bits.
constexpr uint32_t kBins = 2048;
// Heads and values of the straight path.
constexpr uint32_t kHeads = 64, kDim = kIndexDim, kTiles = kHeads / 16, kBlocks = kDim / 32;
// Distance between heads of int8 codes.
constexpr uint32_t kCodeStride = kDim + 16;
// The most that scales may span, as powers of two: 128 products of at most 12 * 12 / 4 stay below 2^24 of the smallest.
constexpr uint32_t kMostSpan = 9;
// An integer in the low bits of this float's mantissa is the float's distance from it.
constexpr uint32_t kMagicBits = 0x4b400000u;
constexpr float kMagic = 12582912.0f;

// The doubled values of four E2M1 codes, one a byte, as int8.
__device__ __forceinline__ uint32_t doubled(uint32_t codes) {
    const uint32_t m = codes & 0x07070707u, t = m | m >> 4;
    const uint32_t select = (t & 0xff) | (t >> 8 & 0xff00);
    const uint32_t plus = __byte_perm(0x03020100u, 0x0c080604u, select);
    const uint32_t minus = __byte_perm(0xfdfeff00u, 0xf4f8fafcu, select);
    // The sign bit of every code fills its byte.
    uint32_t negative;
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(negative) : "r"(codes << 4));
    return (minus & negative) | (plus & ~negative);
}

__device__ __forceinline__ void mma_s8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(kMagicBits));
}

// Smallest and largest of a vector's scale bytes, blocks of zeros left out, and the bytes with those filled in.
struct Scales {
    uint32_t bytes, least, most;
};

// Bytes of four scales; bit b of `zeros`: block b holds nothing but zeros.
__device__ __forceinline__ Scales scales_of(uint32_t bytes, uint32_t zeros) {
    Scales s{bytes, 255, 0};
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
        const uint32_t byte = bytes >> 8 * b & 0xff;
        if ((zeros >> b & 1) == 0) s.least = min(s.least, byte), s.most = max(s.most, byte);
    }
    if (s.most == 0) s.least = s.most = 127;
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
        if (zeros >> b & 1) s.bytes = (s.bytes & ~(0xffu << 8 * b)) | s.most << 8 * b;
    }
    return s;
}

// Whether all orders give the same bits of dots of a row's queries with a key, of which these are the scales.
template <typename Queries>
__device__ __forceinline__ bool any_order(const Queries& q, const Scales& key) {
    return q.span + key.most - key.least <= kMostSpan && q.least + key.least >= 254 - 110 && q.highest + key.most <= 254 + 100 &&
           key.most != kPoison && q.highest != kPoison;
}

// Half a scale, as the doubled integers want it.
__device__ __forceinline__ float half_scale(uint32_t bytes, uint32_t b) { return __uint_as_float(((bytes >> 8 * b & 0xff) - 1) << 23); }

// The lane's value of a byte of codes, times the scale of its block.
__device__ __forceinline__ float key_value(uint32_t byte, uint32_t scale) {
    return __fmul_rn(e2m1_to_f32((threadIdx.x & 31) < 16 ? byte & 15 : byte >> 4), e8m0_to_f32(scale));
}

// Values of one key as a warp holds them, past the first cache: it may just have been stored.
__device__ __forceinline__ void read_key(float (&x)[4], const uint8_t* key, uint32_t dim, uint32_t format) {
    const uint32_t lane = threadIdx.x & 31;
    if (format != kRowFp4) {
        load_row_early(x, reinterpret_cast<const float*>(key), dim);
        return;
    }
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) x[j] = key_value(__ldcg(key + 16 * j + (lane & 15)), __ldcg(key + kDim / 2 + j));
}

// Score of one key by a warp, every operation as on the CPU. Heads: at most 128. query(x, h): values of a head.
template <typename Query>
__device__ float score_in_order(Query query, const float* weights, const uint8_t* key, uint32_t heads, uint32_t dim,
                                uint32_t format) {
    const uint32_t lane = threadIdx.x & 31;
    float x[4], terms[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    read_key(x, key, dim, format);
    // Several heads at a time, so that their values come together.
    constexpr uint32_t kTogether = 4;
    for (uint32_t first = 0; first < heads; first += kTogether) {
        float y[kTogether][4];
#pragma unroll
        for (uint32_t i = 0; i < kTogether; ++i) query(y[i], min(first + i, heads - 1));
#pragma unroll
        for (uint32_t i = 0; i < kTogether; ++i) {
            const uint32_t h = first + i;
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) y[i][j] = __fmul_rn(y[i][j], x[j]);
            const float s = fold_power(y[i], dim);
            const float term = h < heads ? __fmul_rn(weights[h], s < 0.0f ? 0.0f : s) : 0.0f;
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                if (h == lane + 32 * j) terms[j] = term;
            }
        }
    }
    return fold_power(terms, heads);
}

// What is known of all scales of a row's queries.
struct Limits {
    uint32_t span, least, highest, exact;  // exact: whether codes and scales are the queries
};

// A row's queries as a warp multiplies them: of every tile of 16, heads lane / 4 and lane / 4 + 8.
struct Queries {
    uint32_t x[kTiles][kBlocks][4];
    float scale[kTiles][2][kBlocks], weight[kTiles][2];

    __device__ __forceinline__ void load_scales(const float* weights, const uint32_t* bytes, uint32_t stride) {
        const uint32_t lane = threadIdx.x & 31;
#pragma unroll
        for (uint32_t m = 0; m < kTiles; ++m) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const uint32_t h = 16 * m + 8 * half + (lane >> 2);
                weight[m][half] = weights[h];
#pragma unroll
                for (uint32_t b = 0; b < kBlocks; ++b) scale[m][half][b] = half_scale(bytes[h * stride], b);
            }
        }
    }
};

// Eight keys as a warp holds them: the lane has a quarter of every block of key lane / 4, and that key's scales.
struct Keys {
    uint32_t raw[kBlocks], bytes;

    __device__ __forceinline__ void load(const uint8_t* at) {
        const uint32_t* key = reinterpret_cast<const uint32_t*>(at);
#pragma unroll
        for (uint32_t b = 0; b < kBlocks; ++b) raw[b] = __ldcg(key + 4 * b + (threadIdx.x & 3));
        bytes = __ldcg(key + kDim / 8);
    }
};

// Dots of eight keys with all heads, block by block: int8 products, each times both its powers of two. `x`: codes of heads as of
// `Queries`; `bytes`: the lane's key's scales, filled in; scale(m, half, b): that of a block of a head. The lane has keys
// 2 (lane % 4) and the next.
template <typename Scale>
__device__ __forceinline__ void dots_by_block(float (&sum)[kTiles][2][2], const uint32_t (&x)[kTiles][kBlocks][4], const Keys& keys,
                                              uint32_t bytes, Scale scale) {
    const uint32_t lane = threadIdx.x & 31;
    float key_scale[2][kBlocks];
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
        const uint32_t of = __shfl_sync(kFull, bytes, 8 * (lane & 3) + 4 * e);
#pragma unroll
        for (uint32_t b = 0; b < kBlocks; ++b) key_scale[e][b] = half_scale(of, b);
    }
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
        const uint32_t b0 = doubled(keys.raw[b] & 0x0f0f0f0fu), b1 = doubled(keys.raw[b] >> 4 & 0x0f0f0f0fu);
#pragma unroll
        for (uint32_t m = 0; m < kTiles; ++m) {
            int c[4];
            mma_s8(c, x[m][b], b0, b1);
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const float own = scale(m, i / 2, b), dot = __fmul_rn(__fsub_rn(__int_as_float(c[i]), kMagic), own);
                float& to = sum[m][i / 2][i % 2];
                to = b == 0 ? __fmul_rn(dot, key_scale[i % 2][b]) : __fmaf_rn(dot, key_scale[i % 2][b], to);
            }
        }
    }
}

// Scores of eight keys of what their dots with heads are, `sum`. weighed(m, half, v): a dot above 0 times its head's weight; the
// others: see `score_tile`. `plain`: no order of a sum shows.
template <typename Weighed, typename Put, typename InOrder>
__device__ __forceinline__ void sum_heads(const float (&sum)[kTiles][2][2], bool plain, bool dry, Weighed weighed, Put put,
                                          InOrder in_order) {
    const uint32_t lane = threadIdx.x & 31;
    float total[2];
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
        float t[kTiles][2];
#pragma unroll
        for (uint32_t m = 0; m < kTiles; ++m) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const float v = sum[m][half][e];
                t[m][half] = weighed(m, half, v < 0.0f ? 0.0f : v);
            }
        }
        // Heads h + 32, h + 16, h + 8 stand in the lane, h + 4, h + 2, h + 1 in others.
        const float low = __fadd_rn(__fadd_rn(t[0][0], t[2][0]), __fadd_rn(t[1][0], t[3][0]));
        const float high = __fadd_rn(__fadd_rn(t[0][1], t[2][1]), __fadd_rn(t[1][1], t[3][1]));
        float v = __fadd_rn(low, high);
#pragma unroll
        for (int half = 16; half >= 4; half >>= 1) v = __fadd_rn(v, __shfl_xor_sync(kFull, v, half));
        total[e] = v;
    }
    const uint32_t slow = __ballot_sync(kFull, !plain && !dry);
    if (lane < 4 && !dry) {
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
            const uint32_t i = 2 * lane + e;
            if ((slow >> 4 * i & 1) == 0) put(i, ordinal(total[e]));
        }
    }
    if (slow != 0) {
        for (uint32_t i = 0; i < 8; ++i) {
            if ((slow >> 4 * i & 1) == 0) continue;
            const float score = in_order(i);
            if (lane == 0) put(i, ordinal(score));
        }
    }
}

// Scores of eight keys. next(): the keys have been looked at; put(i, ordinal): by one lane; in_order(i): score of the i-th by
// the warp in the CPU's order. `dry`: nothing is put.
template <typename Next, typename Put, typename InOrder>
__device__ __forceinline__ void score_tile(const Queries& q, const Keys& keys, const Limits& limits, bool dry, Next next, Put put,
                                           InOrder in_order) {
    const uint32_t lane = threadIdx.x & 31;
    uint32_t zeros = 0;
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
        const uint32_t used = __ballot_sync(kFull, (keys.raw[b] & 0x77777777u) != 0);
        zeros |= (uint32_t)((used >> (lane & 28) & 15) == 0) << b;
    }
    const Scales s = scales_of(keys.bytes, zeros);
    const bool plain = limits.exact && any_order(limits, s);
    float sum[kTiles][2][2];
    dots_by_block(sum, q.x, keys, s.bytes, [&](uint32_t m, uint32_t half, uint32_t b) { return q.scale[m][half][b]; });
    next();
    const auto weighed = [&](uint32_t m, uint32_t half, float v) { return __fadd_rn(__fmul_rn(q.weight[m][half], v), 0.0f); };
    sum_heads(sum, plain, dry, weighed, put, in_order);
}

}  // namespace arc::indexer
