// Routed experts over few rows: every assignment of a row to an expert by itself, since few rows share an expert.
//
// experts_up     gated units, times the routing weight, and the int8 inputs that the second product reads
// experts_down   the sum over a row's experts, ascending, by blocks that have the same outputs of all of them; of one
//                row, with the shared expert's, whose second matrix is Q8_0
//
// All of it of one row, the shared expert's units too, in one launch: experts_row.cu.
//
// A unit of work is 32 outputs. What the gate chose is read, and weights are asked for, before the wait: a kernel between
// the gate and these lets its next one begin behind its own wait (`Product::late`; `experts_up` does too), so that the
// gate has ended for certain.
#pragma once

#include "tiles.cuh"

namespace arc {

// Mirrors: experts.rs.
struct Experts {
    Cut cut;             // of the routed experts' matrices
    uint32_t outputs;    // rows of such a matrix: of gate and up each
    uint64_t base, part_bytes, up_at;  // the first expert's matrix; from one to the next; from a gate to its up
    uint64_t shared;                   // down: the shared expert's, Q8_0; null: it is somebody else's
    uint64_t order, bounds, ids, weights, infos;
    uint64_t q, d, sums;               // inputs: of rows, or of assignments
    uint64_t x;                        // down: the shared expert's units, [rows, cols] f32
    uint64_t mid;                      // up: units in the order of `order`, f32
    uint64_t mid_q, mid_d, mid_sums;   // up: the same as int8 inputs, by assignment; or null
    uint64_t mid_floats;               // up: the same as f32, by assignment; or null
    uint64_t out;                      // down: [rows, outputs]
    uint32_t rows, chosen, experts;
    float limit;
    uint32_t unit_groups;              // groups of a unit
    uint32_t each, at_once;            // units of a block, of a step
    uint32_t most_staged;              // assignments (up) or inputs (down) whose rows stand in shared memory
    uint32_t stages, stage_bytes;      // of a warp's tiles
    uint32_t shared_each;              // tiles of the shared expert that a warp takes, of a step
    // Where the parts of a block's shared memory begin. Barriers stand at 0.
    uint32_t table_at, q_at, d_at, sums_at, sums_of_at, partials_at, shared_ring_at, ring_at;
    uint32_t pad;
};
static_assert(sizeof(Experts) == 248);

// What a lane's slices of a gate and an up tile make of one row, which is read once for both. COPIES: of the patterns.
template <uint32_t F, uint32_t COPIES>
__device__ __forceinline__ float2 dot_pair(const Cut& cut, const uint8_t* gate, const uint8_t* up, uint32_t t, const Staged& in) {
    if constexpr (F == IQ2_XXS) {
        const uint32_t lane = threadIdx.x & 31, slice = cut.slice_of(t, lane);
        const uint8_t* q = in.q + slice * 272;
        const float* dx = reinterpret_cast<const float*>(in.d) + slice * 8;
        const uint32_t table = shared_at(in.table) + (COPIES == 1 ? 0 : 4 * lane);
        // Kept in a register: the compiler would move the constant there every time.
        const uint32_t low = __shfl_sync(~0u, kMagnitudes, 0);
        const uint8_t* tiles[2] = {gate, up};
        float d8[2], acc[2] = {0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < 2; ++w) d8[w] = __fmul_rn(load_half(tiles[w] + 4 * 512 + 2 * lane), 0.125f);
#pragma unroll 2
        for (int b = 0; b < 8; b += 2) {
            const uint4 v[2] = {load16(gate + 16 * lane + (b / 2) * 512), load16(up + 16 * lane + (b / 2) * 512)};
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const uint4* x = reinterpret_cast<const uint4*>(q + 32 * (b + e));
                const uint4 x0 = x[0], x1 = x[1];
                const float scale_x = dx[b + e];
#pragma unroll
                for (int w = 0; w < 2; ++w) {
                    const uint32_t index = word(v[w], 2 * e), changes = word(v[w], 2 * e + 1), signs = iq2_signs(changes);
                    int dot = 0;
#pragma unroll
                    for (int g = 0; g < 4; ++g) {
                        const uint2 two = iq2<4 * COPIES>(index, signs, g, table, low);
                        const uint4& half = g < 2 ? x0 : x1;
                        dot = __dp4a((int)two.x, (int)word(half, 2 * g % 4), dot);
                        dot = __dp4a((int)two.y, (int)word(half, 2 * g % 4 + 1), dot);
                    }
                    acc[w] = __fmaf_rn(__fmul_rn(iq2_scale(d8[w], changes), scale_x), (float)dot, acc[w]);
                }
            }
        }
        return make_float2(acc[0], acc[1]);
    } else {
        float2 sums;
        dot_tile<1, F>(cut, gate, t, in, &sums.x);
        dot_tile<1, F>(cut, up, t, in, &sums.y);
        return sums;
    }
}

