// Inputs of products, rows of a table, and the norm behind a product.
//
// arc_matmul_prepare: a block a row, 256 or 512 threads.
// arc_matmul_embed: a block a row, a thread 32 values.
// arc_matmul_norm_add: a block a row, 256 threads.
#include "../../pdl.cuh"
#include "decode.cuh"
#include "iq2.cuh"
#include "quantise.cuh"

namespace arc {

// Writes the values of one block.
struct Values {
    uint32_t f;
    int wanted;
    float* out;
    float scale;
    __device__ __forceinline__ void put(int l, float d, float q, float m, bool min) const {
        const float product = __fmul_rn(d, q);
        const float v = min ? __fadd_rn(product, m) : product;
        out[l] = scale != 1.0f ? __fmul_rn(v, scale) : v;
    }
    template <typename Scale>
    __device__ __forceinline__ void all(const uint32_t (&code)[8], Scale scale_of) const {
#pragma unroll
        for (int l = 0; l < 32; ++l) {
            const int byte = (int)(code[l / 4] >> (8 * (l % 4))) & 255;
            const bool is_signed = f == Q8_0 || f == IQ2_XXS || f == MXFP4;
            const int q = is_signed ? (int)(int8_t)byte : byte - code_offset(f);
            scale_of(l, (float)q);
        }
    }
    __device__ __forceinline__ void block(int b, const uint32_t (&code)[8], float d, float m) {
        if (b == wanted) all(code, [&](int l, float q) { put(l, d, q, m, has_min(f)); });
    }
    __device__ __forceinline__ void halves(int b, const uint32_t (&code)[8], float d, int sc0, int sc1, float m,
                                           uint32_t mins) {
        if (b != wanted) return;
        all(code, [&](int l, float q) {
            const float min = (float)((mins >> (l < 16 ? 0 : 8)) & 255u);
            put(l, __fmul_rn(d, (float)(l < 16 ? sc0 : sc1)), q, __fmul_rn(m, min), has_min(f));
        });
    }
};

template <uint32_t F>
__device__ __noinline__ void embed_block(const uint8_t* tile, int lane, int blocks, int b, const uint32_t* patterns, float* out,
                                         float scale) {
    Values values{F, b, out, scale};
    if (unit_len(F) == 32 && blocks != 8) {
        each_block<F, false, 1>(tile, lane, blocks, patterns, values);
    } else {
        each_block<F, true, 1>(tile, lane, 8, patterns, values);
    }
}

__device__ __forceinline__ float float_at(uint32_t f, const uint8_t* tile, int lane, int cols, int k) {
    if (f == FP8) {
        const uint8_t* unit = tile + k / 128 * (kLanes * 129);
        const uint32_t code = unit[k % 128 / 16 * 512 + 16 * lane + k % 16];
        return __fmul_rn(e4m3x2(code).x, e8m0(unit[8 * 512 + lane]));
    }
    const int len = unit_len(f), size = f == F32 ? 4 : 2, units = cols / len;
    const uint8_t* at = k < units * len ? tile + k / len * 512 + 16 * lane + k % len * size
                                        : tile + units * 512 + ((k - units * len) * kLanes + lane) * size;
    if (f == F32) return __uint_as_float(load4(at));
    return halves(f, *reinterpret_cast<const unsigned short*>(at)).x;
}

// Columns k .. k + n (inside 32 that begin at a multiple of 32) of row `row` of the matrix.
__device__ void decode_some(const Seg* segs, uint32_t n_segs, const Cut& cut, uint32_t row, uint32_t k, uint32_t n, float scale,
                            const uint32_t* patterns, float* out) {
    uint32_t seg = 0;
    while (seg + 1 < n_segs && row >= segs[seg + 1].first_row) ++seg;
    row -= segs[seg].first_row;
    const uint32_t f = segs[seg].format, slice = k / kSlice, t = slice >> cut.log_c, wide = cut.group_rows();
    const uint8_t* tile = reinterpret_cast<const uint8_t*>(segs[seg].base) + (size_t)(row / wide) * cut.group_bytes(f) +
                          cut.tile_at(f, t);
    const int lane = (int)(row % wide + (slice & (cut.c() - 1)) * wide);
    const int cols = cut.tail() != 0 && slice + 1 == cut.slices ? (int)cut.tail() : kSlice;
    const int b = (int)(k % kSlice) / 32;
    switch (f) {
        case Q8_0: embed_block<Q8_0>(tile, lane, cols / 32, b, patterns, out, scale); break;
        case Q4_0: embed_block<Q4_0>(tile, lane, cols / 32, b, patterns, out, scale); break;
        case Q4_1: embed_block<Q4_1>(tile, lane, cols / 32, b, patterns, out, scale); break;
        case Q5_0: embed_block<Q5_0>(tile, lane, cols / 32, b, patterns, out, scale); break;
        case Q5_1: embed_block<Q5_1>(tile, lane, cols / 32, b, patterns, out, scale); break;
        case Q2_K: embed_block<Q2_K>(tile, lane, 8, b, patterns, out, scale); break;
        case Q3_K: embed_block<Q3_K>(tile, lane, 8, b, patterns, out, scale); break;
        case Q4_K: embed_block<Q4_K>(tile, lane, 8, b, patterns, out, scale); break;
        case Q5_K: embed_block<Q5_K>(tile, lane, 8, b, patterns, out, scale); break;
        case Q6_K: embed_block<Q6_K>(tile, lane, 8, b, patterns, out, scale); break;
        case IQ2_XXS: embed_block<IQ2_XXS>(tile, lane, 8, b, patterns, out, scale); break;
        case MXFP4: embed_block<MXFP4>(tile, lane, cols / 32, b, patterns, out, scale); break;
        default:
            for (uint32_t i = 0; i < n; ++i) {
                const float v = float_at(f, tile, lane, cols, (int)(k % kSlice + i));
                out[i] = scale != 1.0f ? __fmul_rn(v, scale) : v;
            }
    }
}

// Inputs to memory.
struct ToMemory {
    const Prepare& p;
    uint32_t row;
    __device__ __forceinline__ void take(uint32_t k, uint32_t step, uint32_t cols, const float (&v)[kTogether][4]) const {
        const size_t at = (size_t)row * cols;
        if (p.floats != 0) {
            float* to = reinterpret_cast<float*>(p.floats) + at;
#pragma unroll
            for (int n = 0; n < kTogether; ++n) {
                const uint32_t here = k + n * step;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (here + i < cols) to[here + i] = v[n][i];
                }
            }
        }
        if (p.q == 0) return;
        Quantised out[kTogether];
        quantise(v, out);
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
            const size_t here = at + k + n * step;
            if (k + n * step >= cols) break;
            *reinterpret_cast<uint32_t*>(p.q + here) = out[n].q;
            if (threadIdx.x % 8 == 0) {
                reinterpret_cast<float*>(p.d)[here / 32] = out[n].d;
                reinterpret_cast<uint32_t*>(p.sums)[here / 32] = out[n].sums;
            }
        }
    }
};

