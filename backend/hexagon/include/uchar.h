// No wide characters; libc++'s <iosfwd> wants the type.
#ifndef TB_HEXAGON_UCHAR_H
#define TB_HEXAGON_UCHAR_H

#include <stddef.h>

typedef struct mbstate_t {
    int unused;
} mbstate_t;

#endif
