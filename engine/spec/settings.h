// The table of all settings of a model: keys, members, defaults, ranges and descriptions. Readers
// and writers of files, Validate() and descriptions are visitors of this table, so a setting that
// is added here takes part in all of them. CONTRIBUTING.md lists the changes that a setting takes.
#pragma once

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

#include "engine/spec/spec.h"
#include "engine/spec/spec_limits.h"

namespace moeserve {

inline constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// What a setting's value can be, and how it is described.
struct Rule {
  // The range of a number, and of each number of a list. Real numbers without limits must fit f32.
  double low = -kNoLimit;      // of an enum: the first value that is allowed
  double high = kNoLimit;      // integers with limits have both
  bool above = false;          // `low` itself is not allowed
  bool early = false;          // readers check the range, too, because they allocate by the value
  bool written = false;        // writers write the default, too
  bool used = true;            // files have the key
  std::string_view off = {};   // why the value must be the default; empty: it need not be
  std::string_view text = {};  // describes values other than the default; "%" stands for the value

  constexpr Rule Text(std::string_view words) const {
    Rule rule = *this;
    rule.text = words;
    return rule;
  }
  // The value must be the default if `condition` holds.
  constexpr Rule Off(bool condition, std::string_view why) const {
    Rule rule = *this;
    if (condition) rule.off = why;
    return rule;
  }
  // Unless `condition` holds, files do not have the key and the value must be the default.
  constexpr Rule Only(bool condition, std::string_view why_not) const {
    Rule rule = Off(!condition, why_not);
    rule.used = condition;
    return rule;
  }
};

constexpr Rule Within(double low, double high) { return {.low = low, .high = high}; }
constexpr Rule AtLeast(double low) { return {.low = low}; }
constexpr Rule Above(double low, double high = kNoLimit) {
  return {.low = low, .high = high, .above = true};
}
constexpr Rule Text(std::string_view words) { return Rule().Text(words); }

// Returns the text of a setting's value; that of a real number has this many digits.
template <typename T>
std::string ValueText(const T& value, int digits = 6) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_same_v<T, int>) {
    return std::to_string(value);
  } else if constexpr (std::is_enum_v<T>) {
    return std::string(KindName(value));
  } else if constexpr (std::is_floating_point_v<T>) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.*g", digits, value);
    return text;
  } else if constexpr (requires { value.has_value(); }) {
    return value.has_value() ? ValueText(*value, digits) : "none";
  }
  return "another value";
}

// When files have the object of a structure: only if it differs from the default; always, though
// readers do without it; or always. Optional structures are written if the specification has them.
enum class Need { kOptional, kWritten, kRequired };

// The base of visitors. A visitor defines Row(key, value, assumed, rule), which gets every setting
// with its default, or null if the key is required. It may replace the other functions.
template <typename Visitor, typename S>
class SettingsVisitor {
 public:
  using Spec = std::remove_const_t<S>;

  explicit SettingsVisitor(S& visited) : spec(visited) {}

  template <typename T>
  void Required(const char* key, T Spec::*member, const Rule& rule = {}) {
    static_cast<Visitor*>(this)->Row(key, spec.*member, static_cast<const T*>(nullptr), rule);
  }
  // The default is that of the structure, or `assumed`.
  template <typename T>
  void Optional(const char* key, T Spec::*member, const Rule& rule = {}) {
    OptionalOr(key, member, Spec().*member, rule);
  }
  template <typename T>
  void OptionalOr(const char* key, T Spec::*member, const std::type_identity_t<T>& assumed,
                  const Rule& rule = {}) {
    static_cast<Visitor*>(this)->Row(key, spec.*member, &assumed, rule);
  }
  // The required kind of a structure, on which its other keys depend. Returns false if a file has
  // none, which was reported.
  template <typename T>
  bool Kind(const char* key, T Spec::*member) {
    Required(key, member);
    return true;
  }
  // The kind of a block: "routed" if the optional member has a value, else "dense".
  template <typename... T>
  bool Form(const T&... /*key, member*/) {
    return true;
  }
  // The kind of a mixer that has only one.
  void OnlyKind(const char* /*key*/, std::string_view /*name*/) {}
  // Says in errors about unknown keys which variant of the object has the known ones.
  void Variant(std::string_view) {}
  // A flag that is spelled as one of two names; it is not set by default.
  template <typename... T>
  void Named(const T&... /*key, member, name if not set, name if set*/) {}
  // One width for all experts, or a list.
  template <typename... T>
  void Widths(const T&... /*key, member, rule*/) {}
  // A structure with its own table, which gets the context.
  template <typename... T>
  void Object(const T&... /*key, member, need, context*/) {}
  // At most `most` structures with tables of their own.
  template <typename... T>
  void List(const T&... /*key, member, most*/) {}

