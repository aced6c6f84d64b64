// GATED_DELTA_NET: each head's state, a matrix, decays from token to token, is corrected so that it maps the token's
// key closer to its value, and gives the result for its query. Rows of a state know nothing of each other: threads
// divide them, too.
#include "ops/states.h"

#include <algorithm>
#include <cmath>

namespace tb::npu {
namespace {

// Of a thread: rows side by side, and two of a row's length.
int64_t workspace_bytes(int64_t n) {
    return static_cast<int64_t>(align64(static_cast<uint64_t>((state_lanes + 2) * n) * sizeof(float)));
}

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
        result = ctx.dst.at<float>(0) + ((of.sequence * of.tokens + t) * of.heads + of.head) * of.n;
    }

    void row(int64_t r, const float * from, float * next) const {
        result[r] = scale * ctx.kernels->vec.delta_step(of.n, from, decay, key, query, value[r], beta, next);
    }

    void lanes(int64_t r, int64_t count) const {
        float values[state_lanes] = {};
        float out[state_lanes];
        std::copy_n(value + r, count, values);
        ctx.kernels->vec.mul(of.n, decay, key, seen);
        ctx.kernels->vec.delta_rows(of.n, of.lanes, decay, key, seen, query, values, beta, out);
        for (int64_t i = 0; i < count; i++) {
            result[r + i] = scale * out[i];
        }
    }
};

// Items are heads where there are enough of them for all threads, else blocks of their rows.
void gated_delta_net(const op_context & ctx) {
    const view & v = ctx.src[2];
    const int64_t n = v.ne(0);
    const int64_t heads = v.ne(1);
    const int64_t sequences = v.ne(3);
    float * const last = ctx.dst.at<float>(0) + n * v.rows();
    sequence_states states(ctx, 5, 3, 6, sequences);
    if (!states.begin(last, ctx.scratch + ctx.n_threads * workspace_bytes(n))) {
        return;
    }
    const bool side_by_side = (ctx.op->flags & TB_FLAG_DETERMINISTIC) == 0;
    const int64_t n_rows = heads * sequences >= 4 * ctx.n_threads ? n : state_lanes;
    const int64_t blocks = divide_up(n, n_rows);
    float * const lanes = reinterpret_cast<float *>(ctx.scratch + ctx.thread * workspace_bytes(n));
    float * const decay = lanes + state_lanes * n;
    for (const int64_t item : ctx.share(blocks * heads * sequences)) {
        const int64_t row = item % blocks * n_rows;
        const int64_t head = item / blocks;
        const head_states of{states, last, head % heads,   heads, head / heads, sequences, v.ne(2),
                             n,      n,    ctx.param_i(0), lanes};
        of.walk(row, std::min(row + n_rows, n), side_by_side,
                token{ctx, of, 1.0f / std::sqrt(static_cast<float>(n)), decay, decay + n});
    }
}

uint64_t scratch_bytes(const tb_op & op, int n_threads, const kernel_table &) {
    const tb_tensor & v = op.src[2];
    return static_cast<uint64_t>(n_threads * workspace_bytes(v.ne[0]) + sequence_states::copy_bytes(v.ne[3]));
}

} // namespace

const op_entry gated_delta_net_entry = {gated_delta_net, scratch_bytes};

} // namespace tb::npu
