// See service.h.
#include "service.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <new>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "build_id.h"
#include "bus_guard.h"
#include "cache.h"
#include "channel.h"
#include "checksum.h"
#include "executor.h"
#include "huge_pages.h"
#include "tilebeam/layout.h"
#include "trace_ring.h"
#include "wait.h"

namespace tb::session {

namespace {

constexpr uint32_t most_threads = 512;

// What a request led to, before it becomes a tb_reply.
struct answer {
    tb_status status = TB_OK;
    std::string why;
    uint32_t op_index = 0;
    uint32_t op_code = 0;
    uint32_t tag = 0;
    uint32_t value = 0;
};

answer refuse(tb_status status, std::string why) { return {status, std::move(why)}; }

template <class T> T read_at(const std::vector<uint8_t> & bytes, size_t offset) {
    T value;
    std::memcpy(&value, bytes.data() + offset, sizeof value);
    return value;
}

class service {
  public:
    service(int region_fd, int socket_fd, uint32_t guard_bits)
        : region(region_fd), socket(socket_fd), guards(guard_bits) {}
    ~service();
    int run();
    bool open();
    bool serve_one(uint32_t seq); // false: it was a stop

  private:
    struct mapping {
        void * base;
        uint64_t size;
        bool writable;
        std::unique_ptr<guarded_range> guard; // of a file that may lose pages
    };
    struct kept_graph {
        npu::graph graph;
        uint64_t serial = 0; // 0: nothing kept
    };

    bool map_region();
    answer shake_hands();
    answer handle(uint32_t seq);
    answer take_request(uint32_t seq);
    answer map_buffer(uint32_t seq);
    answer unmap_buffer();
    answer compute();
    answer patch();
    answer set_threads();
    answer set_trace();
    answer run_graph(npu::graph & g);
    void end_trace();
    answer find_lost_file(const npu::graph & g) const;
    void reply(uint32_t seq, const answer & a, int64_t busy_ns);

