#include "server/process/allocator_trim.h"

#include <malloc.h>

#include <algorithm>

namespace moeserve::server {
namespace {

// Requests that follow each other use the same memory again, so it is kept for some seconds.
constexpr int kQuietTicks = 5;

}  // namespace

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
