// The encoders and encoder-decoders in GGUF files. EmbeddingGemma is among the decoders
// (gguf_families.h), of which it differs little.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model_loaders/architectures/architecture.h"
#include "model_loaders/files/gguf/gguf_file.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {

enum class GgufEncoderKind : uint8_t {
  kBert,      // also RoBERTa, XLM-R and others of its design
  kNomic,     // nomic-embed-text, dense
  kNomicMoe,  // with experts in every n-th layer
  kModern,    // ModernBERT
};

inline constexpr std::string_view kGgufT5 = "t5";
inline constexpr std::string_view kGgufT5Encoder = "t5encoder";
// Values of general.architecture, in the order of GgufEncoderKind, then T5's.
inline constexpr std::string_view kGgufEncoderNames[] = {
    "bert", "nomic-bert", "nomic-bert-moe", "modern-bert", kGgufT5, kGgufT5Encoder};

// Read the configuration of a file whose architecture has the name `name`. `ignored` and errors are
// those of ReadGgufConfig(). `name` must be one of the first names above, or one of T5's.
ConfigResult ReadGgufEncoder(const GgufFile& file, const WeightFiles& weights,
                             std::string_view name, const std::vector<std::string>& ignored);
ConfigResult ReadGgufT5(const GgufFile& file, const WeightFiles& weights, std::string_view name,
                        const std::vector<std::string>& ignored);

}  // namespace moeserve
