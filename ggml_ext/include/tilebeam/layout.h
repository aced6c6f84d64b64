// Tile layout: where every weight of a tiled tensor lies. Pack, unpack, reference dequantize. Version 1 has Q4_0, Q8_0
// and IQ4_NL; version 2 adds the other types (K-quants: k_panels.h).
//
// A weight tensor ne = [K, N] is cut into 32(k) x 32(n) tiles; tile (kt, nt) has index nt*(K/32) + kt, so all
// k-tiles of 32 output columns (a "panel") are contiguous. A tile is quants in quad order, then 32 FP16 scales;
// of Q4_1 and Q5_1 then 32 FP16 minima. MXFP4 has 32 bytes for scales, exponents x of 2^(x - 128). NVFP4 has
// 32 for k 0 to 15, then 32 for the others, UE4M3 numbers: exponent of 4 bits, bias 7, and mantissa of 3 bits.
// A block of Q1_0 is four tiles long, one of Q2_0 two: each has its scale, so that tiles are 1.33 and 1.11 times as
// large.
//
// clang-format off
//   4 bits (Q4_0, IQ4_NL, Q4_1, MXFP4,  chunk c = k/8, k' = k%8, v = k'>>1, p = k'&1: byte 128c + 4n + 2p + (v&1),
//   NVFP4)                              nibble v>>1
//   5 bits (Q5_0, Q5_1)                 the low four so; the fifth in byte 512 + 4n + 2p + (v&1), bit k/4
//   1 bit (Q1_0)                        byte 4n + 2p + (v&1), bit k/4
//   2 bits (Q2_0)                       byte 128(k/16) + 4n + 2p + (v&1), bits 2(k/4 % 4) and the next
//   8 bits (Q8_0)                       chunk c = k/4, k' = k%4, v = k'>>1, p = k'&1: byte 128c + 4n + 2p + v
// clang-format on
//
//   column grouping       scale d[n]: one per column and 32 k, ggml's own grouping; lossless
//   tile grouping         scale d[e>>5], e(k,n) = (k>>1)*64 + 2n + (k&1), the HMX FP16 order: a 2(k) x 16(n) block
//
// The text between the cffi marks is also Python's view of this library.
#ifndef TILEBEAM_LAYOUT_H
#define TILEBEAM_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "tilebeam/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
#define TB_LAYOUT_VERSION 2

// The layout version this library was built with: Python compares it with the header's.
uint32_t tb_layout_version(void);

// Bytes of a tiled K x N matrix, N rounded up to whole tiles; 0 if the type is not tiled or K is no multiple of
// tb_tile_k.
uint64_t tb_tiled_bytes(uint32_t type, uint64_t k, uint64_t n);

// Pack ggml blocks of `rows` (1..32) weight rows, each K elements and `row_stride` bytes apart, into one panel of
// K/32 tiles. Missing rows become zero scales and zero quants. `type` is a column-grouped type.
int tb_pack_panel(uint32_t type, uint64_t k, uint32_t rows, const void * src, size_t row_stride, void * panel);

// The inverse, bit for bit.
int tb_unpack_panel(uint32_t type, uint64_t k, uint32_t rows, const void * panel, void * dst, size_t row_stride);

// Whole matrices, rows contiguous: n / 32 panels (the last one padded).
int tb_pack(uint32_t type, uint64_t k, uint64_t n, const void * src, void * tiles);
int tb_unpack(uint32_t type, uint64_t k, uint64_t n, const void * tiles, void * dst);

// Reference dequantize of one panel to float, row-major [rows][K]. Any tiled type.
int tb_dequantize_panel(uint32_t type, uint64_t k, uint32_t rows, const void * panel, float * dst);

// Dequantize `n` consecutive elements of plain ggml blocks, whole ones, or F16/BF16/F32 values to float.
int tb_dequantize_row(uint32_t ggml_type, uint64_t n, const void * src, float * dst);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif // TILEBEAM_LAYOUT_H
