/* The driver calls of graph_pool.c over host memory: physical memory is a memfd, unmapped ranges are PROT_NONE.
 * Misuse (mapping twice, releasing twice, a range that is not reserved) is an error, as it is in the driver. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { INVALID = 1, OUT_OF_MEMORY = 2, CALLS = 14, SLOTS = 4096, PAGE = 1 << 21 };
enum call { GET, RETAIN, DROP, PUSH, POP, GRANULARITY, RESERVE, UNRESERVE, CREATE, RELEASE, MAP, UNMAP, ACCESS, NAME };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct { uintptr_t at; size_t nbytes; int handle, accessible; } ranges[SLOTS];
static struct { int fd; size_t nbytes; } handles[SLOTS]; /* nbytes 0: free; handle h is handles[h - 1] */
static int fails_in[CALLS], fails_with[CALLS], sticky[CALLS];
static int contexts;
static size_t capacity, used;
static __thread int depth;

void fake_reset(size_t bytes) {
  memset(fails_in, 0, sizeof fails_in);
  memset(sticky, 0, sizeof sticky);
  capacity = bytes;
}

/* The nth call from now (1 is the next) fails; with `for_good` all later ones as well. nth 0: none. */
void fake_fail(int call, int nth, int code, int for_good) {
  fails_in[call] = nth, fails_with[call] = code, sticky[call] = for_good;
}

void fake_counts(size_t *counts) { /* reservations, handles, mappings, bytes, contexts */
  memset(counts, 0, 5 * sizeof *counts);
  for (int i = 0; i < SLOTS; i++) {
    counts[0] += ranges[i].nbytes > 0;
    counts[1] += handles[i].nbytes > 0;
    counts[2] += ranges[i].handle > 0;
  }
  counts[3] = used, counts[4] = (size_t)contexts;
}

static int fails(enum call call) {
  if (fails_in[call] == 0 || --fails_in[call] > 0) return 0;
  if (sticky[call]) fails_in[call] = 1;
  return fails_with[call];
}

#define BEGIN(CALL, NEEDS_CONTEXT)                                  \
  pthread_mutex_lock(&mutex);                                       \
  int code = fails(CALL);                                           \
  if (!code && (NEEDS_CONTEXT) && depth != 1) code = INVALID;       \
  if (code) goto out;
#define END                        \
  out:                             \
  pthread_mutex_unlock(&mutex);    \
  return code;

static int find(uintptr_t at, size_t nbytes) {
  for (int i = 0; i < SLOTS; i++)
    if (ranges[i].nbytes && ranges[i].at == at && ranges[i].nbytes == nbytes) return i;
  return -1;
}

int fake_cuDeviceGet(int *device, int ordinal) { BEGIN(GET, 0) *device = ordinal; END }
int fake_cuDevicePrimaryCtxRetain(void **context, int device) {
  BEGIN(RETAIN, 0)(void) device;
  *context = &contexts, contexts++;
  END
}
int fake_cuDevicePrimaryCtxRelease_v2(int device) { BEGIN(DROP, 0)(void) device; contexts--; END }
int fake_cuCtxPushCurrent_v2(void *context) {
  BEGIN(PUSH, 0)
  if (context != &contexts) code = INVALID; else depth++;
  END
}
int fake_cuCtxPopCurrent_v2(void **context) { BEGIN(POP, 1) *context = &contexts, depth--; END }
int fake_cuMemGetAllocationGranularity(size_t *nbytes, const void *prop, int option) {
  BEGIN(GRANULARITY, 0)(void) prop, (void)option;
  *nbytes = PAGE;
  END
}
int fake_cuMemAddressReserve(unsigned long long *at, size_t nbytes, size_t align, unsigned long long hint, unsigned long long flags) {
  BEGIN(RESERVE, 1)(void) align, (void)hint, (void)flags;
  int i = 0;
  while (i < SLOTS && ranges[i].nbytes) i++;
  void *p = i < SLOTS && nbytes && nbytes % PAGE == 0
                ? mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                : MAP_FAILED;
  if (p == MAP_FAILED) { code = INVALID; goto out; }
  ranges[i].at = *at = (uintptr_t)p, ranges[i].nbytes = nbytes, ranges[i].handle = 0;
  END
}
int fake_cuMemAddressFree(unsigned long long at, size_t nbytes) {
  BEGIN(UNRESERVE, 1)
  int i = find(at, nbytes);
  if (i < 0 || ranges[i].handle) { code = INVALID; goto out; }
  munmap((void *)(uintptr_t)at, nbytes);
  ranges[i].nbytes = 0;
  END
}
int fake_cuMemCreate(unsigned long long *handle, size_t nbytes, const void *prop, unsigned long long flags) {
  BEGIN(CREATE, 1)(void) prop, (void)flags;
  if (used + nbytes > capacity) { code = OUT_OF_MEMORY; goto out; }
  int i = 0;
  while (i < SLOTS && handles[i].nbytes) i++;
  int fd = i < SLOTS ? memfd_create("fake", 0) : -1;
  if (fd < 0 || ftruncate(fd, (off_t)nbytes)) { code = INVALID; goto out; }
  handles[i].fd = fd, handles[i].nbytes = nbytes, used += nbytes;
  *handle = (unsigned long long)i + 1;
  END
}
int fake_cuMemRelease(unsigned long long handle) {
  BEGIN(RELEASE, 1)
  if (handle == 0 || handle > SLOTS || !handles[handle - 1].nbytes) { code = INVALID; goto out; }
  used -= handles[handle - 1].nbytes, handles[handle - 1].nbytes = 0;
  close(handles[handle - 1].fd);
  END
}
int fake_cuMemMap(unsigned long long at, size_t nbytes, size_t offset, unsigned long long handle, unsigned long long flags) {
  BEGIN(MAP, 1)(void) flags;
  int i = find(at, nbytes);
  if (i < 0 || offset || ranges[i].handle || handle == 0 || handles[handle - 1].nbytes != nbytes) { code = INVALID; goto out; }
  mmap((void *)(uintptr_t)at, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[handle - 1].fd, 0);
  ranges[i].handle = (int)handle;
  END
}
int fake_cuMemUnmap(unsigned long long at, size_t nbytes) {
  BEGIN(UNMAP, 1)
  int i = find(at, nbytes);
  if (i < 0 || !ranges[i].handle) { code = INVALID; goto out; }
  mmap((void *)(uintptr_t)at, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  ranges[i].handle = 0;
  END
}
int fake_cuMemSetAccess(unsigned long long at, size_t nbytes, const int *access, size_t count) {
  BEGIN(ACCESS, 1)
  int i = find(at, nbytes);
  if (i < 0 || !ranges[i].handle || count != 1 || access[0] != 1 || access[2] != 3) { code = INVALID; goto out; }
  mprotect((void *)(uintptr_t)at, nbytes, PROT_READ | PROT_WRITE);
  END
}
int fake_cuGetErrorName(int code, const char **name) {
  *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == INVALID ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
