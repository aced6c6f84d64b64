// The NPU side under test, with the fuzz input as its CPU side: the real control region, the real socket, the real
// message handling and executor, in this thread.
//
// What it must not do: crash, read or write outside its mappings, answer with a damaged or senseless reply, or hang.
// Every mapping it makes stands between wide ranges without access, and what its last page holds beyond the mapped
// size is poisoned for AddressSanitizer (mmap and munmap are wrapped at link time).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "channel.h"
#include "checksum.h"
#include "executor.h"
#include "service.h"
#include "session.h"
#include "tilebeam/layout.h"
#include "unit.h"

#if defined(__SANITIZE_ADDRESS__)
#    define TILEBEAM_ASAN 1
#elif defined(__has_feature)
#    if __has_feature(address_sanitizer)
#        define TILEBEAM_ASAN 1
#    endif
#endif
#if defined(TILEBEAM_ASAN)
#    include <sanitizer/asan_interface.h>
#else
#    define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#    define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

// ---- guarded mappings

extern "C" {
void * __real_mmap(void * address, size_t size, int protection, int flags, int fd, off_t offset);
int __real_munmap(void * address, size_t size);
void * __wrap_mmap(void * address, size_t size, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void * address, size_t size);
}

namespace {

constexpr size_t page = 4096;
constexpr size_t guard = size_t{4} << 30;

size_t whole_pages(size_t size) { return (size + page - 1) / page * page; }

std::map<void *, size_t> & guarded() {
    static std::map<void *, size_t> mappings;
    return mappings;
}

} // namespace

void * __wrap_mmap(void * address, size_t size, int protection, int flags, int fd, off_t offset) {
    if (fd < 0 || size == 0 || size > guard) {
        return __real_mmap(address, size, protection, flags, fd, offset);
    }
    const size_t inner = whole_pages(size);
    void * all = __real_mmap(nullptr, inner + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) {
        return all;
    }
    auto * at = static_cast<uint8_t *>(all) + guard;
    if (__real_mmap(at, size, protection, flags | MAP_FIXED, fd, offset) == MAP_FAILED) {
        __real_munmap(all, inner + 2 * guard);
        return MAP_FAILED;
    }
    ASAN_POISON_MEMORY_REGION(at + size, inner - size);
    guarded()[at] = size;
    return at;
}

int __wrap_munmap(void * address, size_t size) {
    const auto found = guarded().find(address);
    if (found == guarded().end()) {
        return __real_munmap(address, size);
    }
    if (size != found->second) {
        std::fputs("fuzz: a mapping is given back with another size\n", stderr);
        std::abort();
    }
    guarded().erase(found);
    ASAN_UNPOISON_MEMORY_REGION(address, whole_pages(size));
    return __real_munmap(static_cast<uint8_t *>(address) - guard, whole_pages(size) + 2 * guard);
}

namespace tb::fuzz {

namespace {

constexpr uint64_t region_size = 262144; // small: a payload may claim all of it
// An op that is valid may still be seconds of arithmetic; such messages are left out. Multiply-adds of one op.
constexpr uint64_t most_work = 1 << 18;

totals count;

[[noreturn]] void broken(const char * what) {
    std::fprintf(stderr, "fuzz: %s\n", what);
    std::abort();
}

void require(bool holds, const char * what) {
    if (!holds) {
        broken(what);
    }
}

// What lives as long as the program: the region and the files behind the buffers.
struct world {
    int region = -1;
    tb_channel * channel = nullptr;
    int files[n_files];
    uint8_t * contents[n_files];

    world() {
        channel = reinterpret_cast<tb_channel *>(share(region_size, region));
        for (uint32_t i = 0; i < n_files; ++i) {
            contents[i] = share(file_bytes[i], files[i]);
        }
    }

    static uint8_t * share(size_t size, int & fd) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        require(fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0, "no shared memory");
        void * base = __real_mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        require(base != MAP_FAILED, "no shared memory");
        return static_cast<uint8_t *>(base);
    }

