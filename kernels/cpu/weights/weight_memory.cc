#include "kernels/cpu/weights/weight_memory.h"

#include <algorithm>
#include <utility>

namespace moeserve::cpu {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kLargestBuffer = size_t{32} << 20;
// Larger parts have a buffer of their own, so that at most a quarter of a shared buffer is unused.
constexpr size_t kLargestShared = kLargestBuffer / 4;

}  // namespace

Result<WeightMemory::Part> WeightMemory::Allocate(size_t bytes) {
  if (bytes > kLargestShared) {
    MOESERVE_ASSIGN_OR_RETURN(HostBuffer own, HostBuffer::Allocate(bytes));
    total_ += bytes;
    auto owner = std::make_shared<HostBuffer>(std::move(own));
    char* const data = owner->data();
    return Part{data, std::move(owner)};
  }
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (buffer_ == nullptr || buffer_->bytes() - used_ < rounded) {
    // A buffer is as large as all parts before it, so that small models take little memory.
    const size_t size = std::clamp(total_, rounded, kLargestBuffer);
    MOESERVE_ASSIGN_OR_RETURN(HostBuffer next, HostBuffer::Allocate(size));
    buffer_ = std::make_shared<HostBuffer>(std::move(next));
    used_ = 0;
  }
  char* const data = buffer_->data() + used_;
  used_ += rounded;
  total_ += rounded;
  return Part{data, buffer_};
}

}  // namespace moeserve::cpu
