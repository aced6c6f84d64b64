// Session, channel, service, thread pool and traces under many threads, for ThreadSanitizer: tilebeam-stress [SECONDS].
// With `race` in place of the seconds it does one thing wrong, to see that this would be noticed.
//
// The two sides of a session map the same memory twice, at two addresses, and ThreadSanitizer knows memory by
// its address: it would see neither the channel's races nor its order. So here mmap is wrapped at link time: who maps a
// file again gets the first mapping's address, and both sides of the channel meet in the same bytes.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <tuple>
#include <vector>

#include "executor.h"
#include "session.h"
#include "thread_pool.h"
#include "trace.h"
#include "wait.h"

// ---- one mapping per file

extern "C" {
void * __real_mmap(void * address, size_t size, int protection, int flags, int fd, off_t offset);
int __real_munmap(void * address, size_t size);
void * __wrap_mmap(void * address, size_t size, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void * address, size_t size);
}

namespace {

using file_range = std::tuple<dev_t, ino_t, off_t, size_t>;
struct mapped {
    void * address;
    int users;
};
std::mutex mappings_lock;
std::map<file_range, mapped> mappings;

} // namespace

void * __wrap_mmap(void * address, size_t size, int protection, int flags, int fd, off_t offset) {
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) {
        return __real_mmap(address, size, protection, flags, fd, offset);
    }
    const size_t whole = (size + 4095) / 4096 * 4096;
    std::lock_guard<std::mutex> hold(mappings_lock);
    const auto [at, fresh] = mappings.try_emplace(file_range{st.st_dev, st.st_ino, offset, whole}, mapped{nullptr, 0});
    if (fresh) {
        at->second.address = __real_mmap(address, size, PROT_READ | PROT_WRITE, flags, fd, offset);
    } else if (flags & MAP_FIXED) {
        __real_munmap(address, size); // the place that was reserved for it
    }
    at->second.users++;
    return at->second.address;
}

int __wrap_munmap(void * address, size_t size) {
    std::lock_guard<std::mutex> hold(mappings_lock);
    for (auto at = mappings.begin(); at != mappings.end(); ++at) {
        if (at->second.address == address) {
            if (--at->second.users > 0) {
                return 0;
            }
            mappings.erase(at);
            break;
        }
    }
    return __real_munmap(address, size);
}

