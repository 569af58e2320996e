// Attention on the device that is not causal, compared with double arithmetic. A row must have the
// same bits alone and with other rows, split or tiled, and for any number of split slots.

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "tests/cuda/attention_scene.h"

namespace moeserve::cuda {
namespace {

using Tokens = std::vector<std::vector<AttentionQuery>>;

// Single rows, whole sequences of few tokens, and parts of long ones: [first, end) of a sequence.
Tokens RowsOfSequences(AttentionScene& scene, const std::vector<std::array<int, 3>>& parts) {
  Tokens tokens;
  for (const auto& [sequence, first, end] : parts) {
    for (int p = first; p < end; ++p) tokens.push_back({scene.RandomQuery(sequence, p)});
  }
  return tokens;
}

// Compares every row with double arithmetic, and the bits of every way to compute it.
void ExpectRowsOf(AttentionScene& scene, const Tokens& tokens, int single) {
  const std::string name = scene.setting().Describe();
  const int count = static_cast<int>(tokens.size());
  const auto tiled = scene.Run(tokens, {.tiled_from = single});
  for (int t = 0; t < count; ++t) {
    ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], tiled[t]));
  }
  ASSERT_EQ(tiled, scene.Run(tokens, {.tiled_from = 0})) << name;
  ASSERT_NO_FATAL_FAILURE(scene.ExpectFromAllTiles(tokens, {}, tiled)) << name;
  ASSERT_EQ(tiled, scene.Run(tokens, {.tiled_from = count, .extra_context = 700})) << name;
  ASSERT_EQ(tiled, scene.Run(tokens, {.tiled_from = count, .slots = 4})) << name;
  ASSERT_EQ(tiled, scene.Run(tokens, {.tiled_from = count, .slots = 0})) << name;
  for (int t = 0; t < count; t += 7) {
    ASSERT_EQ(tiled[t], scene.Run({tokens[t]}, {.tiled_from = t % 2})[0]) << name << ", row " << t;
  }
}

TEST(CudaBidirectionalAttentionTest, SequencesMatchDoubleArithmetic) {
  uint64_t seed = 1;
  for (const auto type : kAttentionTypes) {
    for (int head_dim : {16, 80, 128, 256}) {
      for (int window : {0, 1, 2, 40, 300, 2000}) {
        const bool mixed = IsMixed(type.cache, type.output);
        if (window != 0 && (head_dim != 80 || mixed) && (head_dim != 128 || window != 300))
          continue;
        if (mixed && head_dim != 80) continue;
        const bool wide = head_dim > 100;
        const AttentionSetting setting{.head_dim = head_dim,
                                       .kv_heads = 2,
                                       .heads = wide ? 4 : 10,
                                       .tile_order = head_dim == 80,
                                       .cache = type.cache,
                                       .output = type.output,
                                       .window = window,
                                       .lengths = {1, 33, 300, 5, 517},
                                       .soft_cap = window == 300 ? 1.0f : 0.0f,
                                       .sinks = head_dim != 80,
                                       .causal = false};
        AttentionScene scene(setting, seed++);
        Tokens tokens = RowsOfSequences(
            scene, {{0, 0, 1}, {2, 255, 257}, {1, 0, 33}, {3, 0, 5}, {4, 0, 3}, {4, 510, 517}});
        tokens.push_back({scene.RandomQuery(-1, 0)});
        ASSERT_NO_FATAL_FAILURE(ExpectRowsOf(scene, tokens, 1));
      }
    }
  }
}

