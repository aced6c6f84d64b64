// Clocks.
#ifndef TB_HEXAGON_TIME_H
#define TB_HEXAGON_TIME_H

#include <stddef.h>

#define CLOCK_REALTIME 0
#define CLOCK_MONOTONIC 1
#define CLOCKS_PER_SEC 1000000

#ifdef __cplusplus
extern "C" {
#endif

typedef long long time_t;
typedef long clock_t;
typedef int clockid_t;
struct timespec {
    time_t tv_sec;
    long tv_nsec;
    long tv_pad; // the kernel's is 64 bits wide
};
struct tm;

int clock_gettime(clockid_t clock, struct timespec * to);

#ifdef __cplusplus
}
#endif

#endif
