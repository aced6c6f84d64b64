// See bus_guard.h. The handler takes no lock and allocates nothing: ranges lie in a list that only grows, their nodes
// are used again, and a node's version tells a reader that it changed meanwhile.
//
// llama.cpp gives the parts of a mapping back that it does not need, and a later mapping may take their place, inside a
// range that is still guarded. A missing page is that of the latest range around it.
//
// A SIGBUS that is not ours goes to the handler that was there before, each time, and nothing is remembered of it: that
// handler need not come back (siglongjmp). One that a program installs later is in front of ours and stays there: it
// gets every signal first.
#include "bus_guard.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <fcntl.h>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

#include "fork.h"

namespace tb {

struct guarded_range::node {
    node * next = nullptr;            // never changes once the node is in the list
    std::atomic<uint32_t> version{0}; // odd while the fields below change
    std::atomic<uintptr_t> begin{0};
    std::atomic<uintptr_t> end{0};  // 0: free
    std::atomic<uint64_t> order{0}; // later ranges have larger ones
    std::atomic<int> protection{0};
    std::atomic<bool> rest{false};
    std::atomic<bool> hit{false};
};

namespace {

using node = guarded_range::node;

std::atomic<node *> ranges{nullptr};
std::atomic<bool> any_hit{false};
std::atomic<uintptr_t> page_bytes{0};
uint64_t made = 0;       // ranges so far; under `changes`
struct sigaction before; // the handler there before ours; written once, before ours is there

// Nodes are taken and given back, and the handler is installed, by one thread at a time. Never destroyed: buffers may
// be freed by the destructors of static objects.
fork_lock & changes() {
    static auto * const m = new fork_lock;
    return *m;
}

// What a node said at one moment.
struct snapshot {
    uintptr_t begin = 0, end = 0;
    uint64_t order = 0;
    int protection = 0;
    bool rest = false;
    bool is_around(uintptr_t address) const { return address >= begin && address < end; }
};

// An empty one while the node changes.
snapshot read_node(const node & n) {
    snapshot s;
    const uint32_t version = n.version.load(std::memory_order_acquire);
    s.begin = n.begin.load(std::memory_order_relaxed);
    s.end = n.end.load(std::memory_order_relaxed);
    s.order = n.order.load(std::memory_order_relaxed);
    s.protection = n.protection.load(std::memory_order_relaxed);
    s.rest = n.rest.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    const bool settled = version % 2 == 0 && n.version.load(std::memory_order_relaxed) == version;
    return settled ? s : snapshot();
}

// Zeros in place of the missing page. False: not ours.
bool repaired(uintptr_t address) {
    snapshot latest;
    for (const node * n = ranges.load(std::memory_order_acquire); n; n = n->next) {
        const snapshot s = read_node(*n);
        if (s.is_around(address) && s.order > latest.order) {
            latest = s;
        }
    }
    if (latest.order == 0) {
        return false;
    }
    const uintptr_t page = page_bytes.load(std::memory_order_relaxed);
    const uintptr_t first = address / page * page;
    uintptr_t last = first + page;
    int protection = 0;
    for (node * n = ranges.load(std::memory_order_acquire); n; n = n->next) {
        const snapshot s = read_node(*n);
        if (s.begin != latest.begin || s.end != latest.end) { // several buffers may guard one mapping
            continue;
        }
        // Before there are zeros to read: none may go unnoticed.
        n->hit.store(true, std::memory_order_seq_cst);
        any_hit.store(true, std::memory_order_seq_cst);
        if (s.rest) {
            last = (s.end + page - 1) / page * page;
        }
        protection |= s.protection;
    }
    return mmap(reinterpret_cast<void *>(first), last - first, protection,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != MAP_FAILED;
}

void use_the_systems() {
    struct sigaction standard = {};
    standard.sa_handler = SIG_DFL;
    sigaction(SIGBUS, &standard, nullptr);
}

// A signal that is not ours.
void pass_on(int signal, siginfo_t * info, void * context, bool fault) {
    if ((before.sa_flags & static_cast<int>(SA_RESETHAND)) != 0) {
        use_the_systems(); // a handler for one signal only, which it now has
    }
    if ((before.sa_flags & SA_SIGINFO) != 0) {
        before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler == SIG_DFL || (before.sa_handler == SIG_IGN && fault)) { // which cannot be ignored
        use_the_systems();
        if (!fault) {
            raise(signal);
        }
        // a fault happens again
    } else if (before.sa_handler != SIG_IGN) {
        before.sa_handler(signal);
    }
}

void on_bus(int signal, siginfo_t * info, void * context) {
    const int error = errno;
    const bool fault = info->si_code > 0; // else sent by somebody with kill()
    if (!fault || !repaired(reinterpret_cast<uintptr_t>(info->si_addr))) {
        pass_on(signal, info, context, fault);
    }
    errno = error;
}

void install() {
    if (sigaction(SIGBUS, nullptr, &before) != 0) {
        return;
    }
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus;
    // The handler behind this one finds what it asked for.
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | (before.sa_flags & (SA_NODEFER | SA_RESTART));
    ours.sa_mask = before.sa_mask;
    sigaction(SIGBUS, &ours, nullptr);
}

} // namespace

guarded_range::guarded_range(const void * base, size_t size, int protection, repair how) : self(nullptr) {
    std::lock_guard<fork_lock> hold(changes());
    if (page_bytes.load() == 0) {
        page_bytes.store(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)));
        install();
    }
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
    n->order.store(++made, std::memory_order_release);
    n->protection.store(protection, std::memory_order_release);
    n->rest.store(how == repair::rest, std::memory_order_release);
    n->hit.store(false, std::memory_order_release);
    n->end.store(reinterpret_cast<uintptr_t>(base) + size, std::memory_order_release);
    n->version.fetch_add(1, std::memory_order_acq_rel);
    if (fresh) {
        ranges.store(n, std::memory_order_release);
    }
    self = n;
}

guarded_range::~guarded_range() {
    std::lock_guard<fork_lock> hold(changes());
    self->version.fetch_add(1, std::memory_order_acq_rel);
    self->begin.store(0, std::memory_order_release);
    self->end.store(0, std::memory_order_release);
    self->version.fetch_add(1, std::memory_order_acq_rel);
}

bool guarded_range::hit() const { return self->hit.load(std::memory_order_seq_cst); }

bool any_range_hit() { return any_hit.load(std::memory_order_seq_cst); }

bool can_shrink(int fd) {
    const int seals = fcntl(fd, F_GET_SEALS);
    return seals < 0 || (seals & F_SEAL_SHRINK) == 0;
}

} // namespace tb
