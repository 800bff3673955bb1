// Copies from global to shared memory that a thread asks for and later waits for (`cp.async`).
#pragma once

#include <cstdint>

namespace arc {

// 16 bytes, past the first cache. `to`: an address in shared memory as instructions take it, or a pointer.
__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16(void* to, const void* from) { copy16((uint32_t)__cvta_generic_to_shared(to), from); }

// 4 or 8 bytes, through the first cache: of what nobody has written since a kernel might have loaded it there.
template <int BYTES>
__device__ __forceinline__ void copy_few(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "n"(BYTES)
                 : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are on their way.
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Waits for all of this thread's copies.
__device__ __forceinline__ void copies_landed() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace arc
