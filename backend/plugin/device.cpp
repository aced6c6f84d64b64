// Device and buffer types. See device.h; what a device owes llama.cpp is in docs/architecture.md.
#include "device.h"

#include <cstring>
#include <exception>

#include "buffer.h"
#include "executor.h"
#include "lower.h"
#include "tilebeam/layout.h"

namespace tb::plugin {

namespace {

// Kernels want 64-byte vectors, the HMX 128.
constexpr size_t alignment = 128;

ggml_backend_device the_device;

const char * plain_name(ggml_backend_buffer_type_t) { return device_name; }
const char * tiled_name(ggml_backend_buffer_type_t) { return "HMX0_TILED"; }
ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    return buffer::allocate(buft, size);
}
size_t get_alignment(ggml_backend_buffer_type_t) { return alignment; }
bool is_host(ggml_backend_buffer_type_t) { return false; }

size_t tiled_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * t) {
    const uint32_t type = tb_tiled_column(type_of(t->type));
    const size_t matrix = t->view_src || type == TB_TYPE_COUNT
                              ? 0
                              : tb_tiled_bytes(type, static_cast<uint64_t>(t->ne[0]), static_cast<uint64_t>(t->ne[1]));
    return matrix ? matrix * static_cast<size_t>(t->ne[2] * t->ne[3]) : ggml_nbytes(t);
}

ggml_backend_buffer_type plain_type = {
    {plain_name, alloc_buffer, get_alignment, nullptr, nullptr, is_host}, &the_device, nullptr};
ggml_backend_buffer_type tiled_type = {
    {tiled_name, alloc_buffer, get_alignment, nullptr, tiled_alloc_size, is_host}, &the_device, nullptr};

const char * get_name(ggml_backend_dev_t) { return device_name; }

// The text may change with the options, but ggml's callers keep the pointer: one string per thread.
const char * get_description(ggml_backend_dev_t) {
    static thread_local std::string text;
    text = device_description();
    return text.c_str();
}

void get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    uint64_t f = 0, t = 0;
    state::get().memory(&f, &t);
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
    props->caps.mmap_support = true;
}

ggml_backend_t init_backend(ggml_backend_dev_t dev, const char *) { return new_backend(dev); }
ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t) { return plain_buft(); }

ggml_backend_buffer_t buffer_from_host_ptr(ggml_backend_dev_t, void * ptr, size_t size, size_t) {
    return buffer::map_file(plain_buft(), ptr, size);
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) { return can_run(op); }

bool supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
    return buft == plain_buft() || buft == tiled_buft();
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

ggml_backend_buffer_type_t plain_buft() { return &plain_type; }
ggml_backend_buffer_type_t tiled_buft() { return &tiled_type; }

ggml_backend_dev_t device(ggml_backend_reg_t reg) {
    the_device.iface = callbacks;
    the_device.reg = reg;
    return &the_device;
}

ggml_backend_buffer_type_t * extra_bufts(ggml_backend_dev_t) {
    static ggml_backend_buffer_type_t list[] = {tiled_buft(), nullptr};
    return list;
}

std::string device_description() {
    state & st = state::get();
    const tilebeam_options o = st.options();
    const session_ptr session = st.current();
    const auto isas = tb::npu::kernel_isas();
    std::string text = "Tilebeam NPU (";
    text += o.executor == TILEBEAM_EXECUTOR_PROCESS ? "process, " : "thread, ";
    text += session ? session->isa() : o.isa[0] ? o.isa : isas.empty() ? "no kernels" : isas.front();
    const int threads = session ? st.n_threads() : o.n_threads;
    if (threads > 0) text += ", " + std::to_string(threads) + (threads == 1 ? " thread" : " threads");
    return text + ")";
}

} // namespace tb::plugin
