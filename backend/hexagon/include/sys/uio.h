// struct iovec lives in sys/socket.h.
#ifndef TB_HEXAGON_SYS_UIO_H
#define TB_HEXAGON_SYS_UIO_H

#include <sys/socket.h>

#endif
