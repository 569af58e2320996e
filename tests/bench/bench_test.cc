// Tests the parts of `moeserve bench`: shapes from flags, bytes and operations of steps, rate
// measurements, results, and model files for other programs.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/spec/weights.h"
#include "kernels/cpu/isa/isa.h"
#include "kernels/registry.h"
#include "server/bench/bench_cases.h"
#include "server/bench/bench_report.h"
#include "server/bench/bench_work.h"
#include "server/bench/synthetic_model.h"
#include "server/bench/synthetic_options.h"
#include "server/bench/weight_traffic.h"

namespace moeserve::server {
namespace {

// Returns the spec for these command line flags; InvalidArgument if the parser refuses them.
Result<ModelSpec> Shape(const std::string& line) {
  CLI::App app;
  SyntheticOptions options;
  AddSyntheticOptions(app, options);
  try {
    app.parse(line, false);
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  return BuildSyntheticSpec(options);
}

ModelSpec Good(const std::string& line) {
  Result<ModelSpec> spec = Shape(line);
  EXPECT_TRUE(spec.ok()) << line << ": " << spec.status().message();
  return spec.ok() ? *spec : ModelSpec();
}

int64_t Parameters(const ModelSpec& spec) {
  int64_t sum = 0;
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    int64_t n = 1;
    for (const int64_t d : t.shape) n *= d;
    sum += n;
  }
  return sum;
}

// Returns the flags of a small shape. `flags` replace its defaults.
std::string Tiny(const std::string& flags = "") {
  const std::pair<const char*, const char*> defaults[] = {
      {"--hidden", "64"}, {"--layers", "2"},  {"--heads", "4"},  {"--head-dim", "16"},
      {"--vocab", "300"}, {"--experts", "8"}, {"--widths", "32"}};
  std::string line = "--synthetic small " + flags;
  for (const auto& [flag, value] : defaults) {
    if (line.find(std::string(flag) + " ") != std::string::npos) continue;
    line += std::string(" ") + flag + " " + value;
  }
  return line;
}

TEST(SyntheticShapes, NamedOnesHaveTheirParameters) {
  const std::map<std::string, int64_t> expected = {
      {"small", 644'010'240},        {"medium", 2'930'680'320},
      {"small-dense", 112'873'728},  {"medium-dense", 551'330'304},
      {"small-hybrid", 684'994'008}, {"medium-hybrid", 3'066'062'640}};
  for (const auto& [name, parameters] : expected) {
    EXPECT_EQ(Parameters(Good("--synthetic " + name)), parameters) << name;
  }
  for (const std::string_view name : kSyntheticNames) {
    EXPECT_TRUE(Shape("--synthetic " + std::string(name)).ok());
  }
}

TEST(SyntheticShapes, FlagsChangeThem) {
  ModelSpec spec = Good(Tiny("--top-k 3 --score cosine --split-heads 4"));
  EXPECT_EQ(spec.hidden_size, 64);
  EXPECT_EQ(spec.num_layers(), 2);
  EXPECT_EQ(spec.vocab_size, 300);
  EXPECT_EQ(spec.attention(1).num_heads, 4);
  EXPECT_EQ(spec.attention(1).num_kv_heads, 4);
  EXPECT_DOUBLE_EQ(spec.attention(1).scale, 0.25);
  const RoutedLayerSpec routing = *spec.feed_forward(1).routing;
  EXPECT_EQ(routing.widths, std::vector<int>(8, 32));
  EXPECT_EQ(routing.select.k, 3);
  EXPECT_EQ(routing.split.heads, 4);
  EXPECT_EQ(routing.score.kind, ScoreKind::kCosine);
  EXPECT_EQ(routing.score.dim, 4);

  spec = Good("--synthetic small --heads 8 --kv-heads 2");
  EXPECT_EQ(spec.attention(0).num_heads, 8);
  EXPECT_EQ(spec.attention(0).num_kv_heads, 2);

  spec = Good("--synthetic small --widths 9,11,13,15");
  EXPECT_EQ(spec.feed_forward(0).routing->num_experts, 4);
  spec = Good("--synthetic small --experts 6 --widths 9,11,13");
  EXPECT_EQ(spec.feed_forward(0).routing->widths, (std::vector<int>{9, 11, 13, 9, 11, 13}));

  spec = Good("--synthetic small --ff dense");
  EXPECT_EQ(spec.feed_forward(0).width, 2 * 640);
  EXPECT_EQ(Good("--synthetic small --ff dense --widths 16").feed_forward(0).width, 16);

  spec = Good("--synthetic small --attention routed --attention-experts 8 --attention-top-k 5");
  const AttentionSpec& attention = spec.attention(0);
  ASSERT_TRUE(attention.routed());
  EXPECT_EQ(attention.num_kv_heads, 1);
  EXPECT_EQ(attention.routing->num_experts, 8);
  EXPECT_EQ(attention.routing->select.k, 5);
}

TEST(SyntheticShapes, FlagsChangeHybrids) {
  ModelSpec spec = Good("--synthetic small-hybrid --widths 16");
  EXPECT_EQ(spec.feed_forward(1).shared_width, 16);
  EXPECT_TRUE(spec.feed_forward(1).shared_gate);
  EXPECT_TRUE(spec.attention(3).gate);
  spec = Good("--synthetic small-hybrid --ff dense --attention routed --layers 8");
  EXPECT_EQ(spec.feed_forward(0).shared_width, 0);
  EXPECT_NE(spec.token_mixer(6)->delta(), nullptr);
  EXPECT_TRUE(spec.attention(7).routed());
}

TEST(SyntheticShapes, TopPTakesTopKAsItsLimit) {
  SelectSpec select = Good("--synthetic small --top-p 0.6").feed_forward(0).routing->select;
  EXPECT_EQ(select.kind, SelectKind::kTopP);
  EXPECT_EQ(select.max_experts, 32);
  select = Good("--synthetic small --top-p 0.999 --top-k 2").feed_forward(0).routing->select;
  EXPECT_DOUBLE_EQ(select.p, 0.999);
  EXPECT_EQ(select.max_experts, 2);
}

TEST(SyntheticShapes, NonsenseIsRefusedWithAReason) {
  const std::pair<const char*, const char*> refused[] = {
      {"--hidden 64", "--synthetic"},
      {"--synthetic huge", "--synthetic"},
      {"--synthetic small --score sphere", "--score"},
      {"--synthetic small --experts 4 --top-k 5", "select.k"},
      {"--synthetic small --experts 0", "--experts"},
      {"--synthetic small --experts 2000000000", "--experts"},
      {"--synthetic small --experts 4 --widths 1,2,3", "--widths"},
      {"--synthetic small --widths 0", "widths[0]"},
      {"--synthetic small --layers 0", "--layers"},
      {"--synthetic small --layers 2000000000", "--layers"},
      {"--synthetic small --heads 3 --kv-heads 2", "num_kv_heads"},
      {"--synthetic small --split-heads 7", "split.heads"},
      {"--synthetic small --hidden -1", "hidden_size"},
      {"--synthetic small --head-dim 0", "head_dim"},
      {"--synthetic small --head-dim 3", "position.fraction"},
      {"--synthetic small --ff dense --top-k 2", "--top-k"},
      {"--synthetic small --ff dense --widths 1,2", "--widths"},
      {"--synthetic small-dense --experts 4", "--experts"},
      {"--synthetic small-dense --ff routed", "--ff routed"},
      {"--synthetic small --attention-top-k 2", "--attention-top-k"},
      {"--synthetic small --attention routed --heads 4", "--heads"},
      {"--synthetic small --attention routed --attention-top-k 40", "select.k"},
      {"--synthetic small --top-p -0.1", "select.p"}};
  for (const auto& [line, reason] : refused) {
    const Result<ModelSpec> spec = Shape(line);
    ASSERT_FALSE(spec.ok()) << line;
    EXPECT_NE(spec.status().message().find(reason), std::string_view::npos)
        << line << ": " << spec.status().message();
  }
}

TEST(SyntheticShapes, TheDescriptionIsTheCommandLine) {
  SyntheticOptions options;
  CLI::App app;
  AddSyntheticOptions(app, options);
  const std::string line =
      "small --hidden 64 --attention routed --experts 4 --widths 9,11 --top-p 0.25 --score cosine";
  app.parse("--synthetic " + line, false);
  EXPECT_EQ(Describe(options), line);
}

// A routing plan in which every row selects the first k experts.
struct Plan {
  Plan(int rows, int experts, int k) : offsets(static_cast<size_t>(experts) + 1) {
    for (int e = 0; e <= experts; ++e) offsets[e] = std::min(e, k) * rows;
    plan.rows = rows;
    plan.num_experts = experts;
    plan.expert_offsets = offsets.data();
  }
  std::vector<int32_t> offsets;
  RoutingPlan plan;
};

TEST(StepWork, CountsTheActiveParametersOfNamedShapes) {
  const std::map<std::string, int64_t> expected = {{"small", 88'571'904},
                                                   {"medium", 503'316'480},
                                                   {"small-dense", 88'276'992},
                                                   {"medium-dense", 502'136'832}};
  for (const auto& [name, active] : expected) {
    const ModelSpec spec = Good("--synthetic " + name);
    constexpr int kTokens = 3;
    RoutedWork work(spec);
    for (int i = 0; i < spec.num_layers(); ++i) {
      if (!spec.feed_forward(i).routed()) continue;
      const RoutedLayerSpec& r = *spec.feed_forward(i).routing;
      work.Add(i, BlockKind::kFeedForward, Plan(kTokens, r.num_experts, r.select.k).plan);
    }
    const double head = 2.0 * kTokens * static_cast<double>(HeadMacs(spec));
    const StepOperations operations = Operations(spec, work, kTokens, {9, 11});
    EXPECT_EQ(operations.matrices + head, 2.0 * kTokens * static_cast<double>(active)) << name;
    // The scores and the weighted sum of values each take 2 operations per position and element of
    // a head.
    const AttentionSpec& a = spec.attention(0);
    EXPECT_EQ(operations.attention,
              4.0 * 10 * kTokens * spec.num_layers() * a.num_heads * a.head_dim);
  }
}

TEST(StepWork, SubTokensAndUnequalExperts) {
  const ModelSpec spec = Good(Tiny("--layers 1 --split-heads 4 --widths 8,16 --top-k 1"));
  RoutedWork work(spec);
  work.Add(0, BlockKind::kFeedForward, Plan(4, 8, 1).plan);  // one token, four sub-tokens
  EXPECT_EQ(work.experts(), 1);
  EXPECT_EQ(work.parameters(), 3 * 8 * 16);
  EXPECT_EQ(work.products(), 4 * 3 * 8 * 16);
  // The fixed MACs are the matrices q, k, v, o, split and merge, and the router's scores of
  // each sub-token.
  EXPECT_EQ(FixedMacs(spec), 6 * 64 * 64 + 4 * 8 * 16);
}

TEST(StepWork, RoutedAttention) {
  const ModelSpec spec = Good(
      "--synthetic small --hidden 64 --layers 1 --attention routed --attention-experts 6 "
      "--attention-top-k 3 --head-dim 16 --ff dense --widths 16 --vocab 300");
  RoutedWork work(spec);
  work.Add(0, BlockKind::kAttention, Plan(5, 6, 3).plan);
  EXPECT_EQ(work.parameters(), 3 * 2 * 16 * 64);
  EXPECT_EQ(work.attention_heads(0), 15);
  EXPECT_EQ(Operations(spec, work, 5, {7, 7}).attention, 4.0 * 7 * 15 * 16);
  EXPECT_EQ(CacheBytesRead(spec, KvCacheType::kBF16, {1, 1}), 2 * 16 * 2);
}

TEST(StepWork, WindowsBoundWhatIsSeen) {
  for (const int64_t first : {1, 5, 20}) {
    for (const int64_t last : {20, 21, 60}) {
      for (const int window : {1, 4, 20, 21, 59, 60, 100}) {
        double sum = 0;
        for (int64_t v = first; v <= last; ++v)
          sum += static_cast<double>(std::min<int64_t>(v, window));
        EXPECT_NEAR((VisiblePositions{first, last}.Mean(window)),
                    sum / static_cast<double>(last - first + 1), 1e-9)
            << first << ' ' << last << ' ' << window;
      }
    }
  }
  const ModelSpec spec = Good("--synthetic small --layers 2 --window 8");
  const AttentionSpec& a = spec.attention(1);
  EXPECT_EQ(a.window, 8);
  EXPECT_EQ(CacheBytesRead(spec, KvCacheType::kF32, {100, 200}),
            2.0 * 2 * 8 * a.num_kv_heads * a.head_dim * 4);
  const RoutedWork none(spec);
  EXPECT_EQ(Operations(spec, none, 3, {100, 200}).attention,
            2.0 * 4 * 8 * 3 * a.num_heads * a.head_dim);
}

TEST(Rates, TheSlowerOfMemoryAndArithmeticBounds) {
  constexpr KvCacheType kF32 = KvCacheType::kF32;
  CaseResult result;
  result.tokens_per_step = 4;
  result.bytes_per_step = 100;
  result.operations_per_step.matrices = 1000;
  MachineRates rates{.read_bandwidth = 200, .f32 = 1000, .bf16 = 4000};
  EXPECT_DOUBLE_EQ(result.Bound(rates, {.compute = DType::kBF16}, kF32),
                   8.0);                                 // memory takes 0.5 s
  EXPECT_DOUBLE_EQ(result.Bound(rates, {}, kF32), 4.0);  // arithmetic takes 1 s
  rates.bf16 = 0;  // 0 means not measured: bf16 is widened and computed at the f32 rate
  EXPECT_DOUBLE_EQ(result.Bound(rates, {.compute = DType::kBF16}, kF32), 4.0);
  const ModelOptions int8{DType::kBF16, Quantization::kInt8};
  EXPECT_DOUBLE_EQ(result.Bound(rates, int8, kF32), 4.0);
  rates.int8 = 4000;
  EXPECT_DOUBLE_EQ(result.Bound(rates, int8, kF32), 8.0);
  // Attention is computed in f32, or in bf16 if the cache is.
  result.operations_per_step.attention = 500;
  EXPECT_DOUBLE_EQ(result.Bound(rates, int8, kF32), 4.0 / 0.75);
  rates.bf16 = 1000;
  EXPECT_DOUBLE_EQ(result.Bound(rates, int8, KvCacheType::kBF16), 4.0 / 0.75);
  rates.bf16 = 2000;
  EXPECT_DOUBLE_EQ(result.Bound(rates, int8, KvCacheType::kBF16), 8.0);
  EXPECT_DOUBLE_EQ(result.Bound(rates, int8, kF32), 4.0 / 0.75);
  EXPECT_DOUBLE_EQ(result.Bound({}, {}, kF32), 0.0);
  const MachineRates memory{.read_bandwidth = 200};
  EXPECT_DOUBLE_EQ(result.Bound(memory, {}, kF32), 0.0);
  result.decode = true;
  EXPECT_DOUBLE_EQ(result.Bound(memory, {}, kF32), 8.0);
}

TEST(Rates, SharesAreThoseOfSteadyMeasurements) {
  constexpr MachineRates kSlow = {.read_bandwidth = 100}, kFast = {.read_bandwidth = 200};
  constexpr KvCacheType kF32 = KvCacheType::kF32;
  CaseResult result;
  result.decode = true;
  result.tokens_per_step = 1;
  result.bytes_per_step = 10;  // bounds of 10 and 20 tokens per second
  result.rounds = {{.tokens_per_second = 9, .before = kSlow, .after = kSlow},
                   {.tokens_per_second = 8, .before = kSlow, .after = kFast},
                   {.tokens_per_second = 12, .before = kFast, .after = kSlow},
                   {.tokens_per_second = 10, .before = kFast, .after = kFast},
                   {.tokens_per_second = 8, .before = kFast, .after = {.read_bandwidth = 182}}};
  ShareOfBound share = result.Share({}, kF32);
  EXPECT_EQ(share.steady, 3);
  EXPECT_DOUBLE_EQ(share.bound, 20);
  EXPECT_DOUBLE_EQ(share.share, 0.5);  // of 0.9, 0.5 and 0.4
  EXPECT_DOUBLE_EQ(result.Median(), 9);
  EXPECT_DOUBLE_EQ(result.Min(), 8);
  EXPECT_DOUBLE_EQ(result.Max(), 12);
  // Without a steady measurement, all count, with the better rates around each.
  result.rounds = {result.rounds[1], result.rounds[2]};
  share = result.Share({}, kF32);
  EXPECT_EQ(share.steady, 0);
  EXPECT_DOUBLE_EQ(share.bound, 20);
  EXPECT_DOUBLE_EQ(share.share, 0.5);  // the mean of 0.4 and 0.6

  const MachineRates rates = {.read_bandwidth = 100, .f32 = 10, .bf16 = 20, .int8 = 40};
  EXPECT_TRUE(rates.IsNear(rates));
  for (double MachineRates::*const rate : {&MachineRates::read_bandwidth, &MachineRates::f32,
                                           &MachineRates::bf16, &MachineRates::int8}) {
    MachineRates other = rates;
    other.*rate *= 1.09;
    EXPECT_TRUE(rates.IsNear(other) && other.IsNear(rates));
    other.*rate *= 1.02;
    EXPECT_FALSE(rates.IsNear(other) || other.IsNear(rates));
  }
}

TEST(Rates, EveryInstructionSetMeasuresItsArithmetic) {
  for (const cpu::KernelTable* table : cpu::SupportedTables()) {
    const std::string isa = table->name;
    Result<std::unique_ptr<Backend>> backend = CreateBackend({.threads = 2, .cpu_isa = isa});
    ASSERT_TRUE(backend.ok()) << backend.status();
    EXPECT_GT((*backend)->MeasureArithmetic(ArithmeticKind::kF32, 1), 1e6) << isa;
    EXPECT_GT((*backend)->MeasureArithmetic(ArithmeticKind::kInt8, 1), 1e6) << isa;
    const double bf16 = (*backend)->MeasureArithmetic(ArithmeticKind::kBF16, 1);
    EXPECT_EQ(bf16 > 0, isa.ends_with("_bf16")) << isa;
    EXPECT_EQ((*backend)->threads(), 2);
    EXPECT_EQ((*backend)->instruction_set(), isa);
  }
}

class MeasuredCases : public ::testing::TestWithParam<const char*> {};

TEST_P(MeasuredCases, ReportRatesBoundsAndShares) {
  const ModelSpec spec = Good(Tiny(GetParam()));
  Result<std::unique_ptr<Backend>> backend = CreateBackend({.threads = 2});
  ASSERT_TRUE(backend.ok());
  const std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
  Result<std::unique_ptr<Model>> model =
      Model::Create(spec, {.compute = DType::kBF16}, *weights, **backend);
  ASSERT_TRUE(model.ok()) << model.status().message();
  BenchReport report;
  report.threads = 2;
  report.types.compute = DType::kBF16;
  report.kv_cache = KvCacheType::kBF16;
  report.settings = {
      .batches = {1, 4}, .prompt = 10, .chunk = 4, .tokens = 3, .context = 5, .rounds = 4};
  const std::vector<KvLayerShape> shapes = CacheShapes(spec);
  Result<std::unique_ptr<KvCacheStorage>> cache =
      (*backend)->NewKvCache(shapes, KvCacheType::kBF16, {4 * PagesFor(10)});
  ASSERT_TRUE(cache.ok());
  int probes = 0;
  Result<std::vector<CaseResult>> cases =
      MeasureCases(report.settings, **model, **cache, [&]() -> Result<MachineRates> {
        return MachineRates{.read_bandwidth = 1e9 + 1e7 * probes++, .f32 = 1e9, .bf16 = 1e9};
      });
  ASSERT_TRUE(cases.ok()) << cases.status();
  EXPECT_EQ(probes, 1 + 3 * 4);
  // An error of the probe ends the measurement.
  const Result<std::vector<CaseResult>> failed =
      MeasureCases(report.settings, **model, **cache,
                   []() -> Result<MachineRates> { return absl::UnavailableError("no probe"); });
  EXPECT_EQ(failed.status().message(), "no probe");
  report.cases = *std::move(cases);
  report.before = {.read_bandwidth = 3e9, .f32 = 1e9, .bf16 = 5e9};
  report.after = {.read_bandwidth = 2e9, .f32 = 2e9, .bf16 = 4e9};

  const nlohmann::json json = BenchJson(report, spec);
  EXPECT_EQ(json["read_bandwidth"], 3e9);
  EXPECT_EQ(json["peaks"], (nlohmann::json{{"f32", 2e9}, {"bf16", 5e9}}));
  EXPECT_EQ(json["threads"], 2);
  EXPECT_EQ(json["dtype"], "bf16");
  EXPECT_FALSE(json.contains("isa"));
  std::vector<std::string> names;
  for (const nlohmann::json& c : json["cases"]) {
    names.push_back(c["name"]);
    const double speed = c["tokens_per_second"];
    EXPECT_GT(c["min"], 0.0);
    EXPECT_LE(c["min"], speed);
    EXPECT_LE(speed, c["max"]);
    EXPECT_EQ(c["rounds"].size(), 4u);
    EXPECT_EQ(c["steady_rounds"], 4);
    // Every probe finds a little more bandwidth, 12 % in all.
    const double ratio = speed / c["bound_tokens_per_second"].get<double>();
    EXPECT_GT(c["share"], ratio / 1.13);
    EXPECT_LT(c["share"], ratio * 1.13);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"prompt 10", "decode 1", "decode 4"}));
  const std::string table = BenchTable(report);
  for (const std::string& name : names) EXPECT_NE(table.find(name), std::string::npos);

  // One token selects exactly k experts. Decoding starts with a context of 5 tokens; the mean of
  // the 3 decode steps is the second one.
  if (!spec.feed_forward(0).routed()) return;
  const RoutedLayerSpec& r = *spec.feed_forward(0).routing;
  if (r.split.heads > 1) return;
  EXPECT_DOUBLE_EQ(json["cases"][1]["distinct_experts"], r.select.MaxSelected());
  const int64_t expert = 3 * 32 * 64;
  const double bytes = static_cast<double>(FixedWeightBytes(spec, {.compute = DType::kBF16})) +
                       2.0 * spec.num_layers() * r.select.MaxSelected() * expert +
                       CacheBytesRead(spec, KvCacheType::kBF16, {7, 7});
  EXPECT_DOUBLE_EQ(json["cases"][1]["bytes_per_step"], bytes);
}

INSTANTIATE_TEST_SUITE_P(Shapes, MeasuredCases,
                         ::testing::Values("", " --top-p 0.999999 --top-k 2",
                                           " --split-heads 4 --score cosine"));

}  // namespace
}  // namespace moeserve::server
