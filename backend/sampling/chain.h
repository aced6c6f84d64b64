// What a chain does with a row's logits, where it is done here and not by llama.cpp; see sampling.h.
#ifndef TILEBEAM_SAMPLING_CHAIN_H
#define TILEBEAM_SAMPLING_CHAIN_H

#include "sampling.h"

enum { TB_UNCERTAIN = -3 };

// The next random number in [0, 1).
double tb_chain_random(struct tb_chain * chain);

// A position among candidates that top-k has left, sorted: top-p, min-p, temperature, draw. Changes the candidates.
int32_t tb_chain_among(struct tb_chain * chain, struct tb_candidate * top, int32_t size);

// A token of n logits, of a chain with neither top-k nor top-p; TB_DRAW_DAMAGED if there is NaN among them, and
// TB_UNCERTAIN if llama.cpp's arithmetic, which differs in the last bits, might draw another. `room` has n. `sum`: of
// exp(logit / temperature - the largest) over all tokens that min-p leaves, whatever is drawn.
int32_t tb_chain_of_all(struct tb_chain * chain, const float * logits, int32_t n, float * room, double * sum);

#endif // TILEBEAM_SAMPLING_CHAIN_H
