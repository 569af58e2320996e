// T5 and mT5, and Switch Transformers, which are T5 with experts: biases of relative positions, no
// scale of the scores, RMS norms.

#include <algorithm>
#include <cmath>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/decoder_config.h"
#include "model_loaders/architectures/huggingface/model_head.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

// Relative positions have no limit. Texts of this length are accepted.
constexpr int kT5Positions = 4096;

constexpr TensorRule kT5Tables[] = {
    {"embed.weight", "shared.weight"},
    {"embed.weight", "encoder.embed_tokens.weight"},
    {"head.weight", "lm_head.weight"},
    {"encoder.relative_bias.weight",
     "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"},
    {"decoder.relative_bias.weight",
     "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"},
    {"encoder.norm.weight", "encoder.final_layer_norm.weight"},
    {"decoder.norm.weight", "decoder.final_layer_norm.weight"},
};

// clang-format off
#define MOESERVE_T5_ATTENTION(BLOCK, FILE, NORM)                                              \
    {BLOCK ".q.weight", FILE ".q.weight"}, {BLOCK ".k.weight", FILE ".k.weight"},             \
    {BLOCK ".v.weight", FILE ".v.weight"}, {BLOCK ".o.weight", FILE ".o.weight"},             \
    {BLOCK ".norm.weight", NORM ".layer_norm.weight"}
#define MOESERVE_T5_FEED_FORWARD(BLOCK, LAYER)                                                \
    {BLOCK ".norm.weight", LAYER ".layer_norm.weight"},                                       \
    {BLOCK ".up.weight", LAYER ".DenseReluDense.wi.weight"},                                  \
    {BLOCK ".gate.weight", LAYER ".DenseReluDense.wi_0.weight"},                              \
    {BLOCK ".up.weight", LAYER ".DenseReluDense.wi_1.weight"},                                \
    {BLOCK ".down.weight", LAYER ".DenseReluDense.wo.weight"},                                \
    {BLOCK ".up.weight", LAYER ".mlp.wi.weight"},                                             \
    {BLOCK ".down.weight", LAYER ".mlp.wo.weight"},                                           \
    {BLOCK ".router.weight", LAYER ".mlp.router.classifier.weight"},                          \
    {BLOCK ".experts.*.up.weight", LAYER ".mlp.experts.expert_*.wi.weight"},                  \
    {BLOCK ".experts.*.down.weight", LAYER ".mlp.experts.expert_*.wo.weight"}
// clang-format on

constexpr TensorRule kT5Blocks[] = {
    MOESERVE_T5_ATTENTION("encoder.blocks.*.attention", "encoder.block.*.layer.0.SelfAttention",
                          "encoder.block.*.layer.0"),
    MOESERVE_T5_ATTENTION("decoder.blocks.*.attention", "decoder.block.*.layer.0.SelfAttention",
                          "decoder.block.*.layer.0"),
    MOESERVE_T5_ATTENTION("decoder.blocks.*.cross_attention",
                          "decoder.block.*.layer.1.EncDecAttention", "decoder.block.*.layer.1"),
    MOESERVE_T5_FEED_FORWARD("encoder.blocks.*.feed_forward", "encoder.block.*.layer.1"),
    MOESERVE_T5_FEED_FORWARD("decoder.blocks.*.feed_forward", "decoder.block.*.layer.2"),
};
#undef MOESERVE_T5_ATTENTION
#undef MOESERVE_T5_FEED_FORWARD

constexpr KeyRule kT5Keys[] = {{"feed_forward.width", "d_ff"},
                               {"attention.head_dim", "d_kv"},
                               {"relative_bias.buckets", "relative_attention_num_buckets"},
                               {"relative_bias.max_distance", "relative_attention_max_distance"}};

// Returns the networks of a layer: of the form that "feed_forward_proj" names.
FeedForwardSpec ReadT5Dense(DecoderConfig& c, const char* fallback) {
  FeedForwardSpec dense = c.Dense("d_ff");
  ExpertSpec& expert = dense.expert;
  enum class Form { kRelu, kGatedGelu, kGatedSilu };
  const auto form = c.keys().Pick<Form>(
      "feed_forward_proj",
      {{"relu", Form::kRelu}, {"gated-gelu", Form::kGatedGelu}, {"gated-silu", Form::kGatedSilu}},
      std::string_view(fallback) == "relu" ? Form::kRelu : Form::kGatedGelu);
  expert.form = form == Form::kRelu ? ExpertForm::kPlain : ExpertForm::kGated;
  // "gated-gelu" means the approximation by tanh.
  expert.activation = form == Form::kRelu        ? ActivationKind::kRelu
                      : form == Form::kGatedGelu ? ActivationKind::kGeluTanh
                                                 : ActivationKind::kSilu;
  return dense;
}

