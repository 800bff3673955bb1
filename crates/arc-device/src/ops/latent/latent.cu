// DeepSeek-V4's attention: what stands between the products. The step's own rows (latent_rows, latent_rings): rows.cu.
//
// latent_attend  one block a split of 80 rows of a query's own list, for 16 heads, whose queries it norms and rotates:
//                scores and sums by BF16 mma with f32 sums, queries and weights cut into two BF16 terms, or three where
//                rows are f32 or not 512 wide; rows of the format Fp8 are BF16 numbers as they are. Splits are merged
//                ascending, by the blocks of a cluster, each a share of the values, or by latent_merge (merge.cu).
//                Invariant; bounded by the terms (two hold 2^-17 of a score and of a weight). latent_attend_tiles is what
//                one row of a DeepSeek-V4 runs; a warp more brings its rows. Where it has more splits than a cluster has
//                blocks, latent_attend_long has larger ones, whose blocks take a split each in rounds.
//
// What runs ahead. Over few rows, the product that makes the queries lets its successor start after its own wait (`late`). So
// when a block of latent_rows starts, every kernel before that product has ended: rows, compressors, index queries and row
// table are there, and latent_rows does its work while the product runs. It lets its successor start when it is done, and
// ends after the product. So when a block of latent_attend or index_score starts, all rows that it will read are there too,
// and it brings them before its wait; only queries and choices come after. What may be read early is read past the first
// cache. Of one row, latent_rows leaves the list as tiles of BF16, once for all heads; and the products before may be in that
// launch too (follow.cu): latent_rows starts with it then, and takes their outputs as they are sent, and so does the attention
// with its queries. Where index_choose (choose.cu) chooses beside them, the tiles hold all that it chooses among, and the attention
// takes the choice as it is sent.
#include "merge.cuh"
#include "ops/index/index.cuh"
#include "parcel.cuh"
#include "pdl.cuh"

