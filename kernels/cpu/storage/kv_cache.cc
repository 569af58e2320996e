#include "kernels/cpu/storage/kv_cache.h"

#include <cstring>
#include <utility>

namespace moeserve::cpu {
CpuKvCache::Geometry CpuKvCache::GeometryOf(const KvLayerShape& shape, KvCacheType type) {
  const auto head = [&](int dimensions) {
    const int64_t bytes = int64_t{dimensions} * kPageTokens * ElementBytes(type);
    return type == KvCacheType::kInt8 ? kKvScaleBytes + (bytes + 63) / 64 * 64 : bytes;
  };
  Geometry g;
  g.key_head = head(shape.head_dim);
  g.value_head = shape.latent_dim > 0 ? 0 : head(PaddedHeadDim(shape.value_dim()));
  g.key_block = g.key_head * shape.num_kv_heads;
  g.value_block = g.value_head * shape.num_kv_heads;
  return g;
}

int64_t CpuKvCache::BytesPerBlock(std::span<const KvLayerShape> layers, KvCacheType type) {
  int64_t bytes = 0;
  for (const KvLayerShape& s : layers) {
    const Geometry g = GeometryOf(s, type);
    bytes += g.key_block + g.value_block;
  }
  return bytes;
}

Result<std::unique_ptr<CpuKvCache>> CpuKvCache::Allocate(std::vector<KvLayerShape> layers,
                                                         KvCacheType type,
                                                         std::vector<int64_t> num_pages) {
  std::unique_ptr<CpuKvCache> cache(new CpuKvCache(std::move(layers), type, std::move(num_pages)));
  int64_t bytes = 0;
  for (const KvLayerShape& s : cache->shapes_) {
    bytes += BytesPerBlock({&s, 1}, type) * cache->num_pages(s.table);
  }
  MOESERVE_ASSIGN_OR_RETURN(cache->memory_, HostBuffer::Allocate(static_cast<size_t>(bytes)));
  char* next = cache->memory_.data();
  for (const KvLayerShape& s : cache->shapes_) {
    const Geometry g = GeometryOf(s, cache->type());
    const int64_t pages = cache->num_pages(s.table);
    Layer layer{next, next + g.key_block * pages};
    next = layer.values + g.value_block * pages;
    cache->layers_.push_back(layer);
  }
  return cache;
}

void CpuKvCache::DoCopyPage(int table, int32_t from, int32_t to) {
  for (int l = 0; l < static_cast<int>(shapes_.size()); ++l) {
    if (shape(l).table != table) continue;
    const Geometry g = geometry(l);
    std::memcpy(layers_[l].keys + to * g.key_block, layers_[l].keys + from * g.key_block,
                static_cast<size_t>(g.key_block));
    std::memcpy(layers_[l].values + to * g.value_block, layers_[l].values + from * g.value_block,
                static_cast<size_t>(g.value_block));
  }
}

}  // namespace moeserve::cpu
