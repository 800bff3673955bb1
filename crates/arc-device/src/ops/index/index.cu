// The indexer's scores and its choice. Exact.
//
// index_score  scores of the visible keys of a row, as ordered integers. In the format Fp4 with 64 heads of 128 values, a
//              warp takes eight keys by int8 mma: codes are integers, a block of 32 has one power of two on either side,
//              and where the powers of a row and a key span little, every partial sum of the CPU's order is a multiple
//              of the smallest that 24 bits hold: all orders give the same bits. Other keys, and other formats, go through
//              the CPU's order step by step.
// index_pick   the best of a row: of few, by a block that holds them in registers and finds the least chosen one two bits at
//              a time; of many, by radix selection over the blocks of a cluster.
// index_choose both for one row, beside the product that makes the queries of its attention: the index query came first
//              (follow.cu), packed as keys are. One block more looks for the scores, which have a number beside them that is
//              another in every launch, and picks. Small blocks: there is room for one beside the product.
// index_choose_many  the same among more keys than one block picks from. Blocks keep their scores. Each tells the others the best
//              of every part of its keys, and all find a score that enough of these reach: nothing below it is chosen. Only what
//              reaches it goes to the block that picks, in lists.
#include "ops/index/index.cuh"
#include "ops/latent/latent.cuh"
#include "ops/matmul/exchange.cuh"
#include "pdl.cuh"

namespace arc {

namespace {

constexpr uint32_t kFull = 0xffffffffu;
constexpr uint32_t kThreads = 256, kWarps = 8;
// Heads and values of the straight path.
constexpr uint32_t kHeads = 64, kDim = kIndexDim, kTiles = kHeads / 16, kBlocks = kDim / 32;
// Distance between heads of int8 codes.
constexpr uint32_t kCodeStride = kDim + 16;
// The most that scales may span, as powers of two: 128 products of at most 12 * 12 / 4 stay below 2^24 of the smallest.
constexpr uint32_t kMostSpan = 9;
// An integer in the low bits of this float's mantissa is the float's distance from it.
constexpr uint32_t kMagicBits = 0x4b400000u;
constexpr float kMagic = 12582912.0f;

// The doubled values of four E2M1 codes, one a byte, as int8.
__device__ __forceinline__ uint32_t doubled(uint32_t codes) {
    const uint32_t m = codes & 0x07070707u, t = m | m >> 4;
    const uint32_t select = (t & 0xff) | (t >> 8 & 0xff00);
    const uint32_t plus = __byte_perm(0x03020100u, 0x0c080604u, select);
    const uint32_t minus = __byte_perm(0xfdfeff00u, 0xf4f8fafcu, select);
    // The sign bit of every code fills its byte.
    uint32_t negative;
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(negative) : "r"(codes << 4));
    return (minus & negative) | (plus & ~negative);
}

__device__ __forceinline__ void mma_s8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(kMagicBits));
}

// Smallest and largest of a vector's scale bytes, blocks of zeros left out, and the bytes with those filled in.
struct Scales {
    uint32_t bytes, least, most;
};

// Bytes of four scales; bit b of `zeros`: block b holds nothing but zeros.
__device__ __forceinline__ Scales scales_of(uint32_t bytes, uint32_t zeros) {
    Scales s{bytes, 255, 0};
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
        const uint32_t byte = bytes >> 8 * b & 0xff;
        if ((zeros >> b & 1) == 0) s.least = min(s.least, byte), s.most = max(s.most, byte);
    }
    if (s.most == 0) s.least = s.most = 127;
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
        if (zeros >> b & 1) s.bytes = (s.bytes & ~(0xffu << 8 * b)) | s.most << 8 * b;
    }
    return s;
}

// Half a scale, as the doubled integers want it.
__device__ __forceinline__ float half_scale(uint32_t bytes, uint32_t b) { return __uint_as_float(((bytes >> 8 * b & 0xff) - 1) << 23); }

// Values of one key as a warp holds them, past the first cache: it may just have been stored.
__device__ __forceinline__ void read_key(float (&x)[4], const uint8_t* key, uint32_t dim, uint32_t format) {
    const uint32_t lane = threadIdx.x & 31;
    if (format != kRowFp4) {
        load_row_early(x, reinterpret_cast<const float*>(key), dim);
        return;
    }
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t byte = __ldcg(key + 16 * j + (lane & 15));
        x[j] = __fmul_rn(e2m1_to_f32(lane < 16 ? byte & 15 : byte >> 4), e8m0_to_f32(__ldcg(key + kDim / 2 + j)));
    }
}

