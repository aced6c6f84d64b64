// The FP16 numerics: dequantization on HVX (dequantize.cpp), the product on the matrix unit (hmx_model.h).
#include "kernels/gemm.h"
#include "kernels/hvx/dequantize.h"
#include "kernels/hvx/hmx_model.h"
#include "kernels/hvx/hvx.h"

namespace tb::npu {

namespace {

static_assert(gemm_fp16_tile_bytes == hmx::tile_halves * sizeof(uint16_t), "one tile is one tile");

void dequantize(uint32_t type, const uint8_t * panel, int64_t k_tiles, uint16_t * tiles) {
    hvx::dequantize_of(type)(panel, static_cast<uint32_t>(k_tiles), tiles);
}

void activations(const float * x, int64_t k_tiles, uint16_t * tiles, int row) {
    for (; k_tiles != 0; k_tiles--, x += hmx::side, tiles += hmx::tile_halves) {
        alignas(128) uint32_t half[hmx::side];
        hvx::store_aligned(half, hvx::float_to_half(hvx::load(x)));
        for (int k = 0; k < hmx::side; k++)
            tiles[hmx::element(row, k)] = static_cast<uint16_t>(half[k]);
    }
}

void run(const gemm_fp16_args & a) {
    hmx::accumulator sum;
    hmx::clear(sum);
    hmx::multiply(sum, a.rows, a.group, a.panel, a.k_tiles);
    alignas(128) uint16_t tile[hmx::tile_halves];
    hmx::store(sum, a.rows, tile);
    for (int m = 0; m < a.rows; m++) {
        for (int n = 0; n < hmx::side; n++)
            a.out[m][n] = tb_half_to_float(tile[hmx::element(m, n)]);
    }
}

} // namespace

void fill_gemm_hvx_fp16(gemm_kernels & k) {
    k.fp16 = {"gemm_fp16_32x32_hvx_hmx_model", hmx::side, dequantize, activations, run};
}

} // namespace tb::npu
