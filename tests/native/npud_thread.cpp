// tilebeam-npud as a thread of the stress program, where ThreadSanitizer sees both sides of the channel: the linker
// takes these functions in place of session/peer_process.cpp.
#include <atomic>
#include <fcntl.h>
#include <thread>
#include <unistd.h>

#include "peer.h"
#include "service.h"

namespace tb::session {

namespace {

class npud_thread : public peer {
  public:
    npud_thread(int region_fd, int socket_fd)
        : thread([this, region = fcntl(region_fd, F_DUPFD_CLOEXEC, 0), socket = fcntl(socket_fd, F_DUPFD_CLOEXEC, 0)] {
              serve(region, socket);
              done = true;
          }) {}
    ~npud_thread() override { finish(0); }

    bool ended(std::string & how) override {
        how = "has ended by itself";
        return done;
    }
    void finish(int) override {
        if (thread.joinable()) {
            thread.join();
        }
    }
    void forget() override { thread.detach(); }
    int pid() const override { return getpid(); }

  private:
    std::atomic<bool> done{false};
    std::thread thread;
};

} // namespace

std::unique_ptr<peer> start_process(const std::string &, int region_fd, int socket_fd, std::string &) {
    return std::make_unique<npud_thread>(region_fd, socket_fd);
}

std::unique_ptr<peer> start_hexagon(const std::string &, int, int, std::string & why) {
    why = "there is no emulator here";
    return nullptr;
}

} // namespace tb::session