// Score of one key by a warp, every operation as on the CPU. Heads: at most 128. query(x, h): values of a head.
template <typename Query>
__device__ float score_in_order(Query query, const float* weights, const uint8_t* key, uint32_t heads, uint32_t dim,
                                uint32_t format) {
    const uint32_t lane = threadIdx.x & 31;
    float x[4], terms[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    read_key(x, key, dim, format);
    // Several heads at a time, so that their values come together.
    constexpr uint32_t kTogether = 4;
    for (uint32_t first = 0; first < heads; first += kTogether) {
        float y[kTogether][4];
#pragma unroll
        for (uint32_t i = 0; i < kTogether; ++i) query(y[i], min(first + i, heads - 1));
#pragma unroll
        for (uint32_t i = 0; i < kTogether; ++i) {
            const uint32_t h = first + i;
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) y[i][j] = __fmul_rn(y[i][j], x[j]);
            const float s = fold_power(y[i], dim);
            const float term = h < heads ? __fmul_rn(weights[h], s < 0.0f ? 0.0f : s) : 0.0f;
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                if (h == lane + 32 * j) terms[j] = term;
            }
        }
    }
    return fold_power(terms, heads);
}

// What is known of all scales of a row's queries.
struct Limits {
    uint32_t span, least, highest, exact;  // exact: whether codes and scales are the queries
};

// A row's queries as a warp multiplies them: of every tile of 16, heads lane / 4 and lane / 4 + 8.
struct Queries {
    uint32_t x[kTiles][kBlocks][4];
    float scale[kTiles][2][kBlocks], weight[kTiles][2];

    __device__ __forceinline__ void load_scales(const float* weights, const uint32_t* bytes, uint32_t stride) {
        const uint32_t lane = threadIdx.x & 31;
#pragma unroll
        for (uint32_t m = 0; m < kTiles; ++m) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const uint32_t h = 16 * m + 8 * half + (lane >> 2);
                weight[m][half] = weights[h];
#pragma unroll
                for (uint32_t b = 0; b < kBlocks; ++b) scale[m][half][b] = half_scale(bytes[h * stride], b);
            }
        }
    }
};

// Eight keys as a warp holds them: the lane has a quarter of every block of key lane / 4, and that key's scales.
struct Keys {
    uint32_t raw[kBlocks], bytes;

    __device__ __forceinline__ void load(const uint8_t* at) {
        const uint32_t* key = reinterpret_cast<const uint32_t*>(at);
#pragma unroll
        for (uint32_t b = 0; b < kBlocks; ++b) raw[b] = __ldcg(key + 4 * b + (threadIdx.x & 3));
        bytes = __ldcg(key + kDim / 8);
    }
};

// Scores of eight keys of what their dots with heads are, `sum`. weighed(m, half, v): a dot above 0 times its head's weight; the
// others: see `score_tile`. `plain`: no order of a sum shows.
template <typename Weighed, typename Put, typename InOrder>
__device__ __forceinline__ void sum_heads(const float (&sum)[kTiles][2][2], bool plain, bool dry, Weighed weighed, Put put,
                                          InOrder in_order) {
    const uint32_t lane = threadIdx.x & 31;
    float total[2];
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
        float t[kTiles][2];
#pragma unroll
        for (uint32_t m = 0; m < kTiles; ++m) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const float v = sum[m][half][e];
                t[m][half] = weighed(m, half, v < 0.0f ? 0.0f : v);
            }
        }
        // Heads h + 32, h + 16, h + 8 stand in the lane, h + 4, h + 2, h + 1 in others.
        const float low = __fadd_rn(__fadd_rn(t[0][0], t[2][0]), __fadd_rn(t[1][0], t[3][0]));
        const float high = __fadd_rn(__fadd_rn(t[0][1], t[2][1]), __fadd_rn(t[1][1], t[3][1]));
        float v = __fadd_rn(low, high);
