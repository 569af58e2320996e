// Attention of the kernels in kernels/cuda/attention over made-up sequences, and its results in
// double arithmetic.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/int8_cache.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/attention/attention_kernels.h"
#include "kernels/cuda/attention/attention_latent_mma.h"
#include "kernels/cuda/cache/kv_cache.h"
#include "kernels/cuda/positions/norm_rope_append.h"
#include "tests/cuda/device_array.h"
#include "tests/reference/oracle.h"
#include "tests/support/compare.h"
#include "tests/support/distance_biases.h"
#include "tests/support/random.h"

namespace moeserve::cuda {

// The attention layer of a model, and the context lengths of some sequences.
struct AttentionSetting {
  int head_dim = 16;
  int kv_heads = 1;
  int heads = 1;
  bool tile_order = false;
  KvCacheType cache = KvCacheType::kF32;
  DType output = DType::kF32;
  int window = 0;
  bool chunks = false;  // SeenKeys::chunks
  std::vector<int> lengths = {1};
  float soft_cap = 0.0f;
  bool sinks = false;
  int bias_distances = 0;  // 0: no biases
  float scale = 0.0f;      // 0: 1 / sqrt(head_dim)
  bool causal = true;      // else rows see all positions of their sequence that the window allows
  int latent_dim = 0;      // KvLayerShape::latent_dim

  int value_dim() const { return latent_dim > 0 ? latent_dim : head_dim; }

  // Returns the sink of a head, if there are sinks: below, among and above usual scores.
  std::optional<double> Sink(int head) const {
    return sinks ? std::optional<double>(2.5 * (head % 4) - 3.0) : std::nullopt;
  }

  std::string Describe() const {
    return "head_dim " + std::to_string(head_dim) + ", heads " + std::to_string(heads) + "/" +
           std::to_string(kv_heads) + (tile_order ? " tile" : " interleave") + ", cache " +
           std::string(Name(cache)) + ", output " + std::string(Name(output)) + ", window " +
           std::to_string(window) + (chunks ? " chunks" : "") + ", soft cap " +
           std::to_string(soft_cap) + (sinks ? ", sinks" : "") + ", biases " +
           std::to_string(bias_distances) + (causal ? ", causal" : "") + ", latent " +
           std::to_string(latent_dim);
  }
};

// One query row. If attention is not causal, its position may be behind the end of its sequence.
struct AttentionQuery {
  int sequence = 0;  // -1 for padding
  int position = 0;
  std::vector<float> values;
};

// The kernel for single tokens over latent vectors. Unless it is kChosen, it computes all tokens.
enum class Single { kChosen, kLatentMma, kLatentWgmma };

// The kernels for tiles of tokens, which have the same bits.
inline constexpr AttentionTiles kAttentionTiles[] = {
    AttentionTiles::kMma, AttentionTiles::kWarpgroup, AttentionTiles::kPingPong};

// A cache that contains sequences, on the device, and runs of attention over them.
class AttentionScene {
 public:
  AttentionScene(const AttentionSetting& setting, uint64_t seed) : s_(setting), random_(seed) {
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
    // Entries after a sequence's last block are invalid block ids, except for its length at the
    // end.
    stride_ = widest + 3;
    tables_.assign(static_cast<size_t>(sequences) * stride_, 1 << 29);
    for (int i = 0, next = 0; i < sequences; ++i) {
      for (int b = 0; b < blocks[i]; ++b) tables_[i * stride_ + b] = order[next++];
      tables_[(i + 1) * stride_ - 1] = s_.lengths[i];
    }
    auto cache =
        CudaKvCache::Allocate({{s_.kv_heads, s_.head_dim, s_.latent_dim}}, s_.cache, {total});
    EXPECT_TRUE(cache.ok()) << cache.status();
    cache_.emplace(std::move(cache).value());
    const KvLayerView view = cache_->layer(0);
    bytes_ = static_cast<size_t>(view.block_stride) * total * ElementBytes(s_.cache);
    CheckCall(cudaMemset(view.keys, 0xff, bytes_));
    if (s_.latent_dim == 0) CheckCall(cudaMemset(view.values, 0xff, bytes_));
    Fill(total);
  }

