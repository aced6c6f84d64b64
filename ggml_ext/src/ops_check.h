// What the files of checks share: see ops_check.c. And the checks of ops that only some model families have.
#ifndef TILEBEAM_OPS_CHECK_H
#define TILEBEAM_OPS_CHECK_H

#include <string.h>

#include "tilebeam/layout.h"
#include "tilebeam/ops.h"

#define MAX_HEAD 576

int tb_check_add_id(const tb_op * op, const char ** why);
int tb_check_ssm_conv(const tb_op * op, const char ** why);
int tb_check_ssm_scan(const tb_op * op, const char ** why);
int tb_check_gated_delta_net(const tb_op * op, const char ** why);
int tb_check_linear_attention(const tb_op * op, const char ** why);
int tb_check_lightning_indexer(const tb_op * op, const char ** why);
int tb_check_hc_pre(const tb_op * op, const char ** why);
int tb_check_hc_post(const tb_op * op, const char ** why);
int tb_check_hc_comb(const tb_op * op, const char ** why);
int tb_check_arange(const tb_op * op, const char ** why);
int tb_check_pool_2d(const tb_op * op, const char ** why);

static inline int is_in(uint32_t type, uint64_t set) { return type < 64 && (set >> type & 1u) != 0; }

static inline int has(const tb_op * op, uint32_t i) { return i < op->n_src && op->src[i].buffer != TB_NO_BUFFER; }

static inline int is_empty(const tb_tensor * t) {
    return t->ne[0] == 0 || t->ne[1] == 0 || t->ne[2] == 0 || t->ne[3] == 0;
}

static inline int same_shape(const tb_tensor * a, const tb_tensor * b) {
    return memcmp(a->ne, b->ne, sizeof(a->ne)) == 0;
}

// Does b, repeated, fill a from dimension `from` on?
static inline int repeats(const tb_tensor * b, const tb_tensor * a, int from) {
    for (int i = from; i < 4; i++) {
        if (a->ne[i] % b->ne[i] != 0) return 0;
    }
    return 1;
}

static inline int has_shape(const tb_tensor * t, uint32_t n0, uint32_t n1, uint32_t n2, uint32_t n3) {
    return t->ne[0] == n0 && t->ne[1] == n1 && t->ne[2] == n2 && t->ne[3] == n3;
}

static inline uint64_t n_elements(const tb_tensor * t) { return (uint64_t)t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]; }

// Bytes that all elements take if none share any.
static inline uint64_t element_bytes(const tb_tensor * t) {
    if (tb_type_is_tiled(t->type)) return tb_tiled_bytes(t->type, t->ne[0], t->ne[1]) * t->ne[2] * t->ne[3];
    return n_elements(t) / tb_type_block(t->type) * tb_type_size(t->type);
}

static inline int dense_rows(const tb_tensor * t) {
    return tb_type_is_tiled(t->type) || t->nb[0] == tb_type_size(t->type);
}

static inline float param_f(const tb_op * op, int i) {
    float f;
    memcpy(&f, &op->params[i], 4);
    return f;
}

static inline int refuse(int status, const char * text, const char ** why) {
    *why = text;
    return status;
}

#endif // TILEBEAM_OPS_CHECK_H
