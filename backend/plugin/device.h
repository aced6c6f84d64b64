// The device HMX0 and its buffer types, as ggml sees them.
#ifndef TILEBEAM_PLUGIN_DEVICE_H
#define TILEBEAM_PLUGIN_DEVICE_H

#include <string>

#include "ggml-backend-impl.h"

namespace tb::plugin {

constexpr const char * device_name = "HMX0";

ggml_backend_dev_t device(ggml_backend_reg_t reg);
std::string device_description();
ggml_backend_buffer_type_t * extra_bufts(ggml_backend_dev_t dev); // NULL-terminated

// backend.cpp. nullptr: the NPU did not start, the reason is in state's last error.
ggml_backend_t new_backend(ggml_backend_dev_t dev);
void set_n_threads(ggml_backend_t backend, int n_threads);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_DEVICE_H
