// Routing records and routing overrides: a record contains what was computed, however it was
// computed, and an override affects its own request only.

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <latch>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

Request Greedy(const std::string& id, std::vector<TokenId> prompt, int max_tokens) {
  Request r;
  r.id = id;
  r.prompt = std::move(prompt);
  r.sampling.max_tokens = max_tokens;
  r.sampling.temperature = 0.0;
  r.sampling.ignore_eos = true;
  r.routing_record = true;
  return r;
}

EngineOptions WithRecords(EngineOptions options) {
  options.routing_records = true;
  return options;
}

// The routes of a record, without its positions and `reused`.
struct RecordedRoutes {
  std::vector<uint32_t> offsets;
  std::vector<uint16_t> experts;
  std::vector<float> weights;
  friend bool operator==(const RecordedRoutes&, const RecordedRoutes&) = default;
};
RecordedRoutes RoutesOf(const RoutingRecord& r) { return {r.offsets, r.experts, r.weights}; }

bool Reused(const RoutingRecord& record, int position) {
  for (const auto& [begin, end] : record.reused) {
    if (position >= begin && position < end) return true;
  }
  return false;
}

class RoutingTest : public ::testing::TestWithParam<GoldenModel> {
 protected:
  void SetUp() override {
    auto golden = ReadGolden(GetParam().golden);
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *std::move(golden);
  }
  std::unique_ptr<TestEngine> Start(const EngineOptions& options) {
    auto engine = TestEngine::Start(GetParam().model, WithRecords(options));
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }

  Golden golden_;
};

class TrainedModel : public RoutingTest {};
class RoutedModel : public RoutingTest {};

// The counters must equal the sum of the records of all requests. Each row is in exactly one
// record, and tokens that a preempted sequence ran twice are counted once.
TEST_P(TrainedModel, CountersAreTheSumOfTheRecords) {
  constexpr int kConcurrent = 32;
  constexpr uint64_t kTokens = 10'000;
  const int64_t one_sequence = Start({.max_model_len = 256, .max_num_seqs = 1})->BytesFor(256);
  auto engine = Start(
      {.max_model_len = 256, .max_num_seqs = kConcurrent, .kv_cache_bytes = 8 * one_sequence});
  const RouteLayout& layout = engine->get().route_layout();
  std::vector<uint64_t> counts(layout.num_experts);
  std::vector<double> weights(layout.num_experts);
  uint64_t own = 0, reused = 0;
  Random random(11);
  int next = 0;
  const auto submit = [&] {
    std::vector<TokenId> prompt = golden_.Prompt(next % 3);  // some requests share a prefix
    const std::vector<TokenId> rest = golden_.Prompt(3 + next % (golden_.prompts - 3));
    prompt.insert(prompt.end(), rest.begin(), rest.begin() + random.Below(golden_.length));
    Request r = Greedy(std::to_string(next), prompt, 20 + random.Below(100));
    r.sampling.temperature = 1.0;
    r.sampling.seed = next++;
    return std::make_pair(r, engine->Submit(r));
  };
  std::vector<std::pair<Request, std::shared_ptr<CollectingSink>>> open;
  for (int i = 0; i < kConcurrent; ++i) open.push_back(submit());
  for (size_t i = 0; i < open.size(); ++i) {
    const auto [request, sink] = open[i];
    ASSERT_TRUE(sink->Wait().ok()) << sink->Wait();
    const RoutingRecord& record = sink->routing();
    ASSERT_EQ(record.first_position, 0);
    ASSERT_EQ(record.tokens,
              static_cast<int>(request.prompt.size()) + request.sampling.max_tokens - 1);
    ASSERT_EQ(record.offsets.size(),
              static_cast<size_t>(record.tokens) * layout.rows_per_token + 1);
    ASSERT_EQ(record.experts.size(), record.offsets.back());
    for (int t = 0; t < record.tokens; ++t) {
      if (Reused(record, t)) {
        ++reused;
        continue;
      }
      ++own;
      for (int row = 0; row < layout.rows_per_token; ++row) {
        const RoutedBlock& block = layout.blocks[layout.block_of_row[row]];
        const size_t r = static_cast<size_t>(t) * layout.rows_per_token + row;
        for (uint32_t a = record.offsets[r]; a < record.offsets[r + 1]; ++a) {
          ++counts[block.first_expert + record.experts[a]];
          weights[block.first_expert + record.experts[a]] += record.weights[a];
        }
      }
    }
    if (own < kTokens) open.push_back(submit());
  }
  engine->ExpectIdle();
  EXPECT_GE(own, kTokens);
  EXPECT_GT(reused, 0u);
  const EngineStats engine_stats = engine->get().Stats();
  EXPECT_GT(engine_stats.preemptions, 0u);
  const ExpertStats stats = engine->get().ExpertSnapshot();
  EXPECT_EQ(stats.tokens, own);
  EXPECT_GT(stats.recomputed_tokens, 0u);
  uint64_t with_diversity = 0;
  for (uint64_t n : stats.diversity_histogram) with_diversity += n;
  EXPECT_EQ(with_diversity, own);
  for (size_t i = 0; i < stats.blocks.size(); ++i) {
    const BlockExpertStats& b = stats.blocks[i];
    EXPECT_EQ(b.total_tokens(), own);
    EXPECT_EQ(b.recomputed_tokens, stats.recomputed_tokens);
    EXPECT_EQ(b.recomputed_rows, b.recomputed_tokens * b.split_heads);
    uint64_t recomputed = 0;
    for (int e = 0; e < b.num_experts; ++e) {
      const size_t expert = layout.blocks[i].first_expert + static_cast<size_t>(e);
      ASSERT_EQ(b.selections[e], counts[expert]) << "block " << i << ", expert " << e;
      ASSERT_NEAR(b.weight_sums[e], weights[expert], 1e-9 * (1.0 + weights[expert]));
      EXPECT_LE(b.decode_selections[e], b.selections[e]);
      EXPECT_LE(b.touching_tokens[e], b.selections[e]);
      recomputed += b.recomputed_selections[e];
    }
    if (b.select == SelectKind::kTopK) {
      EXPECT_EQ(recomputed, b.recomputed_rows * b.max_selected);
    }
  }
  // The counts by token and expert must add up to the same sums.
  const std::optional<TokenExpertCounts> tokens = engine->get().token_expert_counts();
  if (layout.num_experts > 0) {
    ASSERT_TRUE(tokens.has_value());
    const std::vector<uint32_t> table = tokens->Columns(0, layout.num_experts);
    std::vector<uint64_t> sums(layout.num_experts);
    for (size_t i = 0; i < table.size(); ++i) sums[i % layout.num_experts] += table[i];
    EXPECT_EQ(sums, counts);
  }
}