// Rows of a table.
struct Embed {
    Seg segs[kMaxSegs];
    uint32_t n_segs;
    Cut cut;
    uint64_t ids;  // row of the table for each row: a u32 every `id_stride` of them; 0xffffffff: zeros
    uint64_t live; // null, or a u32 every `id_stride` of them: 0 gives zeros
    uint64_t out;  // [rows, cols] f32
    uint32_t id_stride, table_rows;
    float scale;
    uint32_t unused;
};
static_assert(sizeof(Embed) == 248);

}  // namespace arc

extern "C" __global__ void __launch_bounds__(512) arc_matmul_prepare(const __grid_constant__ arc::Prepare p) {
    __shared__ float shared[arc::kMaxCols / arc::kSumChunk];
    arc::pdl_launch();
    arc::pdl_wait();
    if (p.count != 0 && blockIdx.x >= *reinterpret_cast<const uint32_t*>(p.count)) return;
    arc::prepare_row(p, arc::source_row(p, blockIdx.x), reinterpret_cast<const float*>(p.weight), shared,
                     arc::ToMemory{p, blockIdx.x});
}

extern "C" __global__ void __launch_bounds__(256) arc_matmul_embed(const __grid_constant__ arc::Embed p) {
    __shared__ uint32_t patterns[256];
    arc::pdl_launch();
    for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) patterns[i] = arc::spread_pattern(arc::kPatterns[i]);
    __syncthreads();
    arc::pdl_wait();
    const uint32_t row = blockIdx.x, cols = p.cut.cols;
    float* out = reinterpret_cast<float*>(p.out) + (size_t)row * cols;
    const uint32_t id = reinterpret_cast<const uint32_t*>(p.ids)[row * p.id_stride];
    const bool live = p.live == 0 || reinterpret_cast<const uint32_t*>(p.live)[row * p.id_stride] != 0;
    for (uint32_t k = (blockIdx.y * blockDim.x + threadIdx.x) * 32; k < cols; k += gridDim.y * blockDim.x * 32) {
        const uint32_t n = min(32u, cols - k);
        if (live && id < p.table_rows) {
            arc::decode_some(p.segs, p.n_segs, p.cut, id, k, n, p.scale, patterns, out + k);
        } else {
            for (uint32_t i = 0; i < n; ++i) out[k + i] = 0.0f;
        }
    }
}

// out[r] += norm(x[r]): a product is normed before it joins the residual. Rows of `cols`.
extern "C" __global__ void __launch_bounds__(256) arc_matmul_norm_add(float* out, const float* x, const float* weight,
                                                                      float eps, uint32_t cols) {
    __shared__ float shared[arc::kMaxCols / arc::kSumChunk];
    arc::pdl_launch();
    arc::pdl_wait();
    out += (size_t)blockIdx.x * cols, x += (size_t)blockIdx.x * cols;
    arc::chunk_squares(cols, shared, [&](uint32_t i) { return x[i]; });
    __syncthreads();
    const float factor = arc::norm_factor(cols, eps, shared);
    for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) {
        out[i] = __fadd_rn(out[i], __fmul_rn(__fmul_rn(x[i], factor), weight[i]));
    }
}
