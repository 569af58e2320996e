// Mixtral: softmax over all experts, top-k, renormalised.

#include "model_loaders/architectures/families.h"
#include "model_loaders/architectures/huggingface/parts/decoder_config.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;
using namespace huggingface;  // NOLINT(google-build-using-namespace): shared helpers

ConfigResult ReadMixtral(const Json& json, const StoredNames& stored) {
  DecoderConfig c(json, stored);
  c.Skeleton({.max_position_embeddings = 131072,
              .rms_norm_eps = 1e-5,
              .rope_theta = 1e6,
              .num_key_value_heads = 8});
  AttentionSpec attention = c.Attention();
  attention.window = c.Window();
  FeedForwardSpec experts =
      c.WithActivation(c.Experts({.count = "num_local_experts", .width = "intermediate_size"}));
  experts.routing->renormalize = true;
  c.Ignore({"router_jitter_noise"});  // training only
  c.Tensors({EmbeddingTensors(), PreNormTensors(), AttentionTensors(), BlockSparseTensors(),
             ExpertTensors()});
  return c.Finish(attention, experts);
}

}  // namespace

constinit const Architecture kMixtralArchitecture = {.model_type = "mixtral", .read = ReadMixtral};

}  // namespace moeserve
