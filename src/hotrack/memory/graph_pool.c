/* Memory of captured CUDA graphs that can be taken away and put back at the same addresses.
 *
 * torch calls malloc and free below while it holds the mutex of its caching allocator, on any thread, with or without
 * the interpreter lock. So nothing here calls back into Python or torch, nothing exits or aborts, and a driver call
 * that fails is written down for whoever asks. A pool's own mutex is always the last one taken.
 *
 * A block is one torch segment: a reserved range and, while awake, one physical allocation. Its state is explicit:
 *
 *     RESERVED --create--> DETACHED --attach--> MAPPED
 *     RESERVED <--release- DETACHED <--detach-- MAPPED
 *
 * free() makes no driver call while the pool is awake: kernels may still be using the block, and waiting for them
 * could break a capture on another thread. The block is marked and given back by trim or sleep, whose caller has
 * waited for the device. Asleep there is nothing to wait for, and the range goes at once.
 *
 * No CUDA headers: the driver's functions come in as a table, so that tests can stand in for the driver.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* ---- the part of the driver's ABI that is used ---------------------------------------------------------------- */

typedef int result;                /* CUresult; 0 is success */
typedef unsigned long long handle; /* CUmemGenericAllocationHandle */
typedef unsigned long long address;

enum { PINNED = 1, ON_DEVICE = 1, MINIMUM_GRANULARITY = 0, READ_WRITE = 3 };

