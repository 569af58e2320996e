#include "engine/routes/routing_control.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <tuple>

#include "base/sha256.h"
#include "kernels/base/routing_kinds.h"

namespace moeserve {
namespace {

constexpr double kMaxBias = 1000.0;
// Longer keys are hashed, because every sequence and every first block of a cached prompt keeps a
// copy of its key.
constexpr size_t kMaxPlainKey = 64;

const RoutedLayerSpec* FindRouting(const ModelSpec& spec, int layer, BlockKind kind) {
  const int block = spec.Find(layer, kind);
  return block < 0 ? nullptr : spec.blocks[static_cast<size_t>(block)].routing();
}

absl::Status Refuse(const std::string& where, const std::string& expected,
                    const std::string& found) {
  return absl::InvalidArgumentError(where + ": expected " + expected + ", found " + found);
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.17g", value);
  return text;
}

absl::Status CheckSelection(const RoutingChange& change, const ModelSpec& spec, int max_top_k) {
  if (change.top_k && change.top_p) {
    return absl::InvalidArgumentError("either top_k or top_p can be given, not both");
  }
  int most = std::numeric_limits<int>::max();
  bool routed = false, over_selected = false;
  for (const BlockSpec& block : spec.blocks) {
    const RoutedLayerSpec* routing = block.routing();
    if (routing == nullptr) continue;
    routed = true;
    most = std::min(most, routing->num_experts);
    over_selected = over_selected || DivisorOf(routing->gate) == GateDivisor::kSelectedOnly;
  }
  if (!routed) return absl::InvalidArgumentError("the model has no routed layer");
  if (max_top_k > 0) most = std::min(most, max_top_k);
  if (change.top_k && (*change.top_k < 1 || *change.top_k > most)) {
    return Refuse("top_k", "1 to " + std::to_string(most), std::to_string(*change.top_k));
  }
  if (change.top_p) {
    if (!(*change.top_p > 0.0 && *change.top_p <= 1.0)) {
      return Refuse("top_p", "more than 0 and at most 1", Number(*change.top_p));
    }
    if (over_selected) {
      return absl::InvalidArgumentError(
          "top_p: this model's gates are softmax over the selected experts, which have no shares "
          "before the selection");
    }
    if (max_top_k > 0) {
      return absl::InvalidArgumentError(
          "top_p: this server limits the number of experts, so only top_k can be given");
    }
  }
  return absl::OkStatus();
}

}  // namespace

Result<RoutingControl> RoutingControl::Create(const RoutingChange& change, const ModelSpec& spec,
                                              const RoutingControlLimits& limits) {
  MOESERVE_RETURN_IF_ERROR(CheckSelection(change, spec, limits.max_top_k));
  RoutingControl control;
  control.change_ = change;
  auto& experts = control.change_.experts;
  std::sort(experts.begin(), experts.end(), [](const auto& a, const auto& b) {
    return std::tie(a.layer, a.block, a.expert) < std::tie(b.layer, b.block, b.expert);
  });
  control.key_ = change.top_k   ? "k" + std::to_string(*change.top_k)
                 : change.top_p ? "p" + Number(*change.top_p)
                                : "";
  const RoutingChange::Expert* last = nullptr;
  for (const RoutingChange::Expert& e : experts) {
    const std::string where = "layer " + std::to_string(e.layer) + " " + Name(e.block);
    const RoutedLayerSpec* routing = FindRouting(spec, e.layer, e.block);
    if (routing == nullptr) {
      return absl::InvalidArgumentError(where + " is not routed; the model has the layers 0 to " +
                                        std::to_string(spec.num_layers() - 1));
    }
    if (e.expert < 0 || e.expert >= routing->num_experts) {
      return Refuse(where + " expert", "0 to " + std::to_string(routing->num_experts - 1),
                    std::to_string(e.expert));
    }
    if (last != nullptr &&
        std::tie(last->layer, last->block, last->expert) == std::tie(e.layer, e.block, e.expert)) {
      return absl::InvalidArgumentError(where + ": expert " + std::to_string(e.expert) +
                                        " is named twice");
    }
    last = &e;
    if (e.bias && !(std::abs(*e.bias) <= kMaxBias)) {
      return Refuse(where + " bias", "-1000 to 1000", Number(*e.bias));
    }
    Bias& bias = control.biases_[{e.layer, e.block}];
    if (bias.values.empty()) {
      bias.values.assign(static_cast<size_t>(routing->num_experts), 0.0f);
      bias.allowed = routing->num_experts;
    }
    bias.values[e.expert] =
        e.bias ? static_cast<float>(*e.bias) : -std::numeric_limits<float>::infinity();
    if (!e.bias && --bias.allowed == 0) {
      return absl::InvalidArgumentError(where + ": at least one expert must be left");
    }
    control.key_ += ";" + std::to_string(e.layer) + "." +
                    std::to_string(static_cast<int>(e.block)) + "." + std::to_string(e.expert) +
                    (e.bias ? "+" + Number(*e.bias) : "x");
  }
  // No unhashed key begins with 'h'.
  if (control.key_.size() > kMaxPlainKey) control.key_ = "h" + Sha256(control.key_);
  return control;
}

RoutingControl RoutingControl::Limited(std::shared_ptr<RowLimit> limit) {
  RoutingControl control;
  control.row_limit_ = std::move(limit);
  control.key_ = "limited";
  return control;
}

std::optional<RoutingControl> RoutingControl::Widest(const ModelSpec& spec,
                                                     const RoutingControlLimits& limits) {
  if (!limits.enabled) return std::nullopt;
  Result<RoutingControl> control = Create({.top_p = 1.0}, spec, limits);
  if (control.ok()) return *std::move(control);
  int most = limits.max_top_k > 0 ? limits.max_top_k : std::numeric_limits<int>::max();
  for (const BlockSpec& block : spec.blocks) {
    const RoutedLayerSpec* routing = block.routing();
    if (routing != nullptr) most = std::min(most, routing->num_experts);
  }
  control = Create({.top_k = most}, spec, limits);
  if (!control.ok()) return std::nullopt;
  return *std::move(control);
}

RouteOverride RoutingControl::For(Stack stack, int layer, BlockKind block) const {
  RouteOverride change;
  change.k = change_.top_k.value_or(0);
  if (change_.top_p) {
    change.p = std::max(static_cast<float>(*change_.top_p), std::numeric_limits<float>::min());
  }
  if (stack == Stack::kEncoder) return change;  // its blocks may have other numbers of experts
  const auto it = biases_.find({layer, block});
  if (it != biases_.end()) {
    change.bias = it->second.values.data();
    change.allowed = it->second.allowed;
  }
  return change;
}

}  // namespace moeserve
