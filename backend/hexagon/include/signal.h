// Signals: none is handled on this side.
#ifndef TB_HEXAGON_SIGNAL_H
#define TB_HEXAGON_SIGNAL_H

#include <stddef.h>

typedef unsigned long long sigset_t;
typedef int sig_atomic_t;
#define SIG_DFL ((void (*)(int))0)
#define SIG_SETMASK 2
#define SIGILL 4
#define SIGBUS 7
#define SIGFPE 8
#define SIGSEGV 11

// Only back to the default action, which is what every signal has.
static inline void (*signal(int number, void (*action)(int)))(int) {
    (void)number;
    return action;
}

static inline int sigfillset(sigset_t * set) {
    *set = ~0ULL;
    return 0;
}

static inline int sigdelset(sigset_t * set, int signal) {
    *set &= ~(1ULL << (signal - 1));
    return 0;
}

#endif
