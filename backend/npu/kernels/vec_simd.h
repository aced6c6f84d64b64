// Vector kernels written once over an ISA's `simd` struct (kernels/<isa>/simd.h, included before this). Internal
// linkage, see vec_loops.h. Loops and conversions that compilers vectorize well stay in vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_VEC_SIMD_H
#define TILEBEAM_NPU_KERNELS_VEC_SIMD_H

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/vec.h"

namespace tb::npu {
namespace {

using vec = simd::vec;
constexpr int64_t width = simd::width;

// e^x to about one unit in the last place; 0 below -105, infinity above 89, NaN for NaN (max and min return their
// second argument then).
inline vec exp_vec(vec x) {
    x = simd::max(simd::set1(-105.0f), simd::min(simd::set1(89.0f), x));
    const vec n = simd::round(simd::mul(x, simd::set1(1.44269504088896341f)));
    vec r = simd::fma(n, simd::set1(-0.693359375f), x); // ln 2 in two parts: the first product is exact
    r = simd::fma(n, simd::set1(2.12194440e-4f), r);
    vec p = simd::set1(1.9841270e-4f);
    p = simd::fma(p, r, simd::set1(1.3888889e-3f));
    p = simd::fma(p, r, simd::set1(8.3333333e-3f));
    p = simd::fma(p, r, simd::set1(4.1666667e-2f));
    p = simd::fma(p, r, simd::set1(1.6666667e-1f));
    p = simd::fma(p, r, simd::set1(0.5f));
    p = simd::fma(p, r, simd::set1(1.0f));
    p = simd::fma(p, r, simd::set1(1.0f));
    return simd::ldexp(p, n);
}

inline vec negate(vec x) { return simd::sub(simd::zero(), x); }
inline vec sigmoid(vec x) { return simd::div(simd::set1(1.0f), simd::add(simd::set1(1.0f), exp_vec(negate(x)))); }

// Calls f(load, store) for whole vectors, then for the rest.
template <class F> inline void each(int64_t n, F && f) {
    int64_t i = 0;
    for (; i + width <= n; i += width) {
        f(i, static_cast<int>(width));
    }
    if (i < n) {
        f(i, static_cast<int>(n - i));
    }
}

template <class T> inline vec get(const T * p, int n) { return n == width ? simd::load(p) : simd::load_n(p, n); }
template <class T> inline void put(T * p, vec x, int n) {
    if (n == width) {
        simd::store(p, x);
    } else {
        simd::store_n(p, x, n);
    }
}

void add_simd(int64_t n, const float * a, const float * b, float * dst) {
    each(n, [=](int64_t i, int m) { put(dst + i, simd::add(get(a + i, m), get(b + i, m)), m); });
}

void mul_simd(int64_t n, const float * a, const float * b, float * dst) {
    each(n, [=](int64_t i, int m) { put(dst + i, simd::mul(get(a + i, m), get(b + i, m)), m); });
}

void scale_simd(int64_t n, const float * x, float scale, float bias, float * dst) {
    const vec s = simd::set1(scale);
    const vec b = simd::set1(bias);
    each(n, [=](int64_t i, int m) { put(dst + i, simd::add(simd::mul(get(x + i, m), s), b), m); });
}

// f(i, m, sum) adds what elements [i, i + m) give; sums run side by side.
template <class F> inline float sum_up(int64_t n, F && f) {
    vec sum[4] = {simd::zero(), simd::zero(), simd::zero(), simd::zero()};
    int64_t i = 0;
    for (; i + 4 * width <= n; i += 4 * width) {
        for (int j = 0; j < 4; j++) {
            sum[j] = f(i + j * width, static_cast<int>(width), sum[j]);
        }
    }
    each(n - i, [&](int64_t j, int m) { sum[0] = f(i + j, m, sum[0]); });
    return simd::sum(simd::add(simd::add(sum[0], sum[1]), simd::add(sum[2], sum[3])));
}

float sum_squares_simd(int64_t n, const float * x) {
    return sum_up(n, [=](int64_t i, int m, vec sum) {
        const vec a = get(x + i, m);
        return simd::fma(a, a, sum);
    });
}

float dot_simd(int64_t n, const float * a, const float * b) {
    return sum_up(n, [=](int64_t i, int m, vec sum) { return simd::fma(get(a + i, m), get(b + i, m), sum); });
}

float scan_step_simd(int64_t n, const float * row, const float * decay, float x, const float * in, const float * out,
                     float * next) {
    const vec factor = simd::set1(x);
    return sum_up(n, [=](int64_t i, int m, vec sum) {
        const vec old = simd::mul(get(row + i, m), get(decay + i, m));
        const vec made = simd::fma(factor, get(in + i, m), old);
        put(next + i, made, m);
        return simd::fma(made, get(out + i, m), sum);
    });
}

float delta_step_simd(int64_t n, const float * row, const float * decay, const float * k, const float * q, float v,
                      float beta, float * next) {
    const float known = sum_up(n, [=](int64_t i, int m, vec sum) {
        return simd::fma(simd::mul(get(row + i, m), get(decay + i, m)), get(k + i, m), sum);
    });
    const vec change = simd::set1((v - known) * beta);
    return sum_up(n, [=](int64_t i, int m, vec sum) {
        const vec made = simd::fma(change, get(k + i, m), simd::mul(get(row + i, m), get(decay + i, m)));
        put(next + i, made, m);
        return simd::fma(made, get(q + i, m), sum);
    });
}

float wkv7_step_simd(int64_t n, const float * row, const float * decay, const float * k, const float * a,
                     const float * b, const float * r, float v, float * next) {
    const vec seen = simd::set1(dot_simd(n, row, a));
    const vec value = simd::set1(v);
    return sum_up(n, [=](int64_t i, int m, vec sum) {
        const vec taken = simd::fma(value, get(k + i, m), simd::mul(get(row + i, m), get(decay + i, m)));
        const vec made = simd::fma(seen, get(b + i, m), taken);
        put(next + i, made, m);
        return simd::fma(made, get(r + i, m), sum);
    });
}

// `count` vectors of columns, the last one of which has m elements: what is broadcast is loaded once for all.
template <int count>
inline void linear_columns(int m, int64_t rows, int64_t stride, const float * state, const float * decay,
                           const float * k, const float * q, const float * v, float own, float * next, float * result) {
    const auto used = [=](int c) { return c + 1 < count ? static_cast<int>(width) : m; };
    vec value[count], sum[count];
    for (int c = 0; c < count; c++) {
        value[c] = get(v + c * width, used(c));
        sum[c] = simd::mul(value[c], simd::set1(own));
    }
    for (int64_t i = 0; i < rows; i++, state += stride, next += stride) {
        const vec factor = simd::set1(decay[i]), in = simd::set1(k[i]), out = simd::set1(q[i]);
        for (int c = 0; c < count; c++) {
            const vec old = get(state + c * width, used(c));
            sum[c] = simd::fma(old, out, sum[c]);
            put(next + c * width, simd::fma(value[c], in, simd::mul(old, factor)), used(c));
        }
    }
    for (int c = 0; c < count; c++) {
        put(result + c * width, sum[c], used(c));
    }
}

void linear_step_simd(int64_t n, int64_t rows, int64_t stride, const float * state, const float * decay,
                      const float * k, const float * q, const float * v, float own, float * next, float * result) {
    int64_t i = 0;
    for (; i + 4 * width <= n; i += 4 * width) {
        linear_columns<4>(width, rows, stride, state + i, decay, k, q, v + i, own, next + i, result + i);
    }
    each(n - i, [=](int64_t j, int m) {
        j += i;
        linear_columns<1>(m, rows, stride, state + j, decay, k, q, v + j, own, next + j, result + j);
    });
}

constexpr int row_vecs = state_lanes / width;

// result = f(i, c, sum) added up over the elements of rows that lie side by side, c a vector of rows; four sums take
// turns, which do not wait for each other.
template <class F> inline void sum_rows(int64_t n, float * result, F && f) {
    vec sum[4][row_vecs];
    for (auto & turn : sum) {
        std::fill_n(turn, row_vecs, simd::zero());
    }
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        for (int turn = 0; turn < 4; turn++) {
            for (int c = 0; c < row_vecs; c++) {
                sum[turn][c] = f(i + turn, c, sum[turn][c]);
            }
        }
    }
    for (; i < n; i++) {
        for (int c = 0; c < row_vecs; c++) {
            sum[0][c] = f(i, c, sum[0][c]);
        }
    }
    for (int c = 0; c < row_vecs; c++) {
        simd::store(result + c * width, simd::add(simd::add(sum[0][c], sum[1][c]), simd::add(sum[2][c], sum[3][c])));
    }
}

inline vec decayed(const float * state, float decay, vec factor, float in) {
    return simd::fma(factor, simd::set1(in), simd::mul(simd::load(state), simd::set1(decay)));
}

void scan_rows_simd(int64_t n, float * state, const float * decay, const float * x, const float * in, const float * out,
                    float * result) {
    sum_rows(n, result, [=](int64_t i, int c, vec sum) {
        float * s = state + i * state_lanes + c * width;
        const vec made = decayed(s, decay[i], simd::load(x + c * width), in[i]);
        simd::store(s, made);
        return simd::fma(made, simd::set1(out[i]), sum);
    });
}

void delta_rows_simd(int64_t n, float * state, const float * decay, const float * k, const float * seen,
                     const float * q, const float * v, float beta, float * result) {
    float change[state_lanes];
    sum_rows(n, change, [=](int64_t i, int c, vec sum) {
        return simd::fma(simd::load(state + i * state_lanes + c * width), simd::set1(seen[i]), sum);
    });
    for (int c = 0; c < state_lanes; c += width) {
        const vec missing = simd::sub(simd::load(v + c), simd::load(change + c));
        simd::store(change + c, simd::mul(missing, simd::set1(beta)));
    }
    scan_rows_simd(n, state, decay, change, k, q, result);
}

void wkv7_rows_simd(int64_t n, float * state, const float * decay, const float * k, const float * b, const float * r,
                    const float * v, const float * next_a, float * seen, float * result) {
    vec value[row_vecs], known[row_vecs], out[row_vecs], then[row_vecs];
    for (int c = 0; c < row_vecs; c++) {
        value[c] = simd::load(v + c * width);
        known[c] = simd::load(seen + c * width);
        out[c] = then[c] = simd::zero();
    }
    for (int64_t i = 0; i < n; i++, state += state_lanes) {
        for (int c = 0; c < row_vecs; c++) {
            const vec taken = decayed(state + c * width, decay[i], value[c], k[i]);
            const vec made = simd::fma(known[c], simd::set1(b[i]), taken);
            simd::store(state + c * width, made);
            out[c] = simd::fma(made, simd::set1(r[i]), out[c]);
            then[c] = simd::fma(made, simd::set1(next_a[i]), then[c]);
        }
    }
    for (int c = 0; c < row_vecs; c++) {
        simd::store(result + c * width, out[c]);
        simd::store(seen + c * width, then[c]);
    }
}

void sigmoid_simd(int64_t n, const float * x, float * dst) {
    each(n, [=](int64_t i, int m) { put(dst + i, sigmoid(get(x + i, m)), m); });
}

void silu_simd(int64_t n, const float * x, float * dst) {
    each(n, [=](int64_t i, int m) {
        const vec a = get(x + i, m);
        put(dst + i, simd::mul(a, sigmoid(a)), m);
    });
}

float max_simd(int64_t n, const float * x) {
    const vec lowest = simd::set1(-std::numeric_limits<float>::infinity());
    vec top = lowest;
    each(n, [&](int64_t i, int m) { top = simd::max(simd::select((1u << m) - 1, get(x + i, m), lowest), top); });
    return simd::top(top);
}

float exp_sum_simd(int64_t n, float * x, float max) {
    const vec top = simd::set1(max);
    vec sum = simd::zero();
    each(n, [&](int64_t i, int m) {
        const vec e = exp_vec(simd::sub(get(x + i, m), top));
        put(x + i, e, m);
        sum = simd::add(sum, simd::select((1u << m) - 1, e, simd::zero()));
    });
    return simd::sum(sum);
}

void geglu_simd(int64_t n, const float * gate, const float * up, float, float, float * dst) {
    const vec c0 = simd::set1(2.0f * 0.79788456080286535588f);
    const vec c1 = simd::set1(0.044715f);
    const vec one = simd::set1(1.0f);
    each(n, [=](int64_t i, int m) {
        const vec x = get(gate + i, m);
        const vec inner = simd::mul(simd::mul(c0, x), simd::fma(simd::mul(c1, x), x, one));
        // (1 + tanh z) / 2 = sigmoid(2 z), without cancellation
        put(dst + i, simd::mul(simd::mul(x, sigmoid(inner)), get(up + i, m)), m);
    });
}

void swiglu_simd(int64_t n, const float * gate, const float * up, float, float, float * dst) {
    each(n, [=](int64_t i, int m) {
        const vec x = get(gate + i, m);
        put(dst + i, simd::mul(simd::mul(x, sigmoid(x)), get(up + i, m)), m);
    });
}

void geglu_quick_simd(int64_t n, const float * gate, const float * up, float, float, float * dst) {
    const vec c = simd::set1(1.702f);
    each(n, [=](int64_t i, int m) {
        const vec x = get(gate + i, m);
        put(dst + i, simd::mul(simd::mul(x, sigmoid(simd::mul(c, x))), get(up + i, m)), m);
    });
}

void swiglu_oai_simd(int64_t n, const float * gate, const float * up, float alpha, float limit, float * dst) {
    const vec a = simd::set1(alpha);
    const vec high = simd::set1(limit);
    const vec low = simd::set1(-limit);
    const vec one = simd::set1(1.0f);
    each(n, [=](int64_t i, int m) {
        const vec x = simd::min(high, get(gate + i, m));
        const vec y = simd::max(low, simd::min(high, get(up + i, m)));
        put(dst + i, simd::mul(simd::mul(x, sigmoid(simd::mul(a, x))), simd::add(y, one)), m);
    });
}

void swiglu_clamp_simd(int64_t n, const float * gate, const float * up, float, float limit, float * dst) {
    const vec high = simd::set1(limit);
    const vec low = simd::set1(-limit);
    each(n, [=](int64_t i, int m) {
        const vec x = simd::min(high, get(gate + i, m));
        const vec y = simd::max(low, simd::min(high, get(up + i, m)));
        put(dst + i, simd::mul(simd::mul(x, sigmoid(x)), y), m);
    });
}

void rope_neox_simd(int64_t n, int64_t half, const float * x, const float * cos, const float * sin, float * dst) {
    each(n, [=](int64_t i, int m) {
        const vec a = get(x + i, m);
        const vec b = get(x + half + i, m);
        const vec c = get(cos + i, m);
        const vec s = get(sin + i, m);
        put(dst + i, simd::sub(simd::mul(a, c), simd::mul(b, s)), m);
        put(dst + half + i, simd::add(simd::mul(a, s), simd::mul(b, c)), m);
    });
}

void f16_to_f32_simd(int64_t n, const void * src, float * dst) {
    const uint16_t * x = static_cast<const uint16_t *>(src);
    each(n, [=](int64_t i, int m) { put(dst + i, get(x + i, m), m); });
}

void f32_to_f16_simd(int64_t n, const float * src, void * dst) {
    uint16_t * y = static_cast<uint16_t *>(dst);
    each(n, [=](int64_t i, int m) { put(y + i, get(src + i, m), m); });
}

// A block: an FP16 scale and 32 signed bytes.
void q8_0_to_f32_simd(int64_t n, const void * src, float * dst) {
    constexpr int block = 32;
    const uint8_t * x = static_cast<const uint8_t *>(src);
    for (int64_t i = 0; i < n; i += block, x += sizeof(uint16_t) + block) {
        const vec d = simd::set1(reinterpret_cast<const uint16_t *>(x));
        const int8_t * q = reinterpret_cast<const int8_t *>(x + sizeof(uint16_t));
#pragma GCC unroll 8
        for (int j = 0; j < block; j += simd::width) {
            simd::store(dst + i + j, simd::mul(d, simd::load(q + j)));
        }
    }
}

[[maybe_unused]] void fill_vec_simd(vec_kernels & k) {
    k.to_f32[TB_F16] = f16_to_f32_simd;
    k.to_f32[TB_Q8_0] = q8_0_to_f32_simd;
    k.from_f32[TB_F16] = f32_to_f16_simd;
    k.add = add_simd;
    k.mul = mul_simd;
    k.scale = scale_simd;
    k.sum_squares = sum_squares_simd;
    k.dot = dot_simd;
    k.scan_step = scan_step_simd;
    k.delta_step = delta_step_simd;
    k.wkv7_step = wkv7_step_simd;
    k.linear_step = linear_step_simd;
    k.scan_rows = scan_rows_simd;
    k.delta_rows = delta_rows_simd;
    k.wkv7_rows = wkv7_rows_simd;
    k.sigmoid = sigmoid_simd;
    k.silu = silu_simd;
    k.max = max_simd;
    k.exp_sum = exp_sum_simd;
    k.glu[glu_geglu] = geglu_simd;
    k.glu[glu_swiglu] = swiglu_simd;
    k.glu[glu_swiglu_oai] = swiglu_oai_simd;
    k.glu[glu_geglu_quick] = geglu_quick_simd;
    k.glu[glu_swiglu_clamp] = swiglu_clamp_simd;
    k.rope_neox = rope_neox_simd;
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_VEC_SIMD_H
