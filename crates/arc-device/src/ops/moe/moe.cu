// Sorts a step's assignments by expert, then by row: the bits of moe.rs.
#include "../../pdl.cuh"
#include "../../step.cuh"
#include "../router/router.cuh"
#include "moe.cuh"

using namespace arc;

namespace {

constexpr int kAssignWarps = 32;

// Exclusive sum over the block's 1,024 threads. `warp_sums`: [32].
__device__ __forceinline__ unsigned exclusive_sum(unsigned value, unsigned* warp_sums) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    unsigned sum = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const unsigned below = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += below;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        unsigned total = warp_sums[lane];
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const unsigned below = __shfl_up_sync(0xffffffffu, total, d);
            if (lane >= d) total += below;
        }
        warp_sums[lane] = total;
    }
    __syncthreads();
    return sum - value + (warp ? warp_sums[warp - 1] : 0);
}

}  // namespace

// One block of 1,024. A warp has a run of consecutive assignments: it counts them, finds where each expert's begin for
// it, and places them 32 at a time, so that equal experts stay in order. Dynamic shared memory: [32][experts] u32.
extern "C" __global__ void __launch_bounds__(32 * kAssignWarps)
    arc_moe_assign(unsigned* order, unsigned* bounds, const unsigned* ids, const RowInfo* infos, unsigned rows,
                   unsigned chosen, unsigned experts) {
    extern __shared__ unsigned cursor[];
    __shared__ unsigned warp_sums[32];
    pdl_launch();
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    for (unsigned i = t; i < kAssignWarps * experts; i += blockDim.x) cursor[i] = 0;
    __syncthreads();
    pdl_wait();
    const unsigned n = rows * chosen, run = (n + blockDim.x - 1) / blockDim.x * 32, first = warp * run;
    unsigned* mine = cursor + warp * experts;
    for (unsigned at = first; at < min(first + run, n); at += 32) {
        const unsigned i = at + lane;
        const bool counts = i < n && infos[i / chosen].live;
        if (counts) atomicAdd(&mine[ids[i]], 1u);
    }
    __syncthreads();
    // Thread e: how many of its assignments earlier warps have, and all.
    unsigned total = 0;
    if (t < (int)experts) {
        for (int w = 0; w < kAssignWarps; ++w) {
            const unsigned count = cursor[w * experts + t];
            cursor[w * experts + t] = total;
            total += count;
        }
    }
    const unsigned begin = exclusive_sum(total, warp_sums);
    if (t < (int)experts) {
        for (int w = 0; w < kAssignWarps; ++w) cursor[w * experts + t] += begin;
        bounds[t] = begin;
        if (t == (int)experts - 1) bounds[experts] = begin + total;
    }
    __syncthreads();
    for (unsigned at = first; at < min(first + run, n); at += 32) {
        const unsigned i = at + lane;
        const bool counts = i < n && infos[i / chosen].live;
        const unsigned id = counts ? ids[i] : 0xffffffffu;
        const unsigned same = __match_any_sync(0xffffffffu, id);
        const unsigned before = same & ((1u << lane) - 1);
        if (counts) order[mine[id] + __popc(before)] = i;
        __syncwarp();
        if (counts && before == 0) mine[id] += __popc(same);
        __syncwarp();
    }
}
