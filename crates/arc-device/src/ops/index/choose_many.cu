// index_choose_many  what index_choose (choose.cu) does, among more keys than every block has the scores of. Blocks keep their scores. Each
//                    tells the others the best of every part of its keys, and all find a score that enough of these reach: nothing
//                    below it is chosen. Only what reaches it goes to the block that picks, in lists. Exact.
#include "choose.cuh"

namespace arc {

using namespace indexer;

namespace {

// Scores that a thread of the block that picks has, and what it chooses among at a time; rows that may be chosen.
constexpr uint32_t kEach = 8, kPlaces = kThreads * kEach, kMostTop = 1024;
// Blocks that score, and scores that such a block keeps, at most.
constexpr uint32_t kMostScorers = kThreads / 2, kMostKept = 2072;
// What a block tells all others: two for each warp. Entries of its list that are there in any case.
constexpr uint32_t kBests = 2 * kWarps, kLook = 2 * kEach;
// Eight keys stand one behind the other. So many eights of a warp are on their way behind the one that it has taken.
constexpr uint32_t kTileBytes = 8 * kIndexRowBytes, kOnTheWay = 2;
static_assert(kTileBytes % 16 == 0 && kMostScorers * kBests == kPlaces);
// Beside the length of a list: one of the block's scores was NaN.
constexpr uint32_t kFaulty = 1u << 31;

// What index_choose_many sends beside `Sent`; `Lists` of index/cuda.rs.
struct Lists {
    uint64_t* bests;  // [scorers, kBests]: scores, with the number of the choice
    uint64_t at;      // [scorers, stride]: score, row, length of the list and whether a score was NaN, and the number
    uint32_t stride, pad;
};
static_assert(sizeof(Lists) == 24);

using Sums = uint2[2][kWarps];

// Classes of scores by how far they are from the largest, finer where that is little: 64 for every doubling.
constexpr uint32_t kClasses = kThreads * kEach, kRivals = 32;

struct Classes {
    uint32_t count[kClasses];  // zero before and behind
    uint32_t most[kWarps], sums[kWarps], found, rest, rivals, rival[kRivals];
};

__device__ __forceinline__ uint32_t class_of(uint32_t away) {
    const uint32_t shift = 25 - __clz(away | 64);
    return 64 * shift + (away >> shift);
}
// The most that a score of a class is away.
__device__ __forceinline__ uint32_t class_end(uint32_t c) {
    const uint32_t shift = max(c / 64, 1u) - 1;
    return (c - 64 * shift << shift) + (1u << shift) - 1;
}

// The sum of x over the lanes up to this one.
__device__ __forceinline__ uint32_t sum_up_to(uint32_t x) {
    const uint32_t lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const uint32_t other = __shfl_up_sync(kFull, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

// Of a block's scores, kEach a thread, 0 where there is none: one that just `top` of them reach, or the least of these; 0 where
// there are fewer. Two bits at a time: for scores many of which are alike. A barrier comes before the next.
__device__ __forceinline__ uint32_t border_by_bits(const uint32_t (&x)[kEach], uint32_t top, Sums& sums) {
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t found = 0, turn = 0;
#pragma unroll 1
    for (int shift = 30; shift >= 0; shift -= 2, turn ^= 1) {
        const uint32_t one = found | 1u << shift, two = found | 2u << shift, three = found | 3u << shift;
        uint2 v = make_uint2(0, 0);
#pragma unroll
        for (uint32_t i = 0; i < kEach; ++i) {
            v.x += (x[i] >= one ? 1u : 0u) + (x[i] >= two ? 0x10000u : 0u);
            v.y += x[i] >= three;
        }
        v = make_uint2(__reduce_add_sync(kFull, v.x), __reduce_add_sync(kFull, v.y));
        if (lane == 0) sums[turn][warp] = v;
        __syncthreads();
        v = lane < kWarps ? sums[turn][lane] : make_uint2(0, 0);
        v = make_uint2(__reduce_add_sync(kFull, v.x), __reduce_add_sync(kFull, v.y));
        const uint32_t digit = v.y >= top ? 3 : v.x >> 16 >= top ? 2 : (v.x & 0xffff) >= top ? 1 : 0;
        const uint32_t reach = digit == 3 ? v.y : digit == 2 ? v.x >> 16 : digit == 1 ? v.x & 0xffff : 0;
        found |= digit << shift;
        // It parts them as well as the least of them would.
        if (reach == top) break;
    }
    return found;
}

// The same. EXACT: as there; otherwise a score from whose class on there are `top`. `dry`: nothing is written.
template <bool EXACT>
__device__ __forceinline__ uint32_t border(const uint32_t (&x)[kEach], uint32_t top, bool dry, Classes& s, Sums& sums) {
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    uint32_t most = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) most = max(most, x[i]);
    most = __reduce_max_sync(kFull, most);
    if (lane == 0 && !dry) s.most[warp] = most;
    if (thread == 0 && !dry) s.found = s.rivals = 0;
    __syncthreads();
    most = __reduce_max_sync(kFull, s.most[lane % kWarps]);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
        if (x[i] != 0 && !dry) atomicAdd(&s.count[class_of(most - x[i])], 1);
    }
    __syncthreads();
    // The thread has the classes that come thread-th.
    uint4* mine = reinterpret_cast<uint4*>(s.count + kEach * thread);
    const uint4 near = mine[0], far = mine[1];
    if (!dry) mine[0] = mine[1] = make_uint4(0, 0, 0, 0);
    const uint32_t of[kEach] = {near.x, near.y, near.z, near.w, far.x, far.y, far.z, far.w};
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) sum += of[i];
    uint32_t reach = sum_up_to(sum);
    if (lane == 31 && !dry) s.sums[warp] = reach;
    __syncthreads();
    for (uint32_t w = 0; w < warp; ++w) reach += s.sums[w];
    if (reach >= top && reach - sum < top && !dry) {
        uint32_t rest = top - (reach - sum), at = 0;
#pragma unroll
        for (uint32_t i = 0; i < kEach - 1; ++i) {
            if (at == i && rest > of[i]) rest -= of[i], at = i + 1;
        }
        s.found = kEach * thread + at + 1, s.rest = rest;
    }
    __syncthreads();
    if (s.found == 0) return 0;
    const uint32_t found = s.found - 1;
    if constexpr (!EXACT) {
        const uint32_t end = class_end(found);
        return most > end ? most - end : 1;
    } else {
        // The few of its class, of which some are chosen.
#pragma unroll
        for (uint32_t i = 0; i < kEach; ++i) {
            if (x[i] == 0 || class_of(most - x[i]) != found) continue;
            const uint32_t at = atomicAdd(&s.rivals, 1);
            if (at < kRivals) s.rival[at] = x[i];
        }
        __syncthreads();
        const uint32_t n = s.rivals, rest = s.rest;
        if (n > kRivals) return border_by_bits(x, top, sums);
        const uint32_t own = lane < n ? s.rival[lane] : 0;
        uint32_t larger = 0, reaches = 0;
#pragma unroll 1
        for (uint32_t i = 0; i < n; ++i) {
            const uint32_t other = s.rival[i];
            larger += other > own, reaches += other >= own;
        }
        const uint32_t is = __ballot_sync(kFull, lane < n && larger < rest && reaches >= rest);
        return __shfl_sync(kFull, own, __ffs(is) - 1);
    }
}

// What the block that picks has in shared memory.
struct Picked {
    Classes classes;
    uint32_t score[kMostTop], row[kMostTop];  // chosen of what it has seen, where that is not all
    uint32_t first[kMostScorers + 1];         // entries of all lists before a block's
    Sums sums;
    uint32_t before[kWarps];
};

// The choice among what `active` blocks send, `n` keys in all: by score and in order, as many at a time as there are places, of
// which the chosen ones stay. `dry`: of nothing.
__device__ __forceinline__ void pick_listed(const LatentArgs& a, const Sent& in, const Lists& lists, uint32_t tag, uint32_t n,
                                            uint32_t active, bool dry, uint32_t* picks, Picked& s, const unsigned* kept) {
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    uint32_t x[kEach], row[kEach], told = 0;
    bool nan = false;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) x[i] = 0, row[i] = kEach * thread + i;
    if (dry) {
    } else if (n <= kPlaces) {
        bool all = kEach * thread >= n;
        while (!all) {
            all = true;
#pragma unroll
            for (uint32_t i = 0; i < kEach; ++i) {
                const uint64_t got = look_for(in.scores + min(row[i], n - 1));
                x[i] = row[i] < n ? (uint32_t)got : 0, all = all && got >> 32 == tag;
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < kEach; ++i) nan = nan || (row[i] < n && is_nan_ordinal(x[i]));
    } else if (thread / 2 < active) {
        const uint64_t from = lists.at + 16 * ((size_t)(thread / 2) * lists.stride + thread % 2 * kEach);
        while (look(from + 16 * (kEach - 1)).w != tag) __nanosleep(kPause);
        bool all;
        do {
            all = true;
#pragma unroll
            for (uint32_t i = 0; i < kEach; ++i) {
                const uint4 got = look(from + 16 * i);
                x[i] = got.x, row[i] = got.y, told = got.z, all = all && got.w == tag;
            }
        } while (!all);
        nan = (told & kFaulty) != 0, told &= ~kFaulty;
    }
    const bool faulty = __syncthreads_or(nan), more = __syncthreads_or(told > kLook);
    Marks::mark(kept, 3);
    uint32_t all = 0, seen = 0, held = 0;
    if (more) {
        // Where lists begin among all that is listed.
        const uint32_t own = thread % 2 == 0 ? told : 0, reach = sum_up_to(own);
        if (lane == 31) s.before[warp] = reach;
        __syncthreads();
        uint32_t before = reach - own;
        for (uint32_t w = 0; w < warp; ++w) before += s.before[w];
        if (thread % 2 == 0) s.first[thread / 2] = before;
        if (thread == kThreads - 1) s.first[kMostScorers] = before;
        __syncthreads();
        all = s.first[kMostScorers];
    }
#pragma unroll 1
    for (;;) {
        if (more) {
#pragma unroll 1
            for (uint32_t i = 0; i < kEach; ++i) {
                const uint32_t at = kEach * thread + i, c = seen + at - held;
                uint4 got = make_uint4(0, 0, 0, 0);
                if (at < held) {
                    got = make_uint4(s.score[at], s.row[at], 0, 0);
                } else if (c < all) {
                    uint32_t block = 0;
                    for (uint32_t step = kMostScorers / 2; step > 0; step /= 2) block += s.first[block + step] <= c ? step : 0;
                    const uint64_t from = lists.at + 16 * ((size_t)block * lists.stride + c - s.first[block]);
                    do got = look(from);
                    while (got.w != tag);
                }
#pragma unroll
                for (uint32_t j = 0; j < kEach; ++j) {
                    if (j == i) x[j] = got.x, row[j] = got.y;
                }
            }
        }
        const uint32_t found = border<true>(x, a.top, false, s.classes, s.sums);
        // Larger ones and equal ones, of the thread and before it.
        uint32_t own = 0;
#pragma unroll
        for (uint32_t i = 0; i < kEach; ++i) own += x[i] > found ? 0x10000u : x[i] == found && found != 0 ? 1u : 0u;
        uint32_t before = sum_up_to(own);
        if (lane == 31) s.before[warp] = before;
        __syncthreads();
        before -= own;
        uint32_t sum = 0;
#pragma unroll
        for (uint32_t w = 0; w < kWarps; ++w) {
            if (w < warp) before += s.before[w];
            sum += s.before[w];
        }
        // Of equal ones so many, the first; in a deliberately wrong variant for tests the last.
        const uint32_t need = a.top - min(sum >> 16, a.top), skip = a.mutant == 2 ? (sum & 0xffff) - min(sum & 0xffff, need) : 0;
        uint32_t larger = before >> 16, equal = before & 0xffff;
        uint32_t chosen = larger + (equal > skip ? min(equal - skip, need) : 0);
        seen += kPlaces - held;
        const bool last = !more || seen >= all;
#pragma unroll
        for (uint32_t i = 0; i < kEach; ++i) {
            const bool same = x[i] == found && found != 0;
            if (!dry && chosen < a.top && (x[i] > found || (same && equal >= skip && equal < skip + need))) {
                if (last) {
                    if (chosen != 0 || !faulty) picks[chosen] = row[i];
                } else {
                    s.score[chosen] = x[i], s.row[chosen] = row[i];
                }
                chosen += 1;
            }
            equal += same;
        }
        if (last) break;
        held = a.top;
        __syncthreads();
    }
    if (faulty && thread == 0) picks[0] = kIndexFault;
}

// Ends the block that has picked: the attention may begin.
__device__ __forceinline__ void end_choice(const Sent& in, uint32_t tag) {
    if (threadIdx.x == 0) {
        await(in.left, in.blocks);
        // Whoever had something to send has read the number.
        *in.number = tag, *in.left = 0;
    }
    __syncthreads();
    pdl_launch();
    pdl_wait();
}

}  // namespace

