// Attention with values that are wider or narrower than keys, windows that are chunks of positions,
// and queries that grow with their positions, compared with double arithmetic.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "tests/reference/oracle.h"
#include "tests/support/backends.h"
#include "tests/support/compare.h"
#include "tests/support/device_rows.h"
#include "tests/support/head_order.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr int kKvHeads = 2, kHeads = 6;

struct SettingsCase {
  int head_dim = 16;
  int value_dim = 16;
  int window = 0;
  bool chunks = false;
};

class AttentionSettingsTest : public ::testing::TestWithParam<BackendOptions> {
 protected:
  void SetUp() override { backend_ = std::move(CreateBackend(GetParam())).value(); }
  void Begin(StepInputs inputs) {
    zeros_.assign(inputs.position.size(), 0);
    inputs.token_ids = zeros_;
    inputs.sequence = zeros_;
    backend_->BeginStep(inputs, nullptr, false);
  }
  void Check(const SettingsCase& c, DType dtype, Random& random);

  std::vector<int32_t> zeros_;
  std::unique_ptr<Backend> backend_;
};

// Rows of one head of keys or values, rounded as in the cache.
Matrix HeadRows(const std::vector<float>& x, int rows, int dim, int head, DType dtype) {
  Matrix out;
  for (int r = 0; r < rows; ++r) {
    std::vector<double> row;
    for (int d = 0; d < dim; ++d) {
      const float v = x[(int64_t{r} * kKvHeads + head) * dim + d];
      row.push_back(dtype == DType::kBF16 ? F32FromBf16(Bf16FromF32(v)) : v);
    }
    out.push_back(row);
  }
  return out;
}

void AttentionSettingsTest::Check(const SettingsCase& c, DType dtype, Random& random) {
  constexpr int kTokens = 83;
  const KvLayerShape shape{kKvHeads, c.head_dim, 0, 0, c.value_dim};
  auto cache = std::move(backend_->NewKvCache({shape}, KvCacheTypeOf(dtype), {6})).value();
  const std::vector<int32_t> pages = {4, 1, 5, 0, 3, 2};
  const std::vector<std::span<const int32_t>> tables = {pages};
  std::vector<int32_t> position(kTokens);
  std::iota(position.begin(), position.end(), 0);
  const std::vector<float> k = random.Normals(int64_t{kTokens} * kKvHeads * c.head_dim);
  const std::vector<float> v = random.Normals(int64_t{kTokens} * kKvHeads * c.value_dim);
  const std::vector<float> q = random.Normals(int64_t{kTokens} * kHeads * c.head_dim);
  const DeviceRows keys = MakeRows(*backend_, k, kKvHeads * c.head_dim);
  const DeviceRows values = MakeRows(*backend_, v, kKvHeads * c.value_dim);
  const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  // All rows of the prompt at once, and then the last one alone.
  for (const int first : {0, kTokens - 1}) {
    const int rows = kTokens - first;
    Begin({.position = std::span(position).subspan(first), .page_tables = tables});
    if (first == 0) {
      backend_->AppendKv({.cache = cache.get(), .keys = keys.view, .values = values.view});
    }
    const std::vector<float> asked(q.begin() + int64_t{first} * kHeads * c.head_dim, q.end());
    const DeviceRows query = MakeRows(*backend_, asked, kHeads * c.head_dim);
    const DeviceRows output =
        MakeRows(*backend_, rows, kHeads * c.value_dim, kHeads * c.value_dim, DType::kF32, nullptr);
    backend_->Attention({.cache = cache.get(),
                         .heads = kHeads,
                         .scale = scale,
                         .window = c.window,
                         .chunks = c.chunks,
                         .query = query.view,
                         .output = output.view});
    const std::vector<float> out = HostRows(*backend_, output.view);
    // Sums over wide heads round more often.
    const double tolerance = 2e-6 * std::max(1.0, c.head_dim / 64.0);
    const std::vector<float> used = MultipliedQueries(GetParam(), KvCacheTypeOf(dtype), asked);
    for (int h = 0; h < kHeads; ++h) {
      const int kv_head = KvHeadOf(HeadOrder::kInterleave, h, kHeads, kKvHeads);
      const Matrix all_k = HeadRows(k, kTokens, c.head_dim, kv_head, dtype);
      const Matrix all_v = HeadRows(v, kTokens, c.value_dim, kv_head, dtype);
      for (int r = 0; r < rows; ++r) {
        const int p = first + r;
        const int begin = c.chunks       ? p / c.window * c.window
                          : c.window > 0 ? std::max(0, p - c.window + 1)
                                         : 0;
        const auto from = used.begin() + (int64_t{r} * kHeads + h) * c.head_dim;
        const auto to = out.begin() + (int64_t{r} * kHeads + h) * c.value_dim;
        const auto exact = [&](const Matrix& of) {
          return OracleAttention({from, from + c.head_dim},
                                 {all_k.begin() + begin, all_k.begin() + p + 1},
                                 {of.begin() + begin, of.begin() + p + 1}, scale);
        };
        ASSERT_TRUE(AttentionNear(GetParam(), KvCacheTypeOf(dtype), {to, to + c.value_dim},
                                  exact(all_v), exact(Magnitudes(all_v)), tolerance))
            << Name(dtype) << ", keys of " << c.head_dim << ", values of " << c.value_dim
            << ", window " << c.window << ", position " << p << ", head " << h;
      }
    }
  }
}

