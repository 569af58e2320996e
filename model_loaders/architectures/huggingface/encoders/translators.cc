// Encoder-decoders like BART: M2M100 (NLLB), NLLB-MoE, mBART, BART, Marian and Pegasus.

#include <cmath>
#include <string_view>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/model_head.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kTranslatorTables[] = {
    {"embed.weight", "model.shared.weight"},
    {"head.weight", "lm_head.weight"},
    {.model = "head.bias", .file = "final_logits_bias", .slices = 1},
    {"encoder.embed_position.weight", "model.encoder.embed_positions.weight"},
    {"decoder.embed_position.weight", "model.decoder.embed_positions.weight"},
    {"encoder.embed_norm.weight", "model.encoder.layernorm_embedding.weight"},
    {"encoder.embed_norm.bias", "model.encoder.layernorm_embedding.bias"},
    {"decoder.embed_norm.weight", "model.decoder.layernorm_embedding.weight"},
    {"decoder.embed_norm.bias", "model.decoder.layernorm_embedding.bias"},
    {"encoder.norm.weight", "model.encoder.layer_norm.weight"},
    {"encoder.norm.bias", "model.encoder.layer_norm.bias"},
    {"decoder.norm.weight", "model.decoder.layer_norm.weight"},
    {"decoder.norm.bias", "model.decoder.layer_norm.bias"},
};

// clang-format off
#define MOESERVE_ATTENTION_TENSORS(BLOCK, FILE)                    \
    {BLOCK ".q.weight", FILE ".q_proj.weight"},                    \
    {BLOCK ".q.bias", FILE ".q_proj.bias"},                        \
    {BLOCK ".k.weight", FILE ".k_proj.weight"},                    \
    {BLOCK ".k.bias", FILE ".k_proj.bias"},                        \
    {BLOCK ".v.weight", FILE ".v_proj.weight"},                    \
    {BLOCK ".v.bias", FILE ".v_proj.bias"},                        \
    {BLOCK ".o.weight", FILE ".out_proj.weight"},                  \
    {BLOCK ".out_bias", FILE ".out_proj.bias"},                    \
    {BLOCK ".norm.weight", FILE "_layer_norm.weight"},             \
    {BLOCK ".norm.bias", FILE "_layer_norm.bias"}
#define MOESERVE_FEED_FORWARD_TENSORS(BLOCK, LAYER)                \
    {BLOCK ".up.weight", LAYER ".fc1.weight"},                     \
    {BLOCK ".up.bias", LAYER ".fc1.bias"},                         \
    {BLOCK ".down.weight", LAYER ".fc2.weight"},                   \
    {BLOCK ".down.bias", LAYER ".fc2.bias"},                       \
    {BLOCK ".norm.weight", LAYER ".final_layer_norm.weight"},      \
    {BLOCK ".norm.bias", LAYER ".final_layer_norm.bias"},          \
    {BLOCK ".up.weight", LAYER ".ffn.fc1.weight"},                 \
    {BLOCK ".up.bias", LAYER ".ffn.fc1.bias"},                     \
    {BLOCK ".down.weight", LAYER ".ffn.fc2.weight"},               \
    {BLOCK ".down.bias", LAYER ".ffn.fc2.bias"},                   \
    {BLOCK ".norm.weight", LAYER ".ff_layer_norm.weight"},         \
    {BLOCK ".norm.bias", LAYER ".ff_layer_norm.bias"},             \
    {BLOCK ".router.weight", LAYER ".ffn.router.classifier.weight"}, \
    {BLOCK ".experts.*.up.weight", LAYER ".ffn.experts.expert_*.fc1.weight"},   \
    {BLOCK ".experts.*.up.bias", LAYER ".ffn.experts.expert_*.fc1.bias"},       \
    {BLOCK ".experts.*.down.weight", LAYER ".ffn.experts.expert_*.fc2.weight"}, \
    {BLOCK ".experts.*.down.bias", LAYER ".ffn.experts.expert_*.fc2.bias"}
// clang-format on

constexpr TensorRule kTranslatorBlocks[] = {
    MOESERVE_ATTENTION_TENSORS("encoder.blocks.*.attention", "model.encoder.layers.*.self_attn"),
    MOESERVE_ATTENTION_TENSORS("decoder.blocks.*.attention", "model.decoder.layers.*.self_attn"),
    MOESERVE_ATTENTION_TENSORS("decoder.blocks.*.cross_attention",
                               "model.decoder.layers.*.encoder_attn"),
    MOESERVE_ATTENTION_TENSORS("decoder.blocks.*.cross_attention",
                               "model.decoder.layers.*.cross_attention"),
    MOESERVE_FEED_FORWARD_TENSORS("encoder.blocks.*.feed_forward", "model.encoder.layers.*"),
    MOESERVE_FEED_FORWARD_TENSORS("decoder.blocks.*.feed_forward", "model.decoder.layers.*"),
};
#undef MOESERVE_ATTENTION_TENSORS
#undef MOESERVE_FEED_FORWARD_TENSORS

