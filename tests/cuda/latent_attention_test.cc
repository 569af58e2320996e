// Attention over latent vectors on the device, compared with double arithmetic. A row must have the
// same bits alone and with other rows, split or tiled, and for any number of split slots. Positions
// behind the end of a sequence hold NaN.

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/attention/attention_latent_mma.h"
#include "kernels/cuda/device/launch.h"
#include "tests/cuda/attention_scene.h"
#include "tests/cuda/emulator_test_support.h"

namespace moeserve::cuda {
namespace {

using LatentTokens = std::vector<std::vector<AttentionQuery>>;

AttentionSetting LatentSetting(int heads, int head_dim, int latent_dim, std::vector<int> lengths) {
  return {.head_dim = head_dim,
          .heads = heads,
          .cache = KvCacheType::kBF16,
          .output = DType::kBF16,
          .lengths = std::move(lengths),
          .latent_dim = latent_dim};
}

// Returns the kernels for single tokens that the device has for the layer.
std::vector<Single> SinglesOf(const AttentionScene& scene) {
  if (!FitsLatentMma(scene.view(), scene.setting().output)) return {};
  if (!LatentWgmmaFits(scene.view())) return {Single::kLatentMma};
  return {Single::kLatentMma, Single::kLatentWgmma};
}

// Compares rows with double arithmetic, and the bits of every way to compute them. Tokens from
// `single` on are tiles.
void ExpectLatentRows(AttentionScene& scene, const LatentTokens& tokens, int single) {
  const std::string name = scene.setting().Describe();
  const int count = static_cast<int>(tokens.size());
  const auto rows = scene.Run(tokens, {.tiled_from = single});
  const int step = count > 30 ? 5 : 1;
  for (int t = 0; t < count; t += step) {
    ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], rows[t]));
  }
  ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[count - 1][0], rows[count - 1]));
  ASSERT_EQ(rows, scene.Run(tokens, {.tiled_from = 0})) << name;
  ASSERT_EQ(rows, scene.Run(tokens, {.tiles = AttentionTiles::kWarpgroup})) << name << ", wgmma";
  ASSERT_EQ(rows, scene.Run(tokens, {.tiled_from = count, .extra_context = 700})) << name;
  ASSERT_EQ(rows, scene.Run(tokens, {.tiled_from = count, .slots = 3})) << name;
  for (const Single kernel : SinglesOf(scene)) {
    for (const int slots : {64, 0}) {
      ASSERT_EQ(rows, scene.Run(tokens, {.tiled_from = count, .slots = slots, .single = kernel}))
          << name << ", slots " << slots << ", kernel " << static_cast<int>(kernel);
    }
  }
  for (int t = 0; t < count; t += 7) {
    ASSERT_EQ(rows[t], scene.Run({tokens[t]}, {.tiled_from = t % 2})[0]) << name << ", row " << t;
  }
}

// Rows of several sequences, each a range of its positions, and padding in between.
LatentTokens TokensOf(AttentionScene& scene, const std::vector<std::array<int, 3>>& parts) {
  LatentTokens tokens;
  for (const auto& [sequence, first, end] : parts) {
    for (int p = first; p < end; ++p) tokens.push_back({scene.RandomQuery(sequence, p)});
    if (tokens.size() == 2) tokens.push_back({scene.RandomQuery(-1, 1 << 20)});
  }
  tokens.push_back({scene.RandomQuery(-1, 0)});
  return tokens;
}

// The vectors of models, narrow ones, and those whose rows in the cache are no planes; one row tile
// and several, with and without rows left over.
TEST(CudaLatentAttentionTest, RowsMatchDoubleArithmetic) {
  struct Shape {
    int heads, head_dim, latent_dim, window;
    float soft_cap;
    bool sinks;
  };
  const Shape shapes[] = {{16, 576, 512, 0, 0.0f, false}, {3, 576, 512, 300, 0.0f, true},
                          {20, 576, 512, 0, 0.0f, false}, {40, 288, 256, 0, 2.0f, false},
                          {5, 320, 256, 0, 0.0f, false},  {1, 40, 27, 0, 0.0f, false},
                          {7, 28, 20, 40, 0.0f, true},    {33, 64, 64, 0, 0.0f, false},
                          {2, 80, 64, 5, 1.0f, false},    {4, 48, 33, 0, 0.0f, true},
                          {16, 512, 512, 1, 0.0f, false}, {9, 128, 97, 270, 0.0f, false},
                          {128, 64, 40, 0, 0.0f, false},  {70, 576, 512, 0, 0.0f, false}};
  uint64_t seed = 1;
  for (const Shape& s : shapes) {
    AttentionSetting setting =
        LatentSetting(s.heads, s.head_dim, s.latent_dim, {300, 531, 17, 33, 1, 1050});
    setting.window = s.window;
    setting.soft_cap = s.soft_cap;
    setting.sinks = s.sinks;
    AttentionScene scene(setting, seed++);
    ASSERT_TRUE(FitsLatentMma(scene.view(), DType::kBF16));
    const LatentTokens tokens = TokensOf(
        scene, {{0, 299, 300}, {5, 1049, 1050}, {2, 0, 17}, {3, 31, 33}, {4, 0, 1}, {1, 510, 515}});
    ASSERT_NO_FATAL_FAILURE(ExpectLatentRows(scene, tokens, 2));
  }
}

