// Products with many rows: int8 tensor cores, 32 values at a time, promoted to f32 behind each of them.
//
// A warp multiplies 32 outputs (two tiles of 16) by up to 32 rows (tiles of 8, as many as there are). Slices of weights,
// still coded, and of activations come into shared memory by asynchronous copies, the next ones while the last are
// multiplied: a warp brings its own weights and lays them out as a tile of 32 lanes (layout.cuh), whatever the cut of the
// matrix, so that every address is a constant away from a lane's own. A lane's part of a fragment of weights is two words
// of each of four outputs, decoded in registers.
//
//   mma_*_32, mma_*_64    a block is W warps along the outputs and one or two along the rows; slices one after the other
//   mma_*_64_alone        the same with more slices on their way and four warps along the rows, where a multiprocessor has one block
//   mma_*_split_16, _32   a block is 32 outputs by so many rows, its warps take slices in turn: where the others would be
//                         too few
//
// Which of 32 values a lane takes is free, since integer sums have no order. Natural formats take words t and 4 + t of a
// block, as ldmatrix hands them out; the others words 2t and 2t + 1, as they decode them.
#pragma once

#include "../../copies.cuh"
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

// Four matrices of 8 rows of 16 bytes: lane l names row l % 8 of matrix l / 8 and gets word l % 4 of row l / 4 of each.
__device__ __forceinline__ void load_matrices(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, const uint8_t* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// An integer that was added to kFloatBits.
__device__ __forceinline__ float from_bits(int bits) { return __fsub_rn(__int_as_float(bits), kFloatZero); }

// Whether lanes take words t and 4 + t.
__device__ constexpr bool natural(uint32_t f) { return f == Q8_0 || per_half(f); }
// Q2_K's codes times its scales fit a byte, so that a block is one fragment.
__device__ constexpr bool by_halves(uint32_t f) { return f == Q3_K || f == Q6_K; }

// Scales of one block of one output.
struct Scales {
    float d, m;
    int sc0, sc1;
    uint32_t mins;
};

// A slice of a warp's 32 outputs in shared memory: a tile of layout.cuh whose lanes are the outputs. One of them, as lane
// t of four sees it. TWO: codes of two blocks are loaded at once, where there are registers for them.
template <uint32_t F, bool TWO = true>
struct Coded {
    static constexpr int kUnits = kSlice / unit_len(F), kUnit = kLanes * unit_bytes(F), kBytes = kUnits * kUnit;

    const uint8_t* at;
    uint32_t row, t;
    float d, m;     // of a whole slice
    uint4 two;

    __device__ __forceinline__ const uint8_t* wide(int unit_idx, int chunk) const {
        return at + unit_idx * kUnit + chunk * 512 + 16 * row;
    }
    // Behind `before` bytes a lane, `width` bytes of this lane.
    __device__ __forceinline__ const uint8_t* narrow(int unit_idx, int before, int width) const {
        return at + unit_idx * kUnit + before * kLanes + width * row;
    }

    __device__ __forceinline__ void enter() {
        if constexpr (F == IQ2_XXS) {
            // An eighth, which commutes with the rounding of every product.
            d = __fmul_rn(load_half(narrow(0, 64, 2)), 0.125f);
        } else if constexpr (F == Q2_K) {
            const uint32_t dm = load4(narrow(0, 80, 4));
            d = low_half(dm), m = -high_half(dm);
        } else if constexpr (F == Q3_K || F == Q6_K) {
            d = load_half(narrow(0, F == Q3_K ? 108 : 208, 2));
        }
    }

    // Eight bytes of block b.
    __device__ __forceinline__ uint2 codes(int b, int chunk) {
        if constexpr (!TWO) return *reinterpret_cast<const uint2*>(wide(0, chunk) + 8 * (b % 2));
        if (b % 2 == 0) two = load16(wide(0, chunk));
        return b % 2 == 0 ? make_uint2(two.x, two.y) : make_uint2(two.z, two.w);
    }

    // The two words of block b that this lane takes, and the block's scales. Blocks ascend. `magnitudes`: as `iq2` has them.
    __device__ __forceinline__ Scales decode(int b, const uint8_t* patterns, uint32_t magnitudes, uint32_t& low, uint32_t& high) {
        Scales s{d, m, 0, 0, 0};
        const auto pair = [](const uint8_t* p) { return *reinterpret_cast<const uint2*>(p); };
        if constexpr (F == Q8_0) {
            s.d = load_half(narrow(b, 32, 2));
        } else if constexpr (F == MXFP4) {
            const uint2 v = fp4(load4(wide(b, 0) + 4 * t));
            low = v.x, high = v.y;
            s.d = e8m0_half(*narrow(b, 16, 1));
        } else if constexpr (F == IQ2_XXS) {
            const uint2 v = codes(b, b / 2);
            const uint32_t index = v.x, signs = v.y;
            // As iq2 of decode.cuh, the signs at bit 2 of their nibbles.
            const uint32_t all = iq2_signs(signs), sign = __funnelshift_l(all, all, 2 - t) & 0x44444444u;
            // In one instruction, or in two that need no register for the factor.
            const uint32_t table = (uint32_t)__cvta_generic_to_shared(patterns);
            const uint32_t entry = TWO ? __dp4a(index, (uint32_t)(4 * kLanes) << (8 * t), table)
                                       : table + permute(index, 0, 0x4440 | t) * (4 * kLanes);
            const uint32_t selector = *reinterpret_cast<const uint32_t*>(__cvta_shared_to_generic(entry)) | sign;
            low = permute(magnitudes, 0x00d5e7f8u, selector);
            high = permute(magnitudes, 0x00d5e7f8u, selector >> 16);
            s.d = iq2_scale(d, signs);
        } else if constexpr (F == Q2_K) {
            const uint2 v = codes(b, 1 + b / 2);
            const uint32_t both = *reinterpret_cast<const unsigned short*>(wide(0, 0) + 2 * b);
            low = ((v.x >> (2 * t)) & 0x03030303u) * (both & 15u);
            high = ((v.y >> (2 * t)) & 0x03030303u) * ((both >> 8) & 15u);
            s.mins = (both >> 4) & 0x0f0fu;
            if constexpr (!TWO) enter(), s.d = d, s.m = m;
        } else if constexpr (F == Q3_K) {
            const uint2 v = pair(wide(0, b / 2) + 8 * (b % 2));
            const uint32_t bits = load4(wide(0, 4 + b / 4) + 4 * (b % 4));
            low = ((v.x >> (2 * t)) & 0x03030303u) | ((bits >> t) & 0x01010101u) << 2;
            high = ((v.y >> (2 * t)) & 0x03030303u) | ((bits >> (4 + t)) & 0x01010101u) << 2;
            const uint32_t lows = load4(narrow(0, b < 4 ? 96 : 100, 4)), top = load4(narrow(0, 104, 4));
            s.sc0 = (int)(((lows >> (8 * (b % 4))) & 15u) | (((top >> (4 * b)) & 3u) << 4)) - 32;
            s.sc1 = (int)(((lows >> (8 * (b % 4) + 4)) & 15u) | (((top >> (4 * b + 2)) & 3u) << 4)) - 32;
        } else {
            constexpr bool super = unit_len(F) == 256;
            const uint32_t v = load4(wide(super ? 0 : b, super ? (F == Q6_K ? b : 1 + b) : 0) + 4 * t);
            low = v & 0x0f0f0f0fu, high = (v >> 4) & 0x0f0f0f0fu;
            if constexpr (F == Q5_0 || F == Q5_1 || F == Q5_K) {
                const uint32_t bits = F == Q5_K ? load4(wide(0, 9 + b / 4) + 4 * (b % 4)) : load4(narrow(b, 16, 4));
                low |= ((bits >> (2 * t)) & 0x01010101u) << 4, high |= ((bits >> (2 * t + 1)) & 0x01010101u) << 4;
            }
            if constexpr (F == Q4_0 || F == Q5_0) {
                s.d = load_half(narrow(b, F == Q4_0 ? 16 : 20, 2));
            } else if constexpr (F == Q4_1 || F == Q5_1) {
                const uint32_t dm = load4(narrow(b, F == Q4_1 ? 16 : 20, 4));
                s.d = low_half(dm), s.m = high_half(dm);
            } else if constexpr (F == Q4_K || F == Q5_K) {
                k_scale_min(load16(wide(0, 0)), b, s.d, s.m);
            } else if constexpr (F == Q6_K) {
                const uint2 c = pair(wide(0, 8 + b / 2) + 8 * (b % 2));
                low |= ((c.x >> (2 * t)) & 0x03030303u) << 4, high |= ((c.y >> (2 * t)) & 0x03030303u) << 4;
                const uint32_t both = *reinterpret_cast<const unsigned short*>(wide(0, 12) + 2 * b);
                s.sc0 = (int)(int8_t)both, s.sc1 = (int)(int8_t)(both >> 8);
            }
        }
        return s;
    }
};

// A slice of up to BN rows of activations in shared memory: int8 values, then scales and sums, of a block side by side.
// Rows are so far apart that lanes meet different banks. THREADS bring it, a thread the same part of every slice.
template <uint32_t F, int BN, int THREADS>
struct Rows {
    static constexpr uint32_t kRow = natural(F) ? 272 : 288, kScales = BN * kRow, kSums = kScales + 8 * BN * 4;
    static constexpr uint32_t kBytes = kSums + (reads_sums(F) ? 8 * BN * 4 : 0);
    static constexpr int kCodes = (BN * 16 + THREADS - 1) / THREADS, kBlocks = (BN * 8 + THREADS - 1) / THREADS;

    const Product& p;
    uint32_t thread;
    uint32_t codes[kCodes], blocks[kBlocks];  // places of 16 values and of a block in a row's first slice; kNoRow: nothing

    // Of the first `n` rows.
    __device__ __forceinline__ Rows(const Product& p, const uint32_t* input, uint32_t n, uint32_t thread)
        : p(p), thread(thread) {
        const auto place = [&](uint32_t row, uint32_t each) {
            const uint32_t from = row < n ? input[row] : kNoRow;
            return from == kNoRow ? kNoRow : from * (p.cut.cols / each);
        };
#pragma unroll
        for (int i = 0; i < kCodes; ++i) codes[i] = place((thread + i * THREADS) / 16, 16);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) blocks[i] = place((thread + i * THREADS) / 8, 32);
    }

    // Starts the copies of one slice.
    __device__ __forceinline__ void bring(uint8_t* to, uint32_t slice, uint32_t cols) const {
        const uint32_t chunk = thread % 16, b = thread % 8;
        const uint4* q = reinterpret_cast<const uint4*>(p.q) + slice * 16 + chunk;
        uint8_t* to_q = to + thread / 16 * kRow + chunk * 16;
        if (chunk < cols / 16) {
#pragma unroll
            for (int i = 0; i < kCodes; ++i) {
                if (codes[i] != kNoRow) copy16(to_q + i * (THREADS / 16) * kRow, q + codes[i]);
            }
        }
        const uint32_t first = slice * 8 + b;
        uint8_t* to_d = to + kScales + (b * BN + thread / 8) * 4;
        if (b < cols / 32) {
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
                if (blocks[i] == kNoRow) continue;
                uint8_t* at = to_d + i * (THREADS / 8) * 4;
                copy_few<4>(at, reinterpret_cast<const float*>(p.d) + (first + blocks[i]));
                if constexpr (reads_sums(F)) {
                    copy_few<4>(at + 8 * BN * 4, reinterpret_cast<const uint32_t*>(p.sums) + (first + blocks[i]));
                }
            }
        }
    }
};

