// UNARY, LOG, SQR, SQRT, CLAMP, SCALE, FILL and ARANGE: dst = f(src0), element by element. Any mix of strides, dst and
// src0 of one type.
#include "ops/ops.h"

#include <algorithm>
#include <cmath>

namespace tb::npu {
namespace {

using function = float (*)(float x);

float abs_f(float x) { return std::fabs(x); }
float sgn_f(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f; }
float neg_f(float x) { return -x; }
float step_f(float x) { return x > 0.0f ? 1.0f : 0.0f; }
float tanh_f(float x) { return std::tanh(x); }
float elu_f(float x) { return x > 0.0f ? x : std::exp(x) - 1.0f; }
float relu_f(float x) { return x > 0.0f ? x : 0.0f; }
float sigmoid_f(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float gelu_f(float x) { return 0.5f * x * (1.0f + std::tanh(0.7978845608f * x * (1.0f + 0.044715f * x * x))); }
float gelu_quick_f(float x) { return x / (1.0f + std::exp(-1.702f * x)); }
float silu_f(float x) { return x / (1.0f + std::exp(-x)); }
float hard_sigmoid_f(float x) { return std::min(1.0f, std::max(0.0f, (x + 3.0f) / 6.0f)); }
float hard_swish_f(float x) { return x * hard_sigmoid_f(x); }
float exp_f(float x) { return std::exp(x); }
float softplus_f(float x) { return x > 20.0f ? x : std::log(1.0f + std::exp(x)); }
float gelu_erf_f(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.7071067812f)); }
float floor_f(float x) { return std::floor(x); }
float ceil_f(float x) { return std::ceil(x); }
float round_f(float x) { return std::round(x); }
float trunc_f(float x) { return std::trunc(x); }
float log_f(float x) { return std::log(x); }
float sqr_f(float x) { return x * x; }
float sqrt_f(float x) { return std::sqrt(x); }

// By ggml_unary_op; the kinds that tb_op_check_shape refuses have no entry.
constexpr function FUNCTIONS[TB_UNARY_KINDS] = {
    abs_f,      sgn_f,        neg_f,   step_f,       tanh_f,         elu_f,   relu_f,  sigmoid_f,
    gelu_f,     gelu_quick_f, silu_f,  hard_swish_f, hard_sigmoid_f, exp_f,   nullptr, softplus_f,
    gelu_erf_f, nullptr,      floor_f, ceil_f,       round_f,        trunc_f,
};

// body(n, x, y): y[i] = f(x[i]); x and y may be the same row.
template <class Body> void elementwise(const op_context & ctx, const Body & body) {
    const view & x = ctx.src[0];
    const view & dst = ctx.dst;
    const kernel_table & k = *ctx.kernels;
    int64_t first = 0;
    int64_t last = 0;
    ctx.share_runs(dst, &first, &last);
    float buffer[run_elements];
    for (int64_t item = first; item < last; item++) {
        const auto [i, at, n] = run_of(dst, item);
        const float * src = load_run(k, x, x.at<uint8_t>(i.i1, i.i2, i.i3), at, n, buffer);
        uint8_t * row = dst.at<uint8_t>(i.i1, i.i2, i.i3);
        float * out = run_target(dst, row, at, buffer);
        body(n, src, out);
        store_run(k, dst, row, at, n, out);
    }
}

void apply(const op_context & ctx, function f) {
    elementwise(ctx, [f](int64_t n, const float * x, float * y) {
        for (int64_t i = 0; i < n; i++) {
            y[i] = f(x[i]);
        }
    });
}

void unary(const op_context & ctx) { apply(ctx, FUNCTIONS[ctx.param_i(0)]); }

void log(const op_context & ctx) { apply(ctx, log_f); }

void sqr(const op_context & ctx) { apply(ctx, sqr_f); }

void sqrt(const op_context & ctx) { apply(ctx, sqrt_f); }

void clamp(const op_context & ctx) {
    const float low = ctx.param_f(0);
    const float high = ctx.param_f(1);
    elementwise(ctx, [=](int64_t n, const float * x, float * y) {
        for (int64_t i = 0; i < n; i++) {
            y[i] = std::max(std::min(x[i], high), low);
        }
    });
}

// x * scale + bias
void scale(const op_context & ctx) {
    elementwise(ctx, [&ctx](int64_t n, const float * x, float * y) {
        ctx.kernels->vec.scale(n, x, ctx.param_f(0), ctx.param_f(1), y);
    });
}

// src0 gives the shape only.
void fill(const op_context & ctx) {
    const view & dst = ctx.dst;
    int64_t first = 0;
    int64_t last = 0;
    ctx.share_runs(dst, &first, &last);
    float values[run_elements];
    std::fill(values, values + run_elements, ctx.param_f(0));
    for (int64_t item = first; item < last; item++) {
        const auto [i, at, n] = run_of(dst, item);
        store_run(*ctx.kernels, dst, dst.at<uint8_t>(i.i1, i.i2, i.i3), at, n, values);
    }
}

// start, start + step, ..
void arange(const op_context & ctx) {
    int64_t first = 0;
    int64_t last = 0;
    ctx.share_runs(ctx.dst, &first, &last);
    for (int64_t item = first; item < last; item++) {
        const auto [i, at, n] = run_of(ctx.dst, item);
        float * out = ctx.dst.at<float>(0) + at;
        for (int64_t j = 0; j < n; j++) {
            out[j] = ctx.param_f(0) + static_cast<float>(at + j) * ctx.param_f(2);
        }
    }
}

} // namespace

const op_entry unary_entry = {unary, nullptr, cut::runs};
const op_entry log_entry = {log, nullptr, cut::runs};
const op_entry sqr_entry = {sqr, nullptr, cut::runs};
const op_entry sqrt_entry = {sqrt, nullptr, cut::runs};
const op_entry clamp_entry = {clamp, nullptr, cut::runs};
const op_entry scale_entry = {scale, nullptr, cut::runs};
const op_entry fill_entry = {fill, nullptr, cut::runs};
const op_entry arange_entry = {arange, nullptr, cut::runs};

} // namespace tb::npu
