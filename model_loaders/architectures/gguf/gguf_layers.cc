// The layers of GGUF files: windows, and what differs between layers.

#include <string>
#include <utility>
#include <vector>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/gguf/gguf_reader.h"

namespace moeserve {
namespace {

constexpr std::string_view kWindow = ".attention.sliding_window";

}  // namespace

std::optional<int> GgufConfigReader::First(const std::vector<int>& of_layers) {
  return of_layers.empty() ? std::nullopt : std::optional(of_layers.front());
}

void GgufConfigReader::ReadLayerHeads() {
  if (!family_.layer_heads || !problems_.empty()) return;
  const int all = layers_ + next_token_layers_;
  heads_ = keys_.Ints(".attention.head_count", all, std::nullopt);
  kv_lists_ = keys_.Ints(".attention.head_count_kv", all, std::nullopt);
}

void GgufConfigReader::ReadWindows(int head_dim) {
  if (!family_.window_period.has_value()) {
    keys_.Require(kWindow, 0);
    return;
  }
  const int window = keys_.Int(kWindow, family_.default_window);
  // Half of it on each side.
  if (window != 0) window_ = family_.bidirectional && window > 0 ? window / 2 + 1 : window;
  if (window > 0 && window < kMaxPositions) *window_ += family_.window_extra;
  // Newer files list the layers that have a window.
  constexpr std::string_view kPeriod = ".attention.sliding_window_pattern";
  const GgufValue* const pattern = keys_.Find(kPeriod);
  if (pattern != nullptr && pattern->type == GgufValueType::kArray) {
    windows_ = keys_.Flags(kPeriod, layers_ + next_token_layers_);
  } else {
    window_period_ = keys_.Int(kPeriod, *family_.window_period);
  }
  if (window_period_ < 0) {
    keys_.Fault(kPeriod, "an integer of at least 0", std::to_string(window_period_));
  }
  if (family_.window_rope && window_.has_value()) {
    full_position_.emplace().kind = PositionKind::kNone;
  }
  if (family_.window_theta.has_value()) ReadWindowPositions(head_dim);
}

// Reads what the rotary positions of layers with a window are, and the width of their heads.
void GgufConfigReader::ReadWindowPositions(int head_dim) {
  constexpr std::string_view kWidth = ".attention.key_length_swa";
  int width = head_dim;
  if (family_.window_widths) {
    width = keys_.Int(kWidth, head_dim);
    if (width < 1 || width > kMaxWidth) {
      keys_.Fault(kWidth, Concat("an integer in [1, ", kMaxWidth, ']'), std::to_string(width));
      return;
    }
    keys_.Require(".attention.value_length_swa", width);
    window_head_dim_ = width;
  }
  const double usual = *family_.window_theta == 0.0 ? spec_.position.theta : *family_.window_theta;
  PositionSpec position = spec_.position;
  position.theta = keys_.Real(".rope.freq_base_swa", usual);
  position.scaling = RopeScaling();
  position.span = position.frequencies = RopeSpan::kRotated;
  constexpr std::string_view kRotated = ".rope.dimension_count_swa";
  const int rotated = keys_.Int(kRotated, width == head_dim ? rotated_key_ : width);
  if (rotated < 1 || rotated > width) {
    if (keys_.Find(kRotated) != nullptr) {
      keys_.Fault(kRotated, Concat("an integer in [1, ", width, "] (the width of the heads)"),
                  std::to_string(rotated));
    }
    return;  // else the key for all layers is wrong, which is found later
  }
  position.fraction = static_cast<double>(rotated) / width;
  window_position_ = std::move(position);
}

void GgufConfigReader::ReadQueryScale() {
  const bool chosen = family_.window_period.has_value();
  if (!family_.query_scale.has_value() || (chosen && !window_.has_value())) return;
  constexpr std::string_view kStep = ".attention.temperature_length";
  QueryScaleSpec scale = *family_.query_scale;
  const RopeScaling& rope = spec_.position.scaling;
  const bool usual = scale.factor != 0.0;  // what the authors of the model have
  if (usual && scale.step == 0.0 && rope.kind == RopeScalingKind::kYarn) {
    scale.step = rope.original_positions;
  }
  scale.factor = keys_.Real(".attention.temperature_scale", scale.factor);
  scale.step = keys_.Real(kStep, scale.step);
  if (scale.factor == 0.0) return;
  if (!(scale.step > 0.0)) {
    keys_.Fault(kStep, "a number above 0",
                keys_.Find(kStep) == nullptr ? "no such key" : ShowGguf(*keys_.Find(kStep)));
    return;
  }
  query_scale_ = scale;
}

bool GgufConfigReader::HasWindow(int layer) const {
  if (!window_.has_value()) return false;
  if (windows_.has_value()) return (*windows_)[static_cast<size_t>(layer)];
  return window_period_ == 0 || layer % window_period_ < window_period_ - 1;
}

// Sets what differs between layers with attention.
void GgufConfigReader::SetAttention(int layer, AttentionSpec& attention) const {
  const auto at = static_cast<size_t>(layer);
  if (!heads_.empty()) {
    attention.num_heads = heads_[at];
    attention.num_kv_heads = kv_lists_[at];
  }
  const bool windowed = HasWindow(layer);
  if (windowed) {
    attention.window = window_;
    attention.window_kind = family_.window_kind;
    attention.position = window_position_;
    if (window_head_dim_.has_value()) attention.head_dim = *window_head_dim_;
  } else if (family_.norms != GgufFamily::Norms::kShared || IsRouted(layer)) {
    attention.position = full_position_;
  }
  if (!windowed || !family_.window_period.has_value()) attention.query_scale = query_scale_;
  const PositionSpec& position =
      attention.position.has_value() ? *attention.position : spec_.position;
  // These norms follow a rotation.
  if (attention.qk_norm == QkNorm::kL2 && position.kind == PositionKind::kNone) {
    attention.qk_norm = QkNorm::kNone;
    attention.qk_norm_after_rope = false;
  }
  if (IsRouted(layer)) attention.value_routing = value_routing_;
  if (family_.layer_sinks) attention.sinks = HasIn(layer, "attn_sinks.weight");
  if (family_.keys_as_values && !windowed) {
    attention.value_from_key = !HasIn(layer, "attn_v.weight") && !HasIn(layer, "attn_qkv.weight");
  }
}

LayerSpec GgufConfigReader::Layer(int layer, const AttentionSpec& attention) const {
  const auto at = static_cast<size_t>(layer);
  LayerSpec result{attention, IsRouted(layer) ? experts_ : dense_};
  SetAttention(layer, result.attention);
  if (!limits_.empty()) {
    ExpertSpec& expert = result.feed_forward.expert;
    const bool routed = result.feed_forward.routed();
    expert.activation_limit = routed ? limits_[at] : shared_limits_[at];
    if (routed && shared_limits_[at] != limits_[at]) {
      result.feed_forward.shared_limit = shared_limits_[at];
    }
  }
  if (kinds_[at] == LayerKind::kRecurrent) result.token_mixer = recurrent_;
  if (family_.norms != GgufFamily::Norms::kOne) return result;
  result.one_block = true;
  if (kinds_[at] == LayerKind::kFeedForward) {
    if (!IsRouted(layer)) result.feed_forward.width = widths_[at];
    result.token_mixer = result.feed_forward;
  }
  return result;
}

}  // namespace moeserve
