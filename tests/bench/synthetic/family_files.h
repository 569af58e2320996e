// What the files of a family have of a synthetic model: names, keys and tensors. "Qwen3" means the
// architectures "qwen3moe" and "qwen3" of GGUF files and "qwen3_moe" of folders; "Qwen3.5" means
// "qwen35moe" and "qwen3_5_moe_text".
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/spec/spec.h"
#include "kernels/base/dtype.h"
#include "tests/bench/synthetic/composed_weights.h"
#include "tests/bench/synthetic/gguf_writer.h"

namespace moeserve::testing {

inline constexpr int kEndOfText = 256;  // the token after those of single bytes

// A tensor of a safetensors file and the name of its values in a WeightSource.
struct StoredTensor {
  std::string name;
  std::string source;
  std::vector<int64_t> shape;
  DType dtype = DType::kBF16;  // kBF16 or kF32
};

// Return an error, which starts with `option`, for a shape that the family cannot express.
absl::Status CheckQwen3(const ModelSpec& spec, std::string_view option);
absl::Status CheckQwen35(const ModelSpec& spec, std::string_view option);

// Add the keys of the architecture and the tensors to a GGUF file. Tensors that are made of several
// ones are added to `weights`.
void AddQwen3Gguf(const ModelSpec& spec, GgufWriter& file);
void AddQwen35Gguf(const ModelSpec& spec, GgufWriter& file, ComposedWeights& weights);

// Return config.json and the tensors of a folder.
nlohmann::json Qwen3Config(const ModelSpec& spec);
nlohmann::json Qwen35Config(const ModelSpec& spec);
std::vector<StoredTensor> Qwen3Tensors(const ModelSpec& spec);
std::vector<StoredTensor> Qwen35Tensors(const ModelSpec& spec, ComposedWeights& weights);

// What the families have in common.

// Whether a block is dense and gated, or has experts that these families have: gated, of one width,
// top-k by dot product, renormalized.
bool HasQwenExperts(const FeedForwardSpec& feed_forward);
// Adds the keys of `spec` and of an attention block.
void AddCommonKeys(const ModelSpec& spec, const AttentionSpec& attention, const std::string& arch,
                   GgufWriter& file);
// Adds the router and the stacked experts of a layer.
void AddExperts(const ModelSpec& spec, int layer, GgufWriter& file);
// Returns the entries of config.json that all have.
nlohmann::json CommonConfig(const ModelSpec& spec, const AttentionSpec& attention,
                            const RoutedLayerSpec& routing);

}  // namespace moeserve::testing
