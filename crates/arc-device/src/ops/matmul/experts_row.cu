// The gate and the experts of one row in one launch, the shared one too: choice, gated units, and their sum.
//
// A block makes a unit of every two of the chosen experts, one after the other, and most make half of one of the shared expert;
// then it sums 32 outputs of all of them. Units go to all blocks as they are made, so that most are there when a block has made its
// last, and what they are multiplied with covers the way of the last ones. Weights come in chunks, one stream through one
// ring: of the shared expert's first matrix while the gate chooses, since they depend on nothing; of the chosen experts'
// first; then of all second matrices. Blocks may wait for one another, since all are resident: there is one a multiprocessor
// at most, and the kernels before them end.
//
// What is sent through memory takes microseconds while weights come. So the halves of a unit of the shared expert meet within a
// cluster of two blocks, and nobody looks for units before most of them can be there. The last blocks start late, where the site
// before still has the multiprocessor: helpers, in front of all others and on multiprocessors to spare, make their halves.
//
// First matrices are IQ2_XXS and second ones Q2_K, the shared expert's Q8_0; groups have 8 rows. Exact, since all sums are
// those of experts.cuh.
#include "../router/one.cuh"
#include "exchange.cuh"
#include "experts.cuh"

namespace arc {

namespace {

// Warps that multiply, of which one sends the last unit. Behind them: one brings chunks, one finishes units and sends them, others
// take those of all blocks.
constexpr uint32_t kWarps = 16, kThreads = 32 * kWarps, kBringer = kWarps, kFinisher = kWarps + 1, kTaker = kWarps + 2, kTakers = 2;
// Units that a lane looks for at once, and nanoseconds between two looks.
constexpr uint32_t kAtOnce = 4, kPause = 200;
constexpr uint32_t kAllThreads = 32 * (kTaker + kTakers);
static_assert(kWarps == router::kOneWarps);
constexpr uint32_t kGroup = 8;  // rows of a group
// Groups of the shared expert that a block takes, and of 32 outputs.
constexpr uint32_t kSharedGroups = 2, kUnitGroups = 4;
// Chunks: gates and ups of the shared expert, a part of a group; pairs of gate and up by group; of 32 outputs, the shared
// expert's second matrix by group, and those of the chosen ones by two groups.
constexpr uint32_t kMostShared = 16, kDownGroups = 2, kDownChunks = kUnitGroups / kDownGroups;
// Halves of units of the shared expert that a helper makes, for as many blocks.
constexpr uint32_t kHelps = 4;
constexpr uint32_t kMostChosen = 16, kMostEach = kMostChosen / 2;
// Chunks of second matrices in front of the shared expert's: those of two experts.
constexpr uint32_t kDownAhead = 2 * kDownChunks;
constexpr uint32_t kMostChunks = kMostShared + kUnitGroups * kMostEach + kUnitGroups + kDownChunks * kMostChosen;
constexpr uint32_t kSharedTile = tile_bytes(Q8_0, kSlice), kUpTile = tile_bytes(IQ2_XXS, kSlice), kDownTile = tile_bytes(Q2_K, kSlice);

// What comes together, one after the other; `Chunk` of experts_row.rs.
struct Chunk {
    uint32_t at;             // in the ring
    uint16_t freed, landed;  // chunks in front that have to be empty, and there, before it is asked for: never fewer than before
};

// `ExpertsRow` of experts_row.rs.
struct ExpertsRow {
    Cut up, down;
    uint64_t base, part_bytes, up_at;         // the first expert's gate; from one to the next; from a gate to its up
    uint64_t shared, shared_up_at;            // the shared expert's gate; from it to the up
    uint64_t down_base, down_bytes, shared_down;  // the first expert's second; from one to the next; the shared one's
    uint64_t infos;
    uint64_t q, d;                            // the row as int8, and scales
    uint64_t mid, shared_units, out;          // units of the chosen experts and of the shared one, and the sum: f32
    uint64_t counts;                          // a number that is another in every launch
    uint64_t sent;                            // units that blocks send to one another, as int8: `send_codes_apart`
    uint64_t site;                            // where the sum is sent for the site behind; the word after `counts` has its number. Or null
    uint32_t chosen, units;                   // units of 32 outputs of an expert's first matrix
    uint32_t shared_tiles;                    // of a chunk of the shared expert's first matrix
    uint32_t helpers, each;                   // blocks in front of the others, pairs; units of a block, each of two experts'
    float limit;
    uint32_t known_at, table_at, q_at, d_at, units_at, partials_at, products_at, sums_at, ring_at;  // in shared memory. Barriers stand at 0.
    Chunk chunks[3][kMostChunks];             // of most blocks, of those with nothing of the shared expert's first matrix, of helpers
};
static_assert(sizeof(ExpertsRow) == 224 + 24 * kMostChunks);

// What a block knows of the row, and what it shares of the gate.
struct Known {
    router::GateParts gate;
    uint32_t live, tag;  // the number of the launch
    float half[kHelps][kSharedGroups * kGroup];  // the other block's halves of units of the shared expert
};
static_assert(sizeof(Known) <= 1792 && kMostChosen == router::kMaxChosen);

struct OneRow {
    const ExpertsRow& p;
    uint8_t* smem;
    const uint32_t warp, lane, tiles, down_tiles;  // tiles of a group
    const bool helper;
    const uint32_t block;   // among those that are no helpers
    const uint32_t halves;  // of units of the shared expert that the block makes
    // Chunks of such a half, of all of them, of all first matrices, and all.
    const uint32_t of_half, of_shared, of_units, all;