  S& spec;
};

// The tables. Files have the keys in this order. Readers, writers and Validate() name only the
// sizes and token ids of a model by themselves. Rules that need more than the structure are in
// spec.cc.

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const NormSpec& norm) {
  v.Required("kind", &S::kind);
  v.Optional("eps", &S::eps, Within(0, 1));
  v.Optional("bias", &S::bias, Rule().Off(norm.kind == NormKind::kRms, "norm.kind is \"rms\""));
  v.Optional("final_eps", &S::final_eps, Within(0, 1));
  v.Optional("outer_eps", &S::outer_eps, Within(0, 1));
  v.Optional("placement", &S::placement);
  v.Optional("final", &S::final_norm);
  v.Optional("groups", &S::groups,
             Within(1, kMaxWidth).Off(norm.kind != NormKind::kRms, "norm.kind is \"layer\""));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const RopeScaling& s) {
  using Kind = RopeScalingKind;
  if (!v.Kind("kind", &S::kind)) return;
  const auto is = [&](auto... kinds) { return ((s.kind == kinds) || ...); };
  if (is(Kind::kLinear, Kind::kLlama3, Kind::kYarn)) v.Required("factor", &S::factor, Above(0));
  if (is(Kind::kFactors, Kind::kLong)) v.Required("factors", &S::factors, Above(0));
  if (is(Kind::kLlama3, Kind::kYarn, Kind::kLong)) {
    v.Required("original_positions", &S::original_positions,
               is(Kind::kLong) ? Within(1, kMaxPositions) : Above(0));
  }
  if (is(Kind::kLlama3)) {
    v.Optional("low_freq_factor", &S::low_freq_factor, Above(0));
    v.Optional("high_freq_factor", &S::high_freq_factor, Above(0));
  }
  if (is(Kind::kYarn)) {
    v.Optional("beta_fast", &S::beta_fast, Above(0));
    v.Optional("beta_slow", &S::beta_slow, Above(0));
    v.Optional("truncate", &S::truncate);
  }
  if (is(Kind::kLong)) {
    v.Required("long_factors", &S::long_factors, Above(0));
    v.Optional("long_magnitude", &S::long_magnitude, Above(0));
  }
  v.Optional("magnitude", &S::magnitude, Above(0));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const PositionSpec& position) {
  if (!v.Kind("kind", &S::kind)) return;
  const bool rope = position.kind == PositionKind::kRope;
  const bool sinusoidal = position.kind == PositionKind::kSinusoidal;
  v.Variant(rope ? "kind is \"rope\"" : "kind is not \"rope\"");
  if (rope) {
    v.Optional("theta", &S::theta, Above(0));
    v.Optional("pairing", &S::pairing);
    v.Optional("fraction", &S::fraction, Above(0, 1).Text(" fraction %"));
    v.Optional("xpos_base", &S::xpos_base, Text(" xpos %"));
    v.Optional("span", &S::span,
               Text(" pairs over the whole head")
                   .Off(position.pairing == RopePairing::kInterleaved, "interleaved pairing"));
    v.Optional("frequencies", &S::frequencies, Text(" frequencies of the whole head"));
    v.Object("scaling", &S::scaling);
  }
  const Rule first = Within(0, kMaxPositions).Text(" from %");
  const std::string_view other = "position.kind is not \"sinusoidal\"";
  v.Optional("first", &S::first, first.Only(sinusoidal, other));
  v.Optional("spacing", &S::spacing, Text(", spacing %").Only(sinusoidal, other));
  v.Optional("count_padding", &S::count_padding,
             Text(", padding not counted")
                 .Only(sinusoidal || position.kind == PositionKind::kLearned,
                       "position.kind is not \"sinusoidal\" or \"learned\""));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const RelativeBias& bias) {
  v.Required("buckets", &S::buckets, Within(bias.bidirectional ? 4 : 2, kMaxBuckets));
  v.Required("max_distance", &S::max_distance);
  v.Optional("bidirectional", &S::bidirectional);
  v.Optional("per_layer", &S::per_layer);
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const HeadLayerSpec&) {
  v.Required("activation", &S::activation);
  v.Optional("bias", &S::bias);
  v.Optional("norm", &S::norm);
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const HeadSpec& head) {
  if (!v.Kind("kind", &S::kind)) return;
  const bool labels = HasLabels(head.kind);
  const auto only = [&](const Rule& rule) { return rule.Only(labels, "the head has no labels"); };
  v.Optional("labels", &S::labels, only({}));
  v.Optional("scores", &S::scores, only(Text(", scores by %")));
  v.Object("layer", &S::layer);
  v.Optional("bias", &S::bias, only(Text(", no bias")));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const DenseSpec&) {
  v.Required("width", &S::width, Within(1, kMaxWidth));
  v.Optional("activation", &S::activation);
  v.Optional("bias", &S::bias);
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const PoolingSpec&) {
  if (!v.Kind("kind", &S::kind)) return;
  v.List("dense", &S::dense, kMaxDenseModules);
  v.Optional("normalize", &S::normalize, Text(", normalized"));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const LayerInputSpec&) {
  v.Required("width", &S::width, Within(1, kMaxWidth));
  v.Required("activation", &S::activation, AtLeast(static_cast<int>(ActivationKind::kSilu)));
  v.Optional("token_scale", &S::token_scale);
  v.Optional("projection_scale", &S::projection_scale);
  v.Optional("scale", &S::scale);
}

