// The gate of a mixture of experts: the arithmetic of router.rs, line for line.
#pragma once

#include "../../sum.cuh"

namespace arc::router {

constexpr int kMaxExperts = 1024;
constexpr int kMaxChosen = 16;

// The score of a logit.
__device__ __forceinline__ float score(float logit) { return __fsqrt_rn(softplus(logit)); }

// Bits that order like the numbers, NaN as the largest; -0 and +0 are one.
__device__ __forceinline__ unsigned ordered(float value) {
    const unsigned bits = __float_as_uint(value != value ? ARC_INF : __fadd_rn(value, 0.0f));
    return bits ^ ((unsigned)((int)bits >> 31) | 0x80000000u);
}

// What a warp leaves of its row while it chooses.
struct Chosen {
    unsigned ids[kMaxChosen];
    float scores[kMaxChosen];
};

// The choice of one row by one warp: lane l looks at experts l + 32 i. `table`: the row's ids, or null where scores
// choose, with bias(e). Writes `ids` and `weights`, ascending by id, and `found`. PER: experts a lane at most.
template <int PER, typename Bias>
__device__ __forceinline__ void choose(unsigned* ids, float* weights, Chosen& found, const float* scores,
                                       const unsigned* table, Bias bias, int experts, int chosen, float scale) {
    const int lane = threadIdx.x & 31;
    // Lane p gets the p-th id.
    unsigned id = 0xffffffffu;
    if (table && lane < chosen) id = table[lane];
    float mine[PER];
    bool faulty = false;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        const int e = lane + 32 * i;
        mine[i] = e < experts ? scores[e] : 0.0f;
        faulty |= mine[i] != mine[i];
    }
    faulty = __any_sync(kFullWarp, faulty);
    if (!table) {
        unsigned keys[PER], top = 0;
#pragma unroll
        for (int i = 0; i < PER; ++i) {
            // The key of -inf is not 0: that marks the ones that were taken.
            keys[i] = lane + 32 * i < experts ? ordered(__fadd_rn(mine[i], bias(i))) : 0u;
            top = max(top, keys[i]);
        }
        for (int p = 0; p < chosen; ++p) {
            const unsigned best = __reduce_max_sync(kFullWarp, top);
            unsigned first = 0xffffffffu;
#pragma unroll
            for (int i = PER - 1; i >= 0; --i) {
                if (keys[i] == best) first = lane + 32 * i;
            }
            const unsigned winner = __reduce_min_sync(kFullWarp, first);
            if (lane == p) id = winner;
            top = 0;
#pragma unroll
            for (int i = 0; i < PER; ++i) {
                if (lane + 32 * i == (int)winner) keys[i] = 0;
                top = max(top, keys[i]);
            }
        }
    }
    // A lane's place is the number of smaller ids, and of equal ones before it.
    int place = 0;
    for (int p = 0; p < chosen; ++p) {
        const unsigned other = __shfl_sync(kFullWarp, id, p);
        place += other < id || (other == id && p < lane);
    }
    const float value = lane < chosen ? scores[id] : 0.0f;
    if (lane < chosen) {
        found.ids[place] = id;
        found.scores[place] = value;
    }
    __syncwarp();
    // The sum is taken in the order of ids.
    float total = 0.0f;
    for (int p = 0; p < chosen; ++p) total = __fadd_rn(total, found.scores[p]);
    if (lane < chosen) {
        ids[place] = id;
        weights[place] = faulty ? ARC_NAN : __fmul_rn(__fdiv_rn(value, total), scale);
    }
}

// A score as a word that is not 0, which says that there is none yet.
__device__ __forceinline__ unsigned posted(float score) { return ~__float_as_uint(score != score ? ARC_NAN : score); }
__device__ __forceinline__ float score_of(unsigned word) { return __uint_as_float(~word); }

constexpr int kOneExperts = 256;
// Experts that a lane looks at.
constexpr int kLaneExperts = kOneExperts / 32;

// What a warp shares with its block while it chooses for one row among up to 256 experts.
struct __align__(16) Contest {
    float all[kOneExperts];      // where a table chooses
    unsigned tops[32];           // read by fours, as `scores`
    float scores[kMaxChosen];    // of the chosen ones, 0 behind the last
    float weights[kMaxChosen];
    unsigned ids[kMaxChosen];    // ascending
};

