// Attention over an int8 cache: all kernels on the tensor cores have the same bits, and do not read
// what no row sees, neither integers nor scales. The tests of all types of caches are in the other
// files of attention.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/cuda/attention_scene.h"
#include "tests/cuda/emulator_test_support.h"

namespace moeserve::cuda {
namespace {

using Tokens = std::vector<std::vector<AttentionQuery>>;
using Rows = std::vector<std::vector<uint32_t>>;

AttentionSetting Int8Setting(int head_dim, int kv_heads, int group, std::vector<int> lengths) {
  return {.head_dim = head_dim,
          .kv_heads = kv_heads,
          .heads = kv_heads * group,
          .cache = KvCacheType::kInt8,
          .output = DType::kBF16,
          .lengths = std::move(lengths)};
}

// Compares every kernel with splits that are merged, and a row of every `step` tokens with double
// arithmetic.
void ExpectOneResult(AttentionScene& scene, const Tokens& tokens, int step = 1,
                     AttentionScene::Options options = {}) {
  const int count = static_cast<int>(tokens.size());
  const std::string name = scene.setting().Describe();
  options.slots = 200;
  options.tiled_from = count;
  const Rows expected = scene.Run(tokens, options);
  for (int t = 0, row = 0; t < count; row += static_cast<int>(tokens[t].size()), ++t) {
    if (t % step != 0 || tokens[t].empty()) continue;
    ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], expected[row]));
  }
  options.slots = 0;
  ASSERT_EQ(expected, scene.Run(tokens, options)) << name;
  options.tiled_from = 0;
  ASSERT_EQ(expected, scene.Run(tokens, options)) << name << ", tiles";
  options.tiles = AttentionTiles::kPingPong;
  ASSERT_EQ(expected, scene.Run(tokens, options)) << name << ", tiles of several warpgroups";
  options.tiled_from = count;
  AttentionLaunch launch;
  launch.cache = scene.view();
  launch.output_dtype = DType::kBF16;
  for (const AttentionSplits splits :
       {AttentionSplits::kCluster4, AttentionSplits::kCluster8, AttentionSplits::kCluster16}) {
    if (!CanUseSplits(launch, splits)) continue;
    options.splits = splits;
    ASSERT_EQ(expected, scene.Run(tokens, options)) << name << ", clusters";
  }
}

Tokens RowsFrom(AttentionScene& scene, int sequence, int begin, int end) {
  Tokens tokens;
  for (int p = begin; p < end; ++p) tokens.push_back({scene.RandomQuery(sequence, p)});
  return tokens;
}

Tokens LastAndPadding(AttentionScene& scene) {
  Tokens tokens;
  const std::vector<int> lengths = scene.setting().lengths;
  for (int i = 0; i < static_cast<int>(lengths.size()); ++i) {
    tokens.push_back({scene.RandomQuery(i, lengths[i] - 1)});
  }
  tokens.push_back({scene.RandomQuery(-1, 1 << 20)});
  return tokens;
}

TEST(CudaInt8AttentionTest, SingleTokensOfEveryWidth) {
  uint64_t seed = 1;
  for (const int head_dim : {16, 64, 80, 128, 192, 256}) {
    AttentionSetting setting = Int8Setting(head_dim, 2, 3, {1, 255, 256, 257, 1300, 2049});
    if (head_dim > 128 || head_dim == 16) setting.lengths = {257, 1300, 33};
    setting.tile_order = head_dim == 80;
    AttentionScene scene(setting, seed++);
    ASSERT_NO_FATAL_FAILURE(ExpectOneResult(scene, LastAndPadding(scene)));
  }
}

TEST(CudaInt8AttentionTest, PromptsOfSeveralTiles) {
  uint64_t seed = 100;
  for (const int head_dim : {16, 64, 80, 128, 256}) {
    for (const int window : {0, 90}) {
      if (window > 0 && head_dim != 64 && head_dim != 128) continue;
      AttentionSetting setting = Int8Setting(head_dim, 2, head_dim == 64 ? 3 : 1, {70, 330});
      setting.window = window;
      setting.sinks = head_dim == 64;
      setting.soft_cap = head_dim == 80 ? 1.0f : 0.0f;
      AttentionScene scene(setting, seed++);
      Tokens tokens = RowsFrom(scene, 0, 0, 70);
      for (auto& t : RowsFrom(scene, 1, 180, 330)) tokens.push_back(t);
      tokens.push_back({scene.RandomQuery(-1, 0)});
      ASSERT_NO_FATAL_FAILURE(ExpectOneResult(scene, tokens, 23));
    }
  }
}

