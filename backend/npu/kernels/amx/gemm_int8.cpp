// The integer kernels of the amx set.
#include "kernels/avx512vnni/unit.h"

#include "kernels/amx/gemm_int8.h"
#include "kernels/kernels.h"

namespace tb::npu {

void fill_gemm_amx_k(gemm_kernels & k);

// avx512bf16's set but for integer GEMM. CPUs with AMX have all that set needs.
void fill_amx(kernel_table & t) {
    fill_avx512bf16(t);
    replace_int8_kernels<unit>(t.gemm);
    fill_gemm_amx_k(t.gemm);
}

} // namespace tb::npu
