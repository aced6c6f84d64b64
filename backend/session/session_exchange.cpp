// A message to the NPU side, and the wait for its reply. See session_impl.h.
#include <cstring>
#include <functional>

#include "cache.h"
#include "checksum.h"
#include "cpus.h"
#include "patience.h"
#include "session_impl.h"
#include "wait.h"

namespace tb::session {

namespace {

std::string milliseconds(int64_t ns) { return std::to_string(ns / ns_per_ms) + " ms"; }

} // namespace

// The NPU is dead, late or broke the protocol: nothing it does from now on can be trusted. A process is killed, so that
// it cannot write into buffers that are used for something else by then.
result session::impl::give_up(tb_status status, const std::string & what) {
    why_failed = failure(status, what);
    failed.store(true, std::memory_order_release);
    npu->finish(0);
    return why_failed;
}

// Spinning answers fastest but takes a CPU. It pays for a short wait, and at the end of a long one if there is a CPU
// whose core the NPU's threads do not need.
wait_plan session::impl::plan(int64_t expected_ns) {
    static const int cores = default_threads();
    wait_plan p;
    p.slice = between_looks;
    const int64_t spin = budget.next();
    if (expected_ns <= most_spin_ns()) {
        p.spin_until = spin;
    } else if (n_threads.load(std::memory_order_relaxed) < cores) {
        // Sleeping overshoots by some 50 us, runs differ by a few percent.
        p.sleep_until = std::max<int64_t>(expected_ns - expected_ns / 8 - 50000, 0);
        p.spin_until = p.sleep_until + expected_ns / 4 + spin;
    }
    return p;
}

// Wait for the other side's reply to the request in work; `last` is the number of the one before.
result session::impl::await_reply(uint32_t last, int64_t start, const graph_times & times) {
    // The deadline is for one op: it starts anew whenever one ends, at most as often as a graph has ops.
    const auto limit = static_cast<int64_t>(opt.deadline_ms * std::max(1.0, times.deadline_factor) * ns_per_ms);
    patience left(limit);
    uint32_t ended = 0;
    std::string how;
    bool gone = false;
    const auto keep_waiting = [&] {
        if ((gone = npu->ended(how))) {
            return false;
        }
        const bool more = left.look();
        const uint32_t seen = load_word(&channel->npu_progress);
        if (seen >> 16 == (seq & 0xffff) && (seen & 0xffff) > ended && (seen & 0xffff) <= TB_MAX_GRAPH_OPS) {
            ended = seen & 0xffff;
            left.renew();
        }
        // Once per slice, in case the doorbell was overwritten or the wake-up call did not seem to be needed.
        store_word(&channel->req_seq, seq);
        futex_wake(&channel->req_seq, futex_scope::shared);
        return more || left.look();
    };
    wait_plan p = plan(times.expected_ns);
    p.slice = std::min(p.slice, std::max<int64_t>(limit, ns_per_ms));
    // A counter that is neither the last reply's nor the one to come is not the NPU's.
    wake_reason woken = wake_reason::stopped;
    for (uint32_t old = last; (woken = wait_word(&channel->rep_seq, old, &channel->cpu_sleeping, p,
                                                 std::ref(keep_waiting))) != wake_reason::stopped;) {
        old = load_word(&channel->rep_seq);
        if (old == seq || !keep_waiting()) {
            break;
        }
        p.sleep_until = 0;
        p.spin_until = 0;
    }
    if (p.spin_until > p.sleep_until) {
        budget.report(woken == wake_reason::seen_spinning);
    }
    ++(woken == wake_reason::seen_spinning ? count.spun : count.slept);
    if (load_word(&channel->rep_seq) != seq) {
        if (gone) {
            return give_up(TB_E_DEAD, std::string("the ") + noun() + " " + how);
        }
        return give_up(TB_E_DEADLINE, std::string("the ") + noun() +
                                          " did not answer: no op ended within the deadline of " + milliseconds(limit) +
                                          " (waited " + milliseconds(now_ns() - start) + ")");
    }
    return {};
}

result session::impl::exchange(uint32_t kind, graph_times * times, tb_reply * reply) {
    const uint32_t last = seq++;
    tb_request r{};
    r.kind = kind;
    r.payload_offset = payload_offset;
    r.payload_size = message.size();
    r.check = request_check(seq, r, message.data()); // of the private copy: what is damaged from here on is noticed
    std::copy(message.begin(), message.end(), payload());
    std::memcpy(&channel->request, &r, sizeof r);
    tb_cache_clean(payload(), message.size());
    tb_cache_clean(&channel->request, sizeof channel->request);
    const int64_t start = now_ns();
    ring(&channel->req_seq, seq, &channel->npu_sleeping);

    if (npu->answer(seq)) {
        ++count.spun;
        std::string how;
        if (kind != TB_REQ_STOP && npu->ended(how)) {
            return give_up(TB_E_DEAD, std::string("the ") + noun() + " " + how);
        }
    } else if (const result late = await_reply(last, start, times ? *times : graph_times{}); !late.ok()) {
        return late;
    }
    doorbell_ns = start;
    replied_ns = traced ? now_ns() : 0;
    ++count.requests;
    tb_cache_invalidate(&channel->reply, sizeof channel->reply);
    std::memcpy(reply, &channel->reply, sizeof *reply);
    if (reply->check != reply_check(seq, *reply)) {
        return give_up(TB_E_PROTOCOL, std::string("the ") + noun() +
                                          " sent a damaged reply: the channel's page was overwritten, or it is broken");
    }
    reply->why[sizeof reply->why - 1] = 0;
    if (times) {
        const int64_t took = now_ns() - start;
        times->expected_ns = times->expected_ns == 0 ? took : (times->expected_ns * 3 + took) / 4;
    }
    return {};
}

// A request that is no graph, and what the NPU says to it.
result session::impl::request(uint32_t kind, const void * data, size_t size, tb_reply * reply) {
    message.clear();
    put(data, size);
    const result r = exchange(kind, nullptr, reply);
    return r.ok() ? describe(*reply, nullptr, 0) : r;
}

result session::impl::describe(const tb_reply & r, const tb_op * ops, uint32_t n_ops) {
    if (r.status == TB_OK) {
        return {};
    }
    if (r.status == TB_E_NOMEM && opt.kind == executor_kind::process && opt.memory_limit == 0) {
        starved.store(true, std::memory_order_relaxed);
    }
    std::string why = std::string("the ") + noun() + " reports: " + r.why;
    // A message that was refused as a whole names no op.
    if (ops && r.op_index < n_ops && r.op_code != TB_OP_NOP && r.op_code == ops[r.op_index].code) {
        const tb_op & op = ops[r.op_index];
        why += " (op " + std::to_string(r.op_index) + ", " + tb_op_name(op.code);
        const std::string name(op.name, strnlen(op.name, sizeof op.name));
        why += name.empty() ? ")" : " '" + name + "')";
    }
    why += std::string(" [") + tb_status_name(static_cast<int>(r.status)) + "]";
    return failure(static_cast<tb_status>(r.status), why, r.op_index);
}

} // namespace tb::session
