// The thread's plan, and the rule where there is none. See division.h.
#include "division.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "ggml.h"
#include "shared_state.h"
#include "tilebeam/layout.h"

namespace tb::plugin {

namespace {

using plan = std::unordered_map<std::string, std::vector<column_part>>;
thread_local plan current;

bool is_matrix(const ggml_tensor * t) { return t->ne[1] > 1 && t->ne[2] == 1 && t->ne[3] == 1; }

// Whole panels for each of the devices, in proportion to what their sessions may map.
std::vector<column_part> shares(const ggml_tensor * t, uint64_t bytes) {
    state & st = state::get();
    const int64_t panels = (t->ne[1] + TB_TILE_N - 1) / TB_TILE_N;
    double total = 0;
    std::vector<double> reached;
    for (int d = 0; d < st.n_devices(); ++d) {
        const uint64_t limit = st.limit_of(d);
        total += static_cast<double>(limit == 0 ? bytes : std::min(limit, bytes));
        reached.push_back(total);
    }
    std::vector<column_part> parts;
    int64_t done = 0;
    for (int d = 0; d < st.n_devices(); ++d) {
        const int64_t end =
            d + 1 == st.n_devices()
                ? t->ne[1]
                : static_cast<int64_t>(reached[static_cast<size_t>(d)] / total * static_cast<double>(panels)) *
                      TB_TILE_N;
        if (end > done) parts.push_back({d, end - done});
        done = end;
    }
    return parts;
}

} // namespace

tb_status plan_division(const tilebeam_part * parts, uint64_t n_parts, std::string & why) {
    current.clear();
    plan made;
    for (uint64_t i = 0; i < n_parts; ++i) {
        const tilebeam_part & p = parts[i];
        if (!p.name || !*p.name || std::strlen(p.name) >= GGML_MAX_NAME) {
            why = "a part of a tensor without a valid name";
            return TB_E_SHAPE;
        }
        why = std::string("the division of tensor '") + p.name + "': ";
        if (p.device >= TILEBEAM_MAX_DEVICES) {
            why += "no device " + std::to_string(p.device);
            return TB_E_SHAPE;
        }
        if (p.columns == 0 || p.columns > INT32_MAX) {
            why += "a part of " + std::to_string(p.columns) + " columns";
            return TB_E_SHAPE;
        }
        made[p.name].push_back({static_cast<int>(p.device), static_cast<int64_t>(p.columns)});
    }
    for (const auto & [name, list] : made) {
        for (size_t i = 0; i + 1 < list.size(); ++i) {
            if (list[i].columns % TB_TILE_N == 0) continue;
            why = "the division of tensor '" + name + "' cuts through a tile";
            return TB_E_SHAPE;
        }
    }
    why.clear();
    current = std::move(made);
    return TB_OK;
}

bool division_planned() { return !current.empty(); }

bool divide(const ggml_tensor * t, int device, uint64_t bytes, std::vector<column_part> & parts, std::string & why) {
    parts.clear();
    state & st = state::get();
    if (const auto it = current.find(t->name); it != current.end()) {
        int64_t columns = 0;
        for (const column_part & p : it->second)
            columns += p.columns;
        if (!is_matrix(t) || columns != t->ne[1]) {
            why = std::string("the division of tensor '") + t->name + "' does not fit its shape";
            return false;
        }
        parts = it->second;
    } else if (const uint64_t limit = st.limit_of(device); limit != 0 && bytes > limit && is_matrix(t)) {
        if (st.n_devices() > 1) parts = shares(t, bytes);
    }
    if (parts.size() == 1 && parts[0].device == device) parts.clear();
    return true;
}

} // namespace tb::plugin
