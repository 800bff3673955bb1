// The gate of one row in the kernel of its experts: the arithmetic of router.rs.
//
// Blocks post the scores of a few experts each, and every block takes them all and chooses by itself: nobody waits for a
// block that chooses, and not for a kernel's end. A score has the number of the launch beside it, written and read as one.
#pragma once

#include "../hc/hc.cuh"
#include "router.cuh"

namespace arc::router {

// Warps of a block that have a chunk of one expert's dot product each.
constexpr unsigned kOneWarps = 16;

// `Gate` of router/cuda.rs.
struct Gate {
    unsigned long long h, gate;               // [hidden] and [experts, hidden] f32
    unsigned long long table, bias;           // ids by token, or what is added where scores choose; the other is null
    unsigned long long posts;                 // [256] scores on their way, and numbers of launches
    unsigned long long ids, weights, order, bounds, infos;
    unsigned long long mixing;                // null, or mixing values that are to be settled
    unsigned experts, chosen, chunks;         // chunks of a row
    float scale;
    unsigned iterations;
    float eps;
};
static_assert(sizeof(Gate) == 112);

// What a block shares of it.
struct GateParts {
    Contest contest;
    float sums[kOneWarps];
};

// A chunk of an expert's row, a warp.
struct GateRow {
    float4 w[kChunkReads];

    // Loads it where it stands: before a wait. `block`: among those that have experts; others are behind them.
    __device__ __forceinline__ GateRow(const Gate& g, unsigned block) {
        const unsigned warp = threadIdx.x / 32, task = block * kOneWarps + warp;
        if (warp >= kOneWarps || task / g.chunks >= g.experts) return;
        const float4* from = reinterpret_cast<const float4*>(g.gate) + (size_t)task * (kSumChunk / 4) + threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < kChunkReads; ++j) w[j] = load_early(from + 32 * j);
    }

    // Its part of the expert's dot product, to `sums`.
    __device__ __forceinline__ void dot(const Gate& g, unsigned block, float* sums) const {
        const unsigned warp = threadIdx.x / 32, chunk = warp % g.chunks;
        if (warp >= kOneWarps || (block * kOneWarps + warp) / g.chunks >= g.experts) return;
        const float4* x = reinterpret_cast<const float4*>(g.h) + chunk * (kSumChunk / 4) + threadIdx.x % 32;
        const float4 v[1] = {fold_chunk4([&](int j) { return mul4(w[j], __ldcg(x + 32 * j)); })};
        float s[1];
        sum_lanes4(v, s);
        if (threadIdx.x % 32 == 0) sums[warp] = s[0];
    }
};

// Posts the scores of this block's experts, of `sums`, in launch `number`.
__device__ __forceinline__ void post_scores(const Gate& g, unsigned block, const float* sums, unsigned number) {
    const unsigned per = kOneWarps / g.chunks, e = block * per + threadIdx.x;
    if (threadIdx.x >= per || e >= g.experts) return;
    float logit = 0.0f;
#pragma unroll 1
    for (unsigned c = 0; c < g.chunks; ++c) logit = __fadd_rn(logit, sums[threadIdx.x * g.chunks + c]);
    const unsigned long long word = (unsigned long long)number << 32 | __float_as_uint(score(logit));
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(g.posts + 8ull * e), "l"(word) : "memory");
}

// One warp's way to the choice.
struct Choosing {
    const Gate& g;
    Contest& contest;
    bool faulty = false, live;
    float bias[kLaneExperts], scores[kLaneExperts];

    __device__ __forceinline__ Choosing(const Gate& g, Contest& contest) : g(g), contest(contest) {}

    // Takes the scores of launch `number`, once they are there.
    __device__ __forceinline__ void take(unsigned number) {
        const unsigned lane = threadIdx.x % 32;
        bool there;
        do {
            unsigned long long words[kLaneExperts];
#pragma unroll
            for (int i = 0; i < kLaneExperts; ++i) {
                const unsigned e = min(lane + 32 * i, g.experts - 1);
                asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(words[i]) : "l"(g.posts + 8ull * e) : "memory");
            }
            there = true;
#pragma unroll
            for (int i = 0; i < kLaneExperts; ++i) {
                there &= words[i] >> 32 == number;
                scores[i] = __uint_as_float((unsigned)words[i]);
            }
        } while (!__all_sync(kFullWarp, there));
#pragma unroll
        for (int i = 0; i < kLaneExperts; ++i) faulty |= scores[i] != scores[i];
        faulty = __any_sync(kFullWarp, faulty);
    }

    // Behind the wait: what a table says is known at once.
    __device__ __forceinline__ bool named() {
        const uint2* info = reinterpret_cast<const uint2*>(g.infos);
        const unsigned lane = threadIdx.x % 32;
        live = __ldcg(info).x != 0;
        if (g.table == 0) {
#pragma unroll
            for (int i = 0; i < kLaneExperts; ++i) {
                bias[i] = __ldg(reinterpret_cast<const float*>(g.bias) + min(lane + 32 * i, g.experts - 1));
            }
            return false;
        }
        const unsigned token = __ldcg(info + 1).y;
        unsigned id = 0;
        if (lane < g.chosen) id = __ldg(reinterpret_cast<const unsigned*>(g.table) + (size_t)token * g.chosen + lane);
        choose_named(contest, id, g.chosen);
        return true;
    }
    __device__ __forceinline__ void choose() { choose_largest(contest, scores, bias, g.experts, g.chosen); }

    // Leaves all that the gate leaves, by one block.
    __device__ __forceinline__ void leave() const {
        leave_choice(reinterpret_cast<unsigned*>(g.ids), reinterpret_cast<float*>(g.weights), reinterpret_cast<unsigned*>(g.order),
                     reinterpret_cast<unsigned*>(g.bounds), contest, live, g.experts, g.chosen);
    }
};

}  // namespace arc::router
