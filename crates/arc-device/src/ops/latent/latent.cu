// DeepSeek-V4's attention: what stands between the products.
//
// latent_q_kv    queries, the step's rows, index queries, a warp each; and per compressor a block that pools the row which
//                the token completes. Tokens of short runs enter their rings here, since nothing that this step still reads
//                stands there. Exact.
// latent_rings   the tokens of longer runs, after the attention that reads what they overwrite. Exact.
// latent_attend  one block a split of 80 rows of a query's own list, for 16 heads: scores and sums by BF16 mma with f32
//                sums, queries and weights cut into two BF16 terms, or three where rows are f32; rows of the format Fp8
//                are BF16 numbers as they are. Splits are merged ascending, by the blocks of a cluster, each a share of the values.
//                Invariant; bounded by the terms (2^-17 of a score and of a weight in the format Fp8).
#include "ops/latent/latent.cuh"
#include "pdl.cuh"

namespace arc {

namespace {

constexpr uint32_t kFull = 0xffffffffu;

// The block of a compressor: pools, norms, rotates and stores, where the row's token completes one.
__device__ void compress(const PoolArgs& c, uint32_t format, const LatentArgs& a, uint32_t r, const RowInfo& info,
                         const StepView& view, float* row) {
    const bool completes = (info.pos + 1) % c.ratio == 0;
    if (completes) {
        // The last warp finishes the row; what it needs for that comes while the row is pooled.
        const bool finishes = threadIdx.x >= blockDim.x - 32;
        const uint32_t w = info.pos / c.ratio, lane = threadIdx.x & 31;
        float norm[kLaneValues];
        Angles angles;
        uint8_t* to = nullptr;
        if (finishes) {
            load_row(norm, c.norm, c.dim);
            angles.load(a.rope + (size_t)w * c.ratio * kRopeDim, c.dim);
            to = c.rows + c.place(view.blocks + (size_t)info.slot * view.max_blocks, w) * c.row_bytes;
        }
        pool_row(row, c, a.pool, a.pool_dim, r, info);
        __syncthreads();
        if (finishes) {
            float x[kLaneValues];
            load_row(x, row, c.dim);
            const float factor = rms_factor(x, c.dim, a.eps);
#pragma unroll
            for (uint32_t j = 0; j < kLaneValues; ++j) {
                if (lane + 32 * j < c.dim) x[j] = __fmul_rn(__fmul_rn(x[j], factor), norm[j]);
            }
            rope_row(x, c.dim, angles);
            keep_row(x, c.dim, format, to);
            return;
        }
    }
    if (c.short_run(info)) keep_token(c, a.pool, a.pool_dim, r, info, completes ? blockDim.x - 32 : blockDim.x);
}

}  // namespace

// Grid: (2 + a block for eight of the row, the heads and the index heads, rows).
extern "C" __global__ void __launch_bounds__(256) latent_q_kv(LatentArgs a, StepView view) {
    __shared__ __align__(16) float row[kMaxLatent];
    pdl_launch();
    pdl_wait();
    const uint32_t r = blockIdx.y, lane = threadIdx.x & 31;
    const RowInfo info = view.infos[r];
    if (blockIdx.x < 2) {
        const PoolArgs& c = blockIdx.x == 0 ? a.rows : a.keys;
        if (info.live && c.ratio != 0) {
            compress(c, blockIdx.x == 0 ? a.row_format : a.key_format, a, r, info, view, row);
        }
        return;
    }
    // The row first: it has most to do.
    const uint32_t item = (blockIdx.x - 2) * 8 + (threadIdx.x >> 5);
    if (item > a.heads + a.index_heads) return;
    const float* table = a.rope + (size_t)info.pos * kRopeDim;
    Angles angles;
    if (item == 0) {
        float* kv = a.kv + (size_t)r * a.dim;
        float x[kLaneValues];
        if (!info.live) {
#pragma unroll
            for (uint32_t j = 0; j < kLaneValues; ++j) x[j] = 0.0f;
            store_row(kv, x, a.dim);
            return;
        }
        float norm[kLaneValues];
        load_row(x, a.low + (size_t)r * (a.q_rank + a.dim) + a.q_rank, a.dim);
        load_row(norm, a.kv_norm, a.dim);
        angles.load(table, a.dim);
        const float factor = rms_factor(x, a.dim, a.eps);
#pragma unroll
        for (uint32_t j = 0; j < kLaneValues; ++j) {
            if (lane + 32 * j < a.dim) x[j] = __fmul_rn(__fmul_rn(x[j], factor), norm[j]);
        }
        rope_row(x, a.dim, angles);
        // The ring takes the row as storing left it, which may have a smaller scale of its own.
        keep_row(x, a.dim, a.row_format, nullptr);
        store_row(kv, x, a.dim);
        if (a.short_run(info)) keep_row(x, a.dim, a.row_format, a.in_window(info.slot, info.pos));
    } else if (!info.live) {
        return;
    } else if (item <= a.heads) {
        float* q = a.q + ((size_t)r * a.heads + item - 1) * a.dim;
        float x[kLaneValues];
        load_row(x, q, a.dim);
        angles.load(table, a.dim);
        const float factor = rms_factor(x, a.dim, a.eps);
#pragma unroll
        for (uint32_t j = 0; j < kLaneValues; ++j) x[j] = __fmul_rn(x[j], factor);
        rope_row(x, a.dim, angles);
        store_row(q, x, a.dim);
    } else {
        float* q = a.index_q + ((size_t)r * a.index_heads + item - 1 - a.heads) * a.index_dim;
        float x[4];
        load_row(x, q, a.index_dim);
        angles.load(table, a.index_dim);
        rope_row(x, a.index_dim, angles);
        keep_row(x, a.index_dim, a.key_format, nullptr);
        store_row(q, x, a.index_dim);
    }
}

// Grid: (window, compressor of rows, of keys; rows).
extern "C" __global__ void __launch_bounds__(128) latent_rings(LatentArgs a, StepView view) {
    pdl_launch();
    pdl_wait();
    const uint32_t r = blockIdx.y;
    const RowInfo info = view.infos[r];
    if (!info.live) return;
    // A later row of the step would take the same place.
    if (blockIdx.x == 0) {
        if (info.ahead < a.ring && !a.short_run(info) && threadIdx.x < 32) {
            float x[kLaneValues];
            load_row(x, a.kv + (size_t)r * a.dim, a.dim);
            keep_row(x, a.dim, a.row_format, a.in_window(info.slot, info.pos));
        }
        return;
    }
    const PoolArgs& c = blockIdx.x == 1 ? a.rows : a.keys;
    if (c.ratio != 0 && info.ahead < c.ring_len && !c.short_run(info)) keep_token(c, a.pool, a.pool_dim, r, info, blockDim.x);
}

namespace {

// Heads of a block, rows of a split.
constexpr uint32_t kHeads = 16, kRows = 80, kThreads = 256, kWarps = 8;
// Distances between heads of partial scores (f32) and of weights (BF16).
constexpr uint32_t kScoreStride = 88, kWeightStride = 88;

__device__ __forceinline__ uint32_t shared_at(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

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

__device__ __forceinline__ uint32_t bf16_product(uint32_t x, uint32_t y) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    return r;
}

// Four E4M3 codes times the power of two of a scale byte, as BF16, exact. A code moved to where BF16 has exponent and
// mantissa is a number 2^120 too small, subnormals included.
__device__ __forceinline__ uint2 decode_four(uint32_t codes, uint32_t factor) {
    auto place = [](uint32_t x) { return (x >> 4 & 0x07f007f0u) | (x & 0x80008000u); };
    return make_uint2(bf16_product(place(__byte_perm(codes, 0, 0x1404)), factor),
                      bf16_product(place(__byte_perm(codes, 0, 0x3424)), factor));
}

// 2^120 times the scale as a pair of BF16, NaN for a poisoned block; `rest` is what the number cannot hold, or 1.
__device__ __forceinline__ uint32_t decode_factor(uint32_t scale, uint32_t& rest) {
    const uint32_t exponent = scale + 120, first = min(exponent, 254u);
    rest = (127 + exponent - first) << 7;
    rest |= rest << 16;
    return scale == kPoison ? 0x7fc07fc0u : first << 7 | first << 23;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Eight bytes from global to shared memory; complete after copies_landed().
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_at(shared)), "l"(global) : "memory");
}

