// Draws or scores the head rows of a step: one cluster of 1 to 8 blocks a row. What a row wants is read from its slot, so
// rows of one launch may differ in everything. A row that verifies draws as if the drafts before it had been emitted.
// sample.cuh says how.
//
// sample_rows: grid heads * cluster, 384 threads, dynamic shared memory kRunAt + 4 * run bytes; 80 registers, two blocks a
// multiprocessor up to 16,384 ids a block (nvcc 13.0, sm_90a).
#include "../../pdl.cuh"
#include "sample.cuh"

using namespace arc;
using namespace arc::sampler;

namespace {

// `run`: ids of a block, a multiple of kTile, at least vocab / cluster. `logits`: [heads, vocab]. `stamp`: note the time.
template <bool MUTABLE>
__device__ __forceinline__ void sample_row(const StepView& v, const float* logits, uint32_t run, uint32_t stamp, uint32_t mutant) {
    pdl_launch();
    // Blocks write to one another.
    cluster_arrive_relaxed();
    cluster_wait();
    pdl_wait();
    if (stamp && blockIdx.x == 0 && threadIdx.x == 0) v.progress->now.sample_ns = now_ns();
    const uint32_t h = blockIdx.x / cluster_size();
    if (h >= v.counts[0]) return;
    const uint32_t r = v.heads[h];
    const Row row = v.rows[r];
    const RowInfo info = v.infos[r];
    const Slot& slot = v.slots[info.slot];
    const uint32_t nothing = slot.fault != 0 && slot.active ? slot.fault : info.live ? 0 : kInert;
    const uint32_t verified = row.flags & kRowVerify ? kVerified : 0;
    Landed& out = v.landed[h];
    if (cluster_rank() == 0 && threadIdx.x == 0) {
        out.slot = row.slot;
        out.generation = slot.generation;
        for (uint32_t i = 1; i < kMaxStepTokens; ++i) out.tokens[i] = 0;
        if (nothing != 0) {
            out.flags = nothing | verified;
            out.n_tokens = out.tokens[0] = out.n_top = 0;
            out.logprob = ARC_NAN;
        }
    }
    if (nothing != 0) return;
    Job job;
    job.logits = logits + size_t(h) * v.vocab;
    job.slot = &slot;
    job.bias_ids = v.bias_ids + size_t(info.slot) * kMaxBias;
    job.bias = v.bias + size_t(info.slot) * kMaxBias;
    job.mask = slot.has_mask ? v.masks + size_t(info.slot) * ((v.vocab + 31) / 32) : nullptr;
    job.seen = v.seen + size_t(info.slot) * v.vocab;
    job.drafts = slot.drafts;
    job.n_drafts = verified ? min(row.offset, kMaxDrafts) : 0;
    job.draw_index = slot.n_out + job.n_drafts;
    job.target = row.target;
    job.score = row.flags & kRowScore;
    job.sample = row.flags & kRowDraws;
    job.flags = job.score ? kScored : verified;
    job.out = &out;
    Block<MUTABLE>(run, v.vocab, mutant).run(job);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sample_rows(StepView v, const float* logits, uint32_t run, uint32_t stamp) {
    sample_row<false>(v, logits, run, stamp, kRight);
}

// The same with a deliberate mistake, for the test that must catch it.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample_rows_wrong(StepView v, const float* logits, uint32_t run, uint32_t mutant) {
    sample_row<true>(v, logits, run, 1, mutant);
}
