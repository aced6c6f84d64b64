// The inner loop of an 8-bit product on AVX-512 VNNI, 32 columns of weights in registers and rows of activations in L1,
// with different ways to bring in a row's scale of 32 k. bench/activation_scales.py times them.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#    include <immintrin.h>

namespace {

enum way { by_float, by_table, by_integer, without };

constexpr int k = 32, columns = 32, quads = k / 4, levels = 8;

// What a row brings: q[k]; its scale (1 + level / levels) * 2^exponent; an integer instead of it; 1.5 * 2^23 *
// 2^exponent, a float whose last bit counts 2^exponent, so that integers can be added to its bits.
struct record {
    int8_t q[k];
    float scale;
    int32_t whole;
    float shifted;
    int32_t level;
};

__m512i quad(const int8_t * q) {
    int32_t x;
    memcpy(&x, q, 4);
    return _mm512_set1_epi32(x);
}

// `together` rows at a time: as many dot products as need not wait for one another.
template <way how, int together>
__attribute__((noinline)) void multiply(const __m512i * weights, const record * rows, int n, float (*sums)[columns]) {
    __m512i w[2][quads];
    __m512 scale[2];
    alignas(64) float table[levels][columns];
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < quads; j++)
            w[i][j] = _mm512_loadu_si512(weights + quads * i + j);
        scale[i] = _mm512_castsi512_ps(_mm512_loadu_si512(weights + 2 * quads + i));
        for (int l = 0; l < levels && how == by_table; l++)
            _mm512_store_ps(table[l] + 16 * i, scale[i] * _mm512_set1_ps(1 + static_cast<float>(l) / levels));
    }
    for (int m = 0; m < n; m += together) {
        __m512i dot[together][2];
#    pragma GCC unroll 4
        for (int r = 0; r < together; r++)
            dot[r][0] = dot[r][1] =
                how == by_table ? _mm512_castps_si512(_mm512_set1_ps(rows[m + r].shifted)) : _mm512_setzero_si512();
#    pragma GCC unroll 8
        for (int j = 0; j < quads; j++) {
#    pragma GCC unroll 4
            for (int r = 0; r < together; r++) {
                const __m512i x = quad(rows[m + r].q + 4 * j);
                asm("vpdpbusd %2, %1, %0" : "+v"(dot[r][0]) : "v"(w[0][j]), "v"(x));
                asm("vpdpbusd %2, %1, %0" : "+v"(dot[r][1]) : "v"(w[1][j]), "v"(x));
            }
        }
#    pragma GCC unroll 4
        for (int r = 0; r < together; r++) {
            const record & row = rows[m + r];
#    pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                float * sum = sums[m + r] + 16 * i;
                __m512 x, by = scale[i];
                if constexpr (how == by_table) {
                    x = _mm512_castsi512_ps(dot[r][i]) - _mm512_set1_ps(row.shifted);
                    by = _mm512_load_ps(table[row.level] + 16 * i);
                } else if constexpr (how == by_integer) {
                    x = _mm512_cvtepi32_ps(_mm512_mullo_epi32(dot[r][i], _mm512_set1_epi32(row.whole)));
                } else {
                    x = _mm512_cvtepi32_ps(dot[r][i]);
                    if constexpr (how == by_float) by = _mm512_mul_ps(by, _mm512_set1_ps(row.scale));
                }
                _mm512_storeu_ps(sum, _mm512_fmadd_ps(x, by, _mm512_loadu_ps(sum)));
            }
        }
    }
}

using product = void (*)(const __m512i *, const record *, int, float (*)[columns]);

// One row at a time, and four.
constexpr product products[][2] = {{multiply<by_float, 1>, multiply<by_float, 4>},
                                   {multiply<by_table, 1>, multiply<by_table, 4>},
                                   {multiply<by_integer, 1>, multiply<by_integer, 4>},
                                   {multiply<without, 1>, multiply<without, 4>}};

} // namespace

extern "C" int tb_scale_ways() { return 4; }

// Add n rows' products (n a multiple of 4) to sums[n][32], `repeats` times. weights: 8 quads of 16 columns twice,
// unsigned bytes, then 32 float scales; rows: n records.
extern "C" void tb_scaled_products(int way, int fours, const void * weights, const void * rows, int n, float * sums,
                                   size_t repeats) {
    for (size_t i = 0; i < repeats; i++)
        products[way][fours](static_cast<const __m512i *>(weights), static_cast<const record *>(rows), n,
                             reinterpret_cast<float (*)[columns]>(sums));
}

#else

extern "C" int tb_scale_ways() { return 0; }
extern "C" void tb_scaled_products(int, int, const void *, const void *, int, float *, size_t) {}

#endif
