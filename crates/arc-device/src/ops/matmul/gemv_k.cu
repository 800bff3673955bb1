// Products with few rows, by format; see gemv.cu.
#include "gemv.cuh"

ARC_GEMV_ALL(q3_k, arc::Q3_K)
ARC_GEMV_ALL(q4_k, arc::Q4_K)
ARC_GEMV_ALL(q5_k, arc::Q5_K)
ARC_GEMV_ALL(q6_k, arc::Q6_K)
