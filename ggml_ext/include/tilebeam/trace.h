// Traces: what the NPU side stamps into shared memory while it works, and what the CPU side makes of it.
//
// The ring is memory that the CPU side maps like a buffer and names in a TB_REQ_TRACE. The NPU side writes events, the
// CPU side takes them out after every reply, copies them first and believes nothing: an event that does not fit the
// request just answered is counted as damaged. Both sides stamp with CLOCK_MONOTONIC, which is one clock for all
// processes of a machine.
#ifndef TILEBEAM_TRACE_H
#define TILEBEAM_TRACE_H

#include <stdint.h>

#include "tilebeam/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
#define TB_TRACE_KERNELS 64
#define TB_TRACE_KERNEL_BYTES 40

enum tb_trace_kind {
    TB_TRACE_MESSAGE = 1, // a request, from where the NPU side saw it to where the reply was ready
    TB_TRACE_OP = 2,      // one worker's part of an op
    TB_TRACE_NOTES = 3,   // what only a trace costs: these events are written, between a request and its reply
};

typedef struct tb_trace_event {
    uint64_t begin_ns;
    uint64_t end_ns;
    uint32_t seq; // number of the request
    uint16_t kind;
    uint16_t worker;
    uint32_t index;  // OP: in its graph. MESSAGE: enum tb_request_kind
    uint16_t code;   // OP: enum tb_op_code
    uint16_t kernel; // OP: 1 + index in the ring's names, 0 = none of its own
    uint32_t phase;  // OP: workers meet where it changes
    uint32_t reserved;
} tb_trace_event;

typedef struct tb_trace_ring {
    uint32_t written; // events since tracing began; event i lies in slot i % capacity, behind this header
    uint32_t reserved;
    char kernels[TB_TRACE_KERNELS][TB_TRACE_KERNEL_BYTES];
} tb_trace_ring;

// ---- what becomes of it on the CPU side

enum tb_span {
    TB_SPAN_GRAPH = 1,   // CPU: all that the plugin does for one graph of llama.cpp
    TB_SPAN_LOWER = 2,   // CPU: from ggml's tensors to descriptors, or finding the graph lowered before
    TB_SPAN_SEND = 3,    // CPU: a message is put together and written, until the doorbell
    TB_SPAN_WAIT = 4,    // CPU: from the doorbell to the reply
    TB_SPAN_RECEIVE = 5, // CPU: the reply is copied and checked
    TB_SPAN_MESSAGE = 6, // NPU
    TB_SPAN_OP = 7,      // NPU, per worker
    TB_SPAN_NOTES = 8,   // NPU: the trace itself
};

typedef struct tb_trace_record {
    uint64_t begin_ns;
    uint64_t end_ns;
    uint32_t span;
    uint32_t session; // number of the session within the program, from 1; 0: none
    uint32_t lane;    // CPU: the thread's number in the system. NPU: the worker
    uint32_t seq;     // number of the request within its session; 0: none
    uint32_t index;   // OP: in its graph. Else: ops in the graph
    uint32_t code;    // OP: enum tb_op_code. MESSAGE, SEND, WAIT, RECEIVE: enum tb_request_kind
    uint32_t type;    // OP: enum tb_type of src0, of attention: of K
    uint32_t rows;    // MUL_MAT: rows that meet one weight matrix, FLASH_ATTN: tokens; else 0
    uint32_t phase;   // OP: workers meet where it changes
    uint32_t reserved;
    uint64_t bytes; // OP, of all workers together: see tb_op_cost
    uint64_t work;
    char name[48];
    char kernel[TB_TRACE_KERNEL_BYTES];
} tb_trace_record;

// What an op has to do at least: bytes of all operands read once and of the result written once (of rows that are
// picked or put, those rows; of attention, all cells, also those that the mask hides), and arithmetic operations of its
// products, multiply and add counted apart (0 for other ops). For ops that pass tb_op_check_shape.
void tb_op_cost(const tb_op * op, uint64_t * bytes, uint64_t * work);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif // TILEBEAM_TRACE_H
