// One layer of the paged KV cache in the form that the attention kernels read.
#pragma once

#include <cstdint>

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

// Bytes of the scales that a block of an int8 cache has for one kv head.
inline constexpr int kCacheScaleBytes = kPageTokens * static_cast<int>(sizeof(float));

// Keys and values of one layer, each [block, kv_head, kPageTokens, padded_dim]. So a block's
// rows for one kv head are contiguous. padded_dim is widest_dim() rounded up so that each row
// consists of whole 32-byte sectors and 16-byte copies are aligned. Elements of keys from head_dim
// on and of values from value_dim() on are zero.
//
// If padded_dim is a multiple of kPlaneColumns, a bf16 cache is stored as [block, kv_head, plane,
// kPageTokens, kPlaneColumns], and 16-byte piece c of row r of a plane is at piece c ^ (r % 8).
// These are the bytes that wgmma and ldmatrix read, so a copy to shared memory does not rearrange
// them.
//
// In an int8 cache, what a block has for one kv head starts with the f32 scales of its kPageTokens
// rows. Within each 16 bytes of a row, column c of the first 8 columns is followed by column c + 8.
// So when the even and the odd bytes of the registers that ldmatrix loads are widened to bf16, they
// are the two halves of a fragment of bf16.
struct KvLayerView {
  void* keys = nullptr;
  void* values = nullptr;
  KvCacheType type = KvCacheType::kBF16;
  int num_kv_heads = 0;
  int head_dim = 0;
  int padded_dim = 0;
  int latent_dim = 0;  // KvLayerShape::latent_dim; if above 0, there are no values
  // Elements from one kv head, and from one block, to the next. They include the scales.
  int64_t head_stride = 0;
  int64_t block_stride = 0;
  int own_value_dim = 0;  // KvLayerShape::own_value_dim

  MOESERVE_HOST_DEVICE bool in_planes() const {
    return type == KvCacheType::kBF16 && padded_dim % kPlaneColumns == 0;
  }
  // Returns the index of an element among those that a block has for one kv head. Elements
  // [column / 8 * 8, column / 8 * 8 + 8) of a row are adjacent. Not for an int8 cache.
  MOESERVE_HOST_DEVICE int ElementOf(int row, int column) const {
    if (!in_planes()) return row * padded_dim + column;
    const int piece = (column % kPlaneColumns / 8) ^ (row % 8);
    return column / kPlaneColumns * (kPageTokens * kPlaneColumns) + row * kPlaneColumns +
           piece * 8 + column % 8;
  }
  // As ElementOf(), for an int8 cache. Its elements [column / 16 * 16, column / 16 * 16 + 16) of a
  // row are adjacent.
  MOESERVE_HOST_DEVICE int ByteOf(int row, int column) const {
    return kCacheScaleBytes + row * padded_dim + column / 16 * 16 + PlaceInSixteen(column % 16);
  }
  // Returns the scales of a block and kv head of an int8 cache, which is `keys` or `values`.
  MOESERVE_HOST_DEVICE const float* ScalesOf(const void* cache, int64_t block, int kv_head) const {
    const int64_t at = block * block_stride + kv_head * head_stride;
    return reinterpret_cast<const float*>(static_cast<const char*>(cache) + at);
  }
  // Returns the place of a column among 16 bytes of an int8 cache.
  MOESERVE_HOST_DEVICE static constexpr int PlaceInSixteen(int column) {
    return column % 8 * 2 + column / 8;
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
