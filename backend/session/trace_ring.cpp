// See trace_ring.h: the CPU side's end.
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
    return e.kind == TB_TRACE_NOTES ||
           (e.kind == TB_TRACE_OP && e.index < n_ops && ops[e.index].code == e.code && e.kernel <= TB_TRACE_KERNELS);
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
        if (e.kind != TB_TRACE_OP && static_cast<int32_t>(seq - e.seq) > 0) {
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
        if (e.kind != TB_TRACE_OP) {
            r.span = e.kind == TB_TRACE_MESSAGE ? TB_SPAN_MESSAGE : TB_SPAN_NOTES;
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
        r.phase = e.phase;
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
