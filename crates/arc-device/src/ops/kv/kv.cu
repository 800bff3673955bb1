// The paged KV cache: append, and attention by split and by tile of rows.
//
// kv_append       one warp a head of a row: head norm, rope, f16 into the row's block. Exact.
// kv_attend       one block a split of 256 keys, for up to 4 heads of a row; a warp takes one of the split's tiles for
//                 the scores, then a thread takes one value of each head's output. Splits are merged ascending: by the
//                 first block of a cluster in a short context, else by the last block of the row's heads. Rows that
//                 stand in a run of kRunRows or more are left to:
// kv_attend_rows  one block a tile of up to 64 queries (rows times the heads that share a key head); a warp takes eight of
//                 them through all keys, 128 at a time, and needs no other warp for its softmax.
//
// Both do the operations of cpu.rs in its order, so they give the same bits, whichever of them takes a row.
#include "cluster.cuh"
#include "ops/kv/kv.cuh"
#include "pdl.cuh"

namespace arc {

namespace {

constexpr uint32_t kFull = 0xffffffffu;
// Rows of one sequence that are worth a tile.
constexpr uint32_t kRunRows = 4;
// Heads of one block of kv_attend, at most.
constexpr uint32_t kBlockHeads = 4;
constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / 32;

__device__ __forceinline__ bool in_run(const RowInfo& info) { return info.back + info.ahead + 1 >= kRunRows; }

__device__ __forceinline__ float2 half_pair(const uint16_t* x) {
    return __half22float2(*reinterpret_cast<const __half2*>(x));
}

}  // namespace

// Grid: (heads of queries, keys and values by four, rows). `adjacent`: how values pair up.
extern "C" __global__ void __launch_bounds__(128)
    kv_append(float* qkv, uint16_t* k, uint16_t* v, const float* rope_table, const float* q_norm, const float* k_norm,
              float q_eps, float k_eps, uint32_t n_heads, uint32_t n_kv_heads, uint32_t head_dim, uint32_t rope_dim,
              uint32_t adjacent, StepView view) {
    __shared__ float staged[4][kMaxHeadDim];
    pdl_launch();
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.y;
    const uint32_t head = blockIdx.x * 4 + warp;
    const AttentionShape shape{n_heads, n_kv_heads, head_dim, 0.0f, 0};
    const bool query = head < n_heads, value = head >= n_heads + n_kv_heads;
    const float* weight = query ? q_norm : value ? nullptr : k_norm;
    pdl_wait();
    const RowInfo info = view.infos[row];
    if (!info.live || head >= n_heads + 2 * n_kv_heads) return;
    float* x = qkv + (size_t)row * shape.qkv_dim() + (size_t)head * head_dim;
    const uint32_t block = view.blocks[(size_t)info.slot * view.max_blocks + info.pos / kBlockTokens];
    const uint32_t in_block = info.pos % kBlockTokens;
    if (value) {
        uint16_t* to = v + shape.tile(block, head - n_heads - n_kv_heads) + in_block * head_dim;
        for (uint32_t d = lane; d < head_dim; d += 32) to[d] = f16_bits(x[d]);
        return;
    }
    float r[kMaxHeadDim / 32];
#pragma unroll
    for (uint32_t j = 0; j < kMaxHeadDim / 32; ++j) r[j] = lane + 32 * j < head_dim ? x[lane + 32 * j] : 0.0f;
    if (weight != nullptr) {
        const float mean = __fdiv_rn(sum_sq_head(r), (float)head_dim);
        const float factor = rsqrt(__fadd_rn(mean, query ? q_eps : k_eps));
#pragma unroll
        for (uint32_t j = 0; j < kMaxHeadDim / 32; ++j) {
            if (lane + 32 * j < head_dim) r[j] = __fmul_rn(__fmul_rn(r[j], factor), weight[lane + 32 * j]);
        }
    }
    // Through shared memory, since partners lie anywhere.
    float* s = staged[warp];
#pragma unroll
    for (uint32_t j = 0; j < kMaxHeadDim / 32; ++j) {
        if (lane + 32 * j < head_dim) s[lane + 32 * j] = r[j];
    }
    __syncwarp();
    const float2* table = reinterpret_cast<const float2*>(rope_table + (size_t)info.pos * rope_dim);
    for (uint32_t i = lane; i < rope_dim / 2; i += 32) {
        const float2 cs = table[i];
        float& a = s[adjacent ? 2 * i : i];
        float& b = s[adjacent ? 2 * i + 1 : i + rope_dim / 2];
        turn(a, b, cs.x, cs.y);
    }
    __syncwarp();
    for (uint32_t d = lane; d < head_dim; d += 32) x[d] = s[d];
    if (query) return;
    uint16_t* to = k + shape.tile(block, head - n_heads) + in_block;
    for (uint32_t d = lane; d < head_dim; d += 32) to[d * kBlockTokens] = f16_bits(s[d]);
}

namespace {

// What a block of kv_attend says of the heads that it takes.
struct Softmax {
    // By head and tile of the split: maximum, factor of what stood before, sum.
    float tile_max[kBlockHeads][kSplitTiles], tile_keep[kBlockHeads][kSplitTiles], tile_sum[kBlockHeads][kSplitTiles];
    // By head: of the split, and of those before it.
    float m[kBlockHeads], l[kBlockHeads], total_m[kBlockHeads], total_l[kBlockHeads];
    // By head and split: what stood before a part and the part itself are multiplied by; the part's sum.
    float keep[kBlockHeads][kSplitKeys], add[kBlockHeads][kSplitKeys], part_l[kBlockHeads][kSplitKeys];
    uint32_t is_last;
};

// Values that one stored part takes: the sums, the maximum, the weight.
__device__ __forceinline__ uint32_t part_len(uint32_t head_dim) { return head_dim + 2; }

// What an inert row leaves. The blocks of one y and z have a share each.
__device__ void zero_row(float* out, const AttentionShape& shape, uint32_t row) {
    const uint32_t dim = shape.n_heads * shape.head_dim, first = blockIdx.y * gridDim.x + blockIdx.x;
    for (uint32_t i = first * kThreads + threadIdx.x; i < dim; i += gridDim.x * gridDim.y * kThreads) {
        out[(size_t)row * dim + i] = 0.0f;
    }
}

// A value in the shared memory of another block of the cluster, at the place that `own` has in this one's.
__device__ __forceinline__ float remote(const float* own, uint32_t block) {
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(in_block(own, block)) : "memory");
    return x;
}

// Merges the `splits` parts of some heads, ascending: value d of head h of split s is part(s, h, d), its maximum and weight
// are those of d = head_dim and head_dim + 1. The thread of a unit gets its D values of `total`, and `softmax` the weights.
template <uint32_t D, typename Part>
__device__ void merge_parts(float (&total)[D], Softmax& softmax, uint32_t heads, uint32_t head_dim, uint32_t splits,
                            uint32_t h, uint32_t d, Part part) {
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
#pragma unroll
    for (uint32_t e = 0; e < D; ++e) total[e] = 0.0f;
    for (uint32_t start = 0; start < splits; start += kSplitKeys) {
        const uint32_t n = min(kSplitKeys, splits - start);
        // A warp scans the maxima of a head, 32 splits at a time.
        if (warp < heads) {
            float m = start == 0 ? -ARC_INF : softmax.total_m[warp];
            for (uint32_t base = 0; base < n; base += 32) {
                const uint32_t i = base + lane;
                const float part_m = i < n ? part(start + i, warp, head_dim) : -ARC_INF;
                const float part_l = i < n ? part(start + i, warp, head_dim + 1) : 0.0f;
                float top = part_m;
#pragma unroll
                for (int step = 1; step < 32; step <<= 1) {
                    const float other = __shfl_up_sync(kFull, top, step);
                    if (lane >= step) top = max_or_nan(other, top);
                }
                top = max_or_nan(m, top);
                float before = __shfl_up_sync(kFull, top, 1);
                if (lane == 0) before = m;
                if (i < n) {
                    softmax.keep[warp][i] = exp(__fsub_rn(before, top));
                    softmax.add[warp][i] = exp(__fsub_rn(part_m, top));
                    softmax.part_l[warp][i] = part_l;
                }
                m = __shfl_sync(kFull, top, 31);
            }
            if (lane == 0) softmax.total_m[warp] = m;
        }
        __syncthreads();
        if (h < heads) {
#pragma unroll 8
            for (uint32_t i = 0; i < n; ++i) {
                const float keep = softmax.keep[h][i], add = softmax.add[h][i];
#pragma unroll
                for (uint32_t e = 0; e < D; ++e) total[e] = joined(total[e], keep, part(start + i, h, d + e), add);
            }
        }
        // Threads past the units take the weights.
        if (thread >= kThreads - heads) {
            const uint32_t head = thread - (kThreads - heads);
            float l = start == 0 ? 0.0f : softmax.total_l[head];
#pragma unroll 8
            for (uint32_t i = 0; i < n; ++i) {
                l = joined(l, softmax.keep[head][i], softmax.part_l[head][i], softmax.add[head][i]);
            }
            softmax.total_l[head] = l;
        }
        __syncthreads();
    }
}

// Attention of up to HEADS heads of one row that share a key head. D: values of a head's output that a thread takes.
template <uint32_t HEADS, uint32_t D>
__device__ void attend_row(float* out, const float* qkv, const uint16_t* k, const uint16_t* v, float* parts,
                           uint32_t* tickets, const AttentionShape& shape, uint32_t most_splits, uint32_t spread,
                           const RowInfo& info, uint32_t row, const StepView& view, Softmax& softmax, uint8_t* dynamic) {
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, head_dim = shape.head_dim;
    const uint32_t group = shape.group(), per_kv = (group + HEADS - 1) / HEADS;
    const uint32_t kv_head = blockIdx.y / per_kv, in_group = blockIdx.y % per_kv * HEADS;
    const uint32_t first_head = kv_head * group + in_group, heads = min(HEADS, group - in_group);
    const uint32_t tile_bytes = head_dim * kBlockTokens * 2;
    const uint32_t q_stride = (head_dim + 3) & ~3u;
    float* q = reinterpret_cast<float*>(dynamic);     // [HEADS][q_stride]
    float* p = q + HEADS * q_stride;                  // [HEADS][kSplitKeys]
    float* own_part = p + HEADS * kSplitKeys;         // [HEADS][part_len], in a cluster
    uint8_t* k_tiles = reinterpret_cast<uint8_t*>(own_part + HEADS * ((part_len(head_dim) + 3) & ~3u));
    uint8_t* v_tiles = spread ? k_tiles + kSplitTiles * tile_bytes : k_tiles;
    const bool clustered = parts == nullptr && gridDim.x > 1;

    const uint32_t from = shape.first_visible(info.pos), pos = info.pos;
    const uint32_t begin = from / kSplitKeys, end = pos / kSplitKeys + 1, splits = end - begin;
    if (clustered && splits > gridDim.x) {
        // The step's context class was too small. Every block of the cluster sees it.
        if (thread == 0) report_fault(view, kFaultContextClass);
        return;
    }
    if (blockIdx.x >= splits && (!clustered || splits == 1)) return;
    const uint32_t* blocks = view.blocks + (size_t)info.slot * view.max_blocks;
    float* out_row = out + (size_t)row * shape.n_heads * head_dim + first_head * head_dim;
    // The thread's own values of the output.
    const uint32_t h = thread / (head_dim / D), d = thread % (head_dim / D) * D;
    float total[D];
#pragma unroll
    for (uint32_t e = 0; e < D; ++e) total[e] = 0.0f;
    __syncthreads();
    if (thread < HEADS) softmax.total_m[thread] = -ARC_INF, softmax.total_l[thread] = 0.0f;

    for (uint32_t split = begin + blockIdx.x; split < end; split += gridDim.x) {
        const uint32_t first_tile = max(from / kBlockTokens, split * kSplitTiles);
        const uint32_t end_tile = min(pos / kBlockTokens + 1, (split + 1) * kSplitTiles);
        // The first four warps bring two tiles of keys each, the others two of values.
        auto bring = [&](uint8_t* to, const uint16_t* pool, uint32_t first) {
#pragma unroll
            for (uint32_t i = first; i < first + 2; ++i) {
                const uint32_t tile = split * kSplitTiles + i;
                if (tile >= first_tile && tile < end_tile) {
                    const uint8_t* at = reinterpret_cast<const uint8_t*>(pool + shape.tile(blocks[tile], kv_head));
                    for (uint32_t e = lane; e < tile_bytes / 16; e += 32) copy16(to + i * tile_bytes + e * 16, at + e * 16);
                }
            }
        };
        if (warp < 4) {
            bring(k_tiles, k, 2 * warp);
        } else if (spread) {
            bring(v_tiles, v, 2 * warp - 8);
        }
        copies_commit();
        if (split == begin + blockIdx.x) {
            const float* q_row = qkv + (size_t)row * shape.qkv_dim() + first_head * head_dim;
            for (uint32_t i = thread; i < HEADS * head_dim; i += kThreads) {
                q[i / head_dim * q_stride + i % head_dim] = q_row[min(i, heads * head_dim - 1)];
            }
        }
        // Values may still be on their way.
        if (warp < 4) copies_wait<0>();
        __syncthreads();
        // Lane l has keys 2 l and 2 l + 1 of the warp's 64: a half of the warp has a tile.
        const uint32_t in_split = 2 * warp + (lane >> 4), tile = split * kSplitTiles + in_split;
        const bool has_tile = warp < 4 && tile >= first_tile && tile < end_tile;
        float s[HEADS][2];
        if (warp < 4 && 2 * warp + split * kSplitTiles < end_tile && 2 * warp + 1 + split * kSplitTiles >= first_tile) {
#pragma unroll
            for (uint32_t i = 0; i < HEADS; ++i) s[i][0] = s[i][1] = 0.0f;
            const uint16_t* keys = reinterpret_cast<const uint16_t*>(k_tiles + in_split * tile_bytes) + 2 * (lane & 15);
            const uint32_t whole = head_dim & ~3u;
#pragma unroll 4
            for (uint32_t c = 0; c < whole; c += 4) {
                float2 key[4];
#pragma unroll
                for (uint32_t e = 0; e < 4; ++e) key[e] = half_pair(keys + (c + e) * kBlockTokens);
#pragma unroll
                for (uint32_t i = 0; i < HEADS; ++i) {
                    const float4 x4 = *reinterpret_cast<const float4*>(q + i * q_stride + c);
                    const float x[4] = {x4.x, x4.y, x4.z, x4.w};
#pragma unroll
                    for (uint32_t e = 0; e < 4; ++e) {
                        s[i][0] = __fmaf_rn(x[e], key[e].x, s[i][0]);
                        s[i][1] = __fmaf_rn(x[e], key[e].y, s[i][1]);
                    }
                }
            }
            for (uint32_t c = whole; c < head_dim; ++c) {
                const float2 key = half_pair(keys + c * kBlockTokens);
#pragma unroll
                for (uint32_t i = 0; i < HEADS; ++i) {
                    s[i][0] = __fmaf_rn(q[i * q_stride + c], key.x, s[i][0]);
                    s[i][1] = __fmaf_rn(q[i * q_stride + c], key.y, s[i][1]);
                }
            }
            const uint32_t key = tile * kBlockTokens + 2 * (lane & 15);
#pragma unroll
            for (uint32_t i = 0; i < HEADS; ++i) {
                float top = -ARC_INF;
#pragma unroll
                for (uint32_t e = 0; e < 2; ++e) {
                    const bool visible = has_tile && key + e >= from && key + e <= pos;
                    s[i][e] = visible ? __fmul_rn(s[i][e], shape.scale) : -ARC_INF;
                    top = max_or_nan(top, s[i][e]);
                }
#pragma unroll
                for (int half = 8; half > 0; half >>= 1) top = max_or_nan(top, __shfl_xor_sync(kFull, top, half));
                if (has_tile && (lane & 15) == 0) softmax.tile_max[i][in_split] = top;
            }
        }
        __syncthreads();
        if (warp >= 4 && !spread) bring(v_tiles, v, 2 * warp - 8);
        copies_commit();
        if (warp < 4 && 2 * warp + split * kSplitTiles < end_tile && 2 * warp + 1 + split * kSplitTiles >= first_tile) {
            const uint32_t first = first_tile - split * kSplitTiles;
#pragma unroll
            for (uint32_t i = 0; i < HEADS; ++i) {
                float before = -ARC_INF;
#pragma unroll
                for (uint32_t t = 0; t < kSplitTiles; ++t) {
                    if (t >= first && t < in_split) before = max_or_nan(before, softmax.tile_max[i][t]);
                }
                const float top = has_tile ? max_or_nan(before, softmax.tile_max[i][in_split]) : 0.0f;
                float sum[2];
#pragma unroll
                for (uint32_t e = 0; e < 2; ++e) sum[e] = s[i][e] = exp(__fsub_rn(s[i][e], top));
#pragma unroll
                for (int half = 8; half > 0; half >>= 1) {
#pragma unroll
                    for (uint32_t e = 0; e < 2; ++e) sum[e] = __fadd_rn(sum[e], __shfl_xor_sync(kFull, sum[e], half));
                }
                if (has_tile && (lane & 15) == 0) {
                    softmax.tile_keep[i][in_split] = exp(__fsub_rn(before, top));
                    softmax.tile_sum[i][in_split] = __fadd_rn(sum[0], sum[1]);
                    if (tile + 1 == end_tile) softmax.m[i] = top;
                }
                *reinterpret_cast<float2*>(p + i * kSplitKeys + 64 * warp + 2 * lane) = make_float2(s[i][0], s[i][1]);
            }
        }
        copies_wait<0>();
        __syncthreads();
        if (thread >= kThreads - HEADS) {
            const uint32_t head = thread - (kThreads - HEADS);
            float l = 0.0f;
            for (uint32_t t = first_tile; t < end_tile; ++t) {
                const uint32_t i = t - split * kSplitTiles;
                l = __fadd_rn(__fmul_rn(l, softmax.tile_keep[head][i]), softmax.tile_sum[head][i]);
            }
            softmax.l[head] = l;
            if (gridDim.x == 1) {
                float keep, add;
                join(softmax.total_m[head], softmax.m[head], keep, add);
                softmax.total_l[head] = joined(softmax.total_l[head], keep, l, add);
                softmax.keep[head][0] = keep, softmax.add[head][0] = add;
            }
        }
        float o[D];
#pragma unroll
        for (uint32_t e = 0; e < D; ++e) o[e] = 0.0f;
        if (h < heads) {
            const float* weights = p + h * kSplitKeys;
            for (uint32_t t = first_tile; t < end_tile; ++t) {
                const uint32_t i = t - split * kSplitTiles, start = t * kBlockTokens;
                const float keep = softmax.tile_keep[h][i];
#pragma unroll
                for (uint32_t e = 0; e < D; ++e) o[e] = __fmul_rn(o[e], keep);
                const uint16_t* values = reinterpret_cast<const uint16_t*>(v_tiles + i * tile_bytes) + d;
                auto step = [&](float w, uint32_t key) {
#pragma unroll
                    for (uint32_t e = 0; e < D; e += 2) {
                        const float2 x = half_pair(values + key * head_dim + e);
                        o[e] = __fmaf_rn(w, x.x, o[e]), o[e + 1] = __fmaf_rn(w, x.y, o[e + 1]);
                    }
                };
                // Only visible keys: the others may hold what a former owner of the block left, and 0 times its NaN is
                // NaN.
                const uint32_t lo = from > start ? from - start : 0, hi = min(pos + 1 - start, kBlockTokens);
                if (lo == 0 && hi == kBlockTokens) {
#pragma unroll
                    for (uint32_t key = 0; key < kBlockTokens; key += 4) {
                        const float4 w = *reinterpret_cast<const float4*>(weights + i * kBlockTokens + key);
                        step(w.x, key), step(w.y, key + 1), step(w.z, key + 2), step(w.w, key + 3);
                    }
                } else {
#pragma unroll 4
                    for (uint32_t key = lo; key < hi; ++key) step(weights[i * kBlockTokens + key], key);
                }
            }
        }
        if (gridDim.x == 1) {
            __syncthreads();
            if (h < heads) {
                const float keep = softmax.keep[h][0], add = softmax.add[h][0];
#pragma unroll
                for (uint32_t e = 0; e < D; ++e) total[e] = joined(total[e], keep, o[e], add);
            }
            __syncthreads();
        } else if (splits == 1) {
#pragma unroll
            for (uint32_t e = 0; e < D; ++e) total[e] = o[e];
            __syncthreads();
            if (thread < HEADS) softmax.total_l[thread] = softmax.l[thread];
            __syncthreads();
        } else {
            __syncthreads();
            auto part = [&](uint32_t head) {
                return clustered ? own_part + head * part_len(head_dim)
                                 : parts + (((size_t)row * shape.n_heads + first_head + head) * most_splits + split - begin) *
                                               part_len(head_dim);
            };
            if (h < heads) {
#pragma unroll
                for (uint32_t e = 0; e < D; e += 2) {
                    *reinterpret_cast<float2*>(part(h) + d + e) = make_float2(o[e], o[e + 1]);
                }
            }
            if (thread < heads) {
                *reinterpret_cast<float2*>(part(thread) + head_dim) = make_float2(softmax.m[thread], softmax.l[thread]);
            }
        }
    }
    if (gridDim.x > 1 && splits > 1) {
        if (clustered) {
            // The first block merges; the others stay until it has read theirs.
            cluster_sync();
            if (blockIdx.x == 0) {
                merge_parts<D>(total, softmax, heads, head_dim, splits, h, d, [&](uint32_t s, uint32_t head, uint32_t at) {
                    return remote(own_part + head * part_len(head_dim) + at, s);
                });
            }
            cluster_sync();
            if (blockIdx.x != 0) return;
        } else {
            // The last of the row's blocks merges.
            __threadfence();
            __syncthreads();
            if (thread == 0) {
                uint32_t* ticket = tickets + row * gridDim.y + blockIdx.y;
                softmax.is_last = atomicAdd(ticket, 1) + 1 == min(gridDim.x, splits);
                if (softmax.is_last) *ticket = 0;
            }
            __syncthreads();
            if (!softmax.is_last) return;
            __threadfence();
            const float* first = parts + ((size_t)row * shape.n_heads + first_head) * most_splits * part_len(head_dim);
            merge_parts<D>(total, softmax, heads, head_dim, splits, h, d, [&](uint32_t s, uint32_t head, uint32_t at) {
                return __ldcg(first + ((size_t)head * most_splits + s) * part_len(head_dim) + at);
            });
        }
    }
    if (h < heads) {
        const float l = softmax.total_l[h];
#pragma unroll
        for (uint32_t e = 0; e < D; e += 2) {
            *reinterpret_cast<float2*>(out_row + h * head_dim + d + e) =
                make_float2(__fdiv_rn(total[e], l), __fdiv_rn(total[e + 1], l));
        }
    }
}

}  // namespace

