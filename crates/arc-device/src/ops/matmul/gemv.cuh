// Products with few rows: every weight tile is read once and meets up to NR rows.
//
// A block takes `per_block` groups at a time. A warp owns tiles of them and has up to `stages` in flight, brought into
// shared memory by bulk copies: the first ones before `pdl_wait`, since weights depend on no former kernel. Each lane
// computes its slice; the partial sums meet in shared memory, where slices are added in ascending order.
#pragma once

#include "../../pdl.cuh"
#include "dot.cuh"
#include "iq2.cuh"
#include "product.cuh"

namespace arc {

__device__ __forceinline__ uint32_t shared_at(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(uint64_t* bar) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_at(bar)) : "memory");
}

// One thread: `bytes` from global to shared memory, both 16-byte aligned; completes on `bar`.
__device__ __forceinline__ void bulk_load(void* to, const uint8_t* from, uint32_t bytes, uint64_t* bar) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(bar)), "r"(bytes) : "memory");
    asm volatile(
        "{\n"
        ".reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n"
        "}\n" ::"r"(shared_at(to)),
        "l"(from), "r"(bytes), "r"(shared_at(bar))
        : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni over;\n"
        "bra.uni again;\n"
        "over:\n"
        "}\n" ::"r"(shared_at(bar)),
        "r"(parity)
        : "memory");
}

template <uint32_t F, int NR>
struct Gemv {
    const Product& p;
    uint8_t* smem;
    uint32_t warp, lane, warps;
    uint32_t tiles, per_group, items;  // tiles of a group, of both of a pair, of a step
    uint32_t chunks, steps, first, stride, last;  // steps of a part; all; this block's
    uint32_t active;  // parts or experts with rows

    __device__ __forceinline__ bool by_parts() const { return p.parts != 0; }

    // Where item j of the step at `group` of `part` lies; false where there is nothing.
    __device__ __forceinline__ bool locate(uint32_t part, uint32_t group, uint32_t j, uint32_t& seg, uint32_t& t,
                                           const uint8_t*& from) const {
        const uint32_t i = j % per_group;
        uint32_t g = group + j / per_group;
        if (g >= p.groups) return false;
        t = i % tiles;
        seg = 0;
        if (p.pair) {
            seg = i / tiles;
        } else {
            while (seg + 1 < p.n_segs && g >= p.segs[seg].groups_end) ++seg;
            if (seg > 0) g -= p.segs[seg - 1].groups_end;
        }
        from = reinterpret_cast<const uint8_t*>(p.segs[seg].base) + (by_parts() ? part * p.part_bytes : 0) +
               (size_t)g * p.cut.group_bytes(F) + p.cut.tile_at(F, t);
        return true;
    }

    // The part or expert of a step. `known`: of the step before, which usually has the same.
    struct Part {
        uint32_t nth, id;
    };
    __device__ __forceinline__ Part part_of(uint32_t step, Part known) const {
        if (!by_parts()) return Part{0, 0};
        const uint32_t nth = step / chunks;
        if (nth == known.nth) return known;
        if (p.bounds == 0) return Part{nth, nth};
        return Part{nth, active_expert(reinterpret_cast<const uint32_t*>(p.bounds), p.experts, nth)};
    }
    __device__ __forceinline__ uint32_t group_of(uint32_t step) const {
        return (by_parts() ? step % chunks : step) * p.per_block;
    }

    // Input row of row r of a part or expert.
    __device__ __forceinline__ uint32_t input_row(uint32_t part, uint32_t r) const {
        if (p.bounds != 0) return p.gather ? reinterpret_cast<const uint32_t*>(p.order)[r] / p.chosen : r;
        return by_parts() ? r * p.x_row + part * p.x_part : r;
    }

