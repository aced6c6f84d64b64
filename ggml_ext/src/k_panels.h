// Types with blocks of 256 k, for layout.c: `type` is one of TB_K_TYPES, k a multiple of 256, rows at most 32.
#ifndef TILEBEAM_SRC_K_PANELS_H
#define TILEBEAM_SRC_K_PANELS_H

#include <stddef.h>
#include <stdint.h>

void k_pack_panel(uint32_t type, uint64_t k, uint32_t rows, const uint8_t * src, size_t row_stride, uint8_t * panel);
void k_unpack_panel(uint32_t type, uint64_t k, uint32_t rows, const uint8_t * panel, uint8_t * dst, size_t row_stride);
void k_dequantize_panel(uint32_t type, uint64_t k, uint32_t rows, const uint8_t * panel, float * dst);
void k_dequantize_row(uint32_t type, uint64_t n, const uint8_t * src, float * dst); // `type`: the tiled type

#endif // TILEBEAM_SRC_K_PANELS_H
