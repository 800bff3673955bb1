// Two products of one row in one launch, the second of what the first makes.
//
// A block takes groups of the first product, waits until those of all others that matter are there, and takes groups of the
// second. The tiles of both are one stream through its ring: while blocks wait for one another, weights of the second come
// in. Blocks may wait so, since all are resident: there is one a multiprocessor at most, and the kernels before them end.
//
// The last blocks begin when the attention before leaves their multiprocessors; until then the others fill their rings. So the last
// ones have a few groups of the first product, for which all wait, and less of both.
//
// Weights are Q8_0 in groups of 8 rows; blocks from `split` on have another matrix first, of F16, which the second product
// does not wait for. Those before may have heads of an indexer's query between the two, F16 too, of the same row as the
// second: they come first, since the choice among keys begins with them and runs beside the second. Exact, since all sums
// are those of gemv.cuh.
//
// Registers and shared memory leave room for a block of the kernel before and of the one behind: those of hc.cu, rows.cu. These
// take what they need as it is sent.
#include "../../sum.cuh"
#include "../latent/latent.cuh"
#include "exchange.cuh"

namespace arc {

namespace {

// Warps that multiply; one more brings tiles.
constexpr uint32_t kWarps = 8, kThreads = 32 * kWarps;
// Places of the ring. A tile of F16 takes two.
constexpr uint32_t kPlaces = 22;
// Tiles on their way at a time: what memory needs to be busy. Of F16 these are halves of columns.
constexpr uint32_t kWindow = 4;
constexpr uint32_t kTile = tile_bytes(Q8_0, kSlice), kHalfTile = tile_bytes(F16, kSlice) / 2;
static_assert(kHalfTile <= kTile && kTile % 128 == 0);
constexpr uint32_t kRingAt = 512, kInputsAt = kRingAt + kPlaces * kTile;
static_assert(kPlaces >= 2 * kWarps + kWindow);
// Columns of a second product behind a norm: a chunk of a sum.
constexpr uint32_t kNormed = kSumChunk;
static_assert(kNormed == 4 * kThreads);
// Groups of a head of the index query. A group is one tile.
constexpr uint32_t kHeadGroups = kIndexDim / 8;
static_assert(kNormed == kLanes / 8 * kSlice);
// Bytes of a slice of int8 inputs: codes, and scales behind those of all slices.
constexpr uint32_t kSliceCodes = 272 + 32;
// Where a row behind a norm stands: as int8 with scales, as the others sent it, and where there is an index query as f32.
constexpr uint32_t kSentAt = kNormed / 256 * kSliceCodes, kFloatsAt = kSentAt + 4 * kNormed;

// Outputs of the first that there is room for, in front of those of the second, where both are sent to the next kernels.
constexpr uint32_t kSentFirst = 8192;

// Consecutive groups of a matrix; `Run` of follow.rs.
struct Run {
    uint64_t base, out;
    uint32_t groups, tiles;  // in all; of a group
    uint32_t each, others;   // groups of a block before `split`, and of one behind
};
static_assert(sizeof(Run) == 32);

// `Follow` of follow.rs.
struct Follow {
    Run first[2];  // of blocks before `split`, and of those behind
    Run index;     // of blocks before `split`: whole heads; or none
    Run second;
    uint64_t q, d, floats;  // inputs of the first: int8 and scales, a row for `row_groups` groups; f32
    uint64_t norm;          // weights of the second's norm
    uint64_t counts;        // a number that is another in every launch; of a norm, then arrivals
    uint64_t sent;          // what blocks send to one another
    uint64_t infos, rope;   // of an index query: where its row stands, and the angles of positions
    uint64_t heads;         // where its heads are sent as keys are stored
    // Where the last outputs of F16, the heads' weights, are sent for the choice, and its number: that of the one before. Null:
    // nobody wants to know of them, nor of heads.
    uint64_t weights, number;
    // Where outputs behind no norm are sent for the site behind, and the word after `counts` says with which number. Null:
    // nobody wants to know.
    uint64_t site;
    // Where the inputs of the first are sent, as `send_codes` does, and their number. Null: they are there when all before has ended.
    uint64_t taken, taken_number;
    float eps;
    uint32_t split, row_groups, cols;  // columns of the first
    // Partial sums of the first, of the index query and of the second, and angles, from the inputs on.
    uint32_t first_at, index_at, second_at, angles_at;
};
static_assert(sizeof(Follow) == 272);

// Blocks of a launch without a norm, at most.
constexpr uint32_t kMostBlocks = 160;

// `Shares` of follow.rs: where the groups of every block begin in the first and in the second product, and where they end. Nobody
// has none of the first, nor of more than two of its rows of inputs.
struct Shares {
    uint16_t starts[2][kMostBlocks + 1];
};
static_assert(sizeof(Shares) == 644);

// The thread's number, and an address, as if nobody knew them before: what follows from them does not wait in registers, which
// are few.
__device__ __forceinline__ uint32_t this_thread() {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}
__device__ __forceinline__ uint32_t* this_place(uint64_t at) {
    asm volatile("" : "+l"(at));
    return reinterpret_cast<uint32_t*>(at);
}

// Barrier of the warps that multiply.
__device__ __forceinline__ void sync() { sync_threads<kThreads>(); }

// What a block has of a product. In shared memory, since registers are few.
struct Part {
    uint64_t out;            // of its first group
    uint32_t first, groups;  // its first group, and how many
    uint32_t tiles, half;    // of a group, and whether they are of F16
    uint32_t asked;          // places that the tiles before take
    uint32_t floats;         // where inputs of F16 stand, from the inputs on
    uint32_t next;           // the first tile that has the next row of inputs, which stands behind the block's first one
};
static_assert(sizeof(Part) == 40 && 16 * kPlaces + 8 + 16 + 3 * sizeof(Part) <= kRingAt);

// Nanoseconds between two looks.
constexpr uint32_t kPause = 64;

// The row that `send_codes` sends, to shared memory.
__device__ __forceinline__ void take_codes(uint64_t sent, uint32_t cols, uint32_t tag, uint8_t* to) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < cols / 32; i += kThreads) {
        const uint64_t at = sent + 48 * i;
        uint4 a, b, c;
        // One word of the three, and seldom: what the others send has to get through.
        while (look(at + 32).w != tag) __nanosleep(kPause);
        do {
            a = look(at), b = look(at + 16), c = look(at + 32);
        } while (a.w != tag || b.w != tag || c.w != tag);
        uint4* codes = reinterpret_cast<uint4*>(to + i / 8 * 272 + i % 8 * 32);
        codes[0] = make_uint4(a.x, a.y, a.z, b.x), codes[1] = make_uint4(b.y, b.z, c.x, c.y);
        reinterpret_cast<uint32_t*>(to + cols / 256 * 272)[i] = c.z;
    }
}

