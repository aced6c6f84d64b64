// What the plugin can be told: options and their values, from the environment and from control.h.
#ifndef TILEBEAM_PLUGIN_CONFIGURATION_H
#define TILEBEAM_PLUGIN_CONFIGURATION_H

#include <cstdint>
#include <string>
#include <vector>

#include "control.h"
#include "tilebeam/types.h"

namespace tb::plugin {

constexpr int most_threads = 512;

// What environment variables say; a value that makes no sense is reported and left out.
tilebeam_options options_of_environment();

// TB_OK, or `why` says which of the values is wrong.
tb_status check_options(const tilebeam_options & options, std::string & why);

// Kernel sets that an executor (enum tilebeam_executor) has, best first; never empty.
std::vector<std::string> kernel_sets(int32_t executor);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_CONFIGURATION_H
