// Learns what the host does to caches and states between steps.
#pragma once

#include <cstdint>

namespace moeserve {

// All functions are called by the thread that calls the storage, before the storage acts.
class StorageObserver {
 public:
  virtual ~StorageObserver() = default;
  virtual void CopiesPage(uint64_t storage, int table, int32_t from, int32_t to) = 0;
  virtual void ClearsState(uint64_t storage, int32_t slot) = 0;
  virtual void AdvancesState(uint64_t storage, int32_t from, int rows, int32_t to) = 0;
  virtual void Drops(uint64_t storage) = 0;  // the storage is destroyed
};

}  // namespace moeserve
