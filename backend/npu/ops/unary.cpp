// UNARY, LOG, SQR, SQRT, CLAMP, SCALE, FILL and ARANGE: dst = f(src0), element by element. Any mix of strides, dst and
// src0 of one type.
#include "ops/ops.h"

#include <algorithm>
#include <cmath>

namespace tb::npu {
namespace {

using function = float (*)(float x);

// By ggml_unary_op: ABS, SGN, NEG, STEP, TANH, ELU, RELU, SIGMOID, GELU, GELU_QUICK, SILU, HARDSWISH, HARDSIGMOID, EXP,
// EXPM1, SOFTPLUS, GELU_ERF, XIELU, FLOOR, CEIL, ROUND and TRUNC. None: those of which `unary` knows more.
constexpr function FUNCTIONS[TB_UNARY_KINDS] = {
    [](float x) { return std::fabs(x); },
    [](float x) { return static_cast<float>((x > 0.0f) - (x < 0.0f)); },
    nullptr,
    [](float x) { return x > 0.0f ? 1.0f : 0.0f; },
    [](float x) { return std::tanh(x); },
    [](float x) { return x > 0.0f ? x : std::expm1(x); },
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    [](float x) { return x * std::min(1.0f, std::max(0.0f, (x + 3.0f) / 6.0f)); },
    [](float x) { return std::min(1.0f, std::max(0.0f, (x + 3.0f) / 6.0f)); },
    nullptr,
    [](float x) { return std::expm1(x); },
    [](float x) { return x > 20.0f ? x : std::log(1.0f + std::exp(x)); },
    nullptr,
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

template <class F> void apply(const op_context & ctx, const F & f) {
    elementwise(ctx, [f](int64_t n, const float * x, float * y) {
        for (int64_t i = 0; i < n; i++) {
            y[i] = f(x[i]);
        }
    });
}

// Kinds of ggml_unary_op.
constexpr int32_t NEG = 2;
constexpr int32_t RELU = 6;
constexpr int32_t SIGMOID = 7;
constexpr int32_t GELU = 8;
constexpr int32_t GELU_QUICK = 9;
constexpr int32_t SILU = 10;
constexpr int32_t EXP = 13;
constexpr int32_t GELU_ERF = 16;
constexpr int32_t XIELU = 17;

// The gate of a gated unit whose other half is one.
void gate(const op_context & ctx, glu_kind kind) {
    float ones[run_elements];
    std::fill(ones, ones + run_elements, 1.0f);
    elementwise(ctx,
                [&](int64_t n, const float * x, float * y) { ctx.kernels->vec.glu[kind](n, x, ones, 0.0f, 0.0f, y); });
}

// params: [1] alpha of negative x, [2] of positive ones, [3] beta, [4] eps, as ggml_xielu makes them of a model's own.
void xielu(const op_context & ctx) {
    const float negative = ctx.param_f(1), positive = ctx.param_f(2), beta = ctx.param_f(3), eps = ctx.param_f(4);
    apply(ctx, [=](float x) {
        const float bent = x > 0.0f ? positive * x * x : (std::expm1(std::min(x, eps)) - x) * negative;
        return bent + beta * x;
    });
}

void unary(const op_context & ctx) {
    switch (const int32_t kind = ctx.param_i(0)) {
    case NEG:
        return apply(ctx, [](float x) { return -x; });
    case RELU:
        return apply(ctx, [](float x) { return x > 0.0f ? x : 0.0f; });
    case EXP:
        return elementwise(ctx, [&](int64_t n, const float * x, float * y) {
            if (x != y) std::copy_n(x, n, y);
            ctx.kernels->vec.exp_sum(n, y, 0.0f);
        });
    case SIGMOID:
        return elementwise(ctx, ctx.kernels->vec.sigmoid); // gates of recurrent layers, as wide as the layer
    case SILU:
        return elementwise(ctx, ctx.kernels->vec.silu);
    case GELU:
        return gate(ctx, glu_geglu);
    case GELU_QUICK:
        return gate(ctx, glu_geglu_quick);
    case GELU_ERF:
        return gate(ctx, glu_geglu_erf);
    case XIELU:
        return xielu(ctx);
    default:
        return apply(ctx, FUNCTIONS[kind]);
    }
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
    apply(ctx, [=](float x) { return std::max(std::min(x, high), low); });
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
