// See shared_state.h.
#include "shared_state.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>

#include "configuration.h"
#include "ggml-impl.h"
#include "usable_memory.h"

namespace tb::plugin {

namespace {

tb::session::executor_kind kind_of(int32_t executor) {
    switch (executor) {
    case TILEBEAM_EXECUTOR_PROCESS:
        return tb::session::executor_kind::process;
    case TILEBEAM_EXECUTOR_HEXAGON:
        return tb::session::executor_kind::hexagon;
    default:
        return tb::session::executor_kind::thread;
    }
}

} // namespace

std::string plugin_directory() {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void *>(&plugin_directory), &info) || !info.dli_fname) return ".";
    const std::string path = info.dli_fname;
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash);
}

state & state::get() {
    static state * const instance = new state; // see the class: outlives static destruction on purpose
    return *instance;
}

state::state() {
    opt = options_of_environment();
    opt.deadline_ms = tb::session::default_deadline_ms(kind_of(opt.executor));
    numerics_in_force = opt.numerics;
}

int state::wanted_threads() const { return opt.n_threads > 0 ? opt.n_threads : asked_threads; }

tb::session::options state::session_options(int device) const {
    tb::session::options o;
    o.kind = kind_of(opt.executor);
    o.n_threads = wanted_threads();
    o.deadline_ms = opt.deadline_ms;
    o.memory_limit = tb::session::address_limit(o.kind, opt.memory_limit[device]);
    const bool hexagon = o.kind == tb::session::executor_kind::hexagon;
    o.npud_path =
        opt.npud_path[0] ? opt.npud_path : plugin_directory() + (hexagon ? "/tilebeam-npud-hexagon" : "/tilebeam-npud");
    o.isa = opt.isa;
    return o;
}

session_ptr state::acquire(int device) {
    std::lock_guard<fork_lock> one(starting);
    session_ptr session = current(device);
    if (session && session->alive() && !session->starved()) return session;
    tb::session::options o;
    {
        std::lock_guard<fork_lock> hold(lock);
        o = session_options(device);
    }
    std::string why;
    session = tb::session::session::start(o, why);
    if (!session) {
        fail("the NPU did not start: " + why);
        return nullptr;
    }
    std::lock_guard<fork_lock> hold(lock);
    slot & s = slots[static_cast<size_t>(device)];
    s.running = session;
    s.threads = o.n_threads > 0 ? o.n_threads : session->n_threads();
    s.started++;
    return session;
}

session_ptr state::current(int device) {
    std::lock_guard<fork_lock> hold(lock);
    return slots[static_cast<size_t>(device)].running.lock();
}

uint64_t state::started(int device) {
    std::lock_guard<fork_lock> hold(lock);
    return slots[static_cast<size_t>(device)].started;
}

uint64_t state::limit_of(int device) {
    if (const session_ptr session = current(device); session && session->alive()) return session->opts().memory_limit;
    std::lock_guard<fork_lock> hold(lock);
    return session_options(device).memory_limit;
}

tilebeam_options state::options() {
    std::lock_guard<fork_lock> hold(lock);
    return opt;
}

tb_status state::configure(const tilebeam_options & o, std::string & why) {
    if (const tb_status status = check_options(o, why); status != TB_OK) return status;
    {
        std::lock_guard<fork_lock> hold(lock);
        const int32_t before = opt.executor;
        opt = o;
        if (o.executor != before && o.deadline_ms == tb::session::default_deadline_ms(kind_of(before))) {
            opt.deadline_ms = tb::session::default_deadline_ms(kind_of(o.executor));
        }
        numerics_in_force = opt.numerics;
    }
    const tb::session::result r = give_threads();
    if (!r.ok()) why = r.why;
    return r.status;
}

tb::session::result state::give_threads() {
    std::vector<session_ptr> held, changed; // held: none ends, which takes its time, under the lock
    int threads = 0;
    {
        std::lock_guard<fork_lock> hold(lock);
        threads = wanted_threads();
        for (slot & s : slots) {
            const session_ptr & session = held.emplace_back(s.running.lock());
            if (!session || threads <= 0 || threads == s.threads) continue;
            s.threads = threads;
            changed.push_back(session);
        }
    }
    for (const session_ptr & session : changed) {
        if (!session->alive()) continue;
        if (tb::session::result r = session->set_threads(threads); !r.ok()) return r;
    }
    return {};
}

void state::ask_threads(int n) {
    if (n < 1) return;
    {
        std::lock_guard<fork_lock> hold(lock);
        asked_threads = std::min(n, most_threads);
    }
    if (const tb::session::result r = give_threads(); !r.ok()) fail(r.why);
}

int state::n_threads(int device) {
    std::lock_guard<fork_lock> hold(lock);
    const slot & s = slots[static_cast<size_t>(device)];
    return s.running.expired() ? 0 : s.threads;
}

namespace {

// The failure that a thread met last. Another thread's model may fail at the same time of something else.
struct thread_error {
    std::string text;
    bool is_news = false;
};

thread_error & own_error() {
    static thread_local thread_error own;
    return own;
}

} // namespace

void state::fail(const std::string & why) {
    own_error() = {why, true};
    count.errors++;
    {
        std::lock_guard<fork_lock> hold(error_lock);
        if (error == why) return;
        error = why;
    }
    GGML_LOG_ERROR("tilebeam: %s\n", why.c_str());
}

std::string state::last_error() {
    if (!own_error().text.empty()) return own_error().text;
    std::lock_guard<fork_lock> hold(error_lock);
    return error;
}

std::string state::take_error() {
    thread_error & own = own_error();
    const bool is_news = own.is_news;
    own.is_news = false;
    return is_news ? own.text : "";
}

void state::memory(int device, uint64_t * free, uint64_t * total) {
    const memory_size usable = usable_memory();
    if (const uint64_t limit = limit_of(device); limit != 0) {
        const session_ptr session = current(device);
        const uint64_t used = session ? session->mapped() : 0;
        *total = std::min(usable.total, limit);
        *free = std::min({usable.available, *total, limit > used ? limit - used : 0});
        return;
    }
    *total = usable.total;
    *free = usable.available;
}

} // namespace tb::plugin
