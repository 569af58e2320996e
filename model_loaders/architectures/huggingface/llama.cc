// Llama, Mistral and Granite: pre-norm decoders with a gated feed-forward.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

void AddLlamaDecoderTensors(DecoderConfig& c) {
  for (const auto& table :
       {EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors()}) {
    c.Tensors(table);
  }
}

Result<std::unique_ptr<const CheckpointConfig>> ReadLlama(const Json& json,
                                                          const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({});
  AttentionSpec attention = c.Attention();
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  FeedForwardSpec dense = c.Dense();
  dense.expert.activation = c.Activation();
  dense.expert.bias = c.keys().Bool("mlp_bias", false);
  AddLlamaDecoderTensors(c);
  return c.Finish([&](int) { return LayerSpec{attention, dense}; });
}

Result<std::unique_ptr<const CheckpointConfig>> ReadMistral(const Json& json,
                                                            const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 131072, .num_key_value_heads = 8});
  AttentionSpec attention = c.Attention();
  attention.window = c.Window(4096);
  FeedForwardSpec dense = c.Dense();
  dense.expert.activation = c.Activation();
  AddLlamaDecoderTensors(c);
  return c.Finish([&](int) { return LayerSpec{attention, dense}; });
}

Result<std::unique_ptr<const CheckpointConfig>> ReadGranite(const Json& json,
                                                            const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({});
  ReadGraniteFactors(c);
  AttentionSpec attention = c.Attention();
  attention.scale = c.keys().Real("attention_multiplier", 1.0);
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  FeedForwardSpec dense = c.Dense();
  dense.expert.activation = c.Activation();
  dense.expert.bias = c.keys().Bool("mlp_bias", false);
  AddLlamaDecoderTensors(c);
  return c.Finish([&](int) { return LayerSpec{attention, dense}; });
}

}  // namespace

constinit const Architecture kLlamaArchitecture = {
    .model_type = "llama",
    .recognizes = [](const Json& config) { return HasModelType(config, "llama"); },
    .read = ReadLlama};

constinit const Architecture kMistralArchitecture = {
    .model_type = "mistral",
    .recognizes = [](const Json& config) { return HasModelType(config, "mistral"); },
    .read = ReadMistral};

constinit const Architecture kGraniteArchitecture = {
    .model_type = "granite",
    .recognizes = [](const Json& config) { return HasModelType(config, "granite"); },
    .read = ReadGranite};

}  // namespace moeserve
