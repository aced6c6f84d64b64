// Products on workers of different speeds: slow-workers ROWS PANELS SPEED.. prints the share of the last worker's time
// for which the first to end had nothing to do, how much longer all took than with work that could be cut anywhere, and
// how many results are wrong. tests/npu/test_slow_workers.py compiles and runs it.
//
// Real threads share the work as the executor's do; only the kernel is another: it writes numbers that tell which
// product they are of, and lets its thread's own clock go on by what the product takes at its speed. Whose clock is
// behind goes first, so that the outcome is that of such CPUs, whatever else this machine does.
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "ops/mul_mat.h"
#include "run_state.h"

using namespace tb::npu;

namespace {

constexpr int64_t k = 1024;
const int64_t panel_bytes = k / TB_TILE_K * static_cast<int64_t>(tb_tile_bytes(TB_Q4_0_COL));

std::vector<double> speeds;
std::vector<double> clocks;
std::vector<bool> ended;
std::mutex mutex;
std::condition_variable moved;
thread_local int me = 0;

const uint8_t * weights = nullptr;
const uint8_t * groups = nullptr;

bool is_next() {
    for (size_t i = 0; i < clocks.size(); ++i) {
        const bool before = clocks[i] < clocks[static_cast<size_t>(me)] ||
                            (clocks[i] == clocks[static_cast<size_t>(me)] && i < static_cast<size_t>(me));
        if (!ended[i] && before) return false;
    }
    return true;
}

// The thread's clock goes on; returns when all others' are there, too.
void take(double work) {
    std::unique_lock<std::mutex> lock(mutex);
    clocks[static_cast<size_t>(me)] += work / speeds[static_cast<size_t>(me)];
    moved.notify_all();
    moved.wait(lock, is_next);
}

float number_of(int64_t panel, int64_t row, int column) {
    return static_cast<float>((panel * 32 + column) % 9973) + static_cast<float>(row) / 1024;
}

int64_t row_bytes = 0;

void multiply_one(const gemm_int8_args & a) {
    const int64_t panel = (a.panel - weights) / panel_bytes, row = (a.group - groups) / row_bytes;
    for (int m = 0; m < a.rows; m++)
        for (int c = 0; c < TB_TILE_N; c++)
            a.out[m][c] += number_of(panel, row + m, c); // a product that is made twice shows
    take(a.rows);
}

void work(void * arg, int thread) {
    op_context ctx = *static_cast<op_context *>(arg);
    ctx.thread = me = thread;
    take(0);
    mul_mat_entry.run(ctx);
    {
        const std::lock_guard<std::mutex> lock(mutex);
        ended[static_cast<size_t>(thread)] = true;
    }
    moved.notify_all();
}

tb_tensor tensor(uint32_t type, uint32_t ne0, uint32_t ne1, uint64_t row) {
    return {0, type, 0, {ne0, ne1, 1, 1}, {0, row, row * ne1, row * ne1}};
}

} // namespace

int main(int argc, char ** argv) {
    if (argc < 4) return 2;
    const auto rows = static_cast<uint32_t>(std::atoi(argv[1])), panels = static_cast<uint32_t>(std::atoi(argv[2]));
    for (int i = 3; i < argc; ++i)
        speeds.push_back(std::atof(argv[i]));
    const int n = static_cast<int>(speeds.size());
    clocks.assign(speeds.size(), 0);
    ended.assign(speeds.size(), false);

    kernel_table kernels{};
    kernels.gemm.int8[gemm_q4] = {"counts", 16, 0, multiply_one};
    const uint32_t columns = panels * TB_TILE_N;
    tb_op op{};
    op.code = TB_OP_MUL_MAT;
    op.n_src = 2;
    op.src[0] = tensor(TB_Q4_0_COL, k, columns, 0);
    op.src[1] = tensor(TB_F32, k, rows, k * 4);
    op.dst = tensor(TB_F32, columns, rows, uint64_t{columns} * 4);
    const mul_mat_plan plan = plan_mul_mat(op, n, kernels);
    row_bytes = plan.row_bytes;
    std::vector<uint8_t> w(static_cast<size_t>(panels * panel_bytes)), x(static_cast<size_t>(plan.converted_bytes()));
    std::vector<float> y(static_cast<size_t>(columns) * rows);
    weights = w.data();
    groups = x.data();

    run_state state;
    op_context ctx{};
    ctx.op = &op;
    ctx.kernels = &kernels;
    ctx.n_threads = ctx.meeting = n;
    ctx.state = &state;
    ctx.prepared = x.data();
    ctx.dst = {&op.dst, reinterpret_cast<uint8_t *>(y.data())};
    ctx.src[0] = {&op.src[0], w.data()};
    ctx.src[1] = {&op.src[1], x.data()};
    thread_pool pool(n);
    if (pool.size() != n) return 3;
    pool.run(work, &ctx, n);

    double all = 0;
    for (const double speed : speeds)
        all += speed;
    const double last = *std::max_element(clocks.begin(), clocks.end());
    const double first = *std::min_element(clocks.begin(), clocks.end());
    const double least = static_cast<double>(rows) * panels / all;
    int64_t wrong = 0;
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t c = 0; c < columns; c++)
            wrong += y[size_t{r} * columns + c] != number_of(c / TB_TILE_N, r, static_cast<int>(c % TB_TILE_N));
    std::printf("%.4f %.4f %lld\n", (last - first) / last, last / least - 1, static_cast<long long>(wrong));
    return 0;
}
