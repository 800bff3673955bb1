// Router: scores, choice and, where rows are few, the step's assignments. Exact: the bits of router.rs and moe.rs.
//
// Few rows:   router_few: a warp has one chunk of one expert's dot products; one block more chooses.
// Many rows:  router_scores (tiles of 16 rows and 32 experts), router_choose (a warp a row), moe_assign.
// Any width:  router_scores_any.
#include "../../copies.cuh"
#include "../../pdl.cuh"
#include "../../step.cuh"
#include "../hc/hc.cuh"
#include "../moe/moe.cuh"
#include "router.cuh"

using namespace arc;
using namespace arc::router;

namespace {

constexpr int kWarps = 8;
constexpr int kFewRows = 8;

// Experts of a row by one warp, from its scores.
template <typename Bias>
__device__ __forceinline__ void choose_row(unsigned* ids, float* weights, Chosen& found, const float* scores,
                                           const unsigned* table, Bias bias, unsigned experts, unsigned chosen,
                                           float scale) {
    if (experts <= 256) choose<8>(ids, weights, found, scores, table, bias, experts, chosen, scale);
    else choose<kMaxExperts / 32>(ids, weights, found, scores, table, bias, experts, chosen, scale);
}

// A value that another kernel wrote, loaded where it stands: the next loads do not wait for what is done with it.
__device__ __forceinline__ float4 load_now(const float4* at) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
    return v;
}

// One chunk of N rows, whose values come together, with one expert's; those past the last row are the last again.
template <int N>
__device__ __forceinline__ void dots(float* sums, int stride, const float4 (&w)[kChunkReads], const float* x,
                                     unsigned hidden, unsigned first, unsigned rows) {
    const int lane = threadIdx.x & 31;
    float4 there[N][kChunkReads], v[N];
    float s[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float4* row = reinterpret_cast<const float4*>(x + (size_t)min(first + i, rows - 1) * hidden) + lane;
#pragma unroll
        for (int j = 0; j < kChunkReads; ++j) there[i][j] = load_now(row + 32 * j);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = fold_chunk4([&](int j) { return mul4(w[j], there[i][j]); });
    sum_lanes4(v, s);
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[min(first + i, rows - 1) * stride] = s[i];
    }
}