namespace arc {

namespace {

constexpr uint32_t kFull = 0xffffffffu;

// Rows of a split. Scores: shares of the values, each two warps'.
constexpr uint32_t kRows = kSplitRows, kThreads = 512, kWarps = 16, kShares = 8;
static_assert(kWarps == kHeads, "a head a warp");
// Entries of a table of blocks that are at hand when choices come.
constexpr uint32_t kTable = 256;
// Distances between heads of partial scores (f32) and of weights (BF16).
constexpr uint32_t kScoreStride = 88, kWeightStride = 88;

__device__ __forceinline__ void load_tiles(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

__device__ __forceinline__ void load_tiles_turned(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two BF16 numbers in a word, `low` in its low half.
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Cuts a pair off: the BF16 numbers nearest to x and y, which keep the rest.
__device__ __forceinline__ uint32_t cut_pair(float& x, float& y) {
    const uint32_t pair = bf16_pair(x, y);
    x = __fsub_rn(x, __uint_as_float(pair << 16));
    y = __fsub_rn(y, __uint_as_float(pair & 0xffff0000u));
    return pair;
}

// Where the i-th row stands; `stored`: in the layer's format, otherwise f32 in the step's workspace.
// `pick`: what was chosen in its place, where rows are; `table`: the beginning of `blocks` then, or null.
__device__ __forceinline__ const uint8_t* find_row(const LatentArgs& a, const List& list, const uint32_t* blocks,
                                                   const uint32_t* table, uint32_t r,
                                                   const RowInfo& info, uint32_t i, uint32_t pick, bool& stored) {
    stored = true;
    if (i < list.recent) {
        const uint32_t p = list.first + i;
        // Short runs are in the ring already.
        if (info.pos - p > info.back || a.short_run(info)) return a.in_window(info.slot, p);
        stored = false;
        return reinterpret_cast<const uint8_t*>(a.kv + (size_t)(r - (info.pos - p)) * a.dim);
    }
    const uint32_t w = list.chosen != nullptr ? pick : i - list.recent, entry = a.rows.entry(w);
    const uint32_t block = table != nullptr && list.chosen != nullptr && entry < kTable ? table[entry] : __ldcg(blocks + entry);
    return a.rows.rows + a.rows.place_in(block, w) * a.row_bytes;
}

// The place of the n-th bit that is set, of more than n.
__device__ __forceinline__ uint32_t nth_bit(uint64_t bits, uint32_t n) {
    uint32_t at = 0;
#pragma unroll
    for (uint32_t half = 32; half > 0; half /= 2) {
        const uint32_t below = __popcll(bits & ((1ull << half) - 1));
        if (n >= below) n -= below, bits >>= half, at += half;
    }
    return at;
}

// The choice as a warp looks for it: its number, and what the lane's two blocks of it have told.
struct Told {
    uint32_t number;
    uint4 mine[2];

    __device__ __forceinline__ void ask(const LatentArgs& a) {
        number = __ldcg(reinterpret_cast<const uint32_t*>(a.chosen));
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) mine[i] = look(a.chosen + 16 * (2 * (threadIdx.x & 31) + i + 1));
    }
};

// Brings the block's split of a list that is chosen beside the product from the tiles, row by row, once it is known which keys
// of every block are chosen: by a warp, which has asked already. `faulty`: whether a score was NaN, who waits for the rows sees it.
__device__ __forceinline__ void bring_chosen(const LatentArgs& a, const RowInfo& info, const Told& told, uint32_t to, bool* faulty,
                                             uint64_t* landed) {
    const uint32_t lane = threadIdx.x & 31;
    const uint32_t visible = a.visible(info.pos), recent = info.pos + 1 - a.first_visible(info.pos);
    const uint32_t bytes = 2 * a.dim, step = 2 * a.tile_row();
    uint32_t mine[2];
    bool nan = false;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t block = 2 * lane + i;
        uint4 got = block * kChooserKeys < visible ? told.mine[i] : make_uint4(0, 0, 0, told.number);
        while (got.w != told.number) got = look(a.chosen + 16 * (block + 1));
        mine[i] = got.x, nan = nan || got.z != 0;
    }
    nan = __any_sync(kFull, nan);
    if (lane == 0) *faulty = nan, expect(landed, kRows * bytes);
    __syncwarp();
    // Chosen keys up to those of the lane's blocks.
    uint32_t up_to = __popc(mine[0]) + __popc(mine[1]);
#pragma unroll
    for (uint32_t other = 1; other < 32; other *= 2) {
        const uint32_t n = __shfl_up_sync(kFull, up_to, other);
        if (lane >= other) up_to += n;
    }
    // Rolled: what runs once takes its time to come.
#pragma unroll 1
    for (uint32_t i = lane; i < (kRows + 31) / 32 * 32; i += 32) {
        const uint32_t at = blockIdx.x * kRows + i, k = at - recent;
        uint32_t two = 0;
#pragma unroll
        for (uint32_t half = 16; half > 0; half /= 2) {
            if (__shfl_sync(kFull, up_to, two + half - 1) <= k) two += half;
        }
        const uint32_t before = __shfl_sync(kFull, up_to, two == 0 ? 0 : two - 1);
        const uint64_t bits = (uint64_t)__shfl_sync(kFull, mine[1], two) << 32 | __shfl_sync(kFull, mine[0], two);
        // The rows behind all others are zero.
        const uint32_t row = at < recent ? at : recent + (k < a.top ? 2 * two * kChooserKeys + nth_bit(bits, k - (two == 0 ? 0 : before)) : visible);
        if (i < kRows) bring_lines(to + i * step, reinterpret_cast<const uint8_t*>(a.tiles) + (size_t)min(row, kTileRows - 1) * step, bytes, shared_at(landed));
    }
}

// PLANES: BF16 terms of a row's value. DIM: values of a row, or 0: as `a` says. TILES: what is usual of one row, and nothing else: its
// list is in tiles, queries are sent, and every block has kHeads heads. LONG: of TILES, by clusters of kLongBlocks, which take a split a
// block as often as it takes.
template <uint32_t PLANES, uint32_t DIM, bool TILES, bool LONG = false>
__device__ void attend(const LatentArgs& a, const StepView& view) {
    // BF16 terms of queries and weights: two where production's rows are read, in which every product counts; three hold all
    // of an f32, so that models of other widths, which are small, come as close to a golden as f32 does.
    constexpr uint32_t kQueryTerms = PLANES == 1 && DIM != 0 ? 2 : 3, kWeightTerms = kQueryTerms;
    extern __shared__ __align__(16) uint8_t dynamic[];
    __shared__ float part_m[kHeads], part_l[kHeads], total_m[kHeads], total_l[kHeads], keep_of[kHeads], add_of[kHeads];
    __shared__ float sink_of[kHeads];
    constexpr uint32_t kBlocks = LONG ? kLongBlocks : kMostBlocks;
    __shared__ float2 weight_of[kBlocks][kHeads];      // maximum and sum of every split of a round, where all are local
    __shared__ uint64_t weighed, parcel;               // what other blocks send: these, and the block's share of their sums
    __shared__ uint64_t landed;                        // the block's rows, where they come as a tile
    __shared__ __align__(16) float angles[kRopeDim];
    __shared__ uint32_t table[kTable];                 // of the sequence's blocks, where rows are chosen
    __shared__ bool faulty;                            // TILES: whether a score was NaN
    const Marks marks(kMarkAttend, TILES && a.chosen != 0);
    pdl_launch();
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const uint32_t r = TILES ? 0 : blockIdx.z, first_head = blockIdx.y * kHeads, heads = TILES ? kHeads : min(kHeads, a.heads - first_head);
    const uint32_t dim = DIM != 0 ? DIM : a.dim, row_bytes = DIM != 0 && PLANES == 1 ? DIM + kRopeDim + 8 : a.row_bytes;
    const uint32_t stride = dim + 8, quads = dim / 4, rope_quad = (dim - kRopeDim) / 4;
    // One block takes all splits; or some do, and another kernel merges; or those of a cluster, one each at most.
    const bool single = !TILES && gridDim.x == 1, apart = !TILES && a.apart != 0, local = !single && !apart;
    // The row's list as a tile, which a warp brings: TILES: one more than those that have heads.
    const bool tiles = TILES || (PLANES == 1 && local && a.tiles != nullptr);
    constexpr uint32_t kBringer = TILES ? kWarps : 0;
    // Everybody has begun, and a barrier, before anybody sends to another.
    if (local) {
        if (thread == 0) barrier_init(&weighed), barrier_init(&parcel), barriers_made();
        if (thread == 32 * kBringer) barrier_init(&landed), barriers_made();
        cluster_arrive_relaxed();
    }
    uint16_t* q = reinterpret_cast<uint16_t*>(dynamic);          // [kQueryTerms][kHeads][stride]
    uint16_t* rows = q + kQueryTerms * kHeads * stride;          // [kRows][stride]
    auto bring_tile = [&](uint32_t split) {
        // Sixteen rows at a time.
        const uint32_t bytes = 16 * 2 * stride;
        expect(&landed, kRows / 16 * bytes);
        const uint8_t* tile = reinterpret_cast<const uint8_t*>(a.tiles) + (size_t)split * kRows / 16 * bytes;
        for (uint32_t i = 0; i < kRows / 16; ++i) bring_lines(shared_at(rows) + i * bytes, tile + i * bytes, bytes, shared_at(&landed));
    };
    // A row that is not live has none, but what is there is brought before that is known.
    if (TILES && warp == kBringer) {
        // The barrier is there.
        __syncwarp();
        if (!LONG && a.chosen != 0) {
            Told told;
            told.ask(a);
            const RowInfo info = info_early(view, r);
            if (info.live && a.chooses(info.pos)) return bring_chosen(a, info, told, shared_at(rows), &faulty, &landed);
        }
        if (lane == 0) faulty = false, bring_tile(blockIdx.x);
        return;
    }
    if (tiles && thread == 32 * kBringer) bring_tile(blockIdx.x);
    const RowInfo info = info_early(view, r);
    const bool sent = TILES || (PLANES == 1 && a.sent_q != 0);
    const uint32_t tag = sent ? __ldcg(a.counts + 3) : 0;
    HeadConsts consts;
    consts.load(a, info);
    // Rows of several terms leave no registers for them.
    if (PLANES > 1) consts.store(angles, sink_of);
    // Sixteen fours of a query rotate: a lane has one of them at most. TILES: with angles of its own, so that no warp waits for another.
    const uint32_t turning = (lane - rope_quad) & 31, turning_j = (rope_quad + turning) / 32;
    float4 cs = make_float4(1.0f, 0.0f, 1.0f, 0.0f);
    if (TILES && turning < kRopeDim / 4) cs = *reinterpret_cast<const float4*>(a.rope + (size_t)info.pos * kRopeDim + 4 * turning);
    // The warp's head: values 4 lane + 128 j.
    float4 query[4];
    auto ask_queries = [&]() {
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
            const uint32_t e = 4 * lane + 128 * j;
            query[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (warp < heads && e < dim) {
                query[j] = __ldcg(reinterpret_cast<const float4*>(a.q + ((size_t)r * a.heads + first_head + warp) * dim + e));
            }
        }
    };
    // The same where they are sent: it ends when they are there.
    auto take_queries = [&]() {
        bool there;
        do {
            there = true;
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                const uint32_t e = 4 * lane + 128 * j;
                query[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (warp < heads && e < dim) {
                    const uint64_t at = a.sent_q + 8 * fours_place((first_head + warp) * dim + e);
                    const float2 low = look_at_pairs(at, tag, there), high = look_at_pairs(at + 512, tag, there);
                    query[j] = make_float4(low.x, low.y, high.x, high.y);
                }
            }
        } while (!__all_sync(kFull, there));
    };
    // First of all, unless there are rows to be found meanwhile.
    if (sent && tiles) take_queries();
    const size_t out_at = ((size_t)r * a.heads + first_head) * dim;
    const List list = list_of(a, r, info);
    const bool waits = !info.live || (list.chosen != nullptr && !TILES);
    const uint32_t split_rows = TILES ? kRows : split_len(a);
    // Rows that a warp brings, and what is chosen in the place of the lane's, if it is.
    constexpr uint32_t kOwn = kRows / kWarps;
    auto pick_of = [&](uint32_t split) {
        const uint32_t own = warp * kOwn + lane, i = split * split_rows + own;
        const bool chosen = list.chosen != nullptr && lane < kOwn && own < split_rows && i >= list.recent && i < list.n;
        return chosen ? list.chosen[i - list.recent] : 0;
    };
    // Whoever takes what is sent finds something: zeros with this scale.
    auto send_all = [&](float scale) {
        if constexpr (DIM != 0) {
            if (a.sent_codes == 0) return;
            for (uint32_t i = blockIdx.x * kThreads + thread; i < 3 * (kHeads * dim / 32); i += gridDim.x * kThreads) {
                send_three(a.sent_codes + 48 * (out_at / 32) + 16 * i, 0, 0, i % 3 == 2 ? __float_as_uint(scale) : 0, tag);
            }
        }
    };
    uint32_t pick = 0;
    const uint32_t* blocks = view.blocks + (size_t)info.slot * view.max_blocks;
    if (waits) {
        if (PLANES == 1) {
            if (info.live && thread < kTable && thread * kBlockTokens <= info.pos) table[thread] = __ldcg(blocks + thread);
            sync_threads<kThreads>();
        }
        pdl_wait();
        ask_queries();
        if (tiles) barrier_wait(&landed, 0);
        if (PLANES == 1 && info.live) pick = pick_of(blockIdx.x);
        const bool none = info.live && list.chosen[0] == kIndexFault;
        if (!info.live || none) {
            // NaN as arithmetic leaves it.
            const float fill = none ? __int_as_float(0x7fffffff) : 0.0f;
            for (uint32_t i = blockIdx.x * kThreads + thread; i < heads * dim; i += gridDim.x * kThreads) {
                const size_t at = out_at + i;
                a.out[at] = fill;
                if (a.turned != nullptr) a.turned[at] = fill;
                if (a.codes == nullptr) continue;
                a.codes[at] = 0;
                if (at % 32 == 0) a.code_scales[at / 32] = fill, a.code_sums[at / 32] = 0;
            }
            send_all(fill);
            return;
        }
    }
    const uint32_t splits = (list.n + split_rows - 1) / split_rows;
    if (splits > (LONG ? a.most_splits : local ? gridDim.x : single ? 0xffffffffu : a.most_splits)) {
        // The step's context class was too small.
        if (thread == 0) report_fault(view, 0x6c610001);
        if (!waits) pdl_wait();
        sync_threads<kThreads>();
        if (tiles) barrier_wait(&landed, 0);
        send_all(0.0f);
        return;
    }
    float* scores = reinterpret_cast<float*>(rows + kRows * stride);                      // [kShares][kHeads][kScoreStride]
    uint16_t* weights = reinterpret_cast<uint16_t*>(scores + kShares * kHeads * kScoreStride);  // [terms][kHeads][kWeightStride]
    // What this block merges of every split: [splits][kHeads][share_stride].
    float* received = reinterpret_cast<float*>(weights + kWeightTerms * kHeads * kWeightStride);
    const uint32_t share = share_of(quads, LONG ? kLongBlocks : gridDim.x), share_stride = 4 * share + 8;
    // Brings a split's rows. Each warp takes five, and needs no other for them. First they are found, and those that are
    // stored as Fp8 are sent for as they are, to where the scores will be: eight bytes at a time, all at once.
    uint8_t* raw = reinterpret_cast<uint8_t*>(scores) + warp * kOwn * row_bytes;
    const uint8_t* from = nullptr;
    uint32_t packed = 0;
    auto of = [&](uint32_t i) {
        return reinterpret_cast<const uint8_t*>(__shfl_sync(kFull, (unsigned long long)from, i));
    };
    auto send = [&](uint32_t split, uint32_t pick) {
        const uint32_t base = split * split_rows, here = min(split_rows, list.n - base), own = warp * kOwn + lane;
        bool stored = false;
        from = nullptr;
        if (lane < kOwn && own < here) from = find_row(a, list, blocks, PLANES == 1 ? table : nullptr, r, info, base + own, pick, stored);
        if constexpr (PLANES == 1) {
            packed = __ballot_sync(kFull, stored);
            const uint32_t row_words = row_bytes / 8;
#pragma unroll
            for (uint32_t i = 0; i < kOwn; ++i) {
                const uint8_t* row = of(i);
#pragma unroll
                for (uint32_t j = 0; j < 3; ++j) {
                    const uint32_t word = lane + 32 * j;
                    if ((packed >> i & 1) && word < row_words) copy_few<8>(raw + i * row_bytes + 8 * word, row + 8 * word);
                }
            }
        }
    };
    // Then one plane of them becomes a tile.
    auto bring = [&](uint32_t plane) {
        uint16_t* to = rows + warp * kOwn * stride;
        if constexpr (PLANES == 1) {
            copies_landed();
            __syncwarp();
            const uint32_t nope = dim - kRopeDim, words = nope / 8 + kRopeDim / 4;
            // All words are read before the first is stored.
            uint2 x[kOwn][3];
            uint32_t scale[kOwn][2];
#pragma unroll
            for (uint32_t i = 0; i < kOwn; ++i) {
                const uint8_t* row = raw + i * row_bytes;
#pragma unroll
                for (uint32_t j = 0; j < 3; ++j) {
                    const uint32_t word = min(lane + 32 * j, words - 1);
                    x[i][j] = *reinterpret_cast<const uint2*>(row + 8 * word);
                    // A row that all rotates has none.
                    if (j < 2) scale[i][j] = nope != 0 ? row[nope + 2 * kRopeDim + min(word, nope / 8 - 1) / 8] : 0;
                }
            }
#pragma unroll
            for (uint32_t i = 0; i < kOwn; ++i) {
                if ((packed >> i & 1) == 0) continue;
                uint16_t* row = to + i * stride;
#pragma unroll
                for (uint32_t j = 0; j < 3; ++j) {
                    const uint32_t word = lane + 32 * j;
                    // 512 values have 56 words of codes: the third is past them.
                    if (j < 2 && word < nope / 8) {
                        *reinterpret_cast<uint4*>(row + 8 * word) = decode_eight(x[i][j], scale[i][j % 2]);
                    } else if (word < words) {
                        *reinterpret_cast<uint2*>(row + nope + 4 * (word - nope / 8)) = x[i][j];
                    }
                }
            }
        }
        // Rows in f32, two at a time.
        for (uint32_t i = 0; i < kOwn; i += 2) {
            if ((packed >> i & 3) == (i + 1 < kOwn ? 3 : 1)) continue;
            float4 x[2][4];
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const float4* row = reinterpret_cast<const float4*>(of(i + half));
#pragma unroll
                for (uint32_t j = 0; j < 4; ++j) {
                    const uint32_t e = lane + 32 * j;
                    const bool there = row != nullptr && 4 * e < dim && (packed >> (i + half) & 1) == 0 && i + half < kOwn;
                    x[half][j] = there ? __ldcg(row + e) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
            }
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                if ((packed >> (i + half) & 1) || i + half >= kOwn) continue;
#pragma unroll
                for (uint32_t j = 0; j < 4; ++j) {
                    const uint32_t e = lane + 32 * j;
                    uint2 y;
                    for (uint32_t cut = 0; cut <= plane; ++cut) {
                        y.x = cut_pair(x[half][j].x, x[half][j].y), y.y = cut_pair(x[half][j].z, x[half][j].w);
                    }
                    if (4 * e < dim) *reinterpret_cast<uint2*>(to + (i + half) * stride + 4 * e) = y;
                }
            }
        }
    };

