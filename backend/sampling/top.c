// The likeliest of a row's logits, see tb_top in sampling.h.
//
// The logits are dealt out to lanes, of which there are more than k. The largest values of k lanes are k logits, so
// nothing below the k-th largest lane can be among the likeliest: a second pass collects what is not, in any order of
// the logits about as many as there are lanes, whatever the size of the vocabulary. Only these are sorted.
#include "logits.h"

enum { LANES_MAX = 512, COLLECTED_MAX = 1024, RANKED_MAX = 128, CHUNK = 32 };

// A value that at least k of the lanes reach, and seldom many more: halving, between what all reach and the largest.
TB_INLINE float reached_by(const float * lanes, int32_t n_lanes, int32_t k) {
    float low = lanes[0];
    float high = lanes[0];
    for (int32_t j = 1; j < n_lanes; ++j) {
        low = lanes[j] < low ? lanes[j] : low;
        high = lanes[j] > high ? lanes[j] : high;
    }
    if (!(low > -INFINITY && high < INFINITY)) {
        return low;
    }
    for (int round = 0; round < 12; ++round) {
        const float middle = low + 0.5f * (high - low);
        int32_t above = 0;
        for (int32_t j = 0; j < n_lanes; ++j) {
            above += lanes[j] >= middle;
        }
        if (above >= k) {
            low = middle;
            if (above <= k + k / 16) {
                break;
            }
        } else {
            high = middle;
        }
    }
    return low;
}

// Ids of the logits that are at least `least`, ascending.
TB_INLINE int32_t collect(const float * logits, int32_t n, float least, int32_t * ids, int32_t room) {
    int32_t size = 0;
    int32_t start = 0;
    for (; start + CHUNK <= n && size + CHUNK <= room; start += CHUNK) {
        int32_t some = 0;
        for (int j = 0; j < CHUNK; ++j) {
            some += logits[start + j] >= least;
        }
        if (some == 0) {
            continue;
        }
        for (int j = 0; j < CHUNK; ++j) {
            ids[size] = start + j;
            size += logits[start + j] >= least;
        }
    }
    for (; start < n && size < room; ++start) {
        ids[size] = start;
        size += logits[start] >= least;
    }
    return start < n ? -1 : size;
}

// Sorted by counting, for each, how many are larger. Equals count the same and stand in a row, in the order of ids.
TB_INLINE void rank(const float * logits, const int32_t * ids, int32_t size, int32_t k, struct tb_candidate * top) {
    float value[RANKED_MAX];
    int32_t larger[RANKED_MAX];
    int32_t taken[RANKED_MAX];
    const int32_t padded = (size + TB_LANES - 1) / TB_LANES * TB_LANES;
    for (int32_t i = 0; i < padded; ++i) {
        value[i] = i < size ? logits[ids[i]] : INFINITY;
        larger[i] = 0;
        taken[i] = 0;
    }
    for (int32_t j = 0; j < size; ++j) {
        const float x = value[j];
        for (int32_t i = 0; i < padded; i += TB_LANES) {
            for (int l = 0; l < TB_LANES; ++l) {
                larger[i + l] += x > value[i + l];
            }
        }
    }
    for (int32_t i = 0; i < size; ++i) {
        const int32_t at = larger[i] + taken[larger[i]]++;
        if (at < k) {
            top[at].id = ids[i];
            top[at].logit = value[i];
            top[at].p = 0;
        }
    }
}

// The k likeliest so far, kept in order: for what the lanes do not suit.
static int32_t insert(const float * logits, int32_t n, int32_t k, struct tb_candidate * top) {
    int32_t size = 0;
    for (int32_t i = 0; i < n; ++i) {
        const float logit = logits[i];
        if (isnan(logit) || (size == k && !(logit > top[k - 1].logit))) {
            continue;
        }
        int32_t at = size < k ? size++ : k - 1;
        for (; at > 0 && top[at - 1].logit < logit; --at) {
            top[at] = top[at - 1];
        }
        top[at].id = i;
        top[at].logit = logit;
        top[at].p = 0;
    }
    return size;
}

TB_INLINE int32_t likeliest(const float * logits, int32_t n, struct tb_candidate * top) {
    int32_t best = -1;
    float most = -INFINITY;
    for (int32_t start = 0; start < n;) {
        const int32_t end = n - start < CHUNK ? n : start + CHUNK;
        if (best >= 0 && end - start == CHUNK) {
            int32_t above = 0;
            for (int j = 0; j < CHUNK; ++j) {
                above += logits[start + j] > most;
            }
            if (above == 0) {
                start = end;
                continue;
            }
        }
        for (; start < end; ++start) {
            if (best < 0 ? !isnan(logits[start]) : logits[start] > most) {
                best = start;
                most = logits[start];
            }
        }
    }
    top->id = best;
    top->logit = most;
    top->p = 0;
    return best >= 0; // not so: nothing but NaN
}

