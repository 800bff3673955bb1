// Products with few rows: every weight tile is read once and meets up to NR rows.
//
// A step is `per_block` groups of one part. A block takes steps; a warp takes tiles of a step and has up to `stages` in
// flight, brought into shared memory by bulk copies: the first of them before `pdl_wait`, since weights depend on no
// former kernel. Each lane computes its slice; the partial sums meet in shared memory, where slices are added in ascending
// order.
//
// With a source, blocks make their inputs themselves (norm, rounding, int8), each all of them: for one or two rows, and up to four
// that are one chunk of a sum each, that costs less than a kernel that does it once.
#pragma once

#include "tiles.cuh"

namespace arc {

template <uint32_t F, int NR>
struct Gemv {
    const Product& p;
    const Prepare& source;
    uint8_t* smem;
    uint32_t block, blocks;  // of those that share the product
    uint32_t warp, lane, warps;
    uint32_t tiles, per_group, items;       // tiles of a group, of both of a pair, of a step
    uint32_t chunks, first, stride, last;   // steps of a part; this block's
    uint32_t over_groups, over_tiles;       // from one of a warp's tiles to its next

    // A warp's way through the tiles of its block: tile `i` of the `g`-th group of a step.
    struct Cursor {
        uint32_t step, g, i, group, item, part;
    };
    __device__ __forceinline__ void enter(Cursor& at) const {
        at.item = warp, at.g = warp / per_group, at.i = warp % per_group;
        if (at.step >= last) return;
        at.part = p.parts != 0 ? at.step / chunks : 0;
        at.group = (at.step - at.part * chunks) * p.per_block;
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
        return reinterpret_cast<const uint8_t*>(p.segs[seg].base) + at.part * p.part_bytes +
               (size_t)group * p.cut.group_bytes(F) + p.cut.tile_at(F, tile_of(at));
    }

    // Input row of row r of a part.
    __device__ __forceinline__ uint32_t input_row(uint32_t part, uint32_t r) const {
        return p.parts != 0 ? r * p.x_row + part * p.x_part : r;
    }

    __device__ __forceinline__ float* float_at(uint32_t r, uint32_t k) const {
        return reinterpret_cast<float*>(smem + p.floats_at) + (r * p.cut.slices + k / 256) * 260 + k % 256;
    }

    // Brings `rows` rows of inputs into shared memory. `meanwhile` is called when they are asked for.
    template <typename Meanwhile>
    __device__ void stage(uint32_t part, uint32_t row, uint32_t rows, Meanwhile meanwhile) const {
        const uint32_t slices = p.cut.slices, cols = p.cut.cols;
        for (uint32_t r = 0; r < rows; ++r) {
            const size_t from = input_row(part, row + r);
            if constexpr (!is_float(F)) {
                stage_codes(p.q, p.d, p.sums, from, cols, threadIdx.x, blockDim.x, smem + p.q_at + r * slices * 272,
                            smem + p.d_at + r * slices * 32, smem + p.sums_at + r * slices * 32);
            } else {
                const float* f = reinterpret_cast<const float*>(p.floats) + from * cols;
                if (cols % 4 == 0) {
                    for (uint32_t i = 4 * threadIdx.x; i < cols; i += 4 * blockDim.x) copy16(float_at(r, i), f + i);
                } else {
                    for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) *float_at(r, i) = f[i];
                }
            }
        }
        meanwhile();
        copies_landed();
    }

