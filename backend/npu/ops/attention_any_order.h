// FLASH_ATTN under TB_FLAG_DETERMINISTIC: a row's result depends on its query and on the keys and values of the cells
// that it sees, not on where these lie among others, nor on what else runs beside it.
//
// Sums over cells are those of kernels/attention.h that have no order, and they need what is known only when all cells
// have been seen: the largest score, and a bound of the result. So cells are walked twice. The first walk gives every
// row its scores, in the order in which it meets its cells; the second meets them in the same order.
#ifndef TILEBEAM_NPU_OPS_ATTENTION_ANY_ORDER_H
#define TILEBEAM_NPU_OPS_ATTENTION_ANY_ORDER_H

#include <cstdint>

#include "kernels/kernels.h"

namespace tb::npu {

// The rows of an item.
class any_order_rows {
  public:
    static uint64_t bytes(int64_t rows, int64_t n_kv, int64_t dim);

    // `workspace`: bytes(..), aligned to 128.
    any_order_rows(const kernel_table & kernels, void * workspace, int64_t rows, int64_t n_kv, int64_t dim);

    void open(int64_t rows);
    // First walk: row r has met cells with scores s and, where V is of a type without bound, largest[i] as the largest
    // magnitude in V of cell i; nullptr: `most` for all cells. Bit i of `visible`: the row sees cell i of the tile.
    void meet(int64_t r, int cells, uint64_t visible, const float * s, const float * largest, float most);
    // Between: scores become weights.
    void weigh(int64_t r);
    // The second walk of row r begins, once more if it has been walked.
    void begin_again(int64_t r);
    // Second walk: the weights of the same cells, 0 where they are hidden.
    void meet_again(int64_t r, int cells, uint64_t visible, double * p);
    double * sums(int64_t r) { return total + r * dim; }
    double * weights() { return tile; } // room for the weights of all rows and a tile
    // After: the row's sums, its largest score (-inf: it saw nothing) and its weights' sum.
    struct result {
        float max, sum;
    };
    result close(int64_t r, int64_t n, float * out) const;

  private:
    struct row {
        int64_t met;
        float max, largest; // score; magnitude in V
        double sum, anchor; // of weights; see attention_any_order
    };
    const kernel_table & kernels;
    row * rows;
    double * total; // [rows][dim]
    double * tile;  // [rows][attention_tile_cells]
    float * scores; // [rows][n_kv]
    int64_t n_kv, dim;
};

} // namespace tb::npu

#endif // TILEBEAM_NPU_OPS_ATTENTION_ANY_ORDER_H
