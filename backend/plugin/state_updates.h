// Recurrent layers read the states of a batch's sequences out of the cache (GET_ROWS), compute, and copy the new states
// back (CPY); a short convolution first has what is new laid crosswise behind its state (CONCAT). Where nothing else
// looks at what lies between, the op that computes does all of it in the cache (tilebeam/ops.h).
#ifndef TILEBEAM_PLUGIN_STATE_UPDATES_H
#define TILEBEAM_PLUGIN_STATE_UPDATES_H

#include <cstdint>
#include <vector>

#include "ggml.h"

struct ggml_cgraph;

namespace tb::plugin {

// Of one op: all that it does besides its own work.
struct state_update {
    int node = 0;                         // the op
    const ggml_tensor * states = nullptr; // as GET_ROWS or SSM_SCAN reads them
    const ggml_tensor * numbers = nullptr;
    const ggml_tensor * fresh = nullptr; // SSM_CONV: what CONCAT puts behind the states, [T, C, S]
    int64_t first = 0;                   // the state that sequence 0's new one replaces
    std::vector<int> skipped;            // nodes that it stands for
};

// By their nodes, rising. `placed`: memory has been given out, and only those whose operands are still there when the
// op runs will do.
std::vector<state_update> find_state_updates(const ggml_cgraph * graph, bool placed);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_STATE_UPDATES_H
