// What products over many rows share: which outputs and rows a block computes.
#pragma once

#include "../../count.cuh"
#include "product.cuh"

namespace arc {

constexpr uint32_t kNoRow = 0xffffffffu;

// A block of BM outputs by up to BN rows. `blockIdx.x`: block of rows, of all parts or experts one after the other;
// `blockIdx.y`: block of outputs. In a pair, the first half of the outputs are gates and the others their ups.
template <int BM, int BN>
struct Tables {
    uint64_t base[BM / 8];    // first tile of the group of each eight outputs; 0: no group
    uint32_t place[BM / 8];   // of the first of them in the group
    uint32_t column[BM / 8];  // of the first of them among the product's outputs
    uint32_t rows[BM / 8];    // how many there are
    uint32_t input[BN];       // input row of each row; kNoRow: none

    // The expert of the block-th block of rows of all experts, and the block's place in it.
    __device__ __forceinline__ static bool expert_block(const Product& p, uint32_t taken, uint32_t& block, uint32_t& expert) {
        const uint32_t* bounds = reinterpret_cast<const uint32_t*>(p.bounds);
        // A lane has a run of experts: all its loads are on their way at once.
        const uint32_t lane = threadIdx.x & 31, run = (p.experts + 31) / 32;
        const auto blocks = [&](uint32_t e) { return e < p.experts ? (bounds[e + 1] - bounds[e] + taken - 1) / taken : 0; };
        uint32_t mine = 0;
#pragma unroll 8
        for (uint32_t i = 0; i < run; ++i) mine += blocks(lane * run + i);
        uint32_t sum = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        const uint32_t hit = __ballot_sync(~0u, block < sum);
        if (hit == 0) return false;
        const int from = __ffs(hit) - 1;
        block -= __shfl_sync(~0u, sum - mine, from);
        // As many of the run as there are lanes, at a time.
        for (uint32_t first = from * run;; first += 32) {
            const uint32_t e = first + lane, own = e < (from + 1) * run ? blocks(e) : 0;
            sum = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const uint32_t other = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum += other;
            }
            const uint32_t here = __ballot_sync(~0u, block < sum);
            if (here != 0) {
                block -= __shfl_sync(~0u, sum - own, __ffs(here) - 1);
                expert = first + __ffs(here) - 1;
                return true;
            }
            block -= __shfl_sync(~0u, sum, 31);
        }
    }

    // Fills the tables, by the block, of `taken` rows; they are `row .. end`. False where there is nothing to do. A barrier
    // must follow.
    __device__ __forceinline__ bool fill(const Product& p, uint32_t format, uint32_t taken, uint32_t& row, uint32_t& end) {
        uint32_t part = 0, block = blockIdx.x;
        row = 0, end = p.rows;
        if (p.bounds != 0) {
            if (!expert_block(p, taken, block, part)) return false;
            const uint32_t* bounds = reinterpret_cast<const uint32_t*>(p.bounds);
            row = bounds[part], end = bounds[part + 1];
        } else if (p.parts != 0) {
            const uint32_t blocks = (p.rows + taken - 1) / taken;
            part = block / blocks, block %= blocks;
        }
        row += block * taken;
        end = min(end, row + taken);
        const uint32_t wide = p.cut.group_rows(), of_seg = p.pair ? BM / 2 : BM;
        for (uint32_t s = threadIdx.x; s < BM / 8; s += blockDim.x) {
            uint32_t seg = 8 * s / of_seg, n = blockIdx.y * of_seg + 8 * s % of_seg, g = n / wide;
            const bool there = g < p.groups;
            if (!p.pair) {
                while (seg + 1 < p.n_segs && g >= p.segs[seg].groups_end) ++seg;
                if (seg > 0) g -= p.segs[seg - 1].groups_end;
            }
            n = g * wide + n % wide;
            base[s] = there ? p.segs[seg].base + part * p.part_bytes + (uint64_t)g * p.cut.group_bytes(format) : 0;
            place[s] = n % wide;
            column[s] = p.segs[seg].first_row + n + (p.bounds == 0 ? part * p.segs[seg].rows : 0);
            rows[s] = there && n < p.segs[seg].rows ? min(8u, p.segs[seg].rows - n) : 0;
        }
        for (uint32_t n = threadIdx.x; n < taken; n += blockDim.x) {
            const uint32_t r = row + n;
            uint32_t from = r;
            if (p.bounds != 0) {
                if (r < end && p.gather) from = reinterpret_cast<const uint32_t*>(p.order)[r] / p.chosen;
            } else if (p.parts != 0) {
                from = r * p.x_row + part * p.x_part;
            }
            input[n] = r < end ? from : kNoRow;
        }
        return true;
    }