TEST_P(AttentionSettingsTest, MatchesDoubleArithmetic) {
  Random random(31);
  const SettingsCase cases[] = {{16, 8},
                                {12, 20},
                                {96, 64},
                                {24, 128},
                                {192, 128},
                                {16, 16, 7, true},
                                {16, 16, 16, true},
                                {64, 64, 33, true},
                                {16, 16, 100, true},
                                {24, 12, 20, true},
                                {24, 12, 20},
                                {512, 512},
                                {320, 16, 30},
                                {24, 300}};
  for (const SettingsCase& c : cases) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) Check(c, dtype, random);
  }
}

TEST_P(AttentionSettingsTest, QueriesGrowWithTheirPositions) {
  Random random(32);
  const std::vector<int32_t> position = {0, 1, 5, 6, 7, 8191, 8192, 99999};
  const int cols = 37;
  for (const PositionScale& scale : {PositionScale{.step = 7.0, .factor = 0.3, .first = 1},
                                     PositionScale{.step = 8192.0, .factor = 0.1, .first = 0}}) {
    Begin({.position = position});
    const std::vector<float> x = random.Normals(std::ssize(position) * cols);
    const DeviceRows rows =
        MakeRows(*backend_, std::ssize(position), cols, cols + 3, DType::kF32, &x);
    backend_->ScaleByPosition({.scale = scale, .rows = rows.view});
    for (size_t t = 0; t < position.size(); ++t) {
      const double steps = std::floor((position[t] + scale.first) / scale.step);
      const double factor = 1.0 + scale.factor * std::log(1.0 + steps);
      const std::vector<double> row = RowOf(*backend_, rows.view, static_cast<int64_t>(t), cols);
      for (int i = 0; i < cols; ++i) {
        EXPECT_NEAR(row[static_cast<size_t>(i)], x[t * cols + i] * factor, 1e-6 * factor * 4);
      }
    }
  }
}

