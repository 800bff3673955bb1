// The sampler of one row by one cluster of blocks: token and logprobs, bit for bit what cpu.rs gives.
//
// A row is cut into one run of consecutive ids a block, which stays in shared memory; a run into tiles of 128 ids, and
// each warp has consecutive tiles, so that sums by block, warp and tile are prefix sums in id order. Blocks meet through
// notes in each other's shared memory; each meeting is one cluster barrier.
//
// Filters are cuts in the order "larger logit, then lower id". A histogram over equal steps of logit bounds how far the
// cut can be; where at most kListMax ids come before that, they are gathered into the first block, which finishes the
// row alone. Otherwise the cut is found by a descent over the bits of the order key, by all blocks together.
//
// Compile with -fmad=false, without fast-math.
#pragma once

#include "run.cuh"

namespace arc {
namespace sampler {

// The steps of the sampler on one block's part of a row.
template <bool MUTABLE>
struct Block : Run {
    __device__ __forceinline__ Block(u32 run, u32 vocab, u32 mutant) : Run(run, vocab, mutant) {}

    __device__ __forceinline__ u32 key(float x) const { return order_key<MUTABLE>(x, mutant); }

    // Step 1 on this block's ids. False where an id is outside the vocabulary.
    __device__ __forceinline__ bool process(Best& best) {
        const Job& job = sh().job;
        const Slot& s = *job.slot;
        const SamplerParams& p = s.params;
        bool in_range = true;
        __syncthreads();
        for (u32 i = threadIdx.x; i < s.n_bias; i += kThreads) {
            const u32 id = job.bias_ids[i];
            if (id >= vocab) in_range = false;
            else if (id - lo < ids()) xs()[id - lo] = __fadd_rn(xs()[id - lo], job.bias[i]);
        }
        __syncthreads();
        if (job.draw_index < p.min_tokens && threadIdx.x < s.n_stop) {
            const u32 id = s.stop_ids[threadIdx.x];
            if (id >= vocab) in_range = false;
            else if (id - lo < ids()) xs()[id - lo] = -ARC_INF;
        }
        __syncthreads();
        const bool penal = s.reads_seen != 0;
        const float repetition = p.repetition, presence = p.presence, frequency = p.frequency;
        best = Best{-ARC_INF, kAll, false};
        for (int batch = first(), end = last(); batch < end; batch += 2) {
            uint4 seen2[2];
            u32 allowed2[2];
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const u32 id = id_of(batch + b, 0);
                const bool in = batch + b < end && id < vocab;
                seen2[b] = make_uint4(0, 0, 0, 0);
                if (penal && in) {
                    if ((vocab & 3) == 0) {
                        seen2[b] = *(const uint4*)(job.seen + id);
                    } else {
                        seen2[b].x = job.seen[id];
                        seen2[b].y = id + 1 < vocab ? job.seen[id + 1] : 0;
                        seen2[b].z = id + 2 < vocab ? job.seen[id + 2] : 0;
                        seen2[b].w = id + 3 < vocab ? job.seen[id + 3] : 0;
                    }
                }
#pragma unroll 1
                for (u32 d = 0; penal && d < job.n_drafts; ++d) {
                    const u32 at = job.drafts[d] - id;
                    seen2[b].x += at == 0;
                    seen2[b].y += at == 1;
                    seen2[b].z += at == 2;
                    seen2[b].w += at == 3;
                }
                allowed2[b] = job.mask && in ? job.mask[id >> 5] >> (id & 31) : 15;
            }
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const int t = batch + b;
                if (t >= end) break;
                const float4 x4 = tile_at(t);
                float x[4] = {x4.x, x4.y, x4.z, x4.w};
                const u32 seen[4] = {seen2[b].x, seen2[b].y, seen2[b].z, seen2[b].w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    x[j] = (allowed2[b] >> j) & 1 ? x[j] : -ARC_INF;
                    if (seen[j] != 0) {
                        if (repetition != 1.0f) {
                            x[j] = x[j] > 0.0f ? __fdiv_rn(x[j], repetition) : __fmul_rn(x[j], repetition);
                        }
                        const u32 count = seen[j] & 0x7fffffffu;
                        if (count != 0) {
                            if (presence != 0.0f) x[j] = __fsub_rn(x[j], presence);
                            if (frequency != 0.0f) {
                                const float n = __uint2float_rn(count);
                                x[j] = MUTABLE && mutant == kFusedPenalty ? __fmaf_rn(-frequency, n, x[j])
                                                                          : __fsub_rn(x[j], __fmul_rn(frequency, n));
                            }
                        }
                    }
                    best.see(x[j], id_of(t, j));
                }
                ((float4*)xs())[t * 32 + lane()] = make_float4(x[0], x[1], x[2], x[3]);
            }
        }
        return in_range;
    }

