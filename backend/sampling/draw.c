// See sampling.h.
#include "chain.h"
#include "logits.h"

enum { BLOCK = 1024 };

// What drawing found out about a row's logits on its way.
struct found {
    float largest; // NaN: not known
    double sum;    // see tb_chain_of_all; 0: not known
};

// `top`: the largest of x.
TB_WIDE_VECTORS static double log_norm(const float * x, int32_t n, float top) {
    double sum = 0;
    for (int32_t start = 0; start < n; start += BLOCK) {
        const int32_t end = n - start < BLOCK ? n : start + BLOCK;
        float lanes[TB_LANES] = {0};
        int32_t i = start;
        for (; i + TB_LANES <= end; i += TB_LANES) {
            for (int j = 0; j < TB_LANES; ++j) {
                lanes[j] += tb_exp_of_negative(x[i + j] - top);
            }
        }
        for (; i < end; ++i) {
            lanes[0] += tb_exp_of_negative(x[i] - top);
        }
        for (int j = 0; j < TB_LANES; ++j) {
            sum += lanes[j];
        }
    }
    return (double)top + log(sum);
}

// The logits behind bias and penalties.
static const float * adjusted(const struct tb_draw_context * c, const struct tb_chain * chain, const float * logits) {
    if (chain->n_biases == 0 && chain->penalties == NULL) {
        return logits;
    }
    memcpy(c->adjusted, logits, (size_t)c->n_vocab * sizeof *logits);
    for (int32_t i = 0; i < chain->n_biases; ++i) {
        c->adjusted[chain->biases[i].token] += chain->biases[i].bias;
    }
    if (chain->penalties != NULL) {
        // Given with its logit as often as it came, a token gets the same penalty each time.
        const int32_t n = chain->accepted < chain->n_recent ? chain->accepted : chain->n_recent;
        for (int32_t i = 0; i < n; ++i) {
            c->candidates[i].id = chain->recent[i];
            c->candidates[i].logit = c->adjusted[chain->recent[i]];
            c->candidates[i].p = 0;
        }
        struct tb_candidates recent = {c->candidates, (size_t)n, -1, false};
        c->apply(chain->penalties, &recent);
        for (int32_t i = 0; i < n; ++i) {
            c->adjusted[c->candidates[i].id] = c->candidates[i].logit;
        }
    }
    return c->adjusted;
}

static struct tb_candidates all(const struct tb_draw_context * c, const float * logits, const float * allowed) {
    for (int32_t i = 0; i < c->n_vocab; ++i) {
        c->candidates[i].id = i;
        c->candidates[i].logit = allowed != NULL && allowed[i] == -INFINITY ? -INFINITY : logits[i];
        c->candidates[i].p = 0;
    }
    return (struct tb_candidates){c->candidates, (size_t)c->n_vocab, -1, false};
}

// By llama.cpp's links, from all tokens but those whose `allowed` is -INFINITY. `drawn`: the random number for it has
// been drawn here.
static int32_t by_links(const struct tb_draw_context * c, struct tb_chain * chain, const float * logits,
                        const float * allowed, bool drawn) {
    const bool own = chain->own && chain->draw != NULL;
    if (own) {
        // One random number each: a single candidate takes none before 0.3.35.
        for (; chain->behind > (drawn ? 1 : 0); --chain->behind) {
            struct tb_candidate two[] = {{0, 0, 0}, {1, 0, 0}};
            struct tb_candidates equal = {two, 2, -1, true};
            c->apply(chain->draw, &equal);
        }
    }
    struct tb_candidates candidates = all(c, logits, allowed);
    c->apply(chain->links, &candidates);
    if (own && !drawn && (candidates.size > 1 || chain->one_takes_one)) {
        tb_chain_random(chain);
    }
    chain->behind = 0;
    if (candidates.selected < 0 || (size_t)candidates.selected >= candidates.size) {
        return TB_DRAW_DAMAGED;
    }
    const struct tb_candidate chosen = candidates.data[candidates.selected];
    return isfinite(logits[chosen.id]) && chosen.logit == -INFINITY ? TB_DRAW_NOTHING : chosen.id;
}

static bool ties(const struct tb_candidate * top, int32_t size) {
    for (int32_t i = 1; i < size; ++i) {
        if (top[i].logit == top[i - 1].logit) {
            return true;
        }
    }
    return false;
}