// Int8 inputs of one row to shared memory; complete after copies_landed().
__device__ __forceinline__ void bring_codes(const uint8_t* q, const uint8_t* d, uint32_t cols, uint8_t* to) {
    const uint32_t wide = cols / 16, all = wide + cols / 128;
    uint8_t* scales = to + cols / 256 * 272;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < all; i += kThreads) {
        if (i < wide) {
            copy16(to + i / 16 * 272 + i % 16 * 16, q + 16 * i);
        } else {
            copy16(scales + 16 * (i - wide), d + 16 * (i - wide));
        }
    }
}

// A lane's slices of two tiles of F16, half their columns, by the same inputs: as `dot_floats` of each, but inputs are loaded once.
__device__ __forceinline__ void dot_two(const uint8_t* one, const uint8_t* other, uint32_t lane, const float* f, float (&acc)[2]) {
    constexpr uint32_t kLen = unit_len(F16);
    one += 16 * lane, other += 16 * lane;
#pragma unroll 2
    for (uint32_t u = 0; u < kSlice / 2 / kLen; ++u) {
        const uint4 v[2] = {load16(one + 512 * u), load16(other + 512 * u)};
        const float4 x[2] = {*reinterpret_cast<const float4*>(f + kLen * u), *reinterpret_cast<const float4*>(f + kLen * u + 4)};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float a = j & 1 ? x[j / 2].z : x[j / 2].x, b = j & 1 ? x[j / 2].w : x[j / 2].y;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 two = halves(F16, word(v[n], j));
                acc[n] = __fmaf_rn(two.x, a, acc[n]);
                acc[n] = __fmaf_rn(two.y, b, acc[n]);
            }
        }
    }
}