// The settings of a stack of blocks, of which a model has one or two.
template <typename V, typename S = typename V::Spec>
void StackSettings(V& v, const ModelSpec&) {
  v.Object("norm", &S::norm, Need::kWritten);
  v.Object("position", &S::position, Need::kWritten);
  v.Object("relative_bias", &S::relative_bias);
  v.Optional("embedding_scale", &S::embedding_scale);
  v.Optional("token_types", &S::token_types, Within(0, kMaxTokenTypes).Text(", % token types"));
  v.Optional("embedding_norm", &S::embedding_norm, Text(", norm of embeddings"));
  v.Optional("residual_scale", &S::residual_scale);
  v.Optional("layer_scale", &S::layer_scale, Text(", a factor of each layer"));
  v.Object("layer_input", &S::layer_input);
}

// The other settings of a model.
template <typename V, typename S = typename V::Spec>
void OutputSettings(V& v, const ModelSpec& model) {
  v.Optional("pad_token_id", &S::pad_token_id);
  const Rule pair = Rule().Only(model.stack != Stack::kOnly, "there is no encoder");
  v.Optional("decoder_start_token_id", &S::decoder_start_token_id, pair);
  v.Optional("share_embeddings", &S::share_embeddings,
             pair.Off(model.tie_word_embeddings, "tie_word_embeddings is true"));
  v.Optional("output_scale", &S::output_scale);
  v.Optional("logit_scale", &S::logit_scale);
  v.Optional("logit_soft_cap", &S::logit_soft_cap, AtLeast(0).Text(", logits' soft cap %"));
  v.Optional("tie_word_embeddings", &S::tie_word_embeddings, Text(", tied embeddings"));
  v.Optional("head_bias", &S::head_bias, Text(", bias of logits"));
  v.Object("head", &S::head);
  v.Object("pooling", &S::pooling);
}

template <typename V>
void Settings(V& v, const ModelSpec& model) {
  StackSettings(v, model);
  OutputSettings(v, model);
}

