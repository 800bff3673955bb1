// Products with many rows, by format; see mma.cu.
#include "mma.cuh"

ARC_MMA_HEAVY(q3_k, arc::Q3_K, 3)
ARC_MMA_HEAVY(q4_k, arc::Q4_K, 3)
ARC_MMA_HEAVY(q5_k, arc::Q5_K, 3)
ARC_MMA_HEAVY(q6_k, arc::Q6_K, 3)
