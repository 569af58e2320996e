// Attention with a paged cache, norms and rotary positions compared with double arithmetic, and
// fused operations compared with the operations that they replace.

#include <gtest/gtest.h>

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

class AttentionTest : public ::testing::TestWithParam<BackendOptions> {
 protected:
  void SetUp() override { backend_ = std::move(CreateBackend(GetParam())).value(); }
  // Begins a step with `inputs`. Omitted token ids and sequences are 0.
  void Begin(StepInputs inputs) {
    zeros_.assign(inputs.position.size(), 0);
    inputs.token_ids = zeros_;
    if (inputs.sequence.empty()) inputs.sequence = zeros_;
    backend_->BeginStep(inputs, nullptr, false);
  }
  std::vector<int32_t> zeros_;
  std::unique_ptr<Backend> backend_;
};

// Covers lengths around the block size, shuffled block tables, grouped heads, windows, and several
// cache types.
TEST_P(AttentionTest, MatchesDoubleArithmetic) {
  Random random(5);
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (int head_dim : {4, 12, 16, 80, 128}) {
      for (int window : {0, 1, 17}) {
        const int kv_heads = 2, heads = 6;
        const HeadOrder order = window == 1 ? HeadOrder::kTile : HeadOrder::kInterleave;
        const std::vector<int> lengths = {1, 15, 16, 17, 40, 83};
        const int blocks_each = 6;
        const int sequences = static_cast<int>(lengths.size());
        auto cache = std::move(backend_->NewKvCache({{kv_heads, head_dim}}, KvCacheTypeOf(dtype),
                                                    {sequences * blocks_each}))
                         .value();
        std::vector<std::vector<int32_t>> tables(sequences);
        for (int b = 0; b < sequences * blocks_each; ++b) {
          tables[(b * 5 + 2) % sequences].push_back(b);
        }
        std::vector<std::span<const int32_t>> spans(tables.begin(), tables.end());
        std::vector<Matrix> keys(sequences * kv_heads), values(sequences * kv_heads);
        for (int s = 0; s < sequences; ++s) {
          std::vector<int32_t> position(lengths[s]), sequence(lengths[s], s);
          std::iota(position.begin(), position.end(), 0);
          std::vector<float> k = random.Normals(int64_t{lengths[s]} * kv_heads * head_dim);
          std::vector<float> v = random.Normals(int64_t{lengths[s]} * kv_heads * head_dim);
          const DeviceRows new_keys = MakeRows(*backend_, k, kv_heads * head_dim);
          const DeviceRows new_values = MakeRows(*backend_, v, kv_heads * head_dim);
          Begin({.position = position, .sequence = sequence, .page_tables = spans});
          backend_->AppendKv(
              {.cache = cache.get(), .layer = 0, .keys = new_keys.view, .values = new_values.view});
          for (int p = 0; p < lengths[s]; ++p) {
            for (int h = 0; h < kv_heads; ++h) {
              std::vector<double> key, value;
              for (int d = 0; d < head_dim; ++d) {
                const int64_t at = (int64_t{p} * kv_heads + h) * head_dim + d;
                const bool bf16 = dtype == DType::kBF16;
                key.push_back(bf16 ? F32FromBf16(Bf16FromF32(k[at])) : k[at]);
                value.push_back(bf16 ? F32FromBf16(Bf16FromF32(v[at])) : v[at]);
              }
              keys[s * kv_heads + h].push_back(key);
              values[s * kv_heads + h].push_back(value);
            }
          }
        }
        std::vector<int32_t> position, sequence;
        for (int s = 0; s < sequences; ++s) {
          position.push_back(lengths[s] - 1);
          sequence.push_back(s);
        }
        std::vector<float> q = random.Normals(int64_t{sequences} * heads * head_dim);
        const DeviceRows query = MakeRows(*backend_, q, heads * head_dim);
        const DeviceRows output = MakeRows(*backend_, sequences, heads * head_dim, heads * head_dim,
                                           DType::kF32, nullptr);
        const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
        Begin({.position = position, .sequence = sequence, .page_tables = spans});
        backend_->Attention({.cache = cache.get(),
                             .layer = 0,
                             .heads = heads,
                             .order = order,
                             .scale = scale,
                             .window = window,
                             .query = query.view,
                             .output = output.view});
        const std::vector<float> out = HostRows(*backend_, output.view);
        const std::vector<float> multiplied =
            MultipliedQueries(GetParam(), KvCacheTypeOf(dtype), q);
        for (int s = 0; s < sequences; ++s) {
          for (int h = 0; h < heads; ++h) {
            const int64_t at = (int64_t{s} * heads + h) * head_dim;
            const int kv_head = KvHeadOf(order, h, heads, kv_heads);
            const Matrix& all_k = keys[s * kv_heads + kv_head];
            const Matrix& all_v = values[s * kv_heads + kv_head];
            const int first = window > 0 ? std::max(0, lengths[s] - window) : 0;
            const auto exact = [&](const Matrix& v) {
              return OracleAttention({multiplied.begin() + at, multiplied.begin() + at + head_dim},
                                     {all_k.begin() + first, all_k.end()},
                                     {v.begin() + first, v.end()}, scale);
            };
            ASSERT_TRUE(AttentionNear(GetParam(), KvCacheTypeOf(dtype),
                                      {out.begin() + at, out.begin() + at + head_dim}, exact(all_v),
                                      exact(Magnitudes(all_v)), 2e-6))
                << Name(dtype) << ", head_dim " << head_dim << ", window " << window << ", length "
                << lengths[s] << ", head " << h;
          }
        }
      }
    }
  }
}

