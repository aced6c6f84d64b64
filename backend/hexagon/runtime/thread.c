// Threads over clone() and futex, and the thread-local storage of all of them.
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "syscall.h"
#include "thread.h"

// The parts of the ELF header that lead to the TLS segment. ld.lld defines the symbol where the header is loaded.
typedef struct elf_header {
    uint8_t ident[16];
    uint16_t type, machine;
    uint32_t version, entry, program_headers, section_headers, flags;
    uint16_t size, program_header_size, n_program_headers;
} elf_header;

typedef struct program_header {
    uint32_t type, offset, address, physical, file_size, memory_size, flags, align;
} program_header;

extern const elf_header __ehdr_start;

static const program_header * tls_segment(void) {
    const char * at = (const char *)&__ehdr_start + __ehdr_start.program_headers;
    for (int i = 0; i < __ehdr_start.n_program_headers; i++, at += __ehdr_start.program_header_size) {
        const program_header * p = (const program_header *)at;
        if (p->type == 7) return p; // PT_TLS
    }
    return NULL;
}

static size_t rounded(size_t n, size_t to) { return (n + to - 1) / to * to; }

size_t tb_tls_bytes(void) {
    const program_header * p = tls_segment();
    return p ? rounded(p->memory_size, p->align > 8 ? p->align : 8) : 0;
}

void tb_tls_enter(char * block) {
    const program_header * p = tls_segment();
    if (!p) return;
    char * end = block + tb_tls_bytes();
    // Distances count from the end, with the segment's own alignment.
    char * first = end - rounded(p->memory_size, p->align > 1 ? p->align : 1);
    memcpy(first, (const void *)(uintptr_t)p->address, p->file_size);
    __asm__ volatile("ugp = %0" : : "r"(end) : "memory");
}

struct tb_thread {
    int32_t alive; // thread number while it runs; the kernel clears and wakes it at the very end
    void * (*start)(void *);
    void * arg;
    void * result;
    char * mapping;
    size_t size;
    char * tls;
};

enum { stack_bytes = 1 << 20 };

static void futex(const int32_t * word, int op, int32_t value) { tb_syscall(NR_futex, (long)word, op, value, 0, 0, 0); }

__attribute__((used, noreturn)) static void thread_main(struct tb_thread * t) {
    tb_tls_enter(t->tls);
    t->result = t->start(t->arg);
    for (;;)
        tb_syscall(NR_exit, 0, 0, 0, 0, 0, 0);
}

// The child returns from the system call on its own empty stack, so it must not return from a C function: r16 carries
// its argument over, and the call never comes back.
static long clone_thread(long flags, char * stack, struct tb_thread * t) {
    register long r0 __asm__("r0") = flags;
    register long r1 __asm__("r1") = (long)stack;
    register long r2 __asm__("r2") = (long)&t->alive; // parent's copy of the thread number
    register long r3 __asm__("r3") = (long)&t->alive; // cleared at the end
    register long r4 __asm__("r4") = 0;
    register long r6 __asm__("r6") = NR_clone;
    register long r16 __asm__("r16") = (long)t;
    __asm__ volatile("{ trap0(#1) }\n"
                     "{ p0 = cmp.eq(r0, #0); if (!p0.new) jump:t 1f }\n"
                     "{ r0 = r16; r30 = #0; r31 = #0 }\n"
                     "{ call thread_main }\n"
                     "1:\n"
                     : "+r"(r0)
                     : "r"(r1), "r"(r2), "r"(r3), "r"(r4), "r"(r6), "r"(r16)
                     : "memory", "p0", "r31");
    return r0;
}

int pthread_create(pthread_t * thread, const pthread_attr_t * attr, void * (*start)(void *), void * arg) {
    (void)attr;
    const size_t tls = rounded(tb_tls_bytes(), 128);
    const size_t size = stack_bytes + tls + rounded(sizeof(struct tb_thread), 128);
    char * mapping = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return EAGAIN;
    struct tb_thread * t = (struct tb_thread *)(mapping + stack_bytes + tls);
    t->start = start;
    t->arg = arg;
    t->mapping = mapping;
    t->size = size;
    t->tls = mapping + stack_bytes;
    enum { // CLONE_*
        vm = 0x100,
        fs = 0x200,
        files = 0x400,
        sighand = 0x800,
        same_group = 0x10000,
        sysvsem = 0x40000,
        parent_settid = 0x100000,
        child_cleartid = 0x200000,
    };
    const long tid = clone_thread(vm | fs | files | sighand | same_group | sysvsem | parent_settid | child_cleartid,
                                  mapping + stack_bytes, t);
    if (tid < 0) {
        munmap(mapping, size);
        return (int)-tid;
    }
    *thread = t;
    return 0;
}

int pthread_join(pthread_t t, void ** result) {
    for (;;) {
        const int32_t tid = __atomic_load_n(&t->alive, __ATOMIC_ACQUIRE);
        if (tid == 0) break;
        futex(&t->alive, FUTEX_WAIT, tid);
    }
    if (result) *result = t->result;
    munmap(t->mapping, t->size);
    return 0;
}