struct location {
  int type, id;
};
struct allocation { /* CUmemAllocationProp */
  int type, handle_types;
  struct location location;
  void *win32;
  struct {
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct access {
  struct location location;
  int flags;
};
_Static_assert(sizeof(struct allocation) == 32 && sizeof(struct access) == 12, "the driver's layout");

struct driver { /* in the order of DRIVER_CALLS in graph_pool.py */
  result (*device_get)(int *device, int ordinal);
  result (*context_retain)(void **context, int device);
  result (*context_drop)(int device);
  result (*context_push)(void *context);
  result (*context_pop)(void **context);
  result (*granularity)(size_t *nbytes, const struct allocation *, int option);
  result (*reserve)(address *, size_t nbytes, size_t alignment, address hint, unsigned long long flags);
  result (*unreserve)(address, size_t nbytes);
  result (*create)(handle *, size_t nbytes, const struct allocation *, unsigned long long flags);
  result (*release)(handle);
  result (*map)(address, size_t nbytes, size_t offset, handle, unsigned long long flags);
  result (*unmap)(address, size_t nbytes);
  result (*set_access)(address, size_t nbytes, const struct access *, size_t count);
  result (*error_name)(result, const char **name);
};

/* ---- pools ---------------------------------------------------------------------------------------------------- */

enum state { RESERVED, DETACHED, MAPPED };
enum operation { MALLOC, FREE, SLEEP, WAKE, TRIM, OPERATIONS };
enum { REFUSED = -1 }; /* code of an error that is not the driver's */

struct block {
  struct block *next;
  address at;
  size_t nbytes;
  handle handle; /* 0 when there is none */
  enum state state;
  int freed; /* torch has no use for it any more */
};

struct error {
  char call[32]; /* empty: none since the pool was opened */
  char name[64];
  int code;
  uint64_t at, nbytes;
};

struct stats {
  uint64_t mapped_bytes, live_bytes, freed_bytes; /* live: what torch holds, mapped or asleep */
  uint64_t blocks, handles, epoch;
  int asleep, broken;
  struct error last[OPERATIONS];
};

static struct pool {
  pthread_mutex_t mutex;
  int open, asleep, broken, ordinal, device;
  pid_t owner;
  size_t granularity;
  void *context;
  struct driver driver;
  struct block *blocks;
  uint64_t epoch; /* grows when contents were lost */
  struct error last[OPERATIONS];
} pools[] = {
#define POOL {.mutex = PTHREAD_MUTEX_INITIALIZER}
    POOL, POOL, POOL, POOL, POOL, POOL, POOL, POOL, POOL, POOL, POOL, POOL, POOL, POOL, POOL, POOL,
};
enum { POOLS = sizeof pools / sizeof *pools };

static atomic_int exiting; /* the driver may be gone before torch frees its last block */

static result failed(struct pool *p, enum operation op, const char *call, result code, address at, size_t nbytes) {
  struct error *e = &p->last[op];
  const char *name = NULL;
  if (p->driver.error_name) p->driver.error_name(code, &name);
  snprintf(e->call, sizeof e->call, "%s", call);
  snprintf(e->name, sizeof e->name, "%s", name ? name : "unknown error");
  e->code = code, e->at = at, e->nbytes = nbytes;
  return code;
}

static result refused(struct pool *p, enum operation op, const char *why, address at, size_t nbytes) {
  struct error *e = &p->last[op];
  snprintf(e->call, sizeof e->call, "hotrack");
  snprintf(e->name, sizeof e->name, "%s", why);
  e->code = REFUSED, e->at = at, e->nbytes = nbytes;
  return REFUSED;
}

static int enter(struct pool *p, enum operation op) {
  pthread_mutex_lock(&p->mutex);
  const char *why = !p->open ? "the pool is closed" : p->broken ? "an earlier failure could not be undone" : NULL;
  if (why) {
    refused(p, op, why, 0, 0);
  } else {
    result code = p->driver.context_push(p->context);
    if (!code) return 1;
    failed(p, op, "cuCtxPushCurrent", code, 0, 0);
  }
  pthread_mutex_unlock(&p->mutex);
  return 0;
}

static void leave(struct pool *p) {
  void *popped;
  p->driver.context_pop(&popped);
  pthread_mutex_unlock(&p->mutex);
}

/* ---- one block; every step leaves the state it reached -------------------------------------------------------- */

#define TRY(NAME, CALL)                                                          \
  do {                                                                           \
    result code_ = p->driver.CALL;                                               \
    if (code_) return failed(p, op, NAME, code_, b->at, b->nbytes);              \
  } while (0)

static struct allocation physical(const struct pool *p) {
  return (struct allocation){.type = PINNED, .location = {ON_DEVICE, p->device}};
}

static result create(struct pool *p, enum operation op, struct block *b) {
  struct allocation kind = physical(p);
  TRY("cuMemCreate", create(&b->handle, b->nbytes, &kind, 0));
  b->state = DETACHED;
  return 0;
}

static result detach(struct pool *p, enum operation op, struct block *b) {
  TRY("cuMemUnmap", unmap(b->at, b->nbytes));
  b->state = DETACHED;
  return 0;
}

static result attach(struct pool *p, enum operation op, struct block *b) {
  struct access access = {{ON_DEVICE, p->device}, READ_WRITE};
  TRY("cuMemMap", map(b->at, b->nbytes, 0, b->handle, 0));
  b->state = MAPPED;
  result code = p->driver.set_access(b->at, b->nbytes, &access, 1);
  if (!code) return 0;
  if (!p->driver.unmap(b->at, b->nbytes)) b->state = DETACHED; /* else the undoing of the caller tries again */
  return failed(p, op, "cuMemSetAccess", code, b->at, b->nbytes);
}

static result release(struct pool *p, enum operation op, struct block *b) {
  TRY("cuMemRelease", release(b->handle));
  b->handle = 0;
  b->state = RESERVED;
  return 0;
}

/* Up to MAPPED, or down to RESERVED. */
static result raise_block(struct pool *p, enum operation op, struct block *b) {
  result code = b->state == RESERVED ? create(p, op, b) : 0;
  return code || b->state == MAPPED ? code : attach(p, op, b);
}

static result lower_block(struct pool *p, enum operation op, struct block *b) {
  result code = b->state == MAPPED ? detach(p, op, b) : 0;
  return code || b->state == RESERVED ? code : release(p, op, b);
}

/* Gives everything of *link back and takes it out of the list. */
static result reclaim(struct pool *p, enum operation op, struct block **link) {
  struct block *b = *link;
  result code = lower_block(p, op, b);
  if (code) return code;
  TRY("cuMemAddressFree", unreserve(b->at, b->nbytes));
  *link = b->next;
  free(b);
  return 0;
}

static int64_t reclaim_freed(struct pool *p, enum operation op) {
  int64_t total = 0;
  for (struct block **link = &p->blocks; *link;) {
    struct block *b = *link;
    if (!b->freed) {
      link = &b->next;
      continue;
    }
    int64_t nbytes = b->state == RESERVED ? 0 : (int64_t)b->nbytes;
    if (reclaim(p, op, link)) return -1;
    total += nbytes;
  }
  return total;
}

/* ---- what torch calls ----------------------------------------------------------------------------------------- */

static int usable(const struct pool *p) { return !exiting && p->owner == getpid(); } /* a forked child has no device */

static void *pool_malloc(struct pool *p, ssize_t nbytes, int ordinal) {
  const enum operation op = MALLOC;
  if (!usable(p) || !enter(p, op)) return NULL;
  struct block *b = NULL;
  const char *why = p->asleep               ? "the pool is asleep"
                    : ordinal != p->ordinal ? "the pool belongs to another device"
                    : nbytes <= 0 || (size_t)nbytes > SIZE_MAX / 2 ? "not a size"
                    : !(b = calloc(1, sizeof *b))                  ? "no host memory"
                                                                   : NULL;
  if (why) {
    refused(p, op, why, 0, (size_t)nbytes);
    leave(p);
    return NULL;
  }
  b->nbytes = ((size_t)nbytes + p->granularity - 1) / p->granularity * p->granularity;
  result code = p->driver.reserve(&b->at, b->nbytes, 0, 0, 0);
  if (code) {
    failed(p, op, "cuMemAddressReserve", code, 0, b->nbytes);
    free(b);
    leave(p);
    return NULL;
  }
  b->next = p->blocks;
  p->blocks = b;
  void *memory = (void *)(uintptr_t)b->at;
  if (raise_block(p, op, b)) {
    memory = NULL;
    b->freed = 1; /* what cannot be given back now is given back by the next trim; the first error is the one kept */
    reclaim(p, FREE, &p->blocks);
  }
  leave(p);
  return memory;
}

static void pool_free(struct pool *p, void *memory) {
  const enum operation op = FREE;
  if (!memory || !usable(p)) return;
  pthread_mutex_lock(&p->mutex);
  struct block **link = &p->blocks;
  while (*link && ((*link)->at != (uintptr_t)memory || (*link)->freed)) link = &(*link)->next;
  if (!*link) {
    refused(p, op, "not a block of this pool", (uintptr_t)memory, 0);
  } else {
    (*link)->freed = 1;
    if (p->asleep && !p->broken && !p->driver.context_push(p->context)) {
      void *popped;
      reclaim(p, op, link);
      p->driver.context_pop(&popped);
    }
  }
  pthread_mutex_unlock(&p->mutex);
}

/* torch's signature has no room for the pool, so each has its own pair of functions. */
#define ENTRY(I)                                                                                                   \
  EXPORT void *hotrack_malloc_##I(ssize_t nbytes, int device, void *stream) {                                      \
    (void)stream;                                                                                                  \
    return pool_malloc(&pools[I], nbytes, device);                                                                 \
  }                                                                                                                \
  EXPORT void hotrack_free_##I(void *memory, ssize_t nbytes, int device, void *stream) {                           \
    (void)nbytes, (void)device, (void)stream;                                                                      \
    pool_free(&pools[I], memory);                                                                                  \
  }