TEST_P(AttentionTest, NormsMatchDoubleArithmetic) {
  Random random(6);
  for (const bool layer : {false, true}) {
    for (int width : {1, 3, 31, 32, 33, 128, 700}) {
      const HostTensor scale = MakeTensor(random.Normals(width), {width});
      const HostTensor shift = MakeTensor(random.Normals(width), {width});
      std::vector<HostTensor> shifts;
      if (layer) shifts.push_back(shift);
      auto bank = std::move(backend_->NewNormBank({layer, 1e-5f}, {&scale, 1}, shifts)).value();
      const int rows = 5, segments = 3;
      std::vector<float> x = random.Normals(int64_t{rows} * segments * width, 3.0);
      for (int i = 0; i < width; ++i) x[i] = 0.0f;
      const DeviceRows input = MakeRows(*backend_, x, segments * width);
      const DeviceRows output =
          MakeRows(*backend_, rows, segments * width, segments * width, DType::kF32, nullptr);
      backend_->Norm(
          {.bank = bank.get(), .segments = segments, .input = input.view, .output = output.view});
      const std::vector<float> y = HostRows(*backend_, output.view);
      std::vector<double> scales, shift_values;
      for (int i = 0; i < width; ++i) scales.push_back(ElementAsF32(scale, i));
      for (int i = 0; layer && i < width; ++i) shift_values.push_back(ElementAsF32(shift, i));
      for (int64_t at = 0; at < static_cast<int64_t>(x.size()); at += width) {
        ASSERT_TRUE(RowNear(
            {y.begin() + at, y.begin() + at + width},
            OracleNorm({x.begin() + at, x.begin() + at + width}, layer, 1e-5, scales, shift_values),
            3e-6))
            << "width " << width;
      }
    }
  }
}

