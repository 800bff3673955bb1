// Compressors: pooling of recent tokens, and the rings that hold them. The CUDA twin of compress.rs, exact.
#pragma once

#include <cstdint>

#include "math.cuh"
#include "pdl.cuh"
#include "step.cuh"
#include "sum.cuh"

namespace arc {

// One compressor: shape, weights, state, and its place in the step's workspace. Ratio 0: the layer has none.
struct PoolArgs {
    float* ring;        // [slots, ring_len, 2, width]
    uint8_t* rows;      // [blocks, rows_per_block, row_bytes]
    const float* bias;  // [ratio, width]; null in a deliberately wrong variant for tests: none
    const float* norm;  // [dim]
    uint32_t ratio, overlap, dim;
    uint32_t at;        // first value of a row of the workspace
    uint32_t ring_len, row_bytes;

    __device__ uint32_t width() const { return overlap * dim; }
    __device__ uint32_t visible(uint32_t pos) const { return (pos + 1) / ratio; }

    // Which row of the pool holds row w: in a block of this place in the table of blocks, and there.
    __device__ uint32_t entry(uint32_t w) const { return ((w + 1) * ratio - 1) / kBlockTokens; }
    __device__ size_t place_in(uint32_t block, uint32_t w) const {
        const uint32_t last = (w + 1) * ratio - 1, per_block = ratio > kBlockTokens ? 1 : kBlockTokens / ratio;
        return (size_t)block * per_block + last % kBlockTokens / ratio;
    }
    __device__ size_t place(const uint32_t* blocks, uint32_t w) const { return place_in(__ldcg(blocks + entry(w)), w); }

    // Values and gates of a token in its sequence's ring.
    __device__ float* in_ring(uint32_t slot, uint32_t p) const {
        return ring + ((size_t)slot * ring_len + p % ring_len) * 2 * width();
    }

