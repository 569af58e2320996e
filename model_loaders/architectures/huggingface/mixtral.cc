// Mixtral: softmax over all experts, top-k, renormalised.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

// The names on the hub, and those of newer versions of `transformers` in memory.
constexpr TensorRule kMixtralExperts[] = {
    {"blocks.*.feed_forward.router.weight", "model.layers.*.block_sparse_moe.gate.weight"},
    {"blocks.*.feed_forward.experts.*.gate.weight",
     "model.layers.*.block_sparse_moe.experts.*.w1.weight"},
    {"blocks.*.feed_forward.experts.*.up.weight",
     "model.layers.*.block_sparse_moe.experts.*.w3.weight"},
    {"blocks.*.feed_forward.experts.*.down.weight",
     "model.layers.*.block_sparse_moe.experts.*.w2.weight"},
};

Result<std::unique_ptr<const CheckpointConfig>> ReadMixtral(const Json& json,
                                                            const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 131072,
              .rms_norm_eps = 1e-5,
              .rope_theta = 1e6,
              .num_key_value_heads = 8});
  AttentionSpec attention = c.Attention();
  attention.window = c.Window();
  FeedForwardSpec experts = c.Experts({.count = "num_local_experts", .width = "intermediate_size"});
  experts.expert.activation = c.Activation();
  experts.routing->renormalize = true;
  c.Ignore({"router_jitter_noise"});  // training only
  for (const auto& table : {EmbeddingTensors(), PreNormTensors(), AttentionTensors(),
                            std::span<const TensorRule>(kMixtralExperts), ExpertTensors()}) {
    c.Tensors(table);
  }
  return c.Finish([&](int) { return LayerSpec{attention, experts}; });
}

}  // namespace

constinit const Architecture kMixtralArchitecture = {
    .model_type = "mixtral",
    .recognizes = [](const Json& config) { return HasModelType(config, "mixtral"); },
    .read = ReadMixtral};

}  // namespace moeserve
