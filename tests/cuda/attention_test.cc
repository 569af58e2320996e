// Attention on the device compared with double arithmetic, and its guarantees about bits: a row
// must have the same bits alone and with other rows, split or tiled, and for any number of split
// slots.

#include "kernels/cuda/attention/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/kv_cache.h"
#include "kernels/cuda/attention/norm_rope_append.h"
#include "tests/cuda/device_array.h"
#include "tests/reference/oracle.h"
#include "tests/support/compare.h"
#include "tests/support/distance_biases.h"
#include "tests/support/random.h"

namespace moeserve::cuda {
namespace {

using testing::Matrix;
using testing::Random;

void Check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

float Rounded(float f) { return F32FromBf16(Bf16FromF32(f)); }

// The attention layer of a model, and the context lengths of some sequences.
struct AttentionSetting {
  int head_dim = 16;
  int kv_heads = 1;
  int heads = 1;
  bool tile_order = false;
  DType cache = DType::kF32;
  DType output = DType::kF32;
  int window = 0;
  std::vector<int> lengths = {1};
  float soft_cap = 0.0f;
  bool sinks = false;
  int bias_distances = 0;  // 0: no biases

  // Returns the sink of a head, if there are sinks: below, among and above usual scores.
  std::optional<double> Sink(int head) const {
    return sinks ? std::optional<double>(2.5 * (head % 4) - 3.0) : std::nullopt;
  }

  std::string Describe() const {
    return "head_dim " + std::to_string(head_dim) + ", heads " + std::to_string(heads) + "/" +
           std::to_string(kv_heads) + (tile_order ? " tile" : " interleave") + ", cache " +
           std::string(Name(cache)) + ", output " + std::string(Name(output)) + ", window " +
           std::to_string(window) + ", soft cap " + std::to_string(soft_cap) +
           (sinks ? ", sinks" : "") + ", biases " + std::to_string(bias_distances);
  }
};

// One query row.
struct Query {
  int sequence = 0;  // -1 for padding
  int position = 0;
  std::vector<float> values;
};

// The kernel that computes tiles of tokens.
enum class Tiled { kChosen, kMma, kWgmma };

// Returns the kernel for devices without wgmma, which LaunchAttention() does not choose on others.
Tiled OtherTiled(const AttentionSetting& setting) {
  const bool bf16 = setting.cache == DType::kBF16 && setting.output == DType::kBF16;
  return bf16 ? Tiled::kMma : Tiled::kChosen;
}

class Scene {
 public:
  Scene(const AttentionSetting& setting, uint64_t seed) : s_(setting), random_(seed) {
    const int sequences = static_cast<int>(s_.lengths.size());
    std::vector<int> blocks(sequences);
    int total = 3, widest = 0;
    for (int i = 0; i < sequences; ++i) {
      blocks[i] = (s_.lengths[i] + kPageTokens - 1) / kPageTokens;
      total += blocks[i];
      widest = std::max(widest, blocks[i]);
    }
    std::vector<int32_t> order(total);
    std::iota(order.begin(), order.end(), 0);
    for (int i = total - 1; i > 0; --i) std::swap(order[i], order[random_.Below(i + 1)]);
    // Entries after a sequence's last block are invalid block ids.
    stride_ = widest + 2;
    tables_.assign(static_cast<size_t>(sequences) * stride_, 1 << 29);
    for (int i = 0, next = 0; i < sequences; ++i) {
      for (int b = 0; b < blocks[i]; ++b) tables_[i * stride_ + b] = order[next++];
    }
    auto cache = CudaKvCache::Allocate({{s_.kv_heads, s_.head_dim}}, s_.cache, {total});
    EXPECT_TRUE(cache.ok()) << cache.status();
    cache_.emplace(std::move(cache).value());
    const KvLayerView view = cache_->layer(0);
    bytes_ = static_cast<size_t>(view.block_stride) * total * SizeOf(s_.cache);
    Check(cudaMemset(view.keys, 0xff, bytes_));
    Check(cudaMemset(view.values, 0xff, bytes_));
    Fill(total);
  }

