// Layers of a dense decoder over a few rows, one after the other, in one launch: every row has a cluster.
//
// A cluster's 16 blocks have a share of every product each, so that what one stage leaves for the next crosses shared memory
// alone: five times a layer blocks send one another values (`st.async`), and a barrier of the receiver counts their bytes.
// What a block multiplies by lies in its shared memory: a part of its own for each of a layer's four products, which is filled
// for the next layer as soon as it was read.
//
//   heads      norm and int8 of the residual, by every block; a head of queries, keys or values a block; rope and append
//   attention  key head j by blocks j, j + n_kv_heads and so on, a split of 256 keys each; with several splits blocks then
//              merge 32 values each
//   out        W_o of the heads' int8, added to the residual
//   units      norm and int8 by every block; gate and up; the unit and its int8 by the block that has them
//   down       W_down of the units' int8, added to the residual
//
// A place that blocks send to may be written over: who sends there has what its receivers sent when they were done with it. So
// every block sends something of the residual and of the units. A block is done when it has what the others sent last: nobody sends to one that
// has ended. Barriers are waited for as those of a block's own: an acquire of the cluster's would drop all of L1, and what is sent
// comes with the barrier's count.
//
// Rows of one sequence see each other's keys and values: who appends some that another cluster looks for says so in `appended`, and
// that one asks for a layer's keys when it has seen all of them, rather than ahead. It waits for rows before its own alone, and all
// clusters of a launch are resident.
//
// Weights are Q4_1. Exact: operations and their order are those of gemv.cuh and kv.cu.
#include "../../sum.cuh"
#include "../kv/kv.cuh"
#include "tiles.cuh"

namespace arc {

namespace {

constexpr uint32_t kBlocks = 16;
// More would have fewer registers. Beside what all do, one asks for weights and one for keys and values.
constexpr uint32_t kWarps = 16, kThreads = 32 * kWarps;
constexpr uint32_t kAsks = kWarps - 1, kAsksKeys = kWarps - 2;
constexpr uint32_t kHeadDim = 64;
constexpr uint32_t kMostLayers = 32, kMostSplits = 8;
constexpr uint32_t kTile = tile_bytes(Q4_1, kSlice), kBlockBytes = kLanes * unit_bytes(Q4_1);
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
    // key and value of a key head; angles; sums and weights; parts to merge; weights; keys and values.
    uint32_t x_at, middle_at, codes_at, heads_at, units_at, qkv_at, angles_at, scratch_at, parts_at, weights_at, kv_at;
};
static_assert(sizeof(Layers) == 2400);

// Barriers, in front of everything.
enum Bar : uint32_t {
    kFull,  // of the weights of a product
    kKvFull = kFull + kProducts,
    kSentHeads,  // what is sent: heads of queries, keys and values
    kSentParts,  // parts of heads
    kSentOut,    // heads as int8
    kSentMiddle,
    kSentUnits,
    kSentX,
    kBars
};

// What a block has of a product: where its groups lie in shared memory, how many and from which on.
struct Own {
    uint32_t at, groups, first, bytes;
};
constexpr uint32_t kOwnAt = (8 * kBars + 15) & ~15u, kTablesAt = kOwnAt + kProducts * sizeof(Own);
// Of a split by query head and tile: maximum, factor of what stood before, sum.
struct Tables {
    float top[4][kSplitTiles], keep[4][kSplitTiles], sum[4][kSplitTiles];
};
constexpr uint32_t kMarkAt = kTablesAt + sizeof(Tables);
// What a warp multiplies: a word each, by product, turn and warp.
constexpr uint32_t kItemsAt = 640, kTurns = 2;
static_assert(kMarkAt + 4 <= kItemsAt);
static_assert(kItemsAt + 4 * kProducts * kTurns * kWarps == 1152, "HEAD_BYTES of layers.rs");

__device__ __forceinline__ void send(uint32_t to, uint32_t bar, uint32_t a) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(a), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void send(uint32_t to, uint32_t bar, float a, float b) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "r"(__float_as_uint(a)), "r"(__float_as_uint(b)), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void send(uint32_t to, uint32_t bar, const float4& v) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)),
                 "r"(bar)
                 : "memory");
}

// acc + the bytes of `codes` without a sign times those of `x` with one.
__device__ __forceinline__ int dot_unsigned(uint32_t codes, uint32_t x, int acc) {
    int out;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(codes), "r"(x), "r"(acc));
    return out;
}

// A lane's weights of a block: codes, scale and minimum.
struct Weights {
    uint4 codes;
    uint32_t dm;
    __device__ __forceinline__ void load(const uint8_t* tile, uint32_t b) {
        const uint32_t lane = threadIdx.x & 31;
        codes = load16(tile + b * kBlockBytes + 16 * lane), dm = load4(tile + b * kBlockBytes + 512 + 4 * lane);
    }
};