template <uint32_t F>
struct ExpertsOf {
    const Experts& p;
    uint8_t* smem;
    uint32_t warp, lane, warps, tiles, wide;
    uint64_t* bars;
    uint8_t *ring, *shared_ring;

    __device__ __forceinline__ ExpertsOf(const Experts& args, uint8_t* memory)
        : p(args), smem(memory), warp(threadIdx.x >> 5), lane(threadIdx.x & 31), warps(blockDim.x >> 5),
          tiles(args.cut.tiles()), wide(args.cut.group_rows()) {
        bars = reinterpret_cast<uint64_t*>(smem) + warp * (p.stages + p.shared_each);
        ring = smem + p.ring_at + (size_t)warp * p.stages * p.stage_bytes;
        shared_ring = smem + p.shared_ring_at + (size_t)warp * p.shared_each * shared_bytes();
        if (lane == 0) {
#pragma unroll 1
            for (uint32_t i = 0; i < p.stages + p.shared_each; ++i) barrier_init(bars + i);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
    }

    template <typename T>
    __device__ __forceinline__ T* at(uint32_t offset) const { return reinterpret_cast<T*>(smem + offset); }
    // The bytes of a whole tile of the shared expert's: its columns are those of the routed ones, whole slices.
    __device__ __forceinline__ uint32_t shared_bytes() const { return tile_bytes(Q8_0, kSlice); }
    __device__ __forceinline__ uint64_t shared_tile(uint64_t base, uint32_t group, uint32_t t) const {
        return base + (size_t)group * p.cut.group_bytes(Q8_0) + p.cut.tile_at(Q8_0, t);
    }
    __device__ __forceinline__ bool live(uint32_t row) const {
        return __ldcg(reinterpret_cast<const uint32_t*>(p.infos) + 8 * row) != 0;
    }
    __device__ __forceinline__ uint32_t word_of(uint64_t from, uint32_t i) const {
        return __ldcg(reinterpret_cast<const uint32_t*>(from) + i);
    }
    // Asks for tile `t` of a group of an expert's matrix, and of another that begins `beside` later; `beside` 0: of one.
    __device__ __forceinline__ void ask(uint64_t matrix, uint64_t beside, uint32_t group, uint32_t t, uint32_t place) const {
        if (lane != 0) return;
        const uint8_t* from = reinterpret_cast<const uint8_t*>(matrix + (size_t)group * p.cut.group_bytes(F) + p.cut.tile_at(F, t));
        const uint32_t len = p.cut.tile_len(F, t);
        expect(bars + place, beside != 0 ? 2 * len : len);
        bulk_copy(ring + place * p.stage_bytes, from, len, bars + place);
        if (beside != 0) bulk_copy(ring + place * p.stage_bytes + len, from + beside, len, bars + place);
    }
    __device__ __forceinline__ Staged staged(uint32_t slot) const {
        const uint32_t slices = p.cut.slices;
        return Staged{smem + p.q_at + slot * slices * 272, smem + p.d_at + slot * slices * 32,
                      smem + p.sums_at + slot * slices * 32, nullptr, smem + p.table_at};
    }
    // Sends for row `row` of the inputs, by threads `by`, `by + of` and so on.
    __device__ __forceinline__ void stage(uint32_t slot, uint32_t row, uint32_t by, uint32_t of) const {
        const uint32_t slices = p.cut.slices;
        stage_codes(p.q, p.d, p.sums, row, p.cut.cols, by, of, smem + p.q_at + slot * slices * 272,
                    smem + p.d_at + slot * slices * 32, smem + p.sums_at + slot * slices * 32);
    }

    __device__ void up() {
        const Marks marks(kMarkUp);
        const uint32_t per_unit = p.unit_groups * tiles, units_of = p.outputs / 32;  // pairs of tiles of a unit; units of an expert
        const bool alone = p.rows == 1;
        auto assignment = [&](uint32_t i) { return alone ? i : word_of(p.order, i); };
        const uint32_t first = blockIdx.x * p.each, first_assigned = first / units_of;
        // All that is known of the first assignment comes at once.
        const uint32_t known = alone ? word_of(p.ids, min(first_assigned, p.chosen - 1)) : 0;
        const uint32_t assigned = alone ? (live(0) ? p.chosen : 0) : word_of(p.bounds, p.experts);
        const uint32_t last = min(first + p.each, assigned * units_of);
        // A warp's way through its tiles, step by step.
        struct Cursor {
            uint32_t step, j, of;
            uint64_t matrix;
        };
        const uint32_t step_pairs = p.at_once * per_unit;
        auto pairs_of = [&](uint32_t step) { return min(step_pairs, (last - step) * per_unit); };
        Cursor asked{first, warp, alone ? first_assigned : 0xffffffffu, p.base + (uint64_t)known * p.part_bytes};
        uint32_t place = 0;
        auto ask_next = [&]() {
            while (asked.step < last && asked.j >= pairs_of(asked.step)) asked.step += p.at_once, asked.j = warp;
            if (asked.step >= last) return;
            const uint32_t unit = asked.step + asked.j / per_unit, i = unit / units_of, in_unit = asked.j % per_unit;
            if (i != asked.of) {
                asked.of = i;
                asked.matrix = p.base + (uint64_t)word_of(p.ids, assignment(i)) * p.part_bytes;
            }
            ask(asked.matrix, p.up_at, (unit - i * units_of) * p.unit_groups + in_unit / tiles, in_unit % tiles, place);
            place = place + 1 == p.stages ? 0 : place + 1;
            asked.j += warps;
        };
        for (uint32_t i = 0; i < p.stages; ++i) ask_next();
        make_table<F>(smem + p.table_at);
        pdl_wait();
        marks.mark(2);
        pdl_launch();
        if (alone) {
            stage(0, 0, threadIdx.x, blockDim.x);
        } else {
            for (uint32_t i = first_assigned; i < assigned && i * units_of < last; ++i) {
                stage(i - first_assigned, assignment(i) / p.chosen, threadIdx.x, blockDim.x);
            }
        }
        copies_landed();
        __syncthreads();
        marks.mark(3);
        uint32_t at_place = 0, parity = 0;
        bool second = false;
        float* partials = at<float>(p.partials_at);
        for (uint32_t step = first; step < last; step += p.at_once) {
            const uint32_t n = pairs_of(step);
            for (uint32_t j = warp; j < n; j += warps) {
                const uint32_t i = (step + j / per_unit) / units_of, t = j % tiles;
                const uint8_t* pair = ring + at_place * p.stage_bytes;
                barrier_wait(bars + at_place, parity);
                const float2 sums = dot_pair<F, 1>(p.cut, pair, pair + p.cut.tile_len(F, t), t, staged(alone ? 0 : i - first_assigned));
                float* to = partials + 2 * j * kLanes + lane;
                to[0] = sums.x, to[kLanes] = sums.y;
                __syncwarp();
                at_place = at_place + 1 == p.stages ? 0 : at_place + 1;
                if (at_place == 0) parity ^= 1;
                ask_next();
                if (j == 0 && step == first) marks.mark(4);
            }
            __syncthreads();
            marks.mark(5);
            for (uint32_t u = warp; u * per_unit < n; u += warps) {
                const uint32_t i = (step + u) / units_of, a = assignment(i), column = (step + u - i * units_of) * 32 + lane;
                const float weight = __ldcg(reinterpret_cast<const float*>(p.weights) + a);
                const float* from = partials + 2 * (u * per_unit + lane / wide * tiles) * kLanes;
                const float gate = total(p.cut, from, tiles, 2 * kLanes, lane % wide);
                const float high = total(p.cut, from + kLanes, tiles, 2 * kLanes, lane % wide);
                const float v = __fmul_rn(gated(kThenClampedSilu, gate, high, p.limit), weight);
                reinterpret_cast<float*>(p.mid)[(size_t)i * p.outputs + column] = v;
                if (p.mid_floats != 0) reinterpret_cast<float*>(p.mid_floats)[(size_t)a * p.outputs + column] = v;
                if (p.mid_q != 0) leave_codes(v, p.mid_q, p.mid_d, p.mid_sums, ((size_t)a * p.outputs + column) / 32);
            }
            // The next step's partial sums go to the other half.
            second = !second;
            partials = at<float>(p.partials_at) + (second ? 2 * step_pairs * kLanes : 0);
        }
        marks.mark(6);
    }

    __device__ void down() {
        const Marks marks(kMarkDown);
        const uint32_t of_expert = p.unit_groups * tiles, n_tiles = p.chosen * of_expert;
        const uint32_t shared_tiles = p.shared != 0 ? of_expert : 0;
        const uint32_t groups = (p.outputs + wide - 1) / wide, units_of = (groups + p.unit_groups - 1) / p.unit_groups;
        const uint32_t first = blockIdx.x * p.each, last = min(first + p.each, p.rows * units_of);
        pdl_launch();
        if (first >= last) return pdl_wait();
        uint32_t shared_at = first;
        auto ask_shared = [&]() {
            if (shared_at >= last) return;
            for (uint32_t k = 0, j = warp; k < p.shared_each && j < shared_tiles; ++k, j += warps) {
                const uint32_t group = shared_at % units_of * p.unit_groups + j / tiles;
                const uint64_t from = shared_tile(p.shared, group, j % tiles);
                if (lane == 0 && group < groups) {
                    bulk_load(shared_ring + k * shared_bytes(), reinterpret_cast<const uint8_t*>(from), shared_bytes(), bars + p.stages + k);
                }
            }
            ++shared_at;
        };
        ask_shared();
        // One after the other: a unit of a row that is not live has no tiles.
        struct Cursor {
            uint32_t unit, j, known, place_of;
            uint64_t matrix;
            bool due;
        };
        Cursor asked{first, warp, 0xffffffffu, 0xffffffffu, 0, false};
        uint32_t place = 0;
        auto ask_next = [&]() {
            for (; asked.unit < last; ++asked.unit, asked.j = warp) {
                const uint32_t row = asked.unit / units_of;
                if (row != asked.known) asked.known = row, asked.due = live(row), asked.place_of = 0xffffffffu;
                if (!asked.due) continue;
                for (; asked.j < n_tiles; asked.j += warps) {
                    const uint32_t e = asked.j / of_expert, in_unit = asked.j - e * of_expert;
                    const uint32_t group = (asked.unit - row * units_of) * p.unit_groups + in_unit / tiles;
                    if (group >= groups) continue;
                    if (e != asked.place_of) {
                        asked.place_of = e;
                        asked.matrix = p.base + (size_t)word_of(p.ids, row * p.chosen + e) * p.part_bytes;
                    }
                    ask(asked.matrix, 0, group, in_unit % tiles, place);
                    place = place + 1 == p.stages ? 0 : place + 1;
                    asked.j += warps;
                    return;
                }
                asked.place_of = 0xffffffffu;
            }
        };
        for (uint32_t i = 0; i < p.stages; ++i) ask_next();
        make_table<F>(smem + p.table_at);
        pdl_wait();
        marks.mark(2);
        uint32_t at_place = 0, parity = 0, shared_parity = 0, row_there = 0xffffffffu;
        bool second = false;
        float* partials = at<float>(p.partials_at);
        float* sums = at<float>(p.sums_of_at);
        for (uint32_t unit = first; unit < last; ++unit) {
            const uint32_t row = unit / units_of, first_group = (unit - row * units_of) * p.unit_groups;
            const bool due = live(row);
            if (row != row_there) {
                // Everybody has left the row before: they passed the barriers of the last unit.
                // A row of inputs for every two warps.
                const uint32_t by = threadIdx.x & 63;
                for (uint32_t e = threadIdx.x / 64; e < p.chosen; e += blockDim.x / 64) stage(e, row * p.chosen + e, by, 64);
                if (shared_tiles != 0) stage_shared(row);
                copies_landed();
                __syncthreads();
                row_there = row;
                marks.mark(3);
            }
            float* shared_partials = partials + n_tiles * kLanes;
            for (uint32_t k = 0, j = warp; k < p.shared_each && j < shared_tiles; ++k, j += warps) {
                if (first_group + j / tiles >= groups) continue;
                barrier_wait(bars + p.stages + k, shared_parity);
                dot_tile<1, Q8_0>(p.cut, shared_ring + k * shared_bytes(), j % tiles, staged(p.chosen), shared_partials + j * kLanes + lane);
                __syncwarp();
            }
            shared_parity ^= 1;
            ask_shared();
            for (uint32_t j = warp; due && j < n_tiles; j += warps) {
                const uint32_t e = j / of_expert, in_unit = j - e * of_expert;
                if (first_group + in_unit / tiles >= groups) continue;
                barrier_wait(bars + at_place, parity);
                dot_tile<1, F>(p.cut, ring + at_place * p.stage_bytes, in_unit % tiles, staged(e), partials + j * kLanes + lane);
                __syncwarp();
                at_place = at_place + 1 == p.stages ? 0 : at_place + 1;
                if (at_place == 0) parity ^= 1;
                ask_next();
            }
            marks.mark(4);
            __syncthreads();
            marks.mark(5);
            const uint32_t outputs = p.unit_groups * wide, parts = p.chosen + (shared_tiles != 0);
            for (uint32_t o = threadIdx.x; o < outputs * parts; o += blockDim.x) {
                const uint32_t e = o / outputs, n = o - e * outputs;
                const float* from = partials + (e * of_expert + n / wide * tiles) * kLanes;
                sums[o] = e < p.chosen && !due ? 0.0f : total(p.cut, from, tiles, kLanes, n % wide);
            }
            __syncthreads();
            for (uint32_t n = threadIdx.x; n < outputs; n += blockDim.x) {
                const uint32_t column = first_group * wide + n;
                if (column >= p.outputs) break;
                float sum = 0.0f;
                for (uint32_t e = 0; due && e < p.chosen; ++e) sum = __fadd_rn(sum, sums[e * outputs + n]);
                if (shared_tiles != 0) sum = __fadd_rn(sum, sums[p.chosen * outputs + n]);
                reinterpret_cast<float*>(p.out)[(size_t)row * p.outputs + column] = sum;
            }
            // The next unit's partial sums go to the other half.
            second = !second;
            partials = at<float>(p.partials_at) + (second ? (n_tiles + shared_tiles) * kLanes : 0);
        }
        marks.mark(6);
    }

    // The shared expert's units of a row, made int8 behind those of the routed ones.
    __device__ __forceinline__ void stage_shared(uint32_t row) const {
        const uint32_t slices = p.cut.slices, slot = p.chosen * slices, step = 128 * warps;
        const float* x = reinterpret_cast<const float*>(p.x) + (size_t)row * p.cut.cols;
        for (uint32_t k = 128 * warp + 4 * lane; k - 4 * lane < p.cut.cols; k += step) {
            float v[1][4] = {};
            if (k < p.cut.cols) {
                const float4 four = __ldcg(reinterpret_cast<const float4*>(x + k));
                v[0][0] = four.x, v[0][1] = four.y, v[0][2] = four.z, v[0][3] = four.w;
            }
            Quantised out[1];
            quantise(v, out);
            if (k >= p.cut.cols) continue;
            *reinterpret_cast<uint32_t*>(smem + p.q_at + (slot + k / 256) * 272 + k % 256) = out[0].q;
            if (lane % 8 == 0) at<float>(p.d_at)[slot * 8 + k / 32] = out[0].d, at<uint32_t>(p.sums_at)[slot * 8 + k / 32] = out[0].sums;
        }
    }
};

#define ARC_EXPERTS(NAME, FORMAT)                                                                                        \
    extern "C" __global__ void __launch_bounds__(512, 1) arc_matmul_experts_up_##NAME(const __grid_constant__ arc::Experts p) { \
        extern __shared__ __align__(128) uint8_t smem[];                                                                 \
        arc::ExpertsOf<FORMAT>(p, smem).up();                                                                            \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(512, 1) arc_matmul_experts_down_##NAME(const __grid_constant__ arc::Experts p) { \
        extern __shared__ __align__(128) uint8_t smem[];                                                                 \
        arc::ExpertsOf<FORMAT>(p, smem).down();                                                                          \
    }

}  // namespace arc