  const AttentionSetting& setting() const { return s_; }
  KvLayerView view() const { return cache_->layer(0); }
  testing::Random& random() { return random_; }

  AttentionQuery RandomQuery(int sequence, int position) {
    AttentionQuery q{sequence, position, random_.Normals(int64_t{s_.heads} * s_.head_dim)};
    // Round queries as the kernels do before tensor-core products, so that the expected values
    // match.
    if (s_.cache != KvCacheType::kF32 && s_.output == DType::kBF16) {
      for (float& f : q.values) f = RoundedToBf16(f);
    }
    return q;
  }

  struct Options {
    int tiled_from = 0;
    int slots = 64;
    int max_per_token = 0;  // > 0: rows are assignments of a routing plan
    int by_shape = 1;       // QueryRows::by_shape
    int extra_context = 0;  // added to the context bound that determines launch shapes
    AttentionTiles tiles = AttentionTiles::kAuto;
    AttentionSplits splits = AttentionSplits::kAuto;  // with clusters, there is no work list
    Single single = Single::kChosen;
  };

  // Runs attention for tokens that have one row each or, with MoA, any number of rows. Returns the
  // bits of the rows. tokens[t] contains the token's rows, all with the same sequence and position.
  std::vector<std::vector<uint32_t>> Run(const std::vector<std::vector<AttentionQuery>>& tokens,
                                         const Options& options) {
    const int count = static_cast<int>(tokens.size());
    const int width = s_.heads * s_.head_dim, out_width = s_.heads * s_.value_dim();
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
    const int64_t query_stride = width + 4, output_stride = out_width + 6;
    std::vector<float> query(rows * query_stride, NAN);
    for (int t = 0, n = 0; t < count; ++t) {
      for (const AttentionQuery& q : tokens[t]) {
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
            count, options.slots, PartialFloats(s_.heads * max_per_token, s_.value_dim()))),
        0xff));
    AttentionLaunch a;
    a.cache = view();
    a.step = {count, d_position.data(), d_sequence.data(), d_tables.data(), stride_, 1};
    if (!s_.causal) a.step.lengths = d_tables.data() + stride_ - 1;
    for (int t = 0; t < options.tiled_from; ++t) {
      if (sequence[t] < 0) continue;
      const int context = s_.causal ? position[t] + 1 : s_.lengths[sequence[t]];
      a.step.max_context = std::max(a.step.max_context, context);
    }
    a.step.max_context += options.extra_context;
    if (routed) a.rows = {d_offsets.data(), d_assignment.data(), d_row_of.data(), max_per_token};
    a.rows.by_shape = options.by_shape;
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
    const DeviceArray<float> d_biases(
        testing::DistanceBiases(s_.heads, s_.bias_distances, s_.causal));
    if (s_.bias_distances > 0) {
      a.bias = d_biases.data();
      a.bias_distances = s_.bias_distances;
    }
    a.seen = {s_.causal, s_.window, s_.chunks};
    a.tiled_from = options.tiled_from;
    a.splits = options.splits;
    if (a.splits == AttentionSplits::kAuto || a.splits == AttentionSplits::kMerged) {
      a.work = LayOutAttentionWork(work_memory.data(), count, options.slots);
      LaunchAttentionWork(a.step, options.tiled_from, a.seen, SplitTokensOf(a), a.work, nullptr);
    }
    a.tiles = options.tiles;
    const int64_t sums = a.tiles == AttentionTiles::kAuto ? 0 : TileSumsBytes(a);
    DeviceArray<uint8_t> d_sums(std::vector<uint8_t>(static_cast<size_t>(sums), 0xff));
    if (sums > 0) a.tile_sums = reinterpret_cast<float*>(d_sums.data());
    Launch(a, options);
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
        if (n < rows && i < out_width) {
          results[n].push_back(at(row + i));
        } else if (at(row + i) != poison) {
          ADD_FAILURE() << "wrote beside row " << n << ", column " << i << ": " << s_.Describe();
          return results;
        }
      }
    }
    return results;
  }

  // Replaces the keys and values of positions [begin, end) of a sequence by NaN; in int8, only
  // their scales are NaN.
  void Poison(int sequence, int begin, int end) {
    const KvLayerView view = this->view();
    const auto element = static_cast<size_t>(ElementBytes(s_.cache));
    const bool int8 = s_.cache == KvCacheType::kInt8;
    for (void* memory : {view.keys, view.values}) {
      if (memory == nullptr) continue;  // latent vectors have no values
      std::vector<uint8_t> bytes(bytes_);
      CheckCall(cudaMemcpy(bytes.data(), memory, bytes_, cudaMemcpyDeviceToHost));
      for (int p = begin; p < end; ++p) {
        const int64_t block = tables_[sequence * stride_ + p / kPageTokens] * view.block_stride;
        for (int i = 0; i < s_.kv_heads * view.padded_dim; ++i) {
          const int64_t head = block + i / view.padded_dim * view.head_stride;
          const int row = p % kPageTokens, column = i % view.padded_dim;
          const int64_t at = head + (int8 ? view.ByteOf(row, column) : view.ElementOf(row, column));
          std::memset(&bytes[at * element], 0xff, element);
          if (int8) std::memset(&bytes[head + row * 4], 0xff, 4);
        }
      }
      CheckCall(cudaMemcpy(memory, bytes.data(), bytes_, cudaMemcpyHostToDevice));
    }
  }

  float scale() const {
    return s_.scale != 0.0f ? s_.scale : 1.0f / std::sqrt(static_cast<float>(s_.head_dim));
  }

  // Returns the first key that a query at this position sees.
  int FirstSeen(int position) const {
    if (s_.window <= 0) return 0;
    return s_.chunks ? position - position % s_.window : std::max(0, position - s_.window + 1);
  }

  // Expects the same results from every kernel for tiles. `options.tiles` is ignored.
  void ExpectFromAllTiles(const std::vector<std::vector<AttentionQuery>>& tokens, Options options,
                          const std::vector<std::vector<uint32_t>>& expected) {
    for (const AttentionTiles tiles : kAttentionTiles) {
      options.tiles = tiles;
      ASSERT_TRUE(expected == Run(tokens, options))
          << "kernel " << static_cast<int>(tiles) << ", " << s_.Describe();
    }
  }

  void ExpectNear(const AttentionQuery& q, const std::vector<uint32_t>& bits) {
    std::vector<double> actual;
    for (uint32_t b : bits) {
      actual.push_back(s_.output == DType::kF32 ? F32FromBits(b)
                                                : F32FromBf16(static_cast<Bf16>(b)));
    }
    if (q.sequence < 0) {
      for (double v : actual) ASSERT_EQ(v, 0.0) << "padding row";
      return;
    }
    // The tensor cores multiply weights that are rounded to bf16, each by at most 2^-8 of itself,
    // and results are rounded as well. So an error is in proportion to the sum of weights times
    // magnitudes of values, while values of both signs cancel in the result.
    const bool rounds = s_.cache != KvCacheType::kF32 && s_.output == DType::kBF16;
    const double tolerance = s_.output == DType::kF32 ? 4e-6 : 4e-3;
    const int first = FirstSeen(q.position);
    int end = s_.causal ? q.position + 1 : s_.lengths[q.sequence];
    if (s_.window > 0) end = std::min(end, q.position + s_.window);
    for (int h = 0; h < s_.heads; ++h) {
      const int kv = s_.tile_order ? h % s_.kv_heads : h / (s_.heads / s_.kv_heads);
      const testing::Matrix& k = keys_[q.sequence * s_.kv_heads + kv];
      const testing::Matrix& v = values_[q.sequence * s_.kv_heads + kv];
      const auto from = q.values.begin() + h * s_.head_dim;
      const std::vector<double> row(actual.begin() + h * s_.value_dim(),
                                    actual.begin() + (h + 1) * s_.value_dim());
      testing::Matrix seen(v.begin() + first, v.begin() + end);
      const auto oracle = [&] {
        return testing::OracleAttention({from, from + s_.head_dim},
                                        {k.begin() + first, k.begin() + end}, seen, scale(),
                                        s_.soft_cap, s_.Sink(h),
                                        testing::BiasesOfKeys(s_.heads, s_.bias_distances, h, first,
                                                              end - 1, q.position, s_.causal));
      };
      const std::vector<double> expected = oracle();
      if (!rounds) {
        ASSERT_TRUE(testing::RowNear(row, expected, tolerance))
            << s_.Describe() << ", position " << q.position << ", head " << h;
        continue;
      }
      for (std::vector<double>& value : seen) {
        for (double& d : value) d = std::abs(d);
      }
      const std::vector<double> magnitudes = oracle();
      for (size_t d = 0; d < row.size(); ++d) {
        const double bound = 0x1.02p-8 * (magnitudes[d] + std::abs(expected[d])) + 1e-30;
        ASSERT_LE(std::abs(row[d] - expected[d]), bound)
            << s_.Describe() << ", position " << q.position << ", head " << h << ", column " << d;
      }
    }
  }

 private:
  static void Launch(const AttentionLaunch& a, const Options& options) {
    if (options.single != Single::kChosen) {
      if (options.single == Single::kLatentMma) {
        LaunchLatentSplitMma(a, false, nullptr);
      } else {
        LaunchLatentSplitWgmma(a, nullptr);
      }
      if (MaxSplits(a.step.max_context, a.seen, SplitTokensOf(a)) > 1) {
        LaunchMergeSplits(a, nullptr);
      }
      return;
    }
    LaunchAttention(a, nullptr);
  }
  static void CheckCall(cudaError_t error) {
    ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
  }
  static float RoundedToBf16(float f) { return F32FromBf16(Bf16FromF32(f)); }

  // Returns the elements that the cache has of a head.
  std::vector<double> AsStored(const float* head) const {
    std::vector<double> stored(head, head + s_.head_dim);
    if (s_.cache == KvCacheType::kInt8) {
      std::vector<int8_t> integers(stored.size());
      const double scale = Int8Of(head, integers.data());
      for (size_t d = 0; d < stored.size(); ++d) stored[d] = scale * integers[d];
    } else if (s_.cache == KvCacheType::kBF16) {
      for (double& v : stored) v = RoundedToBf16(static_cast<float>(v));
    }
    return stored;
  }
  // Rounds a head to int8 and returns the scale.
  float Int8Of(const float* head, int8_t* integers) const {
    uint32_t largest = 0;
    for (int d = 0; d < s_.head_dim; ++d) largest = std::max(largest, MagnitudeBits(head[d]));
    const Int8Scale scale = CacheScaleOf(largest);
    for (int d = 0; d < s_.head_dim; ++d) integers[d] = RoundToInt8(head[d], scale);
    return scale.scale;
  }

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
            (*oracle)[i * s_.kv_heads + h].push_back(AsStored(&row[h * s_.head_dim]));
          }
        }
        if (s_.latent_dim > 0) values_[i].back() = keys_[i].back();
        if (s_.latent_dim > 0) values_[i].back().resize(s_.latent_dim);
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
    CheckCall(cudaDeviceSynchronize());
    ExpectCacheHolds(total);
  }

  // Stores a row in what a block has for a kv head, which begins at `to`.
  void SetRow(const std::vector<double>& row, int slot, uint8_t* to) const {
    const int padded = view().padded_dim;
    if (s_.cache == KvCacheType::kInt8) {
      double largest = 0.0;
      for (const double v : row) largest = std::max(largest, std::abs(v));
      const auto scale = static_cast<float>(largest / 127.0);
      std::memcpy(to + slot * 4, &scale, 4);
      to += 64 + slot * padded;
      std::memset(to, 0, padded);
      // The first and the last 8 of 16 columns take turns.
      for (int d = 0; d < s_.head_dim; ++d) {
        const auto integer = static_cast<int8_t>(std::lround(row[d] / scale));
        std::memcpy(to + d / 16 * 16 + d % 8 * 2 + d % 16 / 8, &integer, 1);
      }
      return;
    }
    // Rows of bf16 that are multiples of 128 bytes are stored in planes of 64 columns, whose groups
    // of 8 columns are exchanged.
    const auto element = static_cast<size_t>(ElementBytes(s_.cache));
    const bool planes = s_.cache == KvCacheType::kBF16 && padded % 64 == 0;
    const auto at = [&](int column) {
      if (!planes) return slot * padded + column;
      return column / 64 * 1024 + slot * 64 + (column % 64 ^ (slot % 8 * 8));
    };
    for (int d = 0; d < padded; ++d) std::memset(to + at(d) * element, 0, element);
    for (int d = 0; d < s_.head_dim; ++d) {
      const auto f = static_cast<float>(row[static_cast<size_t>(d)]);
      const Bf16 b = Bf16FromF32(f);
      std::memcpy(to + at(d) * element, element == 4 ? static_cast<const void*>(&f) : &b, element);
    }
  }

  void ExpectCacheHolds(int total) {
    const KvLayerView view = this->view();
    std::vector<uint8_t> written(static_cast<size_t>(total) * kPageTokens, 0);
    const auto element = static_cast<size_t>(ElementBytes(s_.cache));
    for (const auto& [memory, expected] :
         {std::pair{view.keys, &keys_}, std::pair{view.values, &values_}}) {
      if (memory == nullptr) continue;
      std::vector<uint8_t> bytes(bytes_);
      CheckCall(cudaMemcpy(bytes.data(), memory, bytes_, cudaMemcpyDeviceToHost));
      std::vector<uint8_t> image(bytes_, 0xff);
      for (size_t i = 0; i < s_.lengths.size(); ++i) {
        for (int p = 0; p < s_.lengths[i]; ++p) {
          const int64_t block = tables_[i * stride_ + p / kPageTokens];
          for (int h = 0; h < s_.kv_heads; ++h) {
            SetRow((*expected)[i * s_.kv_heads + h][p], p % kPageTokens,
                   &image[(block * view.block_stride + h * view.head_stride) * element]);
          }
        }
      }
      ASSERT_TRUE(bytes == image) << "cache contents, " << s_.Describe();
    }
  }

  AttentionSetting s_;
  testing::Random random_;
  int stride_ = 0;
  size_t bytes_ = 0;
  std::vector<int32_t> tables_;
  std::optional<CudaKvCache> cache_;
  std::vector<testing::Matrix> keys_, values_;  // [sequence * kv_heads + kv head]
};

inline constexpr struct {
  KvCacheType cache;
  DType output;
} kAttentionTypes[] = {{KvCacheType::kF32, DType::kF32},   {KvCacheType::kBF16, DType::kF32},
                       {KvCacheType::kInt8, DType::kF32},  {KvCacheType::kF32, DType::kBF16},
                       {KvCacheType::kBF16, DType::kBF16}, {KvCacheType::kInt8, DType::kBF16}};

// Returns whether the f32 kernels are used with another load or store than that of f32.
inline bool IsMixed(KvCacheType cache, DType output) {
  return (cache == KvCacheType::kF32) != (output == DType::kF32);
}

}  // namespace moeserve::cuda
