#include "engine/routes/row_limit.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "base/check.h"
#include "base/error_text.h"

namespace moeserve {
namespace {

constexpr std::string_view kRenormalize = ":renormalize";

std::string LimitText(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  return std::string(text, end);
}

// Returns the positions of a row's assignments in RoutingPlan::assignments_of_row by descending
// weight; equal weights by ascending expert.
std::vector<int32_t> ByRank(const RoutingPlan& plan, int row) {
  std::vector<int32_t> order(
      static_cast<size_t>(plan.row_offsets[row + 1] - plan.row_offsets[row]));
  std::iota(order.begin(), order.end(), plan.row_offsets[row]);
  const auto weight = [&](int32_t i) {
    return plan.weight_of_assignment[plan.assignments_of_row[i]];
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return weight(a) > weight(b); });
  return order;
}

}  // namespace

Result<CapacityRule> CapacityRule::Parse(std::string_view whole_text) {
  CapacityRule rule;
  std::string_view text = whole_text;
  if (text.ends_with(kRenormalize)) {
    rule.renormalize = true;
    text.remove_suffix(kRenormalize.size());
  }
  if (text == "gshard") {
    rule.kind = Kind::kGshard;
    return rule;
  }
  const size_t colon = text.find(':');
  const std::string_view kind = text.substr(0, colon);
  const std::string_view number = colon == std::string_view::npos ? "" : text.substr(colon + 1);
  const auto read = std::from_chars(number.data(), number.data() + number.size(), rule.value);
  const bool whole =
      !number.empty() && read.ec == std::errc() && read.ptr == number.data() + number.size();
  if (kind == "switch" && whole && rule.value >= 1 && rule.value <= 1e9 &&
      rule.value == std::floor(rule.value)) {
    rule.kind = Kind::kSwitch;
    return rule;
  }
  if (kind == "fraction" && whole && rule.value > 0.0 && rule.value <= 1.0) {
    rule.kind = Kind::kFraction;
    return rule;
  }
  return absl::InvalidArgumentError(
      Concat("capacity: expected switch:ROWS, fraction:F with F above 0 and up to 1, or gshard, "
             "and possibly :renormalize, found ",
             Printable(whole_text, 64)));
}

std::string CapacityRule::Text() const {
  const std::string_view more = renormalize ? kRenormalize : "";
  switch (kind) {
    case Kind::kSwitch:
      return Concat("switch:", LimitText(value), more);
    case Kind::kFraction:
      return Concat("fraction:", LimitText(value), more);
    case Kind::kGshard:
      break;
  }
  return Concat("gshard", more);
}

int64_t CapacityRule::Limit(int64_t rows, int experts, int k) const {
  switch (kind) {
    case Kind::kSwitch:
      return static_cast<int64_t>(value);
    case Kind::kFraction:
      return static_cast<int64_t>(std::ceil(value * static_cast<double>(rows)));
    case Kind::kGshard:
      break;
  }
  return k * ((rows + experts - 1) / experts);
}

RowLimit::RowLimit(const CapacityRule& rule, const ModelSpec& spec) : rule_(rule) {
  for (const BlockSpec& block : spec.blocks) {
    const RoutedLayerSpec* routing = block.routing();
    most_selected_.push_back(routing == nullptr ? 0 : routing->select.MaxSelected());
    dropped_.emplace_back();
    if (routing != nullptr)
      dropped_.back().by_expert.resize(static_cast<size_t>(routing->num_experts));
  }
}

GivenRoutes RowLimit::Apply(int slot, const RoutingPlan& plan) {
  DroppedRows& dropped = dropped_[static_cast<size_t>(slot)];
  const int64_t limit =
      rule_.Limit(plan.rows, plan.num_experts, most_selected_[static_cast<size_t>(slot)]);
  std::vector<std::vector<int32_t>> ranked;
  size_t ranks = 0;
  for (int r = 0; r < plan.rows; ++r) {
    ranked.push_back(ByRank(plan, r));
    ranks = std::max(ranks, ranked.back().size());
  }
  std::vector<int64_t> taken(static_cast<size_t>(plan.num_experts));
  std::vector<uint8_t> kept(static_cast<size_t>(plan.row_offsets[plan.rows]));
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (const std::vector<int32_t>& row : ranked) {
      if (rank >= row.size()) continue;
      const int32_t expert = plan.expert_of_assignment[plan.assignments_of_row[row[rank]]];
      kept[static_cast<size_t>(row[rank])] = taken[static_cast<size_t>(expert)]++ < limit;
    }
  }
  GivenRoutes out;
  out.offsets.push_back(0);
  for (int r = 0; r < plan.rows; ++r) {
    double all = 0.0;
    double left = 0.0;
    const size_t first = out.weights.size();
    for (int32_t i = plan.row_offsets[r]; i < plan.row_offsets[r + 1]; ++i) {
      const int32_t a = plan.assignments_of_row[i];
      const double weight = plan.weight_of_assignment[a];
      all += weight;
      if (kept[static_cast<size_t>(i)] != 0) left += weight;
      ++dropped.choices;
      if (kept[static_cast<size_t>(i)] != 0) {
        out.experts.push_back(plan.expert_of_assignment[a]);
        out.weights.push_back(plan.weight_of_assignment[a]);
      } else {
        ++dropped.dropped;
        ++dropped.by_expert[static_cast<size_t>(plan.expert_of_assignment[a])];
      }
    }
    if (rule_.renormalize && left > 0.0 && left < all) {
      for (size_t i = first; i < out.weights.size(); ++i) {
        out.weights[i] = static_cast<float>(out.weights[i] * (all / left));
      }
    }
    out.offsets.push_back(static_cast<int32_t>(out.experts.size()));
    dropped.rows_without += out.offsets[static_cast<size_t>(r)] == out.offsets.back();
  }
  dropped.rows += static_cast<uint64_t>(plan.rows);
  dropped.least_limit = dropped.least_limit == 0 ? limit : std::min(dropped.least_limit, limit);
  dropped.most_limit = std::max(dropped.most_limit, limit);
  return out;
}

}  // namespace moeserve
