// DeepSeek-V4's attention: the step's own rows. latent.cu says when these run ("What runs ahead").
//
// latent_rows    rows and index queries, a warp each; and per compressor a block that pools the row which the token
//                completes. Tokens of short runs enter their rings here, since nothing that this step still reads stands
//                there. Of one row, blocks leave what the attention may read as tiles of BF16. One block more does what the
//                site before has put off (hc.cu). With `left`, a kernel that needs little of it (`index_choose`) begins
//                with it. Exact.
// latent_rings   the tokens of longer runs, after the attention that reads what they overwrite. Exact.
#include "ops/hc/hc.cuh"
#include "ops/latent/latent.cuh"
#include "pdl.cuh"

namespace arc {

namespace {

// Rows of a step up to which `latent_rows` runs ahead, and sends for what the attention will read: matmul/cuda.rs's
// FEW_ROWS.
constexpr uint32_t kFewRows = 8;
// Rows of a list that are sent for: what the attention begins with.
constexpr uint32_t kMostAhead = 640;

// Leaves row `i` in its tile, as storing left it, by a warp.
__device__ __forceinline__ void leave_in_tile(const LatentArgs& a, uint32_t i, const float (&x)[kLaneValues]) {
    const uint32_t lane = threadIdx.x & 31;
    // More than there is room for: the attention finds that out.
    if (i >= kTileRows) return;
    uint16_t* to = a.tiles + (size_t)i * a.tile_row();
#pragma unroll
    for (uint32_t j = 0; j < kLaneValues; ++j) {
        if (lane + 32 * j < a.dim) to[lane + 32 * j] = bf16_bits(x[j]);
    }
}

// What the layer's compressors take; `tag`: the number of the launch that sends it.
__device__ __forceinline__ Work pool_work(const LatentArgs& a, uint32_t tag) {
    return Work{a.pool, a.pool_dim, a.sent == 0 ? 0 : a.sent + 8 * (a.q_rank + a.dim), tag};
}

// The block of a compressor: pools, norms, rotates and stores, where the row's token completes one.
__device__ void compress(const PoolArgs& c, uint32_t format, const LatentArgs& a, uint32_t r, const RowInfo& info,
                         const StepView& view, uint32_t tag, float* row) {
    const Work work = pool_work(a, tag);
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
        pool_row(row, c, work, r, info);
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
            if (blockIdx.x == 0 && a.tiles != nullptr) leave_in_tile(a, info.pos + 1 - a.first_visible(info.pos) + w, x);
            return;
        }
    }
    if (c.short_run(info)) keep_token(c, work, r, info, completes ? blockDim.x - 32 : blockDim.x);
}

// The row of the token of `info`, by a warp.
__device__ void make_row(const LatentArgs& a, uint32_t r, const RowInfo& info, uint32_t tag) {
    const uint32_t lane = threadIdx.x & 31;
    float* kv = a.kv + (size_t)r * a.dim;
    float x[kLaneValues], norm[kLaneValues];
    Angles angles;
    load_row(norm, a.kv_norm, a.dim);
    angles.load(a.rope + (size_t)info.pos * kRopeDim, a.dim);
    if (a.sent == 0) {
        load_row_early(x, a.low + (size_t)r * (a.q_rank + a.dim) + a.q_rank, a.dim);
    } else {
        bool there;
        do {
            there = true;
#pragma unroll
            for (uint32_t j = 0; j < kLaneValues; ++j) {
                x[j] = lane + 32 * j < a.dim ? look_at_pair(a.sent + 8 * (a.q_rank + lane + 32 * j), tag, there) : 0.0f;
            }
        } while (!__all_sync(0xffffffffu, there));
    }
    const float factor = rms_factor(x, a.dim, a.eps);
#pragma unroll
    for (uint32_t j = 0; j < kLaneValues; ++j) {
        if (lane + 32 * j < a.dim) x[j] = info.live ? __fmul_rn(__fmul_rn(x[j], factor), norm[j]) : 0.0f;
    }
    if (info.live) {
        rope_row(x, a.dim, angles);
        // The ring takes the row as storing left it, which may have a smaller scale of its own.
        keep_row(x, a.dim, a.row_format, nullptr);
    }
    store_row(kv, x, a.dim);
    if (info.live && a.short_run(info)) keep_row(x, a.dim, a.row_format, a.in_window(info.slot, info.pos));
    if (a.tiles != nullptr) leave_in_tile(a, info.pos - a.first_visible(info.pos), x);
}