// Where a lane copies from to bring a slice of its warp's 32 outputs into shared memory.
template <uint32_t F>
struct Bringer {
    static constexpr Planes kPlanes = planes(F);
    static constexpr int kUnits = Coded<F>::kUnits, kUnit = Coded<F>::kUnit;
    static constexpr uint32_t kFours = kPlanes.n16 * 512, kLast = kFours + kPlanes.n4 * 128;
    // Planes of 4 bytes take 8 lanes, four of them at once; the last one, of 2 or of 1, takes 4.
    const uint8_t *wide, *fours, *last;
    uint32_t to_fours, to_last;

    // `output(i)`: of the block's outputs, the warp's i-th.
    template <typename Tables, typename Output>
    __device__ __forceinline__ Bringer(const Tables& tables, Output output) {
        const uint32_t lane = threadIdx.x & 31;
        const auto place = [&](uint32_t i, uint32_t width) -> const uint8_t* {
            const uint32_t o = output(i);
            if (tables.rows[o / 8] == 0) return nullptr;
            return reinterpret_cast<const uint8_t*>(tables.base[o / 8]) + (tables.place[o / 8] + o % 8) * width;
        };
        constexpr uint32_t kEach = kPlanes.n4 == 0 ? 1 : kPlanes.n4;
        const uint32_t four = lane / 8 / kEach * kUnit + lane / 8 % kEach * 128, one = lane / 4 * kUnit;
        wide = place(lane, 16);
        fours = place(4 * (lane % 8), 4), to_fours = kFours + four + lane % 8 * 16;
        if (kUnits == 1 && (int)(lane / 8) >= kPlanes.n4) fours = nullptr;
        if (fours != nullptr) fours += kFours + four;
        constexpr uint32_t kWidth = kPlanes.n2 != 0 ? 2 : 1;
        last = place(8 * (lane % 4), kWidth), to_last = kLast + one + lane % 4 * 8 * kWidth;
        if (kUnits == 1 && lane >= 4) last = nullptr;
        if (last != nullptr) last += kLast + one;
    }

