// The texts of tokens, for grammars: a large vocabulary takes too long from Python.
#include "sampling.h"

void tb_read_pieces(const void * vocab, int32_t n_vocab,
                    int32_t (*to_piece)(const void *, int32_t, char *, int32_t, int32_t, bool),
                    bool (*is_end)(const void *, int32_t), uint8_t * bytes, uint32_t * starts, uint8_t * ends) {
    uint32_t at = 0;
    for (int32_t token = 0; token < n_vocab; ++token) {
        char none[1];
        starts[token] = at;
        ends[token] = is_end(vocab, token);
        // A negative number says how long it would be.
        const int32_t n = bytes == NULL ? to_piece(vocab, token, none, 0, 0, false)
                                        : to_piece(vocab, token, (char *)bytes + at, INT32_MAX, 0, false);
        at += (uint32_t)(n < 0 ? -n : n);
    }
    starts[n_vocab] = at;
}
