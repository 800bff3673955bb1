// Programmatic dependent launch: a kernel may start while the one before it still runs.
#pragma once

#include <cstdint>

#ifdef ARC_TRACE
// Where kernels leave the times at which they begin, in the order in which they run: how many there are (u32), room for
// them (u32), then nanoseconds. 0: nowhere. See cuda/trace.rs.
extern "C" {
__constant__ unsigned long long arc_trace;
// Where blocks leave the times of their marks: how many blocks (u32), room for them (u32), then eight words a block.
__constant__ unsigned long long arc_marks;
}
#endif

namespace arc {

__device__ __forceinline__ void trace_begin() {
#ifdef ARC_TRACE
    if (arc_trace == 0 || (threadIdx.x | blockIdx.x | blockIdx.y | blockIdx.z) != 0) return;
    unsigned* head = reinterpret_cast<unsigned*>(arc_trace);
    const unsigned at = atomicAdd(head, 1u);
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (at < head[1]) reinterpret_cast<unsigned long long*>(arc_trace)[1 + at] = now;
#endif
}

// Whose times they are: the order of KINDS in cuda/trace.rs. `detail` tells launches of a kernel apart, 12 bits: slices of a
// product; of two products, whether a norm is between them (1), whether the block has F16 first (2), whether an index query comes
// between (4); of one row's experts, which warps: those that multiply, that which brings weights (1), that which sends units (2),
// those that take them (3); of a site, whether it takes what is sent (1); of a router's choice, whether it is in the experts'
// kernel (1); of a choice among keys, the block that picks (1), and whether they are many (2); of the attention, whether rows are
// chosen beside it (1).
enum MarkKind : unsigned { kMarkProduct, kMarkFollow, kMarkUp, kMarkExperts, kMarkDown, kMarkSite, kMarkRouter, kMarkChooser, kMarkAttend, kMarkRows, kMarkChoose, kMarkLayers };

// Times inside a block: one thread takes a place when the block begins (mark 1), and leaves a time at every mark. 2: the wait
// is over; 3 and further: inputs are there, then what the kernel has in order.
struct Marks {
#ifdef ARC_TRACE
    unsigned at = ~0u;  // word of `arc_marks`: one register
    __device__ __forceinline__ explicit Marks(MarkKind kind, unsigned detail = 0, unsigned thread = 0) {
        if (arc_marks == 0 || threadIdx.x != thread) return;
        unsigned* head = reinterpret_cast<unsigned*>(arc_marks);
        const unsigned place = atomicAdd(head, 1u) % head[1];
        at = 8 * (1 + place);
        unsigned sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        reinterpret_cast<unsigned long long*>(arc_marks)[at] = (unsigned long long)(kind << 12 | detail & 0xfffu) << 48 | (unsigned long long)sm << 32 | blockIdx.x | blockIdx.y << 16;
        mark(1);
    }
    __device__ __forceinline__ void mark(int i) const {
        if (at == ~0u) return;
        unsigned long long now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) :: "memory");
        reinterpret_cast<unsigned long long*>(arc_marks)[at + i] = now;
    }
    // In shared memory, where registers are few.
    __device__ __forceinline__ void keep(volatile unsigned* to) const {
        if (threadIdx.x == 0) *to = at;
    }
    static __device__ __forceinline__ void mark(const volatile unsigned* kept, int i) {
        if (threadIdx.x == 0) Marks{*kept}.mark(i);
    }

private:
    __device__ __forceinline__ explicit Marks(unsigned at) : at(at) {}
#else
    __device__ __forceinline__ explicit Marks(MarkKind, unsigned = 0, unsigned = 0) {}
    __device__ __forceinline__ void mark(int) const {}
    __device__ __forceinline__ void keep(volatile unsigned*) const {}
    static __device__ __forceinline__ void mark(const volatile unsigned*, int) {}
#endif
};

// Waits until every kernel before this one has ended and what they wrote can be seen. A thread calls it before it touches what
// another kernel wrote or may still read, unless that has the number of its launch beside it or ended for certain (latent.cu,
// "What runs ahead"; hc.cu, SENT); weights may be loaded before it.
__device__ __forceinline__ void pdl_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    trace_begin();
}

// Lets the next kernel start as soon as there is room for it. It still waits, in its own pdl_wait, for this one's end.
__device__ __forceinline__ void pdl_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// The same by one thread of the last block to do so, where the next kernel does not wait but takes values as they are sent: it
// finds their number at `to`, and what this thread knows of.
__device__ __forceinline__ void pdl_launch_as(uint32_t* to, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(tag) : "memory");
    __threadfence();
    pdl_launch();
}

// Counts arrivals of blocks: who sees one sees what was written before it.
__device__ __forceinline__ void arrive(uint32_t* count) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
// The same where nothing was written that anybody looks for.
__device__ __forceinline__ void arrive_empty(uint32_t* count) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
__device__ __forceinline__ uint32_t arrived(const uint32_t* count) {
    uint32_t n;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(count) : "memory");
    return n;
}

// Values that a kernel sends to the one behind it, or its blocks to one another, have the number of the launch beside them,
// written and read as one: who finds the number has the value, and there is no flag to wait for before it.
__device__ __forceinline__ void send_pair(uint64_t to, float v, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((uint64_t)tag << 32 | __float_as_uint(v)) : "memory");
}
// Where value `i` stands of those that lanes take four each: of 128, the first two of every lane, then the others, so that lanes
// have neighbouring pairs.
__device__ __forceinline__ uint32_t fours_place(uint32_t i) { return (i & ~127u) + (i & 2) * 32 + (i % 128 / 4) * 2 + (i & 1); }
// One of them, as it is now; `there` stays only if it has its number.
__device__ __forceinline__ float look_at_pair(uint64_t at, uint32_t tag, bool& there) {
    uint64_t got;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(got) : "l"(at) : "memory");
    there = there && got >> 32 == tag;
    return __uint_as_float((uint32_t)got);
}
__device__ __forceinline__ float2 look_at_pairs(uint64_t at, uint32_t tag, bool& there) {
    uint64_t a, b;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(at) : "memory");
    there = there && a >> 32 == tag && b >> 32 == tag;
    return make_float2(__uint_as_float((uint32_t)a), __uint_as_float((uint32_t)b));
}

}  // namespace arc
