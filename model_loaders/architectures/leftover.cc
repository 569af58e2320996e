#include "model_loaders/architectures/leftover.h"

#include <charconv>
#include <optional>
#include <variant>

#include "base/error_text.h"
#include "base/kinds.h"

namespace moeserve {
namespace {

// Removes `prefix` from the front of `text`. Returns false if `text` does not start with it.
bool Take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// Removes a number and the dot after it from the front of `text` and returns the number; nullopt if
// `text` does not start with a number, without leading zeros, and a dot.
std::optional<int> TakeIndex(std::string_view& text) {
  int index = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  const auto digits = static_cast<size_t>(end - text.data());
  if (error != std::errc() || digits == text.size() || *end != '.' || index < 0)
    return std::nullopt;
  if (digits > 1 && text[0] == '0') return std::nullopt;
  text.remove_prefix(digits + 1);
  return index;
}

std::string KindSetting(const std::string& key, bool routed) {
  return Concat(key, "kind is \"", routed ? "routed" : "dense", '"');
}

std::string NormKindReason(const ModelSpec& spec) {
  if (spec.norm.kind == NormKind::kRms) return "norm.kind is \"rms\", which has no bias";
  return spec.norm.HasBias() ? std::string(kUnknownTensor) : "norm.bias is false";
}

std::string HeadReason(std::string_view name, const ModelSpec& spec) {
  const HeadSpec& head = spec.head;
  const std::string kind = Concat("head.kind is ", Quoted(KindName(head.kind)));
  if (Take(name, "pooling.dense.")) {
    if (!spec.pooling.has_value()) return "there is no pooling";
    const std::optional<int> module = TakeIndex(name);
    if (!module.has_value()) return std::string(kUnknownTensor);
    const auto count = static_cast<int>(spec.pooling->dense.size());
    if (*module >= count) return Concat("pooling.dense has ", count, " objects");
    return name == "bias" ? Concat("pooling.dense[", *module, "].bias is false")
                          : std::string(kUnknownTensor);
  }
  if (name == "classifier.bias" && HasLabels(head.kind)) return "head.bias is false";
  if (name.starts_with("classifier.")) return kind;
  const bool norm = name.starts_with("head.layer_norm.");
  if (norm || name.starts_with("head.layer.")) {
    if (!head.layer.has_value()) return "there is no head.layer";
    if (norm) return head.layer->norm ? NormKindReason(spec) : "head.layer.norm is false";
    return name == "head.layer.bias" ? "head.layer.bias is false" : std::string(kUnknownTensor);
  }
  if (!HasVocabulary(head.kind)) return kind;
  if (name == "head.weight") return "tie_word_embeddings is true";
  return name == "head.bias" ? "head_bias is false" : std::string(kUnknownTensor);
}

// Returns the setting that excludes a norm of a block; `rest` is "norm.weight", "norm.bias",
// "output_norm.weight" or "output_norm.bias".
std::string BlockNormReason(std::string_view rest, const std::string& key, const BlockSpec& block,
                            const ModelSpec& spec) {
  const NormPlacement placement = NormPlacementOf(spec, block);
  const bool of_input = rest.starts_with("norm.");
  if (of_input ? !HasNorm(placement) : !NormsOutput(placement)) {
    const bool own = block.residual.norm_placement.has_value();
    return Concat(own ? key + "norm_placement" : "norm.placement", " is ",
                  Quoted(Traits(placement).name));
  }
  return rest.ends_with(".bias") ? NormKindReason(spec) : std::string(kUnknownTensor);
}

// `of_block` and `object` together are the path of the routing's object.
std::string RouterReason(std::string_view rest, const std::string& of_block,
                         const RoutedLayerSpec& routing, const char* object = "routing.") {
  const std::string key = of_block + object;
  const ScoreSpec& score = routing.score;
  if (rest == "choice_bias") return key + "select.bias is false";
  if (rest == "expert_scale") return key + "expert_scale is false";
  if (rest == "table") {
    return Concat(key, "select.kind is ", Quoted(KindName(routing.select.kind)));
  }
  const std::string score_key = key + "score.";
  if (rest == "norm.weight") return Concat(score_key, "norm is ", Quoted(KindName(score.norm)));
  const bool of_cosine =
      rest.starts_with("projection.") || rest.starts_with("experts.") || rest == "temperature";
  const bool cosine = score.kind == ScoreKind::kCosine;
  if (of_cosine != cosine) {
    return Concat(score_key, "kind is ", Quoted(KindName(score.kind)));
  }
  if (rest == "bias" || rest == "projection.bias") return score_key + "bias is false";
  if (rest == "temperature") return score_key + "temperature is \"none\"";
  return std::string(kUnknownTensor);
}

// Returns the setting that excludes a tensor of an expert. `rest` is the part of the tensor's name
// after the expert's index.
std::string ExpertReason(std::string_view rest, const std::string& key, const ExpertSpec& expert,
                         const ModelSpec& spec) {
  const bool of_sublayer = Take(rest, "layers.");
  if (of_sublayer != expert.residual) {
    return Concat(key, "expert.sublayer is ", Quoted(expert.residual ? "residual" : "plain"));
  }
  if (of_sublayer) {
    const std::optional<int> layer = TakeIndex(rest);
    if (!layer.has_value()) return std::string(kUnknownTensor);
    if (*layer >= expert.depth) return Concat(key, "expert.depth is ", expert.depth);
    if (rest == "norm.bias") return NormKindReason(spec);
  }
  if (rest.starts_with("inner_norm.")) {
    return expert.inner_norm ? NormKindReason(spec) : key + "expert.inner_norm is false";
  }
  if (rest.starts_with("gate.") && expert.form == ExpertForm::kPlain) {
    return key + "expert.form is \"plain\"";
  }
  if (rest == "gate.bias" || rest == "up.bias" || rest == "down.bias") {
    return key + "expert.bias is false";
  }
  return std::string(kUnknownTensor);
}

std::string MixerReason(std::string_view rest, const std::string& key,
                        const AttentionSpec& attention, const ModelSpec& /*spec*/) {
  const bool routed = attention.routed();
  if (rest == "out_bias") return key + "out_bias is false";
  if (rest.starts_with("v.") && !attention.projects_values()) {
    return key + (attention.kv_layer.has_value() ? "kv_layer is set"
                  : attention.value_from_key     ? "value_from_key is true"
                                                 : "value_routing is set");
  }
  if (attention.kv_layer.has_value() && (rest.starts_with("k.") || rest == "k_norm.weight")) {
    return key + "kv_layer is set";
  }
  if (rest == "k.bias" || rest == "v.bias") return key + "bias is false";
  if (rest.starts_with("q.") || rest.starts_with("o.")) {
    if (routed) return KindSetting(key, routed);
    return rest == "q.bias" ? key + "bias is false" : std::string(kUnknownTensor);
  }
  if (rest == "gate.weight" || rest == "gate.bias") {
    if (routed) return KindSetting(key, routed);
    return key + (attention.gate ? "gate_bias is false" : "gate is false");
  }
  if (rest == "q_norm.weight" || rest == "k_norm.weight") {
    if (routed) return KindSetting(key, routed);
    return Concat(key, "qk_norm is ", Quoted(KindName(attention.qk_norm)));
  }
  const bool values = attention.value_routing.has_value();
  const auto& routing = values ? attention.value_routing : attention.routing;
  if (Take(rest, "router.")) {
    if (!routing.has_value()) return KindSetting(key, routed);
    return RouterReason(rest, key, *routing, values ? "value_routing." : "routing.");
  }
  if (Take(rest, "experts.")) {
    if (!routing.has_value()) return KindSetting(key, routed);
    const std::optional<int> expert = TakeIndex(rest);
    if (expert.value_or(0) >= routing->num_experts) {
      return Concat(key, values ? "value_routing" : "routing", ".num_experts is ",
                    routing->num_experts);
    }
  }
  return std::string(kUnknownTensor);
}

std::string MixerReason(std::string_view rest, const std::string& key,
                        const ShortConvolutionSpec& convolution, const ModelSpec& /*spec*/) {
  for (const std::string_view name : {"b.bias", "c.bias", "x.bias", "conv.bias", "o.bias"}) {
    if (rest == name && !convolution.bias) return key + "bias is false";
  }
  return key + "kind is \"short_conv\"";
}

// Returns the setting that excludes a tensor of a mixer with a recurrence, of the kind `kind`.
std::string RecurrentReason(std::string_view rest, const std::string& key, std::string_view kind) {
  const bool attention = rest.starts_with("heads.") || rest.starts_with("latent") ||
                         rest.starts_with("experts.") || rest.starts_with("router.") ||
                         rest.ends_with("_norm.weight") || rest == "sinks" || rest == "out_bias";
  return attention ? Concat(key, "kind is ", Quoted(kind)) : std::string(kUnknownTensor);
}

std::string MixerReason(std::string_view rest, const std::string& key, const DeltaSpec& delta,
                        const ModelSpec& /*spec*/) {
  if (rest == "gate_down.weight" && delta.gate_rank == 0) return key + "gate_rank is 0";
  if (rest == "decay_down.weight" && delta.decay_rank == 0) return key + "decay_rank is 0";
  return RecurrentReason(rest, key, DeltaSpec::kKind);
}

std::string MixerReason(std::string_view rest, const std::string& key, const StateSpaceSpec& ssm,
                        const ModelSpec& /*spec*/) {
  if (rest == "conv.bias" && !ssm.conv_bias) return key + "conv_bias is false";
  for (const std::string_view name :
       {"gate.bias", "x.bias", "b.bias", "c.bias", "step.bias", "o.bias"}) {
    if (rest == name && !ssm.bias) return key + "bias is false";
  }
  return RecurrentReason(rest, key, StateSpaceSpec::kKind);
}

std::string MixerReason(std::string_view rest, const std::string& key, const FeedForwardSpec& block,
                        const ModelSpec& spec) {
  const bool routed = block.routed();
  if (rest == "out_bias") return key + "out_bias is false";
  const bool of_routed =
      rest.starts_with("router.") || rest.starts_with("experts.") || rest.starts_with("split.") ||
      rest.starts_with("merge.") || rest.starts_with("shared.") ||
      rest.starts_with("shared_gate.") || rest.starts_with("shared_norm.") ||
      rest.starts_with("shared_output_norm.") || rest.starts_with("experts_norm.") ||
      rest.starts_with("latent_down.") || rest.starts_with("latent_up.");
  const bool of_dense = rest.starts_with("layers.") || rest.starts_with("gate.") ||
                        rest.starts_with("up.") || rest.starts_with("down.") ||
                        rest.starts_with("inner_norm.");
  if (!of_routed && !of_dense) return std::string(kUnknownTensor);
  if (of_routed != routed) return KindSetting(key, routed);
  if (!routed) return ExpertReason(rest, key, block.expert, spec);

  const RoutedLayerSpec& routing = *block.routing;
  if (Take(rest, "router.")) return RouterReason(rest, key, routing);
  if (Take(rest, "experts.")) {
    const std::optional<int> expert = TakeIndex(rest);
    if (!expert.has_value()) return std::string(kUnknownTensor);
    const std::string null_experts = key + "routing.null_experts.";
    if (rest == "constant") {
      if (*expert < routing.num_places()) {
        return Concat(null_experts, "replaced does not have ", *expert);
      }
      return Concat(null_experts, "constant is ", routing.null_experts.constant);
    }
    if (*expert >= routing.num_places()) {
      return Concat(key, "routing.num_experts is ", routing.num_bodies());
    }
    if (routing.BodyOf(*expert) < 0) return Concat(null_experts, "replaced has ", *expert);
    return ExpertReason(rest, key, block.expert, spec);
  }
  if (rest.starts_with("latent_down.") || rest.starts_with("latent_up.")) {
    return routing.latent_width == 0 ? key + "routing.latent_width is 0"
                                     : std::string(kUnknownTensor);
  }
  if (rest.starts_with("split.") || rest.starts_with("merge.")) {
    const SplitSpec& split = routing.split;
    const bool of_split = rest.starts_with("split.");
    if (!(of_split ? split.projection : split.merge_projection)) {
      return Concat(key, "routing.split.", of_split ? "projection" : "merge_projection",
                    " is false");
    }
    Take(rest, of_split ? "split." : "merge.");
    const std::optional<int> layer = TakeIndex(rest);
    if (layer.has_value() != (split.depth > 1) || layer.value_or(0) >= split.depth) {
      return Concat(key, "routing.split.depth is ", split.depth);
    }
    return rest == "bias" ? key + "routing.split.bias is false" : std::string(kUnknownTensor);
  }
  if (block.shared_width == 0) return key + "shared_width is 0";
  if (rest == "shared_gate.weight") return key + "shared_gate is false";
  if (Take(rest, "shared.")) return ExpertReason(rest, key, block.expert, spec);
  const bool norm = rest.find("_norm.") != std::string_view::npos;
  if (!norm) return std::string(kUnknownTensor);
  return block.shared_norms ? NormKindReason(spec) : key + "shared_norms is false";
}

// The reason for a table of biases of one layer, or of all.
std::string RelativeBiasReason(const ModelSpec& spec) {
  if (!spec.relative_bias.has_value()) return "there is no relative_bias";
  return Concat("relative_bias.per_layer is ", spec.relative_bias->per_layer ? "true" : "false");
}

}  // namespace

namespace {

std::string LayerInputReason(const ModelSpec& spec) {
  return spec.layer_input.has_value() ? std::string(kUnknownTensor) : "layer_input is none";
}

}  // namespace

std::string WhyLeftOver(std::string_view name, const ModelSpec& spec) {
  if (spec.encoder != nullptr) {
    if (Take(name, "encoder.")) return Concat("encoder: ", WhyLeftOver(name, *spec.encoder));
    Take(name, "decoder.");
  }
  if (name.starts_with("head.") || name.starts_with("classifier.") ||
      name.starts_with("pooling.")) {
    return HeadReason(name, spec);
  }
  if (name == "embed_type.weight") return "token_types is 0";
  if (name == "embed_layers.weight" || name.starts_with("layer_input.")) {
    return LayerInputReason(spec);
  }
  if (name == "embed_position.weight") return "position.kind is not \"learned\"";
  if (name == "relative_bias.weight") return RelativeBiasReason(spec);
  if (name == "norm.weight" || name == "norm.bias") {
    if (spec.norm.HasFinal()) return NormKindReason(spec);
    return spec.norm.final_norm.has_value() ? "norm.final is false" : "norm.placement is \"post\"";
  }
  if (!Take(name, "blocks.")) return std::string(kUnknownTensor);
  const std::optional<int> layer = TakeIndex(name);
  if (!layer.has_value()) return std::string(kUnknownTensor);
  if (*layer >= spec.num_layers()) return Concat("num_hidden_layers is ", spec.num_layers());
  if (name == "relative_bias.weight") return RelativeBiasReason(spec);
  if (name == "scale") return "layer_scale is false";
  if (name.starts_with("input.")) return LayerInputReason(spec);
  const BlockSpec* found = nullptr;
  std::string key;
  for (const BlockKind kind :
       {BlockKind::kAttention, BlockKind::kCrossAttention, BlockKind::kFeedForward}) {
    if (!Take(name, Concat(Name(kind), '.'))) continue;
    key = Concat(Name(kind), '[', *layer, "].");
    found = kind == BlockKind::kAttention ? spec.token_mixer(*layer) : spec.FindBlock(*layer, kind);
    break;
  }
  if (key.empty()) return std::string(kUnknownTensor);
  if (found == nullptr) return Concat(key, "kind is \"none\"");
  const BlockSpec& block = *found;
  if (name.starts_with("norm.") || name.starts_with("output_norm.")) {
    return BlockNormReason(name, key, block, spec);
  }
  return std::visit(
      [&](const auto& mixer) { return MixerReason(name, key, SettingsOf(mixer), spec); },
      block.mixer);
}

}  // namespace moeserve
