// What an op costs at least, for traces. See trace.h.
#include "tilebeam/trace.h"

#include "ops_check.h"

static uint64_t bytes_of(const tb_tensor * t) {
    return t->buffer == TB_NO_BUFFER || is_empty(t) ? 0 : element_bytes(t);
}

// Bytes of n rows of a tensor.
static uint64_t row_bytes(const tb_tensor * t, uint64_t n) {
    return t->ne[0] / tb_type_block(t->type) * (uint64_t)tb_type_size(t->type) * n;
}

// What to add to the bytes of all operands and dst where states are replaced in place (ops.h): as many of them as there
// are sequences are read and written, and not the room for them in dst.
static uint64_t states_cost(const tb_op * op, const tb_tensor * states, int dim, uint64_t sequences) {
    if (op->params[1] == 0) return 0;
    const uint64_t all = bytes_of(states), moved = all / states->ne[dim] * sequences;
    return (op->code == TB_OP_SSM_CONV ? 2 * moved : moved) - all;
}

void tb_op_cost(const tb_op * op, uint64_t * bytes, uint64_t * work) {
    const tb_tensor *a = &op->src[0], *b = &op->src[1], *dst = &op->dst;
    *bytes = 0;
    *work = 0;
    if (op->code == TB_OP_NOP || op->code >= TB_OP_COUNT || is_empty(dst)) return;
    for (uint32_t i = 0; i < op->n_src && i < TB_MAX_SRC; i++)
        *bytes += bytes_of(&op->src[i]);
    *bytes += bytes_of(dst);
    switch (op->code) {
    case TB_OP_MUL_MAT:
        *work = 2 * n_elements(dst) * a->ne[0];
        break;
    case TB_OP_MUL_MAT_ID: // of the matrices, at most one per row is read
        if (n_elements(b + 1) < a->ne[2]) *bytes -= bytes_of(a) / a->ne[2] * (a->ne[2] - n_elements(b + 1));
        *work = 2 * n_elements(dst) * a->ne[0];
        break;
    case TB_OP_FLASH_ATTN: // scores, and their sum over V
        *work = 2 * (uint64_t)b->ne[1] * a->ne[1] * a->ne[2] * a->ne[3] * ((uint64_t)a->ne[0] + op->src[2].ne[0]);
        break;
    case TB_OP_SSM_CONV:
        *bytes += states_cost(op, b + 1, 2, dst->ne[2]);
        break;
    case TB_OP_SSM_SCAN: // each token goes through the states of all heads
        *bytes += states_cost(op, a, 3, b->ne[3]);
        *work = 6 * n_elements(b) * a->ne[0];
        break;
    case TB_OP_GATED_DELTA_NET:
        *bytes += states_cost(op, &op->src[5], 3, op->src[2].ne[3]);
        *work = 7 * n_elements(&op->src[2]) * op->src[2].ne[0];
        break;
    case TB_OP_RWKV_WKV6:
    case TB_OP_RWKV_WKV7:
    case TB_OP_GATED_LINEAR_ATTN:
        *bytes += states_cost(op, &op->src[tb_op_states(op->code)], 3, b->ne[3]);
        *work = (op->code == TB_OP_RWKV_WKV7 ? 9 : 5) * n_elements(b) * b->ne[0];
        break;
    case TB_OP_LIGHTNING_INDEXER: // scores over all heads
        *work = 2 * n_elements(dst) * a->ne[0] * a->ne[1];
        break;
    case TB_OP_SET_ROWS: // dst is the whole cache
        *bytes += row_bytes(dst, (uint64_t)a->ne[1] * a->ne[2] * a->ne[3]) - bytes_of(dst);
        break;
    case TB_OP_GET_ROWS: // src0 is the whole table
        *bytes += row_bytes(a, n_elements(b)) - bytes_of(a);
        break;
    case TB_OP_FILL: // src0 gives the shape only
        *bytes = bytes_of(dst);
        break;
    default:
        break;
    }
}
