// What a session asks of the NPU side: buffers, graphs, threads. See session.h and session_impl.h.
#include "session.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <unistd.h>

#include "reply_deadline.h"
#include "session_impl.h"
#include "trace.h"

namespace tb::session {

// The slot of this serial, or the one to overwrite: a free one, else the one unused for longest.
sent_graph & session::impl::slot_for(uint64_t serial) {
    sent_graph * best = &sent[0];
    for (sent_graph & s : sent) {
        if (s.serial == serial) {
            return s;
        }
        if (s.last_used < best->last_used) {
            best = &s;
        }
    }
    best->serial = 0;
    best->times = {};
    return *best;
}

result session::impl::map(int fd, uint64_t offset, uint64_t size, bool writable, uint32_t * id) {
    const auto free = std::find(buffers.begin(), buffers.end(), 0);
    if (free == buffers.end()) {
        return failure(TB_E_BUFFER, "more than " + std::to_string(TB_MAX_BUFFERS) + " buffers on one NPU");
    }
    const auto index = static_cast<uint32_t>(free - buffers.begin());
    const tb_map m{index, writable ? 1u : 0u, offset, size};
    if (!send_descriptor(socket, seq + 1, fd)) {
        const std::string error = std::strerror(errno);
        std::string how;
        if (npu->ended(how)) {
            return give_up(TB_E_DEAD, std::string("the ") + noun() + " " + how);
        }
        return failure(TB_E_BUFFER, "a descriptor could not be handed to the NPU: " + error);
    }
    tb_reply reply;
    const result r = request(TB_REQ_MAP, &m, sizeof m, &reply);
    if (r.ok()) {
        const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
        *free = (size + page - 1) / page * page;
        mapped += *free;
        *id = index;
    }
    return r;
}

result session::impl::unmap(uint32_t id) {
    const tb_map m{id, 0, 0, 0};
    tb_reply reply;
    result r = request(TB_REQ_UNMAP, &m, sizeof m, &reply);
    if (r.status == TB_E_PROTOCOL && !gave_up()) {
        r = request(TB_REQ_UNMAP, &m, sizeof m, &reply); // damaged on its way: the buffer must not stay mapped
    }
    if (r.ok()) {
        mapped -= buffers[id];
        buffers[id] = 0;
    }
    return r;
}

// Tracing was switched since the last graph: give the NPU a ring, or take it away.
void session::impl::follow_tracing(bool on) {
    if (!on) {
        if (traced) {
            unmap(traced->buffer); // ends tracing on the other side too; if it fails the session is of no more use
            traced.reset();
        }
        ring_refused = false;
        return;
    }
    std::string why;
    uint32_t buffer = 0;
    auto memory = shared_memory::create("tilebeam-trace", ring_bytes, why);
    if (memory && map(memory->fd(), 0, memory->size(), true, &buffer).ok()) {
        const tb_map m{buffer, 0, 0, 0};
        tb_reply reply;
        if (request(TB_REQ_TRACE, &m, sizeof m, &reply).ok()) {
            traced = std::make_unique<traced_npu>(std::move(memory), buffer, number);
            return;
        }
        unmap(buffer);
    }
    ring_refused = true; // no address space left for it: the graphs go on, their NPU side is missing in the trace
    trace::get().note_losses(1, 0);
}

uint32_t session::impl::put_graph(const tb_op * ops, uint32_t n_ops, uint64_t serial, bool unchanged,
                                  sent_graph * kept) {
    tb_graph head{0, n_ops, serial};
    if (kept) {
        head.slot = static_cast<uint32_t>(kept - sent);
    }
    message.clear();
    put(&head, sizeof head);
    const bool known = kept && kept->serial == serial && kept->ops.size() == n_ops;
    if (kept) {
        kept->serial = 0; // until the NPU has it: a failure on the way, or no memory, means that it is sent whole again
    }
    if (!known) {
        put(ops, uint64_t{n_ops} * sizeof(tb_op));
        if (kept) {
            kept->ops.assign(ops, ops + n_ops);
            kept->times.deadline_factor = 0;
        }
        return TB_REQ_COMPUTE;
    }
    head.n_ops = 0;
    for (uint32_t i = 0; i < n_ops && !unchanged; ++i) {
        if (std::memcmp(&kept->ops[i], &ops[i], sizeof(tb_op)) == 0) {
            continue;
        }
        kept->ops[i] = ops[i];
        kept->times.deadline_factor = 0;
        const uint32_t index[2] = {i, 0};
        put(index, sizeof index);
        put(&ops[i], sizeof(tb_op));
        ++head.n_ops;
    }
    std::memcpy(message.data(), &head, sizeof head);
    ++count.patched;
    return TB_REQ_PATCH;
}

result session::impl::compute(const tb_op * ops, uint32_t n_ops, uint64_t serial, bool unchanged) {
    if (n_ops > TB_MAX_GRAPH_OPS) {
        return failure(TB_E_PROTOCOL,
                       "a graph of " + std::to_string(n_ops) + " ops; the most is " + std::to_string(TB_MAX_GRAPH_OPS));
    }
    const bool tracing = trace::get().on();
    if (tracing ? !traced && !ring_refused : traced || ring_refused) {
        follow_tracing(tracing);
        if (gave_up()) {
            return why_failed;
        }
    }
    const int64_t began = traced ? now_ns() : 0;
    sent_graph * kept = serial != 0 ? &slot_for(serial) : nullptr;
    const uint32_t kind = put_graph(ops, n_ops, serial, unchanged, kept);
    if (kept) {
        kept->last_used = ++clock;
    }
    graph_times once;
    graph_times & times = kept ? kept->times : once;
    if (times.deadline_factor == 0 && opt.kind != executor_kind::thread) { // which has no deadline
        times.deadline_factor = deadline_factor(ops, n_ops);
    }
    tb_reply reply;
    result r = exchange(kind, &times, &reply);
    if (r.ok()) {
        count.schedules = reply.value;
        if (traced) {
            traced->record(seq, kind, ops, n_ops, {began, doorbell_ns, replied_ns});
        }
        r = describe(reply, ops, n_ops);
    }
    if (kept) {
        kept->serial = r.ok() ? serial : 0;
    }
    return r;
}

result session::map(int fd, uint64_t offset, uint64_t size, bool writable, uint32_t * id) {
    return self->in_turn([&] { return self->map(fd, offset, size, writable, id); });
}

result session::unmap(uint32_t id) {
    return self->in_turn([&] { return self->unmap(id); });
}

result session::compute(const tb_op * ops, uint32_t n_ops, uint64_t serial, bool unchanged) {
    return self->in_turn([&] { return self->compute(ops, n_ops, serial, unchanged); });
}

result session::noop() {
    return self->in_turn([&] {
        tb_reply reply;
        return self->request(TB_REQ_NOOP, nullptr, 0, &reply);
    });
}

result session::set_threads(int n) {
    return self->in_turn([&] {
        const tb_graph head{0, static_cast<uint32_t>(std::max(n, 0)), 0};
        tb_reply reply;
        result r = self->request(TB_REQ_THREADS, &head, sizeof head, &reply);
        if (r.ok()) {
            self->n_threads = static_cast<int>(reply.value);
        }
        return r;
    });
}

bool session::alive() const {
    if (!self->made_in.is_here() || self->gave_up()) {
        return false;
    }
    // While a request is under way its own waiting looks after the peer.
    std::unique_lock<std::mutex> hold(self->lock, std::try_to_lock);
    std::string how;
    if (hold.owns_lock() && self->npu->ended(how)) {
        self->give_up(TB_E_DEAD, std::string("the ") + self->noun() + " " + how);
        return false;
    }
    return true;
}

bool session::starved() const { return self->starved.load(std::memory_order_relaxed); }

int session::npu_pid() const { return self->npu->pid(); }

uint64_t session::mapped() const { return self->mapped.load(std::memory_order_relaxed); }

int session::n_threads() const { return self->n_threads.load(std::memory_order_relaxed); }

const options & session::opts() const { return self->opt; }

uint32_t session::guards() const { return self->guards; }

session_counters session::counters() const {
    if (!self->made_in.is_here()) {
        return self->count; // of the moment of fork()
    }
    std::lock_guard<std::mutex> hold(self->lock);
    return self->count;
}

const char * session::isa() const { return self->isa.c_str(); }

shared_memory & session::control_region() { return *self->region; }

shared_memory * session::trace_ring() { return self->traced ? self->traced->memory.get() : nullptr; }

} // namespace tb::session
