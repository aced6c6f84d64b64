// See control_functions.h, and control.h for what each does.
#include "control_functions.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "buffer.h"
#include "build_id.h"
#include "control.h"
#include "device.h"
#include "ggml_release.h"
#include "manifest.h"
#include "shared_state.h"
#include "trace.h"

namespace tb::plugin {

namespace {

template <size_t N> void set_text(char (&dst)[N], const std::string & text) {
    std::snprintf(dst, N, "%s", text.c_str());
}

int announce_file(const tilebeam_manifest * m) try {
    std::string why;
    const tb_status status = announce(m, why);
    if (status != TB_OK) state::get().fail(why);
    return status;
} catch (const std::exception & e) {
    state::get().fail(e.what());
    return TB_E_NOMEM;
}

int loaded(tilebeam_load * out) try {
    const manifest_ptr & m = announced();
    if (!out || !m) return TB_E_PROTOCOL;
    std::memset(out, 0, sizeof *out);
    out->announced_tensors = m->made->announced;
    out->tiled_tensors = m->made->tiled;
    out->bad_buffers = m->made->bad;
    set_text(out->reason, m->made->first_reason());
    return TB_OK;
} catch (const std::exception & e) {
    state::get().fail(e.what());
    return TB_E_NOMEM;
}

int get_options(tilebeam_options * o) {
    if (!o) return TB_E_PROTOCOL;
    *o = state::get().options();
    return TB_OK;
}

int configure(const tilebeam_options * o) try {
    if (!o) return TB_E_PROTOCOL;
    std::string why;
    const tb_status status = state::get().configure(*o, why);
    if (status != TB_OK) state::get().fail(why);
    return status;
} catch (const std::exception & e) {
    state::get().fail(e.what());
    return TB_E_NOMEM;
}

int32_t state_of(const session_ptr & session) {
    return !session ? TILEBEAM_SESSION_NONE : session->alive() ? TILEBEAM_SESSION_ALIVE : TILEBEAM_SESSION_DEAD;
}

int32_t executor_of(const session_ptr & session, const tilebeam_options & o) {
    if (!session) return o.executor;
    switch (session->opts().kind) {
    case tb::session::executor_kind::process:
        return TILEBEAM_EXECUTOR_PROCESS;
    case tb::session::executor_kind::hexagon:
        return TILEBEAM_EXECUTOR_HEXAGON;
    default:
        return TILEBEAM_EXECUTOR_THREAD;
    }
}

int status(tilebeam_status * out) try {
    if (!out) return TB_E_PROTOCOL;
    state & st = state::get();
    std::memset(out, 0, sizeof *out);
    out->numerics = st.numerics();
    set_text(out->ggml_version, built_version);
    set_text(out->ggml_commit, built_commit);
    out->buffers = st.count.buffers;
    out->buffer_bytes = st.count.buffer_bytes;
    out->mapped_bytes = st.count.mapped_bytes;
    out->bad_buffers = st.count.bad_buffers;
    out->tiled_tensors = st.count.tiled_tensors;
    out->graphs = st.count.graphs;
    out->ops = st.count.ops;
    out->lowered = st.count.lowered;
    out->failures = st.count.failures;
    out->errors = st.count.errors;
    out->compute_ns = st.count.compute_ns;
    set_text(out->last_error, st.last_error());
    set_text(out->build_id, tb::session::build_id_text);
    return TB_OK;
} catch (const std::exception & e) {
    state::get().fail(e.what());
    return TB_E_NOMEM;
}

int device_status(uint32_t index, tilebeam_device_status * out) try {
    if (!out || index >= TILEBEAM_MAX_DEVICES) return TB_E_PROTOCOL;
    state & st = state::get();
    const int device = static_cast<int>(index);
    const session_ptr session = st.current(device);
    std::memset(out, 0, sizeof *out);
    out->index = index;
    out->session = state_of(session);
    out->executor = executor_of(session, st.options());
    if (session) {
        out->n_threads = st.n_threads(device);
        out->npu_pid = session->npu_pid();
        set_text(out->isa, session->isa());
        out->memory_used = session->mapped();
    }
    set_text(out->name, device_name(device));
    set_text(out->description, device_description(device));
    out->memory_limit = st.limit_of(device);
    st.memory(device, &out->memory_free, &out->memory_total);
    out->sessions = st.started(device);
    return TB_OK;
} catch (const std::exception & e) {
    state::get().fail(e.what());
    return TB_E_NOMEM;
}

void * device_pointer(uint32_t index) {
    return index < TILEBEAM_MAX_DEVICES ? device(static_cast<int>(index)) : nullptr;
}

void trace_start(uint64_t most_records) { tb::session::trace::get().start(most_records); }

void trace_stop() { tb::session::trace::get().stop(); }

uint64_t trace_take(void * records, uint64_t most, uint64_t * lost, uint64_t * damaged) {
    tb::session::trace & t = tb::session::trace::get();
    t.losses(lost, damaged);
    return t.take(static_cast<tb_trace_record *>(records), most);
}

const char * last_error() {
    static thread_local std::string text;
    text = state::get().last_error();
    return text.c_str();
}

const char * take_error() {
    static thread_local std::string text;
    text = state::get().take_error();
    return text.c_str();
}

} // namespace

void * control_function(const char * name) {
    const struct {
        const char * name;
        void * function;
    } table[] = {
    // Through their own types, so that a change of control.h does not compile unnoticed.
#define TILEBEAM_CONTROL(name, function) {"tilebeam_" #name, reinterpret_cast<void *>(tilebeam_##name##_t{function})}
        TILEBEAM_CONTROL(announce, announce_file),  TILEBEAM_CONTROL(loaded, loaded),
        TILEBEAM_CONTROL(get_options, get_options), TILEBEAM_CONTROL(configure, configure),
        TILEBEAM_CONTROL(status, status),           TILEBEAM_CONTROL(device_status, device_status),
        TILEBEAM_CONTROL(device, device_pointer),   TILEBEAM_CONTROL(trace_start, trace_start),
        TILEBEAM_CONTROL(trace_stop, trace_stop),   TILEBEAM_CONTROL(trace_take, trace_take),
        TILEBEAM_CONTROL(last_error, last_error),   TILEBEAM_CONTROL(take_error, take_error),
#undef TILEBEAM_CONTROL
    };
    for (const auto & f : table)
        if (std::strcmp(f.name, name) == 0) return f.function;
    return nullptr;
}

} // namespace tb::plugin
