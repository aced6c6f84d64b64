// File status.
#ifndef TB_HEXAGON_SYS_STAT_H
#define TB_HEXAGON_SYS_STAT_H

#include <sys/types.h>

#define S_IFMT 0170000
#define S_ISREG(m) (((m) & S_IFMT) == 0100000)
#define S_ISSOCK(m) (((m) & S_IFMT) == 0140000)

#ifdef __cplusplus
extern "C" {
#endif

struct stat { // as the kernel writes it
    unsigned long long st_dev, st_ino;
    mode_t st_mode;
    unsigned st_nlink, st_uid, st_gid;
    unsigned long long st_rdev, pad1;
    off_t st_size;
    int st_blksize, pad2;
    long long st_blocks;
    unsigned times[6];
    unsigned pad3[2];
};

int fstat(int fd, struct stat * to);

#ifdef __cplusplus
}
#endif

#endif
