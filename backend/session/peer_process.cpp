// The NPU as a process of its own: tilebeam-npud, or tilebeam-npud-hexagon in an emulator. See peer.h.
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <mutex>
#include <poll.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "fork.h"
#include "peer.h"
#include "wait.h"

extern char ** environ;

namespace tb::session {

namespace {

// The exit code of tilebeam-npud-hexagon, which throws no exceptions, where others would (hexagon/runtime/cxx.cpp).
constexpr int exit_no_memory = 112;

// Where tilebeam-npud finds its two descriptors; npud_main.cpp closes everything above.
constexpr int child_region_fd = 3;
constexpr int child_socket_fd = 4;

// A killed process that waits for a disk ends when the disk answers. Nobody waits for it here: its exit status is
// collected when the next one starts.
constexpr int end_ms = 700; // from SIGKILL to the end, for all others
fork_lock abandoned_lock;
std::vector<pid_t> abandoned;

void abandon(pid_t child) {
    std::lock_guard<fork_lock> hold(abandoned_lock);
    abandoned.push_back(child);
}

void collect_abandoned() {
    std::lock_guard<fork_lock> hold(abandoned_lock);
    abandoned.erase(std::remove_if(abandoned.begin(), abandoned.end(),
                                   [](pid_t child) { return waitpid(child, nullptr, WNOHANG) != 0; }),
                    abandoned.end());
}

class process_peer : public peer {
  public:
    explicit process_peer(pid_t p) : child(p), handle(static_cast<int>(syscall(SYS_pidfd_open, p, 0))) {
        if (handle >= 0) {
            fcntl(handle, F_SETFD, FD_CLOEXEC);
        }
    }
    ~process_peer() override {
        finish(0);
        if (running) {
            abandon(child);
        }
        if (handle >= 0) {
            close(handle);
        }
    }

    bool ended(std::string & how) override {
        collect(WNOHANG);
        if (running) {
            return false;
        }
        how = fate;
        return true;
    }

    void finish(int grace_ms) override {
        const int64_t end = now_ns() + int64_t{grace_ms} * 1000000;
        int pause_ms = 1;
        for (collect(WNOHANG); running && now_ns() < end; collect(WNOHANG)) {
            if (handle >= 0) {
                pollfd p{handle, POLLIN, 0};
                poll(&p, 1, static_cast<int>((end - now_ns()) / 1000000 + 1));
            } else {
                usleep(static_cast<useconds_t>(pause_ms) * 1000);
                pause_ms = std::min(2 * pause_ms, 20);
            }
        }
        if (running && !killed) {
            killed = true;
            // By pidfd the signal cannot hit another process that got the number since.
            if (handle < 0 || syscall(SYS_pidfd_send_signal, handle, SIGKILL, nullptr, 0) != 0) {
                kill(child, SIGKILL);
            }
            finish(end_ms);
        }
    }

    void forget() override { running = false; }
    int pid() const override { return static_cast<int>(child); }

  private:
    void collect(int flags) {
        if (!running) {
            return;
        }
        int status = 0;
        pid_t got;
        do {
            got = waitpid(child, &status, flags);
        } while (got < 0 && errno == EINTR);
        if (got == 0) {
            return;
        }
        running = false;
        if (got < 0) {
            fate = "has ended (another part of this program collected its exit status)";
        } else if (WIFSIGNALED(status)) {
            const int sig = WTERMSIG(status);
            fate = "was killed by signal " + std::to_string(sig) + " (" + strsignal(sig) + ")";
            if (sig == SIGBUS) {
                fate += "; most likely a mapped file was truncated";
            } else if (sig == SIGKILL) {
                fate += "; the system does that when memory runs out";
            }
        } else {
            const int code = WEXITSTATUS(status);
            fate = code == exit_no_memory ? "ran out of memory" : "has exited with code " + std::to_string(code);
        }
    }

    pid_t child;
    int handle; // pidfd, -1 on kernels without
    bool running = true;
    bool killed = false;
    std::string fate;
};

// posix_spawn's settings, freed on every way out.
struct spawn_settings {
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    spawn_settings() {
        posix_spawn_file_actions_init(&actions);
        posix_spawnattr_init(&attributes);
    }
    ~spawn_settings() {
        posix_spawn_file_actions_destroy(&actions);
        posix_spawnattr_destroy(&attributes);
    }
    spawn_settings(const spawn_settings &) = delete;
    spawn_settings & operator=(const spawn_settings &) = delete;
};

// `command` gets the descriptors' numbers and this process's as further arguments.
std::unique_ptr<peer> start(std::vector<std::string> command, int region_fd, int socket_fd, std::string & why) {
    collect_abandoned();
    // Above the numbers they are to get, so that neither overwrites the other.
    const int region = fcntl(region_fd, F_DUPFD_CLOEXEC, 10);
    const int socket = fcntl(socket_fd, F_DUPFD_CLOEXEC, 10);
    int error = region < 0 || socket < 0 ? errno : 0;
    pid_t child = 0;
    if (error == 0) {
        spawn_settings s;
        posix_spawn_file_actions_addopen(&s.actions, 0, "/dev/null", O_RDONLY, 0);
        posix_spawn_file_actions_addopen(&s.actions, 1, "/dev/null", O_WRONLY, 0);
        posix_spawn_file_actions_adddup2(&s.actions, region, child_region_fd);
        posix_spawn_file_actions_adddup2(&s.actions, socket, child_socket_fd);
        // A process group of its own: Ctrl-C at the terminal is for the program, which then stops the NPU in good
        // order. Signal dispositions and mask of the program are not inherited.
        sigset_t none;
        sigset_t all;
        sigemptyset(&none);
        sigfillset(&all);
        posix_spawnattr_setsigmask(&s.attributes, &none);
        posix_spawnattr_setsigdefault(&s.attributes, &all);
        posix_spawnattr_setpgroup(&s.attributes, 0);
        posix_spawnattr_setflags(&s.attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 34)
        posix_spawn_file_actions_addclosefrom_np(&s.actions, child_socket_fd + 1);
#endif
        command.push_back("--region-fd=" + std::to_string(child_region_fd));
        command.push_back("--socket-fd=" + std::to_string(child_socket_fd));
        command.push_back("--parent=" + std::to_string(getpid()));
        std::vector<char *> argv;
        for (std::string & argument : command) {
            argv.push_back(argument.data());
        }
        argv.push_back(nullptr);
        error = posix_spawnp(&child, argv[0], &s.actions, &s.attributes, argv.data(), environ);
    }
    for (const int fd : {region, socket}) {
        if (fd >= 0) {
            close(fd);
        }
    }
    if (error != 0) {
        why = "the NPU process '" + command[0] + "' could not be started: " + std::strerror(error);
        return nullptr;
    }
    return std::make_unique<process_peer>(child);
}

} // namespace

std::unique_ptr<peer> start_process(const std::string & path, int region_fd, int socket_fd, std::string & why) {
    if (path.empty()) {
        why = "the process executor needs the path of tilebeam-npud";
        return nullptr;
    }
    return start({path}, region_fd, socket_fd, why);
}

std::unique_ptr<peer> start_hexagon(const std::string & path, int region_fd, int socket_fd, std::string & why) {
    if (access(path.c_str(), R_OK) != 0) {
        why = "'" + path + "' was not built: install the packages clang-19, lld-19 and libc++-19-dev, and build again";
        return nullptr;
    }
    auto started = start({"qemu-hexagon", path}, region_fd, socket_fd, why);
    if (!started) {
        why += "; qemu-hexagon comes with the package qemu-user";
    }
    return started;
}

} // namespace tb::session
