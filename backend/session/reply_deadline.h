// How long the NPU side may take for one op. The deadline that a session is given suits ops of up to 2^34 operations,
// which is 0.3 GFLOPS in the default of 60 s: less than one slow CPU does without vectors. A larger op, as a product of
// a large model's float weights with a long prompt, gets more in proportion.
#ifndef TILEBEAM_SESSION_REPLY_DEADLINE_H
#define TILEBEAM_SESSION_REPLY_DEADLINE_H

#include <algorithm>
#include <cstdint>

#include "tilebeam/ops.h"

namespace tb::session {

// Multiplications and additions; 0 for ops that have only as many as elements.
inline double operations_of(const tb_op & op) {
    const double results = 1.0 * op.dst.ne[0] * op.dst.ne[1] * op.dst.ne[2] * op.dst.ne[3];
    switch (op.code) {
    case TB_OP_MUL_MAT:
    case TB_OP_MUL_MAT_ID:
        return 2 * results * op.src[0].ne[0];
    case TB_OP_FLASH_ATTN: // scores over a head of K, then sums over the cells
        return 2 * results * op.src[1].ne[1] * (1 + 1.0 * op.src[1].ne[0] / std::max(op.dst.ne[0], 1u));
    case TB_OP_SSM_SCAN: // each token goes through the states of all heads
        return 6.0 * op.src[0].ne[0] * op.src[1].ne[0] * op.src[1].ne[1] * op.src[1].ne[2] * op.src[1].ne[3];
    case TB_OP_GATED_DELTA_NET:
        return 7.0 * op.src[2].ne[0] * op.src[2].ne[0] * op.src[2].ne[1] * op.src[2].ne[2] * op.src[2].ne[3];
    case TB_OP_RWKV_WKV6:
    case TB_OP_RWKV_WKV7:
    case TB_OP_GATED_LINEAR_ATTN:
        return 9.0 * op.src[1].ne[0] * op.src[1].ne[0] * op.src[1].ne[1] * op.src[1].ne[2] * op.src[1].ne[3];
    case TB_OP_LIGHTNING_INDEXER: // scores over all heads
        return 2 * results * op.src[0].ne[0] * op.src[0].ne[1];
    default:
        return 0;
    }
}

// By how much the deadline grows for the largest of these ops; at least 1.
inline double deadline_factor(const tb_op * ops, uint32_t n_ops) {
    constexpr double included = 1ull << 34, most = 1e6;
    double largest = included;
    for (uint32_t i = 0; i < n_ops; ++i) {
        largest = std::max(largest, operations_of(ops[i]));
    }
    return std::min(largest / included, most);
}

} // namespace tb::session

#endif // TILEBEAM_SESSION_REPLY_DEADLINE_H
