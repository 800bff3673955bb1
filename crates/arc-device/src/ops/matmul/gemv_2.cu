// Products with few rows, by format; see gemv.cu.
#include "gemv.cuh"

ARC_GEMV_ALL(q2_k, arc::Q2_K)
ARC_GEMV_ALL(iq2_xxs, arc::IQ2_XXS)
ARC_GEMV_ALL(mxfp4, arc::MXFP4)
