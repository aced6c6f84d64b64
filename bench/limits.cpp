// What this machine can do at most: 8-bit dot products with memory operands, float FMAs, and streaming reads. Compiled by
// limits.py for this very CPU. Every function runs on the calling thread.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#    include <immintrin.h>
#elif defined(__aarch64__)
#    include <arm_neon.h>
#endif

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// How often the loops below look at the clock.
constexpr int burst = 5000;

} // namespace

extern "C" {

// Giga operations per second of the widest 8-bit dot product instruction, one operand broadcast from memory where the
// instruction can.
double tb_limit_int8(double seconds) {
    alignas(64) static int32_t memory[16] = {};
    const double start = now();
    double end = start, ops = 0;
#if defined(__AVX512VNNI__)
    __m512i acc[16], w = _mm512_set1_epi8(3);
#    pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        acc[i] = _mm512_set1_epi32(i);
    for (; end - start < seconds; end = now(), ops += burst * 16.0 * 128) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                asm volatile("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(acc[i]) : "m"(memory[i]), "v"(w));
            }
        }
    }
#elif defined(__AVX2__)
    __m256i acc[8], w = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
#    pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        acc[i] = _mm256_set1_epi32(i);
    for (; end - start < seconds; end = now(), ops += burst * 8.0 * 64) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const __m256i a = _mm256_set1_epi32(*const_cast<volatile int32_t *>(memory + i));
                acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), ones));
                asm volatile("" : "+x"(acc[i]));
            }
        }
    }
#elif defined(__ARM_FEATURE_DOTPROD)
    int32x4_t acc[16];
    const int8x16_t w = vdupq_n_s8(3), a = vreinterpretq_s8_s32(vld1q_s32(memory));
#    pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        acc[i] = vdupq_n_s32(i);
    for (; end - start < seconds; end = now(), ops += burst * 16.0 * 32) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                acc[i] = vdotq_laneq_s32(acc[i], w, a, 1);
                asm volatile("" : "+w"(acc[i]));
            }
        }
    }
#else
    (void)memory;
    return 0;
#endif
    return ops / (end - start) * 1e-9;
}

// Giga operations per second of the widest float32 FMA, multiply and add counted apart, operands in registers.
double tb_limit_fma(double seconds) {
    const double start = now();
    double end = start, ops = 0;
#if defined(__AVX512F__)
    __m512 acc[16], w = _mm512_set1_ps(0.5f);
#    pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        acc[i] = _mm512_set1_ps(static_cast<float>(i));
    for (; end - start < seconds; end = now(), ops += burst * 16.0 * 32) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                asm volatile("vfmadd231ps %1, %1, %0" : "+v"(acc[i]) : "v"(w));
        }
    }
#elif defined(__AVX2__) && defined(__FMA__)
    __m256 acc[12], w = _mm256_set1_ps(0.5f);
#    pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        acc[i] = _mm256_set1_ps(static_cast<float>(i));
    for (; end - start < seconds; end = now(), ops += burst * 12.0 * 16) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 12
            for (int i = 0; i < 12; i++)
                asm volatile("vfmadd231ps %1, %1, %0" : "+x"(acc[i]) : "x"(w));
        }
    }
#elif defined(__aarch64__)
    float32x4_t acc[16], w = vdupq_n_f32(0.5f);
#    pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        acc[i] = vdupq_n_f32(static_cast<float>(i));
    for (; end - start < seconds; end = now(), ops += burst * 16.0 * 8) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                asm volatile("fmla %0.4s, %1.4s, %1.4s" : "+w"(acc[i]) : "w"(w));
        }
    }
#else
    return 0;
#endif
    return ops / (end - start) * 1e-9;
}

// Giga bytes per second of reading `size` bytes once, in order; size is a multiple of 256.
double tb_limit_read(const uint8_t * data, size_t size) {
    uint64_t sum[4] = {};
    const double start = now();
#if defined(__AVX512F__)
    __m512i v[4] = {};
    for (size_t i = 0; i < size; i += 256) {
        for (int j = 0; j < 4; j++)
            v[j] = _mm512_xor_si512(v[j], _mm512_loadu_si512(data + i + 64 * j));
    }
    const __m512i all = _mm512_xor_si512(_mm512_xor_si512(v[0], v[1]), _mm512_xor_si512(v[2], v[3]));
    sum[0] = static_cast<uint64_t>(_mm512_reduce_add_epi64(all));
#else
    for (size_t i = 0; i < size; i += 32) {
        uint64_t word[4];
        std::memcpy(word, data + i, 32);
        for (int j = 0; j < 4; j++)
            sum[j] ^= word[j];
    }
#endif
    const double seconds = now() - start;
    asm volatile("" ::"r"(sum[0] ^ sum[1] ^ sum[2] ^ sum[3]));
    return static_cast<double>(size) / seconds * 1e-9;
}
}