// Files have these keys in the object of the block.
template <typename V, typename S = typename V::Spec>
void Settings(V& v, const ResidualSpec&) {
  v.Optional("norm_placement", &S::norm_placement, Text(", norm placement %"));
  v.Optional("residual_scale", &S::scale, Text(", times %"));
  v.Optional("parallel", &S::parallel, Text(", parallel to the block before it"));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const SplitSpec& split) {
  v.Required("heads", &S::heads, Within(1, kMaxWidth));
  v.OptionalOr("projection", &S::projection, split.heads > 1);
  v.OptionalOr("merge_projection", &S::merge_projection, split.projection);
  const bool none = !split.projection && !split.merge_projection;
  v.Optional("depth", &S::depth,
             Within(1, kMaxProjectionDepth).Off(none, "there is no projection"));
  v.Optional("bias", &S::bias);
  v.Optional("residual", &S::residual);
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const ScoreSpec& score) {
  if (!v.Kind("kind", &S::kind)) return;
  v.Optional("stream", &S::stream, Text(" of the residual stream"));
  v.Optional("norm", &S::norm);
  v.Optional("row_scale", &S::row_scale, Text(", rows times %"));
  v.Optional("bias", &S::bias, Text(" with bias"));
  if (score.kind != ScoreKind::kCosine) return;
  v.Optional("dim", &S::dim, {.low = 1, .high = kMaxWidth, .written = true});
  v.Optional("normalize_row", &S::normalize_row, Text(", rows as they are"));
  v.Optional("normalize_expert", &S::normalize_expert, Text(", experts as they are"));
  v.Optional("eps", &S::eps, Within(0, 1));
  v.Optional("temperature", &S::temperature);
}

