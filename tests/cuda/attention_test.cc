// Attention on the device compared with double arithmetic, and its guarantees about bits: a row
// must have the same bits alone and with other rows, split or tiled, and for any number of split
// slots.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/cuda/attention_scene.h"
#include "tests/cuda/emulator_test_support.h"

namespace moeserve::cuda {
namespace {

// Computes the last token of every sequence alone: split, not split, and in tiles.
TEST(CudaAttentionTest, SingleTokensMatchDoubleArithmetic) {
  uint64_t seed = 1;
  for (const auto type : kAttentionTypes) {
    for (int head_dim : {4, 16, 24, 64, 80, 128, 192, 256}) {
      for (int window : {0, 1, 5, 16, 300}) {
        if (window > 0 && head_dim != 24 && (head_dim != 128 || window < 300)) continue;
        // Mixed types use the f32 kernels with another load or store.
        if (IsMixed(type.cache, type.output) && head_dim != 24 && head_dim != 128) continue;
        AttentionSetting setting{.head_dim = head_dim,
                                 .kv_heads = 2,
                                 .heads = 6,
                                 .tile_order = head_dim % 3 == 0,
                                 .cache = type.cache,
                                 .output = type.output,
                                 .window = window,
                                 .lengths = {1, 15, 16, 17, 255, 256, 257, 513}};
        if (head_dim > 64) setting.heads = 4;
        setting.soft_cap = head_dim == 16 || head_dim == 128 ? 2.0f : 0.0f;
        setting.sinks = head_dim >= 80 || window == 16;
        if (head_dim == 4 || head_dim == 80) setting.lengths = {513, 2, 64, 65};
        AttentionScene scene(setting, seed++);
        std::vector<std::vector<AttentionQuery>> tokens;
        for (int i = 0; i < static_cast<int>(setting.lengths.size()); ++i) {
          tokens.push_back({scene.RandomQuery(i, setting.lengths[i] - 1)});
        }
        tokens.insert(tokens.begin() + 2, {scene.RandomQuery(-1, 1 << 20)});
        const int count = static_cast<int>(tokens.size());
        const auto split = scene.Run(tokens, {.tiled_from = count, .extra_context = 700});
        for (int t = 0; t < count; ++t) {
          ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], split[t]));
        }
        ASSERT_EQ(split, scene.Run(tokens, {.tiled_from = count, .slots = 0}));
        ASSERT_EQ(split, scene.Run(tokens, {.tiled_from = count, .slots = 4}));
        ASSERT_EQ(split, scene.Run(tokens, {.tiled_from = 0})) << setting.Describe();
      }
    }
  }
}

// Chunks of prompts together with decoding tokens and padding, for every boundary between
// single-token kernels and tiles.
TEST(CudaAttentionTest, ChunksMatchDoubleArithmeticAndSingleTokens) {
  uint64_t seed = 100;
  for (const auto type : kAttentionTypes) {
    for (int head_dim : {16, 80, 128, 256}) {
      for (int window : {0, 5, 40, 300}) {
        if (window > 0 && head_dim != 80 && (window != 300 || head_dim == 16)) continue;
        const bool wide = head_dim > 100;
        if (IsMixed(type.cache, type.output) && (head_dim != 80 || window != 40)) continue;
        AttentionSetting setting{.head_dim = head_dim,
                                 .kv_heads = 2,
                                 .heads = wide ? 4 : 10,
                                 .tile_order = head_dim == 80,
                                 .cache = type.cache,
                                 .output = type.output,
                                 .window = window,
                                 .lengths = {40, 18, 300, 517},
                                 .soft_cap = window == 300 ? 1.0f : 0.0f,
                                 .sinks = head_dim != 80};
        AttentionScene scene(setting, seed++);
        std::vector<std::vector<AttentionQuery>> tokens;
        tokens.push_back({scene.RandomQuery(0, 30)});
        tokens.push_back({scene.RandomQuery(2, 280)});
        for (int p = 0; p < 18; ++p) tokens.push_back({scene.RandomQuery(1, p)});
        for (int p = 508; p < 517; ++p) tokens.push_back({scene.RandomQuery(3, p)});
        for (int i = 0; i < 3; ++i) tokens.push_back({scene.RandomQuery(-1, 0)});
        const int count = static_cast<int>(tokens.size());
        const auto tiled = scene.Run(tokens, {.tiled_from = 2});
        for (int t = 0; t < count; t += t % 20 < 2 ? 1 : 4) {
          ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], tiled[t]));
        }
        ASSERT_EQ(tiled, scene.Run(tokens, {.tiled_from = 0})) << setting.Describe();
        ASSERT_NO_FATAL_FAILURE(scene.ExpectFromAllTiles(tokens, {}, tiled));
        ASSERT_EQ(tiled, scene.Run(tokens, {.tiled_from = 9})) << setting.Describe();
        ASSERT_EQ(tiled, scene.Run(tokens, {.tiled_from = count})) << setting.Describe();
        for (int t : {1, 19, 22}) {
          ASSERT_EQ(tiled[t], scene.Run({tokens[t]}, {.tiled_from = 1})[0]);
          ASSERT_EQ(tiled[t], scene.Run({tokens[t]}, {.tiled_from = 0})[0]);
        }
      }
    }
  }
}