    // By PARTS warps, each so many of the units.
    template <int PARTS = 1>
    __device__ __forceinline__ void bring(uint8_t* to, const Cut& cut, uint32_t slice, uint32_t cols, uint32_t part = 0) const {
        static_assert(kUnits % PARTS == 0);
        const uint32_t lane = threadIdx.x & 31, units = cols / unit_len(F), first = part * (kUnits / PARTS);
        const uint32_t c = (slice & (cut.c() - 1)) << (5 - cut.log_c), at = cut.tile_at(F, slice >> cut.log_c);
        if (wide != nullptr) {
            const uint8_t* from = wide + at + 16 * c + first * kUnit;
            uint8_t* to_first = to + first * kUnit + 16 * lane;
#pragma unroll
            for (int u = 0; u < kUnits / PARTS; ++u) {
#pragma unroll
                for (int k = 0; k < kPlanes.n16; ++k) {
                    if (first + u < units) copy16(to_first + u * kUnit + k * 512, from + u * kUnit + k * 512);
                }
            }
        }
        // What is left is little.
        if (part != 0) return;
        if constexpr (kPlanes.n4 != 0) {
            if (fours != nullptr) {
                const uint8_t* from = fours + at + 4 * c;
#pragma unroll
                for (int i = 0; i < kUnits * kPlanes.n4; i += 4) {
                    const int over = i / kPlanes.n4 * kUnit;
                    if (i / kPlanes.n4 + lane / 8 / kPlanes.n4 < units) copy16(to + to_fours + over, from + over);
                }
            }
        }
        if constexpr (kPlanes.n2 != 0) {
            if (last != nullptr && lane / 4 < units) copy16(to + to_last, last + at + 2 * c);
        } else if constexpr (kPlanes.n1 != 0) {
            if (last != nullptr && lane / 4 < units) copy_few<8>(to + to_last, last + at + c);
        }
    }
};

