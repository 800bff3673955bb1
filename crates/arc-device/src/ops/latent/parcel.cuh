// What blocks of a cluster send one another, and what a block brings, by copies that count themselves.
#pragma once

#include "cluster.cuh"
#include "ops/matmul/tiles.cuh"

namespace arc {

// Whole lines from this block's shared memory to another's, whose `bar` counts them.
__device__ __forceinline__ void send_lines(uint32_t to, uint32_t from, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from),
                 "r"(bytes), "r"(bar)
                 : "memory");
}

// Whole lines from global memory to this block's shared memory.
__device__ __forceinline__ void bring_lines(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(bar)
                 : "memory");
}

// Two values to another block, whose `bar` counts them.
__device__ __forceinline__ void send2(uint32_t to, uint32_t bar, float x, float y) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(x), "f"(y),
                 "r"(bar)
                 : "memory");
}

}  // namespace arc
