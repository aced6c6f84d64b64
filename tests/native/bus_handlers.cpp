// Programs with a SIGBUS handler of their own beside base/bus_guard.h: bus-handlers SCENARIO prints how often each of
// them was called. tests/session/test_bus_guard.py compiles and runs it.
//
// In every scenario a guarded mapping and a foreign one have lost their pages: reading the former gives zeros, reading
// the latter is a SIGBUS for the program's own handlers.
#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

#include "bus_guard.h"

namespace {

constexpr int rounds = 50;
constexpr size_t bytes = 65536;

sigjmp_buf back;
int early = 0; // calls of each handler
int late = 0;
struct sigaction before_late;

volatile unsigned char * lost_mapping(size_t size = bytes, void * where = nullptr) {
    const int file = memfd_create("bus-handlers", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) {
        std::exit(3);
    }
    void * base = mmap(where, size, PROT_READ, where ? MAP_SHARED | MAP_FIXED : MAP_SHARED, file, 0);
    if (base == MAP_FAILED || ftruncate(file, 0) != 0) {
        std::exit(3);
    }
    return static_cast<volatile unsigned char *>(base);
}

void count_and_jump(int, siginfo_t *, void *) {
    ++early;
    siglongjmp(back, 1);
}

void count(int, siginfo_t *, void *) { ++early; }

void count_and_call(int signal, siginfo_t * info, void * context) {
    ++late;
    before_late.sa_sigaction(signal, info, context);
}

void count_and_put_back(int signal, siginfo_t *, void *) {
    ++late;
    sigaction(SIGBUS, &before_late, nullptr);
    raise(signal);
}

void install(void (*handler)(int, siginfo_t *, void *), int flags = 0, struct sigaction * before = nullptr) {
    struct sigaction action = {};
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO | flags;
    sigaction(SIGBUS, &action, before);
}

// At different depths of the stack, so that its addresses differ from round to round.
__attribute__((noinline)) void read_lost(volatile unsigned char * at, int depth) {
    volatile char room[256];
    room[0] = 0;
    if (depth > 0) {
        read_lost(at, depth - 1);
    } else if (sigsetjmp(back, 1) == 0) {
        (void)*at;
    }
    room[255] = room[0];
}

void on_a_stack_of_their_own() {
    stack_t stack = {};
    stack.ss_size = 65536;
    stack.ss_sp = std::malloc(stack.ss_size);
    sigaltstack(&stack, nullptr);
}

// A mapping that took the place of a part of an older one which is still guarded: the page is the newer one's.
int in_a_hole() {
    volatile unsigned char * const older = lost_mapping(2 * bytes);
    void * const base = const_cast<unsigned char *>(older);
    tb::guarded_range whole(base, 2 * bytes, PROT_READ, tb::guarded_range::repair::page);
    volatile unsigned char * const newer = lost_mapping(bytes, static_cast<char *>(base) + bytes);
    tb::guarded_range inner(const_cast<unsigned char *>(newer), bytes, PROT_READ, tb::guarded_range::repair::page);
    tb::guarded_range again(const_cast<unsigned char *>(newer), bytes, PROT_READ, tb::guarded_range::repair::page);
    if (newer[5000] != 0) return 4;
    std::printf("%d %d\n", whole.hit(), inner.hit() && again.hit());
    if (older[5000] != 0) return 4;
    std::printf("%d %d\n", whole.hit(), inner.hit() && again.hit());
    return 0;
}

} // namespace

int main(int, char ** argv) {
    const auto is = [scenario = argv[1]](const char * name) { return std::strcmp(scenario, name) == 0; };
    if (is("hole")) return in_a_hole();
    volatile unsigned char * const foreign = lost_mapping();
    volatile unsigned char * const guarded = lost_mapping();
    if (is("own-stack")) {
        on_a_stack_of_their_own();
    }
    if (is("ignored") || is("ignored-fault")) {
        std::signal(SIGBUS, SIG_IGN);
    } else if (is("kill") || is("once")) {
        install(count, is("once") ? static_cast<int>(SA_RESETHAND) : 0);
    } else if (!is("default")) {
        install(count_and_jump, is("own-stack") ? SA_ONSTACK : 0);
    }
    tb::guarded_range range(const_cast<unsigned char *>(guarded), bytes, PROT_READ, tb::guarded_range::repair::page);
    if (is("late")) {
        install(count_and_call, 0, &before_late);
    } else if (is("put-back")) {
        install(count_and_put_back, 0, &before_late);
    }
    for (int i = 0; i < rounds; ++i) {
        if (is("kill") || is("ignored") || is("default")) {
            kill(getpid(), SIGBUS);
            raise(SIGBUS);
        } else {
            std::printf("%d %d\n", early, late);
            std::fflush(stdout);
            read_lost(foreign, is("own-stack") ? 0 : std::abs(rounds / 2 - i));
        }
    }
    if (guarded[5000] != 0 || !range.hit()) {
        return 4;
    }
    std::printf("%d %d\n", early, late);
    return 0;
}
