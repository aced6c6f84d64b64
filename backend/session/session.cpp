// The CPU side of the channel. See session.h.
#include "session.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <pthread.h>
#include <unistd.h>

#include "cache.h"
#include "channel.h"
#include "checksum.h"
#include "patience.h"
#include "peer.h"
#include "thread_pool.h"
#include "trace.h"
#include "trace_ring.h"
#include "wait.h"

namespace tb::session {

namespace {

constexpr int least_start_ms = 10000; // a process needs a moment to start, however short the deadline for replies
constexpr int grace_ms = 2000;        // between "stop" and the end of the peer
constexpr int64_t ms = 1000000;       // nanoseconds

// Counts fork() calls seen from the child's side: neither threads nor child processes survive into it.
std::atomic<uint32_t> forks{0};

std::atomic<uint32_t> sessions{0}; // started in this program

void count_forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    (void)registered;
}

result failure(tb_status status, std::string why, uint32_t op_index = 0) {
    result r;
    r.status = status;
    r.op_index = op_index;
    r.why = std::move(why);
    return r;
}

// What the NPU side keeps of a graph, so that only differences need to travel.
struct sent_graph {
    uint64_t serial = 0; // 0: free
    uint64_t last_used = 0;
    std::vector<tb_op> ops;
    int64_t expected_ns = 0; // how long earlier runs took, smoothed; 0 = unknown
};

std::string milliseconds(int64_t ns) { return std::to_string(ns / ms) + " ms"; }

} // namespace

struct session::impl {
    options opt;
    uint32_t fork_count = 0;
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
    const uint32_t number = ++sessions; // in traces
    std::unique_ptr<traced_npu> traced; // while tracing is on
    bool ring_refused = false;          // not asked for again before tracing ends
    int64_t doorbell_ns = 0;            // of the last request, and when its reply was seen
    int64_t replied_ns = 0;

    std::vector<uint8_t> message; // the payload, before it goes where the other side could change it
    session_counters count;
    uint64_t clock = 0; // of last_used
    std::vector<bool> ids = std::vector<bool>(TB_MAX_BUFFERS);
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

    bool start(std::string & why);
    bool shake_hands(std::string & why);
    result give_up(tb_status status, const std::string & what);
    bool usable(result & r);
    wait_plan plan(int64_t expected_ns);
    result await_reply(uint32_t last, int64_t start, int64_t expected_ns);
    // Send `message`, and see the reply to it.
    result exchange(uint32_t kind, int64_t * expected_ns, tb_reply * reply);
    result map(int fd, uint64_t offset, uint64_t size, bool writable, uint32_t * id);
    result unmap(uint32_t id);
    void follow_tracing(bool on);
    result request(uint32_t kind, const void * payload, size_t size, tb_reply * reply);
    bool peer_ended(std::string & how) { return npu->ended(how); }
    result describe(const tb_reply & r, const tb_op * ops, uint32_t n_ops);
    sent_graph & slot_for(uint64_t serial);
    void stop();
};

bool session::impl::start(std::string & why) {
    region = shared_memory::create("tilebeam-channel", region_bytes, why);
    if (!region) {
        return false;
    }
    channel = static_cast<tb_channel *>(region->data());
    if (opt.isa.size() >= sizeof channel->cpu.isa) {
        why = "no kernel set is named '" + opt.isa + "'";
        return false;
    }
    tb_cpu_hello hello = make_cpu_hello(region->size());
    hello.memory_limit = opt.memory_limit;
    hello.n_threads = static_cast<uint32_t>(std::max(opt.n_threads, 0));
    hello.spin_us = static_cast<uint32_t>(std::max(opt.spin_us, 0));
    std::memcpy(hello.isa, opt.isa.data(), opt.isa.size());
    hello.flags = opt.fuse ? 0 : TB_HELLO_UNFUSED;
    hello.check = hello_check(hello);
    std::memcpy(&channel->cpu, &hello, sizeof hello);
    tb_cache_clean(channel, sizeof *channel);
    int sockets[2];
    if (!make_socket_pair(sockets)) {
        why = std::string("no socket for the NPU: ") + std::strerror(errno);
        return false;
    }
    socket = sockets[0];
    switch (opt.kind) {
    case executor_kind::thread:
        npu = opt.queue ? start_thread(region->fd(), sockets[1], why) : start_caller(region->fd(), sockets[1], why);
        break;
    case executor_kind::process:
        npu = start_process(opt.npud_path, region->fd(), sockets[1], why);
        break;
    case executor_kind::hexagon:
        npu = start_hexagon(opt.emulator, opt.npud_path, region->fd(), sockets[1], why);
        break;
    }
    close(sockets[1]);
    return npu && shake_hands(why);
}

