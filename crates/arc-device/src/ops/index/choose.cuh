// What one row's choice beside a product shares: what others send it, and how it looks for that.
#pragma once

#include "score.cuh"

namespace arc::indexer {

// Nanoseconds between two looks.
constexpr uint32_t kPause = 64;

// What a choice is told of what others send; `Sent` of index/cuda.rs.
struct Sent {
    uint64_t packed;          // [kHeads, kBlocks]: the index query, as `send_index_block`, with the number of the choice
    const uint64_t* weights;  // [kHeads], with the number of the choice
    uint64_t* scores;         // [most], the same
    uint32_t* number;         // of the choice before
    uint32_t* left;           // blocks of latent_rows that have left what they have to
    uint64_t chosen;          // the number for the attention; 16 bytes on, which keys of every block of index_choose are chosen
    uint32_t blocks, most;    // of latent_rows; rows that may be visible
    float factor;             // what the projected weights are multiplied by
};
static_assert(sizeof(Sent) == 64);

// The most keys that index_choose chooses among: FEW of index/cuda.rs.
constexpr uint32_t kFew = 2048, kMostChoosers = kFew / kChooserKeys;

// A score and the number of the choice, written and read as one: who finds the number has the score.
__device__ __forceinline__ void send_score(uint64_t* to, uint32_t score, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((uint64_t)tag << 32 | score) : "memory");
}
__device__ __forceinline__ uint64_t look_for(const uint64_t* at) {
    uint64_t x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}

__device__ __forceinline__ void await(const uint32_t* count, uint32_t n) {
    while (arrived(count) < n) {}
}

// Scales of a vector that span so little that its codes, doubled and each times its block's power of two above the least, are int8.
constexpr uint32_t kNarrow = 3;
static_assert((12 << kNarrow) < 128 && kDim * (12 << kNarrow) * (12 << kNarrow) < 1 << 22);

// Bytes times a power of two which they have room for.
__device__ __forceinline__ uint32_t times_power(uint32_t bytes, uint32_t power) {
    return bytes << power & __byte_perm(0xf8fcfeffu, 0, 0x1111 * power);
}

__device__ __forceinline__ void mma_s8_on(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A row's queries in shared memory. Codes: 16 bytes of a head stand eight heads apart, so that eight rows meet no bank twice.
// Scales are those of blocks, or of a narrow head, whose codes have their powers of two already, its least.
struct SharedQueries {
    float weights[kHeads], scale[kHeads];
    uint32_t bytes[kHeads];
    uint32_t span, least, highest;

    // One block of a head, by a thread.
    __device__ __forceinline__ void store(uint8_t* codes, uint32_t h, uint32_t b, const uint32_t (&raw)[4], const Scales& s) {
        const bool narrow = s.most - s.least <= kNarrow;
        const uint32_t power = narrow ? (s.bytes >> 8 * b & 0xff) - s.least : 0;
        uint4 low, high;
        low.x = times_power(doubled(raw[0] & 0x0f0f0f0fu), power), high.x = times_power(doubled(raw[0] >> 4 & 0x0f0f0f0fu), power);
        low.y = times_power(doubled(raw[1] & 0x0f0f0f0fu), power), high.y = times_power(doubled(raw[1] >> 4 & 0x0f0f0f0fu), power);
        low.z = times_power(doubled(raw[2] & 0x0f0f0f0fu), power), high.z = times_power(doubled(raw[2] >> 4 & 0x0f0f0f0fu), power);
        low.w = times_power(doubled(raw[3] & 0x0f0f0f0fu), power), high.w = times_power(doubled(raw[3] >> 4 & 0x0f0f0f0fu), power);
        uint4* head = reinterpret_cast<uint4*>(codes + h * kDim);
        head[(2 * b) ^ (h & 7)] = low, head[(2 * b + 1) ^ (h & 7)] = high;
        if (b == 0) bytes[h] = narrow ? s.least * 0x01010101u : s.bytes, scale[h] = half_scale(s.least, 0);
    }
};

// The same as a warp multiplies them: of every tile of 16, heads lane / 4 and lane / 4 + 8.
struct Fragments {
    uint32_t x[kTiles][kBlocks][4];
    float weight[kTiles][2];

    __device__ __forceinline__ void load(const uint8_t* codes, const SharedQueries& q) {
        const uint32_t lane = threadIdx.x & 31;
#pragma unroll
        for (uint32_t m = 0; m < kTiles; ++m) {
            const uint32_t h = 16 * m + (lane & 15);
#pragma unroll
            for (uint32_t b = 0; b < kBlocks; ++b) {
                const uint32_t at = (uint32_t)__cvta_generic_to_shared(codes + h * kDim + 16 * ((2 * b + (lane >> 4)) ^ (h & 7)));
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(x[m][b][0]), "=r"(x[m][b][1]), "=r"(x[m][b][2]), "=r"(x[m][b][3])
                             : "r"(at)
                             : "memory");
            }
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                weight[m][half] = q.weights[16 * m + 8 * half + (lane >> 2)];
            }
        }
    }
};

