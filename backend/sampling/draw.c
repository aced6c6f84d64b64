// See sampling.h.
#include "chain.h"
#include "logits.h"

enum { BLOCK = 1024, FEW = 256 };

// What drawing found out about a row's logits on its way.
struct found {
    float largest; // NaN: not known
    double sum;    // of exp(logit - largest); 0: not known
};

// Sums over logits x of e = exp(d), of d e and of d, where d = x - the largest, but not below -87.
struct sums {
    double e, de, d;
};

TB_INLINE void add_one(float x, float top, bool all, float * e, float * de, float * d) {
    const float below = x - top, own = below < -87.0f ? -87.0f : below, p = tb_exp_of_negative(own);
    *e += p;
    if (all) {
        *de += own * p;
        *d += own;
    }
}

// `all`: not only of e.
TB_INLINE struct sums sums_of(const float * x, int32_t n, float top, bool all) {
    struct sums sums = {0, 0, 0};
    for (int32_t start = 0; start < n; start += BLOCK) {
        const int32_t end = n - start < BLOCK ? n : start + BLOCK;
        float e[TB_LANES] = {0}, de[TB_LANES] = {0}, d[TB_LANES] = {0};
        int32_t i = start;
        for (; i + TB_LANES <= end; i += TB_LANES) {
            for (int j = 0; j < TB_LANES; ++j) {
                add_one(x[i + j], top, all, &e[j], &de[j], &d[j]);
            }
        }
        for (; i < end; ++i) {
            add_one(x[i], top, all, &e[0], &de[0], &d[0]);
        }
        for (int j = 0; j < TB_LANES; ++j) {
            sums.e += e[j];
            sums.de += de[j];
            sums.d += d[j];
        }
    }
    return sums;
}

// Of exp(x - top), `top` the largest of x.
TB_WIDE_VECTORS static double sum_of_exp(const float * x, int32_t n, float top) { return sums_of(x, n, top, false).e; }

// A function of its own, so that it is compiled for each kind of CPU.
TB_WIDE_VECTORS static struct sums all_sums(const float * x, int32_t n, float top) { return sums_of(x, n, top, true); }

// `counts` has room for every token.
static void penalize(const struct tb_chain * chain, float * x, int32_t * counts) {
    const int32_t n = chain->accepted < chain->n_recent ? (int32_t)chain->accepted : chain->n_recent;
    for (int32_t i = 0; i < n; ++i) {
        counts[chain->recent[i]] = 0;
    }
    for (int32_t i = 0; i < n; ++i) {
        ++counts[chain->recent[i]];
    }
    for (int32_t i = 0; i < n; ++i) {
        const int32_t token = chain->recent[i];
        if (counts[token] > 0) {
            const float logit = x[token] <= 0 ? x[token] * chain->repeat : x[token] / chain->repeat;
            x[token] = logit - ((float)counts[token] * chain->frequency + chain->presence);
            counts[token] = 0;
        }
    }
}

// The logits behind bias and penalties.
static const float * adjusted(const struct tb_draw_context * c, const struct tb_chain * chain, const float * logits) {
    if (chain->n_biases == 0 && chain->n_recent == 0) {
        return logits;
    }
    memcpy(c->adjusted, logits, (size_t)c->n_vocab * sizeof *logits);
    for (int32_t i = 0; i < chain->n_biases; ++i) {
        c->adjusted[chain->biases[i].token] += chain->biases[i].bias;
    }
    penalize(chain, c->adjusted, (int32_t *)c->candidates);
    return c->adjusted;
}

// From logits behind bias and penalties.
static int32_t by_chain(const struct tb_draw_context * c, struct tb_chain * chain, const float * x,
                        struct found * found) {
    struct tb_candidate * top = c->candidates;
    const int32_t k = chain->temperature == 0 ? 1 : chain->top_k;
    int32_t size = tb_top(x, c->n_vocab, k > 0 ? k : 1, top);
    if (size == 0 || top[0].logit == INFINITY) {
        return TB_DRAW_DAMAGED;
    }
    const float largest = found->largest = top[0].logit;
    if (largest == -INFINITY) {
        return TB_DRAW_NOTHING;
    }
    if (k == 0 && chain->top_p == 1) {
        return tb_chain_of_all(chain, x, c->n_vocab, largest, (float *)top, &found->sum);
    }
    double all = 0;
    if (k == 0) {
        found->sum = all = sum_of_exp(x, c->n_vocab, largest);
        if (isnan(all)) {
            return TB_DRAW_DAMAGED;
        }
        size = tb_likeliest(x, c->n_vocab, all * chain->top_p, top);
    }
    return top[tb_chain_among(chain, top, size, all)].id;
}

