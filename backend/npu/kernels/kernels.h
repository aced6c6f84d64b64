// The kernel table: one instance per ISA, chosen once at run time by CPU feature (dispatch.cpp). No ISA tests
// elsewhere.
//
// A kernel's name says what, type, tile and ISA: gemm_q4c_32x32_avx512vnni. The portable set is complete; another set
// starts as a copy of it and replaces what it does faster, so that each fast kernel has a portable twin to be tested
// against. Each family declares its own function types in its header.
#ifndef TILEBEAM_NPU_KERNELS_H
#define TILEBEAM_NPU_KERNELS_H

#include "kernels/attention.h"
#include "kernels/gemm.h"
#include "kernels/vec.h"

namespace tb::npu {

struct kernel_table {
    const char * isa;
    gemm_kernels gemm;
    attention_kernels attention;
    vec_kernels vec;
};

// Best first; ends with "portable". Each pointer lives for ever.
struct kernel_list {
    const kernel_table * const * tables;
    int n;
};
const kernel_list & available_kernels();
const kernel_table * find_kernels(const char * isa); // "" or nullptr = best; nullptr result = not here

// Each set, compiled in its own folder with its own flags; declared here, called by dispatch.cpp only.
void fill_portable(kernel_table & t);
void fill_avx2(kernel_table & t);
void fill_avxvnni(kernel_table & t);
void fill_avx512vnni(kernel_table & t);
void fill_avx512bf16(kernel_table & t);
void fill_amx(kernel_table & t);
void fill_neon(kernel_table & t);
void fill_i8mm(kernel_table & t);
void fill_hvx(kernel_table & t);

} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_H
