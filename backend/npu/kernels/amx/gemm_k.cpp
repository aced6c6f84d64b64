// The kernels of the amx set for types of 256 k. Compiled and emulated, never run on a CPU with AMX
// (amx/matrix_unit.h).
#include "kernels/amx/gemm_k.h"

#include "kernels/avx512vnni/unit.h"

namespace tb::npu {

void fill_gemm_amx_k(gemm_kernels & k);

void fill_gemm_amx_k(gemm_kernels & k) { replace_k_kernels<unit>(k); }

} // namespace tb::npu