// Holds the engine in the first step of a request, so that requests which are submitted meanwhile
// run together.
class HoldingRoutingSink : public TokenSink {
 public:
  void OnDelta(OutputDelta) override { Hold(); }
  void OnError(const absl::Status&) override { Hold(); }
  void WaitUntilHeld() { held_.wait(); }
  void Release() { released_.count_down(); }

 private:
  void Hold() {
    if (held_.try_wait()) return;
    held_.count_down();
    released_.wait();
  }

  std::latch held_{1}, released_{1};
};

// A record must be the same alone, in small steps, with cached prefixes, after preemptions and as
// one of several samples; a cancelled request's record must be a prefix of it.
TEST_P(RoutingTest, RecordsDoNotDependOnHow) {
  const int length = golden_.length;
  const int generated = std::min(40, Start({})->get().max_model_len() - length);
  const auto request = [&](const std::string& id, int prompt) {
    return Greedy(id, golden_.Prompt(prompt), generated);
  };
  std::vector<RecordedRoutes> alone;
  {
    auto engine = Start({.prefix_cache = false});
    for (int p = 0; p < golden_.prompts; ++p) {
      auto sink = engine->Submit(request(std::to_string(p), p));
      ASSERT_TRUE(sink->Wait().ok());
      EXPECT_TRUE(sink->routing().reused.empty());
      EXPECT_EQ(sink->routing().tokens, length + generated - 1);
      alone.push_back(RoutesOf(sink->routing()));
    }
  }
  {
    SCOPED_TRACE("prompts longer than a step");
    auto engine = Start({.max_num_seqs = 5, .max_step_tokens = 7, .prefix_cache = false});
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (int p = 0; p < golden_.prompts; ++p) {
      sinks.push_back(engine->Submit(request(std::to_string(p), p)));
    }
    for (int p = 0; p < golden_.prompts; ++p) {
      ASSERT_TRUE(sinks[p]->Wait().ok());
      EXPECT_EQ(RoutesOf(sinks[p]->routing()), alone[p]) << p;
    }
  }
  {
    SCOPED_TRACE("prefix cache");
    auto engine = Start({});
    for (int round = 0; round < 2; ++round) {
      auto sink = engine->Submit(request(std::to_string(round), 0));
      ASSERT_TRUE(sink->Wait().ok());
      EXPECT_EQ(RoutesOf(sink->routing()), alone[0]) << round;
      using Ranges = std::vector<std::pair<int, int>>;
      const Ranges expected = {{0, sink->last().usage.cached_tokens}};
      EXPECT_EQ(sink->routing().reused, round == 0 ? Ranges() : expected);
      EXPECT_EQ(sink->last().usage.cached_tokens > 0, round == 1);
    }
  }
  {
    SCOPED_TRACE("preempted and resumed");
    auto probe = Start({.max_model_len = length + generated});
    for (const bool prefix_cache : {false, true}) {
      auto engine = Start({.max_model_len = length + generated,
                           .kv_cache_bytes = 2 * probe->BytesFor(length + generated),
                           .prefix_cache = prefix_cache});
      std::vector<std::shared_ptr<CollectingSink>> sinks;
      const auto hold = std::make_shared<HoldingRoutingSink>();
      ASSERT_TRUE(engine->get().Submit(Greedy("hold", golden_.Prompt(0), 1), hold).ok());
      hold->WaitUntilHeld();
      for (int p = 0; p < golden_.prompts; ++p) {
        sinks.push_back(engine->Submit(request(std::to_string(p), p)));
      }
      hold->Release();
      for (int p = 0; p < golden_.prompts; ++p) {
        ASSERT_TRUE(sinks[p]->Wait().ok());
        EXPECT_EQ(RoutesOf(sinks[p]->routing()), alone[p]) << p;
      }
      EXPECT_GT(engine->get().Stats().preemptions, 0u);
    }
  }
  {
    SCOPED_TRACE("samples of one prompt");
    auto engine = Start({});
    std::vector<Request> requests;
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    std::vector<std::shared_ptr<TokenSink>> plain;
    for (int i = 0; i < 4; ++i) {
      requests.push_back(request(std::to_string(i), 1));
      sinks.push_back(std::make_shared<CollectingSink>());
      plain.push_back(sinks.back());
    }
    ASSERT_TRUE(engine->get().Submit(std::move(requests), std::move(plain)).ok());
    int computed_prompts = 0;
    for (const auto& sink : sinks) {
      ASSERT_TRUE(sink->Wait().ok());
      EXPECT_EQ(RoutesOf(sink->routing()), alone[1]);
      computed_prompts += sink->routing().reused.empty();
    }
    EXPECT_EQ(computed_prompts, 1);
  }
}

