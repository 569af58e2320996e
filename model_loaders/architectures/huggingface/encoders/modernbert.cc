// ModernBERT: an encoder whose layers see the whole text or a window of both sides, with rotary
// positions of their own.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/model_head.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr double kGlobalTheta = 160000.0, kLocalTheta = 10000.0;

constexpr TensorRule ModernQkv(std::string_view model, std::string_view file, int part) {
  return {.model = model, .file = file, .part = part, .parts = 3, .order = RowOrder::kQkv};
}

constexpr TensorRule kModernTensors[] = {
    {"embed.weight", "model.embeddings.tok_embeddings.weight"},
    {"embed_norm.weight", "model.embeddings.norm.weight"},
    {"embed_norm.bias", "model.embeddings.norm.bias"},
    {"norm.weight", "model.final_norm.weight"},
    {"norm.bias", "model.final_norm.bias"},
    ModernQkv("blocks.*.attention.q.weight", "model.layers.*.attn.Wqkv.weight", 0),
    ModernQkv("blocks.*.attention.k.weight", "model.layers.*.attn.Wqkv.weight", 1),
    ModernQkv("blocks.*.attention.v.weight", "model.layers.*.attn.Wqkv.weight", 2),
    ModernQkv("blocks.*.attention.q.bias", "model.layers.*.attn.Wqkv.bias", 0),
    ModernQkv("blocks.*.attention.k.bias", "model.layers.*.attn.Wqkv.bias", 1),
    ModernQkv("blocks.*.attention.v.bias", "model.layers.*.attn.Wqkv.bias", 2),
    {"blocks.*.attention.o.weight", "model.layers.*.attn.Wo.weight"},
    {"blocks.*.attention.out_bias", "model.layers.*.attn.Wo.bias"},
    {"blocks.*.attention.norm.weight", "model.layers.*.attn_norm.weight"},
    {"blocks.*.attention.norm.bias", "model.layers.*.attn_norm.bias"},
    {"blocks.*.feed_forward.norm.weight", "model.layers.*.mlp_norm.weight"},
    {"blocks.*.feed_forward.norm.bias", "model.layers.*.mlp_norm.bias"},
    {"blocks.*.feed_forward.gate.weight", "model.layers.*.mlp.Wi.weight", 0, 2},
    {"blocks.*.feed_forward.up.weight", "model.layers.*.mlp.Wi.weight", 1, 2},
    {"blocks.*.feed_forward.gate.bias", "model.layers.*.mlp.Wi.bias", 0, 2},
    {"blocks.*.feed_forward.up.bias", "model.layers.*.mlp.Wi.bias", 1, 2},
    {"blocks.*.feed_forward.down.weight", "model.layers.*.mlp.Wo.weight"},
    {"blocks.*.feed_forward.down.bias", "model.layers.*.mlp.Wo.bias"},
    {"head.layer.weight", "head.dense.weight"},
    {"head.layer.bias", "head.dense.bias"},
    {"head.layer_norm.weight", "head.norm.weight"},
    {"head.layer_norm.bias", "head.norm.bias"},
    {"head.weight", "decoder.weight"},
    {"head.bias", "decoder.bias"},
    {"classifier.weight", "classifier.weight"},
    {"classifier.bias", "classifier.bias"},
};

constexpr KeyRule kModernKeys[] = {{"norm.eps", "norm_eps"},
                                   {"attention.window", "local_attention"}};

ConfigResult ReadModernBert(const Json& json, const StoredNames& stored) {
  Json rest = json;
  const auto parameters = json.find("rope_parameters");
  const bool of_layers = parameters != json.end() && DecoderConfig::IsRopeOfLayers(*parameters);
  if (of_layers) rest.erase("rope_parameters");
  DecoderConfig c(rest, stored);
  c.Skeleton({.max_position_embeddings = 8192,
              .norm_eps_key = "norm_eps",
              .rms_norm_eps = 1e-5,
              .rope_theta = kGlobalTheta,
              .tie_word_embeddings = true,
              .bos_token_id = 50281,
              .eos_token_ids = {50282}});
  ModelSpec& spec = c.spec();
  spec.kind = ModelKind::kEncoder;
  spec.norm.kind = NormKind::kLayer;
  spec.norm.bias = c.keys().Bool("norm_bias", false);
  spec.embedding_norm = true;
  PositionSpec local;
  spec.position.theta = c.keys().Real("global_rope_theta", kGlobalTheta);
  local.theta = c.keys().Real("local_rope_theta", kLocalTheta);
  if (of_layers) {
    if (const auto own = parameters->find("full_attention"); own != parameters->end()) {
      spec.position = c.RopeFrom(*own, "rope_parameters.full_attention", kGlobalTheta);
    }
    if (const auto own = parameters->find("sliding_attention"); own != parameters->end()) {
      local = c.RopeFrom(*own, "rope_parameters.sliding_attention", kLocalTheta);
    }
  }
  AttentionSpec attention = c.Attention();
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  const int window = c.keys().Int("local_attention", 128) / 2 + 1;
  const int pattern = c.keys().Int("global_attn_every_n_layers", 3);
  const std::vector<bool> sliding =
      c.SlidingLayers([&](int layer) { return pattern > 0 && layer % pattern != 0; });
  FeedForwardSpec dense = c.Dense();
  dense.expert.activation = c.Activation("hidden_activation", "gelu");
  dense.expert.bias = c.keys().Bool("mlp_bias", false);
  c.Ignore({"sparse_prediction", "sparse_pred_ignore_index", "deterministic_flash_attn",
            "initializer_cutoff_factor", "mlp_dropout", "reference_compile",
            "repad_logits_with_grad", "position_embedding_type", "layer_norm_eps"});

  const ModelClass model_class =
      ClassOf(c, c.Stores("head.dense.weight") ? ModelClass::kMaskedLm : ModelClass::kBase);
  const bool mean = c.keys()
                        .Pick<bool>("classifier_pooling", {{"cls", false}, {"mean", true}}, false)
                        .value_or(false);
  ReadHead(c, model_class, mean ? PoolingKind::kMean : PoolingKind::kFirst);
  if (model_class == ModelClass::kBase) {
    spec.pooling->kind = PoolingKind::kMean;
    c.Decide("no file says how rows are pooled: vectors are the mean of all rows");
    c.Ignore({"classifier_activation", "classifier_bias"});
  } else {
    spec.head.layer = HeadLayerSpec{.activation = c.Activation("classifier_activation", "gelu"),
                                    .bias = c.keys().Bool("classifier_bias", false),
                                    .norm = true};
  }
  if (model_class == ModelClass::kMaskedLm) {
    spec.head_bias = c.keys().Bool("decoder_bias", true);
  } else {
    c.Ignore({"decoder_bias"});
  }
  c.IgnoreTensors({"decoder.weight"});
  c.Prefix("model.", {"model.", ""});
  c.Tensors(kModernTensors);
  c.Keys(kModernKeys);
  return c.FinishBlocks([&](int layer) {
    AttentionSpec own = attention;
    if (sliding[static_cast<size_t>(layer)]) {
      own.window = window;
      own.position = local;
    }
    // The norm of the embeddings takes its place.
    const ResidualSpec first{.norm_placement = NormPlacement::kNone};
    return std::vector<BlockSpec>{{.mixer = own, .residual = layer == 0 ? first : ResidualSpec()},
                                  {.mixer = dense}};
  });
}

}  // namespace

constinit const Architecture kModernBertArchitecture = {.model_type = "modernbert",
                                                        .read = ReadModernBert};

}  // namespace moeserve