    int region;
    int socket;
    uint32_t guards;
    tb_channel * channel = nullptr;
    uint64_t region_size = 0;
    uint32_t spin_us = 0;
    uint32_t seq_in_work = 0;
    bool authentic = false; // the request in work is one that the CPU side sent under this number
    std::unique_ptr<npu::executor> executor;
    std::map<uint32_t, mapping> mappings;
    kept_graph kept[TB_MAX_GRAPHS];
    const npu::graph * ran = nullptr; // by the request in work
    npu::graph unkept;                // a graph without a serial; keeps its memory between requests
    tb_request request{};
    std::vector<uint8_t> payload;
    ring_writer trace;
    uint32_t trace_buffer = TB_NO_BUFFER; // where its ring lies
};

service::~service() {
    executor.reset(); // its threads end before what they work on goes away
    for (auto & [id, m] : mappings) {
        m.guard.reset();
        munmap(m.base, m.size);
    }
    if (channel) {
        munmap(channel, region_size);
    }
    close(region);
    close(socket);
}

bool service::map_region() {
    struct stat st;
    if (fstat(region, &st) != 0 || st.st_size < static_cast<off_t>(sizeof(tb_channel))) {
        return false;
    }
    region_size = static_cast<uint64_t>(st.st_size);
    void * base = mmap(nullptr, region_size, PROT_READ | PROT_WRITE, MAP_SHARED, region, 0);
    if (base == MAP_FAILED) {
        return false;
    }
    channel = static_cast<tb_channel *>(base);
    return true;
}

answer service::shake_hands() {
    tb_cache_invalidate(&channel->cpu, sizeof channel->cpu);
    tb_cpu_hello c;
    std::memcpy(&c, &channel->cpu, sizeof c);
    const auto differ = [](const char * what, uint64_t theirs, uint64_t ours) {
        return refuse(TB_E_VERSION, std::string(what) + " " + std::to_string(theirs) +
                                        " of the CPU side is not the NPU's " + std::to_string(ours));
    };
    if (c.magic != TB_PROTOCOL_MAGIC) {
        return refuse(TB_E_PROTOCOL, "the control region does not start with the protocol's magic number");
    }
    if (c.protocol_version != TB_PROTOCOL_VERSION) {
        return differ("protocol version", c.protocol_version, TB_PROTOCOL_VERSION);
    }
    if (c.layout_version != TB_LAYOUT_VERSION) {
        return differ("tile layout version", c.layout_version, TB_LAYOUT_VERSION);
    }
    if (c.abi_bytes != abi_bytes) {
        return differ("message size", c.abi_bytes, abi_bytes);
    }
    if (std::memcmp(c.build_id, build_id, sizeof build_id) != 0) {
        return refuse(TB_E_VERSION, "it was built from other sources than the program: install both from one build");
    }
    if (c.check != hello_check(c)) {
        return refuse(TB_E_PROTOCOL, "the greeting was damaged on its way (its digest does not match)");
    }
    if (c.region_size != region_size || region_size <= payload_offset) {
        return differ("control region size", c.region_size, region_size);
    }
    if (c.n_threads > most_threads) {
        return refuse(TB_E_PROTOCOL, "more than 512 threads wanted");
    }
    npu::config cfg;
    cfg.n_threads = static_cast<int>(c.n_threads);
    cfg.isa.assign(c.isa, strnlen(c.isa, sizeof c.isa));
    cfg.memory_limit = c.memory_limit;
    cfg.fuse = (c.flags & TB_HELLO_UNFUSED) == 0;
    const std::vector<const char *> isas = npu::kernel_isas();
    if (!cfg.isa.empty() && std::find(isas.begin(), isas.end(), cfg.isa) == isas.end()) {
        std::string text = "this CPU has no kernels named '" + cfg.isa + "', only";
        for (const char * isa : isas) {
            text += std::string(" ") + isa;
        }
        return refuse(TB_E_UNSUPPORTED, text);
    }
    executor = std::make_unique<npu::executor>(cfg);
    spin_us = std::min(c.spin_us, 1000000u);
    tb_npu_hello hello{};
    std::strncpy(hello.isa, executor->isa(), sizeof hello.isa - 1);
    hello.n_threads = static_cast<uint32_t>(executor->n_threads());
    hello.pid = static_cast<uint32_t>(getpid());
    hello.guards = guards;
    hello.check = hello_check(hello);
    std::memcpy(&channel->npu, &hello, sizeof hello);
    tb_cache_clean(&channel->npu, sizeof channel->npu);
    return {};
}

answer service::take_request(uint32_t seq) {
    authentic = false;
    tb_cache_invalidate(&channel->request, sizeof channel->request);
    std::memcpy(&request, &channel->request, sizeof request);
    if (request.payload_offset < payload_offset || request.payload_offset > region_size ||
        request.payload_size > region_size - request.payload_offset) {
        return refuse(TB_E_PROTOCOL, "the message was damaged on its way (its payload is outside the control region)");
    }
    const uint8_t * shared = reinterpret_cast<const uint8_t *>(channel) + request.payload_offset;
    tb_cache_invalidate(shared, request.payload_size);
    payload.assign(shared, shared + request.payload_size);
    if (request_check(seq, request, payload.data()) != request.check) {
        return refuse(TB_E_PROTOCOL, "the message was damaged on its way (its digest does not match)");
    }
    authentic = true;
    return {};
}

answer service::map_buffer(uint32_t seq) {
    // Taken off the socket first: a refused request must not leave its descriptor behind for the next one.
    struct owned_fd {
        int fd;
        ~owned_fd() {
            if (fd >= 0) {
                close(fd);
            }
        }
    } file{receive_descriptor(socket, seq)};
    if (payload.size() != sizeof(tb_map)) {
        return refuse(TB_E_PROTOCOL, "a map request of the wrong size");
    }
    const auto m = read_at<tb_map>(payload, 0);
    const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    if (m.buffer >= TB_MAX_BUFFERS || mappings.count(m.buffer) != 0) {
        return refuse(TB_E_BUFFER, "no such buffer id, or it is in use");
    }
    if (m.size == 0 || m.offset % page != 0 || m.offset > INT64_MAX || m.size > INT64_MAX - m.offset) {
        return refuse(TB_E_BOUNDS, "a range to map that is empty, overflows or does not start on a page");
    }
    if (m.size > SIZE_MAX - page) {
        return refuse(TB_E_NOMEM, "a range to map that is larger than the address space");
    }
    if (file.fd < 0) {
        return refuse(TB_E_PROTOCOL, "a map request without a descriptor");
    }
    struct stat st;
    if (fstat(file.fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        return refuse(TB_E_BUFFER, "the descriptor to map is not a file");
    }
    // Reading past the end of a mapped file is a SIGBUS; bus_guard.h is for a file that is truncated later.
    if (static_cast<uint64_t>(st.st_size) < m.offset + m.size) {
        return refuse(TB_E_BOUNDS, "the file is shorter than the range to map");
    }
    const int protection = m.writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void * base = map_shared(file.fd, m.offset, m.size, protection);
    if (base == MAP_FAILED) {
        const std::string text = std::string("mapping failed: ") + std::strerror(errno);
        return refuse(errno == EACCES || errno == EPERM ? TB_E_BUFFER : TB_E_NOMEM, text);
    }
    madvise(base, m.size, MADV_HUGEPAGE);
    try {
        mapping & kept_mapping = mappings[m.buffer];
        kept_mapping.base = base;
        kept_mapping.size = m.size;
        kept_mapping.writable = m.writable != 0;
        if (can_shrink(file.fd)) {
            kept_mapping.guard = std::make_unique<guarded_range>(base, m.size, protection, guarded_range::repair::rest);
        }
    } catch (const std::bad_alloc &) {
        mappings.erase(m.buffer);
        munmap(base, m.size);
        throw;
    }
    const npu::origin from{st.st_dev, st.st_ino, m.offset};
    const tb_status status = executor->map(m.buffer, base, m.size, m.writable != 0, from);
    if (status != TB_OK) {
        mappings.erase(m.buffer);
        munmap(base, m.size);
        return refuse(status, status == TB_E_NOMEM ? "the session's memory limit is reached" : "not mappable");
    }
    return {};
}

answer service::unmap_buffer() {
    if (payload.size() != sizeof(tb_map)) {
        return refuse(TB_E_PROTOCOL, "an unmap request of the wrong size");
    }
    const auto it = mappings.find(read_at<tb_map>(payload, 0).buffer);
    if (it == mappings.end()) {
        return refuse(TB_E_BUFFER, "no such buffer");
    }
    if (it->first == trace_buffer) {
        end_trace();
    }
    executor->unmap(it->first);
    it->second.guard.reset();
    munmap(it->second.base, it->second.size);
    mappings.erase(it);
    return {};
}

answer service::run_graph(npu::graph & g) {
    executor->set_progress(&channel->npu_progress, seq_in_work << 16);
    const npu::outcome o = executor->run(g);
    ran = &g;
    answer a;
    a.status = o.status;
    a.why = o.why;
    a.op_index = o.op_index;
    a.value = static_cast<uint32_t>(executor->schedules());
    if (any_range_hit()) {
        if (const answer lost = find_lost_file(g); lost.status != TB_OK) {
            a = lost; // whatever came of it, it was computed with zeros
        }
    }
    if (a.status != TB_OK && a.op_index < g.size()) {
        a.op_code = g.op(a.op_index).code;
        a.tag = g.op(a.op_index).tag;
    }
    return a;
}

// The first op that uses a mapped file of which pages are missing. The ops may have been refused for anything.
answer service::find_lost_file(const npu::graph & g) const {
    for (uint32_t i = 0; i < g.size(); ++i) {
        const tb_op & op = g.op(i);
        const auto lost = [this](const tb_tensor & t) {
            const auto it = mappings.find(t.buffer);
            return it != mappings.end() && it->second.guard && it->second.guard->hit();
        };
        if (op.code != TB_OP_NOP &&
            (lost(op.dst) || std::any_of(op.src, op.src + std::min<uint32_t>(op.n_src, TB_MAX_SRC), lost))) {
            answer a = refuse(TB_E_BUFFER, "the mapped file lost pages: it was truncated, or its disk fails");
            a.op_index = i;
            return a;
        }
    }
    return {};
}

answer service::compute() {
    if (payload.size() < sizeof(tb_graph)) {
        return refuse(TB_E_PROTOCOL, "a graph without its header");
    }
    const auto head = read_at<tb_graph>(payload, 0);
    if (head.n_ops > TB_MAX_GRAPH_OPS || payload.size() != sizeof head + uint64_t{head.n_ops} * sizeof(tb_op)) {
        return refuse(TB_E_PROTOCOL, "a graph whose size is not that of its ops");
    }
    if (head.slot >= TB_MAX_GRAPHS) {
        return refuse(TB_E_PROTOCOL, "no such graph slot");
    }
    kept_graph & slot = kept[head.slot];
    npu::graph & g = head.serial ? slot.graph : unkept;
    if (head.serial) {
        slot.serial = 0; // until the copy is whole
    }
    std::vector<tb_op> ops(head.n_ops);
    if (!ops.empty()) {
        std::memcpy(ops.data(), payload.data() + sizeof head, ops.size() * sizeof(tb_op));
    }
    for (tb_op & op : ops) {
        op.name[sizeof op.name - 1] = 0;
    }
    g.assign(ops.data(), head.n_ops);
    if (head.serial) {
        slot.serial = head.serial;
    }
    return run_graph(g);
}

answer service::patch() {
    if (payload.size() < sizeof(tb_graph)) {
        return refuse(TB_E_PROTOCOL, "a patch without its header");
    }
    const auto head = read_at<tb_graph>(payload, 0);
    if (head.n_ops > TB_MAX_GRAPH_OPS || payload.size() != sizeof head + uint64_t{head.n_ops} * sizeof(tb_patch)) {
        return refuse(TB_E_PROTOCOL, "a patch whose size is not that of its ops");
    }
    if (head.slot >= TB_MAX_GRAPHS || head.serial == 0 || kept[head.slot].serial != head.serial) {
        return refuse(TB_E_PROTOCOL, "a patch for a graph that is not kept");
    }
    npu::graph & g = kept[head.slot].graph;
    const auto patch_at = [&](uint32_t i) { return sizeof head + i * sizeof(tb_patch); };
    for (uint32_t i = 0; i < head.n_ops; ++i) {
        if (read_at<uint32_t>(payload, patch_at(i) + offsetof(tb_patch, index)) >= g.size()) {
            return refuse(TB_E_PROTOCOL, "a patch of an op that the graph does not have");
        }
    }
    for (uint32_t i = 0; i < head.n_ops; ++i) {
        auto p = read_at<tb_patch>(payload, patch_at(i));
        p.op.name[sizeof p.op.name - 1] = 0;
        g.replace(p.index, p.op);
    }
    return run_graph(g);
}

answer service::set_threads() {
    if (payload.size() != sizeof(tb_graph)) {
        return refuse(TB_E_PROTOCOL, "a threads request of the wrong size");
    }
    const uint32_t n = read_at<tb_graph>(payload, 0).n_ops;
    if (n > most_threads) {
        return refuse(TB_E_PROTOCOL, "more than 512 threads wanted");
    }
    executor->set_threads(static_cast<int>(n));
    answer a;
    a.value = static_cast<uint32_t>(executor->n_threads());
    return a;
}

void service::end_trace() {
    trace = ring_writer();
    trace_buffer = TB_NO_BUFFER;
    executor->set_stamps(false);
}

answer service::set_trace() {
    if (payload.size() != sizeof(tb_map)) {
        return refuse(TB_E_PROTOCOL, "a trace request of the wrong size");
    }
    const uint32_t buffer = read_at<tb_map>(payload, 0).buffer;
    if (buffer == TB_NO_BUFFER) {
        end_trace();
        return {};
    }
    const auto it = mappings.find(buffer);
    if (it == mappings.end() || !it->second.writable || !ring_writer::fits(it->second.size)) {
        return refuse(TB_E_BUFFER, "no buffer that could hold a trace");
    }
    trace = ring_writer(it->second.base, it->second.size);
    trace_buffer = buffer;
    executor->set_stamps(true);
    return {};
}

answer service::handle(uint32_t seq) {
    seq_in_work = seq;
    try {
        if (const answer a = take_request(seq); a.status != TB_OK) {
            return a;
        }
        switch (request.kind) {
        case TB_REQ_NOOP:
        case TB_REQ_STOP:
            return {};
        case TB_REQ_MAP:
            return map_buffer(seq);
        case TB_REQ_UNMAP:
            return unmap_buffer();
        case TB_REQ_COMPUTE:
            return compute();
        case TB_REQ_PATCH:
            return patch();
        case TB_REQ_THREADS:
            return set_threads();
        case TB_REQ_TRACE:
            return set_trace();
        default:
            return refuse(TB_E_PROTOCOL, "unknown request");
        }
    } catch (const std::bad_alloc &) {
        return refuse(TB_E_NOMEM, "out of memory");
    } catch (const std::exception & e) {
        return refuse(TB_E_INTERNAL, e.what());
    }
}

void service::reply(uint32_t seq, const answer & a, int64_t busy_ns) {
    tb_reply r{};
    r.status = a.status;
    r.op_index = a.op_index;
    r.op_code = a.op_code;
    r.tag = a.tag;
    r.value = a.value;
    r.busy_ns = static_cast<uint64_t>(busy_ns);
    std::memcpy(r.why, a.why.data(), std::min(a.why.size(), sizeof r.why - 1));
    r.check = reply_check(seq, r);
    std::memcpy(&channel->reply, &r, sizeof r);
    tb_cache_clean(&channel->reply, sizeof channel->reply);
}

bool service::open() {
    if (!map_region()) {
        return false; // nowhere to say why: the CPU side sees this side end
    }
    answer hello;
    try {
        hello = shake_hands();
    } catch (const std::exception & e) {
        hello = refuse(TB_E_NOMEM, e.what());
    }
    reply(0, hello, 0);
    const bool accepted = hello.status == TB_OK;
    ring(&channel->npu_ready, accepted ? TB_NPU_SERVING : TB_NPU_REFUSED, &channel->cpu_sleeping);
    return accepted;
}

bool service::serve_one(uint32_t seq) {
    const int64_t start = now_ns();
    const uint32_t kind = load_word(&channel->request.kind);
    if (kind == TB_REQ_COMPUTE || kind == TB_REQ_PATCH) {
        executor->wake(); // a hint only: the workers get up while the message is read and checked
    }
    ran = nullptr;
    const answer a = handle(seq);
    const int64_t end = now_ns();
    if (trace) {
        trace.add_message(seq, request.kind, start, end);
        if (ran) {
            try {
                trace.add_ops(seq, *ran, *executor);
                trace.add_notes(seq, end, now_ns());
            } catch (const std::bad_alloc &) {
                // the trace has no ops of this graph
            }
        }
        trace.publish();
    }
    reply(seq, a, end - start);
    const bool stop = a.status == TB_OK && request.kind == TB_REQ_STOP;
    if (stop) {
        store_word(&channel->npu_ready, TB_NPU_STOPPED);
    }
    ring(&channel->rep_seq, seq, &channel->cpu_sleeping);
    return !stop;
}

int service::run() {
    if (!open()) {
        return 1;
    }
    uint32_t seen = 0;
    uint32_t done = 0;
    wait_plan plan;
    spin_budget budget(int64_t{spin_us} * 1000);
    plan.slice = 1000000000; // idle: one look a second whether the CPU side is still there
    bool hung_up = false;
    const auto still_there = [&] { return !(hung_up = peer_hung_up(socket)); };
    for (;;) {
        plan.spin_until = budget.next();
        const wake_reason woken =
            wait_word(&channel->req_seq, seen, &channel->npu_sleeping, plan, std::ref(still_there));
        if (woken == wake_reason::stopped) {
            break;
        }
        seen = load_word(&channel->req_seq);
        if (static_cast<int32_t>(seen - done) <= 0) {
            continue; // not the CPU side's: a request is never run twice, nor out of order
        }
        budget.report(woken == wake_reason::seen_spinning);
        if (!serve_one(seen)) {
            return 0;
        }
        if (authentic) {
            done = seen; // a counter that only jumped has no request with its digest
        }
    }
    store_word(&channel->npu_ready, TB_NPU_STOPPED);
    return hung_up ? 0 : 1;
}

} // namespace

int serve(int region_fd, int socket_fd, uint32_t guards) {
    try {
        service s(region_fd, socket_fd, guards);
        return s.run();
    } catch (const std::exception &) {
        return 1; // no memory for the service itself
    }
}

struct inline_service::impl {
    impl(int region_fd, int socket_fd) : side(region_fd, socket_fd, 0) {}
    service side;
};

inline_service::inline_service(int region_fd, int socket_fd) : self(std::make_unique<impl>(region_fd, socket_fd)) {}

inline_service::~inline_service() = default;

bool inline_service::open() { return self->side.open(); }

bool inline_service::answer(uint32_t seq) { return self->side.serve_one(seq); }

} // namespace tb::session
