// The choice of scales with V rows to a vector. quantize_feedback.c includes this once per instruction set, with V,
// TARGET and NAME(x) defined; written with vector types, so that every set computes the very same numbers.

#include "lanes.h"

#define PARTS (LANES / V)

#define AT(array, h) (*(VF *)&(array)[(h) * V])
#define INLINE TARGET static inline __attribute__((always_inline))

// Takes the columns in order, each to the nearest code (or to those that are there), and carries the errors on.
INLINE void NAME(carry)(enum code code, const struct run * r, struct choice * c, int given) {
    const VF zero = {0.0f};
    for (int h = 0; h < PARTS; h++) {
        VF e[GROUP], loss = zero;
        const VF d = AT(c->d, h);
        const VI none = d == zero;
        const VF inverse_d = SELECT(none, zero, 1.0f / SELECT(none, zero + 1.0f, d));
        for (int j = 0; j < r->width; j++) {
            VF x = AT(r->x[j], h);
            for (int i = 0; i < j; i++)
                x -= e[i] * r->by_column[j][i];
            VF q = x * inverse_d;
            NEAREST(code, q);
            if (given) q = AT(c->q[j], h);
            AT(c->q[j], h) = q;
            e[j] = (x - d * q) * r->inverse[j];
            loss += e[j] * e[j];
        }
        AT(c->loss, h) = loss;
    }
    if (!r->one_group) return;
    float sum = 0.0f;
    for (int l = 0; l < LANES; l++)
        sum += c->loss[l];
    for (int l = 0; l < LANES; l++)
        c->loss[l] = sum;
}

// Tries scales; rows that get better keep theirs.
INLINE void NAME(try_scales)(enum code code, const struct run * r, const float * d, struct choice * best) {
    const VF zero = {0.0f};
    struct choice c;
    for (int l = 0; l < LANES; l++)
        c.d[l] = tb_half_to_float(tb_float_to_half(d[l]));
    NAME(carry)(code, r, &c, 0);
    for (int h = 0; h < PARTS; h++) {
        const VF tried = AT(c.d, h), loss = AT(c.loss, h);
        const VI better = (loss < AT(best->loss, h)) & (ABS(tried) <= zero + 65504.0f) & ~(tried == zero);
        AT(best->loss, h) = SELECT(better, loss, AT(best->loss, h));
        AT(best->d, h) = SELECT(better, tried, AT(best->d, h));
    }
}

// The best scales that are found, and their codes; `best` comes in with what is to be beaten.
INLINE void NAME(choose)(enum code code, const struct run * r, const float * largest, struct choice * best) {
    const struct grid * g = &GRID[code];
    const struct choice before = *best;
    float d[LANES];
    for (int p = 0; p < g->sides * PLACES; p++) {
        const float factor = (g->first + g->step * (float)(p % PLACES)) / g->end;
        for (int l = 0; l < LANES; l++)
            d[l] = largest[l] * (p < PLACES ? -factor : factor);
        NAME(try_scales)(code, r, d, best);
    }
    for (int half = 0; half < HALVINGS; half++) {
        const float width = g->step / (float)(2 << half) / g->end;
        float centre[LANES];
        memcpy(centre, best->d, sizeof centre);
        for (int side = -1; side <= 1; side += 2) {
            for (int l = 0; l < LANES; l++)
                d[l] = centre[l] + largest[l] * ((float)side * width);
            NAME(try_scales)(code, r, d, best);
        }
    }
    NAME(carry)(code, r, best, 0);
    for (int h = 0; h < PARTS; h++) {
        const VI better = AT(best->loss, h) < *(const VF *)&before.loss[h * V];
        for (int j = 0; j < r->width; j++)
            AT(best->q[j], h) = SELECT(better, AT(best->q[j], h), *(const VF *)&before.q[j][h * V]);
    }
}

TARGET static void NAME(choose_any)(struct run * r, const float * largest, struct choice * best) {
    if (r->code == CODE_4BIT) {
        NAME(carry)(CODE_4BIT, r, best, 1);
        NAME(choose)(CODE_4BIT, r, largest, best);
    } else if (r->code == CODE_8BIT) {
        NAME(carry)(CODE_8BIT, r, best, 1);
        NAME(choose)(CODE_8BIT, r, largest, best);
    } else {
        NAME(carry)(CODE_NONLINEAR, r, best, 1);
        NAME(choose)(CODE_NONLINEAR, r, largest, best);
    }
}

#undef PARTS
#undef INLINE
#include "lanes_end.h"