    __device__ __forceinline__ OneRow(const ExpertsRow& p, uint8_t* smem)
        : p(p), smem(smem), warp(threadIdx.x >> 5), lane(threadIdx.x & 31), tiles(p.up.tiles()), down_tiles(p.down.tiles()),
          helper(blockIdx.x < p.helpers), block(blockIdx.x - p.helpers),
          halves(helper ? kHelps : block < 2 * p.units - kHelps * p.helpers ? 1 : 0), of_half(2 * kSharedGroups * tiles / p.shared_tiles),
          of_shared(halves * of_half), of_units(of_shared + kUnitGroups * p.each),
          all(helper ? of_shared : of_units + kUnitGroups + kDownChunks * p.chosen) {}

    // The k-th half of this block, among those of all units of the shared expert. Those of a unit are of the blocks of a cluster.
    __device__ __forceinline__ uint32_t half_of(uint32_t k) const {
        return helper ? 2 * (p.units + blockIdx.x / 2 * kHelps + k) - kHelps * p.helpers + blockIdx.x % 2 : block;
    }
    // Whether a chunk is of the shared expert's second matrix, of those of second matrices.
    __device__ __forceinline__ bool shared_second(uint32_t c) const { return c - of_units - kDownAhead < kUnitGroups; }
    __device__ __forceinline__ const Chunk& chunk(uint32_t c) const { return p.chunks[helper ? 2 : 1 - halves][c]; }

    template <typename T>
    __device__ __forceinline__ T* at(uint32_t offset) const { return reinterpret_cast<T*>(smem + offset); }
    __device__ __forceinline__ Known& known() const { return *at<Known>(p.known_at); }
    // Each is used once: a chunk has barriers of its own.
    __device__ __forceinline__ uint64_t* full(uint32_t c) const { return at<uint64_t>(8 * c); }
    __device__ __forceinline__ uint64_t* empty(uint32_t c) const { return full(kMostChunks + c); }
    // That all tiles of the shared expert's units, 0, or of the k-th of the others have been multiplied; that the units of all
    // blocks are there.
    __device__ __forceinline__ uint64_t* multiplied(uint32_t k) const { return full(2 * kMostChunks + k); }
    __device__ __forceinline__ uint64_t* there(uint32_t k) const { return multiplied(1 + kMostEach + k); }
    // That the experts are known, and their weights.
    __device__ __forceinline__ uint64_t* chosen() const { return there(1 + kMostEach); }
    __device__ __forceinline__ uint64_t* weighed() const { return chosen() + 1; }
    // That the other block's k-th half is there.
    __device__ __forceinline__ uint64_t* halved(uint32_t k) const { return weighed() + 1 + k; }

