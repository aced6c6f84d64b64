// Integer GEMM on sdot: 4 rows x 16 columns at a time, each 32-bit lane four k of one column; the activations' quads
// are lanes of two registers per row. Nibbles 0..15 are positive signed bytes, so only they need a start value.
#include "kernels/neon/int8.h"

namespace tb::npu {

void fill_gemm_neon_float(gemm_kernels & k);

namespace {

constexpr int max_rows = 4;

template <class Format> void run(const gemm_int8_args & a) {
    switch (a.rows) {
    case 1:
        return block<Format, 1>(a);
    case 2:
        return block<Format, 2>(a);
    case 3:
        return block<Format, 3>(a);
    default:
        return block<Format, 4>(a);
    }
}

template <class Format> gemm_int8 kernel(const char * name) { return {name, max_rows, Format::offset, run<Format>}; }

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
    k.quantize = quantize;
    k.coarse = {};
    fill_gemm_neon_float(k);
}

} // namespace tb::npu