ENTRY(0) ENTRY(1) ENTRY(2) ENTRY(3) ENTRY(4) ENTRY(5) ENTRY(6) ENTRY(7)
ENTRY(8) ENTRY(9) ENTRY(10) ENTRY(11) ENTRY(12) ENTRY(13) ENTRY(14) ENTRY(15)

/* ---- what Python calls ---------------------------------------------------------------------------------------- */

/* Index of a new pool on a CUDA ordinal; -1: none left, -2 - i: pool i could not be opened, its TRIM error says why. */
EXPORT int hotrack_pool_open(const struct driver *driver, int ordinal) {
  for (int i = 0; i < POOLS; i++) {
    struct pool *p = &pools[i];
    pthread_mutex_lock(&p->mutex);
    if (p->open || p->blocks) {
      pthread_mutex_unlock(&p->mutex);
      continue;
    }
    p->driver = *driver;
    p->ordinal = ordinal;
    p->asleep = p->broken = 0;
    p->epoch = 0;
    p->owner = getpid();
    memset(p->last, 0, sizeof p->last);
    const char *call = "cuDeviceGet";
    result code = driver->device_get(&p->device, ordinal);
    if (!code) call = "cuDevicePrimaryCtxRetain", code = driver->context_retain(&p->context, p->device);
    if (!code) {
      struct allocation kind = physical(p);
      call = "cuMemGetAllocationGranularity";
      code = driver->granularity(&p->granularity, &kind, MINIMUM_GRANULARITY);
      if (code) driver->context_drop(p->device);
    }
    if (code) failed(p, TRIM, call, code, 0, 0);
    p->open = !code;
    pthread_mutex_unlock(&p->mutex);
    return code ? -2 - i : i;
  }
  return -1;
}

