// Products of float weights with many rows, in the order of those with few: every output is a chain of fused multiply-adds
// inside a slice, so the bits are the same.
//
// A block of 8 warps computes 64 outputs of 32 rows, or 32 of 32 or of 16 where there would be too few blocks. Warps take slices
// in turn, each on its own: 32 columns at a time stand decoded in its part of shared memory, a lane multiplies 8 outputs by 8
// rows, 4 by 8 or 4 by 4. Then slices are added in order.
#pragma once

#include "../../pdl.cuh"
#include "decode.cuh"
#include "many.cuh"

namespace arc {

template <uint32_t F, int BM, int BN>
struct Fma {
    static constexpr int W = 8, KC = 32;
    // Outputs and rows of a lane, four by four.
    static constexpr int O = BM / 8, N = BN / 4;
    // Values of a load of 16 bytes.
    static constexpr int kLen = F == F32 ? 4 : F == FP8 ? 16 : 8;

    struct Warp {
        float w[KC][BM];
        float x[KC][BN];
    };
    // Sums of a slice, or of all.
    using Sums = float[BN][BM];
    static_assert(sizeof(Sums) <= sizeof(Warp));
    struct Shared {
        Tables<BM, BN> tables;
        Warp warps[W];
    };

    const Product& p;
    Shared& shared;

