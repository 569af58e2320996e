// Gives memory back to the system after requests that needed much of it.
#pragma once

#include <cstddef>

namespace moeserve::server {

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
