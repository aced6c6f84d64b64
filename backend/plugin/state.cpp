// Options, sessions, errors and counters of the plugin. See state.h.
#include "state.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "executor.h"
#include "ggml-impl.h"
#include "usable_memory.h"
#include "window.h"

namespace tb::plugin {

namespace {

constexpr int max_threads = 512;

void copy_string(char * dst, size_t cap, const char * src) { std::snprintf(dst, cap, "%s", src); }

// "2GiB,4GiB": bytes, or with K, M, G (powers of 1024; iB or B may follow); the last one counts for all further
// devices.
bool read_limits(const char * text, uint64_t (&limits)[TILEBEAM_MAX_DEVICES]) {
    uint64_t read[TILEBEAM_MAX_DEVICES] = {};
    size_t n = 0;
    for (const char * p = text; n < TILEBEAM_MAX_DEVICES; ++p) {
        if (!std::isdigit(static_cast<unsigned char>(*p))) return false;
        char * end = nullptr;
        errno = 0;
        const unsigned long long number = std::strtoull(p, &end, 10);
        const char * const units = "KMG";
        const char * unit = *end ? std::strchr(units, std::toupper(static_cast<unsigned char>(*end))) : nullptr;
        const int shift = unit ? 10 * static_cast<int>(unit - units + 1) : 0;
        if (errno != 0 || number > UINT64_MAX >> shift) return false;
        read[n++] = uint64_t{number} << shift;
        p = end;
        if (unit) ++p;
        if (unit && (*p == 'i' || *p == 'I')) ++p;
        if (*p == 'B' || *p == 'b') ++p;
        if (*p == '\0') {
            for (size_t i = 0; i < TILEBEAM_MAX_DEVICES; ++i)
                limits[i] = read[std::min(i, n - 1)];
            return true;
        }
        if (*p != ',') return false;
    }
    return false;
}

bool known_numerics(int32_t numerics, std::string & why) {
    constexpr int32_t both = TILEBEAM_NUMERICS_EXACT_EXP | TILEBEAM_NUMERICS_BF16,
                      alike = TILEBEAM_NUMERICS_DETERMINISTIC;
    const int32_t n = numerics & ~(both | alike), added = numerics & both;
    if (added == both ||
        (n != TILEBEAM_NUMERICS_INT8 && n != TILEBEAM_NUMERICS_INT8_256 && n != TILEBEAM_NUMERICS_FP16)) {
        why = "numerics must be int8, int8-256 or fp16, with exact exponentials, attention in BF16 or neither";
    } else if ((numerics & alike) != 0 && (n != TILEBEAM_NUMERICS_INT8 || added == TILEBEAM_NUMERICS_BF16)) {
        why = "deterministic results are those of numerics int8, and of attention without BF16";
    }
    return why.empty();
}

// Environment variables give the first options; a value that makes no sense is reported and left out.
void read_environment(tilebeam_options & opt) {
    if (const char * v = std::getenv("TILEBEAM_NPU"); v && *v) {
        if (std::strcmp(v, "process") == 0) {
            opt.executor = TILEBEAM_EXECUTOR_PROCESS;
        } else if (std::strcmp(v, "qemu-hexagon") == 0) {
            opt.executor = TILEBEAM_EXECUTOR_HEXAGON;
        } else if (std::strcmp(v, "thread") != 0) {
            GGML_LOG_WARN("tilebeam: TILEBEAM_NPU=%s is not thread, process or qemu-hexagon: using thread\n", v);
        }
    }
    if (const char * v = std::getenv("TILEBEAM_THREADS"); v && *v) {
        char * end = nullptr;
        const long n = std::strtol(v, &end, 10);
        if (*end == '\0' && n >= 1 && n <= max_threads) {
            opt.n_threads = static_cast<int32_t>(n);
        } else {
            GGML_LOG_WARN("tilebeam: TILEBEAM_THREADS=%s is not a number from 1 to %d: ignored\n", v, max_threads);
        }
    }
    if (const char * v = std::getenv("TILEBEAM_ISA"); v && *v) copy_string(opt.isa, sizeof opt.isa, v);
    if (const char * v = std::getenv("TILEBEAM_NUMERICS"); v && *v) {
        if (std::strcmp(v, "fp16") == 0) {
            opt.numerics = TILEBEAM_NUMERICS_FP16;
        } else if (std::strcmp(v, "int8-256") == 0) {
            opt.numerics = TILEBEAM_NUMERICS_INT8_256;
        } else if (std::strcmp(v, "int8") != 0) {
            GGML_LOG_WARN("tilebeam: TILEBEAM_NUMERICS=%s is not int8, int8-256 or fp16: using int8\n", v);
        }
    }
    if (const char * v = std::getenv("TILEBEAM_SOFTMAX"); v && *v) {
        if (std::strcmp(v, "exact") == 0) {
            opt.numerics |= TILEBEAM_NUMERICS_EXACT_EXP;
        } else if (std::strcmp(v, "bf16") == 0) {
            opt.numerics |= TILEBEAM_NUMERICS_BF16;
        } else if (std::strcmp(v, "table") != 0) {
            GGML_LOG_WARN("tilebeam: TILEBEAM_SOFTMAX=%s is not table, exact or bf16: using table\n", v);
        }
    }
    if (const char * v = std::getenv("TILEBEAM_DETERMINISTIC"); v && *v && std::strcmp(v, "0") != 0) {
        std::string why;
        if (std::strcmp(v, "1") != 0) {
            GGML_LOG_WARN("tilebeam: TILEBEAM_DETERMINISTIC=%s is not 0 or 1: ignored\n", v);
        } else if (!known_numerics(opt.numerics | TILEBEAM_NUMERICS_DETERMINISTIC, why)) {
            GGML_LOG_WARN("tilebeam: TILEBEAM_DETERMINISTIC is ignored: %s\n", why.c_str());
        } else {
            opt.numerics |= TILEBEAM_NUMERICS_DETERMINISTIC;
        }
    }
    if (const char * v = std::getenv("TILEBEAM_MEMORY_LIMIT"); v && *v && !read_limits(v, opt.memory_limit)) {
        GGML_LOG_WARN("tilebeam: TILEBEAM_MEMORY_LIMIT=%s is not a size such as 2GiB, nor a list of them: ignored\n",
                      v);
    }
}

int read_device_count() {
    const char * v = std::getenv("TILEBEAM_DEVICES");
    if (!v || !*v) return 1;
    char * end = nullptr;
    const long n = std::strtol(v, &end, 10);
    if (*end == '\0' && n >= 1 && n <= TILEBEAM_MAX_DEVICES) return static_cast<int>(n);
    GGML_LOG_WARN("tilebeam: TILEBEAM_DEVICES=%s is not a number from 1 to %d: using 1\n", v, TILEBEAM_MAX_DEVICES);
    return 1;
}

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

template <size_t N> bool terminated(const char (&text)[N]) { return std::memchr(text, 0, N) != nullptr; }

} // namespace

std::vector<std::string> kernel_sets(int32_t executor) {
    if (executor == TILEBEAM_EXECUTOR_HEXAGON) return {"hvx", "portable"};
    const std::vector<const char *> names = tb::npu::kernel_isas();
    return {names.begin(), names.end()};
}

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
    opt.version = TILEBEAM_CONTROL_VERSION;
    read_environment(opt);
    opt.deadline_ms = tb::session::default_deadline_ms(kind_of(opt.executor));
    listed = read_device_count();
    opt.n_devices = static_cast<uint32_t>(listed);
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
    count.sessions++;
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
    if (o.version != TILEBEAM_CONTROL_VERSION) {
        why = "options of version " + std::to_string(o.version) + ", the plugin has version " +
              std::to_string(TILEBEAM_CONTROL_VERSION);
        return TB_E_VERSION;
    }
    if (o.executor < TILEBEAM_EXECUTOR_THREAD || o.executor > TILEBEAM_EXECUTOR_HEXAGON) {
        why = "executor must be thread, process or hexagon";
    } else if (!known_numerics(o.numerics, why)) {
        return TB_E_UNSUPPORTED;
    } else if (o.n_threads < 0 || o.n_threads > max_threads) {
        why = "n_threads must be between 0 and " + std::to_string(max_threads);
    } else if (o.deadline_ms <= 0) {
        why = "deadline_ms must be positive";
    } else if (!terminated(o.isa) || !terminated(o.npud_path)) {
        why = "isa and npud_path must end with NUL";
    } else if (o.isa[0]) {
        const std::vector<std::string> isas = kernel_sets(o.executor);
        if (std::find(isas.begin(), isas.end(), o.isa) == isas.end()) {
            why = std::string("no kernel set '") + o.isa + "' ";
            why += o.executor == TILEBEAM_EXECUTOR_HEXAGON ? "for Hexagon; there are:" : "on this CPU; there are:";
            for (const std::string & name : isas)
                why += " " + name;
        }
    }
    if (!why.empty()) return TB_E_UNSUPPORTED;

