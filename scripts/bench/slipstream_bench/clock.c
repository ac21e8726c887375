/* A clock of its own for the Python programs of a host: the time of day and an offset in nanoseconds, read from a
   file at each look. What waits until a time of day waits by this clock too. Monotonic clocks stay as they are.
   The file's second number says how many nanoseconds each fsync takes longer, its third how often one did. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define OF_DAY 1000000000 /* a deadline beyond so many seconds is one of the time of day */

static volatile long long *offset;
static int (*look)(clockid_t, struct timespec *);
static int (*await_condition)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*await_semaphore)(sem_t *, const struct timespec *);
static long (*call_kernel)(long, ...);
static int (*sync_file)(int), (*sync_data)(int);

__attribute__((constructor)) static void find_offset(void) {
  const char *path = getenv("SLIPSTREAM_CLOCK");
  look = dlsym(RTLD_NEXT, "clock_gettime");
  await_condition = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (!await_condition) await_condition = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  await_semaphore = dlsym(RTLD_NEXT, "sem_timedwait");
  call_kernel = dlsym(RTLD_NEXT, "syscall");
  sync_file = dlsym(RTLD_NEXT, "fsync");
  sync_data = dlsym(RTLD_NEXT, "fdatasync");
  if (!path || strncmp(program_invocation_short_name, "python", 6)) return;
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return;
  void *mapped = mmap(NULL, 3 * sizeof *offset, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped != MAP_FAILED) offset = mapped;
}

static struct timespec move(struct timespec at, long long by) {
  long long all = at.tv_sec * SECOND + at.tv_nsec + by;
  return (struct timespec){all / SECOND, all % SECOND};
}

/* The kernel's time of a deadline that was reckoned by our clock. */
static struct timespec of_kernel(const struct timespec *deadline) {
  return offset && deadline->tv_sec > OF_DAY ? move(*deadline, -*offset) : *deadline;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!look) look = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = look(clock, now);
  if (!failed && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *now = move(*now, *offset);
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
  *now = (struct timeval){exact.tv_sec, exact.tv_nsec / 1000};
  return 0;
}

time_t time(time_t *out) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (out) *out = exact.tv_sec;
  return exact.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
  struct timespec at = of_kernel(deadline);
  return await_condition(condition, mutex, &at);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
  struct timespec at = of_kernel(deadline);
  return await_semaphore(semaphore, &at);
}

long syscall(long number, ...) {
  va_list given;
  va_start(given, number);
  long a = va_arg(given, long), b = va_arg(given, long), c = va_arg(given, long), d = va_arg(given, long),
       e = va_arg(given, long), f = va_arg(given, long);
  va_end(given);
  struct timespec at;
  if (number == SYS_futex && d && (b & FUTEX_CLOCK_REALTIME)) {
    at = of_kernel((const struct timespec *)d);
    d = (long)&at;
  }
  if (!call_kernel) call_kernel = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  return call_kernel(number, a, b, c, d, e, f);
}

static void stall(void) {
  long long longer = offset ? offset[1] : 0;
  if (longer <= 0) return;
  struct timespec left = {longer / SECOND, longer % SECOND};
  nanosleep(&left, NULL);
  __sync_fetch_and_add(&offset[2], 1);
}

int fsync(int file) {
  stall();
  return sync_file(file);
}

int fdatasync(int file) {
  stall();
  return sync_data(file);
}
