// Products with few rows, by format; see gemv.cu.
#include "gemv.cuh"

ARC_GEMV_ALL(f32, arc::F32)
ARC_GEMV_ALL(f16, arc::F16)
ARC_GEMV_ALL(bf16, arc::BF16)
ARC_GEMV_ALL(fp8, arc::FP8)
