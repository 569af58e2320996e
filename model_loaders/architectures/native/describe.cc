#include "model_loaders/architectures/native/describe.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "base/kinds.h"
#include "engine/spec/settings.h"

namespace moeserve {
namespace {

// What the table of engine/spec/settings.h says of the settings that are not the default.
template <typename S>
class Phrases : public SettingsVisitor<Phrases<S>, const S> {
 public:
  template <typename... Context>
  explicit Phrases(const S& spec, const Context&... context)
      : SettingsVisitor<Phrases, const S>(spec) {
    Settings(*this, spec, context...);
  }

  template <typename T>
  void Row(std::string_view key, const T& value, const T* assumed, const Rule& rule) {
    if (assumed == nullptr || value == *assumed) return;
    std::string& phrase = phrases_.emplace_back(key, rule.text).second;
    if constexpr (requires { Traits(value).suffix; }) phrase = Traits(value).suffix;
    const size_t at = phrase.find('%');
    if (at != std::string::npos) phrase.replace(at, 1, ValueText(value));
  }

  // Returns the phrases of these keys, in this order.
  std::string Take(std::initializer_list<std::string_view> keys) {
    std::string text;
    for (const std::string_view wanted : keys) {
      for (auto& [key, phrase] : phrases_) {
        if (key == wanted) text.append(std::exchange(phrase, {}));
      }
    }
    return text;
  }
  // Returns the phrases that Take() has not returned, in the order of the table.
  std::string Rest() const {
    std::string text;
    for (const auto& [key, phrase] : phrases_) text.append(phrase);
    return text;
  }

