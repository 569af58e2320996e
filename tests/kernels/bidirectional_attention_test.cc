// Attention that is not causal: over whole sequences with and without windows, and over page tables
// of other lengths, compared with double arithmetic; and independence of a row's bits from all
// else. Positions behind the end of a table hold NaN, so that a row that reads one of them has no
// number.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <tuple>

#include "tests/reference/oracle.h"
#include "tests/support/backends.h"
#include "tests/support/device_rows.h"
#include "tests/support/distance_biases.h"
#include "tests/support/head_order.h"
#include "tests/support/plans.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr KvCacheType kOpenTypes[] = {KvCacheType::kF32, KvCacheType::kBF16, KvCacheType::kInt8};

// A layer. `table` is the page table that it reads: 0 has the rows' own sequence, 1 the source.
struct OpenLayer {
  int heads = 1;
  int kv_heads = 1;
  int head_dim = 16;
  int table = 0;
  int window = 0;
  int bias_distances = 0;
  float soft_cap = 0.0f;
  bool sinks = false;
  int latent_dim = 0;
  HeadOrder order = HeadOrder::kInterleave;
  bool causal = false;

  int value_dim() const { return latent_dim > 0 ? latent_dim : head_dim; }
  // Below, among and above usual scores.
  std::optional<double> Sink(int head) const {
    return sinks ? std::optional<double>(2.5 * (head % 4) - 3.0) : std::nullopt;
  }
  std::string Describe() const {
    return "heads " + std::to_string(heads) + "/" + std::to_string(kv_heads) + ", dim " +
           std::to_string(head_dim) + ", table " + std::to_string(table) + ", window " +
           std::to_string(window) + (causal ? ", causal" : "") + ", biases " +
           std::to_string(bias_distances) + ", soft cap " + std::to_string(soft_cap) +
           (sinks ? ", sinks" : "") + ", latent " + std::to_string(latent_dim);
  }
};

struct OpenRow {
  int sequence;
  int position;
};

// The positions of each sequence in its two tables.
using Lengths = std::vector<std::array<int, 2>>;