// Larger logits, and of equals lower ids, have smaller keys.
static uint64_t key(float logit, int32_t id) {
    const float plain = logit + 0.0f; // -0 becomes 0
    uint32_t bits;
    memcpy(&bits, &plain, sizeof bits);
    bits = bits >> 31 ? bits : ~bits & 0x7fffffffu;
    return (uint64_t)bits << 32 | (uint32_t)id;
}

// Sorted by merging.
static void merge(const float * logits, const int32_t * ids, int32_t size, int32_t k, struct tb_candidate * top) {
    uint64_t room[2][COLLECTED_MAX];
    uint64_t * from = room[0];
    uint64_t * to = room[1];
    for (int32_t i = 0; i < size; ++i) {
        from[i] = key(logits[ids[i]], ids[i]);
    }
    for (int32_t run = 1; run < size; run *= 2) {
        for (int32_t start = 0; start < size; start += 2 * run) {
            const int32_t middle = start + run < size ? start + run : size;
            const int32_t end = middle + run < size ? middle + run : size;
            int32_t a = start;
            int32_t b = middle;
            for (int32_t i = start; i < end; ++i) {
                to[i] = b == end || (a < middle && from[a] < from[b]) ? from[a++] : from[b++];
            }
        }
        uint64_t * const sorted = to;
        to = from;
        from = sorted;
    }
    for (int32_t i = 0; i < k && i < size; ++i) {
        top[i].id = (int32_t)(from[i] & 0xffffffffu);
        top[i].logit = logits[top[i].id];
        top[i].p = 0;
    }
}

TB_VECTORS int32_t tb_top(const float * logits, int32_t n, int32_t k, struct tb_candidate * top) {
    if (k == 1) {
        return likeliest(logits, n, top);
    }
    int32_t n_lanes = 64;
    while (n_lanes < k + k / 2 && n_lanes < LANES_MAX) {
        n_lanes *= 2;
    }
    float least = -INFINITY;
    if (n >= 2 * n_lanes) {
        float lanes[LANES_MAX];
        for (int32_t j = 0; j < n_lanes; ++j) {
            lanes[j] = -INFINITY;
        }
        for (int32_t i = 0; i + n_lanes <= n; i += n_lanes) {
            for (int32_t j = 0; j < n_lanes; j += TB_LANES) {
                for (int l = 0; l < TB_LANES; ++l) {
                    lanes[j + l] = logits[i + j + l] > lanes[j + l] ? logits[i + j + l] : lanes[j + l];
                }
            }
        }
        least = reached_by(lanes, n_lanes, k);
    }
    int32_t ids[COLLECTED_MAX];
    const int32_t size = collect(logits, n, least, ids, COLLECTED_MAX);
    if (size < 0) {
        return insert(logits, n, k, top);
    }
    if (size <= RANKED_MAX) {
        rank(logits, ids, size, k, top);
    } else {
        merge(logits, ids, size, k, top);
    }
    return size < k ? size : k;
}

static bool is_before(struct tb_candidate a, struct tb_candidate b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Let what stands at a place of a heap sink to where it belongs.
static void sink(struct tb_candidate * heap, int32_t size, int32_t at) {
    const struct tb_candidate moved = heap[at];
    for (int32_t child = 2 * at + 1; child < size; child = 2 * at + 1) {
        child += child + 1 < size && is_before(heap[child + 1], heap[child]);
        if (!is_before(heap[child], moved)) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

static void swap(struct tb_candidate * a, struct tb_candidate * b) {
    const struct tb_candidate kept = *a;
    *a = *b;
    *b = kept;
}

TB_VECTORS int32_t tb_likeliest(const float * logits, int32_t n, int32_t k, double mass, struct tb_candidate * top) {
    const int32_t few = k < TB_DRAW_TOP_MAX ? k : TB_DRAW_TOP_MAX;
    int32_t size = tb_top(logits, n, few, top);
    double reached = 0;
    for (int32_t i = 0; i < size && mass < INFINITY; ++i) {
        reached += expf(top[i].logit - top[0].logit);
    }
    if (size < few || few == k || reached >= mass) {
        return size;
    }
    // All that may be among them, in a heap.
    const float enough = k < n / 4 ? reached_by(logits, n, k) : -INFINITY;
    const float least = isnan(enough) ? -INFINITY : enough;
    size = 0;
    for (int32_t i = 0; i < n; ++i) {
        if (logits[i] >= least) {
            top[size++] = (struct tb_candidate){i, logits[i], 0};
        }
    }
    for (int32_t i = size / 2; i-- > 0;) {
        sink(top, size, i);
    }
    // What is taken stands behind the heap, the first last.
    const float largest = top[0].logit;
    int32_t left = size;
    for (reached = 0; left > 0 && size - left < k && reached < mass && top[0].logit > -INFINITY;) {
        reached += expf(top[0].logit - largest);
        swap(&top[0], &top[--left]);
        sink(top, left, 0);
    }
    for (int32_t i = 0; i < size - left && i < size - 1 - i; ++i) {
        swap(&top[i], &top[size - 1 - i]);
    }
    return size - left;
}
