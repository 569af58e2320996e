// Gives sequences slots for their states, and keeps snapshots of states in further slots.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kernels/state_storage.h"

namespace moeserve {

// A snapshot is the state after a text that ends with a published page. It is found by the page's
// content (PagedPool::ContentOf()). If all slots for snapshots are taken, the least recently used
// snapshot is dropped. Engine thread only.
class StatePool {
 public:
  // `storage` outlives the pool; its slots beyond the first `sequences` are for snapshots.
  StatePool(StateStorage& storage, int sequences);

  StateStorage& storage() { return storage_; }

  // Returns a free slot for a sequence. There must be fewer than `sequences` such slots in use.
  int32_t Take();
  void Release(int32_t slot);

  // Returns a slot for a new snapshot, which is written before Publish() or Drop(); nullopt if
  // there are no slots for snapshots or all of them are being written.
  std::optional<int32_t> TakeForSnapshot();
  void Publish(int32_t slot, uint64_t content);
  void Drop(int32_t slot) { free_snapshots_.push_back(slot); }
  bool HasSnapshot(uint64_t content) const { return index_.contains(content); }
  // Returns the slot of a published snapshot, and marks it as used.
  int32_t Use(uint64_t content);

 private:
  using Snapshot = std::pair<int32_t, uint64_t>;  // slot and content

  StateStorage& storage_;
  std::vector<int32_t> free_, free_snapshots_;
  std::list<Snapshot> published_;  // least recently used first
  absl::flat_hash_map<uint64_t, std::list<Snapshot>::iterator> index_;
};

}  // namespace moeserve
