// Attention that normalises and rotates its queries and appends the tokens' keys itself must have
// the bits of the launches that it replaces, in its rows and in every byte of the cache.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/cache/kv_cache.h"
#include "kernels/cuda/positions/norm_rope_append.h"
#include "kernels/cuda/positions/rope.h"
#include "kernels/cuda/positions/rope_tables.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/emulator_test_support.h"
#include "tests/support/random.h"

namespace moeserve::cuda {
namespace {

using testing::Random;

struct PrepareCase {
  int head_dim = 64;
  int kv_heads = 1;
  int group = 1;       // query heads of a row per kv head
  int dimensions = 0;  // rotated
  bool interleaved = false;
  int distance = 0;
  bool query_norm = false, key_norm = false, layer_norm = false;
  double xpos_base = 0.0;
  int window = 0;
  int value_dim = 0;             // 0: head_dim
  std::vector<int> routes = {};  // of each token, in turn; empty: a row per token, without a plan
  std::vector<int> contexts = {1, 16, 17, 256, 257, 1030};
};

// Single tokens of sequences of their own, whose earlier keys are in the cache. The place of a
// token's own key, and everything behind it, is NaN. One token is padding.
class Scene {
 public:
  Scene(const PrepareCase& c, uint64_t seed) : c_(c), random_(seed) {
    const int sequences = static_cast<int>(c.contexts.size());
    std::vector<int32_t> tables;
    int longest = 0;
    for (const int n : c.contexts) longest = std::max(longest, n);
    stride_ = (longest + kPageTokens - 1) / kPageTokens + 1;
    for (int s = 0; s < sequences; ++s) {
      for (int i = 0; i < stride_; ++i) {
        // Sequences take turns in the pages.
        const bool used = i * kPageTokens < c.contexts[static_cast<size_t>(s)];
        tables.push_back(used ? pages_++ * 7 % 1009 : 1 << 29);
      }
    }
    pages_ = 1009;
    tables_ = std::make_unique<DeviceArray<int32_t>>(tables);
    for (int s = 0; s < sequences; ++s) {
      if (s == 1) sequence_.push_back(-1), position_.push_back(1 << 20);
      sequence_.push_back(s);
      position_.push_back(c.contexts[static_cast<size_t>(s)] - 1);
    }
    tokens_ = static_cast<int>(sequence_.size());
    d_sequence_ = std::make_unique<DeviceArray<int32_t>>(sequence_);
    d_position_ = std::make_unique<DeviceArray<int32_t>>(position_);
    step_ = {tokens_, d_position_->data(), d_sequence_->data(), tables_->data(), stride_, longest};
    MakePlan();
    const int rows = c.routes.empty() ? tokens_ : assignments_;
    query_width_ = c.kv_heads * c.group * c.head_dim;
    row_stride_ = (c.routes.empty() ? query_width_ : 0) + KvWidth() + 5;
    rows_ = random_.Normals(int64_t{tokens_} * row_stride_, 2.0);
    for (int64_t i = row_stride_; i < 2 * row_stride_; ++i) rows_[static_cast<size_t>(i)] = NAN;
    queries_ = random_.Normals(int64_t{rows} * query_width_, 2.0);
    for (std::vector<float>* v : {&scales_, &key_scales_, &shifts_, &key_shifts_}) {
      *v = random_.Normals(c.head_dim);
    }
    FillEarlier();
    if (c.dimensions == 0) return;
    RopeSettings rope = RopeOf();
    EXPECT_TRUE(rope_.Reserve(rope, tokens_, nullptr).ok());
    angles_ = rope_.Angles(rope, step_, nullptr);
    if (c.xpos_base == 0.0) return;
    rope.keys = true;
    EXPECT_TRUE(rope_.Reserve(rope, tokens_, nullptr).ok());
    key_angles_ = rope_.Angles(rope, step_, nullptr);
  }

  struct Bytes {
    std::vector<uint16_t> output, keys, values;

    bool operator==(const Bytes&) const = default;
  };