namespace {

using tb::session::result;
using tb::session::session;
using tb::session::shared_memory;

constexpr uint32_t n = 6000; // elements of a vector: more than one thread of the pool runs alone

[[noreturn]] void fail(const std::string & what) {
    std::fprintf(stderr, "stress: %s\n", what.c_str());
    std::exit(1);
}

void require(const result & r) {
    if (!r.ok()) {
        fail(r.why);
    }
}

tb_tensor vector(uint32_t buffer, uint64_t index, uint32_t elements) {
    tb_tensor t{};
    t.buffer = buffer;
    t.type = TB_F32;
    t.offset = index * n * sizeof(float);
    const uint32_t ne[4] = {elements, 1, 1, 1};
    std::memcpy(t.ne, ne, sizeof ne);
    t.nb[0] = sizeof(float);
    t.nb[1] = t.nb[2] = t.nb[3] = sizeof(float) * elements;
    return t;
}

tb_op scale(const tb_tensor & dst, const tb_tensor & src, float factor) {
    tb_op op{};
    op.code = TB_OP_SCALE;
    op.n_src = 1;
    op.dst = dst;
    op.src[0] = src;
    for (int i = 1; i < TB_MAX_SRC; ++i) {
        op.src[i].buffer = TB_NO_BUFFER;
    }
    std::memcpy(&op.params[0], &factor, sizeof factor);
    std::strncpy(op.name, "stress", sizeof op.name - 1);
    return op;
}

// One client of a session that others use too: graphs over a buffer of its own, sent whole and patched.
void client(session & s, uint64_t serial, int64_t until) {
    std::minstd_rand random(static_cast<unsigned>(serial));
    std::string why;
    while (tb::now_ns() < until) {
        const auto memory = shared_memory::create("tilebeam-stress", 2 * n * sizeof(float), why);
        uint32_t buffer = 0;
        if (!memory) {
            fail(why);
        }
        require(s.map(memory->fd(), 0, memory->size(), true, &buffer));
        auto * floats = static_cast<volatile float *>(memory->data());
        for (int round = 0; round < 20 && tb::now_ns() < until; ++round) {
            const auto start = static_cast<float>(random() % 1000);
            const uint32_t elements = random() % 2 ? n : 7;
            for (uint32_t i = 0; i < elements; ++i) {
                floats[i] = start;
            }
            const float factor = random() % 4 ? 2.0f : 3.0f;
            const tb_tensor x = vector(buffer, 0, elements), y = vector(buffer, 1, elements);
            const tb_op ops[3] = {scale(y, x, factor), scale(y, y, 0.5f), scale(x, y, 4.0f)};
            require(s.compute(ops, 3, random() % 3 ? serial : 0));
            for (uint32_t i = 0; i < elements; i += elements - 1) {
                if (floats[i] != start * factor * 2.0f) {
                    fail("a result is wrong");
                }
            }
            if (random() % 8 == 0) {
                require(s.noop());
                require(s.set_threads(1 + static_cast<int>(random() % 4)));
            }
            if (!s.alive() || s.n_threads() < 1 || s.counters().requests == 0) {
                fail("the session is not what it should be");
            }
        }
        require(s.unmap(buffer));
    }
}

// Requests answered by the threads that send them, and by tilebeam-npud (npud_thread.cpp), in turn.
void shared_session(int64_t until) {
    for (bool process = true; tb::now_ns() < until; process = !process) {
        tb::session::options opt;
        opt.n_threads = 3;
        opt.kind = process ? tb::session::executor_kind::process : tb::session::executor_kind::thread;
        std::string why;
        const auto s = session::start(opt, why);
        if (!s) {
            fail(why);
        }
        const int64_t end = std::min(until, tb::now_ns() + int64_t{700} * 1000000);
        std::vector<std::thread> clients;
        for (uint64_t i = 0; i < 3; ++i) {
            clients.emplace_back([&s, i, end] { client(*s, i + 1, end); });
        }
        for (std::thread & t : clients) {
            t.join();
        }
    }
}

void switch_traces(int64_t until) {
    std::vector<tb_trace_record> room(1000);
    tb::session::trace & t = tb::session::trace::get();
    while (tb::now_ns() < until) {
        t.start(50000);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        t.stop();
        while (t.take(room.data(), room.size()) != 0) {
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
}

// The pool alone: every thread takes chunks, meets the others, and sees what they wrote.
struct pool_job {
    tb::npu::thread_pool * pool;
    int hands;
    std::vector<int> written;
    int sum = 0;
    tb::npu::chunk_counter chunks[5];
    int64_t next_chunk(int round) { return chunks[round].next.fetch_add(1, std::memory_order_relaxed); }
};

void add_up(void * arg, int) {
    auto & job = *static_cast<pool_job *>(arg);
    int sum = 0;
    for (const int w : job.written) {
        sum += w;
    }
    job.sum = sum;
}

void pool_task(void * arg, int thread) {
    auto & job = *static_cast<pool_job *>(arg);
    const auto size = static_cast<int64_t>(job.written.size());
    for (int round = 0; round < 5; ++round) {
        for (int64_t i = job.next_chunk(round); i < size; i = job.next_chunk(round)) {
            job.written[static_cast<size_t>(i)] += 1;
        }
        if (round % 2) {
            job.pool->barrier(thread, job.hands, add_up, arg);
            continue;
        }
        job.pool->barrier(thread, job.hands);
        if (thread == round % job.hands) {
            add_up(arg, thread);
        }
        job.pool->barrier(thread, job.hands);
    }
}

void pools(int64_t until) {
    std::minstd_rand random(3);
    for (int threads = 1; tb::now_ns() < until; threads = threads % 5 + 1) {
        tb::npu::thread_pool pool(threads);
        for (int round = 0; round < 30; ++round) {
            const int hands = 1 + static_cast<int>(random() % static_cast<unsigned>(pool.size()));
            pool_job job{&pool, hands, std::vector<int>(64), {}, {}};
            pool.wake(hands);
            pool.run(pool_task, &job, hands);
            if (job.sum != 5 * 64) {
                fail("a chunk was taken twice or never");
            }
        }
    }
}

// Ops on the executor alone: steps that run without a barrier between them must not need one.
class layer {
  public:
    layer(uint32_t rows, uint32_t seed) : n_rows(rows) {
        std::minstd_rand random(seed);
        for (float & x : memory) {
            x = static_cast<float>(random() % 1000) / 1000.0f - 0.5f;
        }
        const auto at = [this](uint32_t slot, uint32_t width = k) { return matrix(0, slot, width, n_rows); };
        const tb_tensor x = at(0), normed = at(1), q = at(2), keys = at(3), v = at(4), out = at(5),
                        bias = matrix(0, 6, k, 1);
        op(TB_OP_RMS_NORM, normed, {x});
        op(TB_OP_MUL, normed, {normed, bias});
        for (const tb_tensor & y : {q, v, keys}) {
            op(TB_OP_MUL_MAT, y, {matrix(1, 0, k, k), normed});
            op(TB_OP_ADD, y, {y, bias});
        }
        op(TB_OP_SCALE, q, {q}, 0.5f);
        op(TB_OP_MUL, keys, {keys, q});
        tb_tensor indices = matrix(0, 7, n_rows, 1);
        indices.type = TB_I32;
        for (uint32_t i = 0; i < n_rows; ++i) {
            const int32_t row = static_cast<int32_t>(n_rows - 1 - i);
            std::memcpy(&memory[7 * slot_floats + i], &row, sizeof row);
        }
        op(TB_OP_SET_ROWS, at(8), {keys, indices});
        op(TB_OP_SET_ROWS, at(9), {v, indices});
        op(TB_OP_MUL_MAT, out, {matrix(1, 0, k, k), at(8)});
        op(TB_OP_ADD, out, {out, x});
        op(TB_OP_MUL_MAT, q, {matrix(1, 0, k, k), out});
        op(TB_OP_MUL_MAT, v, {matrix(1, 0, k, k), out});
        op(TB_OP_GLU, keys, {q, v});
        ops.back().params[0] = 2; // SWIGLU
        op(TB_OP_MUL_MAT, x, {matrix(1, 0, k, k), keys});
        op(TB_OP_ADD, x, {x, out});
        const tb_tensor wide = at(10, 1056), wider = at(11, 1056); // rows of more than one run
        op(TB_OP_ADD, wide, {wide, wider});
        op(TB_OP_SCALE, wider, {wide}, 0.25f);
        op(TB_OP_RMS_NORM, wide, {wider});
        op(TB_OP_ADD, wide, {wide, wider});
    }

    // `hands` threads at work, 0: as many as the machine lets.
    std::vector<float> run(int threads, bool fuse, int hands) const {
        std::vector<float> work = memory, weights(k * k, 0.01f);
        tb::npu::config cfg;
        cfg.n_threads = threads;
        cfg.isa = "portable";
        cfg.fuse = fuse;
        tb::npu::executor npu(cfg);
        npu.set_hands(hands);
        npu.map(0, work.data(), work.size() * sizeof(float), true);
        npu.map(1, weights.data(), weights.size() * sizeof(float), false);
        tb::npu::graph g;
        g.assign(ops.data(), static_cast<uint32_t>(ops.size()));
        for (int round = 0; round < 3; ++round) {
            if (const tb::npu::outcome o = npu.run(g); o.status != TB_OK) {
                fail(o.why);
            }
        }
        return work;
    }

  private:
    static constexpr uint32_t k = 64, slot_floats = 80 * 1056;

    static tb_tensor matrix(uint32_t buffer, uint32_t slot, uint32_t columns, uint32_t rows) {
        tb_tensor t = vector(buffer, 0, columns);
        t.offset = uint64_t{slot} * slot_floats * sizeof(float);
        t.ne[1] = rows;
        t.nb[2] = t.nb[3] = t.nb[1] * rows;
        return t;
    }

    void op(uint32_t code, const tb_tensor & dst, std::initializer_list<tb_tensor> sources, float param = 1e-5f) {
        tb_op made = scale(dst, dst, param);
        made.code = code;
        made.n_src = static_cast<uint32_t>(sources.size());
        std::copy(sources.begin(), sources.end(), made.src);
        ops.push_back(made);
    }

    const uint32_t n_rows;
    std::vector<float> memory = std::vector<float>(12 * slot_floats);
    std::vector<tb_op> ops;
};

void layers(int64_t until) {
    for (uint32_t seed = 1; tb::now_ns() < until; ++seed) {
        const layer some(seed % 3 == 0 ? 1 : seed % 3 == 1 ? 5 : 70, seed);
        const int threads = 2 + static_cast<int>(seed % 4);
        const std::vector<float> want = some.run(1, false, 1),
                                 got = some.run(threads, true, static_cast<int>(seed % 7) % (threads + 1));
        if (std::memcmp(want.data(), got.data(), want.size() * sizeof(float)) != 0) {
            fail("a fused layer gives something else");
        }
    }
}

// What must be reported: two threads write a word of one file through a mapping each, in no order.
int race() {
    std::string why;
    const auto memory = shared_memory::create("tilebeam-stress", 4096, why);
    if (!memory) {
        fail(why);
    }
    void * again = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd(), 0);
    const auto write = [](void * word) {
        for (int i = 0; i < 1000; ++i) {
            *static_cast<volatile int *>(word) = i;
        }
    };
    std::thread other(write, again);
    write(memory->data());
    other.join();
    munmap(again, 4096);
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc > 1 && std::strcmp(argv[1], "race") == 0) {
        return race();
    }
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
    const int64_t until = tb::now_ns() + static_cast<int64_t>(seconds * 1e9);
    std::vector<std::thread> all;
    for (void (*part)(int64_t) : {shared_session, shared_session, switch_traces, pools, layers}) {
        all.emplace_back(part, until);
    }
    for (std::thread & t : all) {
        t.join();
    }
    std::puts("done");
    return 0;
}
