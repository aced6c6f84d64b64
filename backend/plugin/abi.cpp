// See abi.h. Each check asks ggml something that the plugin can also read by itself, through its headers.
#include "abi.h"

#include <cstring>
#include <memory>

#include "ggml.h"

namespace tb::plugin {

namespace {

bool same(const char * a, const char * b) { return a && b && std::strcmp(a, b) == 0; }

const char * enum_difference() {
    const struct {
        ggml_op op;
        const char * name;
    } ops[] = {{GGML_OP_MUL_MAT, "MUL_MAT"},
               {GGML_OP_ROPE, "ROPE"},
               {GGML_OP_FLASH_ATTN_EXT, "FLASH_ATTN_EXT"},
               {GGML_OP_GATED_DELTA_NET, "GATED_DELTA_NET"},
               {GGML_OP_GLU, "GLU"}};
    for (const auto & [op, name] : ops)
        if (!same(ggml_op_name(op), name)) return "enum ggml_op";
    if (!ggml_op_name(static_cast<ggml_op>(GGML_OP_COUNT - 1))) return "enum ggml_op";
    const struct {
        ggml_type type;
        const char * name;
    } types[] = {
        {GGML_TYPE_Q4_0, "q4_0"}, {GGML_TYPE_Q6_K, "q6_K"}, {GGML_TYPE_BF16, "bf16"}, {GGML_TYPE_MXFP4, "mxfp4"}};
    for (const auto & [type, name] : types)
        if (!same(ggml_type_name(type), name)) return "enum ggml_type";
    return nullptr;
}

// A product of two small tensors, read field by field.
const char * tensor_difference() {
    const ggml_init_params params = {8 * ggml_tensor_overhead(), nullptr, true};
    const std::unique_ptr<ggml_context, decltype(&ggml_free)> context(ggml_init(params), ggml_free);
    if (!context) return "ggml_init";
    ggml_tensor * a = ggml_new_tensor_3d(context.get(), GGML_TYPE_F16, 8, 3, 5);
    ggml_tensor * b = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, 8, 2, 5);
    ggml_tensor * c = ggml_mul_mat(context.get(), a, b);
    ggml_set_name(c, "tilebeam");
    ggml_tensor * view = ggml_view_1d(context.get(), a, 2, 4);
    const bool right = a->type == GGML_TYPE_F16 && a->ne[2] == 5 && a->nb[1] == ggml_row_size(GGML_TYPE_F16, 8) &&
                       c->op == GGML_OP_MUL_MAT && c->ne[0] == 3 && c->ne[1] == 2 && c->src[0] == a && c->src[1] == b &&
                       same(c->name, "tilebeam") && view->view_src == a && view->view_offs == 4 && !c->data &&
                       !c->extra;
    return right ? nullptr : "struct ggml_tensor";
}

const char * buffer_difference() {
    ggml_backend_buffer_type_t type = ggml_backend_cpu_buffer_type();
    if (!same(type->iface.get_name(type), ggml_backend_buft_name(type)) ||
        type->iface.get_alignment(type) != ggml_backend_buft_get_alignment(type))
        return "struct ggml_backend_buffer_type_i";
    const std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)> buffer(
        ggml_backend_buft_alloc_buffer(type, 256), ggml_backend_buffer_free);
    if (!buffer) return "ggml_backend_buft_alloc_buffer";
    const bool right = buffer->buft == type && buffer->size == ggml_backend_buffer_get_size(buffer.get()) &&
                       buffer->iface.get_base(buffer.get()) == ggml_backend_buffer_get_base(buffer.get()) &&
                       buffer->usage == ggml_backend_buffer_get_usage(buffer.get());
    return right ? nullptr : "struct ggml_backend_buffer";
}

} // namespace

std::string abi_difference() {
    for (const auto check : {enum_difference, tensor_difference, buffer_difference})
        if (const char * what = check()) return what;
    return "";
}

std::string device_difference(ggml_backend_dev_t device) {
    const bool right = same(ggml_backend_dev_name(device), device->iface.get_name(device)) &&
                       ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_GPU &&
                       ggml_backend_dev_buffer_type(device) == device->iface.get_buffer_type(device) &&
                       ggml_backend_dev_supports_buft(device, device->iface.get_buffer_type(device)) &&
                       !ggml_backend_dev_supports_buft(device, ggml_backend_cpu_buffer_type());
    return right ? "" : "struct ggml_backend_device_i";
}

} // namespace tb::plugin
