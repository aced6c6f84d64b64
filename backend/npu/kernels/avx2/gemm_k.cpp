// GEMM with types of 256 k on vpmaddubsw and vpmaddwd: 3 or 4 rows x 16 columns at a time, each 32-bit lane four k of
// one column, summed over the block in registers.
//
// vpmaddubsw adds two products into 16 bits with saturation, and vpmaddwd widens and multiplies by the scale at once.
// Added in 16 bits: all 8 quads of a tile of 4 bits (15 * 127 * 2 * 8 = 30480), 4 of 5 bits (31496), 2 of 6 bits
// (32004), of fewer bits those that share a scale; one of signed bytes (127 * 127 * 2 = 32258). Where more rows come
// than registers hold sums for, the block is unpacked once, into L1.
#include "kernels/gemm_k.h"

#include <algorithm>
#include <immintrin.h>

#include "kernels/avx2/lanes.h"

namespace tb::npu {

namespace {

// The scales of 8 columns, each twice in its lane: a factor for vpmaddwd.
template <class Format> __m256i scale_pairs(const uint8_t * scales, int i) {
    const __m256i s = lanes::widened<!Format::minima>(scales + 8 * i);
    return _mm256_or_si256(_mm256_and_si256(s, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(s, 16));
}

constexpr int halves = gemm_panel / (2 * lanes::width); // of a panel: two vectors of columns each

// A block as it is in its panel: weights and scales of tile t, vector i.
template <class Format> struct packed {
    const uint8_t *panel, *scale_bytes;
    __m256i weights(int t, int j, int i) const { return Format(panel, t).weights(j, i); }
    __m256i scale(int t, int s, int i) const {
        return scale_pairs<Format>(scale_bytes + gemm_panel * (Format::scales * t + s), i);
    }
    // The next block comes while this one is used, a piece with each tile of each half: a burst would wait for itself.
    // The hardware follows a stream to the end of its page only. Into L2: into L1 is slower with four rows and more.
    void prefetch(int t, int half) const {
        constexpr size_t piece = Format::bytes / (gemm_k_tiles * halves);
        const uint8_t * next = panel + 3 * Format::bytes / 2 + piece * static_cast<size_t>(halves * t + half);
        for (size_t at = 0; at < piece; at += 64)
            __builtin_prefetch(next + at, 0, 2);
    }
};

// A block unpacked.
template <class Format> struct unpacked {
    __m256i quads[halves][gemm_k_tiles][8][2];
    __m256i scales[halves][gemm_k_tiles][Format::scales][2];

    explicit unpacked(const packed<Format> & from) {
        for (int t = 0; t < gemm_k_tiles; t++) {
#pragma GCC unroll 2
            for (int half = 0; half < halves; half++) {
                from.prefetch(t, half);
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++)
                    for (int i = 0; i < 2; i++)
                        quads[half][t][j][i] = from.weights(t, j, 2 * half + i);
#pragma GCC unroll 2
                for (int s = 0; s < Format::scales; s++)
                    for (int i = 0; i < 2; i++)
                        scales[half][t][s][i] = from.scale(t, s, 2 * half + i);
            }
        }
    }
    __m256i weights(int t, int j, int i) const { return quads[i / 2][t][j][i % 2]; }
    __m256i scale(int t, int s, int i) const { return scales[i / 2][t][s][i % 2]; }
    void prefetch(int, int) const {}
};

// How many quads may be added in 16 bits: as many as share a scale, or half or a quarter of them.
template <class Format> constexpr int k_narrow() {
    int quads = 8 / Format::scales;
    while (quads * Format::most * 127 * 2 > 32767)
        quads /= 2;
    return quads;
}

// Code books: the weights of all others are unsigned.
template <class Format> constexpr bool is_signed = !Format::minima && Format::offset == 0;

// Sums in 16 bits of signed weights: |w| times x * sign(w).
template <bool of_signed> __m256i products(__m256i w, __m256i x) {
    return of_signed ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)) : _mm256_maddubs_epi16(w, x);
}