// Cancels its request at a given token, during the callback on the engine thread.
class CancellingSink : public CollectingSink {
 public:
  CancellingSink(Engine& engine, int token) : engine_(engine), token_(token) {}
  void OnDelta(OutputDelta delta) override {
    CollectingSink::OnDelta(std::move(delta));
    if (++seen_ == token_) engine_.Cancel(this);
  }

 private:
  Engine& engine_;
  const int token_;
  int seen_ = 0;
};

TEST_P(RoutingTest, ACancelledRequestHasTheBeginning) {
  auto engine = Start({});
  const int generated = std::min(40, engine->get().max_model_len() - golden_.length);
  auto whole = engine->Submit(Greedy("whole", golden_.Prompt(0), generated));
  ASSERT_TRUE(whole->Wait().ok());
  auto sink = std::make_shared<CancellingSink>(engine->get(), generated / 2);
  ASSERT_TRUE(engine->get().Submit(Greedy("cut", golden_.Prompt(0), generated), sink).ok());
  EXPECT_TRUE(absl::IsCancelled(sink->Wait()));
  const RoutingRecord& part = sink->routing();
  ASSERT_GE(part.tokens, golden_.length + generated / 2 - 1);
  ASSERT_LT(part.tokens, golden_.length + generated - 1);
  const RecordedRoutes beginning = RoutesOf(
      Slice(whole->routing(), 0, part.tokens, engine->get().route_layout().rows_per_token));
  EXPECT_EQ(RoutesOf(part), beginning);
  engine->ExpectIdle();
}