    // Lists every id of the bins from `from` and before `upto` in the first block, in no order, as (top - key) * 2^32 + id;
    // returns how many there are. Above kListMax the list is not complete.
    __device__ __forceinline__ u32 gather(const Ruler& ruler, u32 from, u32 upto) {
        const u32 top = sh().largest;
        u64* local = (u64*)bins();
        if (threadIdx.x == 0) sh().n_local = 0;
        __syncthreads();
        const float least = (float)from, most = Ruler::before(upto);
#pragma unroll 2
        for (int t = first(), end = last(); t < end; ++t) {
            const float4 x4 = tile_at(t);
            const float x[4] = {x4.x, x4.y, x4.z, x4.w};
            const float at[4] = {ruler.place(x4.x), ruler.place(x4.y), ruler.place(x4.z), ruler.place(x4.w)};
            const float near = fminf(fminf(at[0], at[1]), fminf(at[2], at[3]));
            if (!__any_sync(kAll, near < most || most == ARC_INF)) continue;
            // One addition a tile: every entry finds its place among the tile's.
            u32 lanes[4], found = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const bool in = at[j] >= least && (at[j] < most || most == ARC_INF) && id_of(t, j) < vocab;
                lanes[j] = __ballot_sync(kAll, in);
                found += __popc(lanes[j]);
            }
            u32 place = 0;
            if (lane() == 0 && found != 0) place = atomicAdd(&sh().n_local, found);
            place = __shfl_sync(kAll, place, 0);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 mine = place + __popc(lanes[j] & ((1u << lane()) - 1));
                if ((lanes[j] >> lane()) & 1 && mine < kListMax) {
                    local[mine] = ((u64)(top - key(x[j])) << 32) | id_of(t, j);
                }
                place += __popc(lanes[j]);
            }
        }
        __syncthreads();
        const u32 n = sh().n_local;
        if (threadIdx.x == 0) sh().base = atomicAdd(of_rank(&sh().n_list, 0), n);
        __syncthreads();
        const u32 base = sh().base;
        if (base + n <= kListMax) {
            u64* to = of_rank(list(), 0) + base;
#pragma unroll 1
            for (u32 i = threadIdx.x; i < n; i += kThreads) to[i] = local[i];
        }
        Note note{};
        note.c = n;
        const Note* notes = meet(note);
        u32 all = 0;
