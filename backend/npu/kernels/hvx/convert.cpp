// FP16 <-> float for rows and panels, and dequantization to the float panels that the float GEMM reads.
#include <cstring>

#include "kernels/gemm.h"
#include "kernels/hvx/dequantize.h"
#include "kernels/hvx/hvx.h"
#include "kernels/vec.h"

namespace tb::npu {

namespace {

using namespace hvx;

void f16_to_f32(int64_t n, const void * src, float * dst) {
    const uint16_t * x = static_cast<const uint16_t *>(src);
    for (; n >= 64; n -= 64, x += 64, dst += 64) {
        const HVX_VectorPair w = Q6_Wuw_vunpack_Vuh(load(x));
        store(dst, half_to_float(Q6_V_lo_W(w)));
        store(dst + 32, half_to_float(Q6_V_hi_W(w)));
    }
    if (n > 0) {
        alignas(128) uint16_t in[64] = {};
        alignas(128) float out[64];
        std::memcpy(in, x, static_cast<size_t>(n) * sizeof(uint16_t));
        f16_to_f32(64, in, out);
        std::memcpy(dst, out, static_cast<size_t>(n) * sizeof(float));
    }
}

void f32_to_f16(int64_t n, const float * src, void * dst) {
    uint16_t * y = static_cast<uint16_t *>(dst);
    for (; n >= 64; n -= 64, src += 64, y += 64)
        store(y, Q6_Vh_vpacke_VwVw(float_to_half(load(src + 32)), float_to_half(load(src))));
    if (n > 0) {
        alignas(128) float in[64] = {};
        alignas(128) uint16_t out[64];
        std::memcpy(in, src, static_cast<size_t>(n) * sizeof(float));
        f32_to_f16(64, in, out);
        std::memcpy(y, out, static_cast<size_t>(n) * sizeof(uint16_t));
    }
}

void round_fp16(int64_t n, float * x) {
    for (; n >= 32; n -= 32, x += 32)
        store(x, half_to_float(float_to_half(load(x))));
    if (n > 0) {
        alignas(128) float last[32] = {};
        std::memcpy(last, x, static_cast<size_t>(n) * sizeof(float));
        round_fp16(32, last);
        std::memcpy(x, last, static_cast<size_t>(n) * sizeof(float));
    }
}

void dequantize(uint32_t type, const uint8_t * panel, int64_t k_tiles, float * out) {
    const dequantize_function to_tiles = dequantize_of(type);
    const size_t bytes = tile_of(type).bytes;
    alignas(128) uint16_t tile[1024];
    for (; k_tiles != 0; k_tiles--, panel += bytes) {
        to_tiles(panel, 1, tile);
        for (int v = 0; v < 16; v++, out += 64) { // a row pair: even halves are one k, odd ones the next
            const HVX_VectorPair rows = deinterleave(load_aligned(tile + 64 * v));
            store(out, half_to_float(Q6_V_lo_W(rows)));
            store(out + 32, half_to_float(Q6_V_hi_W(rows)));
        }
    }
}

} // namespace

void fill_gemm_hvx_convert(gemm_kernels & k) {
    k.dequantize = dequantize;
    k.round_fp16 = round_fp16;
}

void fill_vec_hvx(vec_kernels & k) {
    k.to_f32[TB_F16] = f16_to_f32;
    k.from_f32[TB_F16] = f32_to_f16;
}

} // namespace tb::npu