// acc = one slice: 32 outputs at `weights` by 8 NT rows, the first of them `first`, at `rows`.
template <uint32_t F, typename X, int BN, int NT>
__device__ __forceinline__ void multiply(const uint8_t* weights, const uint8_t* rows, uint32_t first, const uint8_t* patterns,
                                         uint32_t blocks, float (&acc)[2][NT][4]) {
    const uint32_t lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
    // ldmatrix: of one tile of weights, and of two tiles of rows.
    const uint8_t* matrix = weights + lane / 16 * 512 + lane % 16 * 16;
    const uint8_t* x = rows + (natural(F) ? (first + lane / 16 * 8 + lane % 8) * X::kRow + lane / 8 % 2 * 16
                                          : (first + g) * X::kRow + 8 * t);
    const float* d = reinterpret_cast<const float*>(rows + X::kScales) + first + 2 * t;
    const uint32_t* sums = reinterpret_cast<const uint32_t*>(rows + X::kSums) + first + 2 * t;
    // Kept in a register: the compiler would move a constant there every time.
    const uint32_t magnitudes = F == IQ2_XXS ? __shfl_sync(~0u, lane == 0 ? kMagnitudes : lane, 0) : 0;
    Coded<F, NT <= 3> coded[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        coded[i / 2][i % 2] = Coded<F, NT <= 3>{weights, 8 * i + g, t, 0.0f, 0.0f, {}};
        coded[i / 2][i % 2].enter();
    }
#pragma unroll
    for (int i = 0; i < 8 * NT; ++i) acc[i / 4 / NT][i / 4 % NT][i % 4] = 0.0f;
    const auto block = [&](int b) {
        uint32_t a[2][4];
        Scales w[2][2];
#pragma unroll
        for (int mt = 0; mt < 2; ++mt) {
#pragma unroll
            for (int h = 0; h < 2; ++h) w[mt][h] = coded[mt][h].decode(b, patterns, magnitudes, a[mt][h], a[mt][2 + h]);
            if constexpr (F == Q8_0) {
                load_matrices(a[mt][0], a[mt][1], a[mt][2], a[mt][3], matrix + b * Coded<F>::kUnit + mt * 256);
            }
        }
        uint2 q[NT + 1];
        if constexpr (natural(F)) {
#pragma unroll
            for (int nt = 0; nt < NT; nt += 2) {
                load_matrices(q[nt].x, q[nt].y, q[nt + 1].x, q[nt + 1].y, x + 8 * nt * X::kRow + 32 * b);
            }
        }
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
            if constexpr (!natural(F)) q[nt] = *reinterpret_cast<const uint2*>(x + 8 * nt * X::kRow + 32 * b);
            const float2 dx = *reinterpret_cast<const float2*>(d + b * BN + 8 * nt);
            uint2 s = make_uint2(0, 0);
            if constexpr (reads_sums(F)) s = *reinterpret_cast<const uint2*>(sums + b * BN + 8 * nt);
            const auto half_sum = [](uint32_t s, int h) { return h == 0 ? (int)(int16_t)s : (int)s >> 16; };
            constexpr uint32_t kOff = (uint32_t)(256 - code_offset(F)) * 0x0101u;
#pragma unroll
            for (int mt = 0; mt < 2; ++mt) {
                float dot[4];
                if constexpr (by_halves(F)) {
                    constexpr int kZero = -code_offset(F);
                    int low[4], high[4];
                    mma16(low, a[mt][0], a[mt][1], q[nt].x, kZero * half_sum(s.x, 0), kZero * half_sum(s.y, 0));
                    mma16(high, a[mt][2], a[mt][3], q[nt].y, kZero * half_sum(s.x, 1), kZero * half_sum(s.y, 1));
#pragma unroll
                    for (int i = 0; i < 4; ++i) dot[i] = (float)(w[mt][i / 2].sc0 * low[i] + w[mt][i / 2].sc1 * high[i]);
                } else {
                    int c[4];
                    if constexpr (code_offset(F) == 0) {
                        mma32(c, a[mt], q[nt].x, q[nt].y, kFloatBits, kFloatBits);
                    } else {
                        mma32(c, a[mt], q[nt].x, q[nt].y, dp2a(s.x, kOff, kFloatBits), dp2a(s.y, kOff, kFloatBits));
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) dot[i] = from_bits(c[i]);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float x_scale = i % 2 == 0 ? dx.x : dx.y;
                    float& sum = acc[mt][nt][i];
                    sum = __fmaf_rn(__fmul_rn(w[mt][i / 2].d, x_scale), dot[i], sum);
                    if constexpr (has_min(F)) {
                        const uint32_t mins = F == Q2_K ? w[mt][i / 2].mins : 0x0101u;
                        const float min = from_bits(dp2a(i % 2 == 0 ? s.x : s.y, mins, kFloatBits));
                        sum = __fmaf_rn(__fmul_rn(w[mt][i / 2].m, x_scale), min, sum);
                    }
                }
            }
        }
    };
    if constexpr (Coded<F>::kUnits == 1) {
#pragma unroll(NT >= 3 ? 1 : 2)
        for (int b = 0; b < 8; ++b) block(b);
    } else {
#pragma unroll(NT >= 3 ? 1 : 2)
        for (int b = 0; b < blocks; ++b) block(b);
    }
}

