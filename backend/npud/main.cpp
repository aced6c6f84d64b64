// tilebeam-npud: the NPU as a process of its own. A Tilebeam program starts it with two inherited descriptors, the
// control region and a socket over which it hands in the buffers to map; nobody else can reach it.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <poll.h>
#include <pthread.h>
#include <string>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__GLIBC__)
#    include <malloc.h>
#endif

#include "build_id.h"
#include "kernels/kernels.h"
#include "sandbox.h"
#include "service.h"
#include "thread_pool.h"
#include "tilebeam/layout.h"
#include "tilebeam/protocol.h"

namespace {

constexpr char usage[] = "usage: tilebeam-npud --region-fd=N --socket-fd=N --parent=PID\n"
                         "\n"
                         "The NPU process of Tilebeam. A program that uses Tilebeam with the `process` executor\n"
                         "starts it, talks to it over the inherited descriptors, and stops it.\n"
                         "\n"
                         "  --help       this text\n"
                         "  --version    versions of the protocol and of the tile layout\n";

// The value of --name=N, or -1.
int number(const char * arg, const char * name) {
    const size_t length = std::strlen(name);
    if (std::strncmp(arg, name, length) != 0 || arg[length] != '=') {
        return -1;
    }
    char * end = nullptr;
    errno = 0;
    const long value = std::strtol(arg + length + 1, &end, 10);
    return errno == 0 && end != arg + length + 1 && *end == 0 && value >= 0 && value <= INT32_MAX
               ? static_cast<int>(value)
               : -1;
}

bool is_socket(int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISSOCK(st.st_mode);
}

// The socket's other end was made by the process that started this one: the kernel tells who did.
bool made_by(int socket, int parent) {
    ucred maker{};
    socklen_t size = sizeof maker;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &maker, &size) == 0 && maker.pid == parent &&
           maker.uid == geteuid();
}

struct served {
    int region;
    int socket;
    uint32_t guards;
};

// On a stack of its own, all of which is mapped from the start: the main thread's grows page by page, and where memory
// is short that would end the process instead of giving an error.
void * serve(void * arg) {
    const auto * s = static_cast<const served *>(arg);
    std::exit(tb::session::serve(s->region, s->socket, s->guards));
}

// Ends this process as soon as its parent is gone, whatever the serving thread does at that time. The socket alone
// would not tell while a forked child of the parent still holds the other end; and the kernel's own signal for it
// (PR_SET_PDEATHSIG) comes when the thread ends that started this process, which the program may well outlive.
[[noreturn]] void watch(int socket, int parent) {
    pollfd p[2] = {{socket, 0, 0}, {parent, POLLIN, 0}};
    while (poll(p, 2, -1) < 0 && errno == EINTR) {
    }
    _exit(0);
}

} // namespace

int main(int argc, char ** argv) {
    int region = -1;
    int socket = -1;
    int parent = -1;
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        if (arg == "--help" || arg == "-h") {
            std::fputs(usage, stdout);
            return 0;
        }
        if (arg == "--version") {
            std::printf("tilebeam-npud protocol %d layout %d build %s\n", TB_PROTOCOL_VERSION, TB_LAYOUT_VERSION,
                        tb::session::build_id_text);
            return 0;
        }
        if (const int n = number(argv[i], "--region-fd"); n >= 0) {
            region = n;
        } else if (const int m = number(argv[i], "--socket-fd"); m >= 0) {
            socket = m;
        } else if (const int p = number(argv[i], "--parent"); p >= 0) {
            parent = p;
        } else {
            std::fprintf(stderr, "tilebeam-npud: unknown or bad option '%s'\n%s", argv[i], usage);
            return 2;
        }
    }
    if (region < 0 || !is_socket(socket) || parent < 0) {
        std::fputs("tilebeam-npud: this program is started by Tilebeam itself, not by hand (see --help)\n", stderr);
        return 2;
    }
    tb::session::close_above(region > socket ? region : socket);
    int parent_handle = -1;
#ifdef SYS_pidfd_open
    parent_handle = static_cast<int>(syscall(SYS_pidfd_open, parent, 0));
#endif
    if (getppid() != parent) {
        return 0; // it died while this process started
    }
    if (!made_by(socket, parent)) {
        std::fputs("tilebeam-npud: the socket is not its parent's\n", stderr);
        return 2;
    }
#if defined(__GLIBC__)
    mallopt(M_ARENA_MAX, 1); // one thread allocates; a second arena would only take address space
#endif
    std::signal(SIGBUS, SIG_DFL); // a sanitizer would turn a truncated model file into an exit code
    tb::usable_cpus();            // reads files, and remembers what they say
    tb::npu::available_kernels(); // may ask for more registers, and remembers the answer
    static served s{region, socket, tb::session::enter_sandbox() | TB_GUARD_PARENT};
    pthread_t thread;
    if (pthread_create(&thread, nullptr, serve, &s) != 0) {
        return 1;
    }
    watch(socket, parent_handle);
}