// HEADS times head_dim / D is at most 256; D divides head_dim.
//
// Grid: (blocks of splits, key heads times groups of HEADS heads that share one, rows or fewer). With one block of
// splits, it takes all, one after the other. With several, either they are a cluster, `parts` is null and there are no more
// splits than blocks; or `parts` has room for [rows, n_heads, most_splits, part_len] and `tickets` for [rows, gridDim.y],
// zero before and after. `spread`: keys and values have room of their own. `runs`: kv_attend_rows takes the rows of runs.
#define ARC_ATTEND(HEADS, D)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                             \
        kv_attend_##HEADS##x##D(float* out, const float* qkv, const uint16_t* k, const uint16_t* v, float* parts,          \
                          uint32_t* tickets, uint32_t rows, uint32_t n_heads, uint32_t n_kv_heads, uint32_t head_dim, \
                          float scale, uint32_t window, uint32_t most_splits, uint32_t spread, uint32_t runs,        \
                          StepView view) {                                                                           \
        extern __shared__ __align__(16) uint8_t dynamic[];                                                           \
        __shared__ Softmax softmax;                                                                                  \
        pdl_launch();                                                                                                \
        pdl_wait();                                                                                                  \
        const AttentionShape shape{n_heads, n_kv_heads, head_dim, scale, window};                                    \
        for (uint32_t row = blockIdx.z; row < rows; row += gridDim.z) {                                              \
            const RowInfo info = view.infos[row];                                                                    \
            if (!info.live) {                                                                                        \
                zero_row(out, shape, row);                                                                           \
            } else if (!runs || !in_run(info)) {                                                                     \
                attend_row<HEADS, D>(out, qkv, k, v, parts, tickets, shape, most_splits, spread, info, row, view,    \
                                     softmax, dynamic);                                                              \
            }                                                                                                        \
        }                                                                                                            \
    }