// All kernels for tiles compute the bits of the kernel for single tokens, also for prompts that
// fill several tiles of 64 rows.
TEST(CudaAttentionTest, TiledKernelsHaveTheSameBits) {
  uint64_t seed = 150;
  for (const int head_dim : {16, 64, 80, 128, 256}) {
    for (const int window : {0, 90}) {
      if (window > 0 && head_dim != 64 && head_dim != 128) continue;
      const AttentionSetting setting{.head_dim = head_dim,
                                     .kv_heads = 2,
                                     .heads = head_dim == 128 ? 2 : 6,
                                     .cache = KvCacheType::kBF16,
                                     .output = DType::kBF16,
                                     .window = window,
                                     .lengths = {70, 330},
                                     .soft_cap = head_dim == 80 ? 1.0f : 0.0f,
                                     .sinks = head_dim == 64};
      AttentionScene scene(setting, seed++);
      std::vector<std::vector<AttentionQuery>> tokens;
      for (int p = 0; p < 70; ++p) tokens.push_back({scene.RandomQuery(0, p)});
      for (int p = 180; p < 330; ++p) tokens.push_back({scene.RandomQuery(1, p)});
      tokens.push_back({scene.RandomQuery(-1, 0)});
      const int count = static_cast<int>(tokens.size());
      const auto expected = scene.Run(tokens, {.tiled_from = count});
      for (const int t : {0, 69, 70, count - 2}) {
        ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], expected[t]));
      }
      ASSERT_NO_FATAL_FAILURE(scene.ExpectFromAllTiles(tokens, {}, expected));
    }
  }
}

// Biases of distances: one for all distances, those of some positions, and of more than a text has.
TEST(CudaAttentionTest, BiasesOfDistancesMatchDoubleArithmetic) {
  uint64_t seed = 300;
  for (const auto type : kAttentionTypes) {
    for (int head_dim : {16, 80, 128, 256}) {
      for (int distances : {1, 37, 270, 900}) {
        if (IsMixed(type.cache, type.output) && (head_dim != 80 || distances != 37)) continue;
        if (head_dim > 100 && distances != 270) continue;
        const AttentionSetting setting{.head_dim = head_dim,
                                       .kv_heads = 2,
                                       .heads = head_dim > 100 ? 4 : 10,
                                       .tile_order = head_dim == 80,
                                       .cache = type.cache,
                                       .output = type.output,
                                       .window = distances == 270 ? 300 : 0,
                                       .lengths = {40, 18, 300, 517},
                                       .soft_cap = 0.0f,
                                       .sinks = head_dim == 16,
                                       .bias_distances = distances};
        AttentionScene scene(setting, seed++);
        std::vector<std::vector<AttentionQuery>> tokens;
        tokens.push_back({scene.RandomQuery(0, 30)});
        tokens.push_back({scene.RandomQuery(2, 280)});
        for (int p = 0; p < 18; p += 3) tokens.push_back({scene.RandomQuery(1, p)});
        for (int p = 512; p < 517; ++p) tokens.push_back({scene.RandomQuery(3, p)});
        tokens.push_back({scene.RandomQuery(-1, 0)});
        const int count = static_cast<int>(tokens.size());
        const auto tiled = scene.Run(tokens, {.tiled_from = 2});
        for (int t = 0; t < count; ++t) {
          ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], tiled[t]));
        }
        ASSERT_EQ(tiled, scene.Run(tokens, {.tiled_from = 0})) << setting.Describe();
        ASSERT_NO_FATAL_FAILURE(scene.ExpectFromAllTiles(tokens, {}, tiled));
        ASSERT_EQ(tiled, scene.Run(tokens, {.tiled_from = count})) << setting.Describe();
        ASSERT_EQ(tiled[3], scene.Run({tokens[3]}, {.tiled_from = 1})[0]);
      }
    }
  }
}

