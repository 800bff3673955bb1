// Layers of a dense decoder over a few rows, one after the other, in one launch: every row has a cluster.
//
// A cluster's 16 blocks have a share of every product each, so that what one stage leaves for the next crosses shared memory
// alone: five times a layer blocks send one another values (`st.async`), and a barrier of the receiver counts their bytes.
// What a block multiplies by lies in its shared memory: a part of its own for each of a layer's four products, which is filled
// for the next layer as soon as it was read.
//
//   heads      norm and int8 of the residual, by three warps of every block; a head of queries, keys or values a block; rope and append
//   attention  key head j by blocks j, j + n_kv_heads and so on: a split of 256 keys each, and where there are more blocks than
//              splits some of its query heads each; with several splits blocks then merge 32 values each
//   out        W_o of the heads' int8, added to the residual
//   units      norm and int8 by every block; gate and up; the unit and its int8 by the block that has them
//   down       W_down of the units' int8, added to the residual
//
// A place that blocks send to may be written over: who sends there has what its receivers sent when they were done with it. So
// every block sends something of the residual and of the units. A block is done when it has what the others sent last: nobody sends
// to one that has ended. Barriers are waited for as those of a block's own: an acquire of the cluster's would drop all of L1, and what
// is sent comes with the barrier's count.
//
// Rows of one sequence see each other's keys and values: who appends some that another cluster looks for says so in `appended`, and
// that one asks for a layer's keys when it has seen all of them, rather than ahead. It waits for rows before its own alone, and all
// clusters of a launch are resident.
//
// What stands between a wait and a send is short, and a layer's instructions are few: beyond some 2,000 the instruction cache
// misses. Sums of products have two places, so that between the last look at some and the next ones stands a barrier of the block.
//
// Weights are Q4_1. Exact: operations and their order are those of gemv.cuh and kv.cu.
#include "../kv/kv.cuh"
#include "layers.cuh"

namespace arc {

namespace {

constexpr uint32_t kBlocks = 16;
// More would have fewer registers.
constexpr uint32_t kWarps = 16, kThreads = 32 * kWarps;
// The last warps make the int8 of a norm, eight values a lane, and take the short tiles. One before them asks for what comes next.
constexpr uint32_t kMakers = 3, kFirstMaker = kWarps - kMakers, kAsks = kFirstMaker - 1;
constexpr uint32_t kHeadDim = 64;
constexpr uint32_t kMostLayers = 32, kMostSplits = 8, kMostGroup = 3;
constexpr uint32_t kTile = tile_bytes(Q4_1, kSlice);
constexpr uint32_t kKvTile = kHeadDim * kBlockTokens * 2;
// Values of a part of 32 values of a head: those, the maximum and the sum, and up to a border of 16 bytes.
constexpr uint32_t kPart = 36;

// Products of a layer.
enum Of : uint32_t { kHeads, kOut, kUnits, kDown, kProducts };

struct Layer {
    uint64_t qkv, out, gate, up, down;
    uint64_t attn_norm, ffn_norm;
    uint64_t k, v;
};
static_assert(sizeof(Layer) == 72);

// `Layers` of layers.rs.
struct Layers {
    Layer layers[kMostLayers];
    // `appended`: of each row and key head, of keys and of values, the step's number and how many of its layers are appended.
    uint64_t x, rope, appended;
    float eps, scale;
    uint32_t n_layers, adjacent;
    uint32_t first_row, first_layer;  // of this launch
    // In shared memory: the residual before and after the attention; int8 of a norm, of the heads and of the units; queries,
    // key and value of a key head; angles; sums of heads and units, then an attention's weights; sums of the other products;
    // parts to merge; weights; keys and values.
    uint32_t x_at, middle_at, codes_at, heads_at, units_at, qkv_at, angles_at, sums_at, rows_at, parts_at, weights_at, kv_at;
};
static_assert(sizeof(Layers) == 2400);

// Barriers, in front of everything.
enum Bar : uint32_t {
    kFull,                      // of the weights of a product
    kSent = kFull + kProducts,  // what it reads: the residual, heads as int8, the residual behind the attention, units as int8
    kKvFull = kSent + kProducts,
    kSentHeads,  // heads of queries, keys and values
    kSentParts,  // parts of heads
    kBars
};

// What a block has of a product: where its groups lie in shared memory, how many and from which on.
struct Own {
    uint32_t at, groups, first, bytes;
};
constexpr uint32_t kOwnAt = (8 * kBars + 15) & ~15u, kTablesAt = kOwnAt + kProducts * sizeof(Own);
// Of a split by query head and tile: maximum, factor of what stood before, sum.
struct Tables {
    float top[kMostGroup][kSplitTiles], keep[kMostGroup][kSplitTiles], sum[kMostGroup][kSplitTiles];
};
constexpr uint32_t kPlanAt = kTablesAt + sizeof(Tables), kPlanBytes = 44, kMarkAt = kPlanAt + kPlanBytes;
// What a warp multiplies: a word each, by product and warp; makers have a second one behind those.
constexpr uint32_t kItemsAt = (kMarkAt + 4 + 15) & ~15u, kTurns = 2;
static_assert(kItemsAt + 4 * kProducts * (kWarps + kMakers) == 800, "HEAD_BYTES of layers.rs");

// The first of block `rank`'s `n` items, of which the first `n % kBlocks` blocks have one more, or the last.
__device__ __forceinline__ uint32_t share(uint32_t n, uint32_t rank, bool last) {
    const uint32_t each = n / kBlocks, more = n % kBlocks, few = kBlocks - more;
    return rank * each + (last ? (rank > few ? rank - few : 0) : min(rank, more));
}

// How a matrix of so many columns is cut: `Cut::of` of plan.rs.
constexpr Cut cut_of_cols(uint32_t cols) {
    const uint32_t slices = (cols + kSlice - 1) / kSlice;
    return Cut{cols, slices, cols % kSlice != 0 ? 0u : slices % 4 == 0 ? 2u : slices % 2 == 0 ? 1u : 0u};
}

// HIDDEN: the residual. FFN: units. ROWS: there are several, which may be of one sequence.
template <uint32_t HIDDEN, uint32_t HEADS, uint32_t KV_HEADS, uint32_t FFN, bool ROWS>
struct Decoder {
    static constexpr uint32_t GROUP = HEADS / KV_HEADS;  // query heads of a key head
    // Of matrices that read the residual, the heads, the units.
    static constexpr Cut kHidden = cut_of_cols(HIDDEN), kHeadsCut = cut_of_cols(HEADS * kHeadDim), kFfn = cut_of_cols(FFN);
    static constexpr uint32_t kAllHeads = HEADS + 2 * KV_HEADS, kHeadsEach = (kAllHeads + kBlocks - 1) / kBlocks;
    // Blocks that share the splits of a key head.
    static constexpr uint32_t kPerHead = kBlocks / KV_HEADS;
    static constexpr uint32_t kChunks = HEADS * kHeadDim / 32;
    static_assert(HEADS % KV_HEADS == 0 && GROUP <= kMostGroup && 2 * GROUP <= kWarps && kPerHead >= 1 && kHeadsEach <= 8);
    static_assert(HIDDEN % 32 == 0 && HIDDEN <= kSumChunk && HIDDEN <= 256 * kMakers && FFN % 32 == 0);
    // Every block has rows and units, and its tiles are no more than warps take: whole ones by warps that make nothing.
    static constexpr uint32_t kRowGroups[2] = {HIDDEN / (kLanes >> kHeadsCut.log_c), HIDDEN / (kLanes >> kFfn.log_c)};
    static constexpr uint32_t most(uint32_t n) { return (n + kBlocks - 1) / kBlocks; }
    static constexpr bool fits(const Cut& cut, uint32_t groups) {
        const uint32_t short_ones = cut.cols % kSlice != 0 ? groups : 0;
        return (cut.slices >> cut.log_c) * groups - short_ones <= kFirstMaker && short_ones <= kTurns * kMakers;
    }
    static_assert(kRowGroups[0] >= kBlocks && kRowGroups[1] >= kBlocks && FFN / 32 >= kBlocks);
    static_assert(fits(kHidden, 2 * kHeadsEach << kHidden.log_c) && fits(kHidden, 2 * most(FFN / 32) << kHidden.log_c));
    static_assert(fits(kHeadsCut, most(kRowGroups[0])) && fits(kFfn, most(kRowGroups[1])));

