// Products with many rows: int8 tensor cores, 32 values at a time, promoted to f32 behind each of them.
//
// A block computes 128 outputs of BN rows: four warps along the outputs, WN along the rows, each 32 outputs (two tiles of
// 16) by 8 NT rows. Slices of weights, still coded, and of activations travel through shared memory by asynchronous
// copies, the next ones while the last are multiplied. A lane's part of a fragment of weights is two words of each of two
// rows, decoded in registers.
//
// Which of 32 values a lane takes is free, since integer sums have no order: words 2t and 2t + 1 of a block, and in
// PerHalf formats words t and 4 + t, so that either half is a fragment of its own.
#pragma once

#include "../../pdl.cuh"
#include "decode.cuh"
#include "iq2.cuh"
#include "many.cuh"

namespace arc {

// An integer below 2^22 in magnitude, added to these bits, is the mantissa of a float: 1.5 * 2^23 + the integer.
constexpr int kFloatBits = 0x4b400000;
constexpr float kFloatZero = 12582912.0f;

// Planes of 16, 4, 2 and 1 bytes a lane.
struct Planes {
    int n16, n4, n2, n1;
};
__device__ constexpr Planes planes(uint32_t f) {
    return f == Q8_0      ? Planes{2, 0, 1, 0}
           : f == Q4_0    ? Planes{1, 0, 1, 0}
           : f == Q4_1    ? Planes{1, 1, 0, 0}
           : f == Q5_0    ? Planes{1, 1, 1, 0}
           : f == Q5_1    ? Planes{1, 2, 0, 0}
           : f == Q2_K    ? Planes{5, 1, 0, 0}
           : f == Q3_K    ? Planes{6, 3, 1, 0}
           : f == Q4_K    ? Planes{9, 0, 0, 0}
           : f == Q5_K    ? Planes{11, 0, 0, 0}
           : f == Q6_K    ? Planes{13, 0, 1, 0}
           : f == IQ2_XXS ? Planes{4, 0, 1, 0}
                          : Planes{1, 0, 0, 1};
}

__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from));
}
template <int BYTES>
__device__ __forceinline__ void copy_few(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from),
                 "n"(BYTES));
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Products on top of `even` and `odd`, for the columns 2t and 2t + 1.
__device__ __forceinline__ void mma32(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int even, int odd) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %10, %11};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(even), "r"(odd));
}
__device__ __forceinline__ void mma16(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b, int even, int odd) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %7, %8};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(even), "r"(odd));
}

// Scales of one block of one row.
struct RowScales {
    float d, m;
    int sc0, sc1;
    uint32_t mins;
};

// A slice of the rows of one group in shared memory: units and planes as in a tile, `rows` lanes each.
template <uint32_t F>
struct Slab {
    const uint8_t* at;
    uint32_t rows, row;

    __device__ static constexpr uint32_t unit(uint32_t rows) { return (rows * unit_bytes(F) + 15) / 16 * 16; }

    __device__ __forceinline__ const uint8_t* wide(int unit_idx, int chunk) const {
        return at + unit_idx * unit(rows) + chunk * 16 * rows + 16 * row;
    }
    // Behind `before` bytes a lane, `width` bytes of this lane.
    __device__ __forceinline__ const uint8_t* narrow(int unit_idx, int before, int width) const {
        return at + unit_idx * unit(rows) + before * rows + width * row;
    }

