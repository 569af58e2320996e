/* Preloaded into a server by test_clock.py: shifts the wall clock by the seconds that the file
 * $SHIFTED_CLOCK holds as an int64_t. The monotonic clock stays as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift;

__attribute__((constructor)) static void map_shift(void) {
  const char *path = getenv("SHIFTED_CLOCK");
  const int file = path != NULL ? open(path, O_RDONLY) : -1;
  if (file < 0) return;
  void *memory = mmap(NULL, sizeof(*shift), PROT_READ, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) shift = memory;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *out) {
  const int result = (int)syscall(SYS_clock_gettime, clock, out);
  const int wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (result == 0 && wall && shift != NULL) out->tv_sec += *shift;
  return result;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != NULL) *out = now.tv_sec;
  return now.tv_sec;
}
