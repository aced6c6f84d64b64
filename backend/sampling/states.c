// Hidden states of texts, see tb_states_add in sampling.h.
#include "sampling.h"

#include <stddef.h>

bool tb_states_add(const struct tb_states * states, void * context, float * (*hidden)(void *, int32_t),
                   const int64_t * entries, const int64_t * places, int32_t n) {
    const float decay = states->decay;
    for (int32_t i = 0; i < n; ++i) {
        const float * x = hidden(context, (int32_t)entries[i]);
        if (x == NULL) {
            return false;
        }
        const size_t row = (size_t)places[i] * (size_t)states->n_embd;
        float * total = states->total + row;
        float * recent = states->recent + row;
        float * last = states->last + row;
        for (int32_t j = 0; j < states->n_embd; ++j) {
            total[j] += x[j];
            recent[j] = recent[j] * decay + x[j];
            last[j] = x[j];
        }
        ++states->count[places[i]];
    }
    return true;
}