    // The two words of block b that lane t of four takes.
    __device__ __forceinline__ void words(int b, int t, const uint32_t* patterns, uint32_t& low, uint32_t& high) const {
        const auto two = [](const uint8_t* p) { return *reinterpret_cast<const uint2*>(p); };
        if constexpr (F == Q8_0) {
            const uint2 v = two(wide(b, t / 2) + 8 * (t % 2));
            low = v.x, high = v.y;
        } else if constexpr (F == MXFP4) {
            const uint2 v = fp4(load4(wide(b, 0) + 4 * t));
            low = v.x, high = v.y;
        } else if constexpr (F == IQ2_XXS) {
            const uint2 v = two(wide(0, b / 2) + 8 * (b % 2));
            const uint2 codes = iq2(v.x, v.y, t, patterns);
            low = codes.x, high = codes.y;
        } else if constexpr (F == Q2_K || F == Q3_K) {
            const uint2 v = two(wide(0, (F == Q2_K ? 1 : 0) + b / 2) + 8 * (b % 2));
            low = (v.x >> (2 * t)) & 0x03030303u, high = (v.y >> (2 * t)) & 0x03030303u;
            if constexpr (F == Q3_K) {
                const uint32_t bits = load4(wide(0, 4 + b / 4) + 4 * (b % 4));
                low |= ((bits >> t) & 0x01010101u) << 2, high |= ((bits >> (4 + t)) & 0x01010101u) << 2;
            }
        } else {
            constexpr bool super = unit_len(F) == 256;
            const uint32_t v = load4(wide(super ? 0 : b, super ? (F == Q6_K ? b : 1 + b) : 0) + 4 * t);
            low = v & 0x0f0f0f0fu, high = (v >> 4) & 0x0f0f0f0fu;
            if constexpr (F == Q5_0 || F == Q5_1 || F == Q5_K) {
                const uint32_t bits = F == Q5_K ? load4(wide(0, 9 + b / 4) + 4 * (b % 4)) : load4(narrow(b, 16, 4));
                low |= ((bits >> (2 * t)) & 0x01010101u) << 4, high |= ((bits >> (2 * t + 1)) & 0x01010101u) << 4;
            }
            if constexpr (F == Q6_K) {
                const uint2 c = two(wide(0, 8 + b / 2) + 8 * (b % 2));
                low |= ((c.x >> (2 * t)) & 0x03030303u) << 4, high |= ((c.y >> (2 * t)) & 0x03030303u) << 4;
            }
        }
    }

    __device__ __forceinline__ RowScales scales(int b) const {
        RowScales s{0.0f, 0.0f, 0, 0, 0};
        if constexpr (F == Q8_0) {
            s.d = load_half(narrow(b, 32, 2));
        } else if constexpr (F == Q4_0) {
            s.d = load_half(narrow(b, 16, 2));
        } else if constexpr (F == Q5_0) {
            s.d = load_half(narrow(b, 20, 2));
        } else if constexpr (F == Q4_1 || F == Q5_1) {
            const uint32_t dm = load4(narrow(b, F == Q4_1 ? 16 : 20, 4));
            s.d = low_half(dm), s.m = high_half(dm);
        } else if constexpr (F == MXFP4) {
            s.d = e8m0_half(*narrow(b, 16, 1));
        } else if constexpr (F == Q4_K || F == Q5_K) {
            k_scale_min(load16(wide(0, 0)), b, s.d, s.m);
        } else if constexpr (F == Q2_K) {
            const uint32_t both = *reinterpret_cast<const unsigned short*>(wide(0, 0) + 2 * b), dm = load4(narrow(0, 80, 4));
            s.d = low_half(dm), s.m = -high_half(dm);
            s.sc0 = (int)(both & 15u), s.sc1 = (int)((both >> 8) & 15u), s.mins = (both >> 4) & 0x0f0fu;
        } else if constexpr (F == Q3_K) {
            const uint32_t low = load4(narrow(0, b < 4 ? 96 : 100, 4)), top = load4(narrow(0, 104, 4));
            s.d = load_half(narrow(0, 108, 2));
            s.sc0 = (int)(((low >> (8 * (b % 4))) & 15u) | (((top >> (4 * b)) & 3u) << 4)) - 32;
            s.sc1 = (int)(((low >> (8 * (b % 4) + 4)) & 15u) | (((top >> (4 * b + 2)) & 3u) << 4)) - 32;
        } else if constexpr (F == Q6_K) {
            const uint32_t both = *reinterpret_cast<const unsigned short*>(wide(0, 12) + 2 * b);
            s.d = load_half(narrow(0, 208, 2));
            s.sc0 = (int)(int8_t)both, s.sc1 = (int)(int8_t)(both >> 8);
        } else if constexpr (F == IQ2_XXS) {
            const uint32_t signs = load4(wide(0, b / 2) + 8 * (b % 2) + 4);
            s.d = __fmul_rn(__fmul_rn(load_half(narrow(0, 64, 2)), (float)(2 * (signs >> 28) + 1)), 0.125f);
        }
        return s;
    }
};

// Bytes from one row of activations to the next in shared memory, so that lanes meet different banks: they take 8 bytes
// of each of eight rows, and in PerHalf formats 4.
__device__ constexpr uint32_t row_bytes(uint32_t f) { return per_half(f) ? 272 : 288; }