    // The same of the sum of a row's experts and the output: their products come together, of two outputs at a time.
    __device__ __forceinline__ void store_routed(const Product& p, uint32_t row, uint32_t end, const float* values, uint32_t stride) const {
        constexpr int kTogether = 8;
        for (uint32_t first = threadIdx.x; first < BM * (end - row); first += 2 * blockDim.x) {
            float x[2][kTogether];
            bool live[2], there[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const uint32_t i = first + k * blockDim.x, o = i % BM, r = row + i / BM;
                there[k] = r < end && o % 8 < rows[o / 8];
                live[k] = there[k] && reinterpret_cast<const uint32_t*>(p.infos)[8 * r] != 0;
                const float* from = reinterpret_cast<const float*>(p.aux) + (size_t)r * p.chosen * p.out_stride + column[o / 8] + o % 8;
#pragma unroll
                for (int j = 0; j < kTogether; ++j) {
                    if (there[k] && j < p.chosen) x[k][j] = from[(size_t)j * p.out_stride];
                }
            }
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const uint32_t i = first + k * blockDim.x, o = i % BM, r = row + i / BM;
                if (!there[k]) continue;
                const float* from = reinterpret_cast<const float*>(p.aux) + (size_t)r * p.chosen * p.out_stride + column[o / 8] + o % 8;
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < kTogether; ++j) {
                    if (live[k] && j < p.chosen) sum = __fadd_rn(sum, x[k][j]);
                }
                for (uint32_t j = kTogether; live[k] && j < p.chosen; ++j) sum = __fadd_rn(sum, from[(size_t)j * p.out_stride]);
                reinterpret_cast<float*>(p.out)[(size_t)r * p.out_stride + column[o / 8] + o % 8] =
                    __fadd_rn(sum, values[(i / BM) * stride + o]);
            }
        }
    }

    // All outputs of rows `row .. end`, by the block, neighbours side by side: output o of the n-th of them is
    // `values[n * stride + o]`, and behind the outputs of a pair are their partners. A thread has a column, of every few rows, some of
    // which it takes together.
    __device__ __forceinline__ void store_all(const Product& p, uint32_t row, uint32_t end, const float* values,
                                              uint32_t stride) const {
        const uint32_t outputs = p.pair ? BM / 2 : BM;
        if (p.epilogue == kThenRouted) return store_routed(p, row, end, values, stride);
        const uint32_t* order = p.bounds != 0 && p.scatter ? reinterpret_cast<const uint32_t*>(p.order) : nullptr;
        const uint32_t step = max(blockDim.x / outputs, 1u);
        for (uint32_t o = threadIdx.x & (outputs - 1); o < outputs; o += blockDim.x) {
            if (o % 8 >= rows[o / 8]) continue;
            const uint32_t to = column[o / 8] + o % 8;
            const auto each = [&](auto together, auto left) {
                constexpr int kTogether = decltype(together)::n;
#pragma unroll 1
                for (uint32_t first = row + threadIdx.x / outputs; first < end; first += kTogether * step) {
                    uint32_t out_row[kTogether];
                    float v[kTogether], up[kTogether];
#pragma unroll
                    for (int k = 0; k < kTogether; ++k) {
                        const uint32_t r = min(first + k * step, end - 1);
                        const float* at = values + (r - row) * stride + o;
                        v[k] = *at, up[k] = p.pair ? at[BM / 2] : 0.0f, out_row[k] = order != nullptr ? order[r] : r;
                    }
#pragma unroll
                    for (int k = 0; k < kTogether; ++k) {
                        if (first + k * step < end) left(out_row[k], first + k * step, v[k], up[k]);
                    }
                }
            };
            if (p.epilogue == kThenStore) {
                float* out = reinterpret_cast<float*>(p.out) + to;
                each(Count<8>(), [&](uint32_t out_row, uint32_t, float v, float) { out[(size_t)out_row * p.out_stride] = v; });
            } else {
                each(Count<2>(), [&](uint32_t out_row, uint32_t r, float v, float up) { put(p, out_row, r, to, v, up); });
            }
        }
    }
};

}  // namespace arc
