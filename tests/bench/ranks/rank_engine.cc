#include "tests/bench/ranks/rank_engine.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "base/check.h"
#include "engine/ranks/follower.h"
#include "kernels/registry.h"
#include "server/bench/synthetic_model.h"
#include "tests/bench/ranks/must.h"

namespace moeserve {
namespace {

// Ranks load models of several gigabytes before they take part.
constexpr absl::Duration kRankTimeout = absl::Seconds(600);
// As commands with --ranks have it.
constexpr absl::Duration kSpin = absl::Milliseconds(5);
// Followers that have nothing to do look so often for something.
constexpr absl::Duration kNap = absl::Milliseconds(2);
constexpr StepLimits kBenchLimits{
    .tokens = 1 << 16, .sequences = 1 << 16, .pages = 1 << 20, .changes = 1 << 20};

// What followers shall do.
struct Command {
  enum class Kind : uint64_t { kEnd, kSteps, kGathers };
  Kind kind = Kind::kEnd;
  int64_t bytes = 0, count = 0;  // of gathers
};

MessageExchange::Options NapOptions(const RankSetup& setup) {
  return {.timeout = kRankTimeout,
          .spin = setup.shares_cores ? absl::ZeroDuration() : kSpin,
          .sleep = [](absl::Duration time) { absl::SleepFor(std::min(time, kNap)); }};
}

template <typename T>
std::span<char> BytesOf(T& value) {
  return {reinterpret_cast<char*>(&value), sizeof(value)};
}

void CheckRanks(const Exchange& exchange) {
  MOESERVE_CHECK(exchange.status().ok(), std::string(exchange.status().message()).c_str());
}

RankFigures FiguresOf(const Exchange& exchange) {
  const ExchangeCounts counts = exchange.counts();
  const auto sent_by = [&](ExchangeKind kind) { return counts.sent_by[static_cast<size_t>(kind)]; };
  const uint64_t to_leader = sent_by(ExchangeKind::kGatherAtLeader);
  return {.bytes = counts.bytes_sent - sent_by(ExchangeKind::kBroadcast) - to_leader,
          .bytes_to_leader = to_leader,
          .gathers = counts.gathers,
          .gather_seconds = counts.gather_seconds,
          .longest_wait = std::ranges::max(counts.wait_seconds)};
}

RankFigures Since(const RankFigures& before, const RankFigures& now) {
  return {.bytes = now.bytes - before.bytes,
          .bytes_to_leader = now.bytes_to_leader - before.bytes_to_leader,
          .gathers = now.gathers - before.gathers,
          .gather_seconds = now.gather_seconds - before.gather_seconds,
          .longest_wait = now.longest_wait - before.longest_wait};
}

// Takes part in the gathers of TimeGathers(); returns the seconds of each.
std::vector<double> RunGathers(Exchange& exchange, int64_t bytes, int64_t count) {
  const std::vector<int64_t> parts(static_cast<size_t>(exchange.ranks()), bytes);
  std::vector<char> buffer(static_cast<size_t>(bytes * exchange.ranks()), 1);
  std::vector<double> seconds;
  for (int64_t i = 0; i < count; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    exchange.StartGather(buffer.data(), parts);
    exchange.FinishGather();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return seconds;
}

}  // namespace

// Where a rank gets experts that are moved to it.
struct RankEngine::Source {
  std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
  std::unique_ptr<Backend> backend = Must(CreateBackend({.device = "cpu", .threads = 1}));

  ExpertSource source() const { return {.weights = weights.get(), .backend = backend.get()}; }
};

BenchModel::BenchModel(const RankSetup& setup, Exchange* exchange, const ExpertPlacement* placement,
                       StepListener* listener)
    : backend(Must(CreateBackend({.device = "cpu", .threads = setup.threads}))) {
  const ModelOptions options{.compute = DType::kBF16,
                             .exchange = exchange,
                             .placement = placement,
                             .owner_sums = setup.owner_sums,
                             .listener = listener};
  const std::unique_ptr<WeightSource> weights = MakeSyntheticWeights(DType::kBF16);
  model = Must(Model::Create(setup.spec, options, *weights, *backend));
  cache = Must(backend->NewKvCache(CacheShapes(setup.spec), KvCacheType::kBF16, {setup.pages}));
}

RankEngine::RankEngine(const RankSetup& setup, std::unique_ptr<Transport> transport)
    : exchange_(std::move(transport), NapOptions(setup)),
      placement_(ExpertPlacement::Balanced(setup.spec, exchange_.ranks())),
      source_(std::make_unique<Source>()),
      leader_(std::make_unique<Leader>(exchange_, source_->source())) {
  own_ = std::make_unique<BenchModel>(setup, &exchange_, &placement_, leader_.get());
}

RankEngine::~RankEngine() {
  Command end{.kind = Command::Kind::kEnd};
  exchange_.BroadcastWhenever(BytesOf(end));
}

std::vector<RankFigures> RankEngine::Run(
    const std::function<void(Model&, KvCacheStorage&)>& steps) {
  Command command{.kind = Command::Kind::kSteps};
  exchange_.BroadcastWhenever(BytesOf(command));
  std::vector<RankFigures> all(static_cast<size_t>(ranks()));
  const std::span<char> bytes(reinterpret_cast<char*>(all.data()),
                              all.size() * sizeof(RankFigures));
  RankFigures own;
  exchange_.GatherAtLeader(BytesOf(own), bytes);  // all ranks are awake when this returns
  const RankFigures before = FiguresOf(exchange_);
  steps(*own_->model, *own_->cache);
  own = Since(before, FiguresOf(exchange_));
  leader_->StopFollowers();
  exchange_.GatherAtLeader(BytesOf(own), bytes);
  CheckRanks(exchange_);
  return all;
}

double RankEngine::TimeGathers(int64_t bytes, int count) {
  Command command{.kind = Command::Kind::kGathers, .bytes = bytes, .count = count};
  exchange_.BroadcastWhenever(BytesOf(command));
  std::vector<double> seconds = RunGathers(exchange_, bytes, count);
  CheckRanks(exchange_);
  std::ranges::nth_element(seconds, seconds.begin() + count / 2);
  return seconds[static_cast<size_t>(count) / 2];
}

void Follow(const RankSetup& setup, std::unique_ptr<Transport> transport) {
  MessageExchange exchange(std::move(transport), NapOptions(setup));
  const ExpertPlacement placement = ExpertPlacement::Balanced(setup.spec, exchange.ranks());
  const RankEngine::Source source;
  Follower follower(exchange, kBenchLimits, source.source());
  const BenchModel own(setup, &exchange, &placement, &follower);
  for (;;) {
    Command command;
    exchange.BroadcastWhenever(BytesOf(command));
    CheckRanks(exchange);
    if (command.kind == Command::Kind::kEnd) return;
    if (command.kind == Command::Kind::kGathers) {
      RunGathers(exchange, command.bytes, command.count);
      continue;
    }
    RankFigures figures;
    exchange.GatherAtLeader(BytesOf(figures), {});
    figures = FiguresOf(exchange);
    const absl::Status ran = follower.Run(*own.model);
    MOESERVE_CHECK(ran.ok(), std::string(ran.message()).c_str());
    figures = Since(figures, FiguresOf(exchange));
    exchange.GatherAtLeader(BytesOf(figures), {});
  }
}

}  // namespace moeserve
