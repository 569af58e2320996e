#include "kernels/cuda/cache/kv_cache.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace moeserve::cuda {
namespace {

// Keys and values of a layer have rows of one width.
int WidestDim(const KvLayerShape& s) { return std::max(s.head_dim, s.value_dim()); }

// Returns the elements of a block for one kv head, with the scales.
int64_t HeadStride(const KvLayerShape& s, KvCacheType type) {
  const int scales = type == KvCacheType::kInt8 ? kCacheScaleBytes : 0;
  return scales + int64_t{kPageTokens} * PaddedHeadDim(WidestDim(s));
}

}  // namespace

int64_t CudaKvCache::BytesPerBlock(const std::vector<KvLayerShape>& layers, KvCacheType type) {
  int64_t elements = 0;
  for (const KvLayerShape& s : layers) {
    elements += (s.latent_dim > 0 ? 1 : 2) * s.num_kv_heads * HeadStride(s, type);
  }
  return elements * ElementBytes(type);
}

Result<CudaKvCache> CudaKvCache::Allocate(std::vector<KvLayerShape> layers, KvCacheType type,
                                          const std::vector<int64_t>& num_pages) {
  CudaKvCache cache;
  cache.type_ = type;
  cache.shapes_ = std::move(layers);
  size_t bytes = 0;
  for (const KvLayerShape& s : cache.shapes_) {
    MOESERVE_CHECK(type != KvCacheType::kInt8 || s.latent_dim == 0, "latent vectors in int8");
    bytes += static_cast<size_t>(BytesPerBlock({s}, type) * num_pages[s.table]);
  }
  MOESERVE_ASSIGN_OR_RETURN(cache.memory_, DeviceMemory::Allocate(bytes));
  // Attention reads the padding columns of written rows, which AppendKv sets to zero, and no other
  // padding. The memory is cleared nevertheless, so that no uninitialised value exists.
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaMemset(cache.memory_.data(), 0, bytes));
  // The cache is used next on streams that do not wait for the default stream. Only the default
  // stream is waited for, because other streams may be recording.
  MOESERVE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(nullptr));
  char* next = static_cast<char*>(cache.memory_.data());
  for (const KvLayerShape& s : cache.shapes_) {
    KvLayerView view;
    view.type = type;
    view.num_kv_heads = s.num_kv_heads;
    view.head_dim = s.head_dim;
    view.padded_dim = PaddedHeadDim(WidestDim(s));
    view.own_value_dim = s.own_value_dim;
    view.latent_dim = s.latent_dim;
    view.head_stride = HeadStride(s, type);
    view.block_stride = s.num_kv_heads * view.head_stride;
    const int64_t layer_bytes = view.block_stride * num_pages[s.table] * ElementBytes(type);
    view.keys = next;
    view.values = s.latent_dim > 0 ? nullptr : next + layer_bytes;
    next += (s.latent_dim > 0 ? 1 : 2) * layer_bytes;
    cache.layers_.push_back(view);
  }
  return cache;
}

void CudaKvCache::CopyPage(int table, int32_t from, int32_t to, cudaStream_t stream) {
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (shapes_[l].table != table) continue;
    const KvLayerView& view = layers_[l];
    const int64_t bytes = view.block_stride * ElementBytes(type_);
    for (void* base : {view.keys, view.values}) {
      if (base == nullptr) continue;
      char* memory = static_cast<char*>(base);
      const cudaError_t error =
          cudaMemcpyAsync(memory + to * bytes, memory + from * bytes, static_cast<size_t>(bytes),
                          cudaMemcpyDeviceToDevice, stream);
      MOESERVE_CHECK(error == cudaSuccess, cudaGetErrorString(error));
    }
  }
}

}  // namespace moeserve::cuda