// Rows of a routing plan: tokens with any number of rows, with more rows than heads per block, and
// without rows.
TEST(CudaAttentionTest, RowsOfPlansMatchDoubleArithmetic) {
  uint64_t seed = 200;
  for (const auto type : kAttentionTypes) {
    for (int head_dim : {12, 128, 256}) {
      for (int kv_heads : {1, 2}) {
        AttentionSetting setting{.head_dim = head_dim,
                                 .kv_heads = kv_heads,
                                 .heads = kv_heads * (head_dim == 12 ? 3 : 1),
                                 .tile_order = kv_heads == 2,
                                 .cache = type.cache,
                                 .output = type.output,
                                 .window = kv_heads == 2 ? 70 : 0,
                                 .lengths = {20, 600, 33}};
        AttentionScene scene(setting, seed++);
        std::vector<std::vector<AttentionQuery>> tokens;
        const auto add = [&](int sequence, int position, int rows) {
          tokens.emplace_back();
          for (int i = 0; i < rows; ++i) {
            tokens.back().push_back(scene.RandomQuery(sequence, position));
          }
        };
        add(0, 19, 16);
        add(1, 599, 3);
        for (int p = 20; p < 32; ++p) add(2, p, p == 24 ? 0 : 1 + p % 5);
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
        // Groups that are wide by the model's shape have longer splits in all kernels.
        const auto wide =
            scene.Run(tokens, {.tiled_from = count, .max_per_token = 22, .by_shape = 16});
        ASSERT_EQ(wide, scene.Run(tokens, {.max_per_token = 22, .by_shape = 16}));
        ASSERT_NO_FATAL_FAILURE(
            scene.ExpectFromAllTiles(tokens, {.max_per_token = 22, .by_shape = 16}, wide));
        for (const int row : {0, 16, 18}) {
          ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[row < 16 ? 0 : 1][row % 16], wide[row]));
        }
        ASSERT_NO_FATAL_FAILURE(scene.ExpectFromAllTiles(tokens, {.max_per_token = 22}, results));
        for (int t : {0, 1}) {
          // The bits do not depend either on how many rows other tokens of the step have.
          const int most = static_cast<int>(tokens[t].size());
          const auto alone = scene.Run({tokens[t]}, {.tiled_from = 1, .max_per_token = most});
          ASSERT_TRUE(std::equal(alone.begin(), alone.end(), results.begin() + (t == 0 ? 0 : 16)));
        }
      }
    }
  }
}

// All bf16 kernels compute the same bits in every order of threads, for every number of heads that
// share a key head, and for sequences whose rows begin at any position.
TEST(CudaAttentionTest, KernelsAgreeInEveryOrder) {
  InEveryOrder([] {
    uint64_t seed = 400;
    for (const int head_dim : {64, 128, 256}) {
      for (int group = 1; group <= 8; ++group) {
        if (head_dim == 256 && group % 4 != 1) continue;
        const AttentionSetting setting{.head_dim = head_dim,
                                       .kv_heads = 1,
                                       .heads = group,
                                       .cache = KvCacheType::kBF16,
                                       .output = DType::kBF16,
                                       .window = group % 4 == 2 ? 75 : 0,
                                       .lengths = {21, 300 + group},
                                       .soft_cap = group == 3 ? 1.5f : 0.0f,
                                       .sinks = group % 2 == 0};
        AttentionScene scene(setting, seed++);
        std::vector<std::vector<AttentionQuery>> tokens;
        for (int p = 13; p < 21; ++p) tokens.push_back({scene.RandomQuery(0, p)});
        for (int p = 277 + group; p < 300 + group; ++p) {
          tokens.push_back({scene.RandomQuery(1, p)});
        }
        const int count = static_cast<int>(tokens.size());
        const auto expected = scene.Run(tokens, {.tiled_from = count});
        for (const int t : {0, count - 1}) {
          ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], expected[t]));
        }
        ASSERT_EQ(expected, scene.Run(tokens, {.tiled_from = count, .slots = 0}));
        ASSERT_NO_FATAL_FAILURE(scene.ExpectFromAllTiles(tokens, {}, expected));
      }
    }
  });
}