inline Rule NoMixer(const RoutedLayerSpec& routing) {
  return Rule().Off(routing.gate == GateKind::kSparseMixer, "gate is \"sparse_mixer\"");
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const SelectSpec& select, const RoutedLayerSpec& routing) {
  if (!v.Kind("kind", &S::kind)) return;
  const Rule by_score =
      NoMixer(routing).Off(select.kind == SelectKind::kTable, "select.kind is \"table\"");
  if (select.kind == SelectKind::kTopP) {
    v.Required("p", &S::p, AtLeast(0));
    v.Optional("compare", &S::compare);
    v.OptionalOr("max", &S::max_experts, routing.num_experts);
  } else {
    v.Required("k", &S::k);
  }
  v.Optional("bias", &S::bias, by_score);
  v.Optional("groups", &S::groups, Within(1, kMaxExpertGroups));
  v.OptionalOr("best_groups", &S::best_groups, select.groups, by_score);
  v.Optional("group_score", &S::group_score);
  v.Optional("group_mask", &S::group_mask);
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const NullExperts&) {
  const Rule count = {.low = 0, .high = kMaxExperts, .early = true};
  v.Optional("zero", &S::zero, count);
  v.Optional("copy", &S::copy, count);
  v.Optional("constant", &S::constant, count);
  v.Optional("replaced", &S::replaced, count);
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const RoutedLayerSpec& routing, BlockKind block) {
  const bool feed_forward = block == BlockKind::kFeedForward;
  v.Variant(feed_forward ? "of feed_forward" : "of attention");
  v.Required("num_experts", &S::num_experts, {.low = 1, .high = kMaxExperts, .early = true});
  if (feed_forward) {
    v.Widths("widths", &S::widths, Within(1, kMaxWidth));
    v.Object("split", &S::split);
    v.Object("null_experts", &S::null_experts);
  }
  v.Optional("latent_width", &S::latent_width,
             Within(0, kMaxWidth).Only(feed_forward, "in attention"));
  v.Object("score", &S::score);
  v.Optional("gate", &S::gate);
  v.Optional(
      "mixer_limit", &S::mixer_limit,
      AtLeast(0).Off(routing.gate != GateKind::kSparseMixer, "gate is not \"sparse_mixer\""));
  v.Object("select", &S::select, Need::kRequired, routing);
  v.Optional("renormalize", &S::renormalize, NoMixer(routing).Text(", renormalized"));
  v.Optional("scale", &S::scale, Text(", times %"));
  v.Optional("expert_scale", &S::expert_scale, Text(", times a factor per expert"));
  v.Optional("weight_input", &S::weight_input,
             Text(", weights of the experts' inputs").Only(feed_forward, "in attention"));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const LatentSpec&) {
  v.Required("rank", &S::rank, Within(1, kMaxWidth));
  v.Required("rope_dim", &S::rope_dim);
  v.Required("value_dim", &S::value_dim, Within(1, kMaxWidth));
  v.Optional("query_rank", &S::query_rank, Within(0, kMaxWidth).Text(", queries of rank %"));
  v.Optional("norm_eps", &S::norm_eps, Within(0, 1));
  v.Optional("scale", &S::scale, Text(" times %"));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const QueryScaleSpec&) {
  v.OnlyKind("kind", S::kKind);
  v.Required("step", &S::step, Above(0));
  v.Required("factor", &S::factor);
  v.Optional("first", &S::first, Within(0, kMaxPositions));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const AttentionSpec& attention) {
  if (!v.Form("kind", &S::routing)) return;
  const bool dense = !attention.routed();
  const auto plain = [&](const Rule& rule) {
    return rule.Off(attention.latent.has_value(), "latent attention")
        .Only(dense, "kind is \"routed\"");
  };
  if (dense) v.Required("num_heads", &S::num_heads, Within(1, kMaxWidth));
  v.OptionalOr("num_kv_heads", &S::num_kv_heads, dense ? attention.num_heads : 1,
               Within(1, kMaxWidth));
  v.Required("head_dim", &S::head_dim, Within(1, kMaxWidth));
  v.Optional("bias", &S::bias, Text(", bias"));
  v.Optional("out_bias", &S::out_bias, Text(", output bias"));
  v.OptionalOr("scale", &S::scale,
               attention.head_dim > 0 ? 1.0 / std::sqrt(attention.head_dim) : 1.0);
  v.Optional("soft_cap", &S::soft_cap, AtLeast(0).Text(", soft cap %"));
  if (dense) v.Object("latent", &S::latent);
  v.Optional("sinks", &S::sinks, plain(Text(", sinks")));
  v.Object("position", &S::position);
  v.Optional("causal", &S::causal);
  v.Optional("window", &S::window, Within(1, std::numeric_limits<int>::max()).Text(", window %"));
  v.Optional("window_kind", &S::window_kind,
             Text(" (chunks)").Off(!attention.window.has_value(), "there is no window"));
  if (!dense) v.Object("routing", &S::routing, Need::kRequired, BlockKind::kAttention);
  if (dense) {
    v.Optional("qk_norm", &S::qk_norm);
    v.Optional("qk_norm_after_rope", &S::qk_norm_after_rope, Text(" after rope"));
  }
  v.Optional("qkv_clip", &S::qkv_clip, plain(AtLeast(0).Text(", q, k and v within %")));
  const auto of_gate = [&](const Rule& rule) {
    return rule.Off(!attention.gate, "gate is false").Only(dense, "kind is \"routed\"");
  };
  v.Optional("gate", &S::gate, Text(", gate").Only(dense, "kind is \"routed\""));
  v.Optional("gate_per_head", &S::gate_per_head, of_gate(Text(" of each head")));
  v.Optional("gate_bias", &S::gate_bias, of_gate(Text(" with bias")));
  v.Optional("gate_activation", &S::gate_activation,
             of_gate(AtLeast(static_cast<int>(GateActivation::kSigmoid)).Text(" by %")));
  v.Optional("inner_norm", &S::inner_norm, plain(Text(", inner norm")));
  if (dense) v.Optional("group_order", &S::group_order, Text(", tile order"));
  v.Optional("kv_layer", &S::kv_layer,
             plain(Within(0, kMaxLayers).Text(", keys and values of layer %")));
  const auto own = [&](const Rule& rule) {
    return plain(rule.Off(attention.kv_layer.has_value(), "kv_layer is set"));
  };
  v.Optional("value_dim", &S::value_dim, plain(Within(1, kMaxWidth).Text(", values of %")));
  v.Optional("value_scale", &S::value_scale, own(Text(", values times %")));
  v.Optional("value_norm", &S::value_norm, own(Text(", norm of values")));
  v.Optional("value_from_key", &S::value_from_key, own(Text(", values from the keys")));
  if (dense) {
    v.Object("query_scale", &S::query_scale);
    v.Object("value_routing", &S::value_routing, Need::kOptional, BlockKind::kAttention);
  }
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const ShortConvolutionSpec&) {
  v.OnlyKind("kind", S::kKind);
  v.Optional("conv", &S::taps, Within(1, kMaxTaps));
  v.Optional("bias", &S::bias, Text(", bias"));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const DeltaSpec& delta) {
  v.OnlyKind("kind", S::kKind);
  const Rule size = Within(1, kMaxWidth);
  v.Required("num_heads", &S::num_heads, size);
  v.OptionalOr("num_key_heads", &S::num_key_heads, delta.num_heads, size);
  v.Required("key_dim", &S::key_dim, size);
  v.Required("value_dim", &S::value_dim, size);
  v.Optional("conv", &S::taps, Within(1, kMaxTaps).Text(", % taps"));
  v.Optional("decay", &S::decay, Text(", decays of each %"));
  v.Optional("decay_form", &S::decay_form, Text(", % decays"));
  v.Optional("decay_bound", &S::decay_bound,
             Within(-60, 0)
                 .Text(" above %")
                 .Off(delta.decay_form != DecayForm::kBounded, "decay_form is not \"bounded\""));
  v.Optional("decay_rank", &S::decay_rank, Within(0, kMaxWidth).Text(", decays of rank %"));
  v.Optional("gate_activation", &S::gate_activation,
             AtLeast(static_cast<int>(GateActivation::kSigmoid)).Text(", % gate"));
  v.Optional("gate_rank", &S::gate_rank, Within(0, kMaxWidth).Text(", gates of rank %"));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const StateSpaceSpec&) {
  v.OnlyKind("kind", S::kKind);
  const Rule size = Within(1, kMaxWidth);
  v.Required("num_heads", &S::num_heads, size);
  v.Required("head_dim", &S::head_dim, size);
  v.Required("state_dim", &S::state_dim, size);
  v.Optional("groups", &S::groups, size.Text(", % groups"));
  v.Optional("conv", &S::taps, Within(1, kMaxTaps).Text(", % taps"));
  v.Optional("conv_bias", &S::conv_bias, Text(", convolution without bias"));
  v.Optional("bias", &S::bias, Text(", bias"));
  v.Optional("step_low", &S::step_low, AtLeast(0).Text(", steps from %"));
  v.Optional("step_high", &S::step_high, AtLeast(0).Text(", steps up to %"));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const ExpertSpec& expert) {
  v.Required("form", &S::form);
  v.Required("activation", &S::activation, AtLeast(static_cast<int>(ActivationKind::kSilu)));
  v.Optional("bias", &S::bias, Text(", bias"));
  v.Optional("activation_limit", &S::activation_limit, AtLeast(0).Text(" limited to %"));
  v.Optional("activation_slope", &S::activation_slope, Text(" of slope %"));
  v.Optional("limit_after", &S::limit_after, Text(" after it"));
  v.Optional("up_offset", &S::up_offset, Text(", up plus %"));
  v.Optional("inner_norm", &S::inner_norm, Text(", inner norm"));
  v.Named("sublayer", &S::residual, "plain", "residual");
  v.Optional("depth", &S::depth,
             Within(1, kMaxExpertDepth).Off(!expert.residual, "sublayer is \"plain\""));
}

