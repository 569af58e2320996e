// The feed-forward blocks of GGUF files: dense ones, experts, routers.

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/gguf/gguf_reader.h"

namespace moeserve {
namespace {

using Experts = GgufFamily::Experts;
using Shared = GgufFamily::Shared;

constexpr std::string_view kCount = ".expert_count";
constexpr std::string_view kSelected = ".expert_used_count";
constexpr std::string_view kWidth = ".feed_forward_length";
constexpr std::string_view kFirstRouted = ".leading_dense_block_count";
constexpr std::string_view kExpertStep = ".interleave_moe_layer_step";
constexpr std::string_view kEveryLayers = ".moe_every_n_layers";
constexpr std::string_view kGate = ".expert_gating_func";
constexpr std::string_view kGroups = ".expert_group_count";
constexpr std::string_view kBestGroups = ".expert_group_used_count";
constexpr std::string_view kSharedWidth = ".expert_shared_feed_forward_length";
constexpr std::string_view kSharedCount = ".expert_shared_count";

// Values of the key for the gate; 0 stands for "not set".
constexpr int kSoftmaxGate = 1;
constexpr int kSigmoidGate = 2;
constexpr int kSelectedGate = 3;  // softmax of the selected experts

}  // namespace

bool GgufConfigReader::IsRouted(int layer) const {
  if (!routed_layers_.empty()) return routed_layers_[static_cast<size_t>(layer)];
  return routed_step_ > 0 && layer >= first_routed_ && (layer + 1) % routed_step_ == 0;
}

int GgufConfigReader::FirstRouted() const {
  int layer = 0;
  while (layer < layers_ && !IsRouted(layer)) ++layer;
  return layer;
}

void GgufConfigReader::ReadFeedForward() {
  const int count =
      keys_.Int(kCount, family_.experts == Experts::kAlways ? std::nullopt : std::optional(0));
  if (family_.experts == Experts::kNone && count != 0) {
    keys_.Fault(kCount, "0", std::to_string(count));
  }
  if (family_.experts != Experts::kAlways && count == 0) {
    keys_.Int(kSelected, 0);
    dense_ = ReadDense();
    return;
  }
  ReadRoutedLayers();
  // In most files with experts, this is the width of dense layers, of which there are none.
  for (int i = 0; i < layers_; ++i) {
    if (IsRouted(i)) continue;
    dense_ = ReadDense();
    break;
  }
  experts_ = ReadExperts(count);
  if (!family_.layer_limits) return;
  // A limit follows the activation; 0 stands for none.
  experts_.expert.limit_after = dense_.expert.limit_after = true;
  const int all = layers_ + next_token_layers_;
  limits_ = keys_.Floats(".swiglu_clamp_exp", all);
  shared_limits_ = keys_.Floats(".swiglu_clamp_shexp", all);
}

FeedForwardSpec GgufConfigReader::ReadDense() {
  FeedForwardSpec block;
  block.expert.activation = family_.activation;
  if (family_.plain_experts) block.expert.form = ExpertForm::kPlain;
  if (!widths_.empty()) {  // layers have their own
    block.expert.bias = HasIn(FirstOf(LayerKind::kFeedForward), "ffn_up.bias");
    return block;
  }
  // Without experts, Granite's shared expert is the feed-forward.
  const bool shared = family_.experts == Experts::kIfCounted && family_.granite_factors;
  const std::optional<int> shared_width = shared ? keys_.OptionalInt(kSharedWidth) : std::nullopt;
  const int width = keys_.Int(kWidth, shared_width);
  block.width = shared_width.value_or(width);
  block.expert.bias = Has("blk.0.ffn_up.bias");
  return block;
}

void GgufConfigReader::ReadValueExperts() {
  if (!family_.value_experts) return;
  constexpr std::string_view kValues = ".attention.value_expert_count";
  constexpr std::string_view kChosen = ".attention.value_expert_used_count";
  const int count = keys_.Int(kValues, 0);
  if (count == 0) {
    keys_.Require(kChosen, 0);
    return;
  }
  if (!experts_.routed()) {
    keys_.Fault(kValues, Concat("0 (", keys_.NameOf(kCount), " is 0)"), std::to_string(count));
    return;
  }
  ExpertWidths(kValues, count, 1);  // checks the number
  const RoutedLayerSpec& routing = *experts_.routing;
  RoutedLayerSpec values;
  values.num_experts = count;
  values.select.k = keys_.Int(kChosen);
  values.select.bias = HasIn(FirstRouted(), "attn_v_gate.bias");
  values.gate = routing.gate;
  values.scale = routing.scale;
  values.renormalize = values.select.k > 1;
  value_routing_ = std::move(values);
}

// Finds out which layers have experts.
void GgufConfigReader::ReadRoutedLayers() {
  routed_step_ = 1;
  if (family_.router_decides) {
    for (int i = 0; i < layers_; ++i) {
      routed_layers_.push_back(HasIn(i, "ffn_gate_inp.weight"));
    }
    return;
  }
  keys_.Require(kEveryLayers, 1);
  if (!family_.free_router) {
    keys_.Require(kFirstRouted, 0);
    return;
  }
  first_routed_ = keys_.Int(kFirstRouted, 0);
  if (problems_.empty() && (first_routed_ < 0 || first_routed_ > layers_)) {
    keys_.Fault(kFirstRouted, Concat("an integer in [0, ", layers_, "] (the number of layers)"),
                std::to_string(first_routed_));
  }
  const int step = keys_.Int(kExpertStep, 1);
  if (step < 1) {
    keys_.Fault(kExpertStep, "an integer of at least 1", std::to_string(step));
  } else {
    routed_step_ = step;
  }
}

FeedForwardSpec GgufConfigReader::ReadExperts(int count) {
  FeedForwardSpec block;
  ExpertSpec& expert = block.expert;
  expert.activation = family_.activation;
  if (family_.plain_experts) expert.form = ExpertForm::kPlain;
  if (family_.clamped_experts) {  // numbers that no key has
    expert.bias = true;
    expert.activation_slope = 1.702f;
    expert.activation_limit = 7.0f;
    expert.up_offset = 1.0f;
  }
  RoutedLayerSpec routing;
  routing.num_experts = count;
  routing.select.k = keys_.Int(kSelected);
  ReadGate(routing);
  if (family_.value_experts && routing.select.k > 1) routing.renormalize = true;
  if (routing.gate == GateKind::kSparseMixer) {  // what the authors do, whatever keys say
    keys_.Require(kSelected, 2);
    routing.mixer_limit = 0.02;
    routing.renormalize = false;
  }
  const double scale = keys_.Real(".expert_weights_scale", 1.0);
  routing.scale = scale == 0.0 ? 1.0 : scale;  // 0 stands for "not set"
  routing.weight_input = family_.weight_input;
  if (!family_.counts_next_token_layers) keys_.Require(".nextn_predict_layers", 0);

  routing.latent_width = keys_.Int(".moe_latent_size", 0);

  const std::optional<int> dense = widths_.empty() ? keys_.OptionalInt(kWidth) : std::nullopt;
  // Early files of qwen2moe have no keys for the widths of experts.
  const int selected = routing.select.k;
  const bool early = family_.shared == Shared::kGated && dense.has_value() && selected > 0;
  const int width =
      keys_.Int(family_.expert_width, early ? std::optional(*dense / selected) : std::nullopt);
  if (keys_.Find(kCount) != nullptr) routing.widths = ExpertWidths(kCount, count, width);
  switch (family_.shared) {
    case Shared::kNone:
      break;
    case Shared::kGated:
      block.shared_width = keys_.Int(kSharedWidth, dense);
      block.shared_gate = true;
      break;
    case Shared::kPlain:
      block.shared_width = ReadSharedWidth(width);
      break;
    case Shared::kDense:
      block.shared_width = keys_.Int(kWidth);
      block.shared_norms = true;
      // The router reads a norm of the residual stream.
      routing.score.stream = true;
      routing.score.norm = RowNorm::kRmsWeight;
      if (spec_.hidden_size > 0) routing.score.row_scale = 1.0 / std::sqrt(spec_.hidden_size);
      routing.expert_scale = true;
      break;
  }
  block.routing = std::move(routing);
  return block;
}

// Shared experts are stored as one. Some architectures have its width, some the number of shared
// experts, which are as wide as the others, and some have both.
int GgufConfigReader::ReadSharedWidth(int expert_width) {
  const int count = keys_.Int(kSharedCount, family_.shared_count);
  if (const std::optional<int> whole = keys_.OptionalInt(kSharedWidth)) return *whole;
  const int64_t width = int64_t{count} * expert_width;
  if (count >= 0 && width >= 0 && width <= kMaxWidth) return static_cast<int>(width);
  keys_.Fault(kSharedCount, Concat("a number of experts with at most ", kMaxWidth, " in width"),
              Concat(count, " of width ", expert_width));
  return 0;
}

void GgufConfigReader::ReadGate(RoutedLayerSpec& routing) {
  routing.gate = family_.gate;
  const bool renormalize = keys_.Bool(".expert_weights_norm", family_.renormalize);
  if (!family_.free_router) {
    keys_.Require(kGate, kSoftmaxGate);
    keys_.Require(kGroups, 0);
    keys_.Require(kBestGroups, 0);
    routing.score.bias = family_.clamped_experts;
    // The weights of softmax_selected have the sum 1.
    routing.renormalize = renormalize && routing.gate != GateKind::kSoftmaxSelected;
    return;
  }
  routing.renormalize = renormalize;
  if (family_.softmax_selected) {
    const int gate = keys_.Int(kGate, kSigmoidGate);
    if (gate == kSoftmaxGate || gate == kSelectedGate) {
      routing.gate = GateKind::kSoftmaxSelected;
      routing.renormalize = false;  // their sum is 1
      return;
    }
  }
  const int first = FirstRouted();
  routing.select.bias = HasIn(first, "exp_probs_b.bias") || HasIn(first, "exp_probs_b");
  // GLM-4.7 Flash has no key for its gate. Unlike the models with softmax, it has choice biases.
  const bool sigmoid =
      family_.gate == GateKind::kSigmoid || (family_.latent && routing.select.bias);
  const int usual = sigmoid ? kSigmoidGate : kSoftmaxGate;
  const int gate = keys_.Int(kGate, usual);
  if (gate == kSigmoidGate || (gate == 0 && usual == kSigmoidGate)) {
    routing.gate = GateKind::kSigmoid;
  } else if (gate == kSoftmaxGate || gate == 0) {
    routing.gate = GateKind::kSoftmax;
  } else {
    keys_.Fault(kGate, "1 (softmax) or 2 (sigmoid)", std::to_string(gate));
  }
  ReadGroups(routing);
}

// DeepSeek-V2 (softmax) ranks groups by their best expert, DeepSeek-V3 (sigmoid) and later models
// by the sum of their best two.
void GgufConfigReader::ReadGroups(RoutedLayerSpec& routing) {
  const int groups = keys_.Int(kGroups, 1);
  if (groups == 0 || groups == 1) {  // no groups
    keys_.Ignore(kBestGroups);
    return;
  }
  routing.select.groups = groups;
  routing.select.best_groups = keys_.Int(kBestGroups);
  if (routing.gate == GateKind::kSoftmax) {
    routing.select.group_score =
        family_.group_sums ? GroupScoreKind::kSumOfTwo : GroupScoreKind::kMax;
    routing.select.group_mask = GroupMaskKind::kZero;
  } else {
    routing.select.group_score = GroupScoreKind::kSumOfTwo;
  }
}

}  // namespace moeserve
