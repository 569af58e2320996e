// An engine whose model is computed by several ranks gives the answers, records and statistics of
// an engine alone.
#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "engine/ranks/follower.h"
#include "engine/ranks/leader.h"
#include "kernels/exchange/loopback_transport.h"
#include "kernels/exchange/message_exchange.h"
#include "model_loaders/checkpoint/loader.h"
#include "tests/support/engine_fixture.h"
#include "tests/support/golden.h"

namespace moeserve::testing {
namespace {

constexpr StepLimits kStepLimits{
    .tokens = 4096, .sequences = 256, .pages = 4096, .changes = 1 << 16};

struct RankedModel {
  const char* name;
  const char* folder;
  Quantization quantization = Quantization::kNone;
  bool predictions = false;
  bool pair = false;  // an encoder and a decoder
};
void PrintTo(const RankedModel& m, std::ostream* out) { *out << m.name; }

// What the ranks divide beside the experts.
struct Splits {
  SplitChoice rows = SplitChoice::kAuto, head = SplitChoice::kAuto;
};

// An engine at rank 0 and followers on threads.
class RankedEngine {
 public:
  static std::unique_ptr<RankedEngine> Start(const RankedModel& model, const EngineOptions& options,
                                             int ranks, const Splits& splits) {
    auto ranked = std::make_unique<RankedEngine>();
    std::vector<std::unique_ptr<Transport>> transports = LoopbackTransports(ranks);
    for (int r = 1; r < ranks; ++r) {
      ranked->followers_.emplace_back(
          [&model, splits, transport = std::move(transports[static_cast<size_t>(r)])]() mutable {
            const absl::Status status = Follow(model, splits, std::move(transport));
            EXPECT_TRUE(status.ok()) << status;
          });
    }
    const MessageExchange::Options checked{.timeout = absl::Seconds(100), .check_order = true};
    ranked->exchange_ = std::make_unique<MessageExchange>(std::move(transports[0]), checked);
    ranked->leader_ = std::make_unique<Leader>(*ranked->exchange_);
    auto engine = TestEngine::Start(
        SourcePath(model.folder), options, Compute(model), "cpu", model.quantization, {},
        model.predictions,
        {ranked->exchange_.get(), ranked->leader_.get(), splits.rows, splits.head});
    EXPECT_TRUE(engine.ok()) << engine.status();
    if (engine.ok()) ranked->engine_ = *std::move(engine);
    return ranked;
  }
  ~RankedEngine() {
    engine_.reset();
    EXPECT_TRUE(exchange_->status().ok()) << exchange_->status();
    leader_->StopFollowers();
    for (std::thread& follower : followers_) follower.join();
  }

  TestEngine& engine() { return *engine_; }
  bool started() const { return engine_ != nullptr; }
  static DType Compute(const RankedModel& model) {
    return model.quantization == Quantization::kNone ? DType::kF32 : DType::kBF16;
  }

 private:
  static absl::Status Follow(const RankedModel& model, const Splits& splits,
                             std::unique_ptr<Transport> transport) {
    MessageExchange exchange(std::move(transport),
                             {.timeout = absl::Seconds(100), .check_order = true});
    Follower follower(exchange, kStepLimits);
    LoadOptions load{.require_tokenizer = false};
    load.predictions = model.predictions;
    MOESERVE_ASSIGN_OR_RETURN(Checkpoint checkpoint,
                              LoadCheckpoint(SourcePath(model.folder), load));
    MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend,
                              CreateBackend({.device = "cpu", .threads = 1}));
    const ExpertPlacement placement = ExpertPlacement::Balanced(checkpoint.spec, exchange.ranks());
    MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<Model> loaded,
                              Model::Create(checkpoint.spec,
                                            {.compute = Compute(model),
                                             .quantization = model.quantization,
                                             .exchange = &exchange,
                                             .placement = &placement,
                                             .split_rows = splits.rows,
                                             .split_head = splits.head,
                                             .listener = &follower},
                                            *checkpoint.weights, *backend));
    return follower.Run(*loaded);
  }

  std::unique_ptr<MessageExchange> exchange_;
  std::unique_ptr<Leader> leader_;
  std::unique_ptr<TestEngine> engine_;
  std::vector<std::thread> followers_;
};

class RanksEngineTest : public ::testing::TestWithParam<RankedModel> {
 protected:
  void SetUp() override {
    if (TestDevice() != "cpu") GTEST_SKIP() << "ranks are on CPUs";
  }

  static EngineOptions Options() {
    EngineOptions options;
    options.max_model_len = 64;
    options.routing_records = true;
    options.routing_control = {.enabled = true};
    if (GetParam().predictions) options.draft.max_tokens = 2;
    return options;
  }

