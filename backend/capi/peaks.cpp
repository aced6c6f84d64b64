// See peaks.h. One loop per instruction set, each compiled for it by itself.
#include "peaks.h"

#include <cstring>

#include "kernels/kernels.h"
#include "wait.h"

#if defined(__x86_64__)
#    include <immintrin.h>
#    define FOR_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#    define FOR_AVXVNNI __attribute__((target("avx2,fma,avxvnni")))
#    define FOR_AVX2 __attribute__((target("avx2,fma")))
#elif defined(__aarch64__)
#    include <arm_neon.h>
#    define FOR_NEON __attribute__((target("arch=armv8.2-a+dotprod")))
#    define FOR_I8MM __attribute__((target("arch=armv8.2-a+i8mm")))
#endif

namespace tb::npu {

namespace {

// How often the loops look at the clock, and how many results each keeps under way.
constexpr int burst = 5000;
constexpr int chains = 16;
// Reads: bytes of a stream taken in one go, and how far ahead of them is asked for, which may be beyond the end.
constexpr size_t read_step = 256;
constexpr size_t read_ahead = 2048;

double now() { return static_cast<double>(now_ns()) * 1e-9; }

double rate(double amount, double start) { return amount / (now() - start) * 1e-9; }

bool runs(const char * isa) { return find_kernels(isa) != nullptr; }

#if defined(__x86_64__)

FOR_AVX512 double int8_avx512(double seconds) {
    alignas(64) static int32_t memory[chains] = {};
    __m512i acc[chains];
    const __m512i w = _mm512_set1_epi8(3);
#    pragma GCC unroll 16
    for (int i = 0; i < chains; i++)
        acc[i] = _mm512_set1_epi32(i);
    const double start = now();
    double ops = 0;
    for (; now() - start < seconds; ops += double{burst} * chains * 128) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 16
            for (int i = 0; i < chains; i++)
                asm volatile("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(acc[i]) : "m"(memory[i]), "v"(w));
        }
    }
    return rate(ops, start);
}

FOR_AVX2 double int8_avx2(double seconds) {
    alignas(64) static int32_t memory[chains] = {};
    __m256i acc[chains / 2];
    const __m256i w = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
#    pragma GCC unroll 16
    for (int i = 0; i < chains / 2; i++)
        acc[i] = _mm256_set1_epi32(i);
    const double start = now();
    double ops = 0;
    for (; now() - start < seconds; ops += double{burst} * (chains / 2) * 64) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 8
            for (int i = 0; i < chains / 2; i++) {
                const __m256i a = _mm256_set1_epi32(*const_cast<volatile int32_t *>(memory + i));
                acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), ones));
                asm volatile("" : "+x"(acc[i]));
            }
        }
    }
    return rate(ops, start);
}

FOR_AVXVNNI double int8_avxvnni(double seconds) {
    alignas(64) static int32_t memory[chains] = {};
    constexpr int n_chains = 12; // and a register each for weights and activations
    __m256i acc[n_chains];
    const __m256i w = _mm256_set1_epi8(3);
#    pragma GCC unroll 16
    for (int i = 0; i < n_chains; i++)
        acc[i] = _mm256_set1_epi32(i);
    const double start = now();
    double ops = 0;
    for (; now() - start < seconds; ops += double{burst} * n_chains * 64) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 12
            for (int i = 0; i < n_chains; i++) {
                const __m256i a = _mm256_set1_epi32(*const_cast<volatile int32_t *>(memory + i));
                acc[i] = _mm256_dpbusd_avx_epi32(acc[i], w, a);
                asm volatile("" : "+x"(acc[i]));
            }
        }
    }
    return rate(ops, start);
}

FOR_AVX512 double fma_avx512(double seconds) {
    __m512 acc[chains];
    const __m512 w = _mm512_set1_ps(0.5f);
#    pragma GCC unroll 16
    for (int i = 0; i < chains; i++)
        acc[i] = _mm512_set1_ps(static_cast<float>(i));
    const double start = now();
    double ops = 0;
    for (; now() - start < seconds; ops += double{burst} * chains * 32) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 16
            for (int i = 0; i < chains; i++)
                asm volatile("vfmadd231ps %1, %1, %0" : "+v"(acc[i]) : "v"(w));
        }
    }
    return rate(ops, start);
}

FOR_AVX2 double fma_avx2(double seconds) {
    constexpr int n_chains = 12;
    __m256 acc[n_chains];
    const __m256 w = _mm256_set1_ps(0.5f);
#    pragma GCC unroll 16
    for (int i = 0; i < n_chains; i++)
        acc[i] = _mm256_set1_ps(static_cast<float>(i));
    const double start = now();
    double ops = 0;
    for (; now() - start < seconds; ops += double{burst} * n_chains * 16) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 12
            for (int i = 0; i < n_chains; i++)
                asm volatile("vfmadd231ps %1, %1, %0" : "+x"(acc[i]) : "x"(w));
        }
    }
    return rate(ops, start);
}

