// The keys and tensors of state-space layers (Mamba-2), which several families have.
#pragma once

#include <span>
#include <string_view>

#include "engine/spec/recurrent.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve::huggingface {

// The names of the keys of state-space layers.
struct StateSpaceKeys {
  std::string_view heads, head_dim, state_dim, groups, taps, conv_bias, bias;
};

// Reads state-space layers, whose values in config.json replace those of `defaults`. `head_dim` may
// be "auto", which is `auto_head_dim`; 0: it must be a number.
StateSpaceSpec ReadStateSpace(DecoderConfig& config, const StateSpaceKeys& keys,
                              StateSpaceSpec defaults, int auto_head_dim);

std::span<const TensorRule> MambaTensors();  // mamba.in_proj, mamba.conv1d, ...
std::span<const TensorRule> MixerTensors();  // the same with mixer.

}  // namespace moeserve::huggingface
