// Integer GEMM on sdot: 4 rows x 16 columns at a time, each 32-bit lane four k of one column; the activations' quads
// are lanes of two registers per row. Nibbles 0..15 are positive signed bytes, so only they need a start value.
#include "kernels/kernels.h"
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

void fill_neon(kernel_table & t) {
    TILEBEAM_COLUMN_KERNELS(t.gemm, "4x16_neon");
    t.gemm.quantize = quantize;
    fill_gemm_neon_float(t.gemm);
    fill_gemm_neon_k(t.gemm);
    fill_attention_neon(t.attention);
    fill_vec_neon(t.vec);
}

} // namespace tb::npu
