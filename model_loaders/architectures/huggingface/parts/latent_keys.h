// Multi-head latent attention in the files of DeepSeek and its relatives.
#pragma once

#include <span>

#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve::huggingface {

// The values that configuration classes have for keys that are left out.
struct LatentDefaults {
  int query_rank = 1536;  // 0: none
  int rank = 512;
  int rope_dim = 64;    // "qk_rope_head_dim"
  int plain_dim = 128;  // "qk_nope_head_dim"
  int value_dim = 128;
};

// Reads the keys of the attention, whose rotary pairs are interleaved.
AttentionSpec ReadLatentAttention(DecoderConfig& c, const nlohmann::json& json,
                                  const LatentDefaults& defaults = {});

// self_attn.{q,q_a,q_b,kv_a,kv_b,o}_proj and the norms between them.
std::span<const TensorRule> LatentTensors();

// Adds the names of all tensors of such a model, and ignores settings of training.
void AddLatentTensors(DecoderConfig& c);

}  // namespace moeserve::huggingface
