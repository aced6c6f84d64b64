// The portable vector kernels: the definition that every other set is tested against.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "half.h"
#include "kernels/vec.h"
#include "kernels/vec_loops.h"
#include "tilebeam/layout.h"

namespace tb::npu {
namespace {

void f32_copy_in(int64_t n, const void * src, float * dst) {
    if (n > 0) {
        std::memmove(dst, src, static_cast<size_t>(n) * sizeof(float));
    }
}

void f32_copy_out(int64_t n, const float * src, void * dst) {
    if (n > 0) {
        std::memmove(dst, src, static_cast<size_t>(n) * sizeof(float));
    }
}

void f16_to_f32(int64_t n, const void * src, float * dst) {
    const uint16_t * x = static_cast<const uint16_t *>(src);
    for (int64_t i = 0; i < n; i++) {
        dst[i] = tb_half_to_float(x[i]);
    }
}

void f32_to_f16(int64_t n, const float * src, void * dst) {
    uint16_t * y = static_cast<uint16_t *>(dst);
    for (int64_t i = 0; i < n; i++) {
        y[i] = tb_float_to_half(src[i]);
    }
}

template <uint32_t type> void blocks_to_f32(int64_t n, const void * src, float * dst) {
    tb_dequantize_row(type, static_cast<uint64_t>(n), src, dst);
}

// C's conversion, with what C leaves undefined pinned down: saturate, NaN to 0.
void f32_to_i32(int64_t n, const float * src, void * dst) {
    int32_t * y = static_cast<int32_t *>(dst);
    for (int64_t i = 0; i < n; i++) {
        const float x = src[i];
        if (x >= 2147483648.0f) {
            y[i] = std::numeric_limits<int32_t>::max();
        } else if (x < -2147483648.0f) {
            y[i] = std::numeric_limits<int32_t>::min();
        } else {
            y[i] = std::isnan(x) ? 0 : static_cast<int32_t>(x);
        }
    }
}

constexpr int64_t block = 32;

// A block is an FP16 scale and then the quants; scales that are not finite give zero quants, not undefined casts. A NaN
// makes its block's scale one: whoever reads the block hears of it.
void f32_to_q8_0(int64_t n, const float * src, void * dst) {
    uint8_t * out = static_cast<uint8_t *>(dst);
    for (int64_t b = 0; b < n / block; b++, src += block, out += 34) {
        float amax = 0.0f;
        bool nan = false;
        for (int64_t i = 0; i < block; i++) {
            amax = std::max(amax, std::fabs(src[i]));
            nan |= std::isnan(src[i]);
        }
        const float d = amax / 127.0f;
        const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
        const uint16_t h = tb_float_to_half(nan ? NAN : d);
        std::memcpy(out, &h, sizeof(h));
        for (int64_t i = 0; i < block; i++) {
            const float q = std::round(src[i] * inverse);
            out[2 + i] = static_cast<uint8_t>(q >= -127.0f && q <= 127.0f ? static_cast<int8_t>(q) : 0);
        }
    }
}

void f32_to_q4_0(int64_t n, const float * src, void * dst) {
    uint8_t * out = static_cast<uint8_t *>(dst);
    for (int64_t b = 0; b < n / block; b++, src += block, out += 18) {
        float amax = 0.0f;
        float extreme = 0.0f;
        bool nan = false;
        for (int64_t i = 0; i < block; i++) {
            nan |= std::isnan(src[i]);
            if (std::fabs(src[i]) > amax) {
                amax = std::fabs(src[i]);
                extreme = src[i];
            }
        }
        const float d = extreme / -8.0f;
        const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
        const uint16_t h = tb_float_to_half(nan ? NAN : d);
        std::memcpy(out, &h, sizeof(h));
        uint8_t q[block];
        for (int64_t i = 0; i < block; i++) {
            const float x = src[i] * inverse + 8.5f;
            q[i] = static_cast<uint8_t>(x >= 0.0f && x < 16.0f ? static_cast<int>(x) : (x >= 16.0f ? 15 : 0));
        }
        for (int64_t i = 0; i < block / 2; i++) {
            out[2 + i] = static_cast<uint8_t>(q[i] | (q[i + block / 2] << 4));
        }
    }
}

float sum_squares(int64_t n, const float * x) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    }
    return static_cast<float>(sum);
}

float dot(int64_t n, const float * a, const float * b) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    }
    return static_cast<float>(sum);
}

float scan_step(int64_t n, const float * row, const float * decay, float x, const float * in, const float * out,
                float * next) {
    for (int64_t i = 0; i < n; i++) {
        next[i] = row[i] * decay[i] + x * in[i];
    }
    return dot(n, next, out);
}

float delta_step(int64_t n, const float * row, const float * decay, const float * k, const float * q, float v,
                 float beta, float * next) {
    for (int64_t i = 0; i < n; i++) {
        next[i] = row[i] * decay[i];
    }
    const float change = (v - dot(n, next, k)) * beta;
    for (int64_t i = 0; i < n; i++) {
        next[i] += change * k[i];
    }
    return dot(n, next, q);
}

float wkv7_step(int64_t n, const float * row, const float * decay, const float * k, const float * a, const float * b,
                const float * r, float v, float * next) {
    const float seen = dot(n, row, a);
    for (int64_t i = 0; i < n; i++) {
        next[i] = row[i] * decay[i] + v * k[i] + seen * b[i];
    }
    return dot(n, next, r);
}

void linear_step(int64_t n, int64_t rows, int64_t stride, const float * state, const float * decay, const float * k,
                 const float * q, const float * v, float own, float * next, float * result) {
    for (int64_t j = 0; j < n; j++) {
        result[j] = v[j] * own;
    }
    for (int64_t i = 0; i < rows; i++, state += stride, next += stride) {
        for (int64_t j = 0; j < n; j++) {
            result[j] += state[j] * q[i];
            next[j] = state[j] * decay[i] + v[j] * k[i];
        }
    }
}

