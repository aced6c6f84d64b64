// Shapes of the ops that only some model families have: recurrent states, experts' biases, sparse attention, residual
// streams. See ops_check.c.
#include "ops_check.h"

#define HC_STREAMS 4 // of DSV4_HC_COMB
#define MOST_ROUNDS 1024
#define MOST_TAPS 8 // of SSM_CONV with states

// x [n, n_used, T, ..], biases [n, E], indices [n_used, T].
int tb_check_add_id(const tb_op * op, const char ** why) {
    const tb_tensor *x = &op->src[0], *biases = &op->src[1], *ids = &op->src[2];
    if (!has_shape(biases, x->ne[0], biases->ne[1], 1, 1)) return refuse(TB_E_SHAPE, "biases do not fit the rows", why);
    if (!has_shape(ids, x->ne[1], x->ne[2], 1, 1)) return refuse(TB_E_SHAPE, "indices do not fit the rows", why);
    return same_shape(&op->dst, x) ? TB_OK : refuse(TB_E_SHAPE, "dst and src0 have different shapes", why);
}

// Are there states for these sequences, by number, and does params[1] say where new ones go, if anywhere? Those that
// are written have no gaps and do not lie on top of each other.
static int fit_states(const tb_op * op, const tb_tensor * states, int dim, const tb_tensor * ids, uint32_t sequences) {
    const int64_t first = (int64_t)op->params[1] - 1;
    if (!has_shape(ids, sequences, 1, 1, 1) || first < -1) return 0;
    uint64_t size = sizeof(float);
    for (int i = 0; i <= dim && first >= 0; i++) {
        if (i < dim ? states->nb[i] != size : states->nb[i] < size) return 0;
        size = states->nb[i] * states->ne[i];
    }
    return first < 0 || (uint64_t)first + sequences <= states->ne[dim];
}

// x [C, T, S], weights [d, C], states [d - 1, C, R], numbers [S], dst [C, T, S].
static int conv_with_states(const tb_op * op, const char ** why) {
    const tb_tensor *x = &op->src[0], *w = &op->src[1], *states = &op->src[2];
    if (!same_shape(&op->dst, x) || x->ne[3] != 1) return refuse(TB_E_SHAPE, "dst and src0 have different shapes", why);
    if (!has_shape(w, w->ne[0], x->ne[0], 1, 1)) return refuse(TB_E_SHAPE, "weights do not fit the channels", why);
    if (w->ne[0] > MOST_TAPS) return refuse(TB_E_UNSUPPORTED, "more than 8 weights of a channel", why);
    if (!has(op, 3) || op->params[1] < 1 || !has_shape(states, w->ne[0] - 1, x->ne[0], states->ne[2], 1) ||
        !fit_states(op, states, 2, &op->src[3], x->ne[2])) {
        return refuse(TB_E_SHAPE, "states do not fit", why);
    }
    return TB_OK;
}

// x [d - 1 + T, C, S], weights [d, C], dst [C, T, S].
int tb_check_ssm_conv(const tb_op * op, const char ** why) {
    const tb_tensor *x = &op->src[0], *w = &op->src[1], *dst = &op->dst;
    if (has(op, 2)) return conv_with_states(op, why);
    if (has(op, 3) || op->params[1] != 0) return refuse(TB_E_SHAPE, "no states", why);
    if (!has_shape(w, w->ne[0], x->ne[1], 1, 1)) return refuse(TB_E_SHAPE, "weights do not fit the channels", why);
    if (!has_shape(dst, x->ne[1], dst->ne[1], x->ne[2], 1) || x->ne[3] != 1 ||
        (uint64_t)dst->ne[1] + w->ne[0] - 1 != x->ne[0]) {
        return refuse(TB_E_SHAPE, "dst is not [channels, tokens, sequences]", why);
    }
    return TB_OK;
}

// Are there as many elements in dst as in `results` and `kept` states of `state` elements, for each of n sequences?
static int holds_states(const tb_op * op, int32_t kept, uint64_t results, uint64_t state, uint64_t n) {
    uint64_t all;
    if (kept < 1 || (op->params[1] != 0 && kept != 1) || __builtin_mul_overflow(state, n, &all) ||
        __builtin_mul_overflow(all, (uint64_t)kept, &all) || __builtin_add_overflow(all, results, &all)) {
        return 0;
    }
    return n_elements(&op->dst) == all;
}

// Values [D, H, T, S], states [D, D, H, S], or with numbers [D, D, H, R]. dst: rows of D * H, results and then `kept`
// states of each sequence.
static int with_states(const tb_op * op, const tb_tensor * values, int32_t kept, const char ** why) {
    const uint32_t * n = values->ne;
    const uint32_t at = (uint32_t)tb_op_states(op->code);
    const tb_tensor *states = &op->src[at], *dst = &op->dst;
    if (!has_shape(states, n[0], n[0], n[1], states->ne[3]) ||
        !(has(op, at + 1) ? fit_states(op, states, 3, states + 1, n[3])
                          : states->ne[3] == n[3] && op->params[1] == 0)) {
        return refuse(TB_E_SHAPE, "states do not fit", why);
    }
    const uint64_t row = (uint64_t)n[0] * n[1];
    if (!has_shape(dst, (uint32_t)row, dst->ne[1], 1, 1) || row > UINT32_MAX || dst->nb[1] != row * sizeof(float) ||
        !holds_states(op, kept, n_elements(values), row * n[0], n[3])) {
        return refuse(TB_E_SHAPE, "dst does not hold results and states", why);
    }
    return TB_OK;
}

