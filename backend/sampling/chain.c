// See chain.h.
#include "chain.h"

#include "logits.h"

#include <float.h>

enum { BLOCK = 64 };

static uint64_t rotated(uint64_t x, int by) { return x << by | x >> (64 - by); }

void tb_chain_seed(struct tb_chain * chain, uint64_t seed) {
    for (int i = 0; i < 4; ++i) {
        seed += 0x9e3779b97f4a7c15u;
        uint64_t z = seed;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        chain->random[i] = z ^ z >> 31;
    }
}

static double random_number(struct tb_chain * chain) {
    uint64_t * s = chain->random;
    const uint64_t bits = rotated(s[0] + s[3], 23) + s[0];
    const uint64_t shifted = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= shifted;
    s[3] = rotated(s[3], 45);
    return (double)(bits >> 11) * 0x1p-53;
}

// Weights in proportion to probabilities; their sum.
static double weigh(struct tb_candidate * top, int32_t size, float temperature) {
    double sum = 0;
    for (int32_t i = 0; i < size; ++i) {
        top[i].p = expf((top[i].logit - top[0].logit) / temperature);
        sum += top[i].p;
    }
    return sum;
}

int32_t tb_chain_among(struct tb_chain * chain, struct tb_candidate * top, int32_t size, double all) {
    if (chain->temperature == 0) {
        return 0;
    }
    if (chain->top_p < 1) {
        const double sum = weigh(top, size, 1);
        const double wanted = (all > 0 ? all : sum) * chain->top_p;
        double reached = 0;
        int32_t kept = 0;
        while (kept < size && reached < wanted) {
            reached += top[kept++].p;
        }
        size = kept;
    }
    if (chain->min_p > 0) {
        const float least = top[0].logit + logf(chain->min_p);
        int32_t kept = 1;
        while (kept < size && top[kept].logit >= least) {
            ++kept;
        }
        size = kept;
    }
    const double target = weigh(top, size, chain->temperature) * random_number(chain);
    double reached = top[0].p;
    int32_t i = 0;
    while (i + 1 < size && reached <= target) {
        reached += top[++i].p;
    }
    return i;
}

TB_INLINE double add_up(const float * x, int32_t n) {
    float lanes[TB_LANES] = {0};
    int32_t i = 0;
    for (; i + TB_LANES <= n; i += TB_LANES) {
        for (int j = 0; j < TB_LANES; ++j) {
            lanes[j] += x[i + j];
        }
    }
    double sum = 0;
    for (; i < n; ++i) {
        sum += x[i];
    }
    for (int j = 0; j < TB_LANES; ++j) {
        sum += lanes[j];
    }
    return sum;
}

TB_WIDE_VECTORS int32_t tb_chain_of_all(struct tb_chain * chain, const float * logits, int32_t n, float largest,
                                        float * room, double * sum) {
    const float temperature = chain->temperature;
    const float least = chain->min_p > 0 ? largest + logf(chain->min_p) : -FLT_MAX;
    double all = 0;
    for (int32_t start = 0; start < n; start += BLOCK) {
        const int32_t end = n - start < BLOCK ? n : start + BLOCK;
        for (int32_t i = start; i < end; ++i) {
            const float p = tb_exp_of_negative((logits[i] - largest) / temperature);
            room[i] = logits[i] < least ? 0.0f : p;
        }
        all += add_up(room + start, end - start);
    }
    if (isnan(all)) {
        return TB_DRAW_DAMAGED;
    }
    if (temperature == 1 && !(chain->min_p > 0)) {
        *sum = all;
    }
    const double target = all * random_number(chain);
    double reached = 0;
    int32_t i = 0;
    for (; i < n; i += BLOCK) {
        const double block = add_up(room + i, n - i < BLOCK ? n - i : BLOCK);
        if (reached + block > target) {
            break;
        }
        reached += block;
    }
    for (; i < n; ++i) {
        reached += room[i];
        if (reached > target) {
            return i;
        }
    }
    do { // the sums differ in their last bits: the last token that can be drawn
        --i;
    } while (room[i] == 0);
    return i;
}
