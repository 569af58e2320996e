#include "engine/balance/rebalance_plan.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace moeserve {
namespace {

// Improves the placement of one block step by step.
class BlockBalancer {
 public:
  // Each holder has the share costs[e] of an expert.
  BlockBalancer(std::vector<HolderSet> holders, const std::vector<double>& costs,
                const std::vector<int64_t>& bytes, int ranks)
      : holders_(std::move(holders)),
        costs_(costs),
        bytes_(bytes),
        load_(static_cast<size_t>(ranks)),
        held_(static_cast<size_t>(ranks)) {
    for (size_t e = 0; e < holders_.size(); ++e) {
      for (size_t r = 0; r < load_.size(); ++r) {
        if (!Holds(r, e)) continue;
        load_[r] += costs_[e];
        held_[r] += bytes_[e];
      }
    }
  }

  double Imbalance() const {
    const double all = std::accumulate(load_.begin(), load_.end(), 0.0);
    if (all <= 0.0) return 1.0;
    return *std::ranges::max_element(load_) * static_cast<double>(load_.size()) / all;
  }
  int64_t moved() const { return moved_; }
  const std::vector<HolderSet>& holders() const { return holders_; }

  // Exchanges experts while that helps and no more than `most` bytes are moved.
  void Run(int64_t most) {
    while (Step(most - moved_)) {
    }
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;
  struct Exchange {
    size_t to = 0;          // the other rank
    size_t expert = kNone;  // goes there
    size_t back = kNone;    // comes back; kNone: nothing
    double highest = 0.0;   // load of the two ranks afterwards
  };

  bool Holds(size_t rank, size_t expert) const { return (holders_[expert] >> rank & 1) != 0; }

  // Looks for the exchange between the most loaded rank and another one after which the more loaded
  // of the two has the least load, and makes it. Returns whether there is one that helps.
  bool Step(int64_t budget) {
    const auto from = static_cast<size_t>(std::ranges::max_element(load_) - load_.begin());
    // Less than this is not worth the bytes.
    constexpr double kLeastGain = 0.002;
    Exchange best{.highest = load_[from] * (1.0 - kLeastGain)};
    for (size_t to = 0; to < load_.size(); ++to) {
      if (load_[to] >= load_[from]) continue;
      for (size_t e = 0; e < holders_.size(); ++e) {
        if (Holds(from, e) && !Holds(to, e)) Consider(from, to, e, budget, best);
      }
    }
    if (best.expert == kNone) return false;
    Move(best.expert, from, best.to);
    if (best.back != kNone) Move(best.back, best.to, from);
    return true;
  }

  void Consider(size_t from, size_t to, size_t expert, int64_t budget, Exchange& best) const {
    for (size_t i = 0; i <= holders_.size(); ++i) {
      const size_t back = i < holders_.size() ? i : kNone;
      const bool one_way = back == kNone;
      if (!one_way && (!Holds(to, back) || Holds(from, back))) continue;
      const double gain = costs_[expert] - (one_way ? 0.0 : costs_[back]);
      const double highest = std::max(load_[from] - gain, load_[to] + gain);
      if (gain <= 0.0 || highest >= best.highest) continue;
      const int64_t returned = one_way ? 0 : bytes_[back];
      const int64_t growth = bytes_[expert] - returned;
      // No rank gets more than the other one had, so the largest rank does not grow.
      const bool grows = held_[to] + growth > std::max(held_[to], held_[from]) ||
                         held_[from] - growth > std::max(held_[to], held_[from]);
      if (grows || bytes_[expert] + returned > budget) continue;
      best = {.to = to, .expert = expert, .back = back, .highest = highest};
    }
  }

  void Move(size_t expert, size_t from, size_t to) {
    holders_[expert] ^= HolderSet{1} << from | HolderSet{1} << to;
    load_[from] -= costs_[expert];
    load_[to] += costs_[expert];
    held_[from] -= bytes_[expert];
    held_[to] += bytes_[expert];
    moved_ += bytes_[expert];
  }

  std::vector<HolderSet> holders_;
  const std::vector<double>& costs_;
  const std::vector<int64_t>& bytes_;
  std::vector<double> load_;   // [ranks]
  std::vector<int64_t> held_;  // [ranks] bytes
  int64_t moved_ = 0;
};

// Returns what each holder of an expert has of load x parameters.
std::vector<double> SharesOf(const std::vector<HolderSet>& holders,
                             const std::vector<double>& loads,
                             const std::vector<int64_t>& parameters) {
  std::vector<double> shares;
  for (size_t e = 0; e < holders.size(); ++e) {
    const int copies = std::max(1, std::popcount(holders[e]));
    shares.push_back((e < loads.size() ? loads[e] : 0.0) * static_cast<double>(parameters[e]) /
                     copies);
  }
  return shares;
}

}  // namespace

double PredictedImbalance(const std::vector<HolderSet>& holders, const std::vector<double>& loads,
                          const std::vector<int64_t>& parameters, int ranks) {
  const std::vector<double> shares = SharesOf(holders, loads, parameters);
  return BlockBalancer(holders, shares, parameters, ranks).Imbalance();
}

std::optional<RebalancePlan> PlanRebalance(const ExpertPlacement& placement,
                                           const ExpertLoads& loads, const ExpertSizes& parameters,
                                           const ExpertSizes& bytes,
                                           const RebalanceLimits& limits) {
  std::vector<std::pair<double, std::pair<Stack, int>>> order;
  for (const auto& [key, of_block] : loads) {
    const double predicted = PredictedImbalance(placement.holders(key.first, key.second), of_block,
                                                parameters.at(key), placement.ranks());
    if (predicted > limits.imbalance) order.emplace_back(-predicted, key);
  }
  std::ranges::sort(order);
  ExpertPlacement::Blocks blocks = placement.blocks();
  int64_t moved = 0;
  for (const auto& [negative, key] : order) {
    const std::vector<double> shares = SharesOf(blocks.at(key), loads.at(key), parameters.at(key));
    BlockBalancer balancer(blocks.at(key), shares, bytes.at(key), placement.ranks());
    balancer.Run(limits.bytes - moved);
    if (balancer.Imbalance() > -negative * (1.0 - limits.gain)) continue;
    moved += balancer.moved();
    blocks.at(key) = balancer.holders();
  }
  if (moved == 0) return std::nullopt;
  return RebalancePlan{{placement.ranks(), std::move(blocks), placement.version() + 1}, moved};
}

}  // namespace moeserve