template <int streams, bool ahead> FOR_AVX512 uint64_t read_avx512(const uint8_t * data, size_t size) {
    const size_t part = size / streams;
    __m512i v[4] = {};
    for (size_t i = 0; i < part; i += read_step) {
#    pragma GCC unroll 4
        for (int s = 0; s < streams; s++) {
            const uint8_t * p = data + static_cast<size_t>(s) * part + i;
#    pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                if (ahead) __builtin_prefetch(p + read_ahead + 64 * j, 0, 0);
                v[j] = _mm512_xor_si512(v[j], _mm512_loadu_si512(p + 64 * j));
            }
        }
    }
    alignas(64) uint64_t words[8];
    _mm512_store_si512(words, _mm512_xor_si512(_mm512_xor_si512(v[0], v[1]), _mm512_xor_si512(v[2], v[3])));
    return words[0] ^ words[1] ^ words[2] ^ words[3] ^ words[4] ^ words[5] ^ words[6] ^ words[7];
}

#elif defined(__aarch64__)

FOR_NEON double int8_neon(double seconds) {
    alignas(64) static int32_t memory[chains] = {};
    int32x4_t acc[chains];
    const int8x16_t w = vdupq_n_s8(3), a = vreinterpretq_s8_s32(vld1q_s32(memory));
#    pragma GCC unroll 16
    for (int i = 0; i < chains; i++)
        acc[i] = vdupq_n_s32(i);
    const double start = now();
    double ops = 0;
    for (; now() - start < seconds; ops += double{burst} * chains * 32) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 16
            for (int i = 0; i < chains; i++) {
                acc[i] = vdotq_laneq_s32(acc[i], w, a, 1);
                asm volatile("" : "+w"(acc[i]));
            }
        }
    }
    return rate(ops, start);
}

FOR_I8MM double int8_i8mm(double seconds) {
    int32x4_t acc[chains];
    const int8x16_t w = vdupq_n_s8(3);
#    pragma GCC unroll 16
    for (int i = 0; i < chains; i++)
        acc[i] = vdupq_n_s32(i);
    const double start = now();
    double ops = 0;
    for (; now() - start < seconds; ops += double{burst} * chains * 64) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 16
            for (int i = 0; i < chains; i++) {
                acc[i] = vmmlaq_s32(acc[i], w, w);
                asm volatile("" : "+w"(acc[i]));
            }
        }
    }
    return rate(ops, start);
}

double fma_neon(double seconds) {
    float32x4_t acc[chains];
    const float32x4_t w = vdupq_n_f32(0.5f);
#    pragma GCC unroll 16
    for (int i = 0; i < chains; i++)
        acc[i] = vdupq_n_f32(static_cast<float>(i));
    const double start = now();
    double ops = 0;
    for (; now() - start < seconds; ops += double{burst} * chains * 8) {
        for (int n = 0; n < burst; n++) {
#    pragma GCC unroll 16
            for (int i = 0; i < chains; i++)
                asm volatile("fmla %0.4s, %1.4s, %1.4s" : "+w"(acc[i]) : "w"(w));
        }
    }
    return rate(ops, start);
}

#endif

template <int streams, bool ahead> uint64_t read_words(const uint8_t * data, size_t size) {
    const size_t part = size / streams;
    uint64_t sum[4] = {};
    for (size_t i = 0; i < part; i += 64) {
        for (int s = 0; s < streams; s++) {
            const uint8_t * p = data + static_cast<size_t>(s) * part + i;
            if (ahead) __builtin_prefetch(p + read_ahead, 0, 0);
            uint64_t word[8];
            std::memcpy(word, p, sizeof word);
            for (int j = 0; j < 8; j++)
                sum[j % 4] ^= word[j];
        }
    }
    return sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
}

using read_loop = uint64_t (*)(const uint8_t *, size_t);

// In the order of TB_NPU_READ_WAYS.
constexpr read_loop loops_words[] = {read_words<1, false>, read_words<1, true>, read_words<4, false>,
                                     read_words<4, true>};
#if defined(__x86_64__)
constexpr read_loop loops_avx512[] = {read_avx512<1, false>, read_avx512<1, true>, read_avx512<4, false>,
                                      read_avx512<4, true>};
#endif

} // namespace

double limit_int8([[maybe_unused]] double seconds) {
#if defined(__x86_64__)
    return runs("avx512vnni") ? int8_avx512(seconds)
           : runs("avxvnni")  ? int8_avxvnni(seconds)
           : runs("avx2")     ? int8_avx2(seconds)
                              : 0;
#elif defined(__aarch64__)
    return runs("i8mm") ? int8_i8mm(seconds) : runs("neon") ? int8_neon(seconds) : 0;
#else
    return 0;
#endif
}

double limit_fma([[maybe_unused]] double seconds) {
#if defined(__x86_64__)
    return runs("avx512vnni") ? fma_avx512(seconds) : runs("avx2") ? fma_avx2(seconds) : 0;
#elif defined(__aarch64__)
    return fma_neon(seconds);
#else
    return 0;
#endif
}

double limit_read(const uint8_t * data, size_t size, int way) {
    size = size / (4 * read_step) * (4 * read_step);
    const read_loop * loops = loops_words;
#if defined(__x86_64__)
    if (runs("avx512vnni")) loops = loops_avx512;
#endif
    const double start = now();
    const uint64_t sum = loops[way](data, size);
    asm volatile("" ::"r"(sum));
    return rate(static_cast<double>(size), start);
}

} // namespace tb::npu
