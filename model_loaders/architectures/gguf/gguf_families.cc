#include "model_loaders/architectures/gguf/gguf_families.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "base/error_text.h"
#include "model_loaders/architectures/gguf/gguf_encoders.h"

namespace moeserve {
namespace {

using Experts = GgufFamily::Experts;
using Norms = GgufFamily::Norms;
using Pairs = GgufFamily::Pairs;
using Shared = GgufFamily::Shared;

// Where a file does not say what a model computes, this is what the authors of the model compute.
// llama.cpp differs from them in a few cases, see README.md.
constexpr GgufFamily kFamilies[] = {
    {.name = "bailingmoe2",
     .qk_norm = QkNorm::kHead,
     .qk_norm_optional = true,
     .experts = Experts::kAlways,
     .gate = GateKind::kSigmoid,
     .shared = Shared::kPlain,
     .free_router = true,
     .counts_next_token_layers = true},
    // DeepSeek-V2 and V3, Kimi-K2, Moonlight.
    {.name = "deepseek2",
     .pairs = Pairs::kAdjacent,
     .latent = true,
     .experts = Experts::kAlways,
     .shared = Shared::kPlain,
     .free_router = true},
    {.name = "dots1",
     .qk_norm = QkNorm::kHead,
     .experts = Experts::kAlways,
     .gate = GateKind::kSigmoid,
     .shared = Shared::kPlain,
     .free_router = true},
    // The scores of experts are softmax values plus a choice bias.
    {.name = "ernie4_5-moe",
     .pairs = Pairs::kAdjacent,
     .experts = Experts::kAlways,
     .renormalize = true,
     .shared = Shared::kPlain,
     .free_router = true},
    // The models with 27B parameters have another scale, which converters drop. They are known by
    // the number of their layers.
    {.name = "gemma2",
     .norms = Norms::kBoth,
     .derived_scale_layers = 46,
     .window_period = 2,
     .default_window = 4096,
     .activation = ActivationKind::kGeluTanh,
     .root_embedding_scale = true,
     .logit_cap = 30.0,
     .attention_cap = 50.0,
     .soft_caps = true},
    {.name = "gemma3",
     .norms = Norms::kBoth,
     .qk_norm = QkNorm::kHead,
     .derived_scale_layers = 62,
     .window_period = 6,
     .default_window = std::nullopt,
     .window_theta = 10000.0,
     .activation = ActivationKind::kGeluTanh,
     .root_embedding_scale = true,
     .soft_caps = true},
    // EmbeddingGemma.
    {.name = "gemma-embedding",
     .norms = Norms::kBoth,
     .qk_norm = QkNorm::kHead,
     .bidirectional = true,
     .window_period = 6,
     .default_window = std::nullopt,
     .window_theta = 10000.0,
     .activation = ActivationKind::kGeluTanh,
     .root_embedding_scale = true,
     .soft_caps = true},
    // GLM-4.5; the smaller model has no norms of queries and keys.
    {.name = "glm4moe",
     .norms = Norms::kPostAttention,
     .qk_norm = QkNorm::kHead,
     .qk_norm_optional = true,
     .experts = Experts::kAlways,
     .gate = GateKind::kSigmoid,
     .shared = Shared::kPlain,
     .free_router = true,
     .counts_next_token_layers = true},
    // The limits of yarn's interpolation are not rounded.
    {.name = "gpt-oss",
     .norms = Norms::kPostAttention,
     .sinks = true,
     .window_period = 2,
     .default_window = std::nullopt,
     .yarn_truncate = false,
     .experts = Experts::kAlways,
     .gate = GateKind::kSoftmaxSelected,
     .clamped_experts = true},
    {.name = "granitemoe",
     .pairs = Pairs::kPermuted,
     .experts = Experts::kAlways,
     .expert_width = ".feed_forward_length",
     .gate = GateKind::kSoftmaxSelected,
     .shared = Shared::kPlain,
     .granite_factors = true},
    {.name = "hunyuan-moe",
     .qk_norm = QkNorm::kHead,
     .qk_norm_after_rope = true,
     .experts = Experts::kAlways,
     .renormalize = true,
     .shared = Shared::kPlain},
    {.name = "llama",
     .pairs = Pairs::kPermuted,
     .experts = Experts::kIfCounted,
     .expert_width = ".feed_forward_length",
     .renormalize = true},
    {.name = "olmoe",
     .qk_norm = QkNorm::kFull,
     .experts = Experts::kAlways,
     .expert_width = ".feed_forward_length"},
    {.name = "phi3", .window_period = 0, .long_rope = true, .joined_gate_up = true},
    {.name = "qwen2", .always_biased = true},
    {.name = "qwen2moe",
     .always_biased = true,
     .experts = Experts::kAlways,
     .shared = Shared::kGated},
    {.name = "qwen3", .qk_norm = QkNorm::kHead},
    {.name = "qwen3moe",
     .qk_norm = QkNorm::kHead,
     .experts = Experts::kAlways,
     .renormalize = true},
};

}  // namespace

const GgufFamily* FindGgufFamily(std::string_view name) {
  for (const GgufFamily& family : kFamilies) {
    if (family.name == name) return &family;
  }
  return nullptr;
}

std::string GgufFamilyNames() {
  std::vector<std::string_view> all(std::begin(kGgufEncoderNames), std::end(kGgufEncoderNames));
  for (const GgufFamily& family : kFamilies) all.push_back(family.name);
  std::ranges::sort(all);
  std::string names;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i > 0) names += i + 1 == all.size() ? " or " : ", ";
    names += Quoted(all[i]);
  }
  return names;
}

}  // namespace moeserve