// Block b of a lane's slice: `scales` has the scale of the int8 and their sum.
__device__ __forceinline__ void add_q4_1(const Weights& w, const uint8_t* codes, const float2* scales, uint32_t b, float& acc) {
    const uint4 x0 = load16(codes + 32 * b), x1 = load16(codes + 32 * b + 16);
    const float2 s = scales[b];
    // High nibbles stay where they are: their sum is 16 times as much.
    int low = 0, high = 0;
    low = dot_unsigned(w.codes.x & 0x0f0f0f0fu, x0.x, low), high = dot_unsigned(w.codes.x & 0xf0f0f0f0u, x0.y, high);
    low = dot_unsigned(w.codes.y & 0x0f0f0f0fu, x0.z, low), high = dot_unsigned(w.codes.y & 0xf0f0f0f0u, x0.w, high);
    low = dot_unsigned(w.codes.z & 0x0f0f0f0fu, x1.x, low), high = dot_unsigned(w.codes.z & 0xf0f0f0f0u, x1.y, high);
    low = dot_unsigned(w.codes.w & 0x0f0f0f0fu, x1.z, low), high = dot_unsigned(w.codes.w & 0xf0f0f0f0u, x1.w, high);
    acc = __fmaf_rn(__fmul_rn(low_half(w.dm), s.x), (float)(low + (high >> 4)), acc);
    acc = __fmaf_rn(__fmul_rn(high_half(w.dm), s.x), s.y, acc);
}

// v[j] takes v[j + HALF] of N values, as `fold` of more that are +0: those change no square.
template <int HALF, int N>
__device__ __forceinline__ void fold_first(float* v) {
#pragma unroll
    for (int j = 0; j < HALF; ++j) {
        if (j + HALF < N) v[j] = __fadd_rn(v[j], v[j + HALF]);
    }
    if constexpr (HALF > 1) fold_first<HALF / 2, (N < HALF ? N : HALF)>(v);
}

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

// HIDDEN: the residual. FFN: units.
template <uint32_t HIDDEN, uint32_t HEADS, uint32_t KV_HEADS, uint32_t FFN>
struct Decoder {
    static constexpr uint32_t GROUP = HEADS / KV_HEADS;  // query heads of a key head
    // Of matrices that read the residual, the heads, the units.
    static constexpr Cut kHidden = cut_of_cols(HIDDEN), kHeadsCut = cut_of_cols(HEADS * kHeadDim), kFfn = cut_of_cols(FFN);
    static constexpr uint32_t kAllHeads = HEADS + 2 * KV_HEADS, kHeadsEach = (kAllHeads + kBlocks - 1) / kBlocks;
    // Blocks that share the splits of a key head.
    static constexpr uint32_t kPerHead = kBlocks / KV_HEADS;
    static constexpr uint32_t kChunks = HEADS * kHeadDim / 32;
    static_assert(HEADS % KV_HEADS == 0 && GROUP <= 4 && kPerHead >= 1 && kHeadsEach <= 8);
    static_assert(HIDDEN % 32 == 0 && HIDDEN <= kSumChunk && FFN % 32 == 0);
    // Every block has rows and units, and its tiles are no more than warps take.
    static constexpr uint32_t kRowGroups[2] = {HIDDEN / (kLanes >> kHeadsCut.log_c), HIDDEN / (kLanes >> kFfn.log_c)};
    static constexpr uint32_t most(uint32_t n) { return (n + kBlocks - 1) / kBlocks; }
    static constexpr uint32_t tiles_of(const Cut& cut, uint32_t groups) { return (cut.slices >> cut.log_c) * groups; }
    static_assert(kRowGroups[0] >= kBlocks && kRowGroups[1] >= kBlocks && FFN / 32 >= kBlocks);
    static_assert(tiles_of(kHidden, 2 * kHeadsEach << kHidden.log_c) <= kTurns * kWarps);
    static_assert(tiles_of(kHidden, 2 * most(FFN / 32) << kHidden.log_c) <= kTurns * kWarps);
    static_assert(tiles_of(kHeadsCut, most(kRowGroups[0])) <= kTurns * kWarps && tiles_of(kFfn, most(kRowGroups[1])) <= kTurns * kWarps);

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
    // Which of the blocks that share the splits of a key head this is.
    __device__ __forceinline__ uint32_t head_place() const { return rank / KV_HEADS; }