// What a chain draws, from logits behind bias and penalties, when its grammar has refused the token drawn without it.
static int32_t by_grammar(const struct tb_draw_context * c, struct tb_chain * chain, const float * x) {
    const int32_t top_k = chain->temperature == 0 ? 1 : chain->top_k;
    if (top_k > 0) {
        // As many of the likeliest as the chain keeps may already be among these few.
        const int32_t found = tb_top(x, c->n_vocab, FEW, c->candidates);
        if (!tb_grammar_apply(chain->grammar, c->candidates, found)) {
            return TB_DRAW_COMPLEX;
        }
        int32_t left = 0;
        for (int32_t i = 0; i < found && left < top_k; ++i) {
            if (c->candidates[i].logit != -INFINITY) {
                c->candidates[left++] = c->candidates[i];
            }
        }
        if (left == top_k) {
            return c->candidates[tb_chain_among(chain, c->candidates, left, 0)].id;
        }
    }
    for (int32_t i = 0; i < c->n_vocab; ++i) {
        c->candidates[i] = (struct tb_candidate){i, x[i], 0};
    }
    if (!tb_grammar_apply(chain->grammar, c->candidates, c->n_vocab)) {
        return TB_DRAW_COMPLEX;
    }
    for (int32_t i = 0; i < c->n_vocab; ++i) {
        c->adjusted[i] = c->candidates[i].logit == -INFINITY ? -INFINITY : x[i];
    }
    return by_chain(c, chain, c->adjusted, &(struct found){0});
}

static void draw(const struct tb_draw_context * c, struct tb_draw_row * row, struct found * found) {
    struct tb_chain * chain = row->chain;
    const float * logits = row->logits;
    row->logit = 0;
    row->norm = 0;
    row->token = TB_DRAW_DAMAGED;
    if (logits == NULL) {
        return;
    }
    const float * x = adjusted(c, chain, logits);
    row->token = by_chain(c, chain, x, x == logits ? found : &(struct found){0});
    if (row->token >= 0 && chain->grammar != NULL) {
        struct tb_candidate drawn = {row->token, 0, 0};
        if (!tb_grammar_apply(chain->grammar, &drawn, 1)) {
            row->token = TB_DRAW_COMPLEX;
        } else if (drawn.logit == -INFINITY) {
            row->token = by_grammar(c, chain, x);
        }
    }
    if (row->token < 0) {
        return;
    }
    row->logit = logits[row->token];
    if (!isfinite(row->logit)) {
        row->token = TB_DRAW_DAMAGED;
        return;
    }
    if (chain->grammar != NULL && !tb_grammar_accept(chain->grammar, row->token)) {
        row->token = TB_DRAW_COMPLEX;
        return;
    }
    if (chain->n_recent > 0) {
        chain->recent[chain->accepted % chain->n_recent] = row->token;
        ++chain->accepted;
    }
}

// Set what is wanted of a row's distribution, of which drawing may have most.
static void measure(const struct tb_draw_context * c, struct tb_draw_row * row, const struct found * found) {
    const float * x = row->logits;
    const int32_t n = c->n_vocab;
    const float largest = isnan(found->largest) ? tb_largest(x, n) : found->largest;
    double sum = found->sum;
    if (row->wants >= TB_DRAW_SPREAD) {
        const struct sums sums = all_sums(x, n, largest);
        row->entropy = log(sums.e) - sums.de / sums.e;
        row->certainty = log(sums.e) - sums.d / n - log(n);
        sum = sum > 0 ? sum : sums.e;
    }
    row->norm = (double)largest + log(sum > 0 ? sum : sum_of_exp(x, n, largest));
}

void tb_find_logits(void * context, const float * (*get)(void * context, int32_t entry), struct tb_draw_row * rows,
                    int32_t n) {
    for (int32_t i = 0; i < n; ++i) {
        rows[i].logits = get(context, rows[i].entry);
    }
}

void tb_draw_rows(const struct tb_draw_context * c, struct tb_draw_row * rows, int32_t n) {
    for (int32_t i = 0; i < n; ++i) {
        struct tb_draw_row * row = &rows[i];
        struct found found = {NAN, 0};
        draw(c, row, &found);
        if (row->wants == TB_DRAW_TOKEN || row->token < 0) {
            continue;
        }
        const struct tb_draw_row * last = i > 0 ? row - 1 : NULL;
        if (last != NULL && last->logits == row->logits && last->wants >= row->wants && last->token >= 0) {
            row->norm = last->norm;
            row->entropy = last->entropy;
            row->certainty = last->certainty;
        } else {
            measure(c, row, &found);
        }
    }
}
