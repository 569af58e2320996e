// Synthetic models as files, so that other programs can run the same weights.
#pragma once

#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"

namespace moeserve::testing {

// Both: `weights` must be bf16 (MakeSyntheticWeights). Token ids are bytes, then <|endoftext|>,
// then fillers. InvalidArgument: fewer than 257 token ids. Unavailable: a file cannot be written.

// A folder with config.json, model.safetensors and tokenizer.json. All layers of `spec` are equal.
absl::Status WriteNative(const ModelSpec& spec, WeightSource& weights,
                         const std::filesystem::path& folder);

// A GGUF file of architecture "qwen3moe" or "qwen3": routers and norms f32, the rest bf16.
// InvalidArgument: a shape that neither can express.
absl::Status WriteGguf(const ModelSpec& spec, WeightSource& weights, const std::string& name,
                       const std::filesystem::path& path);

}  // namespace moeserve::testing