// What every block begins with: its patterns, then the wait, then its tables and rows `row .. end`. False where it has none.
template <uint32_t F, int THREADS, typename Tables>
__device__ __forceinline__ bool begin(const Product& p, Tables& tables, uint8_t* patterns, uint32_t most, uint32_t& row, uint32_t& end) {
    pdl_launch();
    if constexpr (F == IQ2_XXS) copy_patterns(reinterpret_cast<uint32_t*>(patterns), THREADS);
    pdl_wait();
    if (!tables.fill(p, F, most, row, end)) return false;
    __syncthreads();
    return true;
}

// W warps along the outputs and WN along the rows, up to EACH rows each; so many slices stand in shared memory at once.
template <uint32_t F, int W, int WN, int EACH, int STAGES>
struct Mma {
    static constexpr int BM = 32 * W, BN = EACH * WN;
    static constexpr int kThreads = 32 * W * WN;
    using X = Rows<F, BN, kThreads>;

    const Product& p;
    uint8_t* smem;

    // Shared memory: tables, patterns, stages of weights and rows; in the end the outputs' totals, by rows.
    static constexpr uint32_t kPatternsAt = (sizeof(Tables<BM, BN>) + 127) / 128 * 128;
    static constexpr uint32_t kStagesAt = kPatternsAt + (F == IQ2_XXS ? 256 * kLanes * 4 : 0);
    static constexpr uint32_t kStage = W * Coded<F>::kBytes + X::kBytes;
    static constexpr uint32_t kTotals = BM + 4;

