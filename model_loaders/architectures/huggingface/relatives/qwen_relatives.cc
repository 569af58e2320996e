// Families that differ from Qwen3-MoE in a few settings: Mellum 2, Flint, and the decoder of
// Qwen3-VL.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

// Reads the rotary parameters of full attention into the model's, and returns those of layers with
// a window. `parameters` is null if the file has none.
PositionSpec ReadRopeOfLayers(DecoderConfig& c, const Json* parameters) {
  constexpr double kGlobalTheta = 500000.0, kLocalTheta = 10000.0;
  PositionSpec local;
  local.theta = kLocalTheta;
  c.spec().position.theta = kGlobalTheta;
  if (parameters == nullptr) return local;
  ObjectReader reader(*parameters, "rope_parameters", &c.problems());
  for (const char* key : {"full_attention", "sliding_attention"}) {
    const Json* const own = reader.Required(key, "an object");
    if (own == nullptr) continue;
    const bool full = key == std::string_view("full_attention");
    (full ? c.spec().position : local) =
        c.RopeFrom(*own, reader.PathOf(key), full ? kGlobalTheta : kLocalTheta);
  }
  reader.RefuseOthers();
  return local;
}

ConfigResult ReadMellum(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 131072,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {},
              .num_key_value_heads = 4,
              .rope = false});
  const PositionSpec local = ReadRopeOfLayers(c, c.keys().Optional("rope_parameters"));
  AttentionSpec attention = c.Attention(128);
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  attention.qk_norm = QkNorm::kHead;
  const std::optional<int> window = c.Window(1024);
  const std::vector<bool> sliding = c.SlidingLayers([](int) { return false; });
  const std::vector<bool> sparse = c.SparseLayers([](int) { return true; });
  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({});
  dense.expert.activation = experts.expert.activation = c.Activation();
  experts.routing->renormalize = c.keys().Bool("norm_topk_prob", true);
  c.Ignore(
      {"num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"});
  c.IgnorePrefix("mtp.");
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), QkNormTensors(),
             DenseTensors(), ExpertTensors()});
  return c.Finish([&](int layer) {
    AttentionSpec own = attention;
    if (sliding[static_cast<size_t>(layer)]) {
      own.window = window;
      own.position = local;
    }
    return LayerSpec{own, sparse[static_cast<size_t>(layer)] ? experts : dense};
  });
}

constexpr TensorRule kSinks[] = {
    {"blocks.*.attention.sinks", "model.layers.*.self_attn.softmax_offset"},
    {"blocks.*.attention.sinks", "model.layers.*.self_attn.sinks"},
};

// Only layers with a window have rotary positions.
ConfigResult ReadFlint(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 262144,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {},
              .num_key_value_heads = 4});
  AttentionSpec attention = c.Attention(128);
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  attention.qk_norm = QkNorm::kHead;
  attention.sinks = true;
  const std::optional<int> window = c.Window(513);
  const std::vector<bool> sliding = c.SlidingLayers(
      [&](int layer) { return layer >= 2 && layer % 4 != 1 && layer != c.layers() - 1; });
  const std::function<bool(int)> sparse = c.SparseByStep({0, 1});
  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({});
  dense.expert.activation = experts.expert.activation = c.Activation();
  experts.routing->gate = GateKind::kSigmoid;
  experts.routing->renormalize = c.keys().Bool("norm_topk_prob", true);
  experts.shared_width = c.keys().Int("shared_expert_intermediate_size", 1024);
  c.Tensors({kSinks, EmbeddingTensors(), PreNormTensors(), AttentionTensors(), QkNormTensors(),
             DenseTensors(), ExpertTensors(), OneSharedExpertTensors()});
  PositionSpec none;
  none.kind = PositionKind::kNone;
  return c.Finish([&](int layer) {
    AttentionSpec own = attention;
    if (sliding[static_cast<size_t>(layer)] && window.has_value()) {
      own.window = window;
    } else {
      own.position = none;
    }
    return LayerSpec{own, sparse(layer) ? experts : dense};
  });
}

constexpr std::string_view kGateUpStack = "model.layers.*.mlp.experts.gate_up_proj";
constexpr std::string_view kDownStack = "model.layers.*.mlp.experts.down_proj";
constexpr TensorRule kTransposedStacks[] = {
    Transposed({"blocks.*.feed_forward.experts.*.gate.weight", kGateUpStack, 0, 2}),
    Transposed({"blocks.*.feed_forward.experts.*.up.weight", kGateUpStack, 1, 2}),
    Transposed({"blocks.*.feed_forward.experts.*.down.weight", kDownStack}),
};

// The published files have transposed stacks of experts, those that transformers writes have not.
// The shapes tell which these are.
bool HasTransposedStacks(const DecoderConfig& c, int64_t hidden, int64_t width) {
  for (const auto& [name, shape] : c.stored().stacks) {
    if (hidden != 2 * width) {
      if (MatchesName(kGateUpStack, name)) return shape[1] == hidden && shape[2] == 2 * width;
    } else if (MatchesName(kDownStack, name)) {
      return shape[1] == width && shape[2] == hidden;
    }
  }
  return false;
}

ConfigResult ReadQwen3VlMoeText(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 128000,
              .rope_theta = 500000.0,
              .tie_word_embeddings = true,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {},
              .num_key_value_heads = 16});
  AttentionSpec attention = c.Attention();
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  attention.qk_norm = QkNorm::kHead;
  const std::function<bool(int)> sparse = c.SparseByStep();
  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({});
  dense.expert.activation = experts.expert.activation = c.Activation();
  experts.routing->renormalize = true;
  // Always as if true; of attention, always as if there were no window.
  c.Ignore({"norm_topk_prob", "sliding_window", "use_sliding_window", "max_window_layers"});
  const std::vector<int>& widths = experts.routing->widths;
  if (!widths.empty() && HasTransposedStacks(c, c.spec().hidden_size, widths.front())) {
    c.Tensors(kTransposedStacks);
  }
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), QkNormTensors(),
             DenseTensors(), ExpertTensors()});
  return c.Finish([&](int layer) { return LayerSpec{attention, sparse(layer) ? experts : dense}; });
}

}  // namespace

constinit const Architecture kFlintArchitecture = {.model_type = "flint", .read = ReadFlint};

constinit const Architecture kMellumArchitecture = {.model_type = "mellum", .read = ReadMellum};

constinit const Architecture kQwen3VlMoeTextArchitecture = {.model_type = "qwen3_vl_moe_text",
                                                            .read = ReadQwen3VlMoeText};

}  // namespace moeserve