  const AttentionSetting& setting() const { return s_; }
  KvLayerView view() const { return cache_->layer(0); }
  Random& random() { return random_; }

  Query RandomQuery(int sequence, int position) {
    Query q{sequence, position, random_.Normals(int64_t{s_.heads} * s_.head_dim)};
    // Round queries as the kernels do before tensor-core products, so that the expected values
    // match.
    if (s_.cache == DType::kBF16 && s_.output == DType::kBF16) {
      for (float& f : q.values) f = Rounded(f);
    }
    return q;
  }

  struct Options {
    int tiled_from = 0;
    int slots = 64;
    int max_per_token = 0;  // > 0: rows are assignments of a routing plan
    int extra_context = 0;  // added to the context bound that determines launch shapes
    Tiled tiled = Tiled::kChosen;
  };

  // Runs attention for tokens that have one row each or, with MoA, any number of rows. Returns the
  // bits of the rows. tokens[t] contains the token's rows, all with the same sequence and position.
  std::vector<std::vector<uint32_t>> Run(const std::vector<std::vector<Query>>& tokens,
                                         const Options& options) {
    const int count = static_cast<int>(tokens.size());
    const int width = s_.heads * s_.head_dim;
    const bool routed = options.max_per_token > 0;
    std::vector<int32_t> position, sequence, offsets = {0};
    std::vector<int32_t> token_of;
    for (int t = 0; t < count; ++t) {
      // A routed padding token has no assignments, and its position is not read.
      const bool none = tokens[t].empty();
      position.push_back(none ? 77777 : tokens[t][0].position);
      sequence.push_back(none ? -1 : tokens[t][0].sequence);
      for (size_t j = 0; j < tokens[t].size(); ++j) token_of.push_back(t);
      offsets.push_back(static_cast<int32_t>(token_of.size()));
    }
    const int rows = static_cast<int>(token_of.size());
    // Assignments have another order than tokens.
    std::vector<int32_t> assignment(rows), row_of(rows);
    std::iota(assignment.begin(), assignment.end(), 0);
    if (routed) {
      for (int i = rows - 1; i > 0; --i) std::swap(assignment[i], assignment[random_.Below(i + 1)]);
    }
    const int64_t query_stride = width + 4, output_stride = width + 6;
    std::vector<float> query(rows * query_stride, NAN);
    for (int t = 0, n = 0; t < count; ++t) {
      for (const Query& q : tokens[t]) {
        row_of[assignment[n]] = t;
        std::copy(q.values.begin(), q.values.end(), query.begin() + assignment[n] * query_stride);
        ++n;
      }
    }
    const int element = static_cast<int>(SizeOf(s_.output));
    DeviceArray<int32_t> d_position(position), d_sequence(sequence), d_tables(tables_),
        d_offsets(offsets), d_assignment(assignment), d_row_of(row_of);
    DeviceArray<float> d_query(query);
    DeviceArray<uint8_t> d_output(std::vector<uint8_t>((rows + 1) * output_stride * element, 0xff));
    const int max_per_token = std::max(1, options.max_per_token);
    DeviceArray<uint8_t> work_memory(std::vector<uint8_t>(
        static_cast<size_t>(AttentionWorkBytes(
            count, options.slots, PartialFloats(s_.heads * max_per_token, s_.head_dim))),
        0xff));
    AttentionLaunch a;
    a.cache = view();
    a.step = {count, d_position.data(), d_sequence.data(), d_tables.data(), stride_, 1};
    for (int t = 0; t < options.tiled_from; ++t) {
      if (sequence[t] >= 0) a.step.max_context = std::max(a.step.max_context, position[t] + 1);
    }
    a.step.max_context += options.extra_context;
    if (routed) a.rows = {d_offsets.data(), d_assignment.data(), d_row_of.data(), max_per_token};
    a.query = d_query.data();
    a.query_stride = query_stride;
    a.output = d_output.data();
    a.output_stride = output_stride;
    a.output_dtype = s_.output;
    a.heads = s_.heads;
    a.tile_order = s_.tile_order;
    a.scale = scale();
    a.soft_cap = s_.soft_cap;
    std::vector<float> sinks;
    for (int h = 0; h < s_.heads; ++h) sinks.push_back(static_cast<float>(s_.Sink(h).value_or(0)));
    DeviceArray<float> d_sinks(sinks);
    if (s_.sinks) a.sinks = d_sinks.data();
    const DeviceArray<float> d_biases(testing::DistanceBiases(s_.heads, s_.bias_distances));
    if (s_.bias_distances > 0) {
      a.bias = d_biases.data();
      a.bias_distances = s_.bias_distances;
    }
    a.seen = {true, s_.window};
    a.tiled_from = options.tiled_from;
    a.work = LayOutAttentionWork(work_memory.data(), count, options.slots);
    LaunchAttentionWork(a.step, options.tiled_from, a.seen, SplitTokens(s_.heads / s_.kv_heads),
                        a.work, nullptr);
    switch (options.tiled) {
      case Tiled::kChosen:
        LaunchAttention(a, nullptr);
        break;
      case Tiled::kMma:
        LaunchTiledMma(a, nullptr);
        break;
      case Tiled::kWgmma:
        LaunchTiledWgmma(a, nullptr);
        break;
    }
    const std::vector<uint8_t> output = d_output.Read();
    std::vector<std::vector<uint32_t>> results(rows);
    const auto at = [&](int64_t i) {
      uint32_t bits = 0;
      std::memcpy(&bits, &output[i * element], element);
      return bits;
    };
    const uint32_t poison = element == 4 ? 0xffffffffu : 0xffffu;
    for (int n = 0; n <= rows; ++n) {
      const int64_t row = (n < rows ? assignment[n] : rows) * output_stride;
      for (int i = 0; i < output_stride; ++i) {
        if (n < rows && i < width) {
          results[n].push_back(at(row + i));
        } else if (at(row + i) != poison) {
          ADD_FAILURE() << "wrote beside row " << n << ", column " << i << ": " << s_.Describe();
          return results;
        }
      }
    }
    return results;
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(s_.head_dim)); }