    // Brings `rows` rows of activations into shared memory.
    __device__ void stage(uint32_t part, uint32_t row, uint32_t rows) const {
        const uint32_t slices = p.cut.slices, cols = p.cut.cols;
        for (uint32_t r = 0; r < rows; ++r) {
            const size_t from = input_row(part, row + r);
            if (p.q != 0) {
                const uint4* q = reinterpret_cast<const uint4*>(p.q + from * cols);
                uint8_t* to = smem + p.q_at + r * slices * 272;
                for (uint32_t i = threadIdx.x; i < cols / 16; i += blockDim.x) {
                    *reinterpret_cast<uint4*>(to + (i / 16) * 272 + (i % 16) * 16) = q[i];
                }
                const float* d = reinterpret_cast<const float*>(p.d) + from * (cols / 32);
                const uint32_t* s = reinterpret_cast<const uint32_t*>(p.sums) + from * (cols / 32);
                float* d_to = reinterpret_cast<float*>(smem + p.d_at) + r * slices * 8;
                uint32_t* s_to = reinterpret_cast<uint32_t*>(smem + p.sums_at) + r * slices * 8;
                for (uint32_t i = threadIdx.x; i < cols / 32; i += blockDim.x) d_to[i] = d[i], s_to[i] = s[i];
            }
            if (p.floats != 0) {
                const float* f = reinterpret_cast<const float*>(p.floats) + from * cols;
                float* to = reinterpret_cast<float*>(smem + p.floats_at) + r * slices * 260;
                for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) to[(i / 256) * 260 + i % 256] = f[i];
            }
        }
    }

    template <int N>
    __device__ __forceinline__ void dot(const uint8_t* tile, uint32_t t, float* to) const {
        const uint32_t slice = p.cut.slice_of(t, lane);
        const uint32_t cols = p.cut.tail() != 0 && slice + 1 == p.cut.slices ? p.cut.tail() : kSlice;
        Inputs x;
        x.q = reinterpret_cast<const int8_t*>(smem + p.q_at) + slice * 272;
        x.d = reinterpret_cast<const float*>(smem + p.d_at) + slice * 8;
        x.sums = reinterpret_cast<const uint32_t*>(smem + p.sums_at) + slice * 8;
        x.f = reinterpret_cast<const float*>(smem + p.floats_at) + slice * 260;
        x.q_row = p.cut.slices * 272;
        x.d_row = p.cut.slices * 8;
        x.f_row = p.cut.slices * 260;
        x.patterns = reinterpret_cast<const uint32_t*>(smem + p.table_at);
        float acc[N];
        dot_slice<N, F>(tile, lane, cols, x, acc);
#pragma unroll
        for (int r = 0; r < N; ++r) to[r * kLanes] = acc[r];
    }

    // The sum of row r's slices of one group, n its row in the group: ascending, from +0.
    __device__ __forceinline__ float total(const float* partials, uint32_t item, uint32_t r, uint32_t n) const {
        float sum = 0.0f;
        for (uint32_t t = 0; t < tiles; ++t) {
            const float* at = partials + ((item + t) * NR + r) * kLanes + n;
            for (uint32_t c = 0; c < kLanes; c += p.cut.group_rows()) sum = __fadd_rn(sum, at[c]);
        }
        return sum;
    }

    __device__ void run() {
        warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
        tiles = p.cut.tiles();
        per_group = p.pair ? 2 * tiles : tiles;
        items = p.per_block * per_group;
        chunks = (p.groups + p.per_block - 1) / p.per_block;
        uint64_t* bars = reinterpret_cast<uint64_t*>(smem) + warp * p.stages;
        uint8_t* ring = smem + p.ring_at + (size_t)warp * p.stages * p.stage_bytes;
        if (lane == 0) {
            for (uint32_t i = 0; i < p.stages; ++i) barrier_init(bars + i);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
        if constexpr (F == IQ2_XXS) {
            uint32_t* table = reinterpret_cast<uint32_t*>(smem + p.table_at);
            for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) table[i] = spread_pattern(kPatterns[i]);
        }
        pdl_launch();
        const bool experts = p.bounds != 0;
        // Which experts are due is known after the wait only.
        if (experts) {
            pdl_wait();
            active = active_expert(reinterpret_cast<const uint32_t*>(p.bounds), p.experts, 0xffffffffu);
        } else {
            active = by_parts() ? p.parts : 1;
        }
        steps = active * chunks;
        if (by_parts()) {
            // Neighbouring steps meet the same rows.
            const uint32_t each = (steps + gridDim.x - 1) / gridDim.x;
            first = blockIdx.x * each, stride = 1, last = min(first + each, steps);
        } else {
            first = blockIdx.x, stride = gridDim.x, last = steps;
        }
        // What is to be loaded next, and how many tiles were asked for.
        uint32_t next_step = first, next_item = warp, asked = 0;
        const Part none{0xffffffffu, 0};
        Part next_part = first < last ? part_of(first, none) : none;
        auto ask = [&]() {
            while (next_step < last) {
                if (next_item >= items) {
                    next_step += stride, next_item = warp;
                    if (next_step < last) next_part = part_of(next_step, next_part);
                    continue;
                }
                uint32_t seg, t;
                const uint8_t* from;
                const bool there = locate(next_part.id, group_of(next_step), next_item, seg, t, from);
                next_item += warps;
                if (!there) continue;
                if (lane == 0) {
                    const uint32_t i = asked % p.stages;
                    bulk_load(ring + i * p.stage_bytes, from, p.cut.tile_len(F, t), bars + i);
                }
                ++asked;
                return;
            }
        };
        for (uint32_t i = 0; i < p.stages; ++i) ask();
        if (!experts) pdl_wait();

        // Rows beyond NR are further blocks in y.
        Part now = none;
        uint32_t staged = 0xffffffffu, taken = 0, row = blockIdx.y * NR, rows = 0, end = p.rows;
        float* partials = reinterpret_cast<float*>(smem + p.partials_at);
        for (uint32_t step = first; step < last; step += stride) {
            now = part_of(step, now);
            const uint32_t part = now.id, group = group_of(step);
            if (part != staged) {
                if (experts) {
                    const uint32_t* bounds = reinterpret_cast<const uint32_t*>(p.bounds);
                    row = bounds[part] + blockIdx.y * NR, end = bounds[part + 1];
                }
                rows = row < end ? min(end - row, (uint32_t)NR) : 0;
                // Everybody has left the rows before: they passed the barrier of the last step.
                stage(part, row, rows);
                staged = part;
                __syncthreads();
            }
            for (uint32_t j = warp; j < items; j += warps) {
                uint32_t seg, t;
                const uint8_t* from;
                if (!locate(part, group, j, seg, t, from)) continue;
                const uint32_t i = taken % p.stages;
                barrier_wait(bars + i, (taken / p.stages) & 1);
                const uint8_t* tile = ring + i * p.stage_bytes;
                float* to = partials + (size_t)j * NR * kLanes + lane;
                // Experts mostly have fewer rows than there is room for.
                if constexpr (NR > 1) {
                    if (rows == 1) {
                        dot<1>(tile, t, to);
                    } else if (NR > 4 && rows <= 4) {
                        dot<NR / 2>(tile, t, to);
                    } else {
                        dot<NR>(tile, t, to);
                    }
                } else {
                    dot<NR>(tile, t, to);
                }
                ++taken;
                __syncwarp();
                ask();
            }
            __syncthreads();
            const uint32_t wide = p.cut.group_rows(), outputs = p.per_block * wide;
            for (uint32_t o = threadIdx.x; o < outputs * rows; o += blockDim.x) {
                const uint32_t r = o / outputs, n = o % outputs, g = group + n / wide;
                if (g >= p.groups) continue;
                uint32_t seg = 0, in_seg = g;
                if (!p.pair) {
                    while (seg + 1 < p.n_segs && g >= p.segs[seg].groups_end) ++seg;
                    if (seg > 0) in_seg -= p.segs[seg - 1].groups_end;
                }
                const uint32_t at = in_seg * wide + n % wide;
                if (at >= p.segs[seg].rows) continue;
                const uint32_t item = n / wide * per_group;
                const float v = total(partials, item, r, n % wide);
                const float up = p.pair ? total(partials, item + tiles, r, n % wide) : 0.0f;
                uint32_t out_row = row + r, column = p.segs[seg].first_row + at;
                if (experts) {
                    if (p.scatter) out_row = reinterpret_cast<const uint32_t*>(p.order)[row + r];
                } else if (by_parts()) {
                    column += part * p.segs[seg].rows;
                }
                put(p, out_row, row + r, column, v, up);
            }
            // The next step's partial sums go to the other half.
            partials = reinterpret_cast<float*>(smem + p.partials_at) +
                       (partials == reinterpret_cast<float*>(smem + p.partials_at) ? items * NR * kLanes : 0);
        }
    }
};

// Threads of a block, blocks of a multiprocessor.
#define ARC_GEMV_BOUNDS_1 256, 3
#define ARC_GEMV_BOUNDS_2 256, 2
#define ARC_GEMV_BOUNDS_4 512, 1
#define ARC_GEMV_BOUNDS_8 384, 1
#define ARC_GEMV(NAME, FORMAT, ROWS)                                                                     \
    extern "C" __global__ void __launch_bounds__(ARC_GEMV_BOUNDS_##ROWS) arc_matmul_gemv_##NAME##_##ROWS(     \
        const __grid_constant__ arc::Product p) {                                                        \
        extern __shared__ __align__(128) uint8_t smem[];                                                 \
        arc::Gemv<FORMAT, ROWS> gemv{p, smem};                                                           \
        gemv.run();                                                                                      \
    }
#define ARC_GEMV_ALL(NAME, FORMAT) \
    ARC_GEMV(NAME, FORMAT, 1)      \
    ARC_GEMV(NAME, FORMAT, 2)      \
    ARC_GEMV(NAME, FORMAT, 4)      \
    ARC_GEMV(NAME, FORMAT, 8)

}  // namespace arc