    // Whether rows of a run this long may put their tokens into the ring while others of the run still read it: no token
    // then takes the place of one that a row of the run pools.
    __device__ bool short_run(const RowInfo& info) const {
        return info.back + info.ahead + 1 <= ring_len - overlap * ratio + 1;
    }
};
static_assert(sizeof(PoolArgs) == 56);

// Values and gates of a step's tokens, a row each, whose gates have no bias yet: in the workspace; or, of one row, pairs that the
// product before sends (`send_pair`).
struct Work {
    const float* at;
    uint32_t stride;
    uint64_t sent;  // 0: none
    uint32_t tag;
};

// Tokens that are loaded together.
constexpr uint32_t kPoolTokens = 8;

// The row that the token of `info` completes, before its norm, by a block; `row`: [dim] in shared memory. A thread takes pairs
// of channels.
__device__ void pool_row(float* row, const PoolArgs& c, const Work& work, uint32_t r, const RowInfo& info) {
    const uint32_t w = info.pos / c.ratio, own = w * c.ratio, width = c.width();
    const uint32_t start = c.overlap == 2 && w > 0 ? own - c.ratio : own, n = own + c.ratio - start;
    // Tokens before this one stand in the ring, up to the first that runs in this step.
    const uint32_t in_ring = info.pos - start > info.back ? info.pos - start - info.back : 0;
    const uint32_t first_place = start % c.ring_len;
    const float* ring = c.ring + (size_t)info.slot * c.ring_len * 2 * width;
    const float* here = work.at + (size_t)(r - (info.pos - start - in_ring)) * work.stride + c.at;
    for (uint32_t channel = 2 * threadIdx.x; channel < c.dim; channel += 2 * blockDim.x) {
        // Values of the i-th token; its gates stand `width` behind them, and `bias` is still to be added where not null.
        auto slot = [&](uint32_t i, const float*& bias) {
            const bool before = start + i < own;
            const uint32_t first = (before ? 0 : (c.overlap - 1) * c.dim) + channel;
            uint32_t place = first_place + i;
            place -= place >= c.ring_len ? c.ring_len : 0;
            const bool kept = i < in_ring;
            bias = kept || c.bias == nullptr ? nullptr : c.bias + (before || start == own ? i : i - c.ratio) * width + first;
            return (kept ? ring + (size_t)place * 2 * width : here + (size_t)(i - in_ring) * work.stride) + first;
        };
        float2 a[kPoolTokens], g[kPoolTokens];
        auto load = [&](uint32_t from, bool values) {
#pragma unroll
            for (uint32_t i = 0; i < kPoolTokens; ++i) {
                const float* bias;
                const float* at = slot(min(from + i, work.sent != 0 ? max(n, 2u) - 2 : n - 1), bias);
                // Past the first cache: this may run before the kernels that wrote it are waited for.
                g[i] = __ldcg(reinterpret_cast<const float2*>(at + width));
                if (values) a[i] = __ldcg(reinterpret_cast<const float2*>(at));
                if (bias != nullptr) {
                    const float2 b = *reinterpret_cast<const float2*>(bias);
                    g[i].x = __fadd_rn(g[i].x, b.x), g[i].y = __fadd_rn(g[i].y, b.y);
                }
            }
            if (work.sent == 0 || from + kPoolTokens < n) return;
            // The last token is on its way.
            const uint32_t first = (c.overlap - 1) * c.dim + channel;
            const uint64_t at = work.sent + 8 * (c.at + first);
            float2 bias = make_float2(0.0f, 0.0f);
            if (c.bias != nullptr) bias = *reinterpret_cast<const float2*>(c.bias + (c.ratio - 1) * width + first);
            float2 value, gate;
            bool there;
            do {
                there = true;
                value = look_at_pairs(at, work.tag, there), gate = look_at_pairs(at + 8 * width, work.tag, there);
            } while (!there);
            if (c.bias != nullptr) gate.x = __fadd_rn(gate.x, bias.x), gate.y = __fadd_rn(gate.y, bias.y);
#pragma unroll
            for (uint32_t i = 0; i < kPoolTokens; ++i) {
                if (from + i + 1 >= n) g[i] = gate, a[i] = value;
            }
        };
        float2 top = make_float2(-ARC_INF, -ARC_INF), sum = make_float2(0.0f, 0.0f), out = sum;
        const bool once = n <= kPoolTokens;
        for (uint32_t from = 0; from < n; from += kPoolTokens) {
            load(from, once);
#pragma unroll
            for (uint32_t i = 0; i < kPoolTokens; ++i) {
                // A token that is met twice changes no maximum.
                top.x = g[i].x > top.x ? g[i].x : top.x;
                top.y = g[i].y > top.y ? g[i].y : top.y;
            }
        }
        for (uint32_t from = 0; from < n; from += kPoolTokens) {
            if (!once) load(from, true);
#pragma unroll
            for (uint32_t i = 0; i < kPoolTokens; ++i) g[i].x = exp(__fsub_rn(g[i].x, top.x)), g[i].y = exp(__fsub_rn(g[i].y, top.y));
#pragma unroll
            for (uint32_t i = 0; i < kPoolTokens; ++i) {
                if (from + i < n) {
                    out.x = __fmaf_rn(g[i].x, a[i].x, out.x), out.y = __fmaf_rn(g[i].y, a[i].y, out.y);
                    sum.x = __fadd_rn(sum.x, g[i].x), sum.y = __fadd_rn(sum.y, g[i].y);
                }
            }
        }
        *reinterpret_cast<float2*>(row + channel) = make_float2(__fdiv_rn(out.x, sum.x), __fdiv_rn(out.y, sum.y));
    }
}

// A token's values and gates, bias included, to their place in the ring, by the first `threads` threads of a block.
__device__ void keep_token(const PoolArgs& c, const Work& work, uint32_t r, const RowInfo& info, uint32_t threads) {
    // Fours that a thread asks for at once.
    constexpr uint32_t kTogether = 2;
    const uint32_t width = c.width();
    const float* from = work.at + (size_t)r * work.stride + c.at;
    float* to = c.in_ring(info.slot, info.pos);
    const float* bias = c.bias + info.pos % c.ratio * width;
#pragma unroll 1
    for (uint32_t first = 4 * threadIdx.x; first < 2 * width; first += 4 * kTogether * threads) {
        float4 x[kTogether], b[kTogether];
        uint32_t at[kTogether];
        bool there;
#pragma unroll
        for (uint32_t n = 0; n < kTogether; ++n) {
            at[n] = first + 4 * n * threads < 2 * width ? first + 4 * n * threads : first;
            if (at[n] >= width && c.bias != nullptr) b[n] = *reinterpret_cast<const float4*>(bias + at[n] - width);
        }
        do {
            there = true;
#pragma unroll
            for (uint32_t n = 0; n < kTogether; ++n) {
                if (work.sent == 0) {
                    x[n] = __ldcg(reinterpret_cast<const float4*>(from + at[n]));
                } else {
                    const uint64_t pairs = work.sent + 8 * (c.at + at[n]);
                    const float2 low = look_at_pairs(pairs, work.tag, there), high = look_at_pairs(pairs + 16, work.tag, there);
                    x[n] = make_float4(low.x, low.y, high.x, high.y);
                }
            }
        } while (!there);
#pragma unroll
        for (uint32_t n = 0; n < kTogether; ++n) {
            if (at[n] >= width && c.bias != nullptr) x[n] = add4(x[n], b[n]);
            *reinterpret_cast<float4*>(to + at[n]) = x[n];
        }
    }
}

}  // namespace arc