  void ExpectNear(const Query& q, const std::vector<uint32_t>& bits) {
    std::vector<double> actual;
    for (uint32_t b : bits) {
      actual.push_back(s_.output == DType::kF32 ? F32FromBits(b)
                                                : F32FromBf16(static_cast<Bf16>(b)));
    }
    if (q.sequence < 0) {
      for (double v : actual) ASSERT_EQ(v, 0.0) << "padding row";
      return;
    }
    const double tolerance = s_.output == DType::kF32  ? 4e-6
                             : s_.cache == DType::kF32 ? 4e-3
                                                       : 8e-3;
    const int first = s_.window > 0 ? std::max(0, q.position - s_.window + 1) : 0;
    for (int h = 0; h < s_.heads; ++h) {
      const int kv = s_.tile_order ? h % s_.kv_heads : h / (s_.heads / s_.kv_heads);
      const Matrix& k = keys_[q.sequence * s_.kv_heads + kv];
      const Matrix& v = values_[q.sequence * s_.kv_heads + kv];
      const auto from = q.values.begin() + h * s_.head_dim;
      ASSERT_TRUE(testing::RowNear(
          {actual.begin() + h * s_.head_dim, actual.begin() + (h + 1) * s_.head_dim},
          testing::OracleAttention(
              {from, from + s_.head_dim}, {k.begin() + first, k.begin() + q.position + 1},
              {v.begin() + first, v.begin() + q.position + 1}, scale(), s_.soft_cap, s_.Sink(h),
              testing::BiasesOfKeys(s_.heads, s_.bias_distances, h, first, q.position)),
          tolerance))
          << s_.Describe() << ", position " << q.position << ", head " << h;
    }
  }

