#include "tests/support/ranked_engine.h"

#include <gtest/gtest.h>

#include <utility>

#include "engine/ranks/follower.h"
#include "kernels/exchange/loopback_transport.h"
#include "tests/support/golden.h"

namespace moeserve::testing {
namespace {

constexpr StepLimits kStepLimits{
    .tokens = 4096, .sequences = 256, .pages = 4096, .changes = 1 << 16};

ExpertSource SourceOf(const ExpertFiles& files, Moves moves) {
  if (moves == Moves::kImpossible || moves == Moves::kRefused) return {};
  ExpertSource source = files.source();
  source.waits = moves == Moves::kAlways;
  return source;
}

absl::Status Follow(const RankedModel& model, const RanksSetting& setting,
                    std::unique_ptr<Transport> transport) {
  MessageExchange exchange(std::move(transport),
                           {.timeout = absl::Seconds(100), .check_order = true});
  ExpertFiles files;
  MOESERVE_RETURN_IF_ERROR(ExpertFiles::Open(model, files));
  Follower follower(exchange, kStepLimits, SourceOf(files, setting.moves));
  LoadOptions load{.require_tokenizer = false};
  load.predictions = model.predictions;
  MOESERVE_ASSIGN_OR_RETURN(Checkpoint checkpoint, LoadCheckpoint(SourcePath(model.folder), load));
  MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend,
                            CreateBackend({.device = TestDevice(), .threads = 1}));
  const ExpertPlacement placement = ExpertPlacement::Balanced(checkpoint.spec, exchange.ranks());
  std::unique_ptr<PackedCache> packed;
  if (!setting.packed_folder.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(packed, OpenPacked(setting.packed_folder, checkpoint, *backend));
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<Model> loaded,
                            Model::Create(checkpoint.spec,
                                          {.compute = model.compute(),
                                           .quantization = model.quantization,
                                           .exchange = &exchange,
                                           .placement = &placement,
                                           .split_rows = setting.splits.rows,
                                           .split_head = setting.splits.head,
                                           .owner_sums = setting.splits.sums,
                                           .listener = &follower},
                                          *checkpoint.weights, *backend, packed.get()));
  EXPECT_TRUE(packed == nullptr || packed->found() > 0);
  MOESERVE_RETURN_IF_ERROR(follower.Run(*loaded));
  EXPECT_TRUE(setting.timeout == absl::ZeroDuration() || exchange.timeout() == setting.timeout);
  return absl::OkStatus();
}

}  // namespace

absl::Status ExpertFiles::Open(const RankedModel& model, ExpertFiles& files) {
  LoadOptions load{.require_tokenizer = false};
  load.predictions = model.predictions;
  MOESERVE_ASSIGN_OR_RETURN(files.checkpoint, LoadCheckpoint(SourcePath(model.folder), load));
  MOESERVE_ASSIGN_OR_RETURN(files.backend, CreateBackend({.device = TestDevice(), .threads = 1}));
  return absl::OkStatus();
}

// A leader that announces, every third step, a placement with each expert of one block on the next
// rank, and may change its checksum.
class RankedEngine::MovingLeader final : public StepListener {
 public:
  MovingLeader(Leader& leader, const RanksSetting& setting)
      : leader_(leader),
        moves_(setting.moves == Moves::kAlways || setting.moves == Moves::kImpossible),
        disagree_in_(setting.disagree_in) {}
  void Loaded(Model& model) override { leader_.Loaded(model); }
  void BeforeStep(StepKind kind, const Batch& batch, KvCacheStorage& cache,
                  const PredictionSources& sources, const StepDivision& division) override {
    ++steps_;
    if (moves_ && steps_ % 3 == 0) {
      const auto [placement, busy] = leader_.placement();
      EXPECT_FALSE(busy) << "step " << steps_;
      ExpertPlacement::Blocks blocks = placement->blocks();
      const int ranks = placement->ranks();
      const auto moved =
          std::next(blocks.begin(), placement->version() % static_cast<uint32_t>(blocks.size()));
      for (HolderSet& h : moved->second) {
        h = (h << 1 | h >> (ranks - 1)) & ((HolderSet{1} << ranks) - 1);
      }
      leader_.Announce(
          std::make_shared<ExpertPlacement>(ranks, std::move(blocks), placement->version() + 1));
    }
    leader_.BeforeStep(kind, batch, cache, sources, division);
  }
  absl::Status AfterStep(uint64_t checksum, const absl::Status& own) override {
    return leader_.AfterStep(steps_ == disagree_in_ ? checksum + 1 : checksum, own);
  }
  void Timed(absl::Duration longest) override { leader_.Timed(longest); }
  int steps() const { return steps_; }

 private:
  Leader& leader_;
  const bool moves_;
  const int disagree_in_;
  int steps_ = 0;
};

RankedEngine::RankedEngine() = default;

std::unique_ptr<RankedEngine> RankedEngine::Start(const RankedModel& model,
                                                  const EngineOptions& options, int ranks,
                                                  const RanksSetting& setting) {
  auto ranked = std::make_unique<RankedEngine>();
  const absl::Status opened = ExpertFiles::Open(model, ranked->files_);
  EXPECT_TRUE(opened.ok()) << opened;
  std::vector<std::unique_ptr<Transport>> transports = LoopbackTransports(ranks);
  for (int r = 1; r < ranks; ++r) {
    ranked->followers_.emplace_back(
        [&model, setting, transport = std::move(transports[static_cast<size_t>(r)])]() mutable {
          const absl::Status status = Follow(model, setting, std::move(transport));
          EXPECT_TRUE(status.ok()) << status;
        });
  }
  const MessageExchange::Options checked{.timeout = absl::Seconds(100), .check_order = true};
  ranked->exchange_ = std::make_unique<MessageExchange>(std::move(transports[0]), checked);
  ranked->leader_ =
      std::make_unique<Leader>(*ranked->exchange_, SourceOf(ranked->files_, setting.moves));
  ranked->moving_ = std::make_unique<MovingLeader>(*ranked->leader_, setting);
  if (setting.timeout > absl::ZeroDuration()) ranked->leader_->LimitWaits(setting.timeout);
  auto engine = TestEngine::Start(SourcePath(model.folder), options, model.compute(), TestDevice(),
                                  model.quantization, {}, model.predictions,
                                  {.exchange = ranked->exchange_.get(),
                                   .listener = ranked->moving_.get(),
                                   .load_watch = &ranked->watch_,
                                   .split_rows = setting.splits.rows,
                                   .split_head = setting.splits.head,
                                   .owner_sums = setting.splits.sums,
                                   .packed_folder = setting.packed_folder});
  EXPECT_TRUE(engine.ok()) << engine.status();
  if (engine.ok()) ranked->engine_ = *std::move(engine);
  return ranked;
}

RankedEngine::~RankedEngine() {
  engine_.reset();
  EXPECT_TRUE(exchange_->status().ok()) << exchange_->status();
  leader_->StopFollowers();
  for (std::thread& follower : followers_) follower.join();
}

int RankedEngine::steps() const { return moving_->steps(); }

}  // namespace moeserve::testing