    // The i-th output of a warp, among the block's. In a pair, tiles are of gate and of up.
    __device__ __forceinline__ uint32_t output(uint32_t i) const {
        const uint32_t along = threadIdx.x / 32 % W;
        return p.pair ? i / 16 * (BM / 2) + along * 16 + i % 16 : along * 32 + i;
    }

    // All slices, and where their totals go. `tiles`: of the block's rows.
    template <int NT>
    __device__ void slices(const Tables<BM, BN>& tables, uint32_t tiles) const {
        const Bringer<F> weights(tables, [&](uint32_t i) { return output(i); });
        const X rows(p, tables.input, 8 * tiles, threadIdx.x);
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, first = warp / W * EACH;
        const uint8_t* patterns = smem + kPatternsAt + 4 * lane;
        const auto cols = [&](uint32_t slice) { return p.cut.cols_of(slice); };
        const auto bring = [&](uint32_t slice) {
            if (slice < p.cut.slices) {
                uint8_t* stage = smem + kStagesAt + slice % STAGES * kStage;
                uint8_t *own = stage + warp % W * Coded<F>::kBytes, *x = stage + W * Coded<F>::kBytes;
                weights.template bring<WN>(own, p.cut, slice, cols(slice), warp / W);
                rows.bring(x, slice, cols(slice));
            }
            copies_commit();
        };
        float total[2][NT == 0 ? 1 : NT][4] = {};
        for (uint32_t slice = 0; slice < STAGES - 1; ++slice) bring(slice);
        for (uint32_t slice = 0; slice < p.cut.slices; ++slice) {
            copies_wait<STAGES - 2>();
            // The slice is there, and everybody has left the one before.
            __syncthreads();
            bring(slice + STAGES - 1);
            const uint8_t* stage = smem + kStagesAt + slice % STAGES * kStage;
            if constexpr (NT != 0) {
                float acc[2][NT][4];
                multiply<F, X, BN, NT>(stage + warp % W * Coded<F>::kBytes, stage + W * Coded<F>::kBytes, first, patterns,
                                    cols(slice) / 32, acc);
#pragma unroll
                for (int i = 0; i < 8 * NT; ++i) {
                    float& sum = total[i / 4 / NT][i / 4 % NT][i % 4];
                    sum = __fadd_rn(sum, acc[i / 4 / NT][i / 4 % NT][i % 4]);
                }
            }
        }
        __syncthreads();
        if constexpr (NT != 0) {
            float* to = reinterpret_cast<float*>(smem + kStagesAt) + (first + lane % 4 * 2) * kTotals + lane / 4;
#pragma unroll
            for (int i = 0; i < 8 * NT; ++i) {
                const int mt = i / 4 / NT, nt = i / 4 % NT, n = 8 * nt + i % 2;
                to[n * kTotals + output(16 * mt + i % 4 / 2 * 8)] = total[mt][nt][i % 4];
            }
        }
        __syncthreads();
    }

