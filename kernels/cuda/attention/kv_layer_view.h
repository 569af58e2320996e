// One layer of the paged KV cache in the form that the attention kernels read.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/host_device.h"
#include "kernels/kv_cache_storage.h"

namespace moeserve::cuda {

inline constexpr int kMaxHeadDim = 512;
// Wider heads are computed by a simple kernel, as latent vectors are.
inline constexpr int kMaxTiledDim = 256;

// Keys and values of one layer, each [block, kv_head, kPageTokens, padded_dim]. So a block's
// rows for one kv head are contiguous. padded_dim is widest_dim() rounded up so that each row
// consists of whole 32-byte sectors and 16-byte copies are aligned. Elements of keys from head_dim
// on and of values from value_dim() on are zero.
struct KvLayerView {
  void* keys = nullptr;
  void* values = nullptr;
  DType dtype = DType::kBF16;  // kF32 or kBF16
  int num_kv_heads = 0;
  int head_dim = 0;
  int padded_dim = 0;
  int latent_dim = 0;        // KvLayerShape::latent_dim; if above 0, there are no values
  int64_t head_stride = 0;   // elements from one kv head to the next
  int64_t block_stride = 0;  // elements from one block to the next
  int own_value_dim = 0;     // KvLayerShape::own_value_dim

  MOESERVE_HOST_DEVICE int value_dim() const {
    return own_value_dim > 0 ? own_value_dim : head_dim;
  }
  MOESERVE_HOST_DEVICE int widest_dim() const {
    return own_value_dim > head_dim ? own_value_dim : head_dim;
  }
};

}  // namespace moeserve::cuda
