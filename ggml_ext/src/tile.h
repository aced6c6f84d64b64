// What packing and quantizing both know of a tile: sizes, grouping, and the code book of IQ4_NL.
#ifndef TILEBEAM_SRC_TILE_H
#define TILEBEAM_SRC_TILE_H

#include "tilebeam/layout.h"

#define TILE 32u
#define Q4_QUANTS 512u
#define Q8_QUANTS 1024u
#define SCALES 64u // bytes of 32 FP16 scales
#define CHUNK 128u

static const int8_t IQ4_NL_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static inline int is_8bit(uint32_t type) { return type == TB_Q8_0_COL || type == TB_Q8_0_TILE; }

static inline int is_nonlinear(uint32_t type) { return type == TB_IQ4_NL_COL || type == TB_IQ4_NL_TILE; }

static inline int is_column(uint32_t type) { return type >= TB_Q4_0_COL && type <= TB_IQ4_NL_COL; }

static inline int bad_panel(uint64_t k, uint32_t rows) { return k == 0 || k % TILE != 0 || rows == 0 || rows > TILE; }

// Element i (0..31) of scale group g lies at (k, n) of its tile.
static inline uint32_t group_k(int column, uint32_t g, uint32_t i) { return column ? i : (g >> 1) * 2 + (i & 1); }

static inline uint32_t group_n(int column, uint32_t g, uint32_t i) { return column ? g : (g & 1) * 16 + (i >> 1); }

#endif // TILEBEAM_SRC_TILE_H
