#include "model_loaders/architectures/huggingface/parts/latent_keys.h"

#include <algorithm>
#include <cmath>

#include "engine/spec/spec_limits.h"

namespace moeserve::huggingface {
namespace {

using Json = nlohmann::json;

constexpr TensorRule kLatentAttention[] = {
    {"blocks.*.attention.q.weight", "model.layers.*.self_attn.q_proj.weight"},
    {"blocks.*.attention.q.weight", "model.layers.*.self_attn.q_b_proj.weight"},
    {"blocks.*.attention.q_down.weight", "model.layers.*.self_attn.q_a_proj.weight"},
    {"blocks.*.attention.q_down.bias", "model.layers.*.self_attn.q_a_proj.bias"},
    {"blocks.*.attention.q_norm.weight", "model.layers.*.self_attn.q_a_layernorm.weight"},
    {"blocks.*.attention.latent.weight", "model.layers.*.self_attn.kv_a_proj_with_mqa.weight"},
    {"blocks.*.attention.latent.bias", "model.layers.*.self_attn.kv_a_proj_with_mqa.bias"},
    {"blocks.*.attention.latent_norm.weight", "model.layers.*.self_attn.kv_a_layernorm.weight"},
    {.model = "blocks.*.attention.heads.*.k.weight",
     .file = "model.layers.*.self_attn.kv_b_proj.weight",
     .part = 0,
     .parts = 2,
     .order = RowOrder::kLatent},
    {.model = "blocks.*.attention.heads.*.v.weight",
     .file = "model.layers.*.self_attn.kv_b_proj.weight",
     .part = 1,
     .parts = 2,
     .order = RowOrder::kLatent},
    {"blocks.*.attention.o.weight", "model.layers.*.self_attn.o_proj.weight"},
    {"blocks.*.attention.out_bias", "model.layers.*.self_attn.o_proj.bias"},
};

constexpr KeyRule kLatentKeys[] = {
    {"attention.latent.rank", "kv_lora_rank"},
    {"attention.latent.query_rank", "q_lora_rank"},
    {"attention.latent.rope_dim", "qk_rope_head_dim"},
    {"attention.latent.value_dim", "v_head_dim"},
    {"attention.head_dim", "qk_nope_head_dim + qk_rope_head_dim"},
};

// Rotation by yarn also scales the scores; "mscale_all_dim" is the part that is not in the cosines
// and sines.
double ScoreFactor(const Json& json) {
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const auto rope = json.find(key);
    if (rope == json.end() || !rope->is_object()) continue;
    const auto number = [&](const char* name) {
      const auto value = rope->find(name);
      return value != rope->end() && value->is_number() ? value->get<double>() : 0.0;
    };
    const double scale = number("mscale_all_dim"), factor = number("factor");
    if (scale == 0.0 || factor <= 1.0) return 1.0;
    const double magnitude = 0.1 * scale * std::log(factor) + 1.0;
    return magnitude * magnitude;
  }
  return 1.0;
}

}  // namespace

std::span<const TensorRule> LatentTensors() { return kLatentAttention; }

AttentionSpec ReadLatentAttention(DecoderConfig& c, const Json& json,
                                  const LatentDefaults& defaults) {
  ObjectReader& keys = c.keys();
  c.Keys(kLatentKeys);
  AttentionSpec attention;
  attention.num_heads = keys.Int("num_attention_heads");
  attention.num_kv_heads = c.KvHeads(attention.num_heads);
  c.Ignore({"head_dim", "qk_head_dim"});  // follow from the keys below
  LatentSpec latent;
  latent.rank = keys.Int("kv_lora_rank", defaults.rank);
  // A query rank that is null differs from one that is absent.
  latent.query_rank = keys.Int("q_lora_rank", c.IsNull("q_lora_rank") ? 0 : defaults.query_rank);
  latent.rope_dim = keys.Int("qk_rope_head_dim", defaults.rope_dim);
  latent.value_dim = keys.Int("v_head_dim", defaults.value_dim);
  const int64_t width = int64_t{keys.Int("qk_nope_head_dim", defaults.plain_dim)} + latent.rope_dim;
  attention.head_dim = static_cast<int>(std::clamp<int64_t>(width, -1, kMaxWidth + 1));
  if (attention.head_dim > 0) {
    attention.scale = ScoreFactor(json) / std::sqrt(static_cast<double>(attention.head_dim));
  }
  attention.latent = latent;
  attention.bias = attention.out_bias = keys.Bool("attention_bias", false);
  c.spec().position.pairing = RopePairing::kInterleaved;
  return attention;
}

void AddLatentTensors(DecoderConfig& c) {
  c.Tensors({EmbeddingTensors(), PreNormTensors(), LatentTensors(), DenseTensors(), ExpertTensors(),
             SharedExpertTensors()});
  // Settings of training and of how the authors' code runs.
  c.Ignore({"aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers"});
}

}  // namespace moeserve::huggingface