    // Barrier of the warps that multiply.
    __device__ __forceinline__ void sync() const { sync_threads<kThreads>(); }

    // By a lane of every warp, some each: a warp's lanes take one after the other. A chunk is empty when all of its tiles, or pairs
    // of tiles, have been taken.
    __device__ __forceinline__ void init_barriers() const {
        if (lane != 0) return;
        const uint32_t first = 2 * all, end = first + 2 * (1 + kMostEach) + 2 + kHelps;
#pragma unroll 1
        for (uint32_t i = warp; i < end; i += kAllThreads / 32) {
            const uint32_t c = i / 2, k = i - first;
            if (i >= first) {
                // From `multiplied` to `halved`, one behind the other.
                const uint32_t of_halves = k - (end - first - kHelps), warps = k <= kMostEach ? kUnitGroups * tiles : 1;
                barrier_init(multiplied(k), kSanitized && of_halves >= kHelps ? kWarpArrivals * warps : warps);
                if (of_halves < halves) expect(multiplied(k), 4 * kSharedGroups * kGroup);
            } else if (i % 2 == 0) {
                barrier_init(full(c), 1);
            } else {
                const uint32_t of_first = c < of_shared ? p.shared_tiles : tiles, of_second = shared_second(c) ? 1 : kDownGroups;
                barrier_init(empty(c), kWarpArrivals * (c < of_units ? of_first : of_second * down_tiles));
            }
        }
        barriers_made();
    }

    // Asks for chunks, by a warp, few at a time: what others load, small as it is, would wait behind all that is on its way. What
    // an ask needs is made by all lanes at once, since one thread would take longer for that than memory for the chunks.
    __device__ __forceinline__ void bring(const Marks& marks) const {
        const uint32_t pair = tiles * kUpTile, shared = down_tiles * kSharedTile, down = down_tiles * kDownTile;
#pragma unroll 1
        for (uint32_t first = 0, end; first < all; first = end) {
            end = min(first + 32, first < of_shared ? of_shared : all);
            const uint32_t c = min(first + lane, end - 1);
            const Chunk here = chunk(c);
            Chunk before{};
            if (c != 0) before = chunk(c - 1);
            // Where it stands in an expert's matrix, from one of which to the next it is `stride`; or 0, and where it stands.
            uint64_t from, stride = 0;
            uint32_t bytes, e = 0;
            const bool pairs = c >= of_shared && c < of_units;
            if (c < of_shared) {
                const uint32_t k = c / of_half, tile = (c - k * of_half) * p.shared_tiles, of_one = kSharedGroups * tiles, up = tile >= of_one;
                from = p.shared + up * p.shared_up_at + (size_t)(half_of(k) * of_one + tile - up * of_one) * kSharedTile;
                bytes = p.shared_tiles * kSharedTile;
            } else if (pairs) {
                const uint32_t i = c - of_shared, second = block >= p.units;
                from = p.base + (size_t)((block - second * p.units) * kUnitGroups + i % kUnitGroups) * pair;
                e = 2 * (i / kUnitGroups) + second, stride = p.part_bytes, bytes = pair;
            } else if (shared_second(c)) {
                from = p.shared_down + (size_t)(block * kUnitGroups + c - of_units - kDownAhead) * shared;
                bytes = shared;
            } else {
                const uint32_t i = c - of_units - (c < of_units + kDownAhead ? 0 : kUnitGroups);
                from = p.down_base + (size_t)(block * kUnitGroups + i % kDownChunks * kDownGroups) * down;
                e = i / kDownChunks, stride = p.down_bytes, bytes = kDownGroups * down;
            }
            if (first == of_shared) {
                barrier_wait(chosen(), 0);
                marks.mark(2);
            }
            // Of a row that is not live what stands there is multiplied, and nobody looks at it.
            bool due = true;
            if (stride != 0) from += known().gate.contest.ids[e] * stride, due = known().live != 0;
            uint8_t* to = smem + p.ring_at + here.at;
#pragma unroll 1
            for (uint32_t k = first; k < end; ++k) {
                if (k == of_shared) marks.mark(3);
                if (k == of_units) marks.mark(4);
                if (lane == k - first) {
#pragma unroll 1
                    for (uint32_t i = before.landed; i < here.landed; ++i) barrier_wait(full(i), 0);
#pragma unroll 1
                    for (uint32_t i = kSanitized ? 0 : before.freed; i < here.freed; ++i) barrier_wait(empty(i), 0);
                    if (due) {
                        expect(full(c), pairs ? 2 * bytes : bytes);
                        bulk_copy(to, reinterpret_cast<const uint8_t*>(from), bytes, full(c));
                        if (pairs) bulk_copy(to + bytes, reinterpret_cast<const uint8_t*>(from + p.up_at), bytes, full(c));
                    } else {
                        barrier_arrive(full(c));
                    }
                }
                __syncwarp();
            }
        }
        marks.mark(5);
    }

