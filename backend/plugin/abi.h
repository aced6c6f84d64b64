// Whether the ggml of this process has the structs, enums and vtables of the headers that the plugin was compiled with.
#ifndef TILEBEAM_PLUGIN_ABI_H
#define TILEBEAM_PLUGIN_ABI_H

#include <string>

#include "ggml-backend-impl.h"

namespace tb::plugin {

// "" if it has, as far as can be tried; else what differs. Version and commit are compared before (registry.cpp): this
// finds builds that were changed after that commit.
std::string abi_difference();

// The same for a device of the plugin's own, as ggml sees it through its vtable.
std::string device_difference(ggml_backend_dev_t device);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_ABI_H
