// Which kernel a MUL_MAT runs, on which groups of rows, in which pieces.
#include "ops/mul_mat.h"

namespace tb::npu {

namespace {

constexpr int64_t item_bytes = 256 << 10; // weights that one item keeps in L2 while its rows pass
constexpr int64_t least_bytes = 32 << 10; // of an item's weights that pass once: each begins by waiting for memory
constexpr int64_t items_per_thread = 4;   // at least, where there is enough to share

// By plain type, which are those of tiles in `column` grouping, too. `tile` grouping is prepared.
constexpr struct {
    uint32_t type;
    gemm_format format;
} formats[] = {
    {TB_Q4_0, gemm_q4},       {TB_Q8_0, gemm_q8},      {TB_IQ4_NL, gemm_iq4nl},    {TB_Q5_0, gemm_q5_0},
    {TB_Q4_1, gemm_q4_1},     {TB_Q5_1, gemm_q5_1},    {TB_MXFP4, gemm_mxfp4},     {TB_Q4_K, gemm_q4_k},
    {TB_Q5_K, gemm_q5_k},     {TB_Q6_K, gemm_q6_k},    {TB_Q2_K, gemm_q2_k},       {TB_Q3_K, gemm_q3_k},
    {TB_IQ4_XS, gemm_iq4_xs}, {TB_TQ2_0, gemm_tq2_0},  {TB_TQ1_0, gemm_tq1_0},     {TB_IQ2_XXS, gemm_iq2_xxs},
    {TB_IQ2_XS, gemm_iq2_xs}, {TB_IQ2_S, gemm_iq2_xs}, {TB_IQ3_XXS, gemm_iq3_xxs}, {TB_IQ3_S, gemm_iq3_s},
    {TB_IQ1_S, gemm_iq1_s},   {TB_IQ1_M, gemm_iq1_m},  {TB_Q1_0, gemm_q1_0},       {TB_Q2_0, gemm_q2_0},
    {TB_NVFP4, gemm_nvfp4},
};

gemm_format format_of(uint32_t type) {
    const uint32_t source = tb_tiled_source(type), key = tb_tiled_column(source) == type ? source : type;
    for (const auto & [of, format] : formats) {
        if (of == key) return format;
    }
    return gemm_prepared;
}

} // namespace

mul_mat_plan plan_mul_mat(const tb_op & op, int64_t matrices, int64_t rows, int n_threads,
                          const kernel_table & kernels) {
    const tb_tensor & w = op.src[0];
    mul_mat_plan p{};
    p.type = w.type;
    p.fp16 = (op.flags & TB_FLAG_FP16) != 0;
    p.format = format_of(w.type);
    p.k_quant = p.format >= gemm_q4_k && !p.fp16;
    p.k = w.ne[0];
    p.n = w.ne[1];
    p.matrices = matrices;
    p.rows = rows;
    if (is_float(w.type)) {
        // dot products of few rows add up in another order than those of many
        const bool few = p.rows <= kernels.gemm.dot[float_of(w.type)].rows;
        const bool any_rows = p.fp16 || (op.flags & TB_FLAG_DETERMINISTIC) != 0;
        p.path = few && !any_rows ? mul_mat_way::dot : mul_mat_way::floats;
    } else if (p.fp16) {
        p.path =
            kernels.gemm.fp16.name != nullptr && has_all_numerics(w.type) ? mul_mat_way::matrix : mul_mat_way::floats;
    } else {
        const bool in_place = tb_type_is_tiled(w.type) && p.format != gemm_prepared;
        p.path = in_place ? mul_mat_way::integer : mul_mat_way::integer_staged;
    }
    const bool matrix = p.path == mul_mat_way::matrix;
    p.set_rows(rows, p.is_integer()               ? kernels.gemm.int8[p.format].rows
                     : p.path == mul_mat_way::dot ? 1
                     : matrix                     ? kernels.gemm.fp16.rows
                                                  : kernels.gemm.f32.rows);
    p.row_bytes =
        p.is_integer() ? p.k / TB_TILE_K * static_cast<int64_t>(gemm_record_bytes(1)) : p.k * (matrix ? 2 : 4);
    if (p.k_quant) p.row_bytes = p.k / TB_K_BLOCK * static_cast<int64_t>(gemm_k_record_bytes(1));
    // a panel as FP16 tiles and, of plain blocks, as packed tiles before
    p.stage = matrix ? p.k / TB_TILE_K * (gemm_fp16_tile_bytes + static_cast<int64_t>(gemm_prepared_bytes))
                     : 2 * mul_mat_stage_bytes;
    // of MUL_MAT_ID, whose matrices may meet fewer rows and take another way than all rows would
    if (is_float(p.type)) p.stage = std::max(p.stage, gemm_dot_scratch(std::min(rows, mul_mat_dot_rows), p.k));
    p.panels = divide_up(p.n, TB_TILE_N);

    const int64_t wanted = n_threads * items_per_thread;
    const int64_t panel_bytes =
        std::max<int64_t>(1, is_float(p.type) ? tb_type_size(p.type) * p.k * TB_TILE_N
                                              : static_cast<int64_t>(tb_tile_bytes(p.type)) * (p.k / TB_TILE_K));
    p.shrinking = p.matrices == 1 && (p.groups == 1 || p.path == mul_mat_way::dot);
    p.panels_per_item = std::clamp<int64_t>(
        p.shrinking ? least_bytes / panel_bytes : std::min(item_bytes / panel_bytes, p.matrices * p.panels / wanted), 1,
        p.panels);
    const int64_t items = p.matrices * divide_up(p.panels, p.panels_per_item);
    p.groups_per_item =
        p.path == mul_mat_way::dot || items >= wanted ? p.groups : divide_up(p.groups, divide_up(wanted, items));
    return p;
}

mul_mat_plan plan_mul_mat(const tb_op & op, int n_threads, const kernel_table & kernels) {
    const tb_tensor &w = op.src[0], &x = op.src[1];
    const int64_t r2 = x.ne[2] / w.ne[2], r3 = x.ne[3] / w.ne[3];
    mul_mat_plan p = plan_mul_mat(op, int64_t{w.ne[2]} * w.ne[3], x.ne[1] * r2 * r3, n_threads, kernels);
    p.r2 = r2;
    p.r3 = r3;
    return p;
}

int64_t picked_rows(const tb_op & op) { return int64_t{op.src[2].ne[0]} * op.src[2].ne[1]; }

mul_mat_plan plan_mul_mat_id(const tb_op & op, int n_threads, const kernel_table & kernels) {
    return plan_mul_mat(op, 1, std::max<int64_t>(1, picked_rows(op)), n_threads, kernels);
}

const char * mul_mat_kernel_name(const tb_op & op, const kernel_table & kernels) {
    const mul_mat_plan p = op.code == TB_OP_MUL_MAT_ID ? plan_mul_mat_id(op, 1, kernels) : plan_mul_mat(op, 1, kernels);
    switch (p.path) {
    case mul_mat_way::dot:
        return kernels.gemm.dot[float_of(p.type)].name;
    case mul_mat_way::floats:
        return kernels.gemm.f32.name;
    case mul_mat_way::matrix:
        return kernels.gemm.fp16.name;
    default:
        return kernels.gemm.int8[p.format].name;
    }
}

} // namespace tb::npu
