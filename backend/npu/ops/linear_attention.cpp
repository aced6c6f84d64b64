// Linear attention whose states decay by a factor of their own for each element of a key. RWKV_WKV7: a state is
// corrected, too, by what it gives for another key; rows are elements of the value. RWKV_WKV6 and GATED_LINEAR_ATTN: a
// state takes in the key times the value; columns are elements of the value, and know nothing of each other.
#include "ops/states.h"

#include <algorithm>

namespace tb::npu {
namespace {

// What one token does to the rows of a head's state.
struct wkv7_token {
    const op_context & ctx;
    const head_states & of;
    float * const seen; // of each row: what lanes give for a
    const float *r = nullptr, *decay = nullptr, *k = nullptr, *v = nullptr, *a = nullptr, *b = nullptr;
    const float * next_a = nullptr; // the last token has its own: nothing reads what that gives
    float * result = nullptr;
    bool is_first = true;

    void read(int64_t t) {
        const float ** const operands[] = {&r, &decay, &k, &v, &a, &b};
        for (int i = 0; i < 6; i++) {
            *operands[i] = ctx.src[i].at<const float>(of.head, t, of.sequence);
        }
        next_a = ctx.src[4].at<const float>(of.head, std::min(t + 1, of.tokens - 1), of.sequence);
        result = of.result(ctx, t);
        is_first = t == 0;
    }

    void row(int64_t i, const float * from, float * next) const {
        result[i] = ctx.kernels->vec.wkv7_step(of.n, from, decay, k, a, b, r, v[i], next);
    }

    void lanes(int64_t i, float * side, int64_t count) const {
        float values[state_lanes] = {};
        float out[state_lanes];
        std::copy_n(v + i, count, values);
        if (is_first) {
            std::fill_n(seen + i, state_lanes, 0.0f);
            for (int64_t j = 0; j < count; j++) {
                seen[i + j] = ctx.kernels->vec.dot(of.n, of.first.from(i + j, of.head, of.sequence), a);
            }
        }
        ctx.kernels->vec.wkv7_rows(of.n, side, decay, k, b, r, values, next_a, seen + i, out);
        std::copy_n(out, count, result + i);
    }
};

void wkv7(const op_context & ctx) {
    walk_heads(ctx, ctx.src[3], 1, side_floats(ctx.src[3].ne(0), 1),
               [&](const head_states & of, float * seen) { return wkv7_token{ctx, of, seen}; });
}

uint64_t wkv7_scratch(const tb_op & op, int n_threads, const kernel_table &) {
    return walk_scratch(op.src[3], n_threads, side_floats(op.src[3].ne[0], 1));
}

// Of a thread: a query.
int64_t query_bytes(int64_t n) { return static_cast<int64_t>(align64(static_cast<uint64_t>(n) * sizeof(float))); }

// A token's result is the query times the state after it (GATED_LINEAR_ATTN), or times the state before it and, with
// factors `first`, what it brings itself (RWKV_WKV6). Both are one product with the state before it, and what the token
// brings is a multiple of its value: return that factor, and in `query` what the state is multiplied by.
float query_of(const op_context & ctx, int64_t head, int64_t t, int64_t sequence, const float * decay, float * query) {
    const view & q = ctx.src[2];
    const int64_t n = q.ne(0);
    const float * const x = q.at<const float>(head, t, sequence);
    const float * const k = ctx.src[0].at<const float>(head, t, sequence);
    if (ctx.op->code == TB_OP_RWKV_WKV6) {
        ctx.kernels->vec.mul(n, x, ctx.src[3].at<const float>(head), query);
        const float own = ctx.kernels->vec.dot(n, query, k);
        std::copy_n(x, n, query);
        return own;
    }
    const float scale = ctx.param_f(0);
    ctx.kernels->vec.mul(n, x, decay, query);
    ctx.kernels->vec.scale(n, query, scale, 0.0f, query);
    return scale * ctx.kernels->vec.dot(n, x, k);
}

// Items are heads where there are enough of them for all threads, else blocks of their columns.
void linear_attention(const op_context & ctx) {
    const view & v = ctx.src[1];
    const view & decays = ctx.src[ctx.op->code == TB_OP_RWKV_WKV6 ? 4 : 3];
    const int64_t n = v.ne(0), heads = v.ne(1), sequences = v.ne(3);
    const int operand = tb_op_states(ctx.op->code);
    float * const last = ctx.dst.at<float>(0) + n * v.rows();
    sequence_states states(ctx, operand, 3, operand + 1, sequences);
    if (!states.begin(last, ctx.scratch + ctx.n_threads * query_bytes(n))) {
        return;
    }
    float * const query = reinterpret_cast<float *>(ctx.scratch + ctx.thread * query_bytes(n));
    const int64_t width = heads * sequences >= 4 * ctx.n_threads ? n : state_lanes;
    const int64_t blocks = divide_up(n, width);
    for (const int64_t item : ctx.share(blocks * heads * sequences)) {
        const int64_t column = item % blocks * width;
        const int64_t head = item / blocks % heads, sequence = item / blocks / heads;
        const head_states of{states, last, head, heads, sequence, sequences, v.ne(2), n, n, 1, nullptr};
        const float * from = states.from(0, head, sequence) + column;
        float * const next = of.row(0, 0) + column;
        for (int64_t t = 0; t < of.tokens; t++) {
            const float * const decay = decays.at<const float>(head, t, sequence);
            const float own = query_of(ctx, head, t, sequence, decay, query);
            ctx.kernels->vec.linear_step(
                std::min(width, n - column), n, n, from, decay, ctx.src[0].at<const float>(head, t, sequence), query,
                v.at<const float>(head, t, sequence) + column, own, next, of.result(ctx, t) + column);
            from = next;
        }
    }
}

uint64_t linear_scratch(const tb_op & op, int n_threads, const kernel_table &) {
    const tb_tensor & v = op.src[1];
    return static_cast<uint64_t>(n_threads * query_bytes(v.ne[0]) + sequence_states::copy_bytes(v.ne[3]));
}

} // namespace

const op_entry wkv7_entry = {wkv7, wkv7_scratch};
const op_entry linear_attention_entry = {linear_attention, linear_scratch};

} // namespace tb::npu