    __device__ __forceinline__ const uint8_t* await(uint32_t c) const {
        barrier_wait(full(c), 0);
        return smem + p.ring_at + chunk(c).at;
    }
    // Behind the stores of what was made of a tile, of which unit `k` says.
    __device__ __forceinline__ void leave(uint32_t c, uint64_t* also = nullptr) const {
        __syncwarp();
        if (!arrives(lane)) return;
        barrier_arrive(empty(c));
        if (also != nullptr) barrier_arrive(also);
    }

    // The k-th unit of this block, among those of all experts.
    __device__ __forceinline__ uint32_t unit_of(uint32_t k) const { return 2 * p.units * k + block; }

    // What has to be known and there before anything is multiplied, and the scores of this block's experts: by all warps but the
    // one that brings weights.
    __device__ __forceinline__ void begin(const router::Gate& gate, const router::GateRow& row, const Marks& marks) const {
        if (threadIdx.x == 32 * kTaker) {
            known().live = __ldcg(reinterpret_cast<const uint32_t*>(p.infos));
            known().tag = __ldcg(reinterpret_cast<const uint32_t*>(p.counts)) + 1;
        }
        const uint32_t wide = p.up.cols / 16;
#pragma unroll 1
        for (uint32_t i = threadIdx.x; threadIdx.x < kThreads && i < wide + p.up.cols / 128; i += kThreads) {
            if (i < wide) {
                copy16(smem + p.q_at + i / 16 * 272 + i % 16 * 16, reinterpret_cast<const uint8_t*>(p.q) + 16 * i);
            } else {
                copy16(smem + p.d_at + 16 * (i - wide), reinterpret_cast<const uint8_t*>(p.d) + 16 * (i - wide));
            }
        }
        row.dot(gate, block, known().gate.sums);
        copies_landed();
        sync_threads<kAllThreads - 32, 2>();
        router::post_scores(gate, block, known().gate.sums, known().tag);
        marks.mark(3);
    }

    // Chooses, by a warp. `named`: the experts are known.
    __device__ __forceinline__ void choose(const router::Gate& gate, router::Choosing& choosing, bool named) const {
        const Marks marks(kMarkChooser, 1, 32 * kTaker);
        marks.mark(2);
        const uint32_t tag = known().tag;
        router::Contest& contest = known().gate.contest;
        if (!named) {
            choosing.take(tag);
            marks.mark(3);
            choosing.choose();
        }
        if (arrives(lane)) barrier_arrive(chosen());
        marks.mark(4);
        if (named) {
            choosing.take(tag);
            router::score_named(contest, choosing.scores, gate.chosen);
        }
        router::weigh(contest, choosing.faulty, gate.chosen, gate.scale);
        if (arrives(lane)) barrier_arrive(weighed());
        if (block == p.units) choosing.leave();
    }

    // A lane's slice of a tile of Q8_0.
    __device__ __forceinline__ float dot_shared(const uint8_t* tile, uint32_t slice, const uint8_t* q, const uint8_t* d) const {
        Inputs x;
        x.q = reinterpret_cast<const int8_t*>(q) + slice * 272;
        x.d = reinterpret_cast<const float*>(d) + slice * 8;
        float acc[1] = {0.0f};
        Add<1, Q8_0> add{x, acc};
        each_block<Q8_0, true, 4>(tile, lane, kSlice / 32, nullptr, add);
        return acc[0];
    }

