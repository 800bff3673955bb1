// Routed experts over few rows, by format; see experts.cuh.
#include "experts.cuh"

ARC_EXPERTS(q2_k, arc::Q2_K)
ARC_EXPERTS(iq2_xxs, arc::IQ2_XXS)
ARC_EXPERTS(mxfp4, arc::MXFP4)
