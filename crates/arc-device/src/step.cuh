// The state that varies between steps: the CUDA side of step.rs and of cuda/state.rs. Sizes are asserted on both sides.
#pragma once

#include <cstdint>

namespace arc {

constexpr uint32_t kBlockTokens = 32;
constexpr uint32_t kMaxStopIds = 16;
constexpr uint32_t kMaxTop = 20;
constexpr uint32_t kMaxDrafts = 4;
constexpr uint32_t kMaxStepTokens = kMaxDrafts + 1;
constexpr uint32_t kTokenOfSlot = 0xffffffffu;
constexpr uint32_t kNone = 0xffffffffu;

// Bits of Row::flags.
constexpr uint32_t kRowHead = 1, kRowSample = 2, kRowScore = 4, kRowPadding = 8, kRowVerify = 16, kRowPropose = 32;
constexpr uint32_t kRowHeads = kRowHead | kRowSample | kRowScore | kRowVerify;
constexpr uint32_t kRowDraws = kRowSample | kRowVerify;
// Bits of Slot::flags.
constexpr uint32_t kIgnoreStop = 1;
// Bits of Landed::flags.
constexpr uint32_t kDoneStop = 1, kDoneLength = 2, kNonFinite = 4, kNothingToSample = 8, kOutOfRange = 16, kInert = 32,
                   kScored = 64, kVerified = 128;
constexpr uint32_t kFault = kNonFinite | kNothingToSample | kOutOfRange;

// One token's place in a step, as staged.
struct Row {
    uint16_t slot, flags;
    uint32_t offset, token, target;
};
static_assert(sizeof(Row) == 16);

// A row of the current step, resolved against its slot. Not live: reads and writes nothing of a sequence, and what it
// leaves in activations is zero.
struct RowInfo {
    uint32_t live, slot, pos, token;
    uint32_t back;   // rows right before this one that hold the positions before it, of the same sequence
    uint32_t ahead;  // rows right after this one that hold the positions after it
    uint32_t group;  // first row of the sequence's rows
    uint32_t next;   // token after the row, or kNone where it is not known
};
static_assert(sizeof(RowInfo) == 32);

// ops/sample.rs says what they mean.
struct SamplerParams {
    uint64_t seed, top_p, min_p;
    float temperature, repetition, presence, frequency;
    uint32_t top_k, min_tokens, choice, flags;
};
static_assert(sizeof(SamplerParams) == 56);

// A sequence.
struct Slot {
    uint32_t active, generation, pos, token;
    uint32_t n_out, max_out, flags, n_stop;
    uint32_t fault;       // a row was out of range; told by the next head row
    uint32_t n_blocks;    // entries of the block table
    uint32_t logprobs;    // alternatives beside a drawn token's logprob, or kNone
    uint32_t prompt_top;  // alternatives beside a scored token's
    uint32_t n_bias;
    uint32_t reads_seen;  // a penalty reads `seen`
    uint32_t has_mask;    // a grammar mask holds for the next sampling
    uint32_t forced;      // 0, or 1: emit `forced_token`, or 2: end with `forced_fault`
    uint32_t forced_token, forced_fault;
    uint32_t stop_ids[kMaxStopIds];
    uint32_t drafts[kMaxDrafts];  // tokens that may be emitted next
    uint32_t n_drafts, pad;
    SamplerParams params;

    // Draft j, counted from 1, where the slot has one and may emit a token after it; otherwise kNone.
    __device__ __forceinline__ uint32_t draft(uint32_t j) const {
        return j >= 1 && j <= n_drafts && n_out + j < max_out ? drafts[j - 1] : kNone;
    }
    // Whether another draft could be of use.
    __device__ __forceinline__ bool takes_draft() const { return n_drafts < kMaxDrafts && n_out + n_drafts < max_out; }
};
static_assert(sizeof(Slot) == 216);

// What a head row leaves for the host.
struct Landed {
    uint32_t slot, generation, flags, n_tokens;
    uint32_t tokens[kMaxStepTokens];
    uint32_t n_top;
    float logprob;
    uint32_t top_ids[kMaxTop];
    float top_logprobs[kMaxTop];
};
static_assert(sizeof(Landed) == 204);

// `StepClocks` of step.rs.
struct Clocks {
    uint64_t start_ns, sample_ns, commit_ns, kv_bytes;
};

// What stages of one kind read of the KV cache; `KvRead` of count/kv.rs.
struct KvRead {
    uint64_t bytes;
    uint32_t ratio, window, together, above, most, unused;
};
struct KvReads {
    uint32_t n, unused;
    KvRead reads[8];
};
static_assert(sizeof(KvReads) == 264);

// What the device counts by itself.
struct Progress {
    uint64_t step;   // steps committed
    uint64_t begun;  // row tables resolved
    Clocks now;
};

// Where everything is. Passed by value to kernels that look at rows and slots.
struct StepView {
    const Row* rows;
    RowInfo* infos;
    uint32_t* heads;         // row of each head row
    uint32_t* counts;        // [0]: head rows, [1]: live rows
    Slot* slots;             // [n_slots]
    const uint32_t* blocks;  // [n_slots, max_blocks]
    uint64_t* writers;       // [n_blocks]: the step and the first row that writes to a block
    Landed* landed;          // [heads_max]: of the current step
    uint32_t* drawn;         // what each row drew, where that counts, otherwise kNone
    uint32_t* from;          // of each draft row, the row of the step that it continues
    const uint32_t* bias_ids;  // [n_slots, kMaxBias]
    const float* bias;         // [n_slots, kMaxBias]
    const uint32_t* masks;     // [n_slots, ceil(vocab / 32)]
    uint32_t* seen;            // [n_slots, vocab]: bit 31 in the prompt, below it the count in the output
    Progress* progress;
    // In host memory.
    Landed* ring;          // [ring_steps, heads_max]
    Clocks* ring_clocks;   // [ring_steps]
    uint64_t* head;        // steps landed
    uint32_t* fault_word;  // 0, or what a kernel found wrong
    uint32_t n_slots, max_blocks, n_blocks, vocab;
    uint32_t context, heads_max, ring_steps, part;
};
static_assert(sizeof(StepView) == 184);
constexpr uint32_t kMaxBias = 1024;
// Rows of a step; `MOST_ROWS` of state.rs.
constexpr uint32_t kRowBits = 16, kMostRows = 1u << kRowBits;

__device__ __forceinline__ uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// A kernel that finds its own index out of range says so, once, and does not write.
__device__ __forceinline__ void report_fault(const StepView& v, uint32_t word) {
    *reinterpret_cast<volatile uint32_t*>(v.fault_word) = word;
    __threadfence_system();
}

}  // namespace arc
