// Float rows to tiles: sixteen groups at a time through round to nearest and, if asked for, the search for better
// scales.
#include "tilebeam/quantize.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "half.h"
#include "quantize_batch.h"
#include "tile.h"

static enum code code_of(uint32_t type) {
    switch (tb_tiled_source(type)) {
    case TB_Q8_0:
        return CODE_8BIT;
    case TB_IQ4_NL:
        return CODE_NONLINEAR;
    default:
        return CODE_4BIT;
    }
}

int tb_has_quantizer(uint32_t type) {
    const uint32_t source = tb_type_is_tiled(type) ? tb_tiled_source(type) : type;
    return source == TB_Q4_0 || source == TB_Q8_0 || source == TB_IQ4_NL;
}

// v, within the code book's range or a little beyond, to the code that ggml's reference gives it.
static inline float nearest(enum code code, float v) {
    if (code == CODE_4BIT) {
        const float q = (float)(int)(v + 8.5f); // two roundings: built without contraction
        return (q < 0.0f ? 0.0f : q > 15.0f ? 15.0f : q) - 8.0f;
    }
    if (code == CODE_8BIT) {
        const float t = (float)(int)v, rest = v - t; // half away from zero
        return t + (float)(rest >= 0.5f) - (float)(rest <= -0.5f);
    }
    float q = -127.0f;
    for (int j = 0; j < 15; j++) {
        const float low = IQ4_NL_VALUES[j], high = IQ4_NL_VALUES[j + 1];
        q += v > 0.5f * (low + high) ? high - low : 0.0f;
    }
    return q;
}

// ggml's rule: the largest weight maps to the end of the code book (Q8_0: its magnitude, to 127). Fills `d`, `q` and
// `reference`. TB_E_UNSUPPORTED if a value is not finite, or no FP16 scale is large enough.
static int round_to_nearest(enum code code, struct batch * b) {
    float inverse[LANES], largest[LANES] = {0.0f};
    int bad = 0;
    for (int l = 0; l < LANES; l++)
        b->reference[l] = 0.0f;
    for (int i = 0; i < GROUP; i++) {
        for (int l = 0; l < LANES; l++) {
            const float x = b->x[i][l], a = fabsf(x);
            bad |= !(a <= FLT_MAX);
            b->reference[l] = a > largest[l] ? x : b->reference[l];
            largest[l] = a > largest[l] ? a : largest[l];
        }
    }
    if (bad) return TB_E_UNSUPPORTED;
    for (int l = 0; l < LANES; l++) {
        const float d = code == CODE_8BIT   ? largest[l] / 127.0f
                        : code == CODE_4BIT ? b->reference[l] / -8.0f
                                            : b->reference[l] / -127.0f;
        const uint16_t half = tb_float_to_half(d);
        if ((half & 0x7c00u) == 0x7c00u) return TB_E_UNSUPPORTED;
        inverse[l] = d != 0.0f ? 1.0f / d : 0.0f;
        if (!(fabsf(inverse[l]) <= FLT_MAX)) inverse[l] = 0.0f; // subnormal d: its FP16 scale is zero anyway
        b->d[l] = tb_half_to_float(half);
    }
    for (int i = 0; i < GROUP; i++) {
        for (int l = 0; l < LANES; l++)
            b->q[i][l] = nearest(code, b->x[i][l] * inverse[l]);
    }
    return TB_OK;
}

// sum of w * (x - d*q)^2 for each group
static void group_errors(const struct batch * b, double e[LANES]) {
    for (int l = 0; l < LANES; l++)
        e[l] = 0.0;
    for (int i = 0; i < GROUP; i++) {
        for (int l = 0; l < LANES; l++) {
            const double r = (double)b->x[i][l] - (double)(b->d[l] * b->q[i][l]);
            e[l] += (double)b->w[i][l] * r * r;
        }
    }
}

// The search's result, or round to nearest's where that is as good: the search sums in float, this compares in double.
static void improve(int lanes, enum code code, struct batch * b) {
    struct batch first = *b;
    double before[LANES], after[LANES];
    group_errors(&first, before);
    tb_search_scales(lanes, code, b);
    group_errors(b, after);
    for (int l = 0; l < LANES; l++) {
        if (after[l] < before[l]) continue;
        b->d[l] = first.d[l];
        for (int i = 0; i < GROUP; i++)
            b->q[i][l] = first.q[i][l];
    }
}

static uint8_t stored(enum code code, float q) {
    if (code == CODE_8BIT) return (uint8_t)(int8_t)q;
    if (code == CODE_4BIT) return (uint8_t)(q + 8.0f);
    uint8_t j = 0;
    while (j < 15 && (float)IQ4_NL_VALUES[j] < q)
        j++;
    return j;
}

static void put_quant(enum code code, uint8_t * tile, uint32_t k, uint32_t n, uint8_t q) {
    if (code == CODE_8BIT) {
        const uint32_t kk = k & 3;
        tile[CHUNK * (k >> 2) + 4 * n + 2 * (kk & 1) + (kk >> 1)] = q;
    } else {
        const uint32_t kk = k & 7, v = kk >> 1;
        tile[CHUNK * (k >> 3) + 4 * n + 2 * (kk & 1) + (v & 1)] |= (uint8_t)(q << (v >> 1 ? 4 : 0));
    }
}

