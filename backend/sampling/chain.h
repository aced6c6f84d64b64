// What a chain does with a row's logits behind bias and penalties; see sampling.h.
#ifndef TILEBEAM_SAMPLING_CHAIN_H
#define TILEBEAM_SAMPLING_CHAIN_H

#include "sampling.h"

// A position among candidates that top-k has left, sorted: top-p, min-p, temperature, draw. Changes the candidates.
// `all`: of exp(logit - the largest), the sum that top-p is of; 0: over these candidates.
int32_t tb_chain_among(struct tb_chain * chain, struct tb_candidate * top, int32_t size, double all);

// A token of n logits, of a chain with neither top-k nor top-p; TB_DRAW_DAMAGED if there is NaN among them. `room` has
// n. `sum`: of exp(logit - largest) over all, set where that is what is added up: at temperature 1, without min-p.
int32_t tb_chain_of_all(struct tb_chain * chain, const float * logits, int32_t n, float largest, float * room,
                        double * sum);

#endif // TILEBEAM_SAMPLING_CHAIN_H
