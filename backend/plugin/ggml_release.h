// What differs between the releases of ggml that the plugin is compiled for, each with its own headers.
// cmake/ggml.cmake looks into them and defines TB_GGML_HAS_..; the other files here are the same for all releases.
#ifndef TILEBEAM_PLUGIN_GGML_RELEASE_H
#define TILEBEAM_PLUGIN_GGML_RELEASE_H

#include <cstdint>

#include "ggml-backend-impl.h"

namespace tb::plugin {

extern const char built_version[]; // of ggml, whose headers the plugin was compiled with
extern const char built_commit[];  // full, or "unknown"

// Before 0.25, graph_optimize could not keep tensors allocated: products that share activations then wait for each
// other.
#ifdef TB_GGML_HAS_OPTIMIZE_PARAMS
using optimize_params = ggml_backend_graph_optimize_params;
#else
struct optimize_params {
    void (*add_alloc_dep)(void * user_data, ggml_tensor * tensor, ggml_tensor * until);
    void * user_data;
};
#endif
void set_graph_optimize(ggml_backend_i & callbacks, void (*optimize)(ggml_backend_t, ggml_cgraph *, optimize_params *));

// Before 0.20, a backend that takes host memory takes mapped files, too.
void set_mmap_support(ggml_backend_dev_caps & caps);

// Ops that not all releases have, or whose parameters stood elsewhere in some: those are the CPU backend's there.
// Sets the code of the channel's op and how many operands it has.
bool find_newer_op(ggml_op op, uint32_t & code, int & n_src);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_GGML_RELEASE_H
