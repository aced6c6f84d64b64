// Quantizing one column of groups so that each weight's error is made up for by the weights after it.
#include <float.h>
#include <math.h>
#include <string.h>

#include "half.h"
#include "quantize_batch.h"
#include "tile.h"

#include "tilebeam/quantize.h"

// Scales that put the group's largest weight at so many places about the end of the code book, on either side of zero
// where that matters, and how often the step between them is halved around the best.
enum { PLACES = 14, HALVINGS = 3 };

struct grid {
    int sides;
    float first, step, end;
};

static const struct grid GRID[3] = {
    [CODE_4BIT] = {2, 0.55f, 0.05f, 8.0f},
    [CODE_8BIT] = {1, 0.90f, 0.01f, 127.0f},
    [CODE_NONLINEAR] = {2, 0.55f, 0.05f, 127.0f},
};

// Sixteen rows of a group's columns (`column` grouping: sixteen groups; `tile`: one).
struct run {
    enum code code;
    int width, one_group;
    float by_column[GROUP][GROUP]; // u, transposed
    float inverse[GROUP];          // 1 / u[j][j]
    _Alignas(64) float x[GROUP][LANES];
};

// Scales of the rows, what they cost, and the codes.
struct choice {
    _Alignas(64) float d[LANES];
    _Alignas(64) float loss[LANES];
    _Alignas(64) float q[GROUP][LANES];
};

#define V 4
#define TARGET
#define NAME(x) x##_4
#include "feedback_lanes.h"
#undef V
#undef TARGET
#undef NAME

#if defined(__x86_64__)
#    define V 8
#    define TARGET __attribute__((target("avx2")))
#    define NAME(x) x##_8
#    include "feedback_lanes.h"
#    undef V
#    undef TARGET
#    undef NAME
#endif

static void choose(int lanes, struct run * r, const float * largest, struct choice * best) {
#if defined(__x86_64__)
    if (lanes >= 8) {
        choose_any_8(r, largest, best);
        return;
    }
#endif
    choose_any_4(r, largest, best);
}

// The largest weight of each group, with its sign.
static void largest_weights(const struct run * r, float largest[LANES]) {
    for (int l = 0; l < LANES; l++) {
        largest[l] = 0.0f;
        for (int j = 0; j < r->width; j++)
            largest[l] = fabsf(r->x[j][l]) > fabsf(largest[l]) ? r->x[j][l] : largest[l];
    }
    if (!r->one_group) return;
    for (int l = 1; l < LANES; l++)
        largest[0] = fabsf(largest[l]) > fabsf(largest[0]) ? largest[l] : largest[0];
    for (int l = 1; l < LANES; l++)
        largest[l] = largest[0];
}

// The group's rows into lanes; those past n are zero. Returns whether all values are finite.
static int gather(struct run * r, const float * x, uint32_t n) {
    int fine = 1;
    memset(r->x, 0, sizeof r->x);
    for (uint32_t l = 0; l < LANES && l < n; l++) {
        for (int j = 0; j < r->width; j++) {
            r->x[j][l] = x[l * (uint32_t)r->width + (uint32_t)j];
            fine &= fabsf(r->x[j][l]) <= FLT_MAX;
        }
    }
    return fine;
}

int tb_quantize_feedback(uint32_t type, uint32_t n, const float * x, const float * u, int again, float * scales,
                         float * codes) {
    if (tb_tile_bytes(type) == 0 || !tb_has_quantizer(type)) return TB_E_UNSUPPORTED;
    const uint32_t source = tb_tiled_source(type);
    const int column = is_column(type), width = column ? (int)GROUP : 2, lanes = tb_search_lanes(1);
    struct run r = {.width = width, .one_group = !column};
    r.code = source == TB_Q8_0 ? CODE_8BIT : source == TB_IQ4_NL ? CODE_NONLINEAR : CODE_4BIT;
    for (int j = 0; j < width; j++) {
        for (int i = 0; i < width; i++)
            r.by_column[j][i] = u[i * width + j];
        r.inverse[j] = 1.0f / u[j * width + j];
        if (!(r.inverse[j] > 0.0f && r.inverse[j] <= FLT_MAX)) return TB_E_UNSUPPORTED;
    }
    for (uint32_t row = 0; row < n; row += LANES) {
        const uint32_t rows = n - row < LANES ? n - row : LANES;
        if (!gather(&r, x + (size_t)row * (uint32_t)width, rows)) return TB_E_UNSUPPORTED;
        struct choice best;
        memset(&best, 0, sizeof best);
        for (uint32_t l = 0; again && l < rows; l++) {
            best.d[l] = scales[column ? row + l : row / LANES];
            for (int j = 0; j < width; j++)
                best.q[j][l] = codes[(size_t)(row + l) * (uint32_t)width + (uint32_t)j];
        }
        float largest[LANES];
        largest_weights(&r, largest);
        choose(lanes, &r, largest, &best);
        for (uint32_t l = 0; l < rows; l++) {
            scales[column ? row + l : row / LANES] = best.d[l];
            for (int j = 0; j < width; j++)
                codes[(size_t)(row + l) * (uint32_t)width + (uint32_t)j] = best.q[j][l];
        }
    }
    return TB_OK;
}
