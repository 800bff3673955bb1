// From rows as they lie in a file to tiles (layout.cuh). Load time only; bits move and none changes.
//
// arc_matmul_repack: a warp a tile, a lane a slice. 256 threads.
#include "../../pdl.cuh"
#include "layout.cuh"

namespace arc {

__device__ __forceinline__ uint32_t read2(const uint8_t* p) { return p[0] | p[1] << 8; }
__device__ __forceinline__ uint32_t read4(const uint8_t* p) { return read2(p) | read2(p + 2) << 16; }

struct Unit {
    uint8_t* at;
    int lane;
    // The i-th 16 bytes of this lane's unit, or the 4, 2 or 1 behind `wide` of them and `bytes` more a lane.
    __device__ __forceinline__ void put16(int i, uint32_t a, uint32_t b, uint32_t c, uint32_t d) const {
        *reinterpret_cast<uint4*>(at + i * 512 + 16 * lane) = make_uint4(a, b, c, d);
    }
    __device__ __forceinline__ void put4(int before, uint32_t v) const {
        *reinterpret_cast<uint32_t*>(at + kLanes * before + 4 * lane) = v;
    }
    __device__ __forceinline__ void put2(int before, uint32_t v) const {
        *reinterpret_cast<unsigned short*>(at + kLanes * before + 2 * lane) = (unsigned short)v;
    }
    __device__ __forceinline__ void put1(int before, uint32_t v) const { at[kLanes * before + lane] = (uint8_t)v; }
};

// Bit 4j + b of `bits` to bit j of byte b.
__device__ __forceinline__ uint32_t spread_bits(uint32_t bits) {
    uint32_t out = 0;
    for (int l = 0; l < 32; ++l) out |= (bits >> l & 1u) << (8 * (l % 4) + l / 4);
    return out;
}

// Codes of 32 values as nibbles of 16 bytes, put as chunk i. HALVES: the order of q6_k.
template <bool HALVES, typename Code>
__device__ __forceinline__ void put_nibbles(const Unit& u, int i, Code code) {
    uint32_t w[4] = {0, 0, 0, 0};
    for (int l = 0; l < 32; ++l) {
        const int word = HALVES ? l % 16 / 4 : l / 8, high = HALVES ? l / 16 : l % 8 / 4;
        w[word] |= (code(l) & 15u) << (8 * (l % 4) + 4 * high);
    }
    u.put16(i, w[0], w[1], w[2], w[3]);
}

// The same from 16 bytes whose low nibbles are values 0 to 15 and whose high ones are the others.
__device__ __forceinline__ void put_halves(const Unit& u, const uint8_t* qs) {
    put_nibbles<false>(u, 0, [=](int l) -> uint32_t { return qs[l % 16] >> (l / 16 * 4); });
}

// Two bits of each of 32 values: two words.
template <typename Code>
__device__ __forceinline__ uint2 crumbs(Code code) {
    uint32_t w[2] = {0, 0};
    for (int l = 0; l < 32; ++l) w[l / 16] |= (code(l) & 3u) << (8 * (l % 4) + 2 * (l % 16 / 4));
    return make_uint2(w[0], w[1]);
}

template <typename Code>
__device__ __forceinline__ uint32_t one_bit(Code code) {
    uint32_t w = 0;
    for (int l = 0; l < 32; ++l) w |= (code(l) & 1u) << (8 * (l % 4) + l / 4);
    return w;
}

// The head of Q4_K and Q5_K: sixteen numbers of six bits in twelve bytes, see format/unpack.rs.
__device__ __forceinline__ void put_head(const Unit& u, const uint8_t* b) {
    const uint8_t* packed = b + 4;
    uint32_t sc_low = 0, min_low = 0, top = 0;
    for (int s = 0; s < 8; ++s) {
        uint32_t sc, mn;
        if (s < 4) {
            sc = packed[s] & 63u, mn = packed[s + 4] & 63u;
        } else {
            sc = (packed[s + 4] & 15u) | (uint32_t)(packed[s - 4] >> 6) << 4;
            mn = (uint32_t)(packed[s + 4] >> 4) | (uint32_t)(packed[s] >> 6) << 4;
        }
        sc_low |= (sc & 15u) << (4 * s), min_low |= (mn & 15u) << (4 * s);
        top |= (sc >> 4) << (2 * s) | (mn >> 4) << (16 + 2 * s);
    }
    u.put16(0, read4(b), sc_low, min_low, top);
}

// One block of the source to one lane of a unit.
__device__ void pack(uint32_t f, const uint8_t* b, const Unit& u) {
    switch (f) {
        case Q8_0:
            for (int i = 0; i < 2; ++i) {
                const uint8_t* c = b + 2 + 16 * i;
                u.put16(i, read4(c), read4(c + 4), read4(c + 8), read4(c + 12));
            }
            u.put2(32, read2(b));
            break;
        case Q4_0: put_halves(u, b + 2), u.put2(16, read2(b)); break;
        case Q4_1: put_halves(u, b + 4), u.put4(16, read4(b)); break;
        case Q5_0:
            put_halves(u, b + 6);
            u.put4(16, spread_bits(read4(b + 2))), u.put2(20, read2(b));
            break;
        case Q5_1:
            put_halves(u, b + 8);
            u.put4(16, spread_bits(read4(b + 4))), u.put4(20, read4(b));
            break;
        case MXFP4: {
            uint32_t w[4] = {0, 0, 0, 0};
            for (int l = 0; l < 32; ++l) w[l / 8] |= ((b[1 + l % 16] >> (4 * (l / 16))) & 15u) << (4 * (l % 8));
            u.put16(0, w[0], w[1], w[2], w[3]), u.put1(16, b[0]);
            break;
        }
        case Q2_K:
            u.put16(0, read4(b), read4(b + 4), read4(b + 8), read4(b + 12));
            for (int s = 0; s < 8; s += 2) {
                auto code = [&](int s) { return [=](int l) -> uint32_t { return b[16 + s / 4 * 32 + l] >> (s % 4 * 2); }; };
                const uint2 even = crumbs(code(s)), odd = crumbs(code(s + 1));
                u.put16(1 + s / 2, even.x, even.y, odd.x, odd.y);
            }
            u.put4(80, read4(b + 80));
            break;
        case Q3_K: {
            for (int s = 0; s < 8; s += 2) {
                auto code = [&](int s) { return [=](int l) -> uint32_t { return b[32 + s / 4 * 32 + l] >> (s % 4 * 2); }; };
                const uint2 even = crumbs(code(s)), odd = crumbs(code(s + 1));
                u.put16(s / 2, even.x, even.y, odd.x, odd.y);
            }
            for (int i = 0; i < 2; ++i) {
                uint32_t w[4];
                for (int s = 0; s < 4; ++s) w[s] = one_bit([=](int l) -> uint32_t { return b[l] >> (4 * i + s); });
                u.put16(4 + i, w[0], w[1], w[2], w[3]);
            }
            const uint8_t* scales = b + 96;
            uint32_t low[2] = {0, 0};
            for (int i = 0; i < 16; ++i) low[i / 8] |= ((scales[i % 8] >> (i / 8 * 4)) & 15u) << (4 * (i % 8));
            uint32_t top = 0;
            for (int i = 0; i < 16; ++i) top |= ((scales[8 + i % 4] >> (i / 4 * 2)) & 3u) << (2 * i);
            u.put4(96, low[0]), u.put4(100, low[1]), u.put4(104, top), u.put2(108, read2(b + 108));
            break;
        }
        case Q4_K:
        case Q5_K: {
            put_head(u, b);
            const uint8_t* qs = b + (f == Q4_K ? 16 : 48);
            for (int s = 0; s < 8; ++s) {
                put_nibbles<false>(u, 1 + s, [=](int l) -> uint32_t { return qs[s / 2 * 32 + l] >> (s % 2 * 4); });
            }
            if (f == Q5_K) {
                for (int i = 0; i < 2; ++i) {
                    uint32_t w[4];
                    for (int s = 0; s < 4; ++s) w[s] = one_bit([=](int l) -> uint32_t { return b[16 + l] >> (4 * i + s); });
                    u.put16(9 + i, w[0], w[1], w[2], w[3]);
                }
            }
            break;
        }
        case Q6_K:
            for (int s = 0; s < 8; ++s) {
                const uint8_t* low = b + s / 4 * 64 + s % 2 * 32;
                put_nibbles<true>(u, s, [=](int l) -> uint32_t { return low[l] >> (s % 4 / 2 * 4); });
            }
            for (int s = 0; s < 8; s += 2) {
                auto code = [&](int s) { return [=](int l) -> uint32_t { return b[128 + s / 4 * 32 + l] >> (s % 4 * 2); }; };
                const uint2 even = crumbs(code(s)), odd = crumbs(code(s + 1));
                u.put16(8 + s / 2, even.x, even.y, odd.x, odd.y);
            }
            u.put16(12, read4(b + 192), read4(b + 196), read4(b + 200), read4(b + 204)), u.put2(208, read2(b + 208));
            break;
        case IQ2_XXS:
            for (int s = 0; s < 8; s += 2) {
                uint32_t w[4];
                for (int e = 0; e < 2; ++e) {
                    const uint32_t signs = read4(b + 2 + 8 * (s + e) + 4);
                    uint32_t moved = signs & 0xf0000000u, odd = 0;
                    for (int i = 0; i < 28; ++i) {
                        odd = (i % 7 == 0 ? 0 : odd) ^ (signs >> i & 1u);
                        moved |= odd << (4 * (i % 7) + i / 7);
                    }
                    w[2 * e] = read4(b + 2 + 8 * (s + e)), w[2 * e + 1] = moved;
                }
                u.put16(s / 2, w[0], w[1], w[2], w[3]);
            }
            u.put2(64, read2(b));
            break;
        case FP8:
            for (int i = 0; i < 8; ++i) {
                const uint8_t* c = b + 1 + 16 * i;
                u.put16(i, read4(c), read4(c + 4), read4(c + 8), read4(c + 12));
            }
            u.put1(128, b[0]);
            break;
        default: u.put16(0, read4(b), read4(b + 4), read4(b + 8), read4(b + 12)); break;
    }
}

}  // namespace arc

