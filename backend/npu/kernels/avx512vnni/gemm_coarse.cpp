// The coarse int8 numerics: weights requantized to one scale per 256 k, and activations. Each returns the portable
// version's bits.
#include <cmath>
#include <cstring>

#include "kernels/avx512vnni/unit.h"
#include "kernels/gemm_vnni.h"

namespace tb::npu {

namespace {

constexpr int halves = 2; // vectors of 16 columns in a panel
constexpr char sign = static_cast<char>(0x80);

// The eight quads of 16 columns of a type that is not Q4_0, as signed bytes.
template <uint32_t type> void signed_bytes(const uint8_t * tile, int half, __m512i * w) {
    if constexpr (type == TB_Q8_0_COL) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            w[j] = _mm512_loadu_si512(tile + 128 * j + 64 * half);
    } else {
        const __m512i values = unit::table(TB_IQ4_NL_VALUES(0));
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            const __m512i v = _mm512_loadu_si512(tile + 128 * c + 64 * half);
            w[2 * c] = unit::look_up(values, unit::low_nibbles(v));
            w[2 * c + 1] = unit::look_up(values, unit::high_nibbles(v));
        }
    }
}

// The common scale of up to 8 tiles' 16 columns, NaN where one is not finite, and each tile's R twice in 32 bits.
template <uint32_t type> __m512 common_scale(const uint8_t * scales, int tiles, __m512i * ratios) {
    constexpr size_t tile_bytes = tile_of(type).bytes;
    __m512 common = _mm512_setzero_ps();
    __mmask16 finite = 0xffff;
    for (int t = 0; t < tiles; t++) {
        const __m512 s = unit::load_halves(scales + tile_bytes * t), magnitude = _mm512_abs_ps(s);
        finite &= _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
        common = _mm512_mask_mov_ps(common, _mm512_cmp_ps_mask(magnitude, _mm512_abs_ps(common), _CMP_GT_OQ), s);
    }
    constexpr bool q4 = type == TB_Q4_0_COL;
    const __mmask16 live = finite & _mm512_cmp_ps_mask(common, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    const __m512 unit_ratio = _mm512_set1_ps(q4 ? -32768.0f : 16384.0f);
    const __m512 inverse = _mm512_maskz_div_ps(live, unit_ratio, common);
    for (int t = 0; t < tiles; t++) {
        const __m512 s = unit::load_halves(scales + tile_bytes * t);
        __m512i r = _mm512_maskz_cvtps_epi32(live, _mm512_mul_ps(s, inverse));
        r = q4 ? _mm512_min_epi32(r, _mm512_set1_epi32(gemm_coarse_most_q4))
               : _mm512_max_epi32(r, _mm512_set1_epi32(gemm_coarse_least_q8));
        ratios[t] = _mm512_or_si512(_mm512_slli_epi32(r, 16), _mm512_and_si512(r, _mm512_set1_epi32(0xffff)));
    }
    const __m512 scale = q4 ? _mm512_mul_ps(common, _mm512_set1_ps(1.0f / 16)) : common;
    return _mm512_mask_mov_ps(_mm512_set1_ps(NAN), finite, scale);
}

// Products of a quad's even and odd bytes, as 16 bits each, back in place and plus 128.
__m512i join(__m512i even, __m512i odd) {
    const __m512i bytes = _mm512_mask_mov_epi8(even, 0xaaaaaaaaaaaaaaaaULL, _mm512_slli_epi16(odd, 8));
    return _mm512_xor_si512(bytes, _mm512_set1_epi8(sign));
}

// Values between 0 and 15, each times 16 in the low byte of 16 bits.
__m512i scale_nibbles(__m512i sixteenfold, __m512i ratio) {
    const __m512i v = _mm512_and_si512(sixteenfold, _mm512_set1_epi16(0xf0));
    return _mm512_mulhrs_epi16(_mm512_sub_epi16(_mm512_set1_epi16(128), v), ratio);
}

// Signed bytes to requantized ones.
__m512i scale_bytes(__m512i w, __m512i ratio) {
    // each becomes twice its value in 16 bits
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(w, 8), 7);
    const __m512i odd = _mm512_srai_epi16(_mm512_and_si512(w, _mm512_set1_epi16(static_cast<int16_t>(0xff00))), 7);
    return join(_mm512_mulhrs_epi16(even, ratio), _mm512_mulhrs_epi16(odd, ratio));
}

