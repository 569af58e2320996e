// K2-Horizon: norms of groups, a rotation that leaves both ends of the halves of a head, and in
// layers with experts a routed projection of values ("MoVA").

#include <functional>

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/layer_kinds.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

// The biases of routers decide the choice alone.
constexpr TensorRule kHorizonTensors[] = {
    {"blocks.*.attention.gate.weight", "model.layers.*.self_attn.gate_proj.weight"},
    {"blocks.*.attention.router.weight", "model.layers.*.self_attn.v_router.weight"},
    {"blocks.*.attention.router.choice_bias", "model.layers.*.self_attn.v_router.bias"},
    {"blocks.*.attention.experts.*.v.weight", "model.layers.*.self_attn.v_experts.*.weight"},
    {"blocks.*.feed_forward.router.choice_bias", "model.layers.*.mlp.gate.bias"},
};

enum class Horizon { kNone, kSilu, kSoftplus };

AttentionSpec ReadHorizonAttention(DecoderConfig& c) {
  ObjectReader& keys = c.keys();
  AttentionSpec attention = c.Attention();
  attention.bias = attention.out_bias = keys.Bool("attention_bias", false);
  if (keys.Bool("query_key_norm", false)) attention.qk_norm = QkNorm::kHeads;
  const auto gate = keys.Pick<Horizon>("attention_gate_func",
                                       {{"silu", Horizon::kSilu}, {"softplus", Horizon::kSoftplus}},
                                       Horizon::kNone);
  attention.gate = gate != Horizon::kNone;
  if (gate == Horizon::kSilu) attention.gate_activation = GateActivation::kSilu;
  if (gate == Horizon::kSoftplus) attention.gate_activation = GateActivation::kSoftplus2;
  PositionSpec& position = c.spec().position;
  const int rotated = keys.Int("rope_head_dim", attention.head_dim);
  if (attention.head_dim > 0) {
    position.fraction = static_cast<double>(rotated) / attention.head_dim;
  }
  if (rotated != attention.head_dim) position.span = RopeSpan::kHead;
  return attention;
}

// Routes as the experts of the feed-forward are routed, and those of the values.
void ReadHorizonRouter(DecoderConfig& c, RoutedLayerSpec& routing, bool renormalize) {
  ObjectReader& keys = c.keys();
  routing.gate =
      keys.Pick<GateKind>("router_score_func",
                          {{"sigmoid", GateKind::kSigmoid}, {"softmax", GateKind::kSoftmax}},
                          GateKind::kSigmoid)
          .value_or(GateKind::kSigmoid);
  routing.select.bias = keys.Bool("moe_gate_bias", true);
  routing.renormalize = renormalize || routing.select.k > 1;
  routing.scale = keys.Real("router_scaling_factor", 1.0);
}

ConfigResult ReadHorizon(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 524288,
              .rope_theta = 1e7,
              .bos_token_id = std::nullopt,
              .eos_token_ids = {}});
  ObjectReader& keys = c.keys();
  c.spec().norm.groups = keys.Int("layernorm_num_groups", 1);
  AttentionSpec attention = ReadHorizonAttention(c);
  c.Ignore({"sliding_window"});  // without use_sliding_window
  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({});
  dense.expert.activation = experts.expert.activation = c.Activation();
  ReadHorizonRouter(c, *experts.routing, keys.Bool("norm_topk_prob", true));
  experts.shared_width = c.SharedWidth("num_shared_experts", 0);
  const std::function<bool(int)> routed = c.SparseByStep();
  AttentionSpec values = attention;
  const int value_experts = keys.Int("mova_num_experts", 0);
  const int selected = keys.Int("mova_num_experts_per_tok", 0);
  if (value_experts > 0) {
    RoutedLayerSpec& routing = values.value_routing.emplace();
    routing.num_experts = value_experts;
    routing.select.k = selected;
    ReadHorizonRouter(c, routing, false);
    c.Decide("values are routed in f32; the model was trained with sums of two halves in bf16");
  } else if (value_experts < 0) {
    keys.Fault("mova_num_experts", "an integer of at least 0", std::to_string(value_experts));
  }
  constexpr KeyRule kRules[] = {{"norm.groups", "layernorm_num_groups"},
                                {"attention.value_routing.num_experts", "mova_num_experts"},
                                {"attention.value_routing.select.k", "mova_num_experts_per_tok"},
                                {"feed_forward.routing.scale", "router_scaling_factor"},
                                {"position.fraction", "rope_head_dim"}};
  c.Keys(kRules);
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), QkNormTensors(),
             kHorizonTensors, DenseTensors(), ExpertTensors(), SharedExpertTensors()});
  return c.Finish([&](int layer) {
    return routed(layer) ? LayerSpec{values, experts} : LayerSpec{attention, dense};
  });
}

}  // namespace

constinit const Architecture kK2HorizonArchitecture = {.model_type = "k2_horizon",
                                                       .read = ReadHorizon};

constinit const Architecture kK2HorizonMovaArchitecture = {.model_type = "k2_horizon_mova",
                                                           .read = ReadHorizon};

}  // namespace moeserve
