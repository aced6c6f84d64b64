// What this CPU can do at most, measured on the calling thread: the yardstick of bench/lib/limits.py, which compiles
// this for the machine that it runs on. All in 10^9 a second, multiply and add counted apart; 0 where there is no such
// instruction.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#    include <immintrin.h>
#    include <sys/syscall.h>
#    include <unistd.h>
#elif defined(__aarch64__)
#    include <arm_neon.h>
#endif

namespace {

constexpr int burst = 5000;         // how often loops look at the clock
constexpr size_t read_ahead = 2048; // how far ahead of a read memory is asked for, which may be beyond the end
typedef uint64_t words __attribute__((vector_size(64), aligned(1), may_alias));

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double rate(double amount, double start) { return amount / (now() - start) * 1e-9; }

// Steps on so many accumulators, which do not wait for each other; a step does `ops` operations.
template <int chains, class V, class Step> double measure(double seconds, int ops, V first, const Step & step) {
    V acc[chains];
#pragma GCC unroll 16
    for (int i = 0; i < chains; ++i)
        acc[i] = first;
    const double start = now();
    double done = 0;
    for (; now() - start < seconds; done += double{burst} * chains * ops) {
        for (int n = 0; n < burst; ++n) {
#pragma GCC unroll 16
            for (int i = 0; i < chains; ++i)
                step(acc[i], i);
        }
    }
    return rate(done, start);
}

// A part of the memory in order, or `streams` of them side by side, with software prefetch or without.
template <int streams, bool ahead> uint64_t read(const uint8_t * data, size_t size) {
    const size_t part = size / streams;
    words sum[4] = {};
    for (size_t i = 0; i < part; i += 256) {
        for (int s = 0; s < streams; ++s) {
            const uint8_t * p = data + static_cast<size_t>(s) * part + i;
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                if (ahead) __builtin_prefetch(p + read_ahead + 64 * j, 0, 0);
                sum[j] ^= *reinterpret_cast<const words *>(p + 64 * j);
            }
        }
    }
    const words all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    return all[0] ^ all[1] ^ all[2] ^ all[3] ^ all[4] ^ all[5] ^ all[6] ^ all[7];
}

} // namespace

#define STEP(type, ...) [&](type & acc, [[maybe_unused]] int i) __attribute__((always_inline)) { __VA_ARGS__; }

#if defined(__AMX_INT8__)
// Of AMX's matrix unit, four tiles of sums; 0 where the system does not give this process its tiles.
double limit_tiles(double seconds) {
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 0; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } before, c = {};
    c.palette = 1;
    for (int i = 0; i < 6; ++i) {
        c.row_bytes[i] = 64;
        c.rows[i] = 16;
    }
    asm volatile("sttilecfg %0" : "=m"(before));
    asm volatile("ldtilecfg %0" : : "m"(c));
    const double start = now();
    double done = 0;
    for (; now() - start < seconds; done += double{burst} * 4 * 2 * 16 * 16 * 64) {
        for (int n = 0; n < burst; ++n)
            asm volatile("tdpbssd %tmm0, %tmm1, %tmm2\n\ttdpbssd %tmm0, %tmm1, %tmm3\n\t"
                         "tdpbssd %tmm0, %tmm1, %tmm4\n\ttdpbssd %tmm0, %tmm1, %tmm5");
    }
    asm volatile("ldtilecfg %0" : : "m"(before));
    return rate(done, start);
}
#endif

// Of the widest 8-bit dot product, or of a matrix unit, one operand broadcast from memory where the instruction can.
extern "C" double limit_int8([[maybe_unused]] double seconds) {
    [[maybe_unused]] alignas(64) static int32_t memory[16] = {};
#if defined(__AMX_INT8__)
    if (const double tiles = limit_tiles(seconds)) return tiles;
#endif
#if defined(__AVX512VNNI__)
    const __m512i w = _mm512_set1_epi8(3);
    return measure<16>(
        seconds, 128, w,
        STEP(__m512i, asm volatile("vpdpbusd %1%{1to16%}, %2, %0" : "+v"(acc) : "m"(memory[i]), "v"(w))));
#elif defined(__AVX2__)
    const __m256i w = _mm256_set1_epi8(3);
    const auto broadcast = [&](int i) { return _mm256_set1_epi32(*const_cast<volatile int32_t *>(memory + i)); };
#    if defined(__AVXVNNI__)
    return measure<12>(
        seconds, 64, w,
        STEP(__m256i, acc = _mm256_dpbusd_avx_epi32(acc, w, broadcast(i)); asm volatile("" : "+x"(acc))));
#    else
    const __m256i ones = _mm256_set1_epi16(1);
    return measure<8>(
        seconds, 64, w,
        STEP(__m256i, acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, broadcast(i)), ones));
             asm volatile("" : "+x"(acc))));
#    endif
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    const int8x16_t w = vdupq_n_s8(3);
    return measure<16>(seconds, 64, vdupq_n_s32(1),
                       STEP(int32x4_t, acc = vmmlaq_s32(acc, w, w); asm volatile("" : "+w"(acc))));
#elif defined(__ARM_FEATURE_DOTPROD)
    const int8x16_t w = vdupq_n_s8(3), a = vreinterpretq_s8_s32(vld1q_s32(memory));
    return measure<16>(seconds, 32, vdupq_n_s32(1),
                       STEP(int32x4_t, acc = vdotq_laneq_s32(acc, w, a, 1); asm volatile("" : "+w"(acc))));
#else
    return 0;
#endif
}

// Of the widest float32 FMA, operands in registers.
extern "C" double limit_fma([[maybe_unused]] double seconds) {
#if defined(__AVX512F__)
    const __m512 w = _mm512_set1_ps(0.5f);
    return measure<16>(seconds, 32, w, STEP(__m512, asm volatile("vfmadd231ps %1, %1, %0" : "+v"(acc) : "v"(w))));
#elif defined(__FMA__)
    const __m256 w = _mm256_set1_ps(0.5f);
    return measure<12>(seconds, 16, w, STEP(__m256, asm volatile("vfmadd231ps %1, %1, %0" : "+x"(acc) : "x"(w))));
#elif defined(__aarch64__)
    const float32x4_t w = vdupq_n_f32(0.5f);
    return measure<16>(seconds, 8, w, STEP(float32x4_t, asm volatile("fmla %0.4s, %1.4s, %1.4s" : "+w"(acc) : "w"(w))));
#else
    return 0;
#endif
}

// Bytes of memory read once. Which way (0 to 3) is the fastest differs by CPU.
extern "C" double limit_read(const uint8_t * data, size_t size, int way) {
    constexpr uint64_t (*ways[])(const uint8_t *, size_t) = {read<1, false>, read<1, true>, read<4, false>,
                                                             read<4, true>};
    size = size / 1024 * 1024;
    const double start = now();
    const uint64_t sum = ways[way](data, size);
    asm volatile("" ::"r"(sum));
    return rate(static_cast<double>(size), start);
}
