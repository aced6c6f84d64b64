// The thread pool's barriers when their counts overflow: pool-counts prints the barriers that somebody left too early.
// tests/npu/test_pool_counts.py compiles and runs it.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <unistd.h>

#include "thread_pool.h"

namespace {

constexpr int threads = 3;
constexpr int barriers = 40;

struct shared {
    tb::npu::thread_pool * pool;
    std::atomic<int> arrived{0};
    std::atomic<int> solos{0};
    std::atomic<int> early{0};
};

void solo(void * arg, int) {
    usleep(500); // long enough for the others to leave, if anything lets them
    static_cast<shared *>(arg)->solos.fetch_add(1);
}

void work(void * arg, int thread) {
    shared & s = *static_cast<shared *>(arg);
    for (int i = 1; i <= barriers; ++i) {
        s.arrived.fetch_add(1);
        s.pool->barrier(thread, threads);
        s.early += s.arrived.load() < threads * (2 * i - 1);
        s.arrived.fetch_add(1);
        s.pool->barrier(thread, threads, solo, &s);
        s.early += s.solos.load() < i || s.arrived.load() < threads * 2 * i;
    }
}

} // namespace

int main() {
    int early = 0;
    // Far from, and just before, the counts where a signed and an unsigned difference overflow.
    for (const uint32_t count : {0u, 0x7fffffd0u, 0x80000000u, 0xc0000000u, 0xffffffd0u}) {
        tb::npu::thread_pool pool(threads, count);
        if (pool.size() != threads) {
            return 3;
        }
        for (int round = 0; round < 2; ++round) {
            shared s{&pool};
            pool.run(work, &s, threads);
            early += s.early.load();
        }
    }
    std::printf("%d\n", early);
    return 0;
}
