// Attention of single tokens by clusters of blocks must have the bits of split and merged
// attention, for every size of clusters.

#include <gtest/gtest.h>

#include <vector>

#include "tests/cuda/attention_scene.h"
#include "tests/cuda/emulator_test_support.h"

namespace moeserve::cuda {
namespace {

using Tokens = std::vector<std::vector<AttentionQuery>>;
using Rows = std::vector<std::vector<uint32_t>>;

AttentionSetting Bf16Setting(int head_dim, int kv_heads, int group, std::vector<int> lengths) {
  return {.head_dim = head_dim,
          .kv_heads = kv_heads,
          .heads = kv_heads * group,
          .cache = KvCacheType::kBF16,
          .output = DType::kBF16,
          .lengths = std::move(lengths)};
}

// Returns the sizes of clusters that the device can run.
std::vector<AttentionSplits> ClusterSizes(const AttentionScene& scene) {
  AttentionLaunch launch;
  launch.cache = scene.view();
  launch.output_dtype = DType::kBF16;
  std::vector<AttentionSplits> sizes;
  for (const AttentionSplits splits :
       {AttentionSplits::kCluster4, AttentionSplits::kCluster8, AttentionSplits::kCluster16}) {
    if (CanUseSplits(launch, splits)) sizes.push_back(splits);
  }
  return sizes;
}

// Compares all sizes of clusters with splits that are merged, and a row of every `step` tokens with
// double arithmetic. All tokens are computed alone.
void ExpectClustersMerge(AttentionScene& scene, const Tokens& tokens,
                         AttentionScene::Options options = {}, int step = 1) {
  const int count = static_cast<int>(tokens.size());
  options.tiled_from = count;
  options.slots = 200;
  options.splits = AttentionSplits::kMerged;
  const Rows merged = scene.Run(tokens, options);
  for (int t = 0, row = 0; t < count; row += static_cast<int>(tokens[t].size()), ++t) {
    if (t % step != 0 || tokens[t].empty()) continue;
    ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], merged[row]));
  }
  for (const AttentionSplits splits : ClusterSizes(scene)) {
    options.splits = splits;
    ASSERT_EQ(merged, scene.Run(tokens, options))
        << static_cast<int>(splits) << ": " << scene.setting().Describe();
  }
}

// The last token of every sequence, and one of padding.
Tokens LastTokens(AttentionScene& scene) {
  Tokens tokens;
  const std::vector<int> lengths = scene.setting().lengths;
  for (int i = 0; i < static_cast<int>(lengths.size()); ++i) {
    tokens.push_back({scene.RandomQuery(i, lengths[i] - 1)});
  }
  tokens.insert(tokens.begin() + 1, {scene.RandomQuery(-1, 1 << 20)});
  return tokens;
}

TEST(CudaAttentionClusterTest, LargestClusterRunsOnTheEmulatedDevice) {
#if defined(MOESERVE_CUDA_EMULATION)
  for (const int head_dim : {64, 128, 256}) {
    AttentionScene scene(Bf16Setting(head_dim, 1, 1, {1}), 1);
    EXPECT_EQ(ClusterSizes(scene).size(), 3u);
    AttentionLaunch launch;
    launch.cache = scene.view();
    EXPECT_FALSE(CanUseSplits(launch, AttentionSplits::kCluster8));  // the output is f32
    launch.output_dtype = DType::kBF16;
    SetEmulatedCapability(8);
    EXPECT_FALSE(CanUseSplits(launch, AttentionSplits::kCluster4));
    EXPECT_TRUE(CanUseSplits(launch, AttentionSplits::kMerged));
    SetEmulatedCapability(9);
  }
#endif
}

TEST(CudaAttentionClusterTest, ContextsOfEveryLength) {
  uint64_t seed = 1000;
  for (const int head_dim : {16, 64, 80, 128, 192, 256}) {
    AttentionSetting setting =
        Bf16Setting(head_dim, 2, head_dim == 128 ? 4 : 3, {1, 255, 256, 257, 1300, 2049});
    setting.tile_order = head_dim == 80;
    if (head_dim > 128 || head_dim == 16) setting.lengths = {257, 2049, 33};
    AttentionScene scene(setting, seed++);
    ASSERT_NO_FATAL_FAILURE(ExpectClustersMerge(scene, LastTokens(scene)));
  }
}

TEST(CudaAttentionClusterTest, LongContextsTakeManyRounds) {
  for (const int window : {0, 3000}) {
    AttentionSetting setting = Bf16Setting(64, 1, 2, {40000, 9});
    setting.window = window;
    AttentionScene scene(setting, 1100);
    if (window > 0) scene.Poison(0, 0, 40000 - window);
    ASSERT_NO_FATAL_FAILURE(ExpectClustersMerge(scene, LastTokens(scene)));
  }
}

// Groups of every width; 17 heads take two clusters.
TEST(CudaAttentionClusterTest, GroupsOfHeads) {
  uint64_t seed = 1200;
  for (const int group : {1, 2, 5, 8, 9, 16, 17}) {
    AttentionScene scene(Bf16Setting(64, group == 5 ? 3 : 1, group, {700, 1025}), seed++);
    ASSERT_NO_FATAL_FAILURE(ExpectClustersMerge(scene, LastTokens(scene), {.by_shape = 1}));
  }
}