// The layers of a step may rotate differently, and steps differ in their positions and number of
// tokens.
TEST_P(AttentionTest, RopeTurnsPairs) {
  Random random(7);
  const std::vector<std::vector<int32_t>> steps = {
      {0, 1, 100, 8000}, {5, 3, 2, 99999}, {7}, {1, 2, 3, 4, 5, 6, 7, 131071, 9}};
  // Equal settings at different addresses, and settings that differ in one number only.
  const auto scaling = [](double factor, double magnitude) {
    return std::make_shared<const RopeScaling>(
        RopeScaling{.kind = RopeScalingKind::kLinear, .factor = factor, .magnitude = magnitude});
  };
  const RopeSettings layers[] = {{12, 8, 10000.0, false},
                                 {12, 8, 10000.0, true},
                                 {12, 8, 500000.0, false},
                                 {12, 12, 10000.0, true},
                                 {12, 0, 10000.0, true},
                                 {12, 8, 10000.0, false},
                                 {12, 8, 10000.0, false, scaling(4.0, 1.0)},
                                 {12, 8, 10000.0, true, scaling(4.0, 1.5)},
                                 {12, 8, 10000.0, false, scaling(4.0, 1.0)},
                                 {12, 8, 10000.0, false, nullptr, 4},
                                 {12, 6, 10000.0, true, nullptr, 5},
                                 {12, 8, 10000.0, true, nullptr, 0, 30000.0, false},
                                 {12, 8, 10000.0, true, nullptr, 0, 30000.0, true},
                                 {12, 6, 10000.0, false, scaling(4.0, 1.5), 4, 20000.0, true},
                                 {12, 8, 10000.0, false, nullptr, 0, 0.0, false, 6},
                                 {12, 4, 10000.0, false, nullptr, 0, 0.0, false, 6, 12},
                                 {12, 8, 10000.0, true, nullptr, 0, 0.0, false, 0, 12},
                                 {12, 8, 10000.0, true}};
  const int heads = 3;
  for (const std::vector<int32_t>& position : steps) {
    Begin({.position = position});
    for (const RopeSettings& s : layers) {
      std::vector<float> x =
          random.Normals(static_cast<int64_t>(position.size()) * heads * s.head_dim);
      const std::vector<float> before = x;
      const DeviceRows rows = MakeRows(*backend_, x, heads * s.head_dim);
      backend_->Rope({.settings = s, .rows = rows.view});
      x = HostRows(*backend_, rows.view);
      for (size_t t = 0; t < position.size(); ++t) {
        for (int h = 0; h < heads; ++h) {
          const int64_t at = (static_cast<int64_t>(t) * heads + h) * s.head_dim;
          std::vector<double> expected(before.begin() + at, before.begin() + at + s.head_dim);
          for (int i = 0; i < s.dimensions / 2; ++i) {
            const double factor = s.scaling == nullptr ? 1.0 : s.scaling->factor;
            const int period = s.period > 0 ? s.period : s.dimensions;
            const double angle = position[t] * std::pow(s.theta, -2.0 * i / period) / factor;
            double magnitude = s.magnitude();
            if (s.xpos_base > 0.0) {
              const double zeta = (2.0 * i / s.dimensions + 0.4) / 1.4;
              magnitude *= std::pow(zeta, (s.keys ? -1 : 1) * position[t] / s.xpos_base);
            }
            const int a = s.first + (s.interleaved ? 2 * i : i);
            const int apart = s.distance > 0 ? s.distance : s.dimensions / 2;
            const int b = s.first + (s.interleaved ? 2 * i + 1 : i + apart);
            const double cosine = std::cos(angle) * magnitude, sine = std::sin(angle) * magnitude;
            expected[a] = before[at + a] * cosine - before[at + b] * sine;
            expected[b] = before[at + b] * cosine + before[at + a] * sine;
          }
          ASSERT_TRUE(RowNear({x.begin() + at, x.begin() + at + s.head_dim}, expected, 1e-6))
              << "position " << position[t] << ", theta " << s.theta;
        }
      }
    }
  }
}

