// Device and buffer types. See device.h; what a device owes llama.cpp is in docs/architecture.md.
#include "device.h"

#include <array>
#include <cstdio>
#include <cstring>
#include <exception>

#include "backend.h"
#include "buffer.h"
#include "buffer_type.h"
#include "configuration.h"
#include "control.h"
#include "ggml_release.h"
#include "lower.h"
#include "shared_state.h"
#include "tilebeam/layout.h"
#include "types.h"

namespace tb::plugin {

namespace {

// Kernels want 64-byte vectors, the HMX 128.
constexpr size_t alignment = 128;

// Everything that ggml holds pointers to, of one device. `context` of device and buffer types points back here.
struct entry : device_identity {
    ggml_backend_device device{};
    ggml_backend_buffer_type plain{};
    ggml_backend_buffer_type tiled{};
    ggml_backend_buffer_type_t extra[2] = {};
};

std::array<entry, TILEBEAM_MAX_DEVICES> & entries() {
    static auto * const all = new std::array<entry, TILEBEAM_MAX_DEVICES>; // never destroyed: see state::get()
    return *all;
}

entry & of(ggml_backend_dev_t dev) { return static_cast<entry &>(*static_cast<device_identity *>(dev->context)); }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    return buffer::allocate(buft, size);
}
size_t get_alignment(ggml_backend_buffer_type_t) { return alignment; }
bool is_host(ggml_backend_buffer_type_t) { return false; }

size_t tiled_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * t) {
    if (t->view_src) return ggml_nbytes(t);
    const uint64_t bytes = stored_bytes(t, tb_tiled_column(type_of(t->type)));
    return bytes != 0 ? bytes : ggml_nbytes(t);
}

const char * get_name(ggml_backend_dev_t dev) { return of(dev).name; }

// The text may change with the options, but ggml's callers keep the pointer: one string per thread and device.
const char * get_description(ggml_backend_dev_t dev) {
    static thread_local std::array<std::string, TILEBEAM_MAX_DEVICES> text;
    std::string & mine = text[static_cast<size_t>(of(dev).index)];
    mine = device_description(of(dev).index);
    return mine.c_str();
}

void get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    uint64_t f = 0, t = 0;
    state::get().memory(of(dev).index, &f, &t);
    *free = f;
    *total = t;
}

enum ggml_backend_dev_type get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    std::memset(props, 0, sizeof *props);
    props->name = get_name(dev);
    props->description = get_description(dev);
    props->type = get_type(dev);
    get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps.async = false;
    props->caps.host_buffer = false;
    props->caps.buffer_from_host_ptr = true;
    props->caps.events = false;
    set_mmap_support(props->caps);
}

ggml_backend_t init_backend(ggml_backend_dev_t dev, const char *) { return new_backend(dev, of(dev).index); }
ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t dev) { return &of(dev).plain; }

ggml_backend_buffer_t buffer_from_host_ptr(ggml_backend_dev_t dev, void * ptr, size_t size, size_t) {
    return buffer::map_file(&of(dev).plain, ptr, size);
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) { return can_run(op); }

// Another device's memory is not mapped in this device's session: ggml copies what crosses over.
bool supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return buft == &of(dev).plain || buft == &of(dev).tiled;
}

// Weights in host memory stay with the CPU: copying them over costs what computing with them does.
bool offload_op(ggml_backend_dev_t, const ggml_tensor *) { return false; }

const ggml_backend_device_i callbacks = {
    get_name,
    get_description,
    get_memory,
    get_type,
    get_props,
    init_backend,
    get_buffer_type,
    nullptr, // host buffer type
    buffer_from_host_ptr,
    supports_op,
    supports_buft,
    offload_op,
    nullptr,
    nullptr,
    nullptr, // events
};

} // namespace

void adopt_devices(ggml_backend_reg_t reg) {
    int index = 0;
    for (entry & e : entries()) {
        device_identity * const context = &e;
        e.index = index;
        std::snprintf(e.name, sizeof e.name, "%s", device_name(index).c_str());
        std::snprintf(e.tiled_name, sizeof e.tiled_name, "%s_TILED", e.name);
        e.device = {callbacks, reg, context};
        e.plain = {{plain_name, alloc_buffer, get_alignment, nullptr, nullptr, is_host}, &e.device, context};
        e.tiled = {{tiled_name, alloc_buffer, get_alignment, nullptr, tiled_alloc_size, is_host}, &e.device, context};
        e.extra[0] = &e.tiled;
        ++index;
    }
}

ggml_backend_dev_t device(int index) { return &entries()[static_cast<size_t>(index)].device; }

ggml_backend_buffer_type_t * extra_bufts(ggml_backend_dev_t dev) { return of(dev).extra; }

std::string device_description(int index) {
    state & st = state::get();
    const tilebeam_options o = st.options();
    const session_ptr session = st.current(index);
    const std::vector<std::string> isas = kernel_sets(o.executor);
    std::string text = "Tilebeam NPU (";
    text += o.executor == TILEBEAM_EXECUTOR_HEXAGON   ? "qemu-hexagon, "
            : o.executor == TILEBEAM_EXECUTOR_PROCESS ? "process, "
                                                      : "thread, ";
    text += session ? session->isa() : o.isa[0] ? o.isa : isas.front().c_str();
    const int threads = session ? st.n_threads(index) : o.n_threads;
    if (threads > 0) text += ", " + std::to_string(threads) + (threads == 1 ? " thread" : " threads");
    if (const uint64_t limit = st.limit_of(index); limit != 0) text += ", " + std::to_string(limit >> 20) + " MiB";
    return text + ")";
}

} // namespace tb::plugin