    // One thread, before anybody looks at them.
    __device__ __forceinline__ void prepare() const {
        for (uint32_t i = 0; i < kBars; ++i) barrier_init(bar(i));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        constexpr uint32_t all = kAllHeads, each = kHeadsEach, wide = 1u << kHidden.log_c;  // groups of 32 rows
        uint32_t at = p.weights_at;
#pragma unroll 1
        for (uint32_t of = 0; of < kProducts; ++of) {
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
            own(of) = Own{at, groups, first, bytes};
            at += bytes;
        }
    }

    // Tile t of group g of a block's own, as a word: its place over 16, blocks of a lane, the place of its sums, and t + 1.
    __device__ __forceinline__ uint32_t& item(uint32_t of, uint32_t turn, uint32_t at) const {
        return reinterpret_cast<uint32_t*>(smem + kItemsAt)[(of * kTurns + turn) * kWarps + at];
    }
    // A warp's tiles of all products. Whole tiles come before the short ones, which warps take from the last one on.
    __device__ __forceinline__ void list() const {
        if (lane >= kProducts * kTurns) return;
        const uint32_t of = lane / kTurns, turn = lane % kTurns;
        const Cut cut = cut_of(of);
        const Own mine = own(of);
        const uint32_t i = turn == 0 ? warp : 2 * kWarps - 1 - warp, t = mine.groups == 0 ? 0 : i / mine.groups;
        const uint32_t g = i - t * mine.groups, tiles = cut.tiles();
        const uint32_t blocks = cut.tail() != 0 && t + 1 == cut.slices ? cut.tail() / 32 : 8;
        const uint32_t at = mine.at + g * cut.group_bytes(Q4_1) + t * kTile;
        item(of, turn, warp) = i < mine.groups * tiles ? at / 16 | blocks << 14 | (g * tiles + t) << 18 | (t + 1) << 28 : 0;
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

    // Int8 of the residual behind its norm, four values a lane.
    __device__ __forceinline__ void make(const float* x, const float4& weight) const {
        constexpr uint32_t n = kHidden.cols;
        // Lanes past the end do what the first of their warp do, and leave nothing.
        const uint32_t first = 128 * warp, own_k = first + 4 * lane, k = own_k < n ? own_k : first + 4 * (lane & 7);
        if (first >= n) return;
        float v[n / 32];
#pragma unroll
        for (uint32_t j = 0; j < n / 32; ++j) {
            const float a = x[lane + 32 * j];
            v[j] = __fmul_rn(a, a);
        }
        const float4 mine = *reinterpret_cast<const float4*>(x + k);
        fold_first<kSumChunk / 64, n / 32>(v);
        float sum = v[0];
#pragma unroll
        for (int half = 16; half > 0; half >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, half));
        const float factor = rsqrt(__fadd_rn(__fdiv_rn(__fadd_rn(0.0f, sum), (float)n), p.eps));
        float four[1][4] = {{__fmul_rn(__fmul_rn(mine.x, factor), weight.x), __fmul_rn(__fmul_rn(mine.y, factor), weight.y),
                             __fmul_rn(__fmul_rn(mine.z, factor), weight.z), __fmul_rn(__fmul_rn(mine.w, factor), weight.w)}};
        Quantised out[1];
        quantise(four, out);
        if (own_k >= n) return;
        *reinterpret_cast<uint32_t*>(smem + p.codes_at + k / 256 * 272 + k % 256) = out[0].q;
        if (lane % 8 == 0) scales(p.codes_at, kHidden)[k / 32] = make_float2(out[0].d, (float)dp2a(out[0].sums, 0x0101u, 0));
    }

    // Scales and sums of int8, behind them.
    __device__ __forceinline__ float2* scales(uint32_t at, const Cut cut) const {
        return reinterpret_cast<float2*>(smem + at + cut.slices * 272);
    }

    // The weights of the norm that comes next, for `make`.
    __device__ __forceinline__ void load_norm(uint64_t norm, float4& weight) const {
        const uint32_t first = 128 * warp, k = first + 4 * lane;
        if (first >= kHidden.cols) return;
        weight = load_early(reinterpret_cast<const float4*>(norm) + (k < kHidden.cols ? k : first + 4 * (lane & 7)) / 4);
    }

    // Blocks `at` and on of 32 values as int8 to all blocks: lane l has four of block `at` + l / 8 % N.
    template <uint32_t N>
    __device__ __forceinline__ void send_fours(const float (&four)[1][4], uint32_t to, const Cut cut, uint32_t at, uint32_t landing) const {
        Quantised made[1];
        quantise(four, made);
        const uint32_t block = at + lane / 8 % N, first = lane / 8 / N;
        const uint8_t* codes = smem + to + block / 8 * 272 + block % 8 * 32 + 4 * (lane & 7);
#pragma unroll
        for (uint32_t i = 0; i < kBlocks; i += 4 / N) {
            send(in_block(codes, first + i), in_block(bar(landing), first + i), made[0].q);
        }
        const uint32_t other = (first * 8 + (lane & 7)) % kBlocks;
        if (N == 2 || lane < kBlocks) {
            send(in_block(scales(to, cut) + block, other), in_block(bar(landing), other), made[0].d, (float)dp2a(made[0].sums, 0x0101u, 0));
        }
    }

