// Two products of one row in one launch, the second of what the first makes.
//
// A block takes groups of the first product, waits until those of all others that matter are there, and takes groups of the
// second. The tiles of both are one stream through its ring: while blocks wait for one another, weights of the second come
// in. Blocks may wait so, since all are resident: there is one a multiprocessor at most, and the kernels before them end.
//
// Weights are Q8_0 in groups of 8 rows; blocks from `split` on have another matrix first, of F16, which the second product
// does not wait for. Exact in Q8_0, since all sums are those of gemv.cuh.
//
// Registers and shared memory leave room for a block of the kernel before and of the one behind: those of hc.cu, rows.cu.
#include "../../sum.cuh"
#include "tiles.cuh"

namespace arc {

namespace {

// Warps that multiply; one more brings tiles.
constexpr uint32_t kWarps = 8, kThreads = 32 * kWarps;
// Places of the ring. A tile of F16 takes two.
constexpr uint32_t kPlaces = 22;
// Tiles on their way at a time: what memory needs to be busy.
constexpr uint32_t kWindow = 4;
constexpr uint32_t kTile = tile_bytes(Q8_0, kSlice), kHalfTile = tile_bytes(F16, kSlice) / 2;
static_assert(kHalfTile <= kTile && kTile % 128 == 0);
constexpr uint32_t kRingAt = 384, kInputsAt = kRingAt + kPlaces * kTile;
static_assert(16 * kPlaces + 8 <= kRingAt);
static_assert(kPlaces >= 2 * kWarps + kWindow);
// Columns of a second product behind a norm: a chunk of a sum.
constexpr uint32_t kNormed = kSumChunk;
static_assert(kNormed == 4 * kThreads);

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
    Run second;
    uint64_t q, d, floats;  // inputs of the first: int8 and scales, a row for `row_groups` groups; f32
    uint64_t norm;          // weights of the second's norm
    uint64_t counts;        // a number that is another in every launch; of a norm, then arrivals
    uint64_t sent;          // what blocks send to one another
    float eps;
    uint32_t split, row_groups, cols;  // columns of the first
    uint32_t first_at, second_at;      // partial sums of the first and of the second, from the inputs on
};
static_assert(sizeof(Follow) == 168);

// Barrier of the warps that multiply.
__device__ __forceinline__ void sync() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// What blocks send to one another has the number of the launch beside it, written and read as one: who finds the number has
// the value, and there is no flag to wait for before it.
__device__ __forceinline__ void send_pair(uint64_t to, float v, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((uint64_t)tag << 32 | __float_as_uint(v)) : "memory");
}
__device__ __forceinline__ void send_three(uint64_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t tag) {
    asm volatile("{\n.reg .b128 v;\nmov.b128 v, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], v;\n}" ::"l"(to),
                 "l"((uint64_t)y << 32 | x), "l"((uint64_t)tag << 32 | z)
                 : "memory");
}
// Three words, once their number is there.
__device__ __forceinline__ uint4 look(uint64_t at) {
    uint64_t low, high;
    asm volatile("{\n.reg .b128 v;\nld.relaxed.gpu.global.b128 v, [%2];\nmov.b128 {%0, %1}, v;\n}"
                 : "=l"(low), "=l"(high)
                 : "l"(at)
                 : "memory");
    return make_uint4((uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32));
}

