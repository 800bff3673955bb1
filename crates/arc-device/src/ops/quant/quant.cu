// Conversions by themselves, for conformance: what the fused stages compose.
#include "ops/quant/quant.cuh"
#include "pdl.cuh"

namespace arc {

// out[i] = E4M3 of the f32 whose bits are first + i, and visited += 1 for each. `mutant`: ties away from zero.
extern "C" __global__ void __launch_bounds__(256)
    quant_e4m3_sweep(uint8_t* out, uint32_t* visited, uint32_t first, uint32_t n, uint32_t mutant) {
    pdl_launch();
    pdl_wait();
    uint32_t seen = 0;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const uint32_t bits = first + i;
        const float x = __uint_as_float(bits);
        uint32_t code = e4m3(x);
        if (mutant && (bits & 0x7fffffff) <= 0x7f800000) {
            const uint32_t magnitude = bits & 0x7fffffff;
            if (magnitude >= 121u << 23) {
                code = (bits >> 24 & 0x80) | min((magnitude - (120u << 23) + (1u << 19)) >> 20, 0x7eu);
            }
        }
        out[i] = code;
        seen += 1;
    }
    seen = __reduce_add_sync(0xffffffffu, seen);
    if ((threadIdx.x & 31) == 0) atomicAdd(visited, seen);
}

}  // namespace arc
