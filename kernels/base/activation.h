// Activation functions of experts and feed-forward layers.
#pragma once

#include <cstdint>

#include "base/kinds.h"
#include "kernels/base/host_device.h"

namespace moeserve {

// kGelu is x times the exact normal distribution function, kRelu2 the square of kRelu.
enum class ActivationKind : uint8_t { kNone, kSilu, kGelu, kGeluTanh, kRelu, kTanh, kRelu2 };
constexpr NameTraits Traits(ActivationKind k) {
  return NameIn({"none", "silu", "gelu", "gelu_tanh", "relu", "tanh", "relu2"}, k);
}

// What a gate multiplies by, for its input z: sigmoid(z); z * sigmoid(z); log2(1 + 2^z).
enum class GateActivation : uint8_t { kNone, kSigmoid, kSilu, kSoftplus2 };
constexpr NameTraits Traits(GateActivation k) {
  return NameIn({"none", "sigmoid", "silu", "softplus2"}, k);
}

// How a linear layer's outputs become hidden units. A gated layer has two outputs per hidden unit,
// g and u, and computes act(g') * (u' + up_offset). With a limit, g' is g but at most `limit`, and
// u' is u clamped to [-limit, limit]; without one, g' is g and u' is u. With `limit_after`, act(g)
// is at most `limit`, instead of g. A layer that is not gated computes act(x) and uses `kind`
// alone.
struct Activation {
  ActivationKind kind = ActivationKind::kNone;
  float limit = 0.0f;  // 0: no limit
  float slope = 1.0f;  // silu of a gated layer computes x * sigmoid(slope * x)
  float up_offset = 0.0f;
  bool limit_after = false;

  constexpr Activation() = default;
  constexpr Activation(ActivationKind k) : kind(k) {}  // NOLINT(google-explicit-constructor)
};

// Returns whether `kind` alone determines the result.
MOESERVE_HOST_DEVICE static inline bool IsPlain(const Activation& a) {
  return a.limit == 0.0f && a.slope == 1.0f && a.up_offset == 0.0f;
}

}  // namespace moeserve
