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

constexpr int kBlockExperts = 256;

// What a block of 256 threads shares while it chooses for one row among as many experts.
struct __align__(16) Contest {
    unsigned keys[kBlockExperts];
    float all[kBlockExperts];
    unsigned tops[32];             // read by fours, as `scores`
    float scores[kMaxChosen];      // of the chosen ones, 0 behind the last
    unsigned ids[kMaxChosen];      // ascending
    unsigned picks[kMaxChosen];    // of the row's token, where a table chooses
    unsigned masks[8], before[8];  // the chosen ones of 32 experts each, and how many are below these
    unsigned faulty;
};

// Which experts have the `chosen` largest of `contest.keys`, of equal ones those with the smaller ids: `masks` and `before`.
// By one warp, whose lane l looks at experts l + 32 i.
//
// The chosen-th of the lanes' largest keys bounds what can be chosen from below. Hardly more are left; the worst of them go.
__device__ __forceinline__ void largest(Contest& contest, int chosen) {
    const int lane = threadIdx.x & 31;
    unsigned keys[8], masks[8], top = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) keys[i] = contest.keys[lane + 32 * i], top = max(top, keys[i]);
    contest.tops[lane] = top;
    __syncwarp();
    int above = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(contest.tops + i);
        above += (four.x > top) + (four.y > top) + (four.z > top) + (four.w > top);
    }
    const unsigned least = __reduce_min_sync(kFullWarp, above < chosen ? top : 0xffffffffu);
    int n = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) masks[i] = __ballot_sync(kFullWarp, keys[i] >= least), n += __popc(masks[i]);
#pragma unroll 1
    for (; n > chosen; --n) {
        unsigned low = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < 8; ++i) low = min(low, masks[i] >> lane & 1 ? keys[i] : 0xffffffffu);
        low = __reduce_min_sync(kFullWarp, low);
        bool gone = false;
#pragma unroll
        for (int i = 7; i >= 0; --i) {
            const unsigned such = __ballot_sync(kFullWarp, keys[i] == low) & masks[i];
            if (such != 0 && !gone) masks[i] ^= 0x80000000u >> __clz(such), gone = true;
        }
    }
    if (lane == 0) {
        unsigned before = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) contest.masks[i] = masks[i], contest.before[i] = before, before += __popc(masks[i]);
    }
}

// The choice and the assignments of one row by a block of 256 threads: thread e has the score of expert e and what is
// added to it. `hashed`: threads below `chosen` have left `picks`. A row that is not live is nobody's.
__device__ __forceinline__ void choose_block(unsigned* ids, float* weights, unsigned* order, unsigned* bounds, Contest& contest,
                                             float score, float bias, bool hashed, bool live, int chosen, float scale) {
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    contest.keys[t] = ordered(__fadd_rn(score, bias));
    contest.all[t] = score;
    if (t == 0) contest.faulty = 0;
    if (t < kMaxChosen) contest.scores[t] = 0.0f;
    __syncthreads();
    if (score != score) contest.faulty = 1;
    // Chosen experts below this thread's.
    unsigned before = 0;
    if (!hashed) {
        if (warp == 0) largest(contest, chosen);
        __syncthreads();
        const unsigned mask = contest.masks[warp];
        before = contest.before[warp] + __popc(mask & ((1u << lane) - 1));
        if (mask >> lane & 1) contest.ids[before] = t, contest.scores[before] = score;
    } else {
        const unsigned id = t < chosen ? contest.picks[t] : 0;
        // A place is the number of smaller ids, and of equal ones before it.
        int place = 0;
#pragma unroll 1
        for (int p = 0; p < chosen; ++p) {
            const unsigned other = contest.picks[p];
            before += other < (unsigned)t;
            place += other < id || (other == id && p < t);
        }
        if (t < chosen) contest.ids[place] = id, contest.scores[place] = contest.all[id];
    }
    __syncthreads();
    bounds[t] = live ? before : 0;
    if (t < chosen) {
        // The sum is taken in the order of ids. What is behind the last is 0, and no score is below.
        float total = 0.0f;
#pragma unroll
        for (int p = 0; p < kMaxChosen; p += 4) {
            const float4 four = *reinterpret_cast<const float4*>(contest.scores + p);
            total = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(total, four.x), four.y), four.z), four.w);
        }
        ids[t] = contest.ids[t];
        weights[t] = contest.faulty ? ARC_NAN : __fmul_rn(__fdiv_rn(contest.scores[t], total), scale);
        if (live) order[t] = t;
    }
    if (t == 0) bounds[kBlockExperts] = live ? chosen : 0;
}

}  // namespace arc::router
