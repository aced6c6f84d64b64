// Float GEMM in portable C++, and what turns weights of every kind into its panels: F32, F16 and BF16 rows, and tiles
// for the FP16 numerics.
#include "kernels/kernels.h"

#include <cstring>

#include "half.h"

namespace tb::npu {

void fill_gemm_portable_int8(gemm_kernels & k);
void fill_gemm_portable_k(gemm_kernels & k);

namespace {

float round_half(float v) { return tb_half_to_float(tb_float_to_half(v)); }

void run(const gemm_float_args & a) {
    for (int m = 0; m < a.rows; m++) {
        float acc[32] = {};
        if (a.add) std::memcpy(acc, a.out[m], sizeof(acc));
        for (int64_t k = 0; k < a.k; k++) {
            const float x = a.group[k * a.rows + m];
            const float * w = a.panel + 32 * k;
            for (int n = 0; n < 32; n++)
                acc[n] += x * w[n];
        }
        std::memcpy(a.out[m], acc, sizeof(acc));
    }
}

float element(uint32_t type, const uint8_t * row, int64_t k) {
    if (type == TB_F32) {
        float v;
        std::memcpy(&v, row + 4 * k, 4);
        return v;
    }
    const uint16_t bits = tb_load16(row + 2 * k);
    return type == TB_F16 ? tb_half_to_float(bits) : tb_bf16_to_float(bits);
}

template <uint32_t type> void dot(const gemm_dot_args & a) {
    for (int m = 0; m < a.rows; m++) {
        for (int c = 0; c < a.cols; c++) {
            const uint8_t * w = a.w + c * a.stride;
            // eight partial sums, as a vector unit would have
            float acc[8] = {};
            int64_t k = 0;
            for (; k + 8 <= a.k; k += 8) {
                for (int i = 0; i < 8; i++)
                    acc[i] += a.x[m][k + i] * element(type, w, k + i);
            }
            float sum = 0;
            for (; k < a.k; k++)
                sum += a.x[m][k] * element(type, w, k);
            for (float v : acc)
                sum += v;
            a.out[m][c] = sum;
        }
    }
}

void dequantize(uint32_t type, const uint8_t * panel, int64_t k_tiles, float * out) {
    const tile_traits tile = tile_of(type);
    const bool q8 = tile.source == TB_Q8_0, nonlinear = tile.source == TB_IQ4_NL;
    for (int64_t t = 0; t < k_tiles; t++, panel += tile.bytes, out += gemm_panel * gemm_panel) {
        for (int k = 0; k < 32; k++) {
            const int p = k & 1, v = k >> 1; // position in the row pair, row pair
            for (int n = 0; n < 32; n++) {
                int q;
                if (q8) {
                    const int byte = panel[128 * (k / 4) + 4 * n + 2 * p + (v & 1)];
                    q = byte < 128 ? byte : byte - 256;
                } else {
                    const int byte = panel[128 * (k / 8) + 4 * n + 2 * p + (v & 1)];
                    const int nibble = v & 2 ? byte >> 4 : byte & 15;
                    q = nonlinear ? iq4nl_values[nibble] : nibble - 8;
                }
                const int group = tile.column ? n : 2 * v + n / 16;
                const float scale = tb_half_to_float(tb_load16(panel + tile.quants + 2 * group));
                out[32 * k + n] = round_half(static_cast<float>(q) * scale);
            }
        }
    }
}

void pack(uint32_t type, const uint8_t * src, int64_t stride, int cols, int64_t k, float * out) {
    for (int64_t i = 0; i < k; i++) {
        for (int n = 0; n < 32; n++)
            out[32 * i + n] = n < cols ? element(type, src + n * stride, i) : 0.0f;
    }
}

void round_fp16(int64_t n, float * x) {
    for (int64_t i = 0; i < n; i++)
        x[i] = round_half(x[i]);
}

} // namespace

void fill_portable(kernel_table & t) {
    gemm_kernels & k = t.gemm;
    fill_gemm_portable_int8(k);
    fill_gemm_portable_k(k);
    k.f32 = {"gemm_f32_8x32_portable", 8, run};
    k.fp16 = {};
    k.dot[gemm_f32] = {"gemm_f32d_1x1_portable", 96, dot<TB_F32>};
    k.dot[gemm_f16] = {"gemm_f16d_1x1_portable", 96, dot<TB_F16>};
    k.dot[gemm_bf16] = {"gemm_bf16d_1x1_portable", 96, dot<TB_BF16>};
    k.dequantize = dequantize;
    k.pack = pack;
    k.round_fp16 = round_fp16;
    fill_attention_portable(t.attention);
    fill_vec_portable(t.vec);
}

} // namespace tb::npu
