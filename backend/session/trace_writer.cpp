// See trace_ring.h: the NPU side's end. Compiled for every NPU side; the rest of tracing is the CPU side's alone.
#include <algorithm>
#include <cstring>

#include "cache.h"
#include "trace_ring.h"

namespace tb::session {

ring_writer::ring_writer(void * memory, uint64_t size)
    : ring(static_cast<tb_trace_ring *>(memory)), events(reinterpret_cast<tb_trace_event *>(ring + 1)),
      capacity(static_cast<uint32_t>(
          std::min<uint64_t>((size - sizeof(tb_trace_ring)) / sizeof(tb_trace_event), ring_events))) {}

void ring_writer::add(const tb_trace_event & e) {
    std::memcpy(&events[written % capacity], &e, sizeof e);
    ++written;
}

// Names are those of the kernel tables: constants, so that one is known by its address.
uint16_t ring_writer::kernel(const char * name) {
    if (!name) {
        return 0;
    }
    const auto known = std::find(names.begin(), names.end(), name);
    if (known != names.end()) {
        return static_cast<uint16_t>(known - names.begin() + 1);
    }
    if (names.size() == TB_TRACE_KERNELS) {
        return 0;
    }
    names.push_back(name);
    char text[TB_TRACE_KERNEL_BYTES] = {};
    std::strncpy(text, name, sizeof text - 1);
    std::memcpy(ring->kernels[names.size() - 1], text, sizeof text);
    return static_cast<uint16_t>(names.size());
}

void ring_writer::add_ops(uint32_t seq, const npu::graph & g, const npu::executor & executor) {
    std::vector<uint16_t> kernels(g.size());
    for (uint32_t i = 0; i < g.size(); ++i) {
        kernels[i] = kernel(executor.kernel_name(g.op(i)));
    }
    for (int worker = 0; worker < executor.n_threads(); ++worker) {
        const npu::stamp * stamps = executor.stamps(worker);
        for (uint32_t at = 0; stamps && at < 2 * g.size(); ++at) {
            const uint32_t i = at % g.size();
            if (stamps[at].begin != 0 && stamps[at].end != 0) {
                add({static_cast<uint64_t>(stamps[at].begin), static_cast<uint64_t>(stamps[at].end), seq, TB_TRACE_OP,
                     static_cast<uint16_t>(worker), i, static_cast<uint16_t>(g.op(i).code), kernels[i],
                     stamps[at].phase, 0});
            }
        }
    }
}

void ring_writer::add_message(uint32_t seq, uint32_t kind, int64_t begin, int64_t end) {
    add({static_cast<uint64_t>(begin), static_cast<uint64_t>(end), seq, TB_TRACE_MESSAGE, 0, kind, 0, 0, 0, 0});
}

void ring_writer::add_notes(uint32_t seq, int64_t begin, int64_t end) {
    add({static_cast<uint64_t>(begin), static_cast<uint64_t>(end), seq, TB_TRACE_NOTES, 0, 0, 0, 0, 0, 0});
}

void ring_writer::publish() {
    tb_cache_clean(ring, sizeof *ring + uint64_t{capacity} * sizeof(tb_trace_event));
    __atomic_store_n(&ring->written, written, __ATOMIC_RELEASE);
}

} // namespace tb::session
