// The kernels around a model's stages: changes from the host, the step's beginning, drafts, its end.
#include "pdl.cuh"
#include "step.cuh"

using namespace arc;

namespace {

// Kinds of records in a staged change; cuda/state.rs writes them.
constexpr uint32_t kRelease = 0, kAdmit = 1, kRows = 2, kMask = 3, kForced = 4;

__device__ void copy_words(uint32_t* to, const uint32_t* from, uint32_t n) {
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}

// Payload: slot, entries of the block table, of bias, of the prompt; then the slot itself and these arrays.
__device__ void admit(const StepView& v, const uint32_t* record) {
    const uint32_t slot = record[0], n_blocks = record[1], n_bias = record[2], n_prompt = record[3];
    const Slot* init = reinterpret_cast<const Slot*>(record + 4);
    const uint32_t* blocks = record + 4 + sizeof(Slot) / 4;
    const uint32_t* bias_ids = blocks + n_blocks;
    const uint32_t* bias = bias_ids + n_bias;
    const uint32_t* prompt = bias + n_bias;
    uint32_t* seen = v.seen + size_t(slot) * v.vocab;
    if (init->reads_seen) {
        for (uint32_t i = threadIdx.x; i < v.vocab; i += blockDim.x) seen[i] = 0;
    }
    copy_words(const_cast<uint32_t*>(v.blocks) + size_t(slot) * v.max_blocks, blocks, n_blocks);
    copy_words(const_cast<uint32_t*>(v.bias_ids) + size_t(slot) * kMaxBias, bias_ids, n_bias);
    copy_words(reinterpret_cast<uint32_t*>(const_cast<float*>(v.bias)) + size_t(slot) * kMaxBias, bias, n_bias);
    copy_words(reinterpret_cast<uint32_t*>(v.slots + slot), record + 4, sizeof(Slot) / 4);
    if (init->reads_seen) {
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n_prompt; i += blockDim.x) {
            if (prompt[i] < v.vocab) atomicOr(seen + prompt[i], 0x80000000u);
        }
    }
}

}  // namespace

// One block a record. `blob`: number, then for each record where it begins, in words; then the records.
extern "C" __global__ void __launch_bounds__(256) step_apply(StepView v, const uint32_t* blob, uint64_t* applied,
                                                              uint64_t number) {
    pdl_wait();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        // The copy that brought the blob has run: the host may write over where it came from.
        *reinterpret_cast<volatile uint64_t*>(applied) = number;
    }
    const uint32_t* record = blob + blob[blockIdx.x];
    const uint32_t kind = record[0];
    record += 1;
    if (kind == kRelease) {
        if (threadIdx.x == 0) v.slots[record[0]].active = 0;
    } else if (kind == kAdmit) {
        admit(v, record);
    } else if (kind == kRows) {
        copy_words(reinterpret_cast<uint32_t*>(const_cast<Row*>(v.rows)), record + 1, record[0] * sizeof(Row) / 4);
    } else if (kind == kMask) {
        const uint32_t words = (v.vocab + 31) / 32;
        copy_words(const_cast<uint32_t*>(v.masks) + size_t(record[0]) * words, record + 1, words);
        if (threadIdx.x == 0) v.slots[record[0]].has_mask = 1;
    } else if (kind == kForced && threadIdx.x == 0) {
        Slot& slot = v.slots[record[0]];
        slot.forced = record[2] != 0 ? 2 : 1;
        slot.forced_token = record[1];
        slot.forced_fault = record[2];
    }
}