// The rows of some tokens of a step, as a rank computes them.
TEST_P(AttentionSettingsTest, RowsOfSomeTokensHaveTheBitsOfAllRows) {
  if (backend_->rank_ops() == nullptr) GTEST_SKIP() << "rows of all tokens only";
  Random random(33);
  // Some tokens of sequences of their own, with long contexts, and then two prompts.
  constexpr int kDim = 32, kSingle = 9, kPrompts[] = {41, 29}, kContext = 640;
  constexpr int kTokens = kSingle + kPrompts[0] + kPrompts[1];
  std::vector<int32_t> shared(kContext / kPageTokens);
  std::iota(shared.begin(), shared.end(), 6);
  const std::vector<std::vector<int32_t>> pages = {{3, 0, 5}, {1, 4, 2}};
  std::vector<std::span<const int32_t>> tables(kSingle, shared);
  tables.insert(tables.end(), pages.begin(), pages.end());
  std::vector<int32_t> position, sequence;
  for (int t = 0; t < kSingle; ++t) {
    sequence.push_back(t);
    position.push_back(kContext - 1 - 70 * t);
  }
  for (const int tokens : kPrompts) {
    for (int t = 0; t < tokens; ++t) {
      sequence.push_back(tokens == kPrompts[0] ? kSingle : kSingle + 1);
      position.push_back(t);
    }
  }
  const auto num_pages = static_cast<int64_t>(6 + shared.size());
  const auto values_of = [&](int tokens, int heads) {
    return random.Normals(int64_t{tokens} * heads * kDim);
  };
  const std::vector<float> context = values_of(kContext, kKvHeads);
  const std::vector<float> k = values_of(kTokens, kKvHeads), v = values_of(kTokens, kKvHeads);
  const std::vector<float> q = values_of(kTokens, kHeads);
  for (const KvCacheType type : {KvCacheType::kF32, KvCacheType::kBF16, KvCacheType::kInt8}) {
    auto cache = std::move(backend_->NewKvCache({{kKvHeads, kDim}}, type, {num_pages})).value();
    const auto append = [&](const std::vector<float>& key, const std::vector<float>& value) {
      const DeviceRows keys = MakeRows(*backend_, key, kKvHeads * kDim);
      const DeviceRows values = MakeRows(*backend_, value, kKvHeads * kDim);
      backend_->AppendKv({.cache = cache.get(), .keys = keys.view, .values = values.view});
      HostRows(*backend_, keys.view);  // waits
    };
    std::vector<int32_t> all_positions(kContext);
    std::iota(all_positions.begin(), all_positions.end(), 0);
    Begin({.position = all_positions,
           .page_tables = std::span(tables).first(1),
           .cache = cache.get()});
    append(context, context);
    backend_->BeginStep({.token_ids = sequence,
                         .position = position,
                         .sequence = sequence,
                         .page_tables = tables,
                         .cache = cache.get()},
                        nullptr, false);
    append(k, v);
    const auto rows_of = [&](int first, int last, DType dtype) {
      const auto at = [&](int token) { return q.begin() + int64_t{token} * kHeads * kDim; };
      const DeviceRows query = MakeRows(*backend_, {at(first), at(last)}, kHeads * kDim);
      RopeSettings rope;
      rope.head_dim = rope.dimensions = kDim;
      backend_->Rope({.settings = rope, .rows = query.view, .first_token = first});
      backend_->ScaleByPosition({.scale = {.step = 7.0, .factor = 0.3, .first = 1},
                                 .rows = query.view,
                                 .first_token = first});
      const DeviceRows output =
          MakeRows(*backend_, last - first, kHeads * kDim, kHeads * kDim, dtype, nullptr);
      backend_->Attention({.cache = cache.get(),
                           .first_token = first,
                           .heads = kHeads,
                           .scale = 0.25f,
                           .query = query.view,
                           .output = output.view});
      return HostRows(*backend_, output.view);
    };
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      std::vector<float> parts;
      for (const auto& [first, last] : {std::pair(0, 4), {4, 4}, {4, 32}, {32, kTokens}}) {
        const std::vector<float> part = rows_of(first, last, dtype);
        parts.insert(parts.end(), part.begin(), part.end());
      }
      const std::vector<float> all = rows_of(0, kTokens, dtype);
      ASSERT_EQ(parts.size(), all.size());
      EXPECT_EQ(std::memcmp(parts.data(), all.data(), all.size() * sizeof(float)), 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, AttentionSettingsTest, ::testing::ValuesIn(AvailableBackends()),
                         [](const auto& info) { return BackendName(info.param); });

}  // namespace
}  // namespace moeserve::testing