 private:
  std::vector<std::pair<std::string_view, std::string>> phrases_;
};

std::string WidthsText(const std::vector<int>& widths) {
  const auto [least, most] = std::minmax_element(widths.begin(), widths.end());
  if (*least == *most) return Concat("width ", *least);
  constexpr size_t kShown = 16;
  std::string text = "widths ";
  for (size_t i = 0; i < widths.size() && i < kShown; ++i) {
    text.append(Concat(i == 0 ? "" : ",", widths[i]));
  }
  if (widths.size() > kShown) text.append(",...");
  return text;
}

std::string ScoreText(const ScoreSpec& score) {
  Phrases phrases(score);
  std::string text = Concat(KindName(score.kind), " score");
  if (score.kind == ScoreKind::kCosine) text.append(Concat(" of dim ", score.dim));
  text.append(phrases.Take({"bias", "normalize_row", "normalize_expert", "temperature"}));
  return text + phrases.Rest();
}

std::string SelectText(const SelectSpec& select) {
  std::string text;
  switch (select.kind) {
    case SelectKind::kTopK:
      text = Concat("top-", select.k);
      break;
    case SelectKind::kTable:
      text = Concat("a table of ", select.k, " for each token");
      break;
    case SelectKind::kTopP:
      text = Concat("top-p ", Traits(select.compare).symbol, ' ', ValueText(select.p), ", at most ",
                    select.max_experts);
      break;
  }
  if (select.best_groups < select.groups) {
    text.append(Concat(" of the best ", select.best_groups, " of ", select.groups, " groups by ",
                       KindName(select.group_score)));
  }
  if (select.bias) text.append(", choice bias");
  return text;
}

// Returns how tokens are split and projected, with a comma behind it, or an empty text.
std::string SplitText(const SplitSpec& split) {
  const bool splits = split.heads > 1;
  const bool both = split.projection && split.merge_projection;
  const bool none = !split.projection && !split.merge_projection;
  if (!splits && none) return "";
  std::string text = splits ? Concat("split into ", split.heads, " sub-tokens") : "not split";
  if (none) {
    text.append(" without projections");
  } else if (!both) {
    const char* const place = split.projection ? "before" : "after";
    text.append(Concat(" with one projection ", place, ' ',
                       !splits            ? "the experts"
                       : split.projection ? "the split"
                                          : "the merge"));
  } else if (!splits || split.depth > 1) {
    text.append(splits ? " with projections" : " with projections before and after the experts");
  }
  if (!none && split.depth > 1) text.append(Concat(" of ", split.depth, " layers"));
  return text + ", ";
}

// Returns ", 4 zero and 2 copy experts", or an empty text if all experts have matrices.
std::string NullExpertsText(const NullExperts& null_experts) {
  std::string text;
  const auto add = [&](int count, std::string_view what) {
    if (count > 0) text.append(Concat(text.empty() ? ", " : " and ", count, ' ', what));
  };
  add(null_experts.zero, "zero");
  add(null_experts.copy, "copy");
  add(null_experts.constant, "constant");
  add(static_cast<int>(null_experts.replaced.size()), "replaced");
  return text.empty() ? text : Concat(text, " experts");
}

std::string RoutingText(const RoutedLayerSpec& routing, BlockKind block) {
  std::string text = SplitText(routing.split);
  if (routing.split.residual) text.append("sub-token residual, ");
  if (routing.latent_width > 0) {
    text.append(Concat("experts on rows of ", routing.latent_width, ", "));
  }
  text.append(Concat(ScoreText(routing.score), ", ", Traits(routing.gate).description, ", ",
                     SelectText(routing.select)));
  return text + Phrases(routing, block).Rest();
}

std::string ExpertText(const ExpertSpec& expert) {
  Phrases phrases(expert);
  std::string text = Concat(KindName(expert.form), ' ', KindName(expert.activation));
  text.append(
      phrases.Take({"activation_slope", "activation_limit", "limit_after", "up_offset", "bias"}));
  text.append(phrases.Rest());
  if (expert.residual) {
    text.append(Concat(", ", expert.depth, " residual sub-layer", expert.depth == 1 ? "" : "s"));
  }
  return text;
}

std::string PositionText(const PositionSpec& position) {
  switch (position.kind) {
    case PositionKind::kRope: {
      std::string text = Concat("rope theta ", ValueText(position.theta), ' ',
                                KindName(position.pairing), Phrases(position).Rest());
      if (position.scaling.kind != RopeScalingKind::kNone) {
        text.append(Concat(" scaling ", KindName(position.scaling.kind)));
      }
      if (position.scaling.kind == RopeScalingKind::kLong) {
        text.append(Concat(" above ", ValueText(position.scaling.original_positions), " tokens"));
      }
      return text;
    }
    case PositionKind::kSinusoidal:
      return "sinusoidal positions" + Phrases(position).Rest();
    case PositionKind::kLearned:
      return "learned positions" + Phrases(position).Rest();
    case PositionKind::kNone:
      return "no positions";
  }
  return "";
}

std::string PoolingText(const PoolingSpec& pooling) {
  std::string text = Concat(", vectors of texts by ", KindName(pooling.kind), " pooling");
  for (const DenseSpec& dense : pooling.dense) text.append(Concat(", dense to ", dense.width));
  return text + Phrases(pooling).Rest();
}

std::string HeadText(const HeadSpec& head) {
  if (head.kind == HeadKind::kLanguageModel) return "";
  std::string text = Concat(", head ", KindName(head.kind));
  if (HasLabels(head.kind)) text.append(Concat(" of ", head.labels.size(), " labels"));
  if (head.layer.has_value()) {
    text.append(Concat(" after a layer with ", KindName(head.layer->activation)));
  }
  return text + Phrases(head).Rest();
}

}  // namespace

std::string DescribeModel(const ModelSpec& spec) {
  const std::string_view placement =
      NameIn({"pre-", "post-", "output ", "pre- and output ", "no "}, spec.norm.placement).name;
  std::string text = Concat("vocabulary ", spec.vocab_size);
  if (PromptVocabulary(spec) != spec.vocab_size) {
    text.append(Concat(" (of sources ", PromptVocabulary(spec), ')'));
  }
  text += Concat(", hidden size ", spec.hidden_size, ", ", spec.num_layers(), " layers, up to ",
                 spec.max_position_embeddings, " positions, ", placement, KindName(spec.norm.kind),
                 " norm");
  if (spec.norm.groups > 1) text.append(Concat(" of ", spec.norm.groups, " groups"));
  if (spec.norm.final_norm.has_value()) {
    text.append(*spec.norm.final_norm ? " with a final norm" : " without a final norm");
  }
  text.append(Concat(", ", PositionText(spec.position)));
  if (spec.relative_bias.has_value()) {
    const RelativeBias& bias = *spec.relative_bias;
    text.append(Concat(", biases of relative positions in ", bias.used_buckets(),
                       " buckets up to distance ", bias.max_distance,
                       bias.per_layer ? ", of each layer" : ""));
  }
  if (spec.layer_input.has_value()) {
    const LayerInputSpec& input = *spec.layer_input;
    text.append(Concat(", inputs of each layer of width ", input.width, " with ",
                       KindName(input.activation)));
  }
  Phrases phrases(spec);
  text.append(phrases.Take({"logit_soft_cap"}));
  text.append(phrases.Rest());
  if (spec.pooling.has_value()) text.append(PoolingText(*spec.pooling));
  return text + HeadText(spec.head);
}

namespace {

std::string MixerText(const AttentionSpec& attention) {
  Phrases phrases(attention);
  std::string norms = NameIn({"", ", q and k norm of each head", ", q and k norm",
                              ", q and k norm of each head with its own weights",
                              ", q and k norm of each head without weights"},
                             attention.qk_norm)
                          .name.data();
  norms.append(phrases.Take({"qk_norm_after_rope", "qkv_clip", "group_order"}));
  std::string text;
  if (attention.routed()) {
    text = Concat("routed: ", attention.routing->num_experts, " experts of ",
                  attention.num_kv_heads, " heads x ", attention.head_dim, ", ",
                  RoutingText(*attention.routing, BlockKind::kAttention));
  } else if (attention.latent.has_value()) {
    const LatentSpec& latent = *attention.latent;
    text = Concat("dense: ", attention.num_heads, " heads x ", attention.head_dim,
                  ", latent vectors of ", latent.rank, " and a rotated part of ", latent.rope_dim,
                  ", values of ", latent.value_dim, Phrases(latent).Rest());
  } else {
    text = Concat("dense: ", attention.num_heads, " heads x ", attention.head_dim, ", ",
                  attention.num_kv_heads, " kv heads", norms);
  }
  text.append(phrases.Take({"bias", "out_bias"}));
  if (attention.position.has_value()) text.append(Concat(", ", PositionText(*attention.position)));
  if (attention.causal == false) text.append(", in both directions");
  text.append(phrases.Take({"window", "window_kind"}));
  text.append(Concat(", scale ", ValueText(attention.scale)));
  if (attention.query_scale.has_value()) {
    const QueryScaleSpec& scale = *attention.query_scale;
    text.append(Concat(", queries times 1 + ", ValueText(scale.factor),
                       " log(1 + floor((position + ", scale.first, ") / ", ValueText(scale.step),
                       "))"));
  }
  text.append(phrases.Rest());
  if (!attention.value_routing.has_value()) return text;
  return Concat(text, "; routed values: ", attention.value_routing->num_experts, " experts, ",
                RoutingText(*attention.value_routing, BlockKind::kAttention));
}

std::string MixerText(const ShortConvolutionSpec& convolution) {
  return Concat("short convolution: ", convolution.taps, " taps", Phrases(convolution).Rest());
}

std::string MixerText(const DeltaSpec& delta) {
  Phrases phrases(delta);
  std::string text = Concat("delta rule: ", delta.num_heads, " heads x ", delta.value_dim, ", ",
                            delta.num_key_heads, " key heads x ", delta.key_dim);
  phrases.Take({"num_key_heads"});
  return text + phrases.Take({"decay_form", "decay_bound"}) + phrases.Rest();
}

std::string MixerText(const StateSpaceSpec& ssm) {
  return Concat("state space: ", ssm.num_heads, " heads x ", ssm.head_dim, ", states of ",
                ssm.state_dim, Phrases(ssm).Rest());
}

std::string MixerText(const FeedForwardSpec& feed_forward) {
  const std::string rest = Phrases(feed_forward).Rest();
  if (!feed_forward.routed()) {
    return Concat("dense: width ", feed_forward.width, ", ", ExpertText(feed_forward.expert), rest);
  }
  const RoutedLayerSpec& routing = *feed_forward.routing;
  return Concat("routed: ", routing.num_bodies(), " experts, ", WidthsText(routing.widths), ", ",
                ExpertText(feed_forward.expert), NullExpertsText(routing.null_experts), "; ",
                RoutingText(routing, BlockKind::kFeedForward), rest);
}

}  // namespace

std::string DescribeBlock(const BlockSpec& block) {
  return std::visit([](const auto& mixer) { return MixerText(SettingsOf(mixer)); }, block.mixer) +
         Phrases(block.residual).Rest();
}

}  // namespace moeserve