// In what these families differ.
struct Translator {
  bool pre_norm = false;  // and a final norm of each stack
  PositionKind positions = PositionKind::kLearned;
  SinusoidSpacing spacing = SinusoidSpacing::kFairseq;
  int first = 0;       // rows of the table, or positions, in front of the first one
  bool scale = false;  // the default of "scale_embedding"
  bool embedding_norm = false;
  bool logit_bias = false;
  bool count_padding = true;
  std::string_view activation = "gelu";
  int start = 2;  // the default of "decoder_start_token_id"
  int pad = 1, eos = 2;
  std::optional<int> bos = 0;
  bool experts = false;
};

// Sets what both stacks have in common.
void SetStack(DecoderConfig& c, const Translator& family, ModelSpec& spec, bool scale) {
  spec.norm.kind = NormKind::kLayer;
  spec.norm.eps = 1e-5f;
  spec.norm.placement = family.pre_norm ? NormPlacement::kPre : NormPlacement::kPost;
  spec.position = {};
  spec.position.kind = family.positions;
  spec.position.spacing = family.spacing;
  spec.position.count_padding = family.count_padding;
  if (family.positions == PositionKind::kSinusoidal) spec.position.first = family.first;
  spec.embedding_norm = family.embedding_norm;
  if (scale && c.spec().hidden_size > 0) {
    spec.embedding_scale = std::sqrt(static_cast<double>(c.spec().hidden_size));
  }
}

AttentionSpec ReadHeads(DecoderConfig& c, std::string_view key) {
  AttentionSpec attention;
  attention.num_heads = attention.num_kv_heads = c.keys().Int(key);
  attention.head_dim = attention.num_heads > 0 ? c.spec().hidden_size / attention.num_heads : 0;
  if (attention.head_dim > 0) attention.scale = 1.0 / std::sqrt(attention.head_dim);
  attention.bias = attention.out_bias = true;
  return attention;
}

// Returns the experts of NLLB-MoE, whose networks are `dense`.
FeedForwardSpec ReadNllbExperts(DecoderConfig& c, const FeedForwardSpec& dense, int experts) {
  FeedForwardSpec routed;
  routed.expert = dense.expert;
  RoutedLayerSpec& routing = routed.routing.emplace();
  routing.num_experts = experts;
  routing.select.k = 2;
  routing.renormalize = true;
  routing.scale = 1.0 - c.keys().Real("moe_token_dropout", 0.2);
  const absl::Status lengths =
      CheckListLengths({"decoder_layers", c.layers()}, {"num_experts", experts});
  if (lengths.ok() && c.ok()) {
    routing.widths.assign(static_cast<size_t>(experts), dense.width);
  } else if (!lengths.ok()) {
    c.keys().Fault("num_experts", "a smaller number", std::to_string(experts));
  }
  return routed;
}

