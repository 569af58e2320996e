// nomic-embed-text: encoders with rotary positions, dense or with experts in every second layer.
// The authors' files have keys like those of GPT-2, those of `transformers` other ones.

#include <algorithm>
#include <cmath>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/model_head.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule NomicQkv(std::string_view model, std::string_view file, int part) {
  return {.model = model, .file = file, .part = part, .parts = 3, .order = RowOrder::kQkv};
}

constexpr TensorRule kNomicTensors[] = {
    {"embed.weight", "bert.embeddings.word_embeddings.weight"},
    {"embed_type.weight", "bert.embeddings.token_type_embeddings.weight"},
    {"embed_norm.weight", "bert.emb_ln.weight"},
    {"embed_norm.bias", "bert.emb_ln.bias"},
    {"embed_norm.weight", "bert.embeddings.LayerNorm.weight"},
    {"embed_norm.bias", "bert.embeddings.LayerNorm.bias"},
    NomicQkv("blocks.*.attention.q.weight", "bert.encoder.layers.*.attn.Wqkv.weight", 0),
    NomicQkv("blocks.*.attention.k.weight", "bert.encoder.layers.*.attn.Wqkv.weight", 1),
    NomicQkv("blocks.*.attention.v.weight", "bert.encoder.layers.*.attn.Wqkv.weight", 2),
    NomicQkv("blocks.*.attention.q.bias", "bert.encoder.layers.*.attn.Wqkv.bias", 0),
    NomicQkv("blocks.*.attention.k.bias", "bert.encoder.layers.*.attn.Wqkv.bias", 1),
    NomicQkv("blocks.*.attention.v.bias", "bert.encoder.layers.*.attn.Wqkv.bias", 2),
    {"blocks.*.attention.o.weight", "bert.encoder.layers.*.attn.out_proj.weight"},
    {"blocks.*.attention.out_bias", "bert.encoder.layers.*.attn.out_proj.bias"},
    {"blocks.*.attention.norm.weight", "bert.encoder.layers.*.norm1.weight"},
    {"blocks.*.attention.norm.bias", "bert.encoder.layers.*.norm1.bias"},
    {"blocks.*.feed_forward.norm.weight", "bert.encoder.layers.*.norm2.weight"},
    {"blocks.*.feed_forward.norm.bias", "bert.encoder.layers.*.norm2.bias"},
    {"blocks.*.feed_forward.up.weight", "bert.encoder.layers.*.mlp.fc1.weight"},
    {"blocks.*.feed_forward.up.bias", "bert.encoder.layers.*.mlp.fc1.bias"},
    {"blocks.*.feed_forward.up.weight", "bert.encoder.layers.*.mlp.fc11.weight"},
    {"blocks.*.feed_forward.up.bias", "bert.encoder.layers.*.mlp.fc11.bias"},
    {"blocks.*.feed_forward.gate.weight", "bert.encoder.layers.*.mlp.fc12.weight"},
    {"blocks.*.feed_forward.gate.bias", "bert.encoder.layers.*.mlp.fc12.bias"},
    {"blocks.*.feed_forward.down.weight", "bert.encoder.layers.*.mlp.fc2.weight"},
    {"blocks.*.feed_forward.down.bias", "bert.encoder.layers.*.mlp.fc2.bias"},
    {"blocks.*.feed_forward.router.weight", "bert.encoder.layers.*.mlp.router.layer.weight"},
    {.model = "blocks.*.feed_forward.experts.*.up.weight",
     .file = "bert.encoder.layers.*.mlp.experts.mlp.w1",
     .order = RowOrder::kExperts},
    Transposed({.model = "blocks.*.feed_forward.experts.*.down.weight",
                .file = "bert.encoder.layers.*.mlp.experts.mlp.w2",
                .order = RowOrder::kExperts}),
    {"blocks.*.feed_forward.out_bias", "bert.encoder.layers.*.mlp.experts.bias"},
    // Files of `transformers`.
    {"blocks.*.attention.q.weight", "bert.layers.*.self_attn.q_proj.weight"},
    {"blocks.*.attention.k.weight", "bert.layers.*.self_attn.k_proj.weight"},
    {"blocks.*.attention.v.weight", "bert.layers.*.self_attn.v_proj.weight"},
    {"blocks.*.attention.o.weight", "bert.layers.*.self_attn.o_proj.weight"},
    {"blocks.*.attention.norm.weight", "bert.layers.*.post_attention_layernorm.weight"},
    {"blocks.*.attention.norm.bias", "bert.layers.*.post_attention_layernorm.bias"},
    {"blocks.*.feed_forward.norm.weight", "bert.layers.*.post_mlp_layernorm.weight"},
    {"blocks.*.feed_forward.norm.bias", "bert.layers.*.post_mlp_layernorm.bias"},
    {"blocks.*.feed_forward.gate.weight", "bert.layers.*.mlp.gate_proj.weight"},
    {"blocks.*.feed_forward.up.weight", "bert.layers.*.mlp.up_proj.weight"},
    {"blocks.*.feed_forward.down.weight", "bert.layers.*.mlp.down_proj.weight"},
};

