// The heap. Blocks up to 64 KiB come from lists of free blocks of a power of two each, cut from 1 MiB pieces that are
// never given back; larger ones are mappings of their own. The NPU allocates when a graph or a buffer comes, not while
// ops run, so this is made to be short.
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { least_shift = 5, most_shift = 16, piece_bytes = 1 << 20 };

// In front of what the caller gets, at the next multiple of 16 below. `size` counts from the block's start.
typedef struct header {
    void * block;
    uint32_t size;
    uint32_t shift; // of the list; 0: a mapping
} header;

typedef struct free_block {
    struct free_block * next;
} free_block;

static free_block * lists[most_shift + 1];
static char *piece, *piece_end;
static char locked;

static void lock(void) {
    while (__atomic_test_and_set(&locked, __ATOMIC_ACQUIRE))
        sched_yield();
}

static void unlock(void) { __atomic_clear(&locked, __ATOMIC_RELEASE); }

static void * map_pages(size_t n) {
    void * p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void * small_block(unsigned shift) {
    lock();
    free_block * b = lists[shift];
    if (b) {
        lists[shift] = b->next;
    } else {
        const size_t n = (size_t)1 << shift;
        if ((size_t)(piece_end - piece) < n) {
            char * fresh = map_pages(piece_bytes); // what is left of the old piece is lost: less than one block
            if (fresh) {
                piece = fresh;
                piece_end = fresh + piece_bytes;
            }
        }
        if ((size_t)(piece_end - piece) >= n) {
            b = (free_block *)(void *)piece;
            piece += n;
        }
    }
    unlock();
    return b;
}

static void * allocate(size_t align, size_t n) {
    if (align < 16) align = 16;
    if (n > SIZE_MAX / 2 || align > SIZE_MAX / 4) return NULL;
    const size_t size = n + sizeof(header) + align;
    unsigned shift = least_shift;
    while (shift <= most_shift && ((size_t)1 << shift) < size)
        shift++;
    const int mapped = shift > most_shift;
    char * block = mapped ? map_pages(size) : small_block(shift);
    if (!block) return NULL;
    char * p = (char *)(((uintptr_t)block + sizeof(header) + align - 1) / align * align);
    header * h = (header *)(void *)(p - sizeof(header));
    h->block = block;
    h->size = mapped ? (uint32_t)size : (uint32_t)1 << shift;
    h->shift = mapped ? 0 : shift;
    return p;
}

void free(void * p) {
    if (!p) return;
    const header h = *(header *)(void *)((char *)p - sizeof(header));
    if (h.shift == 0) {
        munmap(h.block, h.size);
        return;
    }
    free_block * b = h.block;
    lock();
    b->next = lists[h.shift];
    lists[h.shift] = b;
    unlock();
}

int posix_memalign(void ** p, size_t align, size_t n) {
    void * got = align != 0 && (align & (align - 1)) == 0 ? allocate(align, n) : NULL;
    if (!got) return ENOMEM;
    *p = got;
    return 0;
}
