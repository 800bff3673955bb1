// Products with many rows, by format; see mma.cu.
#include "mma.cuh"

ARC_MMA_LIGHT(q4_0, arc::Q4_0)
ARC_MMA_HEAVY(q4_1, arc::Q4_1, 3)
ARC_MMA_LIGHT(q5_0, arc::Q5_0)
ARC_MMA_HEAVY(q5_1, arc::Q5_1, 3)
