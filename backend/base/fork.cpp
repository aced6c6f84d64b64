// What happens at fork(). See fork.h.
#include "fork.h"

#include <atomic>
#include <new>
#include <pthread.h>

namespace tb {

namespace {

std::atomic<uint32_t> forks{0};
std::atomic<fork_lock *> all_locks{nullptr};

} // namespace

// In the thread that calls fork(): `before`, then `in_parent` in the parent and `in_child` in the child.
struct fork_handlers {
    // Those that `before` has taken, and what was made before them: written and read while they are held, so that two
    // threads that fork at the same time do not meet here.
    static inline fork_lock * held = nullptr;

    static void before() {
        fork_lock * const first = all_locks.load(std::memory_order_acquire);
        for (fork_lock * l = first; l; l = l->next) {
            if (l->kind == fork_lock::at_fork::waits) {
                l->lock();
            }
        }
        held = first;
    }

    static void in_parent() {
        for (fork_lock * l = held; l; l = l->next) {
            if (l->kind == fork_lock::at_fork::waits) {
                l->unlock();
            }
        }
    }

    static void in_child() {
        forks.fetch_add(1);
        for (fork_lock * l = held; l; l = l->next) {
            new (&l->mutex) std::mutex;
        }
    }

    static void enlist(fork_lock & lock) {
        static const int registered = pthread_atfork(before, in_parent, in_child);
        (void)registered;
        lock.next = all_locks.load();
        while (!all_locks.compare_exchange_weak(lock.next, &lock)) {
        }
    }
};

uint32_t fork_count() { return forks.load(std::memory_order_relaxed); }

fork_lock::fork_lock(at_fork what) : kind(what) { fork_handlers::enlist(*this); }

} // namespace tb
