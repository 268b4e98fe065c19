// Counts the memory that a process has allocated and not freed, for tests that look for leaks. Resident memory is no
// measure, because it includes memory that the allocator keeps. This library is preloaded (LD_PRELOAD). It writes the
// numbers of bytes and blocks to a file that is named by the process id, in the directory LIVE_HEAP. For each byte
// written to the pipe PID.trim, it returns the allocator's free memory to the system and writes a byte to PID.trimmed.
// It needs glibc, because it calls the internal names of glibc's allocator.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

struct counts {
    atomic_long bytes, blocks;
};

// Used until the file is mapped. Allocations that early are never read.
static struct counts early;
static struct counts *counts = &early;

static void *took(void *block) {
    if (block) {
        atomic_fetch_add_explicit(&counts->bytes, (long)malloc_usable_size(block), memory_order_relaxed);
        atomic_fetch_add_explicit(&counts->blocks, 1, memory_order_relaxed);
    }
    return block;
}

static void gives(void *block) {
    if (block) {
        atomic_fetch_sub_explicit(&counts->bytes, (long)malloc_usable_size(block), memory_order_relaxed);
        atomic_fetch_sub_explicit(&counts->blocks, 1, memory_order_relaxed);
    }
}

void *malloc(size_t size) { return took(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return took(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return took(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    *block = memalign(alignment, size);
    return *block ? 0 : ENOMEM;
}

void *realloc(void *block, size_t size) {
    gives(block);
    void *moved = __libc_realloc(block, size);
    // After a failure, the old block still exists. A size of 0 has freed it.
    took(moved || !size ? moved : block);
    return moved;
}

void free(void *block) {
    gives(block);
    __libc_free(block);
}

static int pipe_of(const char *path, const char *suffix) {
    char name[4200];
    if (snprintf(name, sizeof name, "%s.%s", path, suffix) >= (int)sizeof name || mkfifo(name, 0600)) return -1;
    // Opened in both directions, so that opening does not wait for the other side.
    return open(name, O_RDWR | O_CLOEXEC);
}

static int asked, answered;

static void *trim(void *nothing) {
    char byte;
    while (read(asked, &byte, 1) == 1) {
        malloc_trim(0);
        if (write(answered, &byte, 1) != 1) break;
    }
    return nothing;
}

__attribute__((constructor)) static void map(void) {
    const char *directory = getenv("LIVE_HEAP");
    char path[4096];
    if (!directory || snprintf(path, sizeof path, "%s/%d", directory, getpid()) >= (int)sizeof path) return;
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0) return;
    if (ftruncate(file, sizeof early) == 0) {
        void *mapped = mmap(NULL, sizeof early, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) counts = mapped;
    }
    close(file);
    pthread_t thread;
    asked = pipe_of(path, "trim");
    answered = pipe_of(path, "trimmed");
    if (asked >= 0 && answered >= 0 && !pthread_create(&thread, NULL, trim, NULL)) pthread_detach(thread);
}
