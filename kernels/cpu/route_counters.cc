#include "kernels/cpu/route_counters.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace moeserve::cpu {

CpuRouteCounters::CpuRouteCounters(CountSettings settings)
    : settings_(std::move(settings)), counts_(ZeroCounts(settings_)) {
  for (const CountedBlock& block : settings_.blocks) {
    first_expert_.push_back(experts_);
    experts_ += block.num_experts;
  }
  if (settings_.vocabulary > 0) {
    table_ = std::make_unique<std::atomic<uint32_t>[]>(
        static_cast<size_t>(settings_.table_rows() * experts_));
  }
  if (settings_.own_rows > 0) {
    row_of_token_.assign(static_cast<size_t>(settings_.vocabulary),
                         static_cast<int32_t>(settings_.own_rows));
  }
}

void CpuRouteCounters::Count(std::span<const uint8_t> kind, std::span<const int32_t> token_ids,
                             std::span<const RoutingPlan* const> plans,
                             std::span<TokenRoutes> routes) {
  const bool uniform =
      std::all_of(kind.begin(), kind.end(), [&](uint8_t k) { return k == kind.front(); });
  const bool decode_only = std::all_of(
      kind.begin(), kind.end(), [](uint8_t k) { return k == kTokenDecode || k == kTokenRejected; });
  const Step step{.kind = kind,
                  .token_ids = token_ids,
                  .uniform_kind = uniform && !kind.empty() ? kind.front() : kMixed,
                  .step_kind = decode_only && !kind.empty() ? 1 : 0,
                  .routes = routes};
  std::fill(routes.begin(), routes.end(), TokenRoutes{});
  diversity_.assign(kind.size(), 0);
  {
    const MutexLock lock(mutex_);
    for (size_t i = 0; i < plans.size(); ++i) {
      if (plans[i] != nullptr) CountBlock(step, i, *plans[i]);
    }
    ++counts_.model.steps;
    for (size_t t = 0; t < kind.size(); ++t) {
      ++counts_.model.tokens[kind[t]];
      if (!IsCountedApart(kind[t])) ++counts_.diversity_histogram[diversity_[t]];
    }
  }
  CountPairs();
}

void CpuRouteCounters::CountBlock(const Step& step, size_t index, const RoutingPlan& plan) {
  const CountedBlock& block = settings_.blocks[index];
  BlockCounts& counts = counts_.blocks[index];
  distinct_.assign(step.kind.size(), 0);
  uint64_t active = 0;
  // Assignments are sorted by expert, then by row.
  for (int32_t begin = 0, end = 0; begin < plan.num_assignments; begin = end) {
    const int32_t expert = plan.expert_of_assignment[begin];
    end = plan.expert_offsets[expert + 1];
    if (step.uniform_kind == kMixed || IsCountedApart(step.uniform_kind)) {
      CountExpert<true>(step, index, plan, begin, end);
    } else {
      CountExpert<false>(step, index, plan, begin, end);
    }
    ++active;
  }
  counts_.model.active_experts[step.step_kind].Observe(active);
  const auto sub_tokens = static_cast<size_t>(block.sub_tokens);
  for (size_t t = 0; t < step.kind.size(); ++t) {
    if (IsCountedApart(step.kind[t])) continue;
    for (size_t r = t * sub_tokens; r < (t + 1) * sub_tokens; ++r) {
      counts.nonfinite_rows += plan.row_nonfinite[r] != 0;
    }
    ++counts.distinct_histogram[distinct_[t]];
    if (block.in_diversity) diversity_[t] += distinct_[t];
  }
}