    // Block `at` of 32 values, one a lane.
    __device__ __forceinline__ void send_codes(float v, uint32_t to, const Cut cut, uint32_t at, uint32_t landing) const {
        float four[1][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[0][i] = __shfl_sync(~0u, v, 4 * (lane & 7) + i);
        send_fours<1>(four, to, cut, at, landing);
    }

    // The weights of a whole tile, before its inputs are there.
    __device__ __forceinline__ void take(uint32_t word, Weights (&w)[8]) const {
        if ((word >> 14 & 15) != 8) return;
        const uint8_t* tile = smem + 16 * (word & 0x3fff);
#pragma unroll
        for (uint32_t b = 0; b < 8; ++b) w[b].load(tile, b);
    }

    // The warp's tiles by the int8 inputs: a sum for every lane of each. `w`: the first one's weights, if it is whole.
    __device__ __forceinline__ void multiply(uint32_t of, const uint32_t (&items)[kTurns], uint32_t inputs, const Weights (&w)[8]) const {
        const Cut cut = cut_of(of);
#pragma unroll 1
        for (uint32_t turn = 0; turn < kTurns; ++turn) {
            const uint32_t word = turn == 0 ? items[0] : items[1], blocks = word >> 14 & 15;
            if (word == 0) return;
            const uint32_t slice = cut.slice_of((word >> 28) - 1, lane);
            const uint8_t* codes = smem + inputs + slice * 272;
            const float2* s = scales(inputs, cut) + slice * 8;
            float acc = 0.0f;
            if (turn == 0 && blocks == 8) {
#pragma unroll
                for (uint32_t b = 0; b < 8; ++b) add_q4_1(w[b], codes, s, b, acc);
            } else {
                const uint8_t* tile = smem + 16 * (word & 0x3fff);
#pragma unroll 1
                for (uint32_t b = 0; b < blocks; ++b) {
                    Weights one;
                    one.load(tile, b);
                    add_q4_1(one, codes, s, b, acc);
                }
            }
            floats(p.scratch_at)[(word >> 18 & 1023) * kLanes + lane] = acc;
        }
    }

    // The sum of row n of the block's, from group `from` on.
    __device__ __forceinline__ float row(const Cut cut, uint32_t from, uint32_t n) const {
        const uint32_t rows = cut.group_rows(), tiles = cut.tiles();
        return total(cut, floats(p.scratch_at) + (from + n / rows) * tiles * kLanes, tiles, kLanes, n % rows);
    }

    // Adds the block's rows to the residual, four a lane: to all blocks, or to memory.
    __device__ __forceinline__ void add_rows(const Cut cut, const Own& mine, uint32_t from, uint32_t to, uint32_t landing, float* out) const {
        const uint32_t rows = cut.group_rows(), tiles = cut.tiles(), n = 32 * warp + 4 * (lane & 7);
        if (n >= mine.groups * rows) return;
        const float* at = floats(p.scratch_at) + n / rows * tiles * kLanes + n % rows;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (uint32_t t = 0; t < tiles; ++t, at += kLanes) {
#pragma unroll
            for (uint32_t c = 0; c < kLanes; c += rows) {
                const float4 v = *reinterpret_cast<const float4*>(at + c);
                sum.x = __fadd_rn(sum.x, v.x), sum.y = __fadd_rn(sum.y, v.y);
                sum.z = __fadd_rn(sum.z, v.z), sum.w = __fadd_rn(sum.w, v.w);
            }
        }
        const uint32_t k = mine.first * rows + n;
        const float4 x = *reinterpret_cast<const float4*>(floats(from) + k);
        sum.x = __fadd_rn(x.x, sum.x), sum.y = __fadd_rn(x.y, sum.y), sum.z = __fadd_rn(x.z, sum.z), sum.w = __fadd_rn(x.w, sum.w);
        if (out != nullptr) {
            if (lane < 8) *reinterpret_cast<float4*>(out + k) = sum;
            return;
        }
#pragma unroll
        for (uint32_t i = 0; i < kBlocks; i += 4) {
            const uint32_t other = i + lane / 8;
            send(in_block(floats(to) + k, other), in_block(bar(landing), other), sum);
        }
    }

    // A head by a warp, two values a lane: turned, appended, and sent to the blocks that attend. `layers`: so many are appended then.
    __device__ __forceinline__ void leave_head(const Layer& layer, const RowInfo& info, uint32_t block, uint32_t splits, uint32_t layers) const {
        const Own mine = own(kHeads);
        constexpr Cut cut = kHidden;
        const uint32_t wide = 2u << cut.log_c;
        if (warp >= mine.groups / wide) return;
        const uint32_t head = mine.first / wide + warp, keys = HEADS, values = HEADS + KV_HEADS;
        const uint32_t i = p.adjacent ? 2 * lane : lane, j = p.adjacent ? 2 * lane + 1 : lane + kHeadDim / 2;
        float a = row(cut, warp * wide, i), b = row(cut, warp * wide, j);
        if (head < values) {
            const float2 cs = reinterpret_cast<const float2*>(smem + p.angles_at)[lane];
            turn(a, b, cs.x, cs.y);
        }
        const uint32_t kv_head = head < keys ? head / GROUP : head < values ? head - keys : head - values;
        const uint32_t place = head < keys ? head % GROUP : head < values ? GROUP : GROUP + 1;
        const uint16_t stored[2] = {f16_bits(a), f16_bits(b)};
        if (head >= keys) a = __half2float(__ushort_as_half(stored[0])), b = __half2float(__ushort_as_half(stored[1]));
        const uint32_t receivers = min(splits, kPerHead);
#pragma unroll 1
        for (uint32_t r = 0; r < receivers; ++r) {
            const uint32_t other = kv_head + r * KV_HEADS;
            const uint32_t to = in_block(floats(p.qkv_at) + place * kHeadDim, other), landing = in_block(bar(kSentHeads), other);
            if (p.adjacent) {
                send(to + 4 * i, landing, a, b);
            } else {
                send(to + 4 * i, landing, __float_as_uint(a)), send(to + 4 * j, landing, __float_as_uint(b));
            }
        }
        if (head < keys) return;
        const size_t tile = ((size_t)block * KV_HEADS + kv_head) * kHeadDim * kBlockTokens;
        const uint32_t place_in_block = info.pos % kBlockTokens;
        uint16_t* to = reinterpret_cast<uint16_t*>(head < values ? layer.k : layer.v) + tile;
        const uint32_t step = head < values ? kBlockTokens : 1, at = head < values ? place_in_block : place_in_block * kHeadDim;
        to[i * step + at] = stored[0], to[j * step + at] = stored[1];
        if (info.ahead == 0) return;
        __syncwarp();
        if (lane == 0) {
            asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(appended(row_idx, kv_head, head >= values)),
                         "l"((uint64_t)view.progress->begun << 32 | layers)
                         : "memory");
        }
    }

