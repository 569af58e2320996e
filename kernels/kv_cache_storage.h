// The memory of the paged KV cache. The engine assigns pages to sequences; the backend defines the
// layout within a page.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/base/kv_cache_type.h"
#include "kernels/storage_observer.h"

namespace moeserve {

// Rounds the head dimension up to a multiple of 16, so that a cached row of values consists of
// whole SIMD vectors.
constexpr int PaddedHeadDim(int head_dim) { return (head_dim + 15) / 16 * 16; }

struct KvLayerShape {
  int num_kv_heads = 0;
  int head_dim = 0;  // of keys
  // 0: values are cached. Above 0: there is one kv head, and the values
  // are the first `latent_dim` elements of the keys, so that no values are cached (multi-head
  // latent attention, "DeepSeek-V2", section 2.1).
  int latent_dim = 0;
  // Which of a sequence's page tables lists the pages of this layer. Layers of one table have the
  // same pages, each with memory of its own in them.
  int table = 0;
  int own_value_dim = 0;  // without latent_dim: elements of a head's values; 0: as of its keys

  int value_dim() const {
    return latent_dim > 0 ? latent_dim : own_value_dim > 0 ? own_value_dim : head_dim;
  }
  friend bool operator==(const KvLayerShape&, const KvLayerShape&) = default;
};

// A page has kPageTokens positions of all layers of one table.
class KvCacheStorage {
 public:
  virtual ~KvCacheStorage() {
    if (observer_ != nullptr) observer_->Drops(id_);
  }
  KvCacheStorage(const KvCacheStorage&) = delete;
  KvCacheStorage& operator=(const KvCacheStorage&) = delete;

  KvCacheType type() const { return type_; }
  int num_tables() const { return static_cast<int>(num_pages_.size()); }
  // Returns the number of pages of a table; their ids are below it.
  int64_t num_pages(int table = 0) const { return num_pages_[static_cast<size_t>(table)]; }
  const KvLayerShape& shape(int layer) const { return shapes_[layer]; }
  // Unique within the process and not 0. A recorded step checks it, because a recording is valid
  // for one storage only.
  uint64_t id() const { return id_; }

  // Copies the content of page `from` of a table to its page `to`.
  void CopyPage(int table, int32_t from, int32_t to) {
    if (observer_ != nullptr) observer_->CopiesPage(id_, table, from, to);
    DoCopyPage(table, from, to);
  }

  // The observer must outlive the storage or be replaced by null.
  void SetObserver(StorageObserver* observer) { observer_ = observer; }

 protected:
  virtual void DoCopyPage(int table, int32_t from, int32_t to) = 0;

  // `num_pages` has the number of pages of each table that a shape names.
  KvCacheStorage(std::vector<KvLayerShape> shapes, KvCacheType type, std::vector<int64_t> num_pages)
      : type_(type), num_pages_(std::move(num_pages)), shapes_(std::move(shapes)) {
    for (const KvLayerShape& shape : shapes_) {
      MOESERVE_CHECK(shape.table >= 0 && shape.table < num_tables(), "pages for every table");
    }
  }

  const KvCacheType type_;
  const std::vector<int64_t> num_pages_;
  const std::vector<KvLayerShape> shapes_;

 private:
  inline static std::atomic<uint64_t> last_id_{0};
  const uint64_t id_ = ++last_id_;
  StorageObserver* observer_ = nullptr;
};

// Returns the index in StepInputs::page_tables of the table that a layer of the cache has of a
// sequence.
inline size_t TableOf(const KvCacheStorage& cache, int layer, int32_t sequence) {
  return static_cast<size_t>(sequence) * static_cast<size_t>(cache.num_tables()) +
         static_cast<size_t>(cache.shape(layer).table);
}

}  // namespace moeserve
