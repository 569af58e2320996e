// Gemma, Gemma 2 and Gemma 3 (text): the files store norm weights as offsets from 1.

#include <cmath>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/model_head.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kFinalNorm[] = {
    {.model = "norm.weight", .file = "model.norm.weight", .add = 1.0f},
};

constexpr TensorRule kPreNorms[] = {
    {.model = "blocks.*.attention.norm.weight",
     .file = "model.layers.*.input_layernorm.weight",
     .add = 1.0f},
    {.model = "blocks.*.feed_forward.norm.weight",
     .file = "model.layers.*.post_attention_layernorm.weight",
     .add = 1.0f},
};

constexpr TensorRule kNorms2[] = {
    {.model = "blocks.*.attention.norm.weight",
     .file = "model.layers.*.input_layernorm.weight",
     .add = 1.0f},
    {.model = "blocks.*.attention.output_norm.weight",
     .file = "model.layers.*.post_attention_layernorm.weight",
     .add = 1.0f},
    {.model = "blocks.*.feed_forward.norm.weight",
     .file = "model.layers.*.pre_feedforward_layernorm.weight",
     .add = 1.0f},
    {.model = "blocks.*.feed_forward.output_norm.weight",
     .file = "model.layers.*.post_feedforward_layernorm.weight",
     .add = 1.0f},
};

constexpr TensorRule kQkNorms3[] = {
    {.model = "blocks.*.attention.q_norm.weight",
     .file = "model.layers.*.self_attn.q_norm.weight",
     .add = 1.0f},
    {.model = "blocks.*.attention.k_norm.weight",
     .file = "model.layers.*.self_attn.k_norm.weight",
     .add = 1.0f},
};

DecoderDefaults GemmaDefaults(int kv_heads) {
  return {.max_position_embeddings = 8192,
          .tie_word_embeddings = true,
          .bos_token_id = 2,
          .eos_token_ids = {1},
          .num_key_value_heads = kv_heads};
}

// Adds what all of these models have. The norms' rules come first, because the first rule counts.
void AddDecoder(DecoderConfig& c, std::span<const TensorRule> norms) {
  ModelSpec& spec = c.spec();
  if (spec.hidden_size > 0) spec.embedding_scale = std::sqrt(static_cast<double>(spec.hidden_size));
  c.Tensors({norms, kFinalNorm, EmbeddingTensors(), AttentionTensors(), DenseTensors()});
}

ConfigResult ReadGemma(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton(GemmaDefaults(16));
  c.Require("use_bidirectional_attention", false);
  AddDecoder(c, kPreNorms);
  AttentionSpec attention = c.Attention(256);
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  FeedForwardSpec dense = c.Dense();
  // The first files say "gelu" and mean its approximation by tanh.
  dense.expert.activation = ActivationKind::kGeluTanh;
  for (const char* key : {"hidden_act", "hidden_activation"}) {
    if (c.keys().Optional(key) == nullptr) continue;
    const ActivationKind named = c.Activation(key);
    if (named != ActivationKind::kGelu) dense.expert.activation = named;
  }
  return c.Finish(attention, dense);
}

// Reads what Gemma 2 and 3 have in common: attention without its windows.
AttentionSpec ReadAttention2(DecoderConfig& c, double logits_cap) {
  AttentionSpec attention = c.Attention(256);
  // The bias of the output projection would be added before the output's norm.
  c.Require("attention_bias", false);
  const double scalar = c.keys().Real("query_pre_attn_scalar", 256.0);
  if (scalar > 0) attention.scale = 1.0 / std::sqrt(scalar);
  c.Ignore({"cache_implementation"});
  c.spec().logit_soft_cap = c.Cap("final_logit_softcapping", logits_cap);
  constexpr KeyRule kRules[] = {{"attention.soft_cap", "attn_logit_softcapping"},
                                {"logit_soft_cap", "final_logit_softcapping"}};
  c.Keys(kRules);
  return attention;
}

