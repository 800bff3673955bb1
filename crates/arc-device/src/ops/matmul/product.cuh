// What products over few and over many rows share: what becomes of an output.
#pragma once

#include "../../math.cuh"
#include "layout.cuh"

namespace arc {

// What a gate and an up value make: ops/glu.rs, ops/moe.rs.
__device__ __forceinline__ float gated(uint32_t epilogue, float gate, float up, float limit) {
    if (epilogue == kThenSilu) return __fmul_rn(silu(gate), up);
    if (epilogue == kThenGelu) return __fmul_rn(gelu_tanh(gate), up);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return __fmul_rn(silu(gate), up);
}

// Output n of output row `row`: `row_idx` is its row or assignment among the inputs. Returns what it left.
__device__ __forceinline__ float put(const Product& p, uint32_t row, uint32_t row_idx, uint32_t n, float v, float up) {
    float* out = reinterpret_cast<float*>(p.out) + (size_t)row * p.out_stride + n;
    const float* aux = reinterpret_cast<const float*>(p.aux);
    switch (p.epilogue) {
        case kThenStore: break;
        case kThenBias: v = __fadd_rn(v, aux[n]); break;
        case kThenAdd: v = __fadd_rn(*out, v); break;
        case kThenSoftcap: v = __fmul_rn(p.scalar, tanh(__fdiv_rn(v, p.scalar))); break;
        case kThenRouted: {
            const uint32_t* infos = reinterpret_cast<const uint32_t*>(p.infos);
            float sum = 0.0f;
            if (infos[8 * row] != 0) {
                const float* from = aux + (size_t)row * p.chosen * p.out_stride + n;
                for (uint32_t i = 0; i < p.chosen; ++i) sum = __fadd_rn(sum, from[(size_t)i * p.out_stride]);
            }
            v = __fadd_rn(sum, v);
            break;
        }
        default: {
            v = gated(p.epilogue, v, up, p.scalar);
            if (p.bounds != 0 && p.epilogue == kThenClampedSilu) {
                v = __fmul_rn(v, aux[reinterpret_cast<const uint32_t*>(p.order)[row_idx]]);
            }
        }
    }
    *out = v;
    return v;
}

}  // namespace arc
