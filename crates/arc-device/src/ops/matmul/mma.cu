// Products with many rows, by format; mma.cuh says how.
#include "mma.cuh"

ARC_MMA_LIGHT(q8_0, arc::Q8_0)
ARC_MMA_HEAVY(iq2_xxs, arc::IQ2_XXS)
ARC_MMA_HEAVY(q2_k, arc::Q2_K)
ARC_MMA_HEAVY(mxfp4, arc::MXFP4)
