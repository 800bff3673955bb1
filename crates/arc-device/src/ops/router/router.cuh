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
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
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

// What a block shares while it chooses for one row.
struct Contest {
    unsigned tops[8];               // the largest key of each warp
    unsigned long long list[256];   // candidates: key, then the smaller id first; 0 for none
    unsigned n, faulty;
    Chosen found;
};

// The choice of one row among up to 256 experts by a block of 256 threads: thread e has the score of expert e. Leaves
// the choice in `contest.found` and writes `ids` and `weights`; the block may go on after a barrier.
//
// The chosen-th of the warps' largest keys bounds what can be chosen from below: few experts are left, and each finds
// its rank among them.
__device__ __forceinline__ void choose_block(unsigned* ids, float* weights, Contest& contest, float score,
                                             const unsigned* table, float bias, int experts, int chosen, float scale,
                                             const float* scores) {
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    if (t == 0) contest.n = 0, contest.faulty = 0;
    const unsigned key = t < experts ? ordered(__fadd_rn(score, bias)) : 0u;
    const unsigned top = __reduce_max_sync(kFullWarp, key);
    if (lane == 0) contest.tops[warp] = top;
    __syncthreads();
    if (t < experts && score != score) contest.faulty = 1;
    if (!table) {
        const unsigned other = contest.tops[lane % 8];
        int rank = 0;
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const unsigned v = contest.tops[w];
            rank += v > other || (v == other && w < lane % 8);
        }
        const unsigned who = __ballot_sync(kFullWarp, lane < 8 && rank == chosen - 1);
        const unsigned least = who ? __shfl_sync(kFullWarp, other, __ffs(who) - 1) : 0u;
        const bool may = t < experts && key >= least;
        const unsigned with = __ballot_sync(kFullWarp, may);
        unsigned at = 0;
        if (lane == 0 && with) at = atomicAdd(&contest.n, __popc(with));
        at = __shfl_sync(kFullWarp, at, 0) + __popc(with & ((1u << lane) - 1));
        if (may) contest.list[at] = (unsigned long long)key << 32 | (unsigned)~t;
        __syncthreads();
        const unsigned n = contest.n;
        if (t < (int)n) {
            const unsigned long long mine = contest.list[t];
            int place = 0;
            for (unsigned j = 0; j < n; ++j) place += contest.list[j] > mine;
            if (place < chosen) contest.found.ids[place] = ~(unsigned)mine;
        }
        __syncthreads();
    } else {
        __syncthreads();
    }
    if (warp == 0) {
        const unsigned* from = table ? table : contest.found.ids;
        const unsigned id = lane < chosen ? from[lane] : 0xffffffffu;
        // A lane's place is the number of smaller ids, and of equal ones before it.
        int place = 0;
        for (int p = 0; p < chosen; ++p) {
            const unsigned other = __shfl_sync(kFullWarp, id, p);
            place += other < id || (other == id && p < lane);
        }
        const float value = lane < chosen ? scores[id] : 0.0f;
        __syncwarp();
        if (lane < chosen) contest.found.ids[place] = id, contest.found.scores[place] = value;
        __syncwarp();
        // The sum is taken in the order of ids.
        float total = 0.0f;
        for (int p = 0; p < chosen; ++p) total = __fadd_rn(total, contest.found.scores[p]);
        if (lane < chosen) {
            ids[place] = id;
            weights[place] = contest.faulty ? ARC_NAN : __fmul_rn(__fdiv_rn(value, total), scale);
        }
    }
}

}  // namespace arc::router
