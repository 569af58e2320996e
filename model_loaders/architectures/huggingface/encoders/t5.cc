// T5, mT5 and UMT5, and Switch Transformers, which are T5 with experts: biases of relative
// positions, no scale of the scores, RMS norms. Folders may have the encoder alone.

#include <algorithm>
#include <cmath>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/model_head.h"

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
#define MOESERVE_T5_STACK(STACK, FILE)                                                         \
    {STACK "norm.weight", FILE ".final_layer_norm.weight"},                                    \
    {STACK "relative_bias.weight",                                                             \
     FILE ".block.0.layer.0.SelfAttention.relative_attention_bias.weight"},                    \
    {STACK "blocks.*.relative_bias.weight",                                                    \
     FILE ".block.*.layer.0.SelfAttention.relative_attention_bias.weight"},                    \
    MOESERVE_T5_ATTENTION(STACK "blocks.*.attention", FILE ".block.*.layer.0.SelfAttention",   \
                          FILE ".block.*.layer.0")
// clang-format on

constexpr TensorRule kT5Blocks[] = {
    MOESERVE_T5_STACK("encoder.", "encoder"),
    MOESERVE_T5_STACK("decoder.", "decoder"),
    MOESERVE_T5_ATTENTION("decoder.blocks.*.cross_attention",
                          "decoder.block.*.layer.1.EncDecAttention", "decoder.block.*.layer.1"),
    MOESERVE_T5_FEED_FORWARD("encoder.blocks.*.feed_forward", "encoder.block.*.layer.1"),
    MOESERVE_T5_FEED_FORWARD("decoder.blocks.*.feed_forward", "decoder.block.*.layer.2"),
};
constexpr TensorRule kT5Encoder[] = {
    MOESERVE_T5_STACK("", "encoder"),
    MOESERVE_T5_FEED_FORWARD("blocks.*.feed_forward", "encoder.block.*.layer.1"),
};
#undef MOESERVE_T5_ATTENTION
#undef MOESERVE_T5_FEED_FORWARD
#undef MOESERVE_T5_STACK

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

// In what these families differ.
struct T5Family {
  const char* form = "relu";  // "feed_forward_proj" if the file has none
  bool experts = false;
  bool scales = true;      // the head's input is scaled if nothing else is said
  bool per_layer = false;  // every layer has biases of its own
};

// Reads what both stacks have in common.
void ReadT5Stacks(DecoderConfig& c, const T5Family& family) {
  ModelSpec& spec = c.spec();
  spec.max_position_embeddings = std::max(spec.max_position_embeddings, kT5Positions);
  spec.position.kind = PositionKind::kNone;
  RelativeBias& bias = spec.relative_bias.emplace();
  bias.buckets = c.keys().Int("relative_attention_num_buckets", 32);
  bias.max_distance = c.keys().Int("relative_attention_max_distance", 128);
  bias.per_layer = family.per_layer;
  spec.pad_token_id = c.keys().Int("pad_token_id", 0);
  c.Ignore({"dense_act_fn", "is_gated_act", "dropout_rate", "use_cache", "num_hidden_layers"});
}

// Reads the head of the decoder and which token it starts with.
void ReadT5Decoder(DecoderConfig& c, const T5Family& family) {
  ModelSpec& spec = c.spec();
  spec.decoder_start_token_id = c.keys().Int("decoder_start_token_id", 0);
  // "tie_word_embeddings": false of old files means that the head's input is not scaled.
  const bool stated = spec.tie_word_embeddings;
  const bool scaled = c.keys().Bool("scale_decoder_outputs", stated && family.scales);
  spec.tie_word_embeddings = !c.Stores("lm_head.weight");
  if (scaled && spec.hidden_size > 0) {
    spec.output_scale = 1.0 / std::sqrt(static_cast<double>(spec.hidden_size));
  }
  c.Require("is_encoder_decoder", true);
}

FeedForwardSpec ReadSwitchExperts(DecoderConfig& c, const FeedForwardSpec& dense) {
  FeedForwardSpec routed = c.Experts({"num_experts", "d_ff", "num_selected_experts"});
  routed.expert = dense.expert;
  c.Decide("capacities of experts are not applied: no choice of a token is dropped");
  c.Require("router_bias", false);
  c.Require("add_router_probs", false);
  c.Ignore({"expert_capacity", "router_dtype", "router_ignore_padding_tokens",
            "router_jitter_noise", "encoder_sparse_step", "decoder_sparse_step",
            "num_sparse_encoder_layers", "num_sparse_decoder_layers"});
  return routed;
}