  // Runs attention by these splits; `at_once`: it prepares itself.
  Bytes Run(AttentionSplits splits, bool at_once) {
    auto cache = NewCache();
    const DeviceArray<uint16_t> keys(keys_), values(values_);
    KvLayerView view = cache.layer(0);
    view.keys = keys.data();
    view.values = values.data();
    const DeviceArray<float> rows(rows_), queries(queries_);
    const DeviceArray<float> scales(scales_), key_scales(key_scales_), shifts(shifts_),
        key_shifts(key_shifts_);
    const bool routed = !c_.routes.empty();
    NormRopeAppendLaunch p;
    p.cache = view;
    p.step = step_;
    p.query = routed ? nullptr : rows.data();
    p.keys = rows.data() + (routed ? 0 : query_width_);
    p.values = p.keys + c_.kv_heads * c_.head_dim;
    p.query_stride = p.key_stride = p.value_stride = row_stride_;
    p.heads = routed ? 0 : c_.kv_heads * c_.group;
    if (c_.query_norm) {
      p.query_norm = {c_.layer_norm, 1e-5f, scales.data(), c_.layer_norm ? shifts.data() : nullptr};
    }
    if (c_.key_norm) {
      p.key_norm = {c_.layer_norm, 1e-5f, key_scales.data(),
                    c_.layer_norm ? key_shifts.data() : nullptr};
    }
    p.dimensions = c_.dimensions;
    p.interleaved = c_.interleaved;
    p.distance = c_.distance;
    p.angles = angles_;
    p.key_angles = key_angles_;

    AttentionLaunch a;
    a.cache = view;
    a.step = step_;
    a.query = routed ? queries.data() : rows.data();
    a.query_stride = routed ? query_width_ : row_stride_;
    if (routed) {
      a.rows = {offsets_->data(), of_row_->data(), row_of_->data(), most_routes_, most_routes_};
    }
    const int out_width = c_.kv_heads * c_.group * view.value_dim() + 3;
    const size_t out_rows = static_cast<size_t>(routed ? assignments_ : tokens_) + 1;
    const DeviceArray<uint16_t> output(out_rows * static_cast<size_t>(out_width));
    a.output = output.data();
    a.output_stride = out_width;
    a.output_dtype = DType::kBF16;
    a.heads = c_.kv_heads * c_.group;
    a.tile_order = routed;
    a.scale = 0.11f;
    a.seen = {true, c_.window, false};
    a.tiled_from = tokens_;
    a.splits = splits;
    const DeviceArray<uint8_t> work(static_cast<size_t>(AttentionWorkBytes(
        tokens_, 64, PartialFloats(a.heads * a.rows.max_per_token, view.widest_dim()))));
    if (splits == AttentionSplits::kMerged) {
      a.work = LayOutAttentionWork(work.data(), tokens_, 64);
      LaunchAttentionWork(step_, tokens_, a.seen, SplitTokensOf(a), a.work, nullptr);
    }
    if (at_once) {
      if (routed && c_.dimensions > 0) p.heads = a.heads;
      p.query = nullptr;
      a.prepare = &p;
      EXPECT_TRUE(CanPrepare(a));
    } else {
      LaunchNormRopeAppend(p, nullptr);
      if (routed) RotateRows(queries.data(), a.heads);
    }
    LaunchAttention(a, nullptr);
    if (at_once) {  // the queries stay as they are
      EXPECT_EQ(0, std::memcmp(queries.Read().data(), queries_.data(), queries_.size() * 4));
      EXPECT_EQ(0, std::memcmp(rows.Read().data(), rows_.data(), rows_.size() * 4));
    }
    return {output.Read(), keys.Read(), values.Read()};
  }

  // Returns the splits that the device can run.
  std::vector<AttentionSplits> Splits() {
    AttentionLaunch launch;
    const CudaKvCache cache = NewCache();
    launch.cache = cache.layer(0);
    launch.output_dtype = DType::kBF16;
    std::vector<AttentionSplits> all;
    for (const AttentionSplits s : {AttentionSplits::kMerged, AttentionSplits::kCluster4,
                                    AttentionSplits::kCluster8, AttentionSplits::kCluster16}) {
      if (CanUseSplits(launch, s)) all.push_back(s);
    }
    return all;
  }

 private:
  RopeSettings RopeOf() const {
    return {.head_dim = c_.head_dim,
            .dimensions = c_.dimensions,
            .theta = 5e5,
            .interleaved = c_.interleaved,
            .xpos_base = c_.xpos_base,
            .distance = c_.distance};
  }
  int KvWidth() const {
    return c_.kv_heads * (c_.head_dim + (c_.value_dim > 0 ? c_.value_dim : c_.head_dim));
  }
  CudaKvCache NewCache() const {
    auto cache = CudaKvCache::Allocate({{c_.kv_heads, c_.head_dim, 0, 0, c_.value_dim}},
                                       KvCacheType::kBF16, {pages_});
    EXPECT_TRUE(cache.ok()) << cache.status();
    return std::move(cache).value();
  }

