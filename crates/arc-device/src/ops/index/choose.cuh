// What one row's choice beside a product shares: what others send it, and how it looks for that.
#pragma once

#include "score.cuh"

namespace arc::indexer {

// What a choice is told of what others send; `Sent` of index/cuda.rs.
struct Sent {
    const uint8_t* packed;    // [kHeads, kIndexRowBytes]: the index query
    const uint64_t* weights;  // [kHeads], with the number of the choice
    uint64_t* scores;         // [most], the same
    uint32_t* number;         // of the choice before
    uint32_t *heads, *left;   // heads that are there, and blocks of latent_rows that have left what they have to
    uint32_t blocks, most;    // of latent_rows; rows that may be visible
    float factor;             // what the projected weights are multiplied by
};
static_assert(sizeof(Sent) == 64);

// A score and the number of the choice, written and read as one: who finds the number has the score.
__device__ __forceinline__ void send_score(uint64_t* to, uint32_t score, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((uint64_t)tag << 32 | score) : "memory");
}
__device__ __forceinline__ uint64_t look_for(const uint64_t* at) {
    uint64_t x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
}

__device__ __forceinline__ void await(const uint32_t* count, uint32_t n) {
    while (arrived(count) < n) {}
}

// A step that leaves nothing to choose, or whose context class was too small: by one block, which ends behind the product.
__device__ __forceinline__ void choose_nothing(const Sent& in, uint32_t visible, uint32_t tag, const StepView& view) {
    pdl_wait();
    if (threadIdx.x == 0) {
        *in.heads = *in.left = 0;
        if (visible > in.most) report_fault(view, 0x69780001);
        // The next choice has another number than what was sent for this one.
        *in.number = tag;
    }
}

// Ends the block that has picked: the attention may begin.
__device__ __forceinline__ void end_choice(const Sent& in, uint32_t tag) {
    if (threadIdx.x == 0) {
        await(in.left, in.blocks);
        // Whoever had something to send has read the number, and has found all heads.
        *in.number = tag, *in.heads = *in.left = 0;
    }
    __syncthreads();
    pdl_launch();
    pdl_wait();
}

}  // namespace arc::indexer
