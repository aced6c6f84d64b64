// The NPU without a thread that waits for requests: whoever sends one answers it, and would only wait meanwhile. Nobody
// has to be woken, neither for the request nor for the reply; the thread pool's other threads help. See peer.h.
#include <cerrno>
#include <cstring>
#include <exception>
#include <fcntl.h>
#include <unistd.h>

#include "peer.h"
#include "service.h"

namespace tb::session {

namespace {

class caller_peer : public peer {
  public:
    caller_peer(int region_fd, int socket_fd) : npu(std::make_unique<inline_service>(region_fd, socket_fd)) {
        has_ended = !npu->open();
    }

    bool ended(std::string & how) override {
        how = "has ended by itself";
        return has_ended;
    }

    bool answer(uint32_t seq) override {
        try {
            has_ended = has_ended || !npu->answer(seq);
        } catch (const std::exception &) {
            has_ended = true; // no memory for the service itself
        }
        return true;
    }

    void finish(int) override { npu.reset(); }
    void forget() override { npu.release(); } // its other threads are not in this process
    int pid() const override { return getpid(); }

  private:
    std::unique_ptr<inline_service> npu;
    bool has_ended = false;
};

} // namespace

std::unique_ptr<peer> start_caller(int region_fd, int socket_fd, std::string & why) {
    const int region = fcntl(region_fd, F_DUPFD_CLOEXEC, 0);
    const int socket = fcntl(socket_fd, F_DUPFD_CLOEXEC, 0);
    if (region >= 0 && socket >= 0) {
        return std::make_unique<caller_peer>(region, socket);
    }
    why = std::string("no descriptors for the NPU: ") + std::strerror(errno);
    for (const int fd : {region, socket}) {
        if (fd >= 0) {
            close(fd);
        }
    }
    return nullptr;
}

} // namespace tb::session
