// Products with few rows, by format; see gemv.cu.
#include "gemv.cuh"

ARC_GEMV_ALL(q4_0, arc::Q4_0)
ARC_GEMV_ALL(q4_1, arc::Q4_1)
ARC_GEMV_ALL(q5_0, arc::Q5_0)
ARC_GEMV_ALL(q5_1, arc::Q5_1)
