// Inputs of products, rows of a table, and the norm behind a product.
//
// arc_matmul_prepare: a block a row, 256 or 512 threads.
// arc_matmul_embed: a block of 256 threads a slice of a row; a thread a value, or 32 of integer-coded ones.
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
__device__ __noinline__ void embed_block(const uint8_t* tile, int lane, int b, const uint32_t* patterns, float* out, float scale) {
    if (unit_len(F) == 32) {
        Values values{F, 0, out, scale};
        each_block<F, false, 1>(tile + b * (kLanes * unit_bytes(F)), lane, 1, patterns, values);
    } else {
        Values values{F, b, out, scale};
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

// Block `b` of 32 values of a lane's slice.
__device__ void decode_block(uint32_t f, const uint8_t* tile, int lane, int b, float scale, const uint32_t* patterns, float* out) {
    switch (f) {
        case Q8_0: embed_block<Q8_0>(tile, lane, b, patterns, out, scale); break;
        case Q4_0: embed_block<Q4_0>(tile, lane, b, patterns, out, scale); break;
        case Q4_1: embed_block<Q4_1>(tile, lane, b, patterns, out, scale); break;
        case Q5_0: embed_block<Q5_0>(tile, lane, b, patterns, out, scale); break;
        case Q5_1: embed_block<Q5_1>(tile, lane, b, patterns, out, scale); break;
        case Q2_K: embed_block<Q2_K>(tile, lane, b, patterns, out, scale); break;
        case Q3_K: embed_block<Q3_K>(tile, lane, b, patterns, out, scale); break;
        case Q4_K: embed_block<Q4_K>(tile, lane, b, patterns, out, scale); break;
        case Q5_K: embed_block<Q5_K>(tile, lane, b, patterns, out, scale); break;
        case Q6_K: embed_block<Q6_K>(tile, lane, b, patterns, out, scale); break;
        case IQ2_XXS: embed_block<IQ2_XXS>(tile, lane, b, patterns, out, scale); break;
        default: embed_block<MXFP4>(tile, lane, b, patterns, out, scale); break;
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

// Grid: (rows, slices).
extern "C" __global__ void __launch_bounds__(256) arc_matmul_embed(const __grid_constant__ arc::Embed p) {
    using namespace arc;
    __shared__ uint32_t patterns[256];
    __shared__ float values[kSlice];
    pdl_launch();
    const uint32_t t = threadIdx.x, row = blockIdx.x, slice = blockIdx.y, cols = p.cut.cols_of(slice);
    patterns[t] = spread_pattern(kPatterns[t]);
    pdl_wait();
    float* out = reinterpret_cast<float*>(p.out) + (size_t)row * p.cut.cols + slice * kSlice + t;
    uint32_t id = reinterpret_cast<const uint32_t*>(p.ids)[row * p.id_stride];
    const bool live = p.live == 0 || reinterpret_cast<const uint32_t*>(p.live)[row * p.id_stride] != 0;
    if (!live || id >= p.table_rows) {
        if (t < cols) *out = 0.0f;
        return;
    }
    uint32_t seg = 0;
    while (seg + 1 < p.n_segs && id >= p.segs[seg + 1].first_row) ++seg;
    id -= p.segs[seg].first_row;
    const uint32_t f = p.segs[seg].format, wide = p.cut.group_rows();
    const uint8_t* tile = reinterpret_cast<const uint8_t*>(p.segs[seg].base) + (size_t)(id / wide) * p.cut.group_bytes(f) +
                          p.cut.tile_at(f, slice >> p.cut.log_c);
    const int lane = (int)(id % wide + (slice & (p.cut.c() - 1)) * wide);
    if (is_float(f)) {
        if (t >= cols) return;
        const float v = float_at(f, tile, lane, (int)cols, (int)t);
        *out = p.scale != 1.0f ? __fmul_rn(v, p.scale) : v;
        return;
    }
    __syncthreads();
    if (t % 32 == 0 && t < cols) decode_block(f, tile, lane, (int)t / 32, p.scale, patterns, values + t);
    __syncwarp();
    if (t < cols) *out = values[t];
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
