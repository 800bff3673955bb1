// latent_merge  what blocks apart left in `parts` (latent.cu) becomes one, a share of a head's values by eight lanes. Invariant.
#include "merge.cuh"
#include "ops/index/index.cuh"
#include "pdl.cuh"

namespace arc {

namespace {

constexpr uint32_t kThreads = 128, kHeadLanes = kThreads / kHeads;
// Splits whose sums are on their way while those before them are merged: two weights a lane.
constexpr uint32_t kAtOnce = 2 * kHeadLanes;

// Some splits of a head: the lane's four values of each, and of two of them maximum and sum.
struct Parts {
    float4 x[kAtOnce];
    float2 weight[2];

    // `of`: where the head's splits stand; `quad`: which four of a split's values.
    __device__ __forceinline__ void load(const LatentArgs& a, const float* of, uint32_t quad, uint32_t first, uint32_t splits) {
        const uint32_t lane = threadIdx.x % kHeadLanes;
        auto part = [&](uint32_t split) { return of + (size_t)min(split, splits - 1) * (a.dim + 2); };
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) weight[i] = *reinterpret_cast<const float2*>(part(first + kHeadLanes * i + lane) + a.dim);
#pragma unroll
        for (uint32_t s = 0; s < kAtOnce; ++s) {
            const float2* from = reinterpret_cast<const float2*>(part(first + s) + 4 * quad);
            x[s] = make_float4(from[0].x, from[0].y, from[1].x, from[1].y);
        }
    }
};

}  // namespace

// Grid: (shares of a head's values, of at most kHeadLanes fours; groups of 16 heads; rows).
extern "C" __global__ void __launch_bounds__(128) latent_merge(LatentArgs a, StepView view) {
    __shared__ float sink_of[kHeads];
    __shared__ __align__(16) float angles[kRopeDim];
    pdl_launch();
    const uint32_t r = blockIdx.z, first_head = blockIdx.y * kHeads, lane = threadIdx.x % kHeadLanes, head = threadIdx.x / kHeadLanes;
    const RowInfo info = info_early(view, r);
    const List list = list_of(a, r, info);
    const size_t at = ((size_t)r * a.heads + first_head) * a.dim;
    HeadConsts consts;
    consts.load(a, info);
    consts.store(angles, sink_of);
    __syncthreads();
    pdl_wait();
    // Those rows are complete.
    if (!info.live || (list.chosen != nullptr && list.chosen[0] == kIndexFault)) return;
    const uint32_t share = share_of(a.dim / 4, gridDim.x), splits = (list.n + split_len(a) - 1) / split_len(a);
    if (splits > a.most_splits) return;
    const float* of = a.parts + ((size_t)r * a.heads + min(first_head + head, a.heads - 1)) * a.most_splits * (a.dim + 2);
    const uint32_t quad = min(blockIdx.x * share + min(lane, share - 1), a.dim / 4 - 1);
    Merged<1> all;
    Parts parts;
    parts.load(a, of, quad, 0, splits);
#pragma unroll 1
    for (uint32_t first = 0; first < splits; first += kAtOnce) {
        const Parts now = parts;
        if (first + kAtOnce < splits) parts.load(a, of, quad, first + kAtOnce, splits);
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            // A lane finds out how its split joins those before, and tells the head's others.
            float before = all.m, keep, add;
#pragma unroll
            for (uint32_t s = 0; s < kHeadLanes; ++s) {
                const float other = __shfl_sync(~0u, now.weight[i].x, s, kHeadLanes);
                before = s < lane && other > before ? other : before;
                if (first + kHeadLanes * i + s < splits) all.m = other > all.m ? other : all.m;
            }
            join(before, now.weight[i].x, keep, add);
#pragma unroll
            for (uint32_t s = 0; s < kHeadLanes; ++s) {
                const float keeps = __shfl_sync(~0u, keep, s, kHeadLanes), adds = __shfl_sync(~0u, add, s, kHeadLanes);
                const float sum = __shfl_sync(~0u, now.weight[i].y, s, kHeadLanes);
                if (first + kHeadLanes * i + s >= splits) continue;
                all.l = joined(all.l, keeps, sum, adds);
                const float4 x[1] = {now.x[kHeadLanes * i + s]};
                join_items(all.y, keeps, x, adds);
            }
        }
    }
    leave_merged<kHeadLanes>(a, at, a.dim, share, finish(all.m, all.l, sink_of[head]), angles, all.y, 0);
}

}  // namespace arc
