// The session as a C library (part of libtilebeam_npu.so): the channel with either executor, without llama.cpp. For
// tests, `tilebeam doctor` and benches; the ggml plugin uses session.h directly.
#ifndef TILEBEAM_CAPI_SESSION_API_H
#define TILEBEAM_CAPI_SESSION_API_H

#include <stddef.h>
#include <stdint.h>

#include "tilebeam/ops.h"
#include "tilebeam/protocol.h"
#include "tilebeam/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
typedef struct tb_session tb_session;

// 0 and NULL mean the defaults of session.h.
typedef struct tb_session_options {
    int process; // 0: thread, 1: process, 2: Hexagon in an emulator
    int n_threads;
    int deadline_ms;
    int spin_us; // -1: never spin
    uint64_t memory_limit;
    const char * npud_path;
    const char * isa;
} tb_session_options;

typedef struct tb_session_result {
    int status; // enum tb_status
    uint32_t op_index;
    char why[488]; // a sentence; "" when status is TB_OK
} tb_session_result;

// What the channel did so far (session.h).
typedef struct tb_session_counters {
    uint64_t requests;
    uint64_t patched;
    uint64_t spun;
    uint64_t slept;
    uint32_t schedules;
} tb_session_counters;

// NULL on failure, `result` then says why.
tb_session * tb_session_start(const tb_session_options * options, tb_session_result * result);
void tb_session_stop(tb_session * session);

// Each returns result->status.
int tb_session_map(tb_session * session, int fd, uint64_t offset, uint64_t size, int writable, uint32_t * id,
                   tb_session_result * result);
int tb_session_unmap(tb_session * session, uint32_t id, tb_session_result * result);
int tb_session_compute(tb_session * session, const tb_op * ops, uint32_t n_ops, uint64_t serial,
                       tb_session_result * result);
int tb_session_noop(tb_session * session, tb_session_result * result);
int tb_session_set_threads(tb_session * session, int n_threads, tb_session_result * result);

// Times n no-ops one after the other, in nanoseconds each: what Python's own call overhead would hide.
int tb_session_time_noop(tb_session * session, uint32_t n, int64_t * ns, tb_session_result * result);

int tb_session_alive(tb_session * session);
int tb_session_pid(tb_session * session);
int tb_session_n_threads(tb_session * session);
const char * tb_session_isa(tb_session * session);
uint32_t tb_session_guards(tb_session * session); // enum tb_guard, or'ed
void tb_session_count(tb_session * session, tb_session_counters * counters);

// Digest of the sources that this library was built from, in hexadecimal digits. Both sides of a channel have the same.
const char * tb_session_build_id(void);

// Shut this process in as tilebeam-npud does, for good; for a test that then tries what must not work. Returns the
// enum tb_guard bits that the system granted.
uint32_t tb_session_enter_sandbox(void);

// The shared control region, for fault tests: what is written here the NPU side sees.
tb_channel * tb_session_channel(tb_session * session);
uint64_t tb_session_channel_size(tb_session * session);

// Tracing of all sessions of this library, as tilebeam_trace_* of plugin/control.h.
void tb_trace_start(uint64_t most_records);
void tb_trace_stop(void);
uint64_t tb_trace_take(tb_trace_record * records, uint64_t most, uint64_t * lost, uint64_t * damaged);

// The ring that this session's NPU side writes, for fault tests; NULL while it has none.
tb_trace_ring * tb_session_trace_ring(tb_session * session);

// The NPU side alone, in the calling thread, on copies of both descriptors: returns when the peer says stop or hangs
// up. For tests that play the CPU side themselves.
int tb_service_serve(int region_fd, int socket_fd);

// What such a test needs besides: a greeting of this build, for a region of so many bytes; and digests: of the
// greeting, of a request whose payload lies at `payload`.
void tb_service_hello(tb_cpu_hello * hello, uint64_t region_size);
uint64_t tb_service_hello_check(const tb_cpu_hello * hello);
uint64_t tb_service_check(uint32_t seq, const tb_request * request, const void * payload);
// .. and the wake-up call for a side that may sleep on this counter.
void tb_service_wake(uint32_t * word);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif // TILEBEAM_CAPI_SESSION_API_H
