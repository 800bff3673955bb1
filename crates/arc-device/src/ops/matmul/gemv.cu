// Products with few rows, by format; gemv.cuh says how. Kernels of 1, 2, 4 and 8 rows.
#include "gemv.cuh"

ARC_GEMV_ALL(q8_0, arc::Q8_0)
