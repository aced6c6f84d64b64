// Integer GEMM on vpdpbusd: 32 columns as two halves of 16 lanes, each 32-bit lane four k of one column.
//
// Up to 8 rows both halves run inside one pass over k (16 accumulators, 8 registers of unpacked weights), so that the
// panel streams through once; 9 to 16 rows take one half at a time, so that unpacking is shared by more rows.
// Activations come as broadcast memory operands of vpdpbusd itself.
#include "kernels/gemm.h"

#include <cstring>
#include <immintrin.h>

namespace tb::npu {

void fill_gemm_avx512vnni_float(gemm_kernels & k);
void fill_gemm_avx512vnni_convert(gemm_kernels & k);

namespace {

constexpr int wide_rows = 8; // most rows of the pass over both halves
constexpr int max_rows = 16;
constexpr int prefetch_tiles = 6;

__m512 load_scales(const uint8_t * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

struct format_q4 {
    static constexpr size_t bytes = 576;
    static constexpr int32_t offset = 8;
    static void weights(const uint8_t * tile, int half, __m512i * w) {
        const __m512i mask = _mm512_set1_epi8(15);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            const __m512i v = _mm512_loadu_si512(tile + 128 * c + 64 * half);
            w[2 * c] = _mm512_and_si512(v, mask);
            w[2 * c + 1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), mask);
        }
    }
    static __m512 scales(const uint8_t * tile, int half) { return load_scales(tile + 512 + 32 * half); }
};

struct format_iq4nl {
    static constexpr size_t bytes = 576;
    static constexpr int32_t offset = 128;
    static void weights(const uint8_t * tile, int half, __m512i * w) {
        const __m512i mask = _mm512_set1_epi8(15);
        // -127, -104, -83, .. 113, each plus 128
        const __m512i values = _mm512_broadcast_i32x4(
            _mm_setr_epi8(1, 24, 45, 63, 79, 93, 106, 118, static_cast<char>(129), static_cast<char>(141),
                          static_cast<char>(153), static_cast<char>(166), static_cast<char>(181),
                          static_cast<char>(197), static_cast<char>(217), static_cast<char>(241)));
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            const __m512i v = _mm512_loadu_si512(tile + 128 * c + 64 * half);
            w[2 * c] = _mm512_shuffle_epi8(values, _mm512_and_si512(v, mask));
            w[2 * c + 1] = _mm512_shuffle_epi8(values, _mm512_and_si512(_mm512_srli_epi16(v, 4), mask));
        }
    }
    static __m512 scales(const uint8_t * tile, int half) { return load_scales(tile + 512 + 32 * half); }
};

void load_bytes(const uint8_t * tile, int half, __m512i * w) {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        w[j] = _mm512_xor_si512(_mm512_loadu_si512(tile + 128 * j + 64 * half), sign);
    }
}

struct format_q8 {
    static constexpr size_t bytes = 1088;
    static constexpr int32_t offset = 128;
    static void weights(const uint8_t * tile, int half, __m512i * w) { load_bytes(tile, half, w); }
    static __m512 scales(const uint8_t * tile, int half) { return load_scales(tile + 1024 + 32 * half); }
};

struct format_prepared {
    static constexpr size_t bytes = gemm_prepared_bytes;
    static constexpr int32_t offset = 128;
    static void weights(const uint8_t * tile, int half, __m512i * w) { load_bytes(tile, half, w); }
    static __m512 scales(const uint8_t * tile, int half) { return _mm512_loadu_ps(tile + 1024 + 64 * half); }
};

__m512i broadcast_int(const uint8_t * p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

__m512 broadcast_float(const uint8_t * p) {
    float v;
    std::memcpy(&v, p, 4);
    return _mm512_set1_ps(v);
}

// `halves` = 2: both, from the first; 1: only `half`.
template <class Format, int rows, int halves> void pass(const gemm_int8_args & a, int half) {
    __m512 acc[rows][halves];
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) {
            acc[m][h] = a.add ? _mm512_loadu_ps(a.out[m] + 16 * (half + h)) : _mm512_setzero_ps();
        }
    }
    const uint8_t * tile = a.panel;
    const uint8_t * record = a.group;
    for (int64_t t = 0; t < a.k_tiles; t++, tile += Format::bytes, record += gemm_record_bytes(rows)) {
        if (half == 0) {
#pragma GCC unroll 18
            for (size_t i = 0; i < Format::bytes / 64; i++) {
                _mm_prefetch(reinterpret_cast<const char *>(tile + prefetch_tiles * Format::bytes + 64 * i),
                             _MM_HINT_T0);
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) {
            // Activations are memory operands again in the second half: kept in registers they would push others out.
            if (rows > 3) asm volatile("" ::: "memory");
            __m512i w[8];
            Format::weights(tile, half + h, w);
            const __m512 scale = Format::scales(tile, half + h);
#pragma GCC unroll 16
            for (int m = 0; m < rows; m++) {
                __m512i dot = broadcast_int(record + 36 * rows + 4 * m);
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++) {
                    dot = _mm512_dpbusd_epi32(dot, w[j], broadcast_int(record + 32 * m + 4 * j));
                }
                const __m512 s = _mm512_mul_ps(scale, broadcast_float(record + 32 * rows + 4 * m));
                acc[m][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), s, acc[m][h]);
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++)
            _mm512_storeu_ps(a.out[m] + 16 * (half + h), acc[m][h]);
    }
}

template <class Format, int rows> void pick(const gemm_int8_args & a) {
    if (a.rows != rows) {
        if constexpr (rows > 1) pick<Format, rows - 1>(a);
    } else if constexpr (rows <= wide_rows) {
        pass<Format, rows, 2>(a, 0);
    } else {
        pass<Format, rows, 1>(a, 0);
        pass<Format, rows, 1>(a, 1);
    }
}

template <class Format> gemm_int8 kernel(const char * name) {
    return {name, max_rows, Format::offset, pick<Format, max_rows>};
}

} // namespace

void fill_gemm_avx512vnni(gemm_kernels & k) {
    k.int8[gemm_q4] = kernel<format_q4>("gemm_q4c_16x32_avx512vnni");
    k.int8[gemm_q8] = kernel<format_q8>("gemm_q8c_16x32_avx512vnni");
    k.int8[gemm_iq4nl] = kernel<format_iq4nl>("gemm_nlc_16x32_avx512vnni");
    k.int8[gemm_prepared] = kernel<format_prepared>("gemm_q8p_16x32_avx512vnni");
    fill_gemm_avx512vnni_float(k);
    fill_gemm_avx512vnni_convert(k);
}

} // namespace tb::npu
