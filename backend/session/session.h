// The CPU side of the channel: one session = one NPU (thread or process), its control region and its mapped buffers.
#ifndef TILEBEAM_SESSION_H
#define TILEBEAM_SESSION_H

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shm.h"
#include "tilebeam/ops.h"
#include "tilebeam/protocol.h"

namespace tb::session {

// hexagon: tilebeam-npud-hexagon, a process like the other but for another instruction set, run by qemu-hexagon.
enum class executor_kind { thread, process, hexagon };

constexpr int default_deadline_ms(executor_kind kind) {
    return kind == executor_kind::hexagon ? 600000 : 60000; // the emulator takes some hundred times as long
}

// What a session may map at most, given the limit asked for (0 = none): with 32-bit addresses never more than 3 GiB,
// which leaves the rest to the program and its scratch memory.
constexpr uint64_t address_limit(executor_kind kind, uint64_t wanted) {
    constexpr uint64_t most = uint64_t{3} << 30;
    return kind == executor_kind::hexagon && (wanted == 0 || wanted > most) ? most : wanted;
}

struct options {
    executor_kind kind = executor_kind::thread;
    int n_threads = 0;         // NPU worker threads; 0 = one per performance core
    int deadline_ms = 0;       // longest wait for one op (reply_deadline.h), anew when one ends. 0 = the default
    int spin_us = 50;          // spin this long before sleeping; with one CPU not at all
    uint64_t memory_limit = 0; // address space for mapped buffers; 0 = none
    std::string npud_path;     // process: the tilebeam-npud executable; hexagon: tilebeam-npud-hexagon
    std::string isa;           // kernel set, "" = best
    bool fuse = true;          // false: graphs run op by op (TILEBEAM_FUSE=0)
};

struct result {
    tb_status status = TB_OK;
    uint32_t op_index = 0;
    std::string why; // a sentence for people; empty when status is TB_OK
    bool ok() const { return status == TB_OK; }
};

// What the channel did so far.
struct session_counters {
    uint64_t requests = 0;
    uint64_t patched = 0;   // graphs of which only differences were sent
    uint64_t spun = 0;      // replies that came while spinning for them, or were made by the thread that asked
    uint64_t slept = 0;     // .. while asleep, or never
    uint32_t schedules = 0; // that the NPU side made of graphs
};

// Thread-safe: calls from several threads are served one after the other. After a dead or late NPU every further call
// returns the same failure; a new session starts clean.
class session {
  public:
    // Starts the NPU side and shakes hands. nullptr: `why` says what went wrong.
    static std::unique_ptr<session> start(const options & opt, std::string & why);
    ~session(); // stops the NPU side; leaves no process, thread, descriptor or memory file behind

    // Map [offset, offset+size) of fd on the NPU side; returns the buffer id through *id. The descriptor may be closed
    // after the call. offset is a multiple of the page size.
    result map(int fd, uint64_t offset, uint64_t size, bool writable, uint32_t * id);
    result unmap(uint32_t id);

    // Run a graph. `serial` != 0 names an unchanging list of ops: the first call sends all, later ones with the same
    // serial send only ops that differ from the last time. serial == 0: always sent whole, not kept. `unchanged`: the
    // caller knows that none differs.
    result compute(const tb_op * ops, uint32_t n_ops, uint64_t serial, bool unchanged = false);
    result noop();
    result set_threads(int n);

    bool alive() const;
    // The NPU process once could not get memory that no limit of the session's own forbids: what comes next is better
    // off with a process of its own.
    bool starved() const;
    int npu_pid() const;     // a process: its pid; else this process's
    uint64_t mapped() const; // address space that buffers take, bytes in whole pages
    int n_threads() const;   // NPU threads in use
    const options & opts() const;
    uint32_t guards() const; // enum tb_guard, or'ed: how the NPU side is shut in
    session_counters counters() const;
    const char * isa() const;
    shared_memory & control_region(); // the channel itself, for fault tests
    shared_memory * trace_ring();     // where the NPU side stamps what it does; nullptr while tracing is off

  private:
    session();
    struct impl;
    std::unique_ptr<impl> self;
};

} // namespace tb::session

#endif // TILEBEAM_SESSION_H
