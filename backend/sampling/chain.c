// See chain.h. Random numbers are those of std::mt19937 and std::uniform_real_distribution<double>, which
// llama_sampler_init_dist uses: two numbers of 32 bits make one of 53.
#include "chain.h"

#include "logits.h"

#include <float.h>

enum { HALF = 397, BLOCK = 64 };

// Of the sum of all probabilities: by how much a sum of some of them can differ from llama.cpp's. Its exp and the one
// here are at most 4.2e-7 apart, a block of floats is added up to 2.4e-7 exactly, and the target is such a sum too.
static const double UNSURE = 2e-6;

void tb_chain_seed(struct tb_chain * chain, uint32_t seed) {
    chain->random[0] = seed;
    for (uint32_t i = 1; i < TB_RANDOM_STATE; ++i) {
        const uint32_t last = chain->random[i - 1];
        chain->random[i] = 1812433253u * (last ^ last >> 30) + i;
    }
    chain->used = TB_RANDOM_STATE;
    chain->behind = 0;
}

// A new state from the last one (Matsumoto and Nishimura, 1998).
static void twist(uint32_t * state) {
    for (int i = 0; i < TB_RANDOM_STATE; ++i) {
        const uint32_t joined = (state[i] & 0x80000000u) | (state[(i + 1) % TB_RANDOM_STATE] & 0x7fffffffu);
        state[i] = state[(i + HALF) % TB_RANDOM_STATE] ^ joined >> 1 ^ (joined & 1 ? 0x9908b0dfu : 0);
    }
}

static uint32_t random_bits(struct tb_chain * chain) {
    if (chain->used == TB_RANDOM_STATE) {
        twist(chain->random);
        chain->used = 0;
    }
    uint32_t bits = chain->random[chain->used++];
    bits ^= bits >> 11;
    bits ^= bits << 7 & 0x9d2c5680u;
    bits ^= bits << 15 & 0xefc60000u;
    return bits ^ bits >> 18;
}

double tb_chain_random(struct tb_chain * chain) {
    const double low = random_bits(chain);
    const double number = (low + random_bits(chain) * 0x1p32) * 0x1p-64;
    ++chain->behind;
    return number < 1.0 ? number : 1.0 - 0x1p-53;
}

// How many of the likeliest have probabilities that add up to `p`.
static int32_t nucleus(struct tb_candidate * top, int32_t size, float p) {
    float sum = 0;
    for (int32_t i = 0; i < size; ++i) {
        top[i].p = expf(top[i].logit - top[0].logit);
        sum += top[i].p;
    }
    float reached = 0;
    for (int32_t i = 0; i < size; ++i) {
        reached += top[i].p / sum;
        if (reached >= p) {
            return i + 1;
        }
    }
    return size;
}

int32_t tb_chain_among(struct tb_chain * chain, struct tb_candidate * top, int32_t size) {
    if (chain->draw == NULL) {
        return 0;
    }
    if (chain->top_p < 1) {
        size = nucleus(top, size, chain->top_p);
    }
    if (chain->min_p > 0) {
        const float least = top[0].logit + logf(chain->min_p);
        int32_t kept = 1;
        while (kept < size && !(top[kept].logit < least)) {
            ++kept;
        }
        size = kept;
    }
    const double random = size > 1 || chain->one_takes_one ? tb_chain_random(chain) : 0;
    if (size == 1) {
        return 0;
    }
    const float largest = top[0].logit / chain->temperature;
    double sum = 0;
    for (int32_t i = 0; i < size; ++i) {
        top[i].p = expf(top[i].logit / chain->temperature - largest);
        sum += top[i].p;
    }
    const double target = sum * random;
    double reached = 0;
    for (int32_t i = 0; i < size; ++i) {
        reached += top[i].p;
        if (reached >= target) {
            return i;
        }
    }
    return size - 1;
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

// The position of the only logit that is not below `least`; -1 if there are several.
static int32_t only(const float * x, int32_t n, float least) {
    int32_t found = -1;
    for (int32_t i = 0; i < n; ++i) {
        if (!(x[i] < least)) {
            if (found >= 0) {
                return -1;
            }
            found = i;
        }
    }
    return found;
}

TB_WIDE_VECTORS int32_t tb_chain_of_all(struct tb_chain * chain, const float * logits, int32_t n, float * room,
                                        double * sum) {
    const float largest = tb_largest(logits, n);
    const float temperature = chain->temperature;
    const float top = largest / temperature;
    const float least = chain->min_p > 0 ? largest + logf(chain->min_p) : -INFINITY;
    if (!isfinite(top)) {
        return TB_UNCERTAIN;
    }
    double all = 0;
    for (int32_t start = 0; start < n; start += BLOCK) {
        const int32_t end = n - start < BLOCK ? n : start + BLOCK;
        for (int32_t i = start; i < end; ++i) {
            const float p = tb_exp_of_negative(logits[i] / temperature - top);
            room[i] = logits[i] < least ? 0.0f : p;
        }
        all += add_up(room + start, end - start);
    }
    if (isnan(all)) {
        return TB_DRAW_DAMAGED;
    }
    *sum = all; // whatever is drawn
    const int32_t single = chain->min_p > 0 && !chain->one_takes_one ? only(logits, n, least) : -1;
    if (single >= 0) {
        return single;
    }
    const double target = all * tb_chain_random(chain);
    double reached = 0;
    int32_t start = 0;
    for (; start < n; start += BLOCK) {
        const double block = add_up(room + start, n - start < BLOCK ? n - start : BLOCK);
        if (reached + block >= target) {
            break;
        }
        reached += block;
    }
    for (int32_t i = start; i < n; ++i) {
        const double before = reached;
        reached += room[i];
        if (reached >= target) {
            return target - before > UNSURE * all && reached - target > UNSURE * all ? i : TB_UNCERTAIN;
        }
    }
    return TB_UNCERTAIN;
}
