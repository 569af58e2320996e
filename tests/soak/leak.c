// Leaks 1 kB for each connection that a server accepts. Loaded with LD_PRELOAD by soak.py, to show
// that the harness finds such a leak.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

// Written to, so that the compiler cannot leave the allocation out.
static char* volatile g_leaked;

static void leak(void) {
  g_leaked = malloc(1024);
  if (g_leaked != NULL) memset(g_leaked, 1, 1024);
}

int accept(int fd, struct sockaddr* address, socklen_t* size) {
  static int (*next)(int, struct sockaddr*, socklen_t*);
  if (next == NULL) next = (int (*)(int, struct sockaddr*, socklen_t*))dlsym(RTLD_NEXT, "accept");
  const int result = next(fd, address, size);
  if (result >= 0) leak();
  return result;
}

int accept4(int fd, struct sockaddr* address, socklen_t* size, int flags) {
  static int (*next)(int, struct sockaddr*, socklen_t*, int);
  if (next == NULL) {
    next = (int (*)(int, struct sockaddr*, socklen_t*, int))dlsym(RTLD_NEXT, "accept4");
  }
  const int result = next(fd, address, size, flags);
  if (result >= 0) leak();
  return result;
}
