// The executor as a C library (libtilebeam_npu.so), for tests, `tilebeam doctor` and benches: buffers are plain
// pointers of the caller, no channel in between.
#ifndef TILEBEAM_CAPI_NPU_API_H
#define TILEBEAM_CAPI_NPU_API_H

#include "tilebeam/ops.h"
#include "tilebeam/protocol.h"

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
typedef struct tb_npu tb_npu;

// isa: NULL or "" for the best of this CPU, else one of tb_npu_isa_name. NULL result: no such kernel set here.
tb_npu * tb_npu_create(int n_threads, const char * isa);
// The same with a limit on the bytes of all mapped buffers together; 0 = none.
tb_npu * tb_npu_create_limited(int n_threads, const char * isa, uint64_t memory_limit);
void tb_npu_free(tb_npu * npu);
// Status codes are enum tb_status. A buffer stays the caller's and must outlive its mapping.
int tb_npu_map(tb_npu * npu, uint32_t id, void * base, uint64_t size, int writable);
int tb_npu_unmap(tb_npu * npu, uint32_t id);
int tb_npu_set_threads(tb_npu * npu, int n_threads); // 0: one per performance core
// How many of them are at work: 0 = no more than there are CPUs, and fewer while other programs want those; else that
// many, whatever it costs. The same results, bit for bit.
void tb_npu_set_hands(tb_npu * npu, int n);
// 0: op by op with a barrier after each, nothing fused, shared or reordered. The same results, bit for bit.
void tb_npu_set_fusion(tb_npu * npu, int on);
// Checks every op, then runs all in order. `reply` (may be NULL) says which op failed and why.
int tb_npu_run(tb_npu * npu, const tb_op * ops, uint32_t n_ops, tb_reply * reply);
const char * tb_npu_isa(tb_npu * npu);
int tb_npu_n_threads(tb_npu * npu);

// i = 0, 1, ..: kernel sets runnable on this CPU, best first; NULL past the last.
const char * tb_npu_isa_name(int i);

// The kernel that an op of this shape would run, e.g. "gemm_q4c_32x32_avx512vnni"; NULL if it has none of its own or is
// refused.
const char * tb_npu_kernel_name(tb_npu * npu, const tb_op * op);

// out[i] = exp2(in[i]) as attention of this kernel set computes it: FP16 bits, inputs not above zero (positive ones
// count as 0). Returns a tb_status.
int tb_npu_exp2_fp16(tb_npu * npu, const uint16_t * in, uint16_t * out, uint64_t n);

// The kernels of its set, a tb::npu::kernel_table (npu/kernels/kernels.h), for programs that time them by themselves.
const void * tb_npu_kernels(tb_npu * npu);

// Bytes of memory that this process can have: all, what is available of it, and that with swap (base/usable_memory.h).
// `root`: NULL, or where proc/ and sys/ are.
void tb_usable_memory(const char * root, uint64_t * total, uint64_t * available, uint64_t * with_swap);

// What the system grants this process of the machine's CPUs, as cpu_limits of base/cpus.h, which explains the fields;
// `nodes` is how many, `threads` is default_threads. `root` as above.
typedef struct {
    int32_t cpus, cores, performance_cores, nodes, threads;
    double quota;
} tb_cpus;
void tb_process_cpus(const char * root, tb_cpus * found);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif // TILEBEAM_CAPI_NPU_API_H
