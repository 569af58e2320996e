// Memory for the packed weights of the CPU backend.
#pragma once

#include <cstddef>
#include <memory>

#include "base/status.h"
#include "kernels/base/buffer.h"

namespace moeserve::cpu {

// Allocates memory for weights such that small matrices share huge pages: in pages of 4 KiB, a
// Zen 4 processor reads matrices of 1 MB at 0.8 of the speed. Memory is not reused; a buffer is
// freed when its owners and this object are gone. One thread at a time may use an object.
class WeightMemory {
 public:
  struct Part {
    char* data = nullptr;  // zeroed, aligned to 64 bytes
    std::shared_ptr<const HostBuffer> owner;
  };
  // ResourceExhausted: there is no memory.
  Result<Part> Allocate(size_t bytes);

 private:
  std::shared_ptr<HostBuffer> buffer_;  // the buffer that small parts are taken from; may be null
  size_t used_ = 0;                     // bytes of it
  size_t total_ = 0;                    // bytes of all parts
};

}  // namespace moeserve::cpu
