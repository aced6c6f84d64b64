// Types whose weights are points of a grid (IQ1 to IQ3), for k_panels.c: ggml's super-blocks to what a panel has of a
// column, back bit for bit, and its values.
#ifndef TILEBEAM_SRC_GRID_BLOCKS_H
#define TILEBEAM_SRC_GRID_BLOCKS_H

#include <stdint.h>

#include "tilebeam/k_panels.h"

// One column's 256 quants, in k order (bytes of five stay as they are), and what scales them: bytes as a panel has
// them, one below the other.
typedef struct {
    uint8_t q[TB_K_BLOCK];
    uint8_t scales[16];
    uint16_t d, dmin;
} panel_column;

// 0 and nothing done: `type`, a tiled type, is not one of these.
int grid_from_block(uint32_t type, const uint8_t * block, panel_column * c);
int grid_to_block(uint32_t type, const panel_column * c, uint8_t * block);
int grid_values(uint32_t type, const panel_column * c, float * out); // 256

#endif // TILEBEAM_SRC_GRID_BLOCKS_H
