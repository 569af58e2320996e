// One launch for norms, rotary positions and writing to the KV cache must have the same bits as
// separate launches, in the queries and in every byte of the cache.

#include "kernels/cuda/positions/norm_rope_append.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cuda/cache/kv_cache.h"
#include "kernels/cuda/positions/rope.h"
#include "kernels/cuda/positions/rope_tables.h"
#include "kernels/cuda/rows/rows.h"
#include "tests/cuda/emulator_test_support.h"
#include "tests/support/random.h"

namespace moeserve::cuda {
namespace {

using testing::Random;

struct Setting {
  int heads = 1;
  int kv_heads = 1;
  int head_dim = 16;
  int dimensions = 0;
  bool interleaved = false;
  bool query_norm = false;
  bool key_norm = false;
  bool norm_heads = true;
  bool layer_norm = false;
  int gap = 0;  // unused elements between rows
  double xpos_base = 0.0;

  std::string Describe() const {
    return "heads " + std::to_string(heads) + "/" + std::to_string(kv_heads) + ", head_dim " +
           std::to_string(head_dim) + ", turned " + std::to_string(dimensions) +
           (interleaved ? " interleaved" : "") + (query_norm ? ", query norm" : "") +
           (key_norm ? ", key norm" : "") + (norm_heads ? "" : " of all heads") +
           (layer_norm ? ", layer" : "") + ", gap " + std::to_string(gap) +
           (xpos_base > 0.0 ? ", xpos" : "");
  }
};

class Comparison {
 public:
  Comparison(const Setting& s, KvCacheType cache)
      : s_(s),
        type_(cache),
        query_width_(s.heads * s.head_dim),
        kv_width_(s.kv_heads * s.head_dim),
        stride_(query_width_ + 2 * kv_width_ + s.gap),
        position_(std::vector<int32_t>{0, 15, 40, 7, 16, 99}),
        sequence_(std::vector<int32_t>{2, 0, 1, -1, 0, -1}),
        tables_(std::vector<int32_t>{5, 0, 9, 1, 8, 2, 7, 3, 6}),
        query_scales_(random_.Normals(query_width_ + 1)),
        key_scales_(random_.Normals(kv_width_)),
        query_shifts_(random_.Normals(query_width_ + 1)),
        key_shifts_(random_.Normals(kv_width_)) {
    step_ = {.tokens = kTokens,
             .position = position_.data(),
             .sequence = sequence_.data(),
             .page_tables = tables_.data(),
             .table_stride = 3,
             .max_context = 0};
    rows_ = random_.Normals(kTokens * stride_, 2.0);
    for (int t : {3, 5}) {  // padding rows may contain any values
      for (int64_t i = t * stride_; i < (t + 1) * stride_; ++i) rows_[i] = NAN;
    }
    if (s.dimensions > 0) {
      RopeSettings rope{.head_dim = s.head_dim,
                        .dimensions = s.dimensions,
                        .theta = 5e5,
                        .xpos_base = s.xpos_base};
      EXPECT_TRUE(rope_.Reserve(rope, kTokens, nullptr).ok());
      key_angles_ = angles_ = rope_.Angles(rope, step_, nullptr);
      if (s.xpos_base > 0.0) {
        rope.keys = true;
        EXPECT_TRUE(rope_.Reserve(rope, kTokens, nullptr).ok());
        key_angles_ = rope_.Angles(rope, step_, nullptr);
        EXPECT_NE(key_angles_, angles_);
      }
    }
  }

  void Run() {
    const Result one = Together(), many = OneByOne();
    EXPECT_EQ(one.cache, many.cache);
    for (int t = 0; t < kTokens; ++t) {
      const auto row = [&](const std::vector<float>& rows) {
        return std::string(reinterpret_cast<const char*>(&rows[t * stride_]),
                           query_width_ * sizeof(float));
      };
      const bool padding = t == 3 || t == 5;
      EXPECT_EQ(row(one.rows), row(padding ? rows_ : many.rows)) << "token " << t;
    }
    const bool changes = s_.heads > 0 && (s_.query_norm || s_.dimensions > 0);
    EXPECT_EQ(std::memcmp(one.rows.data() + stride_, rows_.data() + stride_,
                          query_width_ * sizeof(float)) != 0,
              changes);
  }

