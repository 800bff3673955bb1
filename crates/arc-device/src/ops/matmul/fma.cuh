// Products of float weights with many rows, in the order of those with few: every output is a chain of fused multiply-adds
// inside a slice, so the bits are the same.
//
// A block of 256 threads computes 128 outputs of 64 rows, a thread 8 by 4 of them. 32 columns at a time stand decoded in
// shared memory, the next ones in registers.
#pragma once

#include "../../pdl.cuh"
#include "decode.cuh"
#include "many.cuh"

namespace arc {

template <uint32_t F>
struct Fma {
    static constexpr int BN = 64, KC = 32, kThreads = 256;
    // Values of a load of 16 bytes, and such loads a thread.
    static constexpr int kLen = F == F32 ? 4 : F == FP8 ? 16 : 8, kLoads = kBlockOutputs * KC / kLen / kThreads;
    static_assert(kLoads * kLen * kThreads == kBlockOutputs * KC);

    struct Shared {
        Tables<BN> tables;
        float w[KC][kBlockOutputs + 4];
        float x[KC][BN + 4];
    };

    const Product& p;
    Shared& shared;

    // One value of a slice: where whole units end, values stand one by one.
    __device__ __forceinline__ static float one(const uint8_t* tile, uint32_t lane, uint32_t cols, uint32_t k) {
        constexpr uint32_t kSize = F == F32 ? 4 : 2;
        const uint32_t whole = cols / kLen * kLen;
        const uint8_t* at = k < whole ? tile + k / kLen * 512 + 16 * lane + k % kLen * kSize
                                      : tile + whole / kLen * 512 + ((k - whole) * kLanes + lane) * kSize;
        if constexpr (F == F32) return __uint_as_float(load4(at));
        return halves(F, *reinterpret_cast<const unsigned short*>(at)).x;
    }

    // Values k .. k + kLen of output o in one slice, zeros beyond its columns.
    __device__ __forceinline__ void load(uint32_t slice, uint32_t cols, uint32_t o, uint32_t k, float (&v)[kLen]) const {
        const uint32_t wide = p.cut.group_rows(), slot = o / wide;
#pragma unroll
        for (int i = 0; i < kLen; ++i) v[i] = 0.0f;
        if (shared.tables.base[slot] == 0 || k >= cols) return;
        const uint32_t lane = o % wide + (slice & (p.cut.c() - 1)) * wide;
        const uint8_t* tile = reinterpret_cast<const uint8_t*>(shared.tables.base[slot]) + p.cut.tile_at(F, slice >> p.cut.log_c);
        if constexpr (F == FP8) {
            const uint8_t* unit = tile + k / 128 * (kLanes * 129);
            const uint4 codes = load16(unit + k % 128 / 16 * 512 + 16 * lane);
            const float scale = e8m0(unit[8 * 512 + lane]);
#pragma unroll
            for (int i = 0; i < 16; i += 2) {
                const float2 two = e4m3x2(word(codes, i / 4) >> (8 * (i % 4)));
                v[i] = __fmul_rn(two.x, scale), v[i + 1] = __fmul_rn(two.y, scale);
            }
        } else if (k + kLen <= cols) {
            const uint4 four = load16(tile + k / kLen * 512 + 16 * lane);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (F == F32) {
                    v[i] = __uint_as_float(word(four, i));
                } else {
                    const float2 two = halves(F, word(four, i));
                    v[2 * i] = two.x, v[2 * i + 1] = two.y;
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < kLen; ++i) {
                if (k + i < cols) v[i] = one(tile, lane, cols, k + i);
            }
        }
    }

    __device__ __forceinline__ void fetch(uint32_t slice, uint32_t cols, uint32_t k, float (&w)[kLoads][kLen], float (&x)[8]) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const uint32_t at = threadIdx.x + i * kThreads;
            load(slice, cols, at % kBlockOutputs, k + at / kBlockOutputs * kLen, w[i]);
        }
        // A thread takes 8 columns of one row.
        const uint32_t input = shared.tables.input[threadIdx.x / 4], at = k + threadIdx.x % 4 * 8;
        const float* from = reinterpret_cast<const float*>(p.floats) + (size_t)input * p.cut.cols + slice * kSlice;
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = input != kNoRow && at + i < cols ? from[at + i] : 0.0f;
    }

    __device__ void run() const {
        pdl_launch();
        pdl_wait();
        uint32_t row, end;
        if (!shared.tables.fill(p, F, row, end)) return;
        __syncthreads();
        const uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
        float total[8][4] = {};
        for (uint32_t slice = 0; slice < p.cut.slices; ++slice) {
            const uint32_t cols = p.cut.tail() != 0 && slice + 1 == p.cut.slices ? p.cut.tail() : kSlice;
            float acc[8][4] = {};
            for (uint32_t k = 0; k < cols; k += KC) {
                float w[kLoads][kLen], x[8];
                fetch(slice, cols, k, w, x);
                __syncthreads();
#pragma unroll
                for (int i = 0; i < kLoads; ++i) {
                    const uint32_t at = threadIdx.x + i * kThreads;
#pragma unroll
                    for (int j = 0; j < kLen; ++j) shared.w[at / kBlockOutputs * kLen + j][at % kBlockOutputs] = w[i][j];
                }
#pragma unroll
                for (int i = 0; i < 8; ++i) shared.x[threadIdx.x % 4 * 8 + i][threadIdx.x / 4] = x[i];
                __syncthreads();
#pragma unroll 4
                for (int j = 0; j < KC; ++j) {
                    const float4 a = *reinterpret_cast<const float4*>(&shared.w[j][4 * tx]);
                    const float4 b = *reinterpret_cast<const float4*>(&shared.w[j][kBlockOutputs / 2 + 4 * tx]);
                    const float4 v = *reinterpret_cast<const float4*>(&shared.x[j][4 * ty]);
                    const float ws[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, xs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int o = 0; o < 8; ++o) {
#pragma unroll
                        for (int n = 0; n < 4; ++n) acc[o][n] = __fmaf_rn(ws[o], xs[n], acc[o][n]);
                    }
                }
            }
#pragma unroll
            for (int o = 0; o < 8; ++o) {
#pragma unroll
                for (int n = 0; n < 4; ++n) total[o][n] = __fadd_rn(total[o][n], acc[o][n]);
            }
        }
#pragma unroll
        for (int o = 0; o < 8; ++o) {
            if (p.pair && o >= 4) break;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                shared.tables.store(p, row + 4 * ty + n, end, o / 4 * (kBlockOutputs / 2) + 4 * tx + o % 4, total[o][n],
                                    o < 4 ? total[o + 4][n] : 0.0f);
            }
        }
    }
};

}  // namespace arc

#define ARC_FMA(NAME, FORMAT)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256, 2) arc_matmul_fma_##NAME(                                 \
        const __grid_constant__ arc::Product p) {                                                               \
        __shared__ __align__(16) uint8_t smem[sizeof(arc::Fma<FORMAT>::Shared)];                                \
        arc::Fma<FORMAT>{p, *reinterpret_cast<arc::Fma<FORMAT>::Shared*>(smem)}.run();                          \
    }