// states [N, D, H, R], x [D, H, T, S], dt [H, T, S], A [N or 1, H], B and C [N, G, T, S], G divides H, indices [S].
// dst is one row: the results, then the states. With a decay for each element of a state there is one state only.
int tb_check_ssm_scan(const tb_op * op, const char ** why) {
    const tb_tensor *s = &op->src[0], *x = &op->src[1], *dt = &op->src[2], *a = &op->src[3], *b = &op->src[4];
    const uint32_t *n = s->ne, heads = x->ne[1], tokens = x->ne[2], sequences = x->ne[3];
    if (!has_shape(s, n[0], x->ne[0], heads, n[3])) return refuse(TB_E_SHAPE, "states do not fit", why);
    if (!has_shape(dt, heads, tokens, sequences, 1)) return refuse(TB_E_SHAPE, "steps do not fit", why);
    if (!has_shape(a, a->ne[0], heads, 1, 1) || (a->ne[0] != 1 && (a->ne[0] != n[0] || op->params[0] != 1))) {
        return refuse(TB_E_SHAPE, "decays do not fit", why);
    }
    if (!has_shape(b, n[0], b->ne[1], tokens, sequences) || !same_shape(b, &op->src[5]) || heads % b->ne[1] != 0) {
        return refuse(TB_E_SHAPE, "B and C do not fit", why);
    }
    if (!fit_states(op, s, 3, &op->src[6], sequences)) return refuse(TB_E_SHAPE, "indices do not fit", why);
    if (!has_shape(&op->dst, op->dst.ne[0], 1, 1, 1) ||
        !holds_states(op, op->params[0], n_elements(x), (uint64_t)n[0] * n[1] * n[2], sequences)) {
        return refuse(TB_E_SHAPE, "dst does not hold results and states", why);
    }
    return TB_OK;
}

// q and k [D, divides H, T, divides S], v [D, H, T, S], decays [D or 1, H, T, S], beta [1, H, T, S], states
// [D, D, H, S]. dst: rows of D * H, one behind the other.
int tb_check_gated_delta_net(const tb_op * op, const char ** why) {
    const tb_tensor *v = &op->src[2], *decay = &op->src[3];
    const uint32_t * n = v->ne;
    if (n[0] > MAX_HEAD) return refuse(TB_E_UNSUPPORTED, "head size above 576", why);
    for (int i = 0; i < 2; i++) {
        const tb_tensor * t = &op->src[i];
        if (t->ne[0] != n[0] || t->ne[2] != n[2] || n[1] % t->ne[1] != 0 || n[3] % t->ne[3] != 0) {
            return refuse(TB_E_SHAPE, "Q, K and V do not fit together", why);
        }
    }
    if (!has_shape(decay, decay->ne[0], n[1], n[2], n[3]) || (decay->ne[0] != 1 && decay->ne[0] != n[0]) ||
        !has_shape(&op->src[4], 1, n[1], n[2], n[3])) {
        return refuse(TB_E_SHAPE, "decays do not fit", why);
    }
    return with_states(op, v, op->params[0], why);
}

// All [D, H, T, S] but RWKV_WKV6's src3 [D, H], then states [D, D, H, S]. dst as GATED_DELTA_NET's.
int tb_check_linear_attention(const tb_op * op, const char ** why) {
    const tb_tensor * v = &op->src[1];
    if (v->ne[0] > MAX_HEAD) return refuse(TB_E_UNSUPPORTED, "head size above 576", why);
    for (int i = 0; i < tb_op_states(op->code); i++) {
        const tb_tensor * t = &op->src[i];
        const int of_all = op->code == TB_OP_RWKV_WKV6 && i == 3;
        if (of_all ? !has_shape(t, v->ne[0], v->ne[1], 1, 1) : !same_shape(t, v)) {
            return refuse(TB_E_SHAPE, "operands do not fit together", why);
        }
    }
    const tb_tensor * states = &op->src[tb_op_states(op->code)];
    if (states->nb[1] != v->ne[0] * sizeof(float)) return refuse(TB_E_UNSUPPORTED, "states have gaps", why);
    return with_states(op, v, 1, why);
}