// Tokens of long and of other sequences are rotated in one step, by factors of their own.
TEST_P(AttentionTest, RopeTurnsLongSequencesDifferently) {
  Random random(17);
  const RopeScaling scaling{.kind = RopeScalingKind::kLong,
                            .original_positions = 64.0,
                            .factors = {1.0, 1.5, 2.0},
                            .magnitude = 1.25,
                            .long_factors = {3.0, 7.0, 20.0},
                            .long_magnitude = 0.5};
  const RopeSettings s{8, 6, 10000.0, false, std::make_shared<const RopeScaling>(scaling)};
  const std::vector<int32_t> position = {0, 70, 3, 70, 12};
  for (const std::vector<uint8_t>& is_long :
       {std::vector<uint8_t>{1, 1, 0, 0, 1}, std::vector<uint8_t>{}}) {
    Begin({.position = position, .long_sequence = is_long});
    std::vector<float> x = random.Normals(static_cast<int64_t>(position.size()) * s.head_dim);
    const std::vector<float> before = x;
    const DeviceRows rows = MakeRows(*backend_, x, s.head_dim);
    backend_->Rope({.settings = s, .rows = rows.view});
    x = HostRows(*backend_, rows.view);
    for (size_t t = 0; t < position.size(); ++t) {
      const int64_t at = static_cast<int64_t>(t) * s.head_dim;
      const bool turns_as_long = !is_long.empty() && is_long[t] != 0;
      const std::vector<double>& factors = turns_as_long ? scaling.long_factors : scaling.factors;
      const double magnitude = turns_as_long ? scaling.long_magnitude : scaling.magnitude;
      std::vector<double> expected(before.begin() + at, before.begin() + at + s.head_dim);
      for (int i = 0; i < 3; ++i) {
        const double angle = position[t] * std::pow(s.theta, -2.0 * i / 6) / factors[i];
        const double cosine = std::cos(angle) * magnitude, sine = std::sin(angle) * magnitude;
        expected[i] = before[at + i] * cosine - before[at + i + 3] * sine;
        expected[i + 3] = before[at + i + 3] * cosine + before[at + i] * sine;
      }
      EXPECT_TRUE(RowNear({x.begin() + at, x.begin() + at + s.head_dim}, expected, 1e-6)) << t;
    }
  }
}

struct QkvShape {
  int heads;
  int kv_heads;
  int head_dim;
  int turned;
  bool interleaved;
  enum { kNone, kHeads, kRow } norm;
  double xpos_base = 0.0;
  int prompt = 20;  // tokens of the first sequence
  bool norm_last = false;
  float clip = 0.0f;
  int distance = 0;
  int value_dim = 0;  // 0: head_dim
};