 private:
  // Appends every position of every sequence in one step, with padding rows in between.
  void Fill(int total) {
    const int width = s_.kv_heads * s_.head_dim;
    std::vector<int32_t> position, sequence;
    std::vector<float> k, v;
    const int64_t stride = width + 3;
    keys_.resize(s_.lengths.size() * s_.kv_heads);
    values_.resize(keys_.size());
    for (int i = 0; i < static_cast<int>(s_.lengths.size()); ++i) {
      for (int p = 0; p < s_.lengths[i]; ++p) {
        position.push_back(p);
        sequence.push_back(i);
        for (auto [data, oracle] : {std::pair{&k, &keys_}, std::pair{&v, &values_}}) {
          const std::vector<float> row = random_.Normals(stride);
          data->insert(data->end(), row.begin(), row.end());
          for (int h = 0; h < s_.kv_heads; ++h) {
            std::vector<double> head;
            for (int d = 0; d < s_.head_dim; ++d) {
              const float f = row[h * s_.head_dim + d];
              head.push_back(s_.cache == DType::kBF16 ? Rounded(f) : f);
            }
            (*oracle)[i * s_.kv_heads + h].push_back(head);
          }
        }
      }
      position.push_back(5);
      sequence.push_back(-1);
      k.resize(k.size() + stride, NAN);
      v.resize(v.size() + stride, NAN);
    }
    DeviceArray<int32_t> d_position(position), d_sequence(sequence), d_tables(tables_);
    DeviceArray<float> d_k(k), d_v(v);
    NormRopeAppendLaunch a;
    a.cache = view();
    a.step = {static_cast<int>(position.size()),
              d_position.data(),
              d_sequence.data(),
              d_tables.data(),
              stride_,
              0};
    a.keys = d_k.data();
    a.values = d_v.data();
    a.key_stride = a.value_stride = stride;
    LaunchNormRopeAppend(a, nullptr);
    Check(cudaDeviceSynchronize());
    ExpectCacheHolds(total);
  }

  void ExpectCacheHolds(int total) {
    const KvLayerView view = this->view();
    std::vector<uint8_t> written(static_cast<size_t>(total) * kPageTokens, 0);
    const size_t element = SizeOf(s_.cache);
    for (const auto& [memory, expected] :
         {std::pair{view.keys, &keys_}, std::pair{view.values, &values_}}) {
      std::vector<uint8_t> bytes(bytes_);
      Check(cudaMemcpy(bytes.data(), memory, bytes_, cudaMemcpyDeviceToHost));
      std::vector<uint8_t> image(bytes_, 0xff);
      for (size_t i = 0; i < s_.lengths.size(); ++i) {
        for (int p = 0; p < s_.lengths[i]; ++p) {
          const int64_t block = tables_[i * stride_ + p / kPageTokens];
          for (int h = 0; h < s_.kv_heads; ++h) {
            const int64_t at = block * view.block_stride + h * view.head_stride +
                               p % kPageTokens * view.padded_dim;
            std::memset(&image[at * element], 0, view.padded_dim * element);
            for (int d = 0; d < s_.head_dim; ++d) {
              const float f =
                  static_cast<float>((*expected)[i * s_.kv_heads + h][p][static_cast<size_t>(d)]);
              const Bf16 b = Bf16FromF32(f);
              std::memcpy(&image[(at + d) * element],
                          element == 4 ? static_cast<const void*>(&f) : &b, element);
            }
          }
        }
      }
      ASSERT_TRUE(bytes == image) << "cache contents, " << s_.Describe();
    }
  }