 private:
  static constexpr int kTokens = 6;
  static constexpr int kBlocks = 10;

  struct Result {
    std::vector<float> rows;
    std::vector<uint8_t> cache;
  };

  // Returns a cache in which every byte is 0xff.
  KvLayerView NewCache(DeviceArray<uint8_t>& memory) const {
    KvLayerView view;
    view.type = type_;
    view.num_kv_heads = s_.kv_heads;
    view.head_dim = s_.head_dim;
    view.padded_dim = PaddedHeadDim(s_.head_dim);
    view.head_stride = HeadElements();
    view.block_stride = s_.kv_heads * view.head_stride;
    view.keys = memory.data();
    view.values = memory.data() + CacheBytes() / 2;
    return view;
  }
  size_t CacheBytes() const {
    return static_cast<size_t>(2 * ElementBytes(type_) * kBlocks * s_.kv_heads * HeadElements());
  }
  // Returns what a block has for one kv head.
  int64_t HeadElements() const {
    const int scales = type_ == KvCacheType::kInt8 ? kCacheScaleBytes : 0;
    return scales + int64_t{kPageTokens} * PaddedHeadDim(s_.head_dim);
  }

  NormRopeAppendLaunch Append(const KvLayerView& cache, float* rows) const {
    NormRopeAppendLaunch a;
    a.cache = cache;
    a.step = step_;
    a.keys = rows + query_width_;
    a.values = rows + query_width_ + kv_width_;
    a.key_stride = a.value_stride = stride_;
    return a;
  }

  Result Together() const {
    DeviceArray<float> rows(rows_);
    DeviceArray<uint8_t> memory(std::vector<uint8_t>(CacheBytes(), 0xff));
    NormRopeAppendLaunch a = Append(NewCache(memory), rows.data());
    a.query = rows.data();
    a.query_stride = stride_;
    a.heads = s_.heads;
    const NormShape shape{.layer = s_.layer_norm, .eps = 1e-5f};
    if (s_.query_norm) {
      a.query_norm = {shape.layer, shape.eps, query_scales_.data(),
                      s_.layer_norm ? query_shifts_.data() : nullptr};
    }
    if (s_.key_norm) {
      a.key_norm = {shape.layer, shape.eps, key_scales_.data(),
                    s_.layer_norm ? key_shifts_.data() : nullptr};
    }
    a.norm_heads = s_.norm_heads;
    a.dimensions = s_.dimensions;
    a.interleaved = s_.interleaved;
    a.angles = angles_;
    if (s_.xpos_base > 0.0) a.key_angles = key_angles_;
    LaunchNormRopeAppend(a, nullptr);
    return {rows.Read(), memory.Read()};
  }

  Result OneByOne() const {
    DeviceArray<float> rows(rows_);
    DeviceArray<uint8_t> memory(std::vector<uint8_t>(CacheBytes(), 0xff));
    const auto norm = [&](const float* scales, const float* shifts, int64_t begin, int heads) {
      const int vectors = s_.norm_heads ? heads : 1;
      const int width = heads * s_.head_dim / vectors;
      const DeviceArray<int32_t> groups(std::vector<int32_t>{0, width});
      const RowsView view{rows.data() + begin, DType::kF32, kTokens, int64_t{heads} * s_.head_dim,
                          stride_};
      LaunchNorm({.shape = {.layer = s_.layer_norm, .eps = 1e-5f},
                  .scales = scales,
                  .shifts = s_.layer_norm ? shifts : nullptr,
                  .group_begin = groups.data(),
                  .width = width,
                  .segments = vectors,
                  .input = view,
                  .output = view},
                 nullptr);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    };
    if (s_.query_norm && s_.heads > 0) {
      norm(query_scales_.data(), query_shifts_.data(), 0, s_.heads);
    }
    if (s_.key_norm) norm(key_scales_.data(), key_shifts_.data(), query_width_, s_.kv_heads);
    const auto rotate = [&](const float2* angles, int64_t begin, int heads) {
      LaunchRope({.head_dim = s_.head_dim,
                  .dimensions = s_.dimensions,
                  .interleaved = s_.interleaved,
                  .angles = angles,
                  .step = step_,
                  .rows = rows.data() + begin,
                  .num_rows = kTokens,
                  .heads = heads,
                  .stride = stride_},
                 nullptr);
    };
    if (s_.heads > 0) rotate(angles_, 0, s_.heads);
    rotate(key_angles_, query_width_, s_.kv_heads);
    LaunchNormRopeAppend(Append(NewCache(memory), rows.data()), nullptr);
    return {rows.Read(), memory.Read()};
  }

