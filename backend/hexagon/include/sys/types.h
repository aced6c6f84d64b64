// Types of system calls.
#ifndef TB_HEXAGON_SYS_TYPES_H
#define TB_HEXAGON_SYS_TYPES_H

#include <stddef.h>
#include <unistd.h>

typedef long long off_t;
typedef unsigned int mode_t;

#endif
