// System calls that the sources name by number (Linux, generic 32-bit table).
#ifndef TB_HEXAGON_SYS_SYSCALL_H
#define TB_HEXAGON_SYS_SYSCALL_H

#define SYS_futex 98
#define SYS_pidfd_open 434

#endif
