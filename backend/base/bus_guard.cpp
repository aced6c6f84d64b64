// See bus_guard.h. The handler takes no lock and allocates nothing: ranges lie in a list that only grows, their nodes
// are used again, and a node's version tells a reader that it changed meanwhile.
//
// llama.cpp gives the parts of a mapping back that it does not need, and a later mapping may take their place, inside a
// range that is still guarded. A missing page is that of the latest range around it.
//
// A SIGBUS that is not ours goes to the handler that was there before, each time, and nothing is remembered of it: that
// handler need not come back (siglongjmp). Programs put handlers in front of ours, and we go in front of theirs again;
// so that "the one before" stays well defined, each of our places in that row is a function of its own.
#include "bus_guard.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <fcntl.h>
#include <mutex>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <utility>

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
std::atomic<int> in_use{0}; // ranges
uint64_t made = 0;          // ranges so far; under `changes`

// Our places in the row of handlers, oldest first; written under `changes`.
struct place {
    std::atomic<const struct sigaction *> before{nullptr}; // the handler there before; nullptr: not taken
    std::atomic<bool> spent{false};                        // a handler for one signal only, which it has had
};
constexpr size_t most_places = 8; // then the last one is used again
place places[most_places];

// Nodes are taken and given back, and handlers changed, by one thread at a time. Never destroyed: buffers may be freed
// by the destructors of static objects.
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

void die_of(int signal) {
    struct sigaction standard = {};
    standard.sa_handler = SIG_DFL;
    sigaction(signal, &standard, nullptr);
}

// A place that a signal has come through, on the stack of its handler. A handler behind us may call the one before it,
// which may be us again: a signal's list is in its context, in the link that the kernel clears and never reads.
struct visit {
    const place * at;
    visit * earlier;
};

bool was_at(const place & p, const visit * v) {
    while (v && v->at != &p) {
        v = v->earlier;
    }
    return v != nullptr;
}

// What is to be done with a signal that is not ours at this place. False: what the system does.
bool pass_on(place & p, int signal, siginfo_t * info, ucontext_t * context) {
    const struct sigaction & before = *p.before.load(std::memory_order_acquire);
    const bool takes_info = (before.sa_flags & SA_SIGINFO) != 0;
    if (!takes_info && before.sa_handler == SIG_IGN) {
        return info->si_code <= 0; // a fault cannot be ignored
    }
    if ((!takes_info && before.sa_handler == SIG_DFL) ||
        ((before.sa_flags & static_cast<int>(SA_RESETHAND)) != 0 && p.spent.exchange(true))) {
        return false;
    }
    visit here{&p, reinterpret_cast<visit *>(context->uc_link)};
    context->uc_link = reinterpret_cast<ucontext_t *>(&here);
    if (takes_info) {
        before.sa_sigaction(signal, info, context);
    } else {
        before.sa_handler(signal);
    }
    context->uc_link = reinterpret_cast<ucontext_t *>(here.earlier);
    return true;
}

void on_bus(size_t at, int signal, siginfo_t * info, void * from) {
    const int error = errno;
    const bool fault = info->si_code > 0; // else sent by somebody with kill()
    if (!fault || !repaired(reinterpret_cast<uintptr_t>(info->si_addr))) {
        auto * context = static_cast<ucontext_t *>(from);
        while (at < most_places && was_at(places[at], reinterpret_cast<const visit *>(context->uc_link))) {
            --at; // below the first: there is none left
        }
        if (at >= most_places || !pass_on(places[at], signal, info, context)) {
            die_of(signal);
            if (!fault) {
                raise(signal);
            }
            // a fault happens again
        }
    }
    errno = error;
}

using handler = void (*)(int, siginfo_t *, void *);

template <size_t at> void on_bus_at(int signal, siginfo_t * info, void * context) { on_bus(at, signal, info, context); }

template <size_t... at> constexpr std::array<handler, sizeof...(at)> make_handlers(std::index_sequence<at...>) {
    return {on_bus_at<at>...};
}

constexpr std::array<handler, most_places> handlers = make_handlers(std::make_index_sequence<most_places>());

bool is_same(const struct sigaction & a, const struct sigaction & b) {
    return a.sa_sigaction == b.sa_sigaction && a.sa_flags == b.sa_flags;
}

// The place behind which this handler already is, else a free one.
size_t place_before(const struct sigaction & now) {
    size_t at = 0;
    for (; at + 1 < most_places; ++at) {
        const struct sigaction * before = places[at].before.load();
        if (!before || is_same(*before, now)) {
            break;
        }
    }
    const struct sigaction * before = places[at].before.load();
    if (!before || !is_same(*before, now)) {
        places[at].before.store(new struct sigaction(now), std::memory_order_release); // a handler may read the old one
    }
    return at;
}

void put_in_front() {
    struct sigaction now = {};
    if (sigaction(SIGBUS, nullptr, &now) != 0 ||
        ((now.sa_flags & SA_SIGINFO) &&
         std::find(handlers.begin(), handlers.end(), now.sa_sigaction) != handlers.end())) {
        return;
    }
    const size_t at = place_before(now);
    places[at].spent.store(false);
    struct sigaction ours = {};
    ours.sa_sigaction = handlers[at];
    // The handler behind this one finds what it asked for.
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | (now.sa_flags & (SA_NODEFER | SA_RESTART));
    ours.sa_mask = now.sa_mask;
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
