// The memory of the paged KV cache. The engine assigns pages to sequences; the backend defines the
// layout within a page.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/base/kv_cache_type.h"

namespace moeserve {

// Rounds the head dimension up to a multiple of 16, so that a cached row of values consists of
// whole SIMD vectors.
constexpr int PaddedHeadDim(int head_dim) { return (head_dim + 15) / 16 * 16; }

struct KvLayerShape {
  int num_kv_heads = 0;
  int head_dim = 0;  // of keys
  // 0: values have head_dim elements and are cached. Above 0: there is one kv head, and the values
  // are the first `latent_dim` elements of the keys, so that no values are cached (multi-head
  // latent attention, "DeepSeek-V2", section 2.1).
  int latent_dim = 0;

  int value_dim() const { return latent_dim > 0 ? latent_dim : head_dim; }
};

// The cache has `num_pages` pages of kPageTokens positions in every layer.
class KvCacheStorage {
 public:
  virtual ~KvCacheStorage() = default;
  KvCacheStorage(const KvCacheStorage&) = delete;
  KvCacheStorage& operator=(const KvCacheStorage&) = delete;

  KvCacheType type() const { return type_; }
  int64_t num_pages() const { return num_pages_; }
  const KvLayerShape& shape(int layer) const { return shapes_[layer]; }
  // Unique within the process and not 0. A recorded step checks it, because a recording is valid
  // for one storage only.
  uint64_t id() const { return id_; }

  // Copies the content of page `from` to page `to` in every layer.
  virtual void CopyPage(int32_t from, int32_t to) = 0;

 protected:
  KvCacheStorage(std::vector<KvLayerShape> shapes, KvCacheType type, int64_t num_pages)
      : type_(type), num_pages_(num_pages), shapes_(std::move(shapes)) {}

  const KvCacheType type_;
  const int64_t num_pages_;
  const std::vector<KvLayerShape> shapes_;

 private:
  inline static std::atomic<uint64_t> last_id_{0};
  const uint64_t id_ = ++last_id_;
};

}  // namespace moeserve
