// The NPU's threads: persistent workers that run one task together, with barriers inside the task.
//
// The calling thread is worker 0. A wait spins for a few microseconds, because the gap between two ops of a graph is
// about as long, and then sleeps on a futex, so that an idle pool costs no CPU time. With more threads than usable
// CPUs a spinning thread only takes the CPU from the one it waits for: then waits hardly spin at all.
#ifndef TILEBEAM_NPU_THREAD_POOL_H
#define TILEBEAM_NPU_THREAD_POOL_H

#include <atomic>
#include <cstdint>
#include <pthread.h>
#include <vector>

#include "cpus.h"
#include "wait.h"

namespace tb::npu {

// For loops that hand out work dynamically; each has a cache line of its own.
struct alignas(64) chunk_counter {
    std::atomic<int64_t> next{0};
};

class thread_pool {
  public:
    using task = void (*)(void * arg, int thread);

    // Starts n_threads - 1 workers, or as many of them as the system allows.
    explicit thread_pool(int n_threads);
    ~thread_pool();
    thread_pool(const thread_pool &) = delete;
    thread_pool & operator=(const thread_pool &) = delete;

    int size() const { return n; }

    // fn(arg, thread) on all threads; returns when all have returned. Not to be called by two threads at a time.
    void run(task fn, void * arg);

    // Wake sleeping workers because a run is about to come.
    void wake();

    // All threads of the pool meet; called inside a task. The last to arrive sets the counters to 0.
    void barrier(int thread, chunk_counter * counters = nullptr, int n_counters = 0);

  private:
    struct worker {
        thread_pool * pool;
        int index;
        pthread_t handle;
    };
    // What a thread has learned about its waits, and where it runs; each has a cache line of its own.
    struct alignas(64) habits {
        spin_budget at_barrier;
        spin_budget idle;
        int64_t moved_ns = 0;
        int cpu = -1;
    };
    void move_apart(int thread);
    static void * worker_main(void * arg);
    void work(int thread);
    // True if the change was seen while spinning.
    static bool wait_change(std::atomic<uint32_t> & word, uint32_t old, std::atomic<uint32_t> & sleepers,
                            spin_budget & budget);

    // One cache line per group of words that different threads write at different times.
    alignas(64) std::atomic<uint32_t> arrived{0};
    alignas(64) std::atomic<uint32_t> generation{0};
    std::atomic<uint32_t> barrier_sleepers{0};
    alignas(64) std::atomic<uint32_t> job{0};
    std::atomic<uint32_t> idle_sleepers{0};
    task fn = nullptr;
    void * arg = nullptr;
    bool stopping = false;

    alignas(64) int n = 1;
    std::vector<habits> waits; // per thread
    bool spreads = false;      // there is a CPU for each thread
    std::vector<worker> workers;
};

} // namespace tb::npu

#endif // TILEBEAM_NPU_THREAD_POOL_H
