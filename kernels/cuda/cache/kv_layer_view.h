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

// A plane has 64 columns of a bf16 cache, 128 bytes of each row.
inline constexpr int kPlaneColumns = 64;
inline constexpr int kPlaneRowBytes = kPlaneColumns * 2;
inline constexpr int kPlaneBlockBytes = kPageTokens * kPlaneRowBytes;

// Keys and values of one layer, each [block, kv_head, kPageTokens, padded_dim]. So a block's
// rows for one kv head are contiguous. padded_dim is widest_dim() rounded up so that each row
// consists of whole 32-byte sectors and 16-byte copies are aligned. Elements of keys from head_dim
// on and of values from value_dim() on are zero.
//
// If padded_dim is a multiple of kPlaneColumns, a bf16 cache is stored as [block, kv_head, plane,
// kPageTokens, kPlaneColumns], and 16-byte piece c of row r of a plane is at piece c ^ (r % 8).
// These are the bytes that wgmma and ldmatrix read, so a copy to shared memory does not rearrange
// them.
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

  MOESERVE_HOST_DEVICE bool in_planes() const {
    return dtype == DType::kBF16 && padded_dim % kPlaneColumns == 0;
  }
  // Returns the index of an element among those that a block has for one kv head. Elements
  // [column / 8 * 8, column / 8 * 8 + 8) of a row are adjacent.
  MOESERVE_HOST_DEVICE int ElementOf(int row, int column) const {
    if (!in_planes()) return row * padded_dim + column;
    const int piece = (column % kPlaneColumns / 8) ^ (row % 8);
    return column / kPlaneColumns * (kPageTokens * kPlaneColumns) + row * kPlaneColumns +
           piece * 8 + column % 8;
  }
  MOESERVE_HOST_DEVICE int value_dim() const {
    return latent_dim > 0 ? latent_dim : own_value_dim > 0 ? own_value_dim : head_dim;
  }
  // Returns the elements of a row of partial results: value_dim(), rounded up as padded_dim is.
  MOESERVE_HOST_DEVICE int padded_value_dim() const {
    return latent_dim > 0 ? (latent_dim + 15) / 16 * 16 : padded_dim;
  }
  MOESERVE_HOST_DEVICE int widest_dim() const {
    return own_value_dim > head_dim ? own_value_dim : head_dim;
  }
};

}  // namespace moeserve::cuda
