// Owned host memory for weights, activations and the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/status.h"

namespace moeserve {

// Zeroed anonymous memory. Buffers of 2 MiB and more are aligned to 2 MiB and use huge pages if the
// system provides them.
class HostBuffer {
 public:
  HostBuffer() = default;
  // A ResourceExhausted error states the requested size.
  static Result<HostBuffer> Allocate(size_t bytes);
  ~HostBuffer();
  HostBuffer(HostBuffer&& other) noexcept { *this = std::move(other); }
  HostBuffer& operator=(HostBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
    std::swap(mapping_, other.mapping_);
    return *this;
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace moeserve