namespace {

// Where a row stands in its slot's sequence, and its token; whether both are in range.
__device__ __forceinline__ bool locate(const StepView& v, const Row& row, const Slot& slot, RowInfo& info) {
    // All of the slot at once.
    const uint32_t at = slot.pos, last = slot.token, held = slot.n_blocks * kBlockTokens;
    const uint32_t sum = at + row.offset, own = row.token == kTokenOfSlot ? last : row.token;
    info.pos = sum < at ? kNone : sum;
    info.token = row.flags & kRowVerify ? slot.draft(row.offset) : own;
    return info.token < v.vocab && info.pos < v.context && info.pos < held;
}

// As `step_begin`, one row: nobody else's rows have to be looked at.
__device__ void begin_row(const StepView& v, uint32_t stamp) {
    if (stamp) v.progress->now.start_ns = now_ns(), v.progress->now.kv_bytes = 0;
    const Row row = v.rows[0];
    v.progress->begun += 1;
    RowInfo info = {0, row.slot < v.n_slots ? row.slot : v.n_slots - 1, 0, 0, 0, 0, 0, kNone};
    Slot& slot = v.slots[info.slot];
    RowInfo found = info;
    const bool inside = locate(v, row, slot, found);
    if (!(row.flags & kRowPadding) && row.slot < v.n_slots && slot.active && !slot.fault) {
        if (inside && v.blocks[size_t(info.slot) * v.max_blocks + found.pos / kBlockTokens] < v.n_blocks) {
            info.live = 1, info.pos = found.pos, info.token = found.token;
            info.next = row.target < v.vocab ? row.target : kNone;
        } else if (!(row.flags & kRowVerify)) {
            slot.fault = kOutOfRange;
        }
    }
    v.infos[0] = info;
    v.drawn[0] = kNone;
    const uint32_t heads = row.flags & kRowHeads && v.heads_max > 0;
    if (heads) v.heads[0] = 0;
    v.counts[0] = heads, v.counts[1] = info.live;
}

}  // namespace

