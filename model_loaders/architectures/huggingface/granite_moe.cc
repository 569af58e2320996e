// GraniteMoE, its variants with a shared expert and with windows, and the hybrid with state-space
// layers.

#include <algorithm>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/hybrids/state_space_keys.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/layer_kinds.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

constexpr TensorRule kGraniteMoeTensors[] = {
    {"blocks.*.feed_forward.router.weight", "model.layers.*.block_sparse_moe.router.layer.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight",
     "model.layers.*.block_sparse_moe.input_linear.weight", 0, 2},
    {"blocks.*.feed_forward.experts.*.up.weight",
     "model.layers.*.block_sparse_moe.input_linear.weight", 1, 2},
    {"blocks.*.feed_forward.experts.*.down.weight",
     "model.layers.*.block_sparse_moe.output_linear.weight"},
    // Newer versions in memory.
    {"blocks.*.feed_forward.router.weight", "model.layers.*.block_sparse_moe.router.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight",
     "model.layers.*.block_sparse_moe.experts.gate_up_proj", 0, 2},
    {"blocks.*.feed_forward.experts.*.up.weight",
     "model.layers.*.block_sparse_moe.experts.gate_up_proj", 1, 2},
    {"blocks.*.feed_forward.experts.*.down.weight",
     "model.layers.*.block_sparse_moe.experts.down_proj"},
    {"blocks.*.feed_forward.shared.gate.weight", "model.layers.*.shared_mlp.input_linear.weight", 0,
     2},
    {"blocks.*.feed_forward.shared.up.weight", "model.layers.*.shared_mlp.input_linear.weight", 1,
     2},
    {"blocks.*.feed_forward.shared.down.weight", "model.layers.*.shared_mlp.output_linear.weight"},
    // The hybrid without experts.
    {"blocks.*.feed_forward.gate.weight", "model.layers.*.shared_mlp.input_linear.weight", 0, 2},
    {"blocks.*.feed_forward.up.weight", "model.layers.*.shared_mlp.input_linear.weight", 1, 2},
    {"blocks.*.feed_forward.down.weight", "model.layers.*.shared_mlp.output_linear.weight"},
};

void AddGraniteMoeTensors(DecoderConfig& c) {
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), kGraniteMoeTensors});
}

AttentionSpec ReadGraniteMoeAttention(DecoderConfig& c) {
  AttentionSpec attention = c.Attention();
  attention.scale = c.keys().Real("attention_multiplier", 1.0);
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  return attention;
}

// Softmax over the selected experts' scores.
FeedForwardSpec ReadExperts(DecoderConfig& c, int default_shared_width) {
  FeedForwardSpec experts =
      c.WithActivation(c.Experts({.count = "num_local_experts", .width = "intermediate_size"}));
  experts.routing->gate = GateKind::kSoftmaxSelected;
  experts.shared_width = c.keys().Int("shared_intermediate_size", default_shared_width);
  return experts;
}

ConfigResult ReadGraniteMoe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({});
  ReadGraniteFactors(c);
  const AttentionSpec attention = ReadGraniteMoeAttention(c);
  const FeedForwardSpec experts = ReadExperts(c, 0);
  AddGraniteMoeTensors(c);
  return c.Finish(attention, experts);
}

constexpr TensorRule kGraniteSinks[] = {
    {"blocks.*.attention.sinks", "model.layers.*.self_attn.sinks"},
};

// Returns the rotary positions of each layer, which may have a theta of its own; 0 means none.
std::vector<PositionSpec> ReadLayerThetas(DecoderConfig& c) {
  constexpr std::string_view key = "layer_rope_theta";
  if (c.layers() < 1 || c.layers() > kMaxLayers) return {};
  std::vector<PositionSpec> positions(static_cast<size_t>(c.layers()), c.spec().position);
  if (c.keys().Optional(key) == nullptr) return positions;
  const std::vector<double> thetas = c.keys().Reals(key);
  if (!c.ok()) return positions;
  if (thetas.size() != positions.size()) {
    c.keys().Fault(key, Concat("a list of ", positions.size(), " numbers"),
                   Concat("a list of ", thetas.size()));
    return positions;
  }
  for (size_t i = 0; i < thetas.size(); ++i) {
    positions[i].theta = thetas[i];
    if (thetas[i] == 0.0) {
      positions[i] = {};
      positions[i].kind = PositionKind::kNone;
    }
  }
  return positions;
}

