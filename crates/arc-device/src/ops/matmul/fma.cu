// Products of float weights with many rows; fma.cuh says how.
#include "fma.cuh"

ARC_FMA(f32, arc::F32)
ARC_FMA(f16, arc::F16)
ARC_FMA(bf16, arc::BF16)
ARC_FMA(fp8, arc::FP8)