// Tile t's products of `n` rows with `vectors` of a panel's vectors of columns, from `first` on, added to their sums.
template <class Format, int n, int vectors, class Source>
inline __attribute__((always_inline)) void add_tile(const Source & source, int t, int first, const uint8_t * q,
                                                    __m256i (&sum)[n][vectors]) {
    constexpr int narrow = k_narrow<Format>();
#pragma GCC unroll 8
    for (int part = 0; part < 8; part += narrow) {
        __m256i some[n][vectors];
#pragma GCC unroll 8
        for (int j = part; j < part + narrow; j++) {
            __m256i w[vectors];
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                w[i] = source.weights(t, j, first + i);
#pragma GCC unroll 4
            for (int m = 0; m < n; m++) {
                const __m256i x = lanes::broadcast(read_int(q + TB_K_BLOCK * m + 4 * j));
#pragma GCC unroll 4
                for (int i = 0; i < vectors; i++) {
                    const __m256i p = products<is_signed<Format>>(w[i], x);
                    some[m][i] = j == part ? p : _mm256_add_epi16(some[m][i], p);
                    asm("" : "+x"(some[m][i])); // keeps the order: another needs more registers
                }
            }
        }
        const int s = part * Format::scales / 8;
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
            const __m256i scale = source.scale(t, s, first + i);
#pragma GCC unroll 4
            for (int m = 0; m < n; m++) {
                sum[m][i] = _mm256_add_epi32(sum[m][i], _mm256_madd_epi16(some[m][i], scale));
                asm("" : "+x"(sum[m][i]));
            }
        }
    }
}

template <int n, int vectors> void clear(__m256i (&sum)[n][vectors]) {
#pragma GCC unroll 4
    for (int m = 0; m < n; m++) {
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            sum[m][i] = _mm256_setzero_si256();
    }
}

template <int n, int vectors> void store(const __m256i (&sum)[n][vectors], int first, int32_t (*sums)[gemm_panel]) {
#pragma GCC unroll 4
    for (int m = 0; m < n; m++) {
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            lanes::store_sums(sums[m] + lanes::width * (first + i), sum[m][i]);
    }
}

// All tiles, with the sums in registers. Not to be inlined: among its neighbours the compiler runs out of them.
template <class Format, int n, int vectors, class Source>
__attribute__((noinline)) void some_rows(const Source & source, int first, const uint8_t * q,
                                         int32_t (*sums)[gemm_panel]) {
    __m256i sum[n][vectors];
    clear(sum);
#pragma GCC unroll 1
    for (int t = 0; t < gemm_k_tiles; t++, q += TB_TILE_K) {
        for (int i = 0; i < vectors; i += 2)
            source.prefetch(t, (first + i) / 2);
        add_tile<Format, n, vectors>(source, t, first, q, sum);
    }
    store(sum, first, sums);
}

// The same for both halves of the columns, tile by tile: memory is read in order, and the sums of one half wait in L1.
template <class Format, int n, class Source>
__attribute__((noinline)) void both_halves(const Source & source, const uint8_t * q, int32_t (*sums)[gemm_panel]) {
    __m256i sum[halves][n][2];
    for (auto & half : sum)
        clear(half);
#pragma GCC unroll 1
    for (int t = 0; t < gemm_k_tiles; t++, q += TB_TILE_K) {
#pragma GCC unroll 1
        for (int half = 0; half < halves; half++) {
            source.prefetch(t, half);
            add_tile<Format, n, 2>(source, t, 2 * half, q, sum[half]);
        }
    }
    for (int half = 0; half < halves; half++)
        store(sum[half], 2 * half, sums);
}

template <class Format, int most, class Source>
void few_rows(const Source & source, const uint8_t * q, int rows, int32_t (*sums)[gemm_panel]) {
    if (rows == most) {
        both_halves<Format, most>(source, q, sums);
    } else if constexpr (most > 2) {
        few_rows<Format, most - 1>(source, q, rows, sums);
    }
}

template <class Format, int most, class Source>
void at_most(const Source & source, int half, const uint8_t * q, int rows, int32_t (*sums)[gemm_panel]) {
    if (rows == most) {
        some_rows<Format, most, 2>(source, 2 * half, q, sums);
    } else if constexpr (most > 1) {
        at_most<Format, most - 1>(source, half, q, rows, sums);
    }
}

// Rows at a time. With few quads in a sum its registers are soon free again, and three rows need no other place.
template <class Format> constexpr int block_rows = k_narrow<Format>() > 2 ? 4 : 3;

