// See tilebeam/draw.h. The loops over the vocabulary are written so that compilers vectorize them: fixed inner lengths,
// no reduction over floats in one variable.
#include "tilebeam/draw.h"

#include <math.h>
#include <string.h>

enum { LANES = 16, BLOCK = 1024 };

// exp of x <= 0, relative error below 3e-7; 0 far below.
static inline float exp_of_negative(float x) {
    const float limited = x < -87.0f ? -87.0f : x;
    const float shifted = limited * 1.44269504f + 12582912.0f; // rounds to an integer in the low bits
    const float n = shifted - 12582912.0f;
    const float r = (limited - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = ((int32_t)n + 127) * (1 << 23);
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? 0.0f : p * scale;
}

static float largest(const float * x, int32_t n) {
    float lanes[LANES];
    for (int j = 0; j < LANES; ++j) {
        lanes[j] = -INFINITY;
    }
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int j = 0; j < LANES; ++j) {
            lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
        }
    }
    float best = -INFINITY;
    for (int j = 0; j < LANES; ++j) {
        best = lanes[j] > best ? lanes[j] : best;
    }
    for (; i < n; ++i) {
        best = x[i] > best ? x[i] : best;
    }
    return best;
}

static double log_norm(const float * x, int32_t n) {
    const float top = largest(x, n);
    double sum = 0;
    for (int32_t start = 0; start < n; start += BLOCK) {
        const int32_t end = n - start < BLOCK ? n : start + BLOCK;
        float lanes[LANES] = {0};
        int32_t i = start;
        for (; i + LANES <= end; i += LANES) {
            for (int j = 0; j < LANES; ++j) {
                lanes[j] += exp_of_negative(x[i + j] - top);
            }
        }
        for (; i < end; ++i) {
            lanes[0] += exp_of_negative(x[i] - top);
        }
        for (int j = 0; j < LANES; ++j) {
            sum += lanes[j];
        }
    }
    return (double)top + log(sum);
}

int32_t tb_top(const float * logits, int32_t n, int32_t k, struct tb_candidate * top) {
    int32_t size = 0;
    float least = -INFINITY; // of the candidates, once there are k
    for (int32_t start = 0; start < n;) {
        const int32_t left = n - start;
        if (size == k && left >= 2 * LANES) {
            int32_t above = 0;
            for (int j = 0; j < 2 * LANES; ++j) {
                above += logits[start + j] > least;
            }
            if (above == 0) {
                start += 2 * LANES;
                continue;
            }
        }
        const int32_t end = left < 2 * LANES ? n : start + 2 * LANES;
        for (; start < end; ++start) {
            const float logit = logits[start];
            if (size == k ? !(logit > least) : isnan(logit)) {
                continue;
            }
            int32_t at = size < k ? size++ : k - 1;
            for (; at > 0 && top[at - 1].logit < logit; --at) {
                top[at] = top[at - 1];
            }
            top[at].id = start;
            top[at].logit = logit;
            top[at].p = 0;
            least = top[size - 1].logit;
        }
    }
    return size;
}

static void draw(const struct tb_draw_context * c, struct tb_draw_row * row) {
    const float * logits = c->logits(c->context, row->entry);
    struct tb_candidates candidates = {c->scratch, 0, -1, false};
    row->token = TB_DRAW_DAMAGED;
    row->logit = 0;
    if (logits == NULL) {
        return;
    }
    if (row->top > 0 && row->top < c->n_vocab) {
        candidates.size = (size_t)tb_top(logits, c->n_vocab, row->top, c->scratch);
        candidates.sorted = true;
    } else {
        for (int32_t i = 0; i < c->n_vocab; ++i) {
            c->scratch[i].id = i;
            c->scratch[i].logit = logits[i];
            c->scratch[i].p = 0;
        }
        candidates.size = (size_t)c->n_vocab;
    }
    if (candidates.size == 0) {
        return;
    }
    c->apply(row->chain, &candidates);
    if (candidates.selected < 0 || (size_t)candidates.selected >= candidates.size) {
        return;
    }
    const struct tb_candidate chosen = candidates.data[candidates.selected];
    if (!isfinite(logits[chosen.id])) {
        return;
    }
    if (isinf(chosen.logit) && chosen.logit < 0) {
        row->token = TB_DRAW_NOTHING;
        return;
    }
    c->accept(row->chain, chosen.id);
    row->token = chosen.id;
    row->logit = logits[chosen.id];
}

void tb_draw(const struct tb_draw_context * context, struct tb_draw_row * rows, int32_t n) {
    for (int32_t i = 0; i < n; ++i) {
        draw(context, &rows[i]);
        rows[i].norm = 0;
        if (rows[i].wants_norm && rows[i].token >= 0) {
            const bool known = i > 0 && rows[i - 1].entry == rows[i].entry && rows[i - 1].wants_norm;
            rows[i].norm = known && rows[i - 1].token >= 0
                               ? rows[i - 1].norm
                               : log_norm(context->logits(context->context, rows[i].entry), context->n_vocab);
        }
    }
}
