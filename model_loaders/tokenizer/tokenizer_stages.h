// Reads the stages of tokenizer.json: normalizers, pre-tokenizers, post-processors and decoders.
// Each function reads one section, which may be null, and reports errors to `reader`; its result
// then has no meaning.
#pragma once

#include <memory>
#include <vector>

#include "engine/text/tokenizer/decoders/decoder.h"
#include "engine/text/tokenizer/frames.h"
#include "engine/text/tokenizer/normalizers/normalizer.h"
#include "engine/text/tokenizer/pipeline_tokenizer.h"
#include "engine/text/tokenizer/pre_tokenizer.h"
#include "model_loaders/tokenizer/json_reader.h"

namespace moeserve {

struct NormalizerSection {
  std::unique_ptr<Normalizer> normalizer;  // null: none
  bool prepends = false;                   // it has a Prepend stage
};
NormalizerSection ReadNormalizer(JsonReader& reader, const nlohmann::json& json);

struct PreTokenizerSection {
  std::unique_ptr<PreTokenizer> pre_tokenizer;  // null: none
  // There is a ByteLevel stage, which makes the BPE model work on bytes.
  bool byte_level = false;
};
// `prepends` is that of the normalizer.
PreTokenizerSection ReadPreTokenizer(JsonReader& reader, const nlohmann::json& json, bool prepends);

struct PostProcessorSection {
  Frames frames;
  std::vector<SpanTrim> trims;
};
PostProcessorSection ReadPostProcessor(JsonReader& reader, const nlohmann::json& json);

std::unique_ptr<Decoder> ReadDecoder(JsonReader& reader, const nlohmann::json& json);

}  // namespace moeserve
