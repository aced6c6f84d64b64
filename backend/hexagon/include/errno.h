// The error numbers that the code for Hexagon names (Linux, generic).
#ifndef TB_HEXAGON_ERRNO_H
#define TB_HEXAGON_ERRNO_H

// A function instead of a thread-local object: C and C++ then agree on how to reach it.
#ifdef __cplusplus
extern "C" {
#endif

int * tb_errno(void);

#ifdef __cplusplus
}
#endif

#define errno (*tb_errno())

#define EPERM 1
#define EINTR 4
#define EAGAIN 11
#define ENOMEM 12
#define EACCES 13
#define EINVAL 22
#define ERANGE 34
#define EOVERFLOW 75
#define ETIMEDOUT 110

#endif
