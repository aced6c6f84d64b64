// Runs lists of ops: check all, then run all in order on the thread pool. See executor.h.
//
// Every worker walks the list by itself and meets the others at a barrier after each op, so an op costs one barrier
// and nothing else: no queue, no allocation, no system call while the threads are hot. An op with next to no work
// runs on thread 0 alone, and between two such ops there is no barrier either.
#include "executor.h"

#include <algorithm>
#include <cfenv>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

#include "context.h"
#include "kernels/kernels.h"
#include "ops/ops.h"
#include "run_state.h"
#include "thread_pool.h"
#include "wait.h"

namespace tb::npu {

namespace {

struct buffer {
    uint8_t * base = nullptr;
    uint64_t charged = 0; // bytes that count against the memory limit
};

// An op with everything resolved that does not change between runs.
struct step {
    const op_entry * entry = nullptr; // nullptr: nothing to do
    view dst;
    view src[TB_MAX_SRC];
    uint64_t scratch = 0;
    bool solo = false;    // thread 0 alone
    bool meet = true;     // barrier after it
    bool checked = false; // cleared when the op changes
};

// Grows only; what it held is lost when it grows.
class arena {
  public:
    arena() = default;
    arena(const arena &) = delete;
    arena & operator=(const arena &) = delete;
    ~arena() { std::free(base); }

    bool reserve(size_t bytes) {
        if (bytes <= size) {
            return true;
        }
        constexpr size_t huge = size_t{2} << 20;
        const size_t align = bytes >= huge ? huge : 128;
        if (bytes > SIZE_MAX - align) {
            return false;
        }
        const size_t rounded = (bytes + align - 1) / align * align;
        void * grown = nullptr;
        if (posix_memalign(&grown, align, rounded) != 0) {
            return false;
        }
        if (align == huge) {
            madvise(grown, rounded, MADV_HUGEPAGE); // fewer TLB misses; no harm where it is refused
        }
        std::free(base);
        base = static_cast<uint8_t *>(grown);
        size = rounded;
        return true;
    }
    uint8_t * data() const { return base; }

  private:
    uint8_t * base = nullptr;
    size_t size = 0;
};

uint64_t elements(const tb_tensor & t) {
    return uint64_t{t.ne[0]} * t.ne[1] * t.ne[2] * t.ne[3]; // checked ops only: no overflow
}

// So little work that a barrier would cost more than the other threads could save.
bool is_tiny(const tb_op & op) {
    switch (op.code) {
    case TB_OP_MUL_MAT:
    case TB_OP_MUL_MAT_ID:
    case TB_OP_FLASH_ATTN:
        return false;
    case TB_OP_ROPE: // sines, exponentials
    case TB_OP_GLU:
    case TB_OP_SOFT_MAX:
        return elements(op.dst) <= 512;
    case TB_OP_SET_ROWS: // dst is the whole cache, src0 the rows that move
        return elements(op.src[0]) <= 4096;
    default:
        return elements(op.dst) <= 4096;
    }
}

// No exception may leave a worker. An op that allocates has no barrier inside at which the others would wait for the
// thread that failed.
void run_guarded(const op_entry & entry, const op_context & ctx) {
#if defined(__cpp_exceptions)
    try {
        entry.run(ctx);
    } catch (const std::bad_alloc &) {
        ctx.fail(TB_E_NOMEM, "no memory for the op's own tables");
    }
#else
    entry.run(ctx);
#endif
}

} // namespace

struct graph::impl {
    std::vector<tb_op> ops;
    std::vector<step> steps;
    uint64_t epoch = 0; // of the executor's state that the steps were checked against; 0 = none
    uint64_t scratch = 0;
};

graph::graph() : self(std::make_unique<impl>()) {}
graph::~graph() = default;

void graph::assign(const tb_op * ops, uint32_t n_ops) {
    self->ops.assign(ops, ops + n_ops);
    self->epoch = 0;
}

void graph::replace(uint32_t index, const tb_op & op) {
    self->ops[index] = op;
    if (self->epoch != 0) {
        self->steps[index].checked = false;
    }
}

uint32_t graph::size() const { return static_cast<uint32_t>(self->ops.size()); }

const tb_op & graph::op(uint32_t index) const { return self->ops[index]; }

struct executor::impl {
    const kernel_table * kernels;
    uint64_t memory_limit;
    uint32_t * progress = nullptr;
    uint32_t progress_base = 0;
    uint64_t mapped_bytes = 0;
    std::vector<buffer> buffers{TB_MAX_BUFFERS};
    std::vector<tb_extent> extents{TB_MAX_BUFFERS};
    uint64_t epoch = 1; // moves when a resolved step may have become wrong: buffers or thread count changed
    arena scratch;
    std::unique_ptr<thread_pool> pool;
    graph once; // run(ops, n): keeps its memory between calls
    bool stamping = false;
    std::vector<stamp> stamps; // [worker][op] of the last run