  AttentionSetting s_;
  Random random_;
  int stride_ = 0;
  size_t bytes_ = 0;
  std::vector<int32_t> tables_;
  std::optional<CudaKvCache> cache_;
  std::vector<Matrix> keys_, values_;  // [sequence * kv_heads + kv head]
};

constexpr struct {
  DType cache, output;
} kAttentionTypes[] = {{DType::kF32, DType::kF32},
                       {DType::kBF16, DType::kF32},
                       {DType::kF32, DType::kBF16},
                       {DType::kBF16, DType::kBF16}};

// Computes the last token of every sequence alone: split, not split, and in tiles.
TEST(CudaAttentionTest, SingleTokensMatchDoubleArithmetic) {
  uint64_t seed = 1;
  for (const auto type : kAttentionTypes) {
    for (int head_dim : {4, 16, 24, 64, 80, 128, 256}) {
      for (int window : {0, 1, 5, 16, 300}) {
        if (window > 0 && head_dim != 24 && (head_dim != 128 || window < 300)) continue;
        // Mixed types use the f32 kernels with another load or store.
        if (type.cache != type.output && head_dim != 24 && head_dim != 128) continue;
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
        Scene scene(setting, seed++);
        std::vector<std::vector<Query>> tokens;
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
        if (type.cache != type.output && (head_dim != 80 || window != 40)) continue;
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
        Scene scene(setting, seed++);
        std::vector<std::vector<Query>> tokens;
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
        ASSERT_EQ(tiled, scene.Run(tokens, {.tiled = OtherTiled(setting)})) << setting.Describe();
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
                                     .cache = DType::kBF16,
                                     .output = DType::kBF16,
                                     .window = window,
                                     .lengths = {70, 330},
                                     .soft_cap = head_dim == 80 ? 1.0f : 0.0f,
                                     .sinks = head_dim == 64};
      Scene scene(setting, seed++);
      std::vector<std::vector<Query>> tokens;
      for (int p = 0; p < 70; ++p) tokens.push_back({scene.RandomQuery(0, p)});
      for (int p = 180; p < 330; ++p) tokens.push_back({scene.RandomQuery(1, p)});
      tokens.push_back({scene.RandomQuery(-1, 0)});
      const int count = static_cast<int>(tokens.size());
      const auto expected = scene.Run(tokens, {.tiled_from = count});
      for (const int t : {0, 69, 70, count - 2}) {
        ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(tokens[t][0], expected[t]));
      }
      ASSERT_EQ(expected, scene.Run(tokens, {.tiled = Tiled::kMma})) << setting.Describe();
      if (!TiledWgmmaFits()) continue;
      ASSERT_EQ(expected, scene.Run(tokens, {.tiled = Tiled::kWgmma})) << setting.Describe();
    }
  }
}

// Biases of distances: one for all distances, those of some positions, and of more than a text has.
TEST(CudaAttentionTest, BiasesOfDistancesMatchDoubleArithmetic) {
  uint64_t seed = 300;
  for (const auto type : kAttentionTypes) {
    for (int head_dim : {16, 80, 128, 256}) {
      for (int distances : {1, 37, 270, 900}) {
        if (type.cache != type.output && (head_dim != 80 || distances != 37)) continue;
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
        Scene scene(setting, seed++);
        std::vector<std::vector<Query>> tokens;
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
        ASSERT_EQ(tiled, scene.Run(tokens, {.tiled = OtherTiled(setting)})) << setting.Describe();
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
        Scene scene(setting, seed++);
        std::vector<std::vector<Query>> tokens;
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
          for (const Query& q : token) {
            ASSERT_NO_FATAL_FAILURE(scene.ExpectNear(q, results[n++]));
          }
        }
        for (int tiled_from : {0, 8, count}) {
          ASSERT_EQ(results, scene.Run(tokens, {.tiled_from = tiled_from, .max_per_token = 22}));
        }
        ASSERT_EQ(results, scene.Run(tokens, {.max_per_token = 22, .tiled = OtherTiled(setting)}));
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

}  // namespace
}  // namespace moeserve::cuda