// 32 values, one a lane, as int8 to all blocks: block `at` of the row. Words of codes, then the scale.
__device__ __forceinline__ void send_codes(float v, uint64_t to, size_t at, uint32_t tag) {
    const uint32_t lane = threadIdx.x & 31, l = min(lane, 2u);
    float four[1][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[0][i] = __shfl_sync(~0u, v, 4 * (lane & 7) + i);
    Quantised made[1];
    quantise(four, made);
    const uint32_t x = __shfl_sync(~0u, made[0].q, 3 * l), y = __shfl_sync(~0u, made[0].q, 3 * l + 1);
    const uint32_t z = __shfl_sync(~0u, made[0].q, 3 * l + 2);
    if (lane < 3) send_three(to + 48 * at + 16 * lane, x, y, lane == 2 ? __float_as_uint(made[0].d) : z, tag);
}

// The row that `send_codes` sends, to shared memory.
__device__ __forceinline__ void take_codes(uint64_t sent, uint32_t cols, uint32_t tag, uint8_t* to) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < cols / 32; i += kThreads) {
        const uint64_t at = sent + 48 * i;
        uint4 a, b, c;
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

// The row that `send_pair` sends behind its norm as int8, four values a thread: every warp takes the sum of squares by
// itself.
__device__ __forceinline__ void take_normed(uint64_t sent, uint32_t tag, uint64_t norm, float eps, uint8_t* to) {
    const uint32_t lane = threadIdx.x & 31, k = 4 * threadIdx.x;
    float* there = reinterpret_cast<float*>(to + kNormed / 256 * (272 + 32));
    const float4 weight = load_early(reinterpret_cast<const float4*>(norm) + threadIdx.x);
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
    Quantised out[1];
    quantise(x, out);
    *reinterpret_cast<uint32_t*>(to + k / 256 * 272 + k % 256) = out[0].q;
    if (lane % 8 == 0) *reinterpret_cast<float*>(to + kNormed / 256 * 272 + k / 8) = out[0].d;
}

// NORMED: the second product's inputs are behind a norm, and there may be a matrix of F16.
template <bool NORMED>
struct Following {
    const Follow& p;
    uint8_t* smem;
    bool behind;
    const Run& a;
    const Run& b;
    uint32_t a_first, a_n, b_first, b_n;  // groups of this block
    uint32_t a_asks, asks;                // places that tiles of the first, and of both, take

    __device__ __forceinline__ Following(const Follow& p, uint8_t* smem)
        : p(p), smem(smem), behind(NORMED && blockIdx.x >= p.split), a(p.first[behind]), b(p.second) {
        const uint32_t at = behind ? blockIdx.x - p.split : blockIdx.x, each = behind ? b.others : b.each;
        a_first = min(at * a.each, a.groups), a_n = min(a.each, a.groups - a_first);
        b_first = min((behind ? p.split * b.each : 0) + at * each, b.groups), b_n = min(each, b.groups - b_first);
        a_asks = a_n * a.tiles << behind, asks = a_asks + b_n * b.tiles;
    }

    __device__ __forceinline__ uint64_t* full(uint32_t place) const { return reinterpret_cast<uint64_t*>(smem) + place; }
    __device__ __forceinline__ uint64_t* empty(uint32_t place) const { return full(kPlaces) + place; }
    // The number of the launch, and whether the first product's inputs are there.
    __device__ __forceinline__ volatile uint32_t* words() const { return reinterpret_cast<volatile uint32_t*>(full(2 * kPlaces)); }
    __device__ __forceinline__ uint8_t* tile(uint32_t place) const { return smem + kRingAt + place * kTile; }

    // One thread sends for all tiles, few at a time: what others load, small as it is, would wait behind all that is on its
    // way. But a block that is late brings what all others wait for nearly as fast as it can: a warp that has taken a tile may
    // look for its next one, kWarps tiles on, whose place must have had its last tile by then, or the barrier's parity would
    // say that it is there. So no more tiles are on their way than places that are so far from a warp.
    __device__ __forceinline__ void bring() const {
        const uint32_t a_bytes = behind ? kHalfTile : kTile;
        const uint8_t* from = reinterpret_cast<const uint8_t*>(a.base) + (size_t)(a_first * a.tiles << behind) * a_bytes;
        uint32_t place = 0, turn = 0, landed = 0, landed_turn = 0, done = 0;
#pragma unroll 1
        for (uint32_t i = 0; i < asks; ++i) {
            if (i == a_asks) from = reinterpret_cast<const uint8_t*>(b.base) + (size_t)(b_first * b.tiles) * kTile;
            const uint32_t window = i < a_asks && words()[1] != 0 ? kPlaces - (kWarps << behind) : kWindow;
            for (; done + window <= i; ++done) {
                barrier_wait(full(landed), landed_turn & 1);
                if (++landed == kPlaces) landed = 0, ++landed_turn;
            }
            if (turn != 0) barrier_wait(empty(place), turn + 1 & 1);
            const uint32_t bytes = i < a_asks ? a_bytes : kTile;
            bulk_load(tile(place), from, bytes, full(place));
            from += bytes;
            if (++place == kPlaces) place = 0, ++turn;
        }
    }

    __device__ __forceinline__ const uint8_t* await(uint32_t i) const {
        barrier_wait(full(i % kPlaces), i / kPlaces & 1);
        return tile(i % kPlaces);
    }
    __device__ __forceinline__ void leave(uint32_t i) const {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_at(empty(i % kPlaces))) : "memory");
        }
    }

    __device__ __forceinline__ void run() const {
        const Marks marks(kMarkFollow, NORMED | behind << 1);
        if (threadIdx.x == kThreads) {
            for (uint32_t i = 0; i < 2 * kPlaces; ++i) barrier_init(full(i));
            words()[1] = 0;
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
        if (threadIdx.x >= kThreads) {
            if (threadIdx.x == kThreads) bring();
            return;
        }
        const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        pdl_launch();
        pdl_wait();
        marks.mark(2);
        uint32_t* counts = reinterpret_cast<uint32_t*>(p.counts);
        if (threadIdx.x == 0) words()[0] = __ldcg(counts) + 1;

        uint8_t* inputs = smem + kInputsAt;
        if (behind) {
            const float* from = reinterpret_cast<const float*>(p.floats);
            float* to = reinterpret_cast<float*>(inputs);
#pragma unroll 1
            for (uint32_t i = 4 * threadIdx.x; i < p.cols; i += 4 * kThreads) copy16(to + i / 256 * 260 + i % 256, from + i);
        } else if (a_n != 0) {
            const size_t row = a_first / p.row_groups;
            bring_codes(reinterpret_cast<const uint8_t*>(p.q) + row * p.cols,
                        reinterpret_cast<const uint8_t*>(p.d) + row * (p.cols / 8), p.cols, inputs);
        }
        copies_landed();
        sync();
        marks.mark(3);
        if (threadIdx.x == 0) words()[1] = 1;
        const uint32_t tag = words()[0];

        // Rolled: the second product finds the instructions that the first brought.
#pragma unroll 1
        for (bool second = false;; second = true) {
            const uint32_t n = second ? b_n : a_n, tiles = second ? b.tiles : a.tiles;
            float* partials = reinterpret_cast<float*>(inputs + (second ? p.second_at : p.first_at));
            const uint32_t scales_at = tiles * 4 * 272;
#pragma unroll 1
            for (uint32_t t = warp; t < n * tiles; t += kWarps) {
                const uint32_t slice = 4 * (t % tiles) + (lane >> 3);
                Inputs x;
                float acc[1] = {0.0f};
                if (behind && !second) {
                    x.f = reinterpret_cast<const float*>(inputs) + slice * 260;
#pragma unroll 1
                    for (uint32_t i = 2 * t; i < 2 * t + 2; ++i, x.f += kSlice / 2) {
                        dot_floats<1, F16>(await(i), lane, kSlice / 2, x, acc);
                        leave(i);
                    }
                } else {
                    x.q = reinterpret_cast<const int8_t*>(inputs) + slice * 272;
                    x.d = reinterpret_cast<const float*>(inputs + scales_at) + slice * 8;
                    const uint32_t i = second ? a_asks + t : t;
                    Add<1, Q8_0> add{x, acc};
                    each_block<Q8_0, true, 2>(await(i), lane, kSlice / 32, nullptr, add);
                    leave(i);
                }
                partials[t * kLanes + lane] = acc[0];
            }
            sync();
            marks.mark(second ? 6 : 4);
            const uint32_t at = 8 * (second ? b_first : a_first);
            float* out = reinterpret_cast<float*>(second ? b.out : a.out) + at;
#pragma unroll 1
            for (uint32_t o = threadIdx.x; o < 8 * n; o += kThreads) {
                // As `total`.
                const float* from = partials + o / 8 * tiles * kLanes + o % 8;
                float sum = 0.0f;
#pragma unroll NORMED ? 2 : 4
                for (uint32_t t = 0; t < tiles; ++t, from += kLanes) {
                    const float v[4] = {from[0], from[8], from[16], from[24]};
                    sum = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(sum, v[0]), v[1]), v[2]), v[3]);
                }
                // The others first: they wait. Whole warps, each with a block of 32 outputs.
                if (!NORMED && !second) send_codes(sum, p.sent, (at + o) / 32, tag);
                if (NORMED && !second && !behind && at + o < kNormed) send_pair(p.sent + 8 * (at + o), sum, tag);
                out[o] = sum;
            }
            if (second) break;
            if (NORMED) {
                // What the next kernel waits for, which may begin with the outputs of the first product.
                __syncwarp();
                if (lane == 0 && 4 * warp < max(a_n, 1u)) arrive(counts + 1);
                take_normed(p.sent, tag, p.norm, p.eps, inputs);
            } else {
                take_codes(p.sent, 1024 * b.tiles, tag, inputs);
            }
            sync();
            // Every block has read the number: each has sent a part of what is here.
            if (!NORMED && blockIdx.x == 0 && threadIdx.x == 0) counts[0] = tag;
            marks.mark(5);
        }
        marks.mark(7);
    }
};

}  // namespace

extern "C" __global__ void __maxnreg__(56) arc_matmul_follow(const __grid_constant__ Follow p) {
    extern __shared__ __align__(128) uint8_t smem[];
    Following<false>(p, smem).run();
}

extern "C" __global__ void __maxnreg__(56) arc_matmul_follow_normed(const __grid_constant__ Follow p) {
    extern __shared__ __align__(128) uint8_t smem[];
    Following<true>(p, smem).run();
}

}  // namespace arc
