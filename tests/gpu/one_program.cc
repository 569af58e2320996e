// All programs of the packed run in one, which share their code. It runs the program that it is
// called as: its file, or a link to it, has the name of that program.
#include <unistd.h>

#include <cstdio>
#include <string_view>

// The constructors of a program's static objects, which CMake moved into a section of its own, and
// its main().
extern "C" {
using Constructor = void (*)(int, char**, char**);
#define PROGRAM(name, part, main)                 \
  extern const Constructor __start_init_##part[]; \
  extern const Constructor __stop_init_##part[];  \
  int main_##main(int, char**);
#include "programs.inc"
#undef PROGRAM
}

int main(int argc, char** argv) {
  std::string_view called = argv[0];
  called.remove_prefix(called.rfind('/') + 1);
#define PROGRAM(name, part, main)                                                    \
  if (called == #name) {                                                             \
    for (const Constructor* i = __start_init_##part; i != __stop_init_##part; ++i) { \
      (*i)(argc, argv, environ);                                                     \
    }                                                                                \
    return main_##main(argc, argv);                                                  \
  }
#include "programs.inc"
#undef PROGRAM
  std::fprintf(stderr, "this program must be called by the name of one that it contains\n");
  return 2;
}
