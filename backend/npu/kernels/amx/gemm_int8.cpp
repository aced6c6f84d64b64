// The integer kernels of the amx set.
#include "kernels/avx512vnni/unit.h"

#include "kernels/amx/gemm_int8.h"

namespace tb::npu {

void fill_gemm_amx_k(gemm_kernels & k);

void fill_gemm_amx(gemm_kernels & k) {
    replace_int8_kernels<unit>(k);
    fill_gemm_amx_k(k);
}

} // namespace tb::npu