    // Outputs of gate and up, of the k-th unit or of what the block has of the shared expert's, k = 0, and from them a unit.
    template <bool SHARED>
    __device__ __forceinline__ float make_unit(uint32_t k) const {
        barrier_wait(multiplied(k), 0);
        const uint32_t n = SHARED ? lane % (kSharedGroups * kGroup) : lane;
        const uint32_t group = SHARED ? 2 * kSharedGroups * k + n / kGroup : 2 * (kSharedGroups + kUnitGroups * (k - 1) + n / kGroup);
        const float* from = at<float>(p.partials_at) + group * tiles * kLanes;
        const uint32_t step = SHARED ? kLanes : 2 * kLanes, to_up = SHARED ? kSharedGroups * tiles * kLanes : kLanes;
        const float gate = total(p.up, from, tiles, step, n % kGroup), high = total(p.up, from + to_up, tiles, step, n % kGroup);
        return gated(kThenClampedSilu, gate, high, p.limit);
    }

    // Makes the k-th unit and sends it, by a warp.
    __device__ __forceinline__ void send_unit(uint32_t k) const {
        float v = make_unit<false>(k);
        const uint32_t unit = unit_of(k - 1);
        barrier_wait(weighed(), 0);
        v = __fmul_rn(v, known().gate.contest.weights[unit / p.units]);
        send_codes_apart(v, p.sent + 16 * unit, 16 * (p.chosen + 1) * p.units, known().tag);
        reinterpret_cast<float*>(p.mid)[32 * unit + lane] = v;
    }

    // A lane's value to the first block of the cluster.
    __device__ __forceinline__ void send_half(uint32_t k, float v) const {
        const uint32_t to = in_block(known().half[k] + lane, 0), bar = in_block(halved(k), 0);
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(__float_as_uint(v)), "r"(bar)
                     : "memory");
    }

    // Sends units as they are made, by a warp, all but the last: halves of the shared expert's, which come first, are of two
    // blocks, the second of which sends its own to the first.
    __device__ __forceinline__ void finish(const Marks& marks) const {
        constexpr uint32_t kHalf = kSharedGroups * kGroup;
#pragma unroll 1
        for (uint32_t k = 0; k < halves; ++k) {
            float v = make_unit<true>(k);
            const uint32_t half = half_of(k);
            if (lane < kHalf) {
                if (half % 2 != 0) send_half(k, v);
                reinterpret_cast<float*>(p.shared_units)[kHalf * half + lane] = v;
            }
            marks.mark(4);
            if (half % 2 == 0) {
                barrier_wait(halved(k), 0);
                if (lane >= kHalf) v = known().half[k][lane - kHalf];
                __syncwarp();
                send_codes_apart(v, p.sent + 16 * (p.chosen * p.units + half / 2), 16 * (p.chosen + 1) * p.units, known().tag);
            }
        }
        marks.mark(5);
        if (helper) return;
#pragma unroll 1
        for (uint32_t k = 1; k < p.each; ++k) {
            send_unit(k);
            marks.mark(k == 1 ? 6 : 7);
        }
    }

    // A block of 32 units that was sent.
    struct Sent {
        uint4 a, b, c;
        __device__ __forceinline__ void look_at(uint64_t at, uint32_t step) { a = look(at), b = look(at + step), c = look(at + 2 * step); }
        __device__ __forceinline__ bool there(uint32_t tag) const { return a.w == tag && b.w == tag && c.w == tag; }
    };

