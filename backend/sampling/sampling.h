// Drawing the tokens of a whole batch in one call: for every row the sampler chain of its sequence, without a way
// through Python between them.
//
// llama_sampler_sample hands the whole vocabulary to a chain, 12 bytes for each token, which is then sorted, cut and
// turned into probabilities link by link. The usual chains (bias, penalties, top-k, top-p, min-p, temperature, draw)
// are drawn here instead, from the logits themselves, with random numbers of the same kind from the same seed and
// arithmetic in the same order: the token is the one that llama.cpp's chain would have drawn from the k likeliest,
// sorted, of equals the lower first. Where that is not certain (equal logits behind penalties, a random number that
// falls on the border of two tokens of a whole vocabulary), the chain itself draws.
//
// A grammar looks at one token first, the one drawn without it. Only if it refuses this one, it looks at others: the
// likeliest, as many as the chain keeps, or the whole vocabulary; from these is drawn again. The probability of a token
// is so what it is if everything that the grammar refuses is taken away first; but top-k, top-p and min-p cut before
// the grammar does, in the first draw. llama.cpp's common_sampler_sample works alike.
//
// This library is built without llama.cpp: its functions come as pointers, some of its structs are mirrored.
#ifndef TILEBEAM_SAMPLING_H
#define TILEBEAM_SAMPLING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
// llama_token_data, llama_token_data_array and llama_logit_bias of llama.h.
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
struct tb_bias {
    int32_t token;
    float bias;
};

enum {
    TB_DRAW_TOP_MAX = 256, // of more likeliest tokens the whole vocabulary is sorted, by llama.cpp
    TB_DRAW_NOTHING = -1,  // the chain forbids every token
    TB_DRAW_DAMAGED = -2,  // the logits are not numbers
    TB_RANDOM_STATE = 624,
};

// How one sequence draws. Filled in by the caller, then tb_chain_seed.
struct tb_chain {
    void * links;     // llama_sampler chain of everything but the grammar
    void * grammar;   // llama_sampler, or NULL
    void * penalties; // of the links, or NULL
    void * draw;      // of the links the one that draws by chance, NULL if the likeliest is taken
    const struct tb_bias * biases;
    int32_t n_biases;
    bool own; // drawn here; else the links draw
    int32_t top_k;
    float top_p;
    float min_p;
    float temperature;
    int32_t * recent; // a ring with the tokens that the penalties look at
    int32_t n_recent; // its size, at most the vocabulary's
    int32_t accepted; // tokens so far
    int32_t behind;   // random numbers drawn here that `draw` has not drawn yet
    int32_t used;     // of `random`
    uint32_t random[TB_RANDOM_STATE];
};

// What the rows of a context share.
struct tb_draw_context {
    void * context;                                                   // llama_context, or with logits NULL: all logits
    const float * (*logits)(void * context, int32_t entry);           // llama_get_logits_ith
    void (*apply)(void * sampler, struct tb_candidates * candidates); // llama_sampler_apply
    void (*accept)(void * sampler, int32_t token);                    // llama_sampler_accept
    int32_t n_vocab;
    struct tb_candidate * candidates; // room for n_vocab
    float * adjusted;                 // room for n_vocab
};

struct tb_draw_row {
    struct tb_chain * chain;
    int32_t entry; // of the batch, with logits
    int32_t wants_norm;
    // Out.
    int32_t token; // or TB_DRAW_NOTHING, TB_DRAW_DAMAGED; only a token has been accepted by the chain
    float logit;   // of the token, as the model computed it
    double norm;   // logarithm of the sum of exp(logit) over the vocabulary, if wanted
};

// Start the random numbers of a chain where llama_sampler_init_dist starts them.
void tb_chain_seed(struct tb_chain * chain, uint32_t seed);

// Draw a token for each of n rows, in their order.
void tb_draw_rows(const struct tb_draw_context * context, struct tb_draw_row * rows, int32_t n);

// The k likeliest of n logits, likeliest first, of equals the lower; NaN is never among them. k is at least 1 and at
// most TB_DRAW_TOP_MAX. How many there are: k, unless fewer are numbers.
int32_t tb_top(const float * logits, int32_t n, int32_t k, struct tb_candidate * top);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif // TILEBEAM_SAMPLING_H