/* 1: closed; 0: torch still holds blocks, or some could not be given back. Call it with the device idle. */
EXPORT int hotrack_pool_close(int index) {
  struct pool *p = &pools[index];
  if (!enter(p, TRIM)) return 0;
  reclaim_freed(p, TRIM);
  void *popped;
  p->driver.context_pop(&popped);
  if (!p->blocks) {
    p->driver.context_drop(p->device);
    p->open = 0;
  }
  int closed = !p->open;
  pthread_mutex_unlock(&p->mutex);
  return closed;
}

/* Gives back what torch has freed. Bytes, or -1. Call it with the device idle. */
EXPORT int64_t hotrack_pool_trim(int index) {
  struct pool *p = &pools[index];
  if (!enter(p, TRIM)) return -1;
  int64_t total = reclaim_freed(p, TRIM);
  leave(p);
  return total;
}

/* Bytes given back, or -1 and everything is mapped again (its contents are lost only if the epoch has changed).
 * Call it with the device idle. */
EXPORT int64_t hotrack_pool_sleep(int index) {
  struct pool *p = &pools[index];
  struct block *b;
  if (!enter(p, SLEEP)) return -1;
  int64_t total = p->asleep ? 0 : reclaim_freed(p, SLEEP);
  if (total < 0 || p->asleep) {
    leave(p);
    return total;
  }
  result code = 0;
  for (b = p->blocks; b && !code; b = b->next) code = detach(p, SLEEP, b); /* nothing is lost yet */
  if (!code && p->blocks) p->epoch++;
  for (b = p->blocks; b && !code; b = b->next) {
    code = release(p, SLEEP, b);
    if (!code) total += (int64_t)b->nbytes;
  }
  if (code) {
    for (b = p->blocks; b; b = b->next) p->broken |= raise_block(p, WAKE, b) != 0;
    total = -1;
  }
  p->asleep = !code;
  leave(p);
  return total;
}

/* Bytes mapped, or -1 and everything is asleep. Contents are undefined. */
EXPORT int64_t hotrack_pool_wake(int index) {
  struct pool *p = &pools[index];
  struct block *b;
  if (!enter(p, WAKE)) return -1;
  int64_t total = 0;
  result code = 0;
  for (b = p->asleep ? p->blocks : NULL; b && !code; b = b->next) {
    if (b->freed) continue; /* given back by the next trim */
    code = raise_block(p, WAKE, b);
    total += (int64_t)b->nbytes;
  }
  if (code) {
    for (b = p->blocks; b; b = b->next) p->broken |= lower_block(p, SLEEP, b) != 0;
    total = -1;
  } else {
    p->asleep = 0;
  }
  leave(p);
  return total;
}

EXPORT void hotrack_pool_stats(int index, struct stats *s) {
  struct pool *p = &pools[index];
  memset(s, 0, sizeof *s);
  pthread_mutex_lock(&p->mutex);
  for (struct block *b = p->blocks; b; b = b->next) {
    s->blocks++;
    s->handles += b->state != RESERVED;
    *(b->freed ? &s->freed_bytes : &s->live_bytes) += b->nbytes;
    if (b->state == MAPPED) s->mapped_bytes += b->nbytes;
  }
  s->epoch = p->epoch, s->asleep = p->asleep, s->broken = p->broken;
  memcpy(s->last, p->last, sizeof s->last);
  pthread_mutex_unlock(&p->mutex);
}

/* Addresses and sizes of the first `count` blocks torch holds; returns how many it holds. */
EXPORT int64_t hotrack_pool_blocks(int index, uint64_t *at, uint64_t *nbytes, int64_t count) {
  struct pool *p = &pools[index];
  int64_t found = 0;
  pthread_mutex_lock(&p->mutex);
  for (struct block *b = p->blocks; b; b = b->next) {
    if (b->freed) continue;
    if (found < count) at[found] = b->at, nbytes[found] = b->nbytes;
    found++;
  }
  pthread_mutex_unlock(&p->mutex);
  return found;
}

/* The interpreter is going: from here on torch gets and gives back nothing. */
EXPORT void hotrack_exiting(void) { exiting = 1; }
