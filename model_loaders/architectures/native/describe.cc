#include "model_loaders/architectures/native/describe.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "base/kinds.h"
#include "base/message.h"

namespace moeserve {
namespace {

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.6g", value);
  return text;
}

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
  std::string text = Concat(KindName(score.kind), " score");
  switch (score.kind) {
    case ScoreKind::kDot:
      if (score.bias) text.append(" with bias");
      break;
    case ScoreKind::kCosine:
      text.append(Concat(" of dim ", score.dim));
      if (score.bias) text.append(" with bias");
      if (!score.normalize_row) text.append(", rows as they are");
      if (!score.normalize_expert) text.append(", experts as they are");
      text.append(Traits(score.temperature).suffix);
      break;
  }
  text.append(Traits(score.norm).suffix);
  if (score.row_scale != 1.0) text.append(Concat(", rows times ", Number(score.row_scale)));
  return text;
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
      text = Concat("top-p ", Traits(select.compare).symbol, ' ', Number(select.p), ", at most ",
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

std::string ProjectionsText(const SplitSpec& split) {
  if (!split.projection && !split.merge_projection) return " without projections";
  std::string text;
  if (!split.merge_projection) text = " with one projection before the split";
  if (!split.projection) text = " with one projection after the merge";
  if (split.depth > 1) {
    text.append(Concat(text.empty() ? " with projections" : "", " of ", split.depth, " layers"));
  }
  return text;
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
  return text.empty() ? text : Concat(text, " experts");
}

std::string RoutingText(const RoutedLayerSpec& routing) {
  std::string text;
  if (routing.split.heads > 1) {
    text = Concat("split into ", routing.split.heads, " sub-tokens", ProjectionsText(routing.split),
                  ", ");
  }
  if (routing.split.residual) text.append("sub-token residual, ");
  if (routing.latent_width > 0) {
    text.append(Concat("experts on rows of ", routing.latent_width, ", "));
  }
  text.append(Concat(ScoreText(routing.score), ", ", Traits(routing.gate).description, ", ",
                     SelectText(routing.select)));
  if (routing.renormalize) text.append(", renormalized");
  if (routing.scale != 1.0) text.append(Concat(", times ", Number(routing.scale)));
  if (routing.expert_scale) text.append(", times a factor per expert");
  return text;
}

std::string ExpertText(const ExpertSpec& expert) {
  std::string text = expert.form == ExpertForm::kGated ? "gated " : "plain ";
  text.append(KindName(expert.activation));
  if (expert.activation_slope != 1.0f) {
    text.append(Concat(" of slope ", Number(expert.activation_slope)));
  }
  if (expert.activation_limit != 0.0f) {
    text.append(Concat(" limited to ", Number(expert.activation_limit)));
  }
  if (expert.up_offset != 0.0f) text.append(Concat(", up plus ", Number(expert.up_offset)));
  if (expert.bias) text.append(", bias");
  if (expert.inner_norm) text.append(", inner norm");
  if (expert.residual) {
    text.append(Concat(", ", expert.depth,
                       expert.depth == 1 ? " residual sub-layer" : " residual sub-layers"));
  }
  return text;
}

std::string_view PlacementText(NormPlacement placement) {
  switch (placement) {
    case NormPlacement::kPre:
      return "pre-";
    case NormPlacement::kPost:
      return "post-";
    case NormPlacement::kOutput:
      return "output ";
    case NormPlacement::kBoth:
      return "pre- and output ";
  }
  return "";
}

std::string PositionText(const PositionSpec& position) {
  switch (position.kind) {
    case PositionKind::kRope: {
      std::string text = Concat("rope theta ", Number(position.theta),
                                position.pairing == RopePairing::kHalf ? " half" : " interleaved");
      if (position.fraction != 1.0) text.append(Concat(" fraction ", Number(position.fraction)));
      if (position.xpos_base != 0.0) text.append(Concat(" xpos ", Number(position.xpos_base)));
      if (position.scaling.kind != RopeScalingKind::kNone) {
        text.append(Concat(" scaling ", KindName(position.scaling.kind)));
      }
      if (position.scaling.kind == RopeScalingKind::kLong) {
        text.append(Concat(" above ", Number(position.scaling.original_positions), " tokens"));
      }
      return text;
    }
    case PositionKind::kSinusoidal:
      return position.first == 0 ? std::string("sinusoidal positions")
                                 : Concat("sinusoidal positions from ", position.first);
    case PositionKind::kLearned:
      return "learned positions";
    case PositionKind::kNone:
      return "no positions";
  }
  return "";
}

}  // namespace

std::string DescribeModel(const ModelSpec& spec) {
  std::string text =
      Concat("vocabulary ", spec.vocab_size, ", hidden size ", spec.hidden_size, ", ",
             spec.num_layers(), " layers, up to ", spec.max_position_embeddings, " positions, ",
             PlacementText(spec.norm.placement),
             spec.norm.kind == NormKind::kRms ? "rms norm" : "layer norm");
  if (spec.norm.final_norm.has_value()) {
    text.append(*spec.norm.final_norm ? " with a final norm" : " without a final norm");
  }
  text.append(Concat(", ", PositionText(spec.position)));
  if (spec.relative_bias.has_value()) {
    const RelativeBias& bias = *spec.relative_bias;
    text.append(Concat(", biases of relative positions in ", bias.used_buckets(),
                       " buckets up to distance ", bias.max_distance));
  }
  if (spec.logit_soft_cap != 0.0) {
    text.append(Concat(", logits' soft cap ", Number(spec.logit_soft_cap)));
  }
  if (spec.embedding_norm) text.append(", norm of embeddings");
  if (spec.tie_word_embeddings) text.append(", tied embeddings");
  if (spec.head_bias) text.append(", bias of logits");
  return text;
}

namespace {

std::string MixerText(const AttentionSpec& attention) {
  std::string text;
  if (attention.routed()) {
    const RoutedLayerSpec& routing = *attention.routing;
    text = Concat("routed: ", routing.num_experts, " experts of ", attention.num_kv_heads,
                  " heads x ", attention.head_dim, ", ", RoutingText(routing));
  } else {
    text = Concat("dense: ", attention.num_heads, " heads x ", attention.head_dim, ", ",
                  attention.num_kv_heads, " kv heads");
    if (attention.qk_norm == QkNorm::kHead) text.append(", q and k norm of each head");
    if (attention.qk_norm == QkNorm::kFull) text.append(", q and k norm");
    if (attention.qk_norm_after_rope) text.append(" after rope");
    if (attention.qkv_clip != 0.0) {
      text.append(Concat(", q, k and v within ", Number(attention.qkv_clip)));
    }
    if (attention.group_order == GroupOrder::kTile) text.append(", tile order");
    if (attention.latent.has_value()) {
      const LatentSpec& latent = *attention.latent;
      text = Concat("dense: ", attention.num_heads, " heads x ", attention.head_dim,
                    ", latent vectors of ", latent.rank, " and a rotated part of ", latent.rope_dim,
                    ", values of ", latent.value_dim);
      if (latent.query_rank > 0) text.append(Concat(", queries of rank ", latent.query_rank));
    }
  }
  if (attention.bias) text.append(", bias");
  if (attention.out_bias) text.append(", output bias");
  if (attention.position.has_value()) text.append(Concat(", ", PositionText(*attention.position)));
  if (attention.window.has_value()) text.append(Concat(", window ", *attention.window));
  text.append(Concat(", scale ", Number(attention.scale)));
  if (attention.soft_cap != 0.0) text.append(Concat(", soft cap ", Number(attention.soft_cap)));
  if (attention.sinks) text.append(", sinks");
  if (attention.gate) text.append(", gate");
  if (attention.inner_norm) text.append(", inner norm");
  return text;
}

std::string MixerText(const ShortConvolutionSpec& convolution) {
  return Concat("short convolution: ", convolution.taps, " taps", convolution.bias ? ", bias" : "");
}

std::string MixerText(const FeedForwardSpec& feed_forward) {
  const std::string_view out_bias = feed_forward.out_bias ? ", output bias" : "";
  if (!feed_forward.routed()) {
    return Concat("dense: width ", feed_forward.width, ", ", ExpertText(feed_forward.expert),
                  out_bias);
  }
  const RoutedLayerSpec& routing = *feed_forward.routing;
  std::string text = Concat("routed: ", routing.num_bodies(), " experts, ",
                            WidthsText(routing.widths), ", ", ExpertText(feed_forward.expert),
                            NullExpertsText(routing.null_experts), "; ", RoutingText(routing));
  if (feed_forward.shared_width > 0) {
    text.append(Concat("; shared expert of width ", feed_forward.shared_width,
                       feed_forward.shared_gate ? ", gated" : ""));
  }
  text.append(out_bias);
  return text;
}

}  // namespace

std::string DescribeBlock(const BlockSpec& block) {
  return std::visit([](const auto& mixer) { return MixerText(mixer); }, block.mixer);
}

}  // namespace moeserve
