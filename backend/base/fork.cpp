// What happens at fork(). See fork.h.
#include "fork.h"

#include <atomic>
#include <new>
#include <pthread.h>
#include <sys/mman.h>

namespace tb {

namespace {

std::atomic<uint32_t> forks{0};
std::atomic<fork_lock *> all_locks{nullptr};
private_in_children * all_mappings = nullptr; // guarded by mappings_lock()

fork_lock & mappings_lock() {
    static auto * const lock = new fork_lock; // mappings may end with static objects
    return *lock;
}

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
        for (const private_in_children * m = all_mappings; m; m = m->after) {
            make_private(*m);
        }
        for (fork_lock * l = held; l; l = l->next) {
            new (&l->mutex) std::mutex;
        }
    }

    static void make_private(const private_in_children & m) {
        if (mmap(m.base, m.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, m.fd, 0) ==
            MAP_FAILED) {
            mprotect(m.base, m.size, PROT_READ); // no copy, but no harm to the parent either
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

private_in_children::private_in_children(void * b, uint64_t n, int f) : base(b), size(n), fd(f) {
    std::lock_guard<fork_lock> hold(mappings_lock());
    after = all_mappings;
    if (after) {
        after->before = this;
    }
    all_mappings = this;
}

private_in_children::~private_in_children() {
    std::lock_guard<fork_lock> hold(mappings_lock());
    (before ? before->after : all_mappings) = after;
    if (after) {
        after->before = before;
    }
}

} // namespace tb