    tb_status check(const tb_op & op, const char ** why) const;
    void resolve(const tb_op & op, step & s) const;
    outcome prepare(graph::impl & g);

    struct job {
        executor::impl * self;
        graph::impl * g;
        run_state state;
    };
    // Two functions, so that without stamps nothing of them is left in the loop.
    template <bool stamped> static void work(void * arg, int thread);
};

executor::executor(const config & cfg) : self(std::make_unique<impl>()) {
    self->kernels = find_kernels(cfg.isa.c_str());
    if (!self->kernels) {
        self->kernels = find_kernels(nullptr);
    }
    self->memory_limit = cfg.memory_limit;
    attention_exp2_table(); // made here and not in the middle of an op, where there may be no memory
    set_threads(cfg.n_threads);
}

executor::~executor() = default;

void executor::set_threads(int n) {
    n = n > 0 ? n : usable_cpus();
    if (self->pool && self->pool->size() == n) {
        return;
    }
    self->pool.reset(); // never two pools at once
    self->pool = std::make_unique<thread_pool>(n);
    ++self->epoch;
}

void executor::set_progress(uint32_t * word, uint32_t base) {
    self->progress = word;
    self->progress_base = base;
}

void executor::wake() { self->pool->wake(); }

const char * executor::isa() const { return self->kernels->isa; }

int executor::n_threads() const { return self->pool->size(); }

tb_status executor::map(uint32_t id, void * base, uint64_t size, bool writable) {
    if (id >= TB_MAX_BUFFERS || self->extents[id].mapped || !base || size == 0 ||
        size > UINTPTR_MAX - reinterpret_cast<uintptr_t>(base)) {
        return TB_E_BUFFER;
    }
    const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t charged = size > UINT64_MAX - page ? size : (size + page - 1) / page * page;
    if (self->memory_limit != 0 &&
        (charged > self->memory_limit || self->mapped_bytes > self->memory_limit - charged)) {
        return TB_E_NOMEM;
    }
    self->mapped_bytes += charged;
    self->buffers[id] = {static_cast<uint8_t *>(base), charged};
    self->extents[id] = {size, 1, writable ? 1u : 0u};
    ++self->epoch;
    return TB_OK;
}

tb_status executor::unmap(uint32_t id) {
    if (id >= TB_MAX_BUFFERS || !self->extents[id].mapped) {
        return TB_E_BUFFER;
    }
    self->mapped_bytes -= self->buffers[id].charged;
    self->buffers[id] = {};
    self->extents[id] = {};
    ++self->epoch;
    return TB_OK;
}

tb_status executor::impl::check(const tb_op & op, const char ** why) const {
    *why = nullptr;
    const int shape = tb_op_check_shape(&op, why);
    if (shape != TB_OK || op.code == TB_OP_NOP) {
        return static_cast<tb_status>(shape);
    }
    if (!op_table(op.code).run) {
        *why = "no such op here";
        return TB_E_UNSUPPORTED;
    }
    return static_cast<tb_status>(tb_op_check_bounds(&op, extents.data(), static_cast<uint32_t>(extents.size()), why));
}

void executor::impl::resolve(const tb_op & op, step & s) const {
    s = {};
    s.checked = true;
    if (op.code == TB_OP_NOP || elements(op.dst) == 0) {
        s.solo = true;
        return;
    }
    const auto see = [this](const tb_tensor & t) {
        view v;
        if (t.buffer != TB_NO_BUFFER) {
            v.t = &t;
            v.data = buffers[t.buffer].base + t.offset;
        }
        return v;
    };
    s.entry = &op_table(op.code);
    s.dst = see(op.dst);
    for (uint32_t i = 0; i < op.n_src; ++i) {
        s.src[i] = see(op.src[i]);
    }
    s.solo = pool->size() == 1 || is_tiny(op);
    s.scratch = s.entry->scratch_bytes ? s.entry->scratch_bytes(op, s.solo ? 1 : pool->size(), *kernels) : 0;
}

outcome executor::impl::prepare(graph::impl & g) {
    const size_t n = g.ops.size();
    outcome out;
    if (n > TB_MAX_GRAPH_OPS) {
        return {TB_E_PROTOCOL, 0, "too many ops in one graph"};
    }
    if (g.epoch != epoch) {
        g.steps.assign(n, step{});
        g.epoch = epoch;
    }
    bool changed = false;
    for (size_t i = 0; i < n; ++i) {
        if (g.steps[i].checked) {
            continue;
        }
        const char * why = nullptr;
        out.status = check(g.ops[i], &why);
        if (out.status != TB_OK) {
            out.op_index = static_cast<uint32_t>(i);
            out.why = why ? why : "";
            return out;
        }
        resolve(g.ops[i], g.steps[i]);
        changed = true;
    }
    if (changed) {
        g.scratch = 0;
        for (size_t i = 0; i < n; ++i) {
            g.scratch = std::max(g.scratch, g.steps[i].scratch);
            g.steps[i].meet = i + 1 == n ? false : !(g.steps[i].solo && g.steps[i + 1].solo);
        }
    }
    if (g.scratch > SIZE_MAX / 2 || !scratch.reserve(static_cast<size_t>(g.scratch))) {
        return {TB_E_NOMEM, 0, "no memory for scratch space"};
    }
    return out;
}

template <bool stamped> void executor::impl::work(void * arg, int thread) {
    job & j = *static_cast<job *>(arg);
    const impl & self = *j.self;
    const int n_threads = self.pool->size();
    const std::vector<step> & steps = j.g->steps;
    op_context ctx{};
    ctx.kernels = self.kernels;
    ctx.scratch = self.scratch.data();
    ctx.pool = &j.state;
    ctx.thread = thread;
    uint32_t ended = self.progress_base;
    [[maybe_unused]] stamp * const stamps =
        stamped ? j.self->stamps.data() + static_cast<size_t>(thread) * steps.size() : nullptr;
    for (size_t i = 0; i < steps.size(); ++i) {
        const step & s = steps[i];
        // A failure at an earlier op of a row of solo ops, where thread 0 met nobody yet.
        const bool skip =
            s.solo && (thread != 0 || j.state.failed.load(std::memory_order_relaxed) != run_state::no_failure);
        if (s.entry && !skip) {
            ctx.op = &j.g->ops[i];
            ctx.dst = s.dst;
            std::copy(s.src, s.src + TB_MAX_SRC, ctx.src);
            ctx.n_threads = s.solo ? 1 : n_threads;
            if (s.solo) {
                j.state.solo_chunks = 0;
            }
            if constexpr (stamped) {
                stamps[i].begin = now_ns();
            }
            run_guarded(*s.entry, ctx);
            if constexpr (stamped) {
                stamps[i].end = now_ns();
            }
            if (thread == 0 && self.progress) {
                __atomic_store_n(self.progress, ++ended, __ATOMIC_RELAXED);
            }
        }
        if (s.meet) {
            self.pool->barrier(thread, true);
            if (j.state.failed.load(std::memory_order_acquire) <= static_cast<int64_t>(i)) {
                return;
            }
        }
    }
}

outcome executor::run(graph & g) {
    if (self->stamping) {
        self->stamps.assign(static_cast<size_t>(self->pool->size()) * g.size(), stamp{});
    }
    outcome out = self->prepare(*g.self);
    if (out.status != TB_OK) {
        g.self->epoch = 0; // steps are half resolved
        return out;
    }
    // Results must not depend on the rounding and denormal modes of whoever calls.
    std::fenv_t caller;
    std::fegetenv(&caller);
    std::fesetenv(FE_DFL_ENV);
    impl::job job{self.get(), g.self.get(), {}};
    job.state.pool = self->pool.get();
    job.state.ops = g.self->ops.data();
    self->pool->reset_chunks();
    self->pool->run(self->stamping ? impl::work<true> : impl::work<false>, &job);
    std::fesetenv(&caller);
    if (job.state.failed.load(std::memory_order_acquire) != run_state::no_failure) {
        out.status = job.state.status;
        out.op_index = static_cast<uint32_t>(job.state.failed.load(std::memory_order_relaxed));
        out.why = job.state.why;
    }
    return out;
}

void executor::set_stamps(bool on) {
    self->stamping = on;
    self->stamps.clear();
}

const stamp * executor::stamps(int worker) const {
    const size_t n = self->stamps.size() / static_cast<size_t>(self->pool->size());
    return n == 0 ? nullptr : self->stamps.data() + static_cast<size_t>(worker) * n;
}

const char * executor::kernel_name(const tb_op & op) const {
    if (tb_op_check_shape(&op, nullptr) != TB_OK || elements(op.dst) == 0) {
        return nullptr;
    }
    switch (op.code) {
    case TB_OP_MUL_MAT:
    case TB_OP_MUL_MAT_ID:
        return mul_mat_kernel_name(op, *self->kernels);
    case TB_OP_FLASH_ATTN:
        return self->kernels->attention.name;
    default:
        return nullptr;
    }
}

outcome executor::run(const tb_op * ops, uint32_t n_ops) {
    if (n_ops > TB_MAX_GRAPH_OPS) {
        return {TB_E_PROTOCOL, 0, "too many ops in one graph"};
    }
    self->once.assign(ops, n_ops);
    return run(self->once);
}

} // namespace tb::npu
