// The CPU's attention in tiles and blocks: results for every shape of a step, and independence of a
// row's bits from other rows.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "kernels/base/exp.h"
#include "kernels/cpu/isa/isa.h"
#include "kernels/cpu/isa/kernel_table.h"
#include "tests/reference/oracle.h"
#include "tests/support/backends.h"
#include "tests/support/compare.h"
#include "tests/support/device_rows.h"
#include "tests/support/distance_biases.h"
#include "tests/support/head_order.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

constexpr KvCacheType kTileTypes[] = {KvCacheType::kF32, KvCacheType::kBF16, KvCacheType::kInt8};

struct Shape {
  int heads = 1;
  int kv_heads = 1;
  int head_dim = 16;
  HeadOrder order = HeadOrder::kInterleave;
  int window = 0;
  KvCacheType type = KvCacheType::kF32;
  float soft_cap = 0.0f;
  bool sinks = false;
  int latent_dim = 0;      // KvLayerShape::latent_dim
  int bias_distances = 0;  // AttentionArgs::bias_distances; 0: no biases

  int value_dim() const { return latent_dim > 0 ? latent_dim : head_dim; }
  // Returns the sink of a head, if there are sinks: below, among and above usual scores.
  std::optional<double> Sink(int head) const {
    return sinks ? std::optional<double>(2.5 * (head % 4) - 3.0) : std::nullopt;
  }
};

// The sequence and position of one row of queries.
struct Query {
  int sequence;
  int position;
};

