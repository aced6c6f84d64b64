// What the plugin offers beside ggml's own interface: announce a repacked file before its load, configure and inspect
// the NPU. Each function is found by its name through ggml_backend_reg_get_proc_address(reg, "tilebeam_..."), as a
// pointer of the type NAME_t below. All are thread-safe, none throws, none keeps a pointer that it was given.
//
// From Python: parse the text between the cffi marks after that of tilebeam/types.h, then
//     announce = ffi.cast("tilebeam_announce_t", address)
#ifndef TILEBEAM_CONTROL_H
#define TILEBEAM_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
#define TILEBEAM_CONTROL_VERSION 3
#define TILEBEAM_MAX_DEVICES 15 // HMX0 to HMX14: ggml schedules over 16 backends, the CPU is one of them

enum tilebeam_executor {
    TILEBEAM_EXECUTOR_THREAD = 0,
    TILEBEAM_EXECUTOR_PROCESS = 1,
    TILEBEAM_EXECUTOR_HEXAGON = 2, // a process for Hexagon, in an emulator: qemu-hexagon from PATH
};

enum tilebeam_numerics {
    TILEBEAM_NUMERICS_INT8 = 0, // activations int8 per 32 k (docs/accuracy.md)
    TILEBEAM_NUMERICS_FP16 = 1, // the matrix unit's own: FP16 operands and output, of attention too
    // Added to one of them:
    // Flash attention with float32 exponentials instead of the FP16 table, and all else of it in float32
    TILEBEAM_NUMERICS_EXACT_EXP = 16,
    // Without FP16: flash attention of many rows with operands in BF16 where the CPU multiplies it (docs/accuracy.md)
    TILEBEAM_NUMERICS_BF16 = 32,
    // To int8, with or without float32 exponentials, which it has in any case: a row's results do not depend on the
    // rows beside it, nor on where its cells lie (docs/accuracy.md). For contexts made from now on, each for all its
    // life
    TILEBEAM_NUMERICS_DETERMINISTIC = 64,
};

// A tensor that a repacked file holds as tiles.
typedef struct tilebeam_tensor {
    const char * name; // as in the file, UTF-8, at most 63 bytes
    uint32_t type;     // enum tb_type, a tiled one
    uint32_t reserved;
    uint64_t ne[4];
    uint64_t offset; // bytes from the start of the file
} tilebeam_tensor;

typedef struct tilebeam_manifest {
    const char * path; // may be NULL without tensors
    const tilebeam_tensor * tensors;
    uint64_t n_tensors;
} tilebeam_manifest;

// What a load has made so far, less what it freed again. Other loads and models, on any thread, do not count.
typedef struct tilebeam_load {
    uint64_t announced_tensors; // tensors held as the tiles that the manifest names
    uint64_t tiled_tensors;     // all tensors held as tiles, those packed by the load as well
    uint64_t bad_buffers;       // buffers that no graph can use
    char reason[512];           // what went wrong with the first of them
} tilebeam_load;

// Options for sessions started from now on. n_threads and numerics, but for TILEBEAM_NUMERICS_DETERMINISTIC, also
// change those that run.
typedef struct tilebeam_options {
    uint32_t version;  // TILEBEAM_CONTROL_VERSION
    int32_t executor;  // enum tilebeam_executor
    int32_t numerics;  // enum tilebeam_numerics, with what is added
    int32_t n_threads; // 0: as many as llama.cpp asks for; else fixed, whatever llama.cpp says
    // Longest wait for one op, in proportion longer for one of more than 2^34 operations; the default of an executor
    // goes when another one is chosen.
    int32_t deadline_ms;
    uint32_t n_devices;   // that ggml was told of when the plugin was loaded; cannot be changed
    char isa[32];         // kernel set, "" = best
    char npud_path[4096]; // the executable of the NPU process, "" = tilebeam-npud(-hexagon) beside the plugin
    uint64_t memory_limit[TILEBEAM_MAX_DEVICES]; // per device: address space for mapped buffers, bytes; 0 = none
} tilebeam_options;

enum tilebeam_session_state {
    TILEBEAM_SESSION_NONE = 0, // not started: nothing needed it yet
    TILEBEAM_SESSION_ALIVE = 1,
    TILEBEAM_SESSION_DEAD = 2, // the next model load starts a new one
};