template <uint32_t F, int WN, int NT>
struct Mma {
    static constexpr int BN = 8 * NT * WN;
    static constexpr uint32_t kThreads = 128 * WN;
    static constexpr bool kSums = reads_sums(F);

    const Product& p;
    uint8_t* smem;

    // Shared memory: tables, then stages of slabs, rows, scales and sums.
    struct Shared {
        Tables<BN> tables;
        uint32_t patterns[F == IQ2_XXS ? 256 : 1];
    };
    static constexpr uint32_t kTables = (sizeof(Shared) + 127) / 128 * 128;
    static constexpr uint32_t kRowBytes = row_bytes(F);
    static constexpr uint32_t kXBytes = BN * kRowBytes + 8 * BN * 4 + (kSums ? 8 * BN * 4 : 0);

    __device__ static constexpr uint32_t slab_bytes(uint32_t rows) {
        return kSlice / unit_len(F) * Slab<F>::unit(rows);
    }

    // Starts the copies of one slice.
    __device__ __forceinline__ void fetch(const Tables<BN>& tables, uint8_t* stage, uint32_t slab, uint32_t slice) const {
        // Rows of a group, slots of the block and lanes of a plane are powers of two.
        const uint32_t log_r = 5 - p.cut.log_c, rows = 1u << log_r, log_slots = 7 - log_r, slots = 1u << log_slots;
        const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const uint32_t c = slice & (p.cut.c() - 1), t = slice >> p.cut.log_c;
        const uint32_t cols = p.cut.tail() != 0 && slice + 1 == p.cut.slices ? p.cut.tail() : kSlice;
        const uint32_t units = cols / unit_len(F);
        constexpr Planes kPlanes = planes(F);
        // What a lane copies of every unit: the same places each time.
        constexpr int kMost = (kPlanes.n16 * 32 + kPlanes.n4 * 8 + kPlanes.n2 * 4 + kPlanes.n1 * 2 + 31) / 32;
        const uint32_t n16 = kPlanes.n16 << log_r, n4 = n16 + (kPlanes.n4 << log_r >> 2), n2 = n4 + (kPlanes.n2 << log_r >> 3);
        const uint32_t n1 = n2 + kPlanes.n1 * (rows == 8 ? 1 : rows / 16);
        uint32_t places[kMost];
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            const uint32_t j = lane + 32 * i;
            if (j < n16) {
                places[i] = (j >> log_r) * 512 + ((c << log_r) + (j & (rows - 1))) * 16;
            } else if (j < n4) {
                const uint32_t k = j - n16;
                places[i] = kPlanes.n16 * 512 + (k >> (log_r - 2)) * 128 + (c << log_r) * 4 + (k & (rows / 4 - 1)) * 16;
            } else if (j < n2) {
                places[i] = kPlanes.n16 * 512 + kPlanes.n4 * 128 + (c << log_r) * 2 + (j - n4) * 16;
            } else {
                places[i] = kPlanes.n16 * 512 + (c << log_r) + (j - n2) * 16;
            }
        }
        for (uint32_t i = warp; i < slots * units; i += kThreads / 32) {
            const uint32_t slot = i & (slots - 1), u = i >> log_slots;
            const uint8_t* from = reinterpret_cast<const uint8_t*>(tables.base[slot]);
            if (from == nullptr) continue;
            from += p.cut.tile_at(F, t) + u * (kLanes * unit_bytes(F));
            uint8_t* to = stage + slot * slab + u * Slab<F>::unit(rows) + lane * 16;
#pragma unroll
            for (int k = 0; k < kMost; ++k) {
                const uint32_t j = lane + 32 * k;
                if (kPlanes.n1 != 0 && rows == 8 && j == n2) {
                    copy_few<8>(to + k * 512, from + places[k]);
                } else if (j < n1) {
                    copy16(to + k * 512, from + places[k]);
                }
            }
        }
        uint8_t* x = stage + slots * slab;
        float* d = reinterpret_cast<float*>(x + BN * kRowBytes);
        uint32_t* sums = reinterpret_cast<uint32_t*>(d + 8 * BN);
        const uint32_t chunks = cols / 16, blocks = cols / 32;
        for (uint32_t i = threadIdx.x; i < BN * 16; i += kThreads) {
            const uint32_t n = i / 16, chunk = i % 16, input = tables.input[n];
            if (input == kNoRow || chunk >= chunks) continue;
            const uint8_t* q = reinterpret_cast<const uint8_t*>(p.q) + (size_t)input * p.cut.cols + slice * kSlice;
            copy16(x + n * kRowBytes + chunk * 16, q + chunk * 16);
        }
        for (uint32_t i = threadIdx.x; i < BN * 8; i += kThreads) {
            const uint32_t n = i / 8, b = i % 8, input = tables.input[n];
            if (input == kNoRow || b >= blocks) continue;
            const size_t at = ((size_t)input * p.cut.cols + slice * kSlice) / 32 + b;
            copy_few<4>(d + b * BN + n, reinterpret_cast<const float*>(p.d) + at);
            if constexpr (kSums) copy_few<4>(sums + b * BN + n, reinterpret_cast<const uint32_t*>(p.sums) + at);
        }
    }

    // Adds one slice to `total`.
    __device__ __forceinline__ void multiply(const uint32_t* patterns, const uint8_t* stage, uint32_t slab, uint32_t blocks,
                                             float (&total)[2][NT][4]) const {
        const uint32_t rows = p.cut.group_rows(), slots = kBlockOutputs / rows;
        const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
        const uint8_t* x = stage + slots * slab;
        const float* d = reinterpret_cast<const float*>(x + BN * kRowBytes);
        const uint32_t* sums = reinterpret_cast<const uint32_t*>(d + 8 * BN);
        const uint32_t first = warp / 4 * 8 * NT;
        Slab<F> slabs[2][2];
#pragma unroll
        for (int mt = 0; mt < 2; ++mt) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t row = output_row(mt) + g + 8 * h;
                slabs[mt][h] = Slab<F>{stage + row / rows * slab, rows, row % rows};
            }
        }
        float acc[2][NT][4] = {};