    std::vector<session_ptr> changed;
    int threads = 0;
    {
        std::lock_guard<fork_lock> hold(lock);
        const int32_t before = opt.executor;
        opt = o;
        if (o.executor != before && o.deadline_ms == tb::session::default_deadline_ms(kind_of(before))) {
            opt.deadline_ms = tb::session::default_deadline_ms(kind_of(o.executor));
        }
        opt.n_devices = static_cast<uint32_t>(listed);
        numerics_in_force = opt.numerics;
        threads = wanted_threads();
        changed = take_threads();
    }
    for (const session_ptr & session : changed) {
        if (!session->alive()) continue;
        const tb::session::result r = session->set_threads(threads);
        if (!r.ok()) {
            why = r.why;
            return r.status;
        }
    }
    return TB_OK;
}

std::vector<session_ptr> state::take_threads() {
    std::vector<session_ptr> changed;
    const int threads = wanted_threads();
    for (slot & s : slots) {
        if (threads <= 0 || threads == s.threads) continue;
        session_ptr session = s.running.lock();
        if (!session) continue;
        s.threads = threads;
        changed.push_back(std::move(session));
    }
    return changed;
}

void state::ask_threads(int n) {
    if (n < 1) return;
    std::vector<session_ptr> changed;
    int threads = 0;
    {
        std::lock_guard<fork_lock> hold(lock);
        asked_threads = std::min(n, max_threads);
        threads = wanted_threads();
        changed = take_threads();
    }
    for (const session_ptr & session : changed) {
        if (!session->alive()) continue;
        const tb::session::result r = session->set_threads(threads);
        if (!r.ok()) fail(r.why);
    }
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
        const uint64_t used = session ? mapped_in(session.get()) : 0;
        *total = std::min(usable.total, limit);
        *free = std::min({usable.available, *total, limit > used ? limit - used : 0});
        return;
    }
    *total = usable.total;
    *free = usable.available;
}

} // namespace tb::plugin