    // Takes the units of all blocks to shared memory: codes, scales, sums of halves. A warp has every other kind, and looks for
    // some when this block has made the next ones, so that nobody looks in vain most of the time.
    __device__ __forceinline__ void take(const Marks& marks) const {
        const uint32_t tag = known().tag, n = (p.chosen + 1) * p.units;
        uint8_t* codes = smem + p.units_at;
        uint32_t *scales = reinterpret_cast<uint32_t*>(codes + n / 8 * 272), *sums = scales + n;
#pragma unroll 1
        for (uint32_t k = warp - kTaker; k <= p.each; k += kTakers) {
            barrier_wait(multiplied(min(max(k + 1, 2u), p.each)), 0);
            const uint32_t first = k == 0 ? p.chosen * p.units : unit_of(k - 1) - block, end = first + (k == 0 ? 1 : 2) * p.units;
#pragma unroll 1
            for (uint32_t base = first + lane; base < end; base += 32 * kAtOnce) {
                uint32_t missing = (1u << min(kAtOnce, (end - base + 31) / 32)) - 1;
                while (true) {
                    Sent got[kAtOnce];
#pragma unroll
                    for (uint32_t s = 0; s < kAtOnce; ++s) {
                        if (missing >> s & 1) got[s].look_at(p.sent + 16 * (base + 32 * s), 16 * n);
                    }
#pragma unroll
                    for (uint32_t s = 0; s < kAtOnce; ++s) {
                        if ((missing >> s & 1) == 0 || !got[s].there(tag)) continue;
                        missing ^= 1u << s;
                        const uint32_t place = base + 32 * s;
                        const auto& [a, b, c] = got[s];
                        uint4* to = reinterpret_cast<uint4*>(codes + place / 8 * 272 + place % 8 * 32);
                        to[0] = make_uint4(a.x, a.y, a.z, b.x), to[1] = make_uint4(b.y, b.z, c.x, c.y);
                        const int low = sum_of(a.x, sum_of(a.y, sum_of(a.z, sum_of(b.x, 0))));
                        const int high = sum_of(b.y, sum_of(b.z, sum_of(c.x, sum_of(c.y, 0))));
                        scales[place] = c.z, sums[place] = (uint32_t)low & 0xffffu | (uint32_t)high << 16;
                    }
                    if (missing == 0) break;
                    // What is sent comes later where everybody looks all the time.
                    __nanosleep(kPause);
                }
            }
            __syncwarp();
            if (arrives(lane)) barrier_arrive(there(k));
            marks.mark(4 + min(k, 3u));
        }
    }
    static __device__ __forceinline__ int sum_of(uint32_t codes, int sum) { return __dp4a((int)codes, 0x01010101, sum); }