#pragma unroll
        for (int half = 16; half >= 4; half >>= 1) v = __fadd_rn(v, __shfl_xor_sync(kFull, v, half));
        total[e] = v;
    }
    const uint32_t slow = __ballot_sync(kFull, !plain && !dry);
    if (lane < 4 && !dry) {
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
            const uint32_t i = 2 * lane + e;
            if ((slow >> 4 * i & 1) == 0) put(i, ordinal(total[e]));
        }
    }
    if (slow != 0) {
        for (uint32_t i = 0; i < 8; ++i) {
            if ((slow >> 4 * i & 1) == 0) continue;
            const float score = in_order(i);
            if (lane == 0) put(i, ordinal(score));
        }
    }
}

// Scores of eight keys. next(): the keys have been looked at; put(i, ordinal): by one lane; in_order(i): score of the i-th by
// the warp in the CPU's order. `dry`: nothing is put.
template <typename Next, typename Put, typename InOrder>
__device__ __forceinline__ void score_tile(const Queries& q, const Keys& keys, const Limits& limits, bool dry, Next next, Put put,
                                           InOrder in_order) {
    const uint32_t lane = threadIdx.x & 31;
    uint32_t zeros = 0;
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
        const uint32_t used = __ballot_sync(kFull, (keys.raw[b] & 0x77777777u) != 0);
        zeros |= (uint32_t)((used >> (lane & 28) & 15) == 0) << b;
    }
    const Scales s = scales_of(keys.bytes, zeros);
    const bool plain = limits.exact && limits.span + s.most - s.least <= kMostSpan && limits.least + s.least >= 254 - 110 &&
                       limits.highest + s.most <= 254 + 100 && s.most != kPoison && limits.highest != kPoison;
    // Columns 2 (lane % 4) and the next of the tile.
    float key_scale[2][kBlocks], sum[kTiles][2][2];
#pragma unroll
    for (uint32_t e = 0; e < 2; ++e) {
        const uint32_t of = __shfl_sync(kFull, s.bytes, 8 * (lane & 3) + 4 * e);
#pragma unroll
        for (uint32_t b = 0; b < kBlocks; ++b) key_scale[e][b] = half_scale(of, b);
    }
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
        const uint32_t b0 = doubled(keys.raw[b] & 0x0f0f0f0fu), b1 = doubled(keys.raw[b] >> 4 & 0x0f0f0f0fu);
#pragma unroll
        for (uint32_t m = 0; m < kTiles; ++m) {
            int c[4];
            mma_s8(c, q.x[m][b], b0, b1);
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const float dot = __fmul_rn(__fsub_rn(__int_as_float(c[i]), kMagic), q.scale[m][i / 2][b]);
                float& to = sum[m][i / 2][i % 2];
                to = b == 0 ? __fmul_rn(dot, key_scale[i % 2][b]) : __fmaf_rn(dot, key_scale[i % 2][b], to);
            }
        }
    }
    next();
    const auto weighed = [&](uint32_t m, uint32_t half, float v) { return __fadd_rn(__fmul_rn(q.weight[m][half], v), 0.0f); };
    sum_heads(sum, plain, dry, weighed, put, in_order);
}

}  // namespace

// Grid: (blocks of a row, rows of this launch). Dynamic shared memory: a row's queries. `scores`: [rows of this launch, most]; `first`: the first of these rows.
// `factor`: what the projected weights are multiplied by. `straight`: whether int8 mma may be used. `late`: whether
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
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(q + i)),
                     "l"(a.index_q + (size_t)r * heads * dim + i)
                     : "memory");
    }
    const RowInfo info = info_early(view, r);
    const uint32_t visible = info.live ? a.keys.visible(info.pos) : 0;
    // Few keys are a few blocks' work: the others leave room for the next kernels. Block 0 ends after the kernel before.
    const bool idle = straight && blockIdx.x * kWarps * 8 >= visible;
    if (visible <= a.top || visible > most || idle) {
        asm volatile("cp.async.wait_all;" ::: "memory");
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
    asm volatile("cp.async.wait_all;" ::: "memory");
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

constexpr uint32_t kPickThreads = 1024, kBins = 2048;
// Blocks of a cluster, at most.
constexpr uint32_t kPickBlocks = 8;

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A word in the shared memory of another block of the cluster, at the place that `own` has in this one's.
__device__ __forceinline__ uint32_t remote(const uint32_t* own, uint32_t block) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(own), x;
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(block));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
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

__device__ __forceinline__ void few_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kFewThreads) : "memory"); }

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
        few_sync();
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
    few_sync();
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
    if (n <= a.top || n > most) return;
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

