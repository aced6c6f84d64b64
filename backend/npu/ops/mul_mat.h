// What MUL_MAT and MUL_MAT_ID share: how a product is carried out, and the parts that run it.
#ifndef TILEBEAM_NPU_OPS_MUL_MAT_H
#define TILEBEAM_NPU_OPS_MUL_MAT_H

#include <algorithm>

#include "ops/ops.h"
#include "tilebeam/layout.h"

namespace tb::npu {

constexpr int64_t mul_mat_stage_tiles = 32; // k tiles of staged weights at most: 36 KiB of int8
constexpr int64_t mul_mat_stage_bytes = mul_mat_stage_tiles * static_cast<int64_t>(gemm_prepared_bytes);

constexpr int64_t mul_mat_dot_rows = 32; // of one call of a dot kernel at most

enum class mul_mat_way { integer, integer_staged, floats, matrix, dot };

// A row of MUL_MAT_ID: dst's dimensions 1 and 2.
struct picked_row {
    uint32_t i1, i2;
};

struct mul_mat_plan {
    mul_mat_way path;
    gemm_format format;
    bool fp16;
    bool k_quant;             // block panels against K groups
    uint32_t type;            // of the weights
    int64_t k, n, rows;       // rows: per weight matrix
    int64_t matrices, r2, r3; // r2, r3: how often src0 repeats over dimensions 2 and 3
    int64_t max_rows, groups; // groups: per matrix
    int64_t group_size, longer_groups;
    int64_t row_bytes; // of a converted row, in the matrix unit's tiles 32 times that per group
    int64_t stage;     // scratch of each thread
    int64_t panels;
    // Items; shrinking: each takes a share of the panels that are left, and panels_per_item at least.
    bool shrinking;
    int64_t panels_per_item, groups_per_item;
    int64_t expert;            // MUL_MAT_ID: the one matrix
    const picked_row * picked; // and its rows, or some of them; nullptr: all rows, in order

    int64_t converted_rows() const {
        return path == mul_mat_way::matrix ? matrices * groups * TB_TILE_K : matrices * rows;
    }
    int64_t converted_bytes() const { return (converted_rows() * row_bytes + 127) / 128 * 128; }
    void set_rows(int64_t count, int64_t most) {
        rows = count;
        max_rows = most;
        groups = divide_up(rows, max_rows);
        group_size = rows / std::max<int64_t>(1, groups);
        longer_groups = rows - groups * group_size;
    }
    bool is_integer() const { return path == mul_mat_way::integer || path == mul_mat_way::integer_staged; }
    // Where group g begins among the converted rows.
    int64_t group_offset(int64_t m, int64_t g) const {
        return (path == mul_mat_way::matrix ? (m * groups + g) * TB_TILE_K : m * rows + group_start(g)) * row_bytes;
    }
    // Groups differ by one row at most: 17 rows are 9 and 8, not 16 and 1.
    int64_t group_start(int64_t g) const { return g * group_size + std::min(g, longer_groups); }
    int group_rows(int64_t g) const { return static_cast<int>(group_start(g + 1) - group_start(g)); }
};

inline bool is_float(uint32_t type) { return type == TB_F32 || type == TB_F16 || type == TB_BF16; }

// Q4_0, Q8_0 and IQ4_NL, the types that come in either grouping: kernels do all numerics with them, else int8 alone.
inline bool has_all_numerics(uint32_t type) {
    return tb_tiled_tile(tb_type_is_tiled(type) ? tb_tiled_source(type) : type) != TB_TYPE_COUNT;
}

inline gemm_float_type float_of(uint32_t type) {
    return type == TB_F32 ? gemm_f32 : type == TB_F16 ? gemm_f16 : gemm_bf16;
}

// For `rows` rows against each of `matrices` matrices.
mul_mat_plan plan_mul_mat(const tb_op & op, int64_t matrices, int64_t rows, int n_threads,
                          const kernel_table & kernels);
// Of a whole MUL_MAT.
mul_mat_plan plan_mul_mat(const tb_op & op, int n_threads, const kernel_table & kernels);
// Of all rows of a MUL_MAT_ID, as if they met one matrix.
mul_mat_plan plan_mul_mat_id(const tb_op & op, int n_threads, const kernel_table & kernels);
int64_t picked_rows(const tb_op & op); // of a MUL_MAT_ID

// Are activations converted first? A dot product reads F32 where they are.
bool converts_activations(const tb_op & op, const mul_mat_plan & p);
// This thread's share of the activations, into ctx.prepared.
void convert_activations(const op_context & ctx, const mul_mat_plan & p);
// Are both integer products that convert a row of activations to the same numbers?
bool same_integers(const mul_mat_plan & p, const mul_mat_plan & q, const kernel_table & kernels);
// All rows of activations, by this thread alone.
void convert_rows(const op_context & ctx, const mul_mat_plan & p);
// Where in a group of an integer product the record of tile t begins; of 256 k, t is the first of a block.
int64_t record_offset(const mul_mat_plan & p, int64_t t, int rows);
// Part of a product: panels and groups of a matrix, [first, last).
struct mul_mat_item {
    int64_t matrix, panel, last_panel, group, last_group;
};
// An item of activations that were converted into ctx.prepared; `stage`: this thread's scratch.
void multiply(const op_context & ctx, const mul_mat_plan & p, const mul_mat_item & item, uint8_t * stage);

} // namespace tb::npu

#endif // TILEBEAM_NPU_OPS_MUL_MAT_H
