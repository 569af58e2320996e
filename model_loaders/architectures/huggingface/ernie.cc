// ERNIE 4.5 (text), dense and with experts, and the decoder of ERNIE 4.5 VL: interleaved rotary
// positions; experts are chosen by probability plus a bias.

#include <utility>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

// The choice bias is stored as [1, E].
constexpr TensorRule kRouter[] = {
    {.model = "blocks.*.feed_forward.router.choice_bias",
     .file = "model.layers.*.mlp.moe_statics.e_score_correction_bias",
     .slices = 1},
    {.model = "blocks.*.feed_forward.router.choice_bias",
     .file = "model.layers.*.mlp.gate.moe_statics.e_score_correction_bias",
     .slices = 1},
};

DecoderDefaults ErnieDefaults(int kv_heads) {
  return {.max_position_embeddings = 131072,
          .rms_norm_eps = 1e-5,
          .rope_theta = 500000.0,
          .tie_word_embeddings = true,
          .num_key_value_heads = kv_heads};
}

void ReadSkeleton(DecoderConfig& c, const DecoderDefaults& defaults) {
  c.Skeleton(defaults);
  c.spec().position.pairing = RopePairing::kInterleaved;
}

ConfigResult ReadErnie(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  ReadSkeleton(c, ErnieDefaults(2));
  AttentionSpec attention = c.Attention(128);
  FeedForwardSpec dense = c.WithActivation(c.Dense());
  attention.bias = attention.out_bias = dense.expert.bias = c.keys().Bool("use_bias", false);
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors()});
  return c.Finish(attention, dense);
}

ConfigResult ReadErnieMoe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  ReadSkeleton(c, ErnieDefaults(4));
  AttentionSpec attention = c.Attention();
  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({.count = "moe_num_experts", .selected = "moe_k"});
  dense.expert.activation = experts.expert.activation = c.Activation();
  c.Require("use_bias", false);
  c.Require("moe_use_aux_free", true);
  c.Require("moe_gate", "topk");
  experts.routing->renormalize = true;
  experts.routing->select.bias = true;
  experts.shared_width = c.SharedWidth("moe_num_shared_experts", 2);
  const int first = c.keys().Int("moe_layer_start_index", 1);
  const int last = c.keys().Int("moe_layer_end_index", -1);
  const int interval = c.keys().Int("moe_layer_interval", 1);
  if (interval < 1) {
    c.keys().Fault("moe_layer_interval", "an integer >= 1", std::to_string(interval));
  }
  c.IgnoreNextTokenLayers(c.keys().Int("num_nextn_predict_layers", 0));
  c.Ignore({"moe_norm_min", "moe_capacity", "moe_gate_act"});
  c.Require("compression_ratio", 1.0);
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors(),
             ExpertTensors(), SharedExpertTensors(), kRouter});
  const int64_t end = last == -1 ? int64_t{c.layers()} - 1 : last;
  return c.Finish([&](int layer) {
    const bool routed = (layer + 1) % interval == 0 && layer >= first && layer <= end;
    return LayerSpec{attention, routed ? experts : dense};
  });
}

constexpr TensorRule kTextExperts[] = {
    Transposed({"blocks.*.feed_forward.router.weight", "model.layers.*.mlp.gate.weight"}),
    {"blocks.*.feed_forward.router.weight", "model.layers.*.mlp.text_moe.gate.weight"},
    // Those of the text's experts and of the others.
    {.model = "blocks.*.feed_forward.router.choice_bias",
     .file = "model.layers.*.mlp.moe_statics.e_score_correction_bias",
     .slices = 2},
    {.model = "blocks.*.feed_forward.router.choice_bias",
     .file = "model.layers.*.mlp.text_moe.gate.moe_statics.e_score_correction_bias",
     .slices = 1},
    {"blocks.*.feed_forward.experts.*.gate.weight",
     "model.layers.*.mlp.text_moe.experts.gate_up_proj", 0, 2},
    {"blocks.*.feed_forward.experts.*.up.weight",
     "model.layers.*.mlp.text_moe.experts.gate_up_proj", 1, 2},
    {"blocks.*.feed_forward.experts.*.down.weight",
     "model.layers.*.mlp.text_moe.experts.down_proj"},
};

// Images have experts of their own, whose numbers stand behind those of texts in lists.
struct ErnieExperts {
  Json config;     // with the numbers of texts alone
  int images = 0;  // experts of images; as many as of texts unless a list says otherwise
};
ErnieExperts WithoutImages(const Json& json) {
  ErnieExperts out{.config = json};
  for (const auto& [key, fallback] :
       {std::pair{"moe_num_experts", 64}, std::pair{"moe_intermediate_size", 1536}}) {
    const auto found = json.find(key);
    if (found == json.end() || found->is_null()) {
      out.config[key] = fallback;
    } else if (found->is_array() && found->size() == 2 && IntFrom(found->back()).has_value()) {
      out.config[key] = found->front();
      if (key == std::string_view("moe_num_experts")) out.images = *IntFrom(found->back());
    }
  }
  if (out.images <= 0) out.images = IntFrom(out.config["moe_num_experts"]).value_or(0);
  return out;
}

// The decoder of ERNIE 4.5 VL.
ConfigResult ReadErnieVlMoeText(const Json& json, const StoredNames& stored) {
  const ErnieExperts both = WithoutImages(json);
  DecoderConfig c(both.config, stored);
  DecoderDefaults defaults = ErnieDefaults(4);
  defaults.bos_token_id = std::nullopt;
  defaults.eos_token_ids = {};
  ReadSkeleton(c, defaults);
  AttentionSpec attention = c.Attention();
  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({.count = "moe_num_experts", .selected = "moe_k"});
  dense.expert.activation = experts.expert.activation = c.Activation();
  c.Require("use_bias", false);
  experts.routing->renormalize = true;
  experts.routing->select.bias = true;
  experts.shared_width = c.SharedWidth("moe_num_shared_experts", 2);
  const std::vector<bool> sparse = c.SparseLayers([](int layer) { return layer > 0; });
  c.Ignore({"moe_norm_min"});
  const int first = experts.routing->num_experts;
  const int end = first > 0 && both.images <= kMaxExperts ? first + both.images : first;
  c.IgnoreRange({"model.layers.*.mlp.experts.*.gate_proj.weight", 1, first, end});
  c.IgnoreRange({"model.layers.*.mlp.experts.*.up_proj.weight", 1, first, end});
  c.IgnoreRange({"model.layers.*.mlp.experts.*.down_proj.weight", 1, first, end});
  c.IgnoreTensors({"model.layers.*.mlp.gate.weight_1", "model.layers.*.mlp.vision_moe.gate.weight",
                   "model.layers.*.mlp.vision_moe.gate.moe_statics.e_score_correction_bias",
                   "model.layers.*.mlp.vision_moe.experts.gate_up_proj",
                   "model.layers.*.mlp.vision_moe.experts.down_proj"});
  c.Tensors({kTextExperts, EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors(),
             ExpertTensors(), SharedExpertTensors()});
  return c.Finish(attention, dense, experts, sparse);
}

}  // namespace

constinit const Architecture kErnieArchitecture = {.model_type = "ernie4_5", .read = ReadErnie};

constinit const Architecture kErnieMoeArchitecture = {.model_type = "ernie4_5_moe",
                                                      .read = ReadErnieMoe};

constinit const Architecture kErnieVlMoeTextArchitecture = {.model_type = "ernie4_5_vl_moe_text",
                                                            .read = ReadErnieVlMoeText};

}  // namespace moeserve
