#include "tests/bench/ranks/rebalance_steps.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/weights/place_experts.h"

namespace moeserve {
namespace {

using Clock = std::chrono::steady_clock;

// How long steps are timed before a move, and after the new placement is in use.
constexpr double kSteadySeconds = 2.0, kAfterSeconds = 1.0;
// Steps around the first one with the new placement: it, and those in which memory is freed.
constexpr size_t kAroundChange = 4;

// The steps of a work, one after the other, again and again.
class EndlessSteps {
 public:
  EndlessSteps(Model& model, KvCacheStorage& cache, const Work& work)
      : model_(model), cache_(cache), work_(work), expected_(work.batches.size()) {}

  // Runs a step; returns its seconds.
  double Run() {
    const size_t i = step_++ % work_.batches.size();
    const Batch& batch = work_.batches[i];
    logits_.resize(batch.logit_rows.size() * static_cast<size_t>(model_.spec().vocab_size));
    const auto begin = Clock::now();
    model_.Forward(batch, cache_, {}, {.logits = logits_});
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    const absl::Status status = model_.CheckFiles();
    MOESERVE_CHECK(status.ok(), std::string(status.message()).c_str());
    if (expected_[i].empty()) expected_[i] = logits_;
    equal_ = equal_ &&
             std::memcmp(expected_[i].data(), logits_.data(), logits_.size() * sizeof(float)) == 0;
    return seconds;
  }
  // Runs steps until `done` returns true, at least one; returns their seconds.
  std::vector<double> RunUntil(const std::function<bool()>& done) {
    std::vector<double> seconds;
    do {
      seconds.push_back(Run());
    } while (!done());
    return seconds;
  }
  std::vector<double> RunFor(double seconds) {
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    return RunUntil([end] { return Clock::now() >= end; });
  }
  // Whether steps of the same tokens had the same bits.
  bool equal() const { return equal_; }

 private:
  Model& model_;
  KvCacheStorage& cache_;
  const Work& work_;
  size_t step_ = 0;
  std::vector<std::vector<float>> expected_;  // [batches]
  std::vector<float> logits_;
  bool equal_ = true;
};

// Returns a placement in which ranks 0 and 1 have exchanged pairs of experts, one of each block
// after the other, until `bytes` have to be loaded or no pair is left; `loaded` gets the bytes.
std::shared_ptr<const ExpertPlacement> Exchanged(const ExpertPlacement& from,
                                                 const ExpertSizes& sizes, int64_t bytes,
                                                 int64_t& loaded) {
  ExpertPlacement::Blocks blocks = from.blocks();
  loaded = 0;
  for (size_t pair = 0, found = 1; found > 0; ++pair) {
    found = 0;
    for (auto& [key, holders] : blocks) {
      const std::vector<HolderSet>& before = from.holders(key.first, key.second);
      std::vector<size_t> of_rank[2];
      for (size_t e = 0; e < before.size(); ++e) {
        if (before[e] == 1 || before[e] == 2) of_rank[before[e] - 1].push_back(e);
      }
      if (pair >= std::min(of_rank[0].size(), of_rank[1].size()) || loaded >= bytes) continue;
      ++found;
      for (int r = 0; r < 2; ++r) {
        const size_t e = of_rank[r][pair];
        holders[e] = HolderSet{1} << (1 - r);
        loaded += sizes.at(key)[e];
      }
    }
  }
  return std::make_shared<const ExpertPlacement>(from.ranks(), std::move(blocks),
                                                 from.version() + 1);
}

double Longest(const std::vector<double>& seconds) { return std::ranges::max(seconds); }

struct Delays {
  double moving = 0.0, change = 0.0, still = 0.0;
};

Delays RunRound(RankEngine& ranks, EndlessSteps& steps, const ExpertSizes& sizes, int64_t bytes) {
  const std::vector<double> before = steps.RunFor(kSteadySeconds);
  Leader& leader = ranks.leader();
  int64_t loaded = 0;
  const auto next = Exchanged(*leader.placement().first, sizes, bytes, loaded);
  leader.Announce(next);
  const auto announced = Clock::now();
  std::vector<double> moving = steps.RunUntil([&] { return !leader.placement().second; });
  const std::chrono::duration<double> took = Clock::now() - announced;
  MOESERVE_CHECK(leader.placement().first->version() == next->version(), "the new placement");
  // The last one of these steps was the first one with the new placement.
  const std::vector<double> after = steps.RunFor(kAfterSeconds);
  std::vector<double> change(after.begin(), after.begin() + std::min(kAroundChange, after.size()));
  change.push_back(moving.back());
  moving.insert(moving.end(), after.begin(), after.end());
  size_t left = moving.size();
  const std::vector<double> still = steps.RunUntil([&left] { return --left == 0; });
  const double median = Median(before);
  const Delays delays{.moving = Longest(moving) - median,
                      .change = Longest(change) - median,
                      .still = Longest(still) - median};
  std::printf(
      "%.0f MiB of experts moved in %.2f s: %zu steps, median %.2f ms (%.2f before); the longest "
      "one %.2f ms above the median before, at the change %.2f ms; of %zu steps after it %.2f ms\n",
      static_cast<double>(loaded) / (1 << 20), took.count(), moving.size(), 1e3 * Median(moving),
      1e3 * median, 1e3 * delays.moving, 1e3 * delays.change, still.size(), 1e3 * delays.still);
  std::fflush(stdout);
  return delays;
}

}  // namespace

bool MeasureRebalancing(RankEngine& ranks, const ModelSpec& spec, const Work& work, int rounds,
                        int mib) {
  bool equal = false;
  std::vector<double> moving, change, still;
  ranks.Run([&](Model& model, KvCacheStorage& cache) {
    EndlessSteps steps(model, cache, work);
    const ExpertSizes sizes = ExpertBytes(spec, Quantization::kNone, DType::kBF16);
    steps.RunFor(1.0);
    for (int round = 0; round < rounds; ++round) {
      const Delays delays = RunRound(ranks, steps, sizes, int64_t{mib} << 20);
      moving.push_back(delays.moving);
      change.push_back(delays.change);
      still.push_back(delays.still);
    }
    equal = steps.equal();
  });
  std::printf(
      "longest delay of a step, median and maximum of %d rounds: with a move %.2f and %.2f ms, at "
      "the change %.2f and %.2f ms, without a move %.2f and %.2f ms; asked: at most %.0f ms\n",
      rounds, 1e3 * Median(moving), 1e3 * Longest(moving), 1e3 * Median(change),
      1e3 * Longest(change), 1e3 * Median(still), 1e3 * Longest(still), 1e3 * kMostDelaySeconds);
  if (!equal) std::printf("the logits have changed with the placement\n");
  return equal;
}

}  // namespace moeserve
