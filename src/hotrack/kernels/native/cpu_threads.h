/* Included once, by cpu_bf16.c. */
/* ---- threads ------------------------------------------------------------------------------------------------
 * A job is `count` units; caller and workers take units from one ticket (count in the high half, next unit in
 * the low half) until none is left. Whoever holds a unit may read the job: it cannot change before the unit is
 * done. A worker that is asleep or preempted between units delays nobody. Workers spin between the products of
 * one step and sleep between steps, so that the rest of the machine gets the cores.
 */
typedef void (*unit_fn)(const void *job, long unit);

#define MAX_WORKERS 255
#define SPINS 4000 /* about 60 us */

static struct {
  _Alignas(64) _Atomic uint64_t ticket;
  _Alignas(64) _Atomic uint32_t done;
  _Alignas(64) _Atomic uint32_t posted; /* futex: counts jobs */
  _Atomic int sleepers;
  unit_fn run;
  const void *job;
} pool;

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER; /* one job at a time */
static int pool_workers;

static int take_unit(long *unit) {
  uint64_t seen = atomic_load_explicit(&pool.ticket, memory_order_relaxed);
  if ((uint32_t)seen >= (seen >> 32)) return 0;
  seen = atomic_fetch_add_explicit(&pool.ticket, 1, memory_order_acquire);
  *unit = (uint32_t)seen;
  return (uint32_t)seen < (seen >> 32);
}

static void work(void) {
  for (long unit; take_unit(&unit);) {
    pool.run(pool.job, unit);
    atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
  }
}

static void *worker(void *unused) {
  (void)unused;
  for (uint32_t seen = 0;;) {
    uint32_t posted = atomic_load_explicit(&pool.posted, memory_order_acquire);
    for (int spin = 0; posted == seen && spin < SPINS; spin++) {
      _mm_pause();
      posted = atomic_load_explicit(&pool.posted, memory_order_acquire);
    }
    if (posted == seen) {
      atomic_fetch_add(&pool.sleepers, 1);
      syscall(SYS_futex, &pool.posted, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
      atomic_fetch_sub(&pool.sleepers, 1);
      continue;
    }
    seen = posted;
    work();
  }
  return NULL;
}

/* Makes sure that `threads` threads work on a job, the caller included. Returns how many really do. */
int hotrack_set_threads(int threads) {
  pthread_mutex_lock(&pool_lock);
  while (pool_workers < threads - 1 && pool_workers < MAX_WORKERS) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, worker, NULL)) break;
    pthread_detach(thread);
    pool_workers++;
  }
  int working = pool_workers + 1;
  pthread_mutex_unlock(&pool_lock);
  return working;
}

static void child_after_fork(void) { /* the workers stayed behind; the caller does everything itself */
  pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
  pool_lock = fresh;
  pool_workers = 0;
}

__attribute__((constructor)) static void at_load(void) { pthread_atfork(NULL, NULL, child_after_fork); }

static void parallel(unit_fn run, const void *job, long count) {
  if (count < 2 || pool_workers == 0 || pthread_mutex_trylock(&pool_lock)) {
    for (long unit = 0; unit < count; unit++) run(job, unit);
    return;
  }
  pool.run = run;
  pool.job = job;
  atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
  atomic_store_explicit(&pool.ticket, (uint64_t)count << 32, memory_order_release);
  atomic_fetch_add(&pool.posted, 1);
  if (atomic_load(&pool.sleepers)) syscall(SYS_futex, &pool.posted, FUTEX_WAKE_PRIVATE, MAX_WORKERS, NULL, NULL, 0);
  work();
  for (int spin = 0; atomic_load_explicit(&pool.done, memory_order_acquire) < (uint32_t)count; spin++) {
    _mm_pause();
    if (spin > SPINS) { /* somebody was preempted with a unit in hand */
      syscall(SYS_sched_yield);
      spin = 0;
    }
  }
  pthread_mutex_unlock(&pool_lock);
}