// Returns a head's elements after storing them in the cache.
std::vector<double> Cached(const float* x, int n, KvCacheType type) {
  std::vector<double> out;
  float largest = 0.0f;
  for (int i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
  for (int i = 0; i < n; ++i) {
    if (type == KvCacheType::kF32) {
      out.push_back(x[i]);
    } else if (type == KvCacheType::kBF16) {
      out.push_back(F32FromBf16(Bf16FromF32(x[i])));
    } else {
      out.push_back(largest == 0.0f
                        ? 0.0
                        : std::nearbyint(x[i] * (127.0f / largest)) * double{largest / 127.0f});
    }
  }
  return out;
}

// One backend, and a cache that contains the given sequences.
class Attended {
 public:
  // `keys` and `values` have one entry per sequence: [length][kv_heads * head_dim].
  Attended(const BackendOptions& options, const Shape& shape,
           const std::vector<std::vector<float>>& keys,
           const std::vector<std::vector<float>>& values, int chunk)
      : shape_(shape), backend_(std::move(CreateBackend(options)).value()) {
    const int width = shape.kv_heads * shape.head_dim;
    int64_t blocks = 0;
    for (const auto& k : keys) blocks += Blocks(static_cast<int>(k.size()) / width);
    cache_ =
        std::move(backend_->NewKvCache({{2, 8}, {shape.kv_heads, shape.head_dim, shape.latent_dim}},
                                       shape.type, {blocks + 1}))
            .value();
    tables_.resize(keys.size());
    // block ids descend, so that consecutive blocks are not adjacent
    int32_t next = static_cast<int32_t>(blocks);
    for (size_t s = 0; s < keys.size(); ++s) {
      for (int b = 0; b < Blocks(static_cast<int>(keys[s].size()) / width); ++b) {
        tables_[s].push_back(next--);
      }
    }
    spans_.assign(tables_.begin(), tables_.end());
    for (size_t s = 0; s < keys.size(); ++s) {
      const int length = static_cast<int>(keys[s].size()) / width;
      for (int at = 0; at < length; at += chunk) {
        const int end = std::min(length, at + chunk);
        std::vector<Query> rows;
        for (int p = at; p < end; ++p) rows.push_back({static_cast<int>(s), p});
        Begin(rows);
        const auto part = [&](const std::vector<float>& x) {
          return std::vector<float>(x.begin() + at * width, x.begin() + end * width);
        };
        const DeviceRows k = MakeRows(*backend_, part(keys[s]), width);
        const DeviceRows v = MakeRows(*backend_, part(values[s]), width);
        backend_->AppendKv({.cache = cache_.get(), .layer = 1, .keys = k.view, .values = v.view});
      }
    }
  }

  static int Blocks(int tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

  // Returns the output rows [rows][heads * head_dim] in order. With a plan, `tokens` are the tokens
  // of the plan and `queries` the rows of its assignments.
  std::vector<float> Run(const std::vector<Query>& tokens, const std::vector<float>& queries,
                         DType dtype = DType::kF32, const RoutingPlan* plan = nullptr) {
    Begin(tokens);
    const DeviceRows q = MakeRows(*backend_, queries, shape_.heads * shape_.head_dim);
    const int width = shape_.heads * shape_.value_dim();
    const DeviceRows out = MakeRows(*backend_, q.view.rows, width, width + 3, dtype, nullptr);
    std::vector<float> sink_values;
    for (int h = 0; shape_.sinks && h < shape_.heads; ++h) {
      sink_values.push_back(static_cast<float>(*shape_.Sink(h)));
    }
    std::unique_ptr<DeviceBuffer> sinks;
    if (shape_.sinks) sinks = std::move(backend_->Upload(sink_values)).value();
    std::unique_ptr<DeviceBuffer> biases;
    if (shape_.bias_distances > 0)
      biases =
          std::move(backend_->Upload(DistanceBiases(shape_.heads, shape_.bias_distances))).value();
    backend_->Attention(
        {.cache = cache_.get(),
         .layer = 1,
         .plan = plan,
         .heads = shape_.heads,
         .order = shape_.order,
         .scale = Scale(),
         .soft_cap = shape_.soft_cap,
         .sinks = sinks == nullptr ? nullptr : static_cast<const float*>(sinks->data()),
         .bias = biases == nullptr ? nullptr : static_cast<const float*>(biases->data()),
         .bias_distances = shape_.bias_distances,
         .window = shape_.window,
         .query = q.view,
         .output = out.view});
    return HostRows(*backend_, out.view);
  }

  float Scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }
  KvCacheStorage& cache() { return *cache_; }
  std::vector<int32_t>& table(int sequence) { return tables_[sequence]; }

 private:
  void Begin(const std::vector<Query>& rows) {
    position_.clear();
    sequence_.clear();
    for (const Query& q : rows) {
      position_.push_back(q.position);
      sequence_.push_back(q.sequence);
    }
    tokens_.assign(rows.size(), 0);
    backend_->BeginStep(
        {.token_ids = tokens_, .position = position_, .sequence = sequence_, .page_tables = spans_},
        nullptr, false);
  }

  const Shape shape_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<KvCacheStorage> cache_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<std::span<const int32_t>> spans_;
  std::vector<int32_t> position_, sequence_, tokens_;
};

struct Data {
  std::vector<std::vector<float>> keys, values;
};

Data RandomData(Random& random, const Shape& shape, const std::vector<int>& lengths) {
  Data data;
  for (int n : lengths) {
    data.keys.push_back(random.Normals(int64_t{n} * shape.kv_heads * shape.head_dim));
    data.values.push_back(random.Normals(int64_t{n} * shape.kv_heads * shape.head_dim));
  }
  return data;
}

void ScaleAll(std::vector<std::vector<float>>& rows, float factor) {
  for (std::vector<float>& row : rows) {
    for (float& x : row) x *= factor;
  }
}

// Parts of prompts and single rows, with lengths around multiples of 16 and 256 positions.
const std::vector<int> kLengths = {600, 520, 10, 257, 256, 17};

std::vector<Query> RaggedStep() {
  std::vector<Query> rows;
  const auto add = [&](int sequence, int begin, int end) {
    for (int p = begin; p < end; ++p) rows.push_back({sequence, p});
  };
  add(0, 249, 262);
  add(1, 503, 520);
  add(2, 0, 10);
  add(3, 256, 257);
  add(4, 255, 256);
  add(5, 14, 17);
  add(0, 599, 600);
  return rows;
}

std::vector<BackendOptions> CpuBackends(int threads) {
  std::vector<BackendOptions> options = AvailableBackends(threads);
  std::erase_if(options, [](const BackendOptions& o) { return o.device != "cpu"; });
  return options;
}

bool SameBits(const float* a, const float* b, int64_t n) {
  return std::memcmp(a, b, static_cast<size_t>(n) * sizeof(float)) == 0;
}

class AttentionTileTest : public ::testing::TestWithParam<BackendOptions> {
 protected:
  static BackendOptions WithThreads(int threads) {
    BackendOptions o = GetParam();
    o.threads = threads;
    return o;
  }
};

TEST_P(AttentionTileTest, MatchesDoubleArithmetic) {
  Random random(1);
  std::vector<Shape> shapes;
  for (const KvCacheType type : kTileTypes) {
    shapes.push_back({1, 1, 80, HeadOrder::kInterleave, 0, type});
    shapes.push_back({6, 2, 12, HeadOrder::kTile, 0, type});
    shapes.push_back({14, 2, 16, HeadOrder::kInterleave, 300, type});
    shapes.push_back({3, 3, 136, HeadOrder::kInterleave, 5, type});
    shapes.push_back({9, 1, 32, HeadOrder::kTile, 257, type});
    shapes.push_back({4, 2, 24, HeadOrder::kInterleave, 0, type, 1.5f});
    shapes.push_back({6, 2, 16, HeadOrder::kTile, 0, type, 0.0f, true});
    shapes.push_back({8, 1, 16, HeadOrder::kInterleave, 40, type, 50.0f, true});
    shapes.push_back({9, 1, 40, HeadOrder::kInterleave, 0, type, 0.0f, false, 27});
    shapes.push_back({5, 1, 48, HeadOrder::kInterleave, 300, type, 3.0f, false, 32});
    // Biases of distances: one for all, those of some positions, and of more than a text has.
    shapes.push_back({4, 2, 16, HeadOrder::kTile, 0, type, 0.0f, false, 0, 1});
    shapes.push_back({6, 2, 24, HeadOrder::kInterleave, 0, type, 0.0f, true, 0, 37});
    shapes.push_back({3, 1, 16, HeadOrder::kInterleave, 300, type, 0.0f, false, 0, 270});
    shapes.push_back({2, 2, 12, HeadOrder::kInterleave, 0, type, 0.0f, false, 0, 900});
  }
  const std::vector<Query> rows = RaggedStep();
  for (const Shape& shape : shapes) {
    const Data data = RandomData(random, shape, kLengths);
    Attended attended(GetParam(), shape, data.keys, data.values, 512);
    const int dim = shape.head_dim;
    const int64_t width = int64_t{shape.heads} * dim;
    const std::vector<float> queries = random.Normals(static_cast<int64_t>(rows.size()) * width);
    const std::vector<float> out = attended.Run(rows, queries);
    const std::vector<float> multiplied = MultipliedQueries(GetParam(), shape.type, queries);
    for (size_t r = 0; r < rows.size(); ++r) {
      const int last = rows[r].position;
      const int first = shape.window > 0 ? std::max(0, last - shape.window + 1) : 0;
      for (int h = 0; h < shape.heads; ++h) {
        const int kv_head = KvHeadOf(shape.order, h, shape.heads, shape.kv_heads);
        Matrix keys, values;
        for (int p = first; p <= last; ++p) {
          const int64_t at = (int64_t{p} * shape.kv_heads + kv_head) * dim;
          keys.push_back(Cached(data.keys[rows[r].sequence].data() + at, dim, shape.type));
          values.push_back(Cached(data.values[rows[r].sequence].data() + at, dim, shape.type));
          if (shape.latent_dim > 0) {
            values.back().assign(keys.back().begin(), keys.back().begin() + shape.latent_dim);
          }
        }
        const int64_t at = static_cast<int64_t>(r) * width + h * dim;
        const int64_t out_at = (static_cast<int64_t>(r) * shape.heads + h) * shape.value_dim();
        const auto exact = [&](const Matrix& v) {
          return OracleAttention({multiplied.begin() + at, multiplied.begin() + at + dim}, keys, v,
                                 attended.Scale(), shape.soft_cap, shape.Sink(h),
                                 BiasesOfKeys(shape.heads, shape.bias_distances, h, first, last));
        };
        ASSERT_TRUE(AttentionNear(GetParam(), shape.type,
                                  {out.begin() + out_at, out.begin() + out_at + shape.value_dim()},
                                  exact(values), exact(Magnitudes(values)), 4e-6))
            << Name(shape.type) << ", window " << shape.window << ", dim " << dim << ", row " << r
            << ", head " << h;
      }
    }
  }
}

// A row's bits must not depend on other rows, prompt chunks and threads: it is computed alone, in
// steps of a few rows, together with all rows, and where threads take blocks of positions one by
// one.
TEST_P(AttentionTileTest, ARowsBitsAreItsOwn) {
  Random random(2);
  for (int trial = 0; trial < 12; ++trial) {
    Shape shape;
    shape.kv_heads = 1 + random.Below(3);
    shape.heads = shape.kv_heads * (1 + random.Below(5));
    shape.head_dim = 4 * (1 + random.Below(trial % 2 == 0 ? 12 : 40));
    shape.order = random.Below(2) == 0 ? HeadOrder::kTile : HeadOrder::kInterleave;
    shape.window = trial % 3 == 0 ? 0 : 1 + random.Below(400);
    shape.type = kTileTypes[trial % 3];
    if (trial >= 6) {
      shape.kv_heads = 1;
      shape.latent_dim = shape.head_dim - 1 - random.Below(3);
    } else if (trial >= 3) {
      shape.bias_distances = 1 + random.Below(300);
    }
    Data data = RandomData(random, shape, kLengths);
    // Small values have subnormal numbers among their sums, and small keys among their products.
    if (trial % 4 == 1) ScaleAll(data.values, 1e-38f);
    if (trial % 4 == 2) ScaleAll(data.keys, 1e-38f);
    const std::vector<Query> rows = RaggedStep();
    const int64_t width = int64_t{shape.heads} * shape.head_dim;
    const int64_t out_width = int64_t{shape.heads} * shape.value_dim();
    const std::vector<float> queries = random.Normals(static_cast<int64_t>(rows.size()) * width);
    Attended one(WithThreads(1), shape, data.keys, data.values, 1000);
    Attended many(WithThreads(5), shape, data.keys, data.values, 37);
    const std::vector<float> all = one.Run(rows, queries);
    const std::vector<float> threads = many.Run(rows, queries);
    ASSERT_TRUE(SameBits(all.data(), threads.data(), static_cast<int64_t>(all.size())));
    for (size_t begin = 0, end; begin < rows.size(); begin = end) {
      end = std::min(rows.size(), begin + 1 + static_cast<size_t>(random.Below(4)));
      const std::vector<Query> part(rows.begin() + begin, rows.begin() + end);
      const std::vector<float> q(queries.begin() + begin * width, queries.begin() + end * width);
      for (Attended* attended : {&one, &many}) {
        const std::vector<float> out = attended->Run(part, q);
        ASSERT_TRUE(
            SameBits(out.data(), all.data() + begin * out_width, static_cast<int64_t>(out.size())))
            << "trial " << trial << ", rows " << begin << " to " << end;
      }
    }
  }
}

// In routed attention, every assignment of a token has its own query row, in whatever order the
// plan lists the assignments.
TEST_P(AttentionTileTest, RowsOfAPlanAreRowsOfTheirTokens) {
  Random random(3);
  for (const KvCacheType type : kTileTypes) {
    const Shape shape{2, 2, 24, HeadOrder::kTile, 0, type};
    const Data data = RandomData(random, shape, kLengths);
    const std::vector<Query> tokens = RaggedStep();
    const int experts = 5;
    std::vector<int32_t> row_of_assignment, row_offsets = {0}, assignments_of_row;
    std::vector<std::vector<int32_t>> of_token(tokens.size());
    for (int e = 0; e < experts; ++e) {
      for (int t = 0; t < static_cast<int>(tokens.size()); ++t) {
        if (random.Below(2) == 0) continue;
        of_token[t].push_back(static_cast<int32_t>(row_of_assignment.size()));
        row_of_assignment.push_back(t);
      }
    }
    for (const auto& assignments : of_token) {
      assignments_of_row.insert(assignments_of_row.end(), assignments.begin(), assignments.end());
      row_offsets.push_back(static_cast<int32_t>(assignments_of_row.size()));
    }
    const int count = static_cast<int>(row_of_assignment.size());
    const RoutingPlan plan{.rows = static_cast<int>(tokens.size()),
                           .num_experts = experts,
                           .num_assignments = count,
                           .capacity = count,
                           .row_of_assignment = row_of_assignment.data(),
                           .row_offsets = row_offsets.data(),
                           .assignments_of_row = assignments_of_row.data()};
    const int64_t width = int64_t{shape.heads} * shape.head_dim;
    const std::vector<float> queries = random.Normals(count * width);
    Attended attended(GetParam(), shape, data.keys, data.values, 512);
    const std::vector<float> routed = attended.Run(tokens, queries, DType::kF32, &plan);
    for (int a = 0; a < count; ++a) {
      const std::vector<float> alone =
          attended.Run({tokens[row_of_assignment[a]]},
                       {queries.begin() + a * width, queries.begin() + (a + 1) * width});
      ASSERT_TRUE(SameBits(alone.data(), routed.data() + a * width, width)) << "assignment " << a;
    }
  }
}

// A NaN or an infinity in a key or value must reach every row that attends to its position, and no
// other row, not even of the same tile.
TEST_P(AttentionTileTest, ANumericFailureReachesThoseWhoSeeIt) {
  Random random(4);
  const std::vector<Query> rows = RaggedStep();
  for (const KvCacheType type : kTileTypes) {
    for (const bool in_key : {false, true}) {
      for (const float bad :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        Shape shape{2, 1, 16, HeadOrder::kInterleave, 0, type};
        shape.window = in_key ? 8 : 0;
        const Data data = RandomData(random, shape, kLengths);
        Data broken = data;
        const int position = 255;
        (in_key ? broken.keys : broken.values)[0][position * shape.head_dim + 3] = bad;
        const int64_t width = int64_t{shape.heads} * shape.head_dim;
        const std::vector<float> q = random.Normals(static_cast<int64_t>(rows.size()) * width);
        Attended sound(GetParam(), shape, data.keys, data.values, 512);
        Attended faulty(GetParam(), shape, broken.keys, broken.values, 512);
        const std::vector<float> expected = sound.Run(rows, q);
        const std::vector<float> out = faulty.Run(rows, q);
        for (size_t r = 0; r < rows.size(); ++r) {
          const bool sees = rows[r].sequence == 0 && rows[r].position >= position &&
                            (shape.window == 0 || rows[r].position - shape.window < position);
          const float* row = out.data() + static_cast<int64_t>(r) * width;
          if (!sees) {
            EXPECT_TRUE(SameBits(row, expected.data() + static_cast<int64_t>(r) * width, width))
                << "row " << r;
            continue;
          }
          for (int h = 0; h < shape.heads; ++h) {
            const float* head = row + h * shape.head_dim;
            // An infinite key may have no effect: if its score is -inf, its weight is 0.
            if (in_key && std::isinf(bad) && type != KvCacheType::kInt8) continue;
            EXPECT_TRUE(
                std::any_of(head, head + shape.head_dim, [](float v) { return !std::isfinite(v); }))
                << Name(type) << ", row " << r << ", head " << h;
          }
        }
      }
    }
  }
}

TEST_P(AttentionTileTest, ACopiedBlockIsTheSame) {
  Random random(5);
  for (const KvCacheType type : kTileTypes) {
    const Shape shape{4, 2, 20, HeadOrder::kInterleave, 0, type};
    const Data data = RandomData(random, shape, {40});
    Attended attended(GetParam(), shape, data.keys, data.values, 40);
    const std::vector<float> q = random.Normals(int64_t{shape.heads} * shape.head_dim);
    const std::vector<float> before = attended.Run({{0, 39}}, q);
    attended.cache().CopyPage(0, attended.table(0)[1], 0);  // no sequence uses block 0
    attended.table(0)[1] = 0;
    const std::vector<float> after = attended.Run({{0, 39}}, q);
    EXPECT_TRUE(SameBits(before.data(), after.data(), static_cast<int64_t>(before.size())));
  }
}

// Output rows in bf16 must equal the rounded f32 rows.
TEST_P(AttentionTileTest, OutputIsRoundedOnce) {
  Random random(6);
  const Shape shape{4, 2, 20, HeadOrder::kInterleave, 0, KvCacheType::kInt8};
  const Data data = RandomData(random, shape, kLengths);
  Attended attended(GetParam(), shape, data.keys, data.values, 512);
  const std::vector<Query> rows = RaggedStep();
  const std::vector<float> q =
      random.Normals(static_cast<int64_t>(rows.size()) * shape.heads * shape.head_dim);
  std::vector<float> wide = attended.Run(rows, q);
  const std::vector<float> narrow = attended.Run(rows, q, DType::kBF16);
  for (float& v : wide) v = F32FromBf16(Bf16FromF32(v));
  EXPECT_TRUE(SameBits(wide.data(), narrow.data(), static_cast<int64_t>(wide.size())));
}

INSTANTIATE_TEST_SUITE_P(Backends, AttentionTileTest, ::testing::ValuesIn(CpuBackends(2)),
                         [](const auto& info) { return BackendName(info.param); });

// Heads at the limits of what the int8 cache's scale can represent: zeros, tiny numbers and the
// largest ones.
// The value of position p is 1 in column p alone, so the sums are the weights of the positions.
TEST(AttentionKernel, WeightsHaveTheBitsOfContractExp) {
  constexpr int kPositions = cpu::kAttentionBlock;
  constexpr float kSmallest = -0x1.5d589ep+6f;  // below, ContractExp() is 0
  std::vector<float> scores = {0.0f,
                               -0.0f,
                               kSmallest,
                               std::nextafter(kSmallest, 0.0f),
                               std::nextafter(kSmallest, -1e9f),
                               -1e-40f,
                               -1e30f,
                               -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::lowest()};
  while (scores.size() < kPositions) {
    const auto i = static_cast<float>(scores.size());
    scores.push_back(i < 100 ? -0.01f * i : -89.0f * (i - 100) / (kPositions - 100));
  }
  std::vector<float> values(int64_t{kPositions} * kPositions, 0.0f);
  for (int p = 0; p < kPositions; ++p) values[int64_t{p} * kPositions + p] = 1.0f;
  std::vector<int32_t> blocks(kPositions / kPageTokens);
  std::iota(blocks.begin(), blocks.end(), 0);
  for (const cpu::KernelTable* table : cpu::SupportedTables()) {
    SCOPED_TRACE(table->name);
    const float one = 1.0f;
    const float* const query = &one;
    const int32_t begin = 0, end = kPositions;
    float largest = 0.0f, total = 0.0f;
    std::vector<float> scratch(cpu::kAttentionScratch);
    std::vector<float> sums(cpu::kMaxAttentionRows * kPositions);
    table->attention_tile({.rows = 1,
                           .queries = &query,
                           .begin = &begin,
                           .end = &end,
                           .type = KvCacheType::kF32,
                           .keys = reinterpret_cast<const char*>(scores.data()),
                           .values = reinterpret_cast<const char*>(values.data()),
                           .latent_values = nullptr,
                           .page_table = blocks.data(),
                           .key_page_bytes = kPageTokens * sizeof(float),
                           .value_page_bytes = kPageTokens * kPositions * sizeof(float),
                           .key_head_bytes = 0,
                           .value_head_bytes = 0,
                           .head_dim = 1,
                           .value_dim = kPositions,
                           .padded_dim = kPositions,
                           .block = 0,
                           .scale = 1.0f,
                           .soft_cap = 0.0f,
                           .bias = nullptr,
                           .bias_distances = 0,
                           .position = nullptr,
                           .scratch = scratch.data(),
                           .rounded_queries = nullptr,
                           .operands = nullptr,
                           .largest = &largest,
                           .total = &total,
                           .sums = sums.data()});
    EXPECT_EQ(largest, 0.0f);
    for (int p = 0; p < kPositions; ++p) {
      EXPECT_EQ(BitsFromF32(sums[p]), BitsFromF32(ContractExp(scores[p]))) << scores[p];
    }
  }
}

TEST(KvCacheTypeTest, BytesOfExtremeHeads) {
  const Shape shape{1, 1, 16, HeadOrder::kInterleave, 0, KvCacheType::kInt8};
  for (const float largest : {0.0f, 1e-42f, 1e-30f, 1.0f, 3e38f}) {
    std::vector<float> value(16);
    for (int i = 0; i < 16; ++i) value[i] = largest * (static_cast<float>(i - 8) / 8.0f);
    Attended attended(CpuBackends(1)[0], shape, {std::vector<float>(16, 1.0f)}, {value}, 1);
    const std::vector<float> out = attended.Run({{0, 0}}, std::vector<float>(16, 1.0f));
    for (int i = 0; i < 16; ++i) {
      const double bound = std::max(double{largest} / 254.0 * 1.001, 1e-36);
      EXPECT_NEAR(out[i], value[i], bound) << "largest " << largest;
    }
  }
}

TEST(KvCacheTypeTest, ADeviceWithoutLatentVectorsInBytesSaysSo) {
  for (const BackendOptions& options : AvailableBackends()) {
    auto backend = std::move(CreateBackend(options)).value();
    EXPECT_TRUE(backend->NewKvCache({{1, 16}}, KvCacheType::kInt8, {1}).ok());
    const std::vector<KvLayerShape> latent = {{1, 16}, {1, 40, 32}};
    const auto cache = backend->NewKvCache(latent, KvCacheType::kInt8, {1});
    if (options.device == "cpu") {
      EXPECT_TRUE(cache.ok()) << cache.status();
      continue;
    }
    EXPECT_EQ(cache.status().code(), absl::StatusCode::kUnimplemented);
    EXPECT_NE(cache.status().message().find("kv-cache-dtype: expected f32 or bf16, found int8"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace moeserve::testing
