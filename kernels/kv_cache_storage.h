// The memory of the paged KV cache. Which block belongs to whom is the engine's business.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"

namespace moeserve {

// Tokens of one cache block; also the lane width that the CPU attention works with.
inline constexpr int kKvBlockTokens = 16;

struct KvLayerShape {
  int num_kv_heads = 0;
  int head_dim = 0;
};

// Keys of one layer are laid out [block, kv_head, head_dim, 16] (a block's 16 positions adjacent,
// so one vector holds one key element of 16 positions), values [block, kv_head, 16, padded_dim].
// padded_dim is head_dim rounded up to 16; the padding stays zero.
class KvCacheStorage {
 public:
  // `num_blocks` blocks for every layer. `dtype` is kF32 or kBF16. ResourceExhausted with the size.
  static Result<KvCacheStorage> Allocate(std::vector<KvLayerShape> layers, DType dtype,
                                         int64_t num_blocks);

  // Bytes that one block takes over all layers.
  static int64_t BytesPerBlock(const std::vector<KvLayerShape>& layers, DType dtype);

  DType dtype() const { return dtype_; }
  int64_t num_blocks() const { return num_blocks_; }
  const KvLayerShape& shape(int layer) const { return shapes_[layer]; }
  char* keys(int layer) const { return layers_[layer].keys; }
  char* values(int layer) const { return layers_[layer].values; }

  // Copies what block `from` holds to block `to`, in every layer.
  void CopyBlock(int32_t from, int32_t to);

 private:
  struct Layer {
    char* keys;
    char* values;
  };
  DType dtype_ = DType::kF32;
  int64_t num_blocks_ = 0;
  std::vector<KvLayerShape> shapes_;
  std::vector<Layer> layers_;
  HostBuffer memory_;
};

constexpr int PaddedHeadDim(int head_dim) { return (head_dim + 15) / 16 * 16; }

}  // namespace moeserve
