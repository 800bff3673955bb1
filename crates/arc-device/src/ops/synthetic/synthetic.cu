// Rows of random weights in their stored format: the bytes of synthetic.rs. Load time only.
#include <cuda_fp16.h>

#include "../../pdl.cuh"
#include "../../rng.cuh"

using namespace arc;

namespace {

// A tensor's rows: counter = (index, first_row + row, tensor), key = seed.
struct Rows {
    unsigned seed_lo, seed_hi, tensor_lo, tensor_hi, first_row;

    __device__ __forceinline__ Philox at(unsigned index, unsigned row) const {
        return philox4x32(index, first_row + row, tensor_lo, tensor_hi, seed_lo, seed_hi);
    }
};

}  // namespace

// Four values a thread: word >> 8 times unit around mean. Grid: (groups of 256 x 4 values, rows).
extern "C" __global__ void __launch_bounds__(256)
    arc_synthetic_f32(float* out, unsigned seed_lo, unsigned seed_hi, unsigned tensor_lo, unsigned tensor_hi,
                      unsigned first_row, float mean, float unit, unsigned cols, unsigned rows) {
    pdl_wait();
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (4 * i >= cols) return;
    for (unsigned row = blockIdx.y; row < rows; row += gridDim.y) {
        const Philox random = Rows{seed_lo, seed_hi, tensor_lo, tensor_hi, first_row}.at(i, row);
#pragma unroll
        for (unsigned k = 0; k < 4; ++k) {
            if (4 * i + k >= cols) break;
            const float word = (float)((int)random.w[k] >> 8);
            out[(size_t)row * cols + 4 * i + k] = __fadd_rn(mean, __fmul_rn(word, unit));
        }
    }
}

// Eight values a thread. Grid: (groups of 256 x 8 values, rows).
extern "C" __global__ void __launch_bounds__(256)
    arc_synthetic_f16(unsigned short* out, unsigned seed_lo, unsigned seed_hi, unsigned tensor_lo, unsigned tensor_hi,
                      unsigned first_row, float mean, float unit, unsigned cols, unsigned rows) {
    pdl_wait();
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (8 * i >= cols) return;
    for (unsigned row = blockIdx.y; row < rows; row += gridDim.y) {
        const Philox random = Rows{seed_lo, seed_hi, tensor_lo, tensor_hi, first_row}.at(i, row);
#pragma unroll
        for (unsigned k = 0; k < 8; ++k) {
            if (8 * i + k >= cols) break;
            const float word = (float)(short)(random.w[k / 2] >> (16 * (k % 2)));
            const __half value = __float2half_rn(__fadd_rn(mean, __fmul_rn(word, unit)));
            out[(size_t)row * cols + 8 * i + k] = __half_as_ushort(value);
        }
    }
}

namespace {

// A block a thread: WORDS random words, of which the first BYTES bytes are the block, and the byte behind them makes its
// scale. `least`: F16 bits of the least scale. Threads of a block of the grid write through shared memory, since a block
// of bytes is no multiple of anything.
template <int BYTES, bool Q2K>
__device__ __forceinline__ void blocks(unsigned char* out, Rows rows_of, unsigned least, unsigned blocks_of_row,
                                       unsigned long long n_blocks) {
    constexpr int kThreads = 128, kCalls = (BYTES + 16) / 16;
    __shared__ __align__(16) unsigned short halves[kThreads * BYTES / 2];
    static_assert(BYTES % 2 == 0 && kThreads * BYTES % 16 == 0);
    pdl_wait();
    for (unsigned long long first = (unsigned long long)blockIdx.x * kThreads; first < n_blocks;
         first += (unsigned long long)gridDim.x * kThreads) {
        const unsigned long long block = first + threadIdx.x;
        unsigned short* mine = halves + threadIdx.x * (BYTES / 2);
        if (block < n_blocks) {
            const unsigned row = (unsigned)(block / blocks_of_row), at = (unsigned)(block % blocks_of_row) * kCalls;
            unsigned scale = least;
#pragma unroll
            for (int call = 0; call < kCalls; ++call) {
                const Philox random = rows_of.at(at + call, row);
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    unsigned word = random.w[w];
                    const int byte = 16 * call + 4 * w;
                    if (byte <= BYTES && BYTES < byte + 4) scale += word >> (8 * (BYTES - byte)) & 127u;
                    // Sub-scales of 8 ..= 15, minimums alike.
                    if (Q2K && byte < 16) word = (word & 0x07070707u | 0x08080808u) * 0x11u;
                    if (byte < BYTES) mine[byte / 2] = (unsigned short)word;
                    if (byte + 2 < BYTES) mine[byte / 2 + 1] = (unsigned short)(word >> 16);
                }
            }
            mine[Q2K ? 40 : 0] = (unsigned short)scale;
            if (Q2K) {
                const float d = __half2float(__ushort_as_half((unsigned short)scale));
                mine[41] = __half_as_ushort(__float2half_rn(__fmul_rn(1.5f, d)));
            }
        }
        __syncthreads();
        const unsigned bytes = (unsigned)min((unsigned long long)kThreads, n_blocks - first) * BYTES;
        uint4* to = reinterpret_cast<uint4*>(out + first * BYTES);
        for (unsigned i = threadIdx.x; i < bytes / 16; i += kThreads) to[i] = reinterpret_cast<uint4*>(halves)[i];
        for (unsigned i = bytes / 16 * 8 + threadIdx.x; i < bytes / 2; i += kThreads)
            reinterpret_cast<unsigned short*>(to)[i] = halves[i];
        __syncthreads();
    }
}

}  // namespace

#define ARC_SYNTHETIC_BLOCKS(NAME, BYTES, Q2K)                                                                        \
    extern "C" __global__ void __launch_bounds__(128)                                                                 \
        NAME(unsigned char* out, unsigned seed_lo, unsigned seed_hi, unsigned tensor_lo, unsigned tensor_hi,          \
             unsigned first_row, unsigned least, unsigned blocks_of_row, unsigned rows) {                             \
        blocks<BYTES, Q2K>(out, Rows{seed_lo, seed_hi, tensor_lo, tensor_hi, first_row}, least, blocks_of_row,        \
                           (unsigned long long)blocks_of_row * rows);                                                 \
    }
ARC_SYNTHETIC_BLOCKS(arc_synthetic_q8_0, 34, false)
ARC_SYNTHETIC_BLOCKS(arc_synthetic_iq2_xxs, 66, false)
ARC_SYNTHETIC_BLOCKS(arc_synthetic_q2_k, 84, true)
