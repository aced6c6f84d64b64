// DSV4_HC_PRE, DSV4_HC_POST, DSV4_HC_COMB: several residual streams beside each other. A layer reads a weighted sum of
// them (PRE); its result is added to each with a weight, after the streams have been mixed (POST). The matrix that
// mixes them (COMB) has rows and columns that sum up to one.
#include "ops/ops.h"

#include <algorithm>
#include <cmath>

namespace tb::npu {
namespace {

float element(const view & v, int64_t i0, int64_t i1 = 0, int64_t i2 = 0) {
    return *reinterpret_cast<const float *>(v.at<const uint8_t>(i1, i2) + i0 * v.nb(0));
}

// gates[i] = 1 / (1 + exp(-x[i]))
void sigmoid(const vec_kernels & vec, int64_t n, const float * x, float * gates) {
    vec.scale(n, x, -1.0f, 0.0f, gates);
    vec.exp_sum(n, gates, 0.0f);
    for (int64_t i = 0; i < n; i++) {
        gates[i] = 1.0f / (1.0f + gates[i]);
    }
}

// sums += x * factor
void add_scaled(int64_t n, const float * x, float factor, float * sums) {
    for (int64_t i = 0; i < n; i++) {
        sums[i] += x[i] * factor;
    }
}

void hc_pre(const op_context & ctx) {
    const view & x = ctx.src[0];
    const view & weights = ctx.src[1];
    const vec_kernels & vec = ctx.kernels->vec;
    const bool is_gated = ctx.param_i(1) != 0;
    float gates[run_elements];
    for (const int64_t item : ctx.share_runs(ctx.dst)) {
        const auto [i, at, n] = run_of(ctx.dst, item);
        const int64_t token = i.i1;
        float sums[run_elements] = {};
        for (int64_t stream = 0; stream < x.ne(1); stream++) {
            const float * row = x.at<const float>(stream, token) + at;
            if (is_gated) {
                sigmoid(vec, n, weights.at<const float>(stream, token) + at, gates);
                vec.mul(n, gates, row, gates);
                vec.add(n, sums, gates, sums);
            } else {
                add_scaled(n, row, element(weights, stream, token), sums);
            }
        }
        vec.scale(n, sums, ctx.param_f(0), 0.0f, ctx.dst.at<float>(token) + at);
    }
}

// dst[:, to] = x * post[to] + sum over `from` of residual[:, from] * comb[to, from], or + residual[:, to].
void hc_post(const op_context & ctx) {
    const view & x = ctx.src[0];
    const view & residual = ctx.src[1];
    const view & comb = ctx.src[3];
    const vec_kernels & vec = ctx.kernels->vec;
    for (const int64_t item : ctx.share_runs(ctx.dst)) {
        const auto [i, at, n] = run_of(ctx.dst, item);
        const int64_t to = i.i1;
        const int64_t token = i.i2;
        float * out = ctx.dst.at<float>(to, token) + at;
        vec.scale(n, x.at<const float>(token) + at, element(ctx.src[2], to, token), 0.0f, out);
        if (!comb) {
            vec.add(n, out, residual.at<const float>(to, token) + at, out);
            continue;
        }
        for (int64_t from = 0; from < residual.ne(1); from++) {
            add_scaled(n, residual.at<const float>(from, token) + at, element(comb, to, from, token), out);
        }
    }
}

constexpr int streams = 4;

// Divide lines of the matrix by their sums: elements `step` apart, lines `next` apart.
void normalize(float * m, int step, int next, float eps) {
    for (int line = 0; line < streams; line++) {
        float sum = eps;
        for (int j = 0; j < streams; j++) {
            sum += m[line * next + j * step];
        }
        for (int j = 0; j < streams; j++) {
            m[line * next + j * step] *= 1.0f / sum;
        }
    }
}

// A softmax of each row, then columns and rows by turns.
void make_mixer(const op_context & ctx, int64_t token, float * m) {
    const float scale = element(ctx.src[1], 2);
    const float eps = ctx.param_f(0);
    for (int from = 0; from < streams; from++) {
        float * row = m + from * streams;
        for (int to = 0; to < streams; to++) {
            const int64_t i = 2 * streams + from * streams + to;
            row[to] = element(ctx.src[0], i, token) * scale + element(ctx.src[2], i);
        }
        const float top = *std::max_element(row, row + streams);
        float sum = 0.0f;
        for (int to = 0; to < streams; to++) {
            row[to] = std::exp(row[to] - top);
            sum += row[to];
        }
        for (int to = 0; to < streams; to++) {
            row[to] = row[to] * (1.0f / sum) + eps;
        }
    }
    normalize(m, streams, 1, eps);
    for (int round = 1; round < ctx.param_i(1); round++) {
        normalize(m, 1, streams, eps);
        normalize(m, streams, 1, eps);
    }
}

void hc_comb(const op_context & ctx) {
    for (const int64_t token : ctx.share(ctx.dst.ne(2), 4)) {
        float m[streams * streams];
        make_mixer(ctx, token, m);
        for (int from = 0; from < streams; from++) {
            std::copy_n(m + from * streams, streams, ctx.dst.at<float>(from, token));
        }
    }
}

} // namespace

const op_entry hc_pre_entry = {hc_pre, nullptr, cut::runs};
const op_entry hc_post_entry = {hc_post, nullptr};
const op_entry hc_comb_entry = {hc_comb, nullptr};

} // namespace tb::npu
