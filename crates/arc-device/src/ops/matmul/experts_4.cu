// Routed experts over few rows, by format; see experts.cuh.
#include "experts.cuh"

ARC_EXPERTS(q8_0, arc::Q8_0)
ARC_EXPERTS(q4_0, arc::Q4_0)
ARC_EXPERTS(q4_1, arc::Q4_1)
ARC_EXPERTS(q5_0, arc::Q5_0)
ARC_EXPERTS(q5_1, arc::Q5_1)
