// Hyper-connection sites. Exact: the bits of hc.rs, norm.rs and math::sum.
//
// One decoded row:     arc_hc_site_cluster, arc_hc_head_cluster: 16 blocks of a cluster a row, dim 4096.
//                      arc_hc_site_sent where the product before sends its outputs: values with its number beside them.
// Many rows:           arc_hc_site_mix_* or arc_hc_head_mix, then arc_hc_site_rows or arc_hc_head_rows: any dim of whole chunks.
// Any other dim:       arc_hc_site_any, arc_hc_head_any: a block a row. The plain version, and the first rung.
// What sites put off:  arc_hc_settle, where no kernel behind does it beside its own work.
#include <cstdint>

#include "../../barrier.cuh"
#include "../../pdl.cuh"
#include "../matmul/quantise.cuh"
#include "hc.cuh"

using namespace arc;
using namespace arc::hc;

namespace {

// Partial sums of a token: one a chunk for every mixing value, and the last for the statistic.
constexpr int kSums = kMixes + 1;

// What the streams of four columns are when the site begins, in registers.
__device__ __forceinline__ void take(float4 (&x)[kStreams], unsigned incoming, const float* xs, const float* y,
                                     const float* mixing, unsigned dim, unsigned column) {
    if (incoming == kEmbedding) {
        const float4 e = *reinterpret_cast<const float4*>(y + column);
#pragma unroll
        for (int k = 0; k < kStreams; ++k) x[k] = e;
        return;
    }
#pragma unroll
    for (int k = 0; k < kStreams; ++k) x[k] = *reinterpret_cast<const float4*>(xs + k * dim + column);
    if (incoming == kOutput) {
        Mixing m;
        m.load(mixing);
        expand4(x, m, *reinterpret_cast<const float4*>(y + column));
    }
}

// Lane i < COUNT gets the total of mixing value i times the statistic's factor(squares), from chunk sums
// `sums[i * stride + c]`, the squares behind the last value. Called by whole warps.
template <int COUNT, typename Factor>
__device__ __forceinline__ float raw_mix(const float* sums, int stride, int step, int chunks, Factor factor) {
    const int lane = threadIdx.x & 31, row = lane <= COUNT ? lane : 0;
    float total = 0.0f;
    for (int c = 0; c < chunks; ++c) total = __fadd_rn(total, sums[row * stride + c * step]);
    return __fmul_rn(total, factor(__shfl_sync(kFullWarp, total, COUNT)));
}

// `pre` of a site or of the head, in every lane, from lanes that hold scaled values.
__device__ __forceinline__ void pre_of(float (&pre)[kStreams], float value, float eps) {
    const float p = __fadd_rn(sigmoid(value), eps);
#pragma unroll
    for (int k = 0; k < kStreams; ++k) pre[k] = __shfl_sync(kFullWarp, p, k);
}

// Where rows are left as int8 inputs of products: four values a word, a scale and sums a block of 32. Null: nowhere.
struct Codes {
    uint32_t* q;
    float* d;
    uint32_t* sums;
};

constexpr int kClusterBlocks = 16;
constexpr int kClusterDim = kClusterBlocks / kStreams * kSumChunk;
// Warps that hold mixing rows, three each, and one for the statistic.
constexpr int kMixWarps = 8;
constexpr int kThreads = 32 * (kMixWarps + 1);
// Nanoseconds between two looks.
constexpr unsigned kPause = 64;

// A barrier that completes once, when `bytes` have come in. One thread.
__device__ __forceinline__ void complete_once(uint64_t* bar, unsigned bytes) {
    barrier_init(bar);
    barriers_made();
    expect(bar, bytes);
}

// Sends a value to the same variable of another block of the cluster, whose barrier counts its bytes.
__device__ __forceinline__ void send(float* local, uint64_t* bar, unsigned rank, float value) {
    const uint32_t to = in_block(local, rank), to_bar = in_block(bar, rank);
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_uint(value)), "r"(to_bar)
                 : "memory");
}

// Four outputs of the product before, from `column` on, as it sends them, by whole warps.
__device__ __forceinline__ float4 take_sent(uint64_t sent, unsigned column, uint32_t tag) {
    const uint64_t at = sent + 8 * fours_place(column);
    float2 low, high;
    while (true) {
        bool there = true;
        low = look_at_pairs(at, tag, there), high = look_at_pairs(at + 8 * 64, tag, there);
        if (__all_sync(kFullWarp, there)) break;
        // One output in 32 until one is there: what the product loads has to get through.
        there = __any_sync(kFullWarp, there);
        while (!there) {
            __nanosleep(kPause);
            there = threadIdx.x % 8 == 0;
            if (there) look_at_pair(at, tag, there);
            there = __any_sync(kFullWarp, there);
        }
    }
    return make_float4(low.x, low.y, high.x, high.y);
}