// Sets what all of these models have, and what the class says.
void SetEncoder(DecoderConfig& c) {
  ModelSpec& spec = c.spec();
  spec.kind = ModelKind::kEncoder;
  spec.norm.kind = NormKind::kLayer;
  spec.norm.placement = NormPlacement::kPost;
  spec.embedding_norm = true;
  const ModelClass model_class = ClassOf(c, ModelClass::kBase);
  if (model_class != ModelClass::kBase) {
    c.keys().Fault("architectures", "a model without a head: [\"NomicBertModel\"]",
                   "another class");
  }
  ReadHead(c, ModelClass::kBase, PoolingKind::kMean);
  c.Decide("vectors are the mean of all rows, unless other files say otherwise");
  c.IgnoreTensors(
      {"bert.embeddings.position_ids", "bert.pooler.dense.weight", "bert.pooler.dense.bias"});
  c.Prefix("bert.", {"bert.", "nomic_bert.", ""});
  c.Tensors(kNomicTensors);
}

FeedForwardSpec ReadExperts(DecoderConfig& c, const FeedForwardSpec& dense) {
  FeedForwardSpec experts = c.Experts({"num_experts", "n_inner", "moe_top_k"});
  experts.expert = dense.expert;
  experts.expert.form = ExpertForm::kPlain;
  experts.expert.activation = ActivationKind::kGelu;
  experts.expert.bias = false;
  experts.out_bias = true;
  c.Require("moe_normalize_expert_weights", false);
  c.Require("expert_choice_router", false);
  c.Require("num_shared_experts", 0);
  c.Require("ffn_div", 1);
  return experts;
}

// Files of the authors.
ConfigResult ReadNomic(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.size_keys = {"n_embd", "n_layer", "n_positions", "n_head"},
              .max_position_embeddings = 2048,
              .norm_eps_key = "layer_norm_epsilon",
              .rms_norm_eps = 1e-5,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {},
              .rope = false});
  ModelSpec& spec = c.spec();
  SetEncoder(c);
  spec.token_types = c.keys().Int("type_vocab_size", 2);
  spec.position.theta = c.keys().Real("rotary_emb_base", 10000.0);
  spec.position.fraction = c.keys().Real("rotary_emb_fraction", 1.0);
  if (c.keys().Bool("rotary_emb_interleaved", false)) {
    spec.position.pairing = RopePairing::kInterleaved;
  }
  // Beyond these the authors' code changes the frequencies with the length of the text.
  const int trained = c.keys().Int("max_trained_positions", spec.max_position_embeddings);
  spec.max_position_embeddings = std::min(spec.max_position_embeddings, std::max(trained, 1));
  for (const char* key : {"prenorm", "use_rms_norm", "parallel_block", "causal"}) {
    c.Require(key, false);
  }
  c.Require("rotary_emb_scale_base", nullptr);
  c.Ignore({"activation_function",
            "attn_pdrop",
            "fused_bias_fc",
            "fused_dropout_add_ln",
            "last_layer_subset",
            "mlp_checkpoint_lvl",
            "moe_every_n_layers",
            "moe_impl",
            "moe_jitter_eps",
            "moe_resid_pdrop",
            "pad_vocab_size_multiple",
            "parallel_block_tied_norm",
            "reorder_and_upcast_attn",
            "rotary_scaling_factor",
            "router_aux_loss_coef",
            "scale_attn_by_inverse_layer_idx",
            "scale_attn_weights",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
            "use_flash_attn",
            "use_xentropy"});
  AttentionSpec attention = c.Attention();
  attention.bias = attention.out_bias = c.keys().Bool("qkv_proj_bias", true);
  FeedForwardSpec dense = c.Dense("n_inner");
  const Json* const function = c.keys().Optional("activation_function");
  const bool gated = function != nullptr && (*function == "swiglu" || *function == "geglu");
  dense.expert.form = gated ? ExpertForm::kGated : ExpertForm::kPlain;
  if (gated) {
    if (*function == "geglu") dense.expert.activation = ActivationKind::kGelu;
  } else {
    dense.expert.activation = c.Activation("activation_function", "gelu");
  }
  dense.expert.bias = c.keys().Bool("mlp_fc1_bias", true);
  c.Require("mlp_fc2_bias", dense.expert.bias);
  const int every = c.keys().Int("moe_every_n_layers", 2);
  if (c.keys().Int("num_experts", 0) == 0) return c.Finish(attention, dense);
  const FeedForwardSpec experts = ReadExperts(c, dense);
  return c.Finish([&](int layer) {
    const bool routed = every > 0 && layer % every == (every > 1 ? 1 : 0);
    return LayerSpec{attention, routed ? experts : dense};
  });
}

// Files of `transformers`, which have no experts.
ConfigResult ReadNomicBert(const Json& json, const StoredNames& stored) {
  if (json.contains("n_embd")) return ReadNomic(json, stored);
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 2048,
              .norm_eps_key = "layer_norm_eps",
              .rms_norm_eps = 1e-12,
              .rope_theta = 1000.0,
              .tie_word_embeddings = true,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {}});
  SetEncoder(c);
  c.spec().token_types = c.keys().Int("type_vocab_size", 2);
  return c.Finish(c.Attention(), c.WithActivation(c.Dense()));
}

}  // namespace

constinit const Architecture kNomicBertArchitecture = {.model_type = "nomic_bert",
                                                       .read = ReadNomicBert};

}  // namespace moeserve