// The row that `send_pair` sends behind its norm as int8, with FLOATS as f32 too, four values a thread: every warp takes
// the sum of squares by itself.
template <bool FLOATS>
__device__ __forceinline__ void take_normed(uint64_t sent, uint32_t tag, uint64_t norm, float eps, uint8_t* to) {
    const uint32_t thread = this_thread(), lane = thread & 31, k = 4 * thread;
    float* there = reinterpret_cast<float*>(to + kSentAt);
    const float4 weight = load_early(reinterpret_cast<const float4*>(norm) + thread);
    uint64_t got[4];
    do {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                         : "=l"(got[i]), "=l"(got[i + 1])
                         : "l"(sent + 8 * (k + i))
                         : "memory");
        }
    } while (got[0] >> 32 != tag || got[1] >> 32 != tag || got[2] >> 32 != tag || got[3] >> 32 != tag);
    const float4 mine = make_float4(__uint_as_float((uint32_t)got[0]), __uint_as_float((uint32_t)got[1]),
                                    __uint_as_float((uint32_t)got[2]), __uint_as_float((uint32_t)got[3]));
    *reinterpret_cast<float4*>(there + k) = mine;
    sync();
    float v[8][4];
#pragma unroll
    for (int s = 0; s < 8; ++s) {
        const float4 four = *reinterpret_cast<const float4*>(there + 128 * s + 4 * lane);
        v[s][0] = four.x, v[s][1] = four.y, v[s][2] = four.z, v[s][3] = four.w;
    }
    const float squares = chunk_square(v), factor = norm_factor(kNormed, eps, &squares);
    float x[1][4] = {{__fmul_rn(__fmul_rn(mine.x, factor), weight.x), __fmul_rn(__fmul_rn(mine.y, factor), weight.y),
                      __fmul_rn(__fmul_rn(mine.z, factor), weight.z), __fmul_rn(__fmul_rn(mine.w, factor), weight.w)}};
    if (FLOATS) {
        *reinterpret_cast<float4*>(to + kFloatsAt + 4 * (k / 256 * 260 + k % 256)) = make_float4(x[0][0], x[0][1], x[0][2], x[0][3]);
    }
    Quantised out[1];
    quantise(x, out);
    *reinterpret_cast<uint32_t*>(to + k / 256 * 272 + k % 256) = out[0].q;
    if (lane % 8 == 0) *reinterpret_cast<float*>(to + kNormed / 256 * 272 + k / 8) = out[0].d;
}

// NORMED: the second product's inputs are behind a norm, and there may be a matrix of F16. INDEX: there is an index query. Without
// a norm, blocks have what `shares` says.
template <bool NORMED, bool INDEX>
struct Following {
    const Follow& p;
    uint8_t* smem;
    bool behind;
    const Shares* shares;

    // What a block takes groups of, in this order.
    enum Of : uint32_t { kFirst, kQuery, kSecond };

    __device__ __forceinline__ uint64_t* full(uint32_t place) const { return reinterpret_cast<uint64_t*>(smem) + place; }
    __device__ __forceinline__ uint64_t* empty(uint32_t place) const { return full(kPlaces) + place; }
    // That the first product's inputs are there.
    __device__ __forceinline__ uint64_t* begun() const { return full(2 * kPlaces); }
    // The number of the launch, the number of the choice, and `Marks`.
    __device__ __forceinline__ volatile uint32_t* words() const { return reinterpret_cast<volatile uint32_t*>(begun() + 1); }
    __device__ __forceinline__ volatile Part& part(uint32_t of) const { return reinterpret_cast<volatile Part*>(words() + 4)[of]; }
    __device__ __forceinline__ uint8_t* tile(uint32_t place) const { return smem + kRingAt + place * kTile; }