// One row by a cluster: block (k, q) has chunk q of stream k for the mixing values, and columns 1024 q .. of all streams
// in registers, which three others have too. Two exchanges, each waited for by who reads it: the chunk sums, and the
// squares of the norm. Sums of all blocks have come in only when all have read the streams and the old mixing values.
//
// PER_WARP: mixing rows a warp holds in registers, loaded before the wait. Site: 3 x 8; head: 1 x 4.
//
// SENT: the site does not wait for the product before but looks for its outputs, and begins when everything before that product
// has ended. The product's blocks have read what the site writes: each has sent a part of what every output is made of. There is
// no warp for the statistic alone: eight have room beside the product (follow.cu).
template <int COUNT, int PER_WARP, bool SITE, bool SENT>
__device__ __forceinline__ void by_cluster(float* out, const Codes& codes, float* streams, float* mixing_rows, const float* ys,
                                           const float* mix, const float* base, const float* scale,
                                           const float* weight, unsigned incoming, float eps, float norm_eps,
                                           float out_eps, uint64_t sent = 0, const uint32_t* number = nullptr) {
    constexpr unsigned dim = kClusterDim, n = kStreams * dim;
    __shared__ __align__(16) float chunk[kSumChunk], collapsed[kSumChunk], sums[COUNT + 1][kClusterBlocks + 1];
    __shared__ float squares[kStreams];
    __shared__ uint64_t bars[2];
    const Marks marks(kMarkSite, SENT);
    pdl_launch();
    if (threadIdx.x == 0) {
        complete_once(&bars[0], 4 * (COUNT + 1) * kClusterBlocks);
        if (SITE) complete_once(&bars[1], 4 * kStreams);
    }
    cluster_arrive_relaxed();
    const unsigned rank = cluster_rank(), k = rank / kStreams, q = rank % kStreams;
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const unsigned column = q * kSumChunk + 4 * t;
    const size_t row = SENT ? 0 : blockIdx.x / kClusterBlocks;
    float* xs = streams + row * n;
    float* mixing = mixing_rows + row * kMixes;
    float4 x[kStreams], y;
    Mixing m;
    uint32_t tag = 0;
    if (SENT) {
        // All of it is there, and comes before weights.
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(tag) : "l"(number) : "memory");
#pragma unroll
        for (int i = 0; i < kStreams; ++i) x[i] = load_far(reinterpret_cast<const float4*>(xs + i * dim + column));
        m.load<true>(mixing);
    }
    float4 w[PER_WARP][kChunkReads], norm_weight;
    const bool mixes = warp * PER_WARP < COUNT && warp < kMixWarps;
    if (mixes) {
#pragma unroll
        for (int m = 0; m < PER_WARP; ++m) {
            const float* from = mix + (size_t)(warp * PER_WARP + m) * n + rank * kSumChunk;
#pragma unroll
            for (int j = 0; j < kChunkReads; ++j) w[m][j] = load_early(reinterpret_cast<const float4*>(from) + lane + 32 * j);
        }
    }
    // The block writes the k-th quarter of its columns.
    const bool writes = t / (kSumChunk / 16) == (int)k;
    if (SITE && writes) norm_weight = __ldg(reinterpret_cast<const float4*>(weight + column));
    const float lane_scale = lane < COUNT ? __ldg(scale + (lane / kStreams < 2 ? lane / kStreams : 2)) : 0.0f;
    const float lane_base = lane < COUNT ? __ldg(base + lane) : 0.0f;
    // Addresses are translated meanwhile; what is read now may be old, and is not used.
    if (!SENT && t < kStreams) prefetch(xs + t * dim + column);
    if (!SENT && t == kStreams) prefetch(ys + row * dim + column);
    if (!SENT && t == kStreams + 1) prefetch(mixing);
    // Before a block sends to another, that one must run.
    cluster_wait();
    if (!SENT) pdl_wait();
    marks.mark(2);

    // Its own stream first: the mixing values wait for no other.
    const bool takes = incoming == kOutput && t < kSumChunk / 4;
    if (SENT) {
        y = take_sent(sent, column, tag);
        reinterpret_cast<float4*>(chunk)[t] = expand4(x, m.of(k), y);
    } else if (t < kSumChunk / 4) {
        if (incoming != kNothing) y = *reinterpret_cast<const float4*>(ys + row * dim + column);
#pragma unroll
        for (int i = 0; i < kStreams; ++i) {
            x[i] = y;
            if (incoming != kEmbedding) x[i] = *reinterpret_cast<const float4*>(xs + i * dim + column);
        }
        float4 mine = k < 2 ? (k == 0 ? x[0] : x[1]) : (k == 2 ? x[2] : x[3]);
        if (takes) {
            m.load(mixing);
            mine = expand4(x, m.of(k), y);
        }
        reinterpret_cast<float4*>(chunk)[t] = mine;
    }
    __syncthreads();
    marks.mark(3);
    if (mixes) {
        constexpr int kSummed = PER_WARP + SENT;
        float4 v[kSummed];
        float s[kSummed];
        const float4* f = reinterpret_cast<const float4*>(chunk) + lane;
#pragma unroll
        for (int m = 0; m < PER_WARP; ++m) v[m] = fold_chunk4([&](int j) { return mul4(w[m][j], f[32 * j]); });
        // One of the warps has the statistic too.
        const bool squares_too = SENT && warp == kMixWarps - 1;
        if (SENT) v[kSummed - 1] = v[0];
        if (squares_too) v[kSummed - 1] = fold_chunk4([&](int j) { return mul4(f[32 * j], f[32 * j]); });
        sum_lanes4(v, s);
        if (lane < kClusterBlocks) {
            if (squares_too) send(&sums[COUNT][rank], &bars[0], lane, s[kSummed - 1]);
#pragma unroll
            for (int m = 0; m < PER_WARP; ++m) send(&sums[warp * PER_WARP + m][rank], &bars[0], lane, s[m]);
        }
    } else if (warp == kMixWarps) {
        const float s = sum_sq_chunk4(chunk);
        if (lane < kClusterBlocks) send(&sums[COUNT][rank], &bars[0], lane, s);
    }
    if (takes) expand4(x, m, y);
    marks.mark(4);
    barrier_wait(&bars[0], 0);
    marks.mark(5);

    const float raw = raw_mix<COUNT>(&sums[0][0], kClusterBlocks + 1, 1, kClusterBlocks,
                                     [&](float squares) { return norm_factor<n>(squares, norm_eps); });
    const float value = __fadd_rn(__fmul_rn(raw, lane_scale), lane_base);
    // The rest is put off: `Pending` of cuda.rs.
    if (SITE && rank == 0 && warp == kMixWarps - SENT && lane < COUNT) mixing[lane] = value;
    if (warp == kMixWarps) return;
    float pre[kStreams];
    pre_of(pre, value, eps);
    const float4 merged = collapse4(pre, x);
    if (incoming != kNothing) *reinterpret_cast<float4*>(xs + k * dim + column) = reinterpret_cast<float4*>(chunk)[t];
    float4* to = reinterpret_cast<float4*>(out + row * dim + column);
    if (!SITE) {
        if (writes) *to = merged;
        return;
    }
    reinterpret_cast<float4*>(collapsed)[t] = merged;
    sync_threads<32 * kMixWarps>();
    if (warp == 0) {
        const float s = sum_sq_chunk4(collapsed);
        if (lane < kStreams) send(&squares[q], &bars[1], k * kStreams + lane, s);
    }
    marks.mark(6);
    barrier_wait(&bars[1], 0);
    marks.mark(7);
    if (writes) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kStreams; ++i) total = __fadd_rn(total, squares[i]);
        const float factor = norm_factor<dim>(total, out_eps);
        const float4 normed = mul4(mul4(merged, make_float4(factor, factor, factor, factor)), norm_weight);
        *to = normed;
        // Products that follow read it as int8.
        if (codes.q != nullptr) {
            const float v[1][4] = {{normed.x, normed.y, normed.z, normed.w}};
            Quantised left[1];
            quantise(v, left);
            const size_t at = (row * dim + column) / 4;
            codes.q[at] = left[0].q;
            if (lane % 8 == 0) codes.d[at / 8] = left[0].d, codes.sums[at / 8] = left[0].sums;
        }
    }
    // Its end says that the product has ended too.
    if (SENT) pdl_wait();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    arc_hc_site_cluster(float* h, uint32_t* q, float* d, uint32_t* sums, float* streams, float* mixing, const float* y,
                        const float* mix, const float* base, const float* scale, const float* weight, unsigned incoming,
                        float eps, float norm_eps, float out_eps) {
    by_cluster<kMixes, 3, true, false>(h, Codes{q, d, sums}, streams, mixing, y, mix, base, scale, weight, incoming, eps,
                                norm_eps, out_eps);
}

