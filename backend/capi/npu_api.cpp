// C functions over the executor, exported by libtilebeam_npu.so. See npu_api.h.
#pragma GCC visibility push(default)
#include "npu_api.h"
#pragma GCC visibility pop

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "cpus.h"
#include "executor.h"
#include "kernels/kernels.h"
#include "usable_memory.h"

struct tb_npu {
    explicit tb_npu(const tb::npu::config & cfg) : executor(cfg) {}
    tb::npu::executor executor;
};

namespace {

// No exception may leave a C function.
template <class F> int guarded(F && f) {
    try {
        return f();
    } catch (const std::bad_alloc &) {
        return TB_E_NOMEM;
    } catch (...) {
        return TB_E_INTERNAL;
    }
}

} // namespace

tb_npu * tb_npu_create(int n_threads, const char * isa) { return tb_npu_create_limited(n_threads, isa, 0); }

tb_npu * tb_npu_create_limited(int n_threads, const char * isa, uint64_t memory_limit) {
    if (!tb::npu::find_kernels(isa)) {
        return nullptr;
    }
    try {
        tb::npu::config cfg;
        cfg.n_threads = n_threads;
        cfg.isa = isa ? isa : "";
        cfg.memory_limit = memory_limit;
        return new tb_npu(cfg);
    } catch (...) {
        return nullptr;
    }
}

void tb_npu_free(tb_npu * npu) { delete npu; }

int tb_npu_map(tb_npu * npu, uint32_t id, void * base, uint64_t size, int writable) {
    return npu->executor.map(id, base, size, writable != 0);
}

int tb_npu_unmap(tb_npu * npu, uint32_t id) { return npu->executor.unmap(id); }

int tb_npu_set_threads(tb_npu * npu, int n_threads) {
    return guarded([&] {
        npu->executor.set_threads(n_threads);
        return TB_OK;
    });
}

void tb_npu_set_hands(tb_npu * npu, int n) {
    guarded([&] {
        npu->executor.set_hands(n);
        return TB_OK;
    });
}

void tb_npu_set_fusion(tb_npu * npu, int on) { npu->executor.set_fusion(on != 0); }

int tb_npu_run(tb_npu * npu, const tb_op * ops, uint32_t n_ops, tb_reply * reply) {
    tb_reply unused;
    tb_reply & out = reply ? *reply : unused;
    out = tb_reply{};
    const int status = guarded([&] {
        const tb::npu::outcome o = npu->executor.run(ops, n_ops);
        if (o.status != TB_OK) {
            out.op_index = o.op_index;
            if (o.op_index < n_ops) {
                out.op_code = ops[o.op_index].code;
                out.tag = ops[o.op_index].tag;
            }
            std::memcpy(out.why, o.why.c_str(), std::min(o.why.size(), sizeof out.why - 1));
        }
        return static_cast<int>(o.status);
    });
    out.status = static_cast<uint32_t>(status);
    return status;
}

const char * tb_npu_isa(tb_npu * npu) { return npu->executor.isa(); }

int tb_npu_n_threads(tb_npu * npu) { return npu->executor.n_threads(); }

const char * tb_npu_isa_name(int i) {
    const tb::npu::kernel_list & list = tb::npu::available_kernels();
    return i >= 0 && i < list.n ? list.tables[i]->isa : nullptr;
}

const char * tb_npu_kernel_name(tb_npu * npu, const tb_op * op) { return npu->executor.kernel_name(*op); }

const void * tb_npu_kernels(tb_npu * npu) { return tb::npu::find_kernels(npu->executor.isa()); }

int tb_npu_exp2_fp16(tb_npu * npu, const uint16_t * in, uint16_t * out, uint64_t n) {
    const tb::npu::kernel_table * kernels = tb::npu::find_kernels(npu->executor.isa());
    if (!kernels) {
        return TB_E_INTERNAL;
    }
    return guarded([&] {
        kernels->attention.exp2_fp16(in, out, n);
        return TB_OK;
    });
}

void tb_usable_memory(const char * root, uint64_t * total, uint64_t * available, uint64_t * with_swap) {
    guarded([&] {
        const tb::memory_size memory = tb::usable_memory(root ? root : "");
        *total = memory.total;
        *available = memory.available;
        *with_swap = memory.with_swap;
        return TB_OK;
    });
}

void tb_process_cpus(const char * root, tb_cpus * found) {
    guarded([&] {
        const tb::cpu_limits limits = tb::limits_of_cpus(root ? root : "");
        *found = {limits.cpus,
                  limits.cores,
                  limits.performance_cores,
                  static_cast<int32_t>(limits.nodes.size()),
                  limits.default_threads(),
                  limits.quota};
        return TB_OK;
    });
}
