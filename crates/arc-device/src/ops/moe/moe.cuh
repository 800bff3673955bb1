// Routed experts: the gated unit and the sorting of assignments of moe.rs.
#pragma once

#include "../../math.cuh"

namespace arc::moe {

// silu(min(gate, limit)) * clamp(up, -limit, limit); a NaN passes.
__device__ __forceinline__ float clamped_silu(float gate, float up, float limit) {
    const float g = gate > limit ? limit : gate;
    float u = up > limit ? limit : up;
    u = u < -limit ? -limit : u;
    return __fmul_rn(silu(g), u);
}

// `order` and `bounds` of a step of few assignments, by one block: each counts those before it. `ids`: [n] in shared
// memory on a 16-byte border, 0xffffffff where the row is not live and up to a multiple of four behind them.
__device__ __forceinline__ void assign_few(unsigned* order, unsigned* bounds, const unsigned* ids, int n, int experts) {
    const uint4* fours = reinterpret_cast<const uint4*>(ids);
    for (int i = threadIdx.x; i < n || i <= experts; i += blockDim.x) {
        const unsigned id = i < n ? ids[i] : 0xffffffffu;
        int place = 0, before = 0;
#pragma unroll 2
        for (int j = 0; j < n; j += 4) {
            const uint4 four = fours[j / 4];
            const unsigned others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                place += others[k] < id || (others[k] == id && j + k < i);
                before += others[k] < (unsigned)i;
            }
        }
        if (id != 0xffffffffu) order[place] = i;
        if (i <= experts) bounds[i] = before;
    }
}

}  // namespace arc::moe