// Leaves what the attention of a row may read in tiles, but for the rows that are made in this step; what follows is zero. By warp
// `warp` of `warps`.
__device__ void unpack(const LatentArgs& a, const StepView& view, const RowInfo& info, uint32_t warp, uint32_t warps) {
    const uint32_t* blocks = view.blocks + (size_t)info.slot * view.max_blocks;
    const uint32_t lane = threadIdx.x & 31, first = a.first_visible(info.pos), recent = info.pos + 1 - first;
    const uint32_t n = recent + a.visible(info.pos);
    const bool completes = a.rows.ratio != 0 && (info.pos + 1) % a.rows.ratio == 0;
    const uint32_t nope = a.dim - kRopeDim, codes = nope / 8, words = codes + kRopeDim / 4;
#pragma unroll 1
    for (uint32_t i = warp; i < min((n / kSplitRows + 1) * kSplitRows, kTileRows); i += warps) {
        if (i == recent - 1 || (completes && i + 1 == n)) continue;
        const uint8_t* row = i < recent ? a.in_window(info.slot, first + i)
                             : i < n    ? a.rows.rows + a.rows.place(blocks, i - recent) * a.row_bytes
                                        : nullptr;
        uint16_t* to = a.tiles + (size_t)i * a.tile_row();
        uint2 x[3];
        // The scales are behind all words, if there are any.
        uint2 scales = make_uint2(0, 0);
        if (row != nullptr && codes != 0) scales = __ldcg(reinterpret_cast<const uint2*>(row) + words);
#pragma unroll
        for (uint32_t j = 0; j < 3; ++j) {
            const uint32_t word = lane + 32 * j;
            x[j] = row != nullptr && word < words ? __ldcg(reinterpret_cast<const uint2*>(row) + word) : make_uint2(0, 0);
        }
#pragma unroll
        for (uint32_t j = 0; j < 3; ++j) {
            const uint32_t word = lane + 32 * j;
            if (word < codes) {
                const uint32_t block = word / 8, scale = (block < 4 ? scales.x : scales.y) >> 8 * (block % 4) & 0xff;
                *reinterpret_cast<uint4*>(to + 8 * word) = row == nullptr ? make_uint4(0, 0, 0, 0) : decode_eight(x[j], scale);
            } else if (word < words) {
                *reinterpret_cast<uint2*>(to + nope + 4 * (word - codes)) = x[j];
            }
        }
    }
}

// Brings what the attention of a row will read into the second cache, by threads `thread` of `threads`.
__device__ void send_for_rows(const LatentArgs& a, const StepView& view, uint32_t r, const RowInfo& info, uint32_t thread,
                              uint32_t threads) {
    const uint32_t* blocks = view.blocks + (size_t)info.slot * view.max_blocks;
    const uint32_t first = a.first_visible(info.pos), recent = info.pos - first;
    const uint32_t n = a.tiles != nullptr ? 0 : min(recent + (a.chooses(info.pos) ? 0 : a.visible(info.pos)), kMostAhead);
#pragma unroll 4
    for (uint32_t i = thread; i < n; i += threads) {
        const uint8_t* row = i < recent ? a.in_window(info.slot, first + i)
                                        : a.rows.rows + a.rows.place(blocks, i - recent) * a.row_bytes;
        for (uint32_t at = 0; at < a.row_bytes + 127; at += 128) prefetch(row + min(at, a.row_bytes - 1));
    }
    if (thread * 32 < a.heads) prefetch(a.sinks + thread * 32);
}

}  // namespace

