// One layer of the paged KV cache as the attention kernels read it.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/kv_cache_storage.h"

namespace moeserve::cuda {

inline constexpr int kMaxHeadDim = 256;

// Keys and values of one layer, each [block, kv_head, kKvBlockTokens, padded_dim]: what one kv head
// reads of a block is one contiguous piece, its rows are whole 32-byte sectors, and 16-byte copies
// of it are aligned whatever head_dim is. Elements [head_dim, padded_dim) are zero.
struct KvLayerView {
  void* keys = nullptr;
  void* values = nullptr;
  DType dtype = DType::kBF16;  // kF32 or kBF16
  int num_kv_heads = 0;
  int head_dim = 0;
  int padded_dim = 0;
  int64_t head_stride = 0;   // elements from kv head to kv head
  int64_t block_stride = 0;  // elements from block to block
};

}  // namespace moeserve::cuda