// Resolves the row table against the slots: what cpu/state.rs does in `begin`. One block; dynamic shared memory: three
// words a slot. A row out of range, out of order, or in another sequence's block ends the rows of its sequence from
// there on.
extern "C" __global__ void __launch_bounds__(1024) step_begin(StepView v, uint32_t rows, uint32_t stamp) {
    extern __shared__ uint32_t words[];
    uint32_t* first = words;
    uint32_t* bad = words + v.n_slots;
    uint32_t* last = words + 2 * v.n_slots;
    __shared__ uint64_t begun;
    __shared__ uint32_t warp_heads[32], warp_live[32];
    pdl_launch();
    pdl_wait();
    const uint32_t tid = threadIdx.x, n = blockDim.x;
    if (rows == 1) {
        if (tid == 0) begin_row(v, stamp);
        return;
    }
    if (tid == 0) {
        begun = v.progress->begun + 1;
        v.progress->begun = begun;
        if (stamp) v.progress->now.start_ns = now_ns(), v.progress->now.kv_bytes = 0;
    }
    for (uint32_t s = tid; s < v.n_slots; s += n) {
        first[s] = bad[s] = kNone;
        last[s] = 0;
    }
    __syncthreads();
    for (uint32_t r = tid; r < rows; r += n) {
        const Row row = v.rows[r];
        RowInfo info = {0, row.slot < v.n_slots ? row.slot : v.n_slots - 1, 0, 0, 0, 0, r, kNone};
        if (!(row.flags & kRowPadding) && row.slot < v.n_slots) {
            const Slot& slot = v.slots[row.slot];
            if (slot.active && !slot.fault) {
                RowInfo found = info;
                if (locate(v, row, slot, found)) {
                    info.live = 1, info.pos = found.pos, info.token = found.token;
                    atomicMin(first + row.slot, r);
                } else if (!(row.flags & kRowVerify)) {
                    // A draft may be left out.
                    atomicMin(bad + row.slot, r);
                }
            }
        }
        v.infos[r] = info;
        v.drawn[r] = kNone;
    }
    __syncthreads();
    for (uint32_t r = tid; r < rows; r += n) {
        const RowInfo info = v.infos[r];
        if (!info.live) continue;
        bool ok = first[info.slot] == r;
        if (!ok) {
            const RowInfo before = v.infos[r - 1];
            ok = before.live && before.slot == info.slot && before.pos + 1 == info.pos;
        }
        const uint32_t block = v.blocks[size_t(info.slot) * v.max_blocks + info.pos / kBlockTokens];
        if (!ok || block >= v.n_blocks) {
            atomicMin(bad + info.slot, r);
        } else {
            // Of the latest step the first row: that number does not come again in 2^48 steps.
            const uint64_t claim = begun << kRowBits | (kMostRows - 1 - r);
            atomicMax(reinterpret_cast<unsigned long long*>(v.writers + block), (unsigned long long)claim);
        }
    }
    __syncthreads();
    for (uint32_t r = tid; r < rows; r += n) {
        const RowInfo info = v.infos[r];
        if (!info.live || r >= bad[info.slot]) continue;
        const uint32_t block = v.blocks[size_t(info.slot) * v.max_blocks + info.pos / kBlockTokens];
        const uint32_t writer = kMostRows - 1 - uint32_t(v.writers[block] % kMostRows);
        if (v.infos[writer].slot != info.slot) atomicMin(bad + info.slot, r);
    }
    __syncthreads();
    for (uint32_t r = tid; r < rows; r += n) {
        RowInfo& info = v.infos[r];
        // If it is the sequence that goes wrong at a draft, its own row will find out.
        if (bad[info.slot] == r && !(v.rows[r].flags & kRowVerify)) v.slots[info.slot].fault = kOutOfRange;
        if (info.live && r >= bad[info.slot]) {
            info.live = info.pos = info.token = 0;
        } else if (info.live) {
            atomicMax(last + info.slot, r);
        }
    }
    __syncthreads();
    uint32_t heads = 0, live = 0;
    for (uint32_t base = 0; base < rows; base += n) {
        const uint32_t r = base + tid;
        bool is_head = false, is_live = false;
        if (r < rows) {
            RowInfo& info = v.infos[r];
            const Row row = v.rows[r];
            is_head = row.flags & kRowHeads;
            is_live = info.live;
            if (is_live) {
                info.back = r - first[info.slot];
                info.ahead = last[info.slot] - r;
                info.group = first[info.slot];
                const uint32_t next = info.ahead > 0 ? v.infos[r + 1].token : row.target;
                info.next = next < v.vocab ? next : kNone;
            }
        }
        const uint32_t lane = tid % 32, warp = tid / 32;
        const uint32_t head_bits = __ballot_sync(0xffffffffu, is_head);
        const uint32_t live_bits = __ballot_sync(0xffffffffu, is_live);
        if (lane == 0) {
            warp_heads[warp] = __popc(head_bits);
            warp_live[warp] = __popc(live_bits);
        }
        __syncthreads();
        uint32_t before = heads, all = 0;
        for (uint32_t w = 0; w < n / 32; ++w) {
            if (w < warp) before += warp_heads[w];
            all += warp_heads[w];
            live += warp_live[w];
        }
        const uint32_t at = before + __popc(head_bits & ((1u << lane) - 1));
        if (is_head && at < v.heads_max) v.heads[at] = r;
        heads += all;
        __syncthreads();
    }
    if (tid == 0) {
        v.counts[0] = heads < v.heads_max ? heads : v.heads_max;
        v.counts[1] = live;
    }
}

namespace {

// What reads of one kind come to for a row: `KvRead::of` of count/kv.rs.
__device__ uint64_t read_of(const KvRead& read, const RowInfo& info) {
    const uint32_t visible = info.pos + 1;
    uint32_t n = 0;
    if (read.ratio > 0) {
        const uint32_t rows = visible / read.ratio;
        if (rows > read.above) n = min(rows, read.most);
    } else if (info.back % read.together == 0) {
        n = min(visible, read.window) + min(info.ahead, read.together - 1);
    }
    return info.live ? n * read.bytes : 0;
}

// What a step reads over `rows` rows, by a warp.
__device__ uint64_t read_by_warp(const KvReads& reads, const RowInfo* infos, uint32_t rows) {
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x & 31; i < rows * reads.n; i += 32) sum += read_of(reads.reads[i % reads.n], infos[i / reads.n]);
    for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
}