// A run of sixteen groups of one tile: which groups, and where their weights are.
struct place {
    enum code code;
    int column;
    uint32_t first, rows;
    uint64_t k;
    const float * src; // the tile's first element
};

static void gather(const struct place * p, struct batch * b) {
    for (uint32_t i = 0; i < GROUP; i++) {
        for (uint32_t l = 0; l < LANES; l++) {
            const uint32_t k = group_k(p->column, p->first + l, i), n = group_n(p->column, p->first + l, i);
            b->x[i][l] = n < p->rows ? p->src[n * p->k + k] : 0.0f;
            b->w[i][l] = n < p->rows ? 1.0f : 0.0f;
        }
    }
}

static void add_error(const struct place * p, const struct batch * b, struct tb_quantize_error * error) {
    struct tb_quantize_error e = {0.0, 0.0};
    for (uint32_t i = 0; i < GROUP; i++) {
        for (uint32_t l = 0; l < LANES; l++) {
            if (group_n(p->column, p->first + l, i) >= p->rows) continue;
            const double x = b->x[i][l], r = x - (double)(b->d[l] * b->q[i][l]);
            e.squared += r * r;
            e.energy += x * x;
        }
    }
    error->squared += e.squared;
    error->energy += e.energy;
}

static int quantize_tile(struct place p, int lanes, uint8_t * tile, size_t tile_bytes,
                         struct tb_quantize_error * error) {
    memset(tile, 0, tile_bytes);
    for (p.first = 0; p.first < TILE; p.first += LANES) {
        if (p.column && p.first >= p.rows) break; // missing columns: zero scales, zero quants
        struct batch b;
        gather(&p, &b);
        const int st = round_to_nearest(p.code, &b);
        if (st != TB_OK) return st;
        if (lanes) improve(lanes, p.code, &b);
        if (error) add_error(&p, &b, error);
        for (uint32_t l = 0; l < LANES; l++) {
            const uint32_t g = p.first + l;
            if (p.column && g >= p.rows) break;
            for (uint32_t i = 0; i < GROUP; i++) {
                put_quant(p.code, tile, group_k(p.column, g, i), group_n(p.column, g, i), stored(p.code, b.q[i][l]));
            }
            tb_store16(tile + tile_bytes - SCALES + 2 * g, tb_float_to_half(b.d[l]));
        }
    }
    return TB_OK;
}

int tb_quantize(uint32_t type, uint64_t k, uint64_t n, const float * src, int search, void * tiles,
                struct tb_quantize_error * error) {
    const size_t tile_bytes = tb_tile_bytes(type);
    if (tile_bytes == 0 || !tb_has_quantizer(type)) return TB_E_UNSUPPORTED;
    if (tb_tiled_bytes(type, k, n) == 0) return TB_E_SHAPE;
    const int lanes = search ? tb_search_lanes(search) : 0;
    if (search && lanes == 0) return TB_E_UNSUPPORTED;
    uint8_t * tile = (uint8_t *)tiles;
    for (uint64_t row = 0; row < n; row += TILE) {
        struct place p = {.code = code_of(type), .column = is_column(type), .k = k};
        p.rows = n - row < TILE ? (uint32_t)(n - row) : TILE;
        for (uint64_t at = 0; at < k; at += TILE, tile += tile_bytes) {
            p.src = src + row * k + at;
            const int st = quantize_tile(p, lanes, tile, tile_bytes, error);
            if (st != TB_OK) return st;
        }
    }
    return TB_OK;
}

int tb_place_codes(uint32_t type, uint64_t k, uint64_t n, const float * codes, const float * scales, void * tiles) {
    const size_t tile_bytes = tb_tile_bytes(type);
    if (tile_bytes == 0 || !tb_has_quantizer(type)) return TB_E_UNSUPPORTED;
    if (tb_tiled_bytes(type, k, n) == 0) return TB_E_SHAPE;
    const enum code code = code_of(type);
    const int column = is_column(type);
    const uint64_t groups = column ? k / GROUP : k / 2; // scales of a row of groups
    uint8_t * tile = (uint8_t *)tiles;
    for (uint64_t row = 0; row < n; row += TILE) {
        for (uint64_t at = 0; at < k; at += TILE, tile += tile_bytes) {
            memset(tile, 0, tile_bytes);
            for (uint32_t g = 0; g < TILE; g++) {
                const uint64_t first = row + group_n(column, g, 0), from = at + group_k(column, g, 0);
                if (first >= n) continue;
                const uint64_t scale = column ? first * groups + from / GROUP : first / LANES * groups + from / 2;
                tb_store16(tile + tile_bytes - SCALES + 2 * g, tb_float_to_half(scales[scale]));
                for (uint32_t i = 0; i < GROUP; i++) {
                    const uint32_t kk = group_k(column, g, i), nn = group_n(column, g, i);
                    if (row + nn < n) put_quant(code, tile, kk, nn, stored(code, codes[(row + nn) * k + at + kk]));
                }
            }
        }
    }
    return TB_OK;
}
