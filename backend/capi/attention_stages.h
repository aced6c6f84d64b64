// How the time of attention divides into its steps: for a bench. Part of libtilebeam_npu.so only.
#ifndef TILEBEAM_CAPI_ATTENTION_STAGES_H
#define TILEBEAM_CAPI_ATTENTION_STAGES_H

#include "kernels/kernels.h"

namespace tb::npu {

// Queries of one head against the cells of one cache head, tile by tile as in ops/flash_attn.cpp.
struct stage_shape {
    int rows, cells, dim;
    uint32_t flags; // of TB_OP_FLASH_ATTN
};

// Seconds that scores, softmax and accumulation take together over `repeats` passes, random numbers in F16 cells. The
// clock is read four times a tile, which is in the figures.
void attention_stages(const kernel_table & kernels, const stage_shape & shape, int repeats, double (&seconds)[3]);

} // namespace tb::npu

#endif // TILEBEAM_CAPI_ATTENTION_STAGES_H