// Takes a token into the sequence, and says whether that ends it.
__device__ uint32_t emit(const StepView& v, uint32_t at, uint32_t token) {
    Slot& slot = v.slots[at];
    slot.token = token;
    const uint32_t n_out = ++slot.n_out;
    if (slot.reads_seen) v.seen[size_t(at) * v.vocab + token] += 1;
    bool stop = false;
    for (uint32_t i = 0; i < slot.n_stop; ++i) stop |= slot.stop_ids[i] == token;
    uint32_t done = 0;
    if (stop && !(slot.flags & kIgnoreStop)) {
        done = kDoneStop;
    } else if (n_out >= slot.max_out) {
        done = kDoneLength;
    }
    if (done) slot.active = 0;
    return done;
}

// Emits the draws that count: that of head row h, which samples row r, and, while they equal the drafts, those of the
// rows that verify. The tokens join the first entry, with what ended the sequence.
__device__ void settle(const StepView& v, uint32_t h, uint32_t r, uint32_t at, uint32_t heads) {
    Slot& slot = v.slots[at];
    slot.has_mask = slot.forced = 0;
    uint32_t verify = 0;
    while (h + 1 + verify < heads && v.heads[h + 1 + verify] == r + 1 + verify) {
        const Row row = v.rows[r + 1 + verify];
        if (row.slot != at || !(row.flags & kRowVerify)) break;
        ++verify;
    }
    Landed& first = v.landed[h];
    uint32_t flags = first.flags, n = 0;
    for (uint32_t j = 0; j <= verify && j < kMaxStepTokens; ++j) {
        const Landed& draw = v.landed[h + j];
        flags |= draw.flags & kFault;
        if (flags & kFault) {
            slot.active = 0;
            break;
        }
        if (draw.n_tokens == 0) break;
        const uint32_t token = draw.tokens[0];
        first.tokens[j] = token;
        n = j + 1;
        v.drawn[r + j] = v.infos[r + j].next = token;
        flags |= emit(v, at, token);
        if (!slot.active || j >= slot.n_drafts || slot.drafts[j] != token) break;
    }
    first.n_tokens = n;
    first.flags = flags;
    slot.n_drafts = 0;
    for (uint32_t j = 1; j <= verify; ++j) {
        v.landed[h + j].n_tokens = 0;
        v.landed[h + j].flags &= kVerified | kInert;
    }
}

// `heads`: head rows.
__device__ void settle_all(const StepView& v, uint32_t heads) {
    for (uint32_t h = threadIdx.x; h < heads; h += blockDim.x) {
        const uint32_t r = v.heads[h];
        const Row row = v.rows[r];
        if ((row.flags & kRowSample) && row.slot < v.n_slots) settle(v, h, r, row.slot, heads);
    }
}

}  // namespace

// Emits what was drawn, where a drafter has to know it before the commit: one block.
extern "C" __global__ void __launch_bounds__(1024) step_settle(StepView v) {
    pdl_launch();
    pdl_wait();
    settle_all(v, v.counts[0]);
}

// Counts what a forward part alone has read. One warp.
extern "C" __global__ void __launch_bounds__(32) step_count(StepView v, const __grid_constant__ KvReads reads, uint32_t rows) {
    pdl_launch();
    pdl_wait();
    const uint64_t read = read_by_warp(reads, v.infos, rows);
    if (threadIdx.x == 0) v.progress->now.kv_bytes += read;
}

