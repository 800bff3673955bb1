// index_choose  scores and choice of one row in one launch, beside the product that makes the queries of its attention: the index
//               query came first (follow.cu), packed as keys are. One block more looks for the scores, which have a number beside
//               them that is another in every launch, and picks. Small blocks: there is room for one beside the product. Exact.
#include "choose.cuh"

namespace arc {

using namespace indexer;

namespace {

// Words from one head's packed query to the next in shared memory: codes, then scales.
constexpr uint32_t kPackedStride = kDim / 8 + 4;
// Scores of index_choose that stand in shared memory, and those that a lane looks for together.
constexpr uint32_t kKept = 2048, kTogether = 8;
// Rows of the attention are sent for where so few times more are visible than will be chosen.
constexpr uint32_t kAheadTimes = 4;

// What a block that picks has in shared memory.
struct Picking {
    uint32_t kept[kKept], bins[kBins];
    uint32_t sums[kWarps], larger[kWarps], equal[kWarps], digit, rest, faulty;
};

// The choice among n scores that others send, by a block. The least chosen one is found digit by digit, as in index_pick; then
// warps, each with a run of neighbours, count who is above it and who is equal, and write. Rolled: what runs once takes its
// time to come, most of all beside a product.
__device__ __forceinline__ void pick_sent(const LatentArgs& a, const uint64_t* scores, uint32_t tag, uint32_t n, uint32_t* picks,
                                          Picking& s, const unsigned* kept) {
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, before = (1u << lane) - 1;
    const uint32_t share = (n + kThreads - 1) / kThreads * 32, begin = min(warp * share, n), end = min(begin + share, n);
    for (uint32_t i = thread; i < kBins; i += kThreads) s.bins[i] = 0;
    if (thread == 0) s.faulty = 0;
    __syncthreads();
    uint32_t found = 0, need = a.top, larger = 0, equal = 0, skip = 0;
    // Three digits, then counts, then the choice.
#pragma unroll 1
    for (uint32_t pass = 0; pass < 5; ++pass) {
        const uint32_t shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, mask = pass == 2 ? 1023 : 2047;
        const uint32_t above = pass == 0 ? 0 : pass == 1 ? 0xffe00000u : 0xfffffc00u;
#pragma unroll 1
        for (uint32_t base = begin; base < end; base += 32 * kTogether) {
            uint32_t x[kTogether];
            if (pass > 0 && n <= kKept) {
#pragma unroll
                for (uint32_t j = 0; j < kTogether; ++j) x[j] = s.kept[min(base + 32 * j + lane, end - 1)];
            } else {
                bool all;
                do {
                    all = true;
#pragma unroll
                    for (uint32_t j = 0; j < kTogether; ++j) {
                        const uint64_t got = look_for(scores + min(base + 32 * j + lane, end - 1));
                        x[j] = (uint32_t)got, all = all && got >> 32 == tag;
                    }
                } while (!all);
            }
#pragma unroll
            for (uint32_t j = 0; j < kTogether; ++j) {
                const uint32_t i = base + 32 * j + lane;
                if (base + 32 * j >= end) break;
                const bool there = i < end;
                if (pass < 3) {
                    if (pass == 0 && there) {
                        if (n <= kKept) s.kept[i] = x[j];
                        if (is_nan_ordinal(x[j])) s.faulty = 1;
                    }
                    if (there && (x[j] & above) == found) atomicAdd(&s.bins[x[j] >> shift & mask], 1);
                    continue;
                }
                const bool same = there && x[j] == found;
                const uint32_t more = __ballot_sync(kFull, there && x[j] > found), alike = __ballot_sync(kFull, same);
                const uint32_t rank = equal + __popc(alike & before), taken = rank > skip ? min(rank - skip, need) : 0;
                const uint32_t to = larger + __popc(more & before) + taken;
                if (pass == 4 && ((more >> lane & 1) || (same && rank >= skip && rank < skip + need))) {
                    picks[to] = to == 0 && s.faulty ? kIndexFault : i;
                }
                larger += __popc(more), equal += __popc(alike);
            }
        }
        if (pass == 0) Marks::mark(kept, 3);
        if (pass < 3) {
            __syncthreads();
            // The thread has the eight bins that come thread-th from the top.
            uint32_t* mine = s.bins + kBins - 8 * (thread + 1);
            uint32_t bin[8], sum = 0;
#pragma unroll
            for (uint32_t i = 0; i < 8; ++i) bin[i] = mine[i], mine[i] = 0, sum += bin[i];
            uint32_t reach = sum;
#pragma unroll
            for (int step = 1; step < 32; step <<= 1) {
                const uint32_t other = __shfl_up_sync(kFull, reach, step);
                if (lane >= step) reach += other;
            }
            if (lane == 31) s.sums[warp] = reach;
            __syncthreads();
            for (uint32_t w = 0; w < warp; ++w) reach += s.sums[w];
            if (reach >= need && reach - sum < need) {
                uint32_t rest = need - (reach - sum), at = 0;
#pragma unroll
                for (uint32_t i = 7; i > 0; --i) {
                    if (at == 0 && rest <= bin[i]) at = i + 1;
                    if (at == 0) rest -= bin[i];
                }
                s.digit = kBins - 8 * (thread + 1) + (at == 0 ? 0 : at - 1), s.rest = rest;
            }
            __syncthreads();
            found |= s.digit << shift, need = s.rest;
        } else if (pass == 3) {
            if (lane == 0) s.larger[warp] = larger, s.equal[warp] = equal;
            __syncthreads();
            larger = equal = 0;
            uint32_t equals = 0;
            for (uint32_t w = 0; w < kWarps; ++w) {
                if (w < warp) larger += s.larger[w], equal += s.equal[w];
                equals += s.equal[w];
            }
            // Of equal ones the first; in a deliberately wrong variant for tests the last.
            if (a.mutant == 2) skip = equals - need;
        }
    }
}

}  // namespace

// Grid: blocks that score, and one that picks. It begins with the row's own kernel, when everything before the product that
// makes the queries has ended; and lets its successor start when that one has left what it has to (latent.cu, "What runs ahead").
extern "C" __global__ void __maxnreg__(168) index_choose(LatentArgs a, Sent in, uint32_t* picks, StepView view) {
    __shared__ __align__(16) union {
        Picking picking;
        struct {
            uint32_t codes[kHeads][kPackedStride];
            float weights[kHeads];
            uint32_t span, least, highest;
        } scoring;
    } shared;
    const bool picker = blockIdx.x == gridDim.x - 1;
    __shared__ unsigned kept;
    Marks(kMarkChoose, picker).keep(&kept);
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const RowInfo info = info_early(view, 0);
    const uint32_t tag = __ldcg(in.number) + 1;
    const uint32_t visible = info.live ? a.keys.visible(info.pos) : 0;
    const uint32_t scorers = gridDim.x - 1, tiles = (visible + 7) / 8;
    Marks::mark(&kept, 2);
    const bool nothing = visible <= a.top || visible > in.most;
    if (nothing || (!picker && blockIdx.x * kWarps >= tiles)) {
        if (nothing && blockIdx.x == 0) choose_nothing(in, visible, tag, view);
        return;
    }
    if (picker) {
        // Without scores first: its instructions are there when the scores come.
#pragma unroll 1
        for (uint32_t turn = 0; turn < 2; ++turn) pick_sent(a, in.scores, tag, turn == 0 ? 0 : visible, picks, shared.picking, &kept);
        Marks::mark(&kept, 4);
        end_choice(in, tag);
        return;
    }
    pdl_launch();
    auto& s = shared.scoring;
    const uint32_t* blocks = view.blocks + (size_t)info.slot * view.max_blocks;
    auto place = [&](uint32_t w) { return a.keys.place(blocks, min(w, visible - 1)); };
    auto key = [&](uint32_t w) { return a.keys.rows + place(w) * a.keys.row_bytes; };
    const bool completes = (info.pos + 1) % a.keys.ratio == 0;
    Keys keys;
    auto bring = [&](uint32_t tile) {
        // The last key may be the one that the row's token completes.
        if (completes && tile + 1 == tiles) {
            if (lane == 0) await(in.left, in.blocks);
            __syncwarp();
        }
        keys.load(key(tile * 8 + (lane >> 2)));
    };
    const uint32_t own = blockIdx.x * kWarps + warp;
    const size_t first = place(own * 8 + (lane >> 2));
    keys.load(a.keys.rows + first * a.keys.row_bytes);
    // Rows that the attention may read, for the second cache.
    if (visible <= kAheadTimes * a.top && a.rows.ratio == a.keys.ratio) {
        const uint8_t* row = a.rows.rows + first * a.row_bytes;
        for (uint32_t at = 128 * (lane & 3); at < a.row_bytes + 127; at += 512) prefetch(row + min(at, a.row_bytes - 1));
    }
    if (thread == 0) s.span = 0, s.least = 255, s.highest = 0;
    auto query = [&](float (&x)[4], uint32_t h) { read_key(x, in.packed + h * kIndexRowBytes, kDim, kRowFp4); };
    // Twice: of whatever stands there first, so that the instructions are there when the query comes.
#pragma unroll 1
    for (uint32_t turn = 0; turn < 2; ++turn) {
        const bool dry = turn == 0;
        if (!dry) {
            if (thread == 0) await(in.heads, kHeads);
            __syncthreads();
            // A thread brings a block of a head.
            const uint32_t* from = reinterpret_cast<const uint32_t*>(in.packed + thread / kBlocks * kIndexRowBytes);
            uint32_t mine[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) mine[i] = __ldcg(from + thread % kBlocks * 4 + i);
            const uint32_t bytes = __ldcg(from + kDim / 8);
            if (thread < kHeads) {
                uint64_t got;
                do got = look_for(in.weights + thread);
                while (got >> 32 != tag);
                s.weights[thread] = __fmul_rn(__uint_as_float((uint32_t)got), in.factor);
            }
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) s.codes[thread / kBlocks][thread % kBlocks * 4 + i] = mine[i];
            const uint32_t used = __ballot_sync(kFull, ((mine[0] | mine[1] | mine[2] | mine[3]) & 0x77777777u) != 0);
            const Scales scales = scales_of(bytes, ~(used >> (lane & 28)) & 15);
            if (thread % kBlocks == 0) s.codes[thread / kBlocks][kDim / 8] = scales.bytes;
            const uint32_t wide = __reduce_max_sync(kFull, scales.most - scales.least);
            const uint32_t low = __reduce_min_sync(kFull, scales.least), high = __reduce_max_sync(kFull, scales.most);
            if (lane == 0) atomicMax(&s.span, wide), atomicMin(&s.least, low), atomicMax(&s.highest, high);
            __syncthreads();
            Marks::mark(&kept, 3);
            if (completes && own + 1 == tiles) bring(own);
        }
        Queries queries;
#pragma unroll
        for (uint32_t m = 0; m < kTiles; ++m) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
                for (uint32_t b = 0; b < kBlocks; ++b) {
                    const uint32_t word = s.codes[16 * m + 8 * half + (lane >> 2)][4 * b + (lane & 3)];
                    queries.x[m][b][half] = doubled(word & 0x0f0f0f0fu);
                    queries.x[m][b][2 + half] = doubled(word >> 4 & 0x0f0f0f0fu);
                }
            }
        }
        queries.load_scales(s.weights, &s.codes[0][kDim / 8], kPackedStride);
        const Limits limits{s.span, s.least, s.highest, 1};
#pragma unroll 1
        for (uint32_t tile = own; tile < tiles; tile += scorers * kWarps) {
            score_tile(
                queries, keys, limits, dry,
                [&]() {
                    if (!dry) bring(tile + scorers * kWarps);
                },
                [&](uint32_t i, uint32_t score) {
                    if (tile * 8 + i < visible) send_score(in.scores + tile * 8 + i, score, tag);
                },
                [&](uint32_t i) { return score_in_order(query, s.weights, key(tile * 8 + i), kHeads, kDim, kRowFp4); });
            if (dry) break;
        }
    }
    Marks::mark(&kept, 4);
    if (blockIdx.x == 0) pdl_wait();
}

}  // namespace arc
