// Starting and stopping the NPU side. See session_impl.h.
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <unistd.h>

#include "cache.h"
#include "checksum.h"
#include "cpus.h"
#include "patience.h"
#include "session_impl.h"

namespace tb::session {

namespace {

constexpr int least_start_ms = 10000; // a process needs a moment to start, however short the deadline for replies
constexpr int grace_ms = 2000;        // between "stop" and the end of the peer

std::atomic<uint32_t> sessions{0}; // started in this program

} // namespace

session::impl::impl() : number(++sessions) {}

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
        npu = start_caller(region->fd(), sockets[1], why);
        break;
    case executor_kind::process:
        npu = start_process(opt.npud_path, region->fd(), sockets[1], why);
        break;
    case executor_kind::hexagon:
        npu = start_hexagon(opt.npud_path, region->fd(), sockets[1], why);
        break;
    }
    close(sockets[1]);
    return npu && shake_hands(why);
}

bool session::impl::shake_hands(std::string & why) {
    const int limit_ms = std::max(opt.deadline_ms, least_start_ms);
    patience left(limit_ms * ns_per_ms);
    std::string how;
    bool gone = false;
    wait_plan p;
    p.slice = between_looks;
    const auto keep_waiting = [&] { return !(gone = npu->ended(how)) && left.look(); };
    if (wait_word(&channel->npu_ready, 0, &channel->cpu_sleeping, p, keep_waiting) == wake_reason::stopped) {
        why = std::string("the ") + noun() +
              (gone ? " did not start: it " + how : " did not start within " + std::to_string(limit_ms) + " ms");
        return false;
    }
    tb_cache_invalidate(channel, sizeof *channel);
    // Not the whole channel: the NPU side already writes the words of its waits.
    tb_reply reply;
    tb_npu_hello npu_hello;
    std::memcpy(&reply, &channel->reply, sizeof reply);
    std::memcpy(&npu_hello, &channel->npu, sizeof npu_hello);
    if (reply.check != reply_check(0, reply) || (reply.status == TB_OK && npu_hello.check != hello_check(npu_hello))) {
        why = std::string("the ") + noun() + " sent a damaged greeting";
        return false;
    }
    if (reply.status != TB_OK || load_word(&channel->npu_ready) != TB_NPU_SERVING) {
        reply.why[sizeof reply.why - 1] = 0;
        why = std::string("the ") + noun() + " refused to serve: " + reply.why;
        return false;
    }
    isa.assign(npu_hello.isa, strnlen(npu_hello.isa, sizeof npu_hello.isa));
    guards = npu_hello.guards;
    n_threads = static_cast<int>(npu_hello.n_threads);
    served = true;
    return true;
}

void session::impl::stop() {
    if (!made_in.is_here()) {
        if (npu) {
            npu->forget();
        }
    } else if (npu) {
        if (served && !gave_up()) {
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
}

session::impl::~impl() {
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
    std::unique_ptr<session> s(new session);
    s->self->opt = opt;
    s->self->opt.memory_limit = address_limit(opt.kind, opt.memory_limit);
    if (opt.deadline_ms <= 0) {
        s->self->opt.deadline_ms = default_deadline_ms(opt.kind);
    }
    if (usable_cpus() == 1) {
        s->self->opt.spin_us = 0; // who spins takes the CPU from the side that it waits for
    }
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

} // namespace tb::session