// `experts`: the files are of Switch Transformers. `scales`: the head's input is scaled if nothing
// else is said.
ConfigResult ReadT5Like(const Json& json, const StoredNames& stored, const char* form, bool experts,
                        bool scales = true) {
  DecoderConfig c(json, stored);
  c.Skeleton({.size_keys = {"d_model", "num_layers", "n_positions", "num_heads"},
              .max_position_embeddings = 512,
              .norm_eps_key = "layer_norm_epsilon",
              .rms_norm_eps = 1e-6,
              .tie_word_embeddings = true,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {1},
              .rope = false});
  ModelSpec& spec = c.spec();
  spec.max_position_embeddings = std::max(spec.max_position_embeddings, kT5Positions);
  spec.position.kind = PositionKind::kNone;
  ModelSpec encoder;
  encoder.norm = spec.norm;
  encoder.position = spec.position;
  encoder.max_position_embeddings = spec.max_position_embeddings;
  RelativeBias& bias = spec.relative_bias.emplace();
  bias.buckets = c.keys().Int("relative_attention_num_buckets", 32);
  bias.max_distance = c.keys().Int("relative_attention_max_distance", 128);
  encoder.relative_bias = bias;
  encoder.relative_bias->bidirectional = true;
  spec.pad_token_id = c.keys().Int("pad_token_id", 0);
  spec.decoder_start_token_id = c.keys().Int("decoder_start_token_id", 0);
  // "tie_word_embeddings": false of old files means that the head's input is not scaled.
  const bool stated = spec.tie_word_embeddings;
  const bool scaled = c.keys().Bool("scale_decoder_outputs", stated && scales);
  spec.tie_word_embeddings = !c.Stores("lm_head.weight");
  if (scaled && spec.hidden_size > 0) {
    spec.output_scale = 1.0 / std::sqrt(static_cast<double>(spec.hidden_size));
  }
  c.Require("is_encoder_decoder", true);
  c.Ignore({"dense_act_fn", "is_gated_act", "dropout_rate", "use_cache", "num_hidden_layers"});
  if (ClassOf(c, ModelClass::kCausalLm) != ModelClass::kCausalLm) {
    c.keys().Fault("architectures", "a model that generates", "another class");
  }

  AttentionSpec attention;
  attention.num_heads = attention.num_kv_heads = c.keys().Int("num_heads");
  attention.head_dim = c.keys().Int("d_kv", 64);
  attention.scale = 1.0;
  const FeedForwardSpec dense = ReadT5Dense(c, form);
  const int encoder_layers = c.layers();
  FeedForwardSpec routed;
  if (experts) {
    routed = c.Experts({"num_experts", "d_ff", "num_selected_experts"});
    routed.expert = dense.expert;
    c.Decide("capacities of experts are not applied: no choice of a token is dropped");
    c.Require("router_bias", false);
    c.Require("add_router_probs", false);
    c.Ignore({"expert_capacity", "router_dtype", "router_ignore_padding_tokens",
              "router_jitter_noise", "encoder_sparse_step", "decoder_sparse_step",
              "num_sparse_encoder_layers", "num_sparse_decoder_layers"});
  }
  c.IgnoreTensors({"encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
                   "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"});
  c.Tensors({kT5Tables, kT5Blocks});
  c.Keys(kT5Keys);
  // The files show which layers have experts.
  const auto feed_forward = [&](const char* stack, int layer, int part) {
    const std::string router =
        Concat(stack, ".block.", layer, ".layer.", part, ".mlp.router.classifier.weight");
    return experts && c.Stores(router) ? routed : dense;
  };
  const int decoder_layers = c.keys().Int("num_decoder_layers", encoder_layers);
  c.SetLayers(decoder_layers);
  return c.FinishPair(
      std::move(encoder), encoder_layers,
      [&](int layer) {
        return std::vector<BlockSpec>{{.mixer = attention},
                                      {.mixer = feed_forward("encoder", layer, 1)}};
      },
      [&](int layer) {
        return std::vector<BlockSpec>{{.mixer = attention},
                                      {.mixer = CrossAttentionSpec{attention}},
                                      {.mixer = feed_forward("decoder", layer, 2)}};
      });
}

ConfigResult ReadT5(const Json& json, const StoredNames& stored) {
  return ReadT5Like(json, stored, "relu", false);
}
ConfigResult ReadMt5(const Json& json, const StoredNames& stored) {
  return ReadT5Like(json, stored, "gated-gelu", false, false);
}
ConfigResult ReadSwitch(const Json& json, const StoredNames& stored) {
  Json one = json;
  if (one.is_object() && !one.contains("num_selected_experts")) one["num_selected_experts"] = 1;
  return ReadT5Like(one, stored, "relu", true);
}

}  // namespace

constinit const Architecture kT5Architecture = {.model_type = "t5", .read = ReadT5};
constinit const Architecture kMt5Architecture = {.model_type = "mt5", .read = ReadMt5};
constinit const Architecture kSwitchArchitecture = {.model_type = "switch_transformers",
                                                    .read = ReadSwitch};

}  // namespace moeserve
