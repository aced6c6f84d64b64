// The NPU's threads: persistent workers that run one task together, with barriers inside the task.
//
// The calling thread is worker 0. Each thread has cache lines of its own, into which it alone writes how far it is, and
// a mailbox, into which thread 0 writes that there is work; who waits for a thread reads that thread's line. A barrier
// is one store and a look at the others' lines: the last to arrive waits for nobody. What only one thread has to do
// after a barrier is done by the last to arrive, before it lets the others go: one way between CPUs less than a barrier
// more.
//
// A wait in a run spins for a few microseconds, because the gap between two ops of a graph is about as long, and then
// sleeps on a futex. A thread without work spins for longer if the last time that was long enough for the next run to
// come, as while a program decodes step after step; an idle pool costs no CPU time. With more threads than usable CPUs
// a spinning thread only takes the CPU from the one it waits for: then waits hardly spin at all. A wait that had to
// sleep finds out whether the other thread worked meanwhile or was given no CPU (lost_ns).
#ifndef TILEBEAM_NPU_THREAD_POOL_H
#define TILEBEAM_NPU_THREAD_POOL_H

#include <atomic>
#include <cstdint>
#include <memory>
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

    // Starts n_threads - 1 workers, or as many of them as the system allows. `count`: where counts of barriers begin,
    // an even number; tests of their overflow begin shortly before it.
    explicit thread_pool(int n_threads, uint32_t count = 0);
    ~thread_pool();
    thread_pool(const thread_pool &) = delete;
    thread_pool & operator=(const thread_pool &) = delete;

    int size() const { return n; }

    // fn(arg, thread) on threads 0 to hands - 1; returns when all have returned. Not to be called by two threads at a
    // time.
    void run(task fn, void * arg, int hands);

    // Wake the sleeping ones of these threads because a run is about to come.
    void wake(int hands);

    // Threads 0 to hands - 1 meet; called inside a task by each of them.
    void barrier(int thread, int hands);

    // The same, but the last to arrive first does solo(arg, its number), and the others see what it wrote.
    void barrier(int thread, int hands, task solo, void * arg);

    // Since the run began: how long threads at barriers waited for one that was ready to work but was given no CPU.
    int64_t lost_ns() const { return lost.load(std::memory_order_relaxed); }

  private:
    // A counter that moves by 2; its lowest bit says that somebody sleeps until it moves.
    using step_word = std::atomic<uint32_t>;

    // A thread's own, on cache lines by who writes them.
    struct seat {
        alignas(64) step_word mail{0};    // thread 0: runs that it takes part in
        alignas(64) step_word arrived{0}; // barriers since ever
        step_word finished{0};            // runs
        // What it has learned about its waits, and where it runs.
        alignas(64) spin_budget at_barrier;
        spin_budget idle;
        int64_t looked_ns = 0; // when whether it shares its CPU or core
        uint32_t barriers = 0; // as `arrived`
        int cpu = -1;
        cpu_clock clock = no_cpu_clock;
        thread_pool * pool = nullptr;
        int index = 0;
        pthread_t handle{};
    };

    static void * worker_main(void * arg);
    void work(seat & own);
    void move_apart(seat & own);
    static bool reached(const step_word & word, uint32_t value);
    static void advance(step_word & word, uint32_t value);
    // `idle`: of this pool, without work; then only while no other pool works.
    static bool spin(const step_word & word, uint32_t value, int64_t spin_ns, const thread_pool * idle);
    bool others_work() const;
    static void sleep(step_word & word, uint32_t value); // at most until it is reached
    void await_job(seat & own, uint32_t job);
    // Wait for a word of a run. True if it was seen while spinning. `late`: the thread whose word it is; nullptr:
    // whoever is not yet at this barrier, or does the solo.
    bool await(step_word & word, uint32_t value, spin_budget & budget, const seat * late, int hands);
    const seat & last_one(uint32_t barriers, int hands) const;

    int n = 1;
    std::unique_ptr<seat[]> seats;
    bool spreads = false;    // there is a CPU for each thread
    bool has_choice = false; // .. and some of these are of the same core, or of slower ones
    int last_hands = 1;
    // Of the run in work; written before the mail that tells of it.
    task fn = nullptr;
    void * arg = nullptr;
    bool stopping = false;
    std::atomic<bool> at_work{false};
    alignas(64) std::atomic<int64_t> lost{0};
    // Of barriers with a solo: threads that are there, who does it, and, as seat.arrived, those that are over.
    alignas(64) std::atomic<int> gathered{0};
    std::atomic<int> soloist{0};
    alignas(64) step_word released{0};
};

} // namespace tb::npu

#endif // TILEBEAM_NPU_THREAD_POOL_H