    __device__ void run() const {
        Tables<BM, BN>& tables = *reinterpret_cast<Tables<BM, BN>*>(smem);
        uint32_t row, end;
        if (!begin<F, kThreads>(p, tables, smem + kPatternsAt, BN, row, end)) return;
        const uint32_t tiles = (end - row + 7) / 8, before = threadIdx.x / (32 * W) * (EACH / 8);
        switch (tiles <= before ? 0 : tiles - before) {
            case 0: slices<0>(tables, tiles); break;
            case 1: slices<1>(tables, tiles); break;
            case 2: slices<2>(tables, tiles); break;
            case 3: slices<EACH == 16 ? 2 : 3>(tables, tiles); break;
            default: slices<EACH / 8>(tables, tiles);
        }
        tables.store_all(p, row, end, reinterpret_cast<const float*>(smem + kStagesAt), kTotals);
    }
};

// A block of 32 outputs by up to BN rows; W warps take slices in turn.
template <uint32_t F, int W, int BN>
struct Split {
    static constexpr int BM = 32;
    static constexpr int kThreads = 32 * W;
    using X = Rows<F, BN, 32>;

    const Product& p;
    uint8_t* smem;

    // Shared memory: tables, patterns, sums of slices and then of all of them, a stage a warp.
    static constexpr uint32_t kPatternsAt = (sizeof(Tables<BM, BN>) + 127) / 128 * 128;
    static constexpr uint32_t kSumsAt = kPatternsAt + (F == IQ2_XXS ? 256 * kLanes * 4 : 0);
    static constexpr uint32_t kOutputs = BM + 4, kSums = BN * kOutputs * 4;
    static constexpr uint32_t kStagesAt = kSumsAt + W * kSums, kStage = Coded<F>::kBytes + X::kBytes;

