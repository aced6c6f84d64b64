// Hidden states of texts, see tb_states_add and tb_tap in sampling.h.
#include "sampling.h"

#include <stddef.h>
#include <string.h>

bool tb_states_add(const struct tb_states * states, void * source, float * (*hidden)(void *, int32_t),
                   const int64_t * entries, const int64_t * places, int32_t n) {
    const float decay = states->decay;
    for (int32_t i = 0; i < n; ++i) {
        const float * x = hidden(source, (int32_t)entries[i]);
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

bool tb_tap_see(void * tensor, bool ask, void * tap) {
    struct tb_tap * t = tap;
    if (ask && !t->on) {
        return false;
    }
    const char * name = t->tensor_name(tensor);
    int32_t layer = 0;
    while (layer < t->n_layers && strcmp(name, t->names[layer]) != 0) {
        ++layer;
    }
    if (ask || layer == t->n_layers) {
        return layer < t->n_layers;
    }
    const size_t row = (size_t)t->n_embd * sizeof(float), bytes = t->tensor_bytes(tensor);
    int64_t * n_rows = &t->n_rows[layer];
    if (bytes % row == 0 && bytes / row <= (size_t)(t->capacity - *n_rows)) { // else rows are missing in the end
        t->tensor_get(tensor, t->rows + (layer * t->capacity + *n_rows) * t->n_embd, 0, bytes);
        *n_rows += (int64_t)(bytes / row);
    }
    return true;
}

float * tb_tap_row(void * tap, int32_t entry) {
    const struct tb_tap * t = tap;
    return t->n_rows[0] == t->n_tokens && entry >= 0 && entry < t->n_tokens ? t->rows + (int64_t)entry * t->n_embd
                                                                            : NULL;
}