// Of HMX0, unless it says "all devices".
typedef struct tilebeam_status {
    uint32_t version; // TILEBEAM_CONTROL_VERSION
    int32_t session;  // enum tilebeam_session_state
    int32_t executor; // of the running session, or of the next one
    int32_t numerics;
    int32_t n_threads; // of the running session; 0 without one
    int32_t npu_pid;   // a process: its pid; else this process's; 0 without a session
    char isa[32];      // kernel set of the running session, "" without one
    char device[16];
    char description[112];
    char ggml_version[32]; // that the plugin was built for
    char ggml_commit[64];
    uint64_t memory_free; // bytes, as told to llama.cpp
    uint64_t memory_total;
    uint64_t buffers; // all devices from here on: live buffers and their bytes, mapped files included
    uint64_t buffer_bytes;
    uint64_t mapped_bytes;  // of these, mapped from files without a copy
    uint64_t bad_buffers;   // of the live ones, those that no graph can use because something went wrong
    uint64_t tiled_tensors; // tensors held as tiles in live buffers
    uint64_t sessions;      // started since the plugin was loaded
    uint64_t graphs;        // computed, and the ops in them
    uint64_t ops;
    uint64_t lowered;    // graphs translated; the others were sent from the cache
    uint64_t failures;   // graphs that failed
    uint64_t compute_ns; // time spent waiting for the NPU
    char last_error[512];
    uint64_t errors;   // failures of any kind so far
    char build_id[40]; // digest of the sources, in hexadecimal digits: the NPU process must have the same
} tilebeam_status;

// One device, whether ggml was told of it or not.
typedef struct tilebeam_device_status {
    uint32_t version; // TILEBEAM_CONTROL_VERSION
    uint32_t index;
    int32_t session;   // enum tilebeam_session_state
    int32_t executor;  // of the running session, or of the next one
    int32_t n_threads; // 0 without a session
    int32_t npu_pid;   // as in tilebeam_status
    uint32_t listed;   // 1: ggml was told of it
    uint32_t reserved;
    char name[16];
    char description[112];
    char isa[32];
    uint64_t memory_limit; // of the running session, or of the next one; bytes, 0 = none
    uint64_t memory_used;  // address space that the running session has mapped, in whole pages
    uint64_t memory_free;  // as told to llama.cpp
    uint64_t memory_total;
    uint64_t sessions; // started since the plugin was loaded
} tilebeam_device_status;

// Begin the load that this thread makes next, and say what the file holds: nothing, if it is an ordinary one. NULL ends
// it. 0, or an enum tb_status with the reason in tilebeam_last_error.
typedef int (*tilebeam_announce_t)(const tilebeam_manifest * manifest);

// What the load that this thread announced has made. 0, or an enum tb_status: nothing is announced.
typedef int (*tilebeam_loaded_t)(tilebeam_load * load);

// The options in force, to be changed and handed back to tilebeam_configure (0, or an enum tb_status).
typedef int (*tilebeam_get_options_t)(tilebeam_options * options);
typedef int (*tilebeam_configure_t)(const tilebeam_options * options);

// 0, or an enum tb_status.
typedef int (*tilebeam_status_t)(tilebeam_status * status);

typedef int (*tilebeam_device_status_t)(uint32_t index, tilebeam_device_status * status);

// The ggml_backend_dev_t of any device below TILEBEAM_MAX_DEVICES, for llama_model_params.devices: a program may spread
// a model over devices that ggml was not told of. NULL past the last.
typedef void * (*tilebeam_device_t)(uint32_t index);

// Tracing of all graphs from now on, CPU and NPU side; forgets what was collected before. At most so many records are
// kept, later ones are counted as lost.
typedef void (*tilebeam_trace_start_t)(uint64_t most_records);
typedef void (*tilebeam_trace_stop_t)(void);

// Take up to `most` records (tb_trace_record of tilebeam/trace.h) out of the collection, oldest first; how many. *lost:
// records that there was no room for. *damaged: what the NPU side stamped and cannot be true.
typedef uint64_t (*tilebeam_trace_take_t)(void * records, uint64_t most, uint64_t * lost, uint64_t * damaged);

// The last failure as a sentence, this thread's own if it met one, "" if there was none. Valid until this thread's next
// call of it.
typedef const char * (*tilebeam_last_error_t)(void);

// The last failure that this thread met since it asked last, "" if it met none. Valid as tilebeam_last_error's.
typedef const char * (*tilebeam_take_error_t)(void);

// The one function that the library itself exports, for when ggml_backend_load refused it: dlopen the plugin after
// importing llama_cpp and ask why. Compares a ggml version and commit (NULL, NULL: those of the ggml in this process)
// with what the plugin was built for. "" = they fit; else a sentence, valid until this thread's next call.
typedef const char * (*tilebeam_check_ggml_t)(const char * version, const char * commit);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif // TILEBEAM_CONTROL_H
