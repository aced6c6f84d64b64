// Integer GEMM on the 256-bit vpdpbusd of CPUs without AVX-512: the shared kernels over 8 lanes.
#include "kernels/avxvnni/unit.h"
#include "kernels/gemm_vnni.h"
#include "kernels/kernels.h"

namespace tb::npu {

void fill_gemm_avxvnni_k(gemm_kernels & k);

namespace {

template <class Format> gemm_int8 kernel(const char * name) {
    return {name, gemm_max_rows, Format::offset, multiply_panel<unit, Format>};
}

} // namespace

// AVX2's set but for the integer GEMM.
void fill_avxvnni(kernel_table & t) {
    fill_avx2(t);
    gemm_kernels & k = t.gemm;
    k.int8[gemm_q4] = kernel<format_q4<unit>>("gemm_q4c_32x8_avxvnni");
    k.int8[gemm_q8] = kernel<format_q8<unit>>("gemm_q8c_32x8_avxvnni");
    k.int8[gemm_iq4nl] = kernel<format_iq4nl<unit>>("gemm_nlc_32x8_avxvnni");
    k.int8[gemm_prepared] = kernel<format_prepared<unit>>("gemm_q8p_32x8_avxvnni");
    k.int8[gemm_q5_0] = kernel<format_bits<unit, TB_Q5_0_COL>>("gemm_q50c_32x8_avxvnni");
    k.int8[gemm_q4_1] = kernel<format_bits<unit, TB_Q4_1_COL>>("gemm_q41c_32x8_avxvnni");
    k.int8[gemm_q5_1] = kernel<format_bits<unit, TB_Q5_1_COL>>("gemm_q51c_32x8_avxvnni");
    k.int8[gemm_mxfp4] = kernel<format_mxfp4<unit>>("gemm_mx4c_32x8_avxvnni");
    k.int8[gemm_nvfp4] = kernel<format_nvfp4<unit>>("gemm_nv4c_32x8_avxvnni");
    k.int8[gemm_q1_0] = kernel<format_few_bits<unit, TB_Q1_0_COL>>("gemm_q10c_32x8_avxvnni");
    k.int8[gemm_q2_0] = kernel<format_few_bits<unit, TB_Q2_0_COL>>("gemm_q20c_32x8_avxvnni");
    fill_gemm_avxvnni_k(k);
}

} // namespace tb::npu
