#include "model_loaders/architectures/native/write_config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/kinds.h"
#include "model_loaders/architectures/families.h"

namespace moeserve {
namespace {

// Keeps the order of the keys.
using OrderedJson = nlohmann::ordered_json;

std::string NameOf(NormKind kind) {
  switch (kind) {
    case NormKind::kRms:
      return "rms";
    case NormKind::kLayer:
      return "layer";
  }
  return "";
}

std::string NameOf(NormPlacement placement) {
  switch (placement) {
    case NormPlacement::kPre:
      return "pre";
    case NormPlacement::kPost:
      return "post";
    case NormPlacement::kOutput:
      return "output";
    case NormPlacement::kBoth:
      return "both";
  }
  return "";
}

std::string NameOf(PositionKind kind) {
  switch (kind) {
    case PositionKind::kRope:
      return "rope";
    case PositionKind::kSinusoidal:
      return "sinusoidal";
    case PositionKind::kLearned:
      return "learned";
    case PositionKind::kNone:
      return "none";
  }
  return "";
}

std::string NameOf(RopePairing pairing) {
  switch (pairing) {
    case RopePairing::kHalf:
      return "half";
    case RopePairing::kInterleaved:
      return "interleaved";
  }
  return "";
}

std::string NameOf(ExpertForm form) {
  switch (form) {
    case ExpertForm::kPlain:
      return "plain";
    case ExpertForm::kGated:
      return "gated";
  }
  return "";
}

std::string NameOf(QkNorm norm) {
  switch (norm) {
    case QkNorm::kNone:
      return "none";
    case QkNorm::kHead:
      return "head";
    case QkNorm::kFull:
      return "full";
  }
  return "";
}

std::string NameOf(GroupOrder order) {
  switch (order) {
    case GroupOrder::kInterleave:
      return "interleave";
    case GroupOrder::kTile:
      return "tile";
  }
  return "";
}

// The other enums have a table of traits (base/kinds.h).
template <typename Kind>
requires requires(Kind kind) { Traits(kind); }
std::string NameOf(Kind kind) { return std::string(KindName(kind)); }

// Returns a short decimal number that becomes `value` when it is rounded to f32: 1e-6 instead of
// 9.999999974752427e-07.
double Decimal(float value) {
  char text[32];
  const std::to_chars_result written = std::to_chars(text, text + sizeof(text), value);
  double decimal = 0.0;
  std::from_chars(text, written.ptr, decimal);
  return static_cast<float>(decimal) == value ? decimal : static_cast<double>(value);
}

// Sets `key` to `value`, unless this is the value that the reader assumes without the key.
template <typename T>
void Set(OrderedJson& json, const char* key, const T& value, const T& assumed) {
  if (value == assumed) return;
  if constexpr (std::is_enum_v<T>) {
    json[key] = NameOf(value);
  } else if constexpr (std::is_same_v<T, float>) {
    json[key] = Decimal(value);
  } else {
    json[key] = value;
  }
}

// For values without which an object would not be complete.
template <typename T>
void Set(OrderedJson& json, const char* key, const T& value) {
  if constexpr (std::is_enum_v<T>) {
    json[key] = NameOf(value);
  } else {
    json[key] = value;
  }
}

void SetFlag(OrderedJson& json, const char* key, bool value) { Set(json, key, value, false); }

OrderedJson NormJson(const NormSpec& norm) {
  const NormSpec assumed;
  OrderedJson json = OrderedJson::object();
  Set(json, "kind", norm.kind);
  Set(json, "eps", norm.eps, assumed.eps);
  if (norm.final_eps.has_value()) json["final_eps"] = Decimal(*norm.final_eps);
  Set(json, "placement", norm.placement, assumed.placement);
  if (norm.final_norm.has_value()) json["final"] = *norm.final_norm;
  return json;
}

OrderedJson RopeScalingJson(const RopeScaling& scaling) {
  const RopeScaling assumed;
  OrderedJson json = OrderedJson::object();
  Set(json, "kind", scaling.kind);
  switch (scaling.kind) {
    case RopeScalingKind::kNone:
      break;
    case RopeScalingKind::kLinear:
      Set(json, "factor", scaling.factor);
      break;
    case RopeScalingKind::kLlama3:
      Set(json, "factor", scaling.factor);
      Set(json, "original_positions", scaling.original_positions);
      Set(json, "low_freq_factor", scaling.low_freq_factor, assumed.low_freq_factor);
      Set(json, "high_freq_factor", scaling.high_freq_factor, assumed.high_freq_factor);
      break;
    case RopeScalingKind::kYarn:
      Set(json, "factor", scaling.factor);
      Set(json, "original_positions", scaling.original_positions);
      Set(json, "beta_fast", scaling.beta_fast, assumed.beta_fast);
      Set(json, "beta_slow", scaling.beta_slow, assumed.beta_slow);
      Set(json, "truncate", scaling.truncate, assumed.truncate);
      break;
    case RopeScalingKind::kFactors:
      Set(json, "factors", scaling.factors);
      break;
    case RopeScalingKind::kLong:
      Set(json, "factors", scaling.factors);
      Set(json, "original_positions", scaling.original_positions);
      Set(json, "long_factors", scaling.long_factors);
      Set(json, "long_magnitude", scaling.long_magnitude, assumed.long_magnitude);
      break;
  }
  Set(json, "magnitude", scaling.magnitude, assumed.magnitude);
  return json;
}

OrderedJson PositionJson(const PositionSpec& position) {
  const PositionSpec assumed;
  OrderedJson json = OrderedJson::object();
  Set(json, "kind", position.kind);
  switch (position.kind) {
    case PositionKind::kRope: {
      Set(json, "theta", position.theta, assumed.theta);
      Set(json, "pairing", position.pairing, assumed.pairing);
      Set(json, "fraction", position.fraction, assumed.fraction);
      Set(json, "xpos_base", position.xpos_base, assumed.xpos_base);
      OrderedJson scaling = RopeScalingJson(position.scaling);
      if (scaling != RopeScalingJson(assumed.scaling)) json["scaling"] = std::move(scaling);
      break;
    }
    case PositionKind::kSinusoidal:
      Set(json, "first", position.first, assumed.first);
      break;
    case PositionKind::kLearned:
    case PositionKind::kNone:
      break;
  }
  return json;
}

OrderedJson RelativeBiasJson(const RelativeBias& bias) {
  OrderedJson json = OrderedJson::object();
  Set(json, "buckets", bias.buckets);
  Set(json, "max_distance", bias.max_distance);
  SetFlag(json, "bidirectional", bias.bidirectional);
  return json;
}

OrderedJson LatentJson(const LatentSpec& latent) {
  const LatentSpec assumed;
  OrderedJson json = OrderedJson::object();
  Set(json, "rank", latent.rank);
  Set(json, "rope_dim", latent.rope_dim);
  Set(json, "value_dim", latent.value_dim);
  Set(json, "query_rank", latent.query_rank, assumed.query_rank);
  Set(json, "norm_eps", latent.norm_eps, assumed.norm_eps);
  return json;
}

OrderedJson SplitJson(const SplitSpec& split) {
  const SplitSpec assumed;
  OrderedJson json = OrderedJson::object();
  Set(json, "heads", split.heads);
  Set(json, "projection", split.projection, assumed.projection);
  Set(json, "merge_projection", split.merge_projection, split.projection);
  Set(json, "depth", split.depth, assumed.depth);
  Set(json, "bias", split.bias, assumed.bias);
  SetFlag(json, "residual", split.residual);
  return json;
}

OrderedJson ScoreJson(const ScoreSpec& score) {
  const ScoreSpec assumed;
  OrderedJson json = OrderedJson::object();
  Set(json, "kind", score.kind);
  Set(json, "norm", score.norm, assumed.norm);
  Set(json, "row_scale", score.row_scale, assumed.row_scale);
  SetFlag(json, "bias", score.bias);
  switch (score.kind) {
    case ScoreKind::kDot:
      break;
    case ScoreKind::kCosine:
      Set(json, "dim", score.dim);
      Set(json, "normalize_row", score.normalize_row, assumed.normalize_row);
      Set(json, "normalize_expert", score.normalize_expert, assumed.normalize_expert);
      Set(json, "eps", score.eps, assumed.eps);
      Set(json, "temperature", score.temperature, assumed.temperature);
      break;
  }
  return json;
}

OrderedJson NullExpertsJson(const NullExperts& null_experts) {
  OrderedJson json = OrderedJson::object();
  Set(json, "zero", null_experts.zero, 0);
  Set(json, "copy", null_experts.copy, 0);
  Set(json, "constant", null_experts.constant, 0);
  return json;
}

OrderedJson SelectJson(const SelectSpec& select, int num_experts) {
  const SelectSpec assumed;
  OrderedJson json = OrderedJson::object();
  Set(json, "kind", select.kind);
  switch (select.kind) {
    case SelectKind::kTopK:
    case SelectKind::kTable:
      Set(json, "k", select.k);
      break;
    case SelectKind::kTopP:
      Set(json, "p", select.p);
      Set(json, "compare", select.compare, assumed.compare);
      Set(json, "max", select.max_experts, num_experts);
      break;
  }
  SetFlag(json, "bias", select.bias);
  Set(json, "groups", select.groups, assumed.groups);
  Set(json, "best_groups", select.best_groups, select.groups);
  Set(json, "group_score", select.group_score, assumed.group_score);
  Set(json, "group_mask", select.group_mask, assumed.group_mask);
  return json;
}

OrderedJson RoutingJson(const RoutedLayerSpec& routing, BlockKind block) {
  const RoutedLayerSpec assumed;
  OrderedJson json = OrderedJson::object();
  Set(json, "num_experts", routing.num_bodies());
  if (block == BlockKind::kFeedForward) {
    const std::vector<int>& widths = routing.widths;
    const bool equal =
        std::adjacent_find(widths.begin(), widths.end(), std::not_equal_to<>()) == widths.end();
    if (equal && !widths.empty()) {
      json["widths"] = widths.front();
    } else {
      json["widths"] = widths;
    }
    OrderedJson split = SplitJson(routing.split);
    if (split != SplitJson(assumed.split)) json["split"] = std::move(split);
    OrderedJson null_experts = NullExpertsJson(routing.null_experts);
    if (!null_experts.empty()) json["null_experts"] = std::move(null_experts);
    Set(json, "latent_width", routing.latent_width, assumed.latent_width);
  }
  OrderedJson score = ScoreJson(routing.score);
  if (score != ScoreJson(assumed.score)) json["score"] = std::move(score);
  Set(json, "gate", routing.gate, assumed.gate);
  Set(json, "mixer_limit", routing.mixer_limit, assumed.mixer_limit);
  json["select"] = SelectJson(routing.select, routing.num_experts);
  SetFlag(json, "renormalize", routing.renormalize);
  Set(json, "scale", routing.scale, assumed.scale);
  SetFlag(json, "expert_scale", routing.expert_scale);
  return json;
}

OrderedJson AttentionJson(const AttentionSpec& attention) {
  const AttentionSpec assumed;
  const bool routed = attention.routed();
  OrderedJson json = OrderedJson::object();
  json["kind"] = routed ? "routed" : "dense";
  if (!routed) Set(json, "num_heads", attention.num_heads);
  Set(json, "num_kv_heads", attention.num_kv_heads, routed ? 1 : attention.num_heads);
  Set(json, "head_dim", attention.head_dim);
  SetFlag(json, "bias", attention.bias);
  SetFlag(json, "out_bias", attention.out_bias);
  Set(json, "scale", attention.scale, 1.0 / std::sqrt(static_cast<double>(attention.head_dim)));
  Set(json, "soft_cap", attention.soft_cap, assumed.soft_cap);
  if (attention.latent.has_value()) json["latent"] = LatentJson(*attention.latent);
  if (!routed) SetFlag(json, "sinks", attention.sinks);
  if (attention.position.has_value()) json["position"] = PositionJson(*attention.position);
  if (attention.window.has_value()) json["window"] = *attention.window;
  if (routed) {
    json["routing"] = RoutingJson(*attention.routing, BlockKind::kAttention);
    return json;
  }
  Set(json, "qk_norm", attention.qk_norm, assumed.qk_norm);
  SetFlag(json, "qk_norm_after_rope", attention.qk_norm_after_rope);
  Set(json, "qkv_clip", attention.qkv_clip, assumed.qkv_clip);
  SetFlag(json, "gate", attention.gate);
  SetFlag(json, "inner_norm", attention.inner_norm);
  Set(json, "group_order", attention.group_order, assumed.group_order);
  return json;
}

OrderedJson ShortConvolutionJson(const ShortConvolutionSpec& convolution) {
  OrderedJson json = OrderedJson::object();
  json["kind"] = "short_conv";
  Set(json, "conv", convolution.taps, ShortConvolutionSpec().taps);
  SetFlag(json, "bias", convolution.bias);
  return json;
}

OrderedJson ExpertJson(const ExpertSpec& expert) {
  const ExpertSpec assumed;
  OrderedJson json = OrderedJson::object();
  Set(json, "form", expert.form);
  Set(json, "activation", expert.activation);
  SetFlag(json, "bias", expert.bias);
  Set(json, "activation_limit", expert.activation_limit, assumed.activation_limit);
  Set(json, "activation_slope", expert.activation_slope, assumed.activation_slope);
  Set(json, "up_offset", expert.up_offset, assumed.up_offset);
  SetFlag(json, "inner_norm", expert.inner_norm);
  if (expert.residual) json["sublayer"] = "residual";
  Set(json, "depth", expert.depth, assumed.depth);
  return json;
}

OrderedJson FeedForwardJson(const FeedForwardSpec& feed_forward) {
  const bool routed = feed_forward.routed();
  OrderedJson json = OrderedJson::object();
  json["kind"] = routed ? "routed" : "dense";
  json["expert"] = ExpertJson(feed_forward.expert);
  if (routed) {
    json["routing"] = RoutingJson(*feed_forward.routing, BlockKind::kFeedForward);
    Set(json, "shared_width", feed_forward.shared_width, 0);
    SetFlag(json, "shared_gate", feed_forward.shared_gate);
  } else {
    Set(json, "width", feed_forward.width);
  }
  SetFlag(json, "out_bias", feed_forward.out_bias);
  return json;
}

// Returns the blocks of all layers as one object if they are equal, else as a list.
OrderedJson BlocksJson(std::vector<OrderedJson> blocks) {
  const bool equal =
      std::adjacent_find(blocks.begin(), blocks.end(), std::not_equal_to<>()) == blocks.end();
  if (equal && !blocks.empty()) return std::move(blocks.front());
  return OrderedJson(std::move(blocks));
}

}  // namespace

nlohmann::ordered_json NativeConfigJson(const ModelSpec& spec, Quantization quantization) {
  const ModelSpec assumed;
  OrderedJson json = OrderedJson::object();
  json["model_type"] = std::string(kNativeArchitecture.model_type);
  Set(json, "vocab_size", spec.vocab_size);
  Set(json, "hidden_size", spec.hidden_size);
  Set(json, "num_hidden_layers", spec.num_layers());
  Set(json, "max_position_embeddings", spec.max_position_embeddings);
  json["bos_token_id"] =
      spec.bos_token_id.has_value() ? OrderedJson(*spec.bos_token_id) : OrderedJson(nullptr);
  if (spec.eos_token_ids.size() == 1) {
    Set(json, "eos_token_id", spec.eos_token_ids.front());
  } else {
    Set(json, "eos_token_id", spec.eos_token_ids);
  }
  json["norm"] = NormJson(spec.norm);
  json["position"] = PositionJson(spec.position);
  if (spec.relative_bias.has_value()) {
    json["relative_bias"] = RelativeBiasJson(*spec.relative_bias);
  }
  Set(json, "embedding_scale", spec.embedding_scale, assumed.embedding_scale);
  SetFlag(json, "embedding_norm", spec.embedding_norm);
  Set(json, "residual_scale", spec.residual_scale, assumed.residual_scale);
  Set(json, "logit_scale", spec.logit_scale, assumed.logit_scale);
  Set(json, "logit_soft_cap", spec.logit_soft_cap, assumed.logit_soft_cap);
  SetFlag(json, "tie_word_embeddings", spec.tie_word_embeddings);
  SetFlag(json, "head_bias", spec.head_bias);
  if (quantization != Quantization::kNone) {
    OrderedJson stored = OrderedJson::object();
    stored["type"] = std::string(Name(quantization));
    stored["group_size"] = StatedGroupSize(quantization);
    json["quantization"] = std::move(stored);
  }
  std::vector<OrderedJson> attention, feed_forward;
  for (int i = 0; i < spec.num_layers(); ++i) {
    const BlockSpec& mixer = spec.token_mixer(i);
    attention.push_back(mixer.attention() != nullptr
                            ? AttentionJson(*mixer.attention())
                            : ShortConvolutionJson(*mixer.short_convolution()));
    feed_forward.push_back(FeedForwardJson(spec.feed_forward(i)));
  }
  json["attention"] = BlocksJson(std::move(attention));
  json["feed_forward"] = BlocksJson(std::move(feed_forward));
  return json;
}

}  // namespace moeserve