// Up to 8 rows and 256 experts. CHUNKS warps have an expert, 8 / CHUNKS experts a block, whose gate's values are loaded before the
// wait. Every score is a word by itself that one block more looks for, a warp a row, so that no fence and no counter is waited for.
// `posts`: [8, 256], 0 between launches. `mixing`: null, or mixing values that another block settles.
template <int CHUNKS>
__device__ __forceinline__ void router_few(unsigned* ids, float* weights, unsigned* order, unsigned* bounds,
                                           unsigned* posts, const float* h, const float* gate, const unsigned* table,
                                           const float* bias, const RowInfo* infos, unsigned experts, unsigned chosen,
                                           float scale, unsigned rows, float* mixing, unsigned iterations, float eps) {
    constexpr int kExperts = kWarps / CHUNKS, kHidden = CHUNKS * kSumChunk;
    static_assert(kWarps == kFewRows, "a warp a row");
    __shared__ float sums[kFewRows][kExperts][CHUNKS];
    __shared__ Contest contests[kFewRows];
    __shared__ __align__(16) unsigned assigned[kFewRows * kMaxChosen];
    pdl_launch();
    const int t = threadIdx.x, warp = t / 32, lane = t % 32, chunk = warp % CHUNKS;
    const unsigned blocks = gridDim.x - 1 - (mixing != nullptr);
    if (blockIdx.x < blocks) {
        const Marks marks(kMarkRouter);
        const unsigned first = blockIdx.x * kExperts, expert = min(first + warp / CHUNKS, experts - 1);
        float4 w[kChunkReads];
        const float4* from = reinterpret_cast<const float4*>(gate + (size_t)expert * kHidden + chunk * kSumChunk) + lane;
#pragma unroll
        for (int j = 0; j < kChunkReads; ++j) w[j] = load_early(from + 32 * j);
        if (t < CHUNKS) prefetch(h + t * kSumChunk);
        pdl_wait();
        marks.mark(2);
        const float* x = h + chunk * kSumChunk;
        float* to = &sums[0][warp / CHUNKS][chunk];
        if (rows == 1) dots<1>(to, kExperts * CHUNKS, w, x, kHidden, 0, rows);
        if (rows == 2) dots<2>(to, kExperts * CHUNKS, w, x, kHidden, 0, rows);
        for (unsigned r = 0; rows > 2 && r < rows; r += 4) dots<4>(to, kExperts * CHUNKS, w, x, kHidden, r, rows);
        __syncthreads();
        marks.mark(3);
        const unsigned r = t / kExperts, e = first + t % kExperts;
        if (r < rows && e < experts) {
            float logit = 0.0f;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) logit = __fadd_rn(logit, sums[r][t % kExperts][c]);
            const unsigned word = posted(score(logit));
            asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(posts + r * kOneExperts + e), "r"(word) : "memory");
        }
        marks.mark(4);
    } else if (blockIdx.x == blocks) {
        const Marks marks(kMarkChooser);
        float scores[kLaneExperts], own_bias[kLaneExperts];
#pragma unroll
        for (int i = 0; i < kLaneExperts; ++i) {
            own_bias[i] = table != nullptr ? 0.0f : __ldg(bias + min((unsigned)(lane + 32 * i), experts - 1));
        }
        if (t < kFewRows * kMaxChosen) assigned[t] = 0xffffffffu;
        __syncthreads();
        pdl_wait();
        marks.mark(2);
        if (warp < (int)rows) {
            Contest& contest = contests[warp];
            const uint2* info = reinterpret_cast<const uint2*>(infos + warp);
            const bool live = __ldcg(info).x != 0;
            unsigned pick = 0;
            if (table != nullptr && lane < (int)chosen) pick = __ldg(table + (size_t)__ldcg(info + 1).y * chosen + lane);
            unsigned* words = posts + warp * kOneExperts;
            bool there, faulty = false;
            do {
                there = true;
#pragma unroll
                for (int i = 0; i < kLaneExperts; ++i) {
                    unsigned word;
                    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(words + min((unsigned)(lane + 32 * i), experts - 1)) : "memory");
                    there &= word != 0;
                    scores[i] = score_of(word);
                }
            } while (!__all_sync(kFullWarp, there));
#pragma unroll
            for (int i = 0; i < kLaneExperts; ++i) words[lane + 32 * i] = 0, faulty |= scores[i] != scores[i];
            faulty = __any_sync(kFullWarp, faulty);
            marks.mark(3);
            if (table != nullptr) {
                choose_named(contest, pick, chosen);
                score_named(contest, scores, chosen);
            } else {
                choose_largest(contest, scores, own_bias, experts, chosen);
            }
            weigh(contest, faulty, chosen, scale);
            if (lane < (int)chosen) {
                const unsigned at = warp * chosen + lane;
                ids[at] = contest.ids[lane], weights[at] = contest.weights[lane];
                if (live) assigned[at] = contest.ids[lane];
            }
        }
        __syncthreads();
        moe::assign_few(order, bounds, assigned, rows * chosen, experts);
        marks.mark(4);
    } else {
        // What the site before has put off.
        pdl_wait();
        if (warp < (int)rows) hc::settle(mixing + warp * hc::kMixes, iterations, eps);
    }
}

}  // namespace

// Grid: blocks of 8 / CHUNKS experts, one more, and where `mixing` is not null another.
#define ARC_ROUTER_FEW(CHUNKS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(32 * kWarps) arc_router_few_##CHUNKS(                                 \
        unsigned* ids, float* weights, unsigned* order, unsigned* bounds, unsigned* posts, const float* h,             \
        const float* gate, const unsigned* table, const float* bias, const RowInfo* infos, unsigned experts,           \
        unsigned chosen, float scale, unsigned rows, float* mixing, unsigned iterations, float eps) {                  \
        router_few<CHUNKS>(ids, weights, order, bounds, posts, h, gate, table, bias, infos, experts, chosen, scale,    \
                           rows, mixing, iterations, eps);                                                             \
    }
