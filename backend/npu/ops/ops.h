// What the op files share: their entries in the op table, row indexing, and reading or writing runs of elements of any
// type as floats.
#ifndef TILEBEAM_NPU_OPS_OPS_H
#define TILEBEAM_NPU_OPS_OPS_H

#include <cstdint>

#include "context.h"
#include "kernels/kernels.h"

namespace tb::npu {

extern const op_entry mul_mat_entry;
extern const op_entry flash_attn_entry;
extern const op_entry rms_norm_entry;
extern const op_entry mul_entry;
extern const op_entry add_entry;
extern const op_entry rope_entry;
extern const op_entry set_rows_entry;
extern const op_entry get_rows_entry;
extern const op_entry glu_entry;
extern const op_entry scale_entry;
extern const op_entry soft_max_entry;
extern const op_entry cpy_entry;
extern const op_entry sub_entry;
extern const op_entry div_entry;
extern const op_entry unary_entry;
extern const op_entry log_entry;
extern const op_entry clamp_entry;
extern const op_entry fill_entry;
extern const op_entry sum_entry;
extern const op_entry cumsum_entry;
extern const op_entry argmax_entry;
extern const op_entry argsort_entry;
extern const op_entry top_k_entry;
extern const op_entry pad_entry;
extern const op_entry mul_mat_id_entry;
extern const op_entry sum_rows_entry;
extern const op_entry repeat_entry;
extern const op_entry norm_entry;
extern const op_entry sqr_entry;
extern const op_entry sqrt_entry;
extern const op_entry concat_entry;
extern const op_entry l2_norm_entry;
extern const op_entry add_id_entry;
extern const op_entry ssm_conv_entry;
extern const op_entry ssm_scan_entry;
extern const op_entry gated_delta_net_entry;
extern const op_entry lightning_indexer_entry;
extern const op_entry hc_pre_entry;
extern const op_entry hc_post_entry;
extern const op_entry hc_comb_entry;
extern const op_entry arange_entry;
extern const op_entry pool_2d_entry;
extern const op_entry rope_back_entry;

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