  void MakePlan() {
    if (c_.routes.empty()) return;
    std::vector<int32_t> offsets = {0}, row_of;
    for (int t = 0; t < tokens_; ++t) {
      const bool padding = sequence_[static_cast<size_t>(t)] < 0;
      const int n = padding ? 0 : c_.routes[static_cast<size_t>(t) % c_.routes.size()];
      most_routes_ = std::max(most_routes_, n);
      offsets.push_back(offsets.back() + n);
      row_of.insert(row_of.end(), static_cast<size_t>(n), t);
    }
    assignments_ = offsets.back();
    // Assignments have another order than tokens.
    std::vector<int32_t> of_row(row_of.size()), shuffled(row_of.size());
    for (int i = 0; i < assignments_; ++i) of_row[static_cast<size_t>(i)] = i;
    for (int i = assignments_ - 1; i > 0; --i) {
      std::swap(of_row[static_cast<size_t>(i)], of_row[static_cast<size_t>(random_.Below(i + 1))]);
    }
    for (size_t i = 0; i < of_row.size(); ++i) {
      shuffled[static_cast<size_t>(of_row[i])] = row_of[i];
    }
    offsets_ = std::make_unique<DeviceArray<int32_t>>(offsets);
    of_row_ = std::make_unique<DeviceArray<int32_t>>(of_row);
    row_of_ = std::make_unique<DeviceArray<int32_t>>(shuffled);
  }

  void RotateRows(float* queries, int heads) {
    if (c_.dimensions == 0) return;
    LaunchRope({.head_dim = c_.head_dim,
                .dimensions = c_.dimensions,
                .interleaved = c_.interleaved,
                .distance = c_.distance,
                .angles = angles_,
                .step = step_,
                .token_of_row = row_of_->data(),
                .rows = queries,
                .num_rows = assignments_,
                .heads = heads,
                .stride = query_width_},
               nullptr);
  }

  // Appends the tokens before those of the step.
  void FillEarlier() {
    const CudaKvCache cache = NewCache();
    KvLayerView view = cache.layer(0);
    const size_t elements = static_cast<size_t>(view.block_stride * pages_);
    const DeviceArray<uint16_t> keys(elements), values(elements);
    view.keys = keys.data();
    view.values = values.data();
    std::vector<int32_t> position, sequence;
    for (int s = 0; s < static_cast<int>(c_.contexts.size()); ++s) {
      for (int p = 0; p + 1 < c_.contexts[static_cast<size_t>(s)]; ++p) {
        // What a window hides is NaN.
        if (c_.window > 0 && p + c_.window < c_.contexts[static_cast<size_t>(s)]) continue;
        position.push_back(p);
        sequence.push_back(s);
      }
    }
    const int count = static_cast<int>(position.size()), width = KvWidth();
    const DeviceArray<int32_t> d_position(position), d_sequence(sequence);
    const DeviceArray<float> rows(random_.Normals(int64_t{count} * width));
    NormRopeAppendLaunch p;
    p.cache = view;
    p.step = step_;
    p.step.tokens = count;
    p.step.position = d_position.data();
    p.step.sequence = d_sequence.data();
    p.keys = rows.data();
    p.values = rows.data() + c_.kv_heads * c_.head_dim;
    p.key_stride = p.value_stride = width;
    LaunchNormRopeAppend(p, nullptr);
    keys_ = keys.Read();
    values_ = values.Read();
  }

