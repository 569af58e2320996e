#include "model_loaders/architectures/huggingface/hybrids/state_space_keys.h"

#include <cmath>
#include <limits>
#include <optional>

namespace moeserve::huggingface {
namespace {

using Json = nlohmann::json;

constexpr TensorRule InProj(std::string_view model, std::string_view file, int part) {
  return {.model = model, .file = file, .part = part, .order = RowOrder::kStateSpace};
}

// The names differ in what stands in front of them.
#define MOESERVE_STATE_SPACE(prefix)                                                    \
  InProj("blocks.*.attention.gate.weight", prefix "in_proj.weight", 0),                 \
      InProj("blocks.*.attention.x.weight", prefix "in_proj.weight", 1),                \
      InProj("blocks.*.attention.b.weight", prefix "in_proj.weight", 2),                \
      InProj("blocks.*.attention.c.weight", prefix "in_proj.weight", 3),                \
      InProj("blocks.*.attention.step.weight", prefix "in_proj.weight", 4),             \
      InProj("blocks.*.attention.gate.bias", prefix "in_proj.bias", 0),                 \
      InProj("blocks.*.attention.x.bias", prefix "in_proj.bias", 1),                    \
      InProj("blocks.*.attention.b.bias", prefix "in_proj.bias", 2),                    \
      InProj("blocks.*.attention.c.bias", prefix "in_proj.bias", 3),                    \
      InProj("blocks.*.attention.step.bias", prefix "in_proj.bias", 4),                 \
      TensorRule{.model = "blocks.*.attention.conv.weight",                             \
                 .file = prefix "conv1d.weight",                                        \
                 .channel = true},                                                      \
      TensorRule{"blocks.*.attention.conv.bias", prefix "conv1d.bias"},                 \
      TensorRule{"blocks.*.attention.decay_log", prefix "A_log"},                       \
      TensorRule{"blocks.*.attention.step_bias", prefix "dt_bias"},                     \
      TensorRule{"blocks.*.attention.skip", prefix "D"},                                \
      TensorRule{"blocks.*.attention.out_norm.weight", prefix "norm.weight"},           \
      TensorRule{"blocks.*.attention.o.weight", prefix "out_proj.weight"}, TensorRule { \
    "blocks.*.attention.o.bias", prefix "out_proj.bias"                                 \
  }

constexpr TensorRule kMamba[] = {MOESERVE_STATE_SPACE("model.layers.*.mamba.")};
constexpr TensorRule kMixer[] = {MOESERVE_STATE_SPACE("model.layers.*.mixer.")};
#undef MOESERVE_STATE_SPACE

// Returns the number, or the one spelling of infinity that files have beside it; nullopt for other
// values.
std::optional<double> Limit(const Json& json) {
  if (json.is_number()) return json.get<double>();
  if (json == Json{{"__float__", "Infinity"}}) return std::numeric_limits<double>::infinity();
  return std::nullopt;
}

// Reads "time_step_limit", the range of steps.
void ReadStepLimit(DecoderConfig& config, StateSpaceSpec& ssm) {
  constexpr std::string_view key = "time_step_limit";
  const Json* const json = config.keys().Optional(key);
  if (json == nullptr) return;
  const bool two = json->is_array() && json->size() == 2;
  const std::optional<double> low = two ? Limit((*json)[0]) : std::nullopt;
  const std::optional<double> high = two ? Limit((*json)[1]) : std::nullopt;
  if (!low.has_value() || !high.has_value() || std::isinf(*low)) {
    config.keys().Fault(key, "a list of two numbers, the second of which may be Infinity",
                        ShowJson(*json));
    return;
  }
  ssm.step_low = *low;
  ssm.step_high = std::isinf(*high) ? std::nullopt : high;
}

}  // namespace

StateSpaceSpec ReadStateSpace(DecoderConfig& config, const StateSpaceKeys& keys,
                              StateSpaceSpec defaults, int auto_head_dim) {
  StateSpaceSpec ssm = defaults;
  ObjectReader& reader = config.keys();
  ssm.num_heads = reader.Int(keys.heads, defaults.num_heads);
  const Json* const head_dim = reader.Optional(keys.head_dim);
  const bool absent = head_dim == nullptr || *head_dim == "auto";
  if (absent && auto_head_dim > 0 && ssm.num_heads > 0) {
    ssm.head_dim = auto_head_dim / ssm.num_heads;
  } else if (absent) {
    ssm.head_dim = defaults.head_dim;
  } else {
    ssm.head_dim = reader.Int(keys.head_dim);
  }
  if (auto_head_dim > 0 && int64_t{ssm.num_heads} * ssm.head_dim != auto_head_dim) {
    reader.Fault(keys.heads,
                 Concat("a number of heads whose width is ", auto_head_dim, " together"),
                 Concat(ssm.num_heads, " heads of ", ssm.head_dim));
  }
  ssm.state_dim = reader.Int(keys.state_dim, defaults.state_dim);
  ssm.groups = reader.Int(keys.groups, defaults.groups);
  ssm.taps = reader.Int(keys.taps, defaults.taps);
  ssm.conv_bias = reader.Bool(keys.conv_bias, defaults.conv_bias);
  ssm.bias = reader.Bool(keys.bias, defaults.bias);
  ReadStepLimit(config, ssm);
  const KeyRule rules[] = {
      {"attention.head_dim", keys.head_dim},     {"attention.state_dim", keys.state_dim},
      {"attention.groups", keys.groups},         {"attention.conv", keys.taps},
      {"attention.conv_bias", keys.conv_bias},   {"attention.step_low", "time_step_limit"},
      {"attention.step_high", "time_step_limit"}};
  config.Keys(rules);
  return ssm;
}

std::span<const TensorRule> MambaTensors() { return kMamba; }
std::span<const TensorRule> MixerTensors() { return kMixer; }

}  // namespace moeserve::huggingface