    // In a pair, tiles are of gate and of up, as outputs are.
    template <int NT>
    __device__ void slices(const Tables<BM, BN>& tables) const {
        const Bringer<F> bringer(tables, [](uint32_t i) { return i; });
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31;
        const X x(p, tables.input, 8 * NT, lane);
        uint8_t* stage = smem + kStagesAt + warp * kStage;
        const auto cols = [&](uint32_t slice) { return p.cut.cols_of(slice); };
        const auto bring = [&](uint32_t slice) {
            if (slice >= p.cut.slices) return;
            bringer.bring(stage, p.cut, slice, cols(slice));
            x.bring(stage + Coded<F>::kBytes, slice, cols(slice));
            copies_commit();
        };
        bring(warp);
        // A thread adds up an output of every W-th row.
        float* sums = reinterpret_cast<float*>(smem + kSumsAt);
        float total[BN / W] = {};
        for (uint32_t first = 0; first < p.cut.slices; first += W) {
            const uint32_t slice = first + warp;
            if (slice < p.cut.slices) {
                copies_wait<0>();
                __syncwarp();
                float acc[2][NT][4];
                multiply<F, X, BN, NT>(stage, stage + Coded<F>::kBytes, 0, smem + kPatternsAt + 4 * lane, cols(slice) / 32,
                                       acc);
                __syncwarp();
                bring(slice + W);
                float* to = sums + warp * (kSums / 4) + lane % 4 * 2 * kOutputs + lane / 4;
#pragma unroll
                for (int i = 0; i < 8 * NT; ++i) {
                    const int mt = i / 4 / NT, nt = i / 4 % NT;
                    to[(8 * nt + i % 2) * kOutputs + 16 * mt + i % 4 / 2 * 8] = acc[mt][nt][i % 4];
                }
            }
            __syncthreads();
#pragma unroll
            for (int w = 0; w < W; ++w) {
                if (first + w >= p.cut.slices) break;
#pragma unroll
                for (int i = 0; i < BN / W; ++i) {
                    total[i] = __fadd_rn(total[i], sums[w * (kSums / 4) + (warp + i * W) * kOutputs + lane]);
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < BN / W; ++i) sums[(warp + i * W) * kOutputs + lane] = total[i];
    }

    __device__ void run() const {
        Tables<BM, BN>& tables = *reinterpret_cast<Tables<BM, BN>*>(smem);
        uint32_t row, end;
        if (!begin<F, kThreads>(p, tables, smem + kPatternsAt, BN, row, end)) return;
        const uint32_t tiles = (end - row + 7) / 8;
        if (tiles == 1) slices<1>(tables);
        if (tiles == 2) slices<2>(tables);
        if constexpr (BN == 32) {
            if (tiles == 3) slices<3>(tables);
            if (tiles == 4) slices<4>(tables);
        }
        __syncthreads();
        tables.store_all(p, row, end, reinterpret_cast<const float*>(smem + kSumsAt), kOutputs);
    }
};

// EACH: rows of a warp.
#define ARC_MMA(NAME, FORMAT, W, WN, EACH, STAGES, BLOCKS, ROWS, NAMED)                                 \
    extern "C" __global__ void __launch_bounds__(32 * W * WN, BLOCKS) arc_matmul_mma_##NAME##_##NAMED(   \
        const __grid_constant__ arc::Product p) {                                                       \
        extern __shared__ __align__(128) uint8_t smem[];                                                \
        static_assert(arc::Mma<FORMAT, W, WN, EACH, STAGES>::BN == ROWS);                               \
        arc::Mma<FORMAT, W, WN, EACH, STAGES>{p, smem}.run();                                           \
    }
#define ARC_MMA_SPLIT_BY(NAME, FORMAT, W, BLOCKS, ROWS)                                                  \
    extern "C" __global__ void __launch_bounds__(32 * W, BLOCKS) arc_matmul_mma_##NAME##_split_##ROWS(   \
        const __grid_constant__ arc::Product p) {                                                        \
        extern __shared__ __align__(128) uint8_t smem[];                                                 \
        arc::Split<FORMAT, W, ROWS>{p, smem}.run();                                                      \
    }
#define ARC_MMA_SPLIT(NAME, FORMAT)             \
    ARC_MMA_SPLIT_BY(NAME, FORMAT, 4, 3, 16)    \
    ARC_MMA_SPLIT_BY(NAME, FORMAT, 4, 2, 32)
#define ARC_MMA_HEAVY(NAME, FORMAT, BLOCKS)   \
    ARC_MMA(NAME, FORMAT, 4, 1, 32, 2, BLOCKS, 32, 32) \
    ARC_MMA_SPLIT(NAME, FORMAT)
// Where a block of 64 rows is alone on its multiprocessor, more slices are on their way, and it has as many warps as two would have.
#define ARC_MMA_LIGHT(NAME, FORMAT)                      \
    ARC_MMA(NAME, FORMAT, 4, 1, 32, 2, 3, 32, 32)        \
    ARC_MMA(NAME, FORMAT, 4, 2, 32, 2, 2, 64, 64)        \
    ARC_MMA(NAME, FORMAT, 4, 4, 16, 4, 1, 64, 64_alone)  \
    ARC_MMA_SPLIT(NAME, FORMAT)

}  // namespace arc
