// BERT and its relatives with other tokenizers: RoBERTa, XLM-R, CamemBERT.

#include <cmath>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/model_head.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kBertBody[] = {
    {"embed.weight", "bert.embeddings.word_embeddings.weight"},
    {"embed_position.weight", "bert.embeddings.position_embeddings.weight"},
    {"embed_type.weight", "bert.embeddings.token_type_embeddings.weight"},
    {"embed_norm.weight", "bert.embeddings.LayerNorm.weight"},
    {"embed_norm.bias", "bert.embeddings.LayerNorm.bias"},
    {"embed_norm.weight", "bert.embeddings.LayerNorm.gamma"},
    {"embed_norm.bias", "bert.embeddings.LayerNorm.beta"},
    {"blocks.*.attention.q.weight", "bert.encoder.layer.*.attention.self.query.weight"},
    {"blocks.*.attention.q.bias", "bert.encoder.layer.*.attention.self.query.bias"},
    {"blocks.*.attention.k.weight", "bert.encoder.layer.*.attention.self.key.weight"},
    {"blocks.*.attention.k.bias", "bert.encoder.layer.*.attention.self.key.bias"},
    {"blocks.*.attention.v.weight", "bert.encoder.layer.*.attention.self.value.weight"},
    {"blocks.*.attention.v.bias", "bert.encoder.layer.*.attention.self.value.bias"},
    {"blocks.*.attention.o.weight", "bert.encoder.layer.*.attention.output.dense.weight"},
    {"blocks.*.attention.out_bias", "bert.encoder.layer.*.attention.output.dense.bias"},
    {"blocks.*.attention.norm.weight", "bert.encoder.layer.*.attention.output.LayerNorm.weight"},
    {"blocks.*.attention.norm.bias", "bert.encoder.layer.*.attention.output.LayerNorm.bias"},
    {"blocks.*.attention.norm.weight", "bert.encoder.layer.*.attention.output.LayerNorm.gamma"},
    {"blocks.*.attention.norm.bias", "bert.encoder.layer.*.attention.output.LayerNorm.beta"},
    {"blocks.*.feed_forward.up.weight", "bert.encoder.layer.*.intermediate.dense.weight"},
    {"blocks.*.feed_forward.up.bias", "bert.encoder.layer.*.intermediate.dense.bias"},
    {"blocks.*.feed_forward.down.weight", "bert.encoder.layer.*.output.dense.weight"},
    {"blocks.*.feed_forward.down.bias", "bert.encoder.layer.*.output.dense.bias"},
    {"blocks.*.feed_forward.norm.weight", "bert.encoder.layer.*.output.LayerNorm.weight"},
    {"blocks.*.feed_forward.norm.bias", "bert.encoder.layer.*.output.LayerNorm.bias"},
    {"blocks.*.feed_forward.norm.weight", "bert.encoder.layer.*.output.LayerNorm.gamma"},
    {"blocks.*.feed_forward.norm.bias", "bert.encoder.layer.*.output.LayerNorm.beta"},
};

constexpr TensorRule kBertMaskedLm[] = {
    {"head.layer.weight", "cls.predictions.transform.dense.weight"},
    {"head.layer.bias", "cls.predictions.transform.dense.bias"},
    {"head.layer_norm.weight", "cls.predictions.transform.LayerNorm.weight"},
    {"head.layer_norm.bias", "cls.predictions.transform.LayerNorm.bias"},
    {"head.layer_norm.weight", "cls.predictions.transform.LayerNorm.gamma"},
    {"head.layer_norm.bias", "cls.predictions.transform.LayerNorm.beta"},
    {"head.weight", "cls.predictions.decoder.weight"},
    {"head.bias", "cls.predictions.bias"},
    {"head.bias", "cls.predictions.decoder.bias"},
    {"head.layer.weight", "lm_head.dense.weight"},
    {"head.layer.bias", "lm_head.dense.bias"},
    {"head.layer_norm.weight", "lm_head.layer_norm.weight"},
    {"head.layer_norm.bias", "lm_head.layer_norm.bias"},
    {"head.weight", "lm_head.decoder.weight"},
    {"head.bias", "lm_head.bias"},
    {"head.bias", "lm_head.decoder.bias"},
};

