// See bus_guard.h. The handler takes no lock and allocates nothing: ranges lie in a list that only grows, their nodes
// are used again, and a node's version tells a reader that it changed meanwhile.
#include "bus_guard.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <fcntl.h>
#include <mutex>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fork.h"

namespace tb {

struct guarded_range::node {
    node * next = nullptr;            // never changes once the node is in the list
    std::atomic<uint32_t> version{0}; // odd while the fields below change
    std::atomic<uintptr_t> begin{0};
    std::atomic<uintptr_t> end{0}; // 0: free
    std::atomic<int> protection{0};
    std::atomic<bool> rest{false};
    std::atomic<bool> hit{false};
};

namespace {

using node = guarded_range::node;

std::atomic<node *> ranges{nullptr};
std::atomic<bool> any_hit{false};
std::atomic<uintptr_t> page_bytes{0};
std::atomic<int> in_use{0};     // ranges
std::atomic<int> passing_on{0}; // thread that hands a signal to the handler before ours
std::atomic<bool> passed_on{false};
struct sigaction previous; // written under `changes`, before ours is in front

// Nodes are taken and given back, and handlers changed, by one thread at a time. Never destroyed: buffers may be freed
// by the destructors of static objects.
fork_lock & changes() {
    static auto * const m = new fork_lock;
    return *m;
}

// Zeros in place of the missing page. False: not ours.
bool repaired(uintptr_t address) {
    const uintptr_t page = page_bytes.load(std::memory_order_relaxed);
    const uintptr_t first = address / page * page;
    uintptr_t last = 0;
    int protection = 0;
    for (node * n = ranges.load(std::memory_order_acquire); n; n = n->next) {
        const uint32_t version = n->version.load(std::memory_order_acquire);
        const uintptr_t begin = n->begin.load(std::memory_order_relaxed);
        const uintptr_t end = n->end.load(std::memory_order_relaxed);
        const int wanted = n->protection.load(std::memory_order_relaxed);
        const bool rest = n->rest.load(std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_acquire);
        if (version % 2 != 0 || n->version.load(std::memory_order_relaxed) != version || address < begin ||
            address >= end) {
            continue;
        }
        // Before there are zeros to read: none may go unnoticed.
        n->hit.store(true, std::memory_order_seq_cst);
        any_hit.store(true, std::memory_order_seq_cst);
        last = rest ? (end + page - 1) / page * page : std::max(last, first + page);
        protection |= wanted;
    }
    return last != 0 && mmap(reinterpret_cast<void *>(first), last - first, protection,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
}

void die_of(int signal) {
    struct sigaction standard = {};
    standard.sa_handler = SIG_DFL;
    sigaction(signal, &standard, nullptr);
}

void on_bus(int signal, siginfo_t * info, void * context) {
    const int error = errno;
    const bool fault = info->si_code > 0; // else sent by somebody with kill()
    if (fault && repaired(reinterpret_cast<uintptr_t>(info->si_addr))) {
        errno = error;
        return;
    }
    // Another handler may hand it back to this one (each in front of the other), or put this one back and raise the
    // signal again to die of it: then it is time to.
    const int thread = static_cast<int>(syscall(SYS_gettid));
    const bool again = passing_on.load() == thread || (!fault && passed_on.load());
    if (again ||
        (!(previous.sa_flags & SA_SIGINFO) && (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN))) {
        die_of(signal);
        if (!fault) {
            raise(signal);
        }
        return; // a fault happens again
    }
    passed_on.store(true);
    passing_on.store(thread);
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(signal, info, context);
    } else {
        previous.sa_handler(signal);
    }
    passing_on.store(0);
    errno = error;
}

void put_in_front() {
    struct sigaction now = {};
    if (sigaction(SIGBUS, nullptr, &now) != 0 || ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus)) {
        return;
    }
    previous = now;
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

} // namespace

guarded_range::guarded_range(const void * base, size_t size, int protection, repair how) : self(nullptr) {
    std::lock_guard<fork_lock> hold(changes());
    page_bytes.store(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)));
    node * n = ranges.load();
    while (n && n->end.load() != 0) {
        n = n->next;
    }
    const bool fresh = n == nullptr;
    if (fresh) {
        n = new node;
        n->next = ranges.load();
    }
    n->version.fetch_add(1, std::memory_order_acq_rel);
    n->begin.store(reinterpret_cast<uintptr_t>(base), std::memory_order_release);
    n->protection.store(protection, std::memory_order_release);
    n->rest.store(how == repair::rest, std::memory_order_release);
    n->hit.store(false, std::memory_order_release);
    n->end.store(reinterpret_cast<uintptr_t>(base) + size, std::memory_order_release);
    n->version.fetch_add(1, std::memory_order_acq_rel);
    if (fresh) {
        ranges.store(n, std::memory_order_release);
    }
    self = n;
    in_use.fetch_add(1);
    put_in_front();
}

guarded_range::~guarded_range() {
    std::lock_guard<fork_lock> hold(changes());
    self->version.fetch_add(1, std::memory_order_acq_rel);
    self->begin.store(0, std::memory_order_release);
    self->end.store(0, std::memory_order_release);
    self->version.fetch_add(1, std::memory_order_acq_rel);
    in_use.fetch_sub(1);
}

bool guarded_range::hit() const { return self->hit.load(std::memory_order_seq_cst); }

bool any_range_hit() { return any_hit.load(std::memory_order_seq_cst); }

void keep_bus_handler() {
    if (in_use.load() == 0) {
        return;
    }
    std::lock_guard<fork_lock> hold(changes());
    put_in_front();
}

bool can_shrink(int fd) {
    const int seals = fcntl(fd, F_GET_SEALS);
    return seals < 0 || (seals & F_SEAL_SHRINK) == 0;
}

} // namespace tb