// q [D, H, T, S], k [D, 1, cells, S], weights [H, T, 1, S], mask [cells, T, 1, divides S], dst [cells, T, 1, S].
int tb_check_lightning_indexer(const tb_op * op, const char ** why) {
    const tb_tensor *q = &op->src[0], *k = &op->src[1], *mask = &op->src[3];
    const uint32_t *n = q->ne, cells = k->ne[2];
    if (n[0] > MAX_HEAD) return refuse(TB_E_UNSUPPORTED, "head size above 576", why);
    if (!has_shape(k, n[0], 1, cells, n[3])) return refuse(TB_E_SHAPE, "Q and K do not fit together", why);
    if (!has_shape(&op->src[2], n[1], n[2], 1, n[3])) return refuse(TB_E_SHAPE, "weights do not fit", why);
    if (!has_shape(mask, cells, n[2], 1, mask->ne[3]) || n[3] % mask->ne[3] != 0) {
        return refuse(TB_E_SHAPE, "the mask does not fit", why);
    }
    return has_shape(&op->dst, cells, n[2], 1, n[3]) ? TB_OK : refuse(TB_E_SHAPE, "dst is not [cells, T, 1, S]", why);
}

// x [n, streams, T], weights [streams, T] or gates [n, streams, T], dst [n, T].
int tb_check_hc_pre(const tb_op * op, const char ** why) {
    const tb_tensor *x = &op->src[0], *w = &op->src[1];
    const uint32_t * n = x->ne;
    const int gated = op->params[1];
    if (gated != 0 && gated != 1) return refuse(TB_E_UNSUPPORTED, "kind of weights", why);
    if (n[3] != 1 || !(gated ? has_shape(w, n[0], n[1], n[2], 1) : has_shape(w, n[1], n[2], 1, 1))) {
        return refuse(TB_E_SHAPE, "weights do not fit", why);
    }
    if (gated && !dense_rows(w)) return refuse(TB_E_UNSUPPORTED, "rows of gates are not dense", why);
    return has_shape(&op->dst, n[0], n[2], 1, 1) ? TB_OK : refuse(TB_E_SHAPE, "dst is not [n, T]", why);
}

// x [n, T], residual and dst [n, streams, T], post [streams, T], comb [streams, streams, T].
int tb_check_hc_post(const tb_op * op, const char ** why) {
    const tb_tensor * residual = &op->src[1];
    const uint32_t * n = residual->ne;
    if (n[3] != 1 || !has_shape(&op->src[0], n[0], n[2], 1, 1)) return refuse(TB_E_SHAPE, "x does not fit", why);
    if (!has_shape(&op->src[2], n[1], n[2], 1, 1) || (has(op, 3) && !has_shape(&op->src[3], n[1], n[1], n[2], 1))) {
        return refuse(TB_E_SHAPE, "weights do not fit", why);
    }
    return same_shape(&op->dst, residual) ? TB_OK : refuse(TB_E_SHAPE, "dst and residual have different shapes", why);
}

// mixes [24, T], scale [>= 3], base [24], dst [4, 4, T].
int tb_check_hc_comb(const tb_op * op, const char ** why) {
    const tb_tensor *mixes = &op->src[0], *scale = &op->src[1];
    const uint32_t n = HC_STREAMS * (2 + HC_STREAMS), tokens = mixes->ne[1];
    if (op->params[1] < 1 || op->params[1] > MOST_ROUNDS) return refuse(TB_E_UNSUPPORTED, "number of rounds", why);
    if (!has_shape(mixes, n, tokens, 1, 1) || !has_shape(&op->src[2], n, 1, 1, 1) || scale->ne[0] < 3 ||
        !has_shape(scale, scale->ne[0], 1, 1, 1)) {
        return refuse(TB_E_SHAPE, "weights do not fit", why);
    }
    return has_shape(&op->dst, HC_STREAMS, HC_STREAMS, tokens, 1) ? TB_OK
                                                                  : refuse(TB_E_SHAPE, "dst is not [4, 4, T]", why);
}

int tb_check_arange(const tb_op * op, const char ** why) {
    return has_shape(&op->dst, op->dst.ne[0], 1, 1, 1) ? TB_OK : refuse(TB_E_SHAPE, "dst is not one row", why);
}

// Along dimensions 0 and 1: as many places for the rectangle as the steps leave between the padded ends.
int tb_check_pool_2d(const tb_op * op, const char ** why) {
    const tb_tensor *x = &op->src[0], *dst = &op->dst;
    if (op->params[0] != 0 && op->params[0] != 1) return refuse(TB_E_UNSUPPORTED, "kind of pooling", why);
    for (int d = 0; d < 2; d++) {
        const int64_t size = op->params[1 + d], step = op->params[3 + d], padding = op->params[5 + d];
        if (size < 1 || step < 1 || padding < 0) return refuse(TB_E_SHAPE, "size, step or padding", why);
        const int64_t room = x->ne[d] + 2 * padding - size;
        if (room < 0 || room / step + 1 != dst->ne[d]) return refuse(TB_E_SHAPE, "dst does not fit", why);
    }
    return dst->ne[2] == x->ne[2] && dst->ne[3] == x->ne[3] ? TB_OK : refuse(TB_E_SHAPE, "dst does not fit", why);
}
