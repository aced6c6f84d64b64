// See thread_pool.h.
#include "thread_pool.h"

#include <algorithm>
#include <cfenv>
#include <csignal>

namespace tb::npu {

namespace {

constexpr int max_threads = 512;
constexpr int64_t look_every_ns = 2000000;
constexpr int64_t hot_spin_ns = 50000; // longer than the gap between two ops, far shorter than a scheduler tick
// Longer than a program needs between two decode steps. To wake a thread whose CPU sleeps takes tens of microseconds,
// of the one who wakes it, too.
constexpr int64_t idle_spin_ns = 1000000;
constexpr int64_t absent_ns = 500000; // a shorter wait is not worth asking whether the other thread had a CPU
constexpr uint32_t asleep = 1;

// A program with several NPUs lets them work in turn: threads of one do not spin while another needs the CPUs.
std::atomic<int> pools_at_work{0};

const uint32_t * futex_word(const std::atomic<uint32_t> & word) {
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain 32-bit word");
    return reinterpret_cast<const uint32_t *>(&word);
}

} // namespace

thread_pool::thread_pool(int n_threads, uint32_t count) {
    n_threads = std::clamp(n_threads, 1, max_threads);
    spreads = n_threads <= usable_cpus();
    has_choice = spreads && default_threads() < usable_cpus();
    seats = std::make_unique<seat[]>(static_cast<size_t>(n_threads));
    for (int i = 0; i < n_threads; ++i) {
        seats[i].at_barrier = spin_budget(spreads ? hot_spin_ns : 0);
        seats[i].idle = spin_budget(spreads ? idle_spin_ns : 0);
        seats[i].pool = this;
        seats[i].index = i;
        seats[i].barriers = count;
        seats[i].arrived.store(count, std::memory_order_relaxed);
    }
    // Signals are for the program's own threads: a Python handler must not be delayed by a worker in a kernel. What a
    // worker does wrong itself is not held back: blocked, such a signal ends the process whatever handler there is.
    sigset_t others;
    sigset_t before;
    sigfillset(&others);
    for (const int own : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) {
        sigdelset(&others, own);
    }
    pthread_sigmask(SIG_SETMASK, &others, &before);
    for (; n < n_threads; ++n) {
        if (pthread_create(&seats[n].handle, nullptr, worker_main, &seats[n]) != 0) {
            break;
        }
        seats[n].clock = cpu_clock_of(seats[n].handle);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

thread_pool::~thread_pool() {
    stopping = true;
    for (int i = 1; i < n; ++i) {
        advance(seats[i].mail, (seats[i].mail.load(std::memory_order_relaxed) & ~asleep) + 2);
        pthread_join(seats[i].handle, nullptr);
    }
}

void * thread_pool::worker_main(void * arg) {
    auto * own = static_cast<seat *>(arg);
#if defined(__GLIBC__)
    pthread_setname_np(pthread_self(), "tilebeam-npu");
#endif
    std::fesetenv(FE_DFL_ENV); // inherited otherwise, and a creator that flushes denormals would change results
    own->pool->work(*own);
    return nullptr;
}

void thread_pool::work(seat & own) {
    for (uint32_t job = 2;; job += 2) {
        await_job(own, job);
        if (stopping) {
            return;
        }
        __atomic_store_n(&own.cpu, current_cpu(), __ATOMIC_RELAXED);
        if (has_choice) {
            move_apart(own); // two on one core both work, so that neither has to sleep, and so does one on a slow core
        }
        fn(arg, own.index);
        advance(own.finished, job);
    }
}

void thread_pool::run(task f, void * a, int hands) {
    hands = std::clamp(hands, 1, n);
    if (hands == 1) {
        f(a, 0);
        return;
    }
    fn = f;
    arg = a;
    lost.store(0, std::memory_order_relaxed);
    seat & own = seats[0];
    own.clock = own_cpu_clock();
    __atomic_store_n(&own.cpu, current_cpu(), __ATOMIC_RELAXED);
    // Barriers without a solo do not move it: after 2^30 of them it would pass for the next one's.
    released.store(own.barriers, std::memory_order_relaxed);
    // Who took no part in the last run does not know how many barriers there have been.
    for (int i = last_hands; i < hands; ++i) {
        seats[i].barriers = own.barriers;
        seats[i].arrived.store(own.barriers, std::memory_order_relaxed);
    }
    for (int i = 1; i < hands; ++i) {
        advance(seats[i].mail, (seats[i].mail.load(std::memory_order_relaxed) & ~asleep) + 2);
    }
    at_work.store(true, std::memory_order_relaxed);
    pools_at_work.fetch_add(1, std::memory_order_relaxed);
    f(a, 0);
    for (int i = 1; i < hands; ++i) {
        const uint32_t job = seats[i].mail.load(std::memory_order_relaxed) & ~asleep;
        await(seats[i].finished, job, own.at_barrier, &seats[i], hands);
    }
    pools_at_work.fetch_sub(1, std::memory_order_relaxed); // in this order: never does this pool look like another
    at_work.store(false, std::memory_order_release);
    // A task may have gone on with fewer threads (executor.cpp); the others' counts are behind then.
    last_hands = 1;
    while (last_hands < hands && seats[last_hands].barriers == own.barriers) {
        ++last_hands;
    }
}

void thread_pool::wake(int hands) {
    for (int i = 1; i < std::min(hands, n); ++i) {
        // With the mark gone, nobody wakes it again when the run begins, unless it went back to sleep.
        if (seats[i].mail.load(std::memory_order_relaxed) & asleep) {
            seats[i].mail.fetch_and(~asleep, std::memory_order_relaxed);
            futex_wake(futex_word(seats[i].mail), futex_scope::process_private);
        }
    }
}

void thread_pool::barrier(int thread, int hands) {
    if (hands == 1) {
        return;
    }
    seat & own = seats[thread];
    own.barriers += 2;
    advance(own.arrived, own.barriers);
    bool slept = false;
    for (int i = 0; i < hands; ++i) {
        if (i != thread && !reached(seats[i].arrived, own.barriers)) {
            slept = !await(seats[i].arrived, own.barriers, own.at_barrier, &seats[i], hands) || slept;
        }
    }
    if (slept && spreads && thread != 0) {
        move_apart(own);
    }
}

void thread_pool::barrier(int thread, int hands, task solo, void * a) {
    if (hands == 1) {
        solo(a, thread);
        return;
    }
    seat & own = seats[thread];
    own.barriers += 2;
    own.arrived.store(own.barriers, std::memory_order_release); // nobody sleeps on it: this barrier has another word
    if (gathered.fetch_add(1, std::memory_order_acq_rel) + 1 == hands) {
        gathered.store(0, std::memory_order_relaxed);
        soloist.store(thread, std::memory_order_relaxed);
        solo(a, thread);
        advance(released, own.barriers);
        return;
    }
    if (!await(released, own.barriers, own.at_barrier, nullptr, hands) && spreads && thread != 0) {
        move_apart(own);
    }
}

const thread_pool::seat & thread_pool::last_one(uint32_t barriers, int hands) const {
    for (int i = 0; i < hands; ++i) {
        if (!reached(seats[i].arrived, barriers)) {
            return seats[i];
        }
    }
    return seats[soloist.load(std::memory_order_relaxed)];
}

// Threads that hand over to each other by sleeping and waking look like one task to the scheduler, which then leaves
// them on one CPU while another idles. A worker that had to sleep at a barrier and shares its CPU or core with a thread
// of the pool goes to one that none of them uses, and may be moved by the scheduler again from there.
void thread_pool::move_apart(seat & own) {
    const int64_t now = now_ns();
    if (now - own.looked_ns < look_every_ns) {
        return;
    }
    own.looked_ns = now;
    __atomic_store_n(&own.cpu, current_cpu(), __ATOMIC_RELAXED);
    int running_on[max_threads];
    for (int i = 0; i < n; ++i) {
        running_on[i] = __atomic_load_n(&seats[i].cpu, __ATOMIC_RELAXED);
    }
    if (tb::move_apart(running_on, n, own.index)) {
        __atomic_store_n(&own.cpu, current_cpu(), __ATOMIC_RELAXED);
    }
}

bool thread_pool::reached(const step_word & word, uint32_t value) {
    return static_cast<int32_t>((word.load(std::memory_order_acquire) & ~asleep) - value) >= 0;
}

void thread_pool::advance(step_word & word, uint32_t value) {
    if (word.exchange(value, std::memory_order_acq_rel) & asleep) {
        futex_wake(futex_word(word), futex_scope::process_private);
    }
}

bool thread_pool::spin(const step_word & word, uint32_t value, int64_t spin_ns, const thread_pool * idle) {
    int64_t start = 0;
    int64_t spun = 0;
    do {
        for (int i = 0; i < 32; ++i) {
            if (reached(word, value)) {
                return true;
            }
            cpu_pause();
        }
        const int64_t now = now_ns();
        start = start == 0 ? now : start; // a short wait does without the clock
        spun = now - start;
        if (idle && idle->others_work()) {
            break;
        }
    } while (spun < spin_ns);
    return false;
}

// A sleeper marks the word before the kernel compares it, and whoever moves the word takes the mark with the same
// exchange: a wake-up cannot be lost.
void thread_pool::sleep(step_word & word, uint32_t value) {
    uint32_t seen = word.load(std::memory_order_relaxed);
    if (!reached(word, value) &&
        ((seen & asleep) || word.compare_exchange_strong(seen, seen | asleep, std::memory_order_relaxed))) {
        futex_wait(futex_word(word), seen | asleep, -1, futex_scope::process_private);
    }
}

bool thread_pool::others_work() const {
    const int own = at_work.load(std::memory_order_acquire) ? 1 : 0;
    return pools_at_work.load(std::memory_order_relaxed) > own;
}

// Who is woken with the word unchanged (wake) has its job soon.
void thread_pool::await_job(seat & own, uint32_t job) {
    const int64_t start = now_ns();
    for (int64_t spin_ns = own.idle.next(); !spin(own.mail, job, spin_ns, this); spin_ns = own.idle.longest()) {
        sleep(own.mail, job);
    }
    own.idle.report_length(now_ns() - start);
}

bool thread_pool::await(step_word & word, uint32_t value, spin_budget & budget, const seat * whose, int hands) {
    const bool soon = spin(word, value, budget.next(), nullptr);
    budget.report(soon);
    while (!reached(word, value)) {
        const seat & late = whose ? *whose : last_one(value, hands);
        const int64_t start = now_ns();
        const int64_t worked = cpu_time_ns(late.clock);
        sleep(word, value);
        if (const int64_t waited = now_ns() - start; waited > absent_ns) {
            // All the others wait for it, and each of them adds its part.
            const int64_t absent = waited - (cpu_time_ns(late.clock) - worked);
            lost.fetch_add(std::max<int64_t>(absent, 0) / (hands - 1), std::memory_order_relaxed);
        }
    }
    return soon;
}

} // namespace tb::npu
