// LIGHTNING_INDEXER: how much each cell of the KV cache matters to each token: over small heads, the sum of what is
// positive in the products of query and key, times the head's weight; plus the mask.
#include "ops/ops.h"

#include <algorithm>

namespace tb::npu {
namespace {

constexpr int64_t block_cells = 64; // whose keys stay in the cache for all tokens

int64_t keys_bytes(int64_t n) {
    return static_cast<int64_t>(align64(static_cast<uint64_t>(block_cells * n) * sizeof(float)));
}

// Scores of cells [cell, cell + n) for one token; keys as rows of floats.
void score(const op_context & ctx, const float * keys, int64_t cell, int64_t n, int64_t token, int64_t stream) {
    const view & q = ctx.src[0];
    const view & mask = ctx.src[3];
    const vec_kernels & vec = ctx.kernels->vec;
    const float * weights = ctx.src[2].at<const float>(token, 0, stream);
    float sums[block_cells] = {};
    float hidden[block_cells];
    for (int64_t h = 0; h < q.ne(1); h++) {
        const float * query = q.at<const float>(h, token, stream);
        for (int64_t c = 0; c < n; c++) {
            sums[c] += std::max(vec.dot(q.ne(0), query, keys + c * q.ne(0)), 0.0f) * weights[h];
        }
    }
    vec.to_f32[TB_F16](n, mask.at<const uint16_t>(token, 0, stream % mask.ne(3)) + cell, hidden);
    vec.add(n, sums, hidden, ctx.dst.at<float>(token, 0, stream) + cell);
}

void lightning_indexer(const op_context & ctx) {
    const view & k = ctx.src[1];
    const int64_t n = k.ne(0);
    const int64_t cells = k.ne(2);
    const int64_t blocks = divide_up(cells, block_cells);
    float * keys = reinterpret_cast<float *>(ctx.scratch + ctx.thread * keys_bytes(n));
    for (const int64_t item : ctx.share(blocks * k.ne(3))) {
        const int64_t cell = item % blocks * block_cells;
        const int64_t here = std::min(block_cells, cells - cell);
        const int64_t stream = item / blocks;
        for (int64_t c = 0; c < here; c++) {
            ctx.kernels->vec.to_f32[k.type()](n, k.at<const uint8_t>(0, cell + c, stream), keys + c * n);
        }
        for (int64_t token = 0; token < ctx.dst.ne(1); token++) {
            score(ctx, keys, cell, here, token, stream);
        }
    }
}

uint64_t scratch_bytes(const tb_op & op, int n_threads, const kernel_table &) {
    return static_cast<uint64_t>(n_threads) * static_cast<uint64_t>(keys_bytes(op.src[1].ne[0]));
}

} // namespace

const op_entry lightning_indexer_entry = {lightning_indexer, scratch_bytes};

} // namespace tb::npu