    // Attention of a split to the heads that share a key head. `parity`, `sent`: of the waits for keys and for queries.
    __device__ __forceinline__ void attend(uint32_t pos, uint32_t split, uint32_t splits, uint32_t parity, uint32_t sent) const {
        const uint32_t kv_head = rank % KV_HEADS, last = pos / kBlockTokens, place_in_block = pos % kBlockTokens;
        const uint32_t tiles = min(last + 1 - split * kSplitTiles, kSplitTiles);
        const float* q = floats(p.qkv_at);
        const float* fresh = q + GROUP * kHeadDim;  // the row's key and value, as they are stored
        float* weights = floats(p.scratch_at);       // [GROUP][kSplitKeys]
        uint16_t* k_tiles = reinterpret_cast<uint16_t*>(smem + p.kv_at);
        uint16_t* v_tiles = k_tiles + kSplitTiles * kHeadDim * kBlockTokens;
        Tables& t = tables();
        barrier_wait(bar(kKvFull), parity);
        const bool owns_last = split * kSplitTiles + warp % kSplitTiles == last, has = warp < tiles;
        // A warp has a tile, a lane a key, before queries are there.
        uint32_t pairs[kHeadDim / 2];
        if (has) {
            const uint16_t* keys = k_tiles + warp * kHeadDim * kBlockTokens + lane;
#pragma unroll
            for (uint32_t d = 0; d < kHeadDim / 2; ++d) {
                pairs[d] = __byte_perm(keys[2 * d * kBlockTokens], keys[(2 * d + 1) * kBlockTokens], 0x5410);
            }
        }
        barrier_wait(bar(kSentHeads), sent);
        float s[GROUP];
        if (has) {
            const bool mine = owns_last && lane == place_in_block;
#pragma unroll
            for (uint32_t i = 0; i < GROUP; ++i) s[i] = 0.0f;
#pragma unroll
            for (uint32_t d = 0; d < kHeadDim; d += 4) {
                const float4 f = *reinterpret_cast<const float4*>(fresh + d);
                float key[4] = {low_half(pairs[d / 2]), high_half(pairs[d / 2]), low_half(pairs[d / 2 + 1]), high_half(pairs[d / 2 + 1])};
                key[0] = mine ? f.x : key[0], key[1] = mine ? f.y : key[1];
                key[2] = mine ? f.z : key[2], key[3] = mine ? f.w : key[3];
#pragma unroll
                for (uint32_t i = 0; i < GROUP; ++i) {
                    const float4 x = *reinterpret_cast<const float4*>(q + i * kHeadDim + d);
                    s[i] = __fmaf_rn(x.x, key[0], s[i]), s[i] = __fmaf_rn(x.y, key[1], s[i]);
                    s[i] = __fmaf_rn(x.z, key[2], s[i]), s[i] = __fmaf_rn(x.w, key[3], s[i]);
                }
            }
            const bool visible = (split * kSplitTiles + warp) * kBlockTokens + lane <= pos;
            float top[GROUP];
#pragma unroll
            for (uint32_t i = 0; i < GROUP; ++i) top[i] = s[i] = visible ? __fmul_rn(s[i], p.scale) : -ARC_INF;
#pragma unroll
            for (int half = 16; half > 0; half >>= 1) {
#pragma unroll
                for (uint32_t i = 0; i < GROUP; ++i) top[i] = max_or_nan(top[i], __shfl_xor_sync(~0u, top[i], half));
            }
            if (lane == 0) {
#pragma unroll
                for (uint32_t i = 0; i < GROUP; ++i) t.top[i][warp] = top[i];
            }
        } else if (warp >= kSplitTiles && owns_last) {
            uint16_t* values = v_tiles + (warp - kSplitTiles) * kHeadDim * kBlockTokens + place_in_block * kHeadDim;
            for (uint32_t d = lane; d < kHeadDim; d += 32) values[d] = f16_bits(fresh[kHeadDim + d]);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncthreads();
        // The maximum of the tiles before one.
        auto before = [&](uint32_t head, uint32_t tile) {
            float m = -ARC_INF;
#pragma unroll
            for (uint32_t e = 0; e < kSplitTiles - 1; ++e) m = e < tile ? max_or_nan(m, t.top[head][e]) : m;
            return m;
        };
        if (has) {
            float sum[GROUP];
#pragma unroll
            for (uint32_t i = 0; i < GROUP; ++i) {
                sum[i] = exp(__fsub_rn(s[i], max_or_nan(before(i, warp), t.top[i][warp])));
                weights[i * kSplitKeys + 32 * warp + lane] = sum[i];
            }
#pragma unroll
            for (int half = 16; half > 0; half >>= 1) {
#pragma unroll
                for (uint32_t i = 0; i < GROUP; ++i) sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(~0u, sum[i], half));
            }
            if (lane == 0) {
#pragma unroll
                for (uint32_t i = 0; i < GROUP; ++i) t.sum[i][warp] = sum[i];
            }
        } else if (warp >= kSplitTiles && warp - kSplitTiles < tiles && lane < GROUP) {
            // A lane has a head.
            const uint32_t tile = warp - kSplitTiles;
            const float m = before(lane, tile);
            t.keep[lane][tile] = exp(__fsub_rn(m, max_or_nan(m, t.top[lane][tile])));
        }
        __syncthreads();
        if (warp >= GROUP) return;
        // A warp has a head, a lane two values of it.
        const uint32_t chunk = (kv_head * GROUP + warp) * 2;
        const uint16_t* values = v_tiles + 2 * lane;
        const float* w = weights + warp * kSplitKeys;
        float o[2] = {0.0f, 0.0f}, l = 0.0f, m = -ARC_INF;
#pragma unroll 1
        for (uint32_t e = 0; e < tiles; ++e, values += kHeadDim * kBlockTokens, w += kBlockTokens) {
            const float keep = t.keep[warp][e];
            m = max_or_nan(m, t.top[warp][e]);
            l = __fadd_rn(__fmul_rn(l, keep), t.sum[warp][e]);
            o[0] = __fmul_rn(o[0], keep), o[1] = __fmul_rn(o[1], keep);
            const uint32_t seen = min(pos + 1 - (split * kSplitTiles + e) * kBlockTokens, kBlockTokens);
            auto step = [&](float weight, uint32_t key) {
                const float2 x = __half22float2(*reinterpret_cast<const __half2*>(values + key * kHeadDim));
                o[0] = __fmaf_rn(weight, x.x, o[0]), o[1] = __fmaf_rn(weight, x.y, o[1]);
            };
            if (seen == kBlockTokens) {
#pragma unroll
                for (uint32_t key = 0; key < kBlockTokens; key += 4) {
                    const float4 four = *reinterpret_cast<const float4*>(w + key);
                    step(four.x, key), step(four.y, key + 1), step(four.z, key + 2), step(four.w, key + 3);
                }
            } else {
                // Only visible keys: 0 times the NaN of another may be NaN.
#pragma unroll
                for (uint32_t key = 0; key < kBlockTokens; key += 4) {
                    const float4 four = *reinterpret_cast<const float4*>(w + key);
                    if (key < seen) step(four.x, key);
                    if (key + 1 < seen) step(four.y, key + 1);
                    if (key + 2 < seen) step(four.z, key + 2);
                    if (key + 3 < seen) step(four.w, key + 3);
                }
            }
        }
        if (splits == 1) {
            // 32 values a chunk again.
            const float v[2] = {__fdiv_rn(o[0], l), __fdiv_rn(o[1], l)};
            float four[1][4];
            const uint32_t from = (lane & 8) * 2 + (lane & 7) * 2;
#pragma unroll
            for (int i = 0; i < 4; ++i) four[0][i] = __shfl_sync(~0u, v[i & 1], from + i / 2);
            send_fours<2>(four, p.heads_at, kHeadsCut, chunk, kSentOut);
            return;
        }
        const uint32_t mine = chunk + lane / 16, other = mine % kBlocks, landing = in_block(bar(kSentParts), other);
        const uint32_t to = in_block(floats(p.parts_at) + (mine / kBlocks * kMostSplits + split) * kPart, other);
        send(to + 8 * (lane & 15), landing, o[0], o[1]);
        if (lane % 16 == 0) send(to + 4 * 32, landing, m, l);
    }