    __device__ __forceinline__ const Run& run_of(uint32_t of) const {
        return INDEX && of == kQuery ? p.index : of == kSecond ? p.second : p.first[behind];
    }

    // One thread, before anybody looks at them.
    __device__ __forceinline__ void prepare() const {
        for (uint32_t i = 0; i < kPlaces; ++i) barrier_init(full(i)), barrier_init(empty(i), kWarpArrivals);
        barrier_init(begun());
        barriers_made();
        const uint32_t at = behind ? blockIdx.x - p.split : blockIdx.x;
        uint32_t places = 0;
#pragma unroll 1
        for (uint32_t of = kFirst; of <= kSecond; ++of) {
            const Run& run = run_of(of);
            const bool others = behind && of == kSecond, none = of == kQuery && (!INDEX || behind);
            const uint32_t each = none ? 0 : others ? run.others : run.each;
            uint32_t first = min((others ? p.split * run.each : 0) + at * each, run.groups), groups = min(each, run.groups - first);
            volatile Part& own = part(of);
            if (!NORMED && !none) {
                const uint16_t* starts = shares->starts[of == kSecond] + at;
                first = starts[0], groups = starts[1] - first;
                own.next = of == kFirst ? (p.row_groups - first % p.row_groups) * run.tiles : ~0u;
            }
            own.first = first, own.groups = groups, own.tiles = run.tiles;
            own.half = of == kFirst ? behind : of == kQuery;
            own.out = run.out + 32 * first, own.asked = places, own.floats = of == kFirst ? 0 : kFloatsAt;
            places += groups * run.tiles << own.half;
        }
    }

    // One thread sends for all tiles, few at a time: what others load, small as it is, would wait behind all that is on its
    // way. But a block that is late brings what all others wait for nearly as fast as it can: a warp that has taken a tile may
    // look for its next one, kWarps tiles on, whose place must have had its last tile by then, or the barrier's parity would
    // say that it is there. So no more tiles are on their way than places that are so far from a warp.
    //
    // Tiles of F16 come in units of two groups, the same columns of both, and in rounds of a unit a warp: the first half of the columns
    // of all units, then the other. The last of an odd number of groups is a unit by itself. A warp has its next ones at most
    // 2 kWarps places on.
    __device__ __forceinline__ void bring() const {
        uint32_t place = 0, turn = 0, landed = 0, landed_turn = 0, done = 0, i = 0;
        bool late = false;
#pragma unroll 1
        for (uint32_t of = kFirst; of <= kSecond; ++of) {
            volatile Part& own = part(of);
            const bool half = own.half;
            const uint32_t tiles = own.tiles, groups = own.groups, bytes = half ? kHalfTile : kTile, end = i + (groups * tiles << half);
            const uint8_t* from = reinterpret_cast<const uint8_t*>(run_of(of).base) + (size_t)(own.first * tiles << half) * bytes;
            // Of F16: the unit, the first of the round, and which piece of the unit: its tile, and 2 for the later columns.
            uint32_t unit = 0, first = 0, piece = 0;
#pragma unroll 1
            for (; i < end; ++i) {
                late = late || barrier_passed(begun(), 0);
                const uint32_t window = of == kFirst && !half && late ? kPlaces - kWarps : kWindow;
                for (; done + window <= i; ++done) {
                    barrier_wait(full(landed), landed_turn & 1);
                    if (++landed == kPlaces) landed = 0, ++landed_turn;
                }
                if (turn != 0) barrier_wait(empty(place), turn + 1 & 1);
                const uint8_t* at = from;
                if (half) {
                    const uint32_t pair = unit / tiles, k = unit % tiles;
                    at += (size_t)(((2 * pair + (piece & 1)) * tiles + k) * 2 + (piece >> 1)) * kHalfTile;
                    if ((piece & 1) == 0 && 2 * pair + 1 < groups) {
                        piece |= 1;
                    } else {
                        piece &= 2;
                        if (++unit == min(first + kWarps, (groups + 1) / 2 * tiles)) {
                            if (piece == 0) {
                                unit = first;
                            } else {
                                first = unit;
                            }
                            piece ^= 2;
                        }
                    }
                } else {
                    from += kTile;
                }
                bulk_load(tile(place), at, bytes, full(place));
                if (++place == kPlaces) place = 0, ++turn;
            }
        }
    }

