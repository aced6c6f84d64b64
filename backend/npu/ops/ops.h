// What the op files share: their entries in the op table, row indexing, and reading or writing runs of elements of any
// type as floats.
#ifndef TILEBEAM_NPU_OPS_OPS_H
#define TILEBEAM_NPU_OPS_OPS_H

#include <cstdint>

#include "context.h"
#include "kernels/kernels.h"

namespace tb::npu {

// X(code of ggml_ext's ops.h, name): an op, whose entry NAME_entry is defined in its own file.
#define TILEBEAM_OPS(X)                                                                                                \
    X(MUL_MAT, mul_mat)                                                                                                \
    X(FLASH_ATTN, flash_attn)                                                                                          \
    X(RMS_NORM, rms_norm)                                                                                              \
    X(MUL, mul)                                                                                                        \
    X(ADD, add)                                                                                                        \
    X(ROPE, rope)                                                                                                      \
    X(SET_ROWS, set_rows)                                                                                              \
    X(GLU, glu)                                                                                                        \
    X(SCALE, scale)                                                                                                    \
    X(SOFT_MAX, soft_max)                                                                                              \
    X(GET_ROWS, get_rows)                                                                                              \
    X(CPY, cpy)                                                                                                        \
    X(SUB, sub)                                                                                                        \
    X(DIV, div)                                                                                                        \
    X(UNARY, unary)                                                                                                    \
    X(LOG, log)                                                                                                        \
    X(CLAMP, clamp)                                                                                                    \
    X(FILL, fill)                                                                                                      \
    X(SUM, sum)                                                                                                        \
    X(CUMSUM, cumsum)                                                                                                  \
    X(ARGMAX, argmax)                                                                                                  \
    X(ARGSORT, argsort)                                                                                                \
    X(TOP_K, top_k)                                                                                                    \
    X(PAD, pad)                                                                                                        \
    X(MUL_MAT_ID, mul_mat_id)                                                                                          \
    X(SUM_ROWS, sum_rows)                                                                                              \
    X(REPEAT, repeat)                                                                                                  \
    X(NORM, norm)                                                                                                      \
    X(SQR, sqr)                                                                                                        \
    X(SQRT, sqrt)                                                                                                      \
    X(CONCAT, concat)                                                                                                  \
    X(L2_NORM, l2_norm)                                                                                                \
    X(ADD_ID, add_id)                                                                                                  \
    X(SSM_CONV, ssm_conv)                                                                                              \
    X(SSM_SCAN, ssm_scan)                                                                                              \
    X(GATED_DELTA_NET, gated_delta_net)                                                                                \
    X(RWKV_WKV6, linear_attention)                                                                                     \
    X(RWKV_WKV7, wkv7)                                                                                                 \
    X(GATED_LINEAR_ATTN, linear_attention)                                                                             \
    X(LIGHTNING_INDEXER, lightning_indexer)                                                                            \
    X(DSV4_HC_PRE, hc_pre)                                                                                             \
    X(DSV4_HC_POST, hc_post)                                                                                           \
    X(DSV4_HC_COMB, hc_comb)                                                                                           \
    X(ARANGE, arange)                                                                                                  \
    X(POOL_2D, pool_2d)                                                                                                \
    X(ROPE_BACK, rope_back)

#define TILEBEAM_ENTRY(CODE, NAME) extern const op_entry NAME##_entry;
TILEBEAM_OPS(TILEBEAM_ENTRY)
#undef TILEBEAM_ENTRY

// The GEMM kernel that a MUL_MAT of this shape runs.
const char * mul_mat_kernel_name(const tb_op & op, const kernel_table & kernels);

// Bytes of whole cache lines.
inline uint64_t align64(uint64_t n) { return (n + 63) / 64 * 64; }

struct row_index {
    int64_t i1, i2, i3;
};

// Row number r of v, counted in memory order of a contiguous tensor of its shape.
inline row_index row_of(const view & v, int64_t r) {
    const int64_t i1 = r % v.ne(1);
    r /= v.ne(1);
    return {i1, r % v.ne(2), r / v.ne(2)};
}

// An elementwise op's work: every row of `v` cut into runs. item i covers elements [first, first + n) of a row.
struct run_item {
    row_index row;
    int64_t first, n;
};

inline run_item run_of(const view & v, int64_t item) {
    const int64_t per_row = runs_per_row(v);
    const int64_t first = item % per_row * run_elements;
    const int64_t left = v.ne(0) - first;
    return {row_of(v, item / per_row), first, left < run_elements ? left : run_elements};
}

// Elements follow each other without gaps along dimension 0.
bool dense_rows(const view & v);

// Elements [first, first + n) of the row at `row`, as floats: the row itself if it holds floats without gaps, else
// `buffer` (n floats). `first` and n are multiples of the block size of block types, which must have dense rows.
const float * load_run(const kernel_table & k, const view & v, const uint8_t * row, int64_t first, int64_t n,
                       float * buffer);

// Where to compute floats bound for elements [first, first + n) of `row`: there directly, or `buffer`.
float * run_target(const view & v, uint8_t * row, int64_t first, float * buffer);

// Store x, which may be what run_target returned.
void store_run(const kernel_table & k, const view & v, uint8_t * row, int64_t first, int64_t n, const float * x);

// n elements from one row to another, any length: copied bit for bit if both sides have one type, else converted by way
// of float. The positions and n are multiples of the block size of block types.
void copy_run(const kernel_table & k, const view & from, const uint8_t * src, int64_t src_at, const view & to,
              uint8_t * dst, int64_t dst_at, int64_t n);

// ALiBi's slope of head h of n_head; 1 if max_bias is 0.
float alibi_slope(float max_bias, int64_t h, int64_t n_head);

} // namespace tb::npu

#endif // TILEBEAM_NPU_OPS_OPS_H