template <typename V, typename S = typename V::Spec>
void Settings(V& v, const FeedForwardSpec& block) {
  if (!v.Form("kind", &S::routing)) return;
  v.Object("expert", &S::expert, Need::kRequired);
  if (block.routed()) v.Object("routing", &S::routing, Need::kRequired, BlockKind::kFeedForward);
  v.Optional("shared_width", &S::shared_width,
             Within(0, kMaxWidth)
                 .Only(block.routed(), "kind is \"dense\"")
                 .Text("; shared expert of width %"));
  if (block.routed()) {
    v.Optional("shared_gate", &S::shared_gate,
               Text(", gated").Off(block.shared_width == 0, "shared_width is 0"));
    v.Optional("shared_norms", &S::shared_norms,
               Text(" with norms of its own").Off(block.shared_width == 0, "shared_width is 0"));
    v.Optional("shared_limit", &S::shared_limit,
               AtLeast(0).Text(" limited to %").Off(block.shared_width == 0, "shared_width is 0"));
    v.Optional("late_experts", &S::late_experts,
               Text("; experts join at the end of the next layer")
                   .Off(block.shared_width == 0, "shared_width is 0"));
  } else {
    v.Required("width", &S::width, Within(1, kMaxWidth));
  }
  v.Optional("out_bias", &S::out_bias, Text(", output bias"));
}

}  // namespace moeserve
