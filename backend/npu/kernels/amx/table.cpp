// The amx kernel set: avx512bf16's but for integer GEMM. CPUs with AMX have all that set needs.
#include "kernels/kernels.h"

namespace tb::npu {

void fill_amx(kernel_table & t) {
    fill_avx512bf16(t);
    t.isa = "amx";
    fill_gemm_amx(t.gemm);
}

} // namespace tb::npu
