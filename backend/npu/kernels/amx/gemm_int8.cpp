// The integer kernels of the amx set. Compiled and emulated, never run on a CPU with AMX (amx/matrix_unit.h).
#include "kernels/amx/gemm_int8.h"

#include "kernels/avx512vnni/tile_groups.h"
#include "kernels/avx512vnni/unit.h"

namespace tb::npu {

void fill_gemm_amx_k(gemm_kernels & k);

void fill_gemm_amx(gemm_kernels & k) {
    replace_int8_kernels<unit>(k);
    replace_kernel<unit, gemm_q4_tile, format_nibbles_tile<TB_Q4_0_TILE>>(k, "gemm_q4t_32x32_amx");
    replace_kernel<unit, gemm_q8_tile, format_q8_tile>(k, "gemm_q8t_32x32_amx");
    replace_kernel<unit, gemm_iq4nl_tile, format_nibbles_tile<TB_IQ4_NL_TILE>>(k, "gemm_nlt_32x32_amx");
    fill_gemm_amx_k(k);
}

} // namespace tb::npu