    // Small: integers 0..3, which are good row numbers and tiny floats. Bytes: a fixed random sequence. Ones: NaN, -1.
    void fill_with(uint8_t how) const {
        for (uint32_t f = 0; f < n_files; ++f) {
            uint8_t * p = contents[f];
            switch (how % fill_count) {
            case fill_zero:
                std::memset(p, 0, file_bytes[f]);
                break;
            case fill_ones:
                std::memset(p, 0xff, file_bytes[f]);
                break;
            case fill_small:
                for (uint32_t i = 0; i + 4 <= file_bytes[f]; i += 4) {
                    const uint32_t value = i / 4 % 4;
                    std::memcpy(p + i, &value, 4);
                }
                break;
            default: {
                uint32_t state = 12345 + f;
                for (uint32_t i = 0; i < file_bytes[f]; ++i) {
                    state = state * 1664525u + 1013904223u;
                    p[i] = static_cast<uint8_t>(state >> 24);
                }
            }
            }
        }
    }
};

world & the_world() {
    static world w;
    return w;
}

void write_hello(tb_channel & channel, const unit_head & head) {
    std::memset(&channel, 0, sizeof channel);
    tb_cpu_hello c = session::make_cpu_hello(region_size);
    c.memory_limit = uint64_t{head.limit} * page;
    c.n_threads = head.threads % 8 <= 5 ? 1 : head.threads % 8 - 4u;
    c.spin_us = 0;
    if (head.isa != 0) {
        const auto isas = npu::kernel_isas();
        std::strncpy(c.isa, isas[(head.isa - 1u) % isas.size()], sizeof c.isa - 1);
    }
    switch (head.hello % hello_count) {
    case hello_magic:
        c.magic ^= 1;
        break;
    case hello_protocol:
        c.protocol_version += 1;
        break;
    case hello_layout:
        c.layout_version += 1;
        break;
    case hello_abi:
        c.abi_bytes -= 8;
        break;
    case hello_region:
        c.region_size *= 2;
        break;
    case hello_threads:
        c.n_threads = 513;
        break;
    case hello_isa:
        std::memset(c.isa, 'x', sizeof c.isa);
        break;
    default:
        break;
    }
    c.check = session::hello_check(c);
    std::memcpy(&channel.cpu, &c, sizeof c);
}

uint64_t product(std::initializer_list<uint64_t> factors) {
    uint64_t p = 1;
    for (const uint64_t f : factors) {
        if (__builtin_mul_overflow(p, f, &p)) {
            return UINT64_MAX;
        }
    }
    return p;
}

// Multiply-adds of an op whose shape is accepted and whose result fits a buffer: only these ops do more work than
// their operands have bytes.
uint64_t work_of(const tb_op & op) {
    if (tb_op_check_shape(&op, nullptr) != TB_OK) {
        return 0;
    }
    const tb_tensor &a = op.src[0], &b = op.src[1];
    if (op.code == TB_OP_MUL_MAT || op.code == TB_OP_MUL_MAT_ID) {
        return product({a.ne[0], op.dst.ne[0], op.dst.ne[1], op.dst.ne[2], op.dst.ne[3]});
    }
    if (op.code == TB_OP_FLASH_ATTN) {
        return product({b.ne[1], uint64_t{a.ne[0]} + op.src[2].ne[0], a.ne[1], a.ne[2], a.ne[3]});
    }
    return 0;
}

bool is_affordable(const message & m) {
    const op_list list = ops_of(m);
    for (size_t i = 0; i < list.count; ++i) {
        tb_op op;
        std::memcpy(&op, m.payload.data() + list.first + i * list.step, sizeof op);
        if (work_of(op) > most_work) {
            return false;
        }
    }
    if (m.head.kind == TB_REQ_THREADS && m.payload.size() == sizeof(tb_graph)) {
        tb_graph g;
        std::memcpy(&g, m.payload.data(), sizeof g);
        return g.n_ops <= 4 || g.n_ops > 512; // starting hundreds of threads proves nothing
    }
    return true;
}

void poke(const message & m) {
    poke_head head;
    if (m.payload.size() <= sizeof head) {
        return;
    }
    std::memcpy(&head, m.payload.data(), sizeof head);
    const uint32_t file = head.file % n_files;
    const uint32_t at = head.offset % file_bytes[file];
    const size_t n = std::min<size_t>(m.payload.size() - sizeof head, file_bytes[file] - at);
    std::memcpy(the_world().contents[file] + at, m.payload.data() + sizeof head, n);
}

void hand_in_descriptor(const message & m, uint32_t seq, int socket) {
    const uint8_t damage = m.head.damage % damage_count;
    if (m.head.kind != TB_REQ_MAP || damage == damage_descriptor) {
        return;
    }
    uint32_t buffer = 0;
    if (m.payload.size() >= sizeof buffer) {
        std::memcpy(&buffer, m.payload.data(), sizeof buffer);
    }
    const int fd = damage == damage_not_a_file ? socket : the_world().files[buffer % n_files];
    require(session::send_descriptor(socket, seq, fd), "no descriptor could be sent");
    if (damage == damage_two_at_once) {
        require(session::send_descriptor(socket, seq, fd), "no descriptor could be sent");
    }
}

tb_request request_for(const message & m, uint32_t seq) {
    tb_request r{};
    r.kind = m.head.kind;
    r.payload_offset = session::payload_offset;
    r.payload_size = m.payload.size();
    switch (m.head.damage % damage_count) {
    case damage_low_offset:
        r.payload_offset = m.payload.size() % session::payload_offset;
        break;
    case damage_far_offset:
        r.payload_offset = region_size + m.payload.size();
        break;
    case damage_large_size:
        r.payload_size = region_size - session::payload_offset + 1;
        break;
    default:
        break;
    }
    const bool inside = r.payload_size <= m.payload.size();
    r.check = inside ? session::request_check(seq, r, m.payload.data()) : 0;
    if (m.head.damage % damage_count == damage_digest) {
        r.check ^= 1;
    }
    return r;
}

void check_reply(const tb_channel & c, uint32_t seq) {
    tb_reply r;
    std::memcpy(&r, &c.reply, sizeof r);
    require(r.check == session::reply_check(seq, r), "a reply's digest is wrong");
    require(r.status <= TB_E_INTERNAL, "a reply's status is none");
    require(std::memchr(r.why, 0, sizeof r.why) != nullptr, "a reply's reason does not end");
    require((r.status == TB_OK) == (r.why[0] == 0), "a failure without a reason, or a reason without a failure");
    require(r.status != TB_E_INTERNAL, "the NPU side reports a bug of its own");
    count.messages++;
    count.accepted += r.status == TB_OK;
}

// False: the NPU side has stopped.
bool deliver(const message & m, uint32_t seq, int socket, session::inline_service & npu) {
    tb_channel & c = *the_world().channel;
    hand_in_descriptor(m, seq, socket);
    uint8_t * payload = reinterpret_cast<uint8_t *>(&c) + session::payload_offset;
    std::copy(m.payload.begin(), m.payload.end(), payload);
    const tb_request r = request_for(m, seq);
    std::memcpy(&c.request, &r, sizeof r);
    session::store_word(&c.req_seq, seq);
    const bool goes_on = npu.answer(seq);
    require(session::load_word(&c.rep_seq) == seq, "a message was not answered");
    check_reply(c, seq);
    count.graphs += m.head.kind == TB_REQ_COMPUTE || m.head.kind == TB_REQ_PATCH;
    if (c.reply.status == TB_OK) {
        count.computed += ops_of(m).count;
    }
    return goes_on;
}

} // namespace

const totals & counted() { return count; }

void run(const unit & u) {
    world & w = the_world();
    w.fill_with(u.head.fill);
    write_hello(*w.channel, u.head);
    int sockets[2];
    require(session::make_socket_pair(sockets), "no sockets");
    {
        session::inline_service npu(fcntl(w.region, F_DUPFD_CLOEXEC, 0), sockets[1]);
        const bool served = npu.open();
        check_reply(*w.channel, 0);
        require(served == (u.head.hello % hello_count == hello_good), "a handshake was taken for another");
        uint32_t seq = 0;
        for (const message & m : u.messages) {
            if (!served) {
                break;
            }
            if (m.head.kind == kind_poke) {
                poke(m);
            } else if (!is_affordable(m)) {
                count.skipped++;
            } else if (!deliver(m, ++seq, sockets[0], npu)) {
                break;
            }
        }
    }
    close(sockets[0]);
    require(guarded().empty(), "a mapping was left behind");
}

} // namespace tb::fuzz
