// Runs lists of ops: check all, make a schedule, run its steps on the thread pool. See executor.h.
//
// Every worker walks the schedule by itself and meets the others at a barrier where a phase ends: no queue, no
// allocation, no system call while the threads are hot. A phase that is one thread's is done by the last to arrive at
// the barrier before it.
#include "executor.h"

#include <algorithm>
#include <cfenv>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

#include "context.h"
#include "cpus.h"
#include "crew.h"
#include "kernels/kernels.h"
#include "ops/ops.h"
#include "run_state.h"
#include "schedule.h"
#include "thread_pool.h"
#include "wait.h"

namespace tb::npu {

namespace {

constexpr int most_threads = 512;

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

// No exception may leave a worker. An op that allocates has no barrier inside at which the others would wait for the
// thread that failed.
void run_guarded(void (*run)(const op_context & ctx), const op_context & ctx) {
#if defined(__cpp_exceptions)
    try {
        run(ctx);
    } catch (const std::bad_alloc &) {
        ctx.fail(TB_E_NOMEM, "no memory for the op's own tables");
    }
#else
    run(ctx);
#endif
}

} // namespace

// llama.cpp has two numbers of threads, for one token and for more; a graph may meet those of two models.
constexpr size_t most_plans = 4;

struct graph::impl {
    struct plan {
        int n_threads = 0;
        uint64_t last_used = 0;
        schedule steps;
    };
    std::vector<tb_op> ops;
    std::vector<uint8_t> checked; // per op: as it is, against the executor's state of `epoch`
    std::vector<plan> plans;      // of the ops when all were checked last
    uint64_t epoch = 0;           // 0 = none

    // The plan for so many threads, or the one to make it in place of.
    plan & plan_for(int n_threads) {
        const auto fits = [n_threads](const plan & p) { return p.n_threads == n_threads; };
        auto found = std::find_if(plans.begin(), plans.end(), fits);
        if (found == plans.end() && plans.size() < most_plans) {
            return plans.emplace_back();
        }
        const auto older = [](const plan & a, const plan & b) { return a.last_used < b.last_used; };
        return found != plans.end() ? *found : *std::min_element(plans.begin(), plans.end(), older);
    }
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
        self->checked[index] = 0;
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
    std::vector<region> buffers{TB_MAX_BUFFERS};
    std::vector<tb_extent> extents{TB_MAX_BUFFERS};
    uint64_t epoch = 1; // moves when a schedule may have become wrong: buffers changed
    bool fuse = true;
    arena scratch;
    arena prepared;
    int n_threads = 1;   // that schedules are made for
    int fixed_hands = 0; // see set_hands
    std::unique_ptr<thread_pool> pool;
    int pool_wanted = 0;    // threads that it was asked for
    crew present;           // threads of the pool that take part
    uint64_t schedules = 0; // made, and runs begun
    uint64_t runs = 0;
    graph once; // run(ops, n): keeps its memory between calls
    bool stamping = false;
    std::vector<stamp> stamps; // [worker][op] of the last run

    tb_status check(const tb_op & op, const char ** why) const;
    outcome prepare(graph::impl & g, const schedule ** plan);

