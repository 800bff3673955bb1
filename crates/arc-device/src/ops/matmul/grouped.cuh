// Experts over many rows, where an expert has few of them: int8 tensor cores, a warp by itself.
//
// A block, one a multiprocessor, takes an even share of all that is to do: of the experts' tiles of up to 16 or 32 rows one after
// the other, and of their outputs. The rows of a tile stand in shared memory as a whole. A warp takes 16 outputs at a time,
// eight of a gate and the same eight of its up, or sixteen neighbours, through all slices: it brings slices of weights, still
// coded, while it multiplies others, keeps sums in registers and stores what becomes of them. So warps wait
// for one another only where the block goes on to other rows.
//
// For columns that stand four slices a tile (layout.cuh), of formats whose blocks are 256 values. The order of sums is that of
// mma.cuh, whose shapes of fragments these are: rows g of a fragment are outputs, its columns rows of the product.
#pragma once

#include "../../pdl.cuh"
#include "decode.cuh"
#include "iq2.cuh"
#include "mma.cuh"

namespace arc {

// Tiles of up to ROWS rows, W warps, a ring of STAGES slices a warp.
template <uint32_t F, int ROWS, int W, int STAGES>
struct Grouped {
    static constexpr int kThreads = 32 * W, kRows = ROWS, kStages = STAGES;
    // Planes of 16 bytes a lane of which a slice has 8 rows, and the plane behind them.
    static constexpr int kWide = arc::planes(F).n16, kNarrow = F == IQ2_XXS ? 2 : 4;
    static_assert(F == IQ2_XXS || F == Q2_K);
    // Whether a warp's outputs are eight of a gate and the same eight of its up, or sixteen neighbours.
    static constexpr bool kPair = F == IQ2_XXS;
    // A slice of eight outputs, and of a warp's two eights.
    static constexpr uint32_t kHalf = kWide * 128 + 8 * kNarrow, kStage = 2 * kHalf;
    static constexpr bool kSums = reads_sums(F);
    // Bytes that a lane takes together of a block of inputs; it takes twice as many of every block.
    static constexpr uint32_t kPiece = F == IQ2_XXS ? 8 : 4;
    // What a sixteen costs with so many rows, roughly: with every eight of them as much as, without any, once or twice.
    __device__ __forceinline__ static uint32_t cost(uint32_t rows) {
        return rows == 0 ? 0 : (rows + 7) / 8 + (F == IQ2_XXS ? 2 : 1);
    }
    // The same of all rows of an expert.
    __device__ __forceinline__ static uint32_t cost_of_all(uint32_t rows) { return rows / kRows * cost(kRows) + cost(rows % kRows); }

    const Product& p;
    uint8_t* smem;

    // Shared memory: bounds of experts, the block's plan, patterns, scales of a warp's slice, rows, stages.
    struct Places {
        uint32_t plan, magnitudes, patterns, scales, q, d, sums, ring;
    };
    __device__ __forceinline__ static Places places(const Product& p) {
        Places at;
        at.plan = (4 * (p.experts + 1) + 15) / 16 * 16;
        at.magnitudes = (at.plan + (uint32_t)sizeof(Plan) + 127) / 128 * 128;
        at.patterns = at.magnitudes + 128;
        at.scales = at.patterns + (F == IQ2_XXS ? 256 * kLanes * 4 : 0);
        at.q = at.scales + (F == IQ2_XXS ? W * 512 : 0);
        at.d = at.q + kRows * (p.cut.cols + 64);
        at.sums = at.d + p.cut.cols / 32 * kRows * 4;
        at.ring = at.sums + (kSums ? p.cut.cols / 32 * kRows * 4 : 0);
        return at;
    }

    // Rows of one expert, and outputs `first .. last` of them, in sixteens.
    struct Item {
        uint32_t expert, row, end, first, last;
    };

    // A block's way through its items. It stands in shared memory, with this item and the next; one thread goes it.
    struct Way {
        uint32_t expert, tile;  // the tile that is next
        uint32_t before;        // what all tiles before it cost
        uint32_t from, to;      // the block's share

