// openai/privacy-filter: blocks like those of gpt-oss that see both sides, and labels of tokens.

#include <string>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/model_head.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

// The gate is the first half of the joined tensor, unlike in gpt-oss.
constexpr TensorRule kPrivacyTensors[] = {
    {"embed.weight", "model.embed_tokens.weight"},
    {"norm.weight", "model.norm.weight"},
    {"blocks.*.attention.sinks", "model.layers.*.self_attn.sinks"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.mlp.router.weight"},
    {"blocks.*.feed_forward.router.bias", "model.layers.*.mlp.router.bias"},
    Transposed({"blocks.*.feed_forward.experts.*.gate.weight",
                "model.layers.*.mlp.experts.gate_up_proj", 0, 2}),
    Transposed({"blocks.*.feed_forward.experts.*.up.weight",
                "model.layers.*.mlp.experts.gate_up_proj", 1, 2}),
    Transposed(
        {"blocks.*.feed_forward.experts.*.down.weight", "model.layers.*.mlp.experts.down_proj"}),
    {"blocks.*.feed_forward.experts.*.gate.bias", "model.layers.*.mlp.experts.gate_up_proj_bias", 0,
     2},
    {"blocks.*.feed_forward.experts.*.up.bias", "model.layers.*.mlp.experts.gate_up_proj_bias", 1,
     2},
    {"blocks.*.feed_forward.experts.*.down.bias", "model.layers.*.mlp.experts.down_proj_bias"},
    {"classifier.weight", "score.weight"},
    {"classifier.bias", "score.bias"},
};

std::vector<std::string> DefaultLabels() {
  std::vector<std::string> labels = {"O"};
  for (const char* name : {"account_number", "private_address", "private_date", "private_email",
                           "private_person", "private_phone", "private_url", "secret"}) {
    for (const char* position : {"B-", "I-", "E-", "S-"}) {
      labels.push_back(std::string(position) + name);
    }
  }
  return labels;
}

ConfigResult ReadPrivacyFilter(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 131072,
              .rms_norm_eps = 1e-5,
              .rope_theta = 150000.0,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {199999},
              .num_key_value_heads = 2});
  ModelSpec& spec = c.spec();
  spec.kind = ModelKind::kEncoder;
  if (!json.contains("rope_parameters") && !json.contains("rope_scaling")) {
    spec.position.scaling.kind = RopeScalingKind::kYarn;
    spec.position.scaling.factor = 32.0;
    spec.position.scaling.original_positions = 4096.0;
    spec.position.scaling.truncate = false;
    spec.position.scaling.magnitude = 0.1 * std::log(32.0) + 1.0;
  }
  spec.position.pairing = RopePairing::kInterleaved;
  ReadHead(c, ModelClass::kTokenClassification, PoolingKind::kMean);
  ClassOf(c, ModelClass::kTokenClassification);
  if (!json.contains("id2label") && !json.contains("num_labels")) {
    spec.head.labels = DefaultLabels();
  }
  AttentionSpec attention = c.Attention(64);
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", true);
  attention.sinks = true;
  attention.window = c.Window().value_or(128) + 1;
  FeedForwardSpec experts = c.Experts({.count = "num_local_experts", .width = "intermediate_size"});
  experts.routing->gate = GateKind::kSoftmaxSelected;
  experts.routing->score.bias = true;
  ExpertSpec& expert = experts.expert;
  expert.bias = true;
  expert.activation_slope = static_cast<float>(c.keys().Real("swiglu_alpha", 1.702));
  expert.activation_limit = static_cast<float>(c.keys().Real("swiglu_limit", 7.0));
  expert.up_offset = 1.0f;
  c.Ignore({"hidden_act"});
  c.Tensors({kPrivacyTensors, PreNormTensors(), AttentionTensors()});
  return c.Finish(attention, experts);
}

}  // namespace

constinit const Architecture kPrivacyFilterArchitecture = {.model_type = "openai_privacy_filter",
                                                           .read = ReadPrivacyFilter};

}  // namespace moeserve
