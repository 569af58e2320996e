// The paged KV cache in device memory.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/cache/kv_layer_view.h"
#include "kernels/cuda/device/handles.h"
#include "kernels/cuda/device/runtime.h"
#include "kernels/kv_cache_storage.h"

namespace moeserve::cuda {

class CudaKvCache {
 public:
  // Allocates zeroed blocks for every layer, as many as its table has pages. An int8 cache has no
  // latent vectors. A ResourceExhausted error states the size.
  static Result<CudaKvCache> Allocate(std::vector<KvLayerShape> layers, KvCacheType type,
                                      const std::vector<int64_t>& num_pages);

  // Returns the bytes of one block, summed over all layers.
  static int64_t BytesPerBlock(const std::vector<KvLayerShape>& layers, KvCacheType type);

  KvCacheType type() const { return type_; }
  const KvLayerShape& shape(int layer) const { return shapes_[layer]; }
  KvLayerView layer(int layer) const { return layers_[layer]; }

  // Copies the content of block `from` to block `to` in every layer of a table.
  void CopyPage(int table, int32_t from, int32_t to, cudaStream_t stream);

 private:
  KvCacheType type_ = KvCacheType::kF32;
  std::vector<KvLayerShape> shapes_;
  std::vector<KvLayerView> layers_;
  DeviceMemory memory_;
};

}  // namespace moeserve::cuda
