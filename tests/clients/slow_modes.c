/* Preloaded into a program by test_terminal_chat.py: changes of a terminal's mode take 50 ms. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <termios.h>
#include <unistd.h>

int tcsetattr(int file, int when, const struct termios *mode) {
  int (*change)(int, int, const struct termios *) = dlsym(RTLD_NEXT, "tcsetattr");
  usleep(50000);
  return change(file, when, mode);
}