    const Layers& p;
    const StepView& view;
    uint8_t* smem;
    uint32_t row_idx, rank, warp, lane;

    __device__ __forceinline__ uint64_t* bar(uint32_t i) const { return reinterpret_cast<uint64_t*>(smem) + i; }
    __device__ __forceinline__ Own& own(uint32_t of) const { return reinterpret_cast<Own*>(smem + kOwnAt)[of]; }
    __device__ __forceinline__ Tables& tables() const { return *reinterpret_cast<Tables*>(smem + kTablesAt); }
    __device__ __forceinline__ float* floats(uint32_t at) const { return reinterpret_cast<float*>(smem + at); }
    static __device__ __forceinline__ Cut cut_of(uint32_t of) { return of == kOut ? Cut{kHeadsCut} : of == kDown ? Cut{kFfn} : Cut{kHidden}; }
    __device__ __forceinline__ volatile uint32_t* kept() const { return reinterpret_cast<volatile uint32_t*>(smem + kMarkAt); }
    // Of the blocks that have to do with a key head, which this is.
    __device__ __forceinline__ uint32_t head_place() const { return rank / KV_HEADS; }

    // How blocks share the splits of a key head: so many take heads of one split, `each` heads a block, and so many attend at all.
    struct Spread {
        uint32_t parts, each, attending;
        Spread() = default;
        __device__ __forceinline__ explicit Spread(uint32_t splits) {
            parts = splits == 0 || splits > kPerHead ? 1 : min(kPerHead / splits, GROUP);
            each = (GROUP + parts - 1) / parts, parts = (GROUP + each - 1) / each;
            attending = min(splits * parts, kPerHead);
        }
        __device__ __forceinline__ uint32_t heads(uint32_t place) const { return min(each, GROUP - place % parts * each); }
    };

    // What a block has of an attention: its first split, from one to its next, its heads and the first chunk of 32 values of these.
    struct Plan {
        uint32_t pos, ahead, block, splits;
        Spread spread;
        uint32_t split, over, heads, chunk;
    };
    static_assert(sizeof(Plan) == kPlanBytes);
    __device__ __forceinline__ Plan& plan() const { return *reinterpret_cast<Plan*>(smem + kPlanAt); }

    // One warp, before anybody looks at it: what the block has, a product a lane.
    __device__ __forceinline__ void prepare() const {
        constexpr uint32_t all = kAllHeads, each = kHeadsEach, wide = 1u << kHidden.log_c;  // groups of 32 rows
        const uint32_t of = lane % kProducts;
        const Cut cut = cut_of(of);
        uint32_t first, end;
        if (of == kHeads) {
            first = min(rank * each, all) * 2 * wide, end = min((rank + 1) * each, all) * 2 * wide;
        } else if (of == kUnits) {
            first = share(kFfn.cols / 32, rank, false) * wide, end = share(kFfn.cols / 32, rank + 1, false) * wide;
        } else {
            const uint32_t groups = kHidden.cols / cut.group_rows();
            first = share(groups, rank, of == kDown), end = share(groups, rank + 1, of == kDown);
        }
        const uint32_t groups = (end - first) << (of == kUnits), bytes = groups * cut.group_bytes(Q4_1);
        uint32_t at = p.weights_at;
#pragma unroll
        for (uint32_t i = 0; i + 1 < kProducts; ++i) {
            const uint32_t before = __shfl_sync(~0u, bytes, i);
            if (i < of) at += before;
        }
        if (lane < kProducts) own(of) = Own{at, groups, first, bytes};
    }

    // Tile t of group g of a block's own, as a word: its place over 16, blocks of a lane, the place of its sums, and t + 1.
    __device__ __forceinline__ uint32_t& item(uint32_t of, uint32_t turn, uint32_t at) const {
        return reinterpret_cast<uint32_t*>(smem + kItemsAt)[of * (kWarps + kMakers) + turn * kMakers + at];
    }
    // A warp's tiles of all products.
    __device__ __forceinline__ void list() const {
        const bool makes = warp >= kFirstMaker;
        if (lane >= (makes ? kProducts * kTurns : kProducts)) return;
        const uint32_t of = lane % kProducts, turn = lane / kProducts;
        const Cut cut = cut_of(of);
        const Own mine = own(of);
        const uint32_t tiles = cut.tiles(), whole = tiles - (cut.tail() != 0);
        const uint32_t i = makes ? warp - kFirstMaker + turn * kMakers : warp;
        const uint32_t t = makes ? whole : mine.groups == 0 ? 0 : i / mine.groups, g = makes ? i : i - t * mine.groups;
        const bool has = makes ? whole != tiles && i < mine.groups : i < mine.groups * whole;
        const uint32_t at = mine.at + g * cut.group_bytes(Q4_1) + t * kTile;
        item(of, turn, warp) = has ? at / 16 | (makes ? cut.tail() / 32 : 8) << 14 | (g * tiles + t) << 18 | (t + 1) << 28 : 0;
    }