    // Four values of row r, and what eight lanes have of their block, to shared memory.
    __device__ __forceinline__ void keep_codes(uint32_t r, uint32_t k, const Quantised& made) const {
        const uint32_t row = r * p.cut.slices;
        *reinterpret_cast<uint32_t*>(smem + p.q_at + (row + k / 256) * 272 + k % 256) = made.q;
        if (threadIdx.x % 8 == 0) {
            reinterpret_cast<float*>(smem + p.d_at)[row * 8 + k / 32] = made.d;
            reinterpret_cast<uint32_t*>(smem + p.sums_at)[row * 8 + k / 32] = made.sums;
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
#pragma unroll
                for (int n = 0; n < kTogether; ++n) {
                    const uint32_t here = k + n * step;
                    if (here >= cols) break;
                    to.keep_codes(r, here, out[n]);
                }
            }
        }
    };

    // Brings the weights of the norm: they depend on no former kernel.
    __device__ __forceinline__ void ask_norm() const {
        if (source.weight == 0) return;
        const float* from = reinterpret_cast<const float*>(source.weight);
        for (uint32_t k = threadIdx.x; k < p.cut.cols; k += blockDim.x) {
            copy_few<4>(smem + p.norm_at + 4 * k, from + k);
        }
    }

    // Makes rows of inputs in shared memory. Of more than two, `meanwhile` is called when some of what they are made of is asked for.
    template <typename Meanwhile>
    __device__ void make(uint32_t part, uint32_t row, uint32_t rows, Meanwhile meanwhile) const {
        const float* weight = source.weight != 0 ? reinterpret_cast<const float*>(smem + p.norm_at) : nullptr;
        // Behind a barrier, everybody's part of the weights is there.
        copies_landed();
        if constexpr (NR > 2) {
            make_chunks(weight, part, row, rows, meanwhile);
        } else if (weight != nullptr && p.cut.cols == kSumChunk && source.stride % 4 == 0) {
            make_chunks(weight, part, row, rows, meanwhile);
        } else {
            for (uint32_t r = 0; r < rows; ++r) {
                prepare_row(source, source_row(source, input_row(part, row + r)), weight,
                            reinterpret_cast<float*>(smem + p.squares_at) + r * (kMaxCols / kSumChunk), Keep{*this, r});
            }
        }
    }

    // The same of rows behind a norm that are one chunk of a sum each: up to eight warps take the sums of squares of all rows by
    // themselves, two rows at once, and have the same 128 values of each.
    template <typename Meanwhile>
    __device__ __forceinline__ void make_chunks(const float* weight, uint32_t part, uint32_t row, uint32_t rows, Meanwhile meanwhile) const {
        constexpr uint32_t kParts = kSumChunk / 128;
        constexpr int kAtOnce = NR < 2 ? NR : 2;
        __syncthreads();
        if (warp >= kParts) return NR > 2 ? meanwhile() : void();
#pragma unroll 1
        for (uint32_t first = 0; first < rows; first += kAtOnce) {
            float v[kAtOnce][kParts][4], factor[kAtOnce];
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r) {
                const float* x = source_row(source, input_row(part, row + min(first + r, rows - 1)));
#pragma unroll
                for (int n = 0; n < (int)kParts; ++n) load_four(x, 128 * n + 4 * lane, kSumChunk, true, v[r][n]);
            }
            if (NR > 2 && first == 0) meanwhile();
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r) {
                const float squares = chunk_square(v[r]);
                factor[r] = norm_factor(kSumChunk, source.eps, &squares);
            }
