// Integer GEMM on sdot: 4 rows x 16 columns at a time, each 32-bit lane four k of one column; the activations' quads
// are lanes of two registers per row. Nibbles 0..15 are positive signed bytes, so only they need a start value.
#include "kernels/neon/int8.h"

namespace tb::npu {

void fill_gemm_neon_float(gemm_kernels & k);
void fill_gemm_neon_k(gemm_kernels & k);

namespace {

template <class Format> gemm_int8 kernel(const char * name) {
    return {name, gemm_max_rows, Format::offset, multiply_tiles<unit, Format>};
}

void place(uint8_t * record, int, int row, uint8x16_t q0, uint8x16_t q1) {
    vst1q_u8(record + 32 * row, q0);
    vst1q_u8(record + 32 * row + 16, q1);
}

void quantize(const float * x, int64_t k_tiles, int32_t offset, uint8_t * group, int rows, int row) {
    quantize_row(x, k_tiles, offset, group, rows, row, place);
}

} // namespace

void fill_gemm_neon(gemm_kernels & k) {
    k.int8[gemm_q4] = kernel<format_q4>("gemm_q4c_4x16_neon");
    k.int8[gemm_q8] = kernel<format_q8>("gemm_q8c_4x16_neon");
    k.int8[gemm_iq4nl] = kernel<format_iq4nl>("gemm_nlc_4x16_neon");
    k.int8[gemm_prepared] = kernel<format_prepared>("gemm_q8p_4x16_neon");
    k.int8[gemm_q5_0] = kernel<format_bits<TB_Q5_0_COL>>("gemm_q50c_4x16_neon");
    k.int8[gemm_q4_1] = kernel<format_bits<TB_Q4_1_COL>>("gemm_q41c_4x16_neon");
    k.int8[gemm_q5_1] = kernel<format_bits<TB_Q5_1_COL>>("gemm_q51c_4x16_neon");
    k.int8[gemm_mxfp4] = kernel<format_mxfp4>("gemm_mx4c_4x16_neon");
    k.quantize = quantize;
    fill_gemm_neon_float(k);
    fill_gemm_neon_k(k);
}

} // namespace tb::npu
