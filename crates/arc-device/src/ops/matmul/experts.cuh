// Routed experts over few rows: every assignment of a row to an expert by itself, since few rows share an expert.
//
// experts_up     gated units, times the routing weight, and the int8 inputs that the second product reads; a block more makes those
//                of the shared expert's units
// experts_down   the sum over a row's experts, ascending, by blocks that have the same outputs of all of them, and of all rows; with
//                the shared expert's, whose second matrix is Q8_0 and read once for all rows
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
    uint64_t x;                        // up: the shared expert's units, [rows, outputs] f32, which are left as int8 behind those of all
                                       // assignments; or null
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
    uint32_t shared_tiles;             // down: tiles of the shared expert's matrix for 32 outputs
    // Where the parts of a block's shared memory begin. Barriers stand at 0.
    uint32_t table_at, q_at, d_at, sums_at, partials_at, shared_partials_at, shared_ring_at, ring_at;
    uint32_t pad;
};
static_assert(sizeof(Experts) == 248);

// The two int16 of `sums` times the two highest bytes.
__device__ __forceinline__ int dp2a_high(uint32_t sums, uint32_t bytes) {
    int out;
    asm("dp2a.hi.s32.s32 %0, %1, %2, 0;" : "=r"(out) : "r"(sums), "r"(bytes));
    return out;
}

// A lane's slice of a tile of Q2_K: the sums of dot.cuh in fewer instructions. Two crumbs of a byte are four times too large
// where they stand, and dot products take scales out of their word.
__device__ __forceinline__ float dot_q2_k(const uint8_t* tile, uint32_t lane, uint32_t slice, const uint8_t* q, const uint8_t* dx, const uint8_t* sums) {
    const uint8_t* wide = tile + 16 * lane;
    const uint4 scales = load16(wide);
    const uint32_t dm = load4(tile + 5 * 512 + 4 * lane);
    const float d = low_half(dm), m = -high_half(dm);
    float acc = 0.0f;
#pragma unroll
    for (int b = 0; b < 8; b += 4) {
        const uint4 four_d = load16(dx + slice * 32 + 4 * b), four_sums = load16(sums + slice * 32 + 4 * b);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const uint4 v = load16(wide + (1 + (b + e) / 2) * 512);
            const uint4* x = reinterpret_cast<const uint4*>(q + slice * 272 + 32 * (b + e));
            int dots[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint4 values = x[h];
                const uint32_t codes = word(v, 2 * (e % 2) + h), upper = codes >> 4;
                const int ones = __dp4a((int)(upper & 0x03030303u), (int)values.z, __dp4a((int)(codes & 0x03030303u), (int)values.x, 0));
                const int fours = __dp4a((int)(upper & 0x0c0c0c0cu), (int)values.w, __dp4a((int)(codes & 0x0c0c0c0cu), (int)values.y, 0));
                dots[h] = ones + (fours >> 2);
            }
            const uint32_t both = word(scales, (b + e) / 2), of_dots = both & 0x0f0f0f0fu, of_sums = both >> 4 & 0x0f0f0f0fu;
            const uint32_t pair = __byte_perm((uint32_t)dots[0], (uint32_t)dots[1], 0x5410), sum = word(four_sums, e);
            const int dot = e % 2 == 0 ? dp2a(pair, of_dots, 0) : dp2a_high(pair, of_dots);
            const int least = e % 2 == 0 ? dp2a(sum, of_sums, 0) : dp2a_high(sum, of_sums);
            const float scale = __uint_as_float(word(four_d, e));
            acc = __fmaf_rn(__fmul_rn(d, scale), (float)dot, acc);
            acc = __fmaf_rn(__fmul_rn(m, scale), (float)least, acc);
        }
    }
    return acc;
}

// What a lane's slice of a tile makes of one row.
template <uint32_t F>
__device__ __forceinline__ float dot_one(const Cut& cut, const uint8_t* tile, uint32_t t, const Staged& in) {
    const uint32_t lane = threadIdx.x & 31;
    if constexpr (F == Q2_K) {
        return dot_q2_k(tile, lane, cut.slice_of(t, lane), in.q, in.d, in.sums);
    } else {
        float sum;
        dot_tile<1, F>(cut, tile, t, in, &sum);
        return sum;
    }
}

