// The KV cache in the layout of the CPU's attention.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/kv_cache_storage.h"

namespace moeserve::cpu {

// Of a (block, kv_head) of bytes.
inline constexpr int64_t kKvScaleBytes = kKvBlockTokens * int64_t{sizeof(float)};

// Keys of one layer are laid out [block, kv_head, head_dim, 16] (a block's 16 positions adjacent,
// so one vector holds one key element of 16 positions), values [block, kv_head, 16, padded_dim].
// padded_dim is head_dim rounded up to 16; the padding stays zero. With bytes, the elements of a
// (block, kv_head) come after the f32 scales of its 16 positions, and both take whole lines.
class CpuKvCache : public KvCacheStorage {
 public:
  // ResourceExhausted, with the size.
  static Result<std::unique_ptr<CpuKvCache>> Allocate(std::vector<KvLayerShape> layers,
                                                      KvCacheType type, int64_t num_blocks);
  static int64_t BytesPerBlock(std::span<const KvLayerShape> layers, KvCacheType type);

  // Bytes of one kv head within a block, and of a block.
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

  void CopyBlock(int32_t from, int32_t to) override;

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
