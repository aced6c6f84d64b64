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
    const session_ptr session = st.current(0);
    const tilebeam_options o = st.options();
    std::memset(out, 0, sizeof *out);
    out->version = TILEBEAM_CONTROL_VERSION;
    out->session = state_of(session);
    out->executor = executor_of(session, o);
    out->numerics = o.numerics;
    if (session) {
        out->n_threads = st.n_threads(0);
        out->npu_pid = session->npu_pid();
        set_text(out->isa, session->isa());
    }
    set_text(out->device, device_name(0));
    set_text(out->description, device_description(0));
    set_text(out->ggml_version, built_version);
    set_text(out->ggml_commit, built_commit);
    st.memory(0, &out->memory_free, &out->memory_total);
    out->buffers = st.count.buffers;
    out->buffer_bytes = st.count.buffer_bytes;
    out->mapped_bytes = st.count.mapped_bytes;
    out->bad_buffers = st.count.bad_buffers;
    out->tiled_tensors = st.count.tiled_tensors;
    out->sessions = st.count.sessions;
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
    out->version = TILEBEAM_CONTROL_VERSION;
    out->index = index;
    out->session = state_of(session);
    out->executor = executor_of(session, st.options());
    out->listed = device < st.n_devices() ? 1 : 0;
    if (session) {
        out->n_threads = st.n_threads(device);
        out->npu_pid = session->npu_pid();
        set_text(out->isa, session->isa());
        out->memory_used = mapped_in(session.get());
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
    // Assigned through their own types, so that a change of control.h does not compile unnoticed.
    static const tilebeam_announce_t announce_fn = announce_file;
    static const tilebeam_loaded_t loaded_fn = loaded;
    static const tilebeam_get_options_t get_options_fn = get_options;
    static const tilebeam_configure_t configure_fn = configure;
    static const tilebeam_status_t status_fn = status;
    static const tilebeam_device_status_t device_status_fn = device_status;
    static const tilebeam_device_t device_fn = device_pointer;
    static const tilebeam_trace_start_t trace_start_fn = trace_start;
    static const tilebeam_trace_stop_t trace_stop_fn = trace_stop;
    static const tilebeam_trace_take_t trace_take_fn = trace_take;
    static const tilebeam_last_error_t last_error_fn = last_error;
    static const tilebeam_take_error_t take_error_fn = take_error;
    const struct {
        const char * name;
        void * function;
    } table[] = {
        {"tilebeam_announce", reinterpret_cast<void *>(announce_fn)},
        {"tilebeam_loaded", reinterpret_cast<void *>(loaded_fn)},
        {"tilebeam_get_options", reinterpret_cast<void *>(get_options_fn)},
        {"tilebeam_configure", reinterpret_cast<void *>(configure_fn)},
        {"tilebeam_status", reinterpret_cast<void *>(status_fn)},
        {"tilebeam_device_status", reinterpret_cast<void *>(device_status_fn)},
        {"tilebeam_device", reinterpret_cast<void *>(device_fn)},
        {"tilebeam_trace_start", reinterpret_cast<void *>(trace_start_fn)},
        {"tilebeam_trace_stop", reinterpret_cast<void *>(trace_stop_fn)},
        {"tilebeam_trace_take", reinterpret_cast<void *>(trace_take_fn)},
        {"tilebeam_last_error", reinterpret_cast<void *>(last_error_fn)},
        {"tilebeam_take_error", reinterpret_cast<void *>(take_error_fn)},
    };
    for (const auto & f : table)
        if (std::strcmp(f.name, name) == 0) return f.function;
    return nullptr;
}

} // namespace tb::plugin