// Kernels do not read keys and values that no row sees: those before the window or chunk, those
// behind the last position, and those of other blocks. Whole tiles, and the first and last rows of
// blocks, remain unread.
TEST(CudaAttentionTest, KernelsReadOnlyKeysThatAreSeen) {
  InEveryOrder([] {
    uint64_t seed = 600;
    for (const int head_dim : {64, 128}) {
      for (const int end : {1, 63, 64, 65, 255, 256, 257, 300}) {
        for (const int window : {0, 70, -70}) {
          if (window != 0 && end < 255) continue;
          const AttentionSetting setting{.head_dim = head_dim,
                                         .kv_heads = 2,
                                         .heads = 4,
                                         .cache = KvCacheType::kBF16,
                                         .output = DType::kBF16,
                                         .window = std::abs(window),
                                         .chunks = window < 0,
                                         .lengths = {end + 50, 17}};
          AttentionScene scene(setting, seed++);
          std::vector<std::vector<AttentionQuery>> tokens;
          const int begin = std::max(0, end - 40);
          for (int p = begin; p < end; ++p) tokens.push_back({scene.RandomQuery(0, p)});
          for (int p = 10; p < 17; ++p) tokens.push_back({scene.RandomQuery(1, p)});
          scene.Poison(0, 0, scene.FirstSeen(begin));
          scene.Poison(0, end, end + 50);
          const int count = static_cast<int>(tokens.size());
          const auto expected = scene.Run(tokens, {.tiled_from = count});
          for (const int t : {0, count - 8, count - 1}) {
            ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], expected[t]));
          }
          ASSERT_NO_FATAL_FAILURE(scene.ExpectFromAllTiles(tokens, {}, expected));
        }
      }
    }
  });
}

// A value that is not finite reaches the rows that see it, and no others: neither the rows before
// it in the same tile, nor those whose window is behind it.
TEST(CudaAttentionTest, RowsDoNotDependOnValuesThatTheyDoNotSee) {
  uint64_t seed = 700;
  for (const auto type : kAttentionTypes) {
    for (const int head_dim : {64, 128, 256, 576}) {
      for (const int window : {0, 13}) {
        const bool latent = head_dim == 576;
        const bool bf16 = type.cache == KvCacheType::kBF16 && type.output == DType::kBF16;
        if ((latent && !bf16) || (IsMixed(type.cache, type.output) && head_dim != 64)) continue;
        const AttentionSetting setting{.head_dim = head_dim,
                                       .heads = latent ? 3 : 2,
                                       .cache = type.cache,
                                       .output = type.output,
                                       .window = window,
                                       .lengths = {60, 30},
                                       .latent_dim = latent ? 512 : 0};
        AttentionScene scene(setting, seed++);
        std::vector<std::vector<AttentionQuery>> tokens;
        for (int p = 10; p < 60; ++p) tokens.push_back({scene.RandomQuery(0, p)});
        for (int p = 0; p < 30; ++p) tokens.push_back({scene.RandomQuery(1, p)});
        const auto before = scene.Run(tokens, {});
        scene.Poison(0, 41, 42);
        for (const AttentionTiles tiles : kAttentionTiles) {
          const auto after = scene.Run(tokens, {.tiles = tiles});
          for (int t = 0; t < static_cast<int>(tokens.size()); ++t) {
            const AttentionQuery& q = tokens[static_cast<size_t>(t)][0];
            const bool sees =
                q.sequence == 0 && q.position >= 41 && scene.FirstSeen(q.position) <= 41;
            ASSERT_EQ(before[t] == after[t], !sees)
                << setting.Describe() << ", kernel " << static_cast<int>(tiles) << ", position "
                << q.position << " of sequence " << q.sequence;
          }
        }
      }
    }
  }
}

// Scores that are not a positive multiple of the products have maxima of their own.
TEST(CudaAttentionTest, ScalesOfEverySignMatchDoubleArithmetic) {
  uint64_t seed = 500;
  for (const float scale : {-0.2f, 1e-30f, 3.0f}) {
    const AttentionSetting setting{.head_dim = 64,
                                   .kv_heads = 1,
                                   .heads = 2,
                                   .cache = KvCacheType::kBF16,
                                   .output = DType::kBF16,
                                   .lengths = {290},
                                   .scale = scale};
    AttentionScene scene(setting, seed++);
    std::vector<std::vector<AttentionQuery>> tokens;
    for (int p = 250; p < 290; ++p) tokens.push_back({scene.RandomQuery(0, p)});
    const int count = static_cast<int>(tokens.size());
    const auto expected = scene.Run(tokens, {.tiled_from = count});
    for (int t = 0; t < count; t += 13) {
      ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], expected[t]));
    }
    ASSERT_NO_FATAL_FAILURE(scene.ExpectFromAllTiles(tokens, {}, expected));
  }
}

}  // namespace
}  // namespace moeserve::cuda