// Returns a head's elements after storing them in the cache.
std::vector<double> AfterCache(const float* x, int n, KvCacheType type) {
  float largest = 0.0f;
  for (int i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
  std::vector<double> out(x, x + n);
  for (double& v : out) {
    const auto f = static_cast<float>(v);
    if (type == KvCacheType::kBF16) v = F32FromBf16(Bf16FromF32(f));
    if (type == KvCacheType::kInt8) {
      v = std::nearbyint(f * (127.0f / largest)) * double{largest / 127.0f};
    }
  }
  return out;
}

// A backend and a cache of two layers, one for each table.
class OpenScene {
 public:
  OpenScene(const BackendOptions& options, const OpenLayer& layer, KvCacheType type,
            const Lengths& lengths, uint64_t seed)
      : options_(options),
        layer_(layer),
        type_(type),
        lengths_(lengths),
        random_(seed),
        backend_(std::move(CreateBackend(options)).value()) {
    std::vector<int64_t> pages(2, 1);
    for (const auto& n : lengths) {
      for (int t = 0; t < 2; ++t) pages[t] += Pages(n[t]);
    }
    KvLayerShape shape{layer.kv_heads, layer.head_dim, layer.latent_dim};
    KvLayerShape source = shape;
    source.table = 1;
    Result<std::unique_ptr<KvCacheStorage>> cache =
        backend_->NewKvCache({shape, source}, type, pages);
    if (!cache.ok()) return;
    cache_ = std::move(cache).value();
    for (int t = 0; t < 2; ++t) {
      // Consecutive pages of a sequence are neither adjacent nor ascending.
      std::vector<int32_t> ids(static_cast<size_t>(pages[t]));
      std::iota(ids.begin(), ids.end(), 0);
      for (size_t i = ids.size() - 1; i > 0; --i) std::swap(ids[i], ids[random_.Below(i + 1)]);
      for (size_t s = 0, next = 0; s < lengths.size(); ++s) {
        tables_.resize(2 * lengths.size());
        for (int b = 0; b < Pages(lengths[s][t]); ++b) tables_[2 * s + t].push_back(ids[next++]);
      }
    }
    spans_.assign(tables_.begin(), tables_.end());
    for (const auto& n : lengths) counts_.insert(counts_.end(), n.begin(), n.end());
    for (int s = 0; s < static_cast<int>(lengths.size()); ++s) {
      for (int t = 0; t < 2; ++t) Fill(s, t);
    }
    const auto upload = [&](const std::vector<float>& values) {
      return values.empty() ? nullptr : std::move(backend_->Upload(values)).value();
    };
    std::vector<float> sinks;
    for (int h = 0; layer.sinks && h < layer.heads; ++h) {
      sinks.push_back(static_cast<float>(*layer.Sink(h)));
    }
    sinks_ = upload(sinks);
    biases_ = upload(DistanceBiases(layer.heads, layer.bias_distances, layer.causal));
  }

  // False if the device has no cache of the type.
  bool ok() const { return cache_ != nullptr; }
  Backend& backend() { return *backend_; }
  int64_t width() const { return int64_t{layer_.heads} * layer_.head_dim; }
  int64_t out_width() const { return int64_t{layer_.heads} * layer_.value_dim(); }
  // Changes the layer to one with the same heads, neither sinks nor biases.
  void set_layer(const OpenLayer& layer) { layer_ = layer; }
  std::vector<int32_t>& counts() { return counts_; }  // StepInputs::lengths
  std::vector<float> RandomQueries(size_t rows) {
    return random_.Normals(static_cast<int64_t>(rows) * width());
  }

  StepRows Begin(const std::vector<OpenRow>& rows, const void* owner = nullptr,
                 bool replayable = false) {
    position_.clear();
    sequence_.clear();
    for (const OpenRow& r : rows) {
      position_.push_back(r.position);
      sequence_.push_back(r.sequence);
    }
    tokens_.assign(rows.size(), 0);
    return backend_->BeginStep({.token_ids = tokens_,
                                .position = position_,
                                .sequence = sequence_,
                                .page_tables = spans_,
                                .lengths = counts_,
                                .cache = cache_.get()},
                               owner, replayable);
  }

  void Attend(const RowsView& query, const RowsView& output, const RoutingPlan* plan = nullptr) {
    const auto data = [](const auto& buffer) {
      return buffer == nullptr ? nullptr : static_cast<const float*>(buffer->data());
    };
    backend_->Attention({.cache = cache_.get(),
                         .layer = layer_.table,
                         .causal = layer_.causal,
                         .plan = plan,
                         .heads = layer_.heads,
                         .order = layer_.order,
                         .scale = Scale(),
                         .soft_cap = layer_.soft_cap,
                         .sinks = data(sinks_),
                         .bias = data(biases_),
                         .bias_distances = layer_.bias_distances,
                         .window = layer_.window,
                         .query = query,
                         .output = output});
  }

  // Returns the results of a step of these rows.
  std::vector<float> Run(const std::vector<OpenRow>& rows, const std::vector<float>& queries,
                         DType dtype = DType::kF32) {
    Begin(rows);
    const DeviceRows q = MakeRows(*backend_, queries, width());
    const DeviceRows out =
        MakeRows(*backend_, q.view.rows, out_width(), out_width() + 3, dtype, nullptr);
    Attend(q.view, out.view);
    return HostRows(*backend_, out.view);
  }

  ::testing::AssertionResult Near(const std::vector<OpenRow>& rows,
                                  const std::vector<float>& queries,
                                  const std::vector<float>& out) {
    const std::vector<float> multiplied = MultipliedQueries(options_, type_, queries);
    for (size_t r = 0; r < rows.size(); ++r) {
      // Of many rows, most in the middle of long sequences see as much as their neighbours.
      const int p = rows[r].position;
      if (rows.size() > 100 && p > 20 && p < 205 && p % 16 > 1) continue;
      for (int h = 0; h < layer_.heads; ++h) {
        const auto [keys, values, biases] = Seen(rows[r], h);
        const auto q = multiplied.begin() + static_cast<int64_t>(r) * width() + h * layer_.head_dim;
        const auto at =
            out.begin() + static_cast<int64_t>(r) * out_width() + h * layer_.value_dim();
        const auto exact = [&](const Matrix& v) {
          return OracleAttention({q, q + layer_.head_dim}, keys, v, Scale(), layer_.soft_cap,
                                 layer_.Sink(h), biases);
        };
        const auto near = AttentionNear(options_, type_, {at, at + layer_.value_dim()},
                                        exact(values), exact(Magnitudes(values)), 4e-6);
        if (near) continue;
        return ::testing::AssertionFailure()
               << layer_.Describe() << ", " << Name(type_) << ", sequence " << rows[r].sequence
               << ", position " << rows[r].position << ", head " << h << ": " << near.message();
      }
    }
    return ::testing::AssertionSuccess();
  }

 private:
  struct SeenKeys {
    Matrix keys, values;
    std::vector<double> biases;
  };

  static int Pages(int tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }
  float Scale() const { return 1.0f / std::sqrt(static_cast<float>(layer_.head_dim)); }

  // What head h of a row attends to.
  SeenKeys Seen(const OpenRow& row, int h) {
    SeenKeys seen;
    const int n = counts_[2 * row.sequence + layer_.table];
    const int kv_head = KvHeadOf(layer_.order, h, layer_.heads, layer_.kv_heads);
    const int dim = layer_.head_dim;
    const auto& [k, v] = content_[2 * row.sequence + layer_.table];
    for (int p = 0; p < n; ++p) {
      const bool near = layer_.window == 0 || std::abs(row.position - p) < layer_.window;
      if (!near || (layer_.causal && p > row.position)) continue;
      const int64_t at = (int64_t{p} * layer_.kv_heads + kv_head) * dim;
      seen.keys.push_back(AfterCache(k.data() + at, dim, type_));
      seen.values.push_back(AfterCache(v.data() + at, dim, type_));
      if (layer_.latent_dim > 0) {
        seen.values.back().assign(seen.keys.back().begin(),
                                  seen.keys.back().begin() + layer_.latent_dim);
      }
      const std::vector<double> bias =
          BiasesOfKeys(layer_.heads, layer_.bias_distances, h, p, p, row.position, layer_.causal);
      seen.biases.insert(seen.biases.end(), bias.begin(), bias.end());
    }
    return seen;
  }

  void Append(int sequence, int table, const std::vector<float>& keys,
              const std::vector<float>& values) {
    const int64_t kv_width = int64_t{layer_.kv_heads} * layer_.head_dim;
    std::vector<OpenRow> rows;
    for (int p = 0; p < static_cast<int>(keys.size()) / kv_width; ++p) {
      rows.push_back({sequence, p});
    }
    if (rows.empty()) return;
    Begin(rows);
    const DeviceRows k = MakeRows(*backend_, keys, kv_width);
    const DeviceRows v = MakeRows(*backend_, values, kv_width);
    backend_->AppendKv({.cache = cache_.get(), .layer = table, .keys = k.view, .values = v.view});
  }

  void Fill(int sequence, int table) {
    const int n = lengths_[sequence][table];
    const int64_t kv_width = int64_t{layer_.kv_heads} * layer_.head_dim;
    const std::vector<float> stale(static_cast<size_t>(Pages(n) * kPageTokens * kv_width),
                                   std::numeric_limits<float>::quiet_NaN());
    Append(sequence, table, stale, stale);
    auto& [k, v] = content_[2 * sequence + table];
    k = random_.Normals(n * kv_width);
    v = random_.Normals(n * kv_width);
    Append(sequence, table, k, v);
  }

  const BackendOptions options_;
  OpenLayer layer_;
  const KvCacheType type_;
  const Lengths lengths_;
  Random random_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<KvCacheStorage> cache_;
  std::unique_ptr<DeviceBuffer> sinks_, biases_;
  std::vector<std::vector<int32_t>> tables_;  // [2 * sequence + table]
  std::vector<std::span<const int32_t>> spans_;
  std::map<int, std::pair<std::vector<float>, std::vector<float>>> content_;  // keys and values
  std::vector<int32_t> counts_, position_, sequence_, tokens_;
};

// Lengths around pages, halves of the largest one, and a block of 256 positions. The sources are of
// other lengths, the first sequence has one row.
const Lengths kOpenLengths = {{1, 40}, {5, 256}, {16, 1}, {17, 16}, {60, 33}, {261, 700}, {3, 257}};

std::vector<OpenRow> WholeSequences() {
  std::vector<OpenRow> rows;
  for (int s = 0; s < static_cast<int>(kOpenLengths.size()); ++s) {
    for (int p = 0; p < kOpenLengths[s][0]; ++p) rows.push_back({s, p});
  }
  return rows;
}

class BidirectionalAttentionTest : public ::testing::TestWithParam<BackendOptions> {
 protected:
  static BackendOptions WithThreads(int threads) {
    BackendOptions o = GetParam();
    o.threads = threads;
    return o;
  }
};

TEST_P(BidirectionalAttentionTest, WholeSequencesMatchDoubleArithmetic) {
  const OpenLayer layers[] = {
      {.heads = 4, .kv_heads = 2},
      {.heads = 6, .kv_heads = 2, .head_dim = 12, .sinks = true, .order = HeadOrder::kTile},
      {.heads = 3, .kv_heads = 3, .head_dim = 24, .window = 1},
      {.heads = 4, .window = 2, .soft_cap = 1.5f},
      {.heads = 14, .kv_heads = 2, .window = 17},
      {.heads = 5, .head_dim = 20, .window = 1000, .order = HeadOrder::kTile},
      {.heads = 2, .kv_heads = 2, .window = 100, .sinks = true},
      {.heads = 4, .head_dim = 40, .latent_dim = 27},
      {.heads = 5, .head_dim = 48, .window = 20, .soft_cap = 3.0f, .latent_dim = 32},
      {.heads = 2, .kv_heads = 2, .bias_distances = 1},
      {.heads = 4, .kv_heads = 2, .bias_distances = 5, .order = HeadOrder::kTile},
      {.heads = 3, .bias_distances = 37, .sinks = true},
      {.heads = 2, .kv_heads = 2, .window = 40, .bias_distances = 45},
      {.heads = 3, .window = 20, .bias_distances = 7},
      {.heads = 2, .bias_distances = 400}};
  const std::vector<OpenRow> rows = WholeSequences();
  uint64_t seed = 1;
  for (const KvCacheType type : kOpenTypes) {
    for (const OpenLayer& layer : layers) {
      OpenScene scene(GetParam(), layer, type, kOpenLengths, seed++);
      if (!scene.ok()) continue;
      const std::vector<float> queries = scene.RandomQueries(rows.size());
      ASSERT_TRUE(scene.Near(rows, queries, scene.Run(rows, queries)));
    }
  }
}

// The rows' positions have nothing to do with the length of the source, neither with one row of
// each sequence, as in decoding, nor with several.
TEST_P(BidirectionalAttentionTest, SourcesMatchDoubleArithmetic) {
  const OpenLayer layers[] = {
      {.heads = 4, .kv_heads = 2, .table = 1},
      {.heads = 6, .head_dim = 24, .table = 1, .soft_cap = 2.0f, .sinks = true},
      {.heads = 2, .kv_heads = 2, .head_dim = 80, .table = 1, .order = HeadOrder::kTile},
      {.heads = 3, .head_dim = 40, .table = 1, .latent_dim = 24}};
  std::vector<OpenRow> single, several;
  for (int s = 0; s < static_cast<int>(kOpenLengths.size()); ++s) {
    single.push_back({s, s % 3 == 0 ? 1000 + s : s});
    for (int p = 0; p < 1 + s; ++p) several.push_back({s, 30 * s + p});
  }
  uint64_t seed = 100;
  for (const KvCacheType type : kOpenTypes) {
    for (const OpenLayer& layer : layers) {
      OpenScene scene(GetParam(), layer, type, kOpenLengths, seed++);
      if (!scene.ok()) continue;
      for (const std::vector<OpenRow>& rows : {single, several}) {
        const std::vector<float> queries = scene.RandomQueries(rows.size());
        ASSERT_TRUE(scene.Near(rows, queries, scene.Run(rows, queries)));
      }
    }
  }
}

// A row's bits must not depend on other rows, on the order of sequences or on threads.
TEST_P(BidirectionalAttentionTest, ARowsBitsAreItsOwn) {
  Random random(7);
  const std::vector<OpenRow> rows = WholeSequences();
  for (int trial = 0; trial < 12; ++trial) {
    OpenLayer layer;
    layer.kv_heads = trial % 4 == 3 ? 1 : 1 + random.Below(3);
    layer.heads = layer.kv_heads * (1 + random.Below(5));
    layer.head_dim = 4 * (2 + random.Below(12));
    layer.table = trial % 3 == 2 ? 1 : 0;
    layer.window = layer.table == 1 || trial % 2 == 0 ? 0 : 1 + random.Below(70);
    if (trial % 4 == 1) layer.bias_distances = 1 + random.Below(60);
    if (trial % 4 == 3) layer.latent_dim = layer.head_dim - 1;
    layer.sinks = trial % 5 == 0;
    const KvCacheType type = kOpenTypes[trial / 4];
    const DType dtype = trial % 2 == 0 ? DType::kF32 : DType::kBF16;
    OpenScene one(WithThreads(1), layer, type, kOpenLengths, 200 + trial);
    OpenScene many(WithThreads(5), layer, type, kOpenLengths, 200 + trial);
    if (!one.ok()) continue;
    const std::vector<float> queries = one.RandomQueries(rows.size());
    const std::vector<float> all = one.Run(rows, queries, dtype);
    ASSERT_EQ(all, many.Run(rows, queries, dtype)) << layer.Describe();
    const auto query_of = [&](size_t r) { return queries.begin() + r * one.width(); };
    const auto result_of = [&](size_t r) { return all.begin() + r * one.out_width(); };

    std::vector<OpenRow> turned;
    std::vector<float> turned_queries, expected;
    for (size_t end = rows.size(), begin; end > 0; end = begin) {
      for (begin = end - 1; begin > 0 && rows[begin - 1].sequence == rows[begin].sequence;) --begin;
      const std::vector<OpenRow> alone(rows.begin() + begin, rows.begin() + end);
      const std::vector<float> asked(query_of(begin), query_of(end));
      ASSERT_EQ(many.Run(alone, asked, dtype), std::vector<float>(result_of(begin), result_of(end)))
          << layer.Describe() << ", sequence " << alone[0].sequence << " alone";
      turned.insert(turned.end(), alone.begin(), alone.end());
      turned_queries.insert(turned_queries.end(), asked.begin(), asked.end());
      expected.insert(expected.end(), result_of(begin), result_of(end));
    }
    ASSERT_EQ(many.Run(turned, turned_queries, dtype), expected) << layer.Describe() << ", turned";
    for (size_t r = 0; r < rows.size(); r += 1 + random.Below(40)) {
      ASSERT_EQ(many.Run({rows[r]}, {query_of(r), query_of(r + 1)}, dtype),
                std::vector<float>(result_of(r), result_of(r + 1)))
          << layer.Describe() << ", row " << r << " alone";
    }
  }
}

// In routed attention, every assignment of a token has its own query row.
TEST_P(BidirectionalAttentionTest, RowsOfAPlanAreRowsOfTheirTokens) {
  Random random(8);
  const std::vector<OpenRow> rows = WholeSequences();
  const auto tokens = static_cast<int>(rows.size());
  constexpr int kExperts = 5;
  for (const KvCacheType type : kOpenTypes) {
    for (const OpenLayer& layer : {OpenLayer{.heads = 2, .kv_heads = 2, .window = 9},
                                   OpenLayer{.heads = 1, .head_dim = 24, .table = 1}}) {
      OpenScene scene(GetParam(), layer, type, kOpenLengths, 300);
      if (!scene.ok()) continue;
      std::vector<std::vector<int>> routes(rows.size());
      for (int t = 0; t < tokens; ++t) {
        for (int e = 0; e < kExperts; ++e) {
          if (e == t % kExperts || random.Below(3) == 0) routes[t].push_back(e);
        }
      }
      scene.Begin(rows);
      const Grouped grouped = MakePlan(scene.backend(), kExperts, routes);
      const std::vector<float> queries =
          scene.RandomQueries(static_cast<size_t>(grouped.plan.capacity));
      const DeviceRows q = MakeRows(scene.backend(), queries, scene.width());
      const DeviceRows out = MakeRows(scene.backend(), q.view.rows, scene.out_width(),
                                      scene.out_width(), DType::kF32, nullptr);
      scene.Attend(q.view, out.view, &grouped.plan);
      const std::vector<float> results = HostRows(scene.backend(), out.view);
      std::vector<OpenRow> assigned;
      for (int e = 0; e < kExperts; ++e) {
        for (int t = 0; t < tokens; ++t) {
          if (std::ranges::find(routes[t], e) != routes[t].end()) assigned.push_back(rows[t]);
        }
      }
      ASSERT_LE(static_cast<int>(assigned.size()), grouped.plan.capacity);
      ASSERT_TRUE(scene.Near(assigned, queries, results));
    }
  }
}

// A recorded step reads the lengths of the step that replays it.
TEST_P(BidirectionalAttentionTest, ReplayedStepsHaveTheirOwnLengths) {
  const OpenLayer layer{.heads = 4, .kv_heads = 2, .table = 1};
  OpenScene scene(GetParam(), layer, KvCacheType::kBF16, kOpenLengths, 400);
  Backend& backend = scene.backend();
  const DeviceRows q = MakeRows(backend, 8, scene.width(), scene.width(), DType::kF32, nullptr);
  const DeviceRows out =
      MakeRows(backend, 8, scene.out_width(), scene.out_width(), DType::kF32, nullptr);
  const std::vector<int32_t> lengths = scene.counts();
  for (int step = 0; step < 5; ++step) {
    for (size_t i = 0; i < lengths.size(); ++i) {
      scene.counts()[i] = std::max(1, lengths[i] - 17 * step);
    }
    std::vector<OpenRow> rows;
    for (int s = 0; s < 6; ++s) rows.push_back({(s + step) % 7, 3 * s + step});
    const std::vector<float> queries = scene.RandomQueries(8);
    backend.CopyFromHost(queries, q.view);
    RowsView query = q.view, output = out.view;
    query.rows = output.rows = scene.Begin(rows, &scene, true).tokens;
    backend.RunStep([&] { scene.Attend(query, output); });
    backend.FinishStep();
    output.rows = static_cast<int64_t>(rows.size());
    ASSERT_TRUE(scene.Near(rows, queries, HostRows(backend, output))) << "step " << step;
  }
  if (GetParam().device != "cpu") {
    EXPECT_GE(backend.replayed_steps(), 2u);
  }
  backend.ForgetSteps(&scene);
}

// The layers of a step may be causal or not and read different tables: each sees what is its own.
TEST_P(BidirectionalAttentionTest, LayersOfAStepDiffer) {
  OpenLayer layer{.heads = 4, .kv_heads = 2, .causal = true};
  OpenScene scene(GetParam(), layer, KvCacheType::kF32, kOpenLengths, 500);
  std::vector<OpenRow> single;
  for (int s = 0; s < static_cast<int>(kOpenLengths.size()); ++s) {
    single.push_back({s, kOpenLengths[s][0] - 1});
  }
  for (const std::vector<OpenRow>& rows : {single, WholeSequences()}) {
    const std::vector<float> queries = scene.RandomQueries(rows.size());
    scene.Begin(rows);
    for (const auto& [causal, table, window] :
         {std::tuple{true, 0, 0}, {false, 0, 0}, {false, 1, 0}, {false, 0, 9}, {true, 0, 9}}) {
      layer.causal = causal;
      layer.table = table;
      layer.window = window;
      scene.set_layer(layer);
      const DeviceRows q = MakeRows(scene.backend(), queries, scene.width());
      const DeviceRows out = MakeRows(scene.backend(), q.view.rows, scene.out_width(),
                                      scene.out_width(), DType::kF32, nullptr);
      scene.Attend(q.view, out.view);
      ASSERT_TRUE(scene.Near(rows, queries, HostRows(scene.backend(), out.view)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, BidirectionalAttentionTest,
                         ::testing::ValuesIn(AvailableBackends()),
                         [](const auto& info) { return BackendName(info.param); });

}  // namespace
}  // namespace moeserve::testing