    // One thread: weights of a product of a layer.
    __device__ __forceinline__ void ask(const Layer& layer, uint32_t of) const {
        const Own mine = own(of);
        const size_t skip = (size_t)mine.first * cut_of(of).group_bytes(Q4_1);
        const uint64_t base = of == kHeads ? layer.qkv : of == kOut ? layer.out : of == kUnits ? layer.gate : layer.down;
        expect(bar(kFull + of), mine.bytes);
        if (mine.bytes == 0) return;
        const uint32_t bytes = of == kUnits ? mine.bytes / 2 : mine.bytes;
        bulk_copy(smem + mine.at, reinterpret_cast<const uint8_t*>(base) + skip, bytes, bar(kFull + of));
        if (of == kUnits) bulk_copy(smem + mine.at + bytes, reinterpret_cast<const uint8_t*>(layer.up) + skip, bytes, bar(kFull + of));
    }
    // One thread: what is sent next time for a product is counted.
    __device__ __forceinline__ void count(uint32_t of) const {
        expect(bar(kSent + of), of == kOut ? 40 * kChunks : of == kDown ? 40 * (kFfn.cols / 32) : 4 * kHidden.cols);
    }
    __device__ __forceinline__ void count_heads() const {
        const uint32_t heads = plan().heads, splits = plan().splits;
        if (heads != 0) expect(bar(kSentHeads), 4 * (heads + 2) * kHeadDim);
        if (splits > 1 && chunks() > 0) expect(bar(kSentParts), 4 * 34 * chunks() * splits);
    }

    // Which block of the cache has the lane's tile of a split: half of a warp has a tile of keys or of values a lane.
    __device__ __forceinline__ uint32_t block_of(const uint32_t* blocks, uint32_t split, uint32_t tiles) const {
        const uint32_t tile = split * kSplitTiles + lane % kSplitTiles;
        return tile < tiles ? blocks[tile] : 0;
    }
    // One warp: keys and values of a split. `tiles`: of the row's keys.
    __device__ __forceinline__ void ask_keys(const Layer& layer, uint32_t split, uint32_t tiles, uint32_t block) const {
        const uint32_t n = min(tiles - split * kSplitTiles, kSplitTiles);
        if (lane == 0) expect(bar(kKvFull), 2 * n * kKvTile);
        __syncwarp();
        if (lane < 2 * kSplitTiles && lane % kSplitTiles < n) {
            const uint8_t* pool = reinterpret_cast<const uint8_t*>(lane < kSplitTiles ? layer.k : layer.v);
            bulk_copy(smem + p.kv_at + lane * kKvTile, pool + ((size_t)block * KV_HEADS + rank % KV_HEADS) * kKvTile, kKvTile, bar(kKvFull));
        }
    }

    // The word of `appended` of a row.
    __device__ __forceinline__ uint64_t appended(uint32_t row, uint32_t kv_head, uint32_t values) const {
        return p.appended + 8 * ((row * KV_HEADS + kv_head) * 2 + values);
    }
    // One warp: waits until so many layers of the `rows` rows before this one, up to 16, have keys and values.
    __device__ __forceinline__ void await_keys(uint32_t rows, uint32_t layers) const {
        const uint64_t wanted = (uint64_t)view.progress->begun << 32 | layers, at = appended(row_idx - 1 - lane / 2, rank % KV_HEADS, lane % 2);
        uint64_t seen = wanted;
        do {
            if (lane < 2 * rows) asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
        } while (!__all_sync(~0u, seen >> 32 == wanted >> 32 && seen >= wanted));
        __syncwarp();
        asm volatile("fence.proxy.async.global;" ::: "memory");
    }

    // Int8 of a row: scales and sums of its blocks, then slices of codes. `cols` of the row.
    static __device__ __forceinline__ uint32_t codes_of(uint32_t at, uint32_t cols) { return at + (cols / 4 + 15 & ~15u); }
    __device__ __forceinline__ float2* scales(uint32_t at) const { return reinterpret_cast<float2*>(smem + at); }

    // A maker's values of the row: eight a lane. Lanes past the end do what the first of the row do, and leave nothing.
    __device__ __forceinline__ uint32_t own_k() const { return 256 * (warp - kFirstMaker) + 8 * lane; }
    __device__ __forceinline__ uint32_t safe_k() const { return own_k() < kHidden.cols ? own_k() : own_k() % 32; }
    // The weights of a norm, which are on their way while its inputs are.
    struct Norm {
        float4 low, high;
    };
    __device__ __forceinline__ Norm load_norm(uint64_t norm) const {
        const float4* at = reinterpret_cast<const float4*>(norm) + safe_k() / 4;
        return Norm{load_early(at), load_early(at + 1)};
    }

