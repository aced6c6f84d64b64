// What a session is made of. See session.h; session_start.cpp starts and stops it, session_exchange.cpp sends a message
// and waits for the reply, session_requests.cpp makes the messages.
#ifndef TILEBEAM_SESSION_SESSION_IMPL_H
#define TILEBEAM_SESSION_SESSION_IMPL_H

#include <algorithm>
#include <atomic>
#include <mutex>

#include "channel.h"
#include "fork.h"
#include "peer.h"
#include "session.h"
#include "shm.h"
#include "trace_ring.h"
#include "wait.h"

namespace tb::session {

constexpr int64_t ns_per_ms = 1000000;

inline result failure(tb_status status, std::string why, uint32_t op_index = 0) {
    return {status, op_index, std::move(why)};
}

// What is known of the time that a graph takes.
struct graph_times {
    int64_t expected_ns = 0;    // how long earlier runs took, smoothed; 0 = unknown
    double deadline_factor = 0; // reply_deadline.h; 0 = not computed yet
};

// What the NPU side keeps of a graph, so that only differences need to travel.
struct sent_graph {
    uint64_t serial = 0; // 0: free
    uint64_t last_used = 0;
    std::vector<tb_op> ops;
    graph_times times;
};

struct session::impl {
    impl();

    options opt;
    const home made_in;
    std::unique_ptr<shared_memory> region;
    tb_channel * channel = nullptr;
    int socket = -1;
    std::unique_ptr<peer> npu;
    std::string isa;
    uint32_t guards = 0;
    bool served = false; // it has shaken hands
    std::atomic<int> n_threads{0};

    std::mutex lock; // one request at a time; guards what follows
    uint32_t seq = 0;
    const uint32_t number;              // of the program's sessions, in traces
    std::unique_ptr<traced_npu> traced; // while tracing is on
    bool ring_refused = false;          // not asked for again before tracing ends
    int64_t doorbell_ns = 0;            // of the last request, and when its reply was seen
    int64_t replied_ns = 0;

    std::vector<uint8_t> message; // the payload, before it goes where the other side could change it
    session_counters count;
    uint64_t clock = 0;                                                    // of last_used
    std::vector<uint64_t> buffers = std::vector<uint64_t>(TB_MAX_BUFFERS); // by id: address space, 0 = free
    std::atomic<uint64_t> mapped{0};                                       // of all of them
    sent_graph sent[TB_MAX_GRAPHS];
    spin_budget budget;
    // Set once, for good.
    std::atomic<bool> starved{false};
    std::atomic<bool> failed{false};
    result why_failed;

    const char * noun() const {
        return opt.kind == executor_kind::thread    ? "NPU thread"
               : opt.kind == executor_kind::process ? "NPU process"
                                                    : "Hexagon NPU process";
    }
    int64_t most_spin_ns() const { return int64_t{std::max(opt.spin_us, 0)} * 1000; }
    uint8_t * payload() const { return static_cast<uint8_t *>(region->data()) + payload_offset; }
    void put(const void * data, size_t size) {
        const auto * bytes = static_cast<const uint8_t *>(data);
        message.insert(message.end(), bytes, bytes + size);
    }

    ~impl();
    bool start(std::string & why);
    bool shake_hands(std::string & why);
    result give_up(tb_status status, const std::string & what);
    // A call that needs the NPU: one at a time, in the process that started it, for as long as the NPU lives.
    template <class Call> result in_turn(Call && call) {
        if (!made_in.is_here()) { // before the lock, which a thread of the parent may have held
            return failure(TB_E_DEAD, forked_text);
        }
        std::lock_guard<std::mutex> hold(lock);
        return gave_up() ? why_failed : call();
    }
    bool gave_up() const { return failed.load(std::memory_order_acquire); }
    wait_plan plan(int64_t expected_ns);
    result await_reply(uint32_t last, int64_t start, const graph_times & times);
    // Send `message`, and see the reply to it. `times`: of the graph, or nullptr.
    result exchange(uint32_t kind, graph_times * times, tb_reply * reply);
    // Make `message` of a graph; its enum tb_request_kind. `kept`: its slot, or nullptr.
    uint32_t put_graph(const tb_op * ops, uint32_t n_ops, uint64_t serial, bool unchanged, sent_graph * kept);
    result compute(const tb_op * ops, uint32_t n_ops, uint64_t serial, bool unchanged);
    result map(int fd, uint64_t offset, uint64_t size, bool writable, uint32_t * id);
    result unmap(uint32_t id);
    void follow_tracing(bool on);
    result request(uint32_t kind, const void * payload, size_t size, tb_reply * reply);
    result describe(const tb_reply & r, const tb_op * ops, uint32_t n_ops);
    sent_graph & slot_for(uint64_t serial);
    void stop();
};

} // namespace tb::session

#endif // TILEBEAM_SESSION_SESSION_IMPL_H
