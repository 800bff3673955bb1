// The indexer's scores and its choice. Exact.
//
// index_score  scores of the visible keys of a row, as ordered integers (score.cuh).
// index_pick   the best of a row: of few, by a block that holds them in registers and finds the least chosen one two bits at
//              a time; of many, by radix selection over the blocks of a cluster.
//
// One row's choice beside a product: choose.cu and, among many keys, choose_many.cu.
#include "cluster.cuh"
#include "copies.cuh"
#include "score.cuh"

namespace arc {

using namespace indexer;

// Grid: (blocks of a row, rows of this launch). Dynamic shared memory: a row's queries. `scores`: [rows of this launch, most];
// `first`: the first of these rows. `factor`: what the projected weights are multiplied by. `straight`: whether int8 mma may be used. `late`: whether
// queries and their weights are there only when the kernel before has ended.
extern "C" __global__ void __launch_bounds__(256)
    index_score(LatentArgs a, uint32_t* scores, uint32_t most, uint32_t first, float factor, uint32_t straight,
                uint32_t late, StepView view) {
    __shared__ __align__(16) int8_t codes[kHeads][kCodeStride];
    __shared__ float weights[kIndexDim];
    __shared__ uint32_t bytes_of[kHeads];
    __shared__ uint32_t span, least, highest, exact;
    extern __shared__ __align__(16) float q[];  // [heads][dim]
    pdl_launch();
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    if (late) pdl_wait();
    if (thread == 0) span = 0, least = 255, highest = 0, exact = 1;
    __syncthreads();
    // Otherwise queries, their weights, keys and what is known of the row are there already (latent.cu, "What runs ahead").
    const uint32_t r = first + blockIdx.y;
    const uint32_t heads = a.index_heads, dim = a.index_dim;
    // On their way before anything is known of the row.
    for (uint32_t i = 4 * thread; i < heads * dim; i += 4 * kThreads) {
        copy16(q + i, a.index_q + (size_t)r * heads * dim + i);
    }
    const RowInfo info = info_early(view, r);
    const uint32_t visible = info.live ? a.keys.visible(info.pos) : 0;
    // Few keys are a few blocks' work: the others leave room for the next kernels. Block 0 ends after the kernel before.
    const bool idle = straight && blockIdx.x * kWarps * 8 >= visible;
    if (visible <= a.top || visible > most || idle) {
        copies_landed();
        if (blockIdx.x != 0) return;
        if (!late) pdl_wait();
        // The step's context class was too small.
        if (visible > most && thread == 0) report_fault(view, 0x69780001);
        return;
    }
    scores += (size_t)blockIdx.y * most;
    const uint32_t* blocks = view.blocks + (size_t)info.slot * view.max_blocks;
    const float* projected = a.pool + (size_t)r * a.pool_dim + a.pool_dim - heads;
    for (uint32_t h = thread; h < heads; h += kThreads) weights[h] = __fmul_rn(__ldcg(projected + h), factor);
    copies_landed();
    auto query = [&](float (&x)[4], uint32_t h) { load_row(x, q + (size_t)h * dim, dim); };
    if (!straight) {
        __syncthreads();
        if (!late) pdl_wait();
        for (uint32_t w = blockIdx.x * kWarps + warp; w < visible; w += gridDim.x * kWarps) {
            const uint8_t* key = a.keys.rows + a.keys.place(blocks, w) * a.keys.row_bytes;
            const float score = score_in_order(query, weights, key, heads, dim, a.key_format);
            if (lane == 0) scores[w] = ordinal(score);
        }
        return;
    }
    // Queries back to codes: a warp takes heads in turn, as it holds rows.
    // The first tile's keys, meanwhile.
    auto key = [&](uint32_t w) { return a.keys.rows + a.keys.place(blocks, min(w, visible - 1)) * a.keys.row_bytes; };
    Keys keys;
    keys.load(key((blockIdx.x * kWarps + warp) * 8 + (lane >> 2)));
    __syncthreads();
    // Hardly unrolled: code that runs once takes its time to come.
#pragma unroll 2
    for (uint32_t h = warp; h < kHeads; h += kWarps) {
        float x[4];
        load_row(x, q + h * kDim, kDim);
        uint32_t bytes = 0, zeros = 0;
        bool fits = true;
#pragma unroll
        for (uint32_t b = 0; b < kBlocks; ++b) {
            const uint32_t amax = __reduce_max_sync(kFull, magnitude_bits(x[b]));
            const uint32_t scale = fp4_scale(amax);
            const int code = __float2int_rn(__fmul_rn(__fmul_rn(x[b], inverse_scale(scale)), 2.0f));
            fits = fits && __fmul_rn((float)code, __fmul_rn(0.5f, e8m0_to_f32(scale))) == x[b];
            codes[h][32 * b + lane] = code;
            bytes |= scale << 8 * b;
            zeros |= (uint32_t)(amax == 0) << b;
        }
        fits = __all_sync(kFull, fits);
        if (lane == 0) {
            const Scales s = scales_of(bytes, zeros);
            bytes_of[h] = s.bytes;
            atomicMax(&span, s.most - s.least);
            atomicMin(&least, s.least);
            atomicMax(&highest, s.most);
            if (!fits) exact = 0;
        }
    }
    __syncthreads();
    if (!late) pdl_wait();
    const uint32_t tiles = (visible + 7) / 8;
    Queries queries;
#pragma unroll
    for (uint32_t m = 0; m < kTiles; ++m) {
#pragma unroll
        for (uint32_t b = 0; b < kBlocks; ++b) {
            const uint32_t at = (uint32_t)__cvta_generic_to_shared(&codes[16 * m + (lane & 15)][32 * b + (lane >> 4) * 16]);
            uint32_t(&x)[4] = queries.x[m][b];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(at)
                         : "memory");
        }
    }
    queries.load_scales(weights, bytes_of, 1);
    const Limits limits{span, least, highest, exact};
    for (uint32_t tile = blockIdx.x * kWarps + warp; tile < tiles; tile += gridDim.x * kWarps) {
        score_tile(
            queries, keys, limits, false,
            // The next tile's keys are on their way while this one's terms are summed.
            [&]() { keys.load(key((tile + gridDim.x * kWarps) * 8 + (lane >> 2))); },
            [&](uint32_t i, uint32_t score) {
                if (tile * 8 + i < visible) scores[tile * 8 + i] = score;
            },
            [&](uint32_t i) { return score_in_order(query, weights, key(tile * 8 + i), kHeads, kDim, kRowFp4); });
    }
}

