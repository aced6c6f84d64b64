// UNARY, LOG, SQR, SQRT, CLAMP, SCALE, FILL and ARANGE: dst = f(src0), element by element. Any mix of strides, dst and
// src0 of one type.
#include "ops/ops.h"

#include <algorithm>
#include <cmath>

namespace tb::npu {
namespace {

using function = float (*)(float x);

// By ggml_unary_op: ABS, SGN, NEG, STEP, TANH, ELU, RELU, SIGMOID, GELU, GELU_QUICK, SILU, HARDSWISH, HARDSIGMOID, EXP,
// EXPM1, SOFTPLUS, GELU_ERF, XIELU, FLOOR, CEIL, ROUND and TRUNC. None: RELU, SIGMOID and SILU, see `unary`, and the
// kinds that tb_op_check_shape refuses.
constexpr function FUNCTIONS[TB_UNARY_KINDS] = {
    [](float x) { return std::fabs(x); },
    [](float x) { return static_cast<float>((x > 0.0f) - (x < 0.0f)); },
    [](float x) { return -x; },
    [](float x) { return x > 0.0f ? 1.0f : 0.0f; },
    [](float x) { return std::tanh(x); },
    [](float x) { return x > 0.0f ? x : std::exp(x) - 1.0f; },
    nullptr,
    nullptr,
    [](float x) { return 0.5f * x * (1.0f + std::tanh(0.7978845608f * x * (1.0f + 0.044715f * x * x))); },
    [](float x) { return x / (1.0f + std::exp(-1.702f * x)); },
    nullptr,
    [](float x) { return x * std::min(1.0f, std::max(0.0f, (x + 3.0f) / 6.0f)); },
    [](float x) { return std::min(1.0f, std::max(0.0f, (x + 3.0f) / 6.0f)); },
    [](float x) { return std::exp(x); },
    nullptr,
    [](float x) { return x > 20.0f ? x : std::log(1.0f + std::exp(x)); },
    [](float x) { return 0.5f * x * (1.0f + std::erf(x * 0.7071067812f)); },
    nullptr,
    [](float x) { return std::floor(x); },
    [](float x) { return std::ceil(x); },
    [](float x) { return std::round(x); },
    [](float x) { return std::trunc(x); },
};

// body(n, x, y): y[i] = f(x[i]); x and y may be the same row.
template <class Body> void elementwise(const op_context & ctx, const Body & body) {
    const view & x = ctx.src[0];
    const view & dst = ctx.dst;
    const kernel_table & k = *ctx.kernels;
    float buffer[run_elements];
    for (const int64_t item : ctx.share_runs(dst)) {
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

constexpr int32_t RELU = 6; // of ggml_unary_op
constexpr int32_t SIGMOID = 7;
constexpr int32_t SILU = 10;

void unary(const op_context & ctx) {
    const int32_t kind = ctx.param_i(0);
    if (kind == RELU) {
        return elementwise(ctx, [](int64_t n, const float * x, float * y) {
            for (int64_t i = 0; i < n; i++) {
                y[i] = x[i] > 0.0f ? x[i] : 0.0f;
            }
        });
    }
    if (kind == SIGMOID || kind == SILU) { // gates of recurrent layers, as wide as the layer
        return elementwise(ctx, kind == SILU ? ctx.kernels->vec.silu : ctx.kernels->vec.sigmoid);
    }
    apply(ctx, FUNCTIONS[kind]);
}

void log(const op_context & ctx) {
    apply(ctx, [](float x) { return std::log(x); });
}

void sqr(const op_context & ctx) {
    elementwise(ctx, [&ctx](int64_t n, const float * x, float * y) { ctx.kernels->vec.mul(n, x, x, y); });
}

void sqrt(const op_context & ctx) {
    apply(ctx, [](float x) { return std::sqrt(x); });
}

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
    float values[run_elements];
    std::fill(values, values + run_elements, ctx.param_f(0));
    for (const int64_t item : ctx.share_runs(dst)) {
        const auto [i, at, n] = run_of(dst, item);
        store_run(*ctx.kernels, dst, dst.at<uint8_t>(i.i1, i.i2, i.i3), at, n, values);
    }
}

// start, start + step, ..
void arange(const op_context & ctx) {
    for (const int64_t item : ctx.share_runs(ctx.dst)) {
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