ConfigResult ReadTranslator(const Json& json, const StoredNames& stored, const Translator& family) {
  DecoderConfig c(json, stored);
  c.Skeleton({.size_keys = {"d_model", "decoder_layers", "max_position_embeddings",
                            "decoder_attention_heads"},
              .max_position_embeddings = 1024,
              .tie_word_embeddings = true,
              .bos_token_id = family.bos,
              .eos_token_ids = {family.eos},
              .rope = false});
  ModelSpec& spec = c.spec();
  ModelSpec encoder;
  const bool scale = c.keys().Bool("scale_embedding", family.scale);
  SetStack(c, family, spec, scale);
  SetStack(c, family, encoder, scale);
  if (family.positions == PositionKind::kLearned) c.StoredPositionsFrom(family.first);
  encoder.max_position_embeddings = spec.max_position_embeddings;
  spec.head_bias = family.logit_bias && c.Stores("final_logits_bias");
  spec.pad_token_id = c.keys().Int("pad_token_id", family.pad);
  spec.decoder_start_token_id = c.keys().Int("decoder_start_token_id", family.start);
  c.Require("is_encoder_decoder", true);
  c.Require("share_encoder_decoder_embeddings", true);
  c.Require("static_position_embeddings", true);
  c.Require("normalize_before", family.pre_norm);
  c.Require("normalize_embedding", family.embedding_norm);
  c.Require("add_final_layer_norm", family.pre_norm);
  c.Require("add_bias_logits", false);
  c.Require("extra_pos_embeddings", family.positions == PositionKind::kLearned ? 2 : 1);
  c.Ignore({"num_hidden_layers", "encoder_layerdrop", "decoder_layerdrop", "forced_bos_token_id",
            "forced_eos_token_id", "force_bos_token_to_be_generated", "decoder_vocab_size",
            "classif_dropout", "tie_encoder_decoder"});
  const ModelClass model_class = ClassOf(c, ModelClass::kCausalLm);
  if (model_class != ModelClass::kCausalLm) {
    c.keys().Fault("architectures", "a model that generates", "another class");
  }

  const AttentionSpec own = ReadHeads(c, "decoder_attention_heads");
  const AttentionSpec of_encoder = ReadHeads(c, "encoder_attention_heads");
  const int encoder_layers = c.keys().Int("encoder_layers");
  const auto dense_of = [&](const char* key) {
    FeedForwardSpec dense = c.Dense(key);
    dense.expert.form = ExpertForm::kPlain;
    dense.expert.bias = true;
    dense.expert.activation = c.Activation("activation_function", family.activation);
    return dense;
  };
  const FeedForwardSpec dense = dense_of("decoder_ffn_dim");
  const FeedForwardSpec encoder_dense = dense_of("encoder_ffn_dim");
  int encoder_step = 0, decoder_step = 0;
  FeedForwardSpec experts, encoder_experts;
  if (family.experts) {
    const int count = c.keys().Int("num_experts", 128);
    encoder_step = c.keys().Int("encoder_sparse_step", 4);
    decoder_step = c.keys().Int("decoder_sparse_step", 4);
    c.Require("router_bias", false);
    c.Require("second_expert_policy", "all");
    c.Require("normalize_router_prob_before_dropping", false);
    c.Ignore({"router_dtype", "router_ignore_padding_tokens", "batch_prioritized_routing"});
    c.Ignore({"expert_capacity", "moe_eval_capacity_token_fraction"});
    c.Decide("capacities of experts are not applied: no choice of a token is dropped");
    experts = ReadNllbExperts(c, dense, count);
    encoder_experts = ReadNllbExperts(c, encoder_dense, count);
  }
  const auto routed = [](int layer, int step) { return step > 0 && (layer + 1) % step == 0; };
  c.IgnoreTensors(
      {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"});
  if (family.positions == PositionKind::kSinusoidal) {
    c.IgnoreTensors({"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight",
                     "model.encoder.embed_positions.weights",
                     "model.decoder.embed_positions.weights"});
  }
  if (!spec.head_bias) c.IgnoreTensors({"final_logits_bias"});
  c.Tensors({kTranslatorTables, kTranslatorBlocks});
  return c.FinishPair(
      std::move(encoder), encoder_layers,
      [&](int layer) {
        return std::vector<BlockSpec>{
            {.mixer = of_encoder},
            {.mixer = routed(layer, encoder_step) ? encoder_experts : encoder_dense}};
      },
      [&](int layer) {
        return std::vector<BlockSpec>{{.mixer = own},
                                      {.mixer = CrossAttentionSpec{own}},
                                      {.mixer = routed(layer, decoder_step) ? experts : dense}};
      });
}

constexpr Translator kM2m = {.pre_norm = true,
                             .positions = PositionKind::kSinusoidal,
                             .first = 2,
                             .scale = true,
                             .count_padding = false,
                             .activation = "relu"};

ConfigResult ReadM2m100(const Json& json, const StoredNames& stored) {
  return ReadTranslator(json, stored, kM2m);
}
ConfigResult ReadNllbMoe(const Json& json, const StoredNames& stored) {
  Translator family = kM2m;
  family.experts = true;
  return ReadTranslator(json, stored, family);
}
ConfigResult ReadMbart(const Json& json, const StoredNames& stored) {
  return ReadTranslator(
      json, stored,
      {.pre_norm = true, .first = 2, .embedding_norm = true, .logit_bias = true, .start = 2});
}
ConfigResult ReadBart(const Json& json, const StoredNames& stored) {
  return ReadTranslator(json, stored, {.first = 2, .embedding_norm = true, .logit_bias = true});
}
ConfigResult ReadMarian(const Json& json, const StoredNames& stored) {
  return ReadTranslator(json, stored,
                        {.positions = PositionKind::kSinusoidal,
                         .spacing = SinusoidSpacing::kHalf,
                         .logit_bias = true,
                         .start = 58100,
                         .pad = 58100,
                         .eos = 0,
                         .bos = std::nullopt});
}
ConfigResult ReadPegasus(const Json& json, const StoredNames& stored) {
  return ReadTranslator(json, stored,
                        {.pre_norm = true,
                         .positions = PositionKind::kSinusoidal,
                         .spacing = SinusoidSpacing::kHalf,
                         .logit_bias = true,
                         .start = 0,
                         .pad = 0,
                         .eos = 1,
                         .bos = std::nullopt});
}

}  // namespace

constinit const Architecture kM2m100Architecture = {.model_type = "m2m_100", .read = ReadM2m100};
constinit const Architecture kNllbMoeArchitecture = {.model_type = "nllb-moe", .read = ReadNllbMoe};
constinit const Architecture kMbartArchitecture = {.model_type = "mbart", .read = ReadMbart};
constinit const Architecture kBartArchitecture = {.model_type = "bart", .read = ReadBart};
constinit const Architecture kMarianArchitecture = {.model_type = "marian", .read = ReadMarian};
constinit const Architecture kPegasusArchitecture = {.model_type = "pegasus", .read = ReadPegasus};

}  // namespace moeserve