constexpr TensorRule kBertClassifier[] = {
    {"head.layer.weight", "bert.pooler.dense.weight"},
    {"head.layer.bias", "bert.pooler.dense.bias"},
    {"head.layer.weight", "classifier.dense.weight"},
    {"head.layer.bias", "classifier.dense.bias"},
    {"classifier.weight", "classifier.out_proj.weight"},
    {"classifier.bias", "classifier.out_proj.bias"},
    {"classifier.weight", "classifier.weight"},
    {"classifier.bias", "classifier.bias"},
    {"classifier.weight", "qa_outputs.weight"},
    {"classifier.bias", "qa_outputs.bias"},
};

constexpr KeyRule kBertKeys[] = {
    {"norm.eps", "layer_norm_eps"},
    {"token_types", "type_vocab_size"},
    {"feed_forward.width", "intermediate_size"},
    {"head.labels", "id2label"},
};

// Returns the class if "architectures" is absent.
ModelClass ClassByTensors(const DecoderConfig& c) {
  const bool masked =
      c.Stores("cls.predictions.transform.dense.weight") || c.Stores("lm_head.dense.weight");
  return masked ? ModelClass::kMaskedLm : ModelClass::kBase;
}

// `offset` tells whether the rows of padding precede those of positions.
ConfigResult ReadBertLike(const Json& json, const StoredNames& stored, bool offset) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 512,
              .norm_eps_key = "layer_norm_eps",
              .rms_norm_eps = 1e-12,
              .tie_word_embeddings = true,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {},
              .rope = false});
  ModelSpec& spec = c.spec();
  spec.kind = ModelKind::kEncoder;
  spec.norm.kind = NormKind::kLayer;
  spec.norm.placement = NormPlacement::kPost;
  spec.embedding_norm = true;
  spec.token_types = c.keys().Int("type_vocab_size", 2);
  spec.position.kind = PositionKind::kLearned;
  spec.pad_token_id = c.keys().Int("pad_token_id", offset ? 1 : 0);
  if (offset) {
    spec.position.count_padding = false;
    c.SkipPositions(*spec.pad_token_id + 1);
  }
  c.Require("position_embedding_type", "absolute");
  c.Require("is_decoder", false);
  c.Require("add_cross_attention", false);

  const ModelClass model_class = ClassOf(c, ClassByTensors(c));
  ReadHead(c, model_class, PoolingKind::kFirst);
  const bool masked = model_class == ModelClass::kMaskedLm;
  AttentionSpec attention = c.Attention();
  attention.bias = attention.out_bias = true;
  FeedForwardSpec dense = c.Dense();
  dense.expert.form = ExpertForm::kPlain;
  dense.expert.bias = true;
  dense.expert.activation = c.Activation("hidden_act", "gelu");
  if (masked) {
    spec.head_bias = true;
    spec.head.layer = HeadLayerSpec{
        .activation = offset ? ActivationKind::kGelu : dense.expert.activation, .norm = true};
  } else if (model_class == ModelClass::kSequenceClassification) {
    spec.head.layer = HeadLayerSpec{.activation = ActivationKind::kTanh};
  } else if (model_class == ModelClass::kBase) {
    // sentence-transformers says in other files which rows it pools.
    spec.pooling->kind = PoolingKind::kMean;
    c.Decide("no file says how rows are pooled: vectors are the mean of all rows");
  }
  c.IgnoreTensors(
      {"bert.embeddings.position_ids", "bert.pooler.dense.weight", "bert.pooler.dense.bias",
       "cls.seq_relationship.weight", "cls.seq_relationship.bias", "cls.predictions.decoder.weight",
       "cls.predictions.decoder.bias", "lm_head.decoder.weight", "lm_head.decoder.bias"});
  c.Prefix("bert.", {"bert.", "roberta.", "model.", ""});
  c.Tensors(kBertBody);
  c.Tensors(masked ? std::span<const TensorRule>(kBertMaskedLm) : kBertClassifier);
  c.Keys(kBertKeys);
  return c.Finish(attention, dense);
}

ConfigResult ReadBert(const Json& json, const StoredNames& stored) {
  return ReadBertLike(json, stored, false);
}
ConfigResult ReadRoberta(const Json& json, const StoredNames& stored) {
  return ReadBertLike(json, stored, true);
}

}  // namespace

constinit const Architecture kBertArchitecture = {.model_type = "bert", .read = ReadBert};
constinit const Architecture kRobertaArchitecture = {.model_type = "roberta", .read = ReadRoberta};
constinit const Architecture kXlmRobertaArchitecture = {.model_type = "xlm-roberta",
                                                        .read = ReadRoberta};
constinit const Architecture kCamembertArchitecture = {.model_type = "camembert",
                                                       .read = ReadRoberta};

}  // namespace moeserve