#pragma unroll 1
        for (u32 r = 0; r < size(); ++r) all += notes[r].c;
        if (threadIdx.x == 0) sh().n_list = 0;
        return all;
    }

    // Of the first `n` entries of the list, all below 2^width and all different: the one at which the running weight w(i),
    // in ascending order, reaches the target. Weight 0: the entry is not there.
    template <typename Weight>
    __device__ __forceinline__ u64 list_cut(u32 n, int width, u64 target, Weight w) {
        const u64* e = list();
        u64 prefix = 0, above = 0;
        int shift = width;
#pragma unroll 1
        while (true) {
            const int before = shift;
            const int bits = min(shift, kLevelBits);
            shift -= bits;
            __syncthreads();
            clear_bins(2 * kBins);
#pragma unroll 1
            for (u32 i = threadIdx.x; i < n; i += kThreads) {
                if ((before >= 64 ? 0 : e[i] >> before) != prefix) continue;
                const u64 weight = w(i);
                if (weight != 0) add_mass((u32)(e[i] >> shift) & ((1u << bits) - 1), weight);
            }
            __syncthreads();
            const Level found = scan_bins<kBins, 8>(target, above, [&](u32 b) {
                return bins()[b] + ((u64)bins()[kBins + b] << 32);
            });
            prefix = (prefix << bits) | found.bin;
            above = found.above;
            u32 mine = 0;
            u64 last = 0;
#pragma unroll 1
            for (u32 i = threadIdx.x; i < n; i += kThreads) {
                if ((e[i] >> shift) == prefix && w(i) != 0) last = e[i], ++mine;
            }
            // Until one is left, or they differ in no bit any more.
            const bool several = __syncthreads_or(mine > 1);
            if ((__syncthreads_count(mine) > 1 || several) && shift != 0) continue;
            if (mine != 0) sh().entry = last;
            __syncthreads();
            return sh().entry;
        }
    }

    __device__ __forceinline__ u64 block_sum(u64 x) {
        x = warp_sum(x);
        __syncthreads();
        if (lane() == 0) sh().scan[warp()] = x;
        __syncthreads();
        return warp_sum(lane() < kWarps ? sh().scan[lane()] : 0ull);
    }

    // Bits that hold the distance of any of the list's entries from the largest key, and its id.
    __device__ __forceinline__ int list_width(u32 n) {
        u32 far = 0;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < n; i += kThreads) far = max(far, (u32)(list()[i] >> 32));
        far = __reduce_max_sync(kAll, far);
        __syncthreads();
        if (lane() == 0) sh().warp_key[warp()] = far;
        __syncthreads();
        return 64 - __clz(__reduce_max_sync(kAll, lane() < kWarps ? sh().warp_key[lane()] : 0));
    }

    __device__ __forceinline__ u64 share_of(u64 top_p, u64 left) const {
        const u64 low = top_p * left, high = __umul64hi(top_p, left);
        u64 target = (high << 32) | (low >> 32);
        if (!(MUTABLE && mutant == kTopPRoundsDown)) target += (u32)low != 0;
        return target ? target : 1ull;
    }

    __device__ __forceinline__ u64 place(u64 word, u64 whole) const {
        const u64 at = __umul64hi(word, whole);
        return MUTABLE && mutant == kDrawPastEqual && at > 0 ? at - 1 : at;
    }

    __device__ __forceinline__ u64 entry_mass(u32 i) const {
        return sh().scale.mass(of_key(sh().largest - (u32)(list()[i] >> 32)));
    }

    // Steps 4 and 5 on the list of `n` entries, by the first block, whose run is not needed any more. `k`: 0, or how many
    // top_k keeps; `target`: 0, or the mass that top_p keeps. The token, in one thread; the others get kAll.
    __device__ __forceinline__ u32 finish(u32 n, u32 k, u64 target) {
        const SamplerParams& p = sh().job.slot->params;
        const u64 word = sh().word;
        u64* m = (u64*)xs();
        const bool has_p = p.top_p < kTopPAbsent;
        u64 sum = 0;
        __syncthreads();
#pragma unroll 1
        for (u32 i = threadIdx.x; i < n; i += kThreads) m[i] = entry_mass(i);
        if (n <= kPairsMax) {
            // Each entry finds its own place.
            const u32 i = threadIdx.x;
            const u64 e = i < n ? list()[i] : 0;
            u64 mine = i < n ? m[i] : 0;
            __syncthreads();
            if (k != 0 || has_p) {
                u32 before = 0;
                u64 running = 0;
                if (warp() * 32 < n) {
#pragma unroll 4
                    for (u32 j = 0; j < n; ++j) {
                        const bool less = list()[j] < e;
                        before += less;
                        running += less ? m[j] : 0;
                    }
                }
                if (k != 0 && before >= k) mine = 0;
                if (has_p) {
                    if (target == 0) target = share_of(p.top_p, block_sum(mine));
                    if (running >= target) mine = 0;
                }
            }
            if (mine < p.min_p) mine = 0;
            __syncthreads();
            if (i < n) m[i] = mine;
            const u64 at = place(word, block_sum(mine));
            if (warp() * 32 >= n) return kAll;
            sum = 0;
#pragma unroll 4
            for (u32 j = 0; j < n; ++j) sum += (u32)list()[j] < (u32)e ? m[j] : 0;
            return sum <= at && at < sum + mine ? (u32)e : kAll;
        }
        int width = list_width(n);
        u64 end = 0;
        // 0: top_k; 1: top_p; 2: the draw, in the order of ids.
#pragma unroll 1
        for (int stage = k != 0 && k < n ? 0 : has_p ? 1 : 2; stage < 3; ++stage) {
            if (stage == 1 && !has_p) continue;
            if (stage == 0) {
                target = k;
            } else if (stage == 2 || target == 0) {
                const u64 least = stage == 2 ? p.min_p : 0;
                sum = 0;
                __syncthreads();
#pragma unroll 1
                for (u32 i = threadIdx.x; i < n; i += kThreads) {
                    m[i] = m[i] >= least ? m[i] : 0;
                    sum += m[i];
                    if (stage == 2) list()[i] = (u32)list()[i];
                }
                sum = block_sum(sum);
                target = stage == 2 ? place(word, sum) + 1 : share_of(p.top_p, sum);
                if (stage == 2) width = 32 - __clz(vocab - 1);
            }
            end = list_cut(n, width, target, [&](u32 i) { return stage == 0 ? 1 : m[i]; });
            target = 0;
            if (stage == 2) break;
#pragma unroll 1
            for (u32 i = threadIdx.x; i < n; i += kThreads) m[i] = list()[i] <= end ? m[i] : 0;
        }
        return threadIdx.x == 0 ? (u32)end : kAll;
    }

    // One weight of each lane into the histogram. Where all go into one bin, as equal logits do, the warp adds once.
    __device__ __forceinline__ void add(bool in, u32 bin, bool mass, u32 hi, u32 lo_) {
        const u32 lanes = __ballot_sync(kAll, in);
        const u32 leader = __ffs(lanes) - 1;
        const u32 its = __shfl_sync(kAll, bin, leader);
        if (__all_sync(kAll, !in || bin == its)) {
            const u64 m = mass ? warp_halves(in ? hi : 0, in ? lo_ : 0) : __popc(lanes);
            if (lane() == leader) add_mass(bin, m);
        } else if (in) {
            add_mass(bin, mass ? ((u64)hi << 20) + lo_ : 1);
        }
    }

    // Where in the order the running weight of what `within` keeps, from `floor` up, reaches the target: `count` ids, or
    // with `mass`, this share of the mass. May keep ids below the floor besides.
    __device__ __forceinline__ Cut find_cut(u32 floor, const Cut& within, bool mass, u32 count, u64 share, u64 of_all) {
        const u32 top = sh().largest;
        const u32 slice = kBins / size();
        int shift = max(1, 32 - __clz(top - floor));
        u32 prefix = 0;
        u64 above = 0, target = 0, weight = 0;
        bool first_level = true;
#pragma unroll 1
        while (shift > 0) {
            const int bits = min(shift, kLevelBits);
            const int before = shift;
            shift -= bits;
            clear_bins(2 * kBins);
#pragma unroll 1
            for (u32 i = first() * kTile + lane(), end = last() * kTile; i < end; i += 32) {
                const float x = xs()[i];
                const u32 k = key(x), d = top - k;
                const bool in = k >= floor && lo + i < vocab && within.keeps(k, lo + i) &&
                                __funnelshift_rc(d, 0u, before) == prefix;
                if (!__any_sync(kAll, in)) continue;
                u32 hi = 0, lo_ = 0;
                if (mass && in) sh().scale.halves<Scale::kAnyMode>(x, hi, lo_);
                add(in, (d >> shift) & ((1u << bits) - 1), mass, hi, lo_);
            }
            cluster_sync();
            // Each block adds up its slice of the bins over all blocks, in its own place.
            u64 mine = 0;
#pragma unroll 1
            for (u32 b = threadIdx.x; b < slice; b += kThreads) {
                u32* low = bins() + rank() * slice + b;
                u64 sum = 0;
#pragma unroll 1
                for (u32 r = 0; r < size(); ++r) {
                    const u32* theirs = of_rank(low, r);
                    sum += theirs[0] + ((u64)theirs[kBins] << 32);
                }
                low[0] = (u32)sum;
                low[kBins] = (u32)(sum >> 32);
                mine += sum;
            }
            const Note* notes = total(warp_sum(mine));
            if (first_level) {
                weight = whole(notes);
                target = count;
                if (mass) target = share_of(share, MUTABLE && of_all != 0 ? of_all : weight);
                if (MUTABLE && mass && target > weight) target = weight;
                if (!mass && target >= weight) return within;
                first_level = false;
            }
            // The block whose slice reaches the target walks it.
            u64 at = target - 1 - above;
            const u32 who = owner(notes, at);
            Note note{};
            bool says = false;
            if (who == rank() && warp() == 0) {
                const u32 per_lane = slice / 32;
                const u32* low = bins() + rank() * slice + lane() * per_lane;
                const auto bin = [&](u32 i) { return low[i] + ((u64)low[i + kBins] << 32); };
                u64 sum = 0;
#pragma unroll 1
                for (u32 i = 0; i < per_lane; ++i) sum += bin(i);
                const u64 before_lane = warp_prefix(sum, lane()) - sum;
                if (at >= before_lane && at - before_lane < sum) {
                    u64 rest = at - before_lane;
                    u32 i = 0;
#pragma unroll 1
                    while (rest >= bin(i)) rest -= bin(i++);
                    note.a = target - 1 - rest;  // weight above the bin
                    note.b = bin(i);
                    note.c = rank() * slice + lane() * per_lane + i;
                    says = true;
                }
            }
            note = tell(says, note);
            above = note.a;
            weight = note.b;
            prefix = (prefix << bits) | note.c;
            if (!mass && above + weight == target) break;
        }
        const u32 span = (shift > 0 ? 1u << shift : 1u) - 1;
        const u64 distance = ((u64)prefix << shift) + span;
        const u32 least = distance > top ? 0 : top - (u32)distance;
        Cut cut{max(least, floor), kAll};
        if (shift == 0) {
            // All in the bin are equal.
            const u64 each = mass ? sh().scale.mass(of_key(cut.key)) : 1;
            const u64 ties = (target - above + each - 1) / each;
            if (ties * each < weight) cut.id = nth_equal(cut.key, within, ties, weight / each);
        }
        if (cut.key == within.key) cut.id = min(cut.id, within.id);
        return cut;
    }

    // The id of the nth, from 1, of the `n` ids with this key that `within` keeps, in order of id.
    __device__ __forceinline__ u32 nth_equal(u32 cut_key, const Cut& within, u64 nth, u64 n) {
        if (MUTABLE && mutant == kTiesFromTheEnd) nth = n;
        const auto tile = [&](int t, u64 (&w)[4]) {
            const float4 x4 = tile_at(t);
            const float x[4] = {x4.x, x4.y, x4.z, x4.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 id = id_of(t, j);
                w[j] = key(x[j]) == cut_key && id < vocab && within.keeps(cut_key, id);
            }
        };
        u64 sum = 0;
#pragma unroll 1
        for (int t = first(), end = last(); t < end; ++t) {
            u64 w[4];
            tile(t, w);
            sum += (w[0] + w[1]) + (w[2] + w[3]);
        }
        const Note* notes = total(warp_sum(sum));
        u64 at = nth - 1;
        const u32 who = owner(notes, at);
        const u32 id = who == rank() ? pick(at, tile) : kAll;
        Note note{};
        note.c = id;
        return tell(id != kAll, note).c;
    }

    // Steps 3 to 5. The token, in one thread of the cluster; the others get kAll. `best`: the largest that this thread has.
    __device__ __forceinline__ u32 draw(float best) {
        const SamplerParams& p = sh().job.slot->params;
        const Ruler ruler = Ruler::of(sh().scale);
        const bool has_k = p.top_k > 0 && p.top_k < vocab;
        const bool has_p = p.top_p < kTopPAbsent;
        const bool lists = !(MUTABLE && mutant >= kTiesFromTheEnd && mutant != kDrawPastEqual);
        Keep keep{{kKeyMasked, kAll}, p.min_p};
        u64 high = 0;
        bool cut_found = false;
        if ((has_k || has_p) && lists) {
            u32 from = 0, end = kNoMass;
            u64 target = 0;
            if (vocab <= kListMax) {
                // Everything fits.
            } else if (has_k) {
                count_bests(ruler, best, kNoMass);
                cluster_sync();
                const Level found = level<false>(p.top_k, 1);
                if (found.bin != kAll) end = found.bin + 1;
            } else {
                clear_bins(kBins);
                const u64 mass = mass_all<true>(high);
                ARC_SAMPLE_STAMP(4);
                const Note* notes = total(mass, high);
                u64 high_all = 0;
#pragma unroll 1
                for (u32 r = 0; r < size(); ++r) high_all += notes[r].b;
                target = share_of(p.top_p, whole(notes));
                // The lower halves, less than 1 an id, are not counted: the cut is no later than the first bin, and no
                // earlier than the second.
                const u64 least = (target >> 20) > vocab ? (target >> 20) - vocab : 1;
                const Level found = level<true>((target + 0xfffff) >> 20, least);
                // Where the sums are not equal a bin of some block has overflowed.
                end = found.total != high_all ? 0 : found.bin != kAll ? found.bin + 1 : kNoMass;
                from = sh().earliest;
            }
            ARC_SAMPLE_STAMP(5);
            // Once from the first bin on, to finish on the list; else, for top_p, from the first that can have the cut. Where
            // that much mass takes many ids like the last, the first is left out.
            u32 begin = 0;
            if (target != 0 && end != 0 && from != 0) {
                const float last_mass = exp((float)end * (-1.0f / 64.0f));
                if (__ull2float_rn(target >> 20) > 4.0f * kListMax * 1048576.0f * last_mass) begin = from;
            }
#pragma unroll 1
            for (; end != 0; begin = from) {
                u64 above = 0;
                ARC_SAMPLE_STAMP(6);
                if (begin != 0) above = whole(total(mass_of(Keep{{first_key_in(ruler, begin) + 1, kAll}, 0})));
                ARC_SAMPLE_STAMP(7);
                const u32 n = gather(ruler, begin, end);
                ARC_SAMPLE_STAMP(8);
                if (n <= kListMax && begin == 0) {
                    return rank() == 0 ? finish(n, has_k ? p.top_k : 0, target) : kAll;
                }
                if (n <= kListMax) {
                    Note note{};
                    if (rank() == 0) {
                        note.a = list_cut(n, list_width(n), target - above, [&](u32 i) { return entry_mass(i); });
                    }
                    const u64 entry = tell(rank() == 0 && threadIdx.x == 0, note).a;
                    keep.cut = Cut{sh().largest - (u32)(entry >> 32), (u32)entry};
                    cut_found = true;
                }
                if (begin != 0 || has_k || from == 0) break;
            }
        }
        ARC_SAMPLE_STAMP(9);
        // 0: top_k; 1: top_p.
        const u32 floor = key(sh().scale.floor());
        u64 all = 0;
#pragma unroll 1
        for (int stage = 0; stage < 2 && !cut_found; ++stage) {
            if (stage == 0 ? !has_k : !has_p) continue;
            if (MUTABLE && stage == 1 && mutant == kTopPOfAll) all = whole(total(mass_of(Keep{{kKeyMasked, kAll}, 0})));
            keep.cut = find_cut(floor, keep.cut, stage == 1, p.top_k, p.top_p, all);
        }
        const bool any = has_k || has_p || keep.least > 0;
        const u64 sum = any ? mass_of(keep) : mass_all<false>(high);
        ARC_SAMPLE_STAMP(10);
        const Note* notes = total(sum);
        ARC_SAMPLE_STAMP(11);
        u64 at = place(sh().word, whole(notes));
        if (owner(notes, at) != rank()) return kAll;
        return pick(at, [&](int t, u64 (&w)[4]) { kept_tile<Scale::kAnyMode>(sh().scale, keep, of_key(keep.cut.key), t, w); });
    }

    __device__ __forceinline__ float logprob(u32 id) const {
        return __fsub_rn(__fsub_rn(sh().job.logits[id], sh().max), sh().ln_total);
    }

    // Puts the `n` first tokens of the order into `out`, by the first block. The raw logits are in shared memory; `best` is
    // the largest that this thread has.
    __device__ __forceinline__ void alternatives(u32 n, float best) {
        const Ruler ruler = Ruler::of(sh().scale, true);
        n = min(n, vocab);
        u32 end = kBins;
        if (vocab > kListMax) {
            count_bests(ruler, best, kBins - 1);
            cluster_sync();
            const Level found = level<false>(n, 1);
            end = found.bin != kAll ? found.bin + 1 : 0;
        }
        u32 listed = kAll;
        if (end != 0 && !(MUTABLE && mutant >= kTiesFromTheEnd)) listed = gather(ruler, 0, end);
        if (listed <= kListMax) {
            if (rank() == 0) {
                u64 upto = ~0ull;
                if (n < listed) upto = list_cut(listed, list_width(listed), n, [](u32) { return 1ull; });
#pragma unroll 1
                for (u32 i = threadIdx.x; i < listed; i += kThreads) {
                    if (list()[i] <= upto) sh().top[atomicAdd(&sh().n_top, 1)] = list()[i];
                }
            }
        } else {
            const Cut cut = find_cut(kKeyMasked, Cut{kKeyMasked, kAll}, false, n, 0, 0);
#pragma unroll 1
            for (u32 i = first() * kTile + lane(), end = last() * kTile; i < end; i += 32) {
                const u32 k = key(xs()[i]);
                if (lo + i >= vocab || !cut.keeps(k, lo + i)) continue;
                const u32 at = atomicAdd(of_rank(&sh().n_top, 0), 1);
                if (at < kMaxTop) *of_rank(&sh().top[at], 0) = ((u64)(sh().largest - k) << 32) | (lo + i);
            }
            cluster_sync();
        }
        __syncthreads();
        if (rank() == 0 && threadIdx.x < n) {
            const u64 mine = sh().top[threadIdx.x];
            u32 before = 0;
#pragma unroll 1
            for (u32 i = 0; i < n; ++i) before += sh().top[i] < mine;
            const u32 id = (u32)mine;
            sh().job.out->top_ids[before] = id;
            sh().job.out->top_logprobs[before] = logprob(id);
        }
        // The first block is done with its list, which the next one overwrites.
        cluster_sync();
    }

    // The whole row. Every thread of the cluster calls this, once.
    __device__ __forceinline__ void run(const Job& its_job) {
        if (threadIdx.x == 0) {
            sh().job = its_job;
            sh().flags = its_job.flags;
            sh().n_shown = 0;
            sh().logprob = ARC_NAN;
        }
        __syncthreads();
        const Job& job = sh().job;
        const Slot& s = *job.slot;
        const u32 forced = job.sample ? s.forced : 0;
        const bool asks = job.sample && s.logprobs != kNone;
        const bool own = job.score || (asks && forced != 2);
        const bool draws = job.sample && forced == 0;
        const auto fault_of = [](u32 top, bool bad) -> u32 {
            return bad ? kNonFinite : top == kKeyMasked ? kNothingToSample : 0u;
        };
        Found found{0, 0, 0, 0};
        u32 raw_fault = 0;
        float best_x = -ARC_INF;
        ARC_SAMPLE_STAMP(0);
        if (own || draws) {
            Best best = load(job.logits);
            const u32 raw_key = order_key<false>(best.x, 0);
            u32 wrong = best.bad ? kRawBad : 0;
            ARC_SAMPLE_STAMP(1);
            if (own) {
                found = agree(best, raw_key, wrong);
                raw_fault = fault_of(found.raw, found.wrong != 0);
                if (raw_fault == 0) own_distribution(found, best.x, job.score, asks);
            }
            const bool stops = job.draw_index < s.params.min_tokens && s.n_stop > 0;
            const bool processed = draws && (s.n_bias > 0 || job.mask != nullptr || stops || s.reads_seen);
            if (processed && raw_fault == 0) {
                const bool in_range = process(best);
                wrong |= (best.bad ? kBad : 0) | (in_range ? 0 : kIdBad);
                ARC_SAMPLE_STAMP(2);
            }
            if (!own || (processed && raw_fault == 0)) found = agree(best, raw_key, wrong);
            best_x = best.x;
            ARC_SAMPLE_STAMP(3);
        }
        const bool first_thread = threadIdx.x == 0;
        if (job.score && first_thread) {
            const u32 fault = job.target >= vocab ? kOutOfRange : raw_fault;
            sh().flags |= fault;
            if (fault == 0) {
                sh().logprob = logprob(job.target);
                sh().n_shown = min(min(s.prompt_top, kMaxTop), vocab);
            }
        }
        u32 token = kAll;
        bool drawn = false, mine = rank() == 0 && first_thread;
        if (forced == 2) {
            if (first_thread) sh().flags |= s.forced_fault;
        } else if (forced != 0) {
            token = s.forced_token;
            drawn = true;
            const u32 fault = token >= vocab ? kOutOfRange : asks ? raw_fault : 0;
            if (first_thread) sh().flags |= fault;
            if (fault != 0) raw_fault = fault;
        } else if (draws) {
            const u32 raw = raw_fault != 0 ? raw_fault : fault_of(found.raw, found.wrong & kRawBad);
            const u32 fault =
                raw != 0 ? raw : found.wrong & kIdBad ? kOutOfRange : fault_of(found.key, found.wrong & kBad);
            if (first_thread) sh().flags |= fault;
            if (fault == 0) {
                token = found.id;
                if (!(s.params.flags & kGreedy)) {
                    __syncthreads();
                    if (first_thread) {
                        sh().word = draw_word(s.params.seed, job.draw_index, s.params.choice);
                        sh().scale = Scale::of(of_key(found.key), s.params.temperature);
                        sh().largest = key(sh().scale.max);
                    }
                    __syncthreads();
                    token = draw(best_x);
                    mine = token != kAll;
                }
                drawn = true;
            }
        }
        ARC_SAMPLE_STAMP(12);
        if (!mine) return;
        Landed& out = *job.out;
        // Another thread's notes of a row that both scores and draws: barriers of the draw lie between.
        out.flags = sh().flags;
        out.n_tokens = drawn;
        out.tokens[0] = drawn ? token : 0;
        const bool tells = drawn && asks && raw_fault == 0;
        out.n_top = tells ? min(min(s.logprobs, kMaxTop), vocab) : sh().n_shown;
        out.logprob = tells ? logprob(token) : sh().logprob;
    }

    // The mass of the model's own distribution, and alternatives where they are wanted.
    __device__ __forceinline__ void own_distribution(const Found& found, float best, bool score, bool asks) {
        if (threadIdx.x == 0) {
            sh().max = of_key(found.key);
            sh().scale = Scale::of(sh().max, 1.0f);
            sh().largest = found.key;
        }
        __syncthreads();
        u64 high;
        const u64 all = whole(total(mass_pass<0, false>(high)));
        if (threadIdx.x == 0) sh().ln_total = ln(__fmul_rn(__ull2float_rn(all), 1.0f / 1099511627776.0f));
        __syncthreads();
        const Slot& s = *sh().job.slot;
        const u32 n = max(score ? s.prompt_top : 0, asks ? s.logprobs : 0);
        if (n > 0) alternatives(min(n, kMaxTop), best);
    }
};

}  // namespace sampler
}  // namespace arc
