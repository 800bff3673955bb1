// What products over many rows share: which outputs and rows a block computes.
#pragma once

#include "product.cuh"

namespace arc {

// Outputs of a block: as many as it takes groups, from both segments of a pair.
constexpr int kBlockOutputs = 128;
constexpr uint32_t kNoRow = 0xffffffffu;

// A block of 128 outputs by BN rows. `blockIdx.x`: block of rows, of all parts or experts one after the other;
// `blockIdx.y`: block of outputs. In a pair, the first 64 outputs are gates and the others their ups.
template <int BN>
struct Tables {
    uint64_t base[kBlockOutputs / 8];    // first tile of the group of slot s; 0: no group
    uint32_t column[kBlockOutputs / 8];  // output of its first row
    uint32_t rows[kBlockOutputs / 8];    // rows that it has
    uint32_t input[BN];                  // input row of each row; kNoRow: none

    // The expert of the block-th block of rows of all experts, and the block's place in it.
    __device__ __forceinline__ static bool expert_block(const Product& p, uint32_t& block, uint32_t& expert) {
        const uint32_t* bounds = reinterpret_cast<const uint32_t*>(p.bounds);
        const uint32_t lane = threadIdx.x & 31;
        for (uint32_t first = 0; first < p.experts; first += 32) {
            const uint32_t e = first + lane;
            const uint32_t mine = e < p.experts ? (bounds[e + 1] - bounds[e] + BN - 1) / BN : 0;
            uint32_t sum = mine;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const uint32_t other = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum += other;
            }
            const uint32_t hit = __ballot_sync(~0u, block < sum);
            if (hit != 0) {
                const int from = __ffs(hit) - 1;
                block -= __shfl_sync(~0u, sum - mine, from);
                expert = first + from;
                return true;
            }
            block -= __shfl_sync(~0u, sum, 31);
        }
        return false;
    }

    // Fills the tables, by the block; rows are `row .. end`. False where there is nothing to do. A barrier must follow.
    __device__ __forceinline__ bool fill(const Product& p, uint32_t format, uint32_t& row, uint32_t& end) {
        const uint32_t wide = p.cut.group_rows(), slots = kBlockOutputs / wide, per_seg = p.pair ? slots / 2 : slots;
        uint32_t part = 0, block = blockIdx.x;
        row = 0, end = p.rows;
        if (p.bounds != 0) {
            if (!expert_block(p, block, part)) return false;
            const uint32_t* bounds = reinterpret_cast<const uint32_t*>(p.bounds);
            row = bounds[part], end = bounds[part + 1];
        } else if (p.parts != 0) {
            const uint32_t blocks = (p.rows + BN - 1) / BN;
            part = block / blocks, block %= blocks;
        }
        row += block * BN;
        for (uint32_t s = threadIdx.x; s < slots; s += blockDim.x) {
            const uint32_t g = blockIdx.y * per_seg + (p.pair ? s % per_seg : s);
            uint32_t seg = p.pair ? s / per_seg : 0, of_seg = g;
            if (!p.pair) {
                while (seg + 1 < p.n_segs && g >= p.segs[seg].groups_end) ++seg;
                if (seg > 0) of_seg -= p.segs[seg - 1].groups_end;
            }
            const bool there = g < p.groups;
            base[s] = there ? p.segs[seg].base + part * p.part_bytes + (uint64_t)of_seg * p.cut.group_bytes(format) : 0;
            column[s] = p.segs[seg].first_row + of_seg * wide + (p.bounds == 0 ? part * p.segs[seg].rows : 0);
            rows[s] = there ? min(wide, p.segs[seg].rows - of_seg * wide) : 0;
        }
        for (uint32_t n = threadIdx.x; n < BN; n += blockDim.x) {
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

    // Output `o` of the block for row r; `up`: its partner in a pair.
    __device__ __forceinline__ void store(const Product& p, uint32_t r, uint32_t end, uint32_t o, float v, float up) const {
        const uint32_t wide = p.cut.group_rows(), slot = o / wide;
        if (r >= end || o % wide >= rows[slot]) return;
        const uint32_t out_row = p.bounds != 0 && p.scatter ? reinterpret_cast<const uint32_t*>(p.order)[r] : r;
        put(p, out_row, r, column[slot] + o % wide, v, up);
    }
};

}  // namespace arc