// `sent`: outputs of the product before, and `number` their number.
extern "C" __global__ void __maxnreg__(168)
    arc_hc_site_sent(float* h, uint32_t* q, float* d, uint32_t* sums, float* streams, float* mixing, const float* mix,
                     const float* base, const float* scale, const float* weight, float eps, float norm_eps, float out_eps,
                     uint64_t sent, const uint32_t* number) {
    by_cluster<kMixes, 3, true, true>(h, Codes{q, d, sums}, streams, mixing, nullptr, mix, base, scale, weight, kOutput, eps,
                                      norm_eps, out_eps, sent, number);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    arc_hc_head_cluster(float* out, float* streams, float* mixing, const float* y, const float* mix, const float* base,
                        const float* scale, float eps, float norm_eps) {
    by_cluster<kStreams, 1, false, false>(out, Codes{}, streams, mixing, y, mix, base, scale, nullptr, kOutput, eps, norm_eps, 0.0f);
}

// ---- what a site put off ----

// Mixing values of rows whose site left the scaled ones. A warp a row.
extern "C" __global__ void __launch_bounds__(32) arc_hc_settle(float* mixing, unsigned iterations, float eps) {
    pdl_launch();
    pdl_wait();
    settle(mixing + blockIdx.x * kMixes, iterations, eps);
}

// ---- many rows ----

namespace {

// Streams of ROWS tokens over 1,024 columns, and their chunk sums: partial[row][chunk][COUNT + 1]. Block (q, row tile);
// the columns are this block's alone, so the streams change in place. The rows of `mix` are read once for the tile.
template <int COUNT, int PER_WARP, int ROWS>
__device__ __forceinline__ void mix_rows(float* partial, float* streams, const float* mixing, const float* ys,
                                         const float* mix, unsigned dim, unsigned incoming, unsigned rows) {
    extern __shared__ __align__(16) float fs[];  // [ROWS][kStreams][kSumChunk]
    pdl_launch();
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const unsigned q = blockIdx.x, first = blockIdx.y * ROWS, n = kStreams * dim, per_stream = dim / kSumChunk;
    const unsigned column = q * kSumChunk + 4 * t, chunks = n / kSumChunk;
    const unsigned count = min((unsigned)ROWS, rows - first);
    pdl_wait();
    for (unsigned r = 0; r < count; ++r) {
        float* xs = streams + (size_t)(first + r) * n;
        float4 x[kStreams];
        take(x, incoming, xs, ys + (size_t)(first + r) * dim, mixing + (size_t)(first + r) * kMixes, dim, column);
#pragma unroll
        for (int k = 0; k < kStreams; ++k) {
            reinterpret_cast<float4*>(fs + (r * kStreams + k) * kSumChunk)[t] = x[k];
            if (incoming != kNothing) *reinterpret_cast<float4*>(xs + k * dim + column) = x[k];
        }
    }
    __syncthreads();
    for (int k = 0; k < kStreams; ++k) {
        const unsigned c = k * per_stream + q;
        if (warp * PER_WARP < COUNT) {
            float4 w[PER_WARP][kChunkReads];
#pragma unroll
            for (int m = 0; m < PER_WARP; ++m) {
                const float* from = mix + (size_t)(warp * PER_WARP + m) * n + c * kSumChunk;
#pragma unroll
                for (int j = 0; j < kChunkReads; ++j)
                    w[m][j] = __ldg(reinterpret_cast<const float4*>(from) + lane + 32 * j);
            }
            for (unsigned r = 0; r < count; ++r) {
                const float4* f = reinterpret_cast<const float4*>(fs + (r * kStreams + k) * kSumChunk) + lane;
                float4 v[PER_WARP];
                float s[PER_WARP];
#pragma unroll
                for (int m = 0; m < PER_WARP; ++m) v[m] = fold_chunk4([&](int j) { return mul4(w[m][j], f[32 * j]); });
                sum_lanes4(v, s);
                float* to = partial + ((size_t)(first + r) * chunks + c) * kSums + warp * PER_WARP;
                if (lane == 0) {
#pragma unroll
                    for (int m = 0; m < PER_WARP; ++m) to[m] = s[m];
                }
            }
        }
        for (unsigned r = warp; r < count; r += kMixWarps) {
            const float s = sum_sq_chunk4(fs + (r * kStreams + k) * kSumChunk);
            if (lane == 0) partial[((size_t)(first + r) * chunks + c) * kSums + COUNT] = s;
        }
    }
}

// The rest of a token, by one block: `PER` runs of 1,024 columns.
template <int COUNT, bool SITE>
__device__ __forceinline__ void finish_row(float* out, const float* streams, float* mixing, const float* partial,
                                           const float* base, const float* scale, const float* weight, unsigned dim,
                                           unsigned iterations, float eps, float norm_eps, float out_eps) {
    extern __shared__ __align__(16) float ys[];  // [dim]
    __shared__ float squares[32];
    pdl_launch();
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const unsigned n = kStreams * dim, chunks = n / kSumChunk;
    const size_t row = blockIdx.x;
    const float lane_scale = lane < COUNT ? __ldg(scale + (lane / kStreams < 2 ? lane / kStreams : 2)) : 0.0f;
    const float lane_base = lane < COUNT ? __ldg(base + lane) : 0.0f;
    pdl_wait();
    const float raw = raw_mix<COUNT>(partial + row * chunks * kSums, 1, kSums, chunks,
                                     [&](float squares) { return norm_factor(squares, (float)n, norm_eps); });
    const float value = __fadd_rn(__fmul_rn(raw, lane_scale), lane_base);
    if (SITE && warp == kMixWarps) {
        write_mixing(mixing + row * kMixes, value, iterations, eps);
        return;
    }
    float pre[kStreams];
    pre_of(pre, value, eps);
    for (unsigned column = 4 * t; column < dim; column += kSumChunk) {
        float4 x[kStreams];
#pragma unroll
        for (int k = 0; k < kStreams; ++k)
            x[k] = *reinterpret_cast<const float4*>(streams + row * n + k * dim + column);
        const float4 y = collapse4(pre, x);
        if (SITE) *reinterpret_cast<float4*>(ys + column) = y;
        else *reinterpret_cast<float4*>(out + row * dim + column) = y;
    }
    if (!SITE) return;
    sync_threads<32 * kMixWarps>();
    for (unsigned c = warp; c < dim / kSumChunk; c += kMixWarps) {
        const float s = sum_sq_chunk4(ys + c * kSumChunk);
        if (lane == 0) squares[c] = s;
    }
    sync_threads<32 * kMixWarps>();
    float total = 0.0f;
    for (unsigned c = 0; c < dim / kSumChunk; ++c) total = __fadd_rn(total, squares[c]);
    const float factor = norm_factor(total, (float)dim, out_eps);
    const float4 factors = make_float4(factor, factor, factor, factor);
    for (unsigned column = 4 * t; column < dim; column += kSumChunk) {
        const float4 y = *reinterpret_cast<const float4*>(ys + column);
        const float4 w = __ldg(reinterpret_cast<const float4*>(weight + column));
        *reinterpret_cast<float4*>(out + row * dim + column) = mul4(mul4(y, factors), w);
    }
}

}  // namespace

#define ARC_HC_MIX_ROWS(ROWS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(32 * kMixWarps, 1) arc_hc_site_mix_##ROWS(                           \
        float* partial, float* streams, const float* mixing, const float* y, const float* mix, unsigned dim,           \
        unsigned incoming, unsigned rows) {                                                                           \
        mix_rows<kMixes, 3, ROWS>(partial, streams, mixing, y, mix, dim, incoming, rows);                             \
    }
