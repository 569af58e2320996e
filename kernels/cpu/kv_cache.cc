#include "kernels/cpu/kv_cache.h"

#include <cstring>
#include <utility>

namespace moeserve::cpu {
namespace {

int64_t KeyBytes(const KvLayerShape& s, DType dtype) {
  return int64_t{s.num_kv_heads} * s.head_dim * kKvBlockTokens *
         static_cast<int64_t>(SizeOf(dtype));
}

int64_t ValueBytes(const KvLayerShape& s, DType dtype) {
  return int64_t{s.num_kv_heads} * PaddedHeadDim(s.head_dim) * kKvBlockTokens *
         static_cast<int64_t>(SizeOf(dtype));
}

}  // namespace

int64_t CpuKvCache::BytesPerBlock(std::span<const KvLayerShape> layers, DType dtype) {
  int64_t bytes = 0;
  for (const KvLayerShape& s : layers) bytes += KeyBytes(s, dtype) + ValueBytes(s, dtype);
  return bytes;
}

Result<std::unique_ptr<CpuKvCache>> CpuKvCache::Allocate(std::vector<KvLayerShape> layers,
                                                         DType dtype, int64_t num_blocks) {
  std::unique_ptr<CpuKvCache> cache(new CpuKvCache(std::move(layers), dtype, num_blocks));
  const int64_t bytes = BytesPerBlock(cache->shapes_, dtype) * num_blocks;
  MOESERVE_ASSIGN_OR_RETURN(cache->memory_, HostBuffer::Allocate(static_cast<size_t>(bytes)));
  char* next = cache->memory_.data();
  for (const KvLayerShape& s : cache->shapes_) {
    Layer layer{next, next + KeyBytes(s, dtype) * num_blocks};
    next = layer.values + ValueBytes(s, dtype) * num_blocks;
    cache->layers_.push_back(layer);
  }
  return cache;
}

void CpuKvCache::CopyBlock(int32_t from, int32_t to) {
  for (int l = 0; l < static_cast<int>(shapes_.size()); ++l) {
    const int64_t keys = KeyBytes(shapes_[l], dtype_);
    const int64_t values = ValueBytes(shapes_[l], dtype_);
    std::memcpy(layers_[l].keys + to * keys, layers_[l].keys + from * keys,
                static_cast<size_t>(keys));
    std::memcpy(layers_[l].values + to * values, layers_[l].values + from * values,
                static_cast<size_t>(values));
  }
}

}  // namespace moeserve::cpu
