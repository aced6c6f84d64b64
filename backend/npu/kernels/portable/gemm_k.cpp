// GEMM with types of 256 k in portable C++: the reference of the other sets. kernels/gemm_k.h says how sums are made.
#include "kernels/gemm_k.h"

#include "half.h"

namespace tb::npu {

namespace {

constexpr int max_rows = 8;
constexpr float round_to_integer = 12582912.0f; // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even

// Byte `at` (below 128) of quad j of a tile: its nibble, pair of bits, or bit.
int nibble(const uint8_t * panel, int t, int j, int at) {
    return panel[k_nibbles_bytes * t + 128 * (j / 2) + at] >> 4 * (j % 2) & 15;
}
int pair(const uint8_t * plane, int t, int j, int at) {
    return plane[k_pairs_bytes * t + 128 * (j / 4) + at] >> 2 * (j % 4) & 3;
}
int one(const uint8_t * plane, int t, int j, int at) { return plane[k_ones_bytes * t + at] >> j & 1; }

// Number i of column n of a six(h) (tilebeam/k_panels.h).
template <int h> int six_bits(const uint8_t * fields, int i, int n) {
    const int part = i / (h / 2), at = i % (h / 2);
    const int low = fields[32 * ((part & 1) * (h / 2) + at) + n] >> (part >> 1) * 4 & 15;
    return low | (fields[32 * (h + at) + n] >> part * 2 & 3) << 4;
}

// Of column n and 16 k, the i-th of the block: its number of a four(8 * of_tile).
template <int of_tile> int four_bits(const uint8_t * fields, int i, int n) {
    constexpr int half = 4 * of_tile;
    const int at = i * of_tile / 2;
    return fields[32 * (at % half) + n] >> at / half * 4 & 15;
}

// Of each type: a quant, and the scale and minimum of half i of a block's tiles, 16 k each.
struct q4_k : k_format {
    static constexpr size_t bytes = TB_Q4_K_PANEL, fields = TB_Q4_K_FIELDS, halves = TB_Q4_K_HALVES;
    static constexpr bool minima = true;
    static int quant(const uint8_t * p, int t, int j, int at) { return nibble(p, t, j, at); }
    static int scale(const uint8_t * f, int i, int n) { return six_bits<8>(f, i / 2, n); }
    static int minimum(const uint8_t * f, int i, int n) { return six_bits<8>(f, 8 + i / 2, n); }
};

struct q5_k : q4_k {
    static constexpr size_t bytes = TB_Q5_K_PANEL, fields = TB_Q5_K_FIELDS, halves = TB_Q5_K_HALVES;
    static int quant(const uint8_t * p, int t, int j, int at) {
        return nibble(p, t, j, at) | one(p + TB_K_NIBBLES, t, j, at) << 4;
    }
};

struct without_minima : k_format {
    static constexpr bool minima = false;
    static int minimum(const uint8_t *, int, int) { return 0; }
};

struct q6_k : without_minima {
    static constexpr size_t bytes = TB_Q6_K_PANEL, fields = TB_Q6_K_FIELDS, halves = TB_Q6_K_HALVES;
    static int quant(const uint8_t * p, int t, int j, int at) {
        return (nibble(p, t, j, at) | pair(p + TB_K_NIBBLES, t, j, at) << 4) - 32;
    }
    static int scale(const uint8_t * f, int i, int n) { return static_cast<int8_t>(f[32 * i + n]); }
};

struct q2_k : k_format {
    static constexpr size_t bytes = TB_Q2_K_PANEL, fields = TB_Q2_K_FIELDS, halves = TB_Q2_K_HALVES;
    static constexpr bool minima = true;
    static int quant(const uint8_t * p, int t, int j, int at) { return pair(p, t, j, at); }
    static int scale(const uint8_t * f, int i, int n) { return f[32 * i + n] & 15; }
    static int minimum(const uint8_t * f, int i, int n) { return f[32 * i + n] >> 4; }
};

struct q3_k : without_minima {
    static constexpr size_t bytes = TB_Q3_K_PANEL, fields = TB_Q3_K_FIELDS, halves = TB_Q3_K_HALVES;
    static int quant(const uint8_t * p, int t, int j, int at) {
        return (pair(p, t, j, at) | one(p + TB_K_PAIRS, t, j, at) << 2) - 4;
    }
    static int scale(const uint8_t * f, int i, int n) { return six_bits<8>(f, i, n) - 32; }
};

struct iq4_xs : without_minima {
    static constexpr size_t bytes = TB_IQ4_XS_PANEL, fields = TB_IQ4_XS_FIELDS, halves = TB_IQ4_XS_HALVES;
    static int quant(const uint8_t * p, int t, int j, int at) { return iq4nl_values[nibble(p, t, j, at)]; }
    static int scale(const uint8_t * f, int i, int n) { return six_bits<4>(f, i / 2, n) - 32; }
};

struct without_scales : without_minima {
    static constexpr size_t fields = 0;
    static int scale(const uint8_t *, int, int) { return 1; }
};

struct tq2_0 : without_scales {
    static constexpr size_t bytes = TB_TQ2_0_PANEL, halves = TB_TQ2_0_HALVES;
    static int quant(const uint8_t * p, int t, int j, int at) { return pair(p, t, j, at) - 1; }
};

struct tq1_0 : without_scales {
    static constexpr size_t bytes = TB_TQ1_0_PANEL, halves = TB_TQ1_0_HALVES;
    static int quant(const uint8_t * p, int t, int j, int at) {
        const k_digits d(t, j);
        return (static_cast<uint8_t>(p[128 * d.row + at] * d.power) * 3 >> 8) - 1;
    }
};

// IQ1 to IQ3: a code book, and scale 2s + 1.
template <class Book, int of_tile> struct three_bits : without_minima {
    static constexpr int parts = Book::parts;
    static constexpr size_t fields = TB_IQ2_FIELDS, halves = fields + TB_K_FOUR(8) * of_tile;
    static constexpr size_t bytes = halves + TB_K_HALVES;
    static int quant(const uint8_t * p, int t, int j, int at) {
        return Book::at[pair(p, t, j, at) | one(p + TB_K_PAIRS, t, j, at) << 2];
    }
    static int scale(const uint8_t * f, int i, int n) { return 2 * four_bits<of_tile>(f, i, n) + 1; }
};

template <class Book> struct book_of_nibbles : without_minima {
    static constexpr int parts = Book::parts;
    static constexpr size_t bytes = TB_IQ3_PANEL, fields = TB_IQ3_FIELDS, halves = TB_IQ3_HALVES;
    static int quant(const uint8_t * p, int t, int j, int at) { return Book::at[nibble(p, t, j, at)]; }
    static int scale(const uint8_t * f, int i, int n) { return 2 * four_bits<1>(f, i, n) + 1; }
};

struct iq1_s : k_format {
    static constexpr int parts = TB_IQ1_PARTS;
    static constexpr bool minima = true, one_d = true;
    static constexpr size_t bytes = TB_IQ1_S_PANEL, fields = TB_IQ1_S_FIELDS, halves = TB_IQ1_S_HALVES;
    static int quant(const uint8_t * p, int t, int j, int at) { return pair(p, t, j, at); }
    static int odd(const uint8_t * f, int i, int n) { return 2 * (four_bits<1>(f, i, n) & 7) + 1; }
    static int scale(const uint8_t * f, int i, int n) { return 8 * odd(f, i, n); }
    static int minimum(const uint8_t * f, int i, int n) { return (four_bits<1>(f, i, n) & 8 ? 9 : 7) * odd(f, i, n); }
};

template <class Format> void run(const gemm_int8_args & a) {
    const uint8_t * panel = a.panel;
    const uint8_t * record = a.group;
    for (int64_t t0 = 0; t0 < a.k_tiles; t0 += gemm_k_tiles, panel += Format::bytes) {
        const k_record r(record, a.rows);
        record += gemm_k_record_bytes(a.rows);
        int scales[16][gemm_panel], minima[16][gemm_panel];
        for (int i = 0; i < 16; i++) {
            for (int n = 0; n < gemm_panel; n++) {
                scales[i][n] = Format::scale(panel + Format::fields, i, n);
                minima[i][n] = Format::minimum(panel + Format::fields, i, n);
            }
        }
        int32_t sums[max_rows][gemm_panel] = {};
        for (int t = 0; t < gemm_k_tiles; t++) {
            for (int j = 0; j < 8; j++) {
                int16_t w[128];
                for (int at = 0; at < 128; at++)
                    w[at] = static_cast<int16_t>(Format::quant(panel, t, j, at) * scales[2 * t + j / 4][at / 4]);
                for (int m = 0; m < a.rows; m++) {
                    const int8_t * x = reinterpret_cast<const int8_t *>(r.q) + TB_K_BLOCK * m + 32 * t + 4 * j;
                    for (int n = 0; n < gemm_panel; n++)
                        sums[m][n] += x[0] * w[4 * n] + x[1] * w[4 * n + 1] + x[2] * w[4 * n + 2] + x[3] * w[4 * n + 3];
                }
            }
        }
        const uint8_t * halves = panel + Format::halves;
        for (int m = 0; m < a.rows; m++) {
            float scale;
            int16_t sums16[16];
            std::memcpy(&scale, r.scales + 4 * m, 4);
            std::memcpy(sums16, r.sums16 + gemm_k_sums16 * static_cast<size_t>(m), gemm_k_sums16);
            for (int n = 0; n < gemm_panel; n++) {
                const float d = tb_half_to_float(tb_load16(halves + 2 * n)) * (1.0f / Format::parts);
                int taken = 0;
                for (int i = 0; i < 16; i++)
                    taken += minima[i][n] * sums16[i];
                float x = d * static_cast<float>(sums[m][n] - (Format::one_d ? taken : 0));
                if (Format::minima && !Format::one_d) {
                    x -= tb_half_to_float(tb_load16(halves + TB_K_HALVES + 2 * n)) * static_cast<float>(taken);
                }
                a.out[m][n] = a.add || t0 > 0 ? a.out[m][n] + x * scale : x * scale;
            }
        }
    }
}

void quantize(const float * x, int64_t k_tiles, uint8_t * group, int rows, int row) {
    static constexpr int order[4] = {0, 2, 1, 3};
    for (int64_t t = 0; t < k_tiles; t += 8, x += TB_K_BLOCK, group += gemm_k_record_bytes(rows)) {
        float amax = 0;
        bool finite = true;
        for (int i = 0; i < TB_K_BLOCK; i++) {
            const float magnitude = std::fabs(x[i]);
            finite = finite && magnitude < INFINITY;
            amax = magnitude > amax ? magnitude : amax;
        }
        const k_scale s = scale_of_k_block(amax, finite);
        int16_t sums16[16] = {}, sums32[8] = {};
        for (int i = 0; i < TB_K_BLOCK; i++) {
            int8_t q = 0;
            if (s.inverse > 0) {
                const float v = x[(i & ~3) + order[i & 3]] * s.inverse + round_to_integer;
                q = static_cast<int8_t>(v - round_to_integer);
            }
            group[TB_K_BLOCK * row + i] = static_cast<uint8_t>(q);
            sums16[i / 16] = static_cast<int16_t>(sums16[i / 16] + q);
            sums32[i / 32] = static_cast<int16_t>(sums32[i / 32] + q);
        }
        store_k_sums(k_record(group, rows), row, s.scale, sums16, sums32);
    }
}

} // namespace

void fill_gemm_portable_k(gemm_kernels & k) {
    k.quantize_k = quantize;
    k.int8[gemm_q4_k] = {"gemm_q4k_8x32_portable", max_rows, 0, run<q4_k>};
    k.int8[gemm_q5_k] = {"gemm_q5k_8x32_portable", max_rows, 0, run<q5_k>};
    k.int8[gemm_q6_k] = {"gemm_q6k_8x32_portable", max_rows, 0, run<q6_k>};
    k.int8[gemm_q2_k] = {"gemm_q2k_8x32_portable", max_rows, 0, run<q2_k>};
    k.int8[gemm_q3_k] = {"gemm_q3k_8x32_portable", max_rows, 0, run<q3_k>};
    k.int8[gemm_iq4_xs] = {"gemm_nlx_8x32_portable", max_rows, 0, run<iq4_xs>};
    k.int8[gemm_tq2_0] = {"gemm_tq2_8x32_portable", max_rows, 0, run<tq2_0>};
    k.int8[gemm_tq1_0] = {"gemm_tq1_8x32_portable", max_rows, 0, run<tq1_0>};
    k.int8[gemm_iq2_xxs] = {"gemm_i2x_8x32_portable", max_rows, 0, run<three_bits<iq2_book, 1>>};
    k.int8[gemm_iq2_xs] = {"gemm_i2s_8x32_portable", max_rows, 0, run<three_bits<iq2_book, 2>>};
    k.int8[gemm_iq3_xxs] = {"gemm_i3x_8x32_portable", max_rows, 0, run<book_of_nibbles<iq3_xxs_book>>};
    k.int8[gemm_iq3_s] = {"gemm_i3s_8x32_portable", max_rows, 0, run<book_of_nibbles<iq3_s_book>>};
    k.int8[gemm_iq1_s] = {"gemm_i1s_8x32_portable", max_rows, 0, run<iq1_s>};
    k.int8[gemm_iq1_m] = {"gemm_i1m_8x32_portable", max_rows, 0, run<three_bits<iq1_book, 2>>};
}

} // namespace tb::npu
