// See backend.h.
#include "backend.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <memory>

#include "ggml-impl.h"
#include "ggml_release.h"
#include "graph_content.h"
#include "graph_optimize.h"
#include "lower.h"
#include "shared_state.h"
#include "trace.h"
#include "wait.h"

namespace tb::plugin {

namespace {

// ggml numbers a graph whenever the scheduler splits it anew; llama.cpp sends the same one again for as long as its
// shape stays. A few, because a process may run several contexts in turn.
constexpr size_t kept_graphs = 8;
constexpr uint64_t own_number = uint64_t{1} << 47; // ggml's count from 1
std::atomic<uint64_t> numbered{0};                 // of all backends: those of a device share its session

struct kept_graph {
    lowered_graph lowered;
    graph_content content; // of one without a number
};

struct backend {
    const int device;
    const session_ptr session; // keeps the NPU running for as long as somebody may compute
    const bool deterministic;
    std::array<kept_graph, kept_graphs> cache;
    size_t next = 0;

    // nullptr: `why` says which op cannot run. Cached graphs are found by number, or what has none by its content.
    lowered_graph * lowered(const ggml_cgraph * graph, std::string & why) {
        // a context that was promised the same bits keeps them, whatever others ask for
        const int32_t numerics = deterministic ? TILEBEAM_NUMERICS_DETERMINISTIC
                                               : state::get().numerics() & ~TILEBEAM_NUMERICS_DETERMINISTIC;
        kept_graph * same = nullptr;
        for (kept_graph & g : cache)
            if (graph->uid != 0 ? g.lowered.uid == graph->uid : g.content.is(graph)) same = &g;
        if (same && same->lowered.numerics == numerics) return &same->lowered;
        kept_graph & kept = same ? *same : cache[next++ % kept_graphs];
        kept = kept_graph();
        state::get().count.lowered++;
        if (keep(graph, numerics, kept, why)) return &kept.lowered;
        kept = kept_graph();
        return nullptr;
    }

    bool keep(const ggml_cgraph * graph, int32_t numerics, kept_graph & kept, std::string & why) {
        if (!lower(graph, device, numerics, kept.lowered, why)) return false;
        if (graph->uid == 0) {
            kept.lowered.uid = own_number | ++numbered;
            kept.content = graph_content(graph);
        }
        return true;
    }

    // The channel takes so many ops in a message; a longer graph goes in parts, which are not kept.
    static bool send(lowered_graph & g, std::string & why) {
        const size_t n = g.ops.size();
        for (size_t i = 0; i < n; i += TB_MAX_GRAPH_OPS) {
            const auto part = static_cast<uint32_t>(std::min<size_t>(n - i, TB_MAX_GRAPH_OPS));
            const tb::session::result r = g.session->compute(g.ops.data() + i, part, part == n ? g.uid : 0, g.sent);
            if (!r.ok()) {
                why = r.why;
                return false;
            }
        }
        g.sent = true;
        return true;
    }

    // Whatever came of a graph: if a file that it read has changed, it was computed from something else.
    static bool files_intact(const lowered_graph & g, std::string & why) {
        for (const auto & health : g.buffers) {
            if (std::string lost; health->file && !health->file->intact(lost)) {
                why = why.empty() ? lost : lost + " (" + why + ")";
                health->spoil(why);
                return false;
            }
        }
        return true;
    }

    bool compute(const ggml_cgraph * graph, std::string & why) {
        tb::session::trace & trace = tb::session::trace::get();
        const int64_t began = trace.on() ? now_ns() : 0;
        lowered_graph * g = lowered(graph, why);
        if (began != 0) trace.span(TB_SPAN_LOWER, began, now_ns(), 0, 0, 0, static_cast<uint32_t>(graph->n_nodes));
        if (!g) return false;
        for (const auto & health : g->buffers) {
            if (health->bad) {
                why = health->complaint();
                return false;
            }
        }
        const bool sent = send(*g, why);
        if (!files_intact(*g, why) || !sent) return false;
        if (g->ops.empty()) return true;
        state::get().count.graphs++;
        state::get().count.ops += g->ops.size();
        return true;
    }
};

backend & self(ggml_backend_t b) { return *static_cast<backend *>(b->context); }

const char * get_name(ggml_backend_t b) { return ggml_backend_dev_name(b->device); }

void free_backend(ggml_backend_t b) {
    delete &self(b);
    delete b;
}

void synchronize(ggml_backend_t) {} // graph_compute has waited already

ggml_status graph_compute(ggml_backend_t b, ggml_cgraph * graph) {
    state & st = state::get();
    const int64_t start = now_ns();
    std::string why;
    bool ok = false;
    try {
        ok = self(b).compute(graph, why);
    } catch (const std::exception & e) {
        why = e.what();
    }
    const int64_t end = now_ns();
    st.count.compute_ns += static_cast<uint64_t>(end - start);
    tb::session::trace::get().span(TB_SPAN_GRAPH, start, end, 0, 0, 0, static_cast<uint32_t>(graph->n_nodes));
    if (ok) return GGML_STATUS_SUCCESS;
    st.count.failures++;
    st.fail("the NPU could not compute the graph: " + why);
    return GGML_STATUS_FAILED;
}

ggml_guid_t guid() {
    static ggml_guid id = {0x74, 0x69, 0x6c, 0x65, 0x62, 0x65, 0x61, 0x6d, 0x48, 0x4d, 0x58, 0x30, 0, 0, 0, 1};
    return &id;
}

} // namespace

ggml_backend_t new_backend(ggml_backend_dev_t dev, int index) {
    session_ptr session = state::get().acquire(index);
    if (!session) return nullptr;
    ggml_backend_i callbacks{};
    callbacks.get_name = get_name;
    callbacks.free = free_backend;
    callbacks.synchronize = synchronize;
    callbacks.graph_compute = graph_compute;
    set_graph_optimize(callbacks, keep_products_apart);
    const bool deterministic = (state::get().numerics() & TILEBEAM_NUMERICS_DETERMINISTIC) != 0;
    auto context = std::unique_ptr<backend>(new backend{index, std::move(session), deterministic, {}});
    return new ggml_backend{guid(), callbacks, dev, context.release()};
}

void set_n_threads(ggml_backend_t, int n_threads) { state::get().ask_threads(n_threads); }

} // namespace tb::plugin
