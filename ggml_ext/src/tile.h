// What packing and quantizing both ask of a tile: sizes, grouping, and the code book of IQ4_NL.
#ifndef TILEBEAM_SRC_TILE_H
#define TILEBEAM_SRC_TILE_H

#include "tilebeam/layout.h"

#define TILE 32u
#define Q4_QUANTS ((uint32_t)TB_QUANTS(4))
#define Q8_QUANTS ((uint32_t)TB_QUANTS(8))
#define SCALES ((uint32_t)TB_HALF_SCALES)
#define CHUNK 128u

static const int8_t IQ4_NL_VALUES[16] = {TB_IQ4_NL_VALUES(0)};

static inline int is_8bit(uint32_t type) { return tb_tiled_source(type) == TB_Q8_0; }

static inline int is_nonlinear(uint32_t type) { return tb_tiled_source(type) == TB_IQ4_NL; }

static inline int is_column(uint32_t type) {
    const tb_type_info * info = tb_type_of(type);
    return info && info->grouping == TB_COLUMN;
}

static inline int bad_panel(uint64_t k, uint32_t rows) { return k == 0 || k % TILE != 0 || rows == 0 || rows > TILE; }

// Element i (0..31) of scale group g lies at (k, n) of its tile.
static inline uint32_t group_k(int column, uint32_t g, uint32_t i) { return column ? i : (g >> 1) * 2 + (i & 1); }

static inline uint32_t group_n(int column, uint32_t g, uint32_t i) { return column ? g : (g & 1) * 16 + (i >> 1); }

#endif // TILEBEAM_SRC_TILE_H
