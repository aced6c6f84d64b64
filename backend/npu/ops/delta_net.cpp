// GATED_DELTA_NET: each head's state, a matrix, decays from token to token, is corrected so that it maps the token's
// key closer to its value, and gives the result for its query. Rows of a state know nothing of each other: threads
// divide them, too.
#include "ops/ops.h"

#include <algorithm>
#include <cmath>

namespace tb::npu {
namespace {

constexpr int64_t block_rows = 16; // a cache line of results

int64_t workspace_bytes(int64_t n) {
    return static_cast<int64_t>(align64(static_cast<uint64_t>((block_rows + 1) * n) * sizeof(float)));
}

// Some rows of one head's state in one sequence.
struct block {
    int64_t row, n_rows, head, sequence;
};

// The factors of a row's elements: exp of one number for all, or of one for each.
void decays_of(const op_context & ctx, const block & b, int64_t token, int64_t n, float * decay) {
    const view & logs = ctx.src[3];
    const float * x = logs.at<const float>(b.head, token, b.sequence);
    if (logs.ne(0) == 1) {
        std::fill_n(decay, n, std::exp(*x));
    } else {
        std::copy_n(x, n, decay);
        ctx.kernels->vec.exp_sum(n, decay, 0.0f);
    }
}

// Through all tokens. `workspace`: the rows, then a row of factors.
void run_block(const op_context & ctx, const block & b, float * workspace) {
    const view & v = ctx.src[2];
    const int64_t n = v.ne(0);
    const int64_t heads = v.ne(1);
    const int64_t tokens = v.ne(2);
    const int64_t sequences = v.ne(3);
    const int64_t kept = ctx.param_i(0);
    const float scale = 1.0f / std::sqrt(static_cast<float>(n));
    // Heads of values take turns with the heads of queries and keys; sequences share them in a row.
    const auto shared = [&](const view & t, int64_t token) {
        return t.at<const float>(b.head % t.ne(1), token, b.sequence / (sequences / t.ne(3)));
    };
    float * results = ctx.dst.at<float>(0);
    float * states = results + n * heads * tokens * sequences;
    float * decay = workspace + block_rows * n;
    for (int64_t r = 0; r < b.n_rows; r++) {
        std::copy_n(ctx.src[5].at<const float>(b.row + r, b.head, b.sequence), n, workspace + r * n);
    }
    for (int64_t t = 0; t < tokens; t++) {
        decays_of(ctx, b, t, n, decay);
        const float * query = shared(ctx.src[0], t);
        const float * key = shared(ctx.src[1], t);
        const float * value = v.at<const float>(b.head, t, b.sequence);
        const float beta = *ctx.src[4].at<const float>(b.head, t, b.sequence);
        float * result = results + ((b.sequence * tokens + t) * heads + b.head) * n;
        for (int64_t r = 0; r < b.n_rows; r++) {
            result[b.row + r] =
                scale * ctx.kernels->vec.delta_step(n, workspace + r * n, decay, key, query, value[b.row + r], beta);
        }
        const int64_t back = tokens - 1 - t;
        if (back < kept) {
            const int64_t state = (back * sequences + b.sequence) * heads + b.head;
            std::copy_n(workspace, b.n_rows * n, states + (state * n + b.row) * n);
        }
    }
}

void gated_delta_net(const op_context & ctx) {
    const view & v = ctx.src[2];
    const int64_t n = v.ne(0);
    const int64_t blocks = divide_up(n, block_rows);
    float * workspace = reinterpret_cast<float *>(ctx.scratch + ctx.thread * workspace_bytes(n));
    for (const int64_t item : ctx.share(blocks * v.ne(1) * v.ne(3))) {
        const int64_t row = item % blocks * block_rows;
        const int64_t head = item / blocks;
        run_block(ctx, {row, std::min(block_rows, n - row), head % v.ne(1), head / v.ne(1)}, workspace);
    }
}

uint64_t scratch_bytes(const tb_op & op, int n_threads, const kernel_table &) {
    return static_cast<uint64_t>(n_threads) * static_cast<uint64_t>(workspace_bytes(op.src[2].ne[0]));
}

} // namespace

const op_entry gated_delta_net_entry = {gated_delta_net, scratch_bytes};

} // namespace tb::npu
