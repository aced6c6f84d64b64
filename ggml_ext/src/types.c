// Names and sizes of the element types and status codes: one table each.
#include "tilebeam/types.h"

typedef struct {
    const char * name;
    unsigned size;  // bytes of one element or block
    unsigned block; // elements per block
} type_info;

static const type_info TYPES[TB_TYPE_COUNT] = {
    [TB_F32] = {"f32", 4, 1},
    [TB_F16] = {"f16", 2, 1},
    [TB_BF16] = {"bf16", 2, 1},
    [TB_I32] = {"i32", 4, 1},
    [TB_I64] = {"i64", 8, 1},
    [TB_Q4_0] = {"q4_0", 18, 32},
    [TB_Q8_0] = {"q8_0", 34, 32},
    [TB_IQ4_NL] = {"iq4_nl", 18, 32},
    [TB_Q4_0_COL] = {"q4_0_col", 0, 0},
    [TB_Q8_0_COL] = {"q8_0_col", 0, 0},
    [TB_IQ4_NL_COL] = {"iq4_nl_col", 0, 0},
    [TB_Q4_0_TILE] = {"q4_0_tile", 0, 0},
    [TB_Q8_0_TILE] = {"q8_0_tile", 0, 0},
    [TB_IQ4_NL_TILE] = {"iq4_nl_tile", 0, 0},
};

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

unsigned tb_type_size(unsigned type) { return type < TB_TYPE_COUNT ? TYPES[type].size : 0; }

unsigned tb_type_block(unsigned type) { return type < TB_TYPE_COUNT ? TYPES[type].block : 0; }

int tb_type_is_tiled(unsigned type) { return type >= TB_Q4_0_COL && type <= TB_IQ4_NL_TILE; }

const char * tb_type_name(unsigned type) { return type < TB_TYPE_COUNT ? TYPES[type].name : "unknown"; }

const char * tb_status_name(int status) {
    const int n = (int)(sizeof(STATUS) / sizeof(STATUS[0]));
    return status >= 0 && status < n ? STATUS[status] : "unknown status";
}
