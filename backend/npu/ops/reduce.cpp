// SUM, SUM_ROWS, ARGMAX and CUMSUM. Sums are kept in double, so that a vocabulary's worth of small probabilities adds
// up.
#include "ops/ops.h"

namespace tb::npu {
namespace {

// One number from all elements: few enough in every graph that one thread does it.
void sum(const op_context & ctx) {
    if (ctx.thread != 0) {
        return;
    }
    const view & x = ctx.src[0];
    double total = 0;
    for (int64_t r = 0; r < x.rows(); r++) {
        const row_index i = row_of(x, r);
        const float * row = x.at<const float>(i.i1, i.i2, i.i3);
        for (int64_t j = 0; j < x.ne(0); j++) {
            total += static_cast<double>(row[j]);
        }
    }
    *ctx.dst.at<float>(0) = static_cast<float>(total);
}

void sum_rows(const op_context & ctx) {
    const view & x = ctx.src[0];
    for (const int64_t r : ctx.share(x.rows(), 16)) {
        const row_index i = row_of(x, r);
        const float * row = x.at<const float>(i.i1, i.i2, i.i3);
        double total = 0;
        for (int64_t j = 0; j < x.ne(0); j++) {
            total += static_cast<double>(row[j]);
        }
        const double by = ctx.param_i(0) == 1 ? static_cast<double>(x.ne(0)) : 1.0;
        *ctx.dst.at<float>(i.i1, i.i2, i.i3) = static_cast<float>(total / by);
    }
}

// The first of the largest elements of each row.
void argmax(const op_context & ctx) {
    const view & x = ctx.src[0];
    for (const int64_t r : ctx.share(x.ne(1), 16)) {
        const float * row = x.at<const float>(r);
        int64_t best = 0;
        for (int64_t j = 1; j < x.ne(0); j++) {
            if (row[j] > row[best]) {
                best = j;
            }
        }
        ctx.dst.at<int32_t>(0)[r] = static_cast<int32_t>(best);
    }
}

void cumsum(const op_context & ctx) {
    const view & x = ctx.src[0];
    const view & dst = ctx.dst;
    for (const int64_t r : ctx.share(x.rows())) {
        const row_index i = row_of(x, r);
        const float * row = x.at<const float>(i.i1, i.i2, i.i3);
        float * out = dst.at<float>(i.i1, i.i2, i.i3);
        double total = 0;
        for (int64_t j = 0; j < x.ne(0); j++) {
            total += static_cast<double>(row[j]);
            out[j] = static_cast<float>(total);
        }
    }
}

} // namespace

const op_entry sum_entry = {sum, nullptr};
const op_entry sum_rows_entry = {sum_rows, nullptr};
const op_entry argmax_entry = {argmax, nullptr};
const op_entry cumsum_entry = {cumsum, nullptr};

} // namespace tb::npu