        __device__ __forceinline__ void next(const uint32_t* bounds, uint32_t experts, uint32_t outputs, Item& item) {
            for (; expert < experts && before < to; ++expert, tile = 0) {
                const uint32_t begin = bounds[expert], end = bounds[expert + 1];
                while (begin + tile * kRows < end && before < to) {
                    item.expert = expert;
                    item.row = begin + tile * kRows;
                    item.end = min(end, item.row + kRows);
                    const uint32_t each = cost(item.end - item.row);
                    const uint32_t here = before;
                    before += each * outputs, ++tile;
                    item.first = from > here ? (from - here + each - 1) / each : 0;
                    item.last = min(outputs, (to - here + each - 1) / each);
                    if (item.first < item.last) return;
                }
            }
            item.first = item.last = 0;
        }
    };

    // Of this item and the next: what it is (`first` is `last` where there is none), and how many sixteens were taken beside those
    // that warps begin with.
    struct Plan {
        Way way;
        Item items[2];
        uint32_t taken[2];
    };

    static_assert(sizeof(Plan) == 68);

    // Where the block begins.
    __device__ __forceinline__ static Way way(const uint32_t* bounds, uint32_t experts, uint32_t outputs) {
        const uint32_t lane = threadIdx.x & 31, run = (experts + 31) / 32;
        uint32_t mine = 0;
        for (uint32_t e = lane * run; e < min(experts, (lane + 1) * run); ++e) mine += cost_of_all(bounds[e + 1] - bounds[e]);
        mine *= outputs;
        uint32_t sum = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        const uint64_t all = __shfl_sync(~0u, sum, 31);
        Way way;
        way.from = (uint32_t)(all * blockIdx.x / gridDim.x), way.to = (uint32_t)(all * (blockIdx.x + 1) / gridDim.x);
        const uint32_t hit = __ballot_sync(~0u, way.from < sum);
        const int at = hit == 0 ? 31 : __ffs(hit) - 1;
        way.before = __shfl_sync(~0u, sum - mine, at);
        way.expert = at * run, way.tile = 0;
        return way;
    }

    // Slices of weights on their way. Where this lane copies from next: of planes 0
    // to 3 of the first eight outputs, and the others' are `second` further; then what the two eights have beyond these.
    struct Bringing {
        uint64_t from, rest, second;
        uint32_t to, to_rest, step;  // where its copies stand in the ring; bytes from a slice of the last to the next
        uint32_t group, slice, last;  // of what comes next; `group` past the item's last: nothing
    };
    static constexpr uint32_t kMore = (kWide - 4) * 8, kLast = kNarrow / 2, kRest = 2 * (kMore + kLast);

    __device__ __forceinline__ Bringing bringing(uint8_t* ring) const {
        const uint32_t lane = threadIdx.x & 31, row = F == IQ2_XXS ? lane % 8 ^ lane / 8 * 2 : lane % 8;
        constexpr uint32_t kEach = kMore == 0 ? 1 : kMore;
        const bool wide = kMore != 0 && lane < 2 * kMore;
        const uint32_t half = wide ? lane / kEach : (lane - 2 * kMore) / kLast;
        Bringing b;
        b.second = kPair ? p.segs[1].base - p.segs[0].base : p.cut.group_bytes(F);
        b.to = (uint32_t)__cvta_generic_to_shared(ring) + lane / 8 * 128 + row * 16;
        b.to_rest = (uint32_t)__cvta_generic_to_shared(ring) + half * kHalf +
                    (wide ? 4 * 128 + lane % kEach * 16 : kWide * 128 + (lane - 2 * kMore) % kLast * 16);
        b.step = wide ? 128 : 8 * kNarrow;
        return b;
    }

