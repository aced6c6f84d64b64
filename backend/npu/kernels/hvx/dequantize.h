// Weights to FP16 tiles in HMX order by table look-up (vlut16): the step in front of the matrix unit.
//
// Quad order is what vlut16 wants: it writes the results of even bytes to one vector and those of odd bytes to the
// next, so a chunk of 128 bytes comes out as four row pairs (two from the low nibbles, two from the high ones), each in
// HMX order, without a shuffle. Bytes are widened the same way.
//
// Scaling. `column`: one vector of scales, each twice, serves all 16 row pairs of a tile. `tile`: each row pair has its
// own vector of two scales. vdelta with constant controls makes them: the paper spreads scales by another vlut16
// (section 5.2.2), which here would wait for the same unit as the look-ups and conversions.
// With HVX floating point (v68 and later) a value is looked up as FP16 and multiplied in qf16. Without it, values are
// multiplied in integers, and `tile` with 4 bits multiplies its tables instead, before the look-up.
#ifndef TILEBEAM_NPU_KERNELS_HVX_DEQUANTIZE_H
#define TILEBEAM_NPU_KERNELS_HVX_DEQUANTIZE_H

#include <cstdint>

namespace tb::npu::hvx {

// `tiles` consecutive tiles to 1024 FP16 numbers each, `out` 128-byte aligned. A number is q * scale, rounded once to
// nearest even. One function per tiled type, so that each has one inner loop (bench/hvx_packets.py counts it).
void dequantize_q4_column(const uint8_t * panel, uint32_t tiles, uint16_t * out);
void dequantize_iq4nl_column(const uint8_t * panel, uint32_t tiles, uint16_t * out);
void dequantize_q8_column(const uint8_t * panel, uint32_t tiles, uint16_t * out);
void dequantize_q4_tile(const uint8_t * panel, uint32_t tiles, uint16_t * out);
void dequantize_iq4nl_tile(const uint8_t * panel, uint32_t tiles, uint16_t * out);
void dequantize_q8_tile(const uint8_t * panel, uint32_t tiles, uint16_t * out);

// The one for a tb_type; nullptr if it is not tiled.
using dequantize_function = void (*)(const uint8_t * panel, uint32_t tiles, uint16_t * out);
dequantize_function dequantize_of(uint32_t type);

} // namespace tb::npu::hvx

#endif // TILEBEAM_NPU_KERNELS_HVX_DEQUANTIZE_H