// Calls f(block, experts) for every row of `record`.
void EachRow(const RoutingRecord& record, const RouteLayout& layout, const auto& f) {
  for (size_t r = 0; r + 1 < record.offsets.size(); ++r) {
    const int row = static_cast<int>(r % static_cast<size_t>(layout.rows_per_token));
    f(layout.blocks[layout.block_of_row[row]],
      std::span<const uint16_t>(record.experts)
          .subspan(record.offsets[r], record.offsets[r + 1] - record.offsets[r]));
  }
}

std::shared_ptr<const RoutingControl> Control(const RoutingChange& change, const ModelSpec& spec) {
  auto control = RoutingControl::Create(change, spec, {.enabled = true});
  EXPECT_TRUE(control.ok()) << control.status();
  return std::make_shared<const RoutingControl>(*std::move(control));
}

TEST_P(RoutedModel, MaskedExpertsGetNoRowsAndNobodyElseNotices) {
  auto engine = Start({.routing_control = {.enabled = true}});
  const RouteLayout& layout = engine->get().route_layout();
  RoutingChange change;
  for (const RoutedBlock& block : layout.blocks) {
    for (int e = 0; e < block.num_experts; ++e) {
      if (e % 3 == 1 || (e > 0 && e % 3 == 0)) {
        change.experts.push_back({block.layer, block.block, e, std::nullopt});
      }
    }
  }
  const auto control = Control(change, engine->get().spec());
  const int generated = std::min(20, engine->get().max_model_len() - golden_.length);
  auto plain = engine->Submit(Greedy("plain", golden_.Prompt(0), generated));
  ASSERT_TRUE(plain->Wait().ok());
  // Runs a request with an override in the same steps and with the same text as a request without
  // one.
  Request changed = Greedy("changed", golden_.Prompt(0), generated);
  changed.routing_control = control;
  auto other = engine->Submit(changed);
  auto again = engine->Submit(Greedy("again", golden_.Prompt(0), generated));
  ASSERT_TRUE(other->Wait().ok());
  ASSERT_TRUE(again->Wait().ok());
  EXPECT_EQ(RoutesOf(again->routing()), RoutesOf(plain->routing()));
  EXPECT_EQ(again->tokens(), plain->tokens());
  EXPECT_EQ(other->last().usage.cached_tokens, 0) << "another routing gives other keys and values";
  EachRow(other->routing(), layout, [](const RoutedBlock&, std::span<const uint16_t> experts) {
    ASSERT_FALSE(experts.empty());
    for (uint16_t e : experts) ASSERT_FALSE(e % 3 == 1 || (e > 0 && e % 3 == 0)) << e;
  });
  // A request with the same override must find the prefix that the first one left in the cache.
  changed.id = "changed again";
  auto cached = engine->Submit(changed);
  ASSERT_TRUE(cached->Wait().ok());
  EXPECT_GT(cached->last().usage.cached_tokens, 0);
  EXPECT_EQ(RoutesOf(cached->routing()), RoutesOf(other->routing()));
}

