// GATED_DELTA_NET: each head's state, a matrix, decays from token to token, is corrected so that it maps the token's
// key closer to its value, and gives the result for its query. Rows of a state know nothing of each other: threads
// divide them, too.
#include "ops/states.h"

#include <algorithm>
#include <cmath>

namespace tb::npu {
namespace {

// What one token does to the rows of a head's state.
struct token {
    const op_context & ctx;
    const head_states & of;
    const float scale;
    float * const decay; // of a row's elements
    float * const seen;  // decay * key
    const float *query = nullptr, *key = nullptr, *value = nullptr;
    float * result = nullptr;
    float beta = 0;

    // Heads of values take turns with the heads of queries and keys; sequences share them in a row.
    const float * shared(const view & x, int64_t t) const {
        return x.at<const float>(of.head % x.ne(1), t, of.sequence / (of.sequences / x.ne(3)));
    }

    // Factors of a row's elements are exp of one number for all, or of one for each.
    void read(int64_t t) {
        const view & logs = ctx.src[3];
        const float * x = logs.at<const float>(of.head, t, of.sequence);
        if (logs.ne(0) == 1) {
            std::fill_n(decay, of.n, std::exp(*x));
        } else {
            std::copy_n(x, of.n, decay);
            ctx.kernels->vec.exp_sum(of.n, decay, 0.0f);
        }
        query = shared(ctx.src[0], t);
        key = shared(ctx.src[1], t);
        value = ctx.src[2].at<const float>(of.head, t, of.sequence);
        beta = *ctx.src[4].at<const float>(of.head, t, of.sequence);
        result = of.result(ctx, t);
    }

    void row(int64_t r, const float * from, float * next) const {
        result[r] = scale * ctx.kernels->vec.delta_step(of.n, from, decay, key, query, value[r], beta, next);
    }

    void lanes(int64_t r, float * side, int64_t count) const {
        float values[state_lanes] = {};
        float out[state_lanes];
        std::copy_n(value + r, count, values);
        ctx.kernels->vec.mul(of.n, decay, key, seen);
        ctx.kernels->vec.delta_rows(of.n, side, decay, key, seen, query, values, beta, out);
        for (int64_t i = 0; i < count; i++) {
            result[r + i] = scale * out[i];
        }
    }
};

void gated_delta_net(const op_context & ctx) {
    const int64_t n = ctx.src[2].ne(0);
    const float scale = 1.0f / std::sqrt(static_cast<float>(n));
    walk_heads(ctx, ctx.src[2], ctx.param_i(0), 2 * n,
               [&](const head_states & of, float * spare) { return token{ctx, of, scale, spare, spare + n}; });
}

uint64_t scratch_bytes(const tb_op & op, int n_threads, const kernel_table &) {
    return walk_scratch(op.src[2], n_threads, 2 * int64_t{op.src[2].ne[0]});
}

} // namespace

const op_entry gated_delta_net_entry = {gated_delta_net, scratch_bytes};

} // namespace tb::npu