#pragma unroll 1
        for (uint32_t b = 0; b < blocks; ++b) {
            uint32_t a[2][4];
            RowScales w[2][2];
#pragma unroll
            for (int mt = 0; mt < 2; ++mt) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    slabs[mt][h].words((int)b, (int)t, patterns, a[mt][h], a[mt][2 + h]);
                    w[mt][h] = slabs[mt][h].scales((int)b);
                }
            }
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
                const uint8_t* row = x + (first + 8 * nt + g) * kRowBytes + 32 * b;
                uint2 q;
                if constexpr (per_half(F)) {
                    q.x = load4(row + 4 * t), q.y = load4(row + 16 + 4 * t);
                } else {
                    q = *reinterpret_cast<const uint2*>(row + 8 * t);
                }
                const uint32_t column = b * BN + first + 8 * nt + 2 * t;
                const float2 dx = *reinterpret_cast<const float2*>(d + column);
                uint2 s = make_uint2(0, 0);
                if constexpr (kSums) s = *reinterpret_cast<const uint2*>(sums + column);
                const auto half_sum = [](uint32_t s, int h) { return h == 0 ? (int)(int16_t)s : (int)s >> 16; };
#pragma unroll
                for (int mt = 0; mt < 2; ++mt) {
                    float dot[4];
                    constexpr int kOff = -code_offset(F);
                    if constexpr (per_half(F)) {
                        int low[4], high[4];
                        mma16(low, a[mt][0], a[mt][1], q.x, kOff * half_sum(s.x, 0), kOff * half_sum(s.y, 0));
                        mma16(high, a[mt][2], a[mt][3], q.y, kOff * half_sum(s.x, 1), kOff * half_sum(s.y, 1));
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            dot[i] = (float)(w[mt][i / 2].sc0 * low[i] + w[mt][i / 2].sc1 * high[i]);
                        }
                    } else {
                        int c[4];
                        mma32(c, a[mt], q.x, q.y, kFloatBits + kOff * (half_sum(s.x, 0) + half_sum(s.x, 1)),
                              kFloatBits + kOff * (half_sum(s.y, 0) + half_sum(s.y, 1)));
#pragma unroll
                        for (int i = 0; i < 4; ++i) dot[i] = __fsub_rn(__int_as_float(c[i]), kFloatZero);
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float x_scale = i % 2 == 0 ? dx.x : dx.y;
                        const uint32_t sum = i % 2 == 0 ? s.x : s.y;
                        acc[mt][nt][i] = __fmaf_rn(__fmul_rn(w[mt][i / 2].d, x_scale), dot[i], acc[mt][nt][i]);
                        if constexpr (has_min(F)) {
                            const int min = per_half(F) ? dp2a(sum, w[mt][i / 2].mins, 0) : half_sum(sum, 0) + half_sum(sum, 1);
                            acc[mt][nt][i] = __fmaf_rn(__fmul_rn(w[mt][i / 2].m, x_scale), (float)min, acc[mt][nt][i]);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int mt = 0; mt < 2; ++mt) {
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
                for (int i = 0; i < 4; ++i) total[mt][nt][i] = __fadd_rn(total[mt][nt][i], acc[mt][nt][i]);
            }
        }
    }

    // First row of a warp's tile of 16, among the block's. In a pair, tiles are of gate and of up.
    __device__ __forceinline__ uint32_t output_row(int mt) const {
        const uint32_t along = threadIdx.x / 32 % 4;
        return p.pair ? mt * (kBlockOutputs / 2) + along * 16 : along * 32 + mt * 16;
    }

    __device__ void run() const {
        Shared& shared = *reinterpret_cast<Shared*>(smem);
        const uint32_t rows = p.cut.group_rows(), slots = kBlockOutputs / rows, slab = slab_bytes(rows);
        const uint32_t stage_bytes = slots * slab + kXBytes;
        uint8_t* stages = smem + kTables;
        pdl_launch();
        if constexpr (F == IQ2_XXS) {
            for (uint32_t i = threadIdx.x; i < 256; i += kThreads) shared.patterns[i] = spread_pattern(kPatterns[i]);
        }
        pdl_wait();
        uint32_t row, end;
        if (!shared.tables.fill(p, F, row, end)) return;
        __syncthreads();
        float total[2][NT][4] = {};
        fetch(shared.tables, stages, slab, 0);
        copies_commit();
        for (uint32_t slice = 0; slice < p.cut.slices; ++slice) {
            if (slice + 1 < p.cut.slices) fetch(shared.tables, stages + (slice + 1) % 2 * stage_bytes, slab, slice + 1);
            copies_commit();
            copies_wait<1>();
            __syncthreads();
            const uint32_t cols = p.cut.tail() != 0 && slice + 1 == p.cut.slices ? p.cut.tail() : kSlice;
            multiply(shared.patterns, stages + slice % 2 * stage_bytes, slab, cols / 32, total);
            __syncthreads();
        }
        const uint32_t lane = threadIdx.x & 31, first = threadIdx.x / 128 * 8 * NT;
#pragma unroll
        for (int mt = 0; mt < 2; ++mt) {
            if (p.pair && mt == 1) break;
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint32_t r = row + first + 8 * nt + lane % 4 * 2 + i % 2;
                    shared.tables.store(p, r, end, output_row(mt) + lane / 4 + i / 2 * 8, total[mt][nt][i], total[1][nt][i]);
                }
            }
        }
    }
};

#define ARC_MMA(NAME, FORMAT, WN, NT, ROWS)                                                            \
    extern "C" __global__ void __launch_bounds__(128 * WN, WN == 1 ? 3 : 1) arc_matmul_mma_##NAME##_##ROWS( \
        const __grid_constant__ arc::Product p) {                                                       \
        extern __shared__ __align__(128) uint8_t smem[];                                                \
        static_assert(arc::Mma<FORMAT, WN, NT>::BN == ROWS);                                            \
        arc::Mma<FORMAT, WN, NT>{p, smem}.run();                                                        \
    }
// Blocks of 64 rows, by 16 warps or, where decoding weighs more, by 8; and of 16 rows, by 4 warps.
#define ARC_MMA_LIGHT(NAME, FORMAT) \
    ARC_MMA(NAME, FORMAT, 4, 2, 64) \
    ARC_MMA(NAME, FORMAT, 1, 2, 16)
#define ARC_MMA_HEAVY(NAME, FORMAT) \
    ARC_MMA(NAME, FORMAT, 2, 4, 64) \
    ARC_MMA(NAME, FORMAT, 1, 2, 16)

}  // namespace arc
