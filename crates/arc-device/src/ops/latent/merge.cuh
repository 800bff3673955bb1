// Latent attention: splits of a head become one, ascending, and what is left of them. The order and every operation are the same
// whoever merges.
#pragma once

#include "count.cuh"
#include "ops/latent/latent.cuh"
#include "ops/latent/parcel.cuh"
#include "ops/matmul/exchange.cuh"

namespace arc {

// Heads of a block. Fours of a head that a lane merges, at most: where two blocks share them.
constexpr uint32_t kHeads = 16, kItems = kMaxLatent / 4 / 2 / 32;
// Most blocks of a cluster, and those of one that takes several splits a block.
constexpr uint32_t kMostBlocks = 8, kLongBlocks = 16;

// A query's own list: recent rows, then compressed ones.
struct List {
    uint32_t recent, n, first;
    const uint32_t* chosen;  // null where every visible compressed row is read
};

// What all blocks of a row know of it: the query's list, its splits, its angles and sinks.
__device__ __forceinline__ List list_of(const LatentArgs& a, uint32_t r, const RowInfo& info) {
    const uint32_t visible = a.rows.ratio == 0 || !info.live ? 0 : a.rows.visible(info.pos);
    List list;
    list.first = a.first_visible(info.pos);
    list.recent = info.pos + 1 - list.first;
    list.chosen = a.top != 0 && visible > a.top ? a.picks + (size_t)r * a.top : nullptr;
    list.n = list.recent + (a.top != 0 ? min(visible, a.top) : visible);
    return list;
}

// A deliberately wrong variant for tests: as many splits as the step has rows.
__device__ __forceinline__ uint32_t split_len(const LatentArgs& a) {
    return a.mutant == 1 ? max(16u, kSplitRows / a.n_rows / 16 * 16) : kSplitRows;
}

// Angles of the row and sinks of the block's heads: loaded, and brought to shared memory when nothing else is to be loaded.
struct HeadConsts {
    float4 x;

    __device__ __forceinline__ void load(const LatentArgs& a, const RowInfo& info) {
        const uint32_t thread = threadIdx.x, head = blockIdx.y * kHeads + thread - 32;
        if (thread < kRopeDim / 4) {
            x = *reinterpret_cast<const float4*>(a.rope + (size_t)info.pos * kRopeDim + 4 * thread);
        } else if (thread >= 32 && thread - 32 < kHeads) {
            x.x = head < a.heads ? a.sinks[head] : 0.0f;
        }
    }

    __device__ __forceinline__ void store(float* angles, float* sink_of) const {
        const uint32_t thread = threadIdx.x;
        if (thread < kRopeDim / 4) {
            reinterpret_cast<float4*>(angles)[thread] = x;
        } else if (thread >= 32 && thread - 32 < kHeads) {
            sink_of[thread - 32] = x.x;
        }
    }
};

// A running softmax takes a part in: the factors of what stood before and of the part. One of them is 1.
__device__ __forceinline__ void join(float& m, float part_m, float& keep, float& add) {
    const bool higher = part_m > m;
    const float e = exp(higher ? __fsub_rn(m, part_m) : __fsub_rn(part_m, m));
    keep = higher ? e : 1.0f;
    add = higher ? 1.0f : e;
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

// What sums of a running softmax are multiplied with at its end.
__device__ __forceinline__ float finish(float m, float l, float sink) {
    const float most = sink > m ? sink : m;
    const float ours = exp(__fsub_rn(m, most));
    return __fdiv_rn(ours, __fadd_rn(__fmul_rn(l, ours), exp(__fsub_rn(sink, most))));
}

// Stores fours of heads' values, N a lane, as they are and as the first output projection reads them: the rotation undone.
// `at`: where the heads begin. Eight lanes in turn have neighbouring fours. `tag`: with which number they are sent, where they are.
template <int N>
__device__ __forceinline__ void put(const LatentArgs& a, size_t at, uint32_t dim, const float* angles, float (&y)[N][4],
                                    const uint32_t* h, const uint32_t* quad, const bool* there, uint32_t tag) {
    const uint32_t rope_quad = (dim - kRopeDim) / 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const size_t to = at + h[n] * dim + 4 * quad[n];
        if (there[n]) *reinterpret_cast<float4*>(a.out + to) = make_float4(y[n][0], y[n][1], y[n][2], y[n][3]);
        if (there[n] && quad[n] >= rope_quad && a.mutant != 3) {
            const float4 cs = reinterpret_cast<const float4*>(angles)[quad[n] - rope_quad];
            turn(y[n][0], y[n][1], cs.x, -cs.y), turn(y[n][2], y[n][3], cs.z, -cs.w);
        }
        if (there[n] && a.turned != nullptr) {
            *reinterpret_cast<float4*>(a.turned + to) = make_float4(y[n][0], y[n][1], y[n][2], y[n][3]);
        }
    }
    if (a.codes == nullptr) return;
    Quantised q[N];
    quantise(y, q);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const size_t to = at + h[n] * dim + 4 * quad[n];
        if (a.sent_codes != 0) send_block(q[n], there[n], a.sent_codes + 48 * (to / 32), 16, tag);
        if (!there[n]) continue;
        *reinterpret_cast<uint32_t*>(a.codes + to) = q[n].q;
        if (threadIdx.x % 8 == 0) a.code_scales[to / 32] = q[n].d, a.code_sums[to / 32] = q[n].sums;
    }
}