    if (thread < kHeads) total_m[thread] = -ARC_INF, total_l[thread] = 0.0f;
    // Norm and rotation of the queries, which are then cut into terms.
    auto cut_queries = [&]() {
        const float4 squares[1] = {add4(add4(mul4(query[0], query[0]), mul4(query[2], query[2])),
                                        add4(mul4(query[1], query[1]), mul4(query[3], query[3])))};
        float sums[1];
        sum_lanes4(squares, sums);
        const float factor = rsqrt(__fadd_rn(__fdiv_rn(__fadd_rn(0.0f, sums[0]), (float)dim), a.eps));
        if (!TILES && turning < kRopeDim / 4) cs = reinterpret_cast<const float4*>(angles)[turning];
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
            float4& x = query[j];
            x.x = __fmul_rn(x.x, factor), x.y = __fmul_rn(x.y, factor);
            x.z = __fmul_rn(x.z, factor), x.w = __fmul_rn(x.w, factor);
            if (turning < kRopeDim / 4 && j == turning_j) turn(x.x, x.y, cs.x, cs.y), turn(x.z, x.w, cs.z, cs.w);
            const uint32_t e = 4 * lane + 128 * j;
            if (e >= dim) continue;
#pragma unroll
            for (uint32_t t = 0; t < kQueryTerms; ++t) {
                const uint32_t low = cut_pair(x.x, x.y), high = cut_pair(x.z, x.w);
                *reinterpret_cast<uint2*>(q + (t * kHeads + warp) * stride + e) = make_uint2(low, high);
            }
        }
    };
    // Pairs of eight values of a row that the warp sums.
    constexpr uint32_t kPairs = kMaxLatent / 16 / kWarps;
    constexpr bool kWhole = DIM == kMaxLatent;
    const uint32_t pairs = dim / 16, per_warp = (pairs + kWarps - 1) / kWarps, first_pair = warp * per_warp;
    // Those whose scores the warp takes, and its tiles of sixteen rows: three or two.
    const uint32_t steps = (pairs + kShares - 1) / kShares, first_step = warp % kShares * steps;
    constexpr uint32_t kTiles = (kRows / 16 + 1) / 2;
    static_assert(kWarps == 2 * kShares && 2 * kTiles - 1 == kRows / 16);
    const uint32_t first_tile = warp / kShares * kTiles;
    float total[kPairs][2][4];
#pragma unroll
    for (uint32_t i = 0; i < kPairs; ++i) {
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) total[i][j / 4][j % 4] = 0.0f;
    }
    // Rounds of the cluster, one unless it is LONG.
    uint32_t turn = 0;
    const uint32_t turns = LONG ? (splits + kLongBlocks - 1) / kLongBlocks : 1;
    auto splits_of = [&](uint32_t turn) { return LONG ? min(kLongBlocks, splits - turn * kLongBlocks) : splits; };
    // When everybody has left the round before, and not earlier, since a barrier that is told to expect nothing goes on at once: the
    // block's share of the sums of a round's splits, and their weights, are told of.
    auto begin_round = [&]() {
        cluster_wait();
        const uint32_t fours = min(share, quads - min(quads, blockIdx.x * share)), n = splits_of(turn);
        const uint32_t others = fours != 0 ? n - (blockIdx.x < n ? 1 : 0) : 0;
        if (thread == 0) expect(&weighed, n * kHeads * 8), expect(&parcel, others * kHeads * 4 * share_stride);
    };
    Merged<1> merged;
    auto merge_round = [&]() {
        merge_parts<kLongBlocks>(merged, weight_of, received, share, splits_of(turn), &weighed, &parcel, turn % 2, []() {}, []() {});
    };
    if (local) begin_round();
    for (uint32_t split = blockIdx.x; split < splits; split += gridDim.x) {
        const uint32_t here = min(split_rows, list.n - split * split_rows);
        if (!tiles) send(split, PLANES == 1 && split == blockIdx.x ? pick : pick_of(split));
        if (!waits && sent && !tiles && split == blockIdx.x) take_queries();
        if (split == blockIdx.x) marks.mark(2);
        // Scores: the warp takes a share of the values, for its rows.
        float c[kTiles][2][4];
#pragma unroll
        for (uint32_t i = 0; i < kTiles; ++i) {
#pragma unroll
            for (uint32_t j = 0; j < 8; ++j) c[i][j / 4][j % 4] = 0.0f;
        }
        for (uint32_t plane = 0; plane < PLANES; ++plane) {
            // Queries that are there are cut while rows are on their way.
            const bool first = split == blockIdx.x && plane == 0, cuts_early = PLANES == 1 && first && (waits || sent);
            if (!tiles && !cuts_early) bring(plane);
            if (first) {
                if (PLANES == 1) consts.store(angles, sink_of);
                if (!tiles && !cuts_early) marks.mark(3);
                if (!waits && !sent) {
                    pdl_wait();
                    marks.mark(2);
                    ask_queries();
                }
                // `angles` are there.
                if (!TILES) sync_threads<kThreads>();
                cut_queries();
                marks.mark(7);
            }
            if (!tiles && cuts_early) bring(plane), marks.mark(3);
            if (tiles) barrier_wait(&landed, turn % 2), marks.mark(3);
            sync_threads<kThreads>();
#pragma unroll
            for (uint32_t i = 0; i < kMaxLatent / 16 / kShares; ++i) {
                const uint32_t step = first_step + i;
                if (!kWhole && (i >= steps || step >= pairs)) continue;
                uint32_t x[kQueryTerms][4];
#pragma unroll
                for (uint32_t t = 0; t < kQueryTerms; ++t) {
                    load_tiles(x[t], shared_at(q + (t * kHeads + (lane & 15)) * stride + step * 16 + (lane >> 4) * 8));
                }
#pragma unroll
                for (uint32_t n = 0; n < kTiles; ++n) {
                    if (n + 1 == kTiles && warp >= kShares) continue;
                    uint32_t y[4];
                    load_tiles(y, shared_at(rows + ((first_tile + n) * 16 + (lane >> 4) * 8 + (lane & 7)) * stride + step * 16 +
                                            (lane >> 3 & 1) * 8));
#pragma unroll
                    for (uint32_t t = 0; t < kQueryTerms; ++t) {
                        mma(c[n][0], x[t], y[0], y[1]);
                        mma(c[n][1], x[t], y[2], y[3]);
                    }
                }
            }
            if (PLANES > 1 && plane + 1 < PLANES) sync_threads<kThreads>();
        }
        // Everybody has what was sent from there, and has merged it.
        if (LONG && turn != 0) begin_round();
        float* own = scores + (warp % kShares * kHeads + (lane >> 2)) * kScoreStride + first_tile * 16 + (lane & 3) * 2;
#pragma unroll
        for (uint32_t i = 0; i < kTiles; ++i) {
            if (i + 1 == kTiles && warp >= kShares) continue;
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j) {
                *reinterpret_cast<float2*>(own + 16 * i + 8 * j) = make_float2(c[i][j][0], c[i][j][1]);
                *reinterpret_cast<float2*>(own + 8 * kScoreStride + 16 * i + 8 * j) = make_float2(c[i][j][2], c[i][j][3]);
            }
        }
        sync_threads<kThreads>();
        // Softmax: the warp has one head.
        float e[3], top = -ARC_INF;