// `exact`: of equal logits the lower is not good enough.
static int32_t by_own(const struct tb_draw_context * c, struct tb_chain * chain, const float * logits, bool exact,
                      struct found * found, bool * drawn) {
    const int32_t top_k = chain->draw == NULL ? 1 : chain->top_k;
    if (top_k == 0) {
        const int32_t behind = chain->behind;
        const int32_t token = tb_chain_of_all(chain, logits, c->n_vocab, (float *)c->candidates, &found->sum);
        *drawn = chain->behind > behind;
        return token;
    }
    exact = exact && chain->draw != NULL;
    const int32_t n = tb_top(logits, c->n_vocab, exact ? top_k + 1 : top_k, c->candidates);
    if (n == 0) {
        return TB_DRAW_DAMAGED;
    }
    if (exact && ties(c->candidates, n)) {
        return TB_UNCERTAIN;
    }
    found->largest = c->candidates[0].logit;
    const struct tb_candidate chosen = c->candidates[tb_chain_among(chain, c->candidates, n < top_k ? n : top_k)];
    return chosen.logit == -INFINITY ? TB_DRAW_NOTHING : chosen.id;
}

// By whoever draws for this chain. `allowed`: as in by_links, and what `logits` behind bias and penalties are then.
static int32_t by_chain(const struct tb_draw_context * c, struct tb_chain * chain, const float * logits,
                        const float * allowed, struct found * found) {
    bool drawn = false;
    if (chain->own) {
        const float * x = allowed != NULL ? allowed : adjusted(c, chain, logits);
        const bool exact = x != logits && chain->grammar == NULL;
        const int32_t token = by_own(c, chain, x, exact, x == logits ? found : &(struct found){0}, &drawn);
        if (token != TB_UNCERTAIN) {
            return token;
        }
    }
    return by_links(c, chain, logits, allowed, drawn);
}

// What a chain draws when its grammar has refused the token drawn without it.
static int32_t by_grammar(const struct tb_draw_context * c, struct tb_chain * chain, const float * logits) {
    const float * x = chain->own ? adjusted(c, chain, logits) : logits;
    const int32_t top_k = chain->draw == NULL ? 1 : chain->top_k;
    if (chain->own && top_k > 0) {
        // As many of the likeliest as the chain keeps may already be among these few.
        const int32_t found = tb_top(x, c->n_vocab, TB_DRAW_TOP_MAX, c->candidates);
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
            return c->candidates[tb_chain_among(chain, c->candidates, left)].id;
        }
    }
    all(c, logits, NULL);
    if (!tb_grammar_apply(chain->grammar, c->candidates, c->n_vocab)) {
        return TB_DRAW_COMPLEX;
    }
    for (int32_t i = 0; i < c->n_vocab; ++i) {
        c->adjusted[i] = c->candidates[i].logit == -INFINITY ? -INFINITY : x[i];
    }
    return by_chain(c, chain, logits, c->adjusted, &(struct found){0});
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
    row->token = by_chain(c, chain, logits, NULL, found);
    if (row->token >= 0 && chain->grammar != NULL) {
        struct tb_candidate drawn = {row->token, 0, 0};
        if (!tb_grammar_apply(chain->grammar, &drawn, 1)) {
            row->token = TB_DRAW_COMPLEX;
        } else if (drawn.logit == -INFINITY) {
            row->token = by_grammar(c, chain, logits);
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
    if (chain->penalties != NULL) {
        c->accept(chain->penalties, row->token);
        chain->recent[chain->accepted % chain->n_recent] = row->token;
        ++chain->accepted;
    }
}

// The logarithm of the sum of exp(logit), of which drawing may have most.
TB_WIDE_VECTORS static double norm_of(const struct tb_draw_context * c, const struct tb_chain * chain,
                                      const float * logits, const struct found * found) {
    const float largest = isnan(found->largest) ? tb_largest(logits, c->n_vocab) : found->largest;
    const bool summed = found->sum > 0 && chain->temperature == 1 && !(chain->min_p > 0);
    return summed ? (double)largest + log(found->sum) : log_norm(logits, c->n_vocab, largest);
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
        if (row->wants_norm && row->token >= 0) {
            const bool known = i > 0 && row[-1].logits == row->logits && row[-1].wants_norm && row[-1].token >= 0;
            row->norm = known ? row[-1].norm : norm_of(c, row->chain, row->logits, &found);
        }
    }
}