// The fused operation must have the same bits as the operations that it replaces, both in the
// queries and in the attention over the cache that it wrote.
TEST_P(AttentionTest, NormRopeAppendIsItsParts) {
  Random random(8);
  const QkvShape shapes[] = {{6, 2, 16, 16, false, QkvShape::kNone},
                             {6, 2, 12, 8, true, QkvShape::kHeads},
                             {8, 2, 128, 128, false, QkvShape::kRow},
                             {4, 4, 80, 0, false, QkvShape::kHeads},
                             {0, 3, 64, 32, true, QkvShape::kNone},
                             {4, 1, 128, 128, false, QkvShape::kHeads},
                             {6, 2, 16, 16, true, QkvShape::kNone, 8.0},
                             {6, 2, 12, 8, true, QkvShape::kHeads, 8.0},
                             {0, 3, 64, 32, true, QkvShape::kNone, 8.0},
                             {8, 2, 32, 32, false, QkvShape::kRow, 8.0},
                             {6, 2, 12, 8, true, QkvShape::kHeads, 0.0, 20, true},
                             {6, 2, 16, 16, false, QkvShape::kRow, 0.0, 90},
                             {6, 2, 12, 8, true, QkvShape::kHeads, 8.0, 90, true},
                             {0, 2, 16, 0, false, QkvShape::kNone, 0.0, 90},
                             {6, 2, 16, 16, false, QkvShape::kRow, 0.0, 20, false, 0.5f},
                             {6, 2, 12, 8, true, QkvShape::kNone, 8.0, 90, false, 1.5f},
                             {0, 2, 16, 16, false, QkvShape::kNone, 0.0, 20, false, 1.0f},
                             {6, 2, 12, 8, true, QkvShape::kHeads, 0.0, 20, true, 1.0f},
                             {6, 2, 16, 4, false, QkvShape::kHeads, 0.0, 20, false, 0.0f, 8},
                             {6, 2, 12, 8, false, QkvShape::kNone, 0.0, 90, false, 0.0f, 6, 20},
                             {6, 2, 40, 8, true, QkvShape::kRow, 0.0, 20, false, 0.0f, 0, 24},
                             {0, 3, 24, 16, false, QkvShape::kNone, 0.0, 20, false, 0.0f, 12, 4}};
  for (const QkvShape& s : shapes) {
    for (KvCacheType type : {KvCacheType::kF32, KvCacheType::kBF16, KvCacheType::kInt8}) {
      const std::vector<KvLayerShape> layers = {{1, 8},
                                                {s.kv_heads, s.head_dim, 0, 0, s.value_dim}};
      auto one = backend_->NewKvCache(layers, type, {8}),
           many = backend_->NewKvCache(layers, type, {8});
      if (type == KvCacheType::kInt8 && absl::IsUnimplemented(one.status())) continue;
      std::vector<int32_t> position, sequence;
      for (int t = 0; t < s.prompt; ++t) position.push_back(t), sequence.push_back(0);
      for (int t = 0; t < 3; ++t) position.push_back(t), sequence.push_back(1);
      const auto tokens = static_cast<int64_t>(position.size());
      const std::vector<int32_t> first = {3, 0, 5, 1, 7, 4}, second = {2};
      const std::vector<std::span<const int32_t>> tables = {first, second};
      Begin({.position = position, .sequence = sequence, .page_tables = tables});

      const int q_width = s.heads * s.head_dim, kv_width = s.kv_heads * s.head_dim;
      const int value_width = s.kv_heads * layers[1].value_dim();
      const int width = q_width + kv_width + value_width;
      std::unique_ptr<NormBank> query_norm, key_norm;
      if (s.norm != QkvShape::kNone) {
        const auto bank = [&](int n) {
          const HostTensor scale = MakeTensor(random.Normals(n), {n});
          return std::move(backend_->NewNormBank({false, 1e-6f}, {&scale, 1}, {})).value();
        };
        query_norm = bank(s.norm == QkvShape::kHeads ? s.head_dim : q_width);
        key_norm = bank(s.norm == QkvShape::kHeads ? s.head_dim : kv_width);
      }
      const std::vector<float> x = random.Normals(tokens * width, 2.0);
      const DeviceRows a = MakeRows(*backend_, tokens, width, width + 3, DType::kF32, &x);
      const DeviceRows b = MakeRows(*backend_, tokens, width, width + 3, DType::kF32, &x);
      const RopeSettings rope{s.head_dim, s.turned,    10000.0, s.interleaved, nullptr,
                              0,          s.xpos_base, false,   s.distance};
      RopeSettings of_keys = rope;
      of_keys.keys = true;
      backend_->NormRopeAppend({.cache = one->get(),
                                .layer = 1,
                                .rows = a.view,
                                .heads = s.heads,
                                .query_norm = query_norm.get(),
                                .key_norm = key_norm.get(),
                                .norm_heads = s.norm == QkvShape::kHeads,
                                .norm_last = s.norm_last,
                                .clip = s.clip,
                                .rope = rope});

      const RowsView query = b.view.Columns(0, q_width), keys = b.view.Columns(q_width, kv_width),
                     values = b.view.Columns(q_width + kv_width, value_width);
      const auto norms = [&] {
        if (s.norm == QkvShape::kNone) return;
        const bool heads = s.norm == QkvShape::kHeads;
        backend_->Norm({.bank = query_norm.get(),
                        .segments = heads ? s.heads : 1,
                        .input = query,
                        .output = query});
        backend_->Norm({.bank = key_norm.get(),
                        .segments = heads ? s.kv_heads : 1,
                        .input = keys,
                        .output = keys});
      };
      if (!s.norm_last) norms();
      if (s.clip > 0.0f) backend_->Clamp(b.view, s.clip);
      if (s.heads > 0) backend_->Rope({.settings = rope, .rows = query});
      backend_->Rope({.settings = of_keys, .rows = keys});
      if (s.norm_last) norms();
      backend_->AppendKv({.cache = many->get(), .layer = 1, .keys = keys, .values = values});

      if (s.heads > 0) {
        EXPECT_EQ(HostRows(*backend_, a.view.Columns(0, q_width)), HostRows(*backend_, query));
      }
      const DeviceRows asked = MakeRows(*backend_, random.Normals(tokens * kv_width), kv_width);
      const auto attend = [&](const KvCacheStorage* cache) {
        const DeviceRows out =
            MakeRows(*backend_, tokens, value_width, value_width, DType::kF32, nullptr);
        backend_->Attention({.cache = cache,
                             .layer = 1,
                             .heads = s.kv_heads,
                             .scale = 0.25f,
                             .query = asked.view,
                             .output = out.view});
        return HostRows(*backend_, out.view);
      };
      EXPECT_EQ(attend(one->get()), attend(many->get())) << "head_dim " << s.head_dim;
    }
  }
}

