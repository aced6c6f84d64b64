// What is left of a process.
#ifndef TB_HEXAGON_UNISTD_H
#define TB_HEXAGON_UNISTD_H

#include <stddef.h>

#define _SC_PAGESIZE 30
#define _SC_NPROCESSORS_ONLN 84

#ifdef __cplusplus
extern "C" {
#endif

typedef int pid_t;
typedef long ssize_t;

ssize_t read(int fd, void * to, size_t n);
ssize_t write(int fd, const void * from, size_t n);
int close(int fd);
long sysconf(int name);
pid_t getpid(void);
pid_t getppid(void);
unsigned geteuid(void);
long syscall(long number, ...);
__attribute__((noreturn)) void _exit(int code);

#ifdef __cplusplus
}
#endif

#endif
