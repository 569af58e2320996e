#include "server/bench/synthetic_options.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <type_traits>
#include <utility>

#include "base/error_text.h"
#include "engine/spec/spec_limits.h"
#include "server/bench/synthetic_model.h"

namespace moeserve::server {
namespace {

// Defaults of the mixture of attention heads that --attention routed selects.
constexpr int kAttentionExperts = 32;
constexpr int kAttentionTopK = 16;

absl::Status NeedsRouted(const char* flag, const char* part) {
  return absl::InvalidArgumentError(
      Concat(flag, ": expected a routed ", part, ", found a dense one"));
}

absl::Status ChangeAttention(const SyntheticOptions& options, AttentionSpec& attention) {
  const bool was_grouped = attention.num_kv_heads != attention.num_heads;
  if (options.heads) {
    attention.num_heads = *options.heads;
    if (!was_grouped) attention.num_kv_heads = *options.heads;
  }
  if (options.head_dim) attention.head_dim = *options.head_dim;
  attention.scale = 1.0 / std::sqrt(static_cast<double>(attention.head_dim));
  if (options.attention == "routed") {
    if (options.heads) {
      return absl::InvalidArgumentError(
          "--heads: expected a dense attention, found a routed one, whose experts have a query "
          "head for each kv head (--kv-heads, --attention-top-k)");
    }
    attention.num_kv_heads = 1;
    attention.qk_norm = QkNorm::kNone;
    attention.gate = false;
    RoutedLayerSpec routing;
    routing.num_experts = options.attention_experts.value_or(kAttentionExperts);
    routing.select.k = options.attention_top_k.value_or(kAttentionTopK);
    routing.renormalize = true;
    attention.routing = routing;
  } else if (options.attention_experts || options.attention_top_k) {
    return NeedsRouted(options.attention_experts ? "--attention-experts" : "--attention-top-k",
                       "attention (--attention routed)");
  }
  if (options.kv_heads) attention.num_kv_heads = *options.kv_heads;
  if (options.window) attention.window = *options.window;
  return absl::OkStatus();
}

absl::Status ChangeDense(const SyntheticOptions& options, FeedForwardSpec& feed_forward) {
  const std::pair<bool, const char*> routed_flags[] = {
      {options.experts.has_value(), "--experts"},
      {options.top_k.has_value(), "--top-k"},
      {options.top_p.has_value(), "--top-p"},
      {options.split_heads.has_value(), "--split-heads"},
      {options.score.has_value(), "--score"}};
  for (const auto& [given, flag] : routed_flags) {
    if (given) return NeedsRouted(flag, "feed-forward");
  }
  if (options.widths.size() > 1) {
    return absl::InvalidArgumentError(Concat(
        "--widths: expected one width for a dense feed-forward, found ", options.widths.size()));
  }
  if (feed_forward.routed()) {
    // The dense feed-forward is as wide as the experts that a row selects, together.
    feed_forward.width = feed_forward.routing->select.k * feed_forward.routing->widths[0];
    feed_forward.routing.reset();
    feed_forward.shared_width = 0;
    feed_forward.shared_gate = false;
  }
  if (!options.widths.empty()) feed_forward.width = options.widths[0];
  return absl::OkStatus();
}

absl::Status ChangeRouted(const SyntheticOptions& options, RoutedLayerSpec& routing) {
  const int experts = options.experts.value_or(
      options.widths.size() > 1 ? static_cast<int>(options.widths.size()) : routing.num_experts);
  const std::vector<int> pattern =
      options.widths.empty() ? std::vector<int>{routing.widths[0]} : options.widths;
  // Checked before Validate(), because these numbers become vector lengths here.
  if (experts < 1 || experts > kMaxExperts) {
    return absl::InvalidArgumentError(
        Concat("--experts: expected 1 to ", kMaxExperts, ", found ", experts));
  }
  if (experts % static_cast<int>(pattern.size()) != 0) {
    return absl::InvalidArgumentError(Concat(
        "--widths: expected one width, or a list whose length divides the number of experts (",
        experts, "), found ", pattern.size()));
  }
  routing.num_experts = experts;
  routing.widths.clear();
  for (int e = 0; e < experts; ++e) routing.widths.push_back(pattern[e % pattern.size()]);
  if (options.top_k) routing.select.k = *options.top_k;
  if (options.top_p) {
    routing.select.kind = SelectKind::kTopP;
    routing.select.p = *options.top_p;
    routing.select.max_experts = options.top_k.value_or(experts);
  }
  if (options.split_heads) {
    routing.split.heads = *options.split_heads;
    routing.split.projection = routing.split.merge_projection = routing.split.heads > 1;
  }
  if (options.score) {
    const bool cosine = *options.score == "cosine";
    routing.score.kind = cosine ? ScoreKind::kCosine : ScoreKind::kDot;
    if (cosine) {
      // The X-MoE paper uses half as many dimensions as experts.
      routing.score.dim = std::max(1, experts / 2);
      routing.score.temperature = TemperatureKind::kDivide;
    }
  }
  return absl::OkStatus();
}

absl::Status ChangeFeedForward(const SyntheticOptions& options, FeedForwardSpec& feed_forward) {
  const bool dense =
      options.feed_forward ? *options.feed_forward == "dense" : !feed_forward.routed();
  if (dense) return ChangeDense(options, feed_forward);
  if (!feed_forward.routed()) {
    return absl::InvalidArgumentError("--ff routed: expected a shape with experts, found " +
                                      options.name);
  }
  return ChangeRouted(options, *feed_forward.routing);
}

}  // namespace

CLI::Option* AddSyntheticOptions(CLI::App& app, SyntheticOptions& options) {
  const std::vector<std::string> names(std::begin(kSyntheticNames), std::end(kSyntheticNames));
  CLI::Option* synthetic =
      app.add_option("--synthetic", options.name, "Run a model of this shape with random weights")
          ->check(CLI::IsMember(names));
  const auto add = [&](const char* flag, auto& value, const char* text) {
    return app.add_option(flag, value, text)->needs(synthetic)->group("Synthetic shape");
  };
  add("--hidden", options.hidden, "Width of the model");
  add("--layers", options.layers, "Number of layers");
  add("--vocab", options.vocab, "Size of the vocabulary");
  add("--heads", options.heads, "Query heads");
  add("--kv-heads", options.kv_heads, "Key and value heads");
  add("--head-dim", options.head_dim, "Width of a head");
  add("--window", options.window, "Positions that attention sees, the token's own included")
      ->check(CLI::PositiveNumber);
  add("--attention", options.attention, "Attention with all heads, or with routed heads (MoA)")
      ->check(CLI::IsMember({"dense", "routed"}));
  add("--attention-experts", options.attention_experts, "Routed attention: number of experts (32)");
  add("--attention-top-k", options.attention_top_k,
      "Routed attention: experts selected per token (16)");
  add("--ff", options.feed_forward, "Feed-forward: one dense, or routed experts")
      ->check(CLI::IsMember({"dense", "routed"}));
  add("--experts", options.experts, "Experts per feed-forward");
  add("--widths", options.widths,
      "Inner width of the experts, or a list that repeats over the experts")
      ->delimiter(',');
  add("--top-k", options.top_k, "Experts selected per row; with --top-p the maximum");
  add("--top-p", options.top_p, "Select experts until their probabilities sum to this");
  add("--split-heads", options.split_heads, "Sub-tokens per token (MH-MoE)");
  add("--score", options.score, "Router score: dot product or cosine (X-MoE)")
      ->check(CLI::IsMember({"dot", "cosine"}));
  return synthetic;
}

Result<ModelSpec> BuildSyntheticSpec(const SyntheticOptions& options) {
  MOESERVE_ASSIGN_OR_RETURN(ModelSpec spec, SyntheticSpec(options.name));
  if (options.hidden) spec.hidden_size = *options.hidden;
  if (options.vocab) spec.vocab_size = *options.vocab;
  LayerSpec layer{*FirstAttention(spec), spec.feed_forward(0)};
  MOESERVE_RETURN_IF_ERROR(ChangeAttention(options, layer.attention));
  MOESERVE_RETURN_IF_ERROR(ChangeFeedForward(options, layer.feed_forward));
  // Validate one layer before it is copied.
  spec.blocks.clear();
  spec.AddLayer(layer);
  MOESERVE_RETURN_IF_ERROR(Validate(spec));
  const int layers = options.layers.value_or(SyntheticSpec(options.name)->num_layers());
  if (layers < 1 || layers > kMaxLayers) {
    return absl::InvalidArgumentError(
        Concat("--layers: expected 1 to ", kMaxLayers, ", found ", layers));
  }
  spec.AddLayers(layers - 1, layer);
  if (IsHybridName(options.name)) MakeHybrid(spec);
  MOESERVE_RETURN_IF_ERROR(Validate(spec));
  return spec;
}

std::string Describe(const SyntheticOptions& options) {
  std::string text = options.name;
  const auto add = [&](const char* flag, const auto& value) {
    if (!value) return;
    text += Concat(' ', flag, ' ');
    if constexpr (std::is_same_v<std::decay_t<decltype(*value)>, std::string>) {
      text += *value;
    } else {
      char number[32];
      std::snprintf(number, sizeof(number), "%.9g", static_cast<double>(*value));
      text += number;
    }
  };
  add("--hidden", options.hidden);
  add("--layers", options.layers);
  add("--vocab", options.vocab);
  add("--heads", options.heads);
  add("--kv-heads", options.kv_heads);
  add("--head-dim", options.head_dim);
  add("--window", options.window);
  add("--attention", options.attention);
  add("--attention-experts", options.attention_experts);
  add("--attention-top-k", options.attention_top_k);
  add("--ff", options.feed_forward);
  add("--experts", options.experts);
  for (size_t i = 0; i < options.widths.size(); ++i) {
    text += Concat(i == 0 ? " --widths " : ",", options.widths[i]);
  }
  add("--top-k", options.top_k);
  add("--top-p", options.top_p);
  add("--split-heads", options.split_heads);
  add("--score", options.score);
  return text;
}

}  // namespace moeserve::server
