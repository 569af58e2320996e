// Writes synthetic models to files, so that other programs can run the same weights.
#pragma once

#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"

namespace moeserve::testing {

// For all functions, `weights` must be bf16 (see MakeSyntheticWeights). Token ids 0 to 255 are
// single bytes, 256 is <|endoftext|>, and the rest are unused. All functions return
// InvalidArgument if the vocabulary has fewer than 257 tokens, and Unavailable if a file cannot be
// written.

// Writes a folder with config.json, model.safetensors and tokenizer.json. All layers of `spec` must
// be equal.
absl::Status WriteNative(const ModelSpec& spec, WeightSource& weights,
                         const std::filesystem::path& folder);

// Writes a GGUF file of architecture "qwen3moe" or "qwen3", with f32 routers and norms and bf16
// other tensors. Returns InvalidArgument for a shape that neither architecture can express.
absl::Status WriteGguf(const ModelSpec& spec, WeightSource& weights, const std::string& name,
                       const std::filesystem::path& path);

// Writes a folder in Hugging Face's format of "qwen3_moe": config.json, model.safetensors,
// tokenizer.json and tokenizer_config.json. All tensors are bf16: the values of routers, which are
// f32 in `weights`, are rounded. Returns InvalidArgument for a shape that the architecture cannot
// express, such as dense feed-forward layers.
absl::Status WriteHuggingFace(const ModelSpec& spec, WeightSource& weights,
                              const std::filesystem::path& folder);

}  // namespace moeserve::testing
