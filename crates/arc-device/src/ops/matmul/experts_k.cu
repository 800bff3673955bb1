// Routed experts over few rows, by format; see experts.cuh.
#include "experts.cuh"

ARC_EXPERTS(q3_k, arc::Q3_K)
ARC_EXPERTS(q4_k, arc::Q4_K)
ARC_EXPERTS(q5_k, arc::Q5_K)
ARC_EXPERTS(q6_k, arc::Q6_K)
