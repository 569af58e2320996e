#include "kernels/base/buffer.h"

#include <sys/mman.h>

#include <string>

namespace moeserve {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}  // namespace

Result<HostBuffer> HostBuffer::Allocate(size_t bytes) {
  HostBuffer buffer;
  if (bytes == 0) return buffer;
  // A small buffer would waste most of a huge page.
  const size_t alignment = bytes >= kHugePage ? kHugePage : 4096;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  if (rounded < bytes) {
    return absl::ResourceExhaustedError("memory size overflows: " + std::to_string(bytes));
  }
  const size_t mapped = rounded + (alignment > 4096 ? alignment : 0);
  void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    return absl::ResourceExhaustedError("cannot allocate " + std::to_string(bytes >> 20) +
                                        " MiB of memory");
  }
  buffer.mapping_ = p;
  buffer.mapped_ = mapped;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(p) + alignment - 1) / alignment * alignment;
  buffer.data_ = reinterpret_cast<char*>(start);
  buffer.bytes_ = bytes;
  if (alignment == kHugePage) madvise(buffer.data_, rounded, MADV_HUGEPAGE);
  return buffer;
}

HostBuffer::~HostBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

}  // namespace moeserve
