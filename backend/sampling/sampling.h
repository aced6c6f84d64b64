// Drawing the tokens of a whole batch in one call: for every row the sampler chain of its sequence, without a way
// through Python between them.
//
// A chain is: bias, repetition penalties, then the likeliest (temperature 0), or top-k, top-p, min-p, temperature and a
// draw, with the arithmetic of llama.cpp's samplers of these names:
//
// - a token that came c times among the last ones: its logit is divided by `repeat` if positive, else multiplied; then
//   c * frequency + presence is taken away;
// - top-k keeps the k largest logits, of equals those of lower ids;
// - top-p keeps, of these, the fewest of the likeliest that together have at least p of the probability;
// - min-p keeps those with at least min-p times the probability of the likeliest;
// - the probability of a token that is left goes with exp(logit / temperature).
//
// One random number u in [0, 1) makes one draw: the first token at which the probabilities, added up in order, exceed
// u. The order is that of ids if there is neither top-k nor top-p, else from the likeliest on, of equals lower ids
// first. Every chain has its own numbers, from its seed (tb_chain_seed), and takes one for each draw, also where a
// single token is left.
//
// A grammar looks at one token first, the one drawn without it. Only if it refuses this one, it looks at others: the
// likeliest, as many as the chain keeps, or the whole vocabulary; from these is drawn again. The probability of a token
// is so what it is if everything that the grammar refuses is taken away first; but top-k, top-p and min-p cut before
// the grammar does, in the first draw. llama.cpp's common_sampler_sample works alike. The second draw takes a second
// random number.
//
// Grammars are matched here, too (grammar.c): of two ways through a grammar that have met only one is followed on, and
// each token has an allowance of steps, so that no grammar keeps those waiting who decode in the same batch.
//
// This library is built without llama.cpp: its functions come as pointers.
#ifndef TILEBEAM_SAMPLING_H
#define TILEBEAM_SAMPLING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
struct tb_candidate {
    int32_t id;
    float logit;
    float p;
};
struct tb_bias {
    int32_t token;
    float bias;
};

enum {
    TB_DRAW_NOTHING = -1, // the chain forbids every token
    TB_DRAW_DAMAGED = -2, // the logits are not numbers
    TB_DRAW_COMPLEX = -4, // the grammar took more steps than it may
};

// What the tokens of a vocabulary add to a text.
struct tb_pieces {
    int32_t n_vocab;
    const uint8_t * bytes;
    const uint32_t * starts; // n_vocab + 1: where in `bytes` each begins
    const uint8_t * ends;    // n_vocab: the token ends the text
};

// A grammar as lists: rules have alternatives, these have elements, one behind the other.
enum tb_grammar_kind {
    TB_GRAMMAR_END,       // of an alternative
    TB_GRAMMAR_SET,       // a character of a set
    TB_GRAMMAR_RULE,      // another rule
    TB_GRAMMAR_TOKEN,     // one token
    TB_GRAMMAR_NOT_TOKEN, // any other one
};
struct tb_grammar_element {
    int32_t kind;  // enum tb_grammar_kind
    int32_t value; // which set, rule or token
};
struct tb_grammar_rules {
    const struct tb_grammar_element * elements;
    const int32_t * alternatives; // where in `elements` each begins
    const int32_t * rules;        // where in `alternatives` each begins, and their end; the first rule is the root
    const uint32_t * ranges;      // pairs of code points, the first and the last, in ascending order
    const int32_t * sets;         // which pair of `ranges` each begins with, and their end
};
struct tb_grammar; // and where in it one sequence is

// How one sequence draws. Filled in by the caller, then tb_chain_seed.
struct tb_chain {
    struct tb_grammar * grammar; // or NULL
    const struct tb_bias * biases;
    int32_t n_biases;
    int32_t top_k;     // 0: all
    float top_p;       // 1: all
    float min_p;       // 0: all
    float temperature; // 0: the likeliest is taken
    float repeat;
    float frequency;
    float presence;
    int32_t * recent;   // a ring with the tokens that the penalties look at
    int32_t n_recent;   // its size; 0: no penalties
    int64_t accepted;   // tokens so far
    uint64_t random[4]; // the state of xoshiro256++
};

// What one thread draws with.
struct tb_draw_context {
    int32_t n_vocab;
    struct tb_candidate * candidates; // room for n_vocab
    float * adjusted;                 // room for n_vocab
};

// What is wanted besides the token; each with what stands before it.
enum tb_draw_wants { TB_DRAW_TOKEN, TB_DRAW_NORM, TB_DRAW_SPREAD };