    __device__ __forceinline__ static float part(float4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

    // One value of a slice: where whole units end, values stand one by one.
    __device__ __forceinline__ static float one(const uint8_t* tile, uint32_t lane, uint32_t cols, uint32_t k) {
        constexpr uint32_t kSize = F == F32 ? 4 : 2;
        const uint32_t whole = cols / kLen * kLen;
        const uint8_t* at = k < whole ? tile + k / kLen * 512 + 16 * lane + k % kLen * kSize
                                      : tile + whole / kLen * 512 + ((k - whole) * kLanes + lane) * kSize;
        if constexpr (F == F32) return __uint_as_float(load4(at));
        return halves(F, *reinterpret_cast<const unsigned short*>(at)).x;
    }

    // Where output o's tile begins, and its lane there; null: there is no such output.
    __device__ __forceinline__ const uint8_t* tile_of(uint32_t slice, uint32_t o, uint32_t& lane) const {
        const uint32_t slot = o / 8;
        lane = shared.tables.place[slot] + o % 8 + (slice & (p.cut.c() - 1)) * p.cut.group_rows();
        const uint8_t* base = reinterpret_cast<const uint8_t*>(shared.tables.base[slot]);
        return base == nullptr ? nullptr : base + p.cut.tile_at(F, slice >> p.cut.log_c);
    }

    // Where its values k .. k + kLen are; the next ones, of a step of KC columns, are 32 units on.
    __device__ __forceinline__ static const uint4* units_of(const uint8_t* tile, uint32_t lane, uint32_t k) {
        tile += F == FP8 ? k / 128 * (kLanes * 129) + k % 128 / 16 * 512 : k / kLen * 512;
        return reinterpret_cast<const uint4*>(tile) + lane;
    }

    // `scale`: of FP8.
    __device__ __forceinline__ static void decode(const uint4& unit, float scale, float (&v)[kLen]) {
#pragma unroll
        for (int i = 0; i < kLen; i += F == F32 ? 1 : 2) {
            if constexpr (F == F32) {
                v[i] = __uint_as_float(word(unit, i));
            } else if constexpr (F == FP8) {
                const float2 two = e4m3x2(word(unit, i / 4) >> (8 * (i % 4)));
                v[i] = __fmul_rn(two.x, scale), v[i + 1] = __fmul_rn(two.y, scale);
            } else {
                const float2 two = halves(F, word(unit, i / 2));
                v[i] = two.x, v[i + 1] = two.y;
            }
        }
    }

    // Where rows 4n .. 4n + 4 stand in columns 4 four .. 4 four + 4, in fours: lanes that bring them meet different banks.
    __device__ __forceinline__ static uint32_t place(uint32_t n, uint32_t four) { return n ^ (four & (BN / 4 - 1)); }

    // Columns k .. k + KC of a slice.
    __device__ __forceinline__ void stage(Warp& to, uint32_t slice, uint32_t cols, uint32_t k) const {
        const uint32_t lane = threadIdx.x & 31;
        constexpr int kUnits = KC / kLen;
        const bool whole = k + KC <= cols;
        // All loads of a batch are on their way before the first value is used.
        constexpr int kBatch = F == F32 ? 1 : BM / 32;
#pragma unroll
        for (int first = 0; first < BM / 32; first += kBatch) {
            uint4 units[kBatch][kUnits] = {};
            float scales[kBatch] = {};
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                uint32_t at;
                const uint8_t* tile = tile_of(slice, 32 * (first + i) + lane, at);
                if (tile == nullptr || !whole) continue;
#pragma unroll
                for (int j = 0; j < kUnits; ++j) units[i][j] = __ldg(units_of(tile, at, k) + 32 * j);
                if constexpr (F == FP8) scales[i] = e8m0(tile[k / 128 * (kLanes * 129) + 8 * 512 + at]);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
#pragma unroll
                for (int j = 0; j < kUnits; ++j) {
                    float v[kLen];
                    decode(units[i][j], scales[i], v);
#pragma unroll
                    for (int n = 0; n < kLen; ++n) to.w[kLen * j + n][32 * (first + i) + lane] = v[n];
                }
            }
        }
        if constexpr (F != FP8) {
            // The last columns, one by one.
            for (int i = 0; i < BM / 32 && !whole; ++i) {
                uint32_t at;
                const uint8_t* tile = tile_of(slice, 32 * i + lane, at);
                for (uint32_t j = 0; tile != nullptr && k + j < cols; ++j) to.w[j][32 * i + lane] = one(tile, at, cols, k + j);
            }
        }
        // Eight lanes bring a row's columns, four each: whole lines.
        const uint32_t four = lane % 8;
        const float* from = reinterpret_cast<const float*>(p.floats) + slice * kSlice + k + 4 * four;
        if (whole && p.cut.cols % 4 == 0) {
#pragma unroll
            for (int first = 0; first < BN / 4; first += 4) {
                float4 v[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const uint32_t input = shared.tables.input[4 * (first + n) + lane / 8];
                    v[n] = input != kNoRow ? *reinterpret_cast<const float4*>(from + (size_t)input * p.cut.cols)
                                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    float* column = to.x[4 * four] + 4 * place(first + n, four) + lane / 8;
#pragma unroll
                    for (int i = 0; i < 4; ++i) column[i * BN] = part(v[n], i);
                }
            }
        } else {
            for (uint32_t n = 0; n < BN / 4; ++n) {
                const uint32_t input = shared.tables.input[4 * n + lane / 8];
                for (uint32_t i = 0; i < 4; ++i) {
                    const bool there = input != kNoRow && k + 4 * four + i < cols;
                    to.x[4 * four + i][4 * place(n, four) + lane / 8] = there ? from[(size_t)input * p.cut.cols + i] : 0.0f;
                }
            }
        }
    }

