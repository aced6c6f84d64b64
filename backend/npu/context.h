// What an op implementation gets: operand views already checked against their buffers, its share of the work, scratch
// memory, barriers, and the kernel table of this CPU. One function per op code, all registered in ops/ops.cpp.
#ifndef TILEBEAM_NPU_CONTEXT_H
#define TILEBEAM_NPU_CONTEXT_H

#include <cstddef>
#include <cstdint>

#include "tilebeam/ops.h"

namespace tb::npu {

struct kernel_table; // kernels/kernels.h
struct run_state;    // run_state.h

// An operand with its address resolved. data == nullptr: absent.
struct view {
    const tb_tensor * t = nullptr;
    uint8_t * data = nullptr;

    explicit operator bool() const { return data != nullptr; }
    uint32_t type() const { return t->type; }
    int64_t ne(int i) const { return t->ne[i]; }
    int64_t nb(int i) const { return static_cast<int64_t>(t->nb[i]); }
    int64_t rows() const { return ne(1) * ne(2) * ne(3); }
    template <class T> T * at(int64_t i1, int64_t i2 = 0, int64_t i3 = 0) const {
        return reinterpret_cast<T *>(data + i1 * nb(1) + i2 * nb(2) + i3 * nb(3));
    }
};

// Elementwise ops work on runs of at most this many elements, in buffers on the stack. A multiple of every block size.
constexpr int64_t run_elements = 1024;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t runs_per_row(const view & v) { return divide_up(v.ne(0), run_elements); }

// Items [first, last) of an op's work, for loops over them.
struct range {
    struct iterator {
        int64_t item;
        int64_t operator*() const { return item; }
        iterator & operator++() {
            ++item;
            return *this;
        }
        bool operator!=(const iterator & other) const { return item < other.item; }
    };
    int64_t first, last;

    iterator begin() const { return {first}; }
    iterator end() const { return {last}; }
};

// Shared by all threads of one op. Threads call the op's function at the same time, each with its own `thread`.
//
// How many threads there are may differ from run to run of the same graph (crew.h), and within one; results must not.
// Where they depend on the number in another way than rounding allows (op_entry.by_count), it is always the number that
// was asked for, and a thread may run several shares one after the other.
struct op_context {
    const tb_op * op;
    view dst;
    view src[TB_MAX_SRC];
    const kernel_table * kernels;
    int thread;
    int n_threads;
    int meeting;        // threads that barrier() waits for; 1 in all shares of a thread but its first
    bool by_rows;       // share_runs hands out whole rows
    uint8_t * scratch;  // shared by the op's threads, 128-byte aligned, as large as the op's scratch_bytes said
    uint8_t * prepared; // what op_entry.prepare makes, aligned like scratch
    run_state * state;  // of all ops
    int counter;        // the op's own in there, of the phase's chunks
    uint32_t phase;     // ops of one phase run between the same two barriers
    uint32_t index;     // of the op in its graph

    int32_t param_i(int i) const { return op->params[i]; }
    float param_f(int i) const;
    // All threads of this op meet here. With by_count only after the last chunk: other shares may not have begun.
    void barrier() const;
    // First failure wins; the op still runs to its end on all threads. For errors only data can show (a bad index).
    void fail(tb_status status, const char * why) const;
    // This thread's part of `n` items, in multiples of `grain`.
    range share(int64_t n, int64_t grain = 1) const;
    // The same of the runs of a tensor (ops.h), as elementwise ops divide their work.
    range share_runs(const view & v) const;
    // The next number of a dynamic loop that no thread has taken yet; from 0 in each op.
    int64_t next_chunk() const;
};

// How the threads of an op divide its work, for as far as others may build on it: two ops in a row that divide the same
// rows the same way need no barrier between them.
enum class cut : uint8_t {
    any,  // nothing is promised
    runs, // share_runs of dst; element i of an operand of dst's shape is read by the thread that writes element i
    rows, // whole rows of dst, share(rows); and whole rows of operands likewise
};

// What an op makes of one of its operands before it runs. Made once for all ops that want the same of the same operand.
struct op_preparation {
    void (*run)(const op_context & ctx); // ctx.op: one of these ops. Fills ctx.prepared, writes nothing else
    int operand;
    // 0: this op wants nothing.
    uint64_t (*bytes)(const tb_op & op, int n_threads, const kernel_table & kernels);
    // Would both make the same, given the same operand?
    bool (*same)(const tb_op & a, const tb_op & b, int n_threads, const kernel_table & kernels);
    // Over the operand's rows or runs, as `cut` says of dst.
    cut (*divided)(const tb_op & op);
    bool reads_operand = false; // the op itself reads the operand, too
};

struct op_entry {
    void (*run)(const op_context & ctx);
    // Shared scratch the op wants, for this many threads; nullptr = none.
    uint64_t (*scratch_bytes)(const tb_op & op, int n_threads, const kernel_table & kernels);
    cut divided = cut::any;
    bool takes_chunks = false; // calls next_chunk
    const op_preparation * prepare = nullptr;
    bool by_count = false; // sums are split by the number of threads
};

// Table over tb_op_code; run == nullptr for codes without an implementation.
const op_entry & op_table(uint32_t code);

} // namespace tb::npu

#endif // TILEBEAM_NPU_CONTEXT_H