ARC_HC_MIX_ROWS(1)
ARC_HC_MIX_ROWS(2)
ARC_HC_MIX_ROWS(4)
ARC_HC_MIX_ROWS(8)

extern "C" __global__ void __launch_bounds__(32 * kMixWarps, 1)
    arc_hc_head_mix(float* partial, float* streams, const float* mixing, const float* y, const float* mix, unsigned dim,
                    unsigned rows) {
    mix_rows<kStreams, 1, 4>(partial, streams, mixing, y, mix, dim, kOutput, rows);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    arc_hc_site_rows(float* h, const float* streams, float* mixing, const float* partial, const float* base,
                     const float* scale, const float* weight, unsigned dim, unsigned iterations, float eps,
                     float norm_eps, float out_eps) {
    finish_row<kMixes, true>(h, streams, mixing, partial, base, scale, weight, dim, iterations, eps, norm_eps, out_eps);
}

extern "C" __global__ void __launch_bounds__(32 * kMixWarps)
    arc_hc_head_rows(float* out, const float* streams, const float* partial, const float* base, const float* scale,
                     unsigned dim, float eps, float norm_eps) {
    finish_row<kStreams, false>(out, streams, nullptr, partial, base, scale, nullptr, dim, 1, eps, norm_eps, 0.0f);
}

// ---- any dim ----

namespace {

// A block a row, values one by one, sums by warps.
template <int COUNT, bool SITE>
__device__ __forceinline__ void any_row(float* out, float* streams, float* mixing_rows, const float* ys,
                                        const float* mix, const float* base, const float* scale, const float* weight,
                                        unsigned dim, unsigned incoming, unsigned iterations, float eps, float norm_eps,
                                        float out_eps) {
    extern __shared__ float f[];  // [kStreams * dim]
    __shared__ float totals[COUNT + 1];
    pdl_launch();
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const unsigned n = kStreams * dim;
    const size_t row = blockIdx.x;
    pdl_wait();
    float *xs = streams + row * n, *mixing = SITE || incoming == kOutput ? mixing_rows + row * kMixes : nullptr;
    const float* y = ys + row * dim;
    Mixing m;
    if (incoming == kOutput) m.load(mixing);
    for (unsigned i = t; i < dim; i += blockDim.x) {
        float x[kStreams];
#pragma unroll
        for (int k = 0; k < kStreams; ++k) x[k] = incoming == kEmbedding ? y[i] : xs[k * dim + i];
#pragma unroll
        for (int k = 0; k < kStreams; ++k) {
            const float to = incoming == kOutput ? expand(m.of(k), y[i], x[0], x[1], x[2], x[3]) : x[k];
            f[k * dim + i] = to;
            if (incoming != kNothing) xs[k * dim + i] = to;
        }
    }
    __syncthreads();
    for (int i = warp; i <= COUNT; i += blockDim.x / 32) {
        const float* w = mix + (size_t)i * n;
        const float s = i < COUNT ? sum_warp(n, [&](int c) { return __fmul_rn(w[c], f[c]); })
                                  : sum_warp(n, [&](int c) { return __fmul_rn(f[c], f[c]); });
        if (lane == 0) totals[i] = s;
    }
    __syncthreads();
    const float raw = raw_mix<COUNT>(totals, 1, 0, 1,
                                     [&](float squares) { return norm_factor(squares, (float)n, norm_eps); });
    const float value = lane < COUNT ? scaled(raw, lane, base, scale) : 0.0f;
    if (SITE && warp == 0) write_mixing(mixing, value, iterations, eps);
    float pre[kStreams];
    pre_of(pre, value, eps);
    for (unsigned i = t; i < dim; i += blockDim.x) {
        const float v = collapse(pre, f[i], f[dim + i], f[2 * dim + i], f[3 * dim + i]);
        if (SITE) f[i] = v;
        else out[row * dim + i] = v;
    }
    if (!SITE) return;
    __syncthreads();
    const float factor = norm_factor(sum_warp(dim, [&](int c) { return __fmul_rn(f[c], f[c]); }), (float)dim, out_eps);
    for (unsigned i = t; i < dim; i += blockDim.x) out[row * dim + i] = __fmul_rn(__fmul_rn(f[i], factor), weight[i]);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    arc_hc_site_any(float* h, float* streams, float* mixing, const float* y, const float* mix, const float* base,
                    const float* scale, const float* weight, unsigned dim, unsigned incoming, unsigned iterations,
                    float eps, float norm_eps, float out_eps) {
    any_row<kMixes, true>(h, streams, mixing, y, mix, base, scale, weight, dim, incoming, iterations, eps, norm_eps,
                          out_eps);
}

extern "C" __global__ void __launch_bounds__(256)
    arc_hc_head_any(float* out, float* streams, float* mixing, const float* y, const float* mix, const float* base,
                    const float* scale, unsigned dim, float eps, float norm_eps) {
    any_row<kStreams, false>(out, streams, mixing, y, mix, base, scale, nullptr, dim, kOutput, 1, eps, norm_eps, 0.0f);
}
