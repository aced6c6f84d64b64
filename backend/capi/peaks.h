// What this CPU can do at most, measured on the calling thread: the yardstick for benches and traces. Part of
// libtilebeam_npu.so only.
#ifndef TILEBEAM_CAPI_PEAKS_H
#define TILEBEAM_CAPI_PEAKS_H

#include <cstddef>
#include <cstdint>

namespace tb::npu {

// 10^9 operations a second of the widest 8-bit dot product that the kernel sets know, one operand broadcast from memory
// where the instruction can; 0 where there is no such instruction.
double limit_int8(double seconds);

// 10^9 operations a second of the widest float32 FMA, multiply and add counted apart, operands in registers; 0
// likewise.
double limit_fma(double seconds);

// 10^9 bytes a second of reading `size` bytes once. Which way is fastest differs by CPU, so there are several (`way`,
// below TB_NPU_READ_WAYS): in order or as four streams side by side, each without and with software prefetch.
double limit_read(const uint8_t * data, size_t size, int way);

} // namespace tb::npu

#endif // TILEBEAM_CAPI_PEAKS_H