ARC_ROUTER_FEW(1)
ARC_ROUTER_FEW(2)
ARC_ROUTER_FEW(4)

// ---- many rows ----

namespace {

constexpr int kTileRows = 16, kHalfChunk = kSumChunk / 2;
constexpr int kSub = 4;  // rows and experts of a warp's product

// Half a chunk of 4 x 4 dot products: of its elements, lane l takes l + 32 j. Runs of halvings are folded as they become complete,
// so at most one value of every length waits: LEN products from index J in steps of STEP.
template <int LEN, int STEP, int J>
__device__ __forceinline__ void fold_products(float (&out)[kSub][kSub], const float* x, const float* w) {
    if constexpr (LEN == 1) {
        float a[kSub], b[kSub];
#pragma unroll
        for (int i = 0; i < kSub; ++i) a[i] = x[i * kHalfChunk + 32 * J], b[i] = w[i * kHalfChunk + 32 * J];
#pragma unroll
        for (int i = 0; i < kSub; ++i) {
#pragma unroll
            for (int e = 0; e < kSub; ++e) out[i][e] = __fmul_rn(b[e], a[i]);
        }
    } else {
        // The halving that joins these two runs is the one by STEP: of the indices J + STEP i, even and odd i.
        float other[kSub][kSub];
        fold_products<LEN / 2, STEP * 2, J>(out, x, w);
        fold_products<LEN / 2, STEP * 2, J + STEP>(other, x, w);
#pragma unroll
        for (int i = 0; i < kSub; ++i) {
#pragma unroll
            for (int e = 0; e < kSub; ++e) out[i][e] = __fadd_rn(out[i][e], other[i][e]);
        }
    }
}

// The halvings by HALF to 1 of as many sums: lane l ends with sum l / 2, of 16.
template <int HALF>
__device__ __forceinline__ float fold_lanes(const float (&s)[HALF]) {
    // Lanes with this bit keep the upper half of what they have.
    const bool upper = threadIdx.x & HALF;
    if constexpr (HALF == 1) {
        return __fadd_rn(s[0], __shfl_xor_sync(kFullWarp, s[0], 1));
    } else {
        float half[HALF / 2];
#pragma unroll
        for (int i = 0; i < HALF / 2; ++i) {
            const float kept = upper ? s[i + HALF / 2] : s[i], sent = upper ? s[i] : s[i + HALF / 2];
            half[i] = __fadd_rn(kept, __shfl_xor_sync(kFullWarp, sent, HALF));
        }
        return fold_lanes<HALF / 2>(half);
    }
}

// scores[row][expert] of a tile of 16 rows and EXPERTS experts by WARPS warps. Dynamic shared memory: 16 + EXPERTS chunks, as two
// halves: of every two runs of 32 values, one. The last halving of a lane's values joins them, and while one is multiplied the
// other comes.
template <int EXPERTS, int WARPS>
__device__ __forceinline__ void tile_scores(float* scores, const float* h, const float* gate, unsigned hidden,
                                            unsigned experts, unsigned rows) {
    extern __shared__ __align__(16) float tile[];
    pdl_launch();
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const unsigned first_expert = blockIdx.x * EXPERTS, first_row = blockIdx.y * kTileRows;
    constexpr int kAll = kTileRows + EXPERTS, kTasks = kTileRows / kSub * (EXPERTS / kSub), kEach = kTasks / WARPS;
    float totals[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) totals[i] = 0.0f;
    const auto bring = [&](unsigned start, int half) {
        constexpr int kPieces = kHalfChunk / 4;
        const int piece = t % kPieces, from = (2 * (piece / 8) + half) * 32 + piece % 8 * 4;
        if (start < hidden) {
#pragma unroll 4
            for (int i = t / kPieces; i < kAll; i += 32 * WARPS / kPieces) {
                const bool is_row = i < kTileRows;
                const unsigned r = is_row ? min(first_row + i, rows - 1) : min(first_expert + i - kTileRows, experts - 1);
                copy16(tile + (half * kAll + i) * kHalfChunk + 4 * piece, (is_row ? h : gate) + (size_t)r * hidden + start + from);
            }
        }
        copies_commit();
    };
    pdl_wait();
    bring(0, 0), bring(0, 1);
    for (unsigned start = 0; start < hidden; start += kSumChunk) {
        float v[kEach][kSub * kSub];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            copies_wait<1>();
            __syncthreads();
            const float *xs = tile + half * kAll * kHalfChunk + lane, *ws = xs + kTileRows * kHalfChunk;
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int task = warp + WARPS * i, r = task % (kTileRows / kSub) * kSub, e = task / (kTileRows / kSub) * kSub;
                float own[kSub][kSub];
                fold_products<kHalfChunk / 32, 1, 0>(own, xs + r * kHalfChunk, ws + e * kHalfChunk);
#pragma unroll
                for (int k = 0; k < kSub; ++k) {
#pragma unroll
                    for (int n = 0; n < kSub; ++n) v[i][kSub * k + n] = half == 0 ? own[k][n] : __fadd_rn(v[i][kSub * k + n], own[k][n]);
                }
            }
            __syncthreads();
            bring(start + kSumChunk, half);
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) totals[i] = __fadd_rn(totals[i], fold_lanes<kSub * kSub>(v[i]));
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int task = warp + WARPS * i, r = task % (kTileRows / kSub) * kSub, e = task / (kTileRows / kSub) * kSub;
        const unsigned row = first_row + r + lane / 2 / kSub, expert = first_expert + e + lane / 2 % kSub;
        if (lane % 2 == 0 && row < rows && expert < experts) scores[(size_t)row * experts + expert] = score(totals[i]);
    }
}

}  // namespace

