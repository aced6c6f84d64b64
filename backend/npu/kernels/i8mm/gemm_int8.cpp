// Integer GEMM on smmla, a product of 2 columns x 8 k with 8 k x 2 rows: 32 products an instruction, sdot's 16.
//
// A tile's 32-bit lanes hold four k of a column, smmla wants eight: two quads are interleaved in registers after
// unpacking (two instructions for four columns and all rows of a group), because the tiles are one layout for every
// target. Activations are this set's own, so they lie in pairs of rows (gemm_kernels.row_pairs) and are read as they
// are. An odd last row counts twice. One row alone has nothing to pair with and stays with sdot.
//
// The sums of four columns stay in registers while a piece of k passes, two rows and two columns a register, columns
// before rows: so scales and start values of two rows come with one load each.
#include "kernels/gemm_shape.h"
#include "kernels/kernels.h"
#include "kernels/neon/int8.h"

namespace tb::npu {

namespace {

// In pairs of rows by pairs of columns; integer and float sums each. A vector of quants unpacks into two pairs of
// columns, and more of those at a time would cost more unpacking than they save loads. Beside them unpacking takes six
// registers: the mask of nibbles, the table, two vectors of quants and what becomes of them.
constexpr gemm_shape shape = solve_gemm_shape(32, 2, 2, 6, gemm_max_rows / 2);
constexpr int max_rows = 2 * shape.rows;
static_assert(max_rows == 10 && shape.vectors == 2, "the kernels' names");

// Two rows' numbers at p, or of an odd last row the same one twice, for both columns of a pair.
template <bool both> int32x4_t two_numbers(const uint8_t * p) {
    const int32_t * n = reinterpret_cast<const int32_t *>(p);
    if constexpr (both) return vreinterpretq_s32_s64(vld1q_dup_s64(reinterpret_cast<const int64_t *>(n)));
    return vld1q_dup_s32(n);
}

// k 8 * s to 8 * s + 7 of rows 2 * pair and 2 * pair + 1.
template <bool both> int8x16_t two_rows(const uint8_t * record, int pair, int s) {
    if constexpr (both) return unit::bytes(unit::load(record + 64 * pair + 16 * s));
    return vreinterpretq_s8_s64(vld1q_dup_s64(reinterpret_cast<const int64_t *>(record + 64 * pair + 8 * s)));
}

// Columns 4 * g to 4 * g + 3 of `tiles` tiles.
template <class Format, int rows>
void columns(const uint8_t * tile, const uint8_t * record, int64_t tiles, int g, bool add, float * const * out) {
    constexpr int pairs = (rows + 1) / 2;
    constexpr bool odd = rows % 2 != 0, halves = has_halves<Format>;
    constexpr int parts = halves ? 2 : 1, steps = 4 / parts; // with a scale each
    float32x4_t acc[pairs][2];
#pragma GCC unroll 6
    for (int p = 0; p < pairs; p++) {
        acc[p][0] = acc[p][1] = vdupq_n_f32(0);
        if (add) {
            const float32x4_t a = vld1q_f32(out[2 * p] + 4 * g);
            const float32x4_t b = odd && p == pairs - 1 ? a : vld1q_f32(out[2 * p + 1] + 4 * g);
            acc[p][0] = vzip1q_f32(a, b);
            acc[p][1] = vzip2q_f32(a, b);
        }
    }
    for (int64_t t = 0; t < tiles; t++, tile += Format::bytes, record += gemm_record_bytes(rows)) {
        int32x4_t sum[pairs][2];
        const auto each_pair = [](auto && whole, auto && last) {
#pragma GCC unroll 6
            for (int p = 0; p < rows / 2; p++)
                whole(p);
            if constexpr (odd) last(pairs - 1);
        };
        const auto start = [&](int p, int32x4_t v) {
            sum[p][0] = sum[p][1] = Format::offset && !Format::has_minima ? v : vdupq_n_s32(0);
        };
#pragma GCC unroll 2
        for (int h = 0; h < parts; h++) {
            each_pair([&](int p) { start(p, two_numbers<true>(record + 36 * rows + 8 * p)); },
                      [&](int p) { start(p, two_numbers<false>(record + 36 * rows + 8 * p)); });
#pragma GCC unroll 4
            for (int s = steps * h; s < steps * (h + 1); s++) {
                const int32x4_t w0 = Format::weights(tile, s, 0, g), w1 = Format::weights(tile, s, 1, g);
                const int8x16_t low = unit::bytes(vzip1q_s32(w0, w1));
                const int8x16_t high = unit::bytes(vzip2q_s32(w0, w1));
                const auto multiply = [&](int p, int8x16_t x) {
                    sum[p][0] = vmmlaq_s32(sum[p][0], low, x);
                    sum[p][1] = vmmlaq_s32(sum[p][1], high, x);
                };
                each_pair([&](int p) { multiply(p, two_rows<true>(record, p, s)); },
                          [&](int p) { multiply(p, two_rows<false>(record, p, s)); });
            }
            float32x4_t d;
            if constexpr (halves) {
                d = h == 0 ? Format::scales(tile, g) : Format::minima(tile, g);
            } else {
                d = Format::scales(tile, g);
            }
            const float32x4_t scale[2] = {vzip1q_f32(d, d), vzip2q_f32(d, d)};
            float32x4_t least[2];
            if constexpr (Format::has_minima) {
                const float32x4_t m = Format::minima(tile, g);
                least[0] = vzip1q_f32(m, m);
                least[1] = vzip2q_f32(m, m);
            }
            const auto finish = [&](int p, int32x4_t bits, int32x4_t starts) {
                const float32x4_t x = vreinterpretq_f32_s32(bits);
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    const float32x4_t dot = vcvtq_f32_s32(sum[p][i]);
                    if constexpr (Format::has_minima) {
                        const float32x4_t taken = vmulq_f32(least[i], vcvtq_f32_s32(starts));
                        acc[p][i] = vfmaq_f32(acc[p][i], vfmaq_f32(taken, dot, scale[i]), x);
                    } else {
                        acc[p][i] = vfmaq_f32(acc[p][i], dot, vmulq_f32(scale[i], x));
                    }
                }
            };
            const uint8_t *scales = record + 32 * rows, *starts = record + 36 * rows;
            each_pair(
                [&](int p) { finish(p, two_numbers<true>(scales + 8 * p), two_numbers<true>(starts + 8 * p)); },
                [&](int p) { finish(p, two_numbers<false>(scales + 8 * p), two_numbers<false>(starts + 8 * p)); });
        }
    }
#pragma GCC unroll 6
    for (int p = 0; p < pairs; p++) {
        vst1q_f32(out[2 * p] + 4 * g, vuzp1q_f32(acc[p][0], acc[p][1]));
        if (!odd || p < pairs - 1) vst1q_f32(out[2 * p + 1] + 4 * g, vuzp2q_f32(acc[p][0], acc[p][1]));
    }
}

template <class Format, int rows> void run(const gemm_int8_args & a) {
    if (a.rows != rows) {
        if constexpr (rows > 1) run<Format, rows - 1>(a);
    } else if constexpr (rows == 1) {
        multiply_tiles<unit, Format>(a);
    } else {
        // The first four columns bring a piece into the cache, the others find it there.
        for (int64_t t = 0; t < a.k_tiles; t += gemm_piece_tiles) {
            const int64_t n = a.k_tiles - t < gemm_piece_tiles ? a.k_tiles - t : gemm_piece_tiles;
            for (int g = 0; g < gemm_panel / 4; g++) {
                columns<Format, rows>(a.panel + t * static_cast<int64_t>(Format::bytes),
                                      a.group + t * static_cast<int64_t>(gemm_record_bytes(rows)), n, g, a.add || t > 0,
                                      a.out);
            }
        }
    }
}

template <class Format> gemm_int8 kernel(const char * name) {
    return {name, max_rows, Format::offset, run<Format, max_rows>};
}

// Eights of a row beside those of its neighbour.
void place(uint8_t * record, int rows, int row, uint8x16_t q0, uint8x16_t q1) {
    const bool alone = row == rows - 1 && rows % 2 != 0;
    uint8_t * to = record + 64 * (row / 2) + 8 * (row % 2);
    const int step = alone ? 8 : 16;
    vst1_u8(to, vget_low_u8(q0));
    vst1_u8(to + step, vget_high_u8(q0));
    vst1_u8(to + 2 * step, vget_low_u8(q1));
    vst1_u8(to + 3 * step, vget_high_u8(q1));
}

void quantize(const float * x, int64_t k_tiles, int32_t offset, uint8_t * group, int rows, int row) {
    quantize_row(x, k_tiles, offset, group, rows, row, place);
}

} // namespace

// NEON's set but for the integer GEMM.
void fill_i8mm(kernel_table & t) {
    fill_neon(t);
    TILEBEAM_COLUMN_KERNELS(t.gemm, "10x4_i8mm");
    t.gemm.quantize = quantize;
    t.gemm.row_pairs = true;
}

} // namespace tb::npu
