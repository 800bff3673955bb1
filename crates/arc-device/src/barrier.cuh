// Barriers in shared memory that complete by turns, when as many have arrived as each waits for and the bytes have come in that they
// were told to expect (`mbarrier`): of copies, and of what other blocks of the cluster send.
#pragma once

#include "cluster.cuh"

namespace arc {

// compute-sanitizer's racecheck knows of a barrier that what a thread did is done when this thread arrives, and that the thread that
// waits comes behind it, but not what either of them had waited for. So for it all arrive, and wait, that otherwise one stands for; and
// who waits looks seldom, since the tool looks at each attempt.
constexpr uint32_t kWarpArrivals = kSanitized ? 32 : 1;

// The barrier of so many threads of the block, whole warps: where others leave early or do something else, which `__syncthreads` would
// wait for under compute-sanitizer.
template <uint32_t THREADS, uint32_t NUMBER = 1>
__device__ __forceinline__ void sync_threads() {
    static_assert(NUMBER != 0, "the barrier of __syncthreads");
    asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(THREADS) : "memory");
}

// One thread, and `barriers_made` behind the last of them.
__device__ __forceinline__ void barrier_init(uint64_t* bar, uint32_t arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(bar)), "r"(arrivals) : "memory");
}
// Copies, and other blocks, find them as they were made.
__device__ __forceinline__ void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_at(bar)) : "memory");
}
// The same of a thread that knows how many bytes are to come. None: the turn may end at once, so that everybody has to have seen the
// end of the one before.
__device__ __forceinline__ void expect(uint64_t* bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(bar)), "r"(bytes) : "memory");
}
// Who arrives for a warp, behind a `__syncwarp` that all it did is before: it counts as `kWarpArrivals`.
__device__ __forceinline__ bool arrives(uint32_t lane) { return kSanitized || lane == 0; }

// Waits for the end of a turn: `parity` is 0 for the first, 1 for the second, and so on. Who is behind by two waits for nothing. What
// came in with the turn can be read, whichever block of the cluster it is from. The answer may differ between lanes.
__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
#ifdef ARC_SANITIZE
        "nanosleep.u32 1000000;\n"
#endif
        "bra again;\n"
        "over:\n"
        "}\n" ::"r"(shared_at(bar)),
        "r"(parity)
        : "memory");
}

// Whether that turn has ended, now.
__device__ __forceinline__ bool barrier_passed(uint64_t* bar, uint32_t parity) {
    uint32_t passed;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(passed)
        : "r"(shared_at(bar)), "r"(parity)
        : "memory");
    return passed != 0;
}

}  // namespace arc