    __device__ __forceinline__ void enter(Bringing& b, const Item& item, uint32_t group) const {
        const uint32_t lane = threadIdx.x & 31;
        constexpr uint32_t kEach = kMore == 0 ? 1 : kMore;
        const bool wide = kMore != 0 && lane < 2 * kMore;
        const uint32_t half = wide ? lane / kEach : (lane - 2 * kMore) / kLast;
        const uint64_t base = p.segs[0].base + item.expert * p.part_bytes + (uint64_t)group * p.cut.group_bytes(F) * (kPair ? 1 : 2);
        b.group = group, b.slice = 0, b.last = item.last;
        b.from = base + lane / 8 * 512 + lane % 8 * 16;
        b.rest = base + half * b.second + (wide ? 4 * 512 + lane % kEach * 16 : kWide * 512 + (lane - 2 * kMore) % kLast * 16);
    }

    __device__ __forceinline__ static void copy(uint32_t to, uint64_t from) { copy16(to, reinterpret_cast<const void*>(from)); }

    // Asks for the next slice.
    __device__ __forceinline__ void bring(Bringing& b, const Item& item, uint32_t* count) const {
        if (b.group < b.last) {
            const uint32_t stage = b.slice % kStages * kStage;
            copy(b.to + stage, b.from);
            copy(b.to + stage + kHalf, b.from + b.second);
            if ((threadIdx.x & 31) < kRest) copy(b.to_rest + stage, b.rest);
            const bool over = b.slice % 4 == 3;
            b.from += over ? tile_bytes(F, kSlice) - 3 * 128 : 128;
            b.rest += over ? tile_bytes(F, kSlice) - 3 * b.step : b.step;
            if (++b.slice == p.cut.slices) {
                uint32_t next = 0;
                if ((threadIdx.x & 31) == 0) next = atomicAdd(count, 1u);
                enter(b, item, item.first + W + __shfl_sync(~0u, next, 0));
            }
        }
        copies_commit();
    }

    // Brings one row of a tile, by a part of its warps.
    __device__ __forceinline__ void stage_row(const Places& at, uint32_t n, uint32_t input, uint32_t part, uint32_t parts) const {
        const uint32_t lane = threadIdx.x & 31, cols = p.cut.cols;
        const uint8_t* q = reinterpret_cast<const uint8_t*>(p.q) + (size_t)input * cols;
        uint8_t* to = smem + at.q + n * (cols + 64);
        // Of two blocks, a lane's pieces stand together.
        constexpr uint32_t kOf = 64 / kPiece, kEach = kOf / 2;
        for (uint32_t i = part * 32 + lane; i < cols / kPiece; i += 32 * parts) {
            const uint32_t piece = i % kOf, block = piece / kEach, in = piece % kEach;
            const uint32_t place = F == IQ2_XXS ? 2 * in + block : 4 * (in % 4) + 2 * block + in / 4;
            copy_few<kPiece>(to + (i - piece + place) * kPiece, q + i * kPiece);
        }
        const float* d = reinterpret_cast<const float*>(p.d) + (size_t)input * (cols / 32);
        const uint32_t* sums = reinterpret_cast<const uint32_t*>(p.sums) + (size_t)input * (cols / 32);
        for (uint32_t b = part * 32 + lane; b < cols / 32; b += 32 * parts) {
            const uint32_t place = 4 * ((b / 2 * (kRows / 2) + n / 2) * 4 + b % 2 * 2 + n % 2);
            copy_few<4>(smem + at.d + place, d + b);
            if constexpr (kSums) copy_few<4>(smem + at.sums + place, sums + b);
        }
    }

