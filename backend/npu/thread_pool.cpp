// See thread_pool.h.
#include "thread_pool.h"

#include <algorithm>
#include <cfenv>
#include <csignal>

namespace tb::npu {

namespace {

constexpr int max_threads = 512;
constexpr int64_t move_every_ns = 2000000;
constexpr int64_t hot_spin_ns = 50000; // longer than the gap between two ops, far shorter than a scheduler tick

const uint32_t * futex_word(const std::atomic<uint32_t> & word) {
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain 32-bit word");
    return reinterpret_cast<const uint32_t *>(&word);
}

} // namespace

thread_pool::thread_pool(int n_threads) {
    n_threads = std::clamp(n_threads, 1, max_threads);
    const int64_t spin_ns = n_threads > usable_cpus() ? 0 : hot_spin_ns;
    waits.assign(n_threads, {spin_budget(spin_ns), spin_budget(spin_ns)});
    spreads = spin_ns > 0;
    workers.reserve(n_threads); // worker addresses are handed to the threads
    // Signals are for the program's own threads: a Python handler must not be delayed by a worker in a kernel. What a
    // worker does wrong itself is not held back: blocked, such a signal ends the process whatever handler there is.
    sigset_t others;
    sigset_t before;
    sigfillset(&others);
    for (const int own : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) {
        sigdelset(&others, own);
    }
    pthread_sigmask(SIG_SETMASK, &others, &before);
    // Workers read n only after the first job was posted, so it may still shrink here.
    n = 1;
    for (int i = 1; i < n_threads; ++i) {
        workers.push_back({this, i, {}});
        if (pthread_create(&workers.back().handle, nullptr, worker_main, &workers.back()) != 0) {
            workers.pop_back();
            break;
        }
        ++n;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

thread_pool::~thread_pool() {
    stopping = true;
    job.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(futex_word(job), futex_scope::process_private);
    for (worker & w : workers) {
        pthread_join(w.handle, nullptr);
    }
}

void * thread_pool::worker_main(void * arg) {
    auto * w = static_cast<worker *>(arg);
#if defined(__GLIBC__)
    pthread_setname_np(pthread_self(), "tilebeam-npu");
#endif
    std::fesetenv(FE_DFL_ENV); // inherited otherwise, and a creator that flushes denormals would change results
    w->pool->work(w->index);
    return nullptr;
}

void thread_pool::work(int thread) {
    uint32_t seen = 0;
    for (;;) {
        wait_change(job, seen, idle_sleepers, waits[thread].idle);
        ++seen; // one job at a time, so the counter moved by exactly one
        if (stopping) {
            return;
        }
        __atomic_store_n(&waits[thread].cpu, current_cpu(), __ATOMIC_RELAXED);
        fn(arg, thread);
        barrier(thread);
    }
}

void thread_pool::run(task f, void * a) {
    if (n == 1) {
        f(a, 0);
        return;
    }
    fn = f;
    arg = a;
    __atomic_store_n(&waits[0].cpu, current_cpu(), __ATOMIC_RELAXED);
    job.fetch_add(1, std::memory_order_seq_cst);
    wake();
    f(a, 0);
    barrier(0);
}

void thread_pool::wake() {
    if (idle_sleepers.load(std::memory_order_seq_cst) != 0) {
        futex_wake(futex_word(job), futex_scope::process_private);
    }
}

void thread_pool::barrier(int thread, chunk_counter * counters, int n_counters) {
    const auto reset = [&] {
        for (int i = 0; i < n_counters; ++i) {
            counters[i].next.store(0, std::memory_order_relaxed);
        }
    };
    if (n == 1) {
        reset();
        return;
    }
    const uint32_t gen = generation.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == static_cast<uint32_t>(n - 1)) {
        reset();
        arrived.store(0, std::memory_order_relaxed);
        generation.store(gen + 1, std::memory_order_seq_cst);
        if (barrier_sleepers.load(std::memory_order_seq_cst) != 0) {
            futex_wake(futex_word(generation), futex_scope::process_private);
        }
        return;
    }
    if (!wait_change(generation, gen, barrier_sleepers, waits[thread].at_barrier) && spreads && thread != 0) {
        move_apart(thread);
    }
}

// Threads that hand over to each other by sleeping and waking look like one task to the scheduler, which then leaves
// them on one CPU while another idles. A worker that had to sleep at a barrier and shares its CPU with a thread of the
// pool goes to one that none of them uses, and may be moved by the scheduler again from there.
void thread_pool::move_apart(int thread) {
    habits & own = waits[thread];
    const int64_t now = now_ns();
    if (now - own.moved_ns < move_every_ns) {
        return;
    }
    const int cpu = current_cpu();
    __atomic_store_n(&own.cpu, cpu, __ATOMIC_RELAXED);
    std::vector<int> taken(n);
    bool shared = false;
    for (int i = 0; i < n; ++i) {
        taken[i] = __atomic_load_n(&waits[i].cpu, __ATOMIC_RELAXED);
        shared = shared || (i != thread && taken[i] == cpu);
    }
    if (cpu >= 0 && shared && leave_for_free_cpu(taken)) {
        own.moved_ns = now;
        __atomic_store_n(&own.cpu, current_cpu(), __ATOMIC_RELAXED);
    }
}

// A sleeper counts itself before the kernel compares the word, the waker changes the word before it looks at the
// count: with both in one total order a wake-up cannot be lost. Who is woken with the word unchanged spins again.
bool thread_pool::wait_change(std::atomic<uint32_t> & word, uint32_t old, std::atomic<uint32_t> & sleepers,
                              spin_budget & budget) {
    for (bool slept = false;; slept = true) {
        const int64_t spin_ns = budget.next();
        const int64_t start = now_ns();
        do {
            for (int i = 0; i < 32; ++i) {
                if (word.load(std::memory_order_acquire) != old) {
                    if (!slept) {
                        budget.report(true);
                    }
                    return !slept;
                }
                cpu_pause();
            }
        } while (now_ns() - start < spin_ns);
        budget.report(false);
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        futex_wait(futex_word(word), old, -1, futex_scope::process_private);
        sleepers.fetch_sub(1, std::memory_order_relaxed);
    }
}

} // namespace tb::npu
