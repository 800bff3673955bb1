// What the blocks of the sampler's cluster have of a row, and how they meet and add up; sample.cuh has the steps.
#pragma once

#include "../../cluster.cuh"
#include "../../math.cuh"
#include "../../rng.cuh"
#include "../../step.cuh"

#ifndef ARC_SAMPLE_STAMP
#define ARC_SAMPLE_STAMP(i)
#endif

namespace arc {
namespace sampler {

using u32 = uint32_t;
using u64 = unsigned long long;

constexpr int kThreads = 384;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 128;
constexpr int kLoads = 11;  // tiles that a warp has in flight: of 129,280 ids in 8 blocks, all
constexpr int kLevelBits = 11;
constexpr int kBins = 1 << kLevelBits;
constexpr int kMassBins = kBins / 2;
constexpr u32 kListMax = 2048;
constexpr u32 kPairsMax = 192;             // entries of a list that are compared each with each
constexpr int kMaxCluster = 8;
constexpr u32 kAll = 0xffffffffu;        // lanes of a warp, or no id, or no bin
constexpr u32 kKeyMasked = 0x007fffffu;  // order_key(-inf)
constexpr u64 kTopPAbsent = 1ull << 32;
constexpr u32 kGreedy = 1;               // SamplerParams::flags
// No bin of a draw's ruler from here on has mass: 28 units of the quotient.
constexpr u32 kNoMass = 28 * 64 + 8;
// Deliberate mistakes, for the test that must catch them; kNoList is none, and takes the way of long lists always.
enum Mutant : u32 {
    kRight = 0,
    kSignedZero = 1,      // -0.0 below +0.0
    kFusedPenalty = 2,    // frequency penalty in one rounding
    kTopPRoundsDown = 3,  // floor of P * left / 2^32
    kTiesFromTheEnd = 4,  // of equal logits the highest ids are kept
    kTopPOfAll = 5,       // top_p of all mass, not of what top_k left
    kDrawPastEqual = 6,   // the running mass reaches the draw, instead of passing it
    kNoList = 7,
};

// What one block tells the others at a meeting.
struct Note {
    u64 a, b;
    u32 c, d;
};

// Where a running weight reaches a target among bins.
struct Level {
    u32 bin;  // kAll: nowhere
    u64 above, weight, total;
};

// One row, and what its draw depends on.
struct Job {
    const float* logits;  // [vocab]
    const Slot* slot;
    const u32* bias_ids;  // [slot->n_bias]
    const float* bias;
    const u32* mask;      // [vocab / 32], or null
    const u32* seen;      // [vocab]
    const u32* drafts;    // [n_drafts]: tokens that count as emitted
    u32 n_drafts;
    u32 draw_index;       // `n_drafts` included
    u32 target;           // of a row that scores
    u32 flags;            // to begin with
    bool score, sample;
    Landed* out;          // flags, n_tokens, tokens, n_top, logprob and the alternatives are written
};

// Entries of the order up to here: those with a larger key, and those with this key and an id up to this.
struct Cut {
    u32 key, id;
    __device__ __forceinline__ bool keeps(u32 k, u32 i) const { return k > key || (k == key && i <= id); }
};

// Turns logits into mass: trunc(2^40 * exp((x - max) / t)) in two halves of 20 bits.
struct Scale {
    float max, t, inverse, low;
    int mode;  // 0: t is 1; 1: the quotient by two corrections of a product, which serves 0 too; 2: by division
    static constexpr int kAnyMode = 3;

    __device__ __forceinline__ static Scale of(float max, float t) {
        Scale s;
        s.max = max;
        s.t = t;
        s.mode = t == 1.0f ? 0 : t >= 9.094947e-13f && t <= 1.0995116e12f ? 1 : 2;
        s.inverse = __fdiv_rn(1.0f, t);
        s.low = __fmul_rn(-64.0f, t);
        return s;
    }