namespace {

constexpr uint32_t kPickThreads = 1024;
// Blocks of a cluster, at most.
constexpr uint32_t kPickBlocks = 8;

// A word in the shared memory of another block of the cluster, at the place that `own` has in this one's.
__device__ __forceinline__ uint32_t remote(const uint32_t* own, uint32_t block) {
    uint32_t x;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(in_block(own, block)) : "memory");
    return x;
}

// The sum of x over the threads before this one, and over all.
__device__ uint32_t scan_block(uint32_t x, uint32_t* warp_sums, uint32_t& all) {
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t sum = x;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const uint32_t other = __shfl_up_sync(kFull, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        uint32_t s = warp_sums[lane];
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            const uint32_t other = __shfl_up_sync(kFull, s, step);
            if (lane >= step) s += other;
        }
        warp_sums[lane] = s;
    }
    __syncthreads();
    const uint32_t before = (warp == 0 ? 0 : warp_sums[warp - 1]) + sum - x;
    all = warp_sums[31];
    __syncthreads();
    return before;
}

// Threads that pick among few scores, and the most that each of them has.
constexpr uint32_t kFewThreads = 256, kFewEach = 16;

// The choice among n <= kFewThreads * kFewEach scores, by the first kFewThreads threads of a block. Each has neighbours.
__device__ void pick_few(const LatentArgs& a, const uint32_t* scores, uint32_t n, uint32_t* picks, uint2 (*sums)[kFewThreads / 32]) {
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, warps = kFewThreads / 32;
    const uint32_t each = (n + kFewThreads - 1) / kFewThreads, from = thread * each;
    uint32_t x[kFewEach];
    bool nan = false;
#pragma unroll
    for (uint32_t i = 0; i < kFewEach; ++i) {
        // Less than every threshold that is tried.
        x[i] = 0;
        if (i < each && from + i < n) {
            x[i] = __ldcg(scores + from + i);
            nan = nan || is_nan_ordinal(x[i]);
        }
    }
    uint32_t turn = 0;
    // Two words of every thread, summed.
    auto sum = [&](uint2 v) {
        v = make_uint2(__reduce_add_sync(kFull, v.x), __reduce_add_sync(kFull, v.y));
        if (lane == 0) sums[turn & 1][warp] = v;
        sync_threads<kFewThreads>();
        v = lane < warps ? sums[turn & 1][lane] : make_uint2(0, 0);
        turn += 1;
        return make_uint2(__reduce_add_sync(kFull, v.x), __reduce_add_sync(kFull, v.y));
    };
    uint32_t found = 0;
#pragma unroll 1
    for (int shift = 30; shift >= 0; shift -= 2) {
        const uint32_t one = found | 1u << shift, two = found | 2u << shift, three = found | 3u << shift;
        uint2 v = make_uint2(0, 0);
#pragma unroll
        for (uint32_t i = 0; i < kFewEach; i += 4) {
            if (i >= each) break;
#pragma unroll
            for (uint32_t j = i; j < i + 4; ++j) {
                v.x += (x[j] >= one ? 1u : 0u) + (x[j] >= two ? 0x10000u : 0u);
                v.y += x[j] >= three;
            }
        }
        v = sum(v);
        const uint32_t digit = v.y >= a.top ? 3 : v.x >> 16 >= a.top ? 2 : (v.x & 0xffff) >= a.top ? 1 : 0;
        const uint32_t reach = digit == 3 ? v.y : digit == 2 ? v.x >> 16 : digit == 1 ? v.x & 0xffff : 0;
        found |= digit << shift;
        // No more reach it than are wanted: it parts them as well as the least chosen one would.
        if (reach == a.top) break;
    }
    // Larger ones and equal ones, of the thread and before it.
    uint32_t own = 0;
#pragma unroll
    for (uint32_t i = 0; i < kFewEach; ++i) {
        if (i < each && from + i < n) own += (x[i] > found ? 0x10000u : 0u) + (x[i] == found ? 1u : 0u);
    }
    uint32_t before = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const uint32_t other = __shfl_up_sync(kFull, before, step);
        if (lane >= step) before += other;
    }
    const bool fault = __any_sync(kFull, nan);
    if (lane == 31) sums[turn & 1][warp] = make_uint2(before, fault);
    sync_threads<kFewThreads>();
    before -= own;
    uint32_t all = 0, faults = 0;
