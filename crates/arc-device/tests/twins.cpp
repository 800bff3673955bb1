// Runs math.cuh and rng.cuh on the host: each device intrinsic used there is one IEEE operation, which C++ has too.
// Reads f32 bits from standard input; writes, for each function in the order of twins.rs, the bits of all results, then
// draw words.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#define __device__
#define __forceinline__ inline

static inline float __uint_as_float(unsigned u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline unsigned __float_as_uint(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float __int_as_float(int i) { return __uint_as_float((unsigned)i); }
static inline int __float_as_int(float f) { return (int)__float_as_uint(f); }
static inline float __int2float_rn(int i) { return (float)i; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }

// Sums by a warp need a warp; they are only compiled here.
static struct {
    int x;
} threadIdx;
static inline float __shfl_xor_sync(unsigned, float s, int) { return s; }

#include "../src/math.cuh"
#include "../src/rng.cuh"

int main() {
    std::vector<unsigned> in;
    unsigned bits;
    while (fread(&bits, 4, 1, stdin) == 1) in.push_back(bits);
    float (*functions[])(float) = {arc::exp,  arc::ln,   arc::ln_1p,     arc::softplus, arc::sigmoid,
                                   arc::silu, arc::tanh, arc::gelu_tanh, arc::rsqrt};
    for (auto function : functions) {
        for (unsigned x : in) {
            bits = __float_as_uint(function(__uint_as_float(x)));
            fwrite(&bits, 4, 1, stdout);
        }
    }
    for (unsigned x : in) {
        unsigned long long word = arc::draw_word(x * 0x9e3779b97f4a7c15ull, x, x >> 7);
        fwrite(&word, 8, 1, stdout);
    }
    return 0;
}