ConfigResult ReadT5Like(const Json& json, const StoredNames& stored, const T5Family& family) {
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
  ReadT5Stacks(c, family);
  // Vectors are made by the encoder, with which the files may also have a decoder.
  const bool encoder_only =
      c.Stores("encoder.final_layer_norm.weight") && !c.Stores("decoder.final_layer_norm.weight");
  const ModelClass model_class =
      ClassOf(c, encoder_only ? ModelClass::kBase : ModelClass::kCausalLm);
  const bool alone = model_class == ModelClass::kBase && encoder_only;
  if (!alone && model_class != ModelClass::kCausalLm) {
    c.keys().Fault("architectures", "a model that generates, or an encoder without a decoder",
                   "another class");
  }
  AttentionSpec attention;
  attention.num_heads = attention.num_kv_heads = c.keys().Int("num_heads");
  attention.head_dim = c.keys().Int("d_kv", 64);
  attention.scale = 1.0;
  const FeedForwardSpec dense = ReadT5Dense(c, family.form);
  const FeedForwardSpec routed = family.experts ? ReadSwitchExperts(c, dense) : FeedForwardSpec();
  c.IgnoreTensors({"encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
                   "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"});
  c.Tensors(kT5Tables);
  c.Keys(kT5Keys);
  // The files show which layers have experts.
  const auto feed_forward = [&](const char* stack, int layer, int part) {
    const std::string router =
        Concat(stack, ".block.", layer, ".layer.", part, ".mlp.router.classifier.weight");
    return family.experts && c.Stores(router) ? routed : dense;
  };
  const auto encoder_layer = [&](int layer) {
    return std::vector<BlockSpec>{{.mixer = attention},
                                  {.mixer = feed_forward("encoder", layer, 1)}};
  };
  if (alone) {
    c.Ignore({"decoder_start_token_id", "num_decoder_layers", "scale_decoder_outputs",
              "is_encoder_decoder"});
    spec.kind = ModelKind::kEncoder;
    spec.relative_bias->bidirectional = true;
    ReadHead(c, ModelClass::kBase, PoolingKind::kMean);
    c.Decide("vectors are the mean of all rows, unless other files say otherwise");
    c.Tensors(kT5Encoder);
    return c.FinishBlocks(encoder_layer);
  }
  ReadT5Decoder(c, family);
  ModelSpec encoder;
  encoder.norm = spec.norm;
  encoder.position = spec.position;
  encoder.max_position_embeddings = spec.max_position_embeddings;
  encoder.relative_bias = spec.relative_bias;
  encoder.relative_bias->bidirectional = true;
  c.Tensors(kT5Blocks);
  const int encoder_layers = c.layers();
  c.SetLayers(c.keys().Int("num_decoder_layers", encoder_layers));
  return c.FinishPair(std::move(encoder), encoder_layers, encoder_layer, [&](int layer) {
    return std::vector<BlockSpec>{{.mixer = attention},
                                  {.mixer = CrossAttentionSpec{attention}},
                                  {.mixer = feed_forward("decoder", layer, 2)}};
  });
}

ConfigResult ReadT5(const Json& json, const StoredNames& stored) {
  return ReadT5Like(json, stored, {});
}
ConfigResult ReadMt5(const Json& json, const StoredNames& stored) {
  return ReadT5Like(json, stored, {.form = "gated-gelu", .scales = false});
}
ConfigResult ReadUmt5(const Json& json, const StoredNames& stored) {
  return ReadT5Like(json, stored, {.form = "gated-gelu", .per_layer = true});
}
ConfigResult ReadSwitch(const Json& json, const StoredNames& stored) {
  Json one = json;
  if (one.is_object() && !one.contains("num_selected_experts")) one["num_selected_experts"] = 1;
  return ReadT5Like(one, stored, {.experts = true});
}

}  // namespace

constinit const Architecture kT5Architecture = {.model_type = "t5", .read = ReadT5};
constinit const Architecture kMt5Architecture = {.model_type = "mt5", .read = ReadMt5};
constinit const Architecture kUmt5Architecture = {.model_type = "umt5", .read = ReadUmt5};
constinit const Architecture kSwitchArchitecture = {.model_type = "switch_transformers",
                                                    .read = ReadSwitch};

}  // namespace moeserve
