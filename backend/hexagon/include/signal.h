// Signals: none is handled on this side.
#ifndef TB_HEXAGON_SIGNAL_H
#define TB_HEXAGON_SIGNAL_H

#include <stddef.h>

typedef unsigned long long sigset_t;
typedef int sig_atomic_t;
#define SIG_SETMASK 2
#define SIGILL 4
#define SIGBUS 7
#define SIGFPE 8
#define SIGSEGV 11

static inline int sigfillset(sigset_t * set) {
    *set = ~0ULL;
    return 0;
}

static inline int sigdelset(sigset_t * set, int signal) {
    *set &= ~(1ULL << (signal - 1));
    return 0;
}

#endif
