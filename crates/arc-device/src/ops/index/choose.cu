// index_choose  scores and choice of one row in one launch, beside the product that makes the queries of its attention: the index
//               query came first (follow.cu), packed as keys are. Two warps have eight keys. Blocks send one another their scores,
//               and count for each of their keys how many come before it. So they know which ones are chosen, and send that to
//               the attention, which takes the rows from tiles, and one another, to leave the choice in order for others. What
//               they send has a number beside it that is another in every launch. Small blocks: there is room for one beside the
//               product. Exact.
#include "choose.cuh"

namespace arc {

using namespace indexer;

namespace {

// Keys of a tile, and warps that have one; scores that a thread looks for together.
constexpr uint32_t kTile = 8, kTileWarps = 2, kLooks = 4;
static_assert(kTile * kWarps == kTileWarps * kChooserKeys && kChooserKeys == 32 && kMostChoosers <= 64, "a lane has a key, and two blocks");

// One less where x is larger: what a subtraction borrows.
__device__ __forceinline__ void count_larger(uint32_t& n, uint32_t x, uint32_t own) {
    asm("{\n.reg .u32 t;\nsub.cc.u32 t, %1, %2;\nsubc.u32 %0, %0, 0;\n}" : "+r"(n) : "r"(own), "r"(x));
}

// How many of the `half`-th half of n scores come before each of a tile's, the first of which is that of key `first`: larger ones,
// and of equal ones the earlier; in a deliberately wrong variant for tests the later. Lane i < kTile returns that of its key.
__device__ __forceinline__ uint32_t rank_own(const uint32_t* scores, uint32_t n, uint32_t first, uint32_t half, bool later) {
    const uint32_t lane = threadIdx.x & 31, mine = scores[first + lane % kTile];
    uint32_t own[kTile], before[kTile];
#pragma unroll
    for (uint32_t e = 0; e < kTile; ++e) own[e] = scores[first + e], before[e] = 0;
    // Those of the tiles before, the tile's own, and those of the tiles behind. Where equal ones count they do so as larger ones.
#pragma unroll 1
    for (uint32_t part = 0; part < 3; ++part) {
        const uint32_t begin = part == 0 ? 0 : part == 1 ? first : first + kTile, end = min(part == 0 ? first : part == 1 ? first + kTile : n, n);
        const uint32_t less = part == (later ? 2 : 0);
#pragma unroll 1
        for (uint32_t base = begin + half * 32 * kLooks; base < end; base += kTileWarps * 32 * kLooks) {
            uint32_t x[kLooks];
#pragma unroll
            for (uint32_t j = 0; j < kLooks; ++j) {
                const uint32_t i = base + 32 * j + lane;
                x[j] = i < end ? scores[i] : 0;
            }
#pragma unroll
            for (uint32_t j = 0; j < kLooks; ++j) {
#pragma unroll
                for (uint32_t e = 0; e < kTile; ++e) count_larger(before[e], x[j], own[e] - less);
            }
        }
    }
    uint32_t rank = 0;
#pragma unroll
    for (uint32_t e = 0; e < kTile; ++e) {
        const uint32_t all = __reduce_add_sync(kFull, before[e]);
        rank -= lane == e ? all : 0;
        rank += (uint32_t)(half == 0) & (uint32_t)(own[e] == mine) & (uint32_t)(later ? e > lane : e < lane);
    }
    return rank;
}

// Which keys are chosen of the lane's two blocks of so many, once that is known: how many.
__device__ __forceinline__ uint32_t await_chosen(const Sent& in, uint32_t blocks, uint32_t tag) {
    uint32_t n = 0;
    for (uint32_t block = threadIdx.x & 31; block < blocks; block += 32) {
        uint4 got;
        do got = look(in.chosen + 16 * (block + 1));
        while (got.w != tag);
        n += __popc(got.x);
    }
    return n;
}

// The block that lets the attention start when what it reads is there, and ends the choice, when whoever had something to send has
// read the number, and has found what was left.
__device__ __forceinline__ void usher(const Sent& in, uint32_t active, uint32_t tag) {
    const uint32_t thread = threadIdx.x;
    if (thread == 0) {
        await(in.left, in.blocks);
        pdl_launch_as(reinterpret_cast<uint32_t*>(in.chosen), tag);
    }
    if (thread >= 32) return;
    await_chosen(in, active, tag);
    __syncwarp();
    if (thread == 0) *in.number = tag, *in.left = 0;
    pdl_wait();
}

}  // namespace

// Grid: one block, and one for every kChooserKeys keys that may be visible, which wait for one another. It begins with the row's own
// kernel, when everything before the product that makes the queries has ended. Its successor may start when that kernel has left
// what it has to (latent.cu, "What runs ahead"), and takes the choice as it is sent, or waits for the end.
extern "C" __global__ void __maxnreg__(168) index_choose(LatentArgs a, Sent in, uint32_t* picks, StepView view) {
    __shared__ __align__(16) uint8_t codes[kHeads * kDim];
    __shared__ SharedQueries queries;
    __shared__ uint32_t scores[kFew], ranks[kChooserKeys];
    __shared__ bool faulty;
    // What the product leaves: LEFT_TO_CHOICE of follow.rs, less what every block takes and the marks.
    static_assert(sizeof(codes) + sizeof(queries) + sizeof(scores) + sizeof(ranks) + 64 <= 18 << 10);
    __shared__ unsigned kept;
    Marks(kMarkChoose).keep(&kept);
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const RowInfo info = info_early(view, 0);
    const uint32_t tag = __ldcg(in.number) + 1;
    const uint32_t visible = info.live ? a.keys.visible(info.pos) : 0;
    const uint32_t tiles = (visible + kTile - 1) / kTile, active = (visible + kChooserKeys - 1) / kChooserKeys;
    Marks::mark(&kept, 2);
    const bool nothing = visible <= a.top || visible > in.most;
    // The first block has no keys.
    if (blockIdx.x == 0) {
        if (nothing) {
            choose_nothing(in, visible, tag, picks, view);
        } else {
            usher(in, active, tag);
        }
        return;
    }
    const uint32_t block = blockIdx.x - 1;
    pdl_launch();
    if (nothing || block >= active) return;
    const uint32_t* blocks = view.blocks + (size_t)info.slot * view.max_blocks;
    auto place = [&](uint32_t w) { return a.keys.place(blocks, min(w, visible - 1)); };
    auto key = [&](uint32_t w) { return a.keys.rows + place(w) * a.keys.row_bytes; };
    const uint32_t tile = (block * kWarps + warp) / kTileWarps, half = warp % kTileWarps, first = tile * kTile;
    // The last key may be the one that the row's token completes.
    const bool comes_late = (info.pos + 1) % a.keys.ratio == 0 && tile + 1 == tiles;
    const size_t own = place(first + (lane >> 2));
    Keys keys;
    keys.load(a.keys.rows + own * a.keys.row_bytes);
    // Rows that the attention may read, for the second cache, if nobody else brings them.
    if (a.tiles == nullptr && a.rows.ratio == a.keys.ratio) {
        const uint8_t* row = a.rows.rows + own * a.row_bytes;
        for (uint32_t at = 128 * (lane & 3); at < a.row_bytes + 127; at += 512) prefetch(row + min(at, a.row_bytes - 1));
    }
    auto query = [&](float (&x)[4], uint32_t h) { read_head(x, in, h); };
    // Twice: of whatever stands there first, so that the instructions are there when the query comes.
#pragma unroll 1
    for (uint32_t turn = 0; turn < 2; ++turn) {
        const bool dry = turn == 0;
        if (thread == 0) faulty = false;
        take_query(in, tag, dry, codes, queries);
        if (!dry) Marks::mark(&kept, 3);
        if (!dry && comes_late) {
            if (lane == 0) await(in.left, in.blocks);
            __syncwarp();
            keys.load(a.keys.rows + own * a.keys.row_bytes);
        }
        Fragments fragments;
        fragments.load(codes, queries);
        score_eight(
            fragments, queries, keys, dry, []() {},
            [&](uint32_t i, uint32_t score) {
                if (half == 0 && first + i < visible) send_score(in.scores + first + i, score, tag);
            },
            [&](uint32_t i) { return score_in_order(query, queries.weights, key(first + i), kHeads, kDim, kRowFp4); });
        if (!dry) Marks::mark(&kept, 4);
        const uint32_t n = dry ? 1 : visible;
#pragma unroll 1
        for (uint32_t base = 0; base < n; base += kThreads * kLooks) {
            uint64_t got[kLooks];
            bool all;
            do {
                all = true;
#pragma unroll
                for (uint32_t j = 0; j < kLooks; ++j) {
                    got[j] = look_for(in.scores + min(base + j * kThreads + thread, n - 1));
                    all = all && got[j] >> 32 == tag;
                }
                if (!all && !dry) __nanosleep(kPause);
            } while (!all && !dry);
#pragma unroll
            for (uint32_t j = 0; j < kLooks; ++j) {
                const uint32_t i = base + j * kThreads + thread, score = (uint32_t)got[j];
                if (i < kFew) scores[i] = score;
                if (is_nan_ordinal(score) && !dry) faulty = true;
            }
        }
        if (thread < kChooserKeys) ranks[thread] = 0;
        __syncthreads();
        if (!dry) Marks::mark(&kept, 5);
        const uint32_t rank = rank_own(scores, n, first, half, a.mutant == 2);
        if (lane < kTile) atomicAdd(&ranks[warp / kTileWarps * kTile + lane], rank);
        __syncthreads();
        if (warp != 0) continue;
        const uint32_t own_key = block * kChooserKeys + lane;
        const uint32_t chosen = __ballot_sync(kFull, own_key < n && ranks[lane] < a.top);
        if (dry) continue;
        if (lane == 0) send_three(in.chosen + 16 * (block + 1), chosen, 0, faulty, tag);
        Marks::mark(&kept, 6);
        // Who does not take the choice from there finds it in order, behind what is chosen of the blocks before.
        const uint32_t to = __reduce_add_sync(kFull, await_chosen(in, block, tag)) + __popc(chosen & ((1u << lane) - 1));
        if ((chosen >> lane & 1) && to < a.top) picks[to] = to == 0 && faulty ? kIndexFault : own_key;
    }
    Marks::mark(&kept, 7);
}

}  // namespace arc
