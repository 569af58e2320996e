// Gives memory back to the system after requests that needed much of it.
#pragma once

#include <cstddef>

namespace moeserve::server {

// Has glibc give large blocks back to the system as soon as they are freed, and keep at most about
// a MiB at the end of each of its arenas. Without this, its limits grow with the largest block that
// was ever freed (up to 64 MiB for each arena), and malloc_trim() does not reach the ends of the
// arenas of threads. Does nothing if MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or
// GLIBC_TUNABLES is set. Must be called before any thread starts.
void LimitKeptMemory();

// glibc keeps what was freed. Without this, a server that has once held large requests would keep
// that memory for good.
class AllocatorTrim {
 public:
  // To be called about once a second by one thread, with the bytes that requests hold and the most
  // that they have held since the last call. Returns whether memory was given back: some seconds
  // after the requests have ended that held at least `kWorthwhile` bytes together.
  bool Tick(size_t held, size_t peak);

  static constexpr size_t kWorthwhile = size_t{16} << 20;

 private:
  size_t peak_ = 0;      // since memory was last given back
  int quiet_ticks_ = 0;  // calls since requests last held more than half of the peak
};

}  // namespace moeserve::server