// The rows' positions have nothing to do with the lengths of the sources, which are shorter and
// longer, end at the end of a split and behind it.
TEST(CudaBidirectionalAttentionTest, SourcesMatchDoubleArithmetic) {
  uint64_t seed = 100;
  for (const auto type : kAttentionTypes) {
    for (int head_dim : {24, 128}) {
      const AttentionSetting setting{.head_dim = head_dim,
                                     .kv_heads = head_dim == 24 ? 1 : 2,
                                     .heads = 4,
                                     .cache = type.cache,
                                     .output = type.output,
                                     .lengths = {1, 700, 256, 257, 30, 512},
                                     .soft_cap = head_dim == 128 ? 2.0f : 0.0f,
                                     .sinks = head_dim == 24,
                                     .causal = false};
      AttentionScene scene(setting, seed++);
      Tokens tokens;
      for (int s = 0; s < 6; ++s) {
        tokens.push_back({scene.RandomQuery(s, s % 2 == 0 ? 5000 + s : s)});
      }
      tokens.insert(tokens.begin() + 2, {scene.RandomQuery(-1, 1 << 20)});
      for (int p = 600; p < 612; ++p) tokens.push_back({scene.RandomQuery(4, p)});
      ASSERT_NO_FATAL_FAILURE(ExpectRowsOf(scene, tokens, 7));
    }
  }
}

// Biases of distances of both signs: one for all distances, those of some positions, and of more
// than a sequence has.
TEST(CudaBidirectionalAttentionTest, BiasesMatchDoubleArithmetic) {
  uint64_t seed = 200;
  for (const auto type : kAttentionTypes) {
    for (int distances : {1, 5, 37, 270, 900}) {
      if (IsMixed(type.cache, type.output) && distances != 37) continue;
      const AttentionSetting setting{.head_dim = distances == 270 ? 128 : 16,
                                     .kv_heads = 2,
                                     .heads = 4,
                                     .cache = type.cache,
                                     .output = type.output,
                                     .window = distances == 270 ? 290 : 0,
                                     .lengths = {1, 18, 517},
                                     .sinks = distances == 37,
                                     .bias_distances = distances,
                                     .causal = false};
      AttentionScene scene(setting, seed++);
      const Tokens tokens =
          RowsOfSequences(scene, {{0, 0, 1}, {1, 0, 18}, {2, 0, 2}, {2, 250, 258}, {2, 514, 517}});
      ASSERT_NO_FATAL_FAILURE(ExpectRowsOf(scene, tokens, 1));
    }
  }
}

// Rows of a routing plan: tokens with any number of rows, with more rows than heads per block, and
// without rows.
TEST(CudaBidirectionalAttentionTest, RowsOfPlansMatchDoubleArithmetic) {
  uint64_t seed = 300;
  for (const auto type : kAttentionTypes) {
    for (int kv_heads : {1, 2}) {
      const AttentionSetting setting{.head_dim = 12,
                                     .kv_heads = kv_heads,
                                     .heads = kv_heads * 3,
                                     .cache = type.cache,
                                     .output = type.output,
                                     .window = kv_heads == 2 ? 70 : 0,
                                     .lengths = {20, 600, 33},
                                     .causal = false};
      AttentionScene scene(setting, seed++);
      Tokens tokens;
      const auto add = [&](int sequence, int position, int rows) {
        tokens.emplace_back();
        for (int i = 0; i < rows; ++i)
          tokens.back().push_back(scene.RandomQuery(sequence, position));
      };
      add(0, 9, 16);
      add(1, 300, 3);
      for (int p = 0; p < 32; p += p < 10 ? 1 : 3) add(2, p, p == 4 ? 0 : 1 + p % 5);
      add(2, 32, 22);
      for (int i = 0; i < 3; ++i) tokens.emplace_back();
      const int count = static_cast<int>(tokens.size());
      const auto results = scene.Run(tokens, {.tiled_from = 2, .max_per_token = 22});
      int n = 0;
      for (const auto& token : tokens) {
        for (const AttentionQuery& q : token) {
          ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(q, results[n++]));
        }
      }
      for (int tiled_from : {0, 8, count}) {
        ASSERT_EQ(results, scene.Run(tokens, {.tiled_from = tiled_from, .max_per_token = 22}));
      }
      ASSERT_NO_FATAL_FAILURE(scene.ExpectFromAllTiles(tokens, {.max_per_token = 22}, results));
    }
  }
}

}  // namespace
}  // namespace moeserve::cuda