    // (x - max) / t rounded once, or any number below -28 where the quotient is below -64: its mass is 0 either way.
    //
    // Mode 1, 2^-40 <= t <= 2^40: both remainders are exact where |d| >= 2^-66, and two corrections round as a division
    // does. Below that |d / t| < 2^-25, whose exp is 1 however it is rounded.
    // MODE kAnyMode: whichever it is.
    template <int MODE>
    __device__ __forceinline__ float quotient(float x) const {
        const float d = __fsub_rn(x, max);
        if (MODE == 0) return fmaxf(d, -64.0f);
        if (MODE == kAnyMode && mode == 2) return fmaxf(__fdiv_rn(d, t), -64.0f);
        const float c = fmaxf(d, low);
        float q = __fmul_rn(c, inverse);
        q = __fmaf_rn(__fmaf_rn(-q, t, c), inverse, q);
        return __fmaf_rn(__fmaf_rn(-q, t, c), inverse, q);
    }

    // exp_of_nonpositive(quotient) as hi * 2^20 + lo. Adding 2^23 towards zero leaves the integer part in the low bits.
    template <int MODE>
    __device__ __forceinline__ void halves(float x, u32& hi, u32& lo) const {
        const float c = quotient<MODE>(x);
        const float n = __fmaf_rn(c, kLog2E, kRound);
        const float p = exp_reduced(c, __fsub_rn(n, kRound));
        const float e = __fmul_rn(p, __uint_as_float((__float_as_uint(n) << 23) + 0x3f800000u));
        const float big = __fmaf_rz(e, 1048576.0f, 8388608.0f);
        const float rest = __fmaf_rn(e, 1048576.0f, -__fsub_rn(big, 8388608.0f));
        hi = __float_as_uint(big) - 0x4b000000u;
        lo = __float_as_uint(__fmaf_rz(rest, 1048576.0f, 8388608.0f)) - 0x4b000000u;
    }

    template <int MODE = kAnyMode>
    __device__ __forceinline__ u64 mass(float x) const {
        u32 hi, lo;
        halves<MODE>(x, hi, lo);
        return ((u64)hi << 20) + lo;
    }

    // Below this logit mass is certainly 0: exp(-28) * 2^40 is 0.77.
    __device__ __forceinline__ float floor() const { return __fmaf_rn(-28.0f, t, max); }
};

// Equal steps of logit, counted down from the largest: a larger logit is never in a later bin.
struct Ruler {
    float max, scale;
    // 64 bins to a unit of the quotient; `coarse`: 16.
    __device__ __forceinline__ static Ruler of(const Scale& s, bool coarse = false) {
        return Ruler{s.max, fminf(__fmul_rn(coarse ? 16.0f : 64.0f, s.inverse), 1e30f)};
    }
    __device__ __forceinline__ float place(float x) const { return __fmul_rn(__fsub_rn(max, x), scale); }
    __device__ __forceinline__ u32 bin(float x) const { return (u32)fminf(place(x), (float)(kBins - 1)); }
    // Whether bin(x) < end, end being above 0: that of the last bin is infinite.
    __device__ __forceinline__ static float before(u32 end) { return end >= kBins ? ARC_INF : (float)end; }
};

struct Shared {
    Note notes[2][kMaxCluster];
    u64 warp_a[kWarps], warp_b[kWarps];
    u64 scan[kWarps];
    u32 warp_key[kWarps], warp_id[kWarps];
    u64 top[kMaxTop];  // of the first block
    Level level;
    u64 entry;
    u32 n_top, n_local, base, earliest;
    u32 n_list;  // of the first block
    // What all threads know of the block and the row; here, since registers are few.
    u32 rank, size, ids;
    Job job;
    Scale scale;
    u64 word;
    u32 largest;  // key
    float max, ln_total;  // of the model's own distribution
    u32 flags, n_shown;
    float logprob;
};

// Dynamic shared memory: `Shared`, bins, the list of the first block, and the block's run of ids.
constexpr u32 kBinsAt = 1536, kListAt = kBinsAt + 2 * kBins * 4, kRunAt = kListAt + kListMax * 8;
static_assert(sizeof(Shared) <= kBinsAt);
// The run has room for a list's masses.
constexpr u32 kRunMin = kListMax * 2;
extern __shared__ __align__(16) unsigned char shared_bytes[];

// The same variable in another block's shared memory; the rank has to be one of the cluster's.
template <typename T>
__device__ __forceinline__ T* of_rank(T* p, u32 rank) {
    u64 out;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(out) : "l"((u64)p), "r"(rank));
    return (T*)out;
}

template <bool MUTABLE>
__device__ __forceinline__ u32 order_key(float x, u32 mutant) {
    const u32 bits = __float_as_uint(MUTABLE && mutant == kSignedZero ? x : __fadd_rn(x, 0.0f));
    return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ float of_key(u32 key) {
    return __uint_as_float(key ^ ((key >> 31) ? 0x80000000u : 0xffffffffu));
}

// Sum over a warp of hi * 2^20 + lo, each half of it below 2^32.
__device__ __forceinline__ u64 warp_halves(u32 hi, u32 lo) {
    return ((u64)__reduce_add_sync(kAll, hi) << 20) + __reduce_add_sync(kAll, lo);
}

__device__ __forceinline__ u64 warp_sum(u64 x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(kAll, x, d);
    return x;
}

__device__ __forceinline__ u64 warp_prefix(u64 x, int lane) {  // inclusive
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const u64 y = __shfl_up_sync(kAll, x, d);
        if (lane >= d) x += y;
    }
    return x;
}

// One block's part of a row: its run of ids, its meetings with the others, and sums over it.
struct Run {
    u32 vocab, mutant;
    u32 lo;           // first id
    u32 phase;