// What a lane's slices of a gate and an up tile make of one row, which is read once for both. Of patterns every lane has
// a copy (`copy_patterns`).
template <uint32_t F>
__device__ __forceinline__ float2 dot_pair(const Cut& cut, const uint8_t* gate, const uint8_t* up, uint32_t t, const Staged& in) {
    if constexpr (F == IQ2_XXS) {
        const uint32_t lane = threadIdx.x & 31, slice = cut.slice_of(t, lane);
        const uint8_t* q = in.q + slice * 272;
        const float* dx = reinterpret_cast<const float*>(in.d) + slice * 8;
        const uint32_t table = shared_at(in.table) + 4 * lane;
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
                        const uint2 two = iq2<4 * kLanes>(index, signs, g, table, low);
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

// Assignments of few rows, at most.
constexpr uint32_t kMostAssigned = 128;

// A warp's way through tiles, `warps` on every time, without a division: tile `in_unit` of `unit`.
struct Way {
    uint32_t unit, in_unit;

    // `over`: units and tiles that `warps` tiles are.
    __device__ __forceinline__ void next(uint2 over, uint32_t per_unit) {
        unit += over.x, in_unit += over.y;
        if (in_unit >= per_unit) in_unit -= per_unit, ++unit;
    }
};

// Quotients by the tiles of a group, of numbers that are 256 at most: so few that 16 bits of the reciprocal do.
struct ByTiles {
    uint32_t tiles, reciprocal;
    __device__ __forceinline__ explicit ByTiles(uint32_t tiles) : tiles(tiles), reciprocal(65536 / tiles + 1) {}
    __device__ __forceinline__ uint32_t group(uint32_t in_unit) const { return in_unit * reciprocal >> 16; }
    __device__ __forceinline__ uint32_t tile(uint32_t in_unit) const { return in_unit - group(in_unit) * tiles; }
};

template <uint32_t F>
struct ExpertsOf {
    const Experts& p;
    uint8_t* smem;
    uint32_t warp, lane, warps, tiles, wide;
    uint64_t* bars;
    uint8_t* ring;

    __device__ __forceinline__ ExpertsOf(const Experts& args, uint8_t* memory)
        : p(args), smem(memory), warp(threadIdx.x >> 5), lane(threadIdx.x & 31), warps(blockDim.x >> 5),
          tiles(args.cut.tiles()), wide(args.cut.group_rows()) {
        bars = reinterpret_cast<uint64_t*>(smem) + p.shared_tiles + warp * p.stages;
        ring = smem + p.ring_at + (size_t)warp * p.stages * p.stage_bytes;
        if (lane == 0) {
#pragma unroll 1
            for (uint32_t i = 0; i < p.stages; ++i) barrier_init(bars + i);
#pragma unroll 1
            for (uint32_t j = warp; j < p.shared_tiles; j += warps) barrier_init(shared_bar(j));
            barriers_made();
        }
        __syncwarp();
    }

    template <typename T>
    __device__ __forceinline__ T* at(uint32_t offset) const { return reinterpret_cast<T*>(smem + offset); }
    // Tile j of the shared expert's for 32 outputs: its columns are those of the routed ones, whole slices.
    static constexpr uint32_t kSharedBytes = tile_bytes(Q8_0, kSlice);
    __device__ __forceinline__ uint64_t* shared_bar(uint32_t j) const { return reinterpret_cast<uint64_t*>(smem) + j; }
    __device__ __forceinline__ uint8_t* shared_tile(uint32_t j) const { return smem + p.shared_ring_at + j * kSharedBytes; }
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

    // The shared expert's units as int8, behind those of all assignments: by the last block.
    __device__ void leave_shared() const {
        pdl_wait();
        pdl_launch();
        const uint32_t step = 128 * warps, all = p.rows * p.outputs;
        const size_t behind = (size_t)p.rows * p.chosen * p.outputs;
        const float* x = reinterpret_cast<const float*>(p.x);
#pragma unroll 1
        for (uint32_t k = 128 * warp + 4 * lane; k < all; k += step) {
            const float4 four = __ldcg(reinterpret_cast<const float4*>(x + k));
            const float v[1][4] = {{four.x, four.y, four.z, four.w}};
            Quantised out[1];
            quantise(v, out);
            const size_t at = (behind + k) / 4;
            reinterpret_cast<uint32_t*>(p.mid_q)[at] = out[0].q;
            if (lane % 8 != 0) continue;
            reinterpret_cast<float*>(p.mid_d)[at / 8] = out[0].d, reinterpret_cast<uint32_t*>(p.mid_sums)[at / 8] = out[0].sums;
        }
    }

    __device__ void up() {
        if (p.x != 0 && blockIdx.x == gridDim.x - 1) return leave_shared();
        const Marks marks(kMarkUp);
        const uint32_t per_unit = p.unit_groups * tiles, units_of = p.outputs / 32;  // pairs of tiles of a unit; units of an expert
        const bool alone = p.rows == 1;
        const uint32_t first = blockIdx.x * p.each, first_assigned = first / units_of, all_assigned = p.rows * p.chosen;
        // The block's assignments, a lane each, and how many there are in all: what is past these is nobody's.
        const uint32_t mine = min(first_assigned + lane, all_assigned - 1), order = alone ? mine : min(word_of(p.order, mine), all_assigned - 1);
        auto assignment = [&](uint32_t i) { return __shfl_sync(~0u, order, i - first_assigned); };
        auto matrix_of = [&](uint32_t i) { return p.base + (uint64_t)word_of(p.ids, assignment(i)) * p.part_bytes; };
        const uint32_t assigned = alone ? (live(0) ? p.chosen : 0) : word_of(p.bounds, p.experts);
        const uint32_t last = min(first + p.each, assigned * units_of);
        const uint2 over = make_uint2(warps / per_unit, warps % per_unit);
        const Way begin{warp / per_unit, warp % per_unit};
        const ByTiles by(tiles);
        const uint32_t step_pairs = p.at_once * per_unit;
        // Whose units come, and where those of the next one begin.
        uint32_t asked_of = first_assigned, asked_end = (first_assigned + 1) * units_of, asked_step = first;
        uint64_t matrix = matrix_of(first_assigned);
        Way asked{first + begin.unit, begin.in_unit};
        uint32_t place = 0;
        // Step by step: a warp begins each anew.
        auto ask_next = [&]() {
            while (asked.unit >= min(asked_step + p.at_once, last)) {
                asked_step += p.at_once;
                if (asked_step >= last) return;
                asked = Way{asked_step + begin.unit, begin.in_unit};
            }
            if (asked.unit >= asked_end) {
                do ++asked_of, asked_end += units_of; while (asked.unit >= asked_end);
                matrix = matrix_of(asked_of);
            }
            ask(matrix, p.up_at, (asked.unit + units_of - asked_end) * p.unit_groups + by.group(asked.in_unit), by.tile(asked.in_unit), place);
            place = place + 1 == p.stages ? 0 : place + 1;
            asked.next(over, per_unit);
        };
        for (uint32_t i = 0; i < p.stages; ++i) ask_next();
        if constexpr (F == IQ2_XXS) copy_patterns(at<uint32_t>(p.table_at), blockDim.x);
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
        uint32_t at_place = 0, parity = 0, slot = 0, end = (first_assigned + 1) * units_of;
        bool second = false;
        float* partials = at<float>(p.partials_at);
        for (uint32_t step = first; step < last; step += p.at_once) {
            const uint32_t stop = min(step + p.at_once, last), n = (stop - step) * per_unit;
            Way now{step + begin.unit, begin.in_unit};
            for (; now.unit < stop; now.next(over, per_unit)) {
                while (now.unit >= end) ++slot, end += units_of;
                const uint32_t t = by.tile(now.in_unit);
                const uint8_t* pair = ring + at_place * p.stage_bytes;
                barrier_wait(bars + at_place, parity);
                const float2 sums = dot_pair<F>(p.cut, pair, pair + p.cut.tile_len(F, t), t, staged(alone ? 0 : slot));
                float* to = partials + 2 * ((now.unit - step) * per_unit + now.in_unit) * kLanes + lane;
                to[0] = sums.x, to[kLanes] = sums.y;
                __syncwarp();
                at_place = at_place + 1 == p.stages ? 0 : at_place + 1;
                if (at_place == 0) parity ^= 1;
                ask_next();
                if (now.unit == first && now.in_unit == 0) marks.mark(4);
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
        const uint32_t groups = (p.outputs + wide - 1) / wide, units_of = (groups + p.unit_groups - 1) / p.unit_groups;
        // Outputs of all rows, one row after the other.
        const uint32_t first = blockIdx.x * p.each, last = min(first + p.each, p.rows * units_of);
        pdl_launch();
        if (first >= last) return pdl_wait();
        auto ask_shared = [&](uint32_t unit) {
            const uint32_t first_group = unit / p.rows * p.unit_groups;
            for (uint32_t j = warp; lane == 0 && unit < last && j < p.shared_tiles; j += warps) {
                const uint32_t group = first_group + j / tiles;
                const uint64_t from = p.shared + (size_t)group * p.cut.group_bytes(Q8_0) + p.cut.tile_at(Q8_0, j % tiles);
                if (group < groups) bulk_load(shared_tile(j), reinterpret_cast<const uint8_t*>(from), kSharedBytes, shared_bar(j));
            }
        };
        ask_shared(first);
        // What the gate chose for all rows, and which rows are live, a lane each: lane l has assignments l + 32 i.
        uint32_t chosen[kMostAssigned / 32];
#pragma unroll
        for (uint32_t i = 0; i < kMostAssigned / 32; ++i) {
            chosen[i] = lane + 32 * i < p.rows * p.chosen ? word_of(p.ids, lane + 32 * i) : 0;
        }
        const uint32_t lives = __ballot_sync(~0u, lane < p.rows && live(lane));
        auto matrix_of = [&](uint32_t a) {
            uint32_t id = 0;
#pragma unroll
            for (uint32_t i = 0; i < kMostAssigned / 32; ++i) {
                const uint32_t other = __shfl_sync(~0u, chosen[i], a % 32);
                if (a / 32 == i) id = other;
            }
            return p.base + (uint64_t)id * p.part_bytes;
        };
        // A unit's tiles are those of one expert after the other; that of a row that is not live has none.
        const uint2 over = make_uint2(warps / of_expert, warps % of_expert);
        const Way begin{warp / of_expert, warp % of_expert};
        const ByTiles by_tiles(tiles);
        uint32_t asked_unit = first, asked_row = first % p.rows, asked_group = first / p.rows * p.unit_groups, place = 0;
        Way asked = begin;
        auto ask_next = [&]() {
            while (asked_unit < last) {
                while ((lives >> asked_row & 1) && asked.unit < p.chosen) {
                    const uint32_t group = asked_group + by_tiles.group(asked.in_unit);
                    const bool there = group < groups;
                    if (there) ask(matrix_of(asked_row * p.chosen + asked.unit), 0, group, by_tiles.tile(asked.in_unit), place);
                    asked.next(over, of_expert);
                    if (!there) continue;
                    place = place + 1 == p.stages ? 0 : place + 1;
                    return;
                }
                ++asked_unit;
                if (++asked_row == p.rows) asked_row = 0, asked_group += p.unit_groups;
                asked = begin;
            }
        };
        for (uint32_t i = 0; i < p.stages; ++i) ask_next();
        make_table<F>(smem + p.table_at);
        pdl_wait();
        marks.mark(2);
        // A row's inputs, one for every two warps, stand where those of the row before the last did.
        const uint32_t halves = p.rows > 1 ? 2 : 1, shared_slot = halves * p.chosen;
        auto stage_row = [&](uint32_t unit, uint32_t half) {
            const uint32_t row = unit % p.rows, by = threadIdx.x & 63;
            for (uint32_t e = threadIdx.x / 64; e < p.chosen; e += blockDim.x / 64) stage(half * p.chosen + e, row * p.chosen + e, by, 64);
        };
        stage_row(first, 0);
        if (p.shared_tiles != 0) {
            for (uint32_t r = 0; r < p.rows; ++r) stage(shared_slot + r, p.rows * p.chosen + r, threadIdx.x, blockDim.x);
        }
        copies_landed();
        __syncthreads();
        marks.mark(3);
        uint32_t at_place = 0, parity = 0, shared_parity = 0, half = 0;
        bool second = false, shared_second = true;
        float* shared_partials = nullptr;
        uint32_t row = first % p.rows, first_group = first / p.rows * p.unit_groups;
        for (uint32_t unit = first; unit < last; ++unit) {
            const uint32_t slot = half * p.chosen;
            const bool due = lives >> row & 1, shares = p.shared_tiles != 0 && (row == 0 || unit == first);
            // Everybody has left what stands there: they passed the barriers of the last unit.
            if (halves == 2 && unit + 1 < last) stage_row(unit + 1, 1 - half);
            float* partials = at<float>(p.partials_at) + (second ? n_tiles * kLanes : 0);
            // The shared expert's, of all rows.
            if (shares) {
                shared_second = !shared_second;
                shared_partials = at<float>(p.shared_partials_at) + (shared_second ? p.shared_tiles * p.rows * kLanes : 0);
            }
            for (uint32_t j = warp; shares && j < p.shared_tiles * p.rows; j += warps) {
                const uint32_t tile = j % p.shared_tiles, r = j / p.shared_tiles;
                if (first_group + tile / tiles >= groups) continue;
                barrier_wait(shared_bar(tile), shared_parity);
                dot_tile<1, Q8_0>(p.cut, shared_tile(tile), tile % tiles, staged(shared_slot + r), shared_partials + j * kLanes + lane);
            }
            Way now = begin;
            for (uint32_t j = warp; due && j < n_tiles; j += warps, now.next(over, of_expert)) {
                if (first_group + by_tiles.group(now.in_unit) >= groups) continue;
                barrier_wait(bars + at_place, parity);
                partials[j * kLanes + lane] = dot_one<F>(p.cut, ring + at_place * p.stage_bytes, by_tiles.tile(now.in_unit), staged(slot + now.unit));
                __syncwarp();
                at_place = at_place + 1 == p.stages ? 0 : at_place + 1;
                if (at_place == 0) parity ^= 1;
                ask_next();
            }
            marks.mark(4);
            copies_landed();
            __syncthreads();
            marks.mark(5);
            // The shared expert's of the next outputs.
            if (shares) shared_parity ^= 1, ask_shared(unit - row + p.rows);
            // One warp sums, an output a lane, while the others are at the next unit, whose partial sums go to the other half.
            const uint32_t column = first_group * wide + lane;
            if (warp == (unit - first) % warps && column < p.outputs) {
                const float* from = partials + lane / wide * tiles * kLanes;
                float sum = 0.0f;
#pragma unroll 2
                for (uint32_t e = 0; e < (due ? p.chosen : 0); ++e, from += of_expert * kLanes) {
                    sum = __fadd_rn(sum, total(p.cut, from, tiles, kLanes, lane % wide));
                }
                from = shared_partials + (row * p.shared_tiles + lane / wide * tiles) * kLanes;
                if (p.shared_tiles != 0) sum = __fadd_rn(sum, total(p.cut, from, tiles, kLanes, lane % wide));
                reinterpret_cast<float*>(p.out)[(size_t)row * p.outputs + column] = sum;
            }
            second = !second;
            if (halves == 2) half = 1 - half;
            if (++row == p.rows) row = 0, first_group += p.unit_groups;
        }
        marks.mark(6);
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