// Grid and order as those of index_choose. Eight keys are those of a block of tokens. All blocks that have keys wait for one
// another: none of them keeps another's room for long, since those before them end and those behind them begin when the
// choice is made.
extern "C" __global__ void __maxnreg__(168) index_choose_many(LatentArgs a, Sent in, Lists lists, uint32_t* picks, StepView view) {
    __shared__ __align__(16) union {
        Picked picked;
        struct {
            union {
                uint32_t ring[kWarps][kOnTheWay][kTileBytes / 4];
                Classes classes;
            };
            union {
                uint8_t codes[kHeads * kDim];
                uint32_t kept[kMostKept];
            };
            SharedQueries queries;
            Sums sums;
            uint32_t before[kWarps];
        } scoring;
    } shared;
    static_assert(sizeof(Classes) <= sizeof(shared.scoring.ring) && kHeads * kDim <= 4 * kMostKept);
    // What the product leaves: LEFT_TO_CHOICE of follow.rs, less what every block takes and the marks.
    static_assert(sizeof(shared) + 64 <= 18 << 10);
    const bool picker = blockIdx.x == gridDim.x - 1;
    __shared__ unsigned mark_at;
    Marks(kMarkChoose, picker | 2u).keep(&mark_at);
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const RowInfo info = info_early(view, 0);
    const uint32_t tag = __ldcg(in.number) + 1;
    const uint32_t visible = info.live ? a.keys.visible(info.pos) : 0;
    // Warps that have keys, one eight or more, and their blocks.
    const uint32_t tiles = (visible + 7) / 8, warps = min(tiles, (gridDim.x - 1) * kWarps), active = (warps + kWarps - 1) / kWarps;
    Marks::mark(&mark_at, 2);
    const bool nothing = visible <= a.top || visible > in.most;
    if (nothing || (!picker && blockIdx.x >= active)) {
        if (blockIdx.x == 0) choose_nothing(in, visible, tag, picks, view);
        return;
    }
    if (picker) {
        for (uint32_t i = thread; i < kClasses; i += kThreads) shared.picked.classes.count[i] = 0;
        __syncthreads();
        // Of nothing first: its instructions are there when the lists come.
#pragma unroll 1
        for (uint32_t turn = 0; turn < 2; ++turn) {
            pick_listed(a, in, lists, tag, visible, active, turn == 0, picks, shared.picked, &mark_at);
        }
        Marks::mark(&mark_at, 4);
        end_choice(in, tag);
        return;
    }
    pdl_launch();
    auto& s = shared.scoring;
    const bool few = visible <= kPlaces, completes = (info.pos + 1) % a.keys.ratio == 0;
    const uint32_t* blocks = view.blocks + (size_t)info.slot * view.max_blocks;
    // A run of neighbours; runs differ by one eight at most.
    const uint32_t own = blockIdx.x * kWarps + warp;
    const uint32_t begin = own < warps ? own * tiles / warps : tiles, end = own < warps ? (own + 1) * tiles / warps : tiles;
    const uint32_t base = 8 * (blockIdx.x * kWarps * tiles / warps);
    // The last key may be the one that the row's token completes.
    auto comes_late = [&](uint32_t tile) { return completes && tile + 1 == tiles; };
    uint32_t entry = 0;
    auto send_for = [&](uint32_t tile, bool late) {
        const uint32_t i = tile - begin;
        if (i % 32 == 0 && tile < end) entry = __ldcg(blocks + min(tile + lane, tiles - 1));
        const uint8_t* from = a.keys.rows + (size_t)__shfl_sync(kFull, entry, i % 32) * kTileBytes;
        uint8_t* to = reinterpret_cast<uint8_t*>(s.ring[warp][i % kOnTheWay]);
        if (tile < end && comes_late(tile) == late) {
            copy16(to + 16 * lane, from + 16 * lane);
            if (lane < kTileBytes / 16 - 32) copy16(to + 512 + 16 * lane, from + 512 + 16 * lane);
        }
        copies_commit();
    };
    Keys keys;
    auto take = [&](uint32_t tile) {
        if (tile >= end) return;
        if (comes_late(tile)) {
            if (lane == 0) await(in.left, in.blocks);
            __syncwarp();
            send_for(tile, true);
            copies_landed();
        } else {
            copies_wait<kOnTheWay - 1>();
        }
        __syncwarp();
        const uint32_t* key = s.ring[warp][(tile - begin) % kOnTheWay] + (lane >> 2) * (kIndexRowBytes / 4);
#pragma unroll
        for (uint32_t b = 0; b < kBlocks; ++b) keys.raw[b] = key[4 * b + (lane & 3)];
        keys.bytes = key[kDim / 8];
        __syncwarp();
        send_for(tile + kOnTheWay, false);
    };
    for (uint32_t i = 0; i < kOnTheWay; ++i) send_for(begin + i, false);
    take(begin);
    auto key = [&](uint32_t w) { return a.keys.rows + a.keys.place(blocks, min(w, visible - 1)) * kIndexRowBytes; };
    auto query = [&](float (&x)[4], uint32_t h) { read_head(x, in, h); };
    // Twice: of whatever stands there first, so that the instructions are there when the query comes.
#pragma unroll 1
    for (uint32_t turn = 0; turn < 2; ++turn) {
        const bool dry = turn == 0;
        take_query(in, tag, dry, s.codes, s.queries);
        if (!dry) Marks::mark(&mark_at, 3);
        Fragments fragments;
        fragments.load(s.codes, s.queries);
        // Scores take the place of the query.
        __syncthreads();
        uint32_t best[2] = {0, 0};
#pragma unroll 1
        for (uint32_t tile = dry ? 0 : begin; tile < (dry ? 1 : end); ++tile) {
            score_eight(
                fragments, s.queries, keys, dry,
                [&]() {
                    if (!dry) take(tile + 1);
                },
                [&](uint32_t i, uint32_t score) {
                    const uint32_t w = tile * 8 + i;
                    if (w >= visible) return;
                    if (few) {
                        send_score(in.scores + w, score, tag);
                    } else {
                        s.kept[w - base] = score;
                    }
                    if (i % 2 == 0) {
                        best[0] = max(best[0], score);
                    } else {
                        best[1] = max(best[1], score);
                    }
                },
                [&](uint32_t i) { return score_in_order(query, s.queries.weights, key(tile * 8 + i), kHeads, kDim, kRowFp4); });
        }
        if (!dry) Marks::mark(&mark_at, 4);
        if (few && !dry) break;
        if (!dry) {
            // The warp's own keys are done with.
            uint32_t* words = &s.ring[warp][0][0];
            for (uint32_t i = lane; i < kOnTheWay * kTileBytes / 4; i += 32) words[i] = 0;
        }
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) best[half] = __reduce_max_sync(kFull, best[half]);
        if (!dry && lane < 2) send_score(lists.bests + 2 * own + lane, lane == 0 ? best[0] : best[1], tag);
        uint32_t x[kEach];
#pragma unroll
        for (uint32_t i = 0; i < kEach; ++i) x[i] = 0;
        if (!dry && thread < kBests / kEach * active) {
            const uint64_t* from = lists.bests + kEach * thread;
            bool all = false;
            while (!all) {
                all = true;
#pragma unroll
                for (uint32_t i = 0; i < kEach; i += 2) {
                    const float2 two = look_at_pairs(reinterpret_cast<uint64_t>(from + i), tag, all);
                    x[i] = __float_as_uint(two.x), x[i + 1] = __float_as_uint(two.y);
                }
                if (!all) __nanosleep(kPause);
            }
        }
        __syncthreads();
        if (!dry) Marks::mark(&mark_at, 5);
        const uint32_t least = border<false>(x, a.top, dry, s.classes, s.sums);
        if (!dry) Marks::mark(&mark_at, 6);
        // The block's list, in order: a thread has neighbours.
        const uint32_t n = min(8 * (min((blockIdx.x + 1) * kWarps, warps) * tiles / warps), visible) - base;
        const uint32_t each = (n + kThreads - 1) / kThreads, from = min(thread * each, n), to = min(from + each, n);
        uint32_t mine = 0;
        bool nan = false;
#pragma unroll 1
        for (uint32_t i = from; i < to; ++i) mine += s.kept[i] >= least, nan = nan || is_nan_ordinal(s.kept[i]);
        uint32_t at = sum_up_to(mine);
        if (lane == 31) s.before[warp] = at;
        const bool faulty = __syncthreads_or(nan);
        at -= mine;
        uint32_t length = 0;
#pragma unroll
        for (uint32_t w = 0; w < kWarps; ++w) {
            if (w < warp) at += s.before[w];
            length += s.before[w];
        }
        const uint64_t list = lists.at + 16 * (size_t)blockIdx.x * lists.stride;
        const uint32_t tell = length | (faulty ? kFaulty : 0);
        if (!dry) {
#pragma unroll 1
            for (uint32_t i = from; i < to; ++i) {
                const uint32_t score = s.kept[i];
                if (score >= least) send_three(list + 16 * at, score, base + i, tell, tag), at += 1;
            }
            if (thread >= length && thread < kLook) send_three(list + 16 * thread, 0, 0, tell, tag);
        }
        __syncthreads();
    }
    Marks::mark(&mark_at, 7);
    if (blockIdx.x == 0) pdl_wait();
}

}  // namespace arc
