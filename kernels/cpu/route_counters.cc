#include "kernels/cpu/route_counters.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace moeserve::cpu {

CpuRouteCounters::CpuRouteCounters(CountSettings settings)
    : settings_(std::move(settings)), counts_(ZeroCounts(settings_)) {
  size_t widest = 0;
  for (const CountedBlock& block : settings_.blocks) {
    first_expert_.push_back(experts_);
    experts_ += block.num_experts;
    widest = std::max(widest, static_cast<size_t>(block.num_experts));
  }
  sums_.resize(widest);
  if (settings_.vocabulary > 0) {
    table_ = std::make_unique<std::atomic<uint32_t>[]>(
        static_cast<size_t>(settings_.vocabulary * experts_));
  }
}

void CpuRouteCounters::Count(std::span<const uint8_t> kind, std::span<const int32_t> token_ids,
                             std::span<const RoutingPlan* const> plans,
                             std::span<TokenRoutes> routes) {
  const bool decoding =
      std::all_of(kind.begin(), kind.end(), [](uint8_t k) { return k == kTokenDecode; });
  const Step step{kind, token_ids, decoding ? 1 : 0, routes};
  std::fill(routes.begin(), routes.end(), TokenRoutes{});
  diversity_.assign(kind.size(), 0);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < plans.size(); ++i) {
      if (plans[i] != nullptr) CountBlock(step, i, *plans[i]);
    }
    ++counts_.model.steps;
    for (size_t t = 0; t < kind.size(); ++t) {
      ++counts_.model.tokens[kind[t]];
      if (kind[t] != kTokenRecompute) ++counts_.diversity_histogram[diversity_[t]];
    }
  }
  CountPairs();
}

void CpuRouteCounters::CountBlock(const Step& step, size_t index, const RoutingPlan& plan) {
  const int tokens = static_cast<int>(step.kind.size());
  touched_.clear();
  for (int t = 0; t < tokens; ++t) CountToken(step, index, plan, t);
  ModelCounts& model = counts_.model;
  std::vector<ExpertCount>& experts = counts_.blocks[index].experts;
  for (const int e : touched_) {
    const ExpertSums sums = std::exchange(sums_[e], ExpertSums{.mark = sums_[e].mark});
    ExpertCount& count = experts[e];
    count.selections += sums.rows - sums.recomputed;
    count.decode_selections += sums.decoded;
    count.recomputed_selections += sums.recomputed;
    count.touching_tokens += sums.tokens;
    count.weight_sum += sums.weights;
    ++count.visits;
    model.expert_rows[step.step_kind].Observe(sums.rows);
  }
  model.active_experts[step.step_kind].Observe(touched_.size());
}

void CpuRouteCounters::CountToken(const Step& step, size_t index, const RoutingPlan& plan,
                                  int token) {
  const CountedBlock& block = settings_.blocks[index];
  BlockCounts& counts = counts_.blocks[index];
  const bool recomputed = step.kind[token] == kTokenRecompute;
  const uint32_t decoded = step.kind[token] == kTokenDecode;
  const size_t first_pair =
      table_ == nullptr
          ? 0
          : static_cast<size_t>(step.token_ids[token] * experts_ + first_expert_[index]);
  uint32_t distinct = 0;
  ++mark_;
  const int begin = token * block.sub_tokens, end = begin + block.sub_tokens;
  TokenRoutes& routes = step.routes[token];
  routes.routes += static_cast<uint64_t>(plan.row_offsets[end] - plan.row_offsets[begin]);
  for (int32_t i = plan.row_offsets[begin]; i < plan.row_offsets[end]; ++i) {
    const int32_t a = plan.assignments_of_row[i];
    const int e = plan.expert_of_assignment[a];
    ExpertSums& expert = sums_[e];
    if (expert.rows++ == 0) touched_.push_back(e);
    routes.parameters += static_cast<uint64_t>(block.expert_parameters[e]);
    if (recomputed) {
      ++expert.recomputed;
      continue;
    }
    const uint32_t first = expert.mark != mark_;
    expert.mark = mark_;
    expert.tokens += first;
    distinct += first;
    expert.decoded += decoded;
    expert.weights += plan.weight_of_assignment[a];
    if (table_ != nullptr) table_indices_.push_back(first_pair + static_cast<size_t>(e));
  }
  if (recomputed) return;
  for (int r = begin; r < end; ++r) counts.nonfinite_rows += plan.row_nonfinite[r] != 0;
  ++counts.distinct_histogram[distinct];
  if (block.diverse) diversity_[token] += distinct;
}

void CpuRouteCounters::CountPairs() {
  // The table is larger than the caches and every token touches another place of it, so counters
  // are prefetched well before they are needed.
  constexpr size_t kAhead = 24;
  for (size_t i = 0; i < table_indices_.size(); ++i) {
    if (i + kAhead < table_indices_.size()) {
      __builtin_prefetch(&table_[table_indices_[i + kAhead]], 1);
    }
    std::atomic<uint32_t>& count = table_[table_indices_[i]];
    const uint32_t old = count.load(std::memory_order_relaxed);
    count.store(old + (old != UINT32_MAX), std::memory_order_relaxed);
  }
  table_indices_.clear();
}

CountsSnapshot CpuRouteCounters::Read() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

Status CpuRouteCounters::ReadTokenExperts(int64_t first, std::span<uint32_t> part) const {
  MOESERVE_CHECK(
      first >= 0 && first + static_cast<int64_t>(part.size()) <= settings_.vocabulary * experts_,
      "elements of the table");
  for (size_t i = 0; i < part.size(); ++i) {
    part[i] = table_[static_cast<size_t>(first) + i].load(std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

}  // namespace moeserve::cpu