    // acc += one slice.
    template <int NT>
    __device__ __forceinline__ void slice(uint8_t* stage, float* scales, const uint8_t* patterns, uint32_t magnitudes,
                                          const uint8_t* q, const uint8_t* d, const uint8_t* sums, float (&acc)[NT][4]) const {
        const uint32_t lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
        // Of IQ2_XXS, rows of a plane stand so that lanes meet different banks when each reads another plane.
        const auto codes = [&](int half, uint32_t plane) {
            const uint32_t row = F == IQ2_XXS ? g ^ (2 * plane) : g;
            return load16(stage + half * kHalf + plane * 128 + row * 16);
        };
        float w_d[2], w_m[2];
        uint4 own[2];
        if constexpr (F == IQ2_XXS) {
            // A lane makes the scales of two blocks of either output, and signs of what says where they change: all four of them
            // would make the same.
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint4 v = codes(h, t);
                const float d8 = __fmul_rn(load_half(stage + h * kHalf + kWide * 128 + 2 * g), 0.125f);
                *reinterpret_cast<float2*>(scales + (8 * h + g) * 8 + 2 * t) = make_float2(iq2_scale(d8, v.y), iq2_scale(d8, v.w));
                v.y = iq2_signs(v.y), v.w = iq2_signs(v.w);
                *reinterpret_cast<uint4*>(stage + h * kHalf + t * 128 + (g ^ (2 * t)) * 16) = v;
            }
            __syncwarp();
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                own[h] = codes(h, 0);
                const uint32_t dm = load4(stage + h * kHalf + kWide * 128 + 4 * g);
                w_d[h] = low_half(dm), w_m[h] = -high_half(dm);
            }
        }
#pragma unroll(NT <= 2 ? 2 : 1)
        for (int four = 0; four < 2; ++four) {
            float4 made[2];
            if constexpr (F == IQ2_XXS) {
#pragma unroll
                for (int h = 0; h < 2; ++h) made[h] = *reinterpret_cast<const float4*>(scales + (8 * h + g) * 8 + 4 * four);
            }
#pragma unroll
            for (int two = 0; two < 2; ++two) {
                uint4 v[2];
                uint32_t factors[2], mins[2], a[2][4];
                float scale[2][2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    v[h] = codes(h, (F == IQ2_XXS ? 0 : 1) + 2 * four + two);
                    if constexpr (F == Q2_K) {
                        const uint32_t both = two == 0 ? own[h].x : own[h].y;
                        factors[h] = both & 0x0f0f0f0fu, mins[h] = (both >> 4) & 0x0f0f0f0fu;
                    }
                }
#pragma unroll
                for (int e = 0; e < 2; ++e) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        if constexpr (F == IQ2_XXS) {
                            const uint32_t index = word(v[h], 2 * e), all = word(v[h], 2 * e + 1);
                            const uint32_t entry =
                                __dp4a(index, (uint32_t)(4 * kLanes) << (8 * t), (uint32_t)__cvta_generic_to_shared(patterns));
                            const uint32_t sign = __funnelshift_l(all, all, 2 - t) & 0x44444444u;
                            const uint32_t selector = *reinterpret_cast<const uint32_t*>(__cvta_shared_to_generic(entry)) | sign;
                            a[e][h] = permute(magnitudes, 0x00d5e7f8u, selector);
                            a[e][2 + h] = permute(magnitudes, 0x00d5e7f8u, selector >> 16);
                            scale[e][h] = two == 0 ? (e == 0 ? made[h].x : made[h].y) : (e == 0 ? made[h].z : made[h].w);
                        } else {
                            const uint32_t low = e == 0 ? factors[h] & 15u : permute(factors[h], 0, 0x4442);
                            const uint32_t high = permute(factors[h], 0, e == 0 ? 0x4441 : 0x4443);
                            a[e][h] = ((word(v[h], 2 * e) >> (2 * t)) & 0x03030303u) * low;
                            a[e][2 + h] = ((word(v[h], 2 * e + 1) >> (2 * t)) & 0x03030303u) * high;
                            scale[e][h] = w_d[h];
                        }
                    }
                }
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
                    const uint4 x = load16(q + nt * 8 * (p.cut.cols + 64) + two * 64);
                    const float4 dx = *reinterpret_cast<const float4*>(d + (two * (kRows / 2) + 4 * nt) * 16);
                    uint4 s = make_uint4(0, 0, 0, 0);
                    if constexpr (kSums) s = load16(sums + (two * (kRows / 2) + 4 * nt) * 16);
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        int c[4];
                        mma32(c, a[e], e == 0 ? x.x : x.z, e == 0 ? x.y : x.w, kFloatBits, kFloatBits);
                        const float of[2] = {e == 0 ? dx.x : dx.z, e == 0 ? dx.y : dx.w};
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            float& sum = acc[nt][i];
                            sum = __fmaf_rn(__fmul_rn(scale[e][i / 2], of[i % 2]), from_bits(c[i]), sum);
                            if constexpr (F == Q2_K) {
                                const int bits = biased_dp2a(word(s, 2 * e + i % 2), mins[i / 2], e);
                                sum = __fmaf_rn(__fmul_rn(w_m[i / 2], of[i % 2]), from_bits(bits), sum);
                            }
                        }
                    }
                }
            }
            q += 128, d += 2 * (kRows / 2) * 16, sums += 2 * (kRows / 2) * 16;
            if constexpr (F == Q2_K) {
#pragma unroll
                for (int h = 0; h < 2; ++h) own[h].x = own[h].z, own[h].y = own[h].w;
            }
        }
        // The next slice's scales come where these are.
        if constexpr (F == IQ2_XXS) __syncwarp();
    }
    // On top of kFloatBits, the two int16 of `sums` times two bytes, the lower or the upper.
    __device__ __forceinline__ static int biased_dp2a(uint32_t sums, uint32_t bytes, int upper) {
        int out;
        if (upper == 0) {
            asm("dp2a.lo.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(sums), "r"(bytes), "r"(kFloatBits));
        } else {
            asm("dp2a.hi.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(sums), "r"(bytes), "r"(kFloatBits));
        }
        return out;
    }

    // What becomes of a sixteen's sums.
    template <int NT>
    __device__ __forceinline__ void leave(const Item& item, uint32_t group, const float (&total)[NT][4]) const {
        const uint32_t lane = threadIdx.x & 31;
        const uint32_t* order = reinterpret_cast<const uint32_t*>(p.order);
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) {
            const uint32_t r = item.row + i / 2 * 8 + lane % 4 * 2 + i % 2;
            const float v = total[i / 2][i % 2], other = total[i / 2][2 + i % 2];
            if (r < item.end) {
                const uint32_t assigned = order[r];
                float* out = reinterpret_cast<float*>(p.out) + (size_t)(p.scatter ? assigned : r) * p.out_stride;
                if constexpr (kPair) {
                    const float weight = reinterpret_cast<const float*>(p.aux)[assigned];
                    out[8 * group + lane / 4] = __fmul_rn(gated(kThenClampedSilu, v, other, p.scalar), weight);
                } else {
                    out[16 * group + lane / 4] = v, out[16 * group + 8 + lane / 4] = other;
                }
            }
            // One after the other: registers are few.
            __syncwarp();
        }
    }

    template <int NT>
    __device__ __forceinline__ void outputs(const Places& at, const Item& item, Bringing& b, uint32_t* count, uint32_t magnitudes) const {
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
        float* scales = reinterpret_cast<float*>(smem + at.scales) + warp * 128;
        const uint8_t* patterns = smem + at.patterns + 4 * lane;
        uint8_t* ring = smem + at.ring + warp * (kStages * kStage);
        for (uint32_t next = item.first + warp; next < b.last; next = b.group) {
            const uint32_t group = next;
            float total[NT][4] = {};
            const uint8_t* q = smem + at.q + g * (p.cut.cols + 64) + 16 * t;
            const uint8_t *d = smem + at.d + 16 * t, *sums = smem + at.sums + 16 * t;
#pragma unroll 1
            for (uint32_t s = 0; s < p.cut.slices; ++s) {
                copies_wait<kStages - 2>();
                __syncwarp();
                bring(b, item, count);
                float acc[NT][4] = {};
                slice<NT>(ring + s % kStages * kStage, scales, patterns, magnitudes, q, d, sums, acc);
#pragma unroll
                for (int i = 0; i < 4 * NT; ++i) total[i / 4][i % 4] = __fadd_rn(total[i / 4][i % 4], acc[i / 4][i % 4]);
                q += kSlice, d += 4 * (kRows / 2) * 16, sums += 4 * (kRows / 2) * 16;
            }
            leave<NT>(item, group, total);
        }
    }

    __device__ void run() const {
        const Places at = places(p);
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31, n_outputs = p.groups / (kPair ? 1 : 2);
        pdl_launch();
        if constexpr (F == IQ2_XXS) copy_patterns(reinterpret_cast<uint32_t*>(smem + at.patterns), kThreads);
        uint32_t* bounds = reinterpret_cast<uint32_t*>(smem);
        Plan& plan = *reinterpret_cast<Plan*>(smem + at.plan);
        if (threadIdx.x < 2) plan.taken[threadIdx.x] = 0;
        if (threadIdx.x < kLanes) reinterpret_cast<uint32_t*>(smem + at.magnitudes)[threadIdx.x] = kMagnitudes;
        pdl_wait();
        for (uint32_t e = threadIdx.x; e <= p.experts; e += kThreads) bounds[e] = reinterpret_cast<const uint32_t*>(p.bounds)[e];
        __syncthreads();
        if (warp == 0) {
            Way way = Grouped::way(bounds, p.experts, n_outputs);
            if (lane == 0) way.next(bounds, p.experts, n_outputs, plan.items[0]), plan.way = way;
        }
        __syncthreads();
        // A register of every lane: the compiler would move what all have there every time.
        const uint32_t magnitudes = reinterpret_cast<const uint32_t*>(smem + at.magnitudes)[lane];
        Bringing b = bringing(smem + at.ring + warp * (kStages * kStage));
        for (uint32_t n = 0;; n ^= 1) {
            const Item& item = plan.items[n];
            if (item.first == item.last) break;
            const uint32_t rows = item.end - item.row, tiles = (rows + 7) / 8;
            // The first weights come while the rows do.
            enter(b, item, item.first + warp);
            for (int i = 0; i < kStages - 1; ++i) bring(b, item, plan.taken + n);
            // A row by as many warps as there are for it, or a warp more than one row.
            constexpr uint32_t kInputs = (kRows + W - 1) / W;
            const uint32_t parts = max(1u, W / (8 * tiles)), row = warp / parts, step = W / parts;
            uint32_t inputs[kInputs];
#pragma unroll
            for (uint32_t i = 0; i < kInputs; ++i) {
                const uint32_t r = item.row + min(row + i * step, rows - 1);
                inputs[i] = p.gather ? reinterpret_cast<const uint32_t*>(p.order)[r] / p.chosen : r;
            }
            // Everybody has left the rows before.
            __syncthreads();
            if (threadIdx.x == 0) {
                plan.taken[n ^ 1] = 0;
                Way way = plan.way;
                way.next(bounds, p.experts, n_outputs, plan.items[n ^ 1]), plan.way = way;
            }
#pragma unroll
            for (uint32_t i = 0; i < kInputs; ++i) {
                if (row + i * step < rows && row < step) stage_row(at, row + i * step, inputs[i], warp % parts, parts);
            }
            copies_commit();
            copies_wait<0>();
            __syncthreads();
            if (tiles == 1) outputs<1>(at, item, b, plan.taken + n, magnitudes);
            if (tiles == 2) outputs<2>(at, item, b, plan.taken + n, magnitudes);
            if constexpr (kRows == 32) {
                if (tiles == 3) outputs<3>(at, item, b, plan.taken + n, magnitudes);
                if (tiles == 4) outputs<4>(at, item, b, plan.taken + n, magnitudes);
            }
        }
    }
};

#define ARC_GROUPED(NAME, FORMAT, ROWS, W, STAGES)                                                \
    extern "C" __global__ void __launch_bounds__(32 * W, 1) arc_matmul_grouped_##NAME##_##ROWS(   \
        const __grid_constant__ arc::Product p) {                                                 \
        extern __shared__ __align__(128) uint8_t smem[];                                          \
        arc::Grouped<FORMAT, ROWS, W, STAGES>{p, smem}.run();                                     \
    }

}  // namespace arc
