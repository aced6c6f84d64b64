// Sixteen groups side by side, as the quantizer works on them, and the search for their scales.
#ifndef TILEBEAM_SRC_QUANTIZE_BATCH_H
#define TILEBEAM_SRC_QUANTIZE_BATCH_H

#define LANES 16
#define GROUP 32

enum code { CODE_4BIT, CODE_8BIT, CODE_NONLINEAR };

// Element i of group l is [i][l]. `d` and `q` come in as round to nearest made them and go out as the search leaves
// them: values of the code book, each the nearest one for its scale.
struct batch {
    _Alignas(64) float x[GROUP][LANES];
    _Alignas(64) float w[GROUP][LANES]; // 1; 0 in rows that are not there
    _Alignas(64) float q[GROUP][LANES];
    _Alignas(64) float d[LANES];
    _Alignas(64) float reference[LANES]; // a group's largest weight, which a good scale keeps within the code book
};

// Vector length for tb_quantize's `search`; 0 if this CPU has no such vectors.
int tb_search_lanes(int search);

void tb_search_scales(int lanes, enum code code, struct batch * b);

#endif // TILEBEAM_SRC_QUANTIZE_BATCH_H