    // Chunks of heads that this block merges.
    __device__ __forceinline__ uint32_t chunks() const {
        return kChunks / kBlocks + (rank < kChunks % kBlocks);
    }

    // Merges the splits of a chunk, ascending, by a warp, a value a lane.
    __device__ __forceinline__ void merge(uint32_t splits, uint32_t parity) const {
        const uint32_t at = kWarps - 1 - warp;
        if (at >= chunks()) return;
        barrier_wait(bar(kSentParts), parity);
        const float* part = floats(p.parts_at) + at * kMostSplits * kPart;
        float m = -ARC_INF, l = 0.0f, o = 0.0f;
#pragma unroll 1
        for (uint32_t s = 0; s < splits; ++s, part += kPart) {
            float keep, add;
            join(m, part[32], keep, add);
            l = joined(l, keep, part[33], add);
            o = joined(o, keep, part[lane], add);
        }
        send_codes(__fdiv_rn(o, l), p.heads_at, kHeadsCut, rank + at * kBlocks, kSentOut);
    }

    // One thread: what is sent in a layer is counted.
    __device__ __forceinline__ void count(uint32_t splits) const {
        if (head_place() < min(kPerHead, splits)) expect(bar(kSentHeads), 4 * (GROUP + 2) * kHeadDim);
        if (splits > 1 && chunks() > 0) expect(bar(kSentParts), 4 * 34 * chunks() * splits);
        expect(bar(kSentOut), 40 * (kHeadsCut.cols / 32));
        expect(bar(kSentMiddle), 4 * kHidden.cols);
        expect(bar(kSentUnits), 40 * (kFfn.cols / 32));
        expect(bar(kSentX), 4 * kHidden.cols);
    }