  // Requests with prompts that share prefixes; some are drawn, one changes its routing.
  static Request RequestOf(int i) {
    Request r;
    r.id = std::to_string(i);
    for (int t = 0; t < 20 + i % 3; ++t) r.prompt.push_back((t * 7 + (t > 16 ? i : i % 2)) % 40);
    if (GetParam().pair) r.source = r.prompt;
    r.sampling.max_tokens = 12;
    r.sampling.temperature = i % 3 == 2 ? 0.9 : 0.0;
    r.sampling.seed = static_cast<uint64_t>(i);
    r.sampling.ignore_eos = true;
    r.sampling.logprobs = 2;
    r.routing_record = true;
    return r;
  }

  struct Answers {
    std::vector<AnswerBits> bits;
    std::vector<RoutingRecord> records;
  };
  static constexpr int kRequests = 8;

  static void Add(CollectingSink& sink, Answers& answers) {
    answers.bits.push_back(BitsOf(sink));
    answers.records.push_back(sink.routing());
  }
  static Answers OneAfterAnother(TestEngine& engine) {
    Answers answers;
    for (int i = 0; i < kRequests; ++i) Add(*engine.Submit(RequestOf(i)), answers);
    return answers;
  }
  static Answers Together(TestEngine& engine) {
    Answers answers;
    std::vector<std::shared_ptr<CollectingSink>> sinks;
    for (int i = 0; i < kRequests; ++i) sinks.push_back(engine.Submit(RequestOf(i)));
    for (const auto& sink : sinks) Add(*sink, answers);
    engine.ExpectIdle();
    return answers;
  }
  static void ExpectSame(const Answers& a, const Answers& b) {
    for (size_t i = 0; i < kRequests; ++i) {
      EXPECT_TRUE(a.bits[i] == b.bits[i]) << "request " << i;
      EXPECT_EQ(a.records[i].offsets, b.records[i].offsets) << "request " << i;
      EXPECT_EQ(a.records[i].experts, b.records[i].experts) << "request " << i;
      EXPECT_EQ(a.records[i].weights, b.records[i].weights) << "request " << i;
    }
  }
};

TEST_P(RanksEngineTest, AnswersAndStatisticsAreThoseOfOneProcess) {
  int64_t one_sequence = 0;
  Answers alone;
  ExpertStats expected;
  {
    const auto engine = TestEngine::Start(SourcePath(GetParam().folder), Options(),
                                          RankedEngine::Compute(GetParam()), "cpu",
                                          GetParam().quantization, {}, GetParam().predictions);
    ASSERT_TRUE(engine.ok()) << engine.status();
    one_sequence = (*engine)->BytesFor(64);
    alone = OneAfterAnother(**engine);
    expected = (*engine)->get().ExpertSnapshot();
  }
  struct Setup {
    int ranks;
    // Of one request after another, and of steps of 1 to 9 rows. Of the former, auto divides the
    // prompts alone between two ranks.
    Splits alone, together;
  };
  constexpr SplitChoice kAuto = SplitChoice::kAuto, kOn = SplitChoice::kOn,
                        kOff = SplitChoice::kOff;
  for (const auto& [ranks, splits, splits_together] :
       {Setup{2, {kAuto, kOn}, {kOff, kOff}}, Setup{4, {kOff, kAuto}, {kOn, kOn}}}) {
    SCOPED_TRACE(ranks);
    {
      const auto ranked = RankedEngine::Start(GetParam(), Options(), ranks, splits);
      ASSERT_TRUE(ranked->started());
      ExpectSame(OneAfterAnother(ranked->engine()), alone);
      const ExpertStats found = ranked->engine().get().ExpertSnapshot();
      ASSERT_EQ(found.blocks.size(), expected.blocks.size());
      for (size_t b = 0; b < found.blocks.size(); ++b) {
        EXPECT_EQ(found.blocks[b].selections, expected.blocks[b].selections) << "block " << b;
      }
    }
    // Small steps, and so little memory that requests are preempted.
    EngineOptions options = Options();
    options.max_num_seqs = 4;
    options.max_step_tokens = 9;
    options.kv_cache_bytes = 2 * one_sequence;
    const auto ranked = RankedEngine::Start(GetParam(), options, ranks, splits_together);
    ASSERT_TRUE(ranked->started());
    ExpectSame(Together(ranked->engine()), alone);
  }
}

constexpr RankedModel kModels[] = {
    {"mh_moe", "deploy/models/mh-moe"},
    {"moa", "deploy/models/moa"},
    {"moa_translator", "deploy/models/moa-translator", Quantization::kNone, false, true},
    {"hmoe_topp", "deploy/models/hmoe-topp", Quantization::kInt8Channel},
    {"hmoe_topp_int4_k", "deploy/models/hmoe-topp", Quantization::kInt4K},
    {"deepseek_v3_mtp", "tests/golden/families/deepseek-v3-mtp", Quantization::kNone, true},
    {"gpt_oss", "tests/golden/families/gpt-oss"},
    {"qwen3_next", "tests/golden/families/qwen3-next"},
    {"lfm2_moe", "tests/golden/families/lfm2-moe"},
    {"longcat_flash", "tests/golden/families/longcat-flash"}};
INSTANTIATE_TEST_SUITE_P(Models, RanksEngineTest, ::testing::ValuesIn(kModels),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace moeserve::testing
