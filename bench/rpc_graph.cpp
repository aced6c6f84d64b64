// The same small graph through ggml's API on two backends that sit in other processes: ggml's own RPC backend over
// loopback, and Tilebeam. Built by polling.py from the pinned llama.cpp source.
//
//   rpc_graph serve ENDPOINT                          an RPC server with the CPU backend, until killed
//   rpc_graph compare ENDPOINT PLUGIN OPS ROUNDS RUNS
//
// `compare` prints one line per round and backend: its name, then RUNS times in nanoseconds, each of one graph computed
// and one of its results read: RPC's compute call returns before the graph has run. Both results must be equal.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-impl.h"
#include "ggml-rpc.h"
#include "ggml.h"

namespace {

constexpr int64_t elements = 64;

struct computation {
    ggml_backend_t backend;
    ggml_context * context;
    ggml_tensor * input;
    ggml_tensor * output;
    ggml_cgraph * graph;
};

[[noreturn]] void fail(const char * what) {
    std::fprintf(stderr, "rpc_graph: %s\n", what);
    std::exit(1);
}

int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

computation prepare(ggml_backend_t backend, int n_ops) {
    if (!backend) {
        fail("no backend");
    }
    computation c{};
    c.backend = backend;
    c.context = ggml_init({ggml_tensor_overhead() * static_cast<size_t>(n_ops + 1) +
                               ggml_graph_overhead_custom(static_cast<size_t>(n_ops + 1), false),
                           nullptr, true});
    c.input = ggml_new_tensor_1d(c.context, GGML_TYPE_F32, elements);
    c.output = c.input;
    for (int i = 0; i < n_ops; ++i) {
        c.output = ggml_scale(c.context, c.output, i % 2 == 0 ? 0.5f : 2.0f);
    }
    c.graph = ggml_new_graph_custom(c.context, static_cast<size_t>(n_ops + 1), false);
    ggml_build_forward_expand(c.graph, c.output);
    c.graph->uid = 1; // the same graph again and again: both backends then send a short message
    if (!ggml_backend_alloc_ctx_tensors(c.context, backend)) {
        fail("no memory on the backend");
    }
    std::vector<float> values(elements);
    for (int64_t i = 0; i < elements; ++i) {
        values[static_cast<size_t>(i)] = static_cast<float>(i) + 1;
    }
    ggml_backend_tensor_set(c.input, values.data(), 0, sizeof(float) * elements);
    return c;
}

float run(const computation & c) {
    if (ggml_backend_graph_compute(c.backend, c.graph) != GGML_STATUS_SUCCESS) {
        fail("the graph failed");
    }
    float first = 0;
    ggml_backend_tensor_get(c.output, &first, 0, sizeof first);
    return first;
}

void round(const char * name, const computation & c, int runs, float expected) {
    for (int i = 0; i < runs / 10 + 10; ++i) {
        run(c); // both sides awake
    }
    std::vector<int64_t> times(static_cast<size_t>(runs));
    for (int64_t & t : times) {
        const int64_t start = now();
        const float result = run(c);
        t = now() - start;
        if (result != expected) {
            fail("a result is wrong");
        }
    }
    std::printf("%s", name);
    for (const int64_t t : times) {
        std::printf(" %lld", static_cast<long long>(t));
    }
    std::printf("\n");
    std::fflush(stdout);
}

int serve(const char * endpoint) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!cpu) {
        fail("no CPU backend");
    }
    ggml_backend_rpc_start_server(endpoint, nullptr, 1, 1, &cpu); // returns only if it cannot
    return 1;
}

int compare(const char * endpoint, const char * plugin, int n_ops, int rounds, int runs) {
    ggml_backend_reg_t reg = ggml_backend_load(plugin);
    if (!reg) {
        fail("the plugin cannot be loaded");
    }
    const computation rpc = prepare(ggml_backend_rpc_init(endpoint, 0), n_ops);
    const computation own = prepare(ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, 0), nullptr), n_ops);
    const float expected = n_ops % 2 == 0 ? 1.0f : 0.5f;
    for (int i = 0; i < rounds; ++i) {
        round("rpc", rpc, runs, expected);
        round("tilebeam", own, runs, expected);
    }
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc == 3 && std::strcmp(argv[1], "serve") == 0) {
        return serve(argv[2]);
    }
    if (argc == 7 && std::strcmp(argv[1], "compare") == 0) {
        return compare(argv[2], argv[3], std::atoi(argv[4]), std::atoi(argv[5]), std::atoi(argv[6]));
    }
    fail("serve ENDPOINT, or compare ENDPOINT PLUGIN OPS ROUNDS RUNS");
}