    __device__ __forceinline__ void run(const router::Gate& gate) const {
        const uint32_t role = min(max(warp, kWarps - 1) - (kWarps - 1), 3u);
        const Marks marks(kMarkExperts, role, role == 0 ? 0 : 32 * (kWarps - 1 + role));
        init_barriers();
        __syncthreads();
        cluster_arrive_relaxed();
        if (warp != kBringer) copy_patterns(at<uint32_t>(p.table_at), kThreads);
        if (p.site == 0) pdl_launch();
        if (warp == kBringer) {
            // It knows nothing that others wrote but what this block's other warps say.
            bring(marks);
            cluster_wait();
            return;
        }
        const router::GateRow of_gate(gate, block);
        // The other block runs, and its barriers are there.
        cluster_wait();
        pdl_wait();
        // The site that takes what is sent begins when everything before this one has ended.
        if (p.site != 0 && block != p.units) pdl_launch();
        marks.mark(2);
        router::Choosing choosing(gate, known().gate.contest);
        bool named = false;
        if (warp == kTaker) named = choosing.named();
        begin(gate, of_gate, marks);
        if (warp == kFinisher) return finish(marks);
        if (warp >= kTaker) {
            if (helper) return;
            if (warp == kTaker) choose(gate, choosing, named);
            // What the site before has put off, which the one behind finds done.
            if (warp == kTaker + 1 && block == p.units) {
                if (gate.mixing != 0) hc::settle(reinterpret_cast<float*>(gate.mixing), gate.iterations, gate.eps);
                __threadfence();
                __syncwarp();
                if (p.site != 0 && lane == 0) pdl_launch_as(reinterpret_cast<uint32_t*>(p.counts) + 1, known().tag);
            }
            return take(marks);
        }
        float* partials = at<float>(p.partials_at);
#pragma unroll 1
        for (uint32_t j = warp; j < halves * 2 * kSharedGroups * tiles; j += kWarps) {
            const uint32_t c = j / p.shared_tiles, slice = p.up.slice_of(j % tiles, lane);
            const uint8_t* tile = await(c) + j % p.shared_tiles * kSharedTile;
            partials[j * kLanes + lane] = dot_shared(tile, slice, smem + p.q_at, smem + p.d_at);
            leave(c, multiplied(j / (2 * kSharedGroups * tiles)));
        }
        marks.mark(4);
        if (helper) return;
        const Staged row{smem + p.q_at, smem + p.d_at, nullptr, nullptr, smem + p.table_at};
        float* to = partials + 2 * (kSharedGroups * tiles + warp) * kLanes + lane;
#pragma unroll 1
        for (uint32_t j = warp; j < kUnitGroups * p.each * tiles; j += kWarps, to += 2 * kWarps * kLanes) {
            const uint32_t group = j / tiles, t = j - group * tiles;
            const uint8_t* low = await(of_shared + group) + t * kUpTile;
            const float2 both = dot_pair<IQ2_XXS>(p.up, low, low + tiles * kUpTile, t, row);
            to[0] = both.x, to[kLanes] = both.y;
            leave(of_shared + group, multiplied(1 + group / kUnitGroups));
        }
        // The others begin with what is there.
        if (warp == kWarps - 1) send_unit(p.each);
        marks.mark(5);
        const uint32_t of_expert = kUnitGroups * down_tiles, slices = p.down.slices, experts = p.chosen + 1;
        const uint8_t *codes = smem + p.units_at, *scales = codes + experts * slices * 272, *sums = scales + experts * slices * 32;
        float* products = at<float>(p.products_at);
        // As their units come: the shared expert's behind those of the first two.
#pragma unroll 1
        for (uint32_t j = warp; j < of_expert * experts; j += kWarps) {
            const uint32_t turn = j / of_expert, tile = j - turn * of_expert;
            const uint32_t part = turn < 2 ? turn + 1 : turn == 2 ? 0 : turn, k = (part + 1) / 2;
            barrier_wait(there(k), 0);
            if (k == p.each) marks.mark(6);
            float acc;
            uint32_t c;
            if (part == 0) {
                const uint32_t t = tile % down_tiles, slice = p.chosen * slices + p.down.slice_of(t, lane);
                c = of_units + kDownAhead + tile / down_tiles;
                acc = dot_shared(await(c) + t * kSharedTile, slice, codes, scales);
            } else {
                const uint32_t in_chunk = tile % (kDownGroups * down_tiles), slice = (part - 1) * slices + p.down.slice_of(in_chunk % down_tiles, lane);
                c = of_units + (turn < 2 ? 0 : kUnitGroups) + (part - 1) * kDownChunks + tile / (kDownGroups * down_tiles);
                acc = dot_q2_k(await(c) + in_chunk * kDownTile, lane, slice, codes, scales, sums);
            }
            products[(part * of_expert + tile) * kLanes + lane] = acc;
            leave(c);
        }
        sync();
        marks.mark(7);
        float* summed = at<float>(p.sums_at);
#pragma unroll 1
        for (uint32_t o = threadIdx.x; o < 32 * experts; o += kThreads) {
            const uint32_t n = o % 32;
            summed[o] = total(p.down, products + (o / 32 * of_expert + n / kGroup * down_tiles) * kLanes, down_tiles, kLanes, n % kGroup);
        }
        sync();
        if (warp != 0) return;
        float sum = 0.0f;
#pragma unroll 1
        for (uint32_t e = 0; known().live != 0 && e < p.chosen; ++e) sum = __fadd_rn(sum, summed[32 * (e + 1) + lane]);
        sum = __fadd_rn(sum, summed[lane]);
        if (p.site != 0) send_pair(p.site + 8 * fours_place(32 * block + lane), sum, known().tag);
        reinterpret_cast<float*>(p.out)[32 * block + lane] = sum;
        // Every block has read the number: each has sent a part of what was there.
        if (block == 0 && lane == 0) *reinterpret_cast<uint32_t*>(p.counts) = known().tag;
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kAllThreads, 1)
    arc_matmul_experts_row(const __grid_constant__ ExpertsRow p, const __grid_constant__ router::Gate gate) {
    extern __shared__ __align__(128) uint8_t smem[];
    OneRow(p, smem).run(gate);
}

}  // namespace arc