// In blocks that differ by one row at most.
template <class Format, class Source>
void all_rows(const Source & source, const uint8_t * q, int rows, int32_t (*sums)[gemm_panel]) {
    for (int half = 0; half < halves; half++) {
        int blocks = (rows + block_rows<Format> - 1) / block_rows<Format>;
        for (int row = 0; row < rows; blocks--) {
            const int n = (rows - row) / blocks;
            at_most<Format, block_rows<Format>>(source, half, q + TB_K_BLOCK * row, n, sums + row);
            row += n;
        }
    }
}

struct unit : lanes {
    static constexpr bool signed_weights = true; // those that fill eight bits
    static constexpr bool starts = false;
    template <class Format>
    static void block(const uint8_t * panel, const uint8_t * scales, const k_record & r, int rows,
                      int32_t (*sums)[gemm_panel]) {
        const packed<Format> source{panel, scales};
        // One row has registers for all columns: memory is read in order, and an activation once. For a few, memory is
        // the limit, too; more of them read the halves of a block one after the other.
        if (rows == 1) return some_rows<Format, 1, 2 * halves>(source, 0, r.q, sums);
        if (rows <= block_rows<Format>) return few_rows<Format, block_rows<Format>>(source, r.q, rows, sums);
        if (Format::plain && rows <= 2 * block_rows<Format>) return all_rows<Format>(source, r.q, rows, sums);
        all_rows<Format>(unpacked<Format>(source), r.q, rows, sums);
    }
};

// 8 floats to integers in [-127, 127], in 32-bit lanes.
__m256i rounded(const float * x, __m256 inverse) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
}

void quantize(const float * x, int64_t k_tiles, uint8_t * group, int rows, int row) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256 infinity = _mm256_set1_ps(INFINITY);
    // vpackssdw and vpacksswb work in 128-bit halves; then quad order: bytes 0 2 1 3 of each four
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i quads = _mm256_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15, //
                                           0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    for (int64_t t = 0; t < k_tiles; t += 8, x += TB_K_BLOCK, group += gemm_k_record_bytes(rows)) {
        __m256 amax = _mm256_setzero_ps(), finite = _mm256_cmp_ps(amax, amax, _CMP_EQ_OQ);
        for (int i = 0; i < TB_K_BLOCK; i += 8) {
            const __m256 v = _mm256_and_ps(_mm256_loadu_ps(x + i), magnitude);
            finite = _mm256_and_ps(finite, _mm256_cmp_ps(v, infinity, _CMP_LT_OQ));
            amax = _mm256_max_ps(amax, v);
        }
        alignas(32) float lanes[8];
        _mm256_store_ps(lanes, amax);
        const k_scale s = scale_of_k_block(*std::max_element(lanes, lanes + 8), _mm256_movemask_ps(finite) == 255);
        const k_record r(group, rows);
        uint8_t * q = group + TB_K_BLOCK * row;
        int16_t sums16[16], sums32[8];
        for (int i = 0; i < 8; i++, q += 32) {
            const float * v = x + 32 * i;
            __m256i bytes = _mm256_setzero_si256();
            if (s.inverse > 0) {
                const __m256 by = _mm256_set1_ps(s.inverse);
                const __m256i low = _mm256_packs_epi32(rounded(v, by), rounded(v + 8, by));
                const __m256i high = _mm256_packs_epi32(rounded(v + 16, by), rounded(v + 24, by));
                bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), in_order);
            }
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
            const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            const int first = sum_of(_mm256_permute2x128_si256(fours, fours, 0x80)), both = sum_of(fours);
            sums16[2 * i] = static_cast<int16_t>(first);
            sums16[2 * i + 1] = static_cast<int16_t>(both - first);
            sums32[i] = static_cast<int16_t>(both);
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(q), _mm256_shuffle_epi8(bytes, quads));
        }
        store_k_sums(r, row, s.scale, sums16, sums32);
    }
}

} // namespace

void fill_gemm_avx2_k(gemm_kernels & k) {
    k.quantize_k = quantize;
    fill_k_kernels<unit>(k, TILEBEAM_K_NAMES("4x16_avx2"));
}

} // namespace tb::npu
