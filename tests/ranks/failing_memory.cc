// Loaded into a program by LD_PRELOAD: from a SIGUSR2 to the next one, every n-th allocation of
// memory fails, where n is MOESERVE_TEST_FAILING_MEMORY (without it: none).
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>

#include <atomic>

// The allocator of glibc.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
}

namespace {

std::atomic<bool> failing = false;
std::atomic<long> allocations = 0;
long every = 0;

bool Fails() {
  if (!failing.load(std::memory_order_relaxed) || every <= 0) return false;
  if ((allocations.fetch_add(1, std::memory_order_relaxed) + 1) % every != 0) return false;
  errno = ENOMEM;
  return true;
}

void Toggle(int) { failing = !failing; }

[[gnu::constructor]] void Prepare() {
  const char* const text = getenv("MOESERVE_TEST_FAILING_MEMORY");
  if (text == nullptr) return;
  every = strtol(text, nullptr, 10);
  struct sigaction action = {};
  action.sa_handler = Toggle;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR2, &action, nullptr);
}

}  // namespace

extern "C" {

void* malloc(size_t bytes) noexcept { return Fails() ? nullptr : __libc_malloc(bytes); }

void* calloc(size_t count, size_t bytes) noexcept {
  return Fails() ? nullptr : __libc_calloc(count, bytes);
}

void* realloc(void* memory, size_t bytes) noexcept {
  return Fails() ? nullptr : __libc_realloc(memory, bytes);
}

void* memalign(size_t alignment, size_t bytes) noexcept {
  return Fails() ? nullptr : __libc_memalign(alignment, bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) noexcept { return memalign(alignment, bytes); }

int posix_memalign(void** memory, size_t alignment, size_t bytes) noexcept {
  void* const found = memalign(alignment, bytes);
  if (found == nullptr) return ENOMEM;
  *memory = found;
  return 0;
}

}  // extern "C"
