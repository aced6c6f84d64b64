// The portable attention kernels, and the exp2 table that defines the exponent of all sets.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "half.h"
#include "kernels/attention.h"
#include "kernels/attention_any_order.h"
#include "tilebeam/layout.h"
#include "tilebeam/types.h"

namespace tb::npu {
namespace {

constexpr float log2e = 1.4426950408889634f;

// exp2 of a non-positive FP16 number, rounded once: double carries 42 bits more than FP16 needs, so scaling to the
// FP16 quantum and rounding there to nearest even is exact.
uint16_t exp2_of_half(uint16_t bits) {
    const double x = static_cast<double>(tb_half_to_float(bits));
    if (std::isnan(x)) {
        return 0x7e00;
    }
    const double y = std::exp2(x);
    if (y < 0x1p-25) {
        return 0;
    }
    const int quantum = std::max(std::ilogb(y), -14) - 10; // the last bit of an FP16 number of this size is 2^quantum
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(y, -quantum)), quantum);
    return tb_float_to_half(static_cast<float>(rounded));
}

// A cell as floats.
void widen(const void * cell, cell_type type, int dim, float * out) {
    switch (type) {
    case cell_type::f16:
        for (int d = 0; d < dim; d++) {
            out[d] = tb_half_to_float(static_cast<const uint16_t *>(cell)[d]);
        }
        break;
    case cell_type::f32:
        std::copy_n(static_cast<const float *>(cell), dim, out);
        break;
    case cell_type::q8_0:
        tb_dequantize_row(TB_Q8_0, static_cast<uint64_t>(dim), cell, out);
        break;
    }
}

void scores(const attention_scores_args & a) {
    for (int c = 0; c < a.cells; c++) {
        float * k = a.scratch;
        widen(a.k[c], a.type, a.dim, k);
        for (int r = 0; r < a.rows; r++) {
            const float * q = a.q[r];
            float sum[8] = {};
            int d = 0;
            for (; d + 8 <= a.dim; d += 8) {
                for (int i = 0; i < 8; i++) {
                    sum[i] += q[d + i] * k[d + i];
                }
            }
            for (; d < a.dim; d++) {
                sum[0] += q[d] * k[d];
            }
            a.s[r * attention_tile_cells + c] =
                ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
        }
    }
}

void softmax_row(const attention_softmax_args & a, int row) {
    const float inf = std::numeric_limits<float>::infinity();
    const uint16_t * table = attention_exp2_table();
    float * scores = a.s + row * attention_tile_cells;
    const float old_max = a.max[row];
    float max = old_max;
    for (int c = 0; c < a.cells; c++) {
        float s = -inf;
        if ((a.visible >> c) & 1) {
            s = scores[c] * a.scale;
            if (a.softcap != 0.0f) {
                s = a.softcap * std::tanh(s / a.softcap);
            }
            if (a.bias != nullptr) {
                s += a.bias[c];
            }
        }
        scores[c] = s;
        max = s > max ? s : max;
    }
    const float base = std::max(max, attention_least_base);
    float sum = 0.0f;
    for (int c = 0; c < a.cells; c++) {
        if (a.exact) {
            scores[c] = std::exp(scores[c] - base);
        } else {
            const uint16_t t = tb_float_to_half((scores[c] - base) * log2e);
            scores[c] = tb_half_to_float(table[t & 0x7fff]);
        }
        sum += scores[c];
    }
    a.alpha[row] = std::exp2((old_max - base) * log2e);
    a.max[row] = max;
    float * sums = a.sum + row * attention_sum_parts; // only the first part is used
    *sums = *sums * a.alpha[row] + sum;
}

void softmax(const attention_softmax_args & a) {
    for (int r = 0; r < a.rows; r++) {
        softmax_row(a, r);
    }
}

void accumulate(const attention_accumulate_args & a) {
    for (int r = 0; r < a.rows; r++) {
        if (a.alpha[r] != 1.0f) {
            for (int d = 0; d < a.dim; d++) {
                a.o[r][d] *= a.alpha[r];
            }
        }
    }
    for (int c = 0; c < a.cells; c++) {
        float * v = a.scratch;
        widen(a.v[c], a.type, a.dim, v);
        for (int r = 0; r < a.rows; r++) {
            const float p = a.p[r * attention_tile_cells + c];
            // a hidden cell may hold anything, infinities too, and must not touch the row
            if (p != 0.0f) {
                float * o = a.o[r];
                for (int d = 0; d < a.dim; d++) {
                    o[d] += p * v[d];
                }
            }
        }
    }
}

double powers(int64_t n, float * x, float max) {
    for (int64_t i = 0; i < n; i++) {
        x[i] = std::exp(x[i] - max);
    }
    return sum_in_any_order(n, x);
}

// Products of two floats are exact; odd ones are in the middle between two points of no grid that matters.
void accumulate_any_order(const attention_any_order_args & a) {
    for (int c = 0; c < a.cells; c++) {
        float * v = a.scratch;
        widen(a.v[c], a.type, a.dim, v);
        for (int r = 0; r < a.rows; r++) {
            const double p = a.p[r * attention_tile_cells + c];
            for (int d = 0; d < a.dim && p != 0.0; d++) {
                a.o[r][d] += odd(p * static_cast<double>(v[d]));
            }
        }
    }
}

uint64_t visible(const uint16_t * mask, int cells, uint64_t * biased) {
    uint64_t seen = 0;
    uint64_t nonzero = 0;
    for (int c = 0; c < cells; c++) {
        seen |= static_cast<uint64_t>(mask[c] != 0xfc00) << c;
        nonzero |= static_cast<uint64_t>((mask[c] & 0x7fff) != 0) << c;
    }
    *biased = seen & nonzero;
    return seen;
}

void exp2_fp16(const uint16_t * in, uint16_t * out, size_t n) {
    const uint16_t * table = attention_exp2_table();
    for (size_t i = 0; i < n; i++) {
        const bool positive = in[i] > 0 && in[i] <= 0x7c00;
        out[i] = table[positive ? 0 : in[i] & 0x7fff];
    }
}

} // namespace

const uint16_t * attention_exp2_table() {
    static const std::vector<uint16_t> table = [] {
        std::vector<uint16_t> t(32768);
        for (uint32_t i = 0; i < t.size(); i++) {
            t[i] = exp2_of_half(static_cast<uint16_t>(0x8000 | i));
        }
        return t;
    }();
    return table.data();
}

void fill_attention_portable(attention_kernels & k) {
    k.name = "attention_f16_1x1_portable";
    k.scores = scores;
    k.softmax = softmax;
    k.accumulate = accumulate;
    k.visible = visible;
    k.exp2_fp16 = exp2_fp16;
    k.any_order = {powers, accumulate_any_order};
}

} // namespace tb::npu