ARC_ATTEND(1, 2)
ARC_ATTEND(2, 2)
ARC_ATTEND(3, 2)
ARC_ATTEND(4, 2)
ARC_ATTEND(1, 4)
ARC_ATTEND(2, 4)
ARC_ATTEND(3, 4)
ARC_ATTEND(4, 4)

namespace {

// Queries of a tile, of a warp of it, and keys that are looked at together.
constexpr uint32_t kTileQueries = 64, kWarpQueries = 8, kChunkKeys = 128, kChunkTiles = kChunkKeys / kBlockTokens;
// Distance between the queries of one value, and between those of a key in a warp's weights.
constexpr uint32_t kQueryStride = kTileQueries + 4;
// Weights of a warp: of key t, query i at 8 t + 4 (t / 4) + i, so that no two lanes that write together share a bank.
constexpr uint32_t kWarpWeights = kChunkKeys * kWarpQueries + kChunkKeys;

// Attention of `n_queries` queries, rows `row` on, of one sequence. PAIRS: 64 values a pair of a lane.
template <uint32_t PAIRS>
__device__ void attend_tile(float* out, const float* qkv, const uint16_t* k, const uint16_t* v,
                            const AttentionShape& shape, uint32_t kv_head, uint32_t row, uint32_t rows,
                            const StepView& view, uint8_t* dynamic) {
    const uint32_t thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, group = shape.group();
    const uint32_t head_dim = shape.head_dim, tile_bytes = head_dim * kBlockTokens * 2;
    // Two tiles of keys lie in different halves of the banks.
    const uint32_t key_stride = tile_bytes + 64;
    float* q = reinterpret_cast<float*>(dynamic);                    // [head_dim][kQueryStride]
    float* weights = q + head_dim * kQueryStride;                    // [kWarps][kWarpWeights]
    uint8_t* k_tiles = reinterpret_cast<uint8_t*>(weights + kWarps * kWarpWeights);
    uint8_t* v_tiles = PAIRS > 2 ? k_tiles : k_tiles + kChunkTiles * key_stride;
    weights += warp * kWarpWeights;

    const RowInfo info = view.infos[row];
    const uint32_t* blocks = view.blocks + (size_t)info.slot * view.max_blocks;
    const uint32_t queries = rows * group, last = info.pos + rows - 1;
    const uint32_t first_tile = shape.first_visible(info.pos) / kBlockTokens, end_tile = last / kBlockTokens + 1;
    __syncthreads();
    for (uint32_t i = thread; i < kTileQueries * head_dim; i += kThreads) {
        const uint32_t query = i / head_dim, d = i % head_dim;
        const uint32_t r = query / group, h = kv_head * group + query % group;
        q[d * kQueryStride + query] =
            query < queries ? qkv[(size_t)(row + r) * shape.qkv_dim() + h * head_dim + d] : 0.0f;
    }
    // The position past the last visible one of each of the warp's queries; from(to[i]) is the first.
    uint32_t to[kWarpQueries];
    auto from = [&](uint32_t past) { return shape.first_visible(past - 1); };
#pragma unroll
    for (uint32_t i = 0; i < kWarpQueries; ++i) {
        // Queries past the last see what it sees, so that they keep nobody from the straight path.
        const uint32_t query = min(warp * kWarpQueries + i, queries - 1), pos = info.pos + query / group;
        to[i] = pos + 1;
    }
    const bool idle = warp * kWarpQueries >= queries;
    auto bring = [&](uint8_t* to, const uint16_t* pool, uint32_t stride, uint32_t chunk) {
        const uint32_t vectors = tile_bytes / 16;
        for (uint32_t i = thread; i < kChunkTiles * vectors; i += kThreads) {
            const uint32_t t = i / vectors, e = i % vectors, tile = chunk * kChunkTiles + t;
            if (tile >= first_tile && tile < end_tile) {
                copy16(to + t * stride + e * 16,
                           reinterpret_cast<const uint8_t*>(pool + shape.tile(blocks[tile], kv_head)) + e * 16);
            }
        }
        copies_commit();
    };

    float part_m[kWarpQueries], part_l[kWarpQueries], total_m[kWarpQueries], total_l[kWarpQueries];
    float part[kWarpQueries][2 * PAIRS], total[kWarpQueries][2 * PAIRS];
#pragma unroll
    for (uint32_t i = 0; i < kWarpQueries; ++i) {
        part_m[i] = total_m[i] = -ARC_INF;
        part_l[i] = total_l[i] = 0.0f;
#pragma unroll
        for (uint32_t d = 0; d < 2 * PAIRS; ++d) part[i][d] = total[i][d] = 0.0f;
    }
    const uint32_t first_chunk = first_tile / kChunkTiles, end_chunk = (end_tile - 1) / kChunkTiles + 1;
    bring(k_tiles, k, key_stride, first_chunk);
    if constexpr (PAIRS <= 2) bring(v_tiles, v, tile_bytes, first_chunk);
    for (uint32_t chunk = first_chunk; chunk < end_chunk; ++chunk) {
        if constexpr (PAIRS <= 2) {
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        const uint32_t start = chunk * kChunkKeys;
        float s[kWarpQueries][4];
#pragma unroll
        for (uint32_t i = 0; i < kWarpQueries; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
        if (!idle) {
            const uint8_t* keys = k_tiles + (lane >> 3) * key_stride + (lane & 7) * 8;
            const float* qs = q + warp * kWarpQueries;
#pragma unroll 4
            for (uint32_t d = 0; d < head_dim; ++d) {
                const uint2 raw = *reinterpret_cast<const uint2*>(keys + d * kBlockTokens * 2);
                const float2 k0 = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
                const float2 k1 = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
                const float4 q0 = *reinterpret_cast<const float4*>(qs + d * kQueryStride);
                const float4 q1 = *reinterpret_cast<const float4*>(qs + d * kQueryStride + 4);
                const float x[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
#pragma unroll
                for (uint32_t i = 0; i < kWarpQueries; ++i) {
                    s[i][0] = __fmaf_rn(x[i], k0.x, s[i][0]);
                    s[i][1] = __fmaf_rn(x[i], k0.y, s[i][1]);
                    s[i][2] = __fmaf_rn(x[i], k1.x, s[i][2]);
                    s[i][3] = __fmaf_rn(x[i], k1.y, s[i][3]);
                }
            }
        }
        __syncthreads();
        if constexpr (PAIRS <= 2) {
            if (chunk + 1 < end_chunk) bring(k_tiles, k, key_stride, chunk + 1);
        } else {
            bring(v_tiles, v, tile_bytes, chunk);
        }
        // The softmax of the warp's queries. Keys 4 lane .. 4 lane + 3 of the chunk are the lane's; lanes 8 k .. 8 k + 7
        // have tile k.
        float keep[kWarpQueries];
        if (!idle) {
            const uint32_t key = start + 4 * lane, tile_start = start + (lane >> 3) * kBlockTokens;
#pragma unroll
            for (uint32_t i = 0; i < kWarpQueries; ++i) {
                float top = -ARC_INF;
#pragma unroll
                for (uint32_t j = 0; j < 4; ++j) {
                    const bool visible = key + j >= from(to[i]) && key + j < to[i];
                    s[i][j] = visible ? __fmul_rn(s[i][j], shape.scale) : -ARC_INF;
                    top = max_or_nan(top, s[i][j]);
                }
#pragma unroll
                for (int half = 4; half > 0; half >>= 1) top = max_or_nan(top, __shfl_xor_sync(kFull, top, half));
                float before = part_m[i], own_before = before, own_top = before;
#pragma unroll
                for (uint32_t t = 0; t < kChunkTiles; ++t) {
                    const float next = max_or_nan(before, __shfl_sync(kFull, top, 8 * t));
                    if (t == lane >> 3) own_before = before, own_top = next;
                    before = next;
                }
                part_m[i] = before;
                const bool seen = tile_start < to[i] && tile_start + kBlockTokens > from(to[i]);
                keep[i] = seen ? exp(__fsub_rn(own_before, own_top)) : 1.0f;
                float e[4];
#pragma unroll
                for (uint32_t j = 0; j < 4; ++j) e[j] = s[i][j] = seen ? exp(__fsub_rn(s[i][j], own_top)) : 0.0f;
#pragma unroll
                for (int half = 4; half > 0; half >>= 1) {
#pragma unroll
                    for (uint32_t j = 0; j < 4; ++j) e[j] = __fadd_rn(e[j], __shfl_xor_sync(kFull, e[j], half));
                }
                const float sum = __fadd_rn(__fadd_rn(e[0], e[2]), __fadd_rn(e[1], e[3]));
#pragma unroll
                for (uint32_t t = 0; t < kChunkTiles; ++t) {
                    const float c = __shfl_sync(kFull, keep[i], 8 * t), add = __shfl_sync(kFull, sum, 8 * t);
                    const bool tile_seen = start + t * kBlockTokens < to[i] && start + (t + 1) * kBlockTokens > from(to[i]);
                    if (tile_seen) part_l[i] = __fadd_rn(__fmul_rn(part_l[i], c), add);
                }
            }
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                float4* to4 = reinterpret_cast<float4*>(weights + 36 * lane + 8 * j);
                to4[0] = make_float4(s[0][j], s[1][j], s[2][j], s[3][j]);
                to4[1] = make_float4(s[4][j], s[5][j], s[6][j], s[7][j]);
            }
        }
        if constexpr (PAIRS <= 2) {
            if (chunk + 1 < end_chunk) {
                copies_wait<1>();
            } else {
                copies_wait<0>();
            }
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        if (!idle) {
#pragma unroll 1
            for (uint32_t t = 0; t < kChunkTiles; ++t) {
                const uint32_t tile_start = start + t * kBlockTokens;
                bool whole = true;
                uint32_t lo[kWarpQueries], hi[kWarpQueries];
#pragma unroll
                for (uint32_t i = 0; i < kWarpQueries; ++i) {
                    const float c = __shfl_sync(kFull, keep[i], 8 * t);
#pragma unroll
                    for (uint32_t d = 0; d < 2 * PAIRS; ++d) part[i][d] = __fmul_rn(part[i][d], c);
                    lo[i] = from(to[i]) > tile_start ? from(to[i]) - tile_start : 0;
                    hi[i] = to[i] > tile_start ? min(to[i] - tile_start, kBlockTokens) : 0;
                    whole = whole && lo[i] == 0 && hi[i] == kBlockTokens;
                }
                const uint16_t* values = reinterpret_cast<const uint16_t*>(v_tiles + t * tile_bytes);
                const float* w = weights + t * kBlockTokens * 9;
                auto step = [&](uint32_t e, bool all) {
                    const float* we = w + e * 8 + (e >> 2) * 4;
                    const float4 w0 = *reinterpret_cast<const float4*>(we), w1 = *reinterpret_cast<const float4*>(we + 4);
                    const float x[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
#pragma unroll
                    for (uint32_t pair = 0; pair < PAIRS; ++pair) {
                        const uint32_t d = 64 * pair + 2 * lane;
                        // Lanes past the head compute what nobody reads, from values of the next key.
                        const float2 y = half_pair(values + e * head_dim + min(d, head_dim - 2));
#pragma unroll
                        for (uint32_t i = 0; i < kWarpQueries; ++i) {
                            if (all || (e >= lo[i] && e < hi[i])) {
                                part[i][2 * pair] = __fmaf_rn(x[i], y.x, part[i][2 * pair]);
                                part[i][2 * pair + 1] = __fmaf_rn(x[i], y.y, part[i][2 * pair + 1]);
                            }
                        }
                    }
                };
                if (whole) {
#pragma unroll 4
                    for (uint32_t e = 0; e < kBlockTokens; ++e) step(e, true);
                } else {
#pragma unroll 1
                    for (uint32_t e = 0; e < kBlockTokens; ++e) step(e, false);
                }
            }
        }
        // A split ends: its part joins the total.
        if (chunk + 1 == end_chunk || (chunk + 1) % (kSplitKeys / kChunkKeys) == 0) {
#pragma unroll
            for (uint32_t i = 0; i < kWarpQueries; ++i) {
                const uint32_t split_start = chunk / (kSplitKeys / kChunkKeys) * kSplitKeys;
                const bool seen = split_start < to[i] && split_start + kSplitKeys > from(to[i]);
                if (seen) {
                    float c, add;
                    join(total_m[i], part_m[i], c, add);
                    total_l[i] = joined(total_l[i], c, part_l[i], add);
#pragma unroll
                    for (uint32_t d = 0; d < 2 * PAIRS; ++d) total[i][d] = joined(total[i][d], c, part[i][d], add);
                }
                part_m[i] = -ARC_INF;
                part_l[i] = 0.0f;
#pragma unroll
                for (uint32_t d = 0; d < 2 * PAIRS; ++d) part[i][d] = 0.0f;
            }
        }
        __syncthreads();
        if (chunk + 1 < end_chunk) {
            if constexpr (PAIRS <= 2) {
                bring(v_tiles, v, tile_bytes, chunk + 1);
            } else {
                bring(k_tiles, k, key_stride, chunk + 1);
            }
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < kWarpQueries; ++i) {
        const uint32_t query = warp * kWarpQueries + i;
        if (query < queries) {
            float* to_row = out + (size_t)(row + query / group) * shape.n_heads * head_dim +
                            (kv_head * group + query % group) * head_dim;
#pragma unroll
            for (uint32_t pair = 0; pair < PAIRS; ++pair) {
                const uint32_t d = 64 * pair + 2 * lane;
                if (d < head_dim) {
                    *reinterpret_cast<float2*>(to_row + d) = make_float2(__fdiv_rn(total[i][2 * pair], total_l[i]),
                                                                         __fdiv_rn(total[i][2 * pair + 1], total_l[i]));
                }
            }
        }
    }
}

// The runs among a tile's rows, one after the other. Later rows have more keys, so they start first.
template <uint32_t PAIRS>
__device__ void attend_rows(float* out, const float* qkv, const uint16_t* k, const uint16_t* v, uint32_t rows,
                            const AttentionShape& shape, const StepView& view) {
    extern __shared__ __align__(16) uint8_t dynamic[];
    // Per row of the tile: the rows of its run that begins there, or 0.
    __shared__ uint32_t runs[kTileQueries];
    pdl_launch();
    pdl_wait();
    const uint32_t tile_rows = max(kTileQueries / shape.group(), 1u), begin = (gridDim.y - 1 - blockIdx.y) * tile_rows;
    if (threadIdx.x < tile_rows) {
        const uint32_t row = begin + threadIdx.x, end = min(begin + tile_rows, rows);
        uint32_t run = 0;
        if (row < end) {
            const RowInfo info = view.infos[row];
            if (info.live && in_run(info) && (info.back == 0 || threadIdx.x == 0)) run = min(info.ahead + 1, end - row);
        }
        runs[threadIdx.x] = run;
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = 0; i < tile_rows; ++i) {
        if (runs[i] != 0) attend_tile<PAIRS>(out, qkv, k, v, shape, blockIdx.x, begin + i, runs[i], view, dynamic);
    }
}

}  // namespace

// Grid: (key heads, tiles of max(64 / (n_heads / n_kv_heads), 1) rows). The number in the name: the widest head.
#define ARC_ATTEND_ROWS(WIDTH, BLOCKS)                                                                              \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) kv_attend_rows_##WIDTH(                               \
        float* out, const float* qkv, const uint16_t* k, const uint16_t* v, uint32_t rows, uint32_t n_heads,        \
        uint32_t n_kv_heads, uint32_t head_dim, float scale, uint32_t window, StepView view) {                      \
        attend_rows<WIDTH / 64>(out, qkv, k, v, rows, AttentionShape{n_heads, n_kv_heads, head_dim, scale, window}, \
                                view);                                                                              \
    }
ARC_ATTEND_ROWS(64, 1)
ARC_ATTEND_ROWS(128, 1)
ARC_ATTEND_ROWS(256, 1)

}  // namespace arc
