// dots.llm1: sigmoid gates, a choice bias, shared experts, norms of each head.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

const DecoderDefaults kDots1Defaults{
    .bos_token_id = std::nullopt, .eos_token_ids = {}, .num_key_value_heads = 32};

ConfigResult ReadDots1(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton(kDots1Defaults);
  AttentionSpec attention = c.Attention();
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  attention.qk_norm = QkNorm::kHead;
  const std::optional<int> window = c.Window(4096);
  const int first_window = c.keys().Int("max_window_layers", 62);
  const std::vector<bool> sliding =
      c.SlidingLayers([&](int layer) { return window.has_value() && layer >= first_window; });
  const FeedForwardSpec dense = c.Dense();
  const FeedForwardSpec experts =
      c.DeepSeekExperts({.count = "n_routed_experts"}, {.norm_topk_prob = false});
  const int first = c.keys().Int("first_k_dense_replace", 0);
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), QkNormTensors(),
             DenseTensors(), ExpertTensors(), SharedExpertTensors()});
  return c.Finish([&](int layer) {
    AttentionSpec own = attention;
    if (sliding[static_cast<size_t>(layer)]) own.window = window;
    return LayerSpec{own, layer >= first ? experts : dense};
  });
}

}  // namespace

constinit const Architecture kDots1Architecture = {.model_type = "dots1", .read = ReadDots1};

}  // namespace moeserve
