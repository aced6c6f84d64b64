// The likeliest of a row's logits, see tb_top in sampling.h.
//
// The logits are dealt out to lanes, of which there are more than k. The largest values of k lanes are k logits, so
// nothing below the k-th largest lane can be among the likeliest: a second pass looks at what is not, in any order of
// the logits about as many as there are lanes, whatever the size of the vocabulary, and keeps the k likeliest in a
// heap.
#include "logits.h"

enum { LANES_MAX = 512, CHUNK = 32 };

// A value that at least k of n reach, and seldom many more: halving, between what all reach and the largest.
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

// What the k largest are not below.
TB_INLINE float least_of(const float * logits, int32_t n, int32_t k) {
    int32_t n_lanes = 64;
    while (n_lanes < k + k / 2) {
        n_lanes *= 2;
    }
    if (n < 2 * n_lanes) {
        return -INFINITY;
    }
    if (n_lanes > LANES_MAX) {
        const float least = reached_by(logits, n, k);
        return isnan(least) ? -INFINITY : least;
    }
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
    return reached_by(lanes, n_lanes, k);
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

static bool is_before(struct tb_candidate a, struct tb_candidate b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Let what stands at a place of a heap, whose top comes last, sink to where it belongs.
static void sink(struct tb_candidate * heap, int32_t size, int32_t at) {
    const struct tb_candidate moved = heap[at];
    for (int32_t child = 2 * at + 1; child < size; child = 2 * at + 1) {
        child += child + 1 < size && is_before(heap[child], heap[child + 1]);
        if (!is_before(moved, heap[child])) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

static void make_heap(struct tb_candidate * heap, int32_t size) {
    for (int32_t at = size / 2; at-- > 0;) {
        sink(heap, size, at);
    }
}

TB_VECTORS int32_t tb_top(const float * logits, int32_t n, int32_t k, struct tb_candidate * top) {
    if (k == 1) {
        return likeliest(logits, n, top);
    }
    k = k < n ? k : n;
    float least = least_of(logits, n, k);
    int32_t size = 0;
    for (int32_t start = 0; start < n; start += CHUNK) {
        const int32_t end = n - start < CHUNK ? n : start + CHUNK;
        if (end - start == CHUNK) {
            int32_t some = 0;
            for (int j = 0; j < CHUNK; ++j) {
                some += logits[start + j] >= least;
            }
            if (some == 0) {
                continue;
            }
        }
        for (int32_t i = start; i < end; ++i) {
            // Once there are k, an equal one, of a larger id, is none of the likeliest.
            if (size < k ? !(logits[i] >= least) : !(logits[i] > least)) {
                continue;
            }
            top[size < k ? size : 0] = (struct tb_candidate){i, logits[i], 0};
            if (size == k) {
                sink(top, size, 0);
            } else if (++size == k) {
                make_heap(top, size);
            }
            least = size == k ? top[0].logit : least;
        }
    }
    if (size < k) {
        make_heap(top, size);
    }
    for (int32_t left = size; left-- > 1;) {
        const struct tb_candidate last = top[0];
        top[0] = top[left];
        top[left] = last;
        sink(top, left, 0);
    }
    return size;
}

int32_t tb_likeliest(const float * logits, int32_t n, double mass, struct tb_candidate * top) {
    for (int32_t k = 256;; k *= 4) {
        const int32_t size = tb_top(logits, n, k, top);
        double reached = 0;
        for (int32_t i = 0; i < size && reached < mass; ++i) {
            reached += expf(top[i].logit - top[0].logit);
        }
        if (reached >= mass || size < k) {
            return size;
        }
    }
}
