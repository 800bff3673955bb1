// Two products of few rows in one launch: blocks before `split` have the first, the others the second. See gemv.cu.
#include "gemv.cuh"

// So many warps have large tiles at most, and more registers than those of small ones: TWO_THREADS of matmul/cuda.rs.
#define ARC_GEMV_TWO(ROWS)                                                                                       \
    extern "C" __global__ void __launch_bounds__(384, 1) arc_matmul_gemv_q8_0_and_f16_##ROWS(                    \
        const __grid_constant__ arc::Product a, const __grid_constant__ arc::Product b, uint32_t split) {        \
        extern __shared__ __align__(128) uint8_t smem[];                                                         \
        const arc::Prepare there{};                                                                              \
        if (blockIdx.x < split) {                                                                                \
            arc::Gemv<arc::Q8_0, ROWS>{a, there, smem, blockIdx.x, split}.run();                                 \
        } else {                                                                                                 \
            arc::Gemv<arc::F16, ROWS>{b, there, smem, blockIdx.x - split, gridDim.x - split}.run();              \
        }                                                                                                        \
    }
ARC_GEMV_TWO(1)
ARC_GEMV_TWO(2)
ARC_GEMV_TWO(4)
ARC_GEMV_TWO(8)