    // `run`: ids of a block but the last.
    __device__ __forceinline__ Run(u32 run, u32 vocab_, u32 mutant_) : vocab(vocab_), mutant(mutant_), phase(0) {
        lo = cluster_rank() * run;
        if (threadIdx.x == 0) {
            sh().rank = cluster_rank();
            sh().size = cluster_size();
            sh().ids = lo < vocab ? min(run, vocab - lo) : 0;
            sh().n_top = sh().n_list = 0;
        }
        __syncthreads();
    }

    __device__ __forceinline__ static int warp() { return threadIdx.x >> 5; }
    __device__ __forceinline__ static int lane() { return threadIdx.x & 31; }
    __device__ __forceinline__ static u32 rank() { return sh().rank; }
    __device__ __forceinline__ static u32 size() { return sh().size; }
    __device__ __forceinline__ static u32 ids() { return sh().ids; }
    __device__ __forceinline__ static Shared& sh() { return *(Shared*)shared_bytes; }
    __device__ __forceinline__ static u32* bins() { return (u32*)(shared_bytes + kBinsAt); }  // [2 * kBins]
    __device__ __forceinline__ static u64* list() { return (u64*)(shared_bytes + kListAt); }  // [kListMax], first block
    // [tiles * kTile], -inf past the vocabulary.
    __device__ __forceinline__ static float* xs() { return (float*)(shared_bytes + kRunAt); }
    __device__ __forceinline__ int tiles() const { return (ids() + kTile - 1) / kTile; }
    __device__ __forceinline__ int per_warp() const { return (tiles() + kWarps - 1) / kWarps; }
    // Tiles of this warp: from first(), before last().
    __device__ __forceinline__ int first() const { return min(tiles(), warp() * per_warp()); }
    __device__ __forceinline__ int last() const { return min(tiles(), (warp() + 1) * per_warp()); }

    __device__ __forceinline__ u32 id_of(int tile, int j) const { return lo + tile * kTile + lane() * 4 + j; }
    __device__ __forceinline__ float4 tile_at(int tile) const { return ((const float4*)xs())[tile * 32 + lane()]; }

    // Tells every block of the cluster; `note` is the same in all lanes of the first warp. Every thread calls this.
    __device__ __forceinline__ const Note* meet(const Note& note) {
        if (warp() == 0) {
            Note* to = of_rank(&sh().notes[phase][rank()], min((u32)lane(), size() - 1));
            if (lane() < size()) *to = note;
        }
        cluster_sync();
        const Note* notes = sh().notes[phase];
        phase ^= 1;  // The other set: everybody has read that one before coming here.
        return notes;
    }