// `rows` rows at `src`, the first of a group, to whole groups at `dst`, which are zero where there are no rows.
extern "C" __global__ void arc_matmul_repack(uint8_t* dst, const uint8_t* src, uint32_t format, uint32_t rows, uint32_t cols,
                                             uint32_t slices, uint32_t log_c) {
    using namespace arc;
    const Cut cut{cols, slices, log_c};
    const uint32_t lane = threadIdx.x & 31, tile = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    const uint32_t group = tile / cut.tiles(), t = tile % cut.tiles();
    const uint32_t row = group * cut.group_rows() + lane % cut.group_rows(), slice = cut.slice_of(t, lane);
    pdl_wait();
    if (row >= rows) return;
    const uint32_t len = unit_len(format), single = format == F32 ? 4 : 2;
    const uint32_t n = cut.tail() != 0 && slice + 1 == slices ? cut.tail() : kSlice;
    const size_t row_bytes = (size_t)(cols / len) * unit_bytes(format) + (size_t)(cols % len) * single;
    // Of floats, a unit's 16 bytes are those of the source.
    const uint8_t* from = src + row * row_bytes + (size_t)slice * (kSlice / len) * unit_bytes(format);
    uint8_t* to = dst + (size_t)group * cut.group_bytes(format) + cut.tile_at(format, t);
    for (uint32_t u = 0; u < n / len; ++u) {
        pack(format, from + (size_t)u * unit_bytes(format), Unit{to + (size_t)u * kLanes * unit_bytes(format), (int)lane});
    }
    // Values left over.
    to += (size_t)(n / len) * kLanes * 16, from += (size_t)(n / len) * 16;
    if (is_float(format) && format != FP8) {
        for (uint32_t i = 0; i < n % len; ++i) {
            for (uint32_t b = 0; b < single; ++b) to[(i * kLanes + lane) * single + b] = from[i * single + b];
        }
    }
}