// Scores of eight keys, as `score_tile`. Where scales of all heads and of all eight keys are narrow, the product takes them along.
template <typename Next, typename Put, typename InOrder>
__device__ __forceinline__ void score_eight(const Fragments& f, const SharedQueries& q, const Keys& keys, bool dry, Next next, Put put,
                                            InOrder in_order) {
    const uint32_t lane = threadIdx.x & 31;
    uint32_t used = 0;
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) used |= (keys.raw[b] & 0x77777777u) != 0 ? 1u << b : 0;
    used |= __shfl_xor_sync(kFull, used, 1), used |= __shfl_xor_sync(kFull, used, 2);
    const Scales s = scales_of(keys.bytes, ~used & 15);
    const bool plain = any_order(q, s);
    float sum[kTiles][2][2];
    // Of heads lane / 4 and lane / 4 + 8 of a tile with keys 2 (lane % 4) and the next.
    if (__all_sync(kFull, q.span <= kNarrow && s.most - s.least <= kNarrow)) {
        int c[kTiles][4];
#pragma unroll
        for (uint32_t b = 0; b < kBlocks; ++b) {
            const uint32_t power = (s.bytes >> 8 * b & 0xff) - s.least;
            const uint32_t b0 = times_power(doubled(keys.raw[b] & 0x0f0f0f0fu), power);
            const uint32_t b1 = times_power(doubled(keys.raw[b] >> 4 & 0x0f0f0f0fu), power);
#pragma unroll
            for (uint32_t m = 0; m < kTiles; ++m) {
                if (b == 0) {
                    mma_s8(c[m], f.x[m][b], b0, b1);
                } else {
                    mma_s8_on(c[m], f.x[m][b], b0, b1);
                }
            }
        }
        const float own = half_scale(s.least, 0);
        const float scale[2] = {__shfl_sync(kFull, own, 8 * (lane & 3)), __shfl_sync(kFull, own, 8 * (lane & 3) + 4)};
#pragma unroll
        for (uint32_t m = 0; m < kTiles; ++m) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const float dot = __fsub_rn(__int_as_float(c[m][i]), kMagic);
                sum[m][i / 2][i % 2] = __fmul_rn(__fmul_rn(dot, q.scale[16 * m + 8 * (i / 2) + (lane >> 2)]), scale[i % 2]);
            }
        }
    } else {
        dots_by_block(sum, f.x, keys, s.bytes,
                      [&](uint32_t m, uint32_t half, uint32_t b) { return half_scale(q.bytes[16 * m + 8 * half + (lane >> 2)], b); });
    }
    next();
    // But for zeros' signs as there: a sum of -0 is a score of +0 in the end.
    const auto weighed = [&](uint32_t m, uint32_t half, float v) { return __fmul_rn(f.weight[m][half], v); };
    sum_heads(sum, plain, dry, weighed, put, in_order);
}

// The query, once all of it is there, by a block of kThreads: a thread brings a block of a head. `dry`: whatever stands there, so
// that the instructions are there when the query comes.
__device__ __forceinline__ void take_query(const Sent& in, uint32_t tag, bool dry, uint8_t* codes, SharedQueries& q) {
    const uint32_t thread = threadIdx.x, lane = thread & 31, head = thread / kBlocks, block = thread % kBlocks;
    static_assert(kThreads == kHeads * kBlocks);
    if (thread == 0) q.span = 0, q.least = 255, q.highest = 0;
    const uint64_t from = in.packed + 32 * thread;
    // One lane of a warp first, and seldom: what others send has to get through.
    while (lane == 0 && !dry && look(from + 16).w != tag) __nanosleep(kPause);
    __syncwarp();
    uint4 a, b;
    uint64_t weight;
    for (;;) {
        a = look(from), b = look(from + 16), weight = look_for(in.weights + thread % kHeads);
        if (dry || (a.w == tag && b.w == tag && weight >> 32 == tag)) break;
        __nanosleep(kPause);
    }
    __syncthreads();
    if (thread < kHeads) q.weights[thread] = __fmul_rn(__uint_as_float((uint32_t)weight), in.factor);
    const uint32_t raw[4] = {a.x, a.y, a.z, b.x};
    uint32_t bytes = b.y << 8 * block;
    bytes |= __shfl_xor_sync(kFull, bytes, 1);
    bytes |= __shfl_xor_sync(kFull, bytes, 2);
    const uint32_t used = __ballot_sync(kFull, ((raw[0] | raw[1] | raw[2] | raw[3]) & 0x77777777u) != 0);
    const Scales scales = scales_of(bytes, ~(used >> (lane & 28)) & 15);
    q.store(codes, head, block, raw, scales);
    const uint32_t wide = __reduce_max_sync(kFull, scales.most - scales.least);
    const uint32_t low = __reduce_min_sync(kFull, scales.least), high = __reduce_max_sync(kFull, scales.most);
    if (lane == 0) atomicMax(&q.span, wide), atomicMin(&q.least, low), atomicMax(&q.highest, high);
    __syncthreads();
}

// Values of a head of the query, as `read_key`.
__device__ __forceinline__ void read_head(float (&x)[4], const Sent& in, uint32_t h) {
    const uint32_t i = threadIdx.x & 15;
    const uint8_t *at = reinterpret_cast<const uint8_t*>(in.packed) + 32 * kBlocks * h, *code = at + (i < 12 ? i : i + 4);
#pragma unroll
    for (uint32_t j = 0; j < kBlocks; ++j) x[j] = key_value(__ldcg(code + 32 * j), __ldcg(at + 32 * j + 20));
}

// A step that leaves nothing to choose, or whose context class was too small: by one block, which ends behind the product.
__device__ __forceinline__ void choose_nothing(const Sent& in, uint32_t visible, uint32_t tag, uint32_t* picks, const StepView& view) {
    pdl_wait();
    const bool faulty = visible > in.most;
    // Who waits for a choice finds that there is none.
    if (faulty && threadIdx.x <= kMostChoosers) send_three(in.chosen + 16 * threadIdx.x, threadIdx.x == 0 ? tag : 0, 0, 1, tag);
    if (threadIdx.x == 0) {
        *in.left = 0;
        if (faulty) report_fault(view, 0x69780001), picks[0] = kIndexFault;
        // The next choice has another number than what was sent for this one.
        *in.number = tag;
    }
}

}  // namespace arc::indexer