// Moves positions and publishes the step, after emitting what was drawn where that was not done: one block of 256
// threads. `reads`: of the stages over its rows.
extern "C" __global__ void __launch_bounds__(256) step_commit(StepView v, const __grid_constant__ KvReads reads, uint32_t rows,
                                                               uint32_t settled) {
    pdl_launch();
    pdl_wait();
    // Asked for at once: a load takes 0.6 us.
    const uint64_t step = v.progress->step + 1;
    const uint32_t heads = v.counts[0];
    const Clocks now = v.progress->now;
    const uint64_t read = threadIdx.x / 32 == 1 ? read_by_warp(reads, v.infos, rows) : 0;
    if (!settled) {
        settle_all(v, heads);
        __syncthreads();
    }
    const uint32_t entry = uint32_t(step % v.ring_steps);
    for (uint32_t h = threadIdx.x; h < heads; h += blockDim.x) {
        const Landed& landed = v.landed[h];
        const uint32_t* from = reinterpret_cast<const uint32_t*>(&landed);
        uint32_t* to = reinterpret_cast<uint32_t*>(v.ring + size_t(entry) * v.heads_max + h);
        const uint32_t top = offsetof(Landed, top_ids) / 4;
        for (uint32_t i = 0; i < top; ++i) to[i] = from[i];
        for (uint32_t i = 0; i < landed.n_top && i < kMaxTop; ++i) {
            to[top + i] = from[top + i];
            to[top + kMaxTop + i] = from[top + kMaxTop + i];
        }
    }
    for (uint32_t r = threadIdx.x; r < rows; r += blockDim.x) {
        const RowInfo info = v.infos[r];
        const uint32_t flags = v.rows[r].flags, drawn = v.drawn[r];
        if (info.live && (!(flags & kRowDraws) || drawn != kNone)) atomicAdd(&v.slots[info.slot].pos, 1u);
    }
    if (threadIdx.x == 0) {
        Clocks& to = v.ring_clocks[entry];
        to.start_ns = now.start_ns, to.sample_ns = now.sample_ns, to.commit_ns = now_ns();
    } else if (threadIdx.x == 32) {
        v.ring_clocks[entry].kv_bytes = now.kv_bytes + read;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    // Releases what the others wrote, too.
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(v.head), "l"(step) : "memory");
    // Everybody has read the number of the step before.
    v.progress->step = step;
}

// Makes the table of draft rows, `draft` being the view of it: one for each row that wants drafts, at the last row of its
// slot whose draw counts. One block; `n`: draft rows, padding included.
extern "C" __global__ void __launch_bounds__(1024) step_draft_rows(StepView v, StepView draft, uint32_t rows, uint32_t n) {
    __shared__ uint32_t warps[32];
    pdl_launch();
    pdl_wait();
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        draft.infos[i] = RowInfo{0, 0, 0, 0, 0, 0, i, kNone};
        const_cast<Row*>(draft.rows)[i] = Row{0, kRowPadding, 0, kNone, kNone};
        draft.heads[i] = i;
        draft.from[i] = 0;
    }
    __syncthreads();
    uint32_t found = 0;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (uint32_t base = 0; base < rows; base += blockDim.x) {
        const uint32_t r = base + threadIdx.x;
        const bool wants = r < rows && (v.rows[r].flags & kRowPropose);
        const uint32_t bits = __ballot_sync(0xffffffffu, wants);
        if (lane == 0) warps[warp] = __popc(bits);
        __syncthreads();
        uint32_t before = found;
        for (uint32_t w = 0; w < blockDim.x / 32; ++w) {
            if (w < warp) before += warps[w];
            found += warps[w];
        }
        const uint32_t i = before + __popc(bits & ((1u << lane) - 1));
        if (wants && i < n) {
            uint32_t last = r;
            const uint32_t slot = v.rows[r].slot;
            while (last + 1 < rows && v.rows[last + 1].slot == slot && v.drawn[last] != kNone && v.drawn[last + 1] != kNone) ++last;
            const RowInfo info = v.infos[last];
            const uint32_t live = v.drawn[r] != kNone && v.slots[info.slot].active;
            draft.infos[i] = RowInfo{live, info.slot, info.pos, 0, 0, 0, i, v.drawn[last]};
            // A draft is drawn like the row that will verify it.
            const_cast<Row*>(draft.rows)[i] = Row{uint16_t(info.slot), kRowVerify, 0, kNone, kNone};
            draft.from[i] = last;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) draft.counts[0] = draft.counts[1] = found < n ? found : n;
}