    // Int8 of the residual behind its norm, by the makers.
    __device__ __forceinline__ void make(const float* x, const Norm& weight) const {
        constexpr uint32_t n = kHidden.cols;
        float v[n / 32];
#pragma unroll
        for (uint32_t j = 0; j < n / 32; ++j) {
            const float a = x[lane + 32 * j];
            v[j] = __fmul_rn(a, a);
        }
        const uint32_t k = safe_k();
        const float4 low = *reinterpret_cast<const float4*>(x + k), high = *reinterpret_cast<const float4*>(x + k + 4);
        fold_first<kSumChunk / 64, n / 32>(v);
        const float sum = __fadd_rn(0.0f, sum_lanes(v[0]));
        float mean = over<n>(sum);
        if (!tame(sum)) mean = __fdiv_rn(sum, (float)n);
        // As `rsqrt`; what a NaN makes of the codes does not depend on its bits.
        const float factor = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, p.eps)));
        float y[8] = {
            __fmul_rn(__fmul_rn(low.x, factor), weight.low.x),   __fmul_rn(__fmul_rn(low.y, factor), weight.low.y),
            __fmul_rn(__fmul_rn(low.z, factor), weight.low.z),   __fmul_rn(__fmul_rn(low.w, factor), weight.low.w),
            __fmul_rn(__fmul_rn(high.x, factor), weight.high.x), __fmul_rn(__fmul_rn(high.y, factor), weight.high.y),
            __fmul_rn(__fmul_rn(high.z, factor), weight.high.z), __fmul_rn(__fmul_rn(high.w, factor), weight.high.w)};
        auto larger = [](float a, float b) { return max_or_nan(fabsf(a), fabsf(b)); };
        float amax = larger(larger(larger(y[0], y[1]), larger(y[2], y[3])), larger(larger(y[4], y[5]), larger(y[6], y[7])));
        const float of_1 = __shfl_xor_sync(~0u, amax, 1), of_2 = __shfl_xor_sync(~0u, amax, 2), of_3 = __shfl_xor_sync(~0u, amax, 3);
        amax = larger(larger(amax, of_1), larger(of_2, of_3));
        const Scale scale(amax, y);
        int c[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) c[i] = scale.code(y[i]);
        const uint2 codes = make_uint2(low_bytes(c[0], c[1], c[2], c[3]), low_bytes(c[4], c[5], c[6], c[7]));
        int total = __dp4a((int)codes.x, 0x01010101, __dp4a((int)codes.y, 0x01010101, 0));
        const int a = __shfl_xor_sync(~0u, total, 1), b = __shfl_xor_sync(~0u, total, 2), d = __shfl_xor_sync(~0u, total, 3);
        total += a + b + d;
        if (own_k() >= n) return;
        *reinterpret_cast<uint2*>(smem + codes_of(p.codes_at, n) + k / 256 * 272 + k % 256) = codes;
        if (lane % 4 == 0) scales(p.codes_at)[k / 32] = make_float2(scale.d, (float)total);
    }

    // Block `at` of 32 values, one a lane, as int8 to all blocks.
    __device__ __forceinline__ void send_codes(float v, uint32_t to, uint32_t cols, uint32_t at, uint32_t landing) const {
        float y[1] = {v};
        const Scale scale(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(v) & 0x7fffffffu)), y);
        const int code = scale.code(y[0]), sum = __reduce_add_sync(~0u, code - __float_as_int(kRound));
        // Four lanes' codes in each of them, then four words of them.
        const uint32_t first = lane & 16;
        const int b = __shfl_down_sync(~0u, code, 1), c = __shfl_down_sync(~0u, code, 2), d = __shfl_down_sync(~0u, code, 3);
        const uint32_t word = low_bytes(code, b, c, d);
        uint4 words;
        words.x = __shfl_sync(~0u, word, first), words.y = __shfl_sync(~0u, word, first + 4);
        words.z = __shfl_sync(~0u, word, first + 8), words.w = __shfl_sync(~0u, word, first + 12);
        const uint32_t there = in_block(smem, lane & 15), bar = there + 8 * landing;
        send(there + codes_of(to, cols) + at / 8 * 272 + at % 8 * 32 + first, bar, words);
        if (lane < 16) send(there + to + 8 * at, bar, scale.d, (float)sum);
    }

    // What a lane reads of a product's inputs, and where it leaves the sum of a tile.
    struct Inputs {
        const uint8_t* codes;
        const float2* scales;
        float* sum;
    };
    __device__ __forceinline__ Inputs inputs_of(uint32_t of, uint32_t word) const {
        const Cut cut = cut_of(of);
        const bool normed = of == kHeads || of == kUnits;
        const uint32_t at = normed ? p.codes_at : of == kOut ? p.heads_at : p.units_at, slice = cut.slice_of((word >> 28) - 1, lane);
        return Inputs{smem + codes_of(at, cut.cols) + slice * 272, scales(at) + slice * 8,
                      floats(normed ? p.sums_at : p.rows_at) + (word >> 18 & 1023) * kLanes + lane};
    }
    __device__ __forceinline__ const uint8_t* tile_of(uint32_t word) const { return smem + 16 * (word & 0x3fff); }

    // A whole tile. `ready()`: waits for the inputs, when the weights are in registers.
    template <typename Ready>
    __device__ __forceinline__ void multiply(uint32_t of, uint32_t word, Ready ready) const {
        Weights w[8];
#pragma unroll
        for (uint32_t b = 0; b < 8; ++b) w[b].load(tile_of(word), b, lane);
        const Inputs in = inputs_of(of, word);
        // Once, for 8 blocks. A loop, since what stands in one is not moved behind the wait.
        uint32_t blocks = word >> 14 & 15;
#pragma unroll 1
        do {
#pragma unroll
            for (uint32_t b = 0; b < 8; ++b) w[b].part();
        } while ((blocks -= 8) != 0);
        ready();
        float acc = 0.0f;
#pragma unroll
        for (uint32_t b = 0; b < 8; b += 2) {
            const float4 two = *reinterpret_cast<const float4*>(in.scales + b);
            w[b].add(in.codes + 32 * b, make_float2(two.x, two.y), acc);
            w[b + 1].add(in.codes + 32 * b + 32, make_float2(two.z, two.w), acc);
        }
        *in.sum = acc;
    }
    // A short one.
    __device__ __forceinline__ void multiply_short(uint32_t of, uint32_t word) const {
        const Inputs in = inputs_of(of, word);
        float acc = 0.0f;
#pragma unroll 1
        for (uint32_t b = 0; b < (word >> 14 & 15); ++b) {
            Weights w;
            w.load(tile_of(word), b, lane);
            w.part();
            w.add(in.codes + 32 * b, in.scales[b], acc);
        }
        *in.sum = acc;
    }

    // Where the sums of row n of the block's by the residual are, from group `from` on, and the sum of them.
    __device__ __forceinline__ uint32_t row_at(uint32_t from, uint32_t n) const {
        constexpr Cut cut = kHidden;
        const uint32_t rows = cut.group_rows();
        return p.sums_at + 4 * ((from + n / rows) * cut.tiles() * kLanes + n % rows);
    }
    __device__ __forceinline__ float row(uint32_t at) const {
        constexpr uint32_t slices = kHidden.slices, rows = kLanes >> kHidden.log_c;
        float v[slices], sum = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < slices; ++i) v[i] = *floats(at + 4 * i * rows);