namespace {

// Words from one head's packed query to the next in shared memory: codes, then scales.
constexpr uint32_t kPackedStride = kDim / 8 + 4;
// Scores of index_choose that stand in shared memory, and those that a lane looks for together.
constexpr uint32_t kKept = 2048, kTogether = 8;
// Rows of the attention are sent for where so few times more are visible than will be chosen.
constexpr uint32_t kAheadTimes = 4;

// What index_choose is told of what others send; `Sent` of index/cuda.rs.
struct Sent {
    const uint8_t* packed;    // [kHeads, kIndexRowBytes]: the index query
    const uint64_t* weights;  // [kHeads], with the number of the choice
    uint64_t* scores;         // [most], the same
    uint32_t* number;         // of the choice before
    uint32_t *heads, *left;   // heads that are there, and blocks of latent_rows that have left what they have to
    uint32_t blocks, most;    // of latent_rows; rows that may be visible
    float factor;             // what the projected weights are multiplied by
};
static_assert(sizeof(Sent) == 64);

// A score and the number of the choice, written and read as one: who finds the number has the score.
__device__ __forceinline__ void send_score(uint64_t* to, uint32_t score, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((uint64_t)tag << 32 | score) : "memory");
}
__device__ __forceinline__ uint64_t look_for(const uint64_t* at) {
    uint64_t x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}

__device__ __forceinline__ void await(const uint32_t* count, uint32_t n) {
    while (arrived(count) < n) {}
}

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
        if (!nothing || blockIdx.x != 0) return;
        pdl_wait();
        if (thread == 0) {
            *in.heads = *in.left = 0;
            // The step's context class was too small.
            if (visible > in.most) report_fault(view, 0x69780001);
            // The next choice has another number than what was sent for this one.
            *in.number = tag;
        }
        return;
    }
    if (picker) {
        // Without scores first: its instructions are there when the scores come.
#pragma unroll 1
        for (uint32_t turn = 0; turn < 2; ++turn) pick_sent(a, in.scores, tag, turn == 0 ? 0 : visible, picks, shared.picking, &kept);
        Marks::mark(&kept, 4);
        if (thread == 0) {
            await(in.left, in.blocks);
            // Whoever had a score to send has read the number, and has found all heads.
            *in.number = tag, *in.heads = *in.left = 0;
        }
        __syncthreads();
        pdl_launch();
        pdl_wait();
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
// Nanoseconds between two looks.
constexpr uint32_t kPause = 64;

// What index_choose_many sends beside `Sent`; `Lists` of index/cuda.rs.
struct Lists {
    uint64_t* bests;  // [scorers, kBests]: scores, with the number of the choice
    uint64_t at;      // [scorers, stride]: score, row, length of the list and whether a score was NaN, and the number
    uint32_t stride, pad;
};
static_assert(sizeof(Lists) == 24);

using Sums = uint2[2][kWarps];

// Scales of a vector that span so little that its codes, doubled and each times its block's power of two above the least, are int8.
constexpr uint32_t kNarrow = 3;
static_assert((12 << kNarrow) < 128 && kDim * (12 << kNarrow) * (12 << kNarrow) < 1 << 22);

// Bytes times a power of two which they have room for.
__device__ __forceinline__ uint32_t times_power(uint32_t bytes, uint32_t power) {
    return bytes << power & __byte_perm(0xf8fcfeffu, 0, 0x1111 * power);
}

__device__ __forceinline__ void mma_s8_on(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A row's queries in shared memory. Codes: 16 bytes of a head stand eight heads apart, so that eight rows meet no bank twice.
// Scales are those of blocks, or of a narrow head, whose codes have their powers of two already, its least.
struct ManyQueries {
    float weights[kHeads], scale[kHeads];
    uint32_t bytes[kHeads];
    uint32_t span, least, highest;

    // One block of a head, by a thread.
    __device__ __forceinline__ void store(uint8_t* codes, uint32_t h, uint32_t b, const uint32_t (&raw)[4], const Scales& s) {
        const bool narrow = s.most - s.least <= kNarrow;
        const uint32_t power = narrow ? (s.bytes >> 8 * b & 0xff) - s.least : 0;
        uint4 low, high;
        low.x = times_power(doubled(raw[0] & 0x0f0f0f0fu), power), high.x = times_power(doubled(raw[0] >> 4 & 0x0f0f0f0fu), power);
        low.y = times_power(doubled(raw[1] & 0x0f0f0f0fu), power), high.y = times_power(doubled(raw[1] >> 4 & 0x0f0f0f0fu), power);
        low.z = times_power(doubled(raw[2] & 0x0f0f0f0fu), power), high.z = times_power(doubled(raw[2] >> 4 & 0x0f0f0f0fu), power);
        low.w = times_power(doubled(raw[3] & 0x0f0f0f0fu), power), high.w = times_power(doubled(raw[3] >> 4 & 0x0f0f0f0fu), power);
        uint4* head = reinterpret_cast<uint4*>(codes + h * kDim);
        head[(2 * b) ^ (h & 7)] = low, head[(2 * b + 1) ^ (h & 7)] = high;
        if (b == 0) bytes[h] = narrow ? s.least * 0x01010101u : s.bytes, scale[h] = half_scale(s.least, 0);
    }
};

// The same as a warp multiplies them: of every tile of 16, heads lane / 4 and lane / 4 + 8.
struct ManyFragments {
    uint32_t x[kTiles][kBlocks][4];
    float weight[kTiles][2];

    __device__ __forceinline__ void load(const uint8_t* codes, const ManyQueries& q) {
        const uint32_t lane = threadIdx.x & 31;
#pragma unroll
        for (uint32_t m = 0; m < kTiles; ++m) {
            const uint32_t h = 16 * m + (lane & 15);
#pragma unroll
            for (uint32_t b = 0; b < kBlocks; ++b) {
                const uint32_t at = (uint32_t)__cvta_generic_to_shared(codes + h * kDim + 16 * ((2 * b + (lane >> 4)) ^ (h & 7)));
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(x[m][b][0]), "=r"(x[m][b][1]), "=r"(x[m][b][2]), "=r"(x[m][b][3])
                             : "r"(at)
                             : "memory");
            }
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                weight[m][half] = q.weights[16 * m + 8 * half + (lane >> 2)];
            }
        }
    }
};

