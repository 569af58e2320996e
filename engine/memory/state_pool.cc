#include "engine/memory/state_pool.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace moeserve {

StatePool::StatePool(StateStorage& storage, int sequences) : storage_(storage) {
  index_.reserve(static_cast<size_t>(std::max(storage.num_slots() - sequences, 0)));
  for (int32_t slot = storage.num_slots() - 1; slot >= 0; --slot) {
    (slot < sequences ? free_ : free_snapshots_).push_back(slot);
  }
}

int32_t StatePool::Take() {
  MOESERVE_CHECK(!free_.empty(), "a slot for every running sequence");
  const int32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void StatePool::Release(int32_t slot) { free_.push_back(slot); }

std::optional<int32_t> StatePool::TakeForSnapshot() {
  if (free_snapshots_.empty()) {
    if (published_.empty()) return std::nullopt;
    index_.erase(published_.front().second);
    free_snapshots_.push_back(published_.front().first);
    published_.pop_front();
  }
  const int32_t slot = free_snapshots_.back();
  free_snapshots_.pop_back();
  return slot;
}

void StatePool::Publish(int32_t slot, uint64_t content) {
  if (HasSnapshot(content)) return Drop(slot);
  published_.emplace_back(slot, content);
  index_[content] = std::prev(published_.end());
}

int32_t StatePool::Use(uint64_t content) {
  const auto place = index_.at(content);
  published_.splice(published_.end(), published_, place);
  return place->first;
}

}  // namespace moeserve
