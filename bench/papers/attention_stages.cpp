// How the time of attention divides into its steps: the kernels of a set that libtilebeam_npu.so gives, tile by tile as
// in backend/npu/ops/flash_attn.cpp. See attention_stages.py.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "ops/attention_fp16.h"
#include "tilebeam/ops.h"
#include "wait.h"

using namespace tb::npu;

namespace {

// Memory for vectors of any set.
class floats {
  public:
    explicit floats(size_t n) : memory(n + 32) {
        void * at = memory.data();
        size_t room = memory.size() * sizeof(float);
        start = static_cast<float *>(std::align(128, n * sizeof(float), at, room));
    }
    float * data() { return start; }

  private:
    std::vector<float> memory;
    float * start;
};

} // namespace

// Seconds that scores, softmax and accumulation take together over `repeats` passes of `rows` queries of one head
// against `cells` cells of one cache head, random numbers in F16. `flags`: of TB_OP_FLASH_ATTN. The clock is read four
// times a tile, which is in the figures.
extern "C" void tb_attention_stages(const kernel_table * set, int rows, int cells, int dim, uint32_t flags, int repeats,
                                    double * seconds) {
    const kernel_table & kernels = *set;
    const size_t width = static_cast<size_t>(dim), block = static_cast<size_t>(std::min(rows, attention_tile_rows));
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    const auto random = [&](size_t n) {
        std::vector<float> x(n);
        std::generate(x.begin(), x.end(), [&] { return normal(rng); });
        return x;
    };
    const auto cache = [&] {
        const std::vector<float> x = random(static_cast<size_t>(cells) * width);
        std::vector<uint16_t> halves(x.size());
        kernels.vec.from_f32[TB_F16](static_cast<int64_t>(x.size()), x.data(), halves.data());
        return halves;
    };
    const std::vector<float> q = random(static_cast<size_t>(rows) * width);
    const std::vector<uint16_t> k = cache(), v = cache();
    floats s(block * attention_tile_cells), o(block * width), alpha(block), max(block),
        sum(block * attention_sum_parts);
    floats scratch(static_cast<size_t>(attention_scratch_floats(dim))), queries(block * width), values(block * width);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const bool half = (flags & TB_FLAG_FP16) != 0;
    const fp16_products fp16{kernels, scale, queries.data(), values.data()};
    int64_t spent[3] = {};
    for (int i = 0; i < repeats; i++) {
        for (int first = 0; first < rows; first += attention_tile_rows) {
            const int n = std::min(rows - first, attention_tile_rows);
            const float * q_rows[attention_tile_rows];
            float * o_rows[attention_tile_rows];
            for (int r = 0; r < n; r++) {
                q_rows[r] = q.data() + static_cast<size_t>(first + r) * width;
                o_rows[r] = o.data() + static_cast<size_t>(r) * width;
            }
            std::fill_n(o.data(), block * width, 0.0f);
            std::fill_n(max.data(), block, -std::numeric_limits<float>::infinity());
            std::fill_n(sum.data(), block * attention_sum_parts, 0.0f);
            for (int cell = 0; cell < cells; cell += attention_tile_cells) {
                const int m = std::min(cells - cell, attention_tile_cells);
                const void *k_rows[attention_tile_cells], *v_rows[attention_tile_cells];
                for (int c = 0; c < m; c++) {
                    k_rows[c] = k.data() + static_cast<size_t>(cell + c) * width;
                    v_rows[c] = v.data() + static_cast<size_t>(cell + c) * width;
                }
                const attention_scores_args qk = {n, m, dim, q_rows, k_rows, cell_type::f16, s.data(), scratch.data(),
                                                  {}};
                attention_softmax_args weights = {};
                weights.rows = n;
                weights.cells = m;
                weights.visible = m == 64 ? ~uint64_t{0} : (uint64_t{1} << m) - 1;
                weights.scale = half ? 1.0f : scale;
                weights.s = s.data();
                weights.max = max.data();
                weights.sum = sum.data();
                weights.alpha = alpha.data();
                weights.exact = (flags & TB_FLAG_EXACT_EXP) != 0;
                const attention_accumulate_args pv = {
                    n, m, dim, s.data(), alpha.data(), v_rows, cell_type::f16, o_rows, scratch.data(), {}};
                int64_t at = tb::now_ns();
                const auto lap = [&](int stage) {
                    const int64_t then = at;
                    at = tb::now_ns();
                    spent[stage] += at - then;
                };
                half ? fp16.scores(qk) : kernels.attention.scores(qk);
                lap(0);
                kernels.attention.softmax(weights);
                lap(1);
                half ? fp16.accumulate(pv) : kernels.attention.accumulate(pv);
                lap(2);
            }
        }
    }
    std::transform(spent, spent + 3, seconds, [](int64_t ns) { return static_cast<double>(ns) * 1e-9; });
}
