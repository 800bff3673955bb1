// Philox4x32-10 and the draw word of one token: the CUDA twin of rng.rs, line for line.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

namespace arc {

struct Philox {
    unsigned w[4];
};

// Four random words from a 128-bit counter and a 64-bit key.
__device__ __forceinline__ Philox philox4x32(unsigned c0, unsigned c1, unsigned c2, unsigned c3, unsigned k0,
                                             unsigned k1) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned p0_hi = __umulhi(0xD2511F53u, c0), p0_lo = 0xD2511F53u * c0;
        const unsigned p1_hi = __umulhi(0xCD9E8D57u, c2), p1_lo = 0xCD9E8D57u * c2;
        const unsigned n0 = p1_hi ^ c1 ^ k0;
        const unsigned n2 = p0_hi ^ c3 ^ k1;
        c1 = p1_lo;
        c3 = p0_lo;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return Philox{{c0, c1, c2, c3}};
}

// The random word of one drawn token: key = seed, counter = (draw_index, choice, 0, 0).
__device__ __forceinline__ unsigned long long draw_word(unsigned long long seed, unsigned draw_index, unsigned choice) {
    const Philox p = philox4x32(draw_index, choice, 0u, 0u, (unsigned)seed, (unsigned)(seed >> 32));
    return ((unsigned long long)p.w[1] << 32) | p.w[0];
}

}  // namespace arc