TEST_P(RoutedModel, SelectionCanBeOverridden) {
  auto engine = Start({.routing_control = {.enabled = true}});
  const RouteLayout& layout = engine->get().route_layout();
  const ModelSpec& spec = engine->get().spec();
  const auto run = [&](const std::string& id, const RoutingChange& change) {
    Request r = Greedy(id, golden_.Prompt(1), 4);
    r.routing_control = Control(change, spec);
    auto sink = engine->Submit(r);
    EXPECT_TRUE(sink->Wait().ok());
    return sink;
  };
  const auto each_has = [&](const CollectingSink& sink, const auto& expected) {
    EachRow(sink.routing(), layout, [&](const RoutedBlock& block, std::span<const uint16_t> e) {
      ASSERT_EQ(static_cast<int>(e.size()), expected(block));
    });
  };
  int most = layout.blocks[0].num_experts;
  for (const RoutedBlock& block : layout.blocks) most = std::min(most, block.num_experts);
  for (int k : {1, most}) {
    each_has(*run("k" + std::to_string(k), {.top_k = k}), [&](const RoutedBlock&) { return k; });
  }
  bool over_selected = false, own_top_p = false, above_one = false;
  for (const BlockSpec& block : spec.blocks) {
    const RoutedLayerSpec* routing = block.routing();
    if (routing == nullptr) continue;
    over_selected = over_selected || routing->gate == GateKind::kSoftmaxSelected;
    own_top_p = own_top_p || routing->select.kind == SelectKind::kTopP;
    above_one = above_one || routing->gate == GateKind::kSqrtSoftplus;
  }
  if (over_selected) {
    const auto refused = RoutingControl::Create({.top_p = 0.5}, spec, {.enabled = true});
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status()));
    return;
  }
  each_has(*run("p0", {.top_p = 1e-40}), [](const RoutedBlock&) { return 1; });
  // With a share of 1, top-p selects every expert that changes the sum; in f32, the last few may
  // not. Gate values above 1 reach the sum early.
  const auto all = run("p1", {.top_p = 1.0});
  if (own_top_p || above_one) return;
  uint64_t taken = 0, there = 0;
  EachRow(all->routing(), layout, [&](const RoutedBlock& block, std::span<const uint16_t> e) {
    taken += e.size();
    there += static_cast<uint64_t>(block.num_experts);
  });
  EXPECT_GT(taken, there / 4);
}

TEST_P(RoutedModel, BiasMovesRows) {
  auto engine = Start({.routing_control = {.enabled = true}});
  const RouteLayout& layout = engine->get().route_layout();
  const ModelSpec& spec = engine->get().spec();
  // A table selects experts whatever their scores.
  const auto by_scores = [&](const RoutedBlock& b) {
    return RoutingOf(spec, b).select.kind != SelectKind::kTable;
  };
  const auto found = std::ranges::find_if(layout.blocks, by_scores);
  ASSERT_NE(found, layout.blocks.end());
  const RoutedBlock& block = *found;
  const int favoured = block.num_experts - 1;
  Request r = Greedy("a", golden_.Prompt(0), 2);
  r.routing_control = Control({.experts = {{block.layer, block.block, favoured, 1000.0}}}, spec);
  auto sink = engine->Submit(r);
  ASSERT_TRUE(sink->Wait().ok());
  EachRow(sink->routing(), layout, [&](const RoutedBlock& b, std::span<const uint16_t> experts) {
    if (b.first_row != block.first_row) return;
    ASSERT_EQ(experts.back(), favoured);
  });
}

std::vector<GoldenModel> Those(const auto& wanted) {
  std::vector<GoldenModel> models = GoldenModels();
  std::erase_if(models, [&](const GoldenModel& m) { return !wanted(m); });
  return models;
}

std::string TestName(const ::testing::TestParamInfo<GoldenModel>& info) {
  std::string name = info.param.name;
  for (char& c : name) c = c == '-' ? '_' : c;
  return name;
}

INSTANTIATE_TEST_SUITE_P(Models, RoutingTest, ::testing::ValuesIn(GoldenModels()), TestName);
INSTANTIATE_TEST_SUITE_P(Models, TrainedModel, ::testing::ValuesIn(Those([](const GoldenModel& m) {
                           return m.model.string().find("deploy") != std::string::npos;
                         })),
                         TestName);
INSTANTIATE_TEST_SUITE_P(Models, RoutedModel, ::testing::ValuesIn(Those([](const GoldenModel& m) {
                           return m.name != "dense" && m.name != "tiny-learned-layer-norm";
                         })),
                         TestName);