    __device__ void run() const {
        pdl_launch();
        pdl_wait();
        uint32_t row, end;
        if (!shared.tables.fill(p, F, BN, row, end)) return;
        __syncthreads();
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31;
        // Lanes side by side read the same outputs, every second one the same rows: shared memory serves 16 lanes at once.
        const uint32_t lo = lane / 2 % 8 * 4, ln = (lane / 16 * 2 + lane % 2) * 4;
        Warp& own = shared.warps[warp];
        // A thread adds up slices for so many rows of one column.
        constexpr int kEach = BM * BN / (32 * W);
        const uint32_t column = threadIdx.x % BM, first_row = threadIdx.x / BM;
        float total[kEach] = {};
        for (uint32_t first = 0; first < p.cut.slices; first += W) {
            const uint32_t slice = first + warp;
            if (slice < p.cut.slices) {
                const uint32_t cols = p.cut.cols_of(slice);
                float acc[O][N] = {};
                for (uint32_t k = 0; k < cols; k += KC) {
                    __syncwarp();
                    stage(own, slice, cols, k);
                    __syncwarp();
#pragma unroll 1
                    for (int four = 0; four < KC / 4; ++four) {
                        const float* rows[N / 4];
#pragma unroll
                        for (int i = 0; i < N / 4; ++i) rows[i] = &own.x[4 * four][4 * place(4 * i + ln / 4, four)];
#pragma unroll 2
                        for (int j = 0; j < 4; ++j) {
                            float4 w[O / 4], x[N / 4];
#pragma unroll
                            for (int i = 0; i < O / 4; ++i) {
                                w[i] = *reinterpret_cast<const float4*>(&own.w[4 * four + j][32 * i + lo]);
                            }
#pragma unroll
                            for (int i = 0; i < N / 4; ++i) x[i] = *reinterpret_cast<const float4*>(rows[i] + j * BN);
#pragma unroll
                            for (int o = 0; o < O; ++o) {
#pragma unroll
                                for (int n = 0; n < N; ++n) {
                                    acc[o][n] = __fmaf_rn(part(w[o / 4], o % 4), part(x[n / 4], n % 4), acc[o][n]);
                                }
                            }
                        }
                    }
                }
                __syncwarp();
                Sums& sums = reinterpret_cast<Sums&>(own);
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    float* to = sums[n / 4 * 16 + ln + n % 4] + lo;
#pragma unroll
                    for (int o = 0; o < O; o += 4) {
                        *reinterpret_cast<float4*>(to + 8 * o) =
                            make_float4(acc[o][n], acc[o + 1][n], acc[o + 2][n], acc[o + 3][n]);
                    }
                }
            }
            __syncthreads();
#pragma unroll 1
            for (uint32_t w = 0; w < W && first + w < p.cut.slices; ++w) {
                const Sums& sums = reinterpret_cast<const Sums&>(shared.warps[w]);
#pragma unroll
                for (int i = 0; i < kEach; ++i) total[i] = __fadd_rn(total[i], sums[first_row + i * (BN / kEach)][column]);
            }
            __syncthreads();
        }
        Sums& sums = reinterpret_cast<Sums&>(shared.warps[0]);
#pragma unroll
        for (int i = 0; i < kEach; ++i) sums[first_row + i * (BN / kEach)][column] = total[i];
        __syncthreads();
        shared.tables.store_all(p, row, end, sums[0], BM);
    }
};

}  // namespace arc

#define ARC_FMA(NAME, FORMAT)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 2) arc_matmul_fma_##NAME##_32(                                \
        const __grid_constant__ arc::Product p) {                                                                   \
        extern __shared__ __align__(16) uint8_t smem[];                                                             \
        arc::Fma<FORMAT, 64, 32>{p, *reinterpret_cast<arc::Fma<FORMAT, 64, 32>::Shared*>(smem)}.run();              \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256, 3) arc_matmul_fma_##NAME##_32x32(                             \
        const __grid_constant__ arc::Product p) {                                                                   \
        extern __shared__ __align__(16) uint8_t smem[];                                                             \
        arc::Fma<FORMAT, 32, 32>{p, *reinterpret_cast<arc::Fma<FORMAT, 32, 32>::Shared*>(smem)}.run();              \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256, 4) arc_matmul_fma_##NAME##_16(                                \
        const __grid_constant__ arc::Product p) {                                                                   \
        extern __shared__ __align__(16) uint8_t smem[];                                                             \
        arc::Fma<FORMAT, 32, 16>{p, *reinterpret_cast<arc::Fma<FORMAT, 32, 16>::Shared*>(smem)}.run();              \
    }