// Keys outside of windows and chunks and behind the last position, which nothing reads, have NaN as
// scales.
TEST(CudaInt8AttentionTest, KernelsReadOnlyKeysThatAreSeen) {
  InEveryOrder([] {
    uint64_t seed = 200;
    for (const int head_dim : {64, 80, 128, 256}) {
      for (const int end : {1, 64, 65, 257}) {
        for (const int window : {0, 70, -70}) {
          const bool few = head_dim == 80 || head_dim == 256;
          if ((window != 0 && end < 255) || (few && end != 257)) continue;
          AttentionSetting setting = Int8Setting(head_dim, 2, 2, {end + 50, 17});
          setting.window = std::abs(window);
          setting.chunks = window < 0;
          AttentionScene scene(setting, seed++);
          const int begin = std::max(0, end - 24);
          Tokens tokens = RowsFrom(scene, 0, begin, end);
          for (auto& t : RowsFrom(scene, 1, 10, 17)) tokens.push_back(t);
          scene.Poison(0, 0, scene.FirstSeen(begin));
          scene.Poison(0, end, end + 50);
          ASSERT_NO_FATAL_FAILURE(ExpectOneResult(scene, tokens, 19));
        }
      }
    }
  });
}

TEST(CudaInt8AttentionTest, SinksSoftCapsBiasesAndScales) {
  uint64_t seed = 300;
  for (int kind = 0; kind < 6; ++kind) {
    AttentionSetting setting = Int8Setting(kind == 1 ? 128 : 64, 2, 4, {300, 1100});
    setting.sinks = kind == 0 || kind == 1;
    setting.soft_cap = kind == 1 || kind == 2 ? 1.5f : 0.0f;
    setting.bias_distances = kind == 3 ? 270 : 0;
    setting.scale = kind == 4 ? -0.2f : kind == 5 ? 3.0f : 0.0f;
    AttentionScene scene(setting, seed++);
    Tokens tokens = LastAndPadding(scene);
    for (auto& t : RowsFrom(scene, 1, 1080, 1099)) tokens.push_back(t);
    ASSERT_NO_FATAL_FAILURE(ExpectOneResult(scene, tokens, 3));
  }
}

TEST(CudaInt8AttentionTest, BothDirections) {
  uint64_t seed = 400;
  for (const int window : {0, 300}) {
    AttentionSetting setting = Int8Setting(64, 1, 3, {900, 40, 257});
    setting.causal = false;
    setting.window = window;
    AttentionScene scene(setting, seed++);
    Tokens tokens = LastAndPadding(scene);
    for (auto& t : RowsFrom(scene, 1, 0, 40)) tokens.push_back(t);
    ASSERT_NO_FATAL_FAILURE(ExpectOneResult(scene, tokens, 5));
  }
}

// Tokens of routing plans with any number of rows, and groups with longer splits.
TEST(CudaInt8AttentionTest, RowsOfPlans) {
  uint64_t seed = 500;
  for (const int by_shape : {1, 16}) {
    AttentionScene scene(Int8Setting(64, 2, 1, {20, 1300, 600}), seed++);
    Tokens tokens;
    const auto add = [&](int sequence, int position, int rows) {
      tokens.emplace_back();
      for (int i = 0; i < rows; ++i) tokens.back().push_back(scene.RandomQuery(sequence, position));
    };
    add(0, 19, 16);
    add(1, 1299, 22);
    tokens.emplace_back();  // padding
    add(2, 599, 3);
    add(2, 400, 0);
    add(1, 1030, 16);
    ASSERT_NO_FATAL_FAILURE(
        ExpectOneResult(scene, tokens, 1, {.max_per_token = 22, .by_shape = by_shape}));
  }
}

// Heads that are computed in f32, with the cache's integers and scales.
TEST(CudaInt8AttentionTest, WideHeadsMatchDoubleArithmetic) {
  for (const DType output : {DType::kF32, DType::kBF16}) {
    AttentionSetting setting = Int8Setting(320, 2, 3, {40, 270});
    setting.output = output;
    AttentionScene scene(setting, 600);
    scene.Poison(0, 30, 40);
    const Tokens tokens = {{scene.RandomQuery(0, 29)}, {scene.RandomQuery(1, 269)}};
    const Rows rows = scene.Run(tokens, {});
    for (int t = 0; t < 2; ++t) ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], rows[t]));
  }
}

TEST(CudaInt8AttentionTest, EveryOrder) {
  InEveryOrder([] {
    uint64_t seed = 700;
    for (const int head_dim : {64, 128, 256}) {
      for (const int group : {1, 5, 8}) {
        AttentionSetting setting = Int8Setting(head_dim, 1, group, {21, 530});
        setting.sinks = group == 5;
        setting.window = group == 8 ? 75 : 0;
        AttentionScene scene(setting, seed++);
        Tokens tokens = RowsFrom(scene, 0, 13, 21);
        for (auto& t : RowsFrom(scene, 1, 507, 530)) tokens.push_back(t);
        ASSERT_NO_FATAL_FAILURE(ExpectOneResult(scene, tokens, 29));
      }
    }
  });
}

}  // namespace
}  // namespace moeserve::cuda