// Which experts have the `chosen` largest keys, of equal ones those with the smaller ids: bit l of `masks[i]` is expert
// l + 32 i, whose key lane l has. By one warp.
//
// The chosen-th of the lanes' largest keys bounds what can be chosen from below. Hardly more are left; the worst of them go.
__device__ __forceinline__ void largest(unsigned (&masks)[kLaneExperts], const unsigned (&keys)[kLaneExperts], unsigned* tops,
                                        int chosen) {
    const int lane = threadIdx.x & 31;
    unsigned top = 0;
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) top = max(top, keys[i]);
    tops[lane] = top;
    __syncwarp();
    int above = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(tops + i);
        above += (four.x > top) + (four.y > top) + (four.z > top) + (four.w > top);
    }
    const unsigned least = __reduce_min_sync(kFullWarp, above < chosen ? top : 0xffffffffu);
    int n = 0;
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) masks[i] = __ballot_sync(kFullWarp, keys[i] >= least), n += __popc(masks[i]);
#pragma unroll 1
    for (; n > chosen; --n) {
        unsigned low = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < kLaneExperts; ++i) low = min(low, masks[i] >> lane & 1 ? keys[i] : 0xffffffffu);
        low = __reduce_min_sync(kFullWarp, low);
        bool gone = false;
#pragma unroll
        for (int i = kLaneExperts - 1; i >= 0; --i) {
            const unsigned such = __ballot_sync(kFullWarp, keys[i] == low) & masks[i];
            if (such != 0 && !gone) masks[i] ^= 0x80000000u >> __clz(such), gone = true;
        }
    }
}

// The experts with the largest sums of `scores[i]` and `bias[i]`, those of expert lane + 32 i, and their scores. By one warp.
__device__ __forceinline__ void choose_largest(Contest& contest, const float (&scores)[kLaneExperts],
                                               const float (&bias)[kLaneExperts], int experts, int chosen) {
    const int lane = threadIdx.x & 31;
    unsigned keys[kLaneExperts], masks[kLaneExperts], before = 0;
    if (lane < kMaxChosen) contest.scores[lane] = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) {
        // The key of -inf is not 0.
        keys[i] = lane + 32 * i < experts ? ordered(__fadd_rn(scores[i], bias[i])) : 0u;
    }
    largest(masks, keys, contest.tops, chosen);
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) {
        const unsigned place = before + __popc(masks[i] & ((1u << lane) - 1));
        if (masks[i] >> lane & 1) contest.ids[place] = lane + 32 * i, contest.scores[place] = scores[i];
        before += __popc(masks[i]);
    }
    __syncwarp();
}

// The experts that a table names: lane p below `chosen` has the p-th of them. By one warp.
__device__ __forceinline__ void choose_named(Contest& contest, unsigned id, int chosen) {
    const int lane = threadIdx.x & 31;
    if (lane < kMaxChosen) contest.scores[lane] = 0.0f;
    // A place is the number of smaller ids, and of equal ones before it.
    int place = 0;
#pragma unroll 1
    for (int p = 0; p < chosen; ++p) {
        const unsigned other = __shfl_sync(kFullWarp, id, p);
        place += other < id || (other == id && p < lane);
    }
    if (lane < chosen) contest.ids[place] = id;
    __syncwarp();
}

// The scores of those that a table names.
__device__ __forceinline__ void score_named(Contest& contest, const float (&scores)[kLaneExperts], int chosen) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) contest.all[lane + 32 * i] = scores[i];
    __syncwarp();
    if (lane < chosen) contest.scores[lane] = contest.all[contest.ids[lane]];
    __syncwarp();
}

// The weights of the chosen experts, whose scores are there. `faulty`: of any expert.
__device__ __forceinline__ void weigh(Contest& contest, bool faulty, int chosen, float scale) {
    const int lane = threadIdx.x & 31;
    // The sum is taken in the order of ids. What is behind the last is 0, and no score is below.
    float total = 0.0f;
#pragma unroll
    for (int p = 0; p < kMaxChosen; p += 4) {
        const float4 four = *reinterpret_cast<const float4*>(contest.scores + p);
        total = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(total, four.x), four.y), four.z), four.w);
    }
    if (lane < chosen) contest.weights[lane] = faulty ? ARC_NAN : __fmul_rn(__fdiv_rn(contest.scores[lane], total), scale);
    __syncwarp();
}

// Leaves the choice and the assignments of the row. One that is not live is nobody's.
__device__ __forceinline__ void leave_choice(unsigned* ids, float* weights, unsigned* order, unsigned* bounds,
                                             const Contest& contest, bool live, int experts, int chosen) {
    const int lane = threadIdx.x & 31;
    if (lane < chosen) {
        ids[lane] = contest.ids[lane];
        weights[lane] = contest.weights[lane];
        if (live) order[lane] = lane;
    }
#pragma unroll 1
    for (int e = lane; e <= experts; e += 32) {
        unsigned before = 0;
        for (int p = 0; p < chosen; ++p) before += contest.ids[p] < (unsigned)e;
        bounds[e] = live ? before : 0;
    }
}

}  // namespace arc::router