// Leaves what a head's lanes have merged of the block's share, ITEMS fours each: `y` times `factor`.
template <uint32_t LANES, uint32_t ITEMS>
__device__ __forceinline__ void leave_merged(const LatentArgs& a, size_t at, uint32_t dim, uint32_t share, float factor,
                                             const float* angles, float (&y)[ITEMS][4], uint32_t tag) {
    const uint32_t lane = threadIdx.x % LANES, head = threadIdx.x / LANES, quads = dim / 4;
    const uint32_t heads = min(kHeads, a.heads - blockIdx.y * kHeads);
    uint32_t h[ITEMS], quad[ITEMS];
    bool there[ITEMS];
#pragma unroll
    for (uint32_t k = 0; k < ITEMS; ++k) {
        h[k] = head, quad[k] = blockIdx.x * share + min(lane + 32 * k, share - 1);
        there[k] = lane + 32 * k < share && head < heads && quad[k] < quads;
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) y[k][e] = __fmul_rn(y[k][e], factor);
    }
    put(a, at, dim, angles, y, h, quad, there, tag);
}

// A split more in a head's sums.
template <uint32_t ITEMS>
__device__ __forceinline__ void join_items(float (&y)[ITEMS][4], float keep, const float4 (&x)[ITEMS], float add) {
#pragma unroll
    for (uint32_t k = 0; k < ITEMS; ++k) {
        const float v[4] = {x[k].x, x[k].y, x[k].z, x[k].w};
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) y[k][e] = joined(y[k][e], keep, v[e], add);
    }
}

// What a head's lanes have merged: sums of ITEMS fours, and the running softmax.
template <uint32_t ITEMS>
struct Merged {
    float y[ITEMS][4] = {}, m = -ARC_INF, l = 0.0f;
};

// Merges what the blocks of a cluster send of a round's splits, ascending: `splits` of them, no more than there are blocks. How they
// are weighed is known before their sums come: `known` is called between, and `came` behind these. `turn`: 0 and 1 by rounds.
template <uint32_t LANES, uint32_t BLOCKS, uint32_t ITEMS, typename Known, typename Came>
__device__ __forceinline__ void merge_parts(Merged<ITEMS>& of, const float2 (&weight_of)[BLOCKS][kHeads], const float* received,
                                            uint32_t share, uint32_t splits, uint64_t* weighed, uint64_t* parcel, uint32_t turn,
                                            Known known, Came came) {
    static_assert(LANES >= BLOCKS, "a lane a split");
    constexpr uint32_t kTogether = 4;
    const uint32_t head = threadIdx.x / LANES, first = threadIdx.x % LANES;
    const bool merges = head < kHeads;
    // Of many there are no registers for all of them: they are asked for twice.
    constexpr bool kHeld = BLOCKS <= kMostBlocks;
    float own_keep = 0.0f, own_add = 0.0f, keep[kHeld ? BLOCKS : 1], add[kHeld ? BLOCKS : 1];
    auto ask = [&](uint32_t s) {
        keep[kHeld ? s : 0] = __shfl_sync(~0u, own_keep, s, LANES), add[kHeld ? s : 0] = __shfl_sync(~0u, own_add, s, LANES);
    };
    if (merges) {
        barrier_wait(weighed, turn);
        // A lane finds out how its split joins those before, and tells the head's others.
        float m = of.m;
        const uint32_t own = min(first, splits - 1);
#pragma unroll
        for (uint32_t s = 0; s < BLOCKS; ++s) {
            const float other = weight_of[s][head].x;
            m = s < own && other > m ? other : m;
        }
        join(m, weight_of[own][head].x, own_keep, own_add);
#pragma unroll
        for (uint32_t s = 0; s < BLOCKS; ++s) {
            ask(s);
            if (s < splits) of.l = joined(of.l, keep[kHeld ? s : 0], weight_of[s][head].y, add[kHeld ? s : 0]);
        }
        of.m = __shfl_sync(~0u, m, splits - 1, LANES);
        known();
    }
    barrier_wait(parcel, turn);
    came();
    if (!merges) return;
    const uint32_t share_stride = 4 * share + 8;
#pragma unroll
    for (uint32_t before = 0; before < BLOCKS; before += kTogether) {
        if (before >= splits) continue;
        float4 x[kTogether][ITEMS];
#pragma unroll
        for (uint32_t s = 0; s < kTogether; ++s) {
#pragma unroll
            for (uint32_t k = 0; k < ITEMS; ++k) {
                const uint32_t split = min(before + s, splits - 1), i = min(first + 32 * k, share - 1);
                x[s][k] = *reinterpret_cast<const float4*>(received + (split * kHeads + head) * share_stride + 4 * i);
            }
        }
#pragma unroll
        for (uint32_t s = 0; s < kTogether; ++s) {
            const uint32_t at = before + s;
            if (!kHeld) ask(at);
            if (at < splits) join_items(of.y, keep[kHeld ? at : 0], x[s], add[kHeld ? at : 0]);
        }
    }
}

// How many lanes a head has where a block merges such a share, and how many fours each.
template <typename Merge>
__device__ __forceinline__ void by_share(uint32_t share, Merge merge) {
    if (share > 32) {
        merge(Count<32>(), Count<kItems>());
    } else if (share > 16) {
        merge(Count<32>(), Count<1>());
    } else {
        merge(Count<16>(), Count<1>());
    }
}

// A block's share of a head's fours, of so many blocks: whole blocks of 32 values.
__device__ __forceinline__ uint32_t share_of(uint32_t quads, uint32_t blocks) { return (quads + 8 * blocks - 1) / (8 * blocks) * 8; }

}  // namespace arc
