// Threads, as much of them as the thread pool uses.
#ifndef TB_HEXAGON_PTHREAD_H
#define TB_HEXAGON_PTHREAD_H

#include <signal.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tb_thread * pthread_t;
typedef struct pthread_attr_t pthread_attr_t;

// `attr` is NULL.
int pthread_create(pthread_t * thread, const pthread_attr_t * attr, void * (*start)(void *), void * arg);
int pthread_join(pthread_t thread, void ** result);

static inline int pthread_sigmask(int how, const sigset_t * set, sigset_t * old) {
    (void)how;
    (void)set;
    if (old) {
        *old = 0;
    }
    return 0;
}

#ifdef __cplusplus
}
#endif

#endif
