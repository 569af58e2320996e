// A paged KV cache with random keys and values, and the arrays of a step.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/cache/kv_cache.h"
#include "tests/bench/cuda/bench.h"

namespace moeserve::bench {

struct AttentionShape {
  std::string name;
  int kv_heads = 1;
  int heads = 1;  // number of query heads per query row
  int head_dim = 128;
  int rows_per_token = 1;  // for routed attention: k, since each selected expert has a row
  bool tile_order = false;
  int latent_dim = 0;                      // KvLayerShape::latent_dim
  KvCacheType cache = KvCacheType::kBF16;  // or kInt8

  int query_heads() const { return heads * rows_per_token; }
  int value_dim() const { return latent_dim > 0 ? latent_dim : head_dim; }
  double kv_bytes_per_token() const {
    const int row = cache == KvCacheType::kInt8 ? head_dim + 4 : 2 * head_dim;  // with its scale
    return (latent_dim > 0 ? 1.0 : 2.0) * kv_heads * row;
  }
};

std::vector<AttentionShape> AttentionShapes(bool tiny);
AttentionShape AttentionShapeOf(const std::string& name, bool tiny);

// A paged KV cache with several layers and `sequences` sequences of `length` tokens. It contains
// random numbers, and its blocks are in random order.
class RandomCache {
 public:
  static Result<std::unique_ptr<RandomCache>> Create(Bench& bench, const AttentionShape& shape,
                                                     int layers, int sequences, int length);

  int layers() const { return layers_; }
  cuda::KvLayerView layer(int i) const { return cache_.layer(i); }
  float key(int layer, int sequence, int position, int head, int column) const;
  float value(int layer, int sequence, int position, int head, int column) const;

  // Returns a step with the last token of every sequence, or with all tokens of the only sequence.
  Result<cuda::StepView> Step(Bench& bench, bool all_tokens);
  // Returns the arrays of a routing plan that orders the assignments by expert and not by token.
  // The arrays are null if each token has one row.
  Result<cuda::QueryRows> Rows(Bench& bench, int tokens);

 private:
  uint64_t seed(int layer, bool values) const {
    return 9000 + 2 * static_cast<uint64_t>(layer) + (values ? 1 : 0);
  }
  int64_t Element(int sequence, int position, int head, int column) const;
  float Value(uint64_t seed, int64_t element) const;

  AttentionShape shape_;
  int layers_ = 0, sequences_ = 0, length_ = 0, stride_ = 0;
  cuda::CudaKvCache cache_;
  std::vector<int32_t> tables_;
  std::vector<int32_t> assignment_of_;  // [tokens * rows_per_token]
  cuda::DeviceMemory device_tables_, position_, sequence_, row_offsets_, assignments_, row_of_;
};

}  // namespace moeserve::bench
