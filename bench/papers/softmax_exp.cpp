// Ways to the exponent of a softmax, FP16 in and out, for softmax_exp.py; compiled for this very CPU. `in` holds
// non-positive FP16 numbers (bits), out gets exp2 of them. Loops are written so that the compiler vectorizes them.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#    include <immintrin.h>
#endif

namespace {

constexpr int block = 64;

void widen(const uint16_t * in, float * out) {
#if defined(__AVX512F__)
    for (int i = 0; i < block; i += 16)
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(in + i))));
#elif defined(__F16C__)
    for (int i = 0; i < block; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(in + i))));
#else
    for (int i = 0; i < block; i++) {
        _Float16 h;
        std::memcpy(&h, in + i, 2);
        out[i] = static_cast<float>(h);
    }
#endif
}

void narrow(const float * in, uint16_t * out) {
#if defined(__AVX512F__)
    for (int i = 0; i < block; i += 16) {
        const __m256i h = _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + i), h);
    }
#elif defined(__F16C__)
    for (int i = 0; i < block; i += 8) {
        const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i), h);
    }
#else
    for (int i = 0; i < block; i++) {
        const _Float16 h = static_cast<_Float16>(in[i]);
        std::memcpy(out + i, &h, 2);
    }
#endif
}

// exp2(x) for x in [-126, 0] in float: 2^round(x) times a polynomial of degree 6 in what is left.
inline float exp2_float(float x) {
    x = x < -126.0f ? -126.0f : x;
    const float n = std::nearbyint(x);
    const float r = x - n;
    float p = 1.5403530e-4f;
    p = p * r + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &p, 4);
    bits += static_cast<int32_t>(n) * (1 << 23);
    std::memcpy(&p, &bits, 4);
    return p;
}

} // namespace

extern "C" {

// All have one signature, n is a multiple of 64, and `more` is what a way needs besides.
using exp_way = void (*)(const uint16_t * in, uint16_t * out, size_t n, const void * more);

// A way several times over, for inputs so small that one call from Python would take longer than the work.
void tb_exp_repeat(exp_way way, const uint16_t * in, uint16_t * out, size_t n, const void * more, size_t repeats) {
    for (size_t i = 0; i < repeats; i++)
        way(in, out, n, more);
}

void tb_exp_copy(const uint16_t * in, uint16_t * out, size_t n, const void *) { std::memcpy(out, in, 2 * n); }

// tb_npu_exp2_fp16 and the handle that it wants.
struct kernel_call {
    int (*run)(void * npu, const uint16_t * in, uint16_t * out, uint64_t n);
    void * npu;
};

void tb_exp_kernel(const uint16_t * in, uint16_t * out, size_t n, const void * more) {
    const kernel_call & call = *static_cast<const kernel_call *>(more);
    if (call.run(call.npu, in, out, n) != 0) std::abort();
}

// What a library does: float32, and a polynomial that is exact to float32.
void tb_exp_float32(const uint16_t * in, uint16_t * out, size_t n, const void *) {
    float x[block];
    for (size_t at = 0; at < n; at += block) {
        widen(in + at, x);
        for (int i = 0; i < block; i++)
            x[i] = exp2_float(x[i]);
        narrow(x, out + at);
    }
}

// 16-bit fixed point: 5 bits before and 10 after the point, a polynomial of degree 3 in multiply-high instructions, and
// a shift by the whole part. The results are fixed point too, in units of 2^-15.
void tb_exp_fixed16(const uint16_t * in, uint16_t * out, size_t n, const void *) {
    float x[block];
    for (size_t at = 0; at < n; at += block) {
        widen(in + at, x);
        int16_t t[block];
        for (int i = 0; i < block; i++)
            t[i] = static_cast<int16_t>((x[i] < -15.9f ? -15.9f : x[i]) * 1024.0f);
        for (int i = 0; i < block; i++) {
            const int16_t whole = static_cast<int16_t>(-(t[i] >> 10));  // 0 .. 16
            const int16_t f = static_cast<int16_t>((t[i] & 1023) << 5); // the fraction in units of 2^-15
            const auto high = [](int16_t a, int16_t b) { return static_cast<int16_t>(a * b >> 15); };
            int16_t p = 2570;                                              // 0.0784
            p = static_cast<int16_t>(high(p, f) + 7364);                   // 0.2247
            p = static_cast<int16_t>(high(p, f) + 22803);                  // 0.6959
            const uint16_t y = static_cast<uint16_t>(high(p, f) + 32768u); // 1 .. 2 in units of 2^-15
            out[at + i] = static_cast<uint16_t>(y >> whole);
        }
    }
}

// The 64 KiB table over all non-positive FP16 numbers, one entry per element.
void tb_exp_table(const uint16_t * in, uint16_t * out, size_t n, const void * more) {
    const uint16_t * table = static_cast<const uint16_t *>(more);
#if defined(__AVX512F__)
    const __m512i low = _mm512_set1_epi32(0x7fff), entry = _mm512_set1_epi32(0xffff);
    for (size_t i = 0; i < n; i += 16) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(in + i));
        const __m512i index = _mm512_and_si512(_mm512_cvtepu16_epi32(bits), low);
        const __m512i y = _mm512_and_si512(_mm512_i32gather_epi32(index, table, 2), entry);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + i), _mm512_cvtepi32_epi16(y));
    }
#else
    for (size_t i = 0; i < n; i++)
        out[i] = table[in[i] & 0x7fff];
#endif
}
}