// Attention with `append` and `rope` must have the same bits as the operations that come first one
// by one: in its results, and in later attention over the cache. Steps are single tokens, or single
// tokens and a prompt; queries are rows of the tokens, or of a routing plan.
TEST_P(AttentionTest, AppendsFirst) {
  Random random(9);
  struct Shape {
    int heads, kv_heads, head_dim, turned;
    bool norm, norm_heads;
    int routes;  // of every token but the second one, which has none; 0: no plan
    int prompt;
  };
  const Shape shapes[] = {{4, 2, 64, 64, true, true, 0, 0},  {4, 2, 64, 64, true, false, 0, 0},
                          {3, 1, 80, 32, false, true, 0, 0}, {2, 1, 128, 0, false, true, 0, 0},
                          {4, 2, 64, 64, true, true, 0, 7},  {2, 2, 64, 64, false, true, 3, 0},
                          {2, 2, 64, 64, false, true, 3, 5}, {2, 2, 32, 0, false, true, 2, 0}};
  for (const Shape& s : shapes) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const std::vector<KvLayerShape> layers = {{1, 8}, {s.kv_heads, s.head_dim}};
      std::unique_ptr<KvCacheStorage> caches[2];
      for (auto& cache : caches) {
        cache = std::move(backend_->NewKvCache(layers, KvCacheTypeOf(dtype), {64})).value();
      }
      const int q_width = s.routes > 0 ? 0 : s.heads * s.head_dim;
      const int out_width = s.heads * s.head_dim, kv_width = s.kv_heads * s.head_dim;
      const int width = q_width + 2 * kv_width;
      std::vector<int32_t> pages(40);
      std::iota(pages.begin(), pages.end(), 0);
      const std::vector<std::span<const int32_t>> tables = {
          std::span(pages).subspan(0, 20), std::span(pages).subspan(20, 4),
          std::span(pages).subspan(24, 4), std::span(pages).subspan(28, 4)};
      // The earlier tokens of sequence 0 take two splits.
      std::vector<int32_t> position(290), sequence(290, 0);
      std::iota(position.begin(), position.end(), 0);
      Begin({.position = position, .sequence = sequence, .page_tables = tables});
      const std::vector<float> earlier = random.Normals(int64_t{290} * 2 * kv_width);
      const DeviceRows filled = MakeRows(*backend_, earlier, 2 * kv_width);
      for (auto& cache : caches) {
        backend_->AppendKv({.cache = cache.get(),
                            .layer = 1,
                            .keys = filled.view.Columns(0, kv_width),
                            .values = filled.view.Columns(kv_width, kv_width)});
      }
      position = {290, 0, 0};
      sequence = {0, 1, 2};
      for (int p = 0; p < s.prompt; ++p) position.push_back(p), sequence.push_back(3);
      const auto tokens = static_cast<int64_t>(position.size());
      Begin({.position = position, .sequence = sequence, .page_tables = tables});

      std::unique_ptr<NormBank> query_norm, key_norm;
      if (s.norm) {
        const auto bank = [&](int n) {
          const HostTensor scale = MakeTensor(random.Normals(n), {n});
          return std::move(backend_->NewNormBank({false, 1e-6f}, {&scale, 1}, {})).value();
        };
        query_norm = bank(s.norm_heads ? s.head_dim : q_width);
        key_norm = bank(s.norm_heads ? s.head_dim : kv_width);
      }
      RoutingPlan plan;
      std::unique_ptr<Router> router;
      if (s.routes > 0) {
        RouteSettings settings;
        settings.num_experts = 4;
        settings.input_width = 1;
        RouterTensors tensors;
        tensors.weight = MakeTensor(random.Normals(4), {4, 1});
        router = std::move(backend_->NewRouter(settings, tensors)).value();
        GivenRoutes given{.offsets = {0}, .experts = {}, .weights = {}};
        for (int64_t t = 0; t < tokens; ++t) {
          for (int e = 0; e < s.routes && t != 1; ++e) given.experts.push_back(e);
          given.offsets.push_back(static_cast<int32_t>(given.experts.size()));
        }
        given.weights.assign(given.experts.size(), 1.0f);
        const DeviceRows input = MakeRows(*backend_, std::vector<float>(position.size()), 1);
        plan = backend_->Route({.router = router.get(), .input = input.view, .given = &given});
      }
      const std::vector<float> x = random.Normals(tokens * width, 2.0),
                               of_plan = random.Normals(int64_t{plan.capacity} * out_width, 2.0),
                               later = random.Normals(tokens * kv_width);
      const RopeSettings rope{.head_dim = s.head_dim, .dimensions = s.turned};
      const auto run = [&](KvCacheStorage* cache, bool at_once) {
        const DeviceRows rows = MakeRows(*backend_, tokens, width, width + 3, DType::kF32, &x);
        const DeviceRows routed =
            MakeRows(*backend_, std::max(plan.capacity, 1), out_width, out_width, DType::kF32,
                     plan.capacity > 0 ? &of_plan : nullptr);
        const NormRopeAppendArgs append{.cache = cache,
                                        .layer = 1,
                                        .rows = rows.view,
                                        .heads = s.routes > 0 ? 0 : s.heads,
                                        .query_norm = query_norm.get(),
                                        .key_norm = key_norm.get(),
                                        .norm_heads = s.norm_heads,
                                        .rope = rope};
        const bool turns_rows = s.routes > 0 && s.turned > 0;
        AttentionArgs attention{.cache = cache,
                                .layer = 1,
                                .heads = s.heads,
                                .scale = 0.2f,
                                .query = rows.view.Columns(0, q_width),
                                .output = {}};
        if (s.routes > 0) {
          attention.plan = &plan;
          attention.rows_per_token = s.routes;
          attention.order = HeadOrder::kTile;
          attention.query = routed.view;
        }
        if (at_once) {
          attention.append = &append;
          attention.rope = turns_rows ? &rope : nullptr;
        } else {
          backend_->NormRopeAppend(append);
          if (turns_rows) {
            backend_->Rope({.settings = rope, .plan = &plan, .rows = routed.view});
          }
        }
        const int64_t count = s.routes > 0 ? plan.capacity : tokens;
        const std::vector<float> zeros(static_cast<size_t>(count * out_width));
        const DeviceRows out = MakeRows(*backend_, count, out_width, out_width, dtype, &zeros);
        attention.output = out.view;
        backend_->Attention(attention);
        const DeviceRows asked = MakeRows(*backend_, later, kv_width);
        const DeviceRows after =
            MakeRows(*backend_, tokens, kv_width, kv_width, DType::kF32, nullptr);
        backend_->Attention({.cache = cache,
                             .layer = 1,
                             .heads = s.kv_heads,
                             .scale = 0.25f,
                             .query = asked.view,
                             .output = after.view});
        return std::pair(HostRows(*backend_, out.view), HostRows(*backend_, after.view));
      };
      EXPECT_EQ(run(caches[0].get(), true), run(caches[1].get(), false))
          << "head_dim " << s.head_dim << ", turned " << s.turned << ", routes " << s.routes
          << ", prompt " << s.prompt << ", " << Name(dtype);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, AttentionTest, ::testing::ValuesIn(AvailableBackends()),
                         [](const auto& info) { return BackendName(info.param); });

}  // namespace
}  // namespace moeserve::testing