template <uint32_t type> void requantize(const uint8_t * tile, int half, __m512i ratio, uint8_t * out) {
    if constexpr (type == TB_Q4_0_COL) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            const __m512i v = _mm512_loadu_si512(tile + 128 * c + 64 * half);
            const __m512i low =
                join(scale_nibbles(_mm512_slli_epi16(v, 4), ratio), scale_nibbles(_mm512_srli_epi16(v, 4), ratio));
            const __m512i high = join(scale_nibbles(v, ratio), scale_nibbles(_mm512_srli_epi16(v, 8), ratio));
            _mm512_storeu_si512(out + 256 * c, low);
            _mm512_storeu_si512(out + 256 * c + 128, high);
        }
        return;
    }
    __m512i w[8];
    signed_bytes<type>(tile, half, w);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
        _mm512_storeu_si512(out + 128 * j, scale_bytes(w[j], ratio));
}

template <uint32_t type> void prepare_coarse(const uint8_t * panel, int64_t k_tiles, uint8_t * out) {
    constexpr size_t quants = tile_of(type).quants, tile_bytes = tile_of(type).bytes;
    for (int64_t t = 0; t < k_tiles; t += gemm_coarse_tiles, out += gemm_coarse_panel_bytes) {
        const uint8_t * block = panel + tile_bytes * static_cast<size_t>(t);
        const int tiles = static_cast<int>(k_tiles - t < gemm_coarse_tiles ? k_tiles - t : gemm_coarse_tiles);
        for (int i = 0; i < tiles; i++)
            prefetch<tile_bytes, gemm_piece_tiles, _MM_HINT_T1>(block + tile_bytes * i); // the next piece
        for (int half = 0; half < halves; half++) {
            __m512i ratios[gemm_coarse_tiles];
            const __m512 scale = common_scale<type>(block + quants + 32 * half, tiles, ratios);
            for (int i = 0; i < tiles; i++)
                requantize<type>(block + tile_bytes * i, half, ratios[i],
                                 out + gemm_panel * gemm_panel * i + 64 * half);
            _mm512_storeu_ps(out + gemm_coarse_k * gemm_panel + 64 * half, scale);
        }
    }
}

void prepare_coarse_any(uint32_t type, const uint8_t * panel, int64_t k_tiles, uint8_t * out) {
    switch (type) {
    case TB_Q8_0_COL:
        return prepare_coarse<TB_Q8_0_COL>(panel, k_tiles, out);
    case TB_Q4_0_COL:
        return prepare_coarse<TB_Q4_0_COL>(panel, k_tiles, out);
    default:
        return prepare_coarse<TB_IQ4_NL_COL>(panel, k_tiles, out);
    }
}

void quantize_coarse(const float * x, int64_t k_tiles, uint8_t * group, int rows, int row) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    for (int64_t t = 0; t < k_tiles; t += gemm_coarse_tiles, group += gemm_coarse_record_bytes(rows)) {
        const int n = 32 * static_cast<int>(k_tiles - t < gemm_coarse_tiles ? k_tiles - t : gemm_coarse_tiles);
        __m512 top = _mm512_setzero_ps();
        __mmask16 finite = 0xffff;
        for (int i = 0; i < n; i += 16) {
            const __m512 magnitude = _mm512_abs_ps(_mm512_loadu_ps(x + 32 * t + i));
            finite &= _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
            top = _mm512_max_ps(top, magnitude);
        }
        const float amax = _mm512_reduce_max_ps(top);
        const bool live = finite == 0xffff && amax >= gemm_least_amax;
        const float scale = finite != 0xffff ? NAN : live ? amax / 127.0f : 0.0f;
        const __m512 inverse = _mm512_set1_ps(live ? 127.0f / amax : 0.0f);
        const __mmask16 lanes = live ? 0xffff : 0;
        __m512i sum = _mm512_setzero_si512();
        for (int i = 0; i < n; i += 16) {
            const __m512i q = _mm512_maskz_cvtps_epi32(lanes, _mm512_mul_ps(_mm512_loadu_ps(x + 32 * t + i), inverse));
            sum = _mm512_add_epi32(sum, q);
            _mm_storeu_si128(reinterpret_cast<__m128i *>(group + gemm_coarse_k * row + i),
                             _mm_shuffle_epi8(_mm512_cvtepi32_epi8(q), order));
        }
        const int32_t start = -128 * _mm512_reduce_add_epi32(sum);
        std::memcpy(group + gemm_coarse_k * rows + 4 * row, &scale, 4);
        std::memcpy(group + (gemm_coarse_k + 4) * rows + 4 * row, &start, 4);
    }
}

} // namespace

void fill_gemm_avx512vnni_coarse(gemm_kernels & k) {
    k.coarse.quantize = quantize_coarse;
    k.coarse.prepare = prepare_coarse_any;
}

} // namespace tb::npu