__device__ __forceinline__ void copies_landed() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Values in the shared memory of another block of the cluster, at the place that `own` has in this one's.
__device__ __forceinline__ float remote(const float* own, uint32_t block) {
    uint32_t at = shared_at(own);
    float x;
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(block));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}

__device__ __forceinline__ float4 remote4(const float* own, uint32_t block) {
    uint32_t at = shared_at(own);
    float4 x;
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at) : "memory");
    return x;
}

// A query's own list: recent rows, then compressed ones.
struct List {
    uint32_t recent, n, first;
    const uint32_t* chosen;  // null where every visible compressed row is read
};

// Where the i-th row stands; `stored`: in the layer's format, otherwise f32 in the step's workspace.
__device__ __forceinline__ const uint8_t* find_row(const LatentArgs& a, const List& list, const uint32_t* blocks, uint32_t r,
                                                   const RowInfo& info, uint32_t i, bool& stored) {
    stored = true;
    if (i < list.recent) {
        const uint32_t p = list.first + i;
        // Short runs are in the ring already.
        if (info.pos - p > info.back || a.short_run(info)) return a.in_window(info.slot, p);
        stored = false;
        return reinterpret_cast<const uint8_t*>(a.kv + (size_t)(r - (info.pos - p)) * a.dim);
    }
    const uint32_t w = list.chosen != nullptr ? list.chosen[i - list.recent] : i - list.recent;
    return a.rows.rows + a.rows.place(blocks, w) * a.row_bytes;
}

