#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/statistics/expert_recorder.h"
#include "engine/statistics/measures/macs.h"

namespace moeserve {
namespace {

// Returns the sum over the positions of a sequence of the keys that a token sees there.
double KeysOf(int64_t length, std::optional<int> window, WindowKind kind, bool causal) {
  if (!causal) {
    const int64_t w = std::min<int64_t>(window.value_or(length), length);
    // All pairs of positions but those with w or more between them.
    const int64_t apart = length - w;
    return static_cast<double>(length * length - apart * (apart + 1));
  }
  if (length == 0) return 0.0;
  return static_cast<double>(length) * VisiblePositions{1, length}.Mean(window, kind);
}

// Returns the number of keys that a token of a sequence of `length` tokens sees.
int64_t KeysAt(int64_t position, int64_t length, const AttentionSpec& attention, bool causal) {
  const int64_t w = attention.window.value_or(length);
  if (attention.window_kind == WindowKind::kChunk) return position % w + 1;
  const int64_t before = std::min(position + 1, w);  // the token itself included
  return causal ? before : before + std::min(length - position, w) - 1;
}

// Returns the sum over selections of the keys that the selected expert read.
double SelectedKeys(const BlockRoutes& routes, std::span<const int> lengths,
                    const AttentionSpec& attention, bool causal) {
  double sum = 0.0;
  size_t row = 0;
  for (const int length : lengths) {
    for (int64_t position = 0; position < length; ++position, ++row) {
      sum += static_cast<double>(routes.ExpertsOf(row).size()) *
             static_cast<double>(KeysAt(position, length, attention, causal));
    }
  }
  return sum;
}

// Returns the sum over selections, or over rows of dense attention, of the tokens of the source;
// nullopt if the number of selections varies and the routes are not known.
std::optional<double> SelectedSources(const AttentionSpec& cross, std::span<const int> lengths,
                                      std::span<const int> sources, const BlockRoutes* routes) {
  const bool routed = cross.routed();
  const int most = routed ? cross.routing->select.MaxSelected() : 1;
  if (routed && routes == nullptr && cross.routing->select.MinSelected() != most) {
    return std::nullopt;
  }
  double sum = 0.0;
  size_t row = 0;
  for (size_t i = 0; i < lengths.size() && i < sources.size(); ++i) {
    double selected = static_cast<double>(lengths[i]) * most;
    if (routed && routes != nullptr) {
      selected = 0.0;
      for (int t = 0; t < lengths[i]; ++t) {
        selected += static_cast<double>(routes->ExpertsOf(row + static_cast<size_t>(t)).size());
      }
    }
    row += static_cast<size_t>(lengths[i]);
    sum += selected * sources[i];
  }
  return sum;
}

}  // namespace

MeasuredMacs MacsOf(const ModelSpec& spec, const ExpertStats& stats, std::span<const int> lengths,
                    std::span<const BlockRoutes> routes, std::span<const int> sources) {
  MeasuredMacs out;
  const double tokens = static_cast<double>(stats.tokens);
  if (stats.tokens == 0) return out;
  double experts = 0.0, keys = 0.0;
  bool known = true;
  for (const BlockExpertStats& b : stats.blocks) {
    for (int e = 0; e < b.num_experts; ++e) {
      experts += static_cast<double>(b.selections[static_cast<size_t>(e)]) *
                 static_cast<double>(ExpertMacs(spec, b.layer, b.block, e));
    }
  }
  size_t routed = 0;  // index of the routed block
  for (const BlockSpec& block : spec.blocks) {
    const size_t index = routed;
    if (block.routing() != nullptr) ++routed;
    if (const AttentionSpec* cross = block.cross_attention(); cross != nullptr) {
      const auto selected =
          SelectedSources(*cross, lengths, sources, routes.empty() ? nullptr : &routes[index]);
      known = known && selected.has_value();
      keys += static_cast<double>(MacsPerKey(*cross)) * selected.value_or(0.0);
      continue;
    }
    const AttentionSpec* a = block.attention();
    if (a == nullptr) continue;
    const double per_key = static_cast<double>(MacsPerKey(*a));
    if (a->routed() && !routes.empty()) {
      keys += per_key * SelectedKeys(routes[index], lengths, *a, IsCausal(spec, *a));
      continue;
    }
    const int most = a->routed() ? a->routing->select.MaxSelected() : 1;
    known = known && (!a->routed() || a->routing->select.MinSelected() == most);
    for (const int length : lengths) {
      keys += most * per_key * KeysOf(length, a->window, a->window_kind, IsCausal(spec, *a));
    }
  }
  out.matrices = static_cast<double>(FixedMacs(spec)) + experts / tokens;
  if (known) out.attention = keys / tokens;
  return out;
}

RequestMacs::RequestMacs(const ModelSpec& spec)
    : source_(spec.encoder == nullptr ? nullptr : std::make_shared<RequestMacs>(*spec.encoder)),
      source_macs_(SourceMacs(spec)),
      fixed_(FixedMacs(spec)) {
  const ExpertStats sizes = EmptyExpertStats(spec);
  always_parameters_ = sizes.always_active_parameters;
  struct Cost {
    double parameters, macs;
  };
  std::vector<Cost> costs;
  for (const BlockExpertStats& b : sizes.blocks) {
    for (int e = 0; e < b.num_experts; ++e) {
      costs.push_back({static_cast<double>(b.expert_parameters[static_cast<size_t>(e)]),
                       static_cast<double>(ExpertMacs(spec, b.layer, b.block, e))});
    }
  }
  if (!costs.empty()) {
    // Experts of one form and row width are on a line: parameters = a width + b, MACs = c width.
    const auto other = std::find_if(costs.begin(), costs.end(), [&](const Cost& c) {
      return c.parameters != costs.front().parameters;
    });
    if (other != costs.end()) {
      slope_ = (other->macs - costs.front().macs) / (other->parameters - costs.front().parameters);
    }
    offset_ = costs.front().macs - *slope_ * costs.front().parameters;
    for (const Cost& c : costs) {
      const double error = std::abs(*slope_ * c.parameters + offset_ - c.macs);
      if (error > 1e-9 * std::max(1.0, c.macs)) {
        slope_.reset();
        break;
      }
    }
  }
  bool routed_attention = false;
  for (const BlockSpec& block : spec.blocks) {
    const RoutedLayerSpec* routing = block.routing();
    if (routing != nullptr) {
      const SelectSpec& select = routing->select;
      // A varying number never equals the number that is asked for.
      selections_ += select.MinSelected() == select.MaxSelected()
                         ? static_cast<uint64_t>(routing->split.heads * select.MaxSelected())
                         : uint64_t{1} << 40;
    }
    const AttentionSpec* const cross = block.cross_attention();
    const AttentionSpec* const a = cross != nullptr ? cross : block.attention();
    if (a == nullptr) continue;
    routed_attention = routed_attention || a->routed();
    const int selected = a->routed() ? a->routing->select.MaxSelected() : 1;
    const double per_key = static_cast<double>(MacsPerKey(*a)) * selected;
    if (cross != nullptr) {
      source_keys_ += per_key;
    } else {
      keys_.push_back({per_key, a->window, a->window_kind, IsCausal(spec, *a)});
    }
  }
  if (!routed_attention) selections_ = 0;
}

std::optional<double> RequestMacs::Of(const Usage& usage) const {
  const ExpertWork& source = usage.source;
  const auto own = OfStack({.tokens = usage.routed_tokens - source.tokens,
                            .routes = usage.expert_routes - source.routes,
                            .parameters = usage.activated_parameters - source.parameters},
                           source.tokens);
  if (!own || source_ == nullptr) return own;
  const auto of_source = source_->OfStack(source, 0);
  if (!of_source) return std::nullopt;
  return *own + *of_source + static_cast<double>(source.tokens) * static_cast<double>(source_macs_);
}

std::optional<double> RequestMacs::OfStack(const ExpertWork& work, int64_t source_tokens) const {
  const auto tokens = static_cast<uint64_t>(work.tokens);
  if (tokens == 0 || !slope_) return std::nullopt;
  if (selections_ > 0 && work.routes != selections_ * tokens) return std::nullopt;
  const double count = static_cast<double>(tokens);
  const double parameters =
      static_cast<double>(work.parameters) - count * static_cast<double>(always_parameters_);
  double macs = count * static_cast<double>(fixed_) + *slope_ * parameters +
                offset_ * static_cast<double>(work.routes) +
                count * static_cast<double>(source_tokens) * source_keys_;
  for (const Keys& keys : keys_) {
    macs += keys.macs * KeysOf(work.tokens, keys.window, keys.window_kind, keys.causal);
  }
  return std::round(macs);
}

}  // namespace moeserve
