#include "kernels/cuda/slots/slot_memory.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace moeserve::cuda {

SlotMemory::SlotMemory(int64_t bytes) {
  const int64_t usable = bytes / kAlignment * kAlignment;
  if (usable > 0) holes_[0] = usable;
}

std::optional<int64_t> SlotMemory::Take(int64_t bytes) {
  const int64_t wanted = RoundUp(bytes);
  const auto hole = std::ranges::find_if(
      holes_, [wanted](const auto& h) { return h.second - h.first >= wanted; });
  if (hole == holes_.end()) return std::nullopt;
  const auto [begin, end] = *hole;
  holes_.erase(hole);
  if (begin + wanted < end) holes_[begin + wanted] = end;
  return begin;
}

void SlotMemory::Give(int64_t offset, int64_t bytes) {
  int64_t begin = offset, end = offset + RoundUp(bytes);
  auto next = holes_.lower_bound(offset);
  MOESERVE_CHECK(next == holes_.end() || next->first >= end, "memory that was taken");
  if (next != holes_.end() && next->first == end) {
    end = next->second;
    next = holes_.erase(next);
  }
  if (next != holes_.begin()) {
    const auto before = std::prev(next);
    MOESERVE_CHECK(before->second <= begin, "memory that was taken");
    if (before->second == begin) {
      begin = before->first;
      holes_.erase(before);
    }
  }
  holes_[begin] = end;
}

}  // namespace moeserve::cuda
