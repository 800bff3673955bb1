// Two products of one row in one launch: blocks before `split` have the first, the others the second. See gemv.cu.
#include "gemv.cuh"

extern "C" __global__ void __launch_bounds__(512, 1)
    arc_matmul_gemv_q8_0_and_f16(const __grid_constant__ arc::Product a, const __grid_constant__ arc::Product b, uint32_t split) {
    extern __shared__ __align__(128) uint8_t smem[];
    const arc::Prepare there{};
    if (blockIdx.x < split) {
        arc::Gemv<arc::Q8_0, 1>{a, there, smem, blockIdx.x, split}.run();
    } else {
        arc::Gemv<arc::F16, 1>{b, there, smem, blockIdx.x - split, gridDim.x - split}.run();
    }
}