#pragma unroll
        for (uint32_t j = 0; j < 3; ++j) {
            const uint32_t key = lane + 32 * j;
            float dot = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < kShares; ++w) {
                dot = __fadd_rn(dot, scores[(w * kHeads + warp) * kScoreStride + min(key, kRows - 1)]);
            }
            e[j] = key < here ? __fmul_rn(dot, a.scale) : -ARC_INF;
            top = fmaxf(top, e[j]);
        }
#pragma unroll
        for (int half = 16; half > 0; half >>= 1) top = fmaxf(top, __shfl_xor_sync(kFull, top, half));
#pragma unroll
        for (uint32_t j = 0; j < 3; ++j) e[j] = exp(__fsub_rn(e[j], top));
        float sum = __fadd_rn(__fadd_rn(e[0], e[1]), e[2]);
#pragma unroll
        for (uint32_t j = 0; j < 3; ++j) {
            const uint32_t key = lane + 32 * j;
            if (key >= kRows) continue;
#pragma unroll
            for (uint32_t t = 0; t < kWeightTerms; ++t) {
                const uint32_t bits = bf16_pair(e[j], 0.0f) & 0xffff;
                e[j] = __fsub_rn(e[j], __uint_as_float(bits << 16));
                weights[(t * kHeads + warp) * kWeightStride + key] = bits;
            }
        }
