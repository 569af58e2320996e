// Command A with experts: attention and feed-forward read one norm and are added together. Layers
// with a window rotate, the others have no positions.

#include <algorithm>
#include <vector>

#include "engine/spec/spec_limits.h"
#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"
#include "model_loaders/architectures/huggingface/parts/layer_kinds.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

// Both blocks of a layer read the same norm.
constexpr TensorRule kCohereNorms[] = {
    {"blocks.*.attention.norm.weight", "model.layers.*.input_layernorm.weight"},
    {"blocks.*.feed_forward.norm.weight", "model.layers.*.input_layernorm.weight"},
};

ConfigResult ReadCohere2Moe(const Json& json, const StoredNames& stored) {
  const bool rms = json.contains("rms_norm_eps") && !json["rms_norm_eps"].is_null();
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 8192,
              .norm_eps_key = rms ? "rms_norm_eps" : "layer_norm_eps",
              .rms_norm_eps = 1e-5,
              .tie_word_embeddings = true,
              .bos_token_id = 5,
              .eos_token_ids = {255001}});
  ObjectReader& keys = c.keys();
  ModelSpec& spec = c.spec();
  if (rms) {
    c.Ignore({"layer_norm_eps"});
  } else {
    spec.norm.kind = NormKind::kLayer;
    spec.norm.bias = false;
  }
  spec.position.pairing = RopePairing::kInterleaved;
  spec.logit_scale = keys.Real("logit_scale", 0.0625);

  AttentionSpec attention = c.Attention(128);
  attention.bias = attention.out_bias = keys.Bool("attention_bias", false);
  const int first = keys.Int("first_k_dense_replace", 0);
  const int pattern = keys.Int("sliding_window_pattern", 4);
  const int prefix_pattern = keys.Int("prefix_dense_sliding_window_pattern", 1);
  const auto full = [](int layer, int of) { return of > 0 && (layer + 1) % of == 0; };
  const std::vector<bool> sliding = c.SlidingLayers([&](int layer) {
    return layer < first ? !full(layer, prefix_pattern) : !full(layer - first, pattern);
  });
  const std::vector<int> kinds = LayerKinds(
      c, {{"dense", 0}, {"sparse", 1}}, [&](int layer) { return layer < first ? 0 : 1; },
      "mlp_layer_types");
  const std::optional<int> window = c.Window(4096);

  FeedForwardSpec experts = c.Experts({.width = "intermediate_size"});
  FeedForwardSpec dense;
  dense.width = keys.Int("prefix_dense_intermediate_size", keys.Int("intermediate_size"));
  dense.expert.activation = experts.expert.activation = c.Activation();
  RoutedLayerSpec& routing = *experts.routing;
  enum class Gate { kSoftmax, kSigmoid };
  const auto gate =
      keys.Pick<Gate>("expert_selection_fn",
                      {{"softmax", Gate::kSoftmax}, {"sigmoid", Gate::kSigmoid}}, Gate::kSoftmax);
  const bool renormalize = keys.Bool("norm_topk_prob", true);
  routing.gate = GateKind::kSoftmaxSelected;
  if (gate == Gate::kSigmoid) {
    routing.gate = GateKind::kSigmoid;
    routing.renormalize = renormalize;
  }
  experts.shared_width = c.SharedWidth("num_shared_experts", 0);
  enum class Joined { kAverage, kSum };
  const auto joined =
      keys.Pick<Joined>("shared_expert_combination_strategy",
                        {{"average", Joined::kAverage}, {"sum", Joined::kSum}}, Joined::kAverage);
  constexpr KeyRule kRules[] = {{"logit_scale", "logit_scale"},
                                {"feed_forward.width", "prefix_dense_intermediate_size"}};
  c.Keys(kRules);
  c.Tensors({EmbeddingTensors(), kCohereNorms, AttentionTensors(), DenseTensors(), ExpertTensors(),
             SharedExpertTensors()});
  return c.FinishBlocks([&](int layer) {
    const auto index = static_cast<size_t>(layer);
    const bool routed = kinds[index] == 1;
    AttentionSpec own = attention;
    const bool windowed = sliding[index] && window.has_value();
    if (windowed) own.window = window;
    if (!windowed && (routed || prefix_pattern != 1)) {
      own.position.emplace().kind = PositionKind::kNone;
    }
    BlockSpec second{.mixer = routed ? experts : dense};
    second.residual.parallel = true;
    if (routed && experts.shared_width > 0 && joined == Joined::kAverage) {
      second.residual.scale = 0.5;
    }
    return std::vector<BlockSpec>{{.mixer = own}, second};
  });
}

}  // namespace

constinit const Architecture kCohere2MoeArchitecture = {.model_type = "cohere2_moe",
                                                        .read = ReadCohere2Moe};

}  // namespace moeserve
