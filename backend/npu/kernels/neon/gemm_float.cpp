// Float GEMM on NEON: the shared kernels over 4 lanes.
#include "kernels/neon/simd.h"

#include "kernels/gemm_float_simd.h"

namespace tb::npu {

namespace {

struct unit : simd {
    static constexpr int registers = 32;
    static vec load_bf16(const uint8_t * p) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
    }
};

constexpr int rows = panel_shape<unit>.rows;
static_assert(rows == 6 && panel_shape<unit>.vectors * unit::width == 16, "the kernel's name");

} // namespace

void fill_gemm_neon_float(gemm_kernels & k) {
    k.f32 = {"gemm_f32_6x16_neon", rows, float_panel<unit, rows>};
    k.dot[gemm_f32] = {"gemm_f32d_6x4_neon", 32, dot<unit, element_f32<unit>>};
    k.dot[gemm_f16] = {"gemm_f16d_6x4_neon", 48, dot<unit, element_f16<unit>>};
    k.dot[gemm_bf16] = {"gemm_bf16d_6x4_neon", 48, dot<unit, element_bf16<unit>>};
    k.pack = pack<unit>;
}

} // namespace tb::npu
