// The NPU side as the CPU side holds it: the threads that call it, or a tilebeam-npud process, natively or emulated.
#ifndef TILEBEAM_SESSION_PEER_H
#define TILEBEAM_SESSION_PEER_H

#include <cstdint>
#include <memory>
#include <string>

namespace tb::session {

class peer {
  public:
    virtual ~peer() = default;

    // Has it ended? `how` then says what happened, e.g. "was killed by signal 9 (Killed)". Does not wait.
    virtual bool ended(std::string & how) = 0;

    // It was told to stop, or is given up: wait at most grace_ms for its end. A process is then killed and collected
    // (within a second: one that not even that ends is stuck in the kernel, and collected later).
    virtual void finish(int grace_ms) = 0;

    // After fork() the child has a copy of this object but not the thread or child process that it stands for.
    virtual void forget() = 0;

    virtual int pid() const = 0;

    // The request that lies in the region, answered by the calling thread. False: there is somebody else, who answers
    // when the doorbell rings.
    virtual bool answer(uint32_t /*seq*/) { return false; }
};

// All serve on copies of the descriptors. nullptr: `why` says what went wrong.
std::unique_ptr<peer> start_caller(int region_fd, int socket_fd, std::string & why);
std::unique_ptr<peer> start_process(const std::string & path, int region_fd, int socket_fd, std::string & why);
// path: tilebeam-npud-hexagon, which qemu-hexagon from PATH runs.
std::unique_ptr<peer> start_hexagon(const std::string & path, int region_fd, int socket_fd, std::string & why);

} // namespace tb::session

#endif // TILEBEAM_SESSION_PEER_H
