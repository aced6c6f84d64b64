// Drawing the tokens of a whole batch in one call: for every row the sampler chain of its sequence, without a way
// through Python between them.
//
// llama_sampler_sample hands the whole vocabulary to a chain, 12 bytes for each token. Most chains begin by keeping the
// k likeliest; here these are found in the logits themselves (one pass, mostly comparisons with the k-th best so far)
// and the chain is given them, sorted. It then draws what it would have drawn, whatever the vocabulary's size; of equal
// logits at the border the lower token is kept.
//
// This library is built without llama.cpp: its functions come as pointers, two of its structs are mirrored.
#ifndef TILEBEAM_DRAW_H
#define TILEBEAM_DRAW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
// llama_token_data and llama_token_data_array of llama.h.
struct tb_candidate {
    int32_t id;
    float logit;
    float p;
};
struct tb_candidates {
    struct tb_candidate * data;
    size_t size;
    int64_t selected;
    bool sorted;
};

// What the rows of a context share.
struct tb_draw_context {
    void * context;                                                 // llama_context
    const float * (*logits)(void * context, int32_t entry);         // llama_get_logits_ith
    void (*apply)(void * chain, struct tb_candidates * candidates); // llama_sampler_apply
    void (*accept)(void * chain, int32_t token);                    // llama_sampler_accept
    int32_t n_vocab;
    struct tb_candidate * scratch; // n_vocab of them
};

enum {
    TB_DRAW_TOP_MAX = 256, // a chain that keeps more is given the whole vocabulary
    TB_DRAW_NOTHING = -1,  // the chain forbids every token
    TB_DRAW_DAMAGED = -2,  // the logits are not numbers
};

struct tb_draw_row {
    void * chain;  // llama_sampler
    int32_t entry; // of the batch, with logits
    int32_t top;   // the chain looks at so many of the likeliest tokens only, at most TB_DRAW_TOP_MAX; 0: at all
    int32_t wants_norm;
    // Out.
    int32_t token; // or TB_DRAW_NOTHING, TB_DRAW_DAMAGED; only a token has been accepted by the chain
    float logit;   // of the token, as the model computed it
    double norm;   // logarithm of the sum of exp(logit) over the vocabulary, if wanted
};

// Draw a token for each of n rows, in their order.
void tb_draw(const struct tb_draw_context * context, struct tb_draw_row * rows, int32_t n);

// The k likeliest of n logits, likeliest first, of equals the lower; NaN is never among them. k is at least 1 and at
// most TB_DRAW_TOP_MAX. How many there are: k, unless fewer are numbers.
int32_t tb_top(const float * logits, int32_t n, int32_t k, struct tb_candidate * top);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif // TILEBEAM_DRAW_H