#pragma unroll
        for (uint32_t i = 0; i < slices; ++i) sum = __fadd_rn(sum, v[i]);
        return sum;
    }

    // Where a lane has four of the block's rows of a product that the residual takes: sums, and the residual's. None: `kNone`.
    struct Rows {
        uint32_t sums, x;
    };
    __device__ __forceinline__ Rows rows_of(uint32_t of) const {
        const Own mine = own(of);
        const Cut cut = cut_of(of);
        const uint32_t rows = cut.group_rows(), n = 32 * warp + 4 * (lane & 7);
        if (n >= mine.groups * rows) return Rows{0, kNone};
        return Rows{p.rows_at + 4 * ((n & ~(rows - 1)) * cut.slices + (n & rows - 1)), 4 * (mine.first * rows + n)};
    }
    template <typename CutOf>
    static __device__ __forceinline__ float4 add_slices(const uint8_t* at, CutOf) {
        float4 v[CutOf::slices], sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (uint32_t i = 0; i < CutOf::slices; ++i) v[i] = *reinterpret_cast<const float4*>(at + 4 * i * CutOf::rows);
#pragma unroll
        for (uint32_t i = 0; i < CutOf::slices; ++i) sum = add4(sum, v[i]);
        return sum;
    }
    struct OutCut {
        static constexpr uint32_t slices = kHeadsCut.slices, rows = kLanes >> kHeadsCut.log_c;
    };
    struct DownCut {
        static constexpr uint32_t slices = kFfn.slices, rows = kLanes >> kFfn.log_c;
    };
    // Adds the block's rows to the residual: to all blocks, or to memory.
    __device__ __forceinline__ void add_rows(bool behind, uint32_t sums, uint32_t k, float* out) const {
        if (k == kNone) return;
        const uint32_t from = behind ? p.x_at : p.middle_at, to = behind ? p.middle_at : p.x_at;
        const float4 x = *reinterpret_cast<const float4*>(smem + from + k);
        float4 sum;
        if (behind) {
            sum = add_slices(smem + sums, OutCut{});
        } else {
            sum = add_slices(smem + sums, DownCut{});
        }
        sum = add4(x, sum);
        if (out != nullptr) {
            if (lane < 8) *reinterpret_cast<float4*>(reinterpret_cast<uint8_t*>(out) + k) = sum;
            return;
        }
        const uint32_t landing = 8 * (kSent + (behind ? kUnits : kHeads));
#pragma unroll
        for (uint32_t i = 0; i < kBlocks; i += 4) {
            const uint32_t there = in_block(smem, i + lane / 8);
            send(there + to + k, there + landing, sum.x, sum.y, sum.z, sum.w);
        }
    }

    // A warp's chunk of 32 units.
    struct Gate {
        uint32_t chunk, sums, up;
    };
    __device__ __forceinline__ Gate gate_of() const {
        const Own mine = own(kUnits);
        if (warp >= mine.groups >> (kHidden.log_c + 1)) return Gate{kNone, 0, 0};
        const uint32_t n = 32 * warp + lane;
        return Gate{(mine.first >> kHidden.log_c) + warp, row_at(0, n), row_at(mine.groups / 2, n)};
    }

    // A warp's head of queries, keys or values.
    struct Head {
        uint32_t kind;        // 0 of queries, 1 of keys, 2 of values; `kNone`: no head
        uint32_t kv_head;
        uint32_t sums[2];     // where a lane's two values are
        uint32_t to;          // goes to this place of the blocks `first`, `first + step` and so on below `end`
        uint32_t first, step, end;
    };
    __device__ __forceinline__ Head head_of() const {
        const Own mine = own(kHeads);
        const uint32_t wide = 2u << kHidden.log_c;
        if (warp >= mine.groups / wide) return Head{kNone};
        const Spread spread = plan().spread;
        const uint32_t head = mine.first / wide + warp, kind = head < HEADS ? 0 : head < HEADS + KV_HEADS ? 1 : 2;
        const uint32_t kv_head = kind == 0 ? head / GROUP : (head - HEADS) % KV_HEADS;
        const uint32_t part = kind == 0 ? head % GROUP / spread.each : 0;
        const uint32_t place = kind == 0 ? head % GROUP - part * spread.each : GROUP - 1 + kind;
        const uint32_t i = p.adjacent ? 2 * lane : lane, j = p.adjacent ? 2 * lane + 1 : lane + kHeadDim / 2;
        const uint32_t step = KV_HEADS * (kind == 0 ? spread.parts : 1);
        return Head{kind, kv_head, {row_at(warp * wide, i), row_at(warp * wide, j)}, p.qkv_at + place * (4 * kHeadDim) + 8 * lane,
                    kv_head + part * KV_HEADS, step, kv_head + spread.attending * KV_HEADS};
    }
    // A head by a warp, two values a lane: turned, appended, and sent to the blocks that attend. `layers`: so many are appended
    // then.
    __device__ __forceinline__ void leave_head(const Layer& layer, const Head& head, uint32_t layers) const {
        if (head.kind == kNone) return;
        float a = row(head.sums[0]), b = row(head.sums[1]);
        if (head.kind != 2) {
            const float2 angle = reinterpret_cast<const float2*>(smem + p.angles_at)[lane];
            turn(a, b, angle.x, angle.y);
        }
        uint16_t stored[2] = {0, 0};
        if (head.kind != 0) {
            stored[0] = f16_bits(a), stored[1] = f16_bits(b);
            a = __half2float(__ushort_as_half(stored[0])), b = __half2float(__ushort_as_half(stored[1]));
        }
        if (!p.adjacent) {
            // Values 2 lane and 2 lane + 1.
            const uint32_t from = 2 * (lane & 15);
            const float a0 = __shfl_sync(~0u, a, from), a1 = __shfl_sync(~0u, a, from + 1);
            const float b0 = __shfl_sync(~0u, b, from), b1 = __shfl_sync(~0u, b, from + 1);
            a = lane < 16 ? a0 : b0, b = lane < 16 ? a1 : b1;
        }
#pragma unroll 1
        for (uint32_t other = head.first; other < head.end; other += head.step) {
            const uint32_t there = in_block(smem, other);
            send(there + head.to, there + 8 * kSentHeads, a, b);
        }
        if (head.kind == 0) return;
        const Plan& plan = this->plan();
        const bool keys = head.kind == 1;
        const uint32_t i = p.adjacent ? 2 * lane : lane, j = p.adjacent ? 2 * lane + 1 : lane + kHeadDim / 2;
        const size_t tile = ((size_t)plan.block * KV_HEADS + head.kv_head) * kHeadDim * kBlockTokens;
        const uint32_t place = plan.pos % kBlockTokens, step = keys ? kBlockTokens : 1, at = keys ? place : place * kHeadDim;
        uint16_t* pool = reinterpret_cast<uint16_t*>(keys ? layer.k : layer.v) + tile;
        pool[i * step + at] = stored[0], pool[j * step + at] = stored[1];
        if (!ROWS || plan.ahead == 0) return;
        __syncwarp();
        if (lane == 0) {
            asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(appended(row_idx, head.kv_head, !keys)),
                         "l"((uint64_t)view.progress->begun << 32 | layers)
                         : "memory");
        }
    }

    // Attention of a split to `heads` of the heads that share a key head. `parity`, `sent`: of the waits for keys and for queries.
    // Warp w leaves value w * 32 + lane of those heads: the sum of values, the weights' sum and the largest score.
    struct Attended {
        float o, l, m;
    };
    __device__ __forceinline__ Attended attend(uint32_t pos, uint32_t split, uint32_t heads, uint32_t parity, uint32_t sent) const {
        const uint32_t last = pos / kBlockTokens, place_in_block = pos % kBlockTokens;
        const uint32_t tiles = min(last + 1 - split * kSplitTiles, kSplitTiles);
        const float* q = floats(p.qkv_at);
        const float* fresh = q + GROUP * kHeadDim;  // the row's key and value, as they are stored
        float* weights = floats(p.sums_at);         // [GROUP][kSplitKeys]
        uint16_t* k_tiles = reinterpret_cast<uint16_t*>(smem + p.kv_at);
        uint16_t* v_tiles = k_tiles + kSplitTiles * kHeadDim * kBlockTokens;
        Tables& t = tables();
        barrier_wait(bar(kKvFull), parity);
        // Two warps have a tile, a lane a key, and every other head. Keys are there before queries are.
        const uint32_t tile = warp % kSplitTiles, first = warp / kSplitTiles;
        const bool owns_last = split * kSplitTiles + tile == last, has = tile < tiles && first < heads;
        float score[2] = {0.0f, 0.0f};
        if (owns_last && first == 1) {
            // Of 16 keys, those that are not visible count for -0 times their weight, 0: that changes no sum.
            uint16_t* patched = v_tiles + tile * kHeadDim * kBlockTokens + place_in_block * kHeadDim;
            uint4* to = reinterpret_cast<uint4*>(patched + kHeadDim) + lane;
#pragma unroll 1
            for (uint32_t at = lane; at < (15 - place_in_block % 16) * (kHeadDim / 8); at += 32, to += 32) {
                *to = make_uint4(0x80008000u, 0x80008000u, 0x80008000u, 0x80008000u);
            }
            barrier_wait(bar(kSentHeads), sent);
            const float2 two = *reinterpret_cast<const float2*>(fresh + kHeadDim + 2 * lane);
            reinterpret_cast<uint32_t*>(patched)[lane] = f16_bits(two.x) | (uint32_t)f16_bits(two.y) << 16;
        }
        if (has) {
            float key[kHeadDim];
            const uint16_t* keys = k_tiles + tile * kHeadDim * kBlockTokens + lane;
#pragma unroll
            for (uint32_t d = 0; d < kHeadDim; ++d) key[d] = __uint_as_float(keys[d * kBlockTokens]);
            // Once: as in `multiply`.
            uint32_t once = p.n_layers != 0;
#pragma unroll 1
            do {
#pragma unroll
                for (uint32_t d = 0; d < kHeadDim; ++d) key[d] = __half2float(__ushort_as_half((uint16_t)__float_as_uint(key[d])));
            } while (--once != 0);
            barrier_wait(bar(kSentHeads), sent);
            if (owns_last && lane == place_in_block) {
#pragma unroll
                for (uint32_t d = 0; d < kHeadDim; d += 4) {
                    const float4 f = *reinterpret_cast<const float4*>(fresh + d);
                    key[d] = f.x, key[d + 1] = f.y, key[d + 2] = f.z, key[d + 3] = f.w;
                }
            }
            __syncwarp();
            const bool visible = (split * kSplitTiles + tile) * kBlockTokens + lane <= pos;
#pragma unroll 1
            for (uint32_t head = first; head < heads; head += 2) {
                float s = 0.0f;
#pragma unroll
                for (uint32_t d = 0; d < kHeadDim; d += 4) {
                    const float4 x = *reinterpret_cast<const float4*>(q + head * kHeadDim + d);
                    s = __fmaf_rn(x.x, key[d], s), s = __fmaf_rn(x.y, key[d + 1], s);
                    s = __fmaf_rn(x.z, key[d + 2], s), s = __fmaf_rn(x.w, key[d + 3], s);
                }
                s = visible ? __fmul_rn(s, p.scale) : -ARC_INF;
                if (head == first) score[0] = s;
                score[1] = s;
                const float top = max_of_lanes(s);
                if (lane == 0) t.top[head][tile] = top;
            }
        }
        __syncthreads();
        if (has) {
#pragma unroll 1
            for (uint32_t head = first; head < heads; head += 2) {
                // The maximum of the tiles before, and with this one.
                float before = -ARC_INF;
#pragma unroll
                for (uint32_t e = 0; e < kSplitTiles - 1; ++e) before = e < tile ? max_or_nan(before, t.top[head][e]) : before;
                const float m = max_or_nan(before, t.top[head][tile]);
                const float weight = exp_down(__fsub_rn(head == first ? score[0] : score[1], m)), keep = exp_down(__fsub_rn(before, m));
                weights[head * kSplitKeys + 32 * tile + lane] = weight;
                const float sum = sum_lanes(weight);
                if (lane == 0) t.sum[head][tile] = sum, t.keep[head][tile] = keep;
            }
        }
        __syncthreads();
        // Before the next values come to where these were patched.
        if (owns_last && first == 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        Attended of{0.0f, 0.0f, -ARC_INF};
        if (warp >= 2 * heads) return of;
        // Two warps have a head, a lane a value of it; 16 keys are on their way while others are added.
        const uint32_t head = warp / 2;
        const uint16_t* values = v_tiles + 32 * (warp & 1) + lane;
        const float4* w = reinterpret_cast<const float4*>(weights + head * kSplitKeys);
        struct Keys {
            float4 weight[4];
            uint16_t value[16];
            __device__ __forceinline__ void load(const float4* w, const uint16_t* values) {
#pragma unroll
                for (int i = 0; i < 4; ++i) weight[i] = w[i];
#pragma unroll
                for (int i = 0; i < 16; ++i) value[i] = values[i * kHeadDim];
            }
            __device__ __forceinline__ float add(float o) const {
                auto x = [&](int i) { return __half2float(__ushort_as_half(value[i])); };
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    o = __fmaf_rn(weight[i].x, x(4 * i), o), o = __fmaf_rn(weight[i].y, x(4 * i + 1), o);
                    o = __fmaf_rn(weight[i].z, x(4 * i + 2), o), o = __fmaf_rn(weight[i].w, x(4 * i + 3), o);
                }
                return o;
            }
        };
        Keys low, high;
        low.load(w, values);
        const uint32_t seen = min(pos + 1 - split * kSplitKeys, kSplitKeys);
#pragma unroll 1
        for (uint32_t e = 0; e < tiles; ++e) {
            // Beyond the last tile that one again: nobody adds it.
            const bool more = e + 1 < tiles;
            const float keep = t.keep[head][e];
            of.m = max_or_nan(of.m, t.top[head][e]);
            of.l = __fadd_rn(__fmul_rn(of.l, keep), t.sum[head][e]);
            of.o = __fmul_rn(of.o, keep);
            high.load(w + 4, values + 16 * kHeadDim);
            of.o = low.add(of.o);
            if (more) w += kBlockTokens / 4, values += kHeadDim * kBlockTokens;
            low.load(w, values);
            if (32 * e + 16 < seen) of.o = high.add(of.o);
        }
        return of;
    }

    // A part of chunk `chunk` to the block that merges it.
    __device__ __forceinline__ void send_part(const Attended& of, uint32_t split, uint32_t chunk) const {
        const uint32_t there = in_block(smem, chunk % kBlocks), landing = there + 8 * kSentParts;
        const uint32_t to = there + p.parts_at + 4 * ((chunk / kBlocks * kMostSplits + split) * kPart);
        const float b = __shfl_down_sync(~0u, of.o, 1), c = __shfl_down_sync(~0u, of.o, 2), d = __shfl_down_sync(~0u, of.o, 3);
        if (lane % 4 == 0) send(to + 4 * lane, landing, of.o, b, c, d);
        if (lane == 1) send(to + 4 * 32, landing, of.m, of.l);
    }

    // Chunks of heads that this block merges.
    __device__ __forceinline__ uint32_t chunks() const {
        return kChunks / kBlocks + (rank < kChunks % kBlocks);
    }

    // Merges the splits of a chunk, ascending, by a warp, a value a lane.
    __device__ __forceinline__ float merge(uint32_t at, uint32_t splits, uint32_t parity) const {
        barrier_wait(bar(kSentParts), parity);
        const float* part = floats(p.parts_at) + at * kMostSplits * kPart;
        // A lane has what a split is joined by: `join`.
        const uint32_t own = min(lane, splits - 1);
        float before = -ARC_INF;
#pragma unroll
        for (uint32_t s = 0; s < kMostSplits - 1; ++s) before = s < own ? max_or_nan(before, part[s * kPart + 32]) : before;
        const float m = part[own * kPart + 32], top = max_or_nan(before, m);
        const float own_keep = exp_down(__fsub_rn(before, top)), own_add = exp_down(__fsub_rn(m, top));
        float l = 0.0f, o = 0.0f;
#pragma unroll 1
        for (uint32_t s = 0; s < splits; ++s, part += kPart) {
            const float keep = __shfl_sync(~0u, own_keep, s), add = __shfl_sync(~0u, own_add, s);
            l = joined(l, keep, part[33], add);
            o = joined(o, keep, part[lane], add);
        }
        return __fdiv_rn(o, l);
    }

    __device__ __forceinline__ void run() const {
        Marks(kMarkLayers, 0).keep(kept());
        if (threadIdx.x < kBars) {
            barrier_init(bar(threadIdx.x));
            barriers_made();
        }
        if (warp == kAsks) prepare();
        pdl_launch();
        __syncthreads();
        cluster_arrive_relaxed();
        const bool asks = threadIdx.x == 32 * kAsks, makes = warp >= kFirstMaker;
        if (warp == kAsks && lane < kProducts) ask(p.layers[0], lane);
        __syncwarp();
        // Before a block sends to another, that one must run.
        cluster_wait();
        pdl_wait();
        Marks::mark(kept(), 2);
        float* out = reinterpret_cast<float*>(p.x) + row_idx * kHidden.cols;
        if (4 * threadIdx.x < kHidden.cols) copy16(floats(p.x_at) + 4 * threadIdx.x, out + 4 * threadIdx.x);
        const RowInfo info = view.infos[row_idx];
        const uint32_t splits = info.pos / kSplitKeys + 1, kv_tiles = info.pos / kBlockTokens + 1;
        if (!info.live || splits > kMostSplits) {
            if (info.live && rank == 0 && threadIdx.x == 0) report_fault(view, kFaultContextClass);
            // What was asked for has to land before the block ends.
            copies_landed();
#pragma unroll 1
            for (uint32_t of = 0; of < kProducts; ++of) barrier_wait(bar(kFull + of), 0);
            return;
        }
        if (threadIdx.x >= kThreads - kHeadDim / 4) {
            const uint32_t i = 4 * (threadIdx.x - (kThreads - kHeadDim / 4));
            copy16(floats(p.angles_at) + i, reinterpret_cast<const float*>(p.rope) + (size_t)info.pos * kHeadDim + i);
        }
        const uint32_t* blocks = view.blocks + (size_t)info.slot * view.max_blocks;
        const Spread spread(splits);
        if (threadIdx.x == 0) {
            const bool attends = head_place() < spread.attending;
            const uint32_t split = head_place() / spread.parts, over = max(kPerHead / spread.parts, 1u);
            const uint32_t chunk = (rank % KV_HEADS * GROUP + head_place() % spread.parts * spread.each) * 2;
            const uint32_t heads = attends ? spread.heads(head_place()) : 0;
            plan() = Plan{info.pos, info.ahead, blocks[info.pos / kBlockTokens], splits, spread, split, over, heads, chunk};
        }
        const bool asks_keys = head_place() < spread.attending && warp == kAsks;
        const uint32_t kv_block = asks_keys ? block_of(blocks, head_place() / spread.parts, kv_tiles) : 0;
        // Rows of its sequence whose keys and values come in this launch.
        const uint32_t behind = ROWS ? min(info.back, row_idx - p.first_row) : 0;
        if (asks_keys && behind == 0) ask_keys(p.layers[0], head_place() / spread.parts, kv_tiles, kv_block);
        copies_landed();
        __syncthreads();
        if (warp == kAsks) {
            if (lane < kProducts) count(lane);
            if (lane == kProducts) count_heads();
        }
        list();
        __syncwarp();
        const Rows of_out = rows_of(kOut), of_down = rows_of(kDown);
        const Head head = head_of();
        const Gate gate = gate_of();
        uint32_t turns = 0;
#pragma unroll 1
        for (uint32_t l = 0; l < p.n_layers; ++l) {
            const Layer& layer = p.layers[l];
            const uint32_t parity = l & 1;
            const bool last = l + 1 == p.n_layers, noted = l == p.n_layers / 2;
            // Rolled: four products, one after the other, by the same instructions.
#pragma unroll 1
            for (uint32_t of = 0; of < kProducts; ++of) {
                const bool normed = of == kHeads || of == kUnits;
                // The residual stands there at first: nothing has been waited for yet.
                const uint32_t sent = of == kHeads ? parity ^ 1 : parity;
                if (makes) {
                    if (normed) {
                        const Norm weight = load_norm(of == kHeads ? layer.attn_norm : layer.ffn_norm);
                        barrier_wait(bar(kSent + of), sent);
                        make(floats(of == kHeads ? p.x_at : p.middle_at), weight);
                        __syncthreads();
                    } else {
                        barrier_wait(bar(kSent + of), sent);
                    }
                    barrier_wait(bar(kFull + of), parity);
#pragma unroll 1
                    for (uint32_t turn = 0; turn < kTurns; ++turn) {
                        const uint32_t word = item(of, turn, warp);
                        if (word == 0) break;
                        multiply_short(of, word);
                    }
                } else {
                    const uint32_t word = item(of, 0, warp);
                    if (word != 0) {
                        barrier_wait(bar(kFull + of), parity);
                        multiply(of, word, [&] {
                            if (normed) {
                                __syncthreads();
                            } else {
                                barrier_wait(bar(kSent + of), sent);
                            }
                            if (noted) Marks::mark(kept(), of == kHeads ? 3 : 4 + of);
                        });
                    } else if (normed) {
                        __syncthreads();
                    }
                }
                __syncthreads();
                // What was read makes room for the next layer's.
                if (asks && !last) {
                    ask(p.layers[l + 1], of);
                    // The residual that comes for the second layer is counted since the beginning.
                    if (of != kHeads || l > 0) count(of);
                    if (of == kOut) count_heads();
                }
                // A block of values to send as int8.
                float v = 0.0f;
                uint32_t at = kFfn.cols;
                if (of == kHeads) {
                    const Plan& plan = this->plan();
                    leave_head(layer, head, p.first_layer + l + 1);
                    if (ROWS && asks_keys && behind > 0) {
                        await_keys(behind, p.first_layer + l + 1);
                        ask_keys(layer, plan.split, kv_tiles, kv_block);
                    }
                    if (noted) Marks::mark(kept(), 4);
                    const uint32_t heads = plan.heads, splits = plan.splits;
                    if (heads != 0) {
#pragma unroll 1
                        for (uint32_t split = plan.split; split < splits; split += plan.over) {
                            if (split != plan.split) {
                                // The split before has been read.
                                __syncthreads();
                                if (asks_keys) ask_keys(layer, split, kv_tiles, block_of(blocks, split, kv_tiles));
                            }
                            const Attended of_split = attend(plan.pos, split, heads, turns++ & 1, parity);
                            if (warp < 2 * heads) {
                                if (splits == 1) {
                                    v = __fdiv_rn(of_split.o, of_split.l), at = plan.chunk + warp;
                                } else {
                                    send_part(of_split, split, plan.chunk + warp);
                                }
                            }
                        }
                    }
                    if (splits > 1 && kWarps - 1 - warp < chunks()) {
                        v = merge(kWarps - 1 - warp, splits, parity), at = rank + (kWarps - 1 - warp) * kBlocks;
                    }
                } else if (of == kUnits) {
                    if (gate.chunk != kNone) v = gated(kThenSilu, row(gate.sums), row(gate.up), 0.0f), at = gate.chunk;
                } else {
                    if (of == kOut && asks_keys && behind == 0 && !last) ask_keys(p.layers[l + 1], plan().split, kv_tiles, kv_block);
                    const bool behind = of == kOut;
                    add_rows(behind, behind ? of_out.sums : of_down.sums, behind ? of_out.x : of_down.x, !behind && last ? out : nullptr);
                }
                if (at != kFfn.cols) {
                    const bool units = of == kUnits;
                    send_codes(v, units ? p.units_at : p.heads_at, units ? kFfn.cols : HEADS * kHeadDim, at, kSent + (units ? kDown : kOut));
                }
            }
        }
    }
};

}  // namespace

// Of SmolLM2-135M, one row and several. The warp's number comes from one lane, so that it is known to be that of all.
#define ARC_LAYERS(NAME, ROWS)                                                                                            \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                             \
        arc_matmul_layers_##NAME(const __grid_constant__ Layers p, const __grid_constant__ StepView view) {               \
        extern __shared__ __align__(128) uint8_t smem[];                                                                  \
        /* Held in a register, rather than made again wherever it is used. */                                             \
        uint32_t base = shared_at(smem);                                                                                  \
        asm volatile("" : "+r"(base));                                                                                    \
        uint8_t* here = static_cast<uint8_t*>(__cvta_shared_to_generic(base));                                            \
        const uint32_t row = ROWS ? p.first_row + blockIdx.x / kBlocks : 0, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0); \
        uint32_t lane = threadIdx.x & 31;                                                                                 \
        asm volatile("" : "+r"(lane));                                                                                    \
        Decoder<576, 9, 3, 1536, ROWS>{p, view, here, row, cluster_rank(), warp, lane}.run();                             \
    }
ARC_LAYERS(576, true)
ARC_LAYERS(576_one, false)

}  // namespace arc