template <bool mixed>
void CpuRouteCounters::CountExpert(const Step& step, size_t index, const RoutingPlan& plan,
                                   int32_t begin, int32_t end) {
  const CountedBlock& block = settings_.blocks[index];
  const int32_t expert = plan.expert_of_assignment[begin];
  const auto parameters =
      static_cast<uint64_t>(block.expert_parameters[static_cast<size_t>(expert)]);
  const auto column = static_cast<size_t>(first_expert_[index] + expert);
  const auto rows = static_cast<uint64_t>(end - begin);
  uint64_t recomputed = 0, rejected = 0, decoded = 0, tokens = 0;
  double weights = 0.0;
  int32_t last = -1;
  for (int32_t a = begin; a < end; ++a) {
    const int32_t row = plan.row_of_assignment[a];
    const int32_t t = block.sub_tokens == 1 ? row : row / block.sub_tokens;
    TokenRoutes& routes = step.routes[static_cast<size_t>(t)];
    ++routes.routes;
    routes.parameters += parameters;
    if constexpr (mixed) {
      const uint8_t kind = step.kind[static_cast<size_t>(t)];
      if (IsCountedApart(kind)) {
        ++(kind == kTokenRecompute ? recomputed : rejected);
        continue;
      }
      decoded += kind == kTokenDecode;
    }
    // Rows ascend, so the rows of a token are adjacent.
    const bool first = t != last;
    last = t;
    tokens += first;
    distinct_[static_cast<size_t>(t)] += first;
    weights += plan.weight_of_assignment[a];
    if (table_ != nullptr) {
      const auto id = static_cast<size_t>(step.token_ids[static_cast<size_t>(t)]);
      const size_t table_row = row_of_token_.empty() ? id : static_cast<size_t>(row_of_token_[id]);
      table_indices_.push_back(table_row * static_cast<size_t>(experts_) + column);
    }
  }
  if (!mixed && step.uniform_kind == kTokenDecode) decoded = rows;
  ExpertCount& count = counts_.blocks[index].experts[static_cast<size_t>(expert)];
  count.selections += rows - recomputed - rejected;
  count.decode_selections += decoded;
  count.recomputed_selections += recomputed;
  count.rejected_selections += rejected;
  count.touching_tokens += tokens;
  count.weight_sum += weights;
  ++count.visits;
  counts_.model.expert_rows[step.step_kind].Observe(rows);
}

void CpuRouteCounters::CountPairs() {
  // The table is larger than the caches, and every token changes a different part of the table, so
  // counters are prefetched well before they are needed.
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
  const MutexLock lock(mutex_);
  return counts_;
}

void CpuRouteCounters::AssignTokenRows(std::span<const TokenRowChange> changes) {
  MOESERVE_CHECK(settings_.own_rows > 0, "a table whose rows are assigned");
  const auto shared_row = static_cast<size_t>(settings_.own_rows);
  std::atomic<uint32_t>* shared = &table_[shared_row * static_cast<size_t>(experts_)];
  for (const TokenRowChange& change : changes) {
    MOESERVE_CHECK(change.row >= 0 && change.row < settings_.own_rows, "a row of the table");
    std::atomic<uint32_t>* row =
        &table_[static_cast<size_t>(change.row) * static_cast<size_t>(experts_)];
    for (int64_t e = 0; e < experts_; ++e) {
      const uint32_t sum = shared[e].load(std::memory_order_relaxed);
      const uint32_t count = row[e].exchange(0, std::memory_order_relaxed);
      shared[e].store(sum + std::min(count, UINT32_MAX - sum), std::memory_order_relaxed);
    }
    if (change.replaced >= 0) {
      row_of_token_[static_cast<size_t>(change.replaced)] = static_cast<int32_t>(shared_row);
    }
    row_of_token_[static_cast<size_t>(change.token)] = change.row;
  }
}

Status CpuRouteCounters::ReadTokenExperts(int64_t first, std::span<uint32_t> part) const {
  MOESERVE_CHECK(
      first >= 0 && first + static_cast<int64_t>(part.size()) <= settings_.table_rows() * experts_,
      "elements of the table");
  for (size_t i = 0; i < part.size(); ++i) {
    part[i] = table_[static_cast<size_t>(first) + i].load(std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

}  // namespace moeserve::cpu