ConfigResult ReadGemma2(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton(GemmaDefaults(4));
  c.Require("use_bidirectional_attention", false);
  AddDecoder(c, kNorms2);
  c.spec().norm.placement = NormPlacement::kBoth;
  AttentionSpec attention = ReadAttention2(c, 30.0);
  attention.soft_cap = c.Cap("attn_logit_softcapping", 50.0);
  const int window = c.Window().value_or(4096);
  const std::vector<bool> sliding = c.SlidingLayers([](int layer) { return layer % 2 == 0; });
  FeedForwardSpec dense = c.Dense();
  // Old files also name an activation that is not used.
  c.Ignore({"hidden_act"});
  dense.expert.activation = c.Activation("hidden_activation", "gelu_pytorch_tanh");
  return c.Finish([&](int layer) {
    AttentionSpec own = attention;
    if (sliding[static_cast<size_t>(layer)]) own.window = window;
    return LayerSpec{own, dense};
  });
}

ConfigResult ReadGemma3(const Json& json, const StoredNames& stored) {
  // Layers with a window have rotary parameters of their own.
  constexpr double kGlobalTheta = 1e6, kLocalTheta = 1e4;
  Json rest = json;
  const auto parameters = json.find("rope_parameters");
  const bool of_layers = parameters != json.end() && DecoderConfig::IsRopeOfLayers(*parameters);
  if (of_layers) rest.erase("rope_parameters");
  DecoderConfig c(rest, stored);
  DecoderDefaults defaults = GemmaDefaults(4);
  defaults.max_position_embeddings = 131072;
  defaults.rope_theta = kGlobalTheta;
  c.Skeleton(defaults);
  AddDecoder(c, kNorms2);
  c.Tensors(kQkNorms3);
  c.spec().norm.placement = NormPlacement::kBoth;
  PositionSpec local;
  local.theta = c.keys().Real("rope_local_base_freq", kLocalTheta);
  if (of_layers) {
    if (const auto own = parameters->find("full_attention"); own != parameters->end()) {
      c.spec().position = c.RopeFrom(*own, "rope_parameters.full_attention", kGlobalTheta);
    }
    if (const auto own = parameters->find("sliding_attention"); own != parameters->end()) {
      local = c.RopeFrom(*own, "rope_parameters.sliding_attention", kLocalTheta);
    }
  }
  AttentionSpec attention = ReadAttention2(c, 0.0);
  // transformers ignores it, the authors' code applies it; published files have none.
  c.Require("attn_logit_softcapping", nullptr);
  attention.qk_norm = QkNorm::kHead;
  int window = c.Window().value_or(4096);
  if (c.keys().Bool("use_bidirectional_attention", false)) {
    // EmbeddingGemma: half of the window on each side.
    window = window / 2 + 1;
    c.spec().kind = ModelKind::kEncoder;
    ClassOf(c, ModelClass::kBase);
    ReadHead(c, ModelClass::kBase, PoolingKind::kMean);
  }
  const int pattern = c.keys().Int("sliding_window_pattern", 6);
  c.Ignore({"_sliding_window_pattern"});
  const std::vector<bool> sliding =
      c.SlidingLayers([&](int layer) { return pattern > 0 && (layer + 1) % pattern != 0; });
  FeedForwardSpec dense = c.Dense();
  dense.expert.activation = c.Activation("hidden_activation", "gelu_pytorch_tanh");
  return c.Finish([&](int layer) {
    AttentionSpec own = attention;
    if (sliding[static_cast<size_t>(layer)]) {
      own.window = window;
      own.position = local;
    }
    return LayerSpec{own, dense};
  });
}

}  // namespace

constinit const Architecture kGemmaArchitecture = {.model_type = "gemma", .read = ReadGemma};

constinit const Architecture kGemma2Architecture = {.model_type = "gemma2", .read = ReadGemma2};

constinit const Architecture kGemma3Architecture = {.model_type = "gemma3_text",
                                                    .read = ReadGemma3};

}  // namespace moeserve