#pragma unroll 1
            for (uint32_t s = warp; s < kParts; s += blockDim.x >> 5) {
                const uint32_t k = 128 * s + 4 * lane;
                float x[kAtOnce][4];
#pragma unroll
                for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
                    for (int n = 0; n < (int)kParts; ++n) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) x[r][i] = n == 0 || n == (int)s ? v[r][n][i] : x[r][i];
                    }
                    norm_and_round(source, weight, k, factor[r], x[r]);
                }
                if constexpr (is_float(F)) {
#pragma unroll
                    for (int r = 0; r < kAtOnce; ++r) {
                        *reinterpret_cast<float4*>(float_at(first + r, k)) = make_float4(x[r][0], x[r][1], x[r][2], x[r][3]);
                    }
                } else {
                    Quantised out[kAtOnce];
                    quantise(x, out);
#pragma unroll
                    for (int r = 0; r < kAtOnce; ++r) keep_codes(first + r, k, out[r]);
                }
            }
        }
    }

    __device__ void run() {
        warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = p.warps;
        tiles = p.cut.tiles();
        per_group = p.pair ? 2 * tiles : tiles;
        items = p.per_block * per_group;
        over_groups = warps / per_group, over_tiles = warps % per_group;
        chunks = (p.groups + p.per_block - 1) / p.per_block;
        // Warps beyond those that have tiles only help with the rows.
        const bool works = warp < warps;
        const Marks marks(kMarkProduct, p.cut.slices);
        uint64_t* bars = reinterpret_cast<uint64_t*>(smem) + warp * p.stages;
        uint8_t* ring = smem + p.ring_at + (size_t)warp * p.stages * p.stage_bytes;
        if (works && lane == 0) {
            for (uint32_t i = 0; i < p.stages; ++i) barrier_init(bars + i);
            barriers_made();
        }
        __syncwarp();
        if (!p.late) pdl_launch();
        const uint32_t steps = max(p.parts, 1u) * chunks;
        if (p.parts != 0) {
            // Neighbouring steps meet the same rows.
            const uint32_t each = (steps + blocks - 1) / blocks;
            first = block * each, stride = 1, last = min(first + each, steps);
        } else {
            first = block, stride = blocks, last = steps;
        }
        Cursor asked{works ? first : last, 0, 0, 0, 0, 0};
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
        // Inputs are asked for between weights: behind all of these they would come late. One or two rows are made so long that
        // weights would.
        const bool makes = NR <= 4 && source.x != 0, between = NR > 2 || !makes;
        for (uint32_t i = between ? p.stages / 2 : 0; i < p.stages; ++i) ask();
        make_table<F>(smem + p.table_at);
        if (makes) ask_norm();
        pdl_wait();
        marks.mark(2);
        if (p.late) pdl_launch();

        const Staged in{smem + p.q_at, smem + p.d_at, smem + p.sums_at, smem + p.floats_at, smem + p.table_at};
        // Rows beyond NR are further blocks in y.
        const uint32_t row = blockIdx.y * NR, rows = row < p.rows ? min(p.rows - row, (uint32_t)NR) : 0;
        uint32_t staged = 0xffffffffu, at_place = 0, parity = 0;
        float* partials = reinterpret_cast<float*>(smem + p.partials_at);
        bool second = false;
        for (Cursor at{first, 0, 0, 0, 0, 0}; at.step < last; at.step += stride) {
            enter(at);
            if (at.part != staged) {
                // Everybody has left the rows before: they passed the barrier of the last step.
                const auto rest = [&]() {
                    for (uint32_t i = 0; between && i < p.stages / 2 && staged == 0xffffffffu; ++i) ask();
                };
                if (makes) {
                    make(at.part, row, rows, rest);
                } else {
                    stage(at.part, row, rows, rest);
                }
                __syncthreads();
                if (staged == 0xffffffffu) marks.mark(3);
                staged = at.part;
            }
            for (; works && in_step(at); next(at)) {
                barrier_wait(bars + at_place, parity);
                float* to = partials + (size_t)at.item * NR * kLanes + lane;
                dot_tile<NR, F>(p.cut, ring + at_place * p.stage_bytes, tile_of(at), in, to);
                __syncwarp();
                at_place = at_place + 1 == p.stages ? 0 : at_place + 1;
                if (at_place == 0) parity ^= 1;
                ask();
            }
            if (at.step == first) marks.mark(4);
            __syncthreads();
            marks.mark(5);
            const uint32_t wide = p.cut.group_rows(), outputs = p.per_block * wide;
            for (uint32_t o = threadIdx.x; o < outputs * rows; o += blockDim.x) {
                const uint32_t r = NR == 1 ? 0 : o / outputs, n = NR == 1 ? o : o % outputs;
                uint32_t group = at.group + n / wide;
                if (group >= p.groups) continue;
                const uint32_t seg = segment(group), of_seg = group * wide + n % wide;
                if (of_seg >= p.segs[seg].rows) continue;
                const float* from = partials + (n / wide * per_group * NR + r) * kLanes;
                float v = total(p.cut, from, tiles, NR * kLanes, n % wide);
                const float up = p.pair ? total(p.cut, from + tiles * NR * kLanes, tiles, NR * kLanes, n % wide) : 0.0f;
                const uint32_t column = p.segs[seg].first_row + of_seg + at.part * p.segs[seg].rows;
                v = put(p, row + r, row + r, column, v, up);
                // Whole warps, each with a block of 32 outputs: `codes` of matmul/cuda.rs.
                if (p.out_q != 0) {
                    leave_codes(v, p.out_q, p.out_d, p.out_sums, ((size_t)(row + r) * p.out_stride + column) / 32);
                }
            }
            // The next step's partial sums go to the other half.
            second = !second;
            partials = reinterpret_cast<float*>(smem + p.partials_at) + (second ? items * NR * kLanes : 0);
        }
        marks.mark(6);
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
        arc::Gemv<FORMAT, ROWS> gemv{p, source, smem, blockIdx.x, gridDim.x};                                \
        gemv.run();                                                                                          \
    }
#define ARC_GEMV_ALL(NAME, FORMAT) \
    ARC_GEMV(NAME, FORMAT, 1)      \
    ARC_GEMV(NAME, FORMAT, 2)      \
    ARC_GEMV(NAME, FORMAT, 4)      \
    ARC_GEMV(NAME, FORMAT, 8)

}  // namespace arc