    __device__ __forceinline__ const uint8_t* await(uint32_t i) const {
        barrier_wait(full(i % kPlaces), i / kPlaces & 1);
        return tile(i % kPlaces);
    }
    __device__ __forceinline__ void leave(uint32_t i) const {
        __syncwarp();
        if (arrives(threadIdx.x & 31)) barrier_arrive(empty(i % kPlaces));
    }

    // Heads of the index query from the partial sums of their groups, each by four warps: sent as they would be stored, and what that
    // leaves.
    __device__ __forceinline__ void leave_heads(float* partials, const uint8_t* turns, uint32_t first, uint32_t heads) const {
        const uint32_t lane = this_thread() & 31, warp = this_thread() >> 5, j = warp % 4;
#pragma unroll 1
        for (uint32_t h = warp / 4; h < heads + warp / 4; h += kWarps / 4) {
            float* own = partials + (h * kHeadGroups + 4 * j) * kLanes;
            if (h < heads) {
                const float* from = own + lane / 8 * kLanes + lane % 8;
                float x[1] = {__fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(0.0f, from[0]), from[8]), from[16]), from[24])};
                // As `rope_row`.
                if (j >= 2) {
                    const float2 cs = reinterpret_cast<const float2*>(turns)[(lane + 32 * (j - 2)) / 2];
                    const float other = __shfl_xor_sync(~0u, x[0], 1);
                    const float turned = __fmul_rn(other, cs.y), kept = __fmul_rn(x[0], cs.x);
                    x[0] = lane & 1 ? __fadd_rn(kept, turned) : __fsub_rn(kept, turned);
                }
                hadamard_inside(x);
                __syncwarp();
                own[lane] = x[0];
            }
            sync();
            if (h < heads) {
                const float* all = partials + h * kHeadGroups * kLanes + lane;
                float x = hadamard_across({all[0], all[4 * kLanes], all[8 * kLanes], all[12 * kLanes]}, j);
                const IndexCode of = index_code(x, true);
                if (p.weights != 0) send_index_block(of.code, of.scale, p.heads + 128 * (first + h) + 32 * j, words()[1]);
                reinterpret_cast<float*>(p.index.out)[(first + h) * kIndexDim + 32 * j + lane] = x;
            }
        }
    }

    __device__ __forceinline__ void run() const {
        Marks(kMarkFollow, NORMED | behind << 1 | INDEX << 2).keep(words() + 2);
        if (threadIdx.x == kThreads) prepare();
        __syncthreads();
        if (threadIdx.x >= kThreads) {
            if (threadIdx.x == kThreads) bring();
            return;
        }
        const uint32_t warp = threadIdx.x >> 5;
        // Who takes what is sent begins when everything before this one has ended.
        const bool sends = !NORMED && p.site != 0, takes = !NORMED && p.taken != 0;
        if (!NORMED && !sends) pdl_launch();
        if (!takes) {
            pdl_wait();
            if (NORMED || (sends && blockIdx.x != 0)) pdl_launch();
        }
        Marks::mark(words() + 2, 2);
        uint32_t* counts = reinterpret_cast<uint32_t*>(p.counts);
        if (threadIdx.x == 0) words()[0] = __ldcg(counts) + 1;
        if (INDEX && threadIdx.x == 32 && p.weights != 0) words()[1] = __ldcg(reinterpret_cast<const uint32_t*>(p.number)) + 1;

        uint8_t* inputs = smem + kInputsAt;
        const bool turns = INDEX && threadIdx.x < kRopeDim / 4;
        // What comes of an inert row is nobody's matter.
        const RowInfo* info = reinterpret_cast<const RowInfo*>(p.infos);
        const uint32_t pos = turns && __ldcg(&info->live) != 0 ? __ldcg(&info->pos) : 0;
        if (NORMED && part(kFirst).half) {
            const float* from = reinterpret_cast<const float*>(p.floats);
            float* to = reinterpret_cast<float*>(inputs);
#pragma unroll 1
            for (uint32_t i = 4 * threadIdx.x; i < p.cols; i += 4 * kThreads) copy16(to + i / 256 * 260 + i % 256, from + i);
        } else if (part(kFirst).groups != 0) {
            uint32_t row = part(kFirst).first / p.row_groups;
            uint8_t* to = inputs;
#pragma unroll 1
            for (uint32_t more = !NORMED && part(kFirst).next < part(kFirst).groups * part(kFirst).tiles ? 2 : 1; more != 0; --more) {
                if (takes) {
                    take_codes(p.taken + 48 * (row * (p.cols / 32)), p.cols, __ldcg(reinterpret_cast<const uint32_t*>(p.taken_number)), to);
                } else {
                    bring_codes(reinterpret_cast<const uint8_t*>(p.q) + row * p.cols,
                                reinterpret_cast<const uint8_t*>(p.d) + row * (p.cols / 8), p.cols, to);
                }
                ++row, to += p.cols / 256 * kSliceCodes;
            }
        }
        copies_landed();
        sync();
        if (threadIdx.x == 0) barrier_arrive(begun());
        Marks::mark(words() + 2, 3);
        if (turns) copy16(inputs + p.angles_at + 16 * threadIdx.x, reinterpret_cast<const float4*>(p.rope) + pos * (kRopeDim / 4) + threadIdx.x);

        // Rolled: what comes later finds the instructions that the first brought.
#pragma unroll 1
        for (uint32_t of = kFirst;; ++of) {
            volatile Part& own = part(of);
            const uint32_t tiles = own.tiles, all = own.groups * tiles, scales_at = tiles * 4 * 272;
            float* partials = reinterpret_cast<float*>(inputs + (of == kFirst ? p.first_at : INDEX && of == kQuery ? p.index_at : p.second_at));
            const uint32_t lane = this_thread() & 31;
            // Where there are registers for it.
            const bool floating = NORMED && !INDEX && own.half;
            const uint32_t before = INDEX ? 0 : own.asked;
            if (INDEX ? own.half : floating) {
                uint32_t base = INDEX ? own.asked : before;
                const uint32_t pairs = own.groups / 2 * tiles, units = (own.groups + 1) / 2 * tiles;
#pragma unroll 1
                for (uint32_t first = 0; first < units; first += kWarps) {
                    // Pairs of the round, and its pieces of either half of the columns.
                    const uint32_t paired = min(max((int)(pairs - first), 0), kWarps), step = paired + min(units - first, kWarps);
                    const uint32_t unit = first + warp, t = unit / tiles * 2 * tiles + unit % tiles;
                    if (unit < units) {
                        const float* f = reinterpret_cast<const float*>(inputs + own.floats) + (4 * (unit % tiles) + (lane >> 3)) * 260;
                        const uint32_t two = warp < paired;
                        float acc[2] = {0.0f, 0.0f};
#pragma unroll 1
                        for (uint32_t i = base + warp + min(warp, paired), end = i + 2 * step; i < end; i += step, f += kSlice / 2) {
                            const uint8_t *one = await(i), *other = await(i + two);
                            dot_two(one, other, lane, f, acc);
                            leave(i);
                            if (two) leave(i + 1);
                        }
                        partials[t * kLanes + lane] = acc[0];
                        if (two) partials[(t + tiles) * kLanes + lane] = acc[1];
                    }
                    base += 2 * step;
                }
            } else {
#pragma unroll 1
                for (uint32_t t = warp; t < all; t += kWarps) {
                    const uint32_t slice = 4 * (t % tiles) + (lane >> 3);
                    const uint8_t* row = NORMED || t < own.next ? inputs : inputs + 4 * tiles * kSliceCodes;
                    Inputs x;
                    float acc[1] = {0.0f};
                    x.q = reinterpret_cast<const int8_t*>(row) + slice * 272;
                    x.d = reinterpret_cast<const float*>(row + scales_at) + slice * 8;
                    const uint32_t i = (INDEX ? own.asked : before) + t;
                    Add<1, Q8_0> add{x, acc};
                    each_block<Q8_0, true, 2>(await(i), lane, kSlice / 32, nullptr, add);
                    leave(i);
                    partials[t * kLanes + lane] = acc[0];
                }
            }
            sync();
            const uint32_t n = own.groups;
            if (INDEX && of == kQuery) {
                leave_heads(partials, inputs + p.angles_at, own.first / kHeadGroups, n / kHeadGroups);
                continue;
            }
            const bool second = of == kSecond;
            const uint32_t tag = words()[0];
            Marks::mark(words() + 2, second ? 6 : 4);
            const uint32_t at = 8 * own.first;
            float* out = reinterpret_cast<float*>(own.out);
#pragma unroll 1
            for (uint32_t o = this_thread(); o < 8 * n; o += kThreads) {
                // As `total`.
                const float* from = partials + o / 8 * tiles * kLanes + o % 8;
                float sum = 0.0f;
#pragma unroll NORMED ? 1 : 4
                for (uint32_t t = 0; t < tiles; ++t, from += kLanes) {
                    const float v[4] = {from[0], from[8], from[16], from[24]};
                    sum = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(sum, v[0]), v[1]), v[2]), v[3]);
                }
                // The others first: they wait. Whole warps, each with a block of 32 outputs.
                if (!NORMED && !second) send_codes(sum, p.sent, (at + o) / 32, tag);
                if (sends && second) send_pair(p.site + 8 * fours_place(at + o), sum, tag);
                if (NORMED) {
                    const uint32_t to = second ? kSentFirst + fours_place(at + o) : (own.half ? 8 * p.row_groups : 0) + at + o;
                    send_pair(p.sent + 8 * to, sum, tag);
                }
                if (INDEX && !second && p.weights != 0 && own.half) {
                    const uint32_t first = 8 * p.first[1].groups - p.index.groups / kHeadGroups;
                    if (at + o >= first) send_pair(p.weights + 8 * (at + o - first), sum, words()[1]);
                }
                out[o] = sum;
            }
            if (second) break;
            if (NORMED) {
                // The block has read the number.
                if (threadIdx.x == 0) arrive_empty(this_place(p.counts) + 1);
                take_normed<INDEX>(p.sent, tag, p.norm, p.eps, inputs);
                if (INDEX) copies_landed();
            } else {
                // There is time now.
                const bool site = this_place(p.site) != nullptr;
                if (this_place(p.taken) != nullptr) {
                    pdl_wait();
                    if (site && blockIdx.x != 0) pdl_launch();
                }
                if (site && blockIdx.x == 0 && this_thread() == 0) pdl_launch_as(this_place(p.counts) + 1, tag);
                take_codes(p.sent, 1024 * p.second.tiles, tag, inputs);
            }
            sync();
            // Every block has read the number: each has sent a part of what is here.
            if (!NORMED && blockIdx.x == 0 && this_thread() == 0) counts[0] = tag;
            Marks::mark(words() + 2, 5);
            if (!INDEX) ++of;
        }
        Marks::mark(words() + 2, 7);
    }
};

}  // namespace

extern "C" __global__ void __maxnreg__(56) arc_matmul_follow(const __grid_constant__ Follow p, const __grid_constant__ Shares shares) {
    extern __shared__ __align__(128) uint8_t smem[];
    Following<false, false>{p, smem, false, &shares}.run();
}

extern "C" __global__ void __maxnreg__(56) arc_matmul_follow_normed(const __grid_constant__ Follow p) {
    extern __shared__ __align__(128) uint8_t smem[];
    Following<true, false>{p, smem, blockIdx.x >= p.split, nullptr}.run();
}

extern "C" __global__ void __maxnreg__(56) arc_matmul_follow_indexed(const __grid_constant__ Follow p) {
    extern __shared__ __align__(128) uint8_t smem[];
    Following<true, true>{p, smem, blockIdx.x >= p.split, nullptr}.run();
}

}  // namespace arc