    // As above, from the one thread that has something to say; everybody then has that note.
    __device__ __forceinline__ Note tell(bool mine, const Note& note) {
        if (mine) {
            for (u32 r = 0; r < size(); ++r) *of_rank(&sh().notes[phase][0], r) = note;
        }
        cluster_sync();
        const Note heard = sh().notes[phase][0];
        phase ^= 1;
        return heard;
    }

    struct Best {
        float x;
        u32 id;
        bool bad;
        __device__ __forceinline__ void see(float v, u32 i) {
            if (v > x) {
                x = v;
                id = i;
            }
            bad |= !(v < ARC_INF);
        }
    };

    // Brings this block's ids into shared memory.
    __device__ __forceinline__ Best load(const float* logits) {
        Best best{-ARC_INF, kAll, false};
        if ((vocab & 3) == 0) {
            const float4* row = (const float4*)(logits + lo);
            const u32 quads = ids() / 4;
            for (int t = first(), end = last(); t < end; t += kLoads) {
                float4 v[kLoads];
#pragma unroll
                for (int j = 0; j < kLoads; ++j) {
                    const u32 q = (t + j) * 32 + lane();
                    v[j] = t + j < end && q < quads ? row[q] : make_float4(-ARC_INF, -ARC_INF, -ARC_INF, -ARC_INF);
                }
#pragma unroll
                for (int j = 0; j < kLoads; ++j) {
                    if (t + j < end) {
                        ((float4*)xs())[(t + j) * 32 + lane()] = v[j];
                        const u32 id = id_of(t + j, 0);
                        best.see(v[j].x, id);
                        best.see(v[j].y, id + 1);
                        best.see(v[j].z, id + 2);
                        best.see(v[j].w, id + 3);
                    }
                }
            }
        } else {
            for (int t = first(), end = last(); t < end; ++t) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32 id = id_of(t, j);
                    const float x = id < vocab ? logits[id] : -ARC_INF;
                    xs()[id - lo] = x;
                    best.see(x, id);
                }
            }
        }
        return best;
    }

    // What the row's blocks found: the first id of the order, and what is wrong. `raw`: largest key before processors.
    struct Found {
        u32 key, id, raw, wrong;
    };
    enum : u32 { kRawBad = 1, kBad = 2, kIdBad = 4 };

    __device__ __forceinline__ Found agree(const Best& best, u32 raw_key, u32 wrong) {
        const u32 k = order_key<false>(best.x, 0);
        const u32 warp_key = __reduce_max_sync(kAll, k);
        const u32 warp_id = __reduce_min_sync(kAll, k == warp_key ? best.id : kAll);
        wrong = __reduce_or_sync(kAll, wrong);
        raw_key = __reduce_max_sync(kAll, raw_key);
        if (lane() == 0) {
            sh().warp_key[warp()] = warp_key;
            sh().warp_id[warp()] = warp_id;
            sh().warp_a[warp()] = ((u64)raw_key << 32) | wrong;
        }
        __syncthreads();
        Note note{};
        if (warp() == 0) {
            const u32 mine = lane() < kWarps ? sh().warp_key[lane()] : 0;
            const u64 rest = lane() < kWarps ? sh().warp_a[lane()] : 0;
            const u32 most = __reduce_max_sync(kAll, mine);
            const u32 id = __reduce_min_sync(kAll, lane() < kWarps && mine == most ? sh().warp_id[lane()] : kAll);
            note.a = ((u64)most << 32) | (u32)~id;
            note.c = __reduce_max_sync(kAll, (u32)(rest >> 32));
            note.d = __reduce_or_sync(kAll, (u32)rest);
        }
        const Note* notes = meet(note);
        u64 a = 0;
        Found found{0, 0, 0, 0};
#pragma unroll
        for (u32 r = 0; r < kMaxCluster; ++r) {
            if (r >= size()) continue;
            a = notes[r].a > a ? notes[r].a : a;
            found.raw = max(found.raw, notes[r].c);
            found.wrong |= notes[r].d;
        }
        found.key = (u32)(a >> 32);
        found.id = ~(u32)a;
        return found;
    }

    // Mass of this warp's ids. BINS: and the upper halves of it by bin of the ruler, with their sum in `high`.
    template <int MODE, bool BINS>
    __device__ __forceinline__ u64 mass_pass(u64& high) {
        const Scale scale = sh().scale;
        const Ruler ruler = Ruler::of(scale);
        u32 hi = 0, lo_ = 0;
#pragma unroll(BINS ? 1 : 2)
        for (int t = first(), end = last(); t < end; ++t) {
            const float4 x4 = tile_at(t);
            const float x[4] = {x4.x, x4.y, x4.z, x4.w};
            u32 h[4], l[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) scale.halves<MODE>(x[j], h[j], l[j]);
            const u32 sum = (h[0] + h[1]) + (h[2] + h[3]);
            hi += sum;
            lo_ += (l[0] + l[1]) + (l[2] + l[3]);
            if (!BINS || !__any_sync(kAll, sum)) continue;
            const u32 b[4] = {ruler.bin(x4.x), ruler.bin(x4.y), ruler.bin(x4.z), ruler.bin(x4.w)};
            const bool same = b[0] == b[1] && b[0] == b[2] && b[0] == b[3];
            // Apart, since `&&` would leave lanes out of the shuffle.
            const u32 b0 = __shfl_sync(kAll, b[0], 0);
            if (__all_sync(kAll, same && b[0] == b0)) {
                const u32 all = __reduce_add_sync(kAll, sum);
                if (lane() == 0) atomicAdd(&bins()[b[0]], all);
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (h[j]) atomicAdd(&bins()[b[j]], h[j]);
                }
            }
        }
        high = BINS ? warp_sum((u64)hi) : 0;
        return warp_halves(hi, lo_);
    }

    template <bool BINS>
    __device__ __forceinline__ u64 mass_all(u64& high) {
        return sh().scale.mode == 0   ? mass_pass<0, BINS>(high)
               : sh().scale.mode == 1 ? mass_pass<1, BINS>(high)
                                      : mass_pass<Scale::kAnyMode, BINS>(high);
    }

    // What a row keeps of its ids: those that `cut` keeps with at least this mass.
    struct Keep {
        Cut cut;
        u64 least;
    };

    // Masses of what is kept of one tile. `least`: the logit of the cut.
    template <int MODE>
    __device__ __forceinline__ void kept_tile(const Scale& scale, const Keep& keep, float least, int t, u64 (&w)[4]) {
        const float4 x4 = tile_at(t);
        const float x[4] = {x4.x, x4.y, x4.z, x4.w};
        bool kept[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            kept[j] = x[j] > least || (x[j] == least && id_of(t, j) <= keep.cut.id);
            w[j] = 0;
        }
        if (!__any_sync(kAll, kept[0] | kept[1] | kept[2] | kept[3])) return;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u64 m = scale.mass<MODE>(x[j]);
            w[j] = kept[j] && m >= keep.least ? m : 0;
        }
    }

    // Mass of this warp's ids, as far as they are kept.
    template <int MODE>
    __device__ __forceinline__ u64 mass_kept(const Keep& keep) {
        const Scale scale = sh().scale;
        const float least = of_key(keep.cut.key);
        u64 sum = 0;
#pragma unroll 2
        for (int t = first(), end = last(); t < end; ++t) {
            u64 w[4];
            kept_tile<MODE>(scale, keep, least, t, w);
            sum += (w[0] + w[1]) + (w[2] + w[3]);
        }
        return warp_sum(sum);
    }

    // Mode 1 serves mode 0 too: a quotient by 1 needs no correction.
    __device__ __forceinline__ u64 mass_of(const Keep& keep) {
        return sh().scale.mode < 2 ? mass_kept<1>(keep) : mass_kept<Scale::kAnyMode>(keep);
    }

    // Leaves sums by warp of `a` in shared memory and tells the block's totals; returns the cluster's notes.
    __device__ __forceinline__ const Note* total(u64 a, u64 b = 0) {
        if (lane() == 0) {
            sh().warp_a[warp()] = a;
            sh().warp_b[warp()] = b;
        }
        __syncthreads();
        Note note{};
        if (warp() == 0) {
            note.a = warp_sum(lane() < kWarps ? sh().warp_a[lane()] : 0ull);
            note.b = warp_sum(lane() < kWarps ? sh().warp_b[lane()] : 0ull);
        }
        return meet(note);
    }

    __device__ __forceinline__ u64 whole(const Note* notes) const {
        u64 sum = 0;
#pragma unroll
        for (u32 r = 0; r < kMaxCluster; ++r) sum += r < size() ? notes[r].a : 0;
        return sum;
    }

    // Which block has the entry at which the running sum passes `at`; takes what is before that block off `at`.
    __device__ __forceinline__ u32 owner(const Note* notes, u64& at) const {
        u32 r = 0;
        while (r + 1 < size() && at >= notes[r].a) at -= notes[r++].a;
        return r;
    }

    // In the block that owns it: the id at which the running sum passes `at`, in one thread, the others getting kAll.
    // `tile(t, w)` sets the lane's four weights of a tile; the sums by warp are in shared memory.
    template <typename Tile>
    __device__ __forceinline__ u32 pick(u64 at, Tile tile) {
        int w = 0;
        while (w + 1 < kWarps && at >= sh().warp_a[w]) at -= sh().warp_a[w++];
        const int from = w * per_warp();
        const int to = min(tiles(), from + per_warp());
        // The warps look at that warp's tiles, one each.
#pragma unroll 1
        for (int base = from; base < to; base += kWarps) {
            const int t = base + warp();
            u64 weight[4] = {0, 0, 0, 0};
            if (t < to) tile(t, weight);
            const u64 mine = (weight[0] + weight[1]) + (weight[2] + weight[3]);
            const u64 upto = warp_prefix(mine, lane());
            __syncthreads();
            if (lane() == 31) sh().scan[warp()] = upto;
            __syncthreads();
            int i = 0;
            const int n = min(kWarps, to - base);
            while (i < n && at >= sh().scan[i]) at -= sh().scan[i++];
            if (i == n) continue;
            if (i != warp() || at < upto - mine || at >= upto) return kAll;
            u64 rest = at - (upto - mine);
            u32 j = 0;
            if (rest >= weight[0]) {
                rest -= weight[0];
                j = 1;
                if (rest >= weight[1]) {
                    rest -= weight[1];
                    j = rest < weight[2] ? 2 : 3;
                }
            }
            return id_of(t, j);
        }
        return kAll;
    }

    __device__ __forceinline__ void clear_bins(int words) {
        for (int i = threadIdx.x; i < words / 4; i += kThreads) ((uint4*)bins())[i] = make_uint4(0, 0, 0, 0);
        __syncthreads();
    }

    // Adds to a bin of two words; `m` below 2^64 in all.
    __device__ __forceinline__ void add_mass(u32 bin, u64 m) {
        const u32 low = (u32)m;
        const u32 old = atomicAdd(&bins()[bin], low);
        const u32 high = (u32)(m >> 32) + (old + low < old ? 1 : 0);
        if (high) atomicAdd(&bins()[kBins + bin], high);
    }

    // The bin of N, PER a thread, at which the running weight, from `above`, reaches the target. Every thread calls this.
    template <int N, int PER, typename Bin>
    __device__ __forceinline__ Level scan_bins(u64 target, u64 above, Bin bin) {
        static_assert(N % PER == 0 && N / PER <= kThreads);
        u64 mine = 0;
        const bool has = threadIdx.x < N / PER;
        if (has) {
#pragma unroll
            for (int i = 0; i < PER; ++i) mine += bin(threadIdx.x * PER + i);
        }
        const u64 upto = warp_prefix(mine, lane());
        if (lane() == 31) sh().scan[warp()] = upto;
        __syncthreads();
        u64 sum = lane() < kWarps ? sh().scan[lane()] : 0;
        sum = warp_prefix(sum, lane());
        const u64 all = __shfl_sync(kAll, sum, 31);
        const u64 before = (warp() > 0 ? __shfl_sync(kAll, sum, warp() > 0 ? warp() - 1 : 0) : 0) + upto - mine + above;
        if (before < target && target <= before + mine) {
            u64 running = before;
            u32 b = threadIdx.x * PER;
#pragma unroll 1
            while (running + bin(b) < target) running += bin(b++);
            sh().level = Level{b, running, bin(b), 0};
        }
        __syncthreads();
        Level level = sh().level;
        level.total = all;
        if (above + all < target) level.bin = kAll;
        return level;
    }

    // Adds up all blocks' first kBins words (WIDE: kMassBins, in two words each) and finds the bin in which the sum of
    // weights reaches `target`; leaves that of `sooner` in `earliest`. Every block is done counting, and a cluster barrier
    // has passed.
    template <bool WIDE>
    __device__ __forceinline__ Level level(u64 target, u64 sooner) {
        const u32 slice = (WIDE ? kMassBins : kBins) / size();
        u32* sums = bins() + kBins;
        const u32 n_blocks = size();
        for (u32 b = rank() * slice + threadIdx.x; b < (rank() + 1) * slice; b += kThreads) {
            u32 theirs[kMaxCluster];
#pragma unroll
            for (u32 r = 0; r < kMaxCluster; ++r) theirs[r] = *of_rank(bins() + b, r < n_blocks ? r : 0);
            u64 sum = 0;
#pragma unroll
            for (u32 r = 0; r < kMaxCluster; ++r) sum += r < n_blocks ? theirs[r] : 0;
#pragma unroll
            for (u32 r = 0; r < kMaxCluster; ++r) {
                const u32 to = r < n_blocks ? r : 0;
                if (WIDE) of_rank((u64*)sums, to)[b] = sum;
                else of_rank(sums, to)[b] = (u32)sum;
            }
        }
        cluster_sync();
        if (WIDE) {
            const Level early = scan_bins<kMassBins, 4>(sooner, 0, [&](u32 b) { return ((u64*)sums)[b]; });
            if (threadIdx.x == 0) sh().earliest = early.bin == kAll ? 0 : early.bin;
            return scan_bins<kMassBins, 4>(target, 0, [&](u32 b) { return ((u64*)sums)[b]; });
        }
        return scan_bins<kBins, 8>(target, 0, [&](u32 b) -> u64 { return sums[b]; });
    }

    // Histogram of what each thread has seen best, where its bin is below `limit`. At most so many ids come before the
    // bin that has the kth of these, and k at least are not after it.
    __device__ __forceinline__ void count_bests(const Ruler& ruler, float best, u32 limit) {
        clear_bins(kBins);
        const u32 bin = ruler.bin(best);
        if (first() < last() && bin < limit) atomicAdd(&bins()[bin], 1);
    }

    // The largest key whose bin is not before `bin`, which is above 0: keys above it are in the bins before. 32 keys at a
    // time, the bins being in order of keys.
    __device__ __forceinline__ u32 first_key_in(const Ruler& ruler, u32 bin) const {
        const float least = (float)bin;
        // Keys from `low` on may be before; all up to it are not: that of -inf is in the last bin.
        u32 low = kKeyMasked;
#pragma unroll 1
        for (int shift = 27; shift >= 0; shift = shift > 5 ? shift - 5 : shift - 1) {
            const u64 k = (u64)low + ((u64)lane() << shift);
            const bool in = k <= sh().largest && ruler.place(of_key((u32)k)) >= least;
            low += (__popc(__ballot_sync(kAll, in)) - 1) << shift;
        }
        return low;
    }
};

}  // namespace sampler
}  // namespace arc
