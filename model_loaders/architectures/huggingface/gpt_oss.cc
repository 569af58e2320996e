// gpt-oss: attention with sinks and biases, experts with a clamped activation, MXFP4 weights.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

// A part of a tensor in which the rows of gate (part 0) and up (part 1) alternate.
constexpr TensorRule GateUp(std::string_view model, std::string_view file, int part) {
  return {.model = model, .file = file, .part = part, .parts = 2, .order = RowOrder::kInterleaved};
}
constexpr TensorRule Mxfp4(TensorRule rule) {
  rule.mxfp4 = true;
  return rule;
}

constexpr std::string_view kExpertGate = "blocks.*.feed_forward.experts.*.gate.weight";
constexpr std::string_view kExpertUp = "blocks.*.feed_forward.experts.*.up.weight";
constexpr std::string_view kExpertDown = "blocks.*.feed_forward.experts.*.down.weight";

// The rules for MXFP4 come first, because unquantized files have no tensors of these names.
constexpr TensorRule kGptOssTensors[] = {
    {"blocks.*.attention.sinks", "model.layers.*.self_attn.sinks"},
    {"blocks.*.feed_forward.router.weight", "model.layers.*.mlp.router.weight"},
    {"blocks.*.feed_forward.router.bias", "model.layers.*.mlp.router.bias"},
    Mxfp4(GateUp(kExpertGate, "model.layers.*.mlp.experts.gate_up_proj_blocks", 0)),
    Mxfp4(GateUp(kExpertUp, "model.layers.*.mlp.experts.gate_up_proj_blocks", 1)),
    Mxfp4({kExpertDown, "model.layers.*.mlp.experts.down_proj_blocks"}),
    Transposed(GateUp(kExpertGate, "model.layers.*.mlp.experts.gate_up_proj", 0)),
    Transposed(GateUp(kExpertUp, "model.layers.*.mlp.experts.gate_up_proj", 1)),
    Transposed({kExpertDown, "model.layers.*.mlp.experts.down_proj"}),
    GateUp("blocks.*.feed_forward.experts.*.gate.bias",
           "model.layers.*.mlp.experts.gate_up_proj_bias", 0),
    GateUp("blocks.*.feed_forward.experts.*.up.bias",
           "model.layers.*.mlp.experts.gate_up_proj_bias", 1),
    {"blocks.*.feed_forward.experts.*.down.bias", "model.layers.*.mlp.experts.down_proj_bias"},
};

PositionSpec DefaultRope() {
  PositionSpec position;
  position.theta = 150000.0;
  position.scaling.kind = RopeScalingKind::kYarn;
  position.scaling.factor = 32.0;
  position.scaling.original_positions = 4096.0;
  position.scaling.truncate = false;
  position.scaling.magnitude = 0.1 * std::log(32.0) + 1.0;
  return position;
}

ConfigResult ReadGptOss(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 131072,
              .rms_norm_eps = 1e-5,
              .rope_theta = 150000.0,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {},
              .num_key_value_heads = 8,
              .mxfp4 = true});
  const auto none = [&](const char* key) { return !json.contains(key) || json[key].is_null(); };
  if (none("rope_parameters") && none("rope_scaling")) {
    c.spec().position = DefaultRope();
  }
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), kGptOssTensors});
  AttentionSpec attention = c.Attention(64);
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", true);
  attention.sinks = true;
  const int window = c.Window().value_or(128);
  const std::vector<bool> sliding = c.SlidingLayers([](int layer) { return layer % 2 == 0; });

  c.Ignore({"experts_per_token", "initial_context_length"});  // copies of other keys
  FeedForwardSpec experts = c.Experts({.count = "num_local_experts", .width = "intermediate_size"});
  experts.routing->gate = GateKind::kSoftmaxSelected;
  experts.routing->score.bias = true;
  ExpertSpec& expert = experts.expert;
  c.Require("hidden_act", "silu");
  expert.bias = true;
  expert.activation_slope = static_cast<float>(c.keys().Real("swiglu_alpha", 1.702));
  expert.activation_limit = static_cast<float>(c.keys().Real("swiglu_limit", 7.0));
  expert.up_offset = 1.0f;
  constexpr KeyRule kRules[] = {{"feed_forward.expert.activation_slope", "swiglu_alpha"},
                                {"feed_forward.expert.activation_limit", "swiglu_limit"}};
  c.Keys(kRules);
  return c.Finish([&](int layer) {
    AttentionSpec own = attention;
    if (sliding[static_cast<size_t>(layer)]) own.window = window;
    return LayerSpec{own, experts};
  });
}

}  // namespace

constinit const Architecture kGptOssArchitecture = {.model_type = "gpt_oss", .read = ReadGptOss};

}  // namespace moeserve
