#include "engine/statistics/measures/macs.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "engine/spec/weights.h"

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

}  // namespace moeserve