TEST(RoutingControlTest, RefusesWhatCannotBe) {
  ModelSpec spec;
  spec.AddLayers(2);
  spec.feed_forward(1).routing.emplace();
  spec.feed_forward(1).routing->num_experts = 3;
  const auto refused = [&](const RoutingChange& change, const std::string& part,
                           RoutingControlLimits limits = {.enabled = true}) {
    const auto control = RoutingControl::Create(change, spec, limits);
    ASSERT_TRUE(absl::IsInvalidArgument(control.status())) << part;
    EXPECT_NE(std::string(control.status().message()).find(part), std::string::npos)
        << control.status();
  };
  const auto expert = [](int layer, int e, std::optional<double> bias = std::nullopt) {
    return RoutingChange::Expert{layer, BlockKind::kFeedForward, e, bias};
  };
  refused({.top_k = 4}, "1 to 3");
  refused({.top_k = 0}, "1 to 3");
  refused({.top_k = 3}, "1 to 2", {.enabled = true, .max_top_k = 2});
  refused({.top_p = 0.5}, "only top_k", {.enabled = true, .max_top_k = 2});
  refused({.top_k = 1, .top_p = 0.5}, "not both");
  refused({.top_p = 1.5}, "at most 1");
  refused({.top_p = NAN}, "at most 1");
  refused({.experts = {expert(0, 0)}},
          "layer 0 feed_forward is not routed; the model has the layers 0 to ");
  refused({.experts = {expert(2, 0)}}, "not routed");
  refused({.experts = {expert(-1, 0)}}, "not routed");
  refused({.experts = {{1, BlockKind::kAttention, 0, std::nullopt}}}, "attention is not routed");
  refused({.experts = {expert(1, 3)}}, "0 to 2");
  refused({.experts = {expert(1, -1)}}, "0 to 2");
  refused({.experts = {expert(1, 1), expert(1, 0), expert(1, 1, 2.0)}}, "named twice");
  refused({.experts = {expert(1, 0), expert(1, 1), expert(1, 2)}}, "at least one");
  refused({.experts = {expert(1, 0, 1001.0)}}, "-1000 to 1000");
  refused({.experts = {expert(1, 0, NAN)}}, "-1000 to 1000");
  const auto one = RoutingControl::Create({.experts = {expert(1, 2), expert(1, 0)}}, spec, {});
  const auto same = RoutingControl::Create({.experts = {expert(1, 0), expert(1, 2)}}, spec, {});
  const auto other = RoutingControl::Create({.experts = {expert(1, 0), expert(1, 1)}}, spec, {});
  ASSERT_TRUE(one.ok() && same.ok() && other.ok());
  EXPECT_EQ(one->key(), same->key());
  EXPECT_NE(one->key(), other->key());
  EXPECT_EQ(one->For(Stack::kOnly, 1, BlockKind::kFeedForward).allowed, 1);
}

// Cached prompts store the key of their override: a large override must have a small key, and
// different overrides different keys.
TEST(RoutingControlTest, KeysStaySmall) {
  ModelSpec spec;
  spec.AddLayers(1);
  spec.feed_forward(0).routing.emplace();
  spec.feed_forward(0).routing->num_experts = 1000;
  std::set<std::string> keys;
  RoutingChange change = {.top_k = 1};
  for (int e = 0; e < 1000; ++e) {
    change.experts.push_back({0, BlockKind::kFeedForward, e, e / 3.0});
    const auto control = RoutingControl::Create(change, spec, {.enabled = true});
    ASSERT_TRUE(control.ok()) << control.status();
    EXPECT_LE(control->key().size(), 64u);
    EXPECT_TRUE(keys.insert(control->key()).second) << e;
  }
}

// With expert statistics disabled, nothing is counted or stored, and the generated tokens are the
// same.
TEST(ExpertStatsOff, CountsNothingAndChangesNothing) {
  const auto models = GoldenModels();
  for (const GoldenModel& model : models) {
    if (model.name.find("tiny-moa") == std::string::npos) continue;
    auto golden = ReadGolden(model.golden);
    ASSERT_TRUE(golden.ok());
    std::vector<TokenId> tokens[2];
    for (const bool on : {false, true}) {
      auto engine = TestEngine::Start(model.model, {.expert_stats = on, .routing_records = on});
      ASSERT_TRUE(engine.ok());
      Request r = Greedy("a", golden->Prompt(0), 10);
      if (!on) {
        EXPECT_TRUE(absl::IsInvalidArgument((*engine)->Submit(r)->Wait()));
      }
      r.routing_record = false;
      auto sink = (*engine)->Submit(r);
      ASSERT_TRUE(sink->Wait().ok());
      tokens[on] = sink->tokens();
      const ExpertStats stats = (*engine)->get().ExpertSnapshot();
      EXPECT_EQ(stats.tokens > 0, on);
      EXPECT_EQ(sink->last().usage.expert_routes > 0, on);
      EXPECT_EQ((*engine)->get().token_expert_counts().has_value(), on);
    }
    EXPECT_EQ(tokens[0], tokens[1]);
  }
}

}  // namespace
}  // namespace moeserve::testing