bool session::impl::shake_hands(std::string & why) {
    const int limit_ms = std::max(opt.deadline_ms, least_start_ms);
    patience left(limit_ms * ms);
    std::string how;
    bool gone = false;
    wait_plan p;
    p.slice = between_looks;
    const auto keep_waiting = [&] { return !(gone = peer_ended(how)) && left.look(); };
    if (wait_word(&channel->npu_ready, 0, &channel->cpu_sleeping, p, keep_waiting) == wake_reason::stopped) {
        why = std::string("the ") + noun() +
              (gone ? " did not start: it " + how : " did not start within " + std::to_string(limit_ms) + " ms");
        return false;
    }
    tb_cache_invalidate(channel, sizeof *channel);
    tb_channel c;
    std::memcpy(&c, channel, sizeof c);
    if (c.reply.check != reply_check(0, c.reply) || (c.reply.status == TB_OK && c.npu.check != hello_check(c.npu))) {
        why = std::string("the ") + noun() + " sent a damaged greeting";
        return false;
    }
    if (c.reply.status != TB_OK || c.npu_ready != TB_NPU_SERVING) {
        c.reply.why[sizeof c.reply.why - 1] = 0;
        why = std::string("the ") + noun() + " refused to serve: " + c.reply.why;
        return false;
    }
    isa.assign(c.npu.isa, strnlen(c.npu.isa, sizeof c.npu.isa));
    guards = c.npu.guards;
    n_threads = static_cast<int>(c.npu.n_threads);
    served = true;
    return true;
}

// The NPU is dead, late or broke the protocol: nothing it does from now on can be trusted. A process is killed, so that
// it cannot write into buffers that are used for something else by then.
result session::impl::give_up(tb_status status, const std::string & what) {
    why_failed = failure(status, what);
    failed.store(true, std::memory_order_release);
    npu->finish(0);
    return why_failed;
}

bool session::impl::usable(result & r) {
    if (fork_count != forks.load(std::memory_order_relaxed)) {
        r = failure(TB_E_DEAD, "the NPU belongs to the process that forked this one: load the model again here");
        return false;
    }
    if (failed.load(std::memory_order_acquire)) {
        r = why_failed;
        return false;
    }
    return true;
}

// Spinning answers fastest but takes a CPU. It pays for a short wait, and at the end of a long one if there is a CPU
// that the NPU's threads do not need.
wait_plan session::impl::plan(int64_t expected_ns) {
    static const int cpus = usable_cpus();
    wait_plan p;
    p.slice = between_looks;
    const int64_t spin = budget.next();
    if (expected_ns <= most_spin_ns()) {
        p.spin_until = spin;
    } else if (n_threads.load(std::memory_order_relaxed) < cpus) {
        // Sleeping overshoots by some 50 us, runs differ by a few percent.
        p.sleep_until = std::max<int64_t>(expected_ns - expected_ns / 8 - 50000, 0);
        p.spin_until = p.sleep_until + expected_ns / 4 + spin;
    }
    return p;
}

