// Experts over many rows, where an expert has few of them, by format; grouped.cuh says how.
#include "grouped.cuh"

// As many warps as registers allow.
ARC_GROUPED(iq2_xxs, arc::IQ2_XXS, 16, 20, 4)
ARC_GROUPED(iq2_xxs, arc::IQ2_XXS, 32, 16, 2)
ARC_GROUPED(q2_k, arc::Q2_K, 16, 20, 4)
ARC_GROUPED(q2_k, arc::Q2_K, 32, 16, 4)