  const Setting s_;
  const KvCacheType type_;
  const int query_width_, kv_width_;
  const int64_t stride_;
  Random random_{11};
  DeviceArray<int32_t> position_, sequence_, tables_;
  DeviceArray<float> query_scales_, key_scales_, query_shifts_, key_shifts_;
  std::vector<float> rows_;
  StepView step_;
  RopeTables rope_;
  const float2* angles_ = nullptr;
  const float2* key_angles_ = nullptr;
};

TEST(CudaNormRopeAppendTest, HasTheBitsOfItsParts) {
  const Setting settings[] = {
      {.heads = 8, .kv_heads = 2, .head_dim = 16, .dimensions = 16},
      {.heads = 3, .kv_heads = 1, .head_dim = 12, .dimensions = 8, .interleaved = true, .gap = 3},
      {.heads = 5, .kv_heads = 5, .head_dim = 80, .dimensions = 20, .gap = 1},
      {.heads = 2, .kv_heads = 2, .head_dim = 64},
      // Attention experts: keys and values only.
      {.heads = 0, .kv_heads = 3, .head_dim = 128, .dimensions = 128},
      {.heads = 0, .kv_heads = 1, .head_dim = 256, .dimensions = 64, .interleaved = true},
      // Keys with angles of their own.
      {.heads = 3,
       .kv_heads = 1,
       .head_dim = 12,
       .dimensions = 8,
       .interleaved = true,
       .xpos_base = 16.0},
      {.heads = 0, .kv_heads = 2, .head_dim = 64, .dimensions = 64, .xpos_base = 16.0},
      {.heads = 4,
       .kv_heads = 2,
       .head_dim = 32,
       .dimensions = 32,
       .query_norm = true,
       .key_norm = true,
       .norm_heads = false,
       .xpos_base = 16.0},
      // Norms per head.
      {.heads = 4,
       .kv_heads = 2,
       .head_dim = 128,
       .dimensions = 128,
       .query_norm = true,
       .key_norm = true},
      {.heads = 4,
       .kv_heads = 2,
       .head_dim = 256,
       .dimensions = 128,
       .interleaved = true,
       .query_norm = true,
       .key_norm = true,
       .gap = 2},
      {.heads = 3,
       .kv_heads = 3,
       .head_dim = 9,
       .dimensions = 6,
       .query_norm = true,
       .key_norm = true,
       .layer_norm = true},
      {.heads = 2, .kv_heads = 1, .head_dim = 20, .query_norm = true, .key_norm = true},
      {.heads = 2, .kv_heads = 1, .head_dim = 32, .dimensions = 32, .key_norm = true},
      // Norms over all heads, whose widths need different numbers of cooperating threads.
      {.heads = 4,
       .kv_heads = 4,
       .head_dim = 32,
       .dimensions = 32,
       .query_norm = true,
       .key_norm = true,
       .norm_heads = false},
      {.heads = 8,
       .kv_heads = 2,
       .head_dim = 128,
       .dimensions = 64,
       .query_norm = true,
       .key_norm = true,
       .norm_heads = false},
      {.heads = 33,
       .kv_heads = 9,
       .head_dim = 128,
       .dimensions = 128,
       .interleaved = true,
       .query_norm = true,
       .key_norm = true,
       .norm_heads = false,
       .gap = 1},
      {.heads = 9,
       .kv_heads = 7,
       .head_dim = 75,
       .dimensions = 20,
       .query_norm = true,
       .norm_heads = false,
       .layer_norm = true},
      {.heads = 0, .kv_heads = 5, .head_dim = 128, .key_norm = true, .norm_heads = false},
  };
  for (const Setting& s : settings) {
    for (const KvCacheType cache : {KvCacheType::kF32, KvCacheType::kBF16, KvCacheType::kInt8}) {
      SCOPED_TRACE(s.Describe() + ", cache " + std::string(Name(cache)));
      InEveryOrder([&] { Comparison(s, cache).Run(); });
    }
  }
}

}  // namespace
}  // namespace moeserve::cuda
