// Products with many rows, by format; mma.cuh says how.
#include "mma.cuh"

ARC_MMA_LIGHT(q8_0, arc::Q8_0)
// Its table of patterns is 32 KiB a block.
ARC_MMA(iq2_xxs, arc::IQ2_XXS, 8, 1, 32, 2, 2, 32, 32)
ARC_MMA_SPLIT(iq2_xxs, arc::IQ2_XXS)
ARC_MMA_HEAVY(q2_k, arc::Q2_K, 3)
ARC_MMA_HEAVY(mxfp4, arc::MXFP4, 3)
