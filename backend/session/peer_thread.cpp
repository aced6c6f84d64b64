// The NPU as a thread of this process. See peer.h.
#include <cerrno>
#include <cfenv>
#include <csignal>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include "peer.h"
#include "service.h"
#include "wait.h"

namespace tb::session {

namespace {

// Shared by the thread and its owner; whoever lets go last frees it.
struct thread_state {
    int region_fd;
    int socket_fd;
    uint32_t done = 0;
};

void * thread_main(void * arg) {
    std::unique_ptr<std::shared_ptr<thread_state>> own(static_cast<std::shared_ptr<thread_state> *>(arg));
    thread_state & state = **own;
#if defined(__GLIBC__)
    pthread_setname_np(pthread_self(), "tilebeam-npu");
#endif
    std::fesetenv(FE_DFL_ENV);
    serve(state.region_fd, state.socket_fd);
    __atomic_store_n(&state.done, 1, __ATOMIC_RELEASE);
    futex_wake(&state.done, futex_scope::process_private);
    return nullptr;
}

class thread_peer : public peer {
  public:
    thread_peer(std::shared_ptr<thread_state> s, pthread_t h) : state(std::move(s)), handle(h) {}
    ~thread_peer() override { finish(0); }

    bool ended(std::string & how) override {
        if (!__atomic_load_n(&state->done, __ATOMIC_ACQUIRE)) {
            return false;
        }
        how = "has ended by itself";
        return true;
    }

    void finish(int grace_ms) override {
        if (!held) {
            return;
        }
        held = false;
        const int64_t end = now_ns() + int64_t{grace_ms} * 1000000;
        while (!__atomic_load_n(&state->done, __ATOMIC_ACQUIRE)) {
            const int64_t left = end - now_ns();
            if (left <= 0) {
                pthread_detach(handle);
                return;
            }
            futex_wait(&state->done, 0, left, futex_scope::process_private);
        }
        pthread_join(handle, nullptr);
    }

    void forget() override { held = false; }
    int pid() const override { return getpid(); }

  private:
    std::shared_ptr<thread_state> state;
    pthread_t handle;
    bool held = true;
};

} // namespace

std::unique_ptr<peer> start_thread(int region_fd, int socket_fd, std::string & why) {
    auto state = std::make_shared<thread_state>();
    state->region_fd = fcntl(region_fd, F_DUPFD_CLOEXEC, 0);
    state->socket_fd = fcntl(socket_fd, F_DUPFD_CLOEXEC, 0);
    int error = state->region_fd < 0 || state->socket_fd < 0 ? errno : 0;
    pthread_t handle{};
    if (error == 0) {
        auto own = std::make_unique<std::shared_ptr<thread_state>>(state);
        // Signals are for the program's own threads, except those that a thread raises by what it does itself.
        sigset_t others;
        sigset_t before;
        sigfillset(&others);
        for (const int own_signal : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) {
            sigdelset(&others, own_signal);
        }
        pthread_sigmask(SIG_SETMASK, &others, &before);
        error = pthread_create(&handle, nullptr, thread_main, own.get());
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (error == 0) {
            own.release();
            return std::make_unique<thread_peer>(std::move(state), handle);
        }
    }
    for (const int fd : {state->region_fd, state->socket_fd}) {
        if (fd >= 0) {
            close(fd);
        }
    }
    why = std::string("the NPU thread could not be started: ") + std::strerror(error);
    return nullptr;
}

} // namespace tb::session