// Wait for the other side's reply to the request in work; `last` is the number of the one before.
result session::impl::await_reply(uint32_t last, int64_t start, int64_t expected_ns) {
    // The deadline is for one op: it starts anew whenever one ends, at most as often as a graph has ops.
    const int64_t limit = int64_t{opt.deadline_ms} * ms;
    patience left(limit);
    uint32_t ended = 0;
    std::string how;
    bool gone = false;
    const auto keep_waiting = [&] {
        if ((gone = peer_ended(how))) {
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
    wait_plan p = plan(expected_ns);
    p.slice = std::min(p.slice, std::max<int64_t>(limit, ms));
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
        return give_up(TB_E_DEADLINE,
                       std::string("the ") + noun() + " did not answer: no op ended within the deadline of " +
                           std::to_string(opt.deadline_ms) + " ms (waited " + milliseconds(now_ns() - start) + ")");
    }
    return {};
}

result session::impl::exchange(uint32_t kind, int64_t * expected_ns, tb_reply * reply) {
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
        if (kind != TB_REQ_STOP && peer_ended(how)) {
            return give_up(TB_E_DEAD, std::string("the ") + noun() + " " + how);
        }
    } else if (const result late = await_reply(last, start, expected_ns ? *expected_ns : 0); !late.ok()) {
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
    if (expected_ns) {
        const int64_t took = now_ns() - start;
        *expected_ns = *expected_ns == 0 ? took : (*expected_ns * 3 + took) / 4;
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
    best->expected_ns = 0;
    return *best;
}

void session::impl::stop() {
    if (fork_count != forks.load(std::memory_order_relaxed)) {
        if (npu) {
            npu->forget();
        }
    } else if (npu) {
        if (served && !failed.load(std::memory_order_acquire)) {
            // One request like any other, but with a short deadline.
            opt.deadline_ms = grace_ms;
            tb_reply reply;
            request(TB_REQ_STOP, nullptr, 0, &reply);
        }
        if (socket >= 0) {
            close(socket); // also tells an NPU that took no stop
            socket = -1;
        }
        npu->finish(grace_ms);
    }
    if (socket >= 0) {
        close(socket);
    }
}

session::session() : self(std::make_unique<impl>()) {}

session::~session() {
    try {
        self->stop();
    } catch (const std::exception &) {
        // No memory for a message: the socket that closes with the session ends the NPU.
    }
}

std::unique_ptr<session> session::start(const options & opt, std::string & why) {
    count_forks();
    std::unique_ptr<session> s(new session);
    s->self->opt = opt;
    s->self->opt.memory_limit = address_limit(opt.kind, opt.memory_limit);
    if (opt.deadline_ms <= 0) {
        s->self->opt.deadline_ms = default_deadline_ms(opt.kind);
    }
    s->self->fork_count = forks.load();
    s->self->budget = spin_budget(s->self->most_spin_ns());
    if (s->self->opt.isa.empty()) {
        if (const char * isa = std::getenv("TILEBEAM_ISA")) {
            s->self->opt.isa = isa;
        }
    }
    if (const char * fuse = std::getenv("TILEBEAM_FUSE")) {
        s->self->opt.fuse = std::strcmp(fuse, "0") != 0;
    }
    if (!s->self->start(why)) {
        return nullptr;
    }
    return s;
}

result session::impl::map(int fd, uint64_t offset, uint64_t size, bool writable, uint32_t * id) {
    const auto free = std::find(ids.begin(), ids.end(), false);
    if (free == ids.end()) {
        return failure(TB_E_BUFFER, "more than " + std::to_string(TB_MAX_BUFFERS) + " buffers on one NPU");
    }
    const auto index = static_cast<uint32_t>(free - ids.begin());
    const tb_map m{index, writable ? 1u : 0u, offset, size};
    if (!send_descriptor(socket, seq + 1, fd)) {
        const std::string error = std::strerror(errno);
        std::string how;
        if (peer_ended(how)) {
            return give_up(TB_E_DEAD, std::string("the ") + noun() + " " + how);
        }
        return failure(TB_E_BUFFER, "a descriptor could not be handed to the NPU: " + error);
    }
    tb_reply reply;
    const result r = request(TB_REQ_MAP, &m, sizeof m, &reply);
    if (r.ok()) {
        *free = true;
        *id = index;
    }
    return r;
}

result session::impl::unmap(uint32_t id) {
    const tb_map m{id, 0, 0, 0};
    tb_reply reply;
    result r = request(TB_REQ_UNMAP, &m, sizeof m, &reply);
    if (r.status == TB_E_PROTOCOL && usable(r)) {
        r = request(TB_REQ_UNMAP, &m, sizeof m, &reply); // damaged on its way: the buffer must not stay mapped
    }
    if (r.ok()) {
        ids[id] = false;
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

result session::map(int fd, uint64_t offset, uint64_t size, bool writable, uint32_t * id) {
    std::lock_guard<std::mutex> hold(self->lock);
    result r;
    return self->usable(r) ? self->map(fd, offset, size, writable, id) : r;
}

result session::unmap(uint32_t id) {
    std::lock_guard<std::mutex> hold(self->lock);
    result r;
    return self->usable(r) ? self->unmap(id) : r;
}

result session::compute(const tb_op * ops, uint32_t n_ops, uint64_t serial, bool unchanged) {
    std::lock_guard<std::mutex> hold(self->lock);
    result r;
    if (!self->usable(r)) {
        return r;
    }
    if (n_ops > TB_MAX_GRAPH_OPS) {
        return failure(TB_E_PROTOCOL,
                       "a graph of " + std::to_string(n_ops) + " ops; the most is " + std::to_string(TB_MAX_GRAPH_OPS));
    }
    const bool tracing = trace::get().on();
    if (tracing ? !self->traced && !self->ring_refused : self->traced || self->ring_refused) {
        self->follow_tracing(tracing);
        if (!self->usable(r)) {
            return r;
        }
    }
    const int64_t began = self->traced ? now_ns() : 0;
    tb_graph head{0, n_ops, serial};
    uint32_t kind = TB_REQ_COMPUTE;
    sent_graph * kept = serial != 0 ? &self->slot_for(serial) : nullptr;
    if (kept) {
        head.slot = static_cast<uint32_t>(kept - self->sent);
        kept->last_used = ++self->clock;
    }
    self->message.clear();
    self->put(&head, sizeof head);
    const bool known = kept && kept->serial == serial && kept->ops.size() == n_ops;
    if (kept) {
        kept->serial = 0; // until the NPU has it: a failure on the way, or no memory, means that it is sent whole again
    }
    if (known) {
        kind = TB_REQ_PATCH;
        head.n_ops = 0;
        for (uint32_t i = 0; i < n_ops && !unchanged; ++i) {
            if (std::memcmp(&kept->ops[i], &ops[i], sizeof(tb_op)) == 0) {
                continue;
            }
            kept->ops[i] = ops[i];
            const uint32_t index[2] = {i, 0};
            self->put(index, sizeof index);
            self->put(&ops[i], sizeof(tb_op));
            ++head.n_ops;
        }
        std::memcpy(self->message.data(), &head, sizeof head);
        ++self->count.patched;
    } else {
        self->put(ops, uint64_t{n_ops} * sizeof(tb_op));
        if (kept) {
            kept->ops.assign(ops, ops + n_ops);
        }
    }
    tb_reply reply;
    r = self->exchange(kind, kept ? &kept->expected_ns : nullptr, &reply);
    if (r.ok()) {
        if (self->traced) {
            self->traced->record(self->seq, kind, ops, n_ops, {began, self->doorbell_ns, self->replied_ns});
        }
        r = self->describe(reply, ops, n_ops);
    }
    if (kept) {
        kept->serial = r.ok() ? serial : 0;
    }
    return r;
}

result session::noop() {
    std::lock_guard<std::mutex> hold(self->lock);
    result r;
    if (!self->usable(r)) {
        return r;
    }
    tb_reply reply;
    return self->request(TB_REQ_NOOP, nullptr, 0, &reply);
}

result session::set_threads(int n) {
    std::lock_guard<std::mutex> hold(self->lock);
    result r;
    if (!self->usable(r)) {
        return r;
    }
    const tb_graph head{0, static_cast<uint32_t>(std::max(n, 0)), 0};
    tb_reply reply;
    r = self->request(TB_REQ_THREADS, &head, sizeof head, &reply);
    if (r.ok()) {
        self->n_threads = static_cast<int>(reply.value);
    }
    return r;
}

bool session::alive() const {
    if (self->failed.load(std::memory_order_acquire) || self->fork_count != forks.load(std::memory_order_relaxed)) {
        return false;
    }
    // While a request is under way its own waiting looks after the peer.
    std::unique_lock<std::mutex> hold(self->lock, std::try_to_lock);
    std::string how;
    if (hold.owns_lock() && self->peer_ended(how)) {
        self->give_up(TB_E_DEAD, std::string("the ") + self->noun() + " " + how);
        return false;
    }
    return true;
}

bool session::starved() const { return self->starved.load(std::memory_order_relaxed); }

int session::npu_pid() const { return self->npu->pid(); }

int session::n_threads() const { return self->n_threads.load(std::memory_order_relaxed); }

const options & session::opts() const { return self->opt; }

uint32_t session::guards() const { return self->guards; }

session_counters session::counters() const {
    std::lock_guard<std::mutex> hold(self->lock);
    return self->count;
}

const char * session::isa() const { return self->isa.c_str(); }

shared_memory & session::control_region() { return *self->region; }

shared_memory * session::trace_ring() { return self->traced ? self->traced->memory.get() : nullptr; }

} // namespace tb::session
