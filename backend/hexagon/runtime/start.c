// The first instructions: stack, thread-local storage, constructors, main, exit.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "syscall.h"
#include "thread.h"

int main(int argc, char ** argv);

typedef void (*initializer)(void);
extern const initializer __init_array_start[], __init_array_end[];

__asm__(".globl _start\n"
        ".type _start, @function\n"
        "_start:\n"
        "    { r0 = r29 }\n"
        "    { r29 = and(r29, #-128) }\n"
        "    { r30 = #0; r31 = #0 }\n"
        "    { call tb_start }\n"
        ".size _start, .-_start\n");

// The stack as the kernel leaves it: argc, the arguments, NULL, the environment.
__attribute__((used, noreturn)) void tb_start(const intptr_t * stack) {
    static char storage[1024] __attribute__((aligned(128)));
    if (tb_tls_bytes() > sizeof storage) {
        static const char text[] = "tilebeam: too much thread-local storage for the first thread\n";
        tb_syscall(NR_write, 2, (long)text, sizeof text - 1, 0, 0, 0);
        _Exit(127);
    }
    tb_tls_enter(storage);
    for (const initializer * i = __init_array_start; i != __init_array_end; i++)
        (*i)();
    exit(main((int)stack[0], (char **)(stack + 1)));
}