// A running softmax takes a part in: the factors of what stood before and of the part. One of them is 1.
__device__ __forceinline__ void join(float& m, float part_m, float& keep, float& add) {
    const bool higher = part_m > m;
    keep = higher ? exp(__fsub_rn(m, part_m)) : 1.0f;
    add = higher ? 1.0f : exp(__fsub_rn(part_m, m));
    m = higher ? part_m : m;
}

__device__ __forceinline__ float joined(float own, float keep, float part, float add) {
    return __fadd_rn(__fmul_rn(own, keep), __fmul_rn(part, add));
}

// One pair turned by its angle, every product rounded.
__device__ __forceinline__ void turn(float& x, float& y, float cos, float sin) {
    const float a = x, b = y;
    x = __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
    y = __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin));
}

// What a running softmax is divided by and multiplied with at its end.
__device__ __forceinline__ void finish(float m, float l, float sink, float& ours, float& total) {
    const float most = sink > m ? sink : m;
    ours = exp(__fsub_rn(m, most));
    total = __fadd_rn(__fmul_rn(l, ours), exp(__fsub_rn(sink, most)));
}

// PLANES: BF16 terms of a row's value.
template <uint32_t PLANES>
__device__ void attend(const LatentArgs& a, const StepView& view) {
    // BF16 terms of queries and weights.
    constexpr uint32_t kQueryTerms = PLANES == 1 ? 2 : 3, kWeightTerms = kQueryTerms;
    extern __shared__ __align__(16) uint8_t dynamic[];
    __shared__ float part_m[kHeads], part_l[kHeads], total_m[kHeads], total_l[kHeads], keep_of[kHeads], add_of[kHeads];
    __shared__ float2 gathered[kHeads][8];
    pdl_launch();
    pdl_wait();
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const uint32_t r = blockIdx.z, first_head = blockIdx.y * kHeads, heads = min(kHeads, a.heads - first_head);
    const uint32_t dim = a.dim, stride = dim + 8, quads = dim / 4;
    // Queries, all on their way before anything is known of the row.
    constexpr uint32_t kMost = kHeads * kMaxLatent / 4 / kThreads;
    float4 query[kMost];
#pragma unroll
    for (uint32_t j = 0; j < kMost; ++j) {
        const uint32_t i = thread + j * kThreads, h = i / quads, e = i % quads * 4;
        query[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (h < heads) query[j] = *reinterpret_cast<const float4*>(a.q + ((size_t)r * a.heads + first_head + h) * dim + e);
    }
    const RowInfo info = view.infos[r];
    float* out = a.out + ((size_t)r * a.heads + first_head) * dim;
    float* turned = a.turned + ((size_t)r * a.heads + first_head) * dim;
    // Stores values e and e + 1 of a head, as they are and with the rotation undone.
    auto put = [&](uint32_t h, uint32_t e, float x, float y) {
        *reinterpret_cast<float2*>(out + h * dim + e) = make_float2(x, y);
        if (e >= dim - kRopeDim && a.mutant != 3) {
            const float2 cs = *reinterpret_cast<const float2*>(a.rope + (size_t)info.pos * kRopeDim + e - (dim - kRopeDim));
            turn(x, y, cs.x, -cs.y);
        }
        *reinterpret_cast<float2*>(turned + h * dim + e) = make_float2(x, y);
    };
    const uint32_t visible = a.rows.ratio == 0 || !info.live ? 0 : a.rows.visible(info.pos);
    List list;
    list.first = a.first_visible(info.pos);
    list.recent = info.pos + 1 - list.first;
    list.chosen = a.top != 0 && visible > a.top ? a.picks + (size_t)r * a.top : nullptr;
    list.n = list.recent + (a.top != 0 ? min(visible, a.top) : visible);
    const bool faulty = info.live && list.chosen != nullptr && list.chosen[0] == 0xffffffffu;
    if (!info.live || faulty) {
        const float fill = faulty ? ARC_NAN : 0.0f;
        for (uint32_t i = blockIdx.x * kThreads + thread; i < heads * dim; i += gridDim.x * kThreads) {
            out[i] = turned[i] = fill;
        }
        return;
    }
    // A deliberately wrong variant for tests: as many splits as the step has rows.
    const uint32_t split_rows = a.mutant == 1 ? max(16u, kRows / a.n_rows / 16 * 16) : kRows;
    const uint32_t splits = (list.n + split_rows - 1) / split_rows;
    const bool single = gridDim.x == 1;
    if (!single && splits > a.most_splits) {
        // The step's context class was too small.
        if (thread == 0) report_fault(view, 0x6c610001);
        return;
    }
    const uint32_t* blocks = view.blocks + (size_t)info.slot * view.max_blocks;
    uint16_t* q = reinterpret_cast<uint16_t*>(dynamic);          // [kQueryTerms][kHeads][stride]
    uint16_t* rows = q + kQueryTerms * kHeads * stride;          // [kRows][stride]
    float* scores = reinterpret_cast<float*>(rows + kRows * stride);                      // [kWarps][kHeads][kScoreStride]
    uint16_t* weights = reinterpret_cast<uint16_t*>(scores + kWarps * kHeads * kScoreStride);  // [terms][kHeads][kWeightStride]

    // Brings a split's rows. Each warp takes ten, and needs no other for them. First they are found, and those that are
    // stored as Fp8 are sent for as they are, to where the scores will be: eight bytes at a time, all at once.
    constexpr uint32_t kOwn = kRows / kWarps;
    uint8_t* raw = reinterpret_cast<uint8_t*>(scores) + warp * kOwn * a.row_bytes;
    const uint8_t* from = nullptr;
    uint32_t packed = 0;
    auto of = [&](uint32_t i) {
        return reinterpret_cast<const uint8_t*>(__shfl_sync(kFull, (unsigned long long)from, i));
    };
    auto send = [&](uint32_t split) {
        const uint32_t base = split * split_rows, here = min(split_rows, list.n - base), own = warp * kOwn + lane;
        bool stored = false;
        from = nullptr;
        if (lane < kOwn && own < here) from = find_row(a, list, blocks, r, info, base + own, stored);
        if constexpr (PLANES == 1) {
            packed = __ballot_sync(kFull, stored);
            const uint32_t row_words = a.row_bytes / 8;
#pragma unroll
            for (uint32_t i = 0; i < kOwn; ++i) {
                const uint8_t* row = of(i);
#pragma unroll
                for (uint32_t j = 0; j < 3; ++j) {
                    const uint32_t word = lane + 32 * j;
                    if ((packed >> i & 1) && word < row_words) copy_async(raw + i * a.row_bytes + 8 * word, row + 8 * word);
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
            // Five rows at a time: all words are read before the first is stored.
            constexpr uint32_t kTogether = 5;
#pragma unroll 1
            for (uint32_t first = 0; first < kOwn; first += kTogether) {
                uint2 x[kTogether][3];
                uint32_t scale[kTogether][2];
#pragma unroll
                for (uint32_t i = 0; i < kTogether; ++i) {
                    const uint8_t* row = raw + (first + i) * a.row_bytes;
#pragma unroll
                    for (uint32_t j = 0; j < 3; ++j) {
                        const uint32_t word = min(lane + 32 * j, words - 1);
                        x[i][j] = *reinterpret_cast<const uint2*>(row + 8 * word);
                        if (j < 2) scale[i][j] = row[nope + 2 * kRopeDim + min(word, nope / 8 - 1) / 8];
                    }
                }
#pragma unroll
                for (uint32_t i = 0; i < kTogether; ++i) {
                    if ((packed >> (first + i) & 1) == 0) continue;
                    uint16_t* row = to + (first + i) * stride;
#pragma unroll
                    for (uint32_t j = 0; j < 3; ++j) {
                        const uint32_t word = lane + 32 * j;
                        // 512 values have 56 words of codes: the third is past them.
                        if (j < 2 && word < nope / 8) {
                            uint32_t rest;
                            const uint32_t factor = decode_factor(scale[i][j % 2], rest);
                            uint2 low = decode_four(x[i][j].x, factor), high = decode_four(x[i][j].y, factor);
                            if (rest != 0x3f803f80u) {
                                low = make_uint2(bf16_product(low.x, rest), bf16_product(low.y, rest));
                                high = make_uint2(bf16_product(high.x, rest), bf16_product(high.y, rest));
                            }
                            *reinterpret_cast<uint4*>(row + 8 * word) = make_uint4(low.x, low.y, high.x, high.y);
                        } else if (word < words) {
                            *reinterpret_cast<uint2*>(row + nope + 4 * (word - nope / 8)) = x[i][j];
                        }
                    }
                }
            }
        }
        // Rows in f32, two at a time.
        for (uint32_t i = 0; i < kOwn; i += 2) {
            if ((packed >> i & 3) == 3) continue;
            float4 x[2][4];
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const float4* row = reinterpret_cast<const float4*>(of(i + half));
#pragma unroll
                for (uint32_t j = 0; j < 4; ++j) {
                    const uint32_t e = lane + 32 * j;
                    const bool there = row != nullptr && 4 * e < dim && (packed >> (i + half) & 1) == 0;
                    x[half][j] = there ? row[e] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
            }
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                if (packed >> (i + half) & 1) continue;
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

    // Where no block has more than one split, parts stay in shared memory.
    const bool local = !single && splits <= min(gridDim.x, 8u);
    const uint32_t part_stride = dim + 4;
    float* own_part = reinterpret_cast<float*>(rows);  // [kHeads][part_stride]
    if (thread < kHeads) total_m[thread] = -ARC_INF, total_l[thread] = 0.0f;
    // Queries, cut into terms.
    auto cut_queries = [&]() {
#pragma unroll
        for (uint32_t j = 0; j < kMost; ++j) {
            const uint32_t i = thread + j * kThreads, h = i / quads, e = i % quads * 4;
            if (h < kHeads) {
#pragma unroll
                for (uint32_t t = 0; t < kQueryTerms; ++t) {
                    const uint32_t low = cut_pair(query[j].x, query[j].y), high = cut_pair(query[j].z, query[j].w);
                    *reinterpret_cast<uint2*>(q + (t * kHeads + h) * stride + e) = make_uint2(low, high);
                }
            }
        }
    };
    // Pairs of eight values of a row that the warp sums.
    const uint32_t pairs = dim / 16, per_warp = (pairs + kWarps - 1) / kWarps, first_pair = warp * per_warp;
    float total[4][2][4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) total[i][j / 4][j % 4] = 0.0f;
    }
    for (uint32_t split = blockIdx.x; split < splits; split += gridDim.x) {
        const uint32_t here = min(split_rows, list.n - split * split_rows);
        send(split);
        if (split == blockIdx.x) cut_queries();
        // Scores: the warp takes a share of the values, for all rows.
        float c[kRows / 8][4];
#pragma unroll
        for (uint32_t i = 0; i < kRows / 8; ++i) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
        for (uint32_t plane = 0; plane < PLANES; ++plane) {
            bring(plane);
            __syncthreads();
            for (uint32_t step = first_pair; step < min(first_pair + per_warp, pairs); ++step) {
                uint32_t x[kQueryTerms][4];
#pragma unroll
                for (uint32_t t = 0; t < kQueryTerms; ++t) {
                    load_tiles(x[t], shared_at(q + (t * kHeads + (lane & 15)) * stride + step * 16 + (lane >> 4) * 8));
                }
#pragma unroll
                for (uint32_t n = 0; n < kRows / 16; ++n) {
                    uint32_t y[4];
                    load_tiles(y, shared_at(rows + (n * 16 + (lane >> 4) * 8 + (lane & 7)) * stride + step * 16 +
                                            (lane >> 3 & 1) * 8));
#pragma unroll
                    for (uint32_t t = 0; t < kQueryTerms; ++t) {
                        mma(c[2 * n], x[t], y[0], y[1]);
                        mma(c[2 * n + 1], x[t], y[2], y[3]);
                    }
                }
            }
            if (PLANES > 1 && plane + 1 < PLANES) __syncthreads();
        }
        float* own = scores + warp * kHeads * kScoreStride + (lane >> 2) * kScoreStride + (lane & 3) * 2;
#pragma unroll
        for (uint32_t i = 0; i < kRows / 8; ++i) {
            *reinterpret_cast<float2*>(own + 8 * i) = make_float2(c[i][0], c[i][1]);
            *reinterpret_cast<float2*>(own + 8 * kScoreStride + 8 * i) = make_float2(c[i][2], c[i][3]);
        }
        __syncthreads();
        // Softmax: the warp has two heads, side by side.
        float e[2][3], top[2], sum[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            top[i] = -ARC_INF;
#pragma unroll
            for (uint32_t j = 0; j < 3; ++j) {
                const uint32_t key = lane + 32 * j;
                float dot = 0.0f;
#pragma unroll
                for (uint32_t w = 0; w < kWarps; ++w) {
                    dot = __fadd_rn(dot, scores[(w * kHeads + 2 * warp + i) * kScoreStride + min(key, kRows - 1)]);
                }
                e[i][j] = key < here ? __fmul_rn(dot, a.scale) : -ARC_INF;
                top[i] = fmaxf(top[i], e[i][j]);
            }
        }
#pragma unroll
        for (int half = 16; half > 0; half >>= 1) {
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) top[i] = fmaxf(top[i], __shfl_xor_sync(kFull, top[i], half));
        }
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
#pragma unroll
            for (uint32_t j = 0; j < 3; ++j) e[i][j] = exp(__fsub_rn(e[i][j], top[i]));
            sum[i] = __fadd_rn(__fadd_rn(e[i][0], e[i][1]), e[i][2]);
        }
#pragma unroll
        for (int half = 16; half > 0; half >>= 1) {
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(kFull, sum[i], half));
        }
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t h = 2 * warp + i;
#pragma unroll
            for (uint32_t j = 0; j < 3; ++j) {
                const uint32_t key = lane + 32 * j;
                if (key < kRows) {
#pragma unroll
                    for (uint32_t t = 0; t < kWeightTerms; ++t) {
                        const uint32_t bits = bf16_pair(e[i][j], 0.0f) & 0xffff;
                        e[i][j] = __fsub_rn(e[i][j], __uint_as_float(bits << 16));
                        weights[(t * kHeads + h) * kWeightStride + key] = bits;
                    }
                }
            }
            if (lane == 0) {
                part_m[h] = top[i], part_l[h] = sum[i];
                if (single) {
                    float m = total_m[h], keep, add;
                    join(m, top[i], keep, add);
                    total_m[h] = m, total_l[h] = joined(total_l[h], keep, sum[i], add);
                    keep_of[h] = keep, add_of[h] = add;
                }
            }
        }
        __syncthreads();
        // Sums: the warp takes a share of the values.
        float o[4][2][4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
            for (uint32_t j = 0; j < 8; ++j) o[i][j / 4][j % 4] = 0.0f;
        }
        for (uint32_t plane = PLANES; plane-- > 0;) {
            if (plane + 1 < PLANES) {
                __syncthreads();
                bring(plane);
                __syncthreads();
            }
#pragma unroll
            for (uint32_t k = 0; k < kRows / 16; ++k) {
                uint32_t x[kWeightTerms][4];
#pragma unroll
                for (uint32_t t = 0; t < kWeightTerms; ++t) {
                    load_tiles(x[t], shared_at(weights + (t * kHeads + (lane & 15)) * kWeightStride + k * 16 + (lane >> 4) * 8));
                }
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) {
                    const uint32_t pair = first_pair + i;
                    if (i < per_warp && pair < pairs) {
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
            for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
                for (uint32_t j = 0; j < 8; ++j) {
                    float& t = total[i][j / 4][j % 4];
                    t = joined(t, keep[j / 2 % 2], o[i][j / 4][j % 4], add[j / 2 % 2]);
                }
            }
            __syncthreads();
            continue;
        }
        float* parts = a.parts + (((size_t)r * a.heads + first_head) * a.most_splits + split) * (dim + 2);
        size_t to_next = (size_t)a.most_splits * (dim + 2);
        if (local) {
            // Where the rows were.
            __syncthreads();
            parts = own_part, to_next = part_stride;
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            if (i < per_warp && first_pair + i < pairs) {
#pragma unroll
                for (uint32_t j = 0; j < 2; ++j) {
                    const uint32_t e = (first_pair + i) * 16 + 8 * j + 2 * (lane & 3);
                    if (low < heads) *reinterpret_cast<float2*>(parts + low * to_next + e) = make_float2(o[i][j][0], o[i][j][1]);
                    if (high < heads) *reinterpret_cast<float2*>(parts + high * to_next + e) = make_float2(o[i][j][2], o[i][j][3]);
                }
            }
        }
        if (thread < heads && !local) {
            *reinterpret_cast<float2*>(parts + thread * to_next + dim) = make_float2(part_m[thread], part_l[thread]);
        }
        __syncthreads();
    }
    if (single) {
        const uint32_t low = lane >> 2, high = low + 8;
        float ours[2], sum[2];
        finish(total_m[low], total_l[low], low < heads ? a.sinks[first_head + low] : 0.0f, ours[0], sum[0]);
        finish(total_m[high], total_l[high], high < heads ? a.sinks[first_head + high] : 0.0f, ours[1], sum[1]);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            if (i < per_warp && first_pair + i < pairs) {
#pragma unroll
                for (uint32_t j = 0; j < 2; ++j) {
                    const uint32_t e = (first_pair + i) * 16 + 8 * j + 2 * (lane & 3);
#pragma unroll
                    for (uint32_t half = 0; half < 2; ++half) {
                        const uint32_t h = half == 0 ? low : high;
                        const float* t = total[i][j] + 2 * half;
                        if (h < heads) {
                            put(h, e, __fdiv_rn(__fmul_rn(t[0], ours[half]), sum[half]),
                                __fdiv_rn(__fmul_rn(t[1], ours[half]), sum[half]));
                        }
                    }
                }
            }
        }
        return;
    }
    // The cluster's blocks merge, each a share of every head's values. What else that takes comes before they meet.
    const uint32_t share = (quads + gridDim.x - 1) / gridDim.x;
    for (uint32_t i = thread, round = 0; round * kThreads < heads * share; i += kThreads, ++round) {
        const uint32_t h = min(i / share, heads - 1), quad = min(blockIdx.x * share + i % share, quads - 1);
        const float sink = a.sinks[first_head + h];
        float4 cs = make_float4(1.0f, 0.0f, 1.0f, 0.0f);
        if (4 * quad >= dim - kRopeDim) {
            cs = *reinterpret_cast<const float4*>(a.rope + (size_t)info.pos * kRopeDim + 4 * quad - (dim - kRopeDim));
        }
        if (round == 0) cluster_sync();
        const float* part = a.parts + ((size_t)r * a.heads + first_head + h) * a.most_splits * (dim + 2);
        float m = -ARC_INF, l = 0.0f;
        float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        // Parts come eight at a time; local ones are all there are, and their weights were gathered.
        for (uint32_t first = 0; first < splits; first += 8) {
            float2 ml[8];
            float4 x[8];
#pragma unroll
            for (uint32_t s = 0; s < 8; ++s) {
                const uint32_t split = first + s;
                if (split < splits) {
                    if (local) {
                        x[s] = remote4(own_part + h * part_stride + 4 * quad, split);
                    } else {
                        const float* at = part + (size_t)split * (dim + 2);
                        ml[s] = __ldcg(reinterpret_cast<const float2*>(at + dim));
                        const float2 low = __ldcg(reinterpret_cast<const float2*>(at + 4 * quad));
                        const float2 high = __ldcg(reinterpret_cast<const float2*>(at + 4 * quad + 2));
                        x[s] = make_float4(low.x, low.y, high.x, high.y);
                    }
                }
            }
            if (local && round == 0) {
                if (thread < kHeads * 8 && thread % 8 < splits) {
                    const uint32_t of = thread / 8, split = thread % 8;
                    gathered[of][split] = make_float2(remote(part_m + of, split), remote(part_l + of, split));
                }
                __syncthreads();
            }
#pragma unroll
            for (uint32_t s = 0; s < 8; ++s) {
                if (first + s < splits) {
                    if (local) ml[s] = gathered[h][s];
                    float keep, add;
                    join(m, ml[s].x, keep, add);
                    l = joined(l, keep, ml[s].y, add);
                    o.x = joined(o.x, keep, x[s].x, add), o.y = joined(o.y, keep, x[s].y, add);
                    o.z = joined(o.z, keep, x[s].z, add), o.w = joined(o.w, keep, x[s].w, add);
                }
            }
        }
        float ours, sum;
        finish(m, l, sink, ours, sum);
        if (i < heads * share && blockIdx.x * share + i % share < quads) {
            float4 y = make_float4(__fdiv_rn(__fmul_rn(o.x, ours), sum), __fdiv_rn(__fmul_rn(o.y, ours), sum),
                                   __fdiv_rn(__fmul_rn(o.z, ours), sum), __fdiv_rn(__fmul_rn(o.w, ours), sum));
            *reinterpret_cast<float4*>(out + h * dim + 4 * quad) = y;
            if (a.mutant != 3 && 4 * quad >= dim - kRopeDim) turn(y.x, y.y, cs.x, -cs.y), turn(y.z, y.w, cs.z, -cs.w);
            *reinterpret_cast<float4*>(turned + h * dim + 4 * quad) = y;
        }
    }
    // Nobody leaves while others read its part.
    if (local) cluster_sync();
}

}  // namespace

// Grid: (blocks of splits, groups of 16 heads, rows). With one block of splits, it takes all, one after the other; with
// several they are a cluster, and `parts` has room.
extern "C" __global__ void __launch_bounds__(256, 1) latent_attend_packed(LatentArgs a, StepView view) { attend<1>(a, view); }
extern "C" __global__ void __launch_bounds__(256, 1) latent_attend_f32(LatentArgs a, StepView view) { attend<3>(a, view); }

}  // namespace arc
