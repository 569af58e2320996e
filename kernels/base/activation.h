// Activation functions of experts and feed-forward layers.
#pragma once

#include <cstdint>
#include <string_view>

namespace moeserve {

enum class ActivationKind : uint8_t { kNone, kSilu, kGelu, kGeluTanh, kRelu };

struct ActivationTraits {
  std::string_view name;  // in configuration files and descriptions
};

constexpr ActivationTraits Traits(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kNone:
      return {"none"};
    case ActivationKind::kSilu:
      return {"silu"};
    case ActivationKind::kGelu:
      return {"gelu"};  // x times the exact normal distribution function
    case ActivationKind::kGeluTanh:
      return {"gelu_tanh"};
    case ActivationKind::kRelu:
      return {"relu"};
  }
  return {};
}

}  // namespace moeserve
