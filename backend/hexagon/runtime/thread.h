// Thread-local storage blocks, shared by the start code and pthread_create.
//
// The compiler addresses a thread-local object at a negative distance from the register UGP, which points at the end
// of the thread's block.
#ifndef TB_HEXAGON_RUNTIME_THREAD_H
#define TB_HEXAGON_RUNTIME_THREAD_H

#include <stddef.h>

size_t tb_tls_bytes(void); // of a block, a multiple of its alignment (at most 128)

// Fills the block (zeroed by the caller) and makes it this thread's.
void tb_tls_enter(char * block);

#endif
