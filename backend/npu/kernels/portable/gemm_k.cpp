// K-quant GEMM in portable C++: the reference of the other sets. kernels/gemm_k.h says how sums are made.
#include "kernels/gemm_k.h"

#include "half.h"

namespace tb::npu {

void fill_gemm_portable_k(gemm_kernels & k);

namespace {

constexpr int max_rows = 8;
constexpr float round_to_integer = 12582912.0f; // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even

// High bits of byte `at` (below 128) of quad j of tile t.
template <uint32_t type> int high_bits(const uint8_t * panel, int t, int j, int at) {
    if (type == TB_Q5_K_COL) return panel[TB_K_QUANTS + TB_Q5_K_PLANE * t + at] >> j & 1;
    if (type == TB_Q6_K_COL) return panel[TB_K_QUANTS + TB_Q6_K_PLANE * t + 128 * (j / 4) + at] >> 2 * (j % 4) & 3;
    return 0;
}

template <uint32_t type> struct layout;
template <> struct layout<TB_Q4_K_COL> {
    static constexpr size_t bytes = TB_Q4_K_PANEL, fields = TB_Q4_K_FIELDS, halves = TB_Q4_K_HALVES;
};
template <> struct layout<TB_Q5_K_COL> {
    static constexpr size_t bytes = TB_Q5_K_PANEL, fields = TB_Q5_K_FIELDS, halves = TB_Q5_K_HALVES;
};
template <> struct layout<TB_Q6_K_COL> {
    static constexpr size_t bytes = TB_Q6_K_PANEL, fields = TB_Q6_K_FIELDS, halves = TB_Q6_K_HALVES;
};

// Scale and minimum of tile t and column n; of Q6_K the scale of its first 16 k and of the others.
template <uint32_t type> void factors_of(const uint8_t * fields, int t, int n, int (&out)[2]) {
    if (type == TB_Q6_K_COL) {
        out[0] = static_cast<int8_t>(fields[64 * t + n]);
        out[1] = static_cast<int8_t>(fields[64 * t + 32 + n]);
    } else {
        const int low = fields[32 * t + n], high = fields[TB_K_LOW + 32 * (t % 4) + n] >> (t / 4 * 2);
        out[0] = (low & 15) | (high & 3) << 4;
        out[1] = low >> 4 | (high >> 4 & 3) << 4;
    }
}

template <uint32_t type> void run(const gemm_int8_args & a) {
    constexpr bool six = type == TB_Q6_K_COL;
    const uint8_t * panel = a.panel;
    const uint8_t * record = a.group;
    for (int64_t t0 = 0; t0 < a.k_tiles; t0 += 8, panel += layout<type>::bytes) {
        const k_record r(record, a.rows);
        record += gemm_k_record_bytes(a.rows);
        int factors[8][gemm_panel][2];
        for (int t = 0; t < 8; t++) {
            for (int n = 0; n < gemm_panel; n++)
                factors_of<type>(panel + layout<type>::fields, t, n, factors[t][n]);
        }
        int32_t sums[max_rows][gemm_panel] = {};
        for (int t = 0; t < 8; t++) {
            for (int j = 0; j < 8; j++) {
                int16_t w[128];
                for (int i = 0; i < 128; i++) {
                    const int byte = panel[512 * t + 128 * (j / 2) + i];
                    const int q = (j % 2 ? byte >> 4 : byte & 15) | high_bits<type>(panel, t, j, i) << 4;
                    w[i] = static_cast<int16_t>(q * factors[t][i / 4][six ? j / 4 : 0]);
                }
                for (int m = 0; m < a.rows; m++) {
                    const int8_t * x = reinterpret_cast<const int8_t *>(r.q) + TB_K_BLOCK * m + 32 * t + 4 * j;
                    for (int n = 0; n < gemm_panel; n++)
                        sums[m][n] += x[0] * w[4 * n] + x[1] * w[4 * n + 1] + x[2] * w[4 * n + 2] + x[3] * w[4 * n + 3];
                }
            }
        }
        const uint8_t * halves = panel + layout<type>::halves;
        for (int m = 0; m < a.rows; m++) {
            float scale;
            int16_t sums16[16], sums32[8];
            std::memcpy(&scale, r.scales + 4 * m, 4);
            std::memcpy(sums16, r.sums16 + gemm_k_sums16 * static_cast<size_t>(m), gemm_k_sums16);
            std::memcpy(sums32, r.sums32 + gemm_k_sums32 * static_cast<size_t>(m), gemm_k_sums32);
            for (int n = 0; n < gemm_panel; n++) {
                const float d = tb_half_to_float(tb_load16(halves + 2 * n));
                int32_t taken = 0;
                for (int t = 0; t < 8; t++) {
                    const int (&f)[2] = factors[t][n];
                    taken += six ? f[0] * sums16[2 * t] + f[1] * sums16[2 * t + 1] : f[1] * sums32[t];
                }
                float x = d * static_cast<float>(sums[m][n] - (six ? 32 * taken : 0));
                if (!six) x -= tb_half_to_float(tb_load16(halves + TB_K_HALVES + 2 * n)) * static_cast<float>(taken);
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
    k.int8[gemm_q4_k] = {"gemm_q4k_8x32_portable", max_rows, 0, run<TB_Q4_K_COL>};
    k.int8[gemm_q5_k] = {"gemm_q5k_8x32_portable", max_rows, 0, run<TB_Q5_K_COL>};
    k.int8[gemm_q6_k] = {"gemm_q6k_8x32_portable", max_rows, 0, run<TB_Q6_K_COL>};
}

} // namespace tb::npu