    __device__ __forceinline__ void run() const {
        Marks(kMarkLayers, 0).keep(kept());
        if (threadIdx.x == 0) prepare();
        pdl_launch();
        __syncthreads();
        cluster_arrive_relaxed();
        const bool asks = threadIdx.x == 32 * kAsks;
        if (asks) {
#pragma unroll 1
            for (uint32_t of = 0; of < kProducts; ++of) ask(p.layers[0], of);
        }
        __syncwarp();
        float4 weight = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        load_norm(p.layers[0].attn_norm, weight);
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
            for (uint32_t of = 0; of < kProducts; ++of) barrier_wait(bar(kFull + of), 0);
            return;
        }
        if (threadIdx.x >= kThreads - kHeadDim / 4) {
            const uint32_t i = 4 * (threadIdx.x - (kThreads - kHeadDim / 4));
            copy16(floats(p.angles_at) + i, reinterpret_cast<const float*>(p.rope) + (size_t)info.pos * kHeadDim + i);
        }
        const uint32_t* blocks = view.blocks + (size_t)info.slot * view.max_blocks;
        const uint32_t block = blocks[info.pos / kBlockTokens];
        const bool attends = head_place() < min(kPerHead, splits);
        const bool asks_keys = attends && warp == kAsksKeys;
        const uint32_t kv_block = asks_keys ? block_of(blocks, head_place(), kv_tiles) : 0;
        // Rows of its sequence whose keys and values come in this launch.
        const uint32_t behind = min(info.back, row_idx - p.first_row);
        if (asks_keys && behind == 0) ask_keys(p.layers[0], head_place(), kv_tiles, kv_block);
        if (asks) count(splits);
        copies_landed();
        __syncthreads();
        list();
        __syncwarp();
        uint32_t turns = 0;
#pragma unroll 1
        for (uint32_t l = 0; l < p.n_layers; ++l) {
            const Layer& layer = p.layers[l];
            const uint32_t parity = l & 1;
            const bool last = l + 1 == p.n_layers, noted = l == p.n_layers / 2;
            // Rolled: four products, one after the other, by the same instructions.
#pragma unroll 1
            for (uint32_t of = 0; of < kProducts; ++of) {
                uint32_t inputs = p.codes_at;
                const Own mine = own(of);
                const uint32_t items[kTurns] = {item(of, 0, warp), item(of, 1, warp)};
                Weights w[8];
                barrier_wait(bar(kFull + of), parity);
                take(items[0], w);
                if (of == kHeads) {
                    if (l > 0) {
                        barrier_wait(bar(kSentX), parity ^ 1);
                        if (asks) count(splits);
                    }
                    if (noted) Marks::mark(kept(), 3);
                    make(floats(p.x_at), weight);
                    load_norm(layer.ffn_norm, weight);
                    __syncthreads();
                } else if (of == kOut) {
                    barrier_wait(bar(kSentOut), parity);
                    inputs = p.heads_at;
                    if (noted) Marks::mark(kept(), 5);
                } else if (of == kUnits) {
                    barrier_wait(bar(kSentMiddle), parity);
                    if (noted) Marks::mark(kept(), 6);
                    make(floats(p.middle_at), weight);
                    if (!last) load_norm(p.layers[l + 1].attn_norm, weight);
                    __syncthreads();
                } else {
                    barrier_wait(bar(kSentUnits), parity);
                    inputs = p.units_at;
                    if (noted) Marks::mark(kept(), 7);
                }
                multiply(of, items, inputs, w);
                __syncthreads();
                // What was read makes room for the next layer's.
                if (asks && !last) ask(p.layers[l + 1], of);
                if (of == kHeads) {
                    leave_head(layer, info, block, splits, p.first_layer + l + 1);
                    if (asks_keys && behind > 0) {
                        await_keys(behind, p.first_layer + l + 1);
                        ask_keys(layer, head_place(), kv_tiles, kv_block);
                    }
                    if (noted) Marks::mark(kept(), 4);
                    if (attends) {
#pragma unroll 1
                        for (uint32_t split = head_place(); split < splits; split += kPerHead) {
                            if (split != head_place()) {
                                // The split before has been read.
                                __syncthreads();
                                if (asks_keys) ask_keys(layer, split, kv_tiles, block_of(blocks, split, kv_tiles));
                            }
                            attend(info.pos, split, splits, turns++ & 1, parity);
                        }
                    }
                    if (splits > 1) merge(splits, parity);
                } else if (of == kOut) {
                    if (asks_keys && behind == 0 && !last) ask_keys(p.layers[l + 1], head_place(), kv_tiles, kv_block);
                    add_rows(kHeadsCut, mine, p.x_at, p.middle_at, kSentMiddle, nullptr);
                } else if (of == kUnits) {
                    if (warp < mine.groups >> (kHidden.log_c + 1)) {
                        const uint32_t at = 32 * warp + lane;
                        const float v = gated(kThenSilu, row(kHidden, 0, at), row(kHidden, mine.groups / 2, at), 0.0f);
                        send_codes(v, p.units_at, kFfn, (mine.first >> kHidden.log_c) + warp, kSentUnits);
                    }
                } else {
                    add_rows(kFfn, mine, p.middle_at, p.x_at, kSentX, last ? out : nullptr);
                }
            }
        }
    }
};

}  // namespace

// Of SmolLM2-135M. The warp's number comes from one lane, so that it is known to be that of all.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    arc_matmul_layers_576(const __grid_constant__ Layers p, const __grid_constant__ StepView view) {
    extern __shared__ __align__(128) uint8_t smem[];
    // Held in a register, rather than made again wherever it is used.
    uint32_t base = shared_at(smem);
    asm volatile("" : "+r"(base));
    uint8_t* here = static_cast<uint8_t*>(__cvta_shared_to_generic(base));
    const uint32_t row = p.first_row + blockIdx.x / kBlocks, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    Decoder<576, 9, 3, 1536>{p, view, here, row, cluster_rank(), warp, threadIdx.x & 31}.run();
}

}  // namespace arc
