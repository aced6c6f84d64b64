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

typedef long time_t; // 32 bits: qemu-hexagon 7.2 has no system calls with wider times; good for a monotonic clock
typedef long clock_t;
typedef int clockid_t;
struct timespec {
    time_t tv_sec;
    long tv_nsec;
};
struct tm;

int clock_gettime(clockid_t clock, struct timespec * to);

#ifdef __cplusplus
}
#endif

#endif
