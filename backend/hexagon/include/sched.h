// Scheduling.
#ifndef TB_HEXAGON_SCHED_H
#define TB_HEXAGON_SCHED_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

int sched_yield(void);

#ifdef __cplusplus
}
#endif

#endif
