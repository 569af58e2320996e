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

// Writes a folder with config.json, model.safetensors and tokenizer.json.
absl::Status WriteNative(const ModelSpec& spec, WeightSource& weights,
                         const std::filesystem::path& folder);

// Writes a GGUF file of architecture "qwen3moe", "qwen3" or, with linear attention, "qwen35moe".
// Routers, norms and convolutions are f32, other tensors bf16. Returns InvalidArgument for a shape
// that no architecture can express.
absl::Status WriteGguf(const ModelSpec& spec, WeightSource& weights, const std::string& name,
                       const std::filesystem::path& path);

// Writes a folder in Hugging Face's format of "qwen3_moe" or, with linear attention,
// "qwen3_5_moe_text": config.json, model.safetensors,
// tokenizer.json and tokenizer_config.json. All tensors are bf16: the values of routers, which are
// f32 in `weights`, are rounded. Returns InvalidArgument for a shape that the architecture cannot
// express, such as dense feed-forward layers.
absl::Status WriteHuggingFace(const ModelSpec& spec, WeightSource& weights,
                              const std::filesystem::path& folder);

}  // namespace moeserve::testing
