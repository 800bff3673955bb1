// Blocks of a cluster and each other's shared memory.
#pragma once

#include <cstdint>

namespace arc {

// An address in shared memory as instructions take it.
__device__ __forceinline__ uint32_t shared_at(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Blocks of the cluster.
__device__ __forceinline__ uint32_t cluster_size() {
    uint32_t n;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
    return n;
}

// For compute-sanitizer, which does not see all that orders memory (barrier.cuh).
#ifdef ARC_SANITIZE
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// The two halves of a barrier of all threads of the cluster. Relaxed: for those who have written nothing that others read. Blocks
// begin together, but not at once: a block that writes to another has passed such a barrier, and so knows that the other is there.
// Sanitized, the first half is all of it: racecheck lets nobody go on where threads do something else in between, or leave.
__device__ __forceinline__ void cluster_await() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    if (kSanitized) cluster_await();
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    if (kSanitized) cluster_await();
}
__device__ __forceinline__ void cluster_wait() {
    if (!kSanitized) cluster_await();
}
// Orders shared memory of the whole cluster.
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// An address of this block's shared memory as that of the same place in another block of the cluster.
__device__ __forceinline__ uint32_t in_block(uint32_t at, uint32_t block) {
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(block));
    return at;
}
__device__ __forceinline__ uint32_t in_block(const void* at, uint32_t block) { return in_block(shared_at(at), block); }

}  // namespace arc
