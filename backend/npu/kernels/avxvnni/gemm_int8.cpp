// Integer GEMM on the 256-bit vpdpbusd of CPUs without AVX-512: the shared kernels over 8 lanes.
#include "kernels/avxvnni/unit.h"
#include "kernels/gemm_vnni.h"
#include "kernels/kernels.h"

namespace tb::npu {

void fill_gemm_avxvnni_k(gemm_kernels & k);

// AVX2's set but for the integer GEMM.
void fill_avxvnni(kernel_table & t) {
    fill_avx2(t);
    gemm_kernels & k = t.gemm;
    TILEBEAM_VNNI_KERNELS(k, "32x8_avxvnni");
    fill_gemm_avxvnni_k(k);
}

} // namespace tb::npu
