#include "server/process/allocator_trim.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>

namespace moeserve::server {
namespace {

// Requests that follow each other use the same memory again, so it is kept for some seconds.
constexpr int kQuietTicks = 5;

// Blocks of at least this size are mapped one by one. The cost of mapping is small beside that of
// filling so many bytes.
constexpr int kLargeBlock = 1 << 20;

}  // namespace

void LimitKeptMemory() {
#ifdef __GLIBC__
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}) {
    if (std::getenv(name) != nullptr) return;
  }
  mallopt(M_MMAP_THRESHOLD, kLargeBlock);
  mallopt(M_TRIM_THRESHOLD, kLargeBlock);
#endif
}

bool AllocatorTrim::Tick(size_t held, size_t peak) {
  peak_ = std::max(peak_, peak);
  if (peak_ < kWorthwhile || std::max(held, peak) > peak_ / 2) {
    quiet_ticks_ = 0;
    return false;
  }
  if (++quiet_ticks_ < kQuietTicks) return false;
  quiet_ticks_ = 0;
  peak_ = held;
#ifdef __GLIBC__
  malloc_trim(0);
#endif
  return true;
}

}  // namespace moeserve::server
