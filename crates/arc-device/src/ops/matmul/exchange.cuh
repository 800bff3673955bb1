// Values from block to block of one launch, all of whose blocks are resident, or of one kernel and the one behind it.
#pragma once

#include "tiles.cuh"

namespace arc {

// Three words with the number of the launch beside them, as `send_pair`.
__device__ __forceinline__ void send_three(uint64_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t tag) {
    asm volatile("{\n.reg .b128 v;\nmov.b128 v, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], v;\n}" ::"l"(to),
                 "l"((uint64_t)y << 32 | x), "l"((uint64_t)tag << 32 | z)
                 : "memory");
}
// Three words, once their number is there.
__device__ __forceinline__ uint4 look(uint64_t at) {
    uint64_t low, high;
    asm volatile("{\n.reg .b128 v;\nld.relaxed.gpu.global.b128 v, [%2];\nmov.b128 {%0, %1}, v;\n}"
                 : "=l"(low), "=l"(high)
                 : "l"(at)
                 : "memory");
    return make_uint4((uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32));
}

// 32 values of an index row, one a lane, as they are stored (index_code of quant.cuh), to all blocks: three words of codes, then the
// fourth and the scale.
__device__ __forceinline__ void send_index_block(uint32_t code, uint32_t scale, uint64_t to, uint32_t tag) {
    const uint32_t lane = threadIdx.x & 31, rest = lane & 1;
    uint32_t word = code << 8 * (lane & 3) + 4 * (lane >> 4);
    word |= __shfl_xor_sync(~0u, word, 1);
    word |= __shfl_xor_sync(~0u, word, 2);
    word |= __shfl_xor_sync(~0u, word, 16);
    const uint32_t x = __shfl_sync(~0u, word, 12 * rest), y = __shfl_sync(~0u, word, 4), z = __shfl_sync(~0u, word, 8);
    if (lane < 2) send_three(to + 16 * rest, x, rest == 0 ? y : scale, rest == 0 ? z : 0, tag);
}

// Blocks of 32 values as int8, of which every eight lanes have one, where `sends`: three words, `step` bytes from one to the next, of
// codes and then the scale.
__device__ __forceinline__ void send_block(const Quantised& made, bool sends, uint64_t to, uint32_t step, uint32_t tag) {
    const uint32_t lane = threadIdx.x & 7, l = min(lane, 2u);
    const uint32_t x = __shfl_sync(~0u, made.q, 3 * l, 8), y = __shfl_sync(~0u, made.q, 3 * l + 1, 8);
    const uint32_t z = __shfl_sync(~0u, made.q, 3 * l + 2, 8);
    if (sends && lane < 3) send_three(to + step * lane, x, y, lane == 2 ? __float_as_uint(made.d) : z, tag);
}
// 32 values, one a lane, to all blocks.
__device__ __forceinline__ void send_codes_apart(float v, uint64_t to, uint32_t step, uint32_t tag) {
    const uint32_t lane = threadIdx.x & 31;
    float four[1][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[0][i] = __shfl_sync(~0u, v, 4 * (lane & 7) + i);
    Quantised made[1];
    quantise(four, made);
    send_block(made[0], lane < 8, to, step, tag);
}
// Block `at` of the row.
__device__ __forceinline__ void send_codes(float v, uint64_t to, size_t at, uint32_t tag) { send_codes_apart(v, to + 48 * at, 16, tag); }

}  // namespace arc
