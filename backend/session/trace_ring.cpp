// See trace_ring.h.
#include "trace_ring.h"

#include <algorithm>
#include <cctype>
#include <cstring>

#include "cache.h"
#include "trace.h"
#include "wait.h"

namespace tb::session {

namespace {

constexpr uint32_t most_workers = 512;

} // namespace

uint32_t rows_of(const tb_op & op) {
    const tb_tensor &w = op.src[0], &x = op.src[1];
    if (op.code == TB_OP_MUL_MAT && w.ne[2] != 0 && w.ne[3] != 0) {
        return x.ne[1] * (x.ne[2] / w.ne[2]) * (x.ne[3] / w.ne[3]);
    }
    return op.code == TB_OP_FLASH_ATTN ? w.ne[1] : 0;
}

// ---- the NPU side's

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
        for (uint32_t i = 0; stamps && i < g.size(); ++i) {
            if (stamps[i].begin != 0 && stamps[i].end != 0) {
                add({static_cast<uint64_t>(stamps[i].begin), static_cast<uint64_t>(stamps[i].end), seq, TB_TRACE_OP,
                     static_cast<uint16_t>(worker), i, static_cast<uint16_t>(g.op(i).code), kernels[i]});
            }
        }
    }
}

void ring_writer::add_message(uint32_t seq, uint32_t kind, int64_t begin, int64_t end) {
    add({static_cast<uint64_t>(begin), static_cast<uint64_t>(end), seq, TB_TRACE_MESSAGE, 0, kind, 0, 0});
}

void ring_writer::publish() {
    tb_cache_clean(ring, sizeof *ring + uint64_t{capacity} * sizeof(tb_trace_event));
    __atomic_store_n(&ring->written, written, __ATOMIC_RELEASE);
}

// ---- the CPU side's

ring_reader::ring_reader(const void * memory)
    : ring(static_cast<const tb_trace_ring *>(memory)), events(reinterpret_cast<const tb_trace_event *>(ring + 1)) {}

bool ring_reader::believable(const tb_trace_event & e, uint32_t seq, const tb_op * ops, uint32_t n_ops, int64_t begin,
                             int64_t end) const {
    if (e.seq != seq || e.begin_ns > e.end_ns || e.begin_ns < static_cast<uint64_t>(begin) ||
        e.end_ns > static_cast<uint64_t>(end) || e.worker >= most_workers) {
        return false;
    }
    if (e.kind == TB_TRACE_MESSAGE) {
        return e.index < TB_REQ_COUNT;
    }
    return e.kind == TB_TRACE_OP && e.index < n_ops && ops[e.index].code == e.code && e.kernel <= TB_TRACE_KERNELS;
}

void ring_reader::take(uint32_t session, uint32_t seq, const tb_op * ops, uint32_t n_ops, int64_t begin, int64_t end,
                       std::vector<tb_trace_record> & out) {
    const uint32_t written = __atomic_load_n(&ring->written, __ATOMIC_ACQUIRE);
    uint32_t n = written - seen;
    if (n > ring_events) {
        lost += n - ring_events;
        n = ring_events;
    }
    tb_cache_invalidate(ring, ring_bytes);
    for (uint32_t i = written - n; i != written; ++i) {
        tb_trace_event e;
        std::memcpy(&e, &events[i % ring_events], sizeof e);
        if (e.kind == TB_TRACE_MESSAGE && static_cast<int32_t>(seq - e.seq) > 0) {
            continue; // of a request without a graph, since the last one with
        }
        if (!believable(e, seq, ops, n_ops, begin, end)) {
            ++damaged;
            continue;
        }
        tb_trace_record r{};
        r.begin_ns = e.begin_ns;
        r.end_ns = e.end_ns;
        r.session = session;
        r.lane = e.worker;
        r.seq = seq;
        if (e.kind == TB_TRACE_MESSAGE) {
            r.span = TB_SPAN_MESSAGE;
            r.index = n_ops;
            r.code = e.index;
            out.push_back(r);
            continue;
        }
        const tb_op & op = ops[e.index];
        r.span = TB_SPAN_OP;
        r.index = e.index;
        r.code = op.code;
        r.type = op.code == TB_OP_FLASH_ATTN ? op.src[1].type : op.src[0].type;
        r.rows = rows_of(op);
        tb_op_cost(&op, &r.bytes, &r.work);
        std::memcpy(r.name, op.name, strnlen(op.name, sizeof r.name - 1));
        if (e.kernel != 0) {
            std::memcpy(r.kernel, ring->kernels[e.kernel - 1], sizeof r.kernel - 1);
            for (char & c : r.kernel) {
                c = c == 0 || std::isprint(static_cast<unsigned char>(c)) ? c : '?';
            }
        }
        out.push_back(r);
    }
    seen = written;
}

traced_npu::traced_npu(std::unique_ptr<shared_memory> ring, uint32_t buffer_id, uint32_t session_number)
    : memory(std::move(ring)), buffer(buffer_id), session(session_number), reader(memory->data()) {}

void traced_npu::record(uint32_t seq, uint32_t kind, const tb_op * ops, uint32_t n_ops, const stamps & at) {
    const int64_t now = now_ns();
    trace & t = trace::get();
    t.span(TB_SPAN_SEND, at.began, at.doorbell, session, seq, kind, n_ops);
    t.span(TB_SPAN_WAIT, at.doorbell, at.replied, session, seq, kind, n_ops);
    t.span(TB_SPAN_RECEIVE, at.replied, now, session, seq, kind, n_ops);
    std::vector<tb_trace_record> records;
    reader.take(session, seq, ops, n_ops, at.doorbell, at.replied, records);
    t.add(records);
    t.note_losses(reader.lost, reader.damaged);
    reader.lost = 0;
    reader.damaged = 0;
}

} // namespace tb::session