    struct job {
        executor::impl * self;
        graph::impl * g;
        const schedule * plan;
        run_state state;
        int hands;
        int64_t began;
    };
    void run_step(const job & j, const step & s, op_context & ctx, int thread, int hands) const;
    void leave_if_crowded(job & j, const step & s, int hands) const;
    // Two of each, so that without stamps nothing of them is left in the loop.
    template <bool stamped> struct walker;
    template <bool stamped> static void work(void * arg, int thread);
};

executor::executor(const config & cfg) : self(std::make_unique<impl>()) {
    self->kernels = find_kernels(cfg.isa.c_str());
    if (!self->kernels) {
        self->kernels = find_kernels(nullptr);
    }
    self->memory_limit = cfg.memory_limit;
    self->fuse = cfg.fuse;
    attention_exp2_table(); // made here and not in the middle of an op, where there may be no memory
    set_threads(cfg.n_threads);
}

executor::~executor() = default;

void executor::set_threads(int n) {
    n = std::clamp(n > 0 ? n : default_threads(), 1, most_threads);
    const int most = std::min(n, self->fixed_hands > 0 ? self->fixed_hands : usable_cpus());
    self->n_threads = n;
    if (!self->pool || most > self->pool_wanted) {
        self->pool.reset(); // never two pools at once
        self->pool = std::make_unique<thread_pool>(most);
        self->pool_wanted = most;
    }
    self->present.set_most(std::min(most, self->pool->size()), self->fixed_hands > 0);
}

void executor::set_fusion(bool on) {
    self->fuse = on;
    ++self->epoch;
}

void executor::set_progress(uint32_t * word, uint32_t base) {
    self->progress = word;
    self->progress_base = base;
}

void executor::set_hands(int n) {
    self->fixed_hands = n;
    self->pool.reset();
    set_threads(self->n_threads);
}

void executor::wake() {
    if (self->pool) {
        self->pool->wake(self->present.size());
    }
}

const char * executor::isa() const { return self->kernels->isa; }

int executor::n_threads() const { return self->n_threads; }

uint64_t executor::schedules() const { return self->schedules; }

tb_status executor::map(uint32_t id, void * base, uint64_t size, bool writable, const origin & from) {
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
    // Files that share a number by chance only wait for each other.
    const bool has_file = from.device != 0 || from.inode != 0;
    const uint64_t space = has_file ? (from.device * 0x9e3779b97f4a7c15 ^ from.inode) | uint64_t{1} << 63 : 0;
    const uint64_t at = has_file ? from.offset : reinterpret_cast<uintptr_t>(base);
    self->buffers[id] = {static_cast<uint8_t *>(base), charged, space, at};
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

// Everything that a run needs, `*plan` among it.
outcome executor::impl::prepare(graph::impl & g, const schedule ** plan) {
    const size_t n = g.ops.size();
    outcome out;
    if (n > TB_MAX_GRAPH_OPS) {
        return {TB_E_PROTOCOL, 0, "too many ops in one graph"};
    }
    bool changed = g.epoch != epoch;
    if (changed) {
        g.checked.assign(n, 0);
        g.epoch = epoch;
    }
    for (size_t i = 0; i < n; ++i) {
        if (g.checked[i]) {
            continue;
        }
        const char * why = nullptr;
        out.status = check(g.ops[i], &why);
        if (out.status != TB_OK) {
            out.op_index = static_cast<uint32_t>(i);
            out.why = why ? why : "";
            return out;
        }
        g.checked[i] = 1;
        changed = true;
    }
    if (changed) {
        g.plans.clear();
    }
    graph::impl::plan & made = g.plan_for(n_threads);
    if (made.n_threads != n_threads) {
        made.n_threads = 0;
        made.steps = make_schedule(g.ops, buffers, *kernels, n_threads, fuse);
        made.n_threads = n_threads;
        ++schedules;
    }
    made.last_used = ++runs;
    *plan = &made.steps;
    if (made.steps.scratch_bytes > SIZE_MAX / 2 || made.steps.prepared_bytes > SIZE_MAX / 2 ||
        !scratch.reserve(static_cast<size_t>(made.steps.scratch_bytes)) ||
        !prepared.reserve(static_cast<size_t>(made.steps.prepared_bytes))) {
        return {TB_E_NOMEM, 0, "no memory for scratch space"};
    }
    return out;
}

// This thread's part of a step, or its parts, with `hands` threads at work.
void executor::impl::run_step(const job & j, const step & s, op_context & ctx, int thread, int hands) const {
    ctx.op = &j.g->ops[s.index];
    ctx.dst = s.dst;
    std::copy(s.src, s.src + TB_MAX_SRC, ctx.src);
    ctx.by_rows = s.by_rows;
    ctx.scratch = scratch.data() + s.scratch;
    ctx.prepared = prepared.data() + s.prepared;
    ctx.counter = s.counter;
    ctx.phase = s.phase;
    ctx.index = s.index;
    const bool alone = s.thread != all_threads;
    ctx.thread = alone ? 0 : thread;
    ctx.n_threads = ctx.meeting = alone ? 1 : hands;
    if (!s.by_count || alone) {
        run_guarded(s.run, ctx);
        return;
    }
    ctx.n_threads = n_threads;
    for (; ctx.thread < n_threads; ctx.thread += hands) {
        run_guarded(s.run, ctx);
        ctx.meeting = 1;
    }
}

// Thread 0 at the end of a phase: are there too many threads for the CPUs that other programs leave?
void executor::impl::leave_if_crowded(job & j, const step & s, int hands) const {
    const int64_t lost = pool->lost_ns();
    if (lost != 0 && j.state.fewer == 0 && present.is_crowded(hands, lost, now_ns() - j.began)) {
        j.state.fewer = std::max(1, hands / 2);
        j.state.fewer_from.store(s.phase, std::memory_order_relaxed); // the barrier publishes it
    }
}

// A thread on its way through the steps.
template <bool stamped> struct executor::impl::walker {
    job & j;
    const impl & self;
    const int thread;
    int hands;
    op_context ctx{};
    stamp * stamps;
    const step * met = nullptr; // the last step before the barrier that it is at

    walker(job & of, int number)
        : j(of), self(*of.self), thread(number), hands(of.hands),
          stamps(stamped ? of.self->stamps.data() + static_cast<size_t>(number) * 2 * of.g->ops.size() : nullptr) {
        ctx.kernels = self.kernels;
        ctx.state = &j.state;
    }

    bool has_failed() const { return j.state.failed.load(std::memory_order_relaxed) != run_state::no_failure; }

    void run(const step & s) {
        [[maybe_unused]] stamp * const at = stamped ? stamps + s.index + (s.is_op ? 0 : j.g->ops.size()) : nullptr;
        if constexpr (stamped) {
            at->begin = now_ns();
        }
        self.run_step(j, s, ctx, thread, hands);
        if constexpr (stamped) {
            at->end = now_ns();
            at->phase = s.phase;
            for (uint32_t i = 1; i <= s.fused; ++i) {
                at[i] = {at->end, at->end, s.phase};
            }
        }
    }

    // Nobody takes chunks of the phase that has ended, nor will before the next but one.
    void reset_chunks(const step & s) const {
        for (int i = 0; i < s.n_counters; ++i) {
            j.state.chunks[s.phase % 2][i].next.store(0, std::memory_order_relaxed);
        }
    }

    // The phase after a barrier, done there.
    static void solo(void * arg, int) {
        walker & w = *static_cast<walker *>(arg);
        w.reset_chunks(*w.met); // the next phase but one begins with this barrier's end
        for (const step * s = w.met + 1; s <= w.met + w.met->solo && !w.has_failed(); ++s) {
            w.run(*s);
        }
    }

    // True if all go on.
    bool meet(const step & s, const step & last) {
        met = &s;
        if (thread == 0 && hands > 1) {
            self.leave_if_crowded(j, s, hands);
        }
        if (s.solo != 0) {
            self.pool->barrier(thread, hands, solo, this);
        } else {
            self.pool->barrier(thread, hands);
        }
        if (j.state.failed.load(std::memory_order_acquire) <= int64_t{last.phase}) {
            return false;
        }
        if (thread == 0 && s.solo == 0) {
            reset_chunks(s);
        }
        if (hands > 1 && j.state.fewer_from.load(std::memory_order_relaxed) == int64_t{s.phase}) {
            hands = j.state.fewer;
        }
        return thread < hands;
    }
};

template <bool stamped> void executor::impl::work(void * arg, int thread) {
    walker<stamped> w(*static_cast<job *>(arg), thread);
    const std::vector<step> & steps = w.j.plan->steps;
    uint32_t * const progress = thread == 0 ? w.self.progress : nullptr;
    uint32_t ended = w.self.progress_base;
    for (size_t i = 0; i < steps.size(); ++i) {
        const step & s = steps[i];
        const bool alone = s.thread != all_threads;
        // Alone after a step of the same phase that failed: on what it did not write.
        if (!alone || (thread == s.thread % w.hands && !w.has_failed())) {
            w.run(s);
        }
        ended += s.is_op;
        if (s.meet) {
            const size_t last = i + s.solo;
            if (!w.meet(s, steps[last])) {
                return;
            }
            for (; i < last; ++i) {
                ended += steps[i + 1].is_op;
            }
        }
        if (progress) {
            __atomic_store_n(progress, ended, __ATOMIC_RELAXED);
        }
    }
}

outcome executor::run(graph & g) {
    if (!self->pool) {
        set_threads(self->n_threads); // there was no memory for it before
    }
    if (self->stamping) {
        self->stamps.assign(static_cast<size_t>(self->pool->size()) * 2 * g.size(), stamp{});
    }
    const schedule * plan = nullptr;
    outcome out = self->prepare(*g.self, &plan);
    if (out.status != TB_OK) {
        g.self->epoch = 0; // steps are half resolved
        return out;
    }
    // Results must not depend on the rounding and denormal modes of whoever calls.
    std::fenv_t caller;
    std::fegetenv(&caller);
    std::fesetenv(FE_DFL_ENV);
    const int64_t began = now_ns();
    impl::job job{self.get(), g.self.get(), plan, {}, std::min(self->present.next(began), plan->threads), began};
    job.state.pool = self->pool.get();
    self->pool->run(self->stamping ? impl::work<true> : impl::work<false>, &job, job.hands);
    std::fesetenv(&caller);
    if (job.hands > 1 && (job.state.fewer != 0 || self->pool->lost_ns() != 0)) {
        const int64_t now = now_ns();
        if (job.state.fewer != 0 || self->present.is_crowded(job.hands, self->pool->lost_ns(), now - began)) {
            self->present.shrink(job.hands, now);
        }
    }
    if (job.state.failed.load(std::memory_order_acquire) != run_state::no_failure) {
        out.status = job.state.status;
        out.op_index = job.state.op_index;
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
    return n == 0 || worker >= self->pool->size() ? nullptr : self->stamps.data() + static_cast<size_t>(worker) * n;
}

const char * executor::kernel_name(const tb_op & op) const {
    const uint32_t * ne = op.dst.ne;
    if (tb_op_check_shape(&op, nullptr) != TB_OK || ne[0] == 0 || ne[1] == 0 || ne[2] == 0 || ne[3] == 0) {
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

std::vector<const char *> kernel_isas() {
    std::vector<const char *> names;
    for (int i = 0; i < available_kernels().n; ++i) {
        names.push_back(available_kernels().tables[i]->isa);
    }
    return names;
}

} // namespace tb::npu