#pragma unroll
        for (int half = 16; half > 0; half >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(kFull, sum, half));
        if (local) {
            if (lane < gridDim.x) {
                send2(in_block(shared_at(&weight_of[blockIdx.x][warp]), lane), in_block(shared_at(&weighed), lane), top, sum);
            }
        } else if (lane == 0) {
            part_m[warp] = top, part_l[warp] = sum;
            if (single) {
                float m = total_m[warp], keep, add;
                join(m, top, keep, add);
                total_m[warp] = m, total_l[warp] = joined(total_l[warp], keep, sum, add);
                keep_of[warp] = keep, add_of[warp] = add;
            }
        }
        sync_threads<kThreads>();
        marks.mark(4);
        // Sums: the warp takes a share of the values.
        float o[kPairs][2][4];
#pragma unroll
        for (uint32_t i = 0; i < kPairs; ++i) {
#pragma unroll
            for (uint32_t j = 0; j < 8; ++j) o[i][j / 4][j % 4] = 0.0f;
        }
        for (uint32_t plane = PLANES; plane-- > 0;) {
            if (plane + 1 < PLANES) {
                sync_threads<kThreads>();
                bring(plane);
                sync_threads<kThreads>();
            }
#pragma unroll
            for (uint32_t k = 0; k < kRows / 16; ++k) {
                uint32_t x[kWeightTerms][4];
#pragma unroll
                for (uint32_t t = 0; t < kWeightTerms; ++t) {
                    load_tiles(x[t], shared_at(weights + (t * kHeads + (lane & 15)) * kWeightStride + k * 16 + (lane >> 4) * 8));
                }
#pragma unroll
                for (uint32_t i = 0; i < kPairs; ++i) {
                    const uint32_t pair = first_pair + i;
                    if (kWhole || (i < per_warp && pair < pairs)) {
                        uint32_t y[4];
                        load_tiles_turned(y, shared_at(rows + (k * 16 + (lane & 15)) * stride + pair * 16 + (lane >> 4) * 8));
#pragma unroll
                        for (uint32_t t = 0; t < kWeightTerms; ++t) {
                            mma(o[i][0], x[t], y[0], y[1]);
                            mma(o[i][1], x[t], y[2], y[3]);
                        }
                    }
                }
            }
        }
        // Values 16 pair + 8 j + 2 (lane % 4) + {0, 1} of heads lane / 4 and lane / 4 + 8.
        const uint32_t low = lane >> 2, high = low + 8;
        if (single) {
            const float keep[2] = {keep_of[low], keep_of[high]}, add[2] = {add_of[low], add_of[high]};
#pragma unroll
            for (uint32_t i = 0; i < kPairs; ++i) {
#pragma unroll
                for (uint32_t j = 0; j < 8; ++j) {
                    float& t = total[i][j / 4][j % 4];
                    t = joined(t, keep[j / 2 % 2], o[i][j / 4][j % 4], add[j / 2 % 2]);
                }
            }
            sync_threads<kThreads>();
            continue;
        }
        float* parts = a.parts + (((size_t)r * a.heads + first_head) * a.most_splits + split) * (dim + 2);
        const size_t to_next = (size_t)a.most_splits * (dim + 2);
