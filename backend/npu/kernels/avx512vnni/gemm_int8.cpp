// Integer GEMM on AVX-512's vpdpbusd: the shared kernels over 16 lanes.
#include "kernels/avx512vnni/unit.h"
#include "kernels/gemm_vnni.h"
#include "kernels/kernels.h"

namespace tb::npu {

void fill_gemm_avx512vnni_float(gemm_kernels & k);
void fill_gemm_avx512vnni_k(gemm_kernels & k);

// Every CPU with AVX-512 VNNI has AVX2, so what this set lacks comes from there.
void fill_avx512vnni(kernel_table & t) {
    fill_avx2(t);
    gemm_kernels & k = t.gemm;
    TILEBEAM_VNNI_KERNELS(k, "32x32_avx512vnni");
    fill_gemm_avx512vnni_float(k);
    fill_gemm_avx512vnni_k(k);
    fill_attention_avx512vnni(t.attention);
    fill_vec_avx512vnni(t.vec);
}

} // namespace tb::npu
