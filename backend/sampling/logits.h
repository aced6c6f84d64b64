// Loops over the logits of one row, for the files here. Written so that compilers vectorize them: fixed inner lengths,
// no reduction over floats in one variable.
#ifndef TILEBEAM_SAMPLING_LOGITS_H
#define TILEBEAM_SAMPLING_LOGITS_H

#include "sampling.h"

#include <math.h>
#include <string.h>

enum { TB_LANES = 16 };

// Functions that are worth having for x86-64 with and without AVX2, where arithmetic and not memory is the limit also
// with AVX-512, chosen when the library is loaded; the results are the same bits. What they call has to be inlined to
// be compiled so too. Sanitizers are not ready for code that runs as early as the choice.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) &&          \
    !defined(__SANITIZE_THREAD__)
#    define TB_VECTORS __attribute__((target_clones("avx2", "default")))
#    define TB_WIDE_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#    define TB_VECTORS
#    define TB_WIDE_VECTORS
#endif
#define TB_INLINE static inline __attribute__((always_inline))

// exp of x <= 0, relative error below 3e-7; of x below -87 that of -87, which is 1.6e-38. NaN of NaN.
TB_INLINE float tb_exp_of_negative(float x) {
    const float limited = x < -87.0f ? -87.0f : x;
    const float shifted = limited * 1.44269504f + 12582912.0f; // rounds to an integer in the low bits
    const float n = shifted - 12582912.0f;
    const float r = (limited - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // 2^n: what is above n in the bits of `shifted` is shifted out. No conversion to int, which NaN has none of.
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

// NaN is passed over; -INFINITY if there is nothing else.
TB_INLINE float tb_largest(const float * x, int32_t n) {
    float lanes[TB_LANES];
    for (int j = 0; j < TB_LANES; ++j) {
        lanes[j] = -INFINITY;
    }
    int32_t i = 0;
    for (; i + TB_LANES <= n; i += TB_LANES) {
        for (int j = 0; j < TB_LANES; ++j) {
            lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
        }
    }
    float best = -INFINITY;
    for (int j = 0; j < TB_LANES; ++j) {
        best = lanes[j] > best ? lanes[j] : best;
    }
    for (; i < n; ++i) {
        best = x[i] > best ? x[i] : best;
    }
    return best;
}

#endif // TILEBEAM_SAMPLING_LOGITS_H
