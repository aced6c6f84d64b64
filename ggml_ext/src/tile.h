// What packing and quantizing both ask of a tile: sizes, grouping, and code books.
#ifndef TILEBEAM_SRC_TILE_H
#define TILEBEAM_SRC_TILE_H

#include <string.h>

#include "tilebeam/k_panels.h"
#include "tilebeam/layout.h"

#define TILE 32u
#define Q4_QUANTS ((uint32_t)TB_QUANTS(4))
#define Q8_QUANTS ((uint32_t)TB_QUANTS(8))
#define SCALES ((uint32_t)TB_HALF_SCALES)
#define CHUNK 128u

static const int8_t IQ4_NL_VALUES[16] = {TB_IQ4_NL_VALUES(0)};

static inline int is_8bit(uint32_t type) { return tb_tiled_source(type) == TB_Q8_0; }

static inline int is_column(uint32_t type) {
    const tb_type_info * info = tb_type_of(type);
    return info && info->grouping == TB_COLUMN;
}

static inline int is_k_quant(uint32_t type) { return tb_type_block(tb_tiled_source(type)) == TB_K_BLOCK; }

// Of a tiled type.
static inline int bad_panel(uint32_t type, uint64_t k, uint32_t rows) {
    return k == 0 || k % tb_tile_k(type) != 0 || rows == 0 || rows > TILE;
}

static inline uint32_t load32(const uint8_t * p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static inline void store32(uint8_t * p, uint32_t v) { memcpy(p, &v, 4); }

static inline uint64_t load64(const uint8_t * p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static inline void store64(uint8_t * p, uint64_t v) { memcpy(p, &v, 8); }

// k order to quad order and back: bytes 0 1 2 3 -> 0 2 1 3.
static inline uint32_t quad(uint32_t w) { return (w & 0xff0000ffu) | (w & 0x0000ff00u) << 8 | (w >> 8 & 0x0000ff00u); }

// Eight nibble values, one a byte, k order -> one word of a 4-bit tile, and back.
static inline uint32_t join8(uint64_t x) { return quad((uint32_t)x | (uint32_t)(x >> 32) << 4); }

static inline uint64_t split8(uint32_t w) {
    const uint32_t q = quad(w);
    return (uint64_t)(q & 0x0f0f0f0fu) | (uint64_t)(q >> 4 & 0x0f0f0f0fu) << 32;
}

// Element i (0..31) of scale group g lies at (k, n) of its tile.
static inline uint32_t group_k(int column, uint32_t g, uint32_t i) { return column ? i : (g >> 1) * 2 + (i & 1); }

static inline uint32_t group_n(int column, uint32_t g, uint32_t i) { return column ? g : (g & 1) * 16 + (i >> 1); }

#endif // TILEBEAM_SRC_TILE_H