  PrepareCase c_;
  Random random_;
  int stride_ = 0, pages_ = 0, tokens_ = 0, assignments_ = 0, most_routes_ = 1;
  int query_width_ = 0;
  int64_t row_stride_ = 0;
  std::vector<int32_t> sequence_, position_;
  std::unique_ptr<DeviceArray<int32_t>> tables_, d_sequence_, d_position_, offsets_, of_row_,
      row_of_;
  StepView step_;
  std::vector<float> rows_, queries_, scales_, key_scales_, shifts_, key_shifts_;
  std::vector<uint16_t> keys_, values_;  // of the cache before the step
  RopeTables rope_;
  const float2* angles_ = nullptr;
  const float2* key_angles_ = nullptr;
};

void ExpectSame(const PrepareCase& c, uint64_t seed) {
  Scene scene(c, seed);
  const Scene::Bytes expected = scene.Run(AttentionSplits::kMerged, false);
  for (const AttentionSplits splits : scene.Splits()) {
    const Scene::Bytes actual = scene.Run(splits, true);
    const std::string what =
        "case " + std::to_string(seed) + ", splits " + std::to_string(static_cast<int>(splits));
    ASSERT_TRUE(actual.output == expected.output) << what;
    ASSERT_TRUE(actual.keys == expected.keys) << what;
    ASSERT_TRUE(actual.values == expected.values) << what;
  }
}

std::vector<PrepareCase> Cases() {
  return {
      {.head_dim = 64, .kv_heads = 2, .group = 4, .dimensions = 64},
      {.head_dim = 128, .group = 3, .dimensions = 128, .query_norm = true, .key_norm = true},
      {.head_dim = 80, .kv_heads = 2, .group = 2, .dimensions = 32, .interleaved = true},
      {.head_dim = 256, .group = 2, .dimensions = 64, .query_norm = true, .contexts = {3, 300}},
      {.head_dim = 16, .kv_heads = 3, .dimensions = 16, .key_norm = true, .layer_norm = true},
      {.head_dim = 64,
       .group = 2,
       .dimensions = 32,
       .distance = 32,
       .query_norm = true,
       .layer_norm = true},
      {.head_dim = 64, .group = 2, .dimensions = 64, .xpos_base = 512.0},
      {.head_dim = 64, .kv_heads = 2},
      {.head_dim = 128, .query_norm = true, .contexts = {40, 600}},
      {.head_dim = 64, .group = 20, .dimensions = 64, .key_norm = true},
      {.head_dim = 64, .group = 2, .dimensions = 64, .window = 200},
      {.head_dim = 64, .dimensions = 64, .window = 1},
      {.head_dim = 48, .group = 2, .dimensions = 16, .value_dim = 80},
      {.head_dim = 64, .kv_heads = 2, .dimensions = 64, .routes = {4}},
      {.head_dim = 128, .dimensions = 64, .interleaved = true, .routes = {2, 0, 0, 1, 17}},
      {.head_dim = 64, .kv_heads = 2, .routes = {3, 1}},
  };
}

TEST(CudaAttentionPrepareTest, HasTheBitsOfSeparateLaunches) {
  uint64_t seed = 1;
  for (const PrepareCase& c : Cases()) ASSERT_NO_FATAL_FAILURE(ExpectSame(c, seed++));
}

TEST(CudaAttentionPrepareTest, EveryOrder) {
  InEveryOrder([] {
    uint64_t seed = 100;
    for (PrepareCase c : Cases()) {
      if (seed++ % 4 != 0) continue;
      c.contexts = {1, 257, 600};
      ASSERT_NO_FATAL_FAILURE(ExpectSame(c, seed));
    }
  });
}

TEST(CudaAttentionPrepareTest, OnlySingleTokensOverABf16Cache) {
  AttentionLaunch a;
  NormRopeAppendLaunch p;
  a.prepare = &p;
  a.cache.head_dim = a.cache.padded_dim = 64;
  a.cache.num_kv_heads = 1;
  a.output_dtype = DType::kBF16;
  a.heads = 1;
  a.step.tokens = a.tiled_from = 3;
  EXPECT_TRUE(CanPrepare(a));
  const auto cannot = [&](const auto& change) {
    AttentionLaunch b = a;
    NormRopeAppendLaunch q;
    b.prepare = &q;
    change(b, q);
    return !CanPrepare(b);
  };
  EXPECT_TRUE(cannot([](auto& b, auto&) { b.tiled_from = 2; }));
  EXPECT_TRUE(cannot([](auto& b, auto&) { b.cache.type = KvCacheType::kF32; }));
  EXPECT_TRUE(cannot([](auto& b, auto&) { b.cache.type = KvCacheType::kInt8; }));
  EXPECT_TRUE(cannot([](auto& b, auto&) { b.output_dtype = DType::kF32; }));
  EXPECT_TRUE(cannot([](auto& b, auto&) { b.cache.head_dim = 512; }));
  EXPECT_TRUE(cannot([](auto& b, auto&) { b.seen.causal = false; }));
  const float scale = 1.0f;
  EXPECT_TRUE(cannot([&](auto&, auto& q) {
    q.norm_heads = false;
    q.key_norm.scales = &scale;
  }));
}

}  // namespace
}  // namespace moeserve::cuda