#pragma unroll
    for (uint32_t w = 0; w < kFewThreads / 32; ++w) {
        const uint2 v = sums[turn & 1][w];
        if (w < warp) before += v.x;
        all += v.x, faults += v.y;
    }
    // Of equal ones so many, the first; in a deliberately wrong variant for tests the last.
    const uint32_t need = a.top - (all >> 16), skip = a.mutant == 2 ? (all & 0xffff) - need : 0;
    uint32_t larger = before >> 16, equal = before & 0xffff;
    uint32_t chosen = larger + (equal > skip ? min(equal - skip, need) : 0);
#pragma unroll
    for (uint32_t i = 0; i < kFewEach; ++i) {
        if (i >= each || from + i >= n) continue;
        const bool same = x[i] == found;
        if (x[i] > found || (same && equal >= skip && equal < skip + need)) {
            picks[chosen] = chosen == 0 && faults != 0 ? kIndexFault : from + i;
            chosen += 1;
        }
        equal += same;
    }
}

}  // namespace

// Grid: (blocks of a cluster, rows of this launch). Dynamic shared memory: `room` words, for a block's share of the
// scores; where it is too little they are read from device memory each time.
extern "C" __global__ void __launch_bounds__(1024, 1)
    index_pick(LatentArgs a, const uint32_t* scores, uint32_t* picks, uint32_t most, uint32_t first, uint32_t room,
               StepView view) {
    extern __shared__ __align__(16) uint32_t kept[];
    __shared__ uint32_t bins[3][kBins];
    __shared__ uint32_t warp_sums[32], digit, rest, faulty, total;
    __shared__ uint2 few[2][kFewThreads / 32];
    const uint32_t thread = threadIdx.x, blocks = gridDim.x;
    pdl_launch();
    for (uint32_t i = thread; i < 3 * kBins; i += kPickThreads) bins[0][i] = 0;
    if (thread == 0) faulty = 0;
    pdl_wait();
    const uint32_t r = first + blockIdx.y;
    const RowInfo info = view.infos[r];
    const uint32_t n = info.live ? a.keys.visible(info.pos) : 0;
    if (n <= a.top) return;
    if (n > most) {
        // Told by index_score. What was chosen before is not this row's.
        if (blockIdx.x == 0 && thread == 0) picks[(size_t)r * a.top] = kIndexFault;
        return;
    }
    if (blocks == 1 && n <= kFewThreads * kFewEach) {
        if (thread < kFewThreads) pick_few(a, scores + (size_t)blockIdx.y * most, n, picks + (size_t)r * a.top, few);
        return;
    }
    // The block's share, a run of neighbours, and the thread's share of it.
    const uint32_t share = ((n + blocks - 1) / blocks + 3) & ~3u;
    const uint32_t begin = min(blockIdx.x * share, n), here = min(share, n - begin);
    scores += (size_t)blockIdx.y * most + begin;
    const uint32_t* mine = scores;
    __syncthreads();
    bool nan = false;
    if (share <= room) {
        for (uint32_t i = thread; i < here; i += kPickThreads) {
            const uint32_t x = scores[i];
            kept[i] = x;
            nan = nan || is_nan_ordinal(x);
        }
        mine = kept;
    } else {
        for (uint32_t i = thread; i < here; i += kPickThreads) nan = nan || is_nan_ordinal(scores[i]);
    }
    if (nan) faulty = 1;
    __syncthreads();
    uint32_t found = 0, need = a.top;
#pragma unroll
    for (uint32_t pass = 0; pass < 3; ++pass) {
        const uint32_t shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, count = pass == 2 ? 1024 : 2048;
        const uint32_t above = pass == 0 ? 0 : pass == 1 ? 0xffe00000u : 0xfffffc00u;
        for (uint32_t i = thread; i < here; i += kPickThreads) {
            const uint32_t x = mine[i];
            if ((x & above) == found) atomicAdd(&bins[pass][x >> shift & (count - 1)], 1);
        }
        if (blocks > 1) {
            cluster_sync();
        } else {
            __syncthreads();
        }
        // Thread t has the two bins that come t-th from the top.
        const uint32_t high = kBins - 1 - 2 * thread;
        uint32_t x[2] = {bins[pass][high], bins[pass][high - 1]};
        if (blocks > 1) {
            uint32_t y[kPickBlocks][2];
#pragma unroll
            for (uint32_t block = 0; block < kPickBlocks; ++block) {
                y[block][0] = remote(&bins[pass][high], min(block, blocks - 1));
                y[block][1] = remote(&bins[pass][high - 1], min(block, blocks - 1));
            }
            x[0] = x[1] = 0;
#pragma unroll
            for (uint32_t block = 0; block < kPickBlocks; ++block) {
                if (block < blocks) x[0] += y[block][0], x[1] += y[block][1];
            }
        }
        uint32_t all;
        const uint32_t before = scan_block(x[0] + x[1], warp_sums, all);
        if (before < need && before + x[0] >= need) {
            digit = high, rest = need - before;
        } else if (before + x[0] < need && before + x[0] + x[1] >= need) {
            digit = high - 1, rest = need - before - x[0];
        }
        __syncthreads();
        found |= digit << shift, need = rest;
        __syncthreads();
    }
    // Above `found` all are chosen, at it the first `need`.
    const uint32_t per_thread = (here + kPickThreads - 1) / kPickThreads;
    const uint32_t from = min(thread * per_thread, here), to = min(from + per_thread, here);
    uint32_t larger = 0, equal = 0;
    for (uint32_t i = from; i < to; ++i) larger += mine[i] > found, equal += mine[i] == found;
    // Both counts in one word: a block's share is below 2^16.
    uint32_t all;
    const uint32_t before = scan_block(larger << 16 | equal, warp_sums, all);
    uint32_t larger_before = before >> 16, equal_before = before & 0xffff, equals = all & 0xffff;
    bool fault = faulty != 0;
    if (blocks > 1) {
        if (thread == 0) total = all;
        cluster_sync();
        uint32_t y[kPickBlocks], f[kPickBlocks];
#pragma unroll
        for (uint32_t block = 0; block < kPickBlocks; ++block) {
            y[block] = remote(&total, min(block, blocks - 1)), f[block] = remote(&faulty, min(block, blocks - 1));
        }
        equals = 0;
#pragma unroll
        for (uint32_t block = 0; block < kPickBlocks; ++block) {
            fault = fault || f[block] != 0;
            if (block < blockIdx.x) larger_before += y[block] >> 16, equal_before += y[block] & 0xffff;
            if (block < blocks) equals += y[block] & 0xffff;
        }
    }
    if (a.mutant == 2) {
        // A deliberately wrong variant for tests: of equal scores the later rows.
        const uint32_t skip = equals - need;
        uint32_t chosen = larger_before + (equal_before > skip ? equal_before - skip : 0);
        for (uint32_t i = from; i < to; ++i) {
            if (mine[i] > found || (mine[i] == found && equal_before >= skip)) picks[(size_t)r * a.top + chosen++] = begin + i;
            equal_before += mine[i] == found;
        }
    } else {
        uint32_t chosen = larger_before + min(equal_before, need);
        for (uint32_t i = from; i < to; ++i) {
            const uint32_t x = mine[i];
            if (x > found || (x == found && equal_before < need)) {
                picks[(size_t)r * a.top + chosen] = chosen == 0 && fault ? kIndexFault : begin + i;
                chosen += 1;
            }
            equal_before += x == found;
        }
    }
    // Nobody leaves while others read what it counted.
    if (blocks > 1) cluster_sync();
}

}  // namespace arc
