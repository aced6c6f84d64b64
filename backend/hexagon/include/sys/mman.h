// Memory mappings. Offsets need the alignment of 4096 that they need on the host.
#ifndef TB_HEXAGON_SYS_MMAN_H
#define TB_HEXAGON_SYS_MMAN_H

#include <sys/types.h>

#define PROT_READ 1
#define PROT_WRITE 2
#define MAP_SHARED 1
#define MAP_PRIVATE 2
#define MAP_ANONYMOUS 0x20
#define MAP_FAILED ((void *)-1)
#define MADV_HUGEPAGE 14

#ifdef __cplusplus
extern "C" {
#endif

void * mmap(void * at, size_t size, int protection, int flags, int fd, off_t offset);
int munmap(void * at, size_t size);
int madvise(void * at, size_t size, int advice);

#ifdef __cplusplus
}
#endif

#endif