// Windows, sinks in every layer, and rotary positions that differ between layers.
ConfigResult ReadGraniteMoeSwa(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({});
  ReadGraniteFactors(c);
  AttentionSpec attention = ReadGraniteMoeAttention(c);
  attention.sinks = true;
  const std::optional<int> window = c.Window(128);
  const std::vector<bool> sliding = c.SlidingLayers([](int layer) { return layer % 4 != 0; });
  const std::vector<PositionSpec> positions = ReadLayerThetas(c);
  const FeedForwardSpec experts = ReadExperts(c, 0);
  AddGraniteMoeTensors(c);
  c.Tensors(kGraniteSinks);
  return c.Finish([&](int layer) {
    const auto i = static_cast<size_t>(layer);
    AttentionSpec own = attention;
    if (sliding[i]) own.window = window;
    own.position = positions[i];
    return LayerSpec{own, experts};
  });
}

ConfigResult ReadHybrid(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({});
  ReadGraniteFactors(c);
  if (c.keys().Optional("position_embedding_type") == nullptr) {
    c.spec().position.kind = PositionKind::kNone;
  } else if (json["position_embedding_type"] == "nope") {
    c.spec().position.kind = PositionKind::kNone;
  } else {
    c.Require("position_embedding_type", "rope");
  }
  c.Ignore({"mamba_chunk_size", "normalization_function", "init_method", "rope_scaling"});
  enum : int { kAttention, kStateSpaces };
  const std::vector<int> kinds =
      LayerKinds(c,
                 {{"attention", kAttention},
                  {"full_attention", kAttention},
                  {"mamba", kStateSpaces},
                  {"linear_attention", kStateSpaces}},
                 [](int) { return kStateSpaces; }, "layer_types", {"layers_block_type"});
  const int64_t inner = int64_t{c.keys().Int("mamba_expand", 2)} * c.spec().hidden_size;
  const StateSpaceSpec ssm =
      ReadStateSpace(c,
                     {"mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups",
                      "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias"},
                     {.num_heads = 128, .state_dim = 256, .groups = 1},
                     static_cast<int>(std::clamp<int64_t>(inner, 0, kMaxWidth + 1)));
  const AttentionSpec attention = ReadGraniteMoeAttention(c);
  FeedForwardSpec feed_forward;
  if (c.keys().Int("num_local_experts") == 0) {
    feed_forward = c.WithActivation(c.Dense("shared_intermediate_size"));
    c.Ignore({"intermediate_size", "num_experts_per_tok"});
  } else {
    feed_forward = ReadExperts(c, 1024);
  }
  c.Tensors({EmbeddingTensors(), PreNormTensors(), kGraniteMoeTensors});
  c.MixerTensors(BlockKind::kAttention, {AttentionTensors()});
  c.MixerTensors(BlockKind::kStateSpace, {MambaTensors()});
  return c.Finish([&](int layer) {
    LayerSpec own{.attention = attention, .feed_forward = feed_forward};
    if (kinds[static_cast<size_t>(layer)] == kStateSpaces) own.token_mixer = ssm;
    return own;
  });
}

}  // namespace

constinit const Architecture kGraniteMoeArchitecture = {.model_type = "granitemoe",
                                                        .read = ReadGraniteMoe};

constinit const Architecture kGraniteMoeSharedArchitecture = {.model_type = "granitemoeshared",
                                                              .read = ReadGraniteMoe};

constinit const Architecture kGraniteMoeSwaArchitecture = {.model_type = "granitemoe_swa",
                                                           .read = ReadGraniteMoeSwa};

constinit const Architecture kGraniteMoeHybridArchitecture = {.model_type = "granitemoehybrid",
                                                              .read = ReadHybrid};

}  // namespace moeserve
