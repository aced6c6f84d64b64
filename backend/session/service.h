// The NPU side of the channel: takes requests from the control region and runs them in an executor. A loop that waits
// for them is all of tilebeam-npud; with the thread executor each is answered by the thread that sends it.
//
// It trusts nothing in the region: a request and its payload are copied to private memory, their digest is compared,
// and only the copy is looked at.
#ifndef TILEBEAM_SESSION_SERVICE_H
#define TILEBEAM_SESSION_SERVICE_H

#include <cstdint>
#include <memory>

namespace tb::session {

// Serve until the CPU side says stop or is gone. Takes over both descriptors. `guards` (enum tb_guard) is what the
// caller has shut itself in with, for the greeting. Returns 0, or 1 if the CPU side was refused or broke the protocol
// beyond repair.
int serve(int region_fd, int socket_fd, uint32_t guards = 0);

// The same NPU side without the waiting: the caller puts a request into the region and has it answered in its own
// thread (peer_caller.cpp; the fuzz target, where a crash must be the message's own).
class inline_service {
  public:
    inline_service(int region_fd, int socket_fd); // takes over both descriptors
    ~inline_service();
    inline_service(const inline_service &) = delete;
    inline_service & operator=(const inline_service &) = delete;

    bool open();               // maps the region and shakes hands. False: refused, the reply in the region says why
    bool answer(uint32_t seq); // one request, as `req_seq` = seq would start it. False: it was a stop

  private:
    struct impl;
    std::unique_ptr<impl> self;
};

} // namespace tb::session

#endif // TILEBEAM_SESSION_SERVICE_H