// Keys outside of windows and chunks, which nothing reads, are NaN.
TEST(CudaAttentionClusterTest, WindowsAndChunks) {
  uint64_t seed = 1300;
  for (const int head_dim : {64, 128}) {
    for (const int window : {1, 70, 300, 1000}) {
      for (const bool chunks : {false, true}) {
        AttentionSetting setting = Bf16Setting(head_dim, 1, 2, {1, 900, 1500, 2049});
        setting.window = window;
        setting.chunks = chunks;
        AttentionScene scene(setting, seed++);
        for (int i = 0; i < 4; ++i) {
          const int last = setting.lengths[i] - 1;
          scene.Poison(i, 0, chunks ? last - last % window : std::max(0, last - window + 1));
        }
        ASSERT_NO_FATAL_FAILURE(ExpectClustersMerge(scene, LastTokens(scene)));
      }
    }
  }
}

TEST(CudaAttentionClusterTest, SinksSoftCapsBiasesAndScales) {
  uint64_t seed = 1400;
  for (int kind = 0; kind < 5; ++kind) {
    AttentionSetting setting = Bf16Setting(kind == 1 ? 128 : 64, 2, 4, {300, 1800});
    setting.sinks = kind == 0 || kind == 1;
    setting.soft_cap = kind == 1 || kind == 2 ? 1.5f : 0.0f;
    setting.bias_distances = kind == 3 ? 270 : 0;
    setting.scale = kind == 4 ? -0.2f : 0.0f;
    AttentionScene scene(setting, seed++);
    ASSERT_NO_FATAL_FAILURE(ExpectClustersMerge(scene, LastTokens(scene)));
  }
}

// Rows without causality see later keys too.
TEST(CudaAttentionClusterTest, BothDirections) {
  uint64_t seed = 1500;
  for (const int window : {0, 300}) {
    AttentionSetting setting = Bf16Setting(64, 1, 3, {1100, 40, 257});
    setting.causal = false;
    setting.window = window;
    AttentionScene scene(setting, seed++);
    Tokens tokens = LastTokens(scene);
    for (const int p : {0, 255, 600}) tokens.push_back({scene.RandomQuery(0, p)});
    ASSERT_NO_FATAL_FAILURE(ExpectClustersMerge(scene, tokens));
  }
}

// Tokens of routing plans with any number of rows, and groups with longer splits.
TEST(CudaAttentionClusterTest, RowsOfPlans) {
  uint64_t seed = 1600;
  for (const int head_dim : {12, 128}) {
    for (const int by_shape : {1, 16}) {
      AttentionScene scene(Bf16Setting(head_dim, 2, head_dim == 12 ? 3 : 1, {20, 1300, 600}),
                           seed++);
      Tokens tokens;
      const auto add = [&](int sequence, int position, int rows) {
        tokens.emplace_back();
        for (int i = 0; i < rows; ++i) {
          tokens.back().push_back(scene.RandomQuery(sequence, position));
        }
      };
      add(0, 19, 16);
      add(1, 1299, 22);
      tokens.emplace_back();  // padding
      add(2, 599, 3);
      add(2, 511, 1);
      add(2, 400, 0);
      add(1, 1030, 16);
      ASSERT_NO_FATAL_FAILURE(
          ExpectClustersMerge(scene, tokens, {.max_per_token = 22, .by_shape = by_shape}));
      // Alone, a token has the same bits.
      if (ClusterSizes(scene).empty()) continue;
      AttentionScene::Options options{.tiled_from = 7,
                                      .max_per_token = 22,
                                      .by_shape = by_shape,
                                      .splits = AttentionSplits::kCluster4};
      const Rows all = scene.Run(tokens, options);
      options.tiled_from = 1;
      const Rows alone = scene.Run({tokens[1]}, options);
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), all.begin() + 16));
    }
  }
}

// Single tokens by clusters, together with tiles of a prompt.
TEST(CudaAttentionClusterTest, MixedSteps) {
  AttentionScene scene(Bf16Setting(64, 2, 2, {700, 300}), 1700);
  if (ClusterSizes(scene).empty()) GTEST_SKIP();
  Tokens tokens = {{scene.RandomQuery(0, 699)}, {scene.RandomQuery(1, 20)}};
  for (int p = 270; p < 300; ++p) tokens.push_back({scene.RandomQuery(1, p)});
  const Rows expected = scene.Run(tokens, {});
  for (const AttentionSplits splits : ClusterSizes(scene)) {
    ASSERT_EQ(expected, scene.Run(tokens, {.tiled_from = 2, .splits = splits}));
  }
}

TEST(CudaAttentionClusterTest, EveryOrder) {
  InEveryOrder([] {
    uint64_t seed = 1800;
    for (const int head_dim : {64, 128, 256}) {
      AttentionSetting setting = Bf16Setting(head_dim, 1, 3, {1, 257, 2305});
      setting.sinks = head_dim == 64;
      AttentionScene scene(setting, seed++);
      ASSERT_NO_FATAL_FAILURE(ExpectClustersMerge(scene, LastTokens(scene), {}, 3));
    }
  });
}

}  // namespace
}  // namespace moeserve::cuda
