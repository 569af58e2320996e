// The KV cache in the layout that the CPU's attention reads.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/kv_cache_storage.h"

namespace moeserve::cpu {

// Bytes of the scales of one (block, kv_head) in an int8 cache.
inline constexpr int64_t kKvScaleBytes = kPageTokens * int64_t{sizeof(float)};

// The keys of one layer have the layout [block, kv_head, head_dim, 16]: the 16 positions of a block
// are adjacent, so one vector holds the same key element of 16 positions. Values have the layout
// [block, kv_head, 16, padded_dim], where padded_dim is the values' dimension rounded up to 16; the
// padding is always zero. A layer with KvLayerShape::latent_dim has no values. In an int8 cache,
// each (block, kv_head) starts with the f32 scales of its 16 positions, followed by the elements;
// both parts are padded to whole cache lines.
class CpuKvCache : public KvCacheStorage {
 public:
  // A ResourceExhausted error states the size.
  static Result<std::unique_ptr<CpuKvCache>> Allocate(std::vector<KvLayerShape> layers,
                                                      KvCacheType type,
                                                      std::vector<int64_t> num_pages);
  static int64_t BytesPerBlock(std::span<const KvLayerShape> layers, KvCacheType type);

  // Bytes of the keys and of the values of one kv head within a block, and of a whole block.
  struct Geometry {
    int64_t key_head;
    int64_t value_head;
    int64_t key_block;
    int64_t value_block;
  };
  static Geometry GeometryOf(const KvLayerShape& shape, KvCacheType type);

  Geometry geometry(int layer) const { return GeometryOf(shape(layer), type()); }

  char* keys(int layer) const { return layers_[layer].keys; }
  char* values(int layer) const { return layers_[layer].values; }

  void DoCopyPage(int table, int32_t from, int32_t to) override;

 private:
  struct Layer {
    char* keys;
    char* values;
  };
  using KvCacheStorage::KvCacheStorage;

  std::vector<Layer> layers_;
  HostBuffer memory_;
};

}  // namespace moeserve::cpu
