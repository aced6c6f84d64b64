// See session_api.h.
#pragma GCC visibility push(default)
#include "session_api.h"
#pragma GCC visibility pop

#include <algorithm>
#include <cstring>
#include <exception>
#include <fcntl.h>
#include <memory>
#include <string>
#include <utility>

#include "build_id.h"
#include "channel.h"
#include "checksum.h"
#include "sandbox.h"
#include "service.h"
#include "session.h"
#include "trace.h"
#include "wait.h"

struct tb_session {
    std::unique_ptr<tb::session::session> session;
};

namespace {

int report(const tb::session::result & r, tb_session_result * out) {
    *out = tb_session_result{};
    out->status = r.status;
    out->op_index = r.op_index;
    std::memcpy(out->why, r.why.data(), std::min(r.why.size(), sizeof out->why - 1));
    return r.status;
}

// No exception may leave a C function.
template <class F> int guarded(tb_session_result * out, F && f) {
    tb::session::result r;
    try {
        r = f();
    } catch (const std::exception & e) {
        r.status = TB_E_NOMEM;
        r.why = e.what();
    }
    return report(r, out);
}

} // namespace

tb_session * tb_session_start(const tb_session_options * o, tb_session_result * result) {
    tb_session * started = nullptr;
    guarded(result, [&] {
        tb::session::options opt;
        using kind = tb::session::executor_kind;
        opt.kind = o->process == 0 ? kind::thread : o->process == 2 ? kind::hexagon : kind::process;
        opt.n_threads = o->n_threads;
        opt.deadline_ms = o->deadline_ms > 0 ? o->deadline_ms : opt.deadline_ms;
        opt.spin_us = o->spin_us != 0 ? std::max(o->spin_us, 0) : opt.spin_us;
        opt.memory_limit = o->memory_limit;
        opt.npud_path = o->npud_path ? o->npud_path : "";
        opt.isa = o->isa ? o->isa : "";
        tb::session::result r;
        auto s = tb::session::session::start(opt, r.why);
        if (s) {
            started = new tb_session{std::move(s)};
        } else {
            r.status = TB_E_DEAD;
        }
        return r;
    });
    return started;
}

void tb_session_stop(tb_session * session) { delete session; }

int tb_session_map(tb_session * s, int fd, uint64_t offset, uint64_t size, int writable, uint32_t * id,
                   tb_session_result * result) {
    return guarded(result, [&] { return s->session->map(fd, offset, size, writable != 0, id); });
}

int tb_session_unmap(tb_session * s, uint32_t id, tb_session_result * result) {
    return guarded(result, [&] { return s->session->unmap(id); });
}

int tb_session_compute(tb_session * s, const tb_op * ops, uint32_t n_ops, uint64_t serial, tb_session_result * result) {
    return guarded(result, [&] { return s->session->compute(ops, n_ops, serial); });
}

int tb_session_noop(tb_session * s, tb_session_result * result) {
    return guarded(result, [&] { return s->session->noop(); });
}

int tb_session_set_threads(tb_session * s, int n_threads, tb_session_result * result) {
    return guarded(result, [&] { return s->session->set_threads(n_threads); });
}

int tb_session_time_noop(tb_session * s, uint32_t n, int64_t * ns, tb_session_result * result) {
    return guarded(result, [&] {
        tb::session::result r;
        for (uint32_t i = 0; i < n && r.ok(); ++i) {
            const int64_t start = tb::now_ns();
            r = s->session->noop();
            ns[i] = tb::now_ns() - start;
        }
        return r;
    });
}

int tb_session_alive(tb_session * s) { return s->session->alive(); }

int tb_session_pid(tb_session * s) { return s->session->npu_pid(); }

int tb_session_n_threads(tb_session * s) { return s->session->n_threads(); }

const char * tb_session_isa(tb_session * s) { return s->session->isa(); }

uint32_t tb_session_guards(tb_session * s) { return s->session->guards(); }

void tb_session_count(tb_session * s, tb_session_counters * counters) {
    const tb::session::session_counters c = s->session->counters();
    *counters = {c.requests, c.patched, c.spun, c.slept, c.schedules};
}

const char * tb_session_build_id(void) { return tb::session::build_id_text; }

uint32_t tb_session_enter_sandbox(void) { return tb::session::enter_sandbox(); }

tb_channel * tb_session_channel(tb_session * s) {
    return static_cast<tb_channel *>(s->session->control_region().data());
}

uint64_t tb_session_channel_size(tb_session * s) { return s->session->control_region().size(); }

void tb_trace_start(uint64_t most_records) { tb::session::trace::get().start(most_records); }

void tb_trace_stop(void) { tb::session::trace::get().stop(); }

uint64_t tb_trace_take(tb_trace_record * records, uint64_t most, uint64_t * lost, uint64_t * damaged) {
    tb::session::trace & t = tb::session::trace::get();
    t.losses(lost, damaged);
    return t.take(records, most);
}

tb_trace_ring * tb_session_trace_ring(tb_session * s) {
    tb::session::shared_memory * memory = s->session->trace_ring();
    return memory ? static_cast<tb_trace_ring *>(memory->data()) : nullptr;
}

int tb_service_serve(int region_fd, int socket_fd) {
    return tb::session::serve(fcntl(region_fd, F_DUPFD_CLOEXEC, 0), fcntl(socket_fd, F_DUPFD_CLOEXEC, 0));
}

void tb_service_hello(tb_cpu_hello * hello, uint64_t region_size) {
    *hello = tb::session::make_cpu_hello(region_size);
    hello->check = tb::session::hello_check(*hello);
}

uint64_t tb_service_hello_check(const tb_cpu_hello * hello) { return tb::session::hello_check(*hello); }

uint64_t tb_service_check(uint32_t seq, const tb_request * request, const void * payload) {
    return tb::session::request_check(seq, *request, payload);
}

void tb_service_wake(uint32_t * word) { tb::futex_wake(word, tb::futex_scope::shared); }
