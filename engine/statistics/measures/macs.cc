#include "engine/statistics/measures/macs.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "engine/spec/weights.h"
#include "engine/statistics/expert_recorder.h"

namespace moeserve {
namespace {

// Returns the number of rows of a token that a matrix outside of the routed experts multiplies.
int64_t RowsOf(const std::string& tensor, int heads) {
  const bool of_rows = tensor.find(".router.") != std::string::npos ||
                       tensor.find(".latent_down.") != std::string::npos ||
                       tensor.find(".latent_up.") != std::string::npos;
  return of_rows ? heads : 1;
}

// Returns whether a matrix makes keys or values of a source.
bool IsOfSource(const std::string& tensor) {
  return tensor.find(".cross_attention.k.") != std::string::npos ||
         tensor.find(".cross_attention.v.") != std::string::npos;
}

// Returns the number of sub-tokens in the block that a tensor belongs to.
int HeadsOf(const ModelSpec& spec, const std::string& tensor) {
  for (const BlockSpec& block : spec.blocks) {
    if (block.routing() != nullptr && block.routing()->split.heads > 1 &&
        tensor.starts_with(block.name() + ".")) {
      return block.routing()->split.heads;
    }
  }
  return 1;
}

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

int64_t ExpertMacs(const ModelSpec& spec, int layer, BlockKind block, int expert) {
  if (block != BlockKind::kFeedForward) {
    const BlockSpec& owner = *spec.FindBlock(layer, block);
    const AttentionSpec& a =
        block == BlockKind::kAttention ? *owner.attention() : *owner.cross_attention();
    const int64_t width = a.routed() ? int64_t{2} * a.num_kv_heads * a.head_dim : a.value_width();
    return width * spec.hidden_size;
  }
  const FeedForwardSpec& f = spec.feed_forward(layer);
  const RoutedLayerSpec& routing = *f.routing;
  const int body = routing.BodyOf(expert);
  if (body < 0) return 0;
  const int64_t matrices = f.expert.form == ExpertForm::kGated ? 3 : 2;
  const int64_t row =
      routing.latent_width > 0 ? routing.latent_width : spec.hidden_size / routing.split.heads;
  return matrices * f.expert.depth * routing.widths[static_cast<size_t>(body)] * row;
}

int64_t RecurrenceMacs(const BlockSpec& block) {
  const auto of = [](const RecurrentShape& shape) {
    const int64_t passes = shape.delta ? 4 : 3;  // the decay, the value known, what is added, read
    return passes * shape.heads * shape.key_dim * shape.value_dim;
  };
  if (block.delta() != nullptr) return of(block.delta()->recurrence());
  return block.state_space() != nullptr ? of(block.state_space()->recurrence()) : 0;
}

int64_t FixedMacs(const ModelSpec& spec) {
  int64_t macs = 0;
  for (const BlockSpec& block : spec.blocks) macs += RecurrenceMacs(block);
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    if (spec.stack == Stack::kDecoder && t.name.starts_with(TensorPrefix(Stack::kEncoder)))
      continue;
    if (IsOfPrediction(t.name)) continue;
    const bool router = t.name.find(".router.") != std::string::npos;
    const bool expert = !router && t.name.find(".experts.") != std::string::npos;
    const auto is = [&](const char* word) { return t.name.find(word) != std::string::npos; };
    if (t.shape.size() != 2 || expert || t.ids || is("embed") || is("relative_bias") ||
        t.name.starts_with("head.") || t.name.starts_with("classifier.") ||
        t.name.starts_with("pooling.") || IsOfSource(t.name)) {
      continue;
    }
    macs += t.shape[0] * t.shape[1] * RowsOf(t.name, HeadsOf(spec, t.name));
  }
  return macs;
}

int64_t SourceMacs(const ModelSpec& spec) {
  int64_t macs = 0;
  for (const TensorRequirement& t : RequiredTensors(spec)) {
    if (t.shape.size() == 2 && IsOfSource(t.name)) macs += t.shape[0] * t.shape[1];
  }
  return macs;
}

int64_t HeadMacs(const ModelSpec& spec) { return int64_t{spec.vocab_size} * spec.hidden_size; }

int64_t MacsPerKey(const AttentionSpec& a) {
  // The product of a query with a key and that of a probability with a value. With latents, both
  // are of the latent vector; keys have the rotated part besides.
  const int64_t width = a.latent.has_value() ? int64_t{2} * a.latent->rank + a.latent->rope_dim
                                             : int64_t{a.head_dim} + a.output_dim();
  return width * (a.routed() ? a.num_kv_heads : a.num_heads);
}

double VisiblePositions::Mean(std::optional<int> window, WindowKind kind) const {
  if (!window || *window >= last) return 0.5 * static_cast<double>(first + last);
  if (kind == WindowKind::kChunk) {
    // The sum of (n - 1) mod w + 1 over the numbers n up to `end`.
    const auto sum = [w = static_cast<double>(*window)](int64_t end) {
      const double chunks = std::floor(static_cast<double>(end) / w);
      const double rest = static_cast<double>(end) - chunks * w;
      return 0.5 * (chunks * w * (w + 1.0) + rest * (rest + 1.0));
    };
    return (sum(last) - sum(first - 1)) / static_cast<double>(last - first + 1);
  }
  if (*window <= first) return *window;
  const auto count = static_cast<double>(last - first + 1);
  const auto below = static_cast<double>(*window - first);
  return *window - 0.5 * below * (below + 1.0) / count;
}

MacsRange MacsOf(const ModelSpec& spec) {
  MacsRange out;
  out.min = out.max = FixedMacs(spec);
  double nominal = static_cast<double>(out.min);
  bool varies = false;
  for (const BlockSpec& block : spec.blocks) {
    const RoutedLayerSpec* routing = block.routing();
    if (const AttentionSpec* a = block.attention()) {
      const int64_t per_key = MacsPerKey(*a);
      out.min_per_key += per_key * (a->routed() ? routing->select.MinSelected() : 1);
      out.max_per_key += per_key * (a->routed() ? routing->select.MaxSelected() : 1);
    } else if (const AttentionSpec* cross = block.cross_attention()) {
      const int64_t per_key = MacsPerKey(*cross);
      out.min_per_source_key += per_key * (routing != nullptr ? routing->select.MinSelected() : 1);
      out.max_per_source_key += per_key * (routing != nullptr ? routing->select.MaxSelected() : 1);
    }
    if (routing == nullptr) continue;
    std::vector<int64_t> costs;
    for (int e = 0; e < routing->num_experts; ++e) {
      costs.push_back(ExpertMacs(spec, block.layer, block.kind(), e));
    }
    std::sort(costs.begin(), costs.end());
    const SelectSpec& select = routing->select;
    const auto sum = [](auto begin, auto end) { return std::accumulate(begin, end, int64_t{0}); };
    const int64_t heads = routing->split.heads;
    out.min += heads * sum(costs.begin(), costs.begin() + select.MinSelected());
    out.max += heads * sum(costs.end() - select.MaxSelected(), costs.end());
    nominal += static_cast<double>(heads * select.MaxSelected()) *
               static_cast<double>(sum(costs.begin(), costs.end())) /
               static_cast<double>(costs.size());
    varies = varies || select.MinSelected() != select.MaxSelected();
  }
  if (!varies) out.nominal = std::llround(nominal);
  return out;
}

MacsRange SourceMacsOf(const ModelSpec& decoder) {
  MacsRange out = MacsOf(*decoder.encoder);
  const int64_t projections = SourceMacs(decoder);
  out.min += projections;
  out.max += projections;
  if (out.nominal) *out.nominal += projections;
  return out;
}

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