// Scores of eight keys, as `score_tile`. Where scales of all heads and of all eight keys are narrow, the product takes them along.
template <typename Next, typename Put, typename InOrder>
__device__ __forceinline__ void score_eight(const ManyFragments& f, const ManyQueries& q, const Keys& keys, bool dry, Next next, Put put,
                                            InOrder in_order) {
    const uint32_t lane = threadIdx.x & 31;
    uint32_t used = 0;
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) used |= (keys.raw[b] & 0x77777777u) != 0 ? 1u << b : 0;
    used |= __shfl_xor_sync(kFull, used, 1), used |= __shfl_xor_sync(kFull, used, 2);
    const Scales s = scales_of(keys.bytes, ~used & 15);
    const bool plain = q.span + s.most - s.least <= kMostSpan && q.least + s.least >= 254 - 110 && q.highest + s.most <= 254 + 100 &&
                       s.most != kPoison && q.highest != kPoison;
    float sum[kTiles][2][2];
    // Of heads lane / 4 and lane / 4 + 8 of a tile with keys 2 (lane % 4) and the next.
    if (__all_sync(kFull, q.span <= kNarrow && s.most - s.least <= kNarrow)) {
        int c[kTiles][4];
#pragma unroll
        for (uint32_t b = 0; b < kBlocks; ++b) {
            const uint32_t power = (s.bytes >> 8 * b & 0xff) - s.least;
            const uint32_t b0 = times_power(doubled(keys.raw[b] & 0x0f0f0f0fu), power);
            const uint32_t b1 = times_power(doubled(keys.raw[b] >> 4 & 0x0f0f0f0fu), power);
#pragma unroll
            for (uint32_t m = 0; m < kTiles; ++m) {
                if (b == 0) {
                    mma_s8(c[m], f.x[m][b], b0, b1);
                } else {
                    mma_s8_on(c[m], f.x[m][b], b0, b1);
                }
            }
        }
        const float own = half_scale(s.least, 0);
        const float scale[2] = {__shfl_sync(kFull, own, 8 * (lane & 3)), __shfl_sync(kFull, own, 8 * (lane & 3) + 4)};
#pragma unroll
        for (uint32_t m = 0; m < kTiles; ++m) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const float dot = __fsub_rn(__int_as_float(c[m][i]), kMagic);
                sum[m][i / 2][i % 2] = __fmul_rn(__fmul_rn(dot, q.scale[16 * m + 8 * (i / 2) + (lane >> 2)]), scale[i % 2]);
            }
        }
    } else {
        float key_scale[2][kBlocks];
#pragma unroll
        for (uint32_t e = 0; e < 2; ++e) {
            const uint32_t of = __shfl_sync(kFull, s.bytes, 8 * (lane & 3) + 4 * e);
#pragma unroll
            for (uint32_t b = 0; b < kBlocks; ++b) key_scale[e][b] = half_scale(of, b);
        }
#pragma unroll
        for (uint32_t b = 0; b < kBlocks; ++b) {
            const uint32_t b0 = doubled(keys.raw[b] & 0x0f0f0f0fu), b1 = doubled(keys.raw[b] >> 4 & 0x0f0f0f0fu);
#pragma unroll
            for (uint32_t m = 0; m < kTiles; ++m) {
                int c[4];
                mma_s8(c, f.x[m][b], b0, b1);
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) {
                    const float scale = half_scale(q.bytes[16 * m + 8 * (i / 2) + (lane >> 2)], b);
                    const float dot = __fmul_rn(__fsub_rn(__int_as_float(c[i]), kMagic), scale);
                    float& to = sum[m][i / 2][i % 2];
                    to = b == 0 ? __fmul_rn(dot, key_scale[i % 2][b]) : __fmaf_rn(dot, key_scale[i % 2][b], to);
                }
            }
        }
    }
    next();
    // But for zeros' signs as there: a sum of -0 is a score of +0 in the end.
    const auto weighed = [&](uint32_t m, uint32_t half, float v) { return __fmul_rn(f.weight[m][half], v); };
    sum_heads(sum, plain, dry, weighed, put, in_order);
}

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
            ManyQueries queries;
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
        if (blockIdx.x != 0) return;
        pdl_wait();
        if (thread == 0) {
            *in.heads = *in.left = 0;
            // The step's context class was too small.
            if (visible > in.most) report_fault(view, 0x69780001);
            // The next choice has another number than what was sent for this one.
            *in.number = tag;
        }
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
        if (thread == 0) {
            await(in.left, in.blocks);
            // Whoever had something to send has read the number, and has found all heads.
            *in.number = tag, *in.heads = *in.left = 0;
        }
        __syncthreads();
        pdl_launch();
        pdl_wait();
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
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    Keys keys;
    auto take = [&](uint32_t tile) {
        if (tile >= end) return;
        if (comes_late(tile)) {
            if (lane == 0) await(in.left, in.blocks);
            __syncwarp();
            send_for(tile, true);
            asm volatile("cp.async.wait_all;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group %0;" ::"n"(kOnTheWay - 1) : "memory");
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
    if (thread == 0) s.queries.span = 0, s.queries.least = 255, s.queries.highest = 0;
    auto key = [&](uint32_t w) { return a.keys.rows + a.keys.place(blocks, min(w, visible - 1)) * kIndexRowBytes; };
    auto query = [&](float (&x)[4], uint32_t h) { read_key(x, in.packed + h * kIndexRowBytes, kDim, kRowFp4); };
    // Twice: of whatever stands there first, so that the instructions are there when the query comes.
#pragma unroll 1
    for (uint32_t turn = 0; turn < 2; ++turn) {
        const bool dry = turn == 0;
        if (!dry) {
            if (thread == 0) {
                while (arrived(in.heads) < kHeads) __nanosleep(kPause);
            }
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
                s.queries.weights[thread] = __fmul_rn(__uint_as_float((uint32_t)got), in.factor);
            }
            const uint32_t used = __ballot_sync(kFull, ((mine[0] | mine[1] | mine[2] | mine[3]) & 0x77777777u) != 0);
            const Scales scales = scales_of(bytes, ~(used >> (lane & 28)) & 15);
            s.queries.store(s.codes, thread / kBlocks, thread % kBlocks, mine, scales);
            const uint32_t wide = __reduce_max_sync(kFull, scales.most - scales.least);
            const uint32_t low = __reduce_min_sync(kFull, scales.least), high = __reduce_max_sync(kFull, scales.most);
            if (lane == 0) atomicMax(&s.queries.span, wide), atomicMin(&s.queries.least, low), atomicMax(&s.queries.highest, high);
            __syncthreads();
            Marks::mark(&mark_at, 3);
        }
        ManyFragments fragments;
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
