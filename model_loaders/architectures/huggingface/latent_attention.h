// What the families with the latent attention of DeepSeek-V2 have in common.
#pragma once

#include <span>

#include "engine/spec/spec.h"
#include "model_loaders/architectures/huggingface/decoder_config.h"
#include "nlohmann/json.hpp"

namespace moeserve::huggingface {

// The values that a family's configuration class has for keys that config.json omits.
struct LatentDefaults {
  int query_rank = 1536;  // 0: none
  int plain_dim = 128;    // "qk_nope_head_dim"
  int value_dim = 128;    // "v_head_dim"
};

// Reads the keys of latent attention, and sets the pairing of rotary positions. `json` is the
// object that `c` reads. Call after Skeleton().
AttentionSpec ReadLatentAttention(DecoderConfig& c, const nlohmann::json& json,
                                  const LatentDefaults& defaults);
// The names of the tensors of latent attention.
std::span<const TensorRule> LatentTensors();
// Adds the names of all tensors, and ignores settings of training.
void AddLatentTensors(DecoderConfig& c);

}  // namespace moeserve::huggingface
