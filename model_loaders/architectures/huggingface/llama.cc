// Llama, Mistral and Granite: pre-norm decoders with a gated feed-forward.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

ConfigResult ReadLlama(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({});
  AttentionSpec attention = c.Attention();
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  FeedForwardSpec dense = c.WithActivation(c.Dense());
  dense.expert.bias = c.keys().Bool("mlp_bias", false);
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors()});
  return c.Finish(attention, dense);
}

ConfigResult ReadMistral(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 131072, .num_key_value_heads = 8});
  AttentionSpec attention = c.Attention();
  attention.window = c.Window(4096);
  FeedForwardSpec dense = c.WithActivation(c.Dense());
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors()});
  return c.Finish(attention, dense);
}

ConfigResult ReadGranite(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({});
  ReadGraniteFactors(c);
  AttentionSpec attention = c.Attention();
  attention.scale = c.keys().Real("attention_multiplier", 1.0);
  attention.bias = attention.out_bias = c.keys().Bool("attention_bias", false);
  FeedForwardSpec dense = c.WithActivation(c.Dense());
  dense.expert.bias = c.keys().Bool("mlp_bias", false);
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), DenseTensors()});
  return c.Finish(attention, dense);
}

}  // namespace

constinit const Architecture kLlamaArchitecture = {.model_type = "llama", .read = ReadLlama};

constinit const Architecture kMistralArchitecture = {.model_type = "mistral", .read = ReadMistral};

constinit const Architecture kGraniteArchitecture = {.model_type = "granite", .read = ReadGranite};

}  // namespace moeserve