// Takes the drawn drafts (the `landed` of the draft table) into their slots, and moves the draft rows on: one block. `reads`: of
// the stages over draft rows since the last drafts.
extern "C" __global__ void __launch_bounds__(1024) step_push_drafts(StepView draft, const __grid_constant__ KvReads reads, uint32_t n) {
    pdl_launch();
    pdl_wait();
    if (threadIdx.x < 32) {
        const uint64_t read = read_by_warp(reads, draft.infos, n);
        if (threadIdx.x == 0) draft.progress->now.kv_bytes += read;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        RowInfo& info = draft.infos[i];
        if (!info.live) continue;
        Slot& slot = draft.slots[info.slot];
        const Landed& landed = draft.landed[i];
        if (!slot.takes_draft() || (landed.flags & kFault) || landed.n_tokens == 0) {
            info.live = 0;
            continue;
        }
        const uint32_t token = landed.tokens[0];
        slot.drafts[slot.n_drafts++] = token;
        const_cast<Row*>(draft.rows)[i].offset = slot.n_drafts;
        info.token = info.next = token;
        info.pos += 1;
        info.live = info.pos < draft.context;
    }
}

// For tests of speculation: drafts from a table, `script[seed][output position]`, kNone where there is none. One block.
extern "C" __global__ void __launch_bounds__(256) step_script(StepView v, const uint32_t* script, uint32_t n, uint32_t len,
                                                               uint32_t rows, uint32_t drafts) {
    pdl_launch();
    pdl_wait();
    for (uint32_t r = threadIdx.x; r < rows; r += blockDim.x) {
        if (!(v.rows[r].flags & kRowPropose) || v.drawn[r] == kNone) continue;
        Slot& slot = v.slots[v.rows[r].slot];
        if (!slot.active || slot.params.seed >= n) continue;
        const uint32_t* coming = script + slot.params.seed * len;
        while (slot.n_drafts < drafts && slot.takes_draft()) {
            const uint32_t at = slot.n_out + slot.n_drafts;
            if (at >= len || coming[at] == kNone) break;
            slot.drafts[slot.n_drafts++] = coming[at];
        }
    }
}

// Streams and merged streams of the rows that draft rows continue. Grid: x over values, y over draft rows; `wide` and
// `narrow`: values a row of either.
extern "C" __global__ void __launch_bounds__(256) step_draft_gather(StepView draft, float* out, const float* streams,
                                                                     uint32_t wide, float* h, const float* merged,
                                                                     uint32_t narrow) {
    pdl_launch();
    pdl_wait();
    const size_t to = blockIdx.y, from = draft.from[blockIdx.y];
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < wide; i += gridDim.x * blockDim.x) {
        out[to * wide + i] = streams[from * wide + i];
        if (i < narrow) h[to * narrow + i] = merged[from * narrow + i];
    }
}

// Gathers rows of logits for the host. `to`: [n, vocab]; grid: x over values, y over rows.
extern "C" __global__ void __launch_bounds__(256) step_gather(float* to, const float* logits, const uint32_t* heads,
                                                               uint32_t vocab) {
    pdl_launch();
    pdl_wait();
    const uint32_t head = heads[blockIdx.y];
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab; i += gridDim.x * blockDim.x) {
        to[size_t(blockIdx.y) * vocab + i] = logits[size_t(head) * vocab + i];
    }
}

// Adds to `sum` what tells memory from other memory: a sum of its words, each mixed with its place.
extern "C" __global__ void __launch_bounds__(256) step_sum(const uint8_t* from, uint64_t bytes, unsigned long long* sum) {
    pdl_wait();
    auto mixed = [](uint64_t place, uint32_t word) {
        uint64_t x = (place << 32 ^ word) * 0x9e3779b97f4a7c15ull;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
        return x ^ x >> 27;
    };
    const uint64_t words = bytes / 4, first = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long own = 0;
    for (uint64_t i = first; i < words; i += (uint64_t)gridDim.x * blockDim.x) {
        own += mixed(i, __ldcg(reinterpret_cast<const uint32_t*>(from) + i));
    }
    if (first < bytes % 4) own += mixed(words + first, from[4 * words + first]);
    atomicAdd(sum, own);
}

// Tells the host that everything before has run.
extern "C" __global__ void step_signal(uint64_t* at, uint64_t value) {
    pdl_wait();
    __threadfence_system();
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// For tests of faults: ends the context as an illegal access would.
extern "C" __global__ void step_trap() {
    pdl_wait();
    asm volatile("trap;");
}
