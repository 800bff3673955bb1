// The three kernels around a model's stages: changes from the host, the step's beginning, its end.
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

// Resolves the row table against the slots: what cpu/state.rs does in `begin`. One block; dynamic shared memory: three
// words a slot. A row out of range, out of order, or in another sequence's block ends the rows of its sequence from
// there on.
extern "C" __global__ void __launch_bounds__(1024) step_begin(StepView v, uint32_t rows, uint32_t stamp) {
    extern __shared__ uint32_t words[];
    uint32_t* first = words;
    uint32_t* bad = words + v.n_slots;
    uint32_t* last = words + 2 * v.n_slots;
    __shared__ uint32_t begun, warp_heads[32], warp_live[32];
    pdl_launch();
    pdl_wait();
    const uint32_t tid = threadIdx.x, n = blockDim.x;
    if (tid == 0) {
        begun = v.progress->begun + 1;
        v.progress->begun = begun;
        if (stamp) v.progress->now.start_ns = now_ns();
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
                const uint32_t sum = slot.pos + row.offset;
                const uint32_t pos = sum < slot.pos ? kNone : sum;
                const uint32_t token = row.token == kTokenOfSlot ? slot.token : row.token;
                const uint32_t held = slot.n_blocks * kBlockTokens;
                if (token >= v.vocab || pos >= v.context || pos >= held) {
                    atomicMin(bad + row.slot, r);
                } else {
                    info.live = 1;
                    info.pos = pos;
                    info.token = token;
                    atomicMin(first + row.slot, r);
                }
            }
        }
        v.infos[r] = info;
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
            const uint64_t claim = uint64_t(begun) << 32 | (0xffffffffu - r);
            atomicMax(reinterpret_cast<unsigned long long*>(v.writers + block), (unsigned long long)claim);
        }
    }
    __syncthreads();
    for (uint32_t r = tid; r < rows; r += n) {
        const RowInfo info = v.infos[r];
        if (!info.live || r >= bad[info.slot]) continue;
        const uint32_t block = v.blocks[size_t(info.slot) * v.max_blocks + info.pos / kBlockTokens];
        const uint32_t writer = 0xffffffffu - uint32_t(v.writers[block]);
        if (v.infos[writer].slot != info.slot) atomicMin(bad + info.slot, r);
    }
    __syncthreads();
    for (uint32_t r = tid; r < rows; r += n) {
        RowInfo& info = v.infos[r];
        if (bad[info.slot] == r) v.slots[info.slot].fault = kOutOfRange;
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
            is_head = row.flags & (kRowHead | kRowSample | kRowScore);
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

// Takes the drawn tokens into their sequences, moves positions, and publishes the step: one block.
extern "C" __global__ void __launch_bounds__(1024) step_commit(StepView v, uint32_t rows) {
    pdl_launch();
    pdl_wait();
    const uint64_t step = v.progress->step + 1;
    const uint32_t entry = uint32_t(step % v.ring_steps);
    const uint32_t heads = v.counts[0];
    for (uint32_t h = threadIdx.x; h < heads; h += blockDim.x) {
        Landed& landed = v.landed[h];
        const Row row = v.rows[v.heads[h]];
        uint32_t flags = landed.flags;
        if ((row.flags & kRowSample) && row.slot < v.n_slots) {
            Slot& slot = v.slots[row.slot];
            slot.has_mask = slot.forced = 0;
            if (flags & kFault) {
                slot.active = 0;
            } else if (landed.n_tokens != 0) {
                const uint32_t token = landed.tokens[0];
                slot.token = token;
                const uint32_t n_out = ++slot.n_out;
                if (slot.reads_seen) v.seen[size_t(row.slot) * v.vocab + token] += 1;
                bool stop = false;
                for (uint32_t i = 0; i < slot.n_stop; ++i) stop |= slot.stop_ids[i] == token;
                if (stop && !(slot.flags & kIgnoreStop)) {
                    flags |= kDoneStop;
                } else if (n_out >= slot.max_out) {
                    flags |= kDoneLength;
                }
                if (flags & kDone) slot.active = 0;
            }
        }
        landed.flags = flags;
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
        if (info.live) atomicAdd(&v.slots[info.slot].pos, 1u);
    }
    if (threadIdx.x == 0) {
        Clocks now = v.progress->now;
        now.commit_ns = now_ns();
        v.ring_clocks[entry] = now;
        v.progress->step = step;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(v.head), "l"(step) : "memory");
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

// Tells the host that everything before has run.
extern "C" __global__ void step_signal(uint64_t* at, uint64_t value) {
    pdl_wait();
    __threadfence_system();
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// For tests of faults: ends the context as an illegal access would.
extern "C" __global__ void step_trap() { asm volatile("trap;"); }
