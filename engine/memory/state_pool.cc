#include "engine/memory/state_pool.h"

#include "base/check.h"

namespace moeserve {

StatePool::StatePool(StateStorage& storage, int sequences) : storage_(storage) {
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
  const auto [it, fresh] = index_.try_emplace(content);
  if (!fresh) return Drop(slot);
  it->second = published_.insert(published_.end(), {slot, content});
}

int32_t StatePool::Use(uint64_t content) {
  const auto place = index_.at(content);
  published_.splice(published_.end(), published_, place);
  return place->first;
}

}  // namespace moeserve
