// Products with few rows: every weight tile is read once and meets up to NR rows.
//
// A step is `per_block` groups of one part. A block takes steps; a warp takes tiles of a step and has up to `stages` in
// flight, brought into shared memory by bulk copies: the first of them before `pdl_wait`, since weights depend on no
// former kernel. Each lane computes its slice; the partial sums meet in shared memory, where slices are added in ascending
// order.
//
// With a source, blocks make their inputs themselves (norm, rounding, int8), each all of them: for one or two rows that
// costs less than a kernel that does it once.
#pragma once

#include "../../pdl.cuh"
#include "dot.cuh"
#include "iq2.cuh"
#include "product.cuh"
#include "quantise.cuh"

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
    const Prepare& source;
    uint8_t* smem;
    uint32_t warp, lane, warps;
    uint32_t tiles, per_group, items;       // tiles of a group, of both of a pair, of a step
    uint32_t chunks, first, stride, last;   // steps of a part; this block's
    uint32_t over_groups, over_tiles;       // from one of a warp's tiles to its next

    __device__ __forceinline__ bool by_parts() const { return p.parts != 0; }
    __device__ __forceinline__ const uint32_t* bounds() const { return reinterpret_cast<const uint32_t*>(p.bounds); }
    __device__ __forceinline__ const uint32_t* order() const { return reinterpret_cast<const uint32_t*>(p.order); }

    // The part or expert of a step. Neighbouring steps mostly have the same.
    struct Part {
        uint32_t nth, id;
    };
    __device__ __forceinline__ Part part_of(uint32_t step, Part known) const {
        if (!by_parts()) return Part{0, 0};
        const uint32_t nth = step / chunks;
        if (nth == known.nth) return known;
        return Part{nth, p.bounds == 0 ? nth : active_expert(bounds(), p.experts, nth)};
    }

    // A warp's way through the tiles of its block: tile `i` of the `g`-th group of a step.
    struct Cursor {
        uint32_t step, g, i, group, item;
        Part part;
    };
    __device__ __forceinline__ void enter(Cursor& at) const {
        at.item = warp, at.g = warp / per_group, at.i = warp % per_group;
        if (at.step >= last) return;
        at.part = part_of(at.step, at.part);
        at.group = (by_parts() ? at.step % chunks : at.step) * p.per_block;
    }
    // To the next tile of the step; false past its last.
    __device__ __forceinline__ bool in_step(const Cursor& at) const { return at.item < items && at.group + at.g < p.groups; }
    __device__ __forceinline__ void next(Cursor& at) const {
        at.item += warps, at.g += over_groups, at.i += over_tiles;
        if (at.i >= per_group) at.i -= per_group, ++at.g;
    }
    __device__ __forceinline__ uint32_t tile_of(const Cursor& at) const { return p.pair && at.i >= tiles ? at.i - tiles : at.i; }

    // The segment of a group, counted from the first of all, and the group's place in it.
    __device__ __forceinline__ uint32_t segment(uint32_t& group) const {
        uint32_t seg = 0;
        if (p.n_segs > 1 && !p.pair) {
            while (seg + 1 < p.n_segs && group >= p.segs[seg].groups_end) ++seg;
            if (seg > 0) group -= p.segs[seg - 1].groups_end;
        }
        return seg;
    }

    __device__ __forceinline__ const uint8_t* address(const Cursor& at) const {
        uint32_t group = at.group + at.g;
        uint32_t seg = segment(group);
        if (p.pair && at.i >= tiles) seg = 1;
        return reinterpret_cast<const uint8_t*>(p.segs[seg].base) + at.part.id * p.part_bytes +
               (size_t)group * p.cut.group_bytes(F) + p.cut.tile_at(F, tile_of(at));
    }

    // Input row of row r of a part or expert.
    __device__ __forceinline__ uint32_t input_row(uint32_t part, uint32_t r) const {
        if (p.bounds != 0) return p.gather ? order()[r] / p.chosen : r;
        return by_parts() ? r * p.x_row + part * p.x_part : r;
    }

    __device__ __forceinline__ float* float_at(uint32_t r, uint32_t k) const {
        return reinterpret_cast<float*>(smem + p.floats_at) + (r * p.cut.slices + k / 256) * 260 + k % 256;
    }

    // Brings `rows` rows of inputs into shared memory.
    __device__ void stage(uint32_t part, uint32_t row, uint32_t rows) const {
        const uint32_t slices = p.cut.slices, cols = p.cut.cols;
        for (uint32_t r = 0; r < rows; ++r) {
            const size_t from = input_row(part, row + r);
            if constexpr (!is_float(F)) {
                const uint4* q = reinterpret_cast<const uint4*>(p.q + from * cols);
                const float* d = reinterpret_cast<const float*>(p.d) + from * (cols / 32);
                const uint32_t* s = reinterpret_cast<const uint32_t*>(p.sums) + from * (cols / 32);
                uint8_t* to = smem + p.q_at + r * slices * 272;
                float* d_to = reinterpret_cast<float*>(smem + p.d_at) + r * slices * 8;
                uint32_t* s_to = reinterpret_cast<uint32_t*>(smem + p.sums_at) + r * slices * 8;
                // A thread takes 32 values, all its loads first.
                for (uint32_t i = threadIdx.x; i < cols / 32; i += blockDim.x) {
                    const uint4 low = q[2 * i], high = q[2 * i + 1];
                    const float scale = d[i];
                    const uint32_t sums = s[i];
                    uint4* at = reinterpret_cast<uint4*>(to + (i / 8) * 272 + (i % 8) * 32);
                    at[0] = low, at[1] = high, d_to[i] = scale, s_to[i] = sums;
                }
            } else {
                const float* f = reinterpret_cast<const float*>(p.floats) + from * cols;
                for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) *float_at(r, i) = f[i];
            }
        }
    }

    // Inputs to shared memory.
    struct Keep {
        const Gemv& to;
        uint32_t r;
        __device__ __forceinline__ void take(uint32_t k, uint32_t step, uint32_t cols, const float (&v)[kTogether][4]) const {
            if constexpr (is_float(F)) {
#pragma unroll
                for (int n = 0; n < kTogether; ++n) {
                    const uint32_t here = k + n * step;
                    if (here < cols) *reinterpret_cast<float4*>(to.float_at(r, here)) = make_float4(v[n][0], v[n][1], v[n][2], v[n][3]);
                }
            } else {
                Quantised out[kTogether];
                quantise(v, out);
                const uint32_t row = r * to.p.cut.slices;
#pragma unroll
                for (int n = 0; n < kTogether; ++n) {
                    const uint32_t here = k + n * step;
                    if (here >= cols) break;
                    *reinterpret_cast<uint32_t*>(to.smem + to.p.q_at + (row + here / 256) * 272 + here % 256) = out[n].q;
                    if (threadIdx.x % 8 == 0) {
                        reinterpret_cast<float*>(to.smem + to.p.d_at)[row * 8 + here / 32] = out[n].d;
                        reinterpret_cast<uint32_t*>(to.smem + to.p.sums_at)[row * 8 + here / 32] = out[n].sums;
                    }
                }
            }
        }
    };

    // Brings the weights of the norm: they depend on no former kernel.
    __device__ __forceinline__ void ask_norm() const {
        if (source.weight == 0) return;
        const float* from = reinterpret_cast<const float*>(source.weight);
        for (uint32_t k = threadIdx.x; k < p.cut.cols; k += blockDim.x) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_at(smem + p.norm_at + 4 * k)), "l"(from + k));
        }
    }

    // Makes rows of inputs in shared memory.
    __device__ void make(uint32_t part, uint32_t row, uint32_t rows) const {
        const float* weight = source.weight != 0 ? reinterpret_cast<const float*>(smem + p.norm_at) : nullptr;
        // Behind the row's barrier, everybody's part of the weights is there.
        asm volatile("cp.async.wait_all;" ::: "memory");
        for (uint32_t r = 0; r < rows; ++r) {
            prepare_row(source, source_row(source, input_row(part, row + r)), weight,
                        reinterpret_cast<float*>(smem + p.squares_at) + r * (kMaxCols / kSumChunk), Keep{*this, r});
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
        const float* at = partials + (item * NR + r) * kLanes + n;
        if (p.cut.log_c == 2) {
#pragma unroll 2
            for (uint32_t t = 0; t < tiles; ++t, at += NR * kLanes) {
                const float a = at[0], b = at[8], c = at[16], d = at[24];
                sum = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(sum, a), b), c), d);
            }
        } else {
            for (uint32_t t = 0; t < tiles; ++t, at += NR * kLanes) {
                for (uint32_t c = 0; c < kLanes; c += p.cut.group_rows()) sum = __fadd_rn(sum, at[c]);
            }
        }
        return sum;
    }

    __device__ void run() {
        warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
        tiles = p.cut.tiles();
        per_group = p.pair ? 2 * tiles : tiles;
        items = p.per_block * per_group;
        over_groups = warps / per_group, over_tiles = warps % per_group;
        chunks = (p.groups + p.per_block - 1) / p.per_block;
        uint64_t* bars = reinterpret_cast<uint64_t*>(smem) + warp * p.stages;
        uint8_t* ring = smem + p.ring_at + (size_t)warp * p.stages * p.stage_bytes;
        if (lane == 0) {
            for (uint32_t i = 0; i < p.stages; ++i) barrier_init(bars + i);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
        if (!p.late) pdl_launch();
        const bool experts = p.bounds != 0;
        uint32_t active = by_parts() ? p.parts : 1;
        // Which experts are due is known after the wait only.
        if (experts) {
            pdl_wait();
            active = active_expert(bounds(), p.experts, 0xffffffffu);
        }
        const uint32_t steps = active * chunks;
        if (by_parts()) {
            // Neighbouring steps meet the same rows.
            const uint32_t each = (steps + gridDim.x - 1) / gridDim.x;
            first = blockIdx.x * each, stride = 1, last = min(first + each, steps);
        } else {
            first = blockIdx.x, stride = gridDim.x, last = steps;
        }
        const Part none{0xffffffffu, 0};
        Cursor asked{first, 0, 0, 0, 0, none};
        enter(asked);
        uint32_t place = 0;
        auto ask = [&]() {
            while (asked.step < last && !in_step(asked)) {
                asked.step += stride;
                enter(asked);
            }
            if (asked.step >= last) return;
            if (lane == 0) {
                bulk_load(ring + place * p.stage_bytes, address(asked), p.cut.tile_len(F, tile_of(asked)), bars + place);
            }
            place = place + 1 == p.stages ? 0 : place + 1;
            next(asked);
        };
        for (uint32_t i = 0; i < p.stages; ++i) ask();
        if constexpr (F == IQ2_XXS) {
            uint32_t* table = reinterpret_cast<uint32_t*>(smem + p.table_at);
            for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) table[i] = spread_pattern(kPatterns[i]);
        }
        if (NR <= 2 && source.x != 0) ask_norm();
        if (!experts) pdl_wait();
        if (p.late) pdl_launch();

        // Rows beyond NR are further blocks in y; of an expert, which may be named more than once by a row, further passes.
        uint32_t staged = 0xffffffffu, at_place = 0, parity = 0, row = blockIdx.y * NR, rows = 0, end = p.rows;
        float* partials = reinterpret_cast<float*>(smem + p.partials_at);
        bool second = false;
        for (uint32_t pass = 0, more = 1; more != 0; ++pass) {
            more = 0;
            if (pass > 0) {
                asked.step = first, asked.part = none;
                enter(asked);
                for (uint32_t i = 0; i < p.stages; ++i) ask();
                staged = 0xffffffffu;
            }
            Cursor at{first, 0, 0, 0, 0, none};
            for (; at.step < last; at.step += stride) {
                enter(at);
                const uint32_t part = at.part.id;
                if (part != staged) {
                    if (experts) row = bounds()[part] + pass * NR, end = bounds()[part + 1];
                    rows = row < end ? min(end - row, (uint32_t)NR) : 0;
                    more |= experts && row < end && end - row > NR;
                }
                // Of one row, every expert has the same input.
                if (part != staged && !(staged != 0xffffffffu && experts && p.gather && p.rows == 1)) {
                    // Everybody has left the rows before: they passed the barrier of the last step.
                    if (NR <= 2 && source.x != 0) {
                        make(part, row, rows);
                    } else {
                        stage(part, row, rows);
                    }
                    __syncthreads();
                }
                staged = part;
                for (; in_step(at); next(at)) {
                    barrier_wait(bars + at_place, parity);
                    const uint8_t* tile = ring + at_place * p.stage_bytes;
                    const uint32_t t = tile_of(at);
                    float* to = partials + (size_t)at.item * NR * kLanes + lane;
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
                    __syncwarp();
                    at_place = at_place + 1 == p.stages ? 0 : at_place + 1;
                    if (at_place == 0) parity ^= 1;
                    ask();
                }
                __syncthreads();
                const uint32_t wide = p.cut.group_rows(), outputs = p.per_block * wide;
                for (uint32_t o = threadIdx.x; o < outputs * rows; o += blockDim.x) {
                    const uint32_t r = NR == 1 ? 0 : o / outputs, n = NR == 1 ? o : o % outputs;
                    uint32_t group = at.group + n / wide;
                    if (group >= p.groups) continue;
                    const uint32_t seg = segment(group), of_seg = group * wide + n % wide;
                    if (of_seg >= p.segs[seg].rows) continue;
                    const uint32_t item = n / wide * per_group;
                    const float v = total(partials, item, r, n % wide);
                    const float up = p.pair ? total(partials, item + tiles, r, n % wide) : 0.0f;
                    uint32_t out_row = row + r, column = p.segs[seg].first_row + of_seg;
                    if (experts) {
                        if (p.scatter) out_row = order()[row + r];
                    } else {
                        column += part * p.segs[seg].rows;
                    }
                    put(p, out_row, row + r, column, v, up);
                }
                // The next step's partial sums go to the other half.
                second = !second;
                partials = reinterpret_cast<float*>(smem + p.partials_at) + (second ? items * NR * kLanes : 0);
            }
        }
    }
};

// Threads of a block, blocks of a multiprocessor.
#define ARC_GEMV_BOUNDS_1 512, 1
#define ARC_GEMV_BOUNDS_2 512, 1
#define ARC_GEMV_BOUNDS_4 384, 1
#define ARC_GEMV_BOUNDS_8 384, 1
#define ARC_GEMV(NAME, FORMAT, ROWS)                                                                         \
    extern "C" __global__ void __launch_bounds__(ARC_GEMV_BOUNDS_##ROWS) arc_matmul_gemv_##NAME##_##ROWS(    \
        const __grid_constant__ arc::Product p, const __grid_constant__ arc::Prepare source) {               \
        extern __shared__ __align__(128) uint8_t smem[];                                                     \
        arc::Gemv<FORMAT, ROWS> gemv{p, source, smem};                                                       \
        gemv.run();                                                                                          \
    }
#define ARC_GEMV_ALL(NAME, FORMAT) \
    ARC_GEMV(NAME, FORMAT, 1)      \
    ARC_GEMV(NAME, FORMAT, 2)      \
    ARC_GEMV(NAME, FORMAT, 4)      \
    ARC_GEMV(NAME, FORMAT, 8)

}  // namespace arc
