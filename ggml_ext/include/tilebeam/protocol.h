// The channel: what lies in the memory page(s) that the CPU side and the NPU side share, and who writes what when.
//
// One control region per session: tb_channel at offset 0, the request payload area behind it. One request is in
// flight at a time. The CPU side writes the request and its payload, then adds one to `req_seq` (the doorbell); the
// NPU side copies the request and the payload to private memory before it looks at them, works, writes the reply,
// then sets `rep_seq = req_seq`. Each side spins for a while and then sleeps on the other's counter with a futex; a
// sleeper announces itself in `*_sleeping` so that the other side makes the wake-up call only when it is needed.
//
// What is damaged in here by accident must never become a wrong result. Each of the four messages (hello of the CPU
// side, hello of the NPU side, request, reply) carries a digest that is made from the writer's private copy and
// compared with the reader's; each side counts requests for itself and takes no counter but the next one; a lost
// `*_sleeping` only costs the time until the other side looks again; `npu_progress` only ever delays the deadline, by
// at most once per op.
//
// A CPU that is not coherent with the NPU cleans its cache lines before the doorbell and invalidates before it reads
// (tb_cache_clean / tb_cache_invalidate, backend/session/cache.h: no-ops on coherent hosts).
#ifndef TILEBEAM_PROTOCOL_H
#define TILEBEAM_PROTOCOL_H

#include <stdint.h>

#include "tilebeam/ops.h"

// cffi: begin
#define TB_PROTOCOL_MAGIC 0x4d424c54 // "TLBM"
#define TB_PROTOCOL_VERSION 5
#define TB_MAX_BUFFERS 1024
#define TB_MAX_GRAPH_OPS 16384
#define TB_MAX_GRAPHS 16
#define TB_BUILD_ID_BYTES 16

// tb_channel.npu_ready
enum tb_npu_state {
    TB_NPU_STARTING = 0,
    TB_NPU_SERVING = 1,
    TB_NPU_REFUSED = 2, // the reply says why
    TB_NPU_STOPPED = 3,
};

// tb_cpu_hello.flags
#define TB_HELLO_UNFUSED 1 // run graphs op by op: nothing fused, shared or reordered

// tb_npu_hello.guards: what keeps the NPU side from doing more than its work. None of them for a thread of the program.
enum tb_guard {
    TB_GUARD_SYSCALLS = 1, // a seccomp filter: no files, no sockets, no programs, no signals to others
    TB_GUARD_PRIVATE = 2,  // not dumpable: no other process of the user opens its memory or descriptors
    TB_GUARD_PARENT = 4,   // the socket's other end was made by the parent, and the parent's end ends it
};

enum tb_request_kind {
    TB_REQ_NONE = 0,
    TB_REQ_NOOP = 1,
    TB_REQ_MAP = 2,     // payload: tb_map. The descriptor itself travels beside the channel (SCM_RIGHTS)
    TB_REQ_UNMAP = 3,   // payload: tb_map, only `buffer` is read
    TB_REQ_COMPUTE = 4, // payload: tb_graph, n_ops x tb_op. Kept under graph.slot
    TB_REQ_PATCH = 5,   // payload: tb_graph, n_ops x tb_patch: changes ops of the kept graph, then computes it
    TB_REQ_THREADS = 6, // payload: tb_graph, n_ops = threads to use from now on
    TB_REQ_STOP = 7,
    TB_REQ_TRACE = 8, // payload: tb_map; the mapped buffer `buffer` is a trace ring from now on (trace.h), or, with
                      // TB_NO_BUFFER, none is any more. Unmapping it ends tracing too
    TB_REQ_COUNT = 9,
};

typedef struct tb_map {
    uint32_t buffer; // id, below TB_MAX_BUFFERS
    uint32_t writable;
    uint64_t offset; // in the file, a multiple of the page size
    uint64_t size;
} tb_map;

typedef struct tb_graph {
    uint32_t slot;   // below TB_MAX_GRAPHS
    uint32_t n_ops;  // ops (COMPUTE) or patches (PATCH) that follow
    uint64_t serial; // COMPUTE: the graph's number. PATCH: must equal the kept graph's, or the request is refused
} tb_graph;

typedef struct tb_patch {
    uint32_t index; // op in the kept graph
    uint32_t reserved;
    tb_op op;
} tb_patch;

typedef struct tb_request {
    uint32_t kind;
    uint32_t reserved;
    uint64_t payload_offset; // from the start of the control region
    uint64_t payload_size;
    uint64_t check; // digest of req_seq, kind and the payload (backend/session/checksum.h): a scribbled page is noticed
} tb_request;

typedef struct tb_reply {
    uint32_t status; // enum tb_status
    uint32_t op_index;
    uint32_t op_code;
    uint32_t tag;
    uint64_t busy_ns; // time the NPU side worked on this request
    char why[96];     // NUL-terminated
    uint32_t value;   // TB_REQ_THREADS: threads in use from now on; a graph: schedules made so far (they wrap)
    uint32_t reserved;
    uint64_t check; // digest of rep_seq and the fields above
} tb_reply;

// The handshake. The first four fields keep their place in every version of the protocol.
typedef struct tb_cpu_hello {
    uint32_t magic;
    uint32_t protocol_version;
    uint32_t layout_version;
    uint32_t abi_bytes; // sizeof(tb_channel) + sizeof(tb_op), a cheap proof that both sides agree on structs
    uint8_t build_id[TB_BUILD_ID_BYTES]; // digest of the sources of both sides: ops mean the same on both
    uint64_t region_size;
    uint64_t memory_limit; // address space for mapped buffers, bytes; 0 = none
    uint32_t n_threads;
    uint32_t spin_us;
    char isa[16];   // kernel set wanted, NUL-terminated; "" = best
    uint32_t flags; // TB_HELLO_..
    uint32_t reserved;
    uint64_t check; // digest of the fields above
} tb_cpu_hello;

typedef struct tb_npu_hello {
    char isa[16];       // kernel set in use
    uint32_t n_threads; // worker threads in use
    uint32_t pid;
    uint32_t guards; // enum tb_guard, or'ed
    uint32_t reserved;
    uint64_t check; // digest of the fields above
} tb_npu_hello;

// Each side's words have cache lines of their own.
typedef struct tb_channel {
    // written once by the CPU side before the NPU side starts
    tb_cpu_hello cpu;
    uint8_t pad0[40];
    // written by the CPU side
    uint32_t req_seq;
    uint32_t cpu_sleeping;
    tb_request request;
    uint8_t pad1[24];
    // written by the NPU side
    uint32_t rep_seq;
    uint32_t npu_sleeping;
    uint32_t npu_ready;    // enum tb_npu_state
    uint32_t npu_progress; // low half of the request's number, then how many of its ops have ended
    tb_reply reply;
    tb_npu_hello npu;
} tb_channel;
// cffi: end

#endif // TILEBEAM_PROTOCOL_H
