// Qwen2 and Qwen3, dense and with experts.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

// Reads the keys of sliding windows. Without "layer_types", a layer slides if `slides` says so.
std::vector<std::optional<int>> Windows(DecoderConfig& c,
                                        const std::function<bool(int, int)>& slides) {
  const bool used = c.keys().Bool("use_sliding_window", false);
  const std::optional<int> window = c.Window(4096);
  const int first = c.keys().Int("max_window_layers", 28);
  const std::vector<bool> sliding =
      c.SlidingLayers([&](int layer) { return used && window && slides(layer, first); });
  std::vector<std::optional<int>> windows;
  for (const bool s : sliding) windows.push_back(s && used ? window : std::nullopt);
  return windows;
}

bool FromLayer(int layer, int first) { return layer >= first; }

DecoderDefaults QwenDefaults(int kv_heads) {
  return {.max_position_embeddings = 32768,
          .bos_token_id = std::nullopt,
          .eos_token_ids = {},
          .num_key_value_heads = kv_heads};
}

// Reads the windows and the feed-forwards of the models without experts.
ConfigResult FinishDense(DecoderConfig& c, AttentionSpec attention) {
  const std::vector<std::optional<int>> windows = Windows(c, FromLayer);
  FeedForwardSpec dense = c.WithActivation(c.Dense());
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors()});
  return c.Finish([&](int layer) {
    attention.window = windows[static_cast<size_t>(layer)];
    return LayerSpec{attention, dense};
  });
}

ConfigResult ReadQwen2(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton(QwenDefaults(32));
  AttentionSpec attention = c.Attention();
  attention.bias = true;
  return FinishDense(c, attention);
}

ConfigResult ReadQwen3(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton(QwenDefaults(32));
  AttentionSpec attention = c.Attention(128);
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  attention.qk_norm = QkNorm::kHead;
  c.Tensors(QkNormTensors());
  return FinishDense(c, attention);
}

ConfigResult ReadQwen2Moe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton(QwenDefaults(16));
  AttentionSpec attention = c.Attention();
  attention.bias = c.keys().Bool("qkv_bias", true);
  const std::vector<std::optional<int>> windows =
      Windows(c, [](int layer, int first) { return (layer + 1) % 2 == 1 && layer < first; });
  const std::function<bool(int)> routed = c.SparseByStep();
  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({});
  dense.expert.activation = experts.expert.activation = c.Activation();
  experts.routing->renormalize = c.keys().Bool("norm_topk_prob", false);
  experts.shared_width = c.keys().Int("shared_expert_intermediate_size");
  experts.shared_gate = true;
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors(),
             ExpertTensors(), OneSharedExpertTensors()});
  return c.Finish([&](int layer) {
    attention.window = windows[static_cast<size_t>(layer)];
    return LayerSpec{attention, routed(layer) ? experts : dense};
  });
}

ConfigResult ReadQwen3Moe(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton(QwenDefaults(4));
  AttentionSpec attention = c.Attention();
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  attention.qk_norm = QkNorm::kHead;
  const bool slides = c.keys().Bool("use_sliding_window", false);
  const std::optional<int> window = c.Window(4096);
  c.Ignore({"max_window_layers"});  // written by some versions, never read
  if (slides) attention.window = window;
  const std::function<bool(int)> routed = c.SparseByStep();
  FeedForwardSpec dense = c.Dense();
  FeedForwardSpec experts = c.Experts({});
  dense.expert.activation = experts.expert.activation = c.Activation();
  experts.routing->renormalize = c.keys().Bool("norm_topk_prob", false);
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors(),
             QkNormTensors(), ExpertTensors()});
  return c.Finish([&](int layer) { return LayerSpec{attention, routed(layer) ? experts : dense}; });
}

}  // namespace

constinit const Architecture kQwen2Architecture = {.model_type = "qwen2", .read = ReadQwen2};

constinit const Architecture kQwen3Architecture = {.model_type = "qwen3", .read = ReadQwen3};

constinit const Architecture kQwen2MoeArchitecture = {.model_type = "qwen2_moe",
                                                      .read = ReadQwen2Moe};

constinit const Architecture kQwen3MoeArchitecture = {.model_type = "qwen3_moe",
                                                      .read = ReadQwen3Moe};

}  // namespace moeserve