// Grid: (compressor of rows, of keys, the step's row, eight index queries each or shares of the list as tiles, and where `mixing`
// is not null what the site before has put off; rows). Small blocks: there is room for them beside the product.
extern "C" __global__ void __launch_bounds__(256, 1)
    latent_rows(LatentArgs a, StepView view, float* mixing, unsigned iterations, float eps) {
    __shared__ __align__(16) float row[kMaxLatent];
    const Marks marks(kMarkRows);
    const uint32_t r = blockIdx.y;
    // Products over more rows let their successor start before their own wait.
    const bool ahead = a.n_rows <= kFewRows;
    if (!ahead) pdl_wait();
    if (a.left != nullptr) pdl_launch();
    const uint32_t tag = a.sent != 0 ? __ldcg(a.counts) + 1 : 0;
    const RowInfo info = info_early(view, r);
    if (mixing != nullptr && blockIdx.x == gridDim.x - 1) {
        // The site after the attention is the first to read it: nobody else is kept.
        if (a.left == nullptr) pdl_launch();
        if (threadIdx.x < 32) hc::settle(mixing + r * hc::kMixes, iterations, eps);
    } else if (blockIdx.x < 2) {
        const PoolArgs& c = blockIdx.x == 0 ? a.rows : a.keys;
        if (info.live && c.ratio != 0) {
            compress(c, blockIdx.x == 0 ? a.row_format : a.key_format, a, r, info, view, tag, row);
        }
    } else if (blockIdx.x > 2 && a.tiles != nullptr) {
        const uint32_t others = gridDim.x - 3 - (mixing != nullptr);
        if (info.live) unpack(a, view, info, (blockIdx.x - 3) * (blockDim.x / 32) + threadIdx.x / 32, others * (blockDim.x / 32));
    } else if (blockIdx.x > 2) {
        const uint32_t h = (blockIdx.x - 3) * (blockDim.x / 32) + threadIdx.x / 32;
        if (info.live && h < a.index_heads) {
            float* q = a.index_q + ((size_t)r * a.index_heads + h) * a.index_dim;
            float x[4];
            Angles angles;
            load_row_early(x, q, a.index_dim);
            angles.load(a.rope + (size_t)info.pos * kRopeDim, a.index_dim);
            rope_row(x, a.index_dim, angles);
            keep_row(x, a.index_dim, a.key_format, nullptr);
            store_row(q, x, a.index_dim);
        }
    } else if (threadIdx.x < 32) {
        make_row(a, r, info, tag);
        // For the attention: the number of the launch before may be this one when it begins.
        if (a.sent != 0 && threadIdx.x == 0) a.counts[3] = tag;
    } else if (info.live && ahead) {
        send_for_rows(a, view, r, info, threadIdx.x - 32, blockDim.x - 32);
    }
    __threadfence();
    // Tiles are brought by bulk copies.
    asm volatile("fence.proxy.async.global;" ::: "memory");
    __syncthreads();
    marks.mark(2);
    if (a.left == nullptr) pdl_launch();
    if (a.left != nullptr && threadIdx.x == 0) arrive(a.left);
    // Who leaves last prepares the next launch, when every block of this one's product has read the number.
    if (a.sent != 0 && threadIdx.x == 0 && atomicAdd(a.counts + 2, 1u) + 1 == gridDim.x * gridDim.y) {
        while (arrived(a.counts + 1) < a.due) {}
        a.counts[1] = 0, a.counts[2] = 0, a.counts[0] += 1;
    }
    if (ahead) pdl_wait();
    marks.mark(3);
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
    if (c.ratio != 0 && info.ahead < c.ring_len && !c.short_run(info)) keep_token(c, pool_work(a, 0), r, info, blockDim.x);
}

}  // namespace arc