// Encoders, and sources whose lengths have nothing to do with the rows' positions.
TEST(CudaLatentAttentionTest, BidirectionalRowsMatchDoubleArithmetic) {
  uint64_t seed = 100;
  for (const int window : {0, 20, 600}) {
    for (const int head_dim : {40, 576}) {
      AttentionSetting setting = LatentSetting(
          head_dim == 40 ? 5 : 16, head_dim, head_dim - 64 > 0 ? 512 : 33, {1, 700, 512, 60, 513});
      setting.window = window;
      setting.causal = false;
      AttentionScene scene(setting, seed++);
      const LatentTokens tokens = TokensOf(
          scene, {{0, 0, 1}, {1, 500, 501}, {3, 0, 20}, {2, 510, 512}, {4, 0, 2}, {4, 511, 513}});
      ASSERT_NO_FATAL_FAILURE(ExpectLatentRows(scene, tokens, 2));
    }
  }
}

// Scores that are not a positive multiple of the products have maxima of their own.
TEST(CudaLatentAttentionTest, ScalesOfEverySignMatchDoubleArithmetic) {
  uint64_t seed = 200;
  for (const float scale : {-0.2f, 1e-30f, 3.0f}) {
    AttentionSetting setting = LatentSetting(6, 72, 60, {540});
    setting.scale = scale;
    AttentionScene scene(setting, seed++);
    ASSERT_NO_FATAL_FAILURE(ExpectLatentRows(scene, TokensOf(scene, {{0, 534, 540}}), 2));
  }
}

TEST(CudaLatentAttentionTest, KernelsAgreeInEveryOrder) {
  InEveryOrder([] {
    uint64_t seed = 300;
    for (const auto& [heads, head_dim, latent_dim] :
         {std::array{2, 576, 512}, std::array{17, 96, 80}, std::array{16, 56, 48}}) {
      AttentionSetting setting = LatentSetting(heads, head_dim, latent_dim, {21, 530});
      AttentionScene scene(setting, seed++);
      const LatentTokens tokens = TokensOf(scene, {{1, 529, 530}, {0, 18, 21}, {1, 510, 514}});
      const int count = static_cast<int>(tokens.size());
      const auto expected = scene.Run(tokens, {.tiled_from = count});
      for (const int t : {0, count - 2}) {
        ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], expected[t]));
      }
      ASSERT_EQ(expected, scene.Run(tokens, {.tiled_from = count, .slots = 0}));
      ASSERT_EQ(expected, scene.Run(tokens, {})) << setting.Describe();
      ASSERT_EQ(expected, scene.Run(tokens, {.tiles = AttentionTiles::kWarpgroup}));
      for (const Single kernel : SinglesOf(scene)) {
        ASSERT_EQ(expected, scene.Run(tokens, {.tiled_from = count, .single = kernel}));
      }
    }
  });
}

// Blocks that compute several tiles one after another, with contexts of several splits.
TEST(CudaLatentAttentionTest, BlocksOfTilesAreReused) {
#if defined(MOESERVE_CUDA_EMULATION)
  const int before = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  SetEmulatedMultiprocessors(3);
#endif
  AttentionSetting setting = LatentSetting(20, 96, 80, {1050, 40, 9});
  setting.window = 700;
  AttentionScene scene(setting, 500);
  const LatentTokens tokens = TokensOf(scene, {{0, 1030, 1050}, {1, 0, 20}, {2, 0, 9}});
  const auto expected = scene.Run(tokens, {.tiled_from = static_cast<int>(tokens.size())});
  EXPECT_EQ(expected, scene.Run(tokens, {.tiles = AttentionTiles::kMma}));
  EXPECT_EQ(expected, scene.Run(tokens, {.tiles = AttentionTiles::kWarpgroup}));
#if defined(MOESERVE_CUDA_EMULATION)
  SetEmulatedMultiprocessors(before);
#endif
}

// Vectors that are not bf16, or wider than what the kernels are compiled for, are computed in f32.
TEST(CudaLatentAttentionTest, OtherVectorsAreComputedInF32) {
  uint64_t seed = 400;
  for (const auto type : kAttentionTypes) {
    for (const int head_dim : {28, 640}) {
      const bool bf16 = type.cache == KvCacheType::kBF16 && type.output == DType::kBF16;
      if (bf16 == (head_dim == 28) || type.cache == KvCacheType::kInt8) continue;
      AttentionSetting setting = LatentSetting(3, head_dim, head_dim - 8, {40, 270});
      setting.cache = type.cache;
      setting.output = type.output;
      AttentionScene scene(setting, seed++);
      ASSERT_FALSE(FitsLatentMma(scene.view(), type.output));
      ASSERT_NO_FATAL_FAILURE(
          ExpectLatentRows(scene, TokensOf(scene, {{1, 269, 270}, {0, 30, 34}}), 1));
    }
  }
}

}  // namespace
}  // namespace moeserve::cuda