struct tb_draw_row {
    struct tb_chain * chain;
    int32_t entry;        // of the batch, with logits
    int32_t wants;        // enum tb_draw_wants
    const float * logits; // of the entry, see tb_find_logits
    // Out.
    int32_t token; // or TB_DRAW_NOTHING, _DAMAGED, _COMPLEX; only a token has been accepted by the chain
    float logit;   // of the token, as the model computed it
    double norm;   // logarithm of the sum of exp(logit) over the vocabulary, if wanted
    // How the distribution that the model computed is spread over the n tokens, if wanted. Of logits that are more than
    // 87 below the largest, as if they were 87 below it: so both are numbers also where the model bans tokens.
    double entropy;   // sum of -p log p
    double certainty; // mean of -log(n p): how far uniform probabilities diverge (Kullback-Leibler) from these
};

// Start the random numbers of a chain: xoshiro256++ (Blackman and Vigna, 2019), whose state are the first four numbers
// of splitmix64 from this seed. A number in [0, 1) is the upper 53 bits of one of 64.
void tb_chain_seed(struct tb_chain * chain, uint64_t seed);

// Set the logits of n rows. `get` is llama_get_logits_ith, which is for one thread at a time.
void tb_find_logits(void * context, const float * (*get)(void * context, int32_t entry), struct tb_draw_row * rows,
                    int32_t n);

// Draw a token for each of n rows, in their order. Threads may draw for rows of different chains, each with its own
// context.
void tb_draw_rows(const struct tb_draw_context * context, struct tb_draw_row * rows, int32_t n);

// The k likeliest of n logits, likeliest first, of equals the lower; NaN is never among them. k is at least 1, and
// `top` has room for k or n. How many there are: k, unless fewer are numbers.
int32_t tb_top(const float * logits, int32_t n, int32_t k, struct tb_candidate * top);

// The same for as many as it takes for exp(logit - the largest), added up, to reach `mass`, and maybe more. `top` has
// room for n.
int32_t tb_likeliest(const float * logits, int32_t n, double mass, struct tb_candidate * top);

// Hidden states of texts by place, summed up token by token: arrays of [places, n_embd], and a count of tokens for
// each.
struct tb_states {
    float * total;
    float * recent; // each token weighs `decay` times what the next one does
    float * last;
    int64_t * count;
    int32_t n_embd;
    float decay;
};

// Add the hidden states of n batch entries to those of their places; none comes twice. `hidden` is
// llama_get_embeddings_ith with a context, or tb_tap_row with a tap. False, with the rest left out, where it has none.
bool tb_states_add(const struct tb_states * states, void * source, float * (*hidden)(void *, int32_t),
                   const int64_t * entries, const int64_t * places, int32_t n);

#define TB_TAP_LAYERS 8

// Copies what some layers put out while llama.cpp computes a batch: a row for each token, in the order of the batch.
struct tb_tap {
    const char * names[TB_TAP_LAYERS]; // of the tensors
    int64_t n_rows[TB_TAP_LAYERS];     // of this batch so far
    int32_t n_layers;
    int32_t n_embd;
    float * rows; // [n_layers, capacity, n_embd]
    int64_t capacity;
    int64_t n_tokens;                                         // of this batch, as many rows as there must be
    bool on;                                                  // else it looks at nothing
    const char * (*tensor_name)(const void *);                // ggml_get_name
    size_t (*tensor_bytes)(const void *);                     // ggml_nbytes
    void (*tensor_get)(const void *, void *, size_t, size_t); // ggml_backend_tensor_get
};

// A ggml_backend_sched_eval_callback: `tap` is a struct tb_tap. It never ends a graph.
bool tb_tap_see(void * tensor, bool ask, void * tap);

// The first layer's row of a batch entry; NULL: there is none, or not one for each token.
float * tb_tap_row(void * tap, int32_t entry);

// The beginning of a grammar; both tables must outlive it. NULL: no memory, or it takes too many steps to begin.
struct tb_grammar * tb_grammar_new(const struct tb_grammar_rules * rules, const struct tb_pieces * pieces);
void tb_grammar_free(struct tb_grammar * grammar);

// Set the logits of candidates that may not come next to -INFINITY. False: it would take more steps than this token
// may take; from then on always.
bool tb_grammar_apply(struct tb_grammar * grammar, struct tb_candidate * candidates, int32_t n);

// Go on behind a token. False: it may not come next, or as tb_grammar_apply.
bool tb_grammar_accept(struct tb_grammar * grammar, int32_t token);

// The pieces of a vocabulary, read by llama.cpp's functions. With `bytes` NULL only `starts` and `ends` are written:
// the last of `starts` says how many bytes there are.
void tb_read_pieces(const void * vocab, int32_t n_vocab,
                    int32_t (*to_piece)(const void *, int32_t, char *, int32_t, int32_t, bool), // llama_token_to_piece
                    bool (*is_end)(const void *, int32_t),                                      // llama_vocab_is_eog
                    uint8_t * bytes, uint32_t * starts, uint8_t * ends);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif // TILEBEAM_SAMPLING_H
