// The table of types as data, what is read off it, and the names of status codes.
#include "tilebeam/types.h"

#define PLAIN(NAME, LABEL, GGML, BLOCK, BYTES, WEIGHTS)                                                                \
    [TB_##NAME] = {LABEL, GGML, TB_TYPE_COUNT, TB_NO_TILES, WEIGHTS, BLOCK, BYTES, 0, 0},
#define PLAIN_NUMBER(NAME, LABEL, GGML, BLOCK, BYTES, WEIGHTS) GGML_##NAME = GGML,
#define TILED(NAME, LABEL, SOURCE, GROUPING, QUANTS, SCALES)                                                           \
    [TB_##NAME] = {LABEL, GGML_##SOURCE, TB_##SOURCE, GROUPING, TB_IN_TILES, 0, 0, QUANTS, (QUANTS) + (SCALES)},
#define COLUMN(NAME, LABEL, SOURCE, QUANTS, SCALES) TILED(NAME, LABEL, SOURCE, TB_COLUMN, QUANTS, SCALES)
#define TILE(NAME, LABEL, SOURCE, QUANTS, SCALES) TILED(NAME, LABEL, SOURCE, TB_TILE, QUANTS, SCALES)

enum { TB_PLAIN_TYPES(PLAIN_NUMBER) };

static const tb_type_info TYPES[] = {TB_PLAIN_TYPES(PLAIN) TB_COLUMN_TYPES(COLUMN) TB_K_TYPES(COLUMN)
                                         TB_TILE_TYPES(TILE)};

#define ONE(...) +1
_Static_assert((0 TB_PLAIN_TYPES(ONE) TB_TILED_TYPES(ONE)) == TB_TYPE_COUNT, "one line a type");
_Static_assert(sizeof(TYPES) / sizeof(TYPES[0]) == TB_TYPE_COUNT, "one line a type");

static const char * const STATUS[] = {
    [TB_OK] = "ok",
    [TB_E_UNSUPPORTED] = "unsupported op, type or shape",
    [TB_E_SHAPE] = "operands do not fit together",
    [TB_E_BOUNDS] = "outside its buffer",
    [TB_E_BUFFER] = "no such buffer, or read-only",
    [TB_E_NOMEM] = "out of memory",
    [TB_E_PROTOCOL] = "malformed message",
    [TB_E_VERSION] = "version mismatch",
    [TB_E_DEAD] = "the NPU side is gone",
    [TB_E_DEADLINE] = "no answer in time",
    [TB_E_INTERNAL] = "internal error",
};

const tb_type_info * tb_type_of(uint32_t type) { return type < TB_TYPE_COUNT ? &TYPES[type] : NULL; }

unsigned tb_type_size(unsigned type) { return type < TB_TYPE_COUNT ? TYPES[type].block_bytes : 0; }

unsigned tb_type_block(unsigned type) { return type < TB_TYPE_COUNT ? TYPES[type].block : 0; }

int tb_type_is_tiled(unsigned type) { return type < TB_TYPE_COUNT && TYPES[type].grouping != TB_NO_TILES; }

const char * tb_type_name(unsigned type) { return type < TB_TYPE_COUNT ? TYPES[type].name : "unknown"; }

size_t tb_tile_bytes(uint32_t type) { return type < TB_TYPE_COUNT ? TYPES[type].tile_bytes : 0; }

uint32_t tb_tile_k(uint32_t type) { return tb_type_is_tiled(type) ? TYPES[TYPES[type].source].block : 0; }

uint32_t tb_tiled_source(uint32_t type) { return type < TB_TYPE_COUNT ? TYPES[type].source : (uint32_t)TB_TYPE_COUNT; }

#define OF_SOURCE(NAME, LABEL, SOURCE, QUANTS, SCALES)                                                                 \
    case TB_##SOURCE:                                                                                                  \
        return TB_##NAME;

uint32_t tb_tiled_column(uint32_t plain) {
    switch (plain) {
        TB_COLUMN_TYPES(OF_SOURCE)
        TB_K_TYPES(OF_SOURCE)
    default:
        return TB_TYPE_COUNT;
    }
}

uint32_t tb_tiled_tile(uint32_t plain) {
    switch (plain) {
        TB_TILE_TYPES(OF_SOURCE)
    default:
        return TB_TYPE_COUNT;
    }
}

const char * tb_status_name(int status) {
    const int n = (int)(sizeof(STATUS) / sizeof(STATUS[0]));
    return status >= 0 && status < n ? STATUS[status] : "unknown status";
}