// Grid: (experts / 32, rows / 16).
extern "C" __global__ void __launch_bounds__(32 * 16, 1)
    arc_router_scores_32(float* scores, const float* h, const float* gate, unsigned hidden, unsigned experts,
                         unsigned rows) {
    tile_scores<32, 16>(scores, h, gate, hidden, experts, rows);
}

// Grid: (experts / 8, rows / 16): more blocks, for fewer rows.
extern "C" __global__ void __launch_bounds__(32 * kWarps, 2)
    arc_router_scores_8(float* scores, const float* h, const float* gate, unsigned hidden, unsigned experts,
                        unsigned rows) {
    tile_scores<8, kWarps>(scores, h, gate, hidden, experts, rows);
}

// A warp an expert and row. Grid: (experts / 8, rows).
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    arc_router_scores_any(float* scores, const float* h, const float* gate, unsigned hidden, unsigned experts) {
    pdl_launch();
    pdl_wait();
    const unsigned e = blockIdx.x * kWarps + threadIdx.x / 32, row = blockIdx.y;
    if (e >= experts) return;
    const float *w = gate + (size_t)e * hidden, *x = h + (size_t)row * hidden;
    const float logit = sum_warp(hidden, [&](int i) { return __fmul_rn(w[i], x[i]); });
    if (threadIdx.x % 32 == 0) scores[(size_t)row * experts + e] = score(logit);
}

// A warp a row.
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    arc_router_choose(unsigned* ids, float* weights, const float* scores, const unsigned* table, const float* bias,
                      const RowInfo* infos, unsigned experts, unsigned chosen, float scale, unsigned rows) {
    pdl_launch();
    pdl_wait();
    __shared__ Chosen found[kWarps];
    const unsigned row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const unsigned* picks = table ? table + (size_t)infos[row].token * chosen : nullptr;
    choose_row(ids + row * chosen, weights + row * chosen, found[threadIdx.x / 32], scores + (size_t)row * experts,
               picks, [&](int i) { return __ldg(bias + lane + 32 * i); }, experts, chosen, scale);
}