#pragma unroll
        for (uint32_t i = 0; i < kPairs; ++i) {
            if (kWhole || (i < per_warp && first_pair + i < pairs)) {
#pragma unroll
                for (uint32_t j = 0; j < 2; ++j) {
                    const uint32_t e = (first_pair + i) * 16 + 8 * j + 2 * (lane & 3);
                    if (local) {
                        // Where the scores were, for the block that merges these values; this block's own where it looks for them.
                        const uint32_t block = (first_pair + i) * 4 / share;
                        float* to = block == blockIdx.x ? received + blockIdx.x * kHeads * share_stride : scores + block * kHeads * share_stride;
                        to += low * share_stride + e - block * share * 4;
                        *reinterpret_cast<float2*>(to) = make_float2(o[i][j][0], o[i][j][1]);
                        *reinterpret_cast<float2*>(to + 8 * share_stride) = make_float2(o[i][j][2], o[i][j][3]);
                    } else {
                        if (low < heads) *reinterpret_cast<float2*>(parts + low * to_next + e) = make_float2(o[i][j][0], o[i][j][1]);
                        if (high < heads) *reinterpret_cast<float2*>(parts + high * to_next + e) = make_float2(o[i][j][2], o[i][j][3]);
                    }
                }
            }
        }
        if (local) {
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            sync_threads<kThreads>();
            if (thread * share < quads && thread < gridDim.x && thread != blockIdx.x) {
                const uint32_t heads_of = kHeads * share_stride;
                send_lines(in_block(shared_at(received + blockIdx.x * heads_of), thread), shared_at(scores + thread * heads_of), 4 * heads_of,
                           in_block(shared_at(&parcel), thread));
            }
            if (!LONG) break;
            // Everybody has read the tile.
            if (thread == 0 && split + kLongBlocks < splits) bring_tile(split + kLongBlocks);
            if (turn == 0) pdl_wait();
            merge_round();
            if (++turn != turns) cluster_arrive();
            continue;
        }
        if (thread < heads) {
            *reinterpret_cast<float2*>(parts + thread * to_next + dim) = make_float2(part_m[thread], part_l[thread]);
        }
        sync_threads<kThreads>();
    }
    if (blockIdx.x >= splits) {
        if (PLANES == 1) consts.store(angles, sink_of);
        if (tiles) barrier_wait(&landed, 0);
        sync_threads<kThreads>();
    }
    // Whoever has queries that were sent has not waited yet.
    if (!waits && (LONG ? turn == 0 : blockIdx.x >= splits || sent)) pdl_wait();
    if (single) {
        // Through shared memory, where the rows were: from two values a lane to four.
        const uint32_t low = lane >> 2, high = low + 8, part_stride = dim + 4;
        float* part = reinterpret_cast<float*>(rows);
        const float factor[2] = {finish(total_m[low], total_l[low], sink_of[low]), finish(total_m[high], total_l[high], sink_of[high])};
#pragma unroll
        for (uint32_t i = 0; i < kPairs; ++i) {
            if (kWhole || (i < per_warp && first_pair + i < pairs)) {
#pragma unroll
                for (uint32_t j = 0; j < 4; ++j) {
                    const uint32_t e = (first_pair + i) * 16 + 8 * (j / 2) + 2 * (lane & 3), half = j % 2;
                    const float* t = total[i][j / 2] + 2 * half;
                    *reinterpret_cast<float2*>(part + (half == 0 ? low : high) * part_stride + e) =
                        make_float2(__fmul_rn(t[0], factor[half]), __fmul_rn(t[1], factor[half]));
                }
            }
        }
        sync_threads<kThreads>();
        for (uint32_t first = 0; first < heads * quads; first += kThreads) {
            const uint32_t i = first + thread, h[1] = {min(i / quads, heads - 1)}, quad[1] = {i % quads};
            const bool there[1] = {i < heads * quads};
            const float4 x = *reinterpret_cast<const float4*>(part + h[0] * part_stride + 4 * quad[0]);
            float y[1][4] = {{x.x, x.y, x.z, x.w}};
            put(a, out_at, dim, angles, y, h, quad, there, 0);
        }
        return;
    }
    if (apart) return;
    // The cluster's blocks merge, each its share. What a block has sent is read from its shared memory until everybody has received
    // everything.
    auto received_all = [&]() {
        marks.mark(5);
        cluster_arrive_relaxed();
    };
    if constexpr (LONG) {
        if (turn != turns) {
            // The block has nothing of the last round.
            if (turn != 0) begin_round();
            merge_round();
        }
        received_all();
        if (thread / kLongBlocks >= kHeads) return cluster_wait();
        leave_merged<kLongBlocks>(a, out_at, dim, share, finish(merged.m, merged.l, sink_of[thread / kLongBlocks]), angles, merged.y, tag);
    } else {
        by_share(share, [&](auto lanes, auto items) {
            constexpr uint32_t kLanes = decltype(lanes)::n, kFours = decltype(items)::n;
            const uint32_t head = thread / kLanes;
            Merged<kFours> of;
            float factor = 0.0f;
            // A score was NaN: so is what the heads read.
            auto known = [&]() { factor = finish(of.m, of.l, TILES && faulty ? ARC_NAN : sink_of[head]); };
            merge_parts<kLanes>(of, weight_of, received, share, splits, &weighed, &parcel, 0, known, received_all);
            if (head >= kHeads) return;
            leave_merged<kLanes>(a, out_at, dim, share, factor, angles, of.y, tag);
        });
    }
    marks.mark(6);
    cluster_wait();
}

}  // namespace

// Grid: (blocks of splits, groups of 16 heads, rows).
extern "C" __global__ void __launch_bounds__(544, 1) latent_attend_tiles(LatentArgs a, StepView view) { attend<1, 512, true>(a, view); }
extern "C" __global__ void __launch_bounds__(544, 1) latent_attend_long(LatentArgs a, StepView view) {
    attend<1, 512, true, true>(a, view);
}
extern "C" __global__ void __launch_bounds__(512, 1) latent_attend_512(LatentArgs a, StepView view) { attend<1, 512, false>(a, view); }
extern "C" __global__ void __launch_bounds__(512, 1) latent_attend_packed(LatentArgs a, StepView view) { attend<1, 0, false>(a, view); }
extern "C" __global__ void __launch_bounds__(512, 1) latent_attend_f32(LatentArgs a, StepView view) { attend<3, 0, false>(a, view); }

}  // namespace arc