// result[r] = f(i, r, state of row r) added up over the elements.
template <class F> void sum_rows(int64_t n, float * state, float * result, F && f) {
    std::fill_n(result, state_lanes, 0.0f);
    for (int64_t i = 0; i < n; i++, state += state_lanes) {
        for (int64_t r = 0; r < state_lanes; r++) {
            result[r] += f(i, r, state[r]);
        }
    }
}

void scan_rows(int64_t n, float * state, const float * decay, const float * x, const float * in, const float * out,
               float * result) {
    sum_rows(n, state, result, [=](int64_t i, int64_t r, float & s) {
        s = s * decay[i] + x[r] * in[i];
        return s * out[i];
    });
}

void delta_rows(int64_t n, float * state, const float * decay, const float * k, const float * seen, const float * q,
                const float * v, float beta, float * result) {
    float known[state_lanes];
    sum_rows(n, state, known, [=](int64_t i, int64_t, float & s) { return s * seen[i]; });
    sum_rows(n, state, result, [&](int64_t i, int64_t r, float & s) {
        s = s * decay[i] + (v[r] - known[r]) * beta * k[i];
        return s * q[i];
    });
}

void wkv7_rows(int64_t n, float * state, const float * decay, const float * k, const float * b, const float * r,
               const float * v, const float * next_a, float * seen, float * result) {
    sum_rows(n, state, result, [=](int64_t i, int64_t j, float & s) {
        s = s * decay[i] + v[j] * k[i] + seen[j] * b[i];
        return s * r[i];
    });
    sum_rows(n, state, seen, [=](int64_t i, int64_t, float & s) { return s * next_a[i]; });
}

void sigmoid(int64_t n, const float * x, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        dst[i] = 1.0f / (1.0f + std::exp(-x[i]));
    }
}

void silu(int64_t n, const float * x, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        dst[i] = x[i] / (1.0f + std::exp(-x[i]));
    }
}

float max_value(int64_t n, const float * x) {
    float m = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < n; i++) {
        m = x[i] > m ? x[i] : m;
    }
    return m;
}

float exp_sum(int64_t n, float * x, float max) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        x[i] = std::exp(x[i] - max);
        sum += static_cast<double>(x[i]);
    }
    return static_cast<float>(sum);
}

void geglu(int64_t n, const float * gate, const float * up, float, float, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        const float x = gate[i];
        const float inner = 0.79788456080286535588f * x * (1.0f + 0.044715f * x * x);
        dst[i] = x / (1.0f + std::exp(-2.0f * inner)) * up[i]; // (1 + tanh z) / 2 without cancellation
    }
}

void geglu_erf(int64_t n, const float * gate, const float * up, float, float, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        const float x = gate[i];
        dst[i] = 0.5f * x * std::erfc(x * -0.70710678118654752440f) * up[i];
    }
}

void geglu_quick(int64_t n, const float * gate, const float * up, float, float, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        dst[i] = gate[i] / (1.0f + std::exp(-1.702f * gate[i])) * up[i];
    }
}

void swiglu(int64_t n, const float * gate, const float * up, float, float, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        dst[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    }
}

void swiglu_oai(int64_t n, const float * gate, const float * up, float alpha, float limit, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        const float x = std::min(gate[i], limit);
        const float y = std::min(std::max(up[i], -limit), limit);
        dst[i] = x / (1.0f + std::exp(-alpha * x)) * (y + 1.0f);
    }
}

void swiglu_clamp(int64_t n, const float * gate, const float * up, float, float limit, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        const float x = std::min(gate[i], limit);
        const float y = std::min(std::max(up[i], -limit), limit);
        dst[i] = x / (1.0f + std::exp(-x)) * y;
    }
}

} // namespace

void fill_vec_portable(vec_kernels & k) {
    k = vec_kernels{};
    fill_vec_loops(k);
    k.to_f32[TB_F32] = f32_copy_in;
    k.to_f32[TB_F16] = f16_to_f32;
    k.to_f32[TB_Q4_0] = blocks_to_f32<TB_Q4_0>;
    k.to_f32[TB_Q8_0] = blocks_to_f32<TB_Q8_0>;
    k.to_f32[TB_IQ4_NL] = blocks_to_f32<TB_IQ4_NL>;
    k.from_f32[TB_F32] = f32_copy_out;
    k.from_f32[TB_F16] = f32_to_f16;
    k.from_f32[TB_I32] = f32_to_i32;
    k.from_f32[TB_Q8_0] = f32_to_q8_0;
    k.from_f32[TB_Q4_0] = f32_to_q4_0;
    k.sum_squares = sum_squares;
    k.dot = dot;
    k.scan_step = scan_step;
    k.delta_step = delta_step;
    k.wkv7_step = wkv7_step;
    k.scan_rows = scan_rows;
    k.delta_rows = delta_rows;
    k.wkv7_rows = wkv7_rows;
    k.linear_step = linear_step;
    k.sigmoid = sigmoid;
    k.silu = silu;
    k.max = max_value;
    k.exp_sum = exp_sum;
    k.glu[glu_geglu] = geglu;
    k.glu[glu_swiglu] = swiglu;
    k.glu[glu_swiglu_oai] = swiglu_oai;
    k.glu[glu_geglu_erf] = geglu_erf;
    k.glu[glu_geglu_quick] = geglu_quick;
    k.glu[glu_swiglu_clamp] = swiglu_clamp;
}

} // namespace tb::npu
